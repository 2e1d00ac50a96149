"""What the lanes of a warp do together."""

from __future__ import annotations

from cupyfa.emulator.opcodes.forms import Absent, Define, DefPredicate, Form, OrPredicate, Use, UsePredicate, family
from cupyfa.emulator.opcodes.memory import reduction_number
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.syntax import UnsupportedInstruction

_MASK = Use("b32")


@family("shfl")
def shfl(spelling: Spelling) -> Form:
    """``shfl.sync``."""
    spelling.require("sync")
    modes = ("up", "down", "bfly", "idx")
    mode = modes.index(spelling.one_of(modes))
    spelling.type("b32")
    roles = (OrPredicate(Define("b32")), Use("b32"), Use("b32"), Use("b32"), _MASK)
    return Form("shfl", roles, "b32", attr=(mode,))


@family("vote")
def vote(spelling: Spelling) -> Form:
    """``vote.sync``."""
    spelling.require("sync")
    modes = ("all", "any", "uni", "ballot")
    mode = spelling.one_of(modes)
    kind = spelling.type("b32" if mode == "ballot" else "pred")
    target = Define("b32") if mode == "ballot" else DefPredicate()
    return Form("vote", (target, UsePredicate(), _MASK), kind, attr=(modes.index(mode),))


@family("redux")
def redux(spelling: Spelling) -> Form:
    """``redux.sync``."""
    spelling.require("sync")
    operation = spelling.one_of(("add", "min", "max", "and", "or", "xor"))
    bits = operation in ("and", "or", "xor")
    kind = spelling.type("b32" if bits else "u32 s32" if operation == "add" else "u32 s32 f32")
    flags = spelling.flags("abs", "NaN") if kind == "f32" else 0
    return Form("redux", (Define(kind), Use(kind), _MASK), kind, attr=(reduction_number(operation), flags))


@family("match")
def match(spelling: Spelling) -> Form:
    """``match.sync``."""
    spelling.require("sync")
    every = spelling.one_of(("any", "all")) == "all"
    kind = spelling.type("b32 b64")
    if every:
        return Form("match", (OrPredicate(Define("b32")), Use(kind), _MASK), kind, attr=(1,))
    return Form("match", (Define("b32"), Absent(), Use(kind), _MASK), kind, attr=(0,))


@family("activemask")
def activemask(spelling: Spelling) -> Form:
    """``activemask``."""
    spelling.type("b32")
    return Form("activemask", (Define("b32"),))


@family("elect")
def elect(spelling: Spelling) -> Form:
    """``elect.sync``."""
    spelling.require("sync")
    return Form("elect", (OrPredicate(Define("b32"), required=True), _MASK))


def bar_warp(spelling: Spelling) -> Form:
    """``bar.warp.sync``.

    Parameters
    ----------
    spelling : Spelling
        Without ``warp``.
    """
    spelling.require("sync")
    if spelling.rest:
        raise UnsupportedInstruction(f"{spelling.text} is not an instruction")
    return Form("syncwarp", (_MASK,))
