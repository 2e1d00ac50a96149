"""Float arithmetic that PTX defines to the last bit: roundings, flushing, NaN, signed zeros."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from . import data
from .case import Array, Case
from .sweep import Op, Sweep, build, op

# Zeros, ones, the ends of the subnormals and of the finite numbers, infinities, NaNs of both kinds and signs.
SPECIAL32 = (
    *(0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000),
    *(0x80800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF),
    *(0x3F800001, 0x3F7FFFFF, 0x4B000001, 0x4F000000, 0xCF000000, 0x5F000000, 0x3FC00000, 0x40200000, 0x34000000),
)
SPECIAL16 = (0, 0x8000, 0x3C00, 0xBC00, 1, 0x8001, 0x3FF, 0x83FF, 0x400, 0x8400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00)
SPECIALB16 = (0, 0x8000, 0x3F80, 0xBF80, 1, 0x8001, 0x7F, 0x807F, 0x80, 0x8080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0)
SPECIAL64 = (
    *(0, 1 << 63, 0x3FF0000000000000, 0xBFF0000000000000, 1, (1 << 63) + 1, (1 << 52) - 1, 1 << 52),
    *(0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000),
    *(0x3FF0000000000001, 0x36A0000000000000, 0x380FFFFFFFFFFFFF, 0x47EFFFFFE0000000, 0x47EFFFFFF0000000),
)
COUNT = 4096


def operand(seed: int, special: tuple[int, ...], dtype: str, period: int = 1) -> Array:
    """All pairs of special values first; then random bits, and numbers of similar size, which round and cancel."""
    bits = data.words(seed, 2 * COUNT).astype(np.uint64)
    random = bits[:COUNT] << np.uint64(32) | bits[COUNT:]
    width = 8 * np.dtype(dtype).itemsize
    values = random & np.uint64((1 << width) - 1)
    exponents = {64: (0x3FD, 52, 3), 32: (0x7C, 23, 7)}
    if width in exponents:
        bias, shift, spread = exponents[width]
        near = values & np.uint64((1 << shift) - 1) | (bits[:COUNT] % np.uint64(spread) + np.uint64(bias)) << np.uint64(
            shift
        )
        near |= (bits[COUNT:] & np.uint64(1)) << np.uint64(width - 1)
        values = np.where(np.arange(COUNT) % 4 != 0, near, values)
    index = (np.arange(COUNT) // period) % len(special)
    values = np.where(np.arange(COUNT) < len(special) ** 2, np.array(special, np.uint64)[index], values)
    return values.astype(dtype)


def packed(seed: int, special: tuple[int, ...], period: int = 1) -> Array:
    """Two 16-bit numbers in a word, with small integers and random bits behind the special values."""
    low = operand(seed, special, "u2", period).astype(np.uint32)
    high = operand(seed + 50, special, "u2", period)[::-1].astype(np.uint32)
    return low | high << np.uint32(16)


def operands(special: tuple[int, ...], dtype: str) -> dict[str, partial[Array]]:
    period = len(special)
    make = {"a": (1, 1), "b": (2, period), "c": (3, 5)}
    if dtype == "x2":
        return {name: partial(packed, seed, special, step) for name, (seed, step) in make.items()}
    return {name: partial(operand, seed, special, dtype, step) for name, (seed, step) in make.items()}


def rounded(t: str, width: int) -> Iterator[Op]:
    """add, sub, mul, fma in every rounding; f32 also with .ftz and .sat."""
    for flags in ("", ".ftz", ".sat", ".ftz.sat") if t == "f32" else ("",):
        for rounding in ("rn", "rz", "rm", "rp"):
            for name in ("add", "sub", "mul"):
                yield op(f"{name}.{rounding}{flags}.{t} $d, $a, $b", width)
            yield op(f"fma.{rounding}{flags}.{t} $d, $a, $b, $c", width)


def compared(t: str, a: str = "$a", b: str = "$b") -> Iterator[Op]:
    for comparison in ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]:
        for flush in ("", ".ftz") if t == "f32" else ("",):
            yield op(f"setp.{comparison}{flush}.{t} $d, {a}, {b}", 1)


def ops32() -> Iterator[Op]:
    yield from rounded("f32", 32)
    for name in ("min", "max"):
        for flags in ("", ".ftz", ".NaN", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs"):
            yield op(f"{name}{flags}.f32 $d, $a, $b")
    for flush in ("", ".ftz"):
        for rounding in ("rn", "rz", "rm", "rp"):
            yield op(f"div.{rounding}{flush}.f32 $d, $a, $b")
            yield op(f"rcp.{rounding}{flush}.f32 $d, $a")
            yield op(f"sqrt.{rounding}{flush}.f32 $d, $a")
    yield op("copysign.f32 $d, $a, $b")
    for kind in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        yield op(f"testp.{kind}.f32 $d, $a", 1)
    yield from compared("f32")
    for comparison in ("lt", "geu", "nan"):
        yield op(f"set.{comparison}.u32.f32 $d, $a, $b")
        yield op(f"set.{comparison}.s32.f32 $d, $a, $b")
        yield op(f"set.{comparison}.f32.f32 $d, $a, $b")
    yield Op("selp.f32", "setp.lt.f32 $p, $a, $b; selp.f32 $d, $b, $c, $p")
    yield Op("setp.lt.and.f32 q", "setp.gt.f32 $p, $c, $a; setp.lt.and.f32 $q|$d, $a, $b, $p", 1)


def signs() -> Iterator[Op]:
    """neg and abs leave the payload of a NaN open, so that these operands have none."""
    for name in ("neg", "abs"):
        yield op(f"{name}.f32 $d, $a")
        yield op(f"{name}.ftz.f32 $d, $a")
        yield op(f"{name}.f64 $d, $w".replace("$w", "$l"), 64)
        for t in ("f16x2", "bf16x2"):
            yield op(f"{name}.{t} $d, $h")
        for t in ("f16", "bf16"):
            yield op(f"{name}.{t} $d, $s", 16)


def ops64() -> Iterator[Op]:
    yield from rounded("f64", 64)
    for name in ("min", "max"):
        yield op(f"{name}.f64 $d, $a, $b", 64)
    yield from compared("f64")
    yield op("copysign.f64 $d, $a, $b", 64)


def quotients64() -> Iterator[Op]:
    for rounding in ("rn", "rz"):
        yield op(f"div.{rounding}.f64 $d, $a, $b", 64)
        yield op(f"rcp.{rounding}.f64 $d, $a", 64)
        yield op(f"sqrt.{rounding}.f64 $d, $a", 64)


def half(t: str, *, scalar: bool) -> Iterator[Op]:
    """float16 and bfloat16, packed or alone."""
    width = 16 if scalar else 32
    flush = ("", ".ftz") if t.startswith("f16") else ("",)
    for flags in [f + s for f in flush for s in ("", ".sat")] if t.startswith("f16") else [""]:
        for name in ("add", "sub", "mul"):
            yield op(f"{name}.rn{flags}.{t} $d, $a, $b", width)
        yield op(f"fma.rn{flags}.{t} $d, $a, $b, $c", width)
    for f in flush:
        yield op(f"fma.rn{f}.relu.{t} $d, $a, $b, $c", width)
    for name in ("min", "max"):
        for flags in [f + s for f in flush for s in ("", ".NaN", ".NaN.xorsign.abs", ".xorsign.abs")]:
            yield op(f"{name}{flags}.{t} $d, $a, $b", width)
    if scalar:
        for comparison in ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]:
            yield op(f"setp.{comparison}.{t} $d, $a, $b", 1)


def finite(special: tuple[int, ...], dtype: str, infinity: int) -> Array:
    """The operand with its NaNs replaced by 1."""
    values = operand(1, special, dtype)
    magnitude = values & values.dtype.type((1 << (8 * values.itemsize - 1)) - 1)
    return np.where(magnitude > infinity, values.dtype.type(1), values)


def cases() -> list[Case]:
    numbers = {
        "a": partial(finite, SPECIAL32, "u4", 0x7F800000),
        "l": partial(finite, SPECIAL64, "u8", 0x7FF0000000000000),
        "s": partial(finite, SPECIAL16, "u2", 0x7C00),
        "h": lambda: data.words(17, COUNT) & np.uint32(0xBBFFBBFF),  # bit 14 clear: finite in both formats
    }
    sweeps = [
        Sweep("ops32", operands(SPECIAL32, "u4"), tuple(ops32())),
        Sweep("signs", numbers, tuple(signs())),
        Sweep("ops64", operands(SPECIAL64, "u8"), tuple(ops64())),
        Sweep("quotients64", operands(SPECIAL64, "u8"), tuple(quotients64())),
    ]
    for t, special in [("f16", SPECIAL16), ("bf16", SPECIALB16)]:
        sweeps.append(Sweep(t, operands(special, "u2"), tuple(half(t, scalar=True))))
        sweeps.append(Sweep(f"{t}x2", operands(special, "x2"), tuple(half(f"{t}x2", scalar=False))))
    return build("floats", sweeps)
