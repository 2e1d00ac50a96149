"""Blackwell's tensor memory and matrix products."""

from __future__ import annotations

from cupyfa.emulator.builder import Builder
from cupyfa.emulator.opcodes.forms import (
    ADDRESS,
    Absent,
    Define,
    Defines,
    Expand,
    Form,
    Operands,
    Role,
    Tensor,
    Use,
    Uses,
    family,
)
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.syntax import Address, PtxError, UnsupportedInstruction, Vector

# Of ld and st: the number in the machine, and registers for each repetition.
_SHAPES = {"32x32b": (0, 1), "16x64b": (1, 1), "16x128b": (2, 2), "16x256b": (3, 4), "16x32bx2": (4, 1)}
_COPIES = ("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
_COUNTS = {f"x{2**power}": 2**power for power in range(8)}
_KINDS = ("kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8")
_COLLECTORS = ("discard", "fill", "use", "lastuse")
_LITTLE = (0, (1 << 31) - 1)


@family("tcgen05")
def tcgen05(spelling: Spelling) -> Form:
    """``tcgen05``."""
    words = ("alloc", "dealloc", "relinquish_alloc_permit", "mma", "commit", "ld", "st", "cp", "shift")
    word = spelling.one_of((*words, "wait::ld", "wait::st", "fence::before_thread_sync", "fence::after_thread_sync"))
    if word.startswith("fence"):
        return Form("tc_fence", attr=(0, int("after" in word)))
    if word.startswith("wait"):
        spelling.require("sync", "aligned")
        return Form("tc_wait", attr=(0, int(word == "wait::st")))
    if word in ("ld", "st"):
        spelling.require("sync", "aligned")
        return _load(spelling) if word == "ld" else _store(spelling)
    group = int(spelling.one_of(("cta_group::1", "cta_group::2"))[-1])
    if word == "mma":
        return _mma(spelling, group)
    if word == "commit":
        return _commit(spelling, group)
    if word == "cp":
        return _copy(spelling, group)
    if word == "shift":
        spelling.require("down")
        return Form("tc_shift", (Tensor(),), attr=(group,))
    spelling.require("sync", "aligned")
    if word == "relinquish_alloc_permit":
        return Form("tc_relinquish", attr=(group,))
    spelling.type("b32")
    if word == "dealloc":
        return Form("tc_dealloc", (Use("b32"), Use("u32")), attr=(group,))
    spelling.space()
    return Form("tc_alloc", (ADDRESS, Use("u32")), attr=(group,))


def _commit(spelling: Spelling, group: int) -> Form:
    spelling.require("mbarrier::arrive::one")
    spelling.space()
    spelling.type("b64")
    multicast = spelling.flag("multicast::cluster")
    return Form("tc_commit", (ADDRESS, Use("u16") if multicast else Absent()), attr=(group, int(multicast)))


def _copy(spelling: Spelling, group: int) -> Form:
    shape = spelling.one_of(_COPIES)
    number = _COPIES.index(shape)
    if shape == "64x128b":
        number = {"warpx2::02_13": 3, "warpx2::01_23": 4}[spelling.one_of(("warpx2::02_13", "warpx2::01_23"))]
    elif shape == "32x128b":
        spelling.require("warpx4")
        number = 5
    return Form("tc_cp", (Tensor(), Use("b64")), attr=(group, number))


def _repetition(spelling: Spelling) -> tuple[str, int, int]:
    """Take off shape and repetition; return the shape, the repetition and the count of registers."""
    shape = spelling.one_of(_SHAPES)
    repetition = _COUNTS[spelling.one_of(_COUNTS)]
    count = _SHAPES[shape][1] * repetition
    if count > 128:
        raise UnsupportedInstruction(f"{spelling.text}: {count} registers")
    return shape, repetition, count


def _load(spelling: Spelling) -> Form:
    reduces = spelling.flag("red")
    shape, repetition, count = _repetition(spelling)
    reduction, flags = 0, 0
    if reduces:
        reduction = 1 + ("min", "max").index(spelling.one_of(("min", "max")))
        flags = spelling.flags("abs", "NaN")
    pack = spelling.flag("pack::16b")
    kind = spelling.type("f32 u32 s32" if reduces else "b32")
    attr = (0, _SHAPES[shape][0], repetition, int(pack), reduction, flags)
    target: tuple[Role | Absent, ...] = (Defines(count, Define("b32")), Define("b32") if reduces else Absent())
    return Form("tc_ld", expand=_half(target, (), shape, "tc_ld", kind, attr))


def _store(spelling: Spelling) -> Form:
    shape, repetition, count = _repetition(spelling)
    unpack = spelling.flag("unpack::16b")
    spelling.type("b32")
    attr = (0, _SHAPES[shape][0], repetition, int(unpack))
    return Form("tc_st", expand=_half((), (Uses(count, Use("b32")),), shape, "tc_st", "b32", attr))


def _half(
    before: tuple[Role | Absent, ...],
    after: tuple[Role, ...],
    shape: str,
    operation: str,
    kind: str,
    attr: tuple[int, ...],
) -> Expand:
    """Return what writes ``ld`` and ``st``: one shape has the offset of its second half as a number."""
    split = shape == "16x32bx2"

    def expand(builder: Builder, operands: Operands) -> None:
        leading = sum(not isinstance(role, Absent) for role in before)
        wanted = leading + 1 + split + len(after)
        if len(operands) != wanted:
            raise PtxError(f"expected {wanted} operands, got {len(operands)}")
        Form.write_roles(builder, (*before, Tensor()), operands[: leading + 1])
        if split:
            builder.put(builder.literal(operands[leading + 1], *_LITTLE, "the offset of the second half"))
        else:
            builder.absent()
        Form.write_roles(builder, after, operands[leading + 1 + split :])
        builder.emit(operation, kind, attr=attr)

    return expand


def _mma(spelling: Spelling, group: int) -> Form:
    kind = _KINDS.index(spelling.one_of(_KINDS))
    collector = spelling.one_of([f"collector::a::{name}" for name in _COLLECTORS], "collector::a::discard")
    use = _COLLECTORS.index(collector.rpartition("::")[2])

    def expand(builder: Builder, operands: Operands) -> None:
        scale = -1
        masked = len(operands) > 4 and isinstance(operands[4], Vector)
        if len(operands) == 6 + masked:
            scale = builder.literal(operands[-1], 0, 15, "the scale of D")
            operands = operands[:-1]
        if len(operands) != 5 + masked:
            raise PtxError(f"expected {5 + masked} operands, got {len(operands)}")
        in_memory = isinstance(operands[1], Address)
        Tensor().write(builder, operands[0])
        if in_memory:
            Tensor().write(builder, operands[1])
        else:
            builder.use(operands[1], "b64")
            builder.put(0)
        builder.use(operands[2], "b64")
        builder.use(operands[3], "b32")
        builder.use_predicate(operands[-1])
        lanes = 4 * group if masked else 0
        if masked:
            Uses(lanes, Use("b32")).write(builder, operands[4])
        builder.emit("tc_mma", attr=(group, int(in_memory), kind, use, lanes), imm=scale)

    return Form("tc_mma", expand=expand)
