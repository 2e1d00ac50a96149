"""Changed copies of a decoded kernel: what mutations are made of.

A program is never changed in place: an edit returns another one, which shares with the first what it did not touch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyfa.emulator import isa
from cupyfa.emulator.program import Program

__all__ = [
    "branches",
    "constant",
    "entries",
    "inserted",
    "moved",
    "named",
    "rows",
    "with_entries",
    "with_fields",
    "with_operation",
]

_NAMES = {number: name for name, number in isa.OPERATIONS.items()}
_READ, _WRITTEN, _PREDICATE, _CONSTANT = 1, 2, 4, 8


def named(program: Program) -> list[str]:
    """Return the operation of each record by its name."""
    return [_NAMES[int(number)] for number in program.code["operation"]]


def entries(program: Program, index: int) -> NDArray[np.int32]:
    """Return the operands of a record."""
    record = program.code[index]
    first = int(record["operands"])
    return program.pool[first : first + int(record["operand_count"])]


def rows(program: Program, index: int, written: bool) -> set[int]:
    """Return what a record reads, or writes: rows, and predicates as negative numbers."""
    record = program.code[index]
    first = int(record["operands"])
    found = set()
    for k in range(first, first + int(record["operand_count"])):
        entry, role = int(program.pool[k]), int(program.roles[k])
        if role & (_WRITTEN if written else _READ) and not role & _CONSTANT and entry != isa.ABSENT:
            found.add(-1 - (entry & ~isa.NEGATED) if role & _PREDICATE else entry)
    if not written and record["guard"] >= 0:
        found.add(-1 - int(record["guard"]))
    return found


def with_fields(program: Program, index: int, **fields: Any) -> Program:
    """Return the program with other fields in one record; ``attr`` is a mapping from its index to a value."""
    code = program.code.copy()
    for name, value in fields.items():
        if name == "attr":
            for i, x in value.items():
                code["attr"][index, i] = x
        else:
            code[name][index] = value
    return dataclasses.replace(program, code=code)


def with_entries(program: Program, index: int, changes: Mapping[int, int]) -> Program:
    """Return the program with other operands in one record; what they are stays as it is."""
    pool = program.pool.copy()
    first = int(program.code["operands"][index])
    for i, value in changes.items():
        pool[first + i] = value
    return dataclasses.replace(program, pool=pool)


def with_operation(
    program: Program, index: int, operation: str, operands: Sequence[int] = (), roles: Sequence[int] = (), **fields: Any
) -> Program:
    """Return the program with another instruction in the place of one; it keeps the guard and the source position."""
    changed = dataclasses.replace(
        program,
        pool=np.concatenate([program.pool, np.asarray(operands, np.int32)]),
        roles=np.concatenate([program.roles, np.asarray(roles, np.uint8)]),
    )
    return with_fields(
        changed,
        index,
        **{"type": 0, "type2": 0, "imm": 0, "attr": dict.fromkeys(range(8), 0), **fields},
        operation=isa.OPERATIONS[operation],
        operands=len(program.pool),
        operand_count=len(operands),
    )


def constant(program: Program, value: int) -> tuple[Program, int]:
    """Return the program with one more constant, and the operand that names it."""
    constants = np.append(program.constants, np.uint32(value))
    return dataclasses.replace(program, constants=constants), ~(len(constants) - 1)


def branches(program: Program) -> list[tuple[int, int]]:
    """Return (record, target) of all branches; a table of targets counts as one branch for each."""
    found = []
    for index, name in enumerate(named(program)):
        if name == "bra":
            found.append((index, int(program.code["imm"][index])))
        elif name == "brx":
            found += [(index, int(target)) for target in entries(program, index)[2:]]
    return found


def moved(program: Program, index: int, to: int) -> Program | None:
    """Return the program with a record moved in front of the one that is at `to`, or None where that makes no sense.

    A branch from between the two places that leads to where the record goes is one around the record's neighbours:
    after a move down it leads to the record, after a move up (over a loop) it leaves it out. All other ways in or out
    of the stretch are refused, and so is a move past a record that writes what the moved one reads, or vice versa.
    """
    first, last = (to, index) if to < index else (index + 1, to)  # the records that it passes
    passed = [i for i in range(first, last) if i != index]
    uses, definitions = rows(program, index, False), rows(program, index, True)
    for i in passed:
        if rows(program, i, True) & (uses | definitions) or rows(program, i, False) & definitions:
            return None
    inside = range(min(index, to), max(index + 1, to))
    for source, target in branches(program):
        if source in inside:
            if not (target in inside or target == to):
                return None
        elif target in inside and target not in (to, min(inside)):
            return None
    order = list(range(len(program.code)))
    order.remove(index)
    order.insert(to if to < index else to - 1, index)
    place = {old: new for new, old in enumerate(order)}

    def follow(source: int, target: int) -> int:
        if target == index:  # whoever came to the record in its old place comes to what followed it
            return place[index + 1] if to > index else place[index]
        if target == to and (source in inside) == (to > index):
            return place[index]
        return place[target]

    return _ordered(program, order, follow)


def inserted(program: Program, index: int, copied: int) -> Program:
    """Return the program with a copy of one record in front of another; branches to that one come to the copy first."""
    order = [*range(index), copied, *range(index, len(program.code))]
    return _ordered(program, order, lambda source, target: target + (target > index))


def _ordered(program: Program, order: Sequence[int], follow: Callable[[int, int], int]) -> Program:
    """Return the records in another order; `follow` gives a branch its new target, from the old record and target."""
    code, pool = program.code[list(order)], program.pool.copy()
    done = set()
    for new, old in enumerate(order):
        if program.code["operation"][old] == isa.OPERATIONS["bra"]:
            code["imm"][new] = follow(old, int(program.code["imm"][old]))
        elif program.code["operation"][old] == isa.OPERATIONS["brx"] and old not in done:
            done.add(old)
            start = int(program.code["operands"][old])
            for k in range(start + 2, start + int(program.code["operand_count"][old])):
                pool[k] = follow(old, int(program.pool[k]))
    return dataclasses.replace(program, code=code, pool=pool, text=tuple([program.text[old] for old in order]))
