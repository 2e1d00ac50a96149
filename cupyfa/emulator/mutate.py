"""Faults planted in a decoded kernel: one wrong synchronization instruction each.

An operator is a function from a program and the index of a record to changed programs; `OPERATORS` lists all of them.
They work on what the machine executes, so nothing is compiled again, and one source line that was inlined at several
places gives a mutant for each. A mutant that no check notices is a gap of the checks, or the proof that an instruction
is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from cupyfa.emulator import edit, isa
from cupyfa.emulator.edit import entries, with_entries, with_fields, with_operation
from cupyfa.emulator.program import Program
from cupyfa.emulator.report import Place

__all__ = ["OPERATORS", "Mutant", "mutants", "place_of", "source_path"]

#: What may be left out: everything that orders, signals, waits or moves data asynchronously.
SYNCHRONIZATION: Final = frozenset(
    """
    bar cluster_barrier syncwarp fence fence_proxy_async fence_mbarrier_init mbarrier_init mbarrier_arrive mbarrier_tx
    mbarrier_wait cp_async_commit cp_async_wait cp_async_mbarrier_arrive bulk_copy bulk_reduce tensor_load tensor_store
    tensor_reduce bulk_commit bulk_wait wgmma_fence wgmma_commit wgmma_wait setmaxnreg griddep clc_try_cancel tc_alloc
    tc_dealloc tc_relinquish tc_commit tc_wait tc_fence
    """.split()  # noqa: SIM905
)
_COMMITS: Final = {
    "wgmma_commit": ("wgmma",),
    "bulk_commit": ("tensor_store", "tensor_reduce", "bulk_copy", "bulk_reduce"),
    "cp_async_commit": ("cp_async",),
    "tc_commit": ("tc_mma", "tc_cp"),
}
#: Where the address of the mbarrier begins among the operands; of copies it depends on the instruction.
_MBARRIER: Final = {
    "mbarrier_arrive": 2,
    "mbarrier_tx": 0,
    "mbarrier_wait": 1,
    "cp_async_mbarrier_arrive": 0,
    "clc_try_cancel": 3,
    "tc_commit": 0,
}
#: What counts each time that it is executed.
_COUNTED: Final = frozenset(
    """
    mbarrier_init mbarrier_arrive mbarrier_tx cp_async_mbarrier_arrive bulk_reduce tensor_load tensor_reduce tc_alloc
    tc_dealloc tc_commit
    """.split()  # noqa: SIM905
)
_TENSOR: Final = frozenset(("tensor_load", "tensor_store", "tensor_reduce"))
_READS_PREDICATE, _WRITES_PREDICATE = 5, 6
#: A wait's loop ends within so many records: the test of its result and the branch back.
_LOOP = 8

#: Named variants of a changed program.
Variants = Iterator[tuple[str, Program]]


@dataclass(frozen=True)
class Mutant:
    """A kernel with one fault.

    Attributes
    ----------
    name : str
        ``operator@file:line#record``, the same whenever the same kernel is mutated.
    operator : str
        A key of :data:`OPERATORS`, with the variant.
    place : Place
        The instruction that was changed.
    program : Program
        What to run.
    """

    name: str
    operator: str
    place: Place
    program: Program = field(repr=False)


def drop(program: Program, names: list[str], index: int) -> Variants:
    """Leave an instruction out; a wait or an election becomes one that is always true."""
    name = names[index]
    if name in ("mbarrier_wait", "elect"):
        at = 0 if name == "mbarrier_wait" else 1
        result = int(entries(program, index)[at])
        roles = (_WRITES_PREDICATE, _READS_PREDICATE)
        yield "", with_operation(program, index, "mov", (result, 0), roles, type=isa.TYPES["pred"])
    elif name in SYNCHRONIZATION:
        yield "", with_operation(program, index, "nop")


def twice(program: Program, names: list[str], index: int) -> Variants:
    """Execute an arrival, an initialisation or a copy once more."""
    name, kind = names[index], int(program.code["attr"][index, 0])
    # Twice the same wait is no fault, and neither is a second store of the same values.
    arrives = (name == "bar" and kind == 1) or (name == "cluster_barrier" and kind == 0)
    if arrives or name in _COUNTED:
        yield "", with_fields(program, index, repeat=1)


def flip_parity(program: Program, names: list[str], index: int) -> Variants:
    """Wait for the other phase."""
    if names[index] == "mbarrier_wait" and program.code["attr"][index, 1]:
        yield "", with_fields(program, index, bias=1)


def once(program: Program, names: list[str], index: int) -> Variants:
    """Try to wait, and go on whether or not the phase has completed."""
    if names[index] != "mbarrier_wait":
        return
    for back in range(index + 1, min(index + _LOOP, len(names))):
        if names[back] == "bra" and program.code["imm"][back] <= index:
            yield "", with_operation(program, back, "nop")
            return


def wrong_bytes(program: Program, names: list[str], index: int) -> Variants:
    """Expect 16 bytes more, or fewer."""
    arrives = names[index] == "mbarrier_arrive" and entries(program, index)[6] != isa.ABSENT
    if arrives or names[index] == "mbarrier_tx":
        for bias in (16, -16):
            yield f"{bias:+}", with_fields(program, index, bias=bias)


def wrong_count(program: Program, names: list[str], index: int) -> Variants:
    """Expect one arrival, or one warp, more or fewer."""
    step = 1 if names[index] == "mbarrier_init" else 32
    if names[index] == "mbarrier_init" or (names[index] == "bar" and entries(program, index)[3] != isa.ABSENT):
        for bias in (step, -step):
            yield f"{bias:+}", with_fields(program, index, bias=bias)


def weaker_wait(program: Program, names: list[str], index: int) -> Variants:
    """Let one group more be in flight."""
    all_groups = names[index] == "cp_async_wait" and program.code["attr"][index, 0]
    if names[index] in ("wgmma_wait", "bulk_wait", "cp_async_wait") and not all_groups:
        yield "", with_fields(program, index, imm=program.code["imm"][index] + 1)


def other_half(program: Program, names: list[str], index: int) -> Variants:
    """Wait until bulk stores have read instead of written, or the other way round."""
    if names[index] == "bulk_wait":
        reads = int(program.code["attr"][index, 0])
        yield "read to write" if reads else "write to read", with_fields(program, index, attr={0: 1 - reads})


def neighbour(program: Program, names: list[str], index: int) -> Variants:
    """Signal, or wait on, the mbarrier of the next stage."""
    if names[index] == "tensor_load":
        at = 3 + 3 + int(program.code["attr"][index, 0])
    elif names[index] in ("bulk_copy", "bulk_reduce"):
        at = 7
    elif names[index] in _MBARRIER:
        at = _MBARRIER[names[index]]
    else:
        return
    operands = entries(program, index)
    if operands[at] != isa.ABSENT:
        yield "", with_entries(program, index, {at + 2: int(operands[at + 2]) + 8})


def waits_or_not(program: Program, names: list[str], index: int) -> Variants:
    """Arrive at a named barrier without waiting, or wait where only an arrival was meant."""
    kind = int(program.code["attr"][index, 0])
    if names[index] == "bar" and kind < 2:
        yield "wait to arrive" if kind == 0 else "arrive to wait", with_fields(program, index, attr={0: 1 - kind})


def plain_arrival(program: Program, names: list[str], index: int) -> Variants:
    """Arrive at once, without bytes and without what a commit waits for."""
    operands = entries(program, index)
    if names[index] == "mbarrier_arrive" and operands[6] != isa.ABSENT:
        yield "", with_entries(program, index, {6: isa.ABSENT})
    elif names[index] in ("tc_commit", "cp_async_mbarrier_arrive"):
        arrive = (isa.ABSENT, isa.ABSENT, *(int(x) for x in operands[:3]), isa.ABSENT, isa.ABSENT)
        roles = (0, 0, *(int(x) for x in program.roles[program.code["operands"][index] :][:3]), 0, 0)
        attr = {0: 0, 1: 0, 2: isa.ORDERS["release"], 3: isa.SCOPES["cta"]}
        yield "", with_operation(program, index, "mbarrier_arrive", arrive, roles, attr=attr)


def smaller_multicast(program: Program, names: list[str], index: int) -> Variants:
    """Leave a CTA out of a multicast; a mask that is computed becomes that of the first CTA alone."""
    operands = entries(program, index)
    if names[index] not in ("tensor_load", "bulk_copy", "tc_commit") or operands[-1] == isa.ABSENT:
        return
    if names[index] == "tc_commit" and not program.code["attr"][index, 1]:
        return
    at, mask = len(operands) - 1, int(operands[-1])
    known = int(program.constants[~mask]) if mask < 0 else 3
    for bit in range(1, 16):
        if known >> bit & 1:
            changed, row = edit.constant(program, known & ~(1 << bit))
            yield f"-{bit}", with_entries(changed, index, {at: row})


def shifted_copy(program: Program, names: list[str], index: int) -> Variants:
    """Copy a box that begins 8 rows later."""
    if names[index] in _TENSOR:
        yield "", with_fields(program, index, bias=8)


def shifted_operand(program: Program, names: list[str], index: int) -> Variants:
    """Read B 16 bytes further, or with swizzle atoms that are 16 bytes further apart."""
    if names[index] not in ("wgmma", "tc_mma"):
        return
    yield "start", with_fields(program, index, bias=1)
    if names[index] == "tc_mma":
        return
    yield "stride", with_fields(program, index, imm=1)
    attr = program.code["attr"][index]
    # The leading offset counts only where B is contiguous along N and wider than an atom of 64 elements.
    if attr[6] and 8 * attr[2] > 64:
        yield "leading", with_fields(program, index, bias=1 << 16)


def more_registers(program: Program, names: list[str], index: int) -> Variants:
    """Keep, or ask for, 8 registers more."""
    if names[index] == "setmaxnreg":
        yield "", with_fields(program, index, imm=program.code["imm"][index] + 8)


def unguarded(program: Program, names: list[str], index: int) -> Variants:
    """Let all lanes execute what a condition gives to some of them."""
    if names[index] in SYNCHRONIZATION and program.code["guard"][index] >= 0:
        yield "", with_fields(program, index, guard=-1)
    if names[index] != "bra" or program.code["guard"][index] < 0:
        return
    around = range(index + 1, int(program.code["imm"][index]))
    straight = not any(names[i] in ("bra", "brx", "exit") for i in around)
    if straight and any(names[i] in SYNCHRONIZATION for i in around):
        yield "", with_operation(program, index, "nop")


def early_arrival(program: Program, names: list[str], index: int) -> Variants:
    """Exchange an arrival and the wait before it."""
    arrives = names[index] == "bar" and program.code["attr"][index, 0] == 1
    if not (arrives or names[index] in ("mbarrier_arrive", "tc_commit")):
        return
    for wait in range(index - 1, -1, -1):
        if names[wait] == "mbarrier_wait":
            loop = [int(program.code["imm"][i]) for i in range(wait, index) if names[i] == "bra"]
            changed = edit.moved(program, index, min([wait, *(head for head in loop if head <= wait)]))
        elif names[wait] in ("wgmma_wait", "bulk_wait", "cp_async_wait", "tc_wait", "bar", "cluster_barrier"):
            changed = edit.moved(program, wait, index + 1)
        else:
            continue
        if changed is not None:
            yield "", changed
        return


def early_commit(program: Program, names: list[str], index: int) -> Variants:
    """Commit before the last operation that was meant to be in the group."""
    for operation in range(index - 1, -1, -1):
        if names[operation] in ("bra", "brx", "exit"):
            return
        if names[operation] in _COMMITS.get(names[index], ()):
            changed = edit.moved(program, index, operation)
            if changed is not None:
                yield "", changed
            return


def late_fence(program: Program, names: list[str], index: int) -> Variants:
    """Execute a fence of the products after the first product."""
    if names[index] != "wgmma_fence":
        return
    for product in range(index + 1, len(names)):
        if names[product] == "wgmma":
            changed = edit.moved(program, index, product + 1)
            if changed is not None:
                yield "", changed
            return


def early_wait(program: Program, names: list[str], index: int) -> Variants:
    """Wait for loads, or stores, of tensor memory before the last one is issued."""
    if names[index] != "tc_wait":
        return
    waited = "tc_st" if program.code["attr"][index, 1] else "tc_ld"
    for operation in range(index - 1, -1, -1):
        if names[operation] in ("bra", "brx", "exit", "tc_wait"):
            return
        if names[operation] == waited:
            changed = edit.moved(program, index, operation)
            if changed is not None:
                yield "", changed
            return


#: name -> operator: what it does to the record at an index, if that is one it applies to.
OPERATORS: Final[dict[str, Callable[[Program, list[str], int], Variants]]] = {
    "drop": drop,
    "twice": twice,
    "parity": flip_parity,
    "once": once,
    "bytes": wrong_bytes,
    "count": wrong_count,
    "pending": weaker_wait,
    "half": other_half,
    "neighbour": neighbour,
    "kind": waits_or_not,
    "plain": plain_arrival,
    "multicast": smaller_multicast,
    "coordinate": shifted_copy,
    "descriptor": shifted_operand,
    "registers": more_registers,
    "unguarded": unguarded,
    "early-arrival": early_arrival,
    "early-commit": early_commit,
    "late-fence": late_fence,
    "early-wait": early_wait,
}


def source_path(file: str) -> str:
    """Return the name of a kernel source below ``cuda/``, which the compiler may have made absolute."""
    at = file.rfind("cuda/")
    return file[at + len("cuda/") :] if at >= 0 else file


def place_of(program: Program, index: int) -> Place:
    """Return where a record comes from, with names below ``cuda/``."""
    site = int(program.code["site"][index])
    file, line = program.sites[site]
    callers = tuple([(source_path(name), number) for name, number in program.callers[site]])
    return Place(index, source_path(file), line, callers, program.text[index])


def mutants(program: Program) -> Iterator[Mutant]:
    """Yield all mutants of a kernel, in the order of its instructions.

    Parameters
    ----------
    program : Program
        Decoded; it is not changed.

    Yields
    ------
    Mutant
        With a program of its own.
    """
    names = edit.named(program)
    for index in range(len(names)):
        place = place_of(program, index)
        for operator, function in OPERATORS.items():
            for variant, changed in function(program, names, index):
                kind = f"{operator} {variant}".rstrip()
                yield Mutant(f"{kind}@{place.file}:{place.line}#{index}", kind, place, changed)
