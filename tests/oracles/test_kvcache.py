"""The oracle of attention over a cache, held to a cache that is a list of keys for each sequence."""

import functools

import numpy as np
import pytest
from caches import by_oracle

from cupyfa.oracles import dense, kvcache, online
from cupyfa.oracles.kvcache import Places, append
from cupyfa.oracles.rotary import Rotary
from cupyfa.testing import CACHE_CASES, CacheCase


def key_by_key(case, arrays, name, seqlen_new):
    """All keys, or values, of each sequence: a list of numbers of heads, by the definition of each argument."""
    cache, sequences = arrays[name], []
    for b, length in enumerate(case.lengths):
        keys = []
        for i in range(length):
            if case.page_size is not None:
                page, offset = divmod(i, case.page_size)
                keys.append(cache[arrays["page_table"][b, page], offset])
            else:
                keys.append(cache[arrays["cache_batch_idx"][b] if case.batch_idx else b, i])
        new = arrays.get(name[0])
        for i in range(seqlen_new):
            key = new[b, i]
            if case.rotary_dim and name == "k_cache":
                rotary = Rotary(arrays["rotary_cos"], arrays["rotary_sin"], case.rotary_interleaved)
                key = rotary.turn(key[None], np.array([length + i]))[0]
            keys.append(key)
        sequences.append(np.array(keys).reshape(-1, *cache.shape[2:]))
    return sequences


@pytest.mark.parametrize("case", CACHE_CASES, ids=lambda case: case.id)
def test_the_oracle_is_attention_of_each_sequence_with_its_keys(case):
    arrays, options = case.make_arrays(), case.options
    out, lse = by_oracle(arrays, options, of_sequence=dense.attention)
    keys, values = (key_by_key(case, arrays, name, case.seqlen_new) for name in ("k_cache", "v_cache"))
    options.pop("rotary_interleaved", None)
    slopes = options.pop("alibi_slopes", None)
    begin, advance = 0, case.causal or case.window_size != (None, None)
    for b, length in enumerate(case.lengths):
        count = case.seqlen_q if case.lengths_q is None else case.lengths_q[b]
        q = arrays["q"][b] if case.lengths_q is None else arrays["q"][begin : begin + count]
        if case.rotary_dim:
            rotary = Rotary(arrays["rotary_cos"], arrays["rotary_sin"], case.rotary_interleaved)
            q = rotary.turn(q, np.array([length + (i if advance else 0) for i in range(count)], int))
        of_sequence = None if slopes is None else slopes[b]
        expected = dense.attention(q[None], keys[b][None], values[b][None], alibi_slopes=of_sequence, **options)
        own = np.s_[b] if case.lengths_q is None else np.s_[begin : begin + count]
        of_lse = np.s_[b] if case.lengths_q is None else np.s_[:, begin : begin + count]
        np.testing.assert_array_equal(out[own], expected[0][0])
        np.testing.assert_array_equal(lse[of_lse], expected[1][0])
        begin += count
    if case.rows_of_nobody:
        assert not out[begin:].any()
        empty = options["sink"] if case.sink else np.full(case.heads_q, -np.inf)
        np.testing.assert_array_equal(lse[:, begin:], np.repeat(empty[:, None], case.rows_of_nobody, axis=1))


def test_the_oracle_of_a_sequence_can_be_any():
    case = CacheCase("any", (70, 5), heads_q=2)
    arrays = case.make_arrays()
    tiled, _ = by_oracle(arrays, case.options)
    small, _ = by_oracle(arrays, case.options, of_sequence=functools.partial(online.attention, tile_n=16))
    exact, lse = by_oracle(arrays, case.options, of_sequence=dense.attention)
    assert (tiled.dtype, small.dtype, exact.dtype, lse.dtype) == (*[arrays["q"].dtype] * 2, np.float64, np.float64)
    np.testing.assert_allclose(tiled.astype(np.float64), exact, atol=0.01)


def test_append_writes_only_there():
    cache, values = np.zeros((2, 4, 1, 8), np.float16), np.zeros((2, 4, 1, 8), np.float16)
    new = np.ones((2, 2, 1, 8), np.float16)
    append(cache, values, new, 2 * new, np.int32([2, 0]), Places(cache_batch_idx=np.int32([1, 0])))
    np.testing.assert_array_equal(cache[..., 0, 0], [[1, 1, 0, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(values, 2 * cache)


@pytest.mark.parametrize(
    ("places", "end", "message"),
    [
        (Places(), 5, "end is 5; it must be in 0 .. 4"),
        (Places(cache_batch_idx=np.int32([2])), 1, "row is 2; it must be in 0 .. 1"),
        (Places(cache_batch_idx=np.int32([-1])), 1, "row is -1; it must be in 0 .. 1"),
        (Places(np.int32([[0, 1]])), 9, "end is 9; it must be in 0 .. 8"),
        (Places(np.int32([[0, 2]])), 5, "page is 2; it must be in 0 .. 1"),
        (Places(np.int32([[-1, 0]])), 1, "page is -1; it must be in 0 .. 1"),
    ],
)
def test_places_outside_of_the_cache_are_refused(places, end, message):
    cache = np.zeros((2, 4, 1, 8), np.float16)
    with pytest.raises(ValueError, match=message):
        places.of(cache, 0, 0, end)


def test_results_are_written_in_place():
    case = CacheCase("in place", (70, 5), seqlen_q=2)
    arrays = case.make_arrays()
    out, lse = np.empty((2, 2, 4, 64), arrays["q"].dtype), np.empty((2, 4, 2), np.float32)
    result = kvcache.attention(**arrays, **case.options, out=out, lse=lse)
    assert result[0] is out
    assert result[1] is lse
    for a, b in zip(by_oracle(arrays, case.options), result, strict=True):
        np.testing.assert_array_equal(a, b)
