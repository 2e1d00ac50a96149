"""Floating-point arithmetic, and the words that integers share with it."""

from __future__ import annotations

from cupyfa.emulator.builder import DEFINED, Builder
from cupyfa.emulator.isa import FLAGS, ROUNDINGS
from cupyfa.emulator.opcodes import integers
from cupyfa.emulator.opcodes.forms import Define, DefPredicate, Expand, Form, Operands, Use, family
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.syntax import PtxError, UnsupportedInstruction

_HALVES = "f16 f16x2 bf16 bf16x2"
_ROUNDINGS = "rn rz rm rp"


def _is_float(spelling: Spelling) -> bool:
    """Return whether the last modifier is a floating-point type."""
    return bool(spelling.rest) and spelling.rest[-1] in ("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64")


def _same(operation: str, kind: str, sources: int, rounding: int, flags: int) -> Form:
    return Form(operation, (Define(kind), *[Use(kind)] * sources), kind, attr=(rounding, flags))


def _flags(spelling: Spelling, kind: str, extra: tuple[str, ...] = ()) -> int:
    """Take off the flags that PTX has for a type: f32 flushes and saturates, f16 too."""
    if kind == "f64":
        return 0
    if kind == "f32x2":
        return spelling.flags("ftz")
    return spelling.flags(*(("ftz", "sat") if kind in ("f32", "f16", "f16x2") else ()), *extra)


@family("add", "sub")
def add(spelling: Spelling) -> Form:
    """``add``, ``sub``; with a second type that of the first source, which is converted first."""
    if not _is_float(spelling):
        return integers.arithmetic(spelling, spelling.base)
    rounding = spelling.rounding(_ROUNDINGS, "rn")
    if len(spelling.rest) > 1 and spelling.rest[-2] == "f32":
        narrow = spelling.types(2, "f32 f16 bf16")[1]
        return Form(spelling.base, expand=_mixed_add(spelling.base, narrow, rounding, spelling.flags("sat")))
    kind = spelling.type(f"f32 f32x2 f64 {_HALVES}")
    return _same(spelling.base, kind, 2, rounding, _flags(spelling, kind))


def _mixed_add(operation: str, narrow: str, rounding: int, flags: int) -> Expand:
    def expand(builder: Builder, operands: Operands) -> None:
        if len(operands) != 3:
            raise PtxError(f"expected 3 operands, got {len(operands)}")
        (row,) = builder.temporary()
        builder.put(row, DEFINED)
        builder.use(operands[1], narrow)
        builder.emit("cvt", "f32", narrow, (ROUNDINGS["unrounded"], 0))
        builder.define(operands[0], "f32")
        builder.read(row)
        builder.use(operands[2], "f32")
        builder.emit(operation, "f32", attr=(rounding, flags))

    return expand


@family("mul")
def mul(spelling: Spelling) -> Form:
    """``mul``."""
    if not _is_float(spelling):
        return integers.multiplication(spelling)
    rounding = spelling.rounding(_ROUNDINGS, "rn")
    kind = spelling.type(f"f32 f32x2 f64 {_HALVES}")
    return _same("mul", kind, 2, rounding, _flags(spelling, kind))


@family("fma", "mad")
def fma(spelling: Spelling) -> Form:
    """``fma``, ``mad``; with a second type that of the factors."""
    if spelling.base == "mad" and not _is_float(spelling):
        return integers.multiply_add(spelling)
    rounding = spelling.rounding(_ROUNDINGS, "rn" if spelling.base == "mad" else None)
    if len(spelling.rest) > 1 and spelling.rest[-2] == "f32" and spelling.base == "fma":
        kind, narrow = spelling.types(2, "f32 f16 bf16")
        flags = spelling.flags("sat")
        return Form("fma", (Define(kind), Use(narrow), Use(narrow), Use(kind)), kind, narrow, (rounding, flags))
    kind = spelling.type(f"f32 f32x2 f64 {_HALVES}" if spelling.base == "fma" else "f32 f64")
    extra = ("relu",) if kind in _HALVES.split() else ()
    return _same("fma", kind, 3, rounding, _flags(spelling, kind, extra))


@family("div")
def div(spelling: Spelling) -> Form:
    """``div``."""
    if not _is_float(spelling):
        return integers.arithmetic(spelling, "div")
    kind = spelling.type("f32 f64")
    rounding = spelling.rounding(f"{_ROUNDINGS} approx full" if kind == "f32" else _ROUNDINGS, None)
    return _same("div", kind, 2, rounding, spelling.flags("ftz") if kind == "f32" else 0)


@family("min", "max")
def extremum(spelling: Spelling) -> Form:
    """``min``, ``max``, of two or three."""
    if not _is_float(spelling):
        return integers.arithmetic(spelling, spelling.base)
    kind = spelling.type(f"f32 f64 {_HALVES}")
    flags = 0
    if kind != "f64":
        flags = spelling.flags("ftz", "NaN", "xorsign", "abs")
    two = _same(spelling.base, kind, 2, 0, flags)
    three = _same(spelling.base + "3", kind, 3, 0, flags)
    if bool(flags & FLAGS["xorsign"]) and not flags & FLAGS["abs"]:
        raise UnsupportedInstruction(f"{spelling.text}: .xorsign without .abs")

    def expand(builder: Builder, operands: Operands) -> None:
        (three if len(operands) == 4 and kind == "f32" else two).write(builder, operands)

    return Form(spelling.base, expand=expand)


@family("neg", "abs")
def sign(spelling: Spelling) -> Form:
    """``neg``, ``abs``."""
    if not _is_float(spelling):
        return integers.negation(spelling, spelling.base)
    kind = spelling.type(f"f32 f64 {_HALVES}")
    return _same(spelling.base, kind, 1, 0, spelling.flags("ftz") if kind in ("f32", "f16", "f16x2") else 0)


@family("rcp", "sqrt")
def rounded(spelling: Spelling) -> Form:
    """``rcp``, ``sqrt``."""
    kind = spelling.type("f32 f64")
    rounding = spelling.rounding(f"{_ROUNDINGS} approx", None)
    flags = spelling.flags("ftz")
    approximate = rounding == ROUNDINGS["approx"]
    if kind == "f64" and (bool(flags) != approximate or (approximate and spelling.base == "sqrt")):
        raise UnsupportedInstruction(f"{spelling.text} is not an instruction")
    return _same(spelling.base, kind, 1, rounding, flags)


@family("rsqrt", "lg2", "sin", "cos", "ex2", "tanh")
def approximate(spelling: Spelling) -> Form:
    """Read the functions that exist as an approximation only."""
    base = spelling.base
    allowed = {"rsqrt": "f32 f64", "ex2": f"f32 {_HALVES}", "tanh": f"f32 {_HALVES}"}.get(base, "f32")
    kind = spelling.type(allowed)
    rounding = spelling.rounding("approx", None)
    flags = spelling.flags("ftz") if base != "tanh" else 0
    return _same(base, kind, 1, rounding, flags)


@family("copysign")
def copysign(spelling: Spelling) -> Form:
    """``copysign``."""
    kind = spelling.type("f32 f64")
    return Form("copysign", (Define(kind), Use(kind), Use(kind)), kind)


@family("testp")
def testp(spelling: Spelling) -> Form:
    """``testp``."""
    names = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    test = names.index(spelling.one_of(names))
    kind = spelling.type("f32 f64")
    return Form("testp", (DefPredicate(), Use(kind)), kind, attr=(test,))
