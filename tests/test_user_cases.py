"""What users of attention libraries reported, by its number in docs/user_cases.md: what NumPy computes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyfa
from cupyfa.oracles import dense
from cupyfa.testing import assert_close, assert_lse_close, random_array, score_magnitude


def inputs(q: tuple[int, ...], k: tuple[int, ...], dtype: Any = np.float16) -> tuple[Any, Any, Any]:
    return random_array(q, dtype, 0), random_array(k, dtype, 1), random_array(k, dtype, 2)


def check(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """Hold the result for arrays of any place to the oracles, and to that for contiguous ones."""
    out, lse = cupyfa.attention(q, k, v, return_lse=True, **options)
    reference, reference_lse = dense.attention(q, k, v, **options)
    plain, _ = dense.same_precision(q, k, v, **options)
    assert_close(out, reference, plain)
    assert_lse_close(lse, reference_lse, score_magnitude=score_magnitude(q, k))
    np.testing.assert_array_equal(out, cupyfa.attention(*(x.copy() for x in (q, k, v)), **options))
    return out, lse


@pytest.mark.parametrize(
    ("q", "k"),
    [((2, 0, 16, 128), (2, 4096, 16, 128)), ((0, 64, 16, 128), (0, 96, 16, 128)), ((0, 3952, 10, 64), (0, 16, 10, 64))],
)
def test_c03_c10_no_queries_or_no_batch(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    out, lse = cupyfa.attention(*inputs(q, k), causal=True, return_lse=True)
    assert (out.shape, lse.shape) == (q, (q[0], q[2], q[1]))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 5)}], ids="-".join)
def test_c04_no_keys(options: dict[str, Any]) -> None:
    arrays = inputs((3, 70, 4, 64), (3, 0, 2, 64))
    out, lse = cupyfa.attention(*arrays, return_lse=True, **options)
    assert not out.any()
    assert np.isneginf(lse).all()
    sink = np.array([0.5, -np.inf, 3, -2], np.float32)
    out, lse = cupyfa.attention(*arrays, sink=sink, return_lse=True, **options)
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(sink[:, None], lse.shape))


def test_c32_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^attention: window_size is \(-1, -3\); each side must be at least 0"):
        cupyfa.attention(*inputs((1, 8, 1, 16), (1, 8, 1, 16)), causal=True, window_size=(-1, -3))


@pytest.mark.parametrize("kind", ["columns", "offset"])
def test_c42_unaligned_arrays(kind: str) -> None:
    shape = (1, 65, 4, 64)
    views = []
    for values in inputs(shape, shape):
        if kind == "columns":
            view = np.full((*shape[:3], 65), np.nan, np.float16)[..., :64]
        else:
            view = np.full(values.size + 1, np.nan, np.float16)[1:].reshape(shape)
        view[...] = values
        views.append(view)
    check(*views, causal=True)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("name", "qkv")
def test_c45_negative_strides(name: str, axis: int) -> None:
    arrays = dict(zip("qkv", inputs((2, 70, 4, 64), (2, 70, 4, 64)), strict=True))
    arrays[name] = np.flip(arrays[name], axis)
    check(**arrays, causal=True)
