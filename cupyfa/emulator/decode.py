"""An entry of a PTX module -> the records that the machine executes."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np

from cupyfa.emulator import isa
from cupyfa.emulator.builder import Builder, Record
from cupyfa.emulator.layout import Layout, lay_out
from cupyfa.emulator.liveness import Allocation, allocate
from cupyfa.emulator.opcodes import form_of
from cupyfa.emulator.program import INSTRUCTION, Parameter, Program
from cupyfa.emulator.ptx import Entry, Module, Statement
from cupyfa.emulator.syntax import Name, PtxError

__all__ = ["INSTRUCTION", "Parameter", "Program", "decode"]

_LIMIT = 1 << 24
_LIMIT_PREDICATES = 1 << 15


def decode(module: Module, entry_name: str | None = None, optimise: bool = True) -> Program:
    """Return the program of a kernel.

    Parameters
    ----------
    module : Module
        Of :func:`cupyfa.emulator.ptx.parse`.
    entry_name : str, optional
        Which kernel; not needed where there is only one.
    optimise : bool
        Let registers share rows and drop copies.

    Returns
    -------
    Program
        PtxError says what is malformed, UnsupportedInstruction what the emulator does not know, with line and text.
    """
    entry = _choose(module, entry_name)
    layout = lay_out(module, entry)
    builder, first = _records(entry, layout)
    allocation = allocate(builder, first, optimise)
    return _assemble(module, entry, layout, builder, allocation)


def _choose(module: Module, name: str | None) -> Entry:
    """Return the entry of that name, or the only one."""
    known = ", ".join(module.entries) or "none"
    if name is None:
        if len(module.entries) != 1:
            raise PtxError(f"the module does not have one kernel but {len(module.entries)} ({known}): name one")
        return next(iter(module.entries.values()))
    if name not in module.entries:
        raise PtxError(f"no kernel {name} in the module (there are: {known})")
    return module.entries[name]


def _records(entry: Entry, layout: Layout) -> tuple[Builder, list[int]]:
    """Return the builder with all records, and the first record of each statement."""
    builder = Builder(layout.places)
    first = []
    for index, statement in enumerate(entry.statements):
        first.append(len(builder.records))
        template = Record("", statement=index)
        try:
            form = form_of(statement.opcode)
            builder.begin(statement.scope, template)
            if statement.guard is not None:
                template.guard = builder.predicate(Name(statement.guard))
                template.guard_negated = statement.guard_negated
            form.write(builder, statement.operands)
        except PtxError as error:
            raise error.at(statement.line, statement.text[:200]) from None
    first.append(len(builder.records))
    # A kernel also ends where its text ends.
    last = entry.statements[-1].scope if entry.statements else entry.scope
    builder.begin(last, Record("", statement=len(entry.statements) - 1))
    builder.emit("exit")
    if builder.predicates > _LIMIT_PREDICATES or builder.rows > _LIMIT:
        raise PtxError(f"{builder.predicates} predicates and {builder.rows} registers are too many", entry.line)
    return builder, first


def _assemble(module: Module, entry: Entry, layout: Layout, builder: Builder, allocation: Allocation) -> Program:
    """Return the program of allocated records."""
    records, statements = allocation.records, entry.statements
    code = np.zeros(len(records), INSTRUCTION)
    counts = np.array([len(record.entries) for record in records], np.int64)
    attributes = bytearray(8 * len(records))
    for index, record in enumerate(records):
        attributes[8 * index : 8 * index + len(record.attr)] = bytes(record.attr)
    code["operation"] = [isa.OPERATIONS[record.operation] for record in records]
    code["type"] = [isa.TYPES[record.type] for record in records]
    code["type2"] = [isa.TYPES[record.type2] for record in records]
    code["attr"] = np.frombuffer(attributes, np.uint8).reshape(-1, 8)
    code["guard"] = [record.guard for record in records]
    code["guard_negated"] = [record.guard_negated for record in records]
    code["operands"] = np.cumsum(counts) - counts
    code["operand_count"] = counts
    code["imm"] = [record.imm for record in records]
    places, sites = _sites(module, statements, records)
    code["site"] = sites
    directives = {name: numbers for name, numbers in entry.directives.items() if numbers}
    threads = directives.get("reqntid") or directives.get("maxntid")
    return Program(
        name=entry.name,
        arch=module.target,
        code=code,
        pool=np.fromiter(chain.from_iterable(record.entries for record in records), np.int32),
        roles=np.fromiter(chain.from_iterable(record.roles for record in records), np.uint8),
        constants=np.array(list(builder.constants), np.uint32),
        rows=allocation.rows,
        predicates=builder.predicates,
        specials=allocation.specials,
        text=tuple([statements[record.statement].text if record.statement >= 0 else "exit" for record in records]),
        sites=tuple([(file, line) for file, line, _ in places]),
        callers=tuple([callers for _, _, callers in places]),
        params=layout.params,
        param_bytes=layout.param_bytes,
        static_shared=layout.static_shared,
        shared_symbols=layout.shared_symbols,
        dynamic_shared_offset=layout.dynamic_shared,
        data=layout.data,
        data_symbols=layout.data_symbols,
        local_bytes=layout.local_bytes,
        max_threads=math.prod(threads) if threads else None,
        reqntid=directives.get("reqntid"),
        min_ctas=_first(directives.get("minnctapersm")),
        max_registers=_first(directives.get("maxnreg")),
        cluster=directives.get("reqnctapercluster"),
    )


def _sites(
    module: Module, statements: list[Statement], records: list[Record]
) -> tuple[list[tuple[str, int, tuple[tuple[str, int], ...]]], list[int]]:
    """Return the places that records come from and the place of each record: by ``.loc``, or the line of the PTX."""
    numbers: dict[tuple[str, int, tuple[tuple[str, int], ...]], int] = {("<ptx>", 0, ()): 0}
    of_statement = []
    for statement in statements:
        location = module.locations[statement.location]
        line = location.line if statement.location else statement.line
        key = (location.file, line, location.callers)
        of_statement.append(numbers.setdefault(key, len(numbers)))
    return list(numbers), [of_statement[record.statement] if record.statement >= 0 else 0 for record in records]


def _first(numbers: tuple[int, ...] | None) -> int | None:
    return numbers[0] if numbers else None
