"""Names and numbers of the machine's instruction set: the only place of Python that knows them.

They are written once, in ``core/isa.hpp``, and compiled into the machine. A name that is a keyword of C++ has a
trailing underscore.
"""

from __future__ import annotations

from cupyfa.emulator._core import LISTS

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


OPERATIONS = LISTS["OPERATIONS"]
TYPES = LISTS["TYPES"]
SPACES = LISTS["SPACES"]
ROUNDINGS = LISTS["ROUNDINGS"]
FLAGS = LISTS["FLAGS"]
COMPARISONS = LISTS["COMPARISONS"]
BOOLEANS = LISTS["BOOLEANS"]
ORDERS = LISTS["ORDERS"]
SCOPES = LISTS["SCOPES"]
REDUCTIONS = LISTS["REDUCTIONS"]
SPECIALS = LISTS["SPECIALS"]

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
