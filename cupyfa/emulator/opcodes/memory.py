"""Loads, stores, atomics, matrices and addresses."""

from __future__ import annotations

from cupyfa.emulator.isa import BITS, ORDERS, REDUCTIONS, SCOPES, SPACES
from cupyfa.emulator.opcodes.forms import (
    ADDRESS,
    POLICY,
    Absent,
    Define,
    Defines,
    DefPredicate,
    Form,
    Role,
    Use,
    Uses,
    family,
)
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.syntax import UnsupportedInstruction

_MEMORY = "b8 u8 s8 b16 u16 s16 f16 bf16 b32 u32 s32 f32 f16x2 bf16x2 b64 u64 s64 f64 b128"
_ATOMIC = {
    "add": "u32 s32 u64 s64 f32 f64 f16 f16x2 bf16 bf16x2",
    "min": "u32 s32 u64 s64 f16 f16x2 bf16 bf16x2",
    "max": "u32 s32 u64 s64 f16 f16x2 bf16 bf16x2",
    "inc": "u32",
    "dec": "u32",
    "and": "b32 b64",
    "or": "b32 b64",
    "xor": "b32 b64",
    "exch": "b32 b64 b128",
    "cas": "b16 b32 b64 b128",
}


def reduction_number(name: str) -> int:
    """Return the number of a reduction.

    Parameters
    ----------
    name : str
        As PTX writes it.
    """
    return REDUCTIONS[name if name in REDUCTIONS else name + "_"]


def policy(spelling: Spelling) -> tuple[Role, ...]:
    """Take off the cache hints; return the role of the operand that they bring."""
    has_policy = "L2::cache_hint" in spelling.rest
    spelling.cache_hints()
    return (POLICY,) if has_policy else ()


def _access(spelling: Spelling, orders: str) -> tuple[str, tuple[int, ...], int, tuple[Role, ...]]:
    """Take off what loads and stores share: type, attributes, elements, cache policy."""
    spelling.flag("mmio")
    order = spelling.order(f"weak relaxed volatile {orders}", "weak")
    scope = spelling.scope()
    needs_scope = order not in (ORDERS["weak"], ORDERS["volatile_"])
    if needs_scope != (scope != SCOPES["none"]):
        raise UnsupportedInstruction(f"{spelling.text}: a scope and a memory order stand together")
    space = spelling.space()
    extra = policy(spelling)
    elements = spelling.vector()
    kind = spelling.type(_MEMORY)
    if elements * BITS[kind] > 256 or (elements == 8 and BITS[kind] != 32):
        raise UnsupportedInstruction(f"{spelling.text}: {elements} elements of .{kind}")
    return kind, (space, elements, order, scope), elements, extra


@family("ld", "ldu")
def ld(spelling: Spelling) -> Form:
    """``ld``: the sign counts only where the register is wider than the element."""
    kind, attr, elements, extra = _access(spelling, "acquire")
    signed = kind in ("s8", "s16", "s32")
    stored = kind if kind in ("s8", "s16") else f"b{BITS[kind]}"
    wider = kind in ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32")
    role = Define(kind, wider=wider, signed=signed, sink=elements > 1)
    return Form("ld", (Defines(elements, role), ADDRESS, *extra), stored, attr=attr)


@family("st")
def st(spelling: Spelling) -> Form:
    """``st``."""
    kind, attr, elements, extra = _access(spelling, "release")
    if attr[0] == SPACES["constant"]:
        raise UnsupportedInstruction(f"{spelling.text}: a store to .const")
    role = Use(kind, wider=BITS[kind] < 64)
    return Form("st", (ADDRESS, Uses(elements, role), *extra), f"b{BITS[kind]}", attr=attr)


def _atomic(spelling: Spelling) -> tuple[str, str, tuple[int, ...], int, tuple[Role, ...]]:
    """Take off what ``atom`` and ``red`` share."""
    order = spelling.order("relaxed acquire release acq_rel", "relaxed")
    scope = spelling.scope("gpu")
    space = spelling.space()
    if space not in (SPACES["generic"], SPACES["global"], SPACES["shared"]):
        raise UnsupportedInstruction(f"{spelling.text}: an atomic in that space")
    extra = policy(spelling)
    operation = spelling.one_of(_ATOMIC)
    spelling.flag("noftz")
    elements = spelling.vector()
    kind = spelling.type(_ATOMIC[operation])
    return operation, kind, (space, reduction_number(operation), order, scope), elements, extra


@family("atom")
def atom(spelling: Spelling) -> Form:
    """``atom``."""
    operation, kind, attr, elements, extra = _atomic(spelling)
    if elements > 1:
        raise UnsupportedInstruction(f"{spelling.text}: a vector")
    third = Use(kind) if operation == "cas" else Absent(max(1, BITS[kind] // 32))
    return Form("atom", (Define(kind, sink=True), ADDRESS, Use(kind), third, *extra), kind, attr=attr)


@family("red")
def red(spelling: Spelling) -> Form:
    """``red``."""
    operation, kind, attr, elements, extra = _atomic(spelling)
    if operation in ("exch", "cas"):
        raise UnsupportedInstruction(f"{spelling.text} is not an instruction")
    return Form("red", (ADDRESS, Uses(elements, Use(kind)), *extra), kind, attr=(*attr, elements))


@family("cvta")
def cvta(spelling: Spelling) -> Form:
    """``cvta``."""
    to = spelling.flag("to")
    space = spelling.space()
    kind = spelling.type("u32 u64")
    if space == SPACES["generic"]:
        raise UnsupportedInstruction(f"{spelling.text} without a space")
    return Form("cvta", (Define(kind), Use(kind)), kind.replace("u", "b"), attr=(space, int(to)))


@family("isspacep")
def isspacep(spelling: Spelling) -> Form:
    """``isspacep``."""
    own = "shared" in spelling.rest or "shared::cta" in spelling.rest
    space = spelling.space()
    if space == SPACES["generic"]:
        raise UnsupportedInstruction(f"{spelling.text} without a space")
    return Form("isspacep", (DefPredicate(), Use("b64")), attr=(space, int(own)))


@family("mapa")
def mapa(spelling: Spelling) -> Form:
    """``mapa``."""
    shared = spelling.flag("shared::cluster")
    kind = spelling.type("u32 u64")
    if kind == "u32" and not shared:
        raise UnsupportedInstruction(f"{spelling.text}: a generic address has 64 bits")
    attr = (int(not shared),)
    return Form("mapa", (Define(kind), Use(kind), Use("u32")), kind.replace("u", "b"), attr=attr)


@family("getctarank")
def getctarank(spelling: Spelling) -> Form:
    """``getctarank``."""
    shared = spelling.flag("shared::cluster")
    kind = spelling.type("u32 u64")
    if kind == "u32" and not shared:
        raise UnsupportedInstruction(f"{spelling.text}: a generic address has 64 bits")
    return Form("getctarank", (Define("u32"), Use(kind)), kind.replace("u", "b"), attr=(int(not shared),))


@family("prefetch", "prefetchu")
def prefetch(spelling: Spelling) -> Form:
    """``prefetch``: of a tensor map, or of memory, which changes nothing."""
    if spelling.flag("tensormap"):
        spelling.one_of(("const", "param"), "generic")
        return Form("prefetch_map", (ADDRESS,))
    spelling.one_of(("global", "local"), "generic")
    spelling.one_of(("L1", "L2", "L2::evict_last", "L2::evict_normal"))
    return hint(ADDRESS)


def hint(*roles: Role) -> Form:
    """Return a form whose operands are checked and that does nothing.

    Parameters
    ----------
    *roles : Role
        Of the operands.
    """
    return Form("nop", roles)


@family("ldmatrix")
def ldmatrix(spelling: Spelling) -> Form:
    """``ldmatrix`` of 8x8 elements of 16 bits."""
    count, attr = _matrices(spelling)
    return Form("ldmatrix", (Defines(count, Define("b32")), ADDRESS), "b16", attr=attr)


@family("stmatrix")
def stmatrix(spelling: Spelling) -> Form:
    """``stmatrix`` of 8x8 elements of 16 bits."""
    count, attr = _matrices(spelling)
    return Form("stmatrix", (ADDRESS, Uses(count, Use("b32"))), "b16", attr=attr)


def _matrices(spelling: Spelling) -> tuple[int, tuple[int, int]]:
    spelling.require("sync", "aligned", "m8n8")
    count = int(spelling.one_of(("x1", "x2", "x4"))[1:])
    trans = spelling.flag("trans")
    spelling.space()
    spelling.type("b16")
    return count, (count, int(trans))


@family("movmatrix")
def movmatrix(spelling: Spelling) -> Form:
    """``movmatrix``."""
    spelling.require("sync", "aligned", "m8n8", "trans")
    spelling.type("b16")
    return Form("movmatrix", (Define("b32"), Use("b32")), "b16")
