"""Edits of decoded kernels, and the operators that the Hopper forward kernel has no instruction for."""

from __future__ import annotations

import numpy as np
import pytest

from cupyfa.emulator import EmulatedDevice, EmulatedKernel, edit
from cupyfa.emulator.mutate import OPERATORS, Mutant, mutants, source_path
from cupyfa.emulator.program import Program

HEAD = (
    ".version 8.8\n.target {}\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n.entry k(.param .u64 out_) {{"
)
REGISTERS = """
.reg .b16 %h<4>; .reg .b32 %r<40>; .reg .b64 %rd<4>; .reg .pred %p<4>;
ld.param.u64 %rd0, [out_];
mov.u32 %r0, smem;
"""

LOOP = """
mov.u32 %r1, %tid.x;
mov.u32 %r2, 0;
setp.ne.u32 %p0, %r1, 0;
$again:
add.u32 %r2, %r2, 1;
bar.sync 0;
@%p0 bra $over;
mbarrier.arrive.shared.b64 _, [%r0+8];
$over:
setp.lt.u32 %p1, %r2, 3;
@%p1 bra $again;
st.global.u32 [%rd0], %r2;
"""
WAIT = """
mov.u32 %r1, %tid.x;
setp.ne.u32 %p0, %r1, 0;
@%p0 bra $go;
mbarrier.init.shared.b64 [%r0], 2;
$go:
bar.sync 0;
@%p0 bra $wait;
mbarrier.arrive.shared.b64 _, [%r0];
$wait:
mbarrier.try_wait.parity.shared.b64 %p1, [%r0], 0;
@!%p1 bra $wait;
st.global.u32 [%rd0], 7;
"""
BLACKWELL = """
mov.u32 %r1, 0;
mov.b16 %h0, 3;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r0];
tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r0], 3;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];
add.u32 %r3, %r1, 1;
tcgen05.wait::ld.sync.aligned;
tcgen05.fence::before_thread_sync;
st.global.u32 [%rd0], %r2;
"""
COPIES = """
cp.async.ca.shared.global [%r0], [%rd0], 16;
cp.async.commit_group;
cp.async.wait_group 1;
cp.async.mbarrier.arrive.noinc.shared.b64 [%r0+64];
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd0], [%r0], 16;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
@%p0 bar.arrive 1, 64;
barrier.cluster.arrive;
barrier.cluster.wait;
"""


def kernel(body: str, arch: str = "sm_90a") -> EmulatedKernel:
    return EmulatedDevice(arch).load(f"{HEAD.format(arch)}{REGISTERS}{body}ret;\n}}").kernel()


def planted(body: str, arch: str = "sm_90a") -> dict[str, Mutant]:
    """By operator and operation; of several instructions with the same the last one."""
    program = kernel(body, arch).program
    names = edit.named(program)
    return {f"{mutant.operator}: {names[mutant.place.index]}": mutant for mutant in mutants(program)}


def run(k: EmulatedKernel, program: Program, block: int = 32) -> tuple[int, tuple[str, ...]]:
    out = np.zeros(4, np.uint32)
    found = EmulatedKernel(k.device, program).launch(
        grid=1, block=block, shared=1024, params=[out], max_instructions=10_000
    )
    return int(out[0]), found.hazards


def test_an_instruction_is_repeated() -> None:
    """One thread of two arrives; twice, with the mutation."""
    waits = kernel(WAIT)
    assert run(waits, waits.program) == (0, ("PROGRESS_DEADLOCK",))
    assert run(waits, planted(WAIT)["twice: mbarrier_arrive"].program) == (7, ())


def test_a_dropped_wait_is_over_at_once() -> None:
    assert run(kernel(WAIT), planted(WAIT)["drop: mbarrier_wait"].program) == (7, ())


def test_one_try_of_a_wait_that_cannot_succeed() -> None:
    assert run(kernel(WAIT), planted(WAIT)["once: mbarrier_wait"].program) == (7, ())


def test_the_other_parity_is_complete() -> None:
    assert run(kernel(WAIT), planted(WAIT)["parity: mbarrier_wait"].program) == (7, ())


def test_a_count_of_one_is_enough() -> None:
    assert run(kernel(WAIT), planted(WAIT)["count -1: mbarrier_init"].program) == (7, ())


def test_all_lanes_arrive_without_the_branch() -> None:
    """32 arrivals, two a phase: an even number of phases looks like none."""
    (mutant,) = (m for m in mutants(kernel(WAIT).program) if m.operator == "unguarded" and "$wait" in m.place.text)
    assert run(kernel(WAIT), mutant.program) == (0, ("PROGRESS_DEADLOCK",))


def test_a_wait_moves_behind_the_guarded_arrival_for_all_lanes() -> None:
    """The branch around the arrival leads to the wait, and the loop still begins behind where it was."""
    k = kernel(LOOP)
    names = edit.named(k.program)
    wait, arrive = names.index("bar"), names.index("mbarrier_arrive")
    moved = edit.moved(k.program, wait, arrive + 1)
    assert moved is not None
    assert edit.named(moved)[wait : arrive + 1] == ["bra", "mbarrier_arrive", "bar"]
    assert edit.branches(moved)[0] == (wait, arrive)
    assert edit.branches(moved)[1][1] == edit.branches(k.program)[1][1]
    assert moved.text[arrive] == k.program.text[wait]


def test_a_record_moves_up_over_a_loop() -> None:
    """Whoever comes to the loop executes it once, and the branch back does not come to it."""
    k = kernel(LOOP)
    names = edit.named(k.program)
    store = names.index("st")
    ((back, head),) = [(source, target) for source, target in edit.branches(k.program) if target < source]
    free = edit.with_operation(k.program, store, "syncwarp", (-1,), (8,))
    moved = edit.moved(free, store, head)
    assert moved is not None
    assert edit.named(moved)[head] == "syncwarp"
    assert (back + 1, head + 1) in edit.branches(moved)


def test_no_move_past_what_a_record_reads() -> None:
    k = kernel(LOOP)
    names = edit.named(k.program)
    store = names.index("st")  # of the sum that the loop computes
    assert edit.moved(k.program, store, names.index("add")) is None


def test_no_move_into_a_loop_from_outside() -> None:
    k = kernel(LOOP)
    names = edit.named(k.program)
    assert edit.moved(k.program, names.index("bar"), names.index("st") + 1) is None


def test_an_inserted_record_is_met_by_who_branches_there() -> None:
    k = kernel(LOOP)
    ((back, head),) = [(source, target) for source, target in edit.branches(k.program) if target < source]
    count = edit.named(k.program).index("add")
    inserted = edit.inserted(k.program, head, count)
    assert (back + 1, head) in edit.branches(inserted)
    assert edit.named(inserted)[head : head + 2] == ["add", "add"]


def test_the_original_is_untouched() -> None:
    k = kernel(LOOP)
    code, pool = k.program.code.copy(), k.program.pool.copy()
    assert len(list(mutants(k.program))) > 5
    assert np.array_equal(code, k.program.code)
    assert np.array_equal(pool, k.program.pool)


class TestBlackwell:
    """Operators of tcgen05."""

    def operands(self, mutant: Mutant) -> list[int]:
        return [int(x) for x in edit.entries(mutant.program, mutant.place.index)]

    def test_a_commit_becomes_an_arrival(self) -> None:
        mutant = planted(BLACKWELL, "sm_100a")["plain: tc_commit"]
        assert edit.named(mutant.program)[mutant.place.index] == "mbarrier_arrive"

    def test_a_cta_is_left_out(self) -> None:
        mutant = planted(BLACKWELL, "sm_100a")["multicast -1: tc_commit"]
        assert mutant.program.constants[~self.operands(mutant)[-1]] == 1

    def test_a_wait_comes_before_its_load(self) -> None:
        mutant = planted(BLACKWELL, "sm_100a")["early-wait: tc_wait"]
        names = edit.named(mutant.program)
        assert names.index("tc_wait") < names.index("tc_ld")

    @pytest.mark.parametrize("name", ["drop: tc_fence", "drop: tc_wait", "drop: tc_commit", "twice: tc_commit"])
    def test_exists(self, name: str) -> None:
        assert name in planted(BLACKWELL, "sm_100a")

    def test_neighbour(self) -> None:
        assert self.operands(planted(BLACKWELL, "sm_100a")["neighbour: tc_commit"])[2] == 8


@pytest.mark.parametrize(
    "name",
    [
        "drop: cp_async_wait",
        "drop: cp_async_commit",
        "early-commit: cp_async_commit",
        "pending: cp_async_wait",
        "plain: cp_async_mbarrier_arrive",
        "neighbour: cp_async_mbarrier_arrive",
        "twice: bulk_reduce",
        "half write to read: bulk_wait",
        "unguarded: bar",
        "twice: cluster_barrier",
    ],
)
def test_operator_of_other_copies(name: str) -> None:
    assert name in planted(COPIES)


def test_each_operator_is_used() -> None:
    """By the forward kernel, or here."""
    used = {name.split(":")[0].split(" ")[0] for body in (LOOP, WAIT, COPIES) for name in planted(body)}
    used |= {name.split(":")[0].split(" ")[0] for name in planted(BLACKWELL, "sm_100a")}
    products = {"bytes", "coordinate", "descriptor", "registers", "late-fence", "early-arrival", "kind"}
    assert set(OPERATORS) - used <= products


def test_names_do_not_depend_on_where_it_was_compiled() -> None:
    assert source_path("/home/cuda/someone/cuda/ptx/tma.cuh") == "ptx/tma.cuh"
    assert source_path("kernel.ptx") == "kernel.ptx"
