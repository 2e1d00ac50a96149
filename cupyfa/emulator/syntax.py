"""The operands of PTX as they are written, and the errors of everything that reads PTX."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

__all__ = [
    "Address",
    "Integer",
    "Name",
    "Operand",
    "Pair",
    "Parentheses",
    "PtxError",
    "Real",
    "UnsupportedInstruction",
    "Vector",
    "parse_integer",
    "parse_operand",
    "parse_operands",
]


class PtxError(ValueError):
    """The PTX is malformed.

    Parameters
    ----------
    problem : str
        What is wrong.
    line : int or None
        Where, counted from 1. The decoder fills it in for what it raises while it reads a statement.
    text : str
        The statement.
    """

    def __init__(self, problem: str, line: int | None = None, text: str = "") -> None:
        self.problem, self.line, self.text = problem, line, text
        where = f"PTX line {line}: " if line is not None else ""
        super().__init__(where + problem + (f" in {text!r}" if text else ""))

    def at(self, line: int, text: str) -> PtxError:
        """Return the same error with its place, unless it has one."""
        return self if self.line is not None else type(self)(self.problem, line, text)


class UnsupportedInstruction(PtxError):
    """The PTX may be right, but the emulator does not know the instruction or this form of it."""


@dataclass(frozen=True, slots=True)
class Name:
    """A register, variable, label or special register, with a byte offset or a negation; ``_`` is the sink."""

    name: str
    offset: int = 0
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer as it is written."""

    value: int


@dataclass(frozen=True, slots=True)
class Real:
    """A floating-point literal: the bits of an f32 (``0f``) or of an f64 (``0d`` and decimals)."""

    bits: int
    single: bool

    def single_bits(self) -> int:
        """Return it as f32."""
        if self.single:
            return self.bits
        try:
            return int.from_bytes(struct.pack("<f", self._value()), "little")
        except OverflowError:
            return 0xFF800000 if self.bits >> 63 else 0x7F800000

    def double_bits(self) -> int:
        """Return it as f64."""
        return int.from_bytes(struct.pack("<d", self._value()), "little") if self.single else self.bits

    def _value(self) -> float:
        form, size = ("<f", 4) if self.single else ("<d", 8)
        value: float = struct.unpack(form, self.bits.to_bytes(size, "little"))[0]
        return value


@dataclass(frozen=True, slots=True)
class Address:
    """``[base]`` or ``[base, {coordinates}]``."""

    base: Name | Integer
    coordinates: tuple[Operand, ...] | None = None


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``a|b``."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Parentheses:
    """``(a, b, ...)`` of a call."""

    items: tuple[Operand, ...]


Operand: TypeAlias = Name | Integer | Real | Address | Vector | Pair | Parentheses

_INTEGER = r"(?:0[xX][0-9a-fA-F]+|0[bB][01]+|[0-9]+)U?"
_NAME = r"(?:[A-Za-z_]|[%$](?=[\w$]))[\w$]*(?:\.\w+)?"
_READ_NAME = re.compile(rf"(!?)\s*({_NAME})(?:\s*([+-])\s*(-?\s*{_INTEGER}))?", re.ASCII)
_READ_INTEGER = re.compile(rf"-?\s*{_INTEGER}", re.ASCII)
_READ_BITS = re.compile(r"0(?:[fF]([0-9a-fA-F]{8})|[dD]([0-9a-fA-F]{16}))", re.ASCII)
_READ_DECIMAL = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?", re.ASCII)
_READ_CHARACTER = re.compile(r"'([ -~])'")
# An operand ends at a comma that no bracket encloses; an address may enclose coordinates.
_SPLIT = re.compile(r"((?:\{[^{}]*\}|\[[^\[\]]*\]|\([^()]*\)|[^,{}\[\]()])+)(,|\Z)")


def parse_integer(text: str) -> int | None:
    """Return the value of an integer literal, or None.

    Parameters
    ----------
    text : str
        Decimal, ``0x``, ``0b`` or octal, with a minus or a ``U`` if need be.
    """
    if not _READ_INTEGER.fullmatch(text):
        return None
    digits = text.replace(" ", "").removesuffix("U")
    negative, digits = digits.startswith("-"), digits.removeprefix("-").strip()
    prefix = digits[:2].lower()
    base = 16 if prefix == "0x" else 2 if prefix == "0b" else 8 if digits[0] == "0" and len(digits) > 1 else 10
    try:
        value = int(digits, base)
    except ValueError:
        return None
    if value >> 64:
        raise PtxError(f"{text} does not fit 64 bits")
    return -value if negative else value


@lru_cache(maxsize=1 << 16)
def parse_operand(text: str) -> Operand:
    """Return one operand.

    Parameters
    ----------
    text : str
        The operand without surrounding space.
    """
    found = _READ_NAME.fullmatch(text)
    if found:
        negated, name, sign, offset = found.groups()
        if offset is None:
            return Name(name, 0, bool(negated))
        value = parse_integer(offset)
        if value is not None and not negated:
            return Name(name, -value if sign == "-" else value)
    elif text[:1] == "[" and text[-1:] == "]":
        return _parse_address(text[1:-1].strip())
    elif text[:1] == "{" and text[-1:] == "}":
        return Vector(parse_operands(text[1:-1]))
    elif text[:1] == "(" and text[-1:] == ")":
        return Parentheses(parse_operands(text[1:-1]))
    elif text.count("|") == 1:
        first, second = text.split("|", 1)
        return Pair(parse_operand(first.strip()), parse_operand(second.strip()))
    else:
        literal = _parse_literal(text)
        if literal is not None:
            return literal
    raise PtxError(f"cannot read the operand {text!r}" if text else "an operand is missing")


def _parse_literal(text: str) -> Operand | None:
    """Return a number, or None."""
    value = parse_integer(text)
    if value is not None:
        return Integer(value)
    if found := _READ_BITS.fullmatch(text):
        return Real(int(found[1], 16), True) if found[1] else Real(int(found[2], 16), False)
    if _READ_DECIMAL.fullmatch(text):
        return Real(int.from_bytes(struct.pack("<d", float(text)), "little"), False)
    if found := _READ_CHARACTER.fullmatch(text):
        return Integer(ord(found[1]))
    return None


def _parse_address(inside: str) -> Operand:
    """Return what stands between the brackets of an address."""
    parts = parse_operands(inside)
    base = parts[0] if parts else None
    if not isinstance(base, Name | Integer) or len(parts) > 2:
        raise PtxError(f"cannot read the address [{inside}]")
    if len(parts) == 1:
        return Address(base)
    second = parts[1]
    return Address(base, second.items if isinstance(second, Vector) else (second,))


def parse_operands(text: str) -> tuple[Operand, ...]:
    """Return the operands of a list with commas.

    Parameters
    ----------
    text : str
        What follows the opcode, or stands in braces.
    """
    text = text.strip()
    if not text:
        return ()
    if "{" not in text and "[" not in text and "(" not in text:
        return tuple([parse_operand(part.strip()) for part in text.split(",")])
    operands, position, comma = [], 0, ","
    while comma:
        found = _SPLIT.match(text, position)
        if not found:
            raise PtxError(f"cannot read the operands {text!r}")
        operands.append(parse_operand(found[1].strip()))
        position, comma = found.end(), found[2]
    return tuple(operands)
