"""Integers and bits: every instruction over random words and the edges of its operands."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from . import data
from .case import Array, Case
from .sweep import Op, Sweep, build, op

EDGES32 = (0, 1, 2, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFF, 0x10000, 0x8000, 31, 32, 255)
EDGES64 = (*EDGES32, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0xFFFFFFFF80000000, 0x7FFFFFFF00000000)
AMOUNTS = (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257, 0x1FF, 0x80000000, 0xFFFFFFFF)
COUNT = 2048


def operand(seed: int, edges: tuple[int, ...], dtype: str, period: int = 1) -> Array:
    """All pairs of edges come together when two operands have the periods 1 and len(edges); then random words."""
    table = np.array(edges, np.uint64)
    index = (np.arange(COUNT) // period) % len(edges)
    bits = data.words(seed, 2 * COUNT).astype(np.uint64)
    random = bits[:COUNT] << np.uint64(32) | bits[COUNT:]
    random >>= (bits[:COUNT] % np.uint64(48)) * (bits[COUNT:] & np.uint64(1))  # half of them small
    values = np.where(np.arange(COUNT) < len(edges) ** 2, table[index], random)
    return values.astype(dtype)  # a narrower type takes the low bits


def amounts(seed: int, period: int) -> Array:
    return np.array(AMOUNTS, np.uint64)[(np.arange(COUNT) // period + seed) % len(AMOUNTS)].astype(np.uint32)


def ops16() -> Iterator[Op]:
    for t in ("u16", "s16"):
        for name in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"):
            yield op(f"{name}.{t} $d, $a, $b", 16)
        yield op(f"mad.lo.{t} $d, $a, $b, $c", 16)
        yield op(f"mul.wide.{t} $d, $a, $b")
        yield op(f"mad.wide.{t} $d, $a, $b, $e")
        yield op(f"shr.{t} $d, $a, $f", 16)
    for name in ("neg.s16", "abs.s16", "not.b16", "cnot.b16"):
        yield op(f"{name} $d, $a", 16)
    for name in ("and", "or", "xor"):
        yield op(f"{name}.b16 $d, $a, $b", 16)
    yield op("shl.b16 $d, $a, $f", 16)
    for comparison in ("eq", "ne", "lt", "le", "gt", "ge"):
        yield op(f"setp.{comparison}.s16 $d, $a, $b", 1)
        yield op(f"setp.{comparison}.u16 $d, $a, $b", 1)


def ops32() -> Iterator[Op]:
    for t in ("u32", "s32"):
        for name in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"):
            yield op(f"{name}.{t} $d, $a, $b")
        for name in ("mad.lo", "mad.hi", "sad"):
            yield op(f"{name}.{t} $d, $a, $b, $c")
        yield op(f"mul.wide.{t} $d, $a, $b", 64)
        yield op(f"mad.wide.{t} $d, $a, $b, $e", 64)
        yield op(f"bfind.{t} $d, $a")
        yield op(f"bfind.shiftamt.{t} $d, $a")
        for comparison in ("eq", "ne", "lt", "le", "gt", "ge"):
            yield op(f"setp.{comparison}.{t} $d, $a, $b", 1)
            yield op(f"set.{comparison}.u32.{t} $d, $a, $b")
            yield op(f"set.{comparison}.f32.{t} $d, $a, $b")
    for comparison in ("lo", "ls", "hi", "hs"):
        yield op(f"setp.{comparison}.u32 $d, $a, $b", 1)
    for boolean in ("and", "or", "xor"):
        yield Op(f"setp.lt.{boolean}.s32", f"setp.gt.s32 $p, $c, $a; setp.lt.{boolean}.s32 $d, $a, $b, $p", 1)
        yield Op(f"setp.lt.{boolean}.s32 !c", f"setp.gt.s32 $p, $c, $a; setp.lt.{boolean}.s32 $d, $a, $b, !$p", 1)
        second = f"setp.gt.s32 $p, $c, $a; setp.lt.{boolean}.u32 $q|$d, $a, $b, $p"
        yield Op(f"setp.lt.{boolean}.u32 q", second, 1)
    yield op("add.sat.s32 $d, $a, $b")
    yield op("sub.sat.s32 $d, $a, $b")
    yield op("mad.hi.sat.s32 $d, $a, $b, $c")
    for name in ("neg.s32", "abs.s32", "not.b32", "cnot.b32", "popc.b32", "clz.b32", "brev.b32"):
        yield op(f"{name} $d, $a")
    for name in ("and", "or", "xor"):
        yield op(f"{name}.b32 $d, $a, $b")
    yield Op("selp.b32", "setp.lt.s32 $p, $a, $b; selp.b32 $d, $b, $c, $p")
    yield Op("pred logic", "setp.lt.s32 $p, $a, $b; setp.gt.s32 $q, $b, $c; xor.pred $p, $p, $q; not.pred $d, $p", 1)
    yield Op("mov.b64 pack", "mov.b64 $d, {$a, $b}", 64)
    yield Op("mov.b32 unpack", "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $a; mov.b32 $d, {hi, lo}; }")


def ops64() -> Iterator[Op]:
    for t in ("u64", "s64"):
        for name in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"):
            yield op(f"{name}.{t} $d, $a, $b", 64)
        yield op(f"mad.lo.{t} $d, $a, $b, $c", 64)
        yield op(f"mad.hi.{t} $d, $a, $b, $c", 64)
        yield op(f"bfind.{t} $d, $a")
        yield op(f"bfind.shiftamt.{t} $d, $a")
        for comparison in ("eq", "ne", "lt", "le", "gt", "ge"):
            yield op(f"setp.{comparison}.{t} $d, $a, $b", 1)
    for name in ("neg.s64", "abs.s64", "not.b64", "cnot.b64", "brev.b64"):
        yield op(f"{name} $d, $a", 64)
    yield op("popc.b64 $d, $a")
    yield op("clz.b64 $d, $a")
    for name in ("and", "or", "xor"):
        yield op(f"{name}.b64 $d, $a, $b", 64)
    yield Op("selp.b64", "setp.lt.s64 $p, $a, $b; selp.b64 $d, $b, $c, $p", 64)
    yield Op("mov.b64 unpack", "{ .reg .b32 lo, hi; mov.b64 {lo, hi}, $a; mov.b64 $d, {hi, lo}; }", 64)


def shift_ops() -> Iterator[Op]:
    for name in ("shl.b32", "shr.u32", "shr.s32", "shr.b32"):
        yield op(f"{name} $d, $a, $m")
    for name in ("shl.b64", "shr.u64", "shr.s64"):
        yield op(f"{name} $d, $w, $m".replace("$w", "$l"), 64)
    for direction in ("l", "r"):
        for mode in ("clamp", "wrap"):
            yield op(f"shf.{direction}.{mode}.b32 $d, $a, $b, $m")
    for t in ("u32", "s32"):
        yield op(f"bfe.{t} $d, $a, $m, $n")
    for t in ("u64", "s64"):
        yield op(f"bfe.{t} $d, $l, $m, $n", 64)
    yield op("bfi.b32 $d, $a, $b, $m, $n")
    yield op("bfi.b64 $d, $l, $k, $m, $n", 64)


def conversions() -> Iterator[Op]:
    """Between integers, with and without saturation."""
    widths = {"8": 32, "16": 16, "32": 32, "64": 64}
    source = {"8": "$h", "16": "$h", "32": "$a", "64": "$l"}
    for to in (s + w for w in widths for s in "us"):
        for of in (s + w for w in widths for s in "us"):
            # .sat is refused where every value fits.
            fits = int(of[1:]) < int(to[1:]) if of[0] != to[0] else int(of[1:]) <= int(to[1:])
            fits = fits and (of[0], to[0]) != ("s", "u")
            for saturation in ("",) if fits else ("", ".sat"):
                # Of 8 bits all 32 of the register are looked at: they are sign- or zero-extended.
                yield op(f"cvt{saturation}.{to}.{of} $d, {source[of[1:]]}", widths[to[1:]])


def cases() -> list[Case]:
    def three(edges: tuple[int, ...], dtype: str) -> dict[str, partial[Array]]:
        period = len(edges)
        make = {"a": (1, 1), "b": (2, period), "c": (3, 3)}
        return {name: partial(operand, seed, edges, dtype, step) for name, (seed, step) in make.items()}

    edges16 = (0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFFE, 0xFF, 0x100)
    wide = partial(operand, 4, EDGES64, "u8", 5)
    both = {
        "a": partial(operand, 5, EDGES32, "u4"),
        "b": partial(operand, 6, EDGES32, "u4", 7),
        "l": partial(operand, 7, EDGES64, "u8"),
        "k": partial(operand, 8, EDGES64, "u8", 7),
        "m": partial(amounts, 0, 1),
        "n": partial(amounts, 5, len(AMOUNTS)),
    }
    selectors = {
        "a": lambda: np.full(65536, 0x7F8291E4, np.uint32),
        "b": lambda: np.full(65536, 0x05C6D8B3, np.uint32),
        "c": lambda: np.arange(65536, dtype=np.uint32) | data.words(9, 65536) << np.uint32(16),
    }
    tables = {
        name: partial(lambda seed: data.words(seed, 256), seed) for name, seed in zip("abc", (10, 11, 12), strict=True)
    }
    narrow = {
        "h": partial(operand, 13, (*edges16, 0x7F, 0x80), "u2"),
        "a": partial(operand, 14, (*EDGES32, 0x7F, 0x80), "u4"),
        "l": partial(operand, 15, (*EDGES64, 0x7F, 0x80), "u8"),
    }
    amount = {"f": partial(amounts, 0, 3), "e": partial(operand, 16, EDGES32, "u4", 5)}
    return build(
        "integer",
        [
            Sweep("ops16", {**three(edges16, "u2"), **amount}, tuple(ops16())),
            Sweep("ops32", {**three(EDGES32, "u4"), "e": wide}, tuple(ops32())),
            Sweep("ops64", three(EDGES64, "u8"), tuple(ops64())),
            Sweep("shifts", both, tuple(shift_ops())),
            Sweep("conversions", narrow, tuple(conversions())),
            Sweep("prmt", selectors, (op("prmt.b32 $d, $a, $b, $c"),)),
            Sweep("lop3", tables, tuple(op(f"lop3.b32 $d, $a, $b, $c, {i}") for i in range(256))),
        ],
    )
