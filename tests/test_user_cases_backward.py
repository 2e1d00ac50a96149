"""What users of attention libraries reported about gradients, by its number in docs/user_cases.md, on the CPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyfa
from cupyfa.oracles import backward, packed_backward
from cupyfa.testing import assert_close, guarded_empty, random_array

BF16 = ml_dtypes.bfloat16


def inputs(q: tuple[int, ...], k: tuple[int, ...], dtype: Any = np.float16, amplitude: float = 1.0) -> list[Any]:
    """q, k, v and dout."""
    arrays = [random_array(shape, dtype, n, amplitude=amplitude) for n, shape in enumerate((q, k, k))]
    return [*arrays, random_array(q, dtype, 3)]


def check(q: Any, k: Any, v: Any, dout: Any, dlse: Any = None, **options: Any) -> cupyfa.Gradients:
    """Hold the gradients to the oracles, through `attention_vjp`."""
    (out, lse), pullback = cupyfa.attention_vjp(q, k, v, **options, return_lse=True)
    got = pullback(dout, dlse)
    packed = "cu_seqlens_q" in options
    function = packed_backward.attention_backward if packed else backward.attention_backward
    of_sequence = {"of_sequence": backward.same_precision} if packed else {}
    plain = packed_backward.attention_backward if packed else backward.same_precision
    exact = function(dout, q, k, v, out, lse, dlse=dlse, **options)
    rounded = plain(dout, q, k, v, out, lse, dlse=dlse, **options, **of_sequence)
    for name, x, reference, yardstick in zip(got._fields, got, exact, rounded, strict=True):
        if reference is not None:
            assert np.isfinite(x.astype(np.float32)).all()
            assert_close(x, reference, yardstick, what=name)
    return got


def test_c01_gradients_of_more_queries_than_keys() -> None:
    q, k, v, dout = inputs((1, 5, 1, 64), (1, 2, 1, 64))
    dq, dk, dv, *_ = check(q, k, v, dout, causal=True)
    assert not dq[:, :3].any()
    assert dq[:, 4].any()
    # Row 3 sees key 0 alone: its weight is 1, and key 1 gets its share from row 4.
    (out, lse), pullback = cupyfa.attention_vjp(q, k, v, causal=True, return_lse=True)
    dout[:, 4] = 0
    only = pullback(dout)
    np.testing.assert_array_equal(only.dv[:, 0], dout[:, 3])
    assert not only.dv[:, 1].any()
    assert np.isneginf(lse[..., :3]).all()
    assert not out[:, :3].any()
    assert dk.any()
    assert dv.any()


def test_c02_no_nan_in_gradients_of_rows_without_keys() -> None:
    offsets = {"cu_seqlens_q": np.int32([0, 76, 110, 256]), "cu_seqlens_k": np.int32([0, 1, 2, 3])}
    q, k, v, _ = inputs((256, 1, 32), (3, 1, 32), amplitude=3.0)
    dq, dk, dv, *_ = check(q, k, v, np.ones_like(q), **offsets, causal=True)
    assert not dq.any()  # the last row of a sequence sees one key, and the others none
    assert not dk.any()
    np.testing.assert_array_equal(dv, np.ones_like(v))


@pytest.mark.parametrize(("q", "k"), [((2, 0, 16, 128), (2, 409, 16, 128)), ((0, 64, 16, 128), (0, 409, 16, 128))])
def test_c03_gradients_of_no_queries_or_no_batch(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    got = check(*inputs(q, k), sink=np.zeros(16, np.float32), bias=np.zeros((1, 409), np.float32))
    assert [x.shape for x in got[:3]] == [q, k, k]
    assert not any(x.any() for x in got)
    nothing = np.zeros(3, np.int32)
    got = check(*inputs((0, 16, 128), (409, 16, 128)), cu_seqlens_q=nothing, cu_seqlens_k=nothing)
    assert not any(x.any() for x in got[:3])


def test_c08_nothing_is_written_beside_gradients_where_k_has_length_0() -> None:
    q, k, v, dout = inputs((90, 4, 64), (60, 2, 64))
    offsets = {"cu_seqlens_q": np.int32([0, 40, 50, 90]), "cu_seqlens_k": np.int32([0, 0, 60, 60])}
    result, pullback = cupyfa.attention_vjp(q, k, v, **offsets)
    guarded = {name: guarded_empty(x.shape, x.dtype) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    pullback(dout, **{name: x.array for name, x in guarded.items()})
    for name, x in guarded.items():
        x.check(name)
        assert np.isfinite(x.array).all()
    assert not guarded["dq"].array[:40].any()
    assert not guarded["dq"].array[50:].any()
    assert not result[:40].any()


def test_c18_gradients_of_rows_past_the_last_sequence_are_0() -> None:
    offsets = np.int32([0, 144, 432, 944])
    q, k, v, dout = inputs((946, 16, 64), (946, 16, 64), BF16)
    out, pullback = cupyfa.attention_vjp(q, k, v, offsets, offsets)
    for x in (q, dout, out):
        x[944:] = np.nan
    given = {name: np.full_like(x, np.nan) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    for x in pullback(dout, **given)[:3]:
        assert not x[944:].any()
        assert np.isfinite(x.astype(np.float32)).all()


def test_c23_an_lse_below_minus_88() -> None:
    """exp(-lse) would be infinite."""
    q, k, v, dout = inputs((1, 704, 1, 64), (1, 704, 1, 64), BF16)
    q[...], k[...] = np.abs(q), -np.abs(k)
    options = {"softmax_scale": 4.0, "causal": True}
    lse = cupyfa.attention(q, k, v, **options, return_lse=True).lse
    assert np.median(lse) < -88.7
    check(q, k, v, dout, **options)


def test_c29_gradients_of_a_float32_bias_beside_bfloat16() -> None:
    bias = random_array((1, 4, 128, 128), np.float32, 4)
    dbias = check(*inputs((8, 128, 4, 32), (8, 128, 4, 32), BF16), bias=bias).dbias
    assert (dbias.shape, dbias.dtype) == (bias.shape, np.float32)
    # Every row of dL sums to 0, and so does every row of its sum over batches.
    np.testing.assert_allclose(dbias.sum(axis=-1), 0, atol=0.5)


def test_c30_gradients_of_a_mask_and_a_bias_that_grows_with_the_distance() -> None:
    rows, keys = np.ogrid[:1025, :1025]
    check(*inputs((1, 1025, 1, 64), (1, 1025, 1, 64)), causal=True, bias=(rows - keys).astype(np.float32))


def test_c35_gradients_of_many_short_sequences() -> None:
    shape = (8300, 1, 16, 128)
    q, k, v, dout = inputs(shape, shape, BF16)
    _, pullback = cupyfa.attention_vjp(q, k, v)
    dq, dk, dv, *_ = pullback(dout)
    np.testing.assert_array_equal(dv, dout)  # each row sees one key
    for x in (dq, dk):
        assert np.abs(x.astype(np.float32)).max() < 1e-4


@pytest.mark.parametrize("kind", ["columns", "offset"])
def test_c42_gradients_of_unaligned_arrays(kind: str) -> None:
    shape = (1, 65, 4, 64)
    views = []
    for values in inputs(shape, shape):
        if kind == "columns":
            view = np.full((*shape[:3], 65), np.nan, np.float16)[..., :64]
        else:
            view = np.full(values.size + 1, np.nan, np.float16)[1:].reshape(shape)
        view[...] = values
        views.append(view)
    got = check(*views, causal=True)
    for x, y in zip(got[:3], check(*(x.copy() for x in views), causal=True)[:3], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("axis", range(4))
def test_c45_gradients_of_arrays_with_negative_strides(axis: int) -> None:
    arrays = [np.flip(x, axis) for x in inputs((2, 40, 4, 32), (2, 40, 4, 32))]
    got = check(*arrays, causal=True)
    for x, y in zip(got[:3], check(*(x.copy() for x in arrays), causal=True)[:3], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(scale: float) -> None:
    got = check(*inputs((1, 40, 2, 32), (1, 70, 1, 32)), softmax_scale=scale, causal=True)
    assert got.dq.any() == (scale != 0)
    assert got.dv.any()
