"""The gradients: the two invariants, finite differences, an independent derivation, masks, shared heads."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles import backward, dense
from cupyfa.oracles.backward import attention_backward, same_precision, tiled_backward
from cupyfa.oracles.jacobian import delta_from_output, delta_from_probabilities, softmax_backward
from cupyfa.oracles.mask import visible


def inputs(seqlen_q=7, seqlen_k=9, heads_q=4, heads_kv=2, head_dim=8, head_dim_v=6, batch=2, seed=0):
    """dO, q, k, v."""
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, seqlen_q, heads_q, head_dim_v),
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v),
    ]
    return [rng.standard_normal(shape) for shape in shapes]


def probabilities(seqlen_q, seqlen_k, causal, seed=0):
    """P, dP, dO, O of one head."""
    do, q, k, v = (x[0, :, 0] for x in inputs(seqlen_q, seqlen_k, 1, 1, batch=1, seed=seed))
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
    do, q, k, v = inputs(seqlen_q, seqlen_k, heads_q=2, heads_kv=1, head_dim=3, head_dim_v=2, batch=1)
    options = {"softmax_scale": scale, "causal": causal}
    gradients = attention_backward(do, q, k, v, **options)
    step = 1e-5
    for array, gradient in zip((q, k, v), gradients[:3], strict=True):
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
    for x, y in zip(got[:3], expected[:3], strict=True):
        assert x.dtype == np.float64
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("causal", [False, True])
def test_shared_heads_get_the_sum_of_their_query_heads(causal):
    do, q, k, v = inputs(heads_q=6, heads_kv=2)
    dq, dk, dv, *_ = attention_backward(do, q, k, v, causal=causal)
    wide = attention_backward(do, q, k.repeat(3, axis=2), v.repeat(3, axis=2), causal=causal)
    np.testing.assert_allclose(dq, wide[0], atol=1e-14)
    for got, each in ((dk, wide[1]), (dv, wide[2])):
        np.testing.assert_allclose(got, each.reshape(*each.shape[:2], 2, 3, -1).sum(axis=3), atol=1e-14)


def test_rows_and_keys_that_see_nothing_have_no_gradient():
    do, q, k, v = inputs(seqlen_q=9, seqlen_k=4)
    dq, dk, dv, *_ = attention_backward(do, q, k, v, causal=True)
    assert (dq[:, :5] == 0).all()
    assert (dq[:, 6:] != 0).any()
    for x in (dk, dv):
        assert np.isfinite(x).all()
    empty = attention_backward(do, q, k[:, :0], v[:, :0])
    assert [x.shape[1] for x in empty[:3]] == [9, 0, 0]
    assert (empty[0] == 0).all()


def test_values_behind_the_mask_do_not_matter():
    do, q, k, v = inputs(seqlen_q=6, seqlen_k=6)
    clean = attention_backward(do, q, k, v, causal=True)
    k[:, 4], v[:, 4] = np.nan, np.inf  # rows 0 to 3 do not see key 4
    q[:, 1] = np.nan  # row 1 does not see keys 2 to 5
    dq, dk, dv, *_ = attention_backward(do, q, k, v, causal=True)
    np.testing.assert_array_equal(dq[:, [0, 2, 3]], clean[0][:, [0, 2, 3]])
    assert np.isnan(dq[:, [1, 4, 5]]).all()
    # Keys 2 and 3 are seen by rows 4 and 5, which are NaN; nothing is left that is both finite and touched.
    assert np.isnan(dk[:, :4]).all()
    assert np.isnan(dv[:, :4]).all()


def test_a_nan_row_reaches_only_the_keys_that_it_sees():
    do, q, k, v = inputs(seqlen_q=6, seqlen_k=6)
    clean = attention_backward(do, q, k, v, causal=True)
    q[:, 1] = np.nan
    got = attention_backward(do, q, k, v, causal=True)
    for x, y in zip(got[1:3], clean[1:3], strict=True):
        assert np.isnan(x[:, :2]).all()
        np.testing.assert_allclose(x[:, 2:], y[:, 2:], atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_do_not_change_the_result(causal, monkeypatch):
    arrays = inputs(seqlen_q=13, seqlen_k=11)
    whole = attention_backward(*arrays, causal=causal)
    for module in (backward, dense):
        monkeypatch.setattr(module, "SCORE_BUDGET", 40)
    for x, y in zip(attention_backward(*arrays, causal=causal)[:3], whole[:3], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-14)


@pytest.mark.parametrize(("tile_m", "tile_n"), [(1, 1), (3, 4), (8, 5), (100, 100)])
def test_tiled_gradients_equal_direct_ones(tile_m, tile_n):
    """The specification prints errors of about 1e-16 for its small fixture; here 16 x 16 x 4."""
    rng = np.random.default_rng(10)
    Q, K, V, dO = (rng.standard_normal((16, 4)) for _ in range(4))
    direct = attention_backward(*(x[None, :, None] for x in (dO, Q, K, V)), softmax_scale=0.5)
    tiled = tiled_backward(Q, K, V, dO, scale=0.5, tile_m=tile_m, tile_n=tile_n)
    for got, expected in zip(tiled, direct[:3], strict=True):
        assert np.abs(got - expected[0, :, 0]).max() < 2e-15


# --- All options ---

SINK, SLOPES = np.array([0.5, -np.inf]), np.array([0.3, 0.05])
BIAS = np.random.default_rng(5).standard_normal((2, 2, 5, 6))
BIAS[1, 0, 2, :3] = -np.inf
OPTIONS = {
    "plain": {},
    "window": {"window_size": (2, 1)},
    "causal window": {"causal": True, "window_size": (2, None)},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": SINK},
    "slopes": {"alibi_slopes": SLOPES},
    "slopes of batches": {"alibi_slopes": np.stack([SLOPES, 3 * SLOPES])},
    "bias": {"bias": BIAS},
    "bias of heads": {"bias": BIAS[0]},
    "bias of one row": {"bias": BIAS[:, :, :1]},
    "bias of keys": {"bias": BIAS[0, 0, :1]},
    "bias of rows": {"bias": BIAS[:, :1, :, 5:]},
    "everything": {
        "causal": True,
        "window_size": (3, None),
        "softcap": 2.0,
        "sink": SINK,
        "alibi_slopes": SLOPES,
        "bias": BIAS[:, :1],
        "softmax_scale": -0.6,
    },
}


def loss(q, k, v, do, dlse, **options):
    out, lse = dense.attention(q, k, v, **options)
    return (out * do).sum() + (np.where(np.isneginf(lse), 0, lse) * dlse).sum()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 6), (6, 5)])
def test_gradients_of_all_options_against_finite_differences(name, seqlen_q, seqlen_k):
    """Every element of every gradient, with a gradient of the lse too; among the rows are some without keys."""
    do, q, k, v = inputs(seqlen_q, seqlen_k, heads_q=2, heads_kv=1, head_dim=3, head_dim_v=2)
    dlse = np.random.default_rng(1).standard_normal((2, 2, seqlen_q))
    options = OPTIONS[name].copy()
    if "bias" in options:
        axes = [n if n == 1 else size for n, size in zip(options["bias"].shape[-2:], (seqlen_q, seqlen_k), strict=True)]
        options["bias"] = np.resize(options["bias"], (*options["bias"].shape[:-2], *axes))
    gradients = attention_backward(do, q, k, v, dlse=dlse, **options)
    arrays = {"dq": q, "dk": k, "dv": v}
    arrays |= {f"d{x}": options[x] for x in ("sink", "bias") if x in options}
    assert {x for x, value in gradients._asdict().items() if value is not None} == {*arrays}
    step = 1e-5
    for which, array in arrays.items():
        gradient = getattr(gradients, which)
        assert gradient.shape == array.shape
        for index in np.ndindex(array.shape):
            saved, losses = array[index], []
            for shift in (step, -step):
                array[index] = saved + shift
                losses.append(loss(q, k, v, do, dlse, **options))
            array[index] = saved
            assert gradient[index] == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=1e-8), (which, index)


@pytest.mark.parametrize("name", OPTIONS)
def test_out_and_lse_of_the_forward_pass_change_nothing(name):
    do, q, k, v = inputs(5, 6, heads_q=2, heads_kv=1)
    result = dense.attention(q, k, v, **OPTIONS[name])
    ours, given_result = (attention_backward(do, q, k, v, *x, **OPTIONS[name]) for x in ((), result))
    for x, y in zip(ours, given_result, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_bias_that_a_view_repeats_gets_one_gradient():
    do, q, k, v = inputs(5, 6, heads_q=2, heads_kv=1)
    whole = attention_backward(do, q, k, v, bias=BIAS[:, :, :1])
    view = np.broadcast_to(BIAS[:, :, :1], BIAS.shape)
    repeated = attention_backward(do, q, k, v, bias=view)
    assert repeated.dbias.shape == (2, 2, 1, 6)
    np.testing.assert_allclose(repeated.dbias, whole.dbias, atol=1e-14)
    full = attention_backward(do, q, k, v, bias=view.copy())
    np.testing.assert_allclose(full.dbias.sum(axis=2, keepdims=True), whole.dbias, atol=1e-14)


def test_rows_without_keys_have_gradients_of_exactly_0():
    do, q, k, v = inputs(seqlen_q=9, seqlen_k=4)
    sink = np.array([0.5, -np.inf, 3, 0])
    do[:, 2] = np.nan  # a row without keys
    dlse = np.ones((2, 4, 9))
    got = attention_backward(do, q, k, v, causal=True, bias=np.zeros((9, 4)), dlse=dlse)
    assert not got.dq[:, :5].any()
    assert not got.dbias[:5].any()
    assert all(np.isfinite(x).all() for x in (got.dq, got.dk, got.dv, got.dbias))
    # Without any key the lse is the sink, and out does not depend on it.
    nothing = attention_backward(do[:, 3:], q[:, 3:], k[:, :0], v[:, :0], sink=sink, dlse=dlse[:, :, 3:])
    assert nothing.dsink.tolist() == [12, 0, 12, 12]


# --- At the precision of the kernels ---


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_same_precision_is_as_exact_as_its_numbers(name, dtype):
    do, q, k, v = (x.astype(dtype) for x in inputs(5, 6, heads_q=2, heads_kv=1))
    options = OPTIONS[name] | {"dlse": np.ones((2, 2, 5), np.float32)}
    exact, rounded = attention_backward(do, q, k, v, **options), same_precision(do, q, k, v, **options)
    assert [x.dtype for x in rounded[:3]] == [dtype] * 3
    for x, y in zip(exact, rounded, strict=True):
        if x is not None:
            error = np.abs(x - y.astype(np.float64)).max()
            assert 0 < error < 8 * float(ml_dtypes.finfo(dtype).eps) * np.abs(x).max()


def test_same_precision_of_float32_rounds_nothing_on_the_way():
    arrays = [x.astype(np.float32) for x in inputs()]
    exact, single = attention_backward(*arrays, causal=True), same_precision(*arrays, causal=True)
    for x, y in zip(exact[:3], single[:3], strict=True):
        np.testing.assert_allclose(y, x, atol=3e-6)


def test_operands_are_rounded():
    """One key, so that P is 1 but for the lse: dV is dO times P rounded, which a given lse moves to a tie."""
    x = np.ones((1, 1, 1, 8), np.float16)
    lse = np.full((1, 1, 1), np.sqrt(8) + 2.0**-13, np.float32)  # P is 1 - 2**-13, which float16 rounds to 1
    got = same_precision(x, x, x, x, x, lse)
    assert got.dv.astype(float).ravel().tolist() == [1.0] * 8


def test_shapes_are_checked():
    do, q, k, v = inputs()
    with pytest.raises(ValueError, match="dout has shape"):
        attention_backward(do[:, :-1], q, k, v)
    with pytest.raises(ValueError, match="k has head_dim"):
        attention_backward(do, q, k[..., :4], v)
    with pytest.raises(ValueError, match=r"dlse has shape \(2, 7, 4\); it must be \(2, 4, 7\)"):
        attention_backward(do, q, k, v, dlse=np.zeros((2, 7, 4)))
    with pytest.raises(ValueError, match=r"lse has shape \(2, 4, 6\); it must be \(2, 4, 7\)"):
        same_precision(do, q, k, v, do, np.zeros((2, 4, 6)))
    with pytest.raises(ValueError, match="out and lse belong together"):
        attention_backward(do, q, k, v, do)
    with pytest.raises(ValueError, match="softcap is 0"):
        attention_backward(do, q, k, v, softcap=0)
    with pytest.raises(ValueError, match="do not fit each other"):
        softmax_backward(np.ones((2, 3)), np.ones((2, 3)), np.ones(3))
    with pytest.raises(ValueError, match="tiles of 0 x 1"):
        tiled_backward(*(np.ones((2, 2)) for _ in range(4)), scale=1.0, tile_m=0, tile_n=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: delta_from_output(np.ones((2, 3)), np.ones((1, 3))), r"dO \(2, 3\), O \(1, 3\) do not fit"),
        (
            lambda: delta_from_output(np.ones((2, 3)), np.ones((2, 4))),
            r"delta_from_output: dO \(2, 3\), O \(2, 4\)",
        ),
        (lambda: delta_from_probabilities(np.ones((2, 3)), np.ones((1, 3))), r"P \(2, 3\), dP \(1, 3\)"),
        (lambda: delta_from_probabilities(np.float64(1), np.float64(1)), r"must be equal and have rows"),
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
