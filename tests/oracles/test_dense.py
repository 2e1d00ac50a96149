"""The float64 reference against SciPy, and the same-precision yardstick against the reference."""

import math

import ml_dtypes
import numpy as np
import pytest
import scipy.special

from cupyfa.oracles import dense
from cupyfa.oracles.mask import visible

DTYPES = [np.float16, ml_dtypes.bfloat16]


def make(shape_q, shape_k, dtype=np.float64, seed=0, head_dim_v=None):
    rng = np.random.default_rng(seed)
    shape_v = (*shape_k[:3], head_dim_v or shape_k[3])
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in (shape_q, shape_k, shape_v))


def scipy_attention(q, k, v, softmax_scale, causal):
    """One head at a time, by SciPy's softmax and logsumexp; rows that see no key are left at (0, -inf)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    ratio = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for i in range(q.shape[1]):
                count = k.shape[1] if not causal else max(0, i + 1 + k.shape[1] - q.shape[1])
                if count:
                    scores = k[b, :count, h // ratio] @ q[b, i, h] * scale
                    out[b, i, h] = scipy.special.softmax(scores) @ v[b, :count, h // ratio]
                    lse[b, h, i] = scipy.special.logsumexp(scores)
    return out, lse


@pytest.mark.parametrize("softmax_scale", [None, 0.0, -0.5, 1.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("shape_q", "shape_k"),
    [
        ((2, 5, 2, 8), (2, 7, 1, 8)),
        ((1, 9, 6, 16), (1, 4, 3, 16)),
        ((1, 1, 1, 8), (1, 1, 1, 8)),
        ((2, 3, 9, 8), (2, 20, 3, 8)),
        ((1, 4, 2, 8), (1, 0, 2, 8)),
    ],
)
def test_matches_scipy(shape_q, shape_k, causal, softmax_scale):
    q, k, v = make(shape_q, shape_k, head_dim_v=12)
    out, lse = dense.attention(q, k, v, softmax_scale=softmax_scale, causal=causal)
    expected_out, expected_lse = scipy_attention(q, k, v, softmax_scale, causal)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_precision_inputs_are_widened_exactly(dtype):
    q, k, v = make((1, 6, 2, 8), (1, 9, 1, 8), dtype)
    out, lse = dense.attention(q, k, v)
    wide_out, wide_lse = dense.attention(*(x.astype(np.float64) for x in (q, k, v)))
    np.testing.assert_array_equal(out, wide_out)
    np.testing.assert_array_equal(lse, wide_lse)


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
@pytest.mark.parametrize("causal", [False, True])
def test_chunking_does_not_change_results(oracle, causal, monkeypatch):
    q, k, v = make((3, 50, 4, 8), (3, 40, 2, 8), np.float16)
    whole = oracle(q, k, v, causal=causal)
    monkeypatch.setattr(dense, "SCORE_BUDGET", 200)
    chunked = oracle(q, k, v, causal=causal)
    for a, b in zip(whole, chunked, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=2e-3, atol=1e-6)


def test_head_groups_cover_every_pair_once():
    q, k, v = make((3, 2, 6, 8), (3, 4, 2, 8))
    count = np.zeros((3, 6), dtype=int)
    for b, h, Q, K, V in dense.head_groups(q, k, v, np.float64, 40):
        assert len(b) <= 4
        count[b, h] += 1
        np.testing.assert_array_equal(Q, q[b, :, h])
        np.testing.assert_array_equal(K, k[b, :, h // 3])
        np.testing.assert_array_equal(V, v[b, :, h // 3])
    np.testing.assert_array_equal(count, 1)


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
def test_rows_without_keys(oracle):
    q, k, v = make((2, 5, 2, 8), (2, 2, 1, 8), np.float16)
    out, lse = oracle(q, k, v, causal=True)
    assert (out[:, :3] == 0).all()
    assert np.isneginf(lse[:, :, :3]).all()
    np.testing.assert_allclose(out[:, 3], np.repeat(v[:, 0], 2, axis=1), rtol=1e-3)  # row 3 sees key 0 only
    assert np.isfinite(lse[:, :, 3:]).all()


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
def test_scores_that_are_all_minus_infinity_count_as_no_key(oracle):
    q, k, v = (
        np.ones((1, 1, 1, 8), np.float16),
        np.full((1, 3, 1, 8), -np.inf, np.float16),
        np.ones((1, 3, 1, 8), np.float16),
    )
    out, lse = oracle(q, k, v)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
def test_nan_reaches_exactly_the_rows_that_see_it(oracle):
    q, k, v = make((1, 6, 1, 8), (1, 6, 1, 8), np.float16)
    clean_out, clean_lse = oracle(q, k, v, causal=True)
    bad_k, bad_v, bad_q = k.copy(), v.copy(), q.copy()
    bad_k[0, 3, 0, 0], bad_v[0, 2, 0, 5], bad_q[0, 1, 0, 0] = np.nan, np.nan, np.nan

    out, lse = oracle(q, bad_k, v, causal=True)
    assert np.isnan(out[0, 3:]).all()
    assert np.isnan(lse[0, 0, 3:]).all()
    np.testing.assert_array_equal(out[0, :3], clean_out[0, :3])
    np.testing.assert_array_equal(lse[0, 0, :3], clean_lse[0, 0, :3])

    out, lse = oracle(q, k, bad_v, causal=True)
    np.testing.assert_array_equal(np.isnan(out[0, :, 0]), (np.arange(6) >= 2)[:, None] & (np.arange(8) == 5))
    np.testing.assert_array_equal(lse, clean_lse)

    out, _ = oracle(bad_q, k, v, causal=True)
    np.testing.assert_array_equal(np.isnan(out[0, :, 0]).all(axis=1), np.arange(6) == 1)


def test_infinite_score_makes_its_row_nan():
    q, k, v = make((1, 2, 1, 8), (1, 3, 1, 8))
    q[0, 0, 0, 0], k[0, 1, 0, 0] = 1.0, np.inf
    q[0, 1, 0, 0] = -1.0  # the same key at -inf has weight 0
    for oracle in (dense.attention, dense.same_precision):
        out, lse = oracle(q.astype(np.float32), k.astype(np.float32), v.astype(np.float32))
        assert np.isnan(out[0, 0]).all()
        assert np.isnan(lse[0, 0, 0])
        assert np.isfinite(out[0, 1]).all()


def test_huge_scores_do_not_overflow():
    q, k, v = make((1, 4, 1, 8), (1, 5, 1, 8), np.float16)
    q, k = (q * 100).astype(np.float16), (k * 100).astype(np.float16)
    expected_out, expected_lse = scipy_attention(q, k, v, None, False)
    assert np.abs(expected_lse).max() > 1e4
    out, lse = dense.attention(q, k, v)
    np.testing.assert_allclose(out, expected_out, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)
    out, lse = dense.same_precision(q, k, v)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
    np.testing.assert_allclose(out.astype(np.float64), expected_out, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_precision_errs_by_the_format_and_no_more(dtype, causal):
    q, k, v = make((2, 60, 4, 64), (2, 90, 2, 64), dtype)
    reference, reference_lse = dense.attention(q, k, v, causal=causal)
    out, lse = dense.same_precision(q, k, v, causal=causal)
    assert out.dtype == np.dtype(dtype)
    assert lse.dtype == np.float32
    error = np.abs(out.astype(np.float64) - reference).max() / np.abs(reference).max()
    unit = float(ml_dtypes.finfo(dtype).eps) / 2
    assert unit / 20 < error < unit * 2
    np.testing.assert_allclose(lse, reference_lse, rtol=1e-6, atol=1e-6)


def test_same_precision_rounds_p_but_sums_it_unrounded():
    # Two keys whose weights are 1 and w = exp2(-1/3), which float16 cannot hold; v picks the second one.
    q, k, v = np.zeros((1, 1, 1, 8), np.float16), np.zeros((1, 2, 1, 8), np.float16), np.zeros((1, 2, 1, 8), np.float16)
    q[..., 0], k[0, 1, 0, 0], v[0, 1] = 1, -1, 1
    scale = np.float32(math.log(2) / 3) * math.log2(math.e)
    w = np.exp2(-np.float32(scale))
    out, _ = dense.same_precision(q, k, v, softmax_scale=math.log(2) / 3)
    rounded = np.float32(np.float16(w))
    assert rounded != w
    assert out[0, 0, 0, 0] == np.float16(rounded / (1 + w))
    # In float32 nothing is rounded, so the same code must now give the unrounded quotient.
    wide, _ = dense.same_precision(*(x.astype(np.float32) for x in (q, k, v)), softmax_scale=math.log(2) / 3)
    np.testing.assert_allclose(wide[0, 0, 0, 0], w / (1 + w), rtol=2e-7)
    assert abs(rounded / (1 + w) - w / (1 + w)) > 1e-5


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 2), (1, 2, 1, 8), (1, 2, 1, 8)), "q has 3 axes"),
        (((1, 2, 2, 8), (1, 3, 1, 8), (1, 2, 1, 8)), "only the last axis may differ"),
        (((1, 2, 2, 8), (2, 2, 1, 8), (2, 2, 1, 8)), "k has batch 2 but q has 1"),
        (((1, 2, 2, 16), (1, 2, 1, 8), (1, 2, 1, 8)), "k has head_dim 8 but q has 16"),
        (((1, 2, 3, 8), (1, 2, 2, 8), (1, 2, 2, 8)), "3 heads, which is no multiple of the 2"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        dense.check_shapes(*(np.zeros(shape) for shape in shapes))


def test_visible_agrees_with_the_rows_that_have_an_lse():
    q, k, v = make((1, 7, 1, 8), (1, 4, 1, 8))
    _, lse = dense.attention(q, k, v, causal=True)
    np.testing.assert_array_equal(np.isfinite(lse[0, 0]), visible(7, 4, True).any(axis=1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dense.resolve_scale(None, 0), r"head_dim is 0"),
        (lambda: dense.attention(*[np.zeros((1, 2, 1, 0))] * 3), r"head_dim is 0"),
        (lambda: dense.same_precision(*[np.zeros((1, 2, 1))] * 3), r"q has 3 axes"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
