"""Names and numbers of the machine's instruction set: the only place of Python that knows them.

They are written once, in ``core/isa.hpp``.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

__all__ = [
    "ABSENT",
    "BITS",
    "BOOLEANS",
    "COMPARISONS",
    "FLAGS",
    "MODULE_DATA",
    "NEGATED",
    "OPERATIONS",
    "ORDERS",
    "REDUCTIONS",
    "ROUNDINGS",
    "ROWS",
    "SCOPES",
    "SHARED_FIRST",
    "SPACES",
    "SPECIALS",
    "TYPES",
]


@cache
def _header() -> str:
    """Return ``core/isa.hpp`` without comments, one macro a line."""
    text = (Path(__file__).parent / "core" / "isa.hpp").read_text(encoding="utf-8")
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL).replace("\\\n", " ")


def _numbers(which: str) -> dict[str, int]:
    """Return the names of one list with their numbers."""
    found = re.search(rf"#define CUPYFA_{which}\(X\)([^\n]*)", _header())
    assert found is not None, which
    items = re.findall(r"X\((\w+)(?:, *(\d+))?\)", found[1])
    # A name that is a keyword of C++ has a trailing underscore there.
    return {name: int(number) if number else index for index, (name, number) in enumerate(items)}


OPERATIONS = _numbers("OPERATIONS")
TYPES = _numbers("TYPES")
SPACES = _numbers("SPACES")
ROUNDINGS = _numbers("ROUNDINGS")
FLAGS = _numbers("FLAGS")
COMPARISONS = _numbers("COMPARISONS")
BOOLEANS = _numbers("BOOLEANS")
ORDERS = _numbers("ORDERS")
SCOPES = _numbers("SCOPES")
REDUCTIONS = _numbers("REDUCTIONS")
SPECIALS = _numbers("SPECIALS")

#: An operand that is not there.
ABSENT = -(1 << 31)
#: Set in a predicate operand that is read negated.
NEGATED = 1 << 30
#: Where the module's .global and .const variables begin.
MODULE_DATA = 0x7D00_0000_0000
#: The address of the first byte of shared memory that a kernel declares; alignment is one of addresses.
SHARED_FIRST = 0x400

#: Size of each type.
BITS = {
    "pred": 1,
    **dict.fromkeys(("b8", "u8", "s8", "e4m3", "e5m2"), 8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 64),
    "b128": 128,
}
#: Register rows of each type.
ROWS = {name: max(1, bits // 32) for name, bits in BITS.items()}
