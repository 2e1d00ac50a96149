"""The gradients: the two invariants, finite differences, an independent derivation, masks, shared heads."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles import backward, dense
from cupyfa.oracles.backward import (
    attention_backward,
    delta_from_output,
    delta_from_probabilities,
    softmax_backward,
    tiled_backward,
)
from cupyfa.oracles.mask import visible


def inputs(seqlen_q=7, seqlen_k=9, heads_q=4, heads_kv=2, head_dim=8, head_dim_v=6, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v),
        (batch, seqlen_q, heads_q, head_dim_v),
    ]
    return [rng.standard_normal(shape) for shape in shapes]


def probabilities(seqlen_q, seqlen_k, causal, seed=0):
    """P, dP, dO, O of one head."""
    q, k, v, do = (x[0, :, 0] for x in inputs(seqlen_q, seqlen_k, 1, 1, batch=1, seed=seed))
    S = np.where(visible(seqlen_q, seqlen_k, causal), q @ k.T / math.sqrt(8), -np.inf)
    m = S.max(axis=1, keepdims=True)
    P = np.exp(S - np.where(np.isneginf(m), 0, m))
    P /= np.maximum(P.sum(axis=1, keepdims=True), 1e-300)
    return P, do @ v.T, do, P @ v


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 12), st.booleans(), st.integers(0, 1000))
def test_rows_of_ds_sum_to_zero_and_delta_agrees_two_ways(seqlen_q, seqlen_k, causal, seed):
    P, dP, dO, O = probabilities(seqlen_q, seqlen_k, causal, seed)
    delta = delta_from_probabilities(P, dP)
    np.testing.assert_allclose(delta, delta_from_output(dO, O), atol=2e-14)
    for d in (delta, delta_from_output(dO, O)):
        np.testing.assert_allclose(softmax_backward(P, dP, d).sum(axis=1), 0, atol=5e-14)


def test_a_wrong_delta_breaks_the_row_sums():
    P, dP, _, _ = probabilities(5, 6, False)
    off = softmax_backward(P, dP, delta_from_probabilities(P, dP) + 0.01)
    np.testing.assert_allclose(off.sum(axis=1), -0.01, atol=1e-14)


def test_softmax_backward_is_the_jacobian():
    P, dP, _, _ = probabilities(3, 6, False)
    for p, dp, ds in zip(P, dP, softmax_backward(P, dP, delta_from_probabilities(P, dP)), strict=True):
        jacobian = np.diag(p) - np.outer(p, p)  # dp_j / ds_k
        np.testing.assert_allclose(ds, dp @ jacobian, atol=1e-15)
        np.testing.assert_allclose(jacobian.sum(axis=0), 0, atol=1e-15)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.0, -0.7])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 6), (6, 3), (1, 4), (4, 1)])
def test_gradients_against_finite_differences(causal, scale, seqlen_q, seqlen_k):
    """Every element of dq, dk and dv, by central differences of the dense forward pass."""
    q, k, v, do = inputs(seqlen_q, seqlen_k, heads_q=2, heads_kv=1, head_dim=3, head_dim_v=2, batch=1)
    options = {"softmax_scale": scale, "causal": causal}
    gradients = attention_backward(q, k, v, do, **options)
    step = 1e-5
    for array, gradient in zip((q, k, v), gradients, strict=True):
        for index in np.ndindex(array.shape):
            saved, losses = array[index], []
            for shift in (step, -step):
                array[index] = saved + shift
                losses.append((dense.attention(q, k, v, **options)[0] * do).sum())
            array[index] = saved
            assert gradient[index] == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=2e-9)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_inputs_are_widened(dtype):
    arrays = [x.astype(dtype) for x in inputs()]
    got = attention_backward(*arrays, causal=True)
    expected = attention_backward(*(x.astype(np.float64) for x in arrays), causal=True)
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == np.float64
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("causal", [False, True])
def test_shared_heads_get_the_sum_of_their_query_heads(causal):
    q, k, v, do = inputs(heads_q=6, heads_kv=2)
    dq, dk, dv = attention_backward(q, k, v, do, causal=causal)
    wide = attention_backward(q, k.repeat(3, axis=2), v.repeat(3, axis=2), do, causal=causal)
    np.testing.assert_allclose(dq, wide[0], atol=1e-14)
    for got, each in ((dk, wide[1]), (dv, wide[2])):
        np.testing.assert_allclose(got, each.reshape(*each.shape[:2], 2, 3, -1).sum(axis=3), atol=1e-14)


def test_rows_and_keys_that_see_nothing_have_no_gradient():
    q, k, v, do = inputs(seqlen_q=9, seqlen_k=4)
    dq, dk, dv = attention_backward(q, k, v, do, causal=True)
    assert (dq[:, :5] == 0).all()
    assert (dq[:, 6:] != 0).any()
    for x in (dk, dv):
        assert np.isfinite(x).all()
    empty = attention_backward(q, k[:, :0], v[:, :0], do)
    assert [x.shape[1] for x in empty] == [9, 0, 0]
    assert (empty[0] == 0).all()


def test_values_behind_the_mask_do_not_matter():
    q, k, v, do = inputs(seqlen_q=6, seqlen_k=6)
    clean = attention_backward(q, k, v, do, causal=True)
    k[:, 4], v[:, 4] = np.nan, np.inf  # rows 0 to 3 do not see key 4
    q[:, 1] = np.nan  # row 1 does not see keys 2 to 5
    dq, dk, dv = attention_backward(q, k, v, do, causal=True)
    np.testing.assert_array_equal(dq[:, [0, 2, 3]], clean[0][:, [0, 2, 3]])
    assert np.isnan(dq[:, [1, 4, 5]]).all()
    # Keys 2 and 3 are seen by rows 4 and 5, which are NaN; nothing is left that is both finite and touched.
    assert np.isnan(dk[:, :4]).all()
    assert np.isnan(dv[:, :4]).all()


def test_a_nan_row_reaches_only_the_keys_that_it_sees():
    q, k, v, do = inputs(seqlen_q=6, seqlen_k=6)
    clean = attention_backward(q, k, v, do, causal=True)
    q[:, 1] = np.nan
    got = attention_backward(q, k, v, do, causal=True)
    for x, y in zip(got[1:], clean[1:], strict=True):
        assert np.isnan(x[:, :2]).all()
        np.testing.assert_allclose(x[:, 2:], y[:, 2:], atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_do_not_change_the_result(causal, monkeypatch):
    arrays = inputs(seqlen_q=13, seqlen_k=11)
    whole = attention_backward(*arrays, causal=causal)
    for module in (backward, dense):
        monkeypatch.setattr(module, "SCORE_BUDGET", 40)
    for x, y in zip(attention_backward(*arrays, causal=causal), whole, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-14)


@pytest.mark.parametrize(("tile_m", "tile_n"), [(1, 1), (3, 4), (8, 5), (100, 100)])
def test_tiled_gradients_equal_direct_ones(tile_m, tile_n):
    """The specification prints errors of about 1e-16 for its small fixture; here 16 x 16 x 4."""
    rng = np.random.default_rng(10)
    Q, K, V, dO = (rng.standard_normal((16, 4)) for _ in range(4))
    direct = attention_backward(*(x[None, :, None] for x in (Q, K, V, dO)), softmax_scale=0.5)
    for got, expected in zip(tiled_backward(Q, K, V, dO, scale=0.5, tile_m=tile_m, tile_n=tile_n), direct, strict=True):
        assert np.abs(got - expected[0, :, 0]).max() < 2e-15


def test_shapes_are_checked():
    q, k, v, do = inputs()
    with pytest.raises(ValueError, match="dout has shape"):
        attention_backward(q, k, v, do[:, :-1])
    with pytest.raises(ValueError, match="k has head_dim"):
        attention_backward(q, k[..., :4], v, do)
    with pytest.raises(ValueError, match="do not fit each other"):
        softmax_backward(np.ones((2, 3)), np.ones((2, 3)), np.ones(3))
    with pytest.raises(ValueError, match="tiles of 0 x 1"):
        tiled_backward(*(np.ones((2, 2)) for _ in range(4)), scale=1.0, tile_m=0, tile_n=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: backward.delta_from_output(np.ones((2, 3)), np.ones((1, 3))), r"dO \(2, 3\), O \(1, 3\) do not fit"),
        (
            lambda: backward.delta_from_output(np.ones((2, 3)), np.ones((2, 4))),
            r"delta_from_output: dO \(2, 3\), O \(2, 4\)",
        ),
        (lambda: backward.delta_from_probabilities(np.ones((2, 3)), np.ones((1, 3))), r"P \(2, 3\), dP \(1, 3\)"),
        (lambda: backward.delta_from_probabilities(np.float64(1), np.float64(1)), r"must be equal and have rows"),
        (lambda: tiled_backward(*[np.ones(3)] * 4, scale=1.0, tile_m=1, tile_n=1), r"Q has shape \(3,\)"),
        (
            lambda: tiled_backward(*[np.ones((2, 3))] * 3, np.ones((1, 3)), scale=1.0, tile_m=1, tile_n=1),
            r"dO has shape \(1, 3\); it must be \(2, 3\)",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
