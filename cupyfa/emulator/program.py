"""The decoded kernel that the machine executes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["INSTRUCTION", "Parameter", "Program"]

#: ``struct Instruction`` of ``core/isa.hpp``; the machine refuses records of another size.
INSTRUCTION: Final = np.dtype(
    [
        ("operation", "<u2"),
        ("type", "u1"),
        ("type2", "u1"),
        ("attr", "u1", 8),
        ("guard", "<i2"),
        ("guard_negated", "u1"),
        ("repeat", "u1"),
        ("operands", "<i4"),
        ("operand_count", "<i4"),
        ("imm", "<i4"),
        ("bias", "<i4"),
        ("site", "<i4"),
    ]
)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel in the packed block."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True)
class Program:
    """A decoded kernel.

    Attributes
    ----------
    name, arch : str
        Of the entry and the module's target.
    code : ndarray
        Records of type `INSTRUCTION`.
    pool, roles : ndarray
        The operands of all records, and for each what it is, as bits: 1 read, 2 written, 4 a predicate, 8 a constant; 0
        is a number, or absent.
    constants : ndarray of uint32
        The values of the constant rows; an operand is ``~index``.
    rows, predicates : int
        How many a warp has; predicate 0 is always true.
    specials : tuple
        (row, number of the special register) for each row that the machine fills at launch.
    text : tuple of str
        The PTX of each record.
    sites, callers : tuple
        What ``site`` of a record indexes: (file, line), and the lines that it was inlined at, outwards.
    params, param_bytes
        The parameter block.
    static_shared, dynamic_shared_offset : int
        Bytes of .shared variables, and where an array without a size begins.
    shared_symbols, data_symbols : dict
        Name -> (offset, size).
    data : bytes
        The image of .global and .const variables.
    local_bytes : int
        Of .local variables of a thread.
    max_threads, reqntid, min_ctas, max_registers, cluster
        The performance directives, None where there is none.
    """

    name: str
    arch: str
    code: NDArray[np.void]
    pool: NDArray[np.int32]
    roles: NDArray[np.uint8]
    constants: NDArray[np.uint32]
    rows: int
    predicates: int
    specials: tuple[tuple[int, int], ...]
    text: tuple[str, ...] = field(repr=False)
    sites: tuple[tuple[str, int], ...] = field(repr=False)
    callers: tuple[tuple[tuple[str, int], ...], ...] = field(repr=False)
    params: tuple[Parameter, ...]
    param_bytes: int
    static_shared: int
    shared_symbols: dict[str, tuple[int, int]]
    dynamic_shared_offset: int
    data: bytes = field(repr=False)
    data_symbols: dict[str, tuple[int, int]]
    local_bytes: int
    max_threads: int | None
    reqntid: tuple[int, ...] | None
    min_ctas: int | None
    max_registers: int | None
    cluster: tuple[int, ...] | None
