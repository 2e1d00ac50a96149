"""Rows of the specification's failure tables, planted in the compiled Hopper forward kernel (docs/failure_lab.md).

A test's name has the section and the row. Each plants the fault in the decoded kernel and says which checks notice it
under the eight fixed schedules; a row that costs nothing but time must be noticed by none. A row is planted in the
exact kernel and in the shipped, speculative one, where both have it: there in all copies of the source line.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
from emulator.mutation import COUNTER, SUBJECTS, VALUE, Laboratory, Subject, lies_at
from nvrtc_tools import import_nvrtc

from cupyfa.emulator import POLICIES, EmulatedKernel, edit, isa
from cupyfa.emulator.mutate import OPERATORS, place_of, source_path
from cupyfa.emulator.program import Program

SUBJECT = {subject.name: subject for subject in SUBJECTS}
EXACT, FULL, CAUSAL = SUBJECT["exact"], SUBJECT["full"], SUBJECT["causal"]
WITHOUT_OVERLAP = SUBJECT["without overlap"]

# Lines of the kernel; a text may begin on the line before, where one line alone stands at several places.
P, C, E = "hopper/producer.cuh: ", "hopper/consumer.cuh: ", "hopper/epilogue.cuh: "
T, W = "hopper/storer.cuh: ", "hopper/work.cuh: "
FIRST_K = P + "load_k(keys, keys.last);"
NEXT_K = P + "load_k(these, row - S.tile_n);"
LOAD_V = P + "load_v(these, row);"
FIRST_K_WAIT = C + "Slot k = K_.wait();"
TILE_K_WAIT = C + "if (m >= 0) { k = K_.wait();"
SECOND_K_WAIT = C + "k = K_.wait();  // of the first round below"
K_WAIT = C + "This wait ends the block. if (j > blocks.begin) k = K_.wait();"
V_WAIT = C + "// S_j = Q K_j' const Slot v = V_.wait();"
FIRST_S = C + "complete<0>(scores);"
FIRST_K_RELEASE = C + "tests/test_compiler.py looks at them.) release(k);"
S = C + "complete<1>(scores);"
K_RELEASE = C + "O is still in flight release(k);"
O = C + "complete<0>(O);  // proves O, and"
V_RELEASE = C + "no longer reads P and V release(v);"
LAST_V_RELEASE = C + "the next S is in flight release(v);"
ENDING_V_RELEASE = C + "// proves the last O release(v);"
WITHOUT_OVERLAP_V_RELEASE = C + "complete<0>(O);  // proves O release(v);"
CREDIT = C + "if (S.pingpong && last) ptx::bar_arrive(next_, participants);"
TURN, PASS, FINISH = C + "turn_.wait();", C + "turn_.pass();", C + "turn_.finish();"
LAST_PASS = C + "} turn_.pass();"
NEXT_S = C + "issue_scores<S>(scores, rows_of(work), k.data);  // S_j"
SCALE = C + "scale_rows(O, shrink);"
PROXY_FENCE = E + "ptx::fence_proxy_async_shared_cta();"
STAGED_INIT = W + "ptx::mbarrier_init(shared_address(&barriers.staged[stage]), stagers);"
STAGED_WAIT = T + "wait_parity(works.staged(work), work.parity);"
Q_RELEASE = T + "ptx::mbarrier_arrive(works.empty(work));"
NEXT_WORK = C + "const Work next = works_.next();"
CLOSE = P + "works.close();"
Q_READ = E + "ptx::bar_sync(epilogue_barrier + place.warpgroup, warpgroup_threads);"
POST = P + "if constexpr (S.q_stages > 1) post"
WRITTEN, CONSTANT = 2, 8

#: A read of what TMA writes, without the wait: the checks know whether the copy had landed by then, or begun.
READ_TOO_EARLY = {
    "SHARED_READ_OF_IN_FLIGHT_TMA_DATA",
    "SHARED_READ_NOT_ORDERED_AFTER_WRITE",
    "SHARED_UNINITIALISED_READ",
}


@functools.cache
def laboratory(subject: Subject) -> Laboratory:
    import_nvrtc()
    return Laboratory(subject)


@pytest.fixture(params=[EXACT, FULL], ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    """The kernel that a row is planted in; some rows name others."""
    return request.param


@pytest.fixture
def kernel(subject: Subject) -> Program:
    return laboratory(subject).kernel.program


def noticed(program: Program, subject: Subject) -> set[str]:
    """The first thing that the checks say, under each schedule and on each problem of the subject."""
    lab = laboratory(subject)
    mutant = EmulatedKernel(lab.kernel.device, program)
    found = {
        bench.check_of(mutant, policy, lab.limits[number, policy])
        for number, bench in enumerate(lab.benches())
        for policy in POLICIES
    }
    return {check for check in found if check is not None}


def hazards(program: Program, subject: Subject, policy: str = "eager") -> dict[str, set[str]]:
    """All errors of a run that is not stopped at the first, and the lines where they were seen."""
    benches = laboratory(subject).benches()  # hard scores are needed where a speculative softmax has to correct
    bench = next((bench for bench in benches if bench.problem.scores != "normal"), benches[0])
    mutant = EmulatedKernel(bench.kernel.device, program)
    run = bench.launch(mutant, policy, stop_at_error=False, max_instructions=1_000_000)
    found: dict[str, set[str]] = {}
    for finding in run.findings:
        where = "" if finding.place is None else f"{source_path(finding.place.file)}:{finding.place.line}"
        found.setdefault(finding.hazard, set()).add(where)
    return found


def places(program: Program, operation: str, *marks: str) -> list[int]:
    """The records of an operation that come from these source lines."""
    names = edit.named(program)
    found = [i for i, name in enumerate(names) if name == operation and lies_at(place_of(program, i), marks)]
    assert found, marks
    return found


def place(program: Program, operation: str, *marks: str) -> int:
    (index,) = places(program, operation, *marks)
    return index


def applied(program: Program, operator: str, indices: Iterable[int], variant: str = "") -> Program:
    """The program with an operator applied to some records."""
    for index in indices:
        program = dict(OPERATORS[operator](program, edit.named(program), index))[variant]
    return program


def writer_before(program: Program, index: int, operand: int) -> int:
    """The last record in front of another that writes an operand of it."""
    row = int(edit.entries(program, index)[operand])
    return max(i for i in range(index) if row in edit.rows(program, i, True))


def loops(program: Program, index: int) -> list[tuple[int, int]]:
    """(head, branch back) of the loops around a record, the innermost first."""
    return sorted(
        [(target, source) for source, target in edit.branches(program) if target <= index <= source],
        key=lambda loop: loop[1] - loop[0],
    )


def set_at(program: Program, index: int, row: int, value: int) -> Program:
    """Assign a constant to a row in front of a record."""
    program, constant = edit.constant(edit.inserted(program, index, 0), value)
    kind = isa.TYPES["b32"]
    return edit.with_operation(program, index, "mov", (row, constant), (WRITTEN, CONSTANT), type=kind, guard=-1)


def with_state_reset(program: Program, wait: int, parity: int) -> Program:
    """The state of the ring that this wait belongs to starts afresh each time that somebody comes to it."""
    names = edit.named(program)
    # RingWalk::slot: barriers_ + stage_ * 8.
    address = max(i for i in range(wait) if names[i] == "shl")
    stage_row, parity_row = int(edit.entries(program, address)[1]), int(edit.entries(program, wait)[4])
    head = max(i for i in range(address) if names[i] == "bra") + 1
    return set_at(set_at(program, head, parity_row, parity), head, stage_row, 0)


def released_early(program: Program, release: int, waits: list[int]) -> Program:
    """The waits in front of a release come behind it."""
    program = edit.inserted(program, release + 1, waits[0])
    return applied(program, "drop", [i + (i > release) for i in waits])


def last_warpgroup_only(program: Program, index: int, credit: int) -> Program:
    """A record is executed by the last consumer warpgroup alone, as the first credit is."""
    around = max(i for i in range(credit) if edit.named(program)[i] == "bra" and program.code["guard"][i] >= 0)
    skips, negated = (int(program.code[field][around]) for field in ("guard", "guard_negated"))
    return edit.with_fields(program, index, guard=skips, guard_negated=1 - negated)


def arrival(program: Program, mark: str) -> int:
    return place(program, "mbarrier_arrive", mark)


def arrivals(program: Program, mark: str) -> list[int]:
    return places(program, "mbarrier_arrive", mark)


def wait(program: Program, mark: str) -> int:
    return place(program, "mbarrier_wait", mark)


def waits(program: Program, mark: str) -> list[int]:
    return places(program, "mbarrier_wait", mark)


class TestHopperMachine:
    """0x02: copies, matrix units, registers."""

    def test_0x02_row_1_consumer_does_not_wait(self, kernel: Program, subject: Subject) -> None:
        found = noticed(applied(kernel, "drop", [wait(kernel, FIRST_K_WAIT)]), subject)
        assert found
        assert found <= READ_TOO_EARLY

    def test_0x02_row_2_score_is_read_without_its_wait(self, kernel: Program, subject: Subject) -> None:
        assert noticed(applied(kernel, "drop", places(kernel, "wgmma_wait", S)), subject) == {
            "WGMMA_REGISTER_READ_IN_FLIGHT"
        }

    def test_0x02_row_3_no_proxy_fence_before_the_store_of_o(self, kernel: Program, subject: Subject) -> None:
        fences = places(kernel, "fence_proxy_async", PROXY_FENCE)
        assert noticed(applied(kernel, "drop", fences), subject) == {"SHARED_MISSING_PROXY_FENCE"}

    def test_0x02_row_5_registers_are_not_released(self, kernel: Program, subject: Subject) -> None:
        release = place(kernel, "setmaxnreg", "hopper/fwd.cu: setmaxnreg_dec")
        assert noticed(applied(kernel, "drop", [release]), subject) == {"REGISTERS_POOL_DEADLOCK"}

    def test_0x02_row_6_too_few_bytes(self, kernel: Program, subject: Subject) -> None:
        """One panel of two: the phase completes with the first of them."""
        half = edit.with_fields(kernel, arrival(kernel, NEXT_K), bias=-(128 * 64 * 2))
        assert "MBARRIER_FLIP_WITH_TMA_IN_FLIGHT" in noticed(half, subject)

    def test_0x02_row_7_too_many_bytes(self, kernel: Program, subject: Subject) -> None:
        assert noticed(applied(kernel, "bytes", [arrival(kernel, NEXT_K)], "+16"), subject) == {"PROGRESS_DEADLOCK"}

    def test_0x02_row_11_no_fence_before_the_product(self, kernel: Program, subject: Subject) -> None:
        fences = places(kernel, "wgmma_fence", NEXT_S)
        assert noticed(applied(kernel, "drop", fences), subject) == {"WGMMA_MISSING_FENCE"}


class TestRing:
    """0x03: producer, consumers and the shared-memory ring."""

    def test_0x03_row_1_pipelines_row_8_state_of_the_producer_starts_afresh(
        self, kernel: Program, subject: Subject
    ) -> None:
        found = noticed(with_state_reset(kernel, waits(kernel, FIRST_K)[-1], 1), subject)
        assert {"MBARRIER_OVER_ARRIVAL", "SHARED_WRITE_NOT_ORDERED_AFTER_WRITE"} <= found

    def test_0x03_row_1_pipelines_row_8_state_of_the_consumers_starts_afresh(
        self, kernel: Program, subject: Subject
    ) -> None:
        program = kernel
        for index in reversed(waits(kernel, TILE_K_WAIT)):
            program = with_state_reset(program, index, 0)
        found = noticed(program, subject)
        assert "PROGRESS_DEADLOCK" in found
        assert found & READ_TOO_EARLY

    def test_0x03_row_2_pipelines_row_10_the_producer_leaves_out_a_block(
        self, kernel: Program, subject: Subject
    ) -> None:
        """Its loop over the blocks of a tile ends before block 0."""
        (_, back) = loops(kernel, wait(kernel, LOAD_V))[1]
        predicate = -1 - int(kernel.code["guard"][back])
        test = max(i for i in range(back) if predicate in edit.rows(kernel, i, True))
        program, one = edit.constant(kernel, 1)
        assert noticed(edit.with_entries(program, test, {3: one}), subject) == {"PROGRESS_DEADLOCK"}

    def test_0x03_row_3_a_path_ends_without_releasing_v(self, kernel: Program, subject: Subject) -> None:
        assert noticed(applied(kernel, "drop", arrivals(kernel, LAST_V_RELEASE)), subject) == {"PROGRESS_DEADLOCK"}

    def test_0x03_row_4_0x05_row_6_k_is_released_before_its_wait(self, kernel: Program, subject: Subject) -> None:
        early = applied(kernel, "early-arrival", arrivals(kernel, K_RELEASE))
        assert noticed(early, subject) == {"SHARED_WRITE_TO_BUFFER_BEING_READ"}

    def test_0x03_row_4_0x05_row_6_the_first_k_is_released_before_its_wait(
        self, kernel: Program, subject: Subject
    ) -> None:
        """Its waits lie in front of the loop over tiles and at its end, the release at its head."""
        early = released_early(kernel, arrival(kernel, FIRST_K_RELEASE), places(kernel, "wgmma_wait", FIRST_S))
        assert "SHARED_WRITE_TO_BUFFER_BEING_READ" in noticed(early, subject)

    def test_0x03_row_5_0x05_row_6_v_is_released_before_its_wait(self, kernel: Program, subject: Subject) -> None:
        early = applied(kernel, "early-arrival", arrivals(kernel, V_RELEASE))
        assert noticed(early, subject) == {"SHARED_WRITE_TO_BUFFER_BEING_READ"}

    @pytest.mark.parametrize("subject", [WITHOUT_OVERLAP], ids=str)  # with overlap, the next K holds the producer back
    def test_0x03_row_5_0x05_row_6_the_last_v_is_released_before_its_wait(
        self, kernel: Program, subject: Subject
    ) -> None:
        early = applied(kernel, "early-arrival", arrivals(kernel, WITHOUT_OVERLAP_V_RELEASE))
        assert noticed(early, subject) == {"SHARED_WRITE_TO_BUFFER_BEING_READ"}

    def test_0x03_row_6_pipelines_row_9_nothing_is_released(self, kernel: Program, subject: Subject) -> None:
        marks = (FIRST_K_RELEASE, K_RELEASE, V_RELEASE, LAST_V_RELEASE, ENDING_V_RELEASE)
        releases = [i for mark in marks for i in arrivals(kernel, mark)]
        assert noticed(applied(kernel, "drop", releases), subject) == {"PROGRESS_DEADLOCK"}

    def test_0x03_row_7_a_release_has_no_produced_slot(self, kernel: Program, subject: Subject) -> None:
        assert "SHARED_WRITE_TO_BUFFER_BEING_READ" in noticed(
            applied(kernel, "twice", arrivals(kernel, K_RELEASE)), subject
        )

    def test_0x03_row_8_the_parity_is_ignored(self, kernel: Program, subject: Subject) -> None:
        program, zero = edit.constant(kernel, 0)
        for mark in (FIRST_K_WAIT, SECOND_K_WAIT, K_WAIT, TILE_K_WAIT):
            for index in waits(program, mark):
                program = edit.with_entries(program, index, {4: zero})
        found = noticed(program, subject)
        assert "PROGRESS_DEADLOCK" in found
        assert found & READ_TOO_EARLY


class TestPingpong:
    """0x04: turns of the consumer warpgroups."""

    @pytest.fixture(params=[EXACT, CAUSAL], ids=str)
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        return request.param

    def test_0x04_row_1_pipelines_row_12_no_first_credit(self, kernel: Program, subject: Subject) -> None:
        assert noticed(applied(kernel, "drop", [place(kernel, "bar", CREDIT)]), subject) == {"PROGRESS_DEADLOCK"}

    @pytest.mark.parametrize("more", [-128, 128])
    def test_0x04_rows_2_and_3_pipelines_row_13_wrong_number_of_participants(
        self, kernel: Program, subject: Subject, more: int
    ) -> None:
        program = kernel
        for index in [i for mark in (CREDIT, TURN, PASS, FINISH) for i in places(kernel, "bar", mark)]:
            program = edit.with_fields(program, index, bias=more)
        found = noticed(program, subject)
        assert found
        assert found <= {"BARRIER_COUNT_MISMATCH", "PROGRESS_DEADLOCK"}

    def test_0x04_row_2_the_sides_disagree(self, kernel: Program, subject: Subject) -> None:
        program = kernel
        for index in places(kernel, "bar", TURN):
            program = edit.with_fields(program, index, bias=-128)
        assert noticed(program, subject) == {"BARRIER_COUNT_MISMATCH"}

    def test_0x04_row_4_the_producer_is_not_subtracted(self, kernel: Program, subject: Subject) -> None:
        """Waits name the barrier of the physical warpgroup, arrivals that of the logical one."""
        own = writer_before(kernel, min(places(kernel, "bar", TURN)), 2)
        assert edit.named(kernel)[own] == "add"
        program, shifted = edit.constant(kernel, 2)
        assert noticed(edit.with_entries(program, own, {2: shifted}), subject) == {"PROGRESS_DEADLOCK"}

    def test_0x04_row_5_pipelines_row_14_one_group_leaves_out_a_call(self, kernel: Program, subject: Subject) -> None:
        program, credit = kernel, place(kernel, "bar", CREDIT)
        for index in places(kernel, "bar", PASS):
            program = last_warpgroup_only(program, index, credit)
        assert noticed(program, subject) == {"PROGRESS_DEADLOCK"}

    @pytest.mark.parametrize("subject", [WITHOUT_OVERLAP], ids=str)
    def test_0x04_row_6_pipelines_row_15_the_last_pass_is_left_out(self, kernel: Program, subject: Subject) -> None:
        program = applied(kernel, "drop", [place(kernel, "bar", LAST_PASS)])
        assert noticed(program, subject) == {"PROGRESS_DEADLOCK"}

    def test_0x04_row_7_pipelines_row_16_a_credit_for_each_tile(self, kernel: Program, subject: Subject) -> None:
        credit, head = place(kernel, "bar", CREDIT), loops(kernel, places(kernel, "bar", TURN)[0])[-1][0]
        program, first_barrier = edit.constant(kernel, 1)
        program = edit.inserted(edit.with_entries(program, credit, {2: first_barrier}), head, credit)
        found = noticed(last_warpgroup_only(program, head, credit), subject)
        assert "BARRIER_COUNT_MISMATCH" in found
        assert found <= {"BARRIER_COUNT_MISMATCH", "BARRIER_LEFTOVER"}  # left over: no tile has taken a turn

    @pytest.mark.parametrize("mark", [K_WAIT, V_WAIT], ids="KV")
    def test_0x04_row_8_the_token_is_taken_for_readiness(self, kernel: Program, subject: Subject, mark: str) -> None:
        found = noticed(applied(kernel, "drop", waits(kernel, mark)), subject)
        assert found
        assert found <= READ_TOO_EARLY


class TestWork:
    """How a tile passes through a CTA: coordinates and Q to all roles, O to the storer, the slot to a later tile."""

    def test_slot_is_given_back_before_o_has_been_read(self, kernel: Program, subject: Subject) -> None:
        early = applied(kernel, "early-arrival", [arrival(kernel, Q_RELEASE)])
        assert noticed(early, subject) == {"SHARED_WRITE_TO_BUFFER_BEING_READ"}

    def test_slot_is_not_given_back(self, kernel: Program, subject: Subject) -> None:
        assert noticed(applied(kernel, "drop", [arrival(kernel, Q_RELEASE)]), subject) == {"PROGRESS_DEADLOCK"}

    @pytest.mark.parametrize("operator", ["drop", "parity"])
    def test_storer_does_not_wait_for_o_of_this_tile(self, kernel: Program, subject: Subject, operator: str) -> None:
        found = noticed(applied(kernel, operator, [wait(kernel, STAGED_WAIT)]), subject)
        assert "SHARED_WRITE_TO_BUFFER_BEING_READ" in found
        assert found <= {"SHARED_WRITE_TO_BUFFER_BEING_READ", "PROGRESS_DEADLOCK"}

    def test_one_warp_need_not_say_that_its_o_is_staged(self, kernel: Program, subject: Subject) -> None:
        program = kernel
        for index in places(kernel, "mbarrier_init", STAGED_INIT):
            program = applied(program, "count", [index], "-1")
        found = noticed(program, subject)
        assert {"SHARED_WRITE_TO_BUFFER_BEING_READ", "SHARED_READ_NOT_ORDERED_AFTER_WRITE"} <= found

    def test_o_is_staged_before_all_warps_have_read_q(self, kernel: Program, subject: Subject) -> None:
        found = noticed(applied(kernel, "drop", places(kernel, "bar", Q_READ)), subject)
        assert found == {"SHARED_WRITE_TO_BUFFER_BEING_READ"}

    def test_next_tile_is_posted_before_this_slot_is_empty(self, kernel: Program, subject: Subject) -> None:
        found = noticed(applied(kernel, "drop", waits(kernel, POST)), subject)
        assert {"MBARRIER_OVER_ARRIVAL", "SHARED_WRITE_TO_BUFFER_BEING_READ"} <= found

    def test_consumers_do_not_wait_for_the_next_tile(self, kernel: Program, subject: Subject) -> None:
        found = noticed(applied(kernel, "drop", waits(kernel, NEXT_WORK)), subject)
        assert found
        assert found <= READ_TOO_EARLY

    def test_nobody_is_told_that_there_is_no_more(self, kernel: Program, subject: Subject) -> None:
        (close,) = set(arrivals(kernel, CLOSE)) & set(arrivals(kernel, POST))
        assert noticed(applied(kernel, "drop", [close]), subject) == {"PROGRESS_DEADLOCK"}

    def test_counter_is_not_made_ready(self, kernel: Program, subject: Subject) -> None:
        program = kernel
        for index in places(kernel, "st", "tile_scheduler.cuh: *p_.tile_counter = 0;"):
            program = edit.with_operation(program, index, "nop")
        assert noticed(program, subject) == {COUNTER}


class TestTwoStages:
    """0x05: two stages inside one warpgroup."""

    def test_0x05_row_1_pipelines_row_17_a_helper_that_waits_costs_time_only(
        self, kernel: Program, subject: Subject
    ) -> None:
        program, first = kernel, places(kernel, "wgmma_wait", FIRST_S)[0]
        for commit in sorted(places(kernel, "wgmma_commit", NEXT_S), reverse=True):
            program = edit.inserted(program, commit + 1, first)
        assert noticed(program, subject) == set()

    def test_0x05_row_2_wait_0_where_1_was_meant_costs_time_only(self, kernel: Program, subject: Subject) -> None:
        program = kernel
        for index in places(kernel, "wgmma_wait", S):
            program = edit.with_fields(program, index, imm=0)
        assert noticed(program, subject) == set()

    def test_0x05_row_3_pipelines_row_18_the_wait_covers_too_little(self, kernel: Program, subject: Subject) -> None:
        late = applied(kernel, "pending", places(kernel, "wgmma_wait", S))
        assert noticed(late, subject) == {"WGMMA_REGISTER_READ_IN_FLIGHT"}

    @pytest.mark.parametrize("subject", [EXACT], ids=str)  # a speculative softmax has two P
    def test_0x05_row_4_p_is_overwritten_while_pv_reads_it(self, kernel: Program, subject: Subject) -> None:
        found = hazards(applied(kernel, "drop", places(kernel, "wgmma_wait", O)), subject)
        (convert,) = {
            place_of(kernel, i).file for i in places(kernel, "cvt_pack", C + "round_from<S>(P_next, scores);")
        }
        assert any(line.startswith(convert) for line in found["WGMMA_REGISTER_WRITE_IN_FLIGHT"])

    def test_0x05_row_5_o_is_rescaled_while_pv_is_in_flight(self, kernel: Program, subject: Subject) -> None:
        found = hazards(applied(kernel, "drop", places(kernel, "wgmma_wait", O)), subject)
        (scale,) = {(p := place_of(kernel, i)).file + f":{p.line}" for i in places(kernel, "mul", SCALE)}
        assert found["WGMMA_REGISTER_READ_IN_FLIGHT"] == {scale}

    def test_0x05_row_10_o_stays_in_the_old_frame(self, kernel: Program, subject: Subject) -> None:
        program, one = edit.constant(kernel, 0x3F80_0000)
        for index in places(kernel, "mul", SCALE):
            program = edit.with_entries(program, index, {1: one})
        assert noticed(program, subject) == {VALUE}


class TestPipelines:
    """Pipelines and synchronisation; the rows that no other section has."""

    def test_pipelines_row_7_0x02_row_1_a_stage_is_refilled_too_early(self, kernel: Program, subject: Subject) -> None:
        found = noticed(applied(kernel, "drop", [wait(kernel, NEXT_K)]), subject)
        assert found <= {
            "SHARED_WRITE_NOT_ORDERED_AFTER_WRITE",
            "SHARED_WRITE_TO_BUFFER_BEING_READ",
            "MBARRIER_OVER_ARRIVAL",
        }
        assert found

    def test_pipelines_row_19_the_producer_keeps_too_many_registers(self, kernel: Program, subject: Subject) -> None:
        keeps = applied(kernel, "registers", [place(kernel, "setmaxnreg", "hopper/fwd.cu: setmaxnreg_dec")])
        assert noticed(keeps, subject) == {"REGISTERS_POOL_DEADLOCK"}
