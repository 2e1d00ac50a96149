"""Instructions of a whole warp: shuffles, votes, reductions, matches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from . import data
from .case import Array, Case
from .sweep import Op, Sweep, build, op

COUNT = 512
FULL = "0xffffffff"


def shuffles() -> Iterator[Op]:
    """All modes, segment widths and amounts, those beyond the segment included; the value and the predicate."""
    for mode, clamp in (("up", 0), ("down", 31), ("bfly", 31), ("idx", 31)):
        for width in (1, 2, 4, 8, 16, 32):
            control = (32 - width) << 8 | clamp
            for amount in (0, 1, 3, 16, 31):
                text = f"shfl.sync.{mode}.b32 $u|$p, $a, {amount}, {control}, {FULL}"
                yield Op(f"{mode} {width} {amount}", f"{text}; selp.b32 $d, 1, 0, $p; xor.b32 $d, $d, $u")
        text = f"shfl.sync.{mode}.b32 $d|$p, $a, $b, $c, {FULL}"
        yield Op(f"{mode} registers", text)
        yield Op(f"{mode} registers p", text.replace("$d|$p", "$u|$d"), 1)
        yield op(f"shfl.sync.{mode}.b32 $d, $a, $e, {7 << 8 | clamp}, {FULL}")
    # Parts of the warp: only they execute it, and segments of 8 lanes stay inside (idx 9 reads lane 1 of each).
    parts = ((0xFFFF, "lt.u32 $p, $l, 16"), (0xFF00FF00, "ne.u32 $p, $m, 0"), (1 << 9, "eq.u32 $p, $l, 9"))
    for mask, condition in parts:
        for mode, amount in (("bfly", 1), ("idx", 9), ("up", 0), ("down", 0)):
            if mask == 1 << 9 and mode == "bfly":
                continue  # lane 8 does not take part
            control = 24 << 8 | (0 if mode == "up" else 31)
            text = f"@$p shfl.sync.{mode}.b32 $d, $a, {amount}, {control}, {mask}"
            yield Op(f"{mode} {amount} of {mask:#x}", f"mov.u32 $d, 77; setp.{condition}; {text}")


def votes() -> Iterator[Op]:
    conditions = {
        "mixed": "setp.lt.s32 $p, $a, 0",
        "all": "setp.eq.s32 $p, $a, $a",
        "none": "setp.ne.s32 $p, $a, $a",
        "one": "setp.eq.s32 $p, $l, 13",
    }
    for name, condition in conditions.items():
        for negation in ("", "!"):
            label = f"{negation}{name}"
            for mode in ("all", "any", "uni"):
                yield Op(f"{mode} {label}", f"{condition}; vote.sync.{mode}.pred $d, {negation}$p, {FULL}", 1)
            yield Op(f"ballot {label}", f"{condition}; vote.sync.ballot.b32 $d, {negation}$p, {FULL}")
    half = "setp.lt.u32 $q, $l, 16; setp.lt.s32 $p, $a, 0; mov.u32 $d, 5; @$q vote.sync.ballot.b32 $d, $p, 0xffff"
    yield Op("ballot of half", half)
    yield Op("activemask", "activemask.b32 $d")
    yield Op("activemask guarded", "mov.u32 $d, 5; setp.lt.s32 $p, $a, 0; @$p activemask.b32 $d")
    # Which lane is elected is the machine's choice: that there is one, and that all know it, is not.
    elected = f"elect.sync $u|$p, {FULL}; vote.sync.ballot.b32 $d, $p, {FULL}"
    yield Op("elect count", f"{elected}; popc.b32 $d, $d")
    yield Op("elect lane", f"{elected}; bfind.u32 $d, $d; sub.u32 $d, $d, $u")
    inside = "mov.u32 $u, 1; shl.b32 $d, $u, $d; and.b32 $d, $d, 0xff0; setp.ne.u32 $p, $d, 0; selp.b32 $d, 1, 0, $p"
    yield Op("elect in mask", f"setp.ne.u32 $q, $n, 0; mov.u32 $d, 0; @$q elect.sync $d|$p, 0xff0; {inside}")


def reductions() -> Iterator[Op]:
    for name, types in (("add", "us"), ("min", "us"), ("max", "us"), ("and", "b"), ("or", "b"), ("xor", "b")):
        for t in types:
            yield op(f"redux.sync.{name}.{t}32 $d, $a, {FULL}")
            half = f"setp.ge.u32 $p, $l, 20; mov.u32 $d, 9; @$p redux.sync.{name}.{t}32 $d, $a, 0xfff00000"
            yield Op(f"redux {name} {t}32 of a part", half)
    yield op(f"match.any.sync.b32 $d, $k, {FULL}")
    yield op(f"match.any.sync.b64 $d, $w, {FULL}".replace("$w", "$j"))
    for value, label in (("$k", "different"), ("$s", "same")):
        yield Op(f"match.all {label}", f"match.all.sync.b32 $d|$p, {value}, {FULL}")
        yield Op(f"match.all {label} p", f"match.all.sync.b32 $u|$d, {value}, {FULL}", 1)
    yield Op("match.all.b64", f"match.all.sync.b64 $d|$p, $j, {FULL}")
    half = "setp.lt.u32 $p, $l, 8; mov.u32 $d, 9; @$p match.any.sync.b32 $d, $k, 0xff"
    yield Op("match.any of a part", half)


def cases() -> list[Case]:
    lane = np.arange(COUNT, dtype=np.uint32) % 32

    def random(seed: int, mask: int) -> Array:
        return data.words(seed, COUNT) & np.uint32(mask)

    operands = {
        "a": partial(random, 41, 0xFFFFFFFF),
        "b": partial(random, 42, 0x3F),
        "c": partial(random, 43, 0x1F1F),
        "e": partial(random, 44, 0x1F),
        "k": partial(random, 45, 3),
        "s": lambda: np.repeat(data.words(46, COUNT // 32), 32),
        "j": lambda: data.words(47, COUNT).astype(np.uint64) % 3 << np.uint64(31),
        "l": lambda: lane,
        "m": lambda: (np.uint32(0xFF00FF00) >> lane) & np.uint32(1),
        "n": lambda: (np.uint32(0xFF0) >> lane) & np.uint32(1),
    }
    # A shuffle needs one width in the whole segment: the control of a lane decides for that lane alone in hardware.
    uniform = operands | {"c": lambda: np.repeat(random(43, 0x1F1F)[::32], 32)}
    return build(
        "warp",
        [
            Sweep("shuffle", uniform, tuple(shuffles())),
            Sweep("shuffle_per_lane", operands, tuple(o for o in shuffles() if "registers" in o.label)),
            Sweep("vote", operands, tuple(votes())),
            Sweep("reduce", operands, tuple(reductions())),
        ],
    )
