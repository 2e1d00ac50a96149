"""The block arithmetic against the definition of the mask."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupyfa.oracles.mask import BlockRange, TileMask, block_range, visible, weighted_sum, window_bounds

LENGTHS = [(1, 1), (5, 2), (2, 5), (7, 7), (16, 40), (40, 16), (33, 64), (64, 33), (3, 0), (100, 1)]
WINDOWS = [(0, 0), (3, 0), (0, 3), (2, 5), (None, 4), (4, None), (1000, 1000), (-1, 2), (6, -1)]


def brute_visible(seqlen_q, seqlen_k, causal, window_size=(None, None)):
    left, right = (math.inf if side in (None, -1) else side for side in window_size)
    right = 0 if causal else right
    seen = np.zeros((seqlen_q, seqlen_k), dtype=bool)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            diagonal = i + seqlen_k - seqlen_q
            seen[i, j] = diagonal - left <= j <= diagonal + right
    return seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_visible_is_bottom_right(seqlen_q, seqlen_k, causal):
    seen = visible(seqlen_q, seqlen_k, causal)
    np.testing.assert_array_equal(seen, brute_visible(seqlen_q, seqlen_k, causal))
    assert seen[-1].all()  # the last query sees every key, whatever the lengths
    np.testing.assert_array_equal(visible(seqlen_q, seqlen_k, causal, slice(1, 4)), seen[1:4])


def test_five_queries_two_keys():
    np.testing.assert_array_equal(visible(5, 2, True).sum(axis=1), [0, 0, 0, 1, 2])


@pytest.mark.parametrize("window_size", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_visible_in_a_window(seqlen_q, seqlen_k, causal, window_size):
    seen = visible(seqlen_q, seqlen_k, causal, window_size=window_size)
    np.testing.assert_array_equal(seen, brute_visible(seqlen_q, seqlen_k, causal, window_size))
    np.testing.assert_array_equal(visible(seqlen_q, seqlen_k, causal, slice(1, 4), window_size), seen[1:4])


def test_windows_that_are_causal():
    for window_size in [(None, 0), (-1, 0), (9, 0), (8, 0)]:
        np.testing.assert_array_equal(visible(9, 9, False, window_size=window_size), visible(9, 9, True))
    assert not np.array_equal(visible(9, 9, False, window_size=(7, 0)), visible(9, 9, True))
    np.testing.assert_array_equal(visible(9, 9, True, window_size=(2, 5)), visible(9, 9, False, window_size=(2, 0)))


def test_windows_count_their_own_key():
    for window_size, count in [((4, 0), 5), ((0, 0), 1), ((0, 4), 5), ((2, 3), 6)]:
        seen = visible(20, 30, False, window_size=window_size)
        np.testing.assert_array_equal(seen[:16].sum(axis=1), count)
        assert seen[np.arange(20), np.arange(20) + 10].all()
    np.testing.assert_array_equal(visible(5, 2, False, window_size=(0, 1)).sum(axis=1), [0, 0, 1, 2, 1])


@pytest.mark.parametrize(
    ("causal", "window_size", "bounds"),
    [
        (False, (None, None), (None, None)),
        (False, (-1, -1), (None, None)),
        (True, (None, None), (None, 0)),
        (True, (-1, 7), (None, 0)),
        (False, (3, 7), (3, 7)),
        (True, (3, 0), (3, 0)),
        (False, [np.int64(3), None], (3, None)),
    ],
)
def test_window_bounds(causal, window_size, bounds):
    assert window_bounds(causal, window_size) == bounds


@pytest.mark.parametrize("window_size", [(-3, 0), (0, -2), (1.0, 0), ("1", None), (1,), (1, 2, 3), None, 4])
def test_windows_that_are_none(window_size):
    message = r"^attention: window_size is .*; each side must be an integer >= 0, or None or -1 for no bound$"
    for call in (
        lambda: window_bounds(True, window_size),
        lambda: visible(2, 2, False, window_size=window_size),
        lambda: block_range(0, 1, 4, 4, 2, False, window_size),
        lambda: TileMask(0, 1, 4, 4, 2, False, window_size),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"window_size is \(-3, 0\); each"):
        window_bounds(False, (-3, 0))


@st.composite
def tiles(draw):
    """A tile of one problem: rows, lengths, tile_n, causal, window."""
    seqlen_q, seqlen_k = draw(st.integers(1, 40)), draw(st.integers(0, 40))
    begin = draw(st.integers(0, seqlen_q - 1))
    end = draw(st.integers(begin + 1, seqlen_q))
    side = st.one_of(st.none(), st.integers(0, 50))
    return begin, end, seqlen_q, seqlen_k, draw(st.integers(1, 12)), draw(st.booleans()), (draw(side), draw(side))


@settings(deadline=None, derandomize=True, max_examples=1500)
@given(tiles())
@example((0, 16, 16, 64, 8, True, (8, None)))
@example((8, 16, 40, 8, 8, False, (2, 3)))  # the whole tile sees nothing
@example((0, 16, 16, 16, 8, False, (0, 0)))
def test_blocks_of_a_window_follow_from_what_is_visible(tile):
    begin, end, seqlen_q, seqlen_k, tile_n, _, (left, _) = tile
    rows = brute_visible(seqlen_q, seqlen_k, *tile[5:])[begin:end]
    blocks = block_range(*tile)
    assert 0 <= blocks.first <= blocks.low
    assert blocks.first < blocks.end or blocks.first == blocks.end == 0
    mask = TileMask(*tile)
    assert mask.blocks == blocks
    for n in range(-(-seqlen_k // tile_n)):
        seen = rows[:, n * tile_n : (n + 1) * tile_n]
        ragged = seen.shape[1] < tile_n
        assert seen.any() == (blocks.first <= n < blocks.end)
        np.testing.assert_array_equal(mask.block(n), seen)
        if seen.any():
            assert (n < blocks.low) == (not seen[-1, 0])
            assert (n >= blocks.full) == (ragged or not seen[0, -1])
            assert (blocks.low <= n < blocks.full) == (seen.all() and not ragged)
            scores = np.zeros(seen.shape)
            masked = mask.apply(scores, n)
            np.testing.assert_array_equal(masked == 0, seen)
            assert (masked is scores) == mask.is_whole(n)
            assert seen.all() or masked is not scores
    if left is None:
        assert blocks.first == blocks.low == 0
    if end == seqlen_q:  # a tile that sticks out below the last row visits the same blocks, and masks as many
        longer = block_range(begin, end + 5, *tile[2:])
        assert (longer.first, longer.full, longer.end) == (blocks.first, blocks.full, blocks.end)
        assert longer.low >= blocks.low


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_block_range_follows_from_visible(seqlen_q, seqlen_k, causal):
    seen = brute_visible(seqlen_q, seqlen_k, causal)
    for tile_m in (1, 3, 8, 64):
        for tile_n in (1, 4, 7, 64):
            for begin in range(0, seqlen_q, tile_m):
                end = min(begin + tile_m, seqlen_q)
                rows = seen[begin:end]
                starts = range(0, seqlen_k, tile_n)
                whole = [rows[:, n : n + tile_n].all() and n + tile_n <= seqlen_k for n in starts]
                some = [bool(rows[:, n : n + tile_n].any()) for n in starts]
                blocks = block_range(begin, end, seqlen_q, seqlen_k, tile_n, causal)
                assert blocks == BlockRange(first=0, full=sum(whole), end=sum(some))
                assert whole == sorted(whole, reverse=True), "blocks seen whole come first"
                # A tile that sticks out below the last row visits the same blocks.
                assert block_range(begin, begin + tile_m, seqlen_q, seqlen_k, tile_n, causal) == blocks


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 128, 512, 512, 128, True), BlockRange(0, 0, 1)),
        ((384, 512, 512, 512, 128, True), BlockRange(0, 3, 4)),
        ((0, 128, 113, 203, 128, False), BlockRange(0, 1, 2)),
        ((0, 128, 300, 1, 128, True), BlockRange(0, 0, 0)),  # sees nothing: the count must not go below 0
        ((256, 384, 300, 1, 128, True), BlockRange(0, 0, 1)),
        ((0, 128, 5, 0, 128, False), BlockRange(0, 0, 0)),
        ((127, 128, 1000, 1000, 128, True), BlockRange(0, 1, 1)),  # row 127 sees block 0 whole and nothing else
        # Rows 512 to 639: the first one sees keys from 512 - left on, the last one from 639 - left on.
        ((512, 640, 1024, 1024, 128, True, (256, None)), BlockRange(2, 4, 5, 3)),
        ((512, 640, 1024, 1024, 128, True, (255, None)), BlockRange(2, 4, 5, 3)),
        ((512, 640, 1024, 1024, 128, True, (257, None)), BlockRange(1, 4, 5, 3)),
        ((512, 640, 1024, 1024, 128, True, (383, None)), BlockRange(1, 4, 5, 2)),
        ((512, 640, 1024, 1024, 128, False, (0, 0)), BlockRange(4, 4, 5, 5)),
        ((512, 640, 1024, 1024, 128, False, (10, 126)), BlockRange(3, 4, 6, 5)),
        ((512, 640, 1024, 1024, 128, False, (None, 127)), BlockRange(0, 5, 6, 0)),
        ((0, 128, 1024, 256, 128, False, (100, 100)), BlockRange(0, 0, 0, 0)),  # sees nothing
        ((0, 128, 128, 1024, 128, False, (5000, 5000)), BlockRange(0, 8, 8, 0)),
    ],
)
def test_block_range_golden(arguments, expected):
    assert block_range(*arguments) == expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 33), (33, 40), (17, 5)])
def test_tile_mask_rebuilds_the_dense_mask(seqlen_q, seqlen_k, causal):
    tile_m, tile_n = 16, 8
    rebuilt = np.full((seqlen_q, seqlen_k), -np.inf)
    for begin in range(0, seqlen_q, tile_m):
        rows = slice(begin, min(begin + tile_m, seqlen_q))
        mask = TileMask(rows.start, rows.stop, seqlen_q, seqlen_k, tile_n, causal)
        for j in range(mask.blocks.first, mask.blocks.end):
            keys = slice(j * tile_n, min((j + 1) * tile_n, seqlen_k))
            scores = np.zeros((rows.stop - rows.start, keys.stop - keys.start))
            masked = mask.apply(scores, j)
            assert (masked is scores) == (not causal or j < mask.blocks.full)
            rebuilt[rows, keys] = masked
            np.testing.assert_array_equal(mask.block(j), brute_visible(seqlen_q, seqlen_k, causal)[rows, keys])
    np.testing.assert_array_equal(rebuilt == 0, brute_visible(seqlen_q, seqlen_k, causal))


def test_weighted_sum_of_finite_values_is_the_plain_product():
    rng = np.random.default_rng(0)
    seen = visible(6, 9, True)
    P = np.where(seen, rng.random((2, 6, 9)), 0.0)
    V = rng.standard_normal((2, 9, 4))
    np.testing.assert_array_equal(weighted_sum(P, V, seen), P @ V)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_weighted_sum_keeps_special_values_where_they_are_seen(special):
    rng = np.random.default_rng(1)
    seen = visible(5, 5, True)
    P = np.where(seen, rng.random((2, 5, 5)) + 0.1, 0.0)
    V = rng.standard_normal((2, 5, 3))
    expected = P @ V
    V[1, 2, 1] = special
    with np.errstate(invalid="ignore"):
        got = weighted_sum(P, V, seen)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-14)
    np.testing.assert_allclose(got[1][:, [0, 2]], expected[1][:, [0, 2]], rtol=1e-14)
    np.testing.assert_allclose(got[1, :2, 1], expected[1, :2, 1], rtol=1e-14)
    np.testing.assert_array_equal(got[1, 2:, 1], [special] * 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: visible(-1, 2, True), r"seqlen_q is -1"),
        (lambda: block_range(0, 1, 4, 4, 0, True), r"tile_n is 0"),
        (lambda: block_range(0, 1, 4, -4, 2, False), r"seqlen_k is -4"),
        (lambda: TileMask(0, 5, 4, 4, 2, True), r"row_end is 5; it must be in 0 .. 4"),
        (lambda: TileMask(3, 2, 4, 4, 2, True), r"row_begin is 3; it must be in 0 .. 2"),
        (lambda: TileMask(0, 2, 4, 4, 2, True).block(2), r"block is 2; it must be in 0 .. 1"),
        (lambda: TileMask(0, 2, 4, 4, 2, True).apply(np.zeros((1, 2)), 0), r"they must be \(..., 2, 2\)"),
        (lambda: weighted_sum(np.ones((2, 3)), np.ones((4, 1)), None), r"P \(2, 3\) and V \(4, 1\)"),
        (
            lambda: weighted_sum(np.ones((2, 3)), np.ones((3, 1)), np.ones((1, 3), bool)),
            r"seen has shape \(1, 3\); it must be \(2, 3\)",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
