"""What users of attention libraries reported, by its number in the list of reports, here and on the GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nvrtc_tools import import_nvrtc

from cupyfa.oracles import dense
from cupyfa.testing import assert_close, assert_lse_close, random_array, score_magnitude

BF16 = np.dtype(ml_dtypes.bfloat16)
SINK = np.array([1, -2], np.float32)


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


def inputs(
    sq: int, sk: int, heads: int = 2, heads_kv: int = 1, head_dim: int = 64, dtype: Any = np.float16
) -> tuple[Any, Any, Any]:
    q, k, v = ((1, sq, heads, head_dim), *[(1, sk, heads_kv, head_dim)] * 2)
    return random_array(q, dtype, 0), random_array(k, dtype, 1), random_array(v, dtype, 2)


def check(backend: Any, arrays: tuple[Any, Any, Any], **options: Any) -> tuple[Any, Any]:
    """Hold the kernel to the oracles."""
    out, lse = backend.attention(*arrays, **options)
    reference, reference_lse = dense.attention(*arrays, **options)
    plain, _ = dense.same_precision(*arrays, **options)
    assert_close(out, reference, plain)
    magnitude = score_magnitude(*arrays[:2], options.get("softmax_scale"), options.get("softcap"))
    if "bias" in options:
        bias = options["bias"].astype(np.float64)
        magnitude = magnitude + np.abs(bias, where=np.isfinite(bias), out=np.zeros_like(bias)).max(axis=-1)
    assert_lse_close(lse, reference_lse, score_magnitude=magnitude)
    return out, lse


def test_c01_more_queries_than_keys(backend: Any) -> None:
    q, k, v = inputs(5, 2, heads=1)
    out, lse = check(backend, (q, k, v), causal=True)
    assert not out[:, :3].any()
    assert np.isneginf(lse[..., :3]).all()
    np.testing.assert_array_equal(out[:, 3], v[:, 0])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_c11_rows_of_the_most_negative_number_and_of_infinity(dtype: Any, backend: Any) -> None:
    """No NaN: the first give the mean of V, the others count as rows without keys, and neither touches its neighbours.

    As masks come from models: whole rows, the beginning or the end of a row, or all but one key.
    """
    arrays = inputs(20, 393, dtype=np.float16 if dtype == np.float32 else dtype)
    lowest = ml_dtypes.finfo(dtype).min
    bias = random_array((1, 2, 20, 393), dtype, 3)
    bias[..., 2, :], bias[..., 5, :] = lowest, -np.inf
    bias[..., 7, :200] = bias[..., 8, 200:] = lowest
    bias[..., 9, :300] = bias[..., 10, 70:] = -np.inf
    bias[..., 11, :50], bias[..., 11, 50:] = -np.inf, lowest
    bias[..., 12, :] = lowest
    bias[..., 12, 391] = 1
    out, lse = check(backend, arrays, bias=bias)
    assert np.isfinite(out).all()
    assert not out[0, 5].any()
    assert np.isneginf(lse[0, :, 5]).all()
    np.testing.assert_array_equal(out[0, 12], np.repeat(arrays[2][0, 391], 2, axis=0))
    if dtype != np.float16:  # whose most negative number is not large enough to make scores vanish
        mean = arrays[2].astype(np.float64).mean(axis=1)
        np.testing.assert_allclose(out[0, 2].astype(np.float64), np.repeat(mean[0], 2, axis=0), rtol=2**-7, atol=2**-9)
        np.testing.assert_allclose(lse[0, :, [2, 11]], float(lowest), rtol=1e-6)
    for options in ({"causal": True}, {"softcap": 5.0}):
        check(backend, arrays, bias=bias, **options)
    if dtype != BF16:  # which shows what is left of keys that vanish beside a sink, 1e-38 of a value
        check(backend, arrays, bias=bias, sink=SINK)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_a_special_bias_stays_in_its_row(special: float, backend: Any) -> None:
    """And where it is hidden, it is nowhere."""
    arrays = inputs(130, 200, dtype=BF16)
    bias = random_array((1, 2, 130, 200), np.float32, 3)
    plain, _ = check(backend, arrays, bias=bias, causal=True)
    bias[0, 1, 40, 100] = special
    hidden = np.arange(200) > np.arange(130)[:, None] + 70
    bias[0, 0] = np.where(hidden, special, bias[0, 0])
    out, lse = backend.attention(*arrays, bias=bias, causal=True)
    assert np.isnan(out[0, 40, 1]).all()
    assert np.isnan(lse[0, 1, 40])
    out[0, 40, 1] = plain[0, 40, 1]
    np.testing.assert_array_equal(out, plain)


def test_c29_a_float32_bias_of_other_inputs(backend: Any) -> None:
    arrays = (random_array((8, 128, 4, 32), BF16, seed) for seed in range(3))
    check(backend, tuple(arrays), bias=random_array((1, 4, 128, 128), np.float32, 3))


def test_c30_a_mask_and_a_bias_that_grows_with_the_distance(backend: Any) -> None:
    arrays = inputs(1025, 1025, 1)
    bias = (np.arange(1025)[:, None] - np.arange(1025)).astype(np.float32)
    out, _ = check(backend, arrays, bias=bias[None, None], causal=True)
    assert np.isfinite(out).all()


def test_c44_rows_that_are_no_multiple_of_16_bytes(backend: Any) -> None:
    arrays = inputs(16, 43, 16, 16)
    check(backend, arrays, bias=random_array((1, 16, 16, 43), np.float32, 3))
    check(backend, arrays, bias=random_array((1, 16, 16, 43), np.float16, 3))


def test_c12_a_sink_where_no_key_is_seen(backend: Any) -> None:
    sink = np.full(2, 0.5, np.float32)
    out, lse = check(backend, inputs(256, 128), causal=True, sink=sink)
    assert not out[:, :128].any()
    np.testing.assert_allclose(lse[..., :128], 0.5, rtol=1e-6)


def test_a_nan_is_not_hidden_by_a_sink_that_outweighs_all_keys(backend: Any) -> None:
    """The weights of the keys vanish beside it, but a row with keys does not pass for one without."""
    q, k, v = inputs(130, 150)
    v[0, 3, 0, 5] = np.nan
    for sink in (60.0, 200.0):
        out, _ = backend.attention(q, k, v, sink=np.full(2, sink, np.float32))
        assert np.isnan(out[..., 5]).all()
        assert np.isfinite(np.delete(out, 5, axis=-1)).all()


@pytest.mark.parametrize("speculative", [False, True])
def test_a_sink_that_outweighs_all_keys_leaves_nothing_of_them(speculative: bool, backend: Any) -> None:
    q, k, v = inputs(130, 150, dtype=BF16)
    sink = np.array([200, 3e4], np.float32)
    out, lse = backend.attention(q, k, np.full_like(v, 1e3), sink=sink, config={"speculative": speculative})
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(sink[None, :, None], lse.shape))


def test_c22_scores_that_are_all_far_below_0(backend: Any) -> None:
    """Causal, heads 14/2, a first tile that is masked in part; a maximum that stays at 0 makes every weight vanish."""
    q, k, v = inputs(88, 448, 14, 2)
    q[...], k[...] = np.abs(q), -4 - np.abs(k)
    for options in ({}, {"window_size": (100, 0)}, {"sink": np.full(14, -70, np.float32)}):
        out, lse = check(backend, (q, k, v), causal=True, softmax_scale=0.25, **options)
        assert (lse < -20).all()
        assert out.any()


@pytest.mark.parametrize("score", [5e3, 1e4])
def test_c24_a_softcap_saturates(score: float, backend: Any) -> None:
    q, k, v = (np.zeros((1, n, 1, 64), np.float16) for n in (2, 4, 4))
    q[0, :, 0, 0] = 1, -1
    k[0, :, 0, 0] = score, -score, score, -score
    v[0, :, 0, :4] = np.eye(4)
    out, lse = check(backend, (q, k, v), softmax_scale=1.0, softcap=50.0)
    np.testing.assert_array_equal(out[0, :, 0, :4], [[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]])
    np.testing.assert_allclose(lse, 50 + np.log(2), rtol=1e-6)


@pytest.mark.parametrize("slope", [-1, 1])
def test_c30_scores_that_change_by_1_from_key_to_key(slope: float, backend: Any) -> None:
    _, lse = check(backend, inputs(400, 400, heads=1), causal=True, alibi_slopes=np.full(1, slope, np.float32))
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("window_size", [(None, 0), (-1, 0), (300, 0), (299, 0)], ids=str)
def test_c31_a_window_as_long_as_the_sequence_is_causal(window_size: tuple[int | None, int], backend: Any) -> None:
    arrays = inputs(300, 300, head_dim=128)
    for window, causal in zip(
        backend.attention(*arrays, window_size=window_size), backend.attention(*arrays, causal=True), strict=True
    ):
        np.testing.assert_array_equal(window, causal)


@pytest.mark.parametrize("window_size", [(9, 0), (0, 0), (0, 9)], ids=str)
def test_c33_a_bound_of_0_is_a_bound(window_size: tuple[int, int], backend: Any) -> None:
    arrays = inputs(200, 200, dtype=BF16)
    out, _ = check(backend, arrays, window_size=window_size)
    if window_size == (0, 0):
        np.testing.assert_array_equal(out, np.broadcast_to(arrays[2], out.shape))


@pytest.mark.parametrize("left", [0, 1, 63, 64, 127, 128, 200])
def test_c34_a_row_sees_one_key_more_than_the_window_is_wide(left: int, backend: Any) -> None:
    q, k, v = (np.zeros((1, 400, 1, 64), np.float16) for _ in range(3))
    _, lse = backend.attention(q, k, v, window_size=(left, 0))
    np.testing.assert_allclose(np.exp(lse[0, 0]), np.minimum(np.arange(400), left) + 1, rtol=1e-5)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_keys_and_values_outside_of_every_window_never_matter(special: float, backend: Any) -> None:
    """C15 and C16, for what a window leaves out: blocks that no row of a tile sees are never read."""
    q, k, v = inputs(64, 640, head_dim=128)
    k[:, :448] = v[:, :448] = special
    check(backend, (q, k, v), window_size=(64, 0))


@pytest.mark.parametrize("options", [{"window_size": (70, 10)}, {"softcap": 5.0}, {"sink": SINK}], ids="-".join)
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(scale: float, options: dict[str, Any], backend: Any) -> None:
    check(backend, inputs(150, 200), softmax_scale=scale, **options)


def test_more_rows_than_keys_in_a_window(backend: Any) -> None:
    """C01, with a window: rows that see no key are 0, their lse is -inf."""
    out, lse = check(backend, inputs(300, 100, dtype=BF16), window_size=(20, 5))
    assert not out[:, :195].any()
    assert np.isneginf(lse[..., :195]).all()
    assert np.isfinite(lse[..., 195:]).all()
