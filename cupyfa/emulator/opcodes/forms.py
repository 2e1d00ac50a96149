"""How a spelling is decoded: an operation, its attributes, and the role of each operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cupyfa.emulator.builder import Builder
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.syntax import Address, Name, Operand, Pair, PtxError

__all__ = [
    "ADDRESS",
    "POLICY",
    "Absent",
    "DefPredicate",
    "Define",
    "Defines",
    "Expand",
    "Family",
    "Fixed",
    "Form",
    "MapAddress",
    "Maybe",
    "OrPredicate",
    "Role",
    "Tensor",
    "Use",
    "UsePredicate",
    "Uses",
    "family",
    "look_up",
]


class Role(Protocol):
    """What one operand is; it writes the operand's entries into the builder's record."""

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entries."""


@dataclass(frozen=True, slots=True)
class Use:
    """A register or number that is read; `wider` registers are read in their low part."""

    type: str
    wider: bool = False

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entries."""
        builder.use(operand, self.type, self.wider)


@dataclass(frozen=True, slots=True)
class Define:
    """A register that is written; `wider` ones are filled up, `signed` with the sign; with `sink` it may be ``_``."""

    type: str
    wider: bool = False
    signed: bool = False
    sink: bool = False

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entries."""
        builder.define(operand, self.type, self.wider, self.sink, self.signed)


@dataclass(frozen=True, slots=True)
class Uses:
    """As many registers in braces, read."""

    count: int
    role: Use

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entries."""
        for item in builder.items(operand, self.count):
            self.role.write(builder, item)


@dataclass(frozen=True, slots=True)
class Defines:
    """As many registers in braces, written."""

    count: int
    role: Define

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entries."""
        for item in builder.items(operand, self.count):
            self.role.write(builder, item)


@dataclass(frozen=True, slots=True)
class UsePredicate:
    """A predicate that is read, perhaps negated."""

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entry."""
        builder.use_predicate(operand)


@dataclass(frozen=True, slots=True)
class DefPredicate:
    """A predicate that is written."""

    sink: bool = False

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entry."""
        builder.define_predicate(operand, self.sink)


@dataclass(frozen=True, slots=True)
class OrPredicate:
    """``d|p``: a destination, with a predicate or without one."""

    first: Define | DefPredicate
    required: bool = False

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entries."""
        if isinstance(operand, Pair):
            first = operand.first
            if self.required and isinstance(first, Name) and first.name == "_":
                builder.absent()
            else:
                self.first.write(builder, first)
            builder.define_predicate(operand.second, sink=not self.required)
        elif self.required:
            raise PtxError("expected two destinations, d|p")
        else:
            self.first.write(builder, operand)
            builder.absent()


@dataclass(frozen=True, slots=True)
class MapAddress:
    """``[map, {coordinates}]``."""

    dimensions: int

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entries."""
        if not isinstance(operand, Address) or operand.coordinates is None:
            raise PtxError("expected an address with coordinates, [map, {c, ...}]")
        if len(operand.coordinates) != self.dimensions:
            raise PtxError(f"expected {self.dimensions} coordinates, got {len(operand.coordinates)}")
        builder.base(operand.base)
        for coordinate in operand.coordinates:
            builder.use(coordinate, "s32")


@dataclass(frozen=True, slots=True)
class _Address:
    """``[base + offset]``."""

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entries."""
        builder.address(operand)


@dataclass(frozen=True, slots=True)
class Tensor:
    """``[address + offset]`` in tensor memory: a row and a number."""

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entries."""
        if not isinstance(operand, Address) or operand.coordinates is not None:
            raise PtxError("expected a tensor memory address in brackets")
        base, offset = operand.base, 0
        if isinstance(base, Name):
            base, offset = Name(base.name, 0, base.negated), base.offset
        builder.use(base, "b32")
        builder.put(builder.number(offset, -(1 << 31), (1 << 31) - 1, "the offset"))


@dataclass(frozen=True, slots=True)
class _Policy:
    """A cache policy, which nothing depends on."""

    def write(self, builder: Builder, operand: Operand) -> None:
        """Check it."""
        builder.values(operand, "b64")


@dataclass(frozen=True, slots=True)
class Maybe:
    """An operand that may be missing at the end of the list."""

    role: Role
    entries: int = 1

    def write(self, builder: Builder, operand: Operand) -> None:
        """Append the entries."""
        self.role.write(builder, operand)


@dataclass(frozen=True, slots=True)
class Absent:
    """Entries of operands that this spelling does not have."""

    entries: int = 1


@dataclass(frozen=True, slots=True)
class Fixed:
    """A number that the layout wants and PTX does not write."""

    value: int


ADDRESS = _Address()
POLICY = _Policy()

Operands: TypeAlias = tuple[Operand, ...]
Expand: TypeAlias = Callable[[Builder, Operands], None]


@dataclass(frozen=True, slots=True)
class Form:
    """A spelling's meaning.

    Attributes
    ----------
    operation : str
        A name of ``isa.OPERATIONS``.
    roles : tuple
        Of the operands in order, with what the layout adds to them.
    type, type2, attr, imm
        As in ``core/isa.hpp``.
    expand : callable, optional
        Writes the records itself, where one operation does not do or the layout has another order.
    number : tuple of int, optional
        The last operand is a number in this range, and becomes `imm`.
    """

    operation: str
    roles: tuple[Role | Maybe | Absent | Fixed, ...] = ()
    type: str = "none"
    type2: str = "none"
    attr: tuple[int, ...] = ()
    imm: int = 0
    expand: Expand | None = None
    number: tuple[int, int] | None = None

    def write(self, builder: Builder, operands: Operands) -> None:
        """Write the records of one statement."""
        if self.expand is not None:
            self.expand(builder, operands)
            return
        imm = self.imm
        if self.number is not None:
            if not operands:
                raise PtxError("the number is missing")
            imm = builder.literal(operands[-1], *self.number)
            operands = operands[:-1]
        self.write_roles(builder, self.roles, operands)
        builder.emit(self.operation, self.type, self.type2, self.attr, imm)

    @staticmethod
    def write_roles(
        builder: Builder, roles: Sequence[Role | Maybe | Absent | Fixed], operands: Sequence[Operand]
    ) -> None:
        """Append the entries of all operands to the current record."""
        index, count = 0, len(operands)
        for role in roles:
            if isinstance(role, Absent):
                builder.absent(role.entries)
            elif isinstance(role, Fixed):
                builder.put(role.value)
            elif index < count:
                role.write(builder, operands[index])
                index += 1
            elif isinstance(role, Maybe):
                builder.absent(role.entries)
            else:
                wanted = sum(not isinstance(other, Absent | Fixed | Maybe) for other in roles)
                raise PtxError(f"expected {wanted} operands, got {count}")
        if index < count:
            raise PtxError(f"expected {index} operands, got {count}")


Family: TypeAlias = Callable[[Spelling], Form]
_FAMILIES: dict[str, Family] = {}


def family(*bases: str) -> Callable[[Family], Family]:
    """Enter a function as the reader of all spellings that begin with these words.

    Parameters
    ----------
    *bases : str
        First words of opcodes.
    """

    def enter(function: Family) -> Family:
        for base in bases:
            if base in _FAMILIES:
                raise ValueError(f"two families read {base}")
            _FAMILIES[base] = function
        return function

    return enter


def look_up(base: str) -> Family | None:
    """Return the reader of spellings that begin with a word.

    Parameters
    ----------
    base : str
        The first word of an opcode.
    """
    return _FAMILIES.get(base)
