"""Key blocks per tile, against the mask itself."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.mask import block_range
from cupyfa.oracles.scheduling import costs
from cupyfa.oracles.scheduling.costs import TileCost, causal_key_blocks, check_costs, check_positive, visited_key_blocks

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=150)
LENGTH = st.integers(1, 400)
TILE = st.integers(1, 130)


def test_doctests():
    assert doctest.testmod(costs).failed == 0


def test_square_tiles_on_a_square_visit_m_plus_1_blocks():
    np.testing.assert_array_equal(causal_key_blocks(1024, 1024, 128, 128), np.arange(8) + 1)


def test_j_m_is_clipped_by_the_keys_and_by_the_last_row():
    np.testing.assert_array_equal(causal_key_blocks(512, 200, 128, 128), [1, 2, 2, 2])  # ceil(S_k / N) = 2
    np.testing.assert_array_equal(causal_key_blocks(130, 512, 128, 128), [1, 2])  # rows end at 130, not at 256


@EXAMPLES
@given(seqlen=LENGTH, tile_m=TILE, tile_n=TILE)
def test_the_formula_is_the_mask_for_self_attention(seqlen, tile_m, tile_n):
    expected = [block_range(m, m + tile_m, seqlen, seqlen, tile_n, True).end for m in range(0, seqlen, tile_m)]
    np.testing.assert_array_equal(causal_key_blocks(seqlen, seqlen, tile_m, tile_n), expected)
    np.testing.assert_array_equal(visited_key_blocks(seqlen, seqlen, tile_m, tile_n), expected)


def test_the_formula_is_not_the_bottom_right_mask_when_lengths_differ():
    assert causal_key_blocks(128, 512, 128, 128).tolist() == [1]
    assert visited_key_blocks(128, 512, 128, 128).tolist() == [4]


@EXAMPLES
@given(
    seqlen_q=LENGTH,
    seqlen_k=st.integers(0, 400),
    tile_m=TILE,
    tile_n=TILE,
    causal=st.booleans(),
    left=st.none() | st.integers(0, 300),
    right=st.none() | st.integers(0, 300),
)
def test_visited_blocks_span_what_the_rows_of_a_tile_see(seqlen_q, seqlen_k, tile_m, tile_n, causal, left, right):
    i, j = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, np.arange(seqlen_k)[None, :]
    seen = np.ones((seqlen_q, seqlen_k), bool)
    if left is not None:
        seen &= j >= i - left
    if causal or right is not None:
        seen &= j <= i + (0 if causal else right)
    expected = []
    for m in range(0, seqlen_q, tile_m):
        keys = np.flatnonzero(seen[m : m + tile_m].any(axis=0))
        expected.append(keys[-1] // tile_n - keys[0] // tile_n + 1 if keys.size else 0)
    got = visited_key_blocks(seqlen_q, seqlen_k, tile_m, tile_n, causal, (left, right))
    np.testing.assert_array_equal(got, expected)


def test_a_window_caps_the_cost_and_removes_the_imbalance():
    blocks = visited_key_blocks(8192, 8192, 128, 128, window=(1023, None))
    assert blocks.max() == 9  # 8 blocks of window, and one more where the borders do not meet
    assert set(blocks[8:].tolist()) == {9}


def test_cost_is_a_fixed_part_and_one_per_block():
    cost = TileCost(fixed=100, qk=20, softmax=10, pv=20, load=5)
    np.testing.assert_array_equal(cost.of([0, 1, 10]), [100, 155, 650])
    # Block sparsity replaces J by the selected blocks; splitting the keys divides it, the fixed part stays.
    whole, halves = cost.of([10]), cost.of([5, 5])
    assert halves.sum() - whole.sum() == 100


@pytest.mark.parametrize("name", ["seqlen_q", "tile_m", "tile_n"])
def test_sizes_must_be_positive(name):
    sizes = {"seqlen_q": 8, "seqlen_k": 8, "tile_m": 8, "tile_n": 8, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0; it must be positive"):
        visited_key_blocks(**sizes)
    with pytest.raises(ValueError, match=f"{name} is 0"):
        causal_key_blocks(**sizes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: visited_key_blocks(8, 8, 8, 8, window=(-1, None)), "window is"),
        (lambda: visited_key_blocks(8, 8, 8, 8, window=(1, 2, 3)), "window is"),
        (lambda: visited_key_blocks(8, -1, 8, 8), "seqlen_k is -1"),
        (lambda: check_positive(batch=1, heads=-3), "heads is -3"),
        (lambda: check_positive(mean=math.nan), "mean is nan"),
        (lambda: check_positive(mean=math.inf), "mean is inf"),
        (lambda: check_costs([1, math.nan]), "finite numbers"),
        (lambda: check_costs([[1], [1, 2]]), "array of numbers"),
        (lambda: TileCost(softmax=-1), "the cost softmax is -1"),
        (lambda: TileCost().of([1, -1]), "none of them negative"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
