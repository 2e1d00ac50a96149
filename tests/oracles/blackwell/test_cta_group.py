"""How a pair of CTAs splits rows, operands and accumulators."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell.cta_group import (
    AccumulatorShape,
    Cell,
    MmaTile,
    accumulator_cell,
    accumulator_columns,
    b_payload,
    barrier_arrivals,
    mma_tile_pv,
    mma_tile_qk,
    operand_slices,
    output_rows,
)


def test_tiles_of_the_specification():
    assert mma_tile_qk(128, 128, 128, 1) == MmaTile(128, 128, 128, (1, 1))
    assert mma_tile_qk(128, 128, 128, 2) == MmaTile(256, 128, 128, (2, 1))
    assert mma_tile_pv(128, 128, 64, 2) == MmaTile(256, 64, 128, (2, 1))
    assert output_rows(mma_tile_qk(128, 128, 128, 1), 0) == range(128)
    assert [output_rows(mma_tile_qk(128, 128, 128, 2), rank) for rank in (0, 1)] == [range(128), range(128, 256)]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2]))
def test_slices_compute_the_product(m, n, k, group):
    """Each CTA multiplies its rows of A with all of B, of which it holds its share; nobody splits the reduction."""
    tile = mma_tile_qk(m, 2 * n, k, group)
    rng = np.random.default_rng(m * 100 + n * 10 + k)
    A, B = rng.integers(-9, 9, (tile.m, tile.k)), rng.integers(-9, 9, (tile.k, tile.n))
    slices = [operand_slices(tile, rank) for rank in range(group)]
    assert sorted(row for rows, _, _ in slices for row in rows) == list(range(tile.m))
    assert sorted(col for _, cols, _ in slices for col in cols) == list(range(tile.n))
    assert all(reduction == range(tile.k) for _, _, reduction in slices)
    shared_B = np.concatenate([B[:, cols] for _, cols, _ in slices], axis=1)
    D = np.concatenate([A[rows] @ shared_B for rows, _, _ in slices])
    np.testing.assert_array_equal(D, A @ B)


def test_k_is_split_by_keys_and_v_by_head_dimension():
    keys = operand_slices(mma_tile_qk(128, 128, 192, 2), 1)[1]
    columns = operand_slices(mma_tile_pv(128, 128, 128, 2), 1)[1]
    assert (keys, columns) == (range(64, 128), range(64, 128))
    assert operand_slices(mma_tile_pv(128, 128, 128, 2), 1)[2] == range(128), "all keys"


def test_bad_tiles():
    with pytest.raises(ValueError, match="must be positive"):
        mma_tile_qk(128, 0, 128, 1)
    with pytest.raises(ValueError, match="must be 1 or 2"):
        mma_tile_pv(128, 128, 128, 4)
    with pytest.raises(ValueError, match="rank 1"):
        operand_slices(mma_tile_qk(128, 128, 128, 1), 1)
    with pytest.raises(AccumulatorShape, match="cannot be shared"):
        operand_slices(mma_tile_qk(128, 127, 128, 2), 0)


def test_b_payload_of_the_specification():
    pair, alone = b_payload(128, 128, 2, 2), b_payload(128, 128, 2, 1)
    kib = 1024
    assert alone.per_cta == 32 * kib
    assert alone.pair == alone.independent == pair.independent == 64 * kib
    assert (pair.per_cta, pair.pair) == (16 * kib, 32 * kib)
    assert (pair.ratio, alone.ratio) == (0.5, 1.0)


def test_b_has_to_be_divisible():
    with pytest.raises(AccumulatorShape):
        b_payload(127, 128, 2, 2)


@pytest.mark.parametrize(
    ("threads", "pair"),
    [(256, 512), (128, 256), (4, 8), (1, 2)],  # softmax + correction; correction; a lane per softmax warp; one thread
)
def test_arrivals_double_in_a_pair(threads, pair):
    assert barrier_arrivals(threads, 1) == threads
    assert barrier_arrivals(threads, 2) == pair


LAYOUTS = [(64, 1, False), (128, 1, False), (256, 2, False), (128, 2, False), (64, 1, True)]


@pytest.mark.parametrize("n", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(("m", "group", "ws"), LAYOUTS)
def test_every_result_has_a_cell_of_its_own(m, n, group, ws):
    columns = accumulator_columns(m, n, group, ws=ws)
    cells = [accumulator_cell(r, c, m, n, group, ws=ws) for r in range(m) for c in range(n)]
    assert len(set(cells)) == m * n
    assert {cell.cta for cell in cells} == set(range(group))
    assert {cell.column for cell in cells} == set(range(columns))
    assert max(cell.lane for cell in cells) < 128
    # All 128 lanes are used, except that M = 64 in one CTA leaves every second group of 16 empty.
    assert len({cell.lane for cell in cells}) == (64 if (m, group, ws) == (64, 1, False) else 128)


@pytest.mark.parametrize(
    ("row", "column", "layout", "cell"),
    [
        ((127), 255, (128, 256, 1, False), Cell(0, 127, 255)),
        (17, 3, (64, 128, 1, False), Cell(0, 33, 3)),
        (63, 0, (64, 128, 1, False), Cell(0, 111, 0)),
        (128, 9, (256, 128, 2, False), Cell(1, 0, 9)),
        (63, 63, (128, 128, 2, False), Cell(0, 63, 63)),
        (63, 64, (128, 128, 2, False), Cell(0, 127, 0)),
        (64, 127, (128, 128, 2, False), Cell(1, 64, 63)),
        (5, 100, (64, 128, 1, True), Cell(0, 69, 36)),
    ],
)
def test_golden_cells(row, column, layout, cell):
    m, n, group, ws = layout
    assert accumulator_cell(row, column, m, n, group, ws=ws) == cell


def test_equal_addresses_in_two_views_are_two_cells():
    low, high = (accumulator_cell(row, 7, 256, 128, 2) for row in (3, 131))
    assert (low.lane, low.column) == (high.lane, high.column)
    assert low != high


def test_folded_widths_of_the_backward_maps():
    assert accumulator_columns(128, 128, 2) == 64  # dQ at head dimension 128
    assert accumulator_columns(128, 192, 2) == 96  # dQ at 192
    assert accumulator_columns(128, 256, 2) == 128  # dK at 256


def test_shapes_without_a_layout():
    for m, n, group, ws in [(256, 128, 1, False), (64, 128, 2, False), (128, 264, 1, False), (128, 4, 1, False)]:
        with pytest.raises(AccumulatorShape):
            accumulator_columns(m, n, group, ws=ws)
    with pytest.raises(AccumulatorShape, match=r"\.ws"):
        accumulator_columns(128, 128, 2, ws=True)
    with pytest.raises(ValueError, match="outside D"):
        accumulator_cell(128, 0, 128, 128, 1)
