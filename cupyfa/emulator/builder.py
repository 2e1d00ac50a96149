"""Writes records: resolves the names of operands into rows, predicates and numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cupyfa.emulator.isa import ABSENT, BITS, NEGATED, ROWS, SPECIALS
from cupyfa.emulator.scopes import Register, Scope, Variable
from cupyfa.emulator.syntax import Address, Integer, Name, Operand, PtxError, Real, UnsupportedInstruction, Vector

__all__ = ["CONSTANT", "DEFINED", "NUMBER", "PREDICATE", "USED", "Builder", "Record"]

# What an entry of the pool is, as bits.
NUMBER: Final = 0
USED: Final = 1
DEFINED: Final = 2
PREDICATE: Final = 4
CONSTANT: Final = 8

_FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "tf32", "f64", "f32x2"}
_CLOCKS = {"%clock": ("clock", 0), "%clock_lo": ("clock64", 0), "%clock_hi": ("clock64", 1), "%clock64": ("clock64", 0)}
_CLOCKS |= {f"%globaltimer{suffix}": ("globaltimer", part) for suffix, part in (("", 0), ("_lo", 0), ("_hi", 1))}
_OTHER_SPECIALS = re.compile(
    r"%(gridid|is_explicit_cluster|aggr_smem_size|current_graph_exec|(envreg|reserved_smem_offset_|pm)\w+)", re.ASCII
)
_WIDE_CLOCKS = {"%clock64", "%globaltimer"}


@dataclass(slots=True)
class Record:
    """One instruction of the machine before rows are shared; `roles` says what each of its `entries` is."""

    operation: str
    type: str = "none"
    type2: str = "none"
    attr: tuple[int, ...] = ()
    imm: int = 0
    entries: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    guard: int = -1
    guard_negated: bool = False
    statement: int = -1
    targets: tuple[int, ...] = ()


class Builder:
    """The records of one entry.

    Parameters
    ----------
    places : mapping
        The offset of each variable in its space.

    Notes
    -----
    A register of 64 bits has two rows and each of them is a number of its own; a constant is ``~index``.
    """

    def __init__(self, places: Mapping[Variable, int]) -> None:
        self.places = places
        self.records: list[Record] = []
        self.after: list[Record] = []
        self.current = Record("")
        self.scope = Scope()
        self.rows = 0
        self.predicates = 1  # predicate 0 is always true
        self.constants: dict[int, int] = {}
        self.specials: dict[str, int] = {}
        self.register_rows: dict[Register, tuple[int, ...]] = {}
        self.register_predicates: dict[Register, int] = {}
        self.zero = self.constant(0)

    # --- records ---

    def begin(self, scope: Scope, template: Record) -> None:
        """Start the records of a statement; they get the guard and the statement of the template."""
        self.scope, self.template = scope, template
        self.current = Record("")

    def emit(
        self,
        operation: str,
        type: str = "none",
        type2: str = "none",
        attr: tuple[int, ...] = (),
        imm: int = 0,
        targets: tuple[int, ...] = (),
    ) -> None:
        """Finish the current record with the entries written so far, and what was to follow it."""
        record = self.current
        record.operation, record.type, record.type2 = operation, type, type2
        record.attr, record.imm, record.targets = attr, imm, targets
        self._append(record)
        self.current = Record("")
        for late in self.after:
            self._append(late)
        self.after.clear()

    def _append(self, record: Record) -> None:
        template = self.template
        record.guard, record.guard_negated = template.guard, template.guard_negated
        record.statement = template.statement
        self.records.append(record)

    def before(self, operation: str, type: str, defined: list[int], used: list[int], imm: int = 0) -> None:
        """Write a record that must come before the current one."""
        self._append(self._helper(operation, type, defined, used, imm))

    def later(self, operation: str, type: str, defined: list[int], used: list[int]) -> None:
        """Write a record that follows the current one."""
        self.after.append(self._helper(operation, type, defined, used, 0))

    @staticmethod
    def _helper(operation: str, type: str, defined: list[int], used: list[int], imm: int) -> Record:
        roles = [DEFINED] * len(defined) + [USED if entry >= 0 else CONSTANT for entry in used]
        return Record(operation, type, imm=imm, entries=defined + used, roles=roles)

    def put(self, entry: int, role: int = NUMBER) -> None:
        """Append one entry to the current record."""
        self.current.entries.append(entry)
        self.current.roles.append(role)

    def absent(self, count: int = 1) -> None:
        """Append absent entries."""
        for _ in range(count):
            self.put(ABSENT)

    def read(self, row: int) -> None:
        """Append a row, or a constant, that is read."""
        self.put(row, USED if row >= 0 else CONSTANT)

    # --- rows ---

    def temporary(self, count: int = 1) -> list[int]:
        """Return new rows."""
        self.rows += count
        return list(range(self.rows - count, self.rows))

    def constant(self, value: int) -> int:
        """Return the entry of a constant row of 32 bits."""
        return ~self.constants.setdefault(value & 0xFFFFFFFF, len(self.constants))

    def special(self, name: str) -> int:
        """Return the row of a special register."""
        if name not in self.specials:
            (self.specials[name],) = self.temporary()
        return self.specials[name]

    def rows_of(self, register: Register) -> tuple[int, ...]:
        """Return the rows of a register, low ones first."""
        rows = self.register_rows.get(register)
        if rows is None:
            if register.type == "pred":
                raise PtxError(f"{register.name} is a predicate")
            rows = self.register_rows[register] = tuple(self.temporary(ROWS[register.type]))
        return rows

    # --- operands ---

    def find(self, name: str) -> Register | Variable | None:
        """Return what a name means; None is a special register or the constant WARP_SZ."""
        found = self.scope.find(name)
        if found is None and name[0] != "%" and name != "WARP_SZ":
            raise PtxError(f"{name} is not declared" if name != "_" else "an operand that must not be _")
        return found

    def register(self, operand: Operand, type: str, wider: bool = False) -> tuple[int, ...]:
        """Return all rows of a register operand, and check its size."""
        if not isinstance(operand, Name) or operand.offset or operand.negated:
            raise PtxError(f"expected a register of type {type}")
        found = self.find(operand.name)
        if not isinstance(found, Register):
            raise PtxError(f"{operand.name} is not a declared register")
        rows = self.rows_of(found)
        self.check_size(found, type, wider)
        return rows

    @staticmethod
    def check_size(register: Register, type: str, wider: bool) -> None:
        """Refuse a register of another size than the operand's type."""
        if register.type == "pred" or not (register.bits == BITS[type] or (wider and register.bits > BITS[type])):
            raise PtxError(f"the register {register.name} is .{register.type}, the operand has the type .{type}")

    def values(self, operand: Operand, type: str, wider: bool = False) -> list[int]:
        """Return the rows and constants of an operand that is read, as many as its type has."""
        count = ROWS[type]
        if isinstance(operand, Name):
            if operand.negated:
                raise PtxError(f"!{operand.name} is no predicate here")
            found = self.find(operand.name)
            if isinstance(found, Register):
                return list(self.register(operand, type, wider)[:count])
            if isinstance(found, Variable):
                return self._symbol(found, operand.offset, type)
            if operand.offset:
                raise PtxError(f"{operand.name} cannot have an offset")
            return self._predefined(operand.name, type)
        if isinstance(operand, Integer | Real):
            value = self.immediate(operand, type)
            return [self.constant(value >> 32 * index) for index in range(count)]
        raise PtxError(f"expected a register or a number of type {type}")

    def use(self, operand: Operand, type: str, wider: bool = False) -> None:
        """Append an operand that is read."""
        for row in self.values(operand, type, wider):
            self.read(row)

    def define(
        self, operand: Operand, type: str, wider: bool = False, sink: bool = False, signed: bool = False
    ) -> None:
        """Append a register that is written; with `sink` it may be ``_``. A wider one is filled up afterwards."""
        if isinstance(operand, Name) and operand.name == "_":
            if not sink:
                raise PtxError("the destination must not be _")
            for row in self.temporary(ROWS[type]):
                self.put(row, DEFINED)
            return
        rows = self.register(operand, type, wider)
        count = ROWS[type]
        for row in rows[:count]:
            self.put(row, DEFINED)
        if len(rows) > count:
            if len(rows) != 2:
                raise UnsupportedInstruction("a value that is widened to 128 bits")
            high, low = [rows[1]], [rows[0]]
            if signed:
                self.later("shr", "s32", high, [*low, self.constant(31)])
            else:
                self.later("mov", "b32", high, [self.zero])

    def immediate(self, operand: Integer | Real, type: str) -> int:
        """Return the bits of a number in an operand's type."""
        bits = BITS[type]
        if isinstance(operand, Real):
            if type == "f64" or (type == "b64" and not operand.single):
                return operand.double_bits()
            if type == "f32" or (type == "b32" and operand.single):
                return operand.single_bits()
            raise PtxError(f"a floating-point number for an operand of type .{type}")
        if type in _FLOATS:
            raise PtxError(f"the integer {operand.value} for an operand of type .{type}")
        return operand.value & ((1 << bits) - 1)

    def _symbol(self, variable: Variable, offset: int, type: str) -> list[int]:
        """Return the rows of a variable's address."""
        if BITS[type] < 32 or (BITS[type] == 32 and variable.space in ("global", "const")):
            raise PtxError(f"the address of {variable.name} does not fit an operand of type .{type}")
        place = self.place(variable) + offset
        if variable.space == "shared":
            low = self.special("shared_base")
            if place:
                (row,) = self.temporary()
                self.before("add", "u32", [row], [low, self.constant(place)])
                low = row
            return [low] + [self.zero] * (ROWS[type] - 1)
        return [self.constant(place >> 32 * index) for index in range(ROWS[type])]

    def place(self, variable: Variable) -> int:
        """Return a variable's offset, or its address in .global and .const."""
        if variable not in self.places:
            if variable.space == "param":
                raise UnsupportedInstruction(f"{variable.name} is a parameter of a call, and calls are not supported")
            raise UnsupportedInstruction(f"{variable.name} has no definition in this module")
        return self.places[variable]

    def _predefined(self, name: str, type: str) -> list[int]:
        """Return the rows of a special register or of WARP_SZ."""
        if name == "WARP_SZ":
            return [self.constant(32)] + [self.zero] * (ROWS[type] - 1)
        if name in _CLOCKS:
            special, part = _CLOCKS[name]
            rows = self.temporary(1 if special == "clock" else 2)
            self.before("special", "none", rows, [], SPECIALS[special])
            rows = rows if name in _WIDE_CLOCKS else [rows[part]]
        elif (special := name[1:].replace(".", "_")) in SPECIALS:
            rows = [self.special(special)]
            if BITS[type] == 16:
                low = self.temporary()
                self.before("and_", "b32", low, [*rows, self.constant(0xFFFF)])
                return low
        else:
            if _OTHER_SPECIALS.fullmatch(name):
                raise UnsupportedInstruction(f"the special register {name}")
            raise PtxError(f"{name} is neither a declared register nor a special register")
        if BITS[type] != 32 * len(rows):
            raise PtxError(f"{name} has {32 * len(rows)} bits, the operand has the type .{type}")
        return rows

    # --- predicates ---

    def predicate(self, operand: Operand, negatable: bool = True) -> int:
        """Return a predicate that is read, with its negation."""
        if isinstance(operand, Integer):
            return 0 if operand.value else NEGATED
        if not isinstance(operand, Name) or operand.offset or (operand.negated and not negatable):
            raise PtxError("expected a predicate")
        found = self.find(operand.name)
        if not isinstance(found, Register) or found.type != "pred":
            raise PtxError(f"{operand.name} is not a declared predicate")
        number = self.register_predicates.get(found)
        if number is None:
            number = self.register_predicates[found] = self.predicates
            self.predicates += 1
        return number | (NEGATED if operand.negated else 0)

    def use_predicate(self, operand: Operand) -> None:
        """Append a predicate that is read."""
        self.put(self.predicate(operand), PREDICATE | USED)

    def define_predicate(self, operand: Operand, sink: bool = False) -> None:
        """Append a predicate that is written; with `sink` it may be ``_``, and is absent then."""
        if sink and isinstance(operand, Name) and operand.name == "_":
            self.absent()
        elif isinstance(operand, Integer):
            raise PtxError("expected a predicate")
        else:
            self.put(self.predicate(operand, negatable=False), PREDICATE | DEFINED)

    # --- addresses, vectors, numbers ---

    def address(self, operand: Operand) -> None:
        """Append an address: low row, high row, byte offset."""
        if not isinstance(operand, Address) or operand.coordinates is not None:
            raise PtxError("expected an address in brackets")
        self.base(operand.base)

    def base(self, base: Name | Integer) -> None:
        """Append what stands in the brackets of an address."""
        if isinstance(base, Integer):
            self.read(self.constant(base.value))
            self.read(self.constant(base.value >> 32))
            self.put(0)
            return
        found = self.find(base.name)
        if base.negated or found is None:
            raise PtxError(f"{base.name} is no address")
        if isinstance(found, Register):
            rows = self.rows_of(found)
            self.check_size(found, "b64" if len(rows) == 2 else "b32", False)
            self.read(rows[0])
            self.read(rows[1] if len(rows) == 2 else self.zero)
            self.put(self.number(base.offset, -(1 << 31), (1 << 31) - 1, "the offset"))
            return
        place = self.place(found)
        low = self.special("shared_base") if found.space == "shared" else self.constant(place)
        high = self.zero if found.space == "shared" else self.constant(place >> 32)
        offset = base.offset + (place if found.space == "shared" else 0)
        self.read(low)
        self.read(high)
        self.put(self.number(offset, -(1 << 31), (1 << 31) - 1, "the offset"))

    @staticmethod
    def number(value: int, low: int, high: int, what: str = "the number") -> int:
        """Return a number that is in its range."""
        if not low <= value <= high:
            raise PtxError(f"{what} is {value}, it must be {low} to {high}")
        return value

    def literal(self, operand: Operand, low: int, high: int, what: str = "the number") -> int:
        """Return the value of an operand that must be an integer as it is written."""
        if not isinstance(operand, Integer):
            raise PtxError(f"{what} must be a number as it stands")
        return self.number(operand.value, low, high, what)

    @staticmethod
    def items(operand: Operand, count: int) -> tuple[Operand, ...]:
        """Return the parts of a vector; one part may stand without braces."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        if len(items) != count or (count > 1 and not isinstance(operand, Vector)):
            raise PtxError(f"expected {count} registers in braces, got {len(items)}")
        return items
