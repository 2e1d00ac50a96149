"""Barriers, mbarriers and fences."""

from __future__ import annotations

from cupyfa.emulator.builder import Builder
from cupyfa.emulator.isa import ORDERS, SCOPES, SPACES
from cupyfa.emulator.opcodes.forms import (
    ADDRESS,
    Absent,
    Define,
    DefPredicate,
    Expand,
    Form,
    Maybe,
    Operands,
    Use,
    UsePredicate,
    family,
)
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.opcodes.warps import bar_warp
from cupyfa.emulator.syntax import Name, PtxError, UnsupportedInstruction

_U32 = Use("u32")


@family("bar", "barrier")
def barrier(spelling: Spelling) -> Form:
    """``bar`` and ``barrier`` of a warp, a CTA or a cluster; a ``bar`` is aligned."""
    if spelling.base == "bar" and spelling.flag("warp"):
        return bar_warp(spelling)
    if spelling.flag("cluster"):
        return _cluster(spelling)
    spelling.flag("cta")
    aligned = int(spelling.flag("aligned") or spelling.base == "bar")
    mode = spelling.one_of(("sync", "arrive", "red"))
    if mode == "sync":
        return Form("bar", (Absent(2), _U32, Maybe(_U32)), attr=(0, aligned))
    if mode == "arrive":
        return Form("bar", (Absent(2), _U32, _U32), attr=(1, aligned))
    reduction = spelling.one_of(("popc", "and", "or"))
    spelling.type("u32" if reduction == "popc" else "pred")
    number = {"popc": 2, "and": 3, "or": 4}[reduction]
    return Form("bar", expand=_reduction(number, aligned))


def _reduction(number: int, aligned: int) -> Expand:
    """Return what writes ``bar.red``: the machine wants the predicate before the barrier."""
    target = Define("u32") if number == 2 else DefPredicate()

    def expand(builder: Builder, operands: Operands) -> None:
        if len(operands) not in (3, 4):
            raise PtxError(f"expected 3 or 4 operands, got {len(operands)}")
        first, *threads, predicate = operands
        roles = (target, UsePredicate(), _U32, Maybe(_U32))
        Form.write_roles(builder, roles, (first, predicate, *threads))
        builder.emit("bar", attr=(number, aligned))

    return expand


def _cluster(spelling: Spelling) -> Form:
    mode = spelling.one_of(("arrive", "wait"))
    order = spelling.one_of(("release", "relaxed") if mode == "arrive" else ("acquire",), "")
    aligned = spelling.flag("aligned")
    return Form("cluster_barrier", attr=(int(mode == "wait"), int(aligned), int(order == "relaxed")))


@family("fence")
def fence(spelling: Spelling) -> Form:
    """``fence``, ``fence.proxy``, ``fence.mbarrier_init``."""
    if spelling.flag("mbarrier_init"):
        spelling.require("release", "cluster")
        return Form("fence_mbarrier_init")
    if spelling.flag("proxy"):
        return _proxy(spelling)
    order = spelling.order("sc acq_rel acquire release", "acq_rel")
    scope = spelling.one_of(("cta", "cluster", "gpu", "sys"))
    return Form("fence", attr=(order, SCOPES[scope]))


def _proxy(spelling: Spelling) -> Form:
    kinds = ("alias", "async", "async.global", "tensormap", "tensormap::generic")
    kind = spelling.one_of(kinds)
    if kind == "alias":
        return Form("fence_proxy_other", attr=(0,))
    if kind == "async":
        space = SPACES[spelling.one_of(("global", "shared::cta", "shared::cluster"), "generic").partition("::")[0]]
        return Form("fence_proxy_async", attr=(space,))
    if kind == "tensormap":
        return Form("fence_proxy_other", attr=(1,))
    order = spelling.one_of(("acquire", "release"))
    spelling.one_of(("cta", "cluster", "gpu", "sys"))
    if order == "release":
        return Form("fence_proxy_other", attr=(1,))
    # The range of an acquire is a tensor map's, and nothing is emulated per map.
    return Form("fence_proxy_other", expand=_tensormap_acquire)


def _tensormap_acquire(builder: Builder, operands: Operands) -> None:
    """Check the operands ``[address], 128`` and write the fence without them."""
    if len(operands) != 2:
        raise PtxError(f"expected 2 operands, got {len(operands)}")
    builder.address(operands[0])
    builder.literal(operands[1], 128, 128, "the size")
    builder.current.entries.clear()
    builder.current.roles.clear()
    builder.emit("fence_proxy_other", attr=(1,))


@family("membar")
def membar(spelling: Spelling) -> Form:
    """``membar``: a sequentially consistent fence under an old name."""
    if spelling.flag("proxy"):
        return _proxy(spelling)
    scope = {"cta": "cta", "gl": "gpu", "sys": "sys"}[spelling.one_of(("cta", "gl", "sys"))]
    return Form("fence", attr=(ORDERS["sc"], SCOPES[scope]))


@family("mbarrier")
def mbarrier(spelling: Spelling) -> Form:
    """``mbarrier``."""
    actions = ("init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait")
    action = spelling.one_of((*actions, "pending_count"))
    # arrive.expect_tx has both words.
    expects = action == "arrive" or action == "arrive_drop"
    if action == "expect_tx" and (arrive := spelling.one_of(("arrive", "arrive_drop"), "")):
        raise UnsupportedInstruction(f"{spelling.text}: .{arrive} after .{action}")
    spelling.type("b64")
    if action == "pending_count":
        return Form("mbarrier_pending", (Define("u32"), Use("b64")))
    if expects:
        return _arrive(spelling, action)
    if action in ("test_wait", "try_wait"):
        return _wait(spelling, action)
    if action in ("expect_tx", "complete_tx"):
        spelling.flag("relaxed")
        spelling.scope()
    spelling.space()
    if action == "inval":
        return Form("mbarrier_inval", (ADDRESS,))
    if action == "init":
        return Form("mbarrier_init", (ADDRESS, _U32))
    return Form("mbarrier_tx", (ADDRESS, _U32), attr=(int(action == "complete_tx"),))


def _arrive(spelling: Spelling, action: str) -> Form:
    expect = spelling.flag("expect_tx")
    incomplete = spelling.flag("noComplete")
    if expect and incomplete:
        raise UnsupportedInstruction(f"{spelling.text} is not an instruction")
    order = spelling.order("release relaxed", "release")
    scope = spelling.scope("cta")
    spelling.space()
    attr = (int(action == "arrive_drop"), int(incomplete), order, scope)

    def expand(builder: Builder, operands: Operands) -> None:
        first, rest = (operands[0] if operands else None), operands[1:]
        if first is None or (isinstance(first, Name) and first.name == "_"):
            builder.absent(2)
        else:
            builder.define(first, "b64")
        count = (Absent(), _U32) if expect else (_U32 if incomplete else Maybe(_U32), Absent())
        Form.write_roles(builder, (ADDRESS, *count), rest)
        builder.emit("mbarrier_arrive", attr=attr)

    return Form("mbarrier_arrive", expand=expand)


def _wait(spelling: Spelling, action: str) -> Form:
    parity = spelling.flag("parity")
    order = spelling.order("acquire relaxed", "acquire")
    scope = spelling.scope("cta")
    spelling.space()
    attr = (int(action == "try_wait"), int(parity), order, scope)

    def expand(builder: Builder, operands: Operands) -> None:
        if action == "try_wait" and len(operands) == 4:
            builder.values(operands[3], "u32")  # how long it may suspend: any time is right
            operands = operands[:3]
        roles = (DefPredicate(), ADDRESS, Use("u32" if parity else "b64"))
        Form.write_roles(builder, roles, operands)
        builder.emit("mbarrier_wait", attr=attr)

    return Form("mbarrier_wait", expand=expand)
