"""Hardware-assisted distribution: the token protocol with its named faults, and what it does not promise."""

import doctest
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.scheduling import clc
from cupyfa.oracles.scheduling.cache import key_value_traffic
from cupyfa.oracles.scheduling.clc import (
    ClcToken,
    MissingTail,
    RequestAfterEnd,
    ResponseNotWaited,
    ResponseOverwritten,
    TokenNotHeld,
    WorkQueue,
    clc_allowed,
    clc_coordinates,
    clc_schedule,
)
from cupyfa.oracles.scheduling.costs import causal_key_blocks
from cupyfa.oracles.scheduling.makespan import TileSetViolation, list_schedule
from cupyfa.oracles.scheduling.orders import TileGrid, lexical_order, order_costs, sectioned_order

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=120)


def test_doctests():
    assert doctest.testmod(clc).failed == 0


def begun(items=(0, 1, 2)):
    token = ClcToken(WorkQueue(items))
    token.initial_work()
    return token


def test_the_legal_loop_sees_every_item_once_and_closes():
    token = ClcToken(WorkQueue(range(4)))
    seen, work = [], token.initial_work()
    while work is not None:
        seen.append(work)
        token.prefetch()
        token.wait()
        work = token.current()
        token.release()
    token.tail()
    token.leave()
    assert seen == [0, 1, 2, 3]
    actions = [event.action for event in token.events]
    assert actions == ["initial", *["request", "wait", "read", "release"] * 4, "tail"]
    waits = [event.phase for event in token.events if event.action == "wait"]
    assert waits == [0, 1, 0, 1]  # one slot, so its parity alternates


def test_read_without_wait():
    token = begun()
    token.prefetch()
    with pytest.raises(ResponseNotWaited, match="has not waited for"):
        token.current()


def test_request_over_an_unreleased_response():
    token = begun()
    token.prefetch()
    with pytest.raises(ResponseOverwritten):
        token.prefetch()
    token.wait()
    with pytest.raises(ResponseOverwritten):
        token.prefetch()


def test_wait_without_request_and_release_without_response():
    token = begun()
    with pytest.raises(TokenNotHeld, match="nobody requested"):
        token.wait()
    with pytest.raises(TokenNotHeld, match="does not hold"):
        token.release()
    with pytest.raises(TokenNotHeld, match="initial work twice"):
        token.initial_work()


def test_request_after_the_end():
    token = begun([0])
    token.prefetch()
    token.wait()
    assert token.current() is None
    token.release()
    with pytest.raises(RequestAfterEnd):
        token.prefetch()


def test_tail_is_needed_and_needs_an_empty_slot():
    token = begun()
    with pytest.raises(MissingTail):
        token.leave()
    token.prefetch()
    with pytest.raises(TokenNotHeld, match="slot is requested"):
        token.tail()


def test_request_before_begin_and_after_tail():
    token = ClcToken(WorkQueue([1]))
    with pytest.raises(TokenNotHeld, match="outside its loop"):
        token.prefetch()
    token.initial_work()
    token.tail()
    with pytest.raises(TokenNotHeld, match="outside its loop"):
        token.prefetch()


@EXAMPLES
@given(calls=st.lists(st.sampled_from(["prefetch", "wait", "current", "release", "tail"]), max_size=14))
def test_no_sequence_of_calls_repeats_or_invents_work(calls):
    token = ClcToken(WorkQueue(range(100)))
    got = [token.initial_work()]
    for name in calls:
        try:
            result = getattr(token, name)()
        except clc.ClcViolation:
            break
        if name == "current":
            got.append(result)
    requests = sum(event.action == "request" for event in token.events)
    releases = sum(event.action == "release" for event in token.events)
    assert 0 <= requests - releases <= 1  # one slot
    assert set(got) <= set(range(requests + 1))
    assert sorted(set(got)) == got or len(set(got)) < len(got)  # a response may be read twice, never out of order


@EXAMPLES
@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=30), workers=st.integers(1, 8), data=st.data())
def test_distribution_is_first_free_in_the_hardwares_order(costs, workers, data):
    order = data.draw(st.permutations(range(len(costs))))
    events = []
    run = clc_schedule(costs, order, workers, events)
    assert sorted(run.placements) == sorted(list_schedule(costs, order, workers).placements)
    assert sum(event.action == "tail" for event in events) == workers
    assert [event.ordinal for event in events] == list(range(len(events)))
    # Every CTA learns once that there is nothing left; nobody asks again.
    assert sum(e.work is None for e in events if e.action in ("read", "initial")) == workers


# --- Coordinates ---


def test_coordinates_are_a_bijection_with_clusters_and_splits():
    grid = TileGrid(batches=2, heads=3, blocks=4)
    for cluster, splits in itertools.product((1, 2), (1, 3)):
        launch = itertools.product(range(0, grid.blocks * cluster, cluster), range(grid.heads * splits), range(2))
        got = {clc_coordinates(ctaid, grid, cluster, splits) for ctaid in launch}
        assert got == {(tile, split) for tile in lexical_order(grid) for split in range(splits)}
    pair = [clc_coordinates((x, 0, 0), grid, cluster=2) for x in (6, 7)]
    assert pair[0] == pair[1] == clc_coordinates((3, 0, 0), grid)  # the two CTAs of a cluster share a tile


def test_only_the_block_is_reversed():
    grid = TileGrid(batches=1, heads=4, blocks=3)
    raw = [(x, y, 0) for y in range(4) for x in range(3)]
    tiles = [clc_coordinates(ctaid, grid)[0] for ctaid in raw]
    assert [(t.head, t.block) for t in tiles] == [(h, m) for h in range(4) for m in (2, 1, 0)]
    assert [clc_coordinates(c, grid, reverse_blocks=False)[0].block for c in raw[:3]] == [0, 1, 2]


def test_work_stealing_is_not_the_static_swizzle():
    """0x0B failure: the same tiles, legal coordinates, another order, and no promise about L2."""
    blocks = causal_key_blocks(2048, 2048, 128, 128)
    grid = TileGrid(batches=1, heads=32, blocks=16)
    static = sectioned_order(grid, 4)
    raw = [(x, y, 0) for y in range(32) for x in range(16)]
    stolen = [clc_coordinates(ctaid, grid)[0] for ctaid in raw]
    assert set(stolen) == set(static)  # both look right
    assert stolen != static
    costs = order_costs(stolen, [blocks])
    # The static map fixes the order, hence the section that is in work. The hardware's order is its own: two legal
    # ones, the grid's (block fastest) and one that takes the heads first, differ in what they fetch.
    heads_first = np.arange(512).reshape(32, 16).T.ravel()
    capacity = 4 * 16  # keys and values of four heads
    fetched = {}
    for name, order in (("grid", range(512)), ("heads first", heads_first)):
        run = clc_schedule(costs, order, 16)
        fetched[name] = key_value_traffic(run, stolen, [blocks], capacity).refetches
    run = list_schedule(order_costs(static, [blocks]), None, 16)
    assert key_value_traffic(run, static, [blocks], capacity).refetches == 1.0
    assert fetched["grid"] == 1.0
    assert fetched["heads first"] > 5


def test_stealing_balances_without_sorting():
    """Dynamic assignment in the grid's order ends later than the same assignment in the section's order."""
    blocks = causal_key_blocks(4096, 4096, 128, 128)
    grid = TileGrid(batches=1, heads=32, blocks=32)
    stolen = clc_schedule(order_costs(lexical_order(grid, reverse_blocks=True), [blocks]), range(1024), 132)
    static = list_schedule(order_costs(sectioned_order(grid, 16), [blocks]), None, 132)
    assert stolen.makespan > 1.1 * static.makespan


@pytest.mark.parametrize(
    ("causal", "varlen", "heads", "heads_kv", "kept"),
    [
        (True, False, 16, 16, True),
        (True, True, 16, 16, False),  # more K/V blocks in flight
        (True, True, 16, 4, True),
        (False, False, 16, 16, False),  # equal tiles: stealing is overhead
        (False, False, 16, 4, False),
        (False, True, 16, 16, False),
    ],
)
def test_when_the_release_declines(causal, varlen, heads, heads_kv, kept):
    assert clc_allowed(True, causal, varlen, heads, heads_kv) is kept
    assert clc_allowed(False, causal, varlen, heads, heads_kv) is False


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: clc_coordinates((3, 0, 0), TileGrid(1, 4, 3)), ValueError, "outside the launch grid"),
        (lambda: clc_coordinates((0, 0), TileGrid(1, 4, 3)), ValueError, "three coordinates"),
        (lambda: clc_coordinates((0, 0, 0), TileGrid(1, 4, 3), splits=0), ValueError, "splits is 0"),
        (lambda: clc_allowed(True, True, False, 4, 0), ValueError, "heads_kv is 0"),
        (lambda: clc_allowed(True, True, False, 4, 3), ValueError, "4 heads are no multiple of the 3"),
        (lambda: WorkQueue([0, 1, 0]), TileSetViolation, "must differ"),
        (lambda: WorkQueue([0, -1]), TileSetViolation, "must not be negative"),
        (lambda: clc_schedule([1, 2], [0], 1), TileSetViolation, "each of the 2 work items exactly once"),
        (lambda: clc_schedule([1, 2], [1, 2], 1), TileSetViolation, "each of the 2 work items exactly once"),
        (lambda: clc_schedule([1, -2], [0, 1], 1), ValueError, "none of them negative"),
        (lambda: clc_schedule([1, 2], [0, 1], 0), ValueError, "workers is 0"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
