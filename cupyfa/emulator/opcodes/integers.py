"""Integer arithmetic and bits. add, sub, min and the like of floats are spelled alike, and stand in ``floats``."""

from __future__ import annotations

from cupyfa.emulator.isa import BITS
from cupyfa.emulator.opcodes.forms import Define, DefPredicate, Form, Use, UsePredicate, family
from cupyfa.emulator.opcodes.spelling import Spelling

__all__ = ["INTEGERS", "arithmetic", "negation"]

INTEGERS = "u16 s16 u32 s32 u64 s64"
_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def arithmetic(spelling: Spelling, operation: str) -> Form:
    """``d, a, b`` of one integer type."""
    kind = spelling.type(INTEGERS)
    flags = 0
    if operation in ("add", "sub") and kind == "s32":
        flags = spelling.flags("sat")
    elif operation in ("min", "max") and kind == "s32":
        flags = spelling.flags("relu")
    return Form(operation, (Define(kind), Use(kind), Use(kind)), kind, attr=(0, flags))


def negation(spelling: Spelling, operation: str) -> Form:
    """``d, a`` of one signed type."""
    kind = spelling.type("s16 s32 s64")
    return Form(operation, (Define(kind), Use(kind)), kind)


@family("rem")
def rem(spelling: Spelling) -> Form:
    """``rem``."""
    return arithmetic(spelling, "rem")


def multiplication(spelling: Spelling) -> Form:
    """``mul.lo``, ``mul.hi``, ``mul.wide``."""
    half = spelling.one_of(("lo", "hi", "wide"))
    kind = spelling.type(INTEGERS if half != "wide" else " ".join(_WIDE))
    wide = _WIDE[kind] if half == "wide" else kind
    return Form(f"mul_{half}", (Define(wide), Use(kind), Use(kind)), kind)


def multiply_add(spelling: Spelling) -> Form:
    """``mad.lo``, ``mad.hi``, ``mad.wide``."""
    half = spelling.one_of(("lo", "hi", "wide"))
    kind = spelling.type(INTEGERS if half != "wide" else " ".join(_WIDE))
    wide = _WIDE[kind] if half == "wide" else kind
    flags = spelling.flags("sat") if half == "hi" and kind == "s32" else 0
    return Form(f"mad_{half}", (Define(wide), Use(kind), Use(kind), Use(wide)), kind, attr=(0, flags))


@family("popc", "clz", "brev")
def count(spelling: Spelling) -> Form:
    """``popc``, ``clz``, ``brev``: the first two count into 32 bits."""
    kind = spelling.type("b32 b64")
    return Form(spelling.base, (Define(kind if spelling.base == "brev" else "u32"), Use(kind)), kind)


@family("bfind")
def bfind(spelling: Spelling) -> Form:
    """``bfind``."""
    shift = spelling.flag("shiftamt")
    kind = spelling.type("u32 s32 u64 s64")
    return Form("bfind", (Define("u32"), Use(kind)), kind, attr=(int(shift),))


@family("and", "or", "xor")
def logic(spelling: Spelling) -> Form:
    """``and``, ``or``, ``xor``."""
    kind = spelling.type("pred b16 b32 b64")
    name = spelling.base + "_"
    if kind == "pred":
        return Form(name, (DefPredicate(), UsePredicate(), UsePredicate()), kind)
    return Form(name, (Define(kind), Use(kind), Use(kind)), kind)


@family("not", "cnot")
def complement(spelling: Spelling) -> Form:
    """``not``, ``cnot``."""
    if spelling.base == "cnot":
        kind = spelling.type("b16 b32 b64")
        return Form("cnot", (Define(kind), Use(kind)), kind)
    kind = spelling.type("pred b16 b32 b64")
    if kind == "pred":
        return Form("not_", (DefPredicate(), UsePredicate()), kind)
    return Form("not_", (Define(kind), Use(kind)), kind)


@family("shl", "shr")
def shift(spelling: Spelling) -> Form:
    """``shl``, ``shr``: the amount has 32 bits; a shift of untyped bits to the right is one of unsigned ones."""
    kind = spelling.type("b16 b32 b64" if spelling.base == "shl" else f"b16 b32 b64 {INTEGERS}")
    if spelling.base == "shr":
        kind = kind.replace("b", "u")
    return Form(spelling.base, (Define(kind), Use(kind), Use("u32")), kind)


@family("shf")
def funnel_shift(spelling: Spelling) -> Form:
    """``shf``."""
    right = spelling.one_of(("l", "r")) == "r"
    wrap = spelling.one_of(("clamp", "wrap")) == "wrap"
    kind = spelling.type("b32")
    return Form("shf", (Define(kind), Use(kind), Use(kind), Use(kind)), kind, attr=(int(right), int(wrap)))


@family("bfe")
def bfe(spelling: Spelling) -> Form:
    """``bfe``."""
    kind = spelling.type("u32 s32 u64 s64")
    return Form("bfe", (Define(kind), Use(kind), Use("u32"), Use("u32")), kind)


@family("bfi")
def bfi(spelling: Spelling) -> Form:
    """``bfi``."""
    kind = spelling.type("b32 b64")
    return Form("bfi", (Define(kind), Use(kind), Use(kind), Use("u32"), Use("u32")), kind)


@family("prmt")
def prmt(spelling: Spelling) -> Form:
    """``prmt`` without a mode."""
    kind = spelling.type("b32")
    return Form("prmt", (Define(kind), Use(kind), Use(kind), Use(kind)), kind)


@family("lop3")
def lop3(spelling: Spelling) -> Form:
    """``lop3``."""
    kind = spelling.type("b32")
    return Form("lop3", (Define(kind), Use(kind), Use(kind), Use(kind)), kind, number=(0, 255))


@family("sad")
def sad(spelling: Spelling) -> Form:
    """``sad``."""
    kind = spelling.type(INTEGERS)
    unsigned = kind.replace("s", "u") if BITS[kind] else kind
    return Form("sad", (Define(unsigned), Use(kind), Use(kind), Use(unsigned)), kind)
