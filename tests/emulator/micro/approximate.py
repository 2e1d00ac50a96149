"""Approximations: PTX bounds their error, so that results are compared with the true values, not bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from . import data
from .case import Array, Case
from .floats import SPECIAL16, SPECIAL32, packed
from .sweep import Sweep, build, op

COUNT = 2048


def spread(seed: int, low: float, high: float, *, logarithmic: bool = False) -> Array:
    """Special values, then numbers that fill an interval, of both signs where ``logarithmic`` (of the exponent)."""
    fraction = data.words(seed, COUNT).astype(np.float64) / 2.0**32
    values = low + (high - low) * fraction
    bits = values.astype(np.float32).view(np.uint32)
    if logarithmic:
        bits = (np.uint32(1) << np.uint32(23)) + (fraction * 254 * 2**23).astype(np.uint32)
        bits |= data.words(seed + 1, COUNT) & np.uint32(0x80000000)
    special = np.array(SPECIAL32, np.uint32)
    bits[: len(special)] = special
    return bits


def divisor() -> Array:
    """All specials against all; then divisors for which the bound of div.approx holds, 2^-126 to 2^126."""
    bits = spread(33, 0, 1, logarithmic=True)
    return np.where((bits & np.uint32(0x7F800000)) > np.uint32(0x7E000000), bits - np.uint32(0x04000000), bits)


def cases() -> list[Case]:
    both = ("", ".ftz")
    wide = ["rcp", "rsqrt", "sqrt", "lg2"]
    positive = tuple(op(f"{name}.approx{flush}.f32 $d, $a") for name in wide for flush in both)
    trigonometric = tuple(op(f"{name}.approx{flush}.f32 $d, $a") for name in ("sin", "cos") for flush in both)
    exponential = (*(op(f"ex2.approx{flush}.f32 $d, $a") for flush in both), op("tanh.approx.f32 $d, $a"))
    divisions = tuple(op(f"div.{kind}{flush}.f32 $d, $a, $b") for kind in ("approx", "full") for flush in both)
    halves = (
        op("ex2.approx.f16 $d, $h", 16),
        op("ex2.approx.ftz.bf16 $d, $h", 16),
        op("tanh.approx.f16 $d, $h", 16),
        op("tanh.approx.bf16 $d, $h", 16),
    )
    pairs = (
        op("ex2.approx.f16x2 $d, $a"),
        op("ex2.approx.ftz.bf16x2 $d, $a"),
        op("tanh.approx.f16x2 $d, $a"),
        op("tanh.approx.bf16x2 $d, $a"),
    )
    numerator = {"a": partial(spread, 31, 0, 1, logarithmic=True), "b": divisor}
    sweeps = [
        Sweep("wide", {"a": partial(spread, 34, 0, 1, logarithmic=True)}, positive),
        Sweep("near_one", {"a": partial(spread, 35, 0.4, 2.1)}, positive),
        Sweep("angles", {"a": partial(spread, 36, -3.14159, 3.14159)}, trigonometric),
        Sweep("exponents", {"a": partial(spread, 37, -130, 130)}, exponential),
        Sweep("small_exponents", {"a": partial(spread, 38, -4, 4)}, exponential),
        Sweep("divide", numerator, divisions),
        Sweep("halves", {"h": partial(np.arange, 0, 65536, 7, np.uint16)}, halves),
        Sweep("pairs", {"a": partial(packed, 39, SPECIAL16)}, pairs),
    ]
    kept = {sweep.name: ("out32",) for sweep in sweeps if sweep.name != "halves"} | {"halves": ("out16",)}
    return [replace(case, compare="approximate") for case in build("approximate", sweeps, keep=kept)]
