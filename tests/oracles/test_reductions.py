"""Ordered reductions: turns, float32 order, missing slots and the bridge over them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles import reductions
from cupyfa.oracles.reductions import Writer, causal_writers, dense_lock, gqa_lock, run_writers, spt_lock, sum_in_order
from cupyfa.oracles.violations import ContractViolation

CONTRIBUTIONS = [100000000.0, 1.0, -100000000.0, 3.0]
PROPERTIES = settings(deadline=None, derandomize=True, max_examples=80)


def writers(values=CONTRIBUTIONS, **fields):
    return [Writer(n, n, value, **fields) for n, value in enumerate(values)]


def test_float32_order_decides_the_sum():
    assert sum_in_order(CONTRIBUTIONS) == 3.0  # writer order
    assert sum_in_order(CONTRIBUTIONS, [0, 2, 1, 3]) == 4.0  # an order of arrival
    sums = {float(sum_in_order(CONTRIBUTIONS, order)) for order in itertools.permutations(range(4))}
    assert {3.0, 4.0} < sums  # and there are more
    # The exact sum is 4: a declared order makes the result repeatable, not more accurate.
    assert sum(CONTRIBUTIONS) == 4.0
    assert sum_in_order(CONTRIBUTIONS).dtype == np.float32


def test_dense_order():
    outcome = run_writers([Writer(n, dense_lock(n)) for n in (2, 0, 3, 1)])
    assert outcome.order == (0, 1, 2, 3)


def test_causal_shortest_first_order():
    order, locks = causal_writers([1, 2, 3])
    assert order == [3, 2, 1]
    assert locks == {3: 0, 2: 1, 1: 2}
    outcome = run_writers([Writer(n, locks[n]) for n in (1, 2, 3)])
    assert outcome.order == (3, 2, 1)


def test_gqa_order():
    heads_per_kv = 4
    for kv in range(3):
        heads = range(kv * heads_per_kv, (kv + 1) * heads_per_kv)
        outcome = run_writers([Writer(head, gqa_lock(head, heads_per_kv)) for head in reversed(heads)])
        assert outcome.order == tuple(heads)


def test_missing_slot_deadlocks_without_the_bridge():
    present = [w for w in writers() if w.name != 1]
    with pytest.raises(reductions.Deadlock, match=r"turn 1 has no writer; after \[0\], writers \[2, 3\]"):
        run_writers(present)
    outcome = run_writers(present, bridge=True)
    assert outcome.order == (0, 2, 3)
    assert [e.action for e in outcome.events if e.writer == -1] == ["bridge"]


def test_missing_slots_at_the_ends():
    present = [w for w in writers() if w.name in (1, 2)]
    with pytest.raises(reductions.Deadlock, match=r"turn 0 has no writer; after \[\]"):
        run_writers(present)
    outcome = run_writers(present, turns=6, bridge=True)
    assert outcome.order == (1, 2)
    assert outcome.events[-1].semaphore == 6  # the next tile of the row finds the count it waits for


def test_compact_numbering_needs_no_bridge():
    order, locks = causal_writers([0, 1, 3])
    with pytest.raises(reductions.Deadlock):
        run_writers([Writer(n, locks[n]) for n in order])
    assert run_writers([Writer(n, turn) for turn, n in enumerate(order)]).order == (3, 1, 0)


def test_release_before_completion_changes_the_order():
    # Writer 1 is slow; its turn is released when its addition is issued, so those of 2 and 3 complete before it.
    slow = [Writer(n, n, value, latency=9.0 if n == 1 else 0.5) for n, value in enumerate(CONTRIBUTIONS)]
    assert run_writers(slow).order == (0, 1, 2, 3)
    assert run_writers(slow).total == 3.0
    early = run_writers(slow, early_release=True)
    assert early.order == (0, 2, 3, 1)
    assert early.total == 4.0


@pytest.mark.parametrize("early_release", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("latency", [0.0, 1.0])
def test_each_writer_releases_once(early_release, slots, latency):
    outcome = run_writers(writers(latency=latency), slots=slots, early_release=early_release)
    assert [e.writer for e in outcome.events if e.action == "release"] == [0, 1, 2, 3]
    assert [e.semaphore for e in outcome.events if e.action == "release"] == [1, 2, 3, 4]
    assert outcome.events[-1].semaphore == 4
    for writer in range(4):
        actions = [e.action for e in outcome.events if e.writer == writer]
        assert actions == (["add", "release", "added"] if early_release else ["add", "added", "release"])


def run_to_the_end(run):
    while True:
        run.step()


def test_a_machine_that_never_stops_is_stopped():
    run = reductions._Run(writers(), None, None, True, True, False)
    run.turns = 10**9  # as if the bridge did not know where the schedule ends
    with pytest.raises(RuntimeError, match=r"more than 16 events; the last is Addition\(.*'bridge'"):
        run_to_the_end(run)


def test_launch_order_against_turn_order():
    # Two slots, longest first: the residents wait for a turn whose writer cannot be launched.
    order, locks = causal_writers(range(4))
    launched = [Writer(n, locks[n]) for n in sorted(order)]
    with pytest.raises(reductions.Deadlock, match="turn 0 belongs to writer 3, no slot"):
        run_writers(launched, slots=2)
    assert run_writers(launched, slots=4).order == (3, 2, 1, 0)
    assert run_writers(launched[::-1], slots=1).order == (3, 2, 1, 0)


def test_duplicate_turn():
    with pytest.raises(reductions.DuplicateTurn, match="writers 0 and 1 both hold turn 0"):
        run_writers([Writer(0, 0), Writer(1, 0)])


def test_waiting_costs_time():
    times = [Writer(n, n, ready=float(9 - 3 * n)) for n in range(4)]
    ordered, free = run_writers(times), run_writers(times, ordered=False)
    assert ordered.events[-1].time == 9 + 4
    assert free.order == (3, 2, 1, 0)
    assert free.events[-1].time == 9 + 1


@PROPERTIES
@given(
    st.lists(st.floats(-1e8, 1e8, width=32), min_size=1, max_size=6),
    st.data(),
)
def test_order_of_writers_does_not_depend_on_timing(values, data):
    count = len(values)
    times = data.draw(st.lists(st.tuples(st.floats(0, 9), st.floats(0.1, 5)), min_size=count, max_size=count))
    launch = data.draw(st.permutations(range(count)))
    timed = [Writer(n, n, values[n], latency=times[n][1], ready=times[n][0]) for n in launch]
    outcome = run_writers(timed)
    assert outcome.order == tuple(range(count))
    assert outcome.total == sum_in_order(values)
    free = run_writers(timed, ordered=False)
    assert sorted(free.order) == list(range(count))
    assert free.total == sum_in_order(values, free.order)
    assert free.events[-1].time <= outcome.events[-1].time


@PROPERTIES
@given(st.sets(st.integers(0, 9), min_size=1), st.integers(1, 4))
def test_bridge_completes_any_subset(locks, slots):
    present = [Writer(lock, lock) for lock in sorted(locks)]
    outcome = run_writers(present, turns=10, slots=slots, bridge=True)
    assert outcome.order == tuple(sorted(locks))
    assert outcome.events[-1].semaphore == 10
    gaps = set(range(max(locks) + 1)) - locks
    if gaps:
        with pytest.raises(reductions.Deadlock, match=f"turn {min(gaps)} has no writer"):
            run_writers(present, slots=slots)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: dense_lock(-1), "n_block"),
        (lambda: spt_lock(4, 4), "0 .. 3"),
        (lambda: gqa_lock(1, 0), "heads_per_kv"),
        (lambda: run_writers([Writer(0, 0)], slots=0), "slots"),
        (lambda: run_writers([Writer(0, 3)], turns=3), "3 turns do not cover turn 3"),
        (lambda: causal_writers([1, 1]), "one tile twice"),
        (lambda: sum_in_order([1, 2], [0, 5]), r"order \[0, 5\] must name each of 0 .. 1 once"),
        (lambda: sum_in_order([1, 2], [0, 0]), "once"),
        (lambda: sum_in_order([1, 2], [0, -1]), "once"),
        (lambda: Writer(0, -1), "lock is -1"),
        (lambda: Writer(0, 0, latency=float("nan")), "latency is nan"),
        (lambda: Writer(0, 0, ready=-1.0), "ready is -1.0"),
    ],
)
def test_bad_input(call, word):
    with pytest.raises(ContractViolation, match=word):
        call()
