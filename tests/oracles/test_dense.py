"""The float64 reference against SciPy, and the same-precision yardstick against the reference."""

import itertools
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


def brute_force(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    softcap=None,
    sink=None,
    alibi_slopes=None,
    bias=None,
):
    """The definition, one key at a time, in float64."""
    (batch, seqlen_q, heads, _), seqlen_k = q.shape, k.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros((batch, seqlen_q, heads, v.shape[3]))
    lse = np.full((batch, heads, seqlen_q), -np.inf)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    left, right = (math.inf if side in (None, -1) else side for side in window_size)
    for b, h, i in itertools.product(range(batch), range(heads), range(seqlen_q)):
        kv_head = h // (heads // k.shape[2])
        diagonal = i + seqlen_k - seqlen_q
        logits, values = [], []
        for j in range(seqlen_k):
            if j < diagonal - left or j > diagonal + (0 if causal else right):
                continue
            s = scale * float(q[b, i, h] @ k[b, j, kv_head])
            if softcap is not None:
                s = softcap * math.tanh(s / softcap)
            if alibi_slopes is not None:
                s -= float(alibi_slopes[h] if alibi_slopes.ndim == 1 else alibi_slopes[b, h]) * abs(diagonal - j)
            if bias is not None:
                s += float(np.broadcast_to(bias, (batch, heads, seqlen_q, seqlen_k))[b, h, i, j])
            logits.append(s)
            values.append(v[b, j, kv_head])
        if sink is not None:
            logits.append(float(sink[h]))
            values.append(np.zeros(v.shape[3]))
        if logits and max(logits) > -math.inf:
            lse[b, h, i] = scipy.special.logsumexp(logits)
            out[b, i, h] = scipy.special.softmax(logits) @ np.array(values)
    return out, lse


OPTIONS = {
    "window_size": [(3, 1), (0, 0), (None, 2), (4, -1)],
    "softcap": [1.5],
    "sink": [np.float32([0.5, -np.inf, 40.0, -3.0])],
    "alibi_slopes": [np.float32([0.5, 0.25, 1, 0]), np.float32([[0.5, 0.25, 1, 0], [0.1, 0.7, 0, 3]])],
}


@pytest.mark.parametrize("lengths", [(9, 13), (13, 5), (7, 7), (4, 0)])
@pytest.mark.parametrize("softmax_scale", [None, -1.5, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_options_match_brute_force(lengths, causal, softmax_scale):
    q, k, v = make((2, lengths[0], 4, 8), (2, lengths[1], 2, 8), np.float16, head_dim_v=3)
    q = q * np.float16(2)
    for values in itertools.product(*([None, *values] for values in OPTIONS.values())):
        options = {name: value for name, value in zip(OPTIONS, values, strict=True) if value is not None}
        options |= {"softmax_scale": softmax_scale, "causal": causal}
        expected_out, expected_lse = brute_force(q, k, v, **options)
        out, lse = dense.attention(q, k, v, **options)
        assert out.dtype == lse.dtype == np.float64
        np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)
        out, lse = dense.same_precision(*(x.astype(np.float32) for x in (q, k, v)), **options)
        np.testing.assert_allclose(out, expected_out, rtol=1e-4, atol=3e-6)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("lengths", [(9, 13), (13, 5), (4, 0)])
@pytest.mark.parametrize("axes", ["bhqk", "hqk", "bqk", "bhk", "bhq", "qk", "k", "q", "b", ""])
def test_bias_matches_brute_force(axes, lengths, dtype):
    q, k, v = make((2, lengths[0], 4, 8), (2, lengths[1], 2, 8), np.float16, head_dim_v=3)
    sizes = {"b": 2, "h": 4, "q": lengths[0], "k": lengths[1]}
    bias = np.random.default_rng(4).normal(0, 3, [n if axis in axes else 1 for axis, n in sizes.items()]).astype(dtype)
    bias[bias > 4] = -np.inf
    every = {
        "window_size": (5, 2),
        "softcap": 1.5,
        "sink": OPTIONS["sink"][0],
        "alibi_slopes": OPTIONS["alibi_slopes"][1],
    }
    for others in ({}, {"causal": True}, *({name: value} for name, value in every.items()), every):
        options = others | {"bias": bias, "softmax_scale": -0.7}
        expected_out, expected_lse = brute_force(q, k, v, **options)
        out, lse = dense.attention(q, k, v, **options)
        np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)
        out, lse = dense.same_precision(*(x.astype(np.float32) for x in (q, k, v)), **options)
        np.testing.assert_allclose(out, expected_out, rtol=1e-4, atol=3e-6)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
def test_a_row_of_the_most_negative_number_sees_all_keys(oracle):
    q, k, v = make((1, 3, 1, 8), (1, 40, 1, 8), np.float16)
    bias = np.zeros((3, 40), np.float32)
    bias[0], bias[1], bias[2, 1:] = np.finfo(np.float32).min, -np.inf, np.finfo(np.float32).min
    out, lse = oracle(q, k, v, bias=bias)
    np.testing.assert_allclose(out[0, 0, 0].astype(float), v[0, :, 0].astype(float).mean(axis=0), rtol=2e-3, atol=1e-3)
    assert not out[0, 1].any()
    np.testing.assert_array_equal(out[0, 2], v[0, 0])
    assert lse[0, 0].tolist()[:2] == [float(np.finfo(np.float32).min), -math.inf]


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
def test_options_that_change_nothing(oracle):
    q, k, v = make((2, 20, 4, 8), (2, 20, 2, 8), np.float16)
    for causal in (False, True):
        plain = oracle(q, k, v, causal=causal)
        for options in (
            {"window_size": (20, 20)},
            {"window_size": (19, 19)},
            {"window_size": (-1, None)},
            {"sink": np.full(4, -np.inf, np.float32)},
            {"alibi_slopes": np.zeros(4, np.float32)},
        ):
            for a, b in zip(oracle(q, k, v, causal=causal, **options), plain, strict=True):
                np.testing.assert_array_equal(a, b)
        a, _ = oracle(q, k, v, causal=causal, window_size=(18, 18))
        assert (a != plain[0]).any()


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
def test_windows_that_are_causal(oracle):
    q, k, v = make((1, 20, 2, 8), (1, 20, 1, 8), np.float16)
    causal = oracle(q, k, v, causal=True)
    for window_size in [(None, 0), (20, 0), (19, 0)]:
        for a, b in zip(oracle(q, k, v, window_size=window_size), causal, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
@pytest.mark.parametrize(("window_size", "count"), [((6, 0), 7), ((0, 0), 1), ((0, 6), 7), ((1, 2), 4)])
def test_windows_count_their_own_key(oracle, window_size, count):
    q, k, v = (np.zeros((1, n, 1, 8), np.float16) for n in (12, 25, 25))
    v[0, :, 0, 0] = np.arange(25)
    rows = np.arange(12)[: 12 - window_size[1]]
    out, lse = oracle(q, k, v, window_size=window_size)
    np.testing.assert_allclose(lse[0, 0, rows], np.log(count), rtol=1e-6, atol=1e-12)
    middle = rows + 13 + (window_size[1] - window_size[0]) / 2
    np.testing.assert_allclose(out[0, rows, 0, 0].astype(float), middle, rtol=1e-3)


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
@pytest.mark.parametrize("score", [5e3, 1e4])
def test_a_softcap_saturates(oracle, score):
    q, k, v = (np.zeros((1, n, 1, 8), np.float32) for n in (2, 3, 3))
    q[0, 0, 0, 0], q[0, 1, 0, 0] = 1, -1
    k[0, :, 0, 0] = score, -score, np.inf
    v[0, :, 0, :3] = np.eye(3)
    out, lse = oracle(q, k, v, softmax_scale=1.0, softcap=50.0)
    np.testing.assert_allclose(out[0, :, 0, :3], [[0.5, math.exp(-100), 0.5], [0, 1, 0]], rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(lse[0, 0], [50 + math.log(2), 50], rtol=1e-6)


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
@pytest.mark.parametrize("seqlen_k", [0, 2])
def test_rows_without_keys_have_the_sink_as_their_lse(oracle, seqlen_k):
    q, k, v = make((2, 5, 3, 8), (2, seqlen_k, 1, 8), np.float16)
    out, lse = oracle(q, k, v, causal=True, sink=np.float32([0.5, -np.inf, -20]))
    blind = 5 - seqlen_k
    assert (out[:, :blind] == 0).all()
    np.testing.assert_allclose(lse[:, 0, :blind], 0.5, rtol=1e-7)
    assert np.isneginf(lse[:, 1, :blind]).all()
    np.testing.assert_allclose(lse[:, 2, :blind], -20, rtol=1e-7)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
def test_a_huge_sink_overflows_nothing(oracle):
    q, k, v = make((1, 4, 4, 8), (1, 6, 1, 8), np.float16)
    out, lse = oracle(q, k, v, sink=np.float32([1e4, 1e38, -1e4, -3e38]))
    assert (out[:, :, :2] == 0).all()
    np.testing.assert_allclose(lse[0, :2], [[1e4] * 4, [1e38] * 4], rtol=1e-6)
    without, lse_without = oracle(q, k, v)
    np.testing.assert_array_equal(out[:, :, 2:], without[:, :, 2:])
    np.testing.assert_array_equal(lse[:, 2:], lse_without[:, 2:])


def test_the_yardstick_keeps_probabilities_beside_a_large_sink():
    q, k, v = make((1, 8, 1, 8), (1, 30, 1, 8), np.float16)
    v = np.abs(v) * np.float16(1000)
    sink = np.float32([14.0])
    reference, _ = dense.attention(q, k, v, sink=sink)
    out, _ = dense.same_precision(q, k, v, sink=sink)
    np.testing.assert_allclose(out.astype(float), reference, rtol=2e-3)


@pytest.mark.parametrize("oracle", [dense.attention, dense.same_precision])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_keys_outside_of_the_window_never_reach_a_row(oracle, special):
    q, k, v = make((1, 12, 2, 8), (1, 12, 2, 8), np.float16)
    options = {"window_size": (2, 1), "softcap": 5.0, "alibi_slopes": np.float32([0.5, 0.1])}
    clean, clean_lse = oracle(q, k, v, **options)
    for bad, name in ((k.copy(), "k"), (v.copy(), "v")):
        bad[0, 6, 0, 3] = special
        out, lse = oracle(q, *((bad, v) if name == "k" else (k, bad)), **options)
        seen = np.isin(np.arange(12), (5, 6, 7, 8))
        np.testing.assert_array_equal(out[0, ~seen], clean[0, ~seen])
        np.testing.assert_array_equal(out[0, :, 1], clean[0, :, 1])
        np.testing.assert_array_equal(lse[0, 0, ~seen], clean_lse[0, 0, ~seen])
        assert (out[0, seen, 0] != clean[0, seen, 0]).any(axis=1).all()


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
        *(
            (
                lambda oracle=oracle, options=options: oracle(*[np.zeros((3, 2, 2, 8), np.float16)] * 3, **options),
                message,
            )
            for oracle, (options, message) in itertools.product(
                (dense.attention, dense.same_precision),
                [
                    ({"softcap": 0.0}, r"^attention: softcap is 0.0; it must be positive and finite, or None$"),
                    ({"softcap": -1.0}, r"softcap is -1.0"),
                    ({"softcap": math.inf}, r"softcap is inf"),
                    ({"softcap": math.nan}, r"softcap is nan"),
                    ({"sink": np.zeros(3)}, r"^attention: sink has shape \(3,\); it must be \(2,\)$"),
                    ({"sink": np.zeros((3, 2))}, r"sink has shape \(3, 2\)"),
                    (
                        {"alibi_slopes": np.zeros((2, 2))},
                        r"^attention: alibi_slopes has shape \(2, 2\); it must be \(2,\) or \(3, 2\)$",
                    ),
                    ({"alibi_slopes": np.zeros(())}, r"alibi_slopes has shape \(\)"),
                    ({"window_size": (0, -2)}, r"window_size is \(0, -2\)"),
                    (
                        {"bias": np.zeros((2, 3))},
                        r"^attention: bias has shape \(2, 3\); it must broadcast to \(3, 2, 2, 2\)$",
                    ),
                    ({"bias": np.zeros((1, 1, 1, 1, 1))}, r"bias has shape \(1, 1, 1, 1, 1\)"),
                ],
            )
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
