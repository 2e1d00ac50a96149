"""Deterministic dQ turns against the forward's longest-first order."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.reductions import sum_in_order
from cupyfa.oracles.scheduling import turns
from cupyfa.oracles.scheduling.makespan import list_schedule
from cupyfa.oracles.scheduling.turns import TurnDeadlock, causal_turns

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=60)


def test_doctests():
    assert doctest.testmod(turns).failed == 0


@EXAMPLES
@given(blocks=st.integers(1, 14), workers=st.integers(1, 16))
def test_shortest_first_never_stalls(blocks, workers):
    run = causal_turns(blocks, range(blocks)[::-1], workers, descending_turns=True)
    assert not run.stalled.any()
    assert run.writers == tuple(tuple(range(m, -1, -1)) for m in range(blocks))
    assert run.makespan >= max(blocks, blocks * (blocks + 1) / 2 / workers)


@EXAMPLES
@given(blocks=st.integers(1, 14), workers=st.integers(1, 16), longest_first=st.booleans())
def test_a_worker_takes_the_next_cta_when_it_is_free(blocks, workers, longest_first):
    order = range(blocks) if longest_first else range(blocks)[::-1]
    run = causal_turns(blocks, order, workers, descending_turns=not longest_first)
    starts = run.start[list(order)]
    np.testing.assert_array_equal(starts, np.sort(starts))
    for time in starts:
        assert 1 <= np.sum((run.start <= time) & (run.finish > time)) <= workers
    np.testing.assert_array_equal(starts[workers:], np.sort(run.finish)[: max(0, blocks - workers)])


@EXAMPLES
@given(blocks=st.integers(2, 14), workers=st.integers(2, 16))
def test_longest_first_stalls_its_first_writers(blocks, workers):
    """0x0B failure: long tiles start early, the first writer of a row waits, and the float32 order is another."""
    run = causal_turns(blocks, range(blocks), workers, descending_turns=False)
    resident = min(workers, blocks)
    np.testing.assert_array_equal(run.stalled[:resident], np.arange(resident))  # n others before block n
    assert run.writers == tuple(tuple(range(m + 1)) for m in range(blocks))
    reference = causal_turns(blocks, range(blocks)[::-1], workers, descending_turns=True)
    assert run.stalled.sum() > reference.stalled.sum() == 0


def test_stalls_eat_what_longest_first_gains():
    costs = 32 - np.arange(32)
    longest = causal_turns(32, range(32), 8, descending_turns=False)
    shortest = causal_turns(32, range(32)[::-1], 8, descending_turns=True)
    # Without turns longest first is the better start order, and ends where the bound is.
    assert list_schedule(costs, range(32), 8).makespan == costs.sum() / 8 == 66
    assert list_schedule(costs, range(32)[::-1], 8).makespan == shortest.makespan == 80
    # With turns it ends no earlier than shortest first, and the multiprocessors are held while their CTAs wait.
    assert longest.makespan == 80
    assert (shortest.finish - shortest.start).sum() == costs.sum()
    assert (longest.finish - longest.start).sum() == costs.sum() + longest.stalled.sum() > 1.2 * costs.sum()


@pytest.mark.parametrize(("order", "descending"), [(range(6), True), (range(6)[::-1], False)])
def test_turns_against_the_start_order_deadlock(order, descending):
    with pytest.raises(TurnDeadlock, match="have not started"):
        causal_turns(6, order, 3, descending)
    assert causal_turns(6, order, 6, descending).makespan >= 6  # all resident: slow at worst


def test_the_order_of_turns_is_visible_in_float32():
    shortest = causal_turns(3, [2, 1, 0], 3, descending_turns=True).writers[2]
    longest = causal_turns(3, [0, 1, 2], 3, descending_turns=False).writers[2]
    terms = [2.0**24, 1.0, 1.0]  # of key blocks 0, 1 and 2
    assert float(sum_in_order(terms, longest)) == 2.0**24
    assert float(sum_in_order(terms, shortest)) == 2.0**24 + 2


@pytest.mark.parametrize(
    ("blocks", "order", "workers", "message"),
    [
        (3, [0, 1, 1], 2, "each of 3 key blocks once"),
        (3, [0, 1], 2, "each of 3 key blocks once"),
        (3, [0, 1, 2], 0, "workers is 0"),
        (0, [], 1, "blocks is 0"),
    ],
)
def test_bad_input_is_named(blocks, order, workers, message):
    with pytest.raises(ValueError, match=message):
        causal_turns(blocks, order, workers, descending_turns=True)
