"""Makespan: the printed example, the bounds, and the host model of the shipped kernel's scheduler."""

import doctest
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import make_problem

from cupyfa import schedule as host
from cupyfa.oracles.scheduling import makespan
from cupyfa.oracles.scheduling.costs import TileCost, visited_key_blocks
from cupyfa.oracles.scheduling.makespan import (
    Placement,
    Schedule,
    TileSetViolation,
    grid_stride_schedule,
    list_makespan_bound,
    list_schedule,
    makespan_lower_bound,
    physical_grid,
)
from cupyfa.oracles.scheduling.orders import TileGrid, order_costs, sectioned_order

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=150)
COSTS = st.lists(st.integers(1, 40), min_size=1, max_size=40)
WORKERS = st.integers(1, 12)
TOY = [1, 2, 3, 4, 5, 6]


def test_doctests():
    assert doctest.testmod(makespan).failed == 0


# --- The worked example ---


def test_lexical_order_ends_at_9():
    run = list_schedule(TOY, range(6), 3)
    assert run.loads.tolist() == [5, 7, 9]
    assert run.makespan == 9
    assert run.balance == pytest.approx(7 / 9)


def test_longest_first_ends_at_7_which_is_the_bound():
    run = list_schedule(TOY, reversed(range(6)), 3)
    assert run.loads.tolist() == [7, 7, 7]
    assert run.makespan == makespan_lower_bound(TOY, 3) == max(21 / 3, 6) == 7


def test_placements_are_the_gantt_chart():
    run = list_schedule(TOY, reversed(range(6)), 3)
    assert run.placements[:4] == (Placement(5, 0, 0, 6), Placement(4, 1, 0, 5), Placement(3, 2, 0, 4), (2, 2, 4, 7))


def spec_list_schedule(tile_costs, logical_order, worker_count):
    """The reference: a linear search for the least loaded worker, the lowest among equals."""
    loads = [0] * worker_count
    out = []
    for tile in logical_order:
        worker = min(range(worker_count), key=lambda p: (loads[p], p))
        out.append((tile, worker, loads[worker], loads[worker] + tile_costs[tile]))
        loads[worker] += tile_costs[tile]
    return out


@EXAMPLES
@given(costs=COSTS, workers=WORKERS, data=st.data())
def test_heap_and_linear_search_agree(costs, workers, data):
    order = data.draw(st.permutations(range(len(costs))))
    assert list(list_schedule(costs, order, workers).placements) == spec_list_schedule(costs, order, workers)


# --- Bounds ---


@EXAMPLES
@given(costs=COSTS, workers=WORKERS, data=st.data())
def test_every_schedule_lies_between_the_bounds(costs, workers, data):
    order = data.draw(st.permutations(range(len(costs))))
    lower = makespan_lower_bound(costs, workers)
    assert lower <= list_schedule(costs, order, workers).makespan * (1 + 1e-12)
    assert list_schedule(costs, order, workers).makespan <= list_makespan_bound(costs, workers) * (1 + 1e-12)
    for alternate in (False, True):
        assert lower <= grid_stride_schedule(costs, order, workers, alternate).makespan * (1 + 1e-12)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(costs=st.lists(st.integers(1, 12), min_size=1, max_size=6), workers=st.integers(1, 3))
def test_longest_first_is_within_a_third_of_the_optimum(costs, workers):
    best = min(
        max(sum(c for c, p in zip(costs, owner, strict=True) if p == worker) for worker in range(workers))
        for owner in itertools.product(range(workers), repeat=len(costs))
    )
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    assert makespan_lower_bound(costs, workers) <= best
    assert list_schedule(costs, order, workers).makespan <= best * (4 / 3 - 1 / (3 * workers)) + 1e-9  # Graham 1969


def test_the_bounds_are_reached():
    assert makespan_lower_bound([10, 1, 1], 3) == 10  # one long tile
    tail = [1] * 6 + [3]  # the long tile last, all workers equally loaded before: sum / 3 + 2 / 3 * 3
    assert list_schedule(tail, None, 3).makespan == list_makespan_bound(tail, 3) == 5
    assert makespan_lower_bound([], 4) == list_makespan_bound([], 4) == 0


# --- Static persistence ---


def test_grid_stride_advances_by_the_physical_grid():
    run = grid_stride_schedule([1] * 10, None, 4)
    assert [[p.tile for p in run.placements if p.worker == w] for w in range(4)] == [
        [0, 4, 8],
        [1, 5, 9],
        [2, 6],
        [3, 7],
    ]


def test_persistence_is_not_longest_first():
    """0x0B failure: every CTA computes several tiles, and still one stride column has all the long ones."""
    blocks = np.arange(1, 5)  # four query tiles per head, a grid of four: CTA m gets tile m of every head
    costs = np.tile(blocks, 16)
    static = grid_stride_schedule(costs, None, 4)
    assert [sum(p.worker == w for p in static.placements) for w in range(4)] == [16] * 4  # all look equally busy
    assert static.makespan == 64 == 1.6 * makespan_lower_bound(costs, 4)
    assert list_schedule(costs, np.argsort(-costs, kind="stable"), 4).makespan == makespan_lower_bound(costs, 4) == 40


def test_alternating_rounds_mend_that_column():
    costs = np.tile(np.arange(1, 5), 16)
    assert grid_stride_schedule(costs, None, 4, alternate=True).makespan == 40


def test_increasing_blocks_leave_the_long_tiles_for_the_end():
    """0x0B failure: causal query blocks in rising order; all tiles are right and the tail is long."""
    for heads, blocks, workers in ((1, 64, 13), (4, 32, 24), (16, 16, 132)):
        rising = np.repeat(np.arange(1, blocks + 1), heads)
        falling = rising[::-1]
        up, down = list_schedule(rising, None, workers), list_schedule(falling, None, workers)
        assert up.loads.sum() == down.loads.sum()  # the same work
        assert up.makespan > 1.05 * down.makespan
        last = max(up.placements, key=lambda p: p.finish)
        assert rising[last.tile] > 0.75 * blocks  # who ends last has a long tile
        last = max(down.placements, key=lambda p: p.finish)
        assert falling[last.tile] <= 0.5 * blocks


@pytest.mark.parametrize(
    ("tiles", "sms", "cluster", "grid"), [(4096, 132, 1, 132), (7, 132, 1, 7), (4096, 148, 2, 148), (5, 147, 2, 6)]
)
def test_physical_grid(tiles, sms, cluster, grid):
    assert physical_grid(tiles, sms, cluster) == grid


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: list_schedule([1, 2, 3], [0, 1, 1], 2), TileSetViolation, "each of the 3 tiles exactly once"),
        (lambda: list_schedule([1, 2], [0.4, 1.2], 2), TileSetViolation, "exactly once"),
        (lambda: grid_stride_schedule([1, 2, 3], [0, 1], 2), TileSetViolation, "exactly once"),
        (lambda: list_schedule([1, -2], None, 2), ValueError, "none of them negative"),
        (lambda: list_schedule([[1, 2]], None, 2), ValueError, r"shape \(1, 2\)"),
        (lambda: makespan_lower_bound([1], 0), ValueError, "workers is 0"),
        (lambda: physical_grid(8, 2, cluster=4), ValueError, "cluster of 4 does not fit 2"),
        (lambda: Schedule((), 0), ValueError, "workers is 0"),
        (lambda: Schedule((Placement(0, 2, 0, 1),), 2), ValueError, "worker 2 of 2"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- The host model of the shipped scheduler (cupyfa/schedule.py) ---


@EXAMPLES
@given(
    batch=st.integers(1, 4),
    groups=st.integers(1, 6),
    group=st.integers(1, 4),
    seqlen_q=st.integers(1, 900),
    seqlen_k=st.integers(1, 1500),
    right=st.just(0) | st.integers(1, 1000),
    section_kv=st.integers(1, 8),
    workers=st.integers(1, 40),
)
def test_host_model_agrees_with_the_simulator(batch, groups, group, seqlen_q, seqlen_k, right, section_kv, workers):
    window = (None, right)  # of causal attention, or the right side alone
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    problem = make_problem(heads_q=groups * group, heads_kv=groups, window_size=window, **sizes)
    costs = TileCost(fixed=1).of(visited_key_blocks(seqlen_q, seqlen_k, 128, 80, causal=False, window=window))
    np.testing.assert_array_equal(host.tile_costs(problem, 128, 80), costs)
    grid = TileGrid(batch, groups * group, len(costs), group)
    order = order_costs(sectioned_order(grid, section_kv, across_batches=True), [costs])
    np.testing.assert_array_equal(host.tile_order(costs, batch * groups * group, section_kv * group), order)
    run = grid_stride_schedule(order, None, workers, alternate=True)
    assert host.balance(order, workers) == pytest.approx(run.balance, rel=1e-12)


def test_host_model_of_a_full_mask():
    problem = make_problem(seqlen_q=300, seqlen_k=500, causal=False)
    expected = TileCost(fixed=1).of(visited_key_blocks(300, 500, 128, 80, causal=False))
    np.testing.assert_array_equal(host.tile_costs(problem, 128, 80), expected)
