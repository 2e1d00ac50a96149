"""Keys and values in L2: the half of an order that the makespan does not show."""

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.scheduling import cache
from cupyfa.oracles.scheduling.cache import key_value_traffic
from cupyfa.oracles.scheduling.costs import causal_key_blocks
from cupyfa.oracles.scheduling.makespan import (
    Placement,
    Schedule,
    TileSetViolation,
    list_schedule,
    makespan_lower_bound,
)
from cupyfa.oracles.scheduling.orders import (
    TileGrid,
    WorkTile,
    heads_per_section,
    key_value_bytes,
    lexical_order,
    longest_first_order,
    order_costs,
    sectioned_order,
)


def test_doctests():
    assert doctest.testmod(cache).failed == 0


def run(order, blocks, workers, capacity, group=1):
    schedule = list_schedule(order_costs(order, [blocks]), None, workers)
    return schedule, key_value_traffic(schedule, order, [blocks], capacity, group)


def test_least_recently_used_and_last_block_first():
    one = [[1, 1, 1]]  # head 0, head 1, head 0, head 2, head 0; L2 holds two blocks
    tiles = [WorkTile(0, head, block) for head, block in ((0, 0), (1, 0), (0, 1), (2, 0), (0, 2))]
    assert key_value_traffic(list_schedule([1] * 5, None, 1), tiles, one, 2).misses == 3
    tiles = [WorkTile(0, 0, 1), WorkTile(0, 0, 0)]  # reads 2, 1, 0, then 0 again
    assert key_value_traffic(list_schedule([3, 1], None, 1), tiles, [[1, 3]], 2).misses == 3


def test_sorting_all_heads_balances_and_thrashes_l2():
    """0x0B failure: 64 heads of 8k tokens, d = 128, bfloat16, 132 workers, 50 MiB of L2."""
    blocks = causal_key_blocks(8192, 8192, 128, 128)
    grid = TileGrid(1, 64, len(blocks))
    l2 = 50 * 2**20
    capacity = l2 // key_value_bytes(128, 128, 128)
    section = heads_per_section(key_value_bytes(8192, 128, 128), l2)
    lexical, plain = run(lexical_order(grid), blocks, 132, capacity)
    everything, thrashing = run(longest_first_order(lexical_order(grid), [blocks]), blocks, 132, capacity)
    sections, fitting = run(sectioned_order(grid, section), blocks, 132, capacity)
    bound = makespan_lower_bound(order_costs(lexical_order(grid), [blocks]), 132)
    # The tail shrinks: sorting everything is as good as it can be, and so are sections.
    assert bound / lexical.makespan < 0.97
    assert bound / everything.makespan > 0.998
    assert bound / sections.makespan > 0.998
    # But all 64 heads are in flight, and the same keys and values are fetched again and again.
    assert (thrashing.heads_in_flight, fitting.heads_in_flight) == (64, 2 * section)
    assert thrashing.refetches > 10
    assert plain.refetches == fitting.refetches == 1.0
    assert plain.reads == thrashing.reads == fitting.reads == 64 * int(blocks.sum())


def test_heads_that_share_keys_belong_together():
    """MQA: 32 query heads on 4 key/value heads; walking over them one of each group at a time refetches."""
    blocks = causal_key_blocks(2048, 2048, 128, 128)
    grid, ungrouped = TileGrid(1, 32, 16, group=8), TileGrid(1, 32, 16)
    capacity = 2 * 16  # the keys and values of two heads
    together = sectioned_order(grid, 2)
    apart = [t._replace(head=t.head % 4 * 8 + t.head // 4) for t in sectioned_order(ungrouped, 2)]
    assert set(together) == set(apart)
    a, b = run(together, blocks, 16, capacity, group=8), run(apart, blocks, 16, capacity, group=8)
    assert a[0].makespan == b[0].makespan
    assert a[1].refetches == 1.0
    assert b[1].refetches == 8.0  # once per query head of the group


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    heads=st.integers(1, 6),
    seqlen=st.integers(1, 900),
    workers=st.integers(1, 8),
    section=st.integers(1, 4),
    capacity=st.integers(1, 40),
)
def test_misses_lie_between_compulsory_ones_and_all_reads(heads, seqlen, workers, section, capacity):
    blocks = causal_key_blocks(seqlen, seqlen, 128, 128)
    order = sectioned_order(TileGrid(1, heads, len(blocks)), section)
    _, traffic = run(order, blocks, workers, capacity)
    assert traffic.compulsory == heads * len(blocks)
    assert traffic.compulsory <= traffic.misses <= traffic.reads == heads * int(blocks.sum())
    assert 1 <= traffic.heads_in_flight <= min(heads, workers)
    _, bigger = run(order, blocks, workers, capacity + 1)
    assert bigger.misses <= traffic.misses  # a least-recently-used cache never gets worse with size
    _, everything = run(order, blocks, workers, heads * len(blocks))
    assert everything.misses == everything.compulsory


TILES = lexical_order(TileGrid(1, 1, 2))
TWICE = Schedule((Placement(0, 0, 0, 1), Placement(0, 0, 1, 2)), 1)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"order": TILES[:1]}, TileSetViolation, "2 placements for 1 tiles"),
        ({"schedule": TWICE}, TileSetViolation, "each of the 2 tiles exactly once"),
        ({"blocks": [[1]]}, ValueError, "no cost of WorkTile"),
        ({"blocks": [[1, -1]]}, ValueError, "none of them negative"),
        ({"blocks": [[1, 1.5]]}, ValueError, "whole number"),
        ({"capacity": 0}, ValueError, "capacity is 0"),
        ({"group": 0}, ValueError, "group is 0"),
    ],
)
def test_bad_input_is_named(changed, error, message):
    arguments = {"schedule": list_schedule([1, 1], None, 1), "order": TILES, "blocks": [[1, 1]], "capacity": 4}
    assert key_value_traffic(**arguments).reads == 2
    with pytest.raises(error, match=message):
        key_value_traffic(**arguments | changed)
