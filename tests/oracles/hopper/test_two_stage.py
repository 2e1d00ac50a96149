"""The two-stage loop of a warpgroup: its figures, what each wait proves, and its failures (specification 0x05)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.hopper.ledger import REFERENCE_REGISTERS
from cupyfa.oracles.hopper.live_words import live_words
from cupyfa.oracles.hopper.roles import Config, Consumer, Durations, run
from cupyfa.oracles.hopper.two_stage import (
    Act,
    FrameMismatch,
    MissingProduct,
    check,
    earliest_wait,
    schedule,
    serial_units,
    timeline,
    two_stage_units,
)
from cupyfa.oracles.hopper.wgmma_queue import (
    AccumulatorInFlight,
    MissingFence,
    OperandInFlight,
    ReleaseBeforeCompletion,
    StaleSharedOperand,
    WgmmaQueue,
)

exact = settings(deadline=None, derandomize=True, max_examples=150)

OPTIONS = [{}, {"overlap": False}, {"rescale_first": True}, {"overlap": False, "rescale_first": True}]


def moved(acts, kind, tile, *, before):
    """The schedule with one act moved to just before another."""
    rest = [act for act in acts if act != Act(kind, tile)]
    return [*rest[: rest.index(before)], Act(kind, tile), *rest[rest.index(before) :]]


def waits_of(acts, change):
    """The schedule with its waits changed."""
    return [Act("wait", change(act.tile)) if act.kind == "wait" else act for act in acts]


# --- Figures ---


def test_printed_bound():
    assert serial_units(5, 1, 1, 1) == 15
    assert two_stage_units(5, 1, 1, 1) == 11
    assert f"{15 / 11:.2f}" == "1.36"
    assert timeline(schedule(5), 1, 1, 1)[0] == 11
    assert timeline(schedule(5, overlap=False), 1, 1, 1)[0] == 15


@exact
@given(st.integers(1, 20), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_the_schedule_reaches_its_bound(blocks, qk, softmax, pv):
    assert timeline(schedule(blocks), qk, softmax, pv)[0] == two_stage_units(blocks, qk, softmax, pv)
    assert timeline(schedule(blocks, overlap=False), qk, softmax, pv)[0] == serial_units(blocks, qk, softmax, pv)
    assert two_stage_units(blocks, qk, softmax, pv) <= serial_units(blocks, qk, softmax, pv)


@exact
@given(st.integers(1, 12), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(2, 3))
def test_the_kernels_loop_on_the_machine_reaches_it_too(blocks, qk, softmax, pv, stages):
    for overlap, bound in ((True, two_stage_units), (False, serial_units)):
        config = Config(consumers=1, stages=stages, overlap=overlap, pingpong=False)
        cta = run(config, [blocks], Durations(qk=qk, softmax=softmax, pv=pv))
        assert cta.machine.now == bound(blocks, qk, softmax, pv)


@pytest.mark.parametrize(
    ("removed", "milliseconds", "tflops"), [("", 3.538, 661), ("warps", 4.105, 570), ("pipe", 4.021, 582)]
)
def test_reported_ablation_is_consistent(removed, milliseconds, tflops):
    """The paper's table 2 by the forward FLOP convention, 4 B H S^2 d."""
    flops = 4 * 4 * 16 * 8448**2 * 128
    assert flops / milliseconds * 1e3 / 1e12 == pytest.approx(tflops, rel=2e-3), removed


# --- Legality by age ---


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("blocks", range(1, 8))
def test_schedules_are_legal(blocks, options):
    check(schedule(blocks, **options))


@pytest.mark.parametrize(
    ("kind", "pending"),
    [("softmax", 1), ("release_k", 1), ("rescale_o", 0), ("convert_p", 0), ("release_v", 0)],
)
def test_earliest_legal_point(kind, pending):
    assert earliest_wait(kind) == pending


def test_a_wait_proves_age_and_not_a_name():
    """The same two instructions, committed in the other order, prove the other product."""
    for order, proven in ((("QK", "PV"), "QK"), (("PV", "QK"), "PV")):
        queue = WgmmaQueue()
        for name in order:
            queue.fence()
            queue.issue("S" if name == "QK" else "O")
            queue.commit(name)
        assert [group.name for group in queue.wait(1)] == [proven]
        assert [group.name for group in queue.wait(0)] == [order[1]]
        assert queue.wait(0) == []


def test_commits_exchanged_in_the_loop():
    pair = [Act("issue_qk", 1), Act("issue_pv", 0)]
    acts = schedule(3)
    place = acts.index(pair[0])
    acts[place : place + 2] = pair[::-1]
    with pytest.raises(ReleaseBeforeCompletion, match=r"QK\(1\) reads"):
        check(acts)


@exact
@given(st.lists(st.integers(0, 6), min_size=1, max_size=20))
def test_wait_leaves_at_most_so_many_pending(waits):
    queue = WgmmaQueue()
    for newest, pending in enumerate(waits):
        queue.issue(f"D{newest}")
        queue.commit(f"group {newest}")
        queue.wait(pending)
        unproven = [group.name for group in queue.groups if not group.proven]
        assert len(unproven) <= pending
        assert unproven == [f"group {i}" for i in range(newest + 1 - len(unproven), newest + 1)]


def test_products_may_accumulate_into_one_register_set_in_flight():
    queue = WgmmaQueue()
    for name in ("first", "second"):
        queue.issue("O", "P")
        queue.commit(name)
    queue.wait(1)
    with pytest.raises(AccumulatorInFlight, match="O, which second writes"):
        queue.access("O")


# --- Ordering primitives: what each does not prove ---


class TestFences:
    def test_wgmma_fence_orders_registers(self):
        queue = WgmmaQueue()
        queue.access("O")
        with pytest.raises(MissingFence, match=r"\['O'\]"):
            queue.issue("O")
        queue.fence()
        queue.issue("O")

    def test_wgmma_fence_is_no_wait(self):
        queue = WgmmaQueue()
        queue.issue("S")
        queue.commit("QK")
        queue.fence()
        with pytest.raises(AccumulatorInFlight):
            queue.access("S")

    def test_wgmma_fence_is_no_proxy_fence(self):
        queue = WgmmaQueue()
        queue.store_shared("P")
        queue.fence()
        with pytest.raises(StaleSharedOperand, match="issues with P and no async-proxy fence"):
            queue.issue("O", "P")

    def test_proxy_fence_shows_shared_p(self):
        queue = WgmmaQueue()
        queue.store_shared("P")
        queue.proxy_fence()
        queue.issue("O", "P")

    def test_proxy_fence_is_no_wait(self):
        queue = WgmmaQueue()
        queue.issue("O", "P")
        queue.commit("PV")
        queue.proxy_fence()
        with pytest.raises(OperandInFlight):
            queue.store_shared("P")

    def test_wait_is_no_proxy_fence(self):
        queue = WgmmaQueue()
        queue.store_shared("P")
        queue.wait(0)
        with pytest.raises(StaleSharedOperand):
            queue.issue("O", "P")

    def test_uncommitted_products_are_covered_by_no_wait(self):
        queue = WgmmaQueue()
        queue.issue("S")
        queue.wait(0)
        with pytest.raises(AccumulatorInFlight, match="uncommitted"):
            queue.access("S")


# --- The failure table ---


class TestWaitsTooEarly:
    """Correct and slow: nothing but the time shows it."""

    def test_helper_that_waits_after_each_product(self):
        acts = []
        for act in schedule(5):
            acts.append(act)
            if act.kind in ("issue_qk", "issue_pv"):
                acts.append(Act("wait", 0))
        check(acts)
        assert timeline(acts, 1, 1, 1)[0] == serial_units(5, 1, 1, 1) == 15

    def test_wait_0_where_1_was_meant(self):
        acts = waits_of(schedule(5), lambda pending: 0)
        check(acts)
        assert timeline(acts, 1, 1, 1)[0] == 15
        assert timeline(schedule(5), 1, 1, 1)[0] == 11

    def test_on_the_machine(self):
        class WaitsForAll(Consumer):
            def complete(self, pending):
                return super().complete(0)

        config = Config(consumers=1, pingpong=False)
        durations = Durations(qk=1, softmax=1, pv=1)
        assert run(config, [5], durations, consumer=WaitsForAll).machine.now == 15
        assert run(config, [5], durations).machine.now == 11


def test_scores_read_before_their_wait():
    acts = moved(schedule(3), "softmax", 1, before=Act("issue_pv", 0))
    with pytest.raises(AccumulatorInFlight, match=r"touches S, which QK\(1\) writes"):
        check(acts)


def test_wait_covers_too_little():
    with pytest.raises((AccumulatorInFlight, ReleaseBeforeCompletion)):
        check(waits_of(schedule(3), lambda pending: pending + 1))


def test_p_overwritten_while_pv_reads_it():
    """Straight after softmax, where the equation would allow it."""
    acts = schedule(3)
    place = acts.index(Act("softmax", 1)) + 1
    acts.remove(Act("convert_p", 1))
    acts.insert(place, Act("convert_p", 1))
    with pytest.raises(OperandInFlight, match=r"overwrites P, which PV\(0\) reads"):
        check(acts)


def test_o_rescaled_while_pv_is_in_flight():
    acts = schedule(3)
    place = acts.index(Act("softmax", 1)) + 1
    acts.remove(Act("rescale_o", 1))
    acts.insert(place, Act("rescale_o", 1))
    with pytest.raises(AccumulatorInFlight, match=r"touches O, which PV\(0\) writes"):
        check(acts)


@pytest.mark.parametrize(
    ("kind", "tile", "before", "reader"),
    [("release_k", 1, Act("issue_pv", 0), r"QK\(1\)"), ("release_v", 0, Act("softmax", 1), r"PV\(0\)")],
)
def test_stage_released_before_its_product_completes(kind, tile, before, reader):
    with pytest.raises(ReleaseBeforeCompletion, match=f"a tile that {reader} reads"):
        check(moved(schedule(3), kind, tile, before=before))


def test_a_release_too_early_keeps_all_counters_balanced():
    """The ring's ledger cannot find it: acquires, commits, waits and releases agree."""

    class Blind(Consumer):
        def issue_output(self, v):
            super().issue_output(v)
            self.V.release(v)

        def release_v(self, slot):
            pass

    cta = run(Config(consumers=1, pingpong=False), [6], Durations(softmax=50), consumer=Blind)
    assert cta.v.produced == cta.v.freed == 6  # `run` has compared every event


def test_temporaries_that_live_too_long_do_not_fit():
    """What the equations count leaves 80 words of 240; one more score tile leaves 16, and P as well leaves none."""
    words, budget = live_words(128, 128, 128, consumers=2, p_itemsize=2), REFERENCE_REGISTERS[2].consumer
    assert budget - words.total == 80
    assert budget - words.total - words.scores == 16
    assert budget - words.total - words.scores - words.probabilities < 0


def test_order_does_not_prove_overlap():
    """The same legal order, on a machine whose products take no time beside softmax: nothing is gained."""
    assert timeline(schedule(5), 1, 1, 1)[0] < serial_units(5, 1, 1, 1)
    assert timeline(schedule(5), 0, 1, 0)[0] == serial_units(5, 0, 1, 0)


class TestFramesAndOrder:
    def test_rescale_moved_without_its_bookkeeping(self):
        """After the wait of its own step but for the maximum of the step before: P and O are in different frames."""
        acts = [Act("rescale_o", act.tile - 1) if act.kind == "rescale_o" else act for act in schedule(4)]
        with pytest.raises(FrameMismatch, match=r"PV\(1\) adds P of frame 1 to O of frame 0"):
            check(acts)

    def test_rescale_left_out(self):
        with pytest.raises(FrameMismatch):
            check([act for act in schedule(4) if act.kind != "rescale_o"])

    def test_both_placements_are_legal_and_take_the_same_time_here(self):
        for acts in (schedule(5), schedule(5, rescale_first=True)):
            check(acts)
            assert timeline(acts, 1, 1, 1)[0] == 11

    @pytest.mark.parametrize("kind", ["softmax", "convert_p", "issue_pv"])
    def test_every_step_is_needed(self, kind):
        # Without PV(1), the newest group is QK(2) itself: wait 1 proves nothing about it.
        with pytest.raises(ReleaseBeforeCompletion if kind == "issue_pv" else MissingProduct):
            check([act for act in schedule(3) if act != Act(kind, 1)])

    def test_wait_before_the_maximum_is_known(self):
        with pytest.raises(MissingProduct, match="which is not known"):
            check(moved(schedule(3), "rescale_o", 2, before=Act("issue_qk", 2)))

    def test_scores_overwritten(self):
        acts = schedule(2)
        acts.remove(Act("convert_p", 0))
        with pytest.raises(MissingProduct, match=r"QK\(1\) overwrites the scores of 0"):
            check(acts)

    def test_stored_too_early(self):
        acts = schedule(3)
        acts.remove(Act("wait", 0))
        acts.remove(acts[-1])
        acts.insert(acts.index(Act("issue_pv", 2)), Act("store_o", 2))
        with pytest.raises((MissingProduct, ReleaseBeforeCompletion)):
            check(acts)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule(0), "0 blocks"),
        (lambda: two_stage_units(0, 1, 1, 1), "0 blocks"),
        (lambda: two_stage_units(1, -1, 1, 1), "qk is -1"),
        (lambda: serial_units(-1, 1, 1, 1), "-1 blocks"),
        (lambda: serial_units(1, 1, 1, float("nan")), "pv is nan"),
        (lambda: timeline(schedule(1), 1, -1, 1), "softmax is -1"),
        (lambda: Act("issue_kq", 0), "no act is 'issue_kq'"),
        (lambda: Act("softmax", -1), "of tile -1"),
        (lambda: check([Act("release_k", 0)]), "K of 0 is given back"),
        (lambda: check([Act("release_v", 0)]), "V of 0 is given back"),
        (lambda: WgmmaQueue().wait(-1), "wait_group -1"),
        (lambda: earliest_wait("issue_qk"), "no wait makes issue_qk legal"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
