"""Conversions: on every tie of every rounding, or over all bit patterns where those are 65,536."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from . import data
from .case import Array, Case
from .floats import SPECIAL32, SPECIAL64, operand
from .sweep import Op, Sweep, build, op


def all_patterns() -> Array:
    return np.arange(65536, dtype=np.uint16)


def bfloat16_ties() -> Array:
    """Every upper half with the lower halves around the tie."""
    upper = np.arange(0, 65536, 3, dtype=np.uint32) << np.uint32(16)  # every third: all low bits, all exponents
    return (upper[:, None] | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).reshape(-1)


def around(values: Array) -> Array:
    """float32 bit patterns of positive numbers, their midpoints, one unit to each side, and all of that negated."""
    exact = np.unique(values.astype(np.float64))
    with np.errstate(over="ignore"):
        bits = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2]).astype(np.float32).view(np.uint32)
    near = np.concatenate([bits, bits + np.uint32(1), np.maximum(bits, 1) - np.uint32(1)])
    return np.concatenate([near, near | np.uint32(0x80000000), np.array(SPECIAL32, np.uint32)])


def float16_ties() -> Array:
    """Of all finite float16 every 5th pair of neighbours, and the beginning of the overflow."""
    values = np.arange(0, 0x7C00, dtype=np.uint16)
    chosen = values[(values % 5 < 2) | (values < 64) | (values > 0x7BC0)]
    return around(np.append(chosen.view(np.float16).astype(np.float64), [65536.0, 131072.0]))


def eight_bit(mantissa: int, bias: int, top: int) -> Array:
    """The positive finite numbers of an 8-bit format, and what the next ones would be."""
    codes = np.arange(top + 4)
    exponent, fraction = codes >> mantissa, codes & ((1 << mantissa) - 1)
    normal = (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias)
    return np.where(exponent > 0, normal, fraction / (1 << mantissa) * 2.0 ** (1 - bias))


def eight_bit_ties() -> Array:
    exact = np.concatenate([eight_bit(3, 7, 0x7E), eight_bit(2, 15, 0x7B)])
    sample = np.arange(0, 65536, 7, dtype=np.uint32) << np.uint32(16) | np.uint32(0x4321)
    return np.concatenate([around(exact), sample])


def partner(make: partial[Array] | object) -> Array:
    """The same values in another order, for the second operand of a packed conversion."""
    values = make()  # type: ignore[operator]
    return np.roll(values, len(values) // 3)


def integer_boundaries() -> Array:
    """float32 around halves, and around the ends of every integer type."""
    halves = np.arange(0, 300, 0.25)
    ends = [float(1 << k) for k in range(6, 66)]
    return np.concatenate([around(np.append(halves, ends)), data.words(21, 2048)])


def wide_integers() -> Array:
    """64-bit integers that round in float32 and float64, ties included."""
    found = []
    for k in range(64):
        for low in (0, 1, 2, 3):
            found += [(1 << k) + low, (1 << k) - low, -(1 << k) + low]
            for bits in (24, 53, 11, 8):
                if k >= bits:
                    unit = 1 << (k - bits + 1)
                    found += [(1 << k) + unit // 2, (1 << k) + unit // 2 + low, (1 << k) + 3 * unit // 2 - low]
    return np.array([value & (1 << 64) - 1 for value in found], np.uint64)


def to_half(t: str) -> Iterator[Op]:
    for rounding in ("rn", "rz"):
        for relu in ("", ".relu"):
            yield op(f"cvt.{rounding}{relu}.{t}.f32 $d, $a", 16)
            yield op(f"cvt.{rounding}{relu}.{t}x2.f32 $d, $a, $b")
    if t == "f16":
        yield op("cvt.rn.ftz.f16.f32 $d, $a", 16)
        yield op("cvt.rn.sat.f16.f32 $d, $a", 16)
        yield op("cvt.rm.f16.f32 $d, $a", 16)
        yield op("cvt.rp.f16.f32 $d, $a", 16)
    yield op(f"cvt.rn.satfinite.{t}.f32 $d, $a", 16)
    yield op(f"cvt.rn.satfinite.relu.{t}x2.f32 $d, $a, $b")
    yield op(f"cvt.rz.satfinite.{t}x2.f32 $d, $a, $b")
    yield op("cvt.rna.tf32.f32 $d, $a")
    for rounding in ("rn", "rz"):
        for relu in ("", ".relu"):
            yield op(f"cvt.{rounding}{relu}.tf32.f32 $d, $a")


def to_eight_bits() -> Iterator[Op]:
    for t in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            yield op(f"cvt.rn.satfinite{relu}.{t}.f32 $d, $a, $b", 16)


def from_half() -> Iterator[Op]:
    for t in ("f16", "bf16"):
        yield op(f"cvt.f32.{t} $d, $h")
        yield op(f"cvt.f64.{t} $d, $h", 64)
    yield op("cvt.ftz.f32.f16 $d, $h")
    for t in ("f16", "bf16"):
        for to in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
            for rounding in ("rni", "rzi", "rmi", "rpi"):
                if (rounding in ("rni", "rzi") and (t == "f16" or "8" not in to)) or to == "s32":
                    width = {"8": 32, "16": 16, "32": 32, "64": 64}[to[1:]]
                    yield op(f"cvt.{rounding}.{to}.{t} $d, $h", width)
    for rounding in ("rni", "rzi", "rmi", "rpi"):
        yield op(f"cvt.{rounding}.f16.f16 $d, $h", 16)
        yield op(f"cvt.{rounding}.bf16.bf16 $d, $h", 16)
    yield op("cvt.rn.bf16.f16 $d, $h", 16)
    yield op("cvt.rn.f16.bf16 $d, $h", 16)
    yield op("cvt.rn.f16x2.e4m3x2 $d, $h")
    yield op("cvt.rn.f16x2.e5m2x2 $d, $h")
    yield op("cvt.rn.relu.f16x2.e4m3x2 $d, $h")
    yield op("cvt.rn.relu.f16x2.e5m2x2 $d, $h")


def from_half_pairs() -> Iterator[Op]:
    for t in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            yield op(f"cvt.rn.satfinite{relu}.{t}.f16x2 $d, $a", 16)


def float_to_integer() -> Iterator[Op]:
    for to in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        width = {"8": 32, "16": 16, "32": 32, "64": 64}[to[1:]]
        for rounding in ("rni", "rzi", "rmi", "rpi"):
            yield op(f"cvt.{rounding}.{to}.f32 $d, $a", width)
        yield op(f"cvt.rzi.ftz.{to}.f32 $d, $a", width)
        yield op(f"cvt.rpi.ftz.{to}.f32 $d, $a", width)
    for rounding in ("rni", "rzi", "rmi", "rpi"):
        for flags in ("", ".ftz", ".sat"):
            yield op(f"cvt.{rounding}{flags}.f32.f32 $d, $a")
    yield op("cvt.sat.f32.f32 $d, $a")
    yield op("cvt.ftz.f32.f32 $d, $a")
    yield op("cvt.f64.f32 $d, $a", 64)
    yield op("cvt.ftz.f64.f32 $d, $a", 64)


def integer_to_float() -> Iterator[Op]:
    sources = {"u8": "$h", "s8": "$h", "u16": "$h", "s16": "$h", "u32": "$a", "s32": "$a", "u64": "$l", "s64": "$l"}
    for of, register in sources.items():
        for rounding in ("rn", "rz", "rm", "rp"):
            yield op(f"cvt.{rounding}.f32.{of} $d, {register}")
            yield op(f"cvt.{rounding}.f16.{of} $d, {register}", 16)
            if int(of[1:]) >= 32:
                yield op(f"cvt.{rounding}.f64.{of} $d, {register}", 64)
        if "8" not in of:
            yield op(f"cvt.rn.bf16.{of} $d, {register}", 16)


def doubles() -> Iterator[Op]:
    for rounding in ("rn", "rz", "rm", "rp"):
        yield op(f"cvt.{rounding}.f32.f64 $d, $a")
        yield op(f"cvt.{rounding}.ftz.f32.f64 $d, $a")
        yield op(f"cvt.{rounding}.f16.f64 $d, $a", 16)
        for to in ("u32", "s32"):
            yield op(f"cvt.{rounding}i.{to}.f64 $d, $a")
        for to in ("u64", "s64"):
            yield op(f"cvt.{rounding}i.{to}.f64 $d, $a", 64)
        yield op(f"cvt.{rounding}i.f64.f64 $d, $a", 64)


def double_values() -> Array:
    exact = integer_boundaries().view(np.float32)
    with np.errstate(invalid="ignore"):
        near = exact.astype(np.float64).view(np.uint64)
    near = near[np.isfinite(exact)]
    ties = (bfloat16_ties()[::11].astype(np.uint64) << np.uint64(29)) + np.uint64(0x3690000010000000)
    return np.concatenate([near, near + np.uint64(1), ties, operand(22, SPECIAL64, "u8")])


def pair(make: object) -> dict[str, object]:
    return {"a": make, "b": partial(partner, make)}


def cases() -> list[Case]:
    wide = {
        "l": wide_integers,
        "a": lambda: wide_integers().astype(np.uint32),
        "h": lambda: np.resize(np.arange(0, 65536, 13, dtype=np.uint16), len(wide_integers())),
    }
    words = {
        "a": lambda: np.concatenate(
            [data.words(23, 32768), np.arange(0, 65536, 2, dtype=np.uint32) * np.uint32(0x10001)]
        )
    }
    sweeps = [
        Sweep("to_bf16", pair(bfloat16_ties), tuple(to_half("bf16"))),  # type: ignore[arg-type]
        Sweep("to_f16", pair(float16_ties), tuple(to_half("f16"))),  # type: ignore[arg-type]
        Sweep("to_8bits", pair(eight_bit_ties), tuple(to_eight_bits())),  # type: ignore[arg-type]
        Sweep("from_16bits", {"h": all_patterns}, tuple(from_half())),
        Sweep("half_to_8bits", words, tuple(from_half_pairs())),
        Sweep("to_integer", {"a": integer_boundaries}, tuple(float_to_integer())),
        Sweep("from_integer", wide, tuple(integer_to_float())),
        Sweep("doubles", {"a": double_values}, tuple(doubles())),
    ]
    return build("convert", sweeps)
