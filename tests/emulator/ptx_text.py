"""PTX modules around single statements, and decoded records as text, for the tests of the emulator's decoder."""

from __future__ import annotations

from typing import Any

from cupyfa.emulator import isa
from cupyfa.emulator.decode import Program, decode
from cupyfa.emulator.ptx import parse

_REGISTERS = {"rs": ("b16", 1), "r": ("b32", 1), "rd": ("b64", 2), "f": ("f32", 1), "fd": ("f64", 2), "rq": ("b128", 4)}
DECLARATIONS = ".reg .pred %p<9>; " + " ".join(f".reg .{kind} %{name}<9>;" for name, (kind, _) in _REGISTERS.items())


def module(body: str, parameters: str = "", head: str = "", target: str = "sm_100a") -> str:
    """A module with one kernel k."""
    return f".version 9.0\n.target {target}\n.address_size 64\n{head}\n.entry k({parameters}) {{\n{body}\n}}\n"


def decoded(body: str, optimise: bool = False, **parts: str) -> Program:
    """The program of a kernel with that body."""
    return decode(parse(module(body, **parts)), optimise=optimise)


def _named_rows() -> tuple[list[str], dict[int, str]]:
    """Statements that touch all registers in order, so that each row has a name that is known."""
    statements, names = [], {}
    for name, (kind, rows) in _REGISTERS.items():
        for index in range(9):
            statements.append(f"mov.b{kind[1:]} %{name}{index}, %{name}{index};")
            for part in range(rows):
                suffix = "" if rows == 1 else f".{'lh'[part]}" if rows == 2 else f".{part}"
                names[len(names)] = f"{name}{index}{suffix}"
    statements += [f"mov.pred %p{index}, %p{index};" for index in range(9)]
    return statements, names


_TOUCH, _ROW_NAMES = _named_rows()
_OPERATIONS = {number: name for name, number in isa.OPERATIONS.items()}
_TYPES = {number: name for name, number in isa.TYPES.items()}
_SPECIALS = {number: name for name, number in isa.SPECIALS.items()}
# Attributes that are numbers of a list.
_ATTRIBUTES: dict[str, tuple[dict[str, int] | None, ...]] = {
    **dict.fromkeys(("ld", "st"), (isa.SPACES, None, isa.ORDERS, isa.SCOPES)),
    **dict.fromkeys(("atom", "red"), (isa.SPACES, isa.REDUCTIONS, isa.ORDERS, isa.SCOPES)),
    **dict.fromkeys(("mbarrier_arrive", "mbarrier_wait"), (None, None, isa.ORDERS, isa.SCOPES)),
    **dict.fromkeys(("setp", "set"), (isa.COMPARISONS, isa.BOOLEANS)),
    **dict.fromkeys(("cvta", "isspacep", "fence_proxy_async"), (isa.SPACES,)),
    **dict.fromkeys(("bulk_reduce", "tensor_reduce"), (None, isa.REDUCTIONS)),
    "redux": (isa.REDUCTIONS,),
    "fence": (isa.ORDERS, isa.SCOPES),
    "wgmma": (None, isa.TYPES),
    **dict.fromkeys(("add", "sub", "mul", "fma", "div", "rcp", "sqrt", "cvt", "cvt_pack"), (isa.ROUNDINGS,)),
    **dict.fromkeys(("rsqrt", "ex2", "lg2", "sin", "cos", "tanh"), (isa.ROUNDINGS,)),
}


def _attributes(operation: str, values: list[int]) -> str:
    lists = _ATTRIBUTES.get(operation, ())
    shown = []
    for index, value in enumerate(values):
        numbers = lists[index] if index < len(lists) else None
        shown.append(str(value) if numbers is None else {number: name for name, number in numbers.items()}[value])
    while shown and shown[-1] in ("0", "none"):
        shown.pop()
    return "[" + " ".join(shown) + "]" if shown else ""


def entries(program: Program, record: Any) -> list[str]:
    """The operands of a record: > is written, # a constant, ! a negated predicate, - absent."""
    specials = {row: _SPECIALS[number] for row, number in program.specials}
    span = slice(record["operands"], record["operands"] + record["operand_count"])
    shown = []
    for value, role in zip(program.pool[span].tolist(), program.roles[span].tolist(), strict=True):
        if role & 4:
            number = value & ~isa.NEGATED
            text = ("!" if value & isa.NEGATED else "") + (f"p{number - 1}" if number else "true")
        elif role & 3:
            text = _ROW_NAMES.get(value) or specials.get(value) or "t"
        elif role & 8:
            text = f"#{program.constants[~value]:x}"
        else:
            text = "-" if value == isa.ABSENT else str(value)
        shown.append({0: "", 1: "", 2: ">", 3: "<>"}[role & 3] + text)
    return shown


def rendered(statement: str, **parts: str) -> list[str]:
    """The records of one statement as text."""
    program = decoded(f"{DECLARATIONS}\n{' '.join(_TOUCH)}\n{statement};", **parts)
    lines = []
    for record in program.code[len(_TOUCH) : -1]:
        operation = _OPERATIONS[int(record["operation"])]
        kinds = [_TYPES[int(record[field])] for field in ("type", "type2") if record[field]]
        guard = f"@{'!' if record['guard_negated'] else ''}p{record['guard'] - 1} " if record["guard"] >= 0 else ""
        parts_of = [guard + ".".join([operation, *kinds]), *entries(program, record)]
        if shown := _attributes(operation, record["attr"].tolist()):
            parts_of.append(shown)
        if record["imm"]:
            parts_of.append(f"imm={record['imm']}")
        lines.append(" ".join(parts_of))
    return lines
