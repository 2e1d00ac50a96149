"""setp and set: comparisons."""

from __future__ import annotations

from cupyfa.emulator.isa import BITS, BOOLEANS, COMPARISONS
from cupyfa.emulator.opcodes.forms import Absent, Define, DefPredicate, Form, OrPredicate, Use, UsePredicate, family
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.syntax import UnsupportedInstruction

# Unsigned comparisons have names of their own.
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_NAMES = COMPARISONS | {name: COMPARISONS[same] for name, same in _UNSIGNED.items()}
_TYPES = "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64 f16 bf16"


def _comparison(spelling: Spelling) -> str:
    return spelling.one_of(_NAMES)


def _check(spelling: Spelling, comparison: str, kind: str) -> str:
    """Refuse comparisons that a type does not have; return the type, where untyped bits compare as unsigned."""
    is_float = kind in ("f32", "f64", "f16", "bf16")
    only_equal = kind[0] == "b" and not is_float and comparison not in ("eq", "ne")
    only_float = not is_float and COMPARISONS.get(comparison, 0) >= COMPARISONS["equ"]
    if only_equal or only_float or (comparison in _UNSIGNED and kind[0] != "u"):
        raise UnsupportedInstruction(f"{spelling.text}: the comparison .{comparison} of .{kind}")
    return kind if is_float or kind[0] != "b" else f"u{BITS[kind]}"


@family("setp")
def setp(spelling: Spelling) -> Form:
    """``setp``, with a third predicate that is combined."""
    comparison = _comparison(spelling)
    boolean = spelling.one_of(("and", "or", "xor"), "none")
    kind = _check(spelling, comparison, spelling.type(_TYPES))
    ftz = spelling.flag("ftz") if kind in ("f32", "f16") else False
    attr = (_NAMES[comparison], BOOLEANS[boolean if boolean == "none" else boolean + "_"], int(ftz))
    third = Absent() if boolean == "none" else UsePredicate()
    return Form("setp", (OrPredicate(DefPredicate()), Use(kind), Use(kind), third), kind, attr=attr)


@family("set")
def set_(spelling: Spelling) -> Form:
    """``set``."""
    comparison = _comparison(spelling)
    target, source = spelling.types(2, _TYPES)
    if target not in ("u32", "s32", "f32"):
        raise UnsupportedInstruction(f"{spelling.text}: a result of type .{target}")
    kind = _check(spelling, comparison, source)
    ftz = spelling.flag("ftz") if kind in ("f32", "f16") else False
    return Form("set", (Define(target), Use(kind), Use(kind)), kind, target, (_NAMES[comparison], 0, int(ftz)))
