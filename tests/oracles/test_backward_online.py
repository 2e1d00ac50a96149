"""The twin of the backward kernel: against the reference by the tolerance rule, its tiles, its orders of addition."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from cupyfa.oracles import backward, dense, online, packed_backward
from cupyfa.oracles.backward_online import attention_backward, preprocess
from cupyfa.testing import BACKWARD_CASES, as_bshd, assert_close, assert_gradients_close, random_array

RNG = np.random.default_rng(0)
SINK = np.float32([0.5, -np.inf, 2.0, -1.0])
SLOPES = np.float32([0.3, 0.05, 0.01, 0.0])
BIAS = random_array((2, 4, 70, 90), np.float32, seed=3)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 10)},
    "softcap": {"softcap": 3.0, "causal": True},
    "sink": {"sink": SINK},
    "slopes": {"alibi_slopes": np.stack([SLOPES, 2 * SLOPES]), "causal": True},
    "bias": {"bias": BIAS},
    "bias of heads": {"bias": BIAS[0]},
    "bias of keys in half precision": {"bias": BIAS[1, 0, :1].astype(np.float16)},
    "bias of rows": {"bias": BIAS[:, :1, :, 3:4]},
    "negative scale": {"softmax_scale": -0.3},
    "no scale": {"softmax_scale": 0.0},
    "everything": {
        "window_size": (30, 5),
        "softcap": 2.0,
        "sink": SINK,
        "alibi_slopes": SLOPES,
        "bias": BIAS[:, :1],
        "softmax_scale": -0.4,
    },
}


def arrays(seqlen_q=70, seqlen_k=90, heads_q=4, heads_kv=2, head_dim=32, head_dim_v=24, dtype=ml_dtypes.bfloat16):
    """dO, q, k, v."""
    shapes = [(seqlen_q, heads_q, head_dim_v), (seqlen_q, heads_q, head_dim)]
    shapes += [(seqlen_k, heads_kv, head_dim), (seqlen_k, heads_kv, head_dim_v)]
    return [random_array((2, *shape), dtype, seed) for seed, shape in enumerate(shapes)]


def result(q, k, v, options):
    """Out and lse as a kernel would give them."""
    out, lse = dense.attention(q, k, v, **options)
    return out.astype(q.dtype), lse.astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_all_options(name, dtype):
    do, q, k, v = arrays(dtype=dtype)
    options = OPTIONS[name]
    of_forward = result(q, k, v, options)
    dlse = random_array((2, 4, 70), np.float32, seed=9)
    got = attention_backward(do, q, k, v, *of_forward, dlse=dlse, tile_n=64, **options)
    exact = backward.attention_backward(do, q, k, v, dlse=dlse, **options)
    plain = backward.same_precision(do, q, k, v, *of_forward, dlse=dlse, **options)
    for field, x, reference, yardstick in zip(got._fields, got, exact, plain, strict=True):
        if x is not None:
            assert x.dtype == yardstick.dtype
            assert_close(x, reference, yardstick, what=field)


@pytest.mark.parametrize(("tile_m", "tile_n"), [(1, 1), (16, 80), (80, 16), (64, 128), (1000, 1000)])
def test_tiles_change_rounding_only(tile_m, tile_n):
    do, q, k, v = (x.astype(np.float32) for x in arrays(30, 41))
    options = {"causal": True, "softcap": 2.0}
    of_forward = dense.attention(q, k, v, **options)
    got = attention_backward(do, q, k, v, *of_forward, tile_m=tile_m, tile_n=tile_n, **options)
    for x, y in zip(got[:3], backward.attention_backward(do, q, k, v, **options)[:3], strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_the_order_of_writers_decides_about_bits_of_dq_alone():
    do, q, k, v = (x.astype(np.float32) for x in arrays(heads_q=2))
    of_forward = dense.attention(q, k, v)
    orders = [None, (0, 1, 2), (2, 1, 0), (0, 2, 1)]
    results = [attention_backward(do, q, k, v, *of_forward, tile_n=32, writer_order=order) for order in orders]
    assert np.array_equal(results[0].dq, results[1].dq)
    for a, b in itertools.combinations(results[1:], 2):
        assert not np.array_equal(a.dq, b.dq)
        np.testing.assert_allclose(a.dq, b.dq, atol=2e-6)
        assert np.array_equal(a.dk, b.dk)
        assert np.array_equal(a.dv, b.dv)


def test_dq_is_a_sum_over_key_tiles_in_the_order_of_writers():
    """Each key tile alone, without rounding in between: float32 additions in the declared order give the bits."""
    do, q, k, v = (x.astype(np.float32) for x in arrays(40, 96, heads_q=2))
    of_forward = dense.attention(q, k, v, softmax_scale=1.0)
    whole = attention_backward(do, q, k, v, *of_forward, softmax_scale=1.0, tile_n=32, writer_order=(1, 0, 2))
    total = np.zeros_like(q)
    for n in (1, 0, 2):
        keys = slice(32 * n, 32 * n + 32)
        total += attention_backward(do, q, k[:, keys], v[:, keys], *of_forward, softmax_scale=1.0, tile_n=32).dq
    assert np.array_equal(whole.dq, total)


def test_what_no_row_sees_has_gradients_of_exactly_0():
    do, q, k, v = arrays(90, 30)
    do[:, 5] = np.nan
    options = {"window_size": (5, 0), "bias": np.zeros((90, 30), np.float16)}
    got = attention_backward(do, q, k, v, *result(q, k, v, options), tile_m=16, tile_n=16, **options)
    assert not got.dq[:, :60].any()
    assert got.dq[:, 61:].any(axis=(-1, -2)).all()  # the softmax of one key has no gradient
    assert not got.dbias[:60].any()
    assert all(np.isfinite(x.astype(np.float32)).all() for x in got if x is not None)
    empty = attention_backward(do, q, k[:, :0], v[:, :0], *result(q, k[:, :0], v[:, :0], {}))
    assert not empty.dq.any()
    assert empty.dk.shape == (2, 0, 2, 32)


def test_a_row_without_keys_has_an_infinite_reference():
    x, lse = np.ones((1, 2, 1, 4), np.float32), np.float32([[[1.0, -np.inf]]])
    delta, reference = preprocess(x, x, lse, np.float32([[[1, 3]]]), shift=3.0, natural=True)
    assert delta.tolist() == [[[3.0, 1.0]]]
    assert reference.tolist() == [[[-2.0, np.inf]]]


def test_a_capped_score_has_the_derivative_of_tanh():
    scores = np.linspace(-40, 40, 801, dtype=np.float32)
    mod = online.ScoreMod(0.5, 4.0, None, None)
    capped = mod.cap(scores)
    np.testing.assert_allclose(1 + 2 * capped, np.tanh(scores / 8), atol=3e-7)
    np.testing.assert_allclose(mod.derivative(capped), 1 - np.tanh(scores.astype(float) / 8) ** 2, atol=5e-7)


@pytest.mark.parametrize("order", [(0,), (0, 0, 1), (1, 2, 3), (0, 1, 2, 3)])
def test_an_order_that_is_none_is_refused(order):
    do, q, k, v = arrays()
    with pytest.raises(ValueError, match=r"writer_order is \[.*\]; it must have each of the 3 key tiles once$"):
        attention_backward(do, q, k, v, *result(q, k, v, {}), tile_n=32, writer_order=order)


def test_tiles_of_nothing_are_refused():
    do, q, k, v = arrays()
    with pytest.raises(ValueError, match="tile_m"):
        attention_backward(do, q, k, v, *result(q, k, v, {}), tile_m=0)


@pytest.mark.parametrize("case", [case for case in BACKWARD_CASES if not case.large], ids=lambda case: case.id)
def test_cases(case):
    """The twin is as close to the reference as a kernel has to be."""
    arrays, options = case.make_arrays(), case.options
    if case.packed:
        got = packed_backward.attention_backward(**arrays, **options, of_sequence=attention_backward)
    else:
        layout = case.forward.layout
        arrays |= {name: as_bshd(arrays[name], layout) for name in ("dout", "q", "k", "v", "out")}
        got = attention_backward(**arrays, **options)
        got = got._replace(**{name: as_bshd(getattr(got, name), layout) for name in ("dq", "dk", "dv")})
    assert_gradients_close(got, case)
