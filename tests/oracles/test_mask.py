"""The block arithmetic against the definition of the mask."""

import numpy as np
import pytest

from cupyfa.oracles.mask import BlockRange, TileMask, block_range, visible, weighted_sum

LENGTHS = [(1, 1), (5, 2), (2, 5), (7, 7), (16, 40), (40, 16), (33, 64), (64, 33), (3, 0), (100, 1)]


def brute_visible(seqlen_q, seqlen_k, causal):
    return np.array(
        [[not causal or j <= i + seqlen_k - seqlen_q for j in range(seqlen_k)] for i in range(seqlen_q)], dtype=bool
    ).reshape(seqlen_q, seqlen_k)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_visible_is_bottom_right(seqlen_q, seqlen_k, causal):
    seen = visible(seqlen_q, seqlen_k, causal)
    np.testing.assert_array_equal(seen, brute_visible(seqlen_q, seqlen_k, causal))
    assert seen[-1].all()  # the last query sees every key, whatever the lengths
    np.testing.assert_array_equal(visible(seqlen_q, seqlen_k, causal, slice(1, 4)), seen[1:4])


def test_five_queries_two_keys():
    np.testing.assert_array_equal(visible(5, 2, True).sum(axis=1), [0, 0, 0, 1, 2])


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
