"""cp.async, bulk copies, tensor copies and reductions, CLC."""

from __future__ import annotations

from cupyfa.emulator.builder import Builder
from cupyfa.emulator.opcodes.forms import (
    ADDRESS,
    Absent,
    Define,
    Defines,
    DefPredicate,
    Form,
    MapAddress,
    Operands,
    Role,
    Use,
    family,
)
from cupyfa.emulator.opcodes.memory import hint, policy, reduction_number
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.scopes import Register
from cupyfa.emulator.syntax import Name, PtxError, UnsupportedInstruction

_TX = "mbarrier::complete_tx::bytes"
_MASK = Use("u16")
_SIZE = Use("u32")
_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_REDUCED = "u32 s32 u64 s64 b32 b64 f16 bf16 f32 f64"
_GROUPS = (0, (1 << 31) - 1)


@family("cp")
def cp(spelling: Spelling) -> Form:
    """``cp.async`` and ``cp.reduce.async.bulk``."""
    reduces = spelling.flag("reduce")
    spelling.require("async")
    if spelling.flag("bulk"):
        return _bulk(spelling, reduces)
    if reduces:
        raise UnsupportedInstruction(f"{spelling.text} is not an instruction")
    if spelling.flag("commit_group"):
        return Form("cp_async_commit")
    if spelling.flag("wait_all"):
        return Form("cp_async_wait", attr=(1,))
    if spelling.flag("wait_group"):
        return Form("cp_async_wait", attr=(0,), number=_GROUPS)
    if spelling.flag("mbarrier"):
        spelling.require("arrive")
        noinc = spelling.flag("noinc")
        spelling.space()
        spelling.type("b64")
        return Form("cp_async_mbarrier_arrive", (ADDRESS,), attr=(int(noinc),))
    return _small(spelling)


def _small(spelling: Spelling) -> Form:
    """Return ``cp.async`` of 4, 8 or 16 bytes."""
    level = spelling.one_of(("ca", "cg"))
    spelling.one_of(("shared", "shared::cta"))
    spelling.require("global")
    extra = len(policy(spelling))

    def expand(builder: Builder, operands: Operands) -> None:
        if not 3 + extra <= len(operands) <= 4 + extra:
            raise PtxError(f"expected {3 + extra} or {4 + extra} operands, got {len(operands)}")
        if extra:
            builder.values(operands[-1], "b64")
            operands = operands[:-1]
        builder.address(operands[0])
        builder.address(operands[1])
        size = builder.literal(operands[2], 4, 16, "the size")
        if size not in ((16,) if level == "cg" else (4, 8, 16)):
            raise PtxError(f"a copy of {size} bytes")
        fourth = operands[3] if len(operands) > 3 else None
        found = builder.find(fourth.name) if isinstance(fourth, Name) else None
        if fourth is None:
            builder.absent(2)
        elif isinstance(found, Register) and found.type == "pred":
            builder.absent()
            builder.use_predicate(fourth)
        else:
            builder.use(fourth, "u32")
            builder.absent()
        builder.emit("cp_async", imm=size)

    return Form("cp_async", expand=expand)


def _bulk(spelling: Spelling, reduces: bool) -> Form:
    """Return a bulk operation."""
    if spelling.flag("commit_group"):
        return Form("bulk_commit")
    if spelling.flag("wait_group"):
        return Form("bulk_wait", attr=(int(spelling.flag("read")),), number=_GROUPS)
    dimensions = int(spelling.one_of(("1d", "2d", "3d", "4d", "5d"))[0]) if spelling.flag("tensor") else 0
    if spelling.flag("prefetch"):
        spelling.require("L2", "global")
        extra = policy(spelling)
        if dimensions:
            spelling.flag("tile")
            return hint(MapAddress(dimensions), *extra)
        return hint(ADDRESS, _SIZE, *extra)
    if dimensions:
        return _tensor(spelling, dimensions, reduces)
    return _bulk_reduce(spelling) if reduces else _bulk_copy(spelling)


def _direction(spelling: Spelling) -> tuple[str, str]:
    """Take off the spaces of the destination and the source, which stand in this order."""
    spaces = ("global", "shared::cta", "shared::cluster")
    return spelling.one_of(spaces), spelling.one_of(spaces)


def _multicast(spelling: Spelling) -> Role | Absent:
    return _MASK if spelling.flag("multicast::cluster") else Absent()


def _bulk_copy(spelling: Spelling) -> Form:
    direction = _direction(spelling)
    kinds = {
        ("shared::cluster", "global"): 0,
        ("shared::cta", "global"): 0,
        ("shared::cluster", "shared::cta"): 1,
        ("global", "shared::cta"): 2,
    }
    if direction not in kinds:
        raise UnsupportedInstruction(f"{spelling.text}: a copy from {direction[1]} to {direction[0]}")
    kind = kinds[direction]
    if kind == 2:
        spelling.require("bulk_group")
        extra = policy(spelling)
        return Form("bulk_copy", (ADDRESS, ADDRESS, _SIZE, *extra, Absent(4)), attr=(2,))
    spelling.require(_TX)
    extra = policy(spelling)
    mask = _multicast(spelling) if kind == 0 else Absent()
    return Form("bulk_copy", (ADDRESS, ADDRESS, _SIZE, ADDRESS, mask, *extra), attr=(kind,))


def _bulk_reduce(spelling: Spelling) -> Form:
    direction = _direction(spelling)
    kinds = {("shared::cluster", "shared::cta"): 1, ("global", "shared::cta"): 2}
    if direction not in kinds:
        raise UnsupportedInstruction(f"{spelling.text}: a reduction from {direction[1]} to {direction[0]}")
    spelling.require(_TX if kinds[direction] == 1 else "bulk_group")
    extra = policy(spelling)
    operation = spelling.one_of(_REDUCTIONS)
    spelling.flag("noftz")
    kind = spelling.type(_REDUCED)
    barrier: Role | Absent = ADDRESS if kinds[direction] == 1 else Absent(3)
    attr = (kinds[direction], reduction_number(operation))
    return Form("bulk_reduce", (ADDRESS, ADDRESS, _SIZE, barrier, *extra), kind, attr=attr)


def _tensor(spelling: Spelling, dimensions: int, reduces: bool) -> Form:
    target, source = _direction(spelling)
    operation = spelling.one_of(_REDUCTIONS) if reduces else ""
    spelling.flag("tile")
    if source == "global" and target != "global" and not reduces:
        spelling.require(_TX)
        group = spelling.one_of(("cta_group::1", "cta_group::2"), "cta_group::0")
        extra = policy(spelling)
        mask = _multicast(spelling)
        attr = (dimensions, int(group[-1]))
        return Form("tensor_load", (ADDRESS, MapAddress(dimensions), ADDRESS, mask, *extra), attr=attr)
    if (target, source) != ("global", "shared::cta"):
        raise UnsupportedInstruction(f"{spelling.text}: a copy from {source} to {target}")
    spelling.require("bulk_group")
    roles: tuple[Role, ...] = (MapAddress(dimensions), ADDRESS, *policy(spelling))
    if reduces:
        return Form("tensor_reduce", roles, attr=(dimensions, reduction_number(operation)))
    return Form("tensor_store", roles, attr=(dimensions,))


@family("clusterlaunchcontrol")
def clusterlaunchcontrol(spelling: Spelling) -> Form:
    """``clusterlaunchcontrol``."""
    if spelling.flag("try_cancel"):
        spelling.require("async", _TX)
        spelling.space()
        spelling.type("b128")
        everyone = spelling.flag("multicast::cluster::all")
        return Form("clc_try_cancel", (ADDRESS, ADDRESS), attr=(int(everyone),))
    spelling.require("query_cancel")
    if spelling.flag("is_canceled"):
        spelling.types(2, "pred b128")
        return Form("clc_query", (DefPredicate(), Use("b128")), attr=(0,))
    names = ("get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z", "get_first_ctaid")
    query = names.index(spelling.one_of(names)) + 1
    if query == 4:
        spelling.flag("v4")
        target: Role = Defines(4, Define("b32", sink=True))
    else:
        target = Define("b32")
    spelling.types(2, "b32 b128")
    return Form("clc_query", (target, Use("b128")), attr=(query,))
