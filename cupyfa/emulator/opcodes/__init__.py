"""The table of PTX: spelling -> operation, roles of the operands, attributes. One module a family."""

from __future__ import annotations

from functools import lru_cache

from cupyfa.emulator.opcodes import (
    asynchronous,
    barriers,
    control,
    conversions,
    floats,
    integers,
    memory,
    moves,
    predicates,
    tcgen05,
    warps,
    wgmma,
)
from cupyfa.emulator.opcodes.forms import Form, look_up
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.syntax import UnsupportedInstruction

__all__ = ["Form", "form_of"]

_FAMILIES = (
    asynchronous,
    barriers,
    control,
    conversions,
    floats,
    integers,
    memory,
    moves,
    predicates,
    tcgen05,
    warps,
    wgmma,
)


@lru_cache(maxsize=4096)
def form_of(opcode: str) -> Form:
    """Return what a spelling means.

    Parameters
    ----------
    opcode : str
        Such as ``add.rn.f32x2``.

    Returns
    -------
    Form
        Raises UnsupportedInstruction instead of guessing.
    """
    spelling = Spelling(opcode)
    reader = look_up(spelling.base)
    if reader is None:
        raise UnsupportedInstruction(f"{spelling.base} is not an instruction that the emulator knows")
    form = reader(spelling)
    spelling.end()
    return form
