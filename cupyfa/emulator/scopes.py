"""What PTX declares: variables and registers, in scopes that braces open and close."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cupyfa.emulator.isa import BITS
from cupyfa.emulator.syntax import PtxError, parse_integer

__all__ = ["Register", "Scope", "Variable", "declare_registers", "parse_variable"]

_SPLIT_PREFIX = re.compile(r"(.*?)(0|[1-9]\d*)", re.ASCII)
_REGISTERS = re.compile(r"([%$A-Za-z_][\w$]*)(?:\s*<\s*(\d+)\s*>)?", re.ASCII)
_VARIABLE = re.compile(
    r"""(?P<extern>(?:\.(?:extern|visible|weak|common)\s+)*)
    \.(?P<space>global|const|shared|local|param)(?:::\w+)?\s*
    (?P<qualifiers>(?:\.(?:[\w:]+)(?:\s+\d+)?(?:\s*\([^()]*\))?\s*)*)
    (?P<name>[%$A-Za-z_][\w$]*)\s*
    (?P<dimensions>(?:\[\s*\w*\s*\]\s*)*)
    (?:=\s*(?P<initial>.*))?""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_QUALIFIER = re.compile(r"\.([\w:]+)(?:\s+(\d+))?(?:\s*\([^()]*\))?", re.ASCII)
_LARGEST = 1 << 40


@dataclass(eq=False, slots=True)
class Register:
    """One declared register."""

    name: str
    type: str

    @property
    def bits(self) -> int:
        """Its size."""
        return BITS[self.type]


@dataclass(eq=False, slots=True)
class Variable:
    """A variable in memory, or a parameter; `size` is 0 for an array without a size."""

    space: str
    name: str
    type: str
    align: int
    size: int
    external: bool = False
    initial: str | None = None
    line: int = 0


@dataclass(eq=False, slots=True)
class Scope:
    """Declarations between two braces."""

    parent: Scope | None = None
    registers: dict[str, Register] = field(default_factory=dict)
    ranges: dict[str, tuple[int, str]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def find(self, name: str) -> Register | Variable | None:
        """Return what a name means here."""
        scope: Scope | None = self
        while scope is not None:
            found = scope.registers.get(name) or scope._from_range(name) or scope.variables.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None

    def find_label(self, name: str) -> int | None:
        """Return the index of the statement that a label stands before."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None

    def find_table(self, name: str) -> tuple[str, ...] | None:
        """Return the labels of a ``.branchtargets`` list."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.tables:
                return scope.tables[name]
            scope = scope.parent
        return None

    def _from_range(self, name: str) -> Register | None:
        """Return a register of a declaration like ``%r<8>``: a thousand of them cost nothing until they are used."""
        if not self.ranges or not (split := _SPLIT_PREFIX.fullmatch(name)):
            return None
        count, kind = self.ranges.get(split[1], (0, ""))
        if int(split[2]) >= count:
            return None
        return self.registers.setdefault(name, Register(name, kind))


def declare_registers(scope: Scope, text: str) -> None:
    """Enter a ``.reg`` declaration into a scope.

    Parameters
    ----------
    scope : Scope
        Where it stands.
    text : str
        What follows ``.reg``.
    """
    kind, _, names = text.strip().partition(" ")
    kind = kind.removeprefix(".")
    if kind not in BITS:
        raise PtxError(f"registers of an unknown type .{kind}")
    for item in names.split(","):
        found = _REGISTERS.fullmatch(item.strip())
        if not found:
            raise PtxError(f"cannot read the register declaration {item.strip()!r}")
        name, count = found.groups()
        if name in (scope.registers if count is None else scope.ranges):  # %h and %h<2> (%h0, %h1) do not meet
            raise PtxError(f"{name} is declared twice")
        if count is None:
            scope.registers[name] = Register(name, kind)
        else:
            scope.ranges[name] = (int(count), kind)


def parse_variable(text: str, line: int) -> Variable:
    """Return a declared variable or parameter.

    Parameters
    ----------
    text : str
        The declaration without its semicolon.
    line : int
        Where it stands.
    """
    found = _VARIABLE.fullmatch(text.strip())
    if not found:
        raise PtxError("cannot read the declaration", line, " ".join(text.split()))
    kind, align, elements = None, 0, 1
    for word, number in _QUALIFIER.findall(found["qualifiers"]):
        if word in BITS and word != "pred":
            kind = word
        elif word == "align" and number:
            align = int(number)
        elif word in ("v2", "v4", "v8"):
            elements = int(word[1:])
    if kind is None:
        raise PtxError("a declaration without a known type", line, " ".join(text.split()))
    unit = BITS[kind] // 8 * elements
    size = unit
    for dimension in re.findall(r"\[\s*(\w*)\s*\]", found["dimensions"]):
        count = parse_integer(dimension) if dimension else 0
        if count is None or not 0 <= count <= _LARGEST:
            raise PtxError(f"cannot read the dimension [{dimension}]", line, " ".join(text.split()))
        size = min(size * count, _LARGEST)
    align = align or unit
    if align & (align - 1) or align > 1 << 20:
        raise PtxError(f"an alignment of {align} bytes", line, " ".join(text.split()))
    external = ".extern" in found["extern"]
    return Variable(found["space"], found["name"], kind, align, size, external, found["initial"], line)
