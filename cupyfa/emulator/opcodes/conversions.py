"""cvt: conversions between numbers, and from two f32 to a packed type."""

from __future__ import annotations

from cupyfa.emulator.builder import Builder
from cupyfa.emulator.isa import BITS, FLAGS, ROUNDINGS
from cupyfa.emulator.opcodes.forms import Define, Expand, Form, Operands, Use, family
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.syntax import PtxError, UnsupportedInstruction

_INTEGERS = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"}
_FLOATS = {"f16", "bf16", "f32", "f64"}
_PACKED = {"f16x2", "bf16x2", "e4m3x2", "e5m2x2"}
# One packed type to another: what exists.
_REPACKED = {("f16x2", "e4m3x2"), ("f16x2", "e5m2x2"), ("e4m3x2", "f16x2"), ("e5m2x2", "f16x2")}
_INTEGER_ROUNDINGS = {"rni", "rzi", "rmi", "rpi"}


@family("cvt")
def cvt(spelling: Spelling) -> Form:
    """``cvt``."""
    explicit = spelling.one_of(ROUNDINGS, "unrounded")
    target, source = spelling.types(2)
    flags = spelling.flags("ftz", "sat", "relu", "satfinite")
    pair = target in _PACKED and source == "f32"
    known = pair or (target, source) in _REPACKED or (target == "tf32" and source == "f32")
    if not known and not {target, source} <= _INTEGERS | _FLOATS:
        raise UnsupportedInstruction(f"{spelling.text}: a conversion that the emulator does not know")
    _check(spelling, explicit, target, source, flags)
    # Without a word: a conversion that loses nothing, or the default rounding of hardware.
    rounding = "rn" if explicit == "unrounded" and _loses(target, source) else explicit
    attr = (ROUNDINGS[rounding], flags)
    if pair:
        return Form("cvt_pack", (Define(target), Use("f32"), Use("f32")), target, source, attr)
    if not flags and _only_moves(target, source):
        return Form("mov", expand=_move(target, source))
    # Registers may be wider than the number, but for f32.
    narrow = _INTEGERS | {"f16", "bf16"}
    define = Define(target, wider=target in narrow, signed=target in ("s8", "s16", "s32"))
    return Form("cvt", (define, Use(source, wider=source in narrow)), target, source, attr)


def _only_moves(target: str, source: str) -> bool:
    """Return whether a conversion between integers only takes or fills rows."""
    if not {target, source} <= {"u32", "s32", "u64", "s64"}:
        return False
    return BITS[target] <= BITS[source] or source == "u32"


def _move(target: str, source: str) -> Expand:
    """Return what writes such a conversion as a move, which can be left out later."""

    def expand(builder: Builder, operands: Operands) -> None:
        if len(operands) != 2:
            raise PtxError(f"expected 2 operands, got {len(operands)}")
        rows = builder.values(operands[1], source, wider=True)
        builder.define(operands[0], target, wider=True, signed=target == "s32")
        count = BITS[target] // 32
        for row in [*rows, builder.zero][:count]:
            builder.read(row)
        builder.emit("mov", f"b{BITS[target]}")

    return expand


def _loses(target: str, source: str) -> bool:
    """Return whether a float conversion without a rounding can be inexact."""
    return target in _FLOATS and source in _FLOATS and BITS[target] < BITS[source]


def _check(spelling: Spelling, rounding: str, target: str, source: str, flags: int) -> None:
    """Refuse combinations that PTX does not have."""
    floats = _FLOATS | _PACKED | {"tf32"}
    wrong = ""
    if rounding == "rs":
        wrong = "stochastic rounding"
    elif target in _INTEGERS and source in _FLOATS and rounding not in _INTEGER_ROUNDINGS:
        wrong = "a conversion to an integer needs .rni, .rzi, .rmi or .rpi"
    elif target in _FLOATS and source in _INTEGERS and rounding not in ("rn", "rz", "rm", "rp"):
        wrong = "a conversion from an integer needs .rn, .rz, .rm or .rp"
    elif target in _INTEGERS and source in _INTEGERS and rounding != "unrounded":
        wrong = "a rounding between integers"
    elif rounding in _INTEGER_ROUNDINGS and target != source and target not in _INTEGERS:
        wrong = "an integer rounding between different floats"
    elif (target in _PACKED or target == "tf32") and rounding == "unrounded":
        wrong = "a packed type needs a rounding"
    elif target not in floats and flags & (FLAGS["relu"] | FLAGS["satfinite"]):
        wrong = ".relu or .satfinite for an integer"
    if wrong:
        raise UnsupportedInstruction(f"{spelling.text}: {wrong}")
