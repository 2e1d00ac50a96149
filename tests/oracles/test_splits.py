"""Split keys: which keys each split has, and that their merge is attention over all of them."""

import functools
import itertools

import numpy as np
import pytest
from caches import by_oracle, hold_to_oracle

from cupyfa.oracles import dense, online, splits
from cupyfa.testing import CACHE_CASES, random_array

CUTS = [{"num_splits": n} for n in (1, 2, 5, 64)] + [{"split_size": n} for n in (64, 128, 4096)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("blocks", [range(0), range(1), range(3, 4), range(7), range(5, 29), range(64)], ids=str)
def test_splits_have_all_blocks_in_order(cut, blocks):
    parts = splits.split_blocks(blocks, **cut)
    assert list(itertools.chain(*parts)) == list(blocks)
    if "num_splits" in cut:
        assert len(parts) == cut["num_splits"]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        assert all(len(part) == cut["split_size"] // 64 for part in parts[:-1])
        assert all(parts)


def test_a_fixed_size_cuts_alike_whatever_follows():
    short, long = (splits.split_blocks(range(n), split_size=256) for n in (10, 1000))
    assert short[:2] == long[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "one is to be given"),
        ({"num_splits": 2, "split_size": 64}, "one is to be given"),
        ({"num_splits": 0}, "num_splits is 0"),
        ({"split_size": 32}, "split_size is 32"),
        ({"split_size": 96}, "split_size_behind_a_block is 32"),
    ],
)
def test_wrong_cuts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        splits.split_blocks(range(4), **arguments)


@pytest.mark.parametrize("cut", [{"num_splits": 5}, {"split_size": 128}], ids=str)
@pytest.mark.parametrize("case", CACHE_CASES, ids=lambda case: case.id)
def test_splits_give_what_all_keys_at_once_give(case, cut):
    hold_to_oracle(case, *by_oracle(case.make_arrays(), case.options | cut, of_sequence=splits.attention))


@pytest.mark.parametrize(
    "case", [case for case in CACHE_CASES if case.num_splits or case.split_size], ids=lambda c: c.id
)
def test_the_splits_of_a_case(case):
    cut = {"num_splits": case.num_splits, "split_size": case.split_size}
    hold_to_oracle(case, *by_oracle(case.make_arrays(), case.options | cut, of_sequence=splits.attention))


def inputs(seqlen_q=3, seqlen_k=300, heads=2):
    q = random_array((1, seqlen_q, heads, 64), np.float16, 0)
    return q, *(random_array((1, seqlen_k, heads, 64), np.float16, n) for n in (1, 2))


def test_each_split_is_attention_over_its_keys():
    q, k, v = inputs()
    outs, lses = splits.partials(q, k, v, num_splits=2)
    assert outs.dtype == lses.dtype == np.float32
    for part, keys in zip(range(2), (np.s_[:128], np.s_[128:]), strict=True):
        expected, expected_lse = dense.attention(q, k[:, keys], v[:, keys])
        np.testing.assert_allclose(outs[part], expected, atol=1e-3)
        np.testing.assert_allclose(lses[part], expected_lse, atol=1e-5)


def test_one_split_is_the_loop_itself():
    q, k, v = inputs()
    out, lse = splits.attention(q, k, v, num_splits=1, causal=True)
    expected, expected_lse = online.attention(q, k, v, causal=True, tile_n=64)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


def test_rows_that_see_nothing_of_a_split():
    q, k, v = inputs(seqlen_q=2, seqlen_k=65)
    outs, lses = splits.partials(q, k, v, num_splits=2, causal=True)
    assert np.isneginf(lses[1, 0, :, 0]).all()  # the first row ends with key 63
    assert not outs[1, 0, 0].any()
    assert np.isfinite(lses[1, 0, :, 1]).all()


def test_empty_splits_change_no_bit():
    outs, lses = splits.partials(*inputs(), num_splits=3)
    nothing = np.full_like(outs[:1], np.nan), np.full_like(lses[:1], -np.inf)
    for order in itertools.permutations(range(2)):
        parts = [(outs, lses), nothing]
        more = [np.concatenate([parts[i][n] for i in order]) for n in range(2)]
        for a, b in zip(splits.merge(*more), splits.merge(outs, lses), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("sink", [None, np.float32([0.5, -np.inf])], ids=["", "sink"])
def test_nothing_but_empty_splits(count, sink):
    outs = np.full((count, 2, 3, 2, 8), np.nan, np.float32)
    out, lse = splits.merge(outs, np.full((count, 2, 2, 3), -np.inf, np.float32), sink)
    assert not out.any()
    expected = np.full(2, -np.inf) if sink is None else sink
    np.testing.assert_array_equal(lse, np.broadcast_to(expected[:, None], (2, 2, 3)))


def test_the_sink_counts_once():
    q, k, v = inputs()
    sink = np.float32([2.0, -3.0])
    out, lse = splits.attention(q, k, v, num_splits=4, sink=sink)
    expected, expected_lse = dense.attention(q, k, v, sink=sink)
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=1e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


def test_float64_stays():
    outs, lses = splits.partials(*inputs(), num_splits=3)
    out, lse = splits.merge(outs.astype(np.float64), lses.astype(np.float64))
    assert out.dtype == lse.dtype == np.float64
    single, _ = splits.merge(outs, lses)
    np.testing.assert_allclose(out, single, atol=1e-6)


def test_a_split_does_not_depend_on_a_neighbour():
    q, k, v = inputs(seqlen_k=500)
    of_fixed_size = functools.partial(splits.partials, split_size=128)
    outs, lses = of_fixed_size(q, k, v)
    shorter, shorter_lses = of_fixed_size(q, k[:, :300], v[:, :300])
    np.testing.assert_array_equal(outs[:2], shorter[:2])
    np.testing.assert_array_equal(lses[:2], shorter_lses[:2])
