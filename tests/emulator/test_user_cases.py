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
    assert_lse_close(lse, reference_lse, score_magnitude=magnitude)
    return out, lse


def test_c01_more_queries_than_keys(backend: Any) -> None:
    q, k, v = inputs(5, 2, heads=1)
    out, lse = check(backend, (q, k, v), causal=True)
    assert not out[:, :3].any()
    assert np.isneginf(lse[..., :3]).all()
    np.testing.assert_array_equal(out[:, 3], v[:, 0])


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
