"""Orders: coordinates, sections and the residual heads; and keys and values in L2 while they run."""

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.scheduling import orders
from cupyfa.oracles.scheduling.costs import causal_key_blocks
from cupyfa.oracles.scheduling.makespan import list_schedule
from cupyfa.oracles.scheduling.orders import (
    BETA23_L2_BYTES,
    TileGrid,
    WorkTile,
    decode_sectioned,
    heads_per_section,
    key_value_bytes,
    lexical_order,
    longest_first_order,
    order_costs,
    sectioned_order,
)

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=150)
GRIDS = st.builds(
    lambda b, kv, blocks, group: TileGrid(b, kv * group, blocks, group),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 7),
    st.integers(1, 4),
)


def test_doctests():
    assert doctest.testmod(orders).failed == 0


def all_tiles(grid):
    return {WorkTile(b, h, m) for b in range(grid.batches) for h in range(grid.heads) for m in range(grid.blocks)}


@EXAMPLES
@given(grid=GRIDS, section=st.integers(1, 12), reverse=st.booleans(), across=st.booleans())
def test_every_order_has_every_tile_once(grid, section, reverse, across):
    costs = [list(range(1, grid.blocks + 1))]
    lexical = lexical_order(grid, reverse)
    for order in (lexical, longest_first_order(lexical, costs), sectioned_order(grid, section, reverse, across)):
        assert len(order) == grid.tiles
        assert set(order) == all_tiles(grid)


@EXAMPLES
@given(grid=GRIDS, section=st.integers(1, 12), reverse=st.booleans())
def test_loops_and_divisions_agree(grid, section, reverse):
    order = sectioned_order(grid, section, reverse, across_batches=True)
    assert [decode_sectioned(i, grid, section, reverse) for i in range(grid.tiles)] == order


@EXAMPLES
@given(grid=GRIDS, section=st.integers(1, 12))
def test_a_section_is_finished_before_the_next_and_longest_first_inside(grid, section):
    order = sectioned_order(grid, section)
    key = [(t.batch, t.head // (section * grid.group), -t.block, t.head) for t in order]
    assert key == sorted(key)
    costs = order_costs(order, [list(range(1, grid.blocks + 1))])
    sections = [k[:2] for k in key]
    assert all(a >= b for a, b, s, t in zip(costs, costs[1:], sections, sections[1:], strict=False) if s == t)


@EXAMPLES
@given(grid=GRIDS, section=st.integers(1, 12))
def test_query_heads_of_a_group_stand_together(grid, section):
    order = sectioned_order(grid, section)
    for i in range(0, len(order), grid.group):
        together = order[i : i + grid.group]
        assert len({(t.batch, t.head // grid.group, t.block) for t in together}) == 1


def test_residual_heads():
    """7 heads in sections of 4: the last section has 3, and dividing it by 4 would name head 7."""
    grid = TileGrid(batches=1, heads=7, blocks=2)
    order = sectioned_order(grid, 4, across_batches=True)
    assert [t.head for t in order] == [0, 1, 2, 3] * 2 + [4, 5, 6] * 2
    assert [t.block for t in order] == [1] * 4 + [0] * 4 + [1] * 3 + [0] * 3
    block, head = divmod(11 - 8, 4)  # tile 11 without the residual rule
    assert (head + 4, 1 - block) == (7, 1)
    assert decode_sectioned(11, grid, 4) == WorkTile(0, 4, 0)


def test_sections_do_not_cross_batches_unless_flattened():
    grid = TileGrid(batches=2, heads=3, blocks=1)
    assert [(t.batch, t.head) for t in sectioned_order(grid, 2)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    deep = TileGrid(batches=2, heads=3, blocks=2)
    third = [(t.batch, t.head, t.block) for t in sectioned_order(deep, 2, across_batches=True)][4:8]
    assert third == [(0, 2, 1), (1, 0, 1), (0, 2, 0), (1, 0, 0)]


def test_working_set_and_section_size():
    assert key_value_bytes(8192, 128, 128, 2) == 8192 * 256 * 2 == 4 * 2**20
    assert key_value_bytes(1024, 192, 128, 2) == 1024 * 320 * 2
    assert BETA23_L2_BYTES == 50 * 1024 * 1024
    assert heads_per_section(4 * 2**20) == 8  # 12 fit; the audited release takes a power of two
    assert heads_per_section(4 * 2**20, power_of_two=False) == 12
    assert heads_per_section(4 * 2**20, l2_bytes=40 * 2**20, power_of_two=False) == 10  # the stale comment
    assert heads_per_section(64 * 2**20) == 1  # one head, even if it does not fit
    assert heads_per_section(2**10, heads=16) == 16


@EXAMPLES
@given(size=st.integers(1, 2**26), l2=st.integers(1, 2**27), power=st.booleans())
def test_a_section_fits_and_is_as_large_as_it_can_be(size, l2, power):
    section = heads_per_section(size, l2, power_of_two=power)
    assert section == 1 or section * size <= l2
    assert (section * 2 if power else section + 1) * size > l2


def test_global_longest_first_interleaves_what_sections_keep_apart():
    grid = TileGrid(batches=2, heads=4, blocks=4)
    blocks = [causal_key_blocks(512, 512, 128, 128)]
    everything = longest_first_order(lexical_order(grid), blocks)
    assert {(t.batch, t.head) for t in everything[:8]} == {(b, h) for b in range(2) for h in range(4)}
    assert len({(t.batch, t.head) for t in sectioned_order(grid, 2)[:8]}) == 2
    for order in (everything, sectioned_order(grid, 2)):
        assert list_schedule(order_costs(order, blocks), None, 4).makespan == 20  # both balance


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TileGrid(1, 5, 1, 2), "5 heads are no multiple of the group of 2"),
        (lambda: TileGrid(1, 3, 2).tile(6), "tile 6 does not exist"),
        (lambda: TileGrid(1, 3, 2).tile(-1), "tile -1 does not exist"),
        (lambda: sectioned_order(TileGrid(1, 1, 1), 0), "section is 0"),
        (lambda: decode_sectioned(6, TileGrid(1, 3, 2), 2), "tile 6 does not exist"),
        (lambda: key_value_bytes(0, 1, 1), "seqlen_k is 0"),
        (lambda: heads_per_section(1, heads=0), "heads is 0"),
        (lambda: order_costs([WorkTile(0, 0, 2)], [[1, 2]]), r"no cost of WorkTile\(batch=0, head=0, block=2\)"),
        (lambda: order_costs([WorkTile(2, 0, 0)], [[1], [2]]), "no cost of WorkTile"),
        (lambda: order_costs([WorkTile(0, 0, -1)], [[1]]), "no cost of WorkTile"),
        (lambda: order_costs([WorkTile(0, 0, 0)], []), "no cost of WorkTile"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
