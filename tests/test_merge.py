"""Attention over two sets of keys, merged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyfa
from cupyfa import merge_states
from cupyfa.oracles import dense, splits
from cupyfa.testing import assert_close, assert_lse_close, random_array, score_magnitude

BF16 = ml_dtypes.bfloat16


def states(*counts: int, dtype: Any = np.float16, causal: bool = False) -> tuple[Any, list[Any]]:
    """q, k and v, and attention over the first keys, the next ones, and so on."""
    total = sum(counts)
    q, k, v = (random_array((2, n, 4, 64), dtype, seed) for seed, n in enumerate((5, total, total)))
    ends = itertools.accumulate(counts)
    parts = [
        cupyfa.attention(q, k[:, end - n : end], v[:, end - n : end], return_lse=True)
        for n, end in zip(counts, ends, strict=True)
    ]
    return (q, k, v), parts


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("counts", [(3, 70), (64, 1), (200, 0), (0, 5)])
def test_merged_states_are_attention_over_all_keys(counts: tuple[int, int], dtype: Any) -> None:
    (q, k, v), (a, b) = states(*counts, dtype=dtype)
    out, lse = merge_states(*a, *b)
    assert (out.dtype, lse.dtype) == (np.dtype(dtype), np.float32)
    reference, reference_lse = dense.attention(q, k, v)
    plain, _ = dense.same_precision(q, k, v)
    # Each state was rounded once before, by half an ulp, and its error is one of fewer keys.
    assert_close(out, reference, plain, factor=2.5, row_factor=4.0)
    assert_lse_close(lse, reference_lse, score_magnitude=score_magnitude(q, k))


@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_it_is_the_merge_of_splits(wide: Any) -> None:
    q, k, v = (random_array((2, n, 4, 64), np.float16, seed) for seed, n in enumerate((3, 200, 200)))
    outs, lses = (x.astype(wide) for x in splits.partials(q, k, v, num_splits=2))
    out, lse = merge_states(outs[0], lses[0], outs[1], lses[1])
    expected, expected_lse = splits.merge(outs, lses)
    assert out.dtype == lse.dtype == wide
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6 if wide is np.float32 else 1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6 if wide is np.float32 else 1e-14)


def test_states_are_merged_one_by_one_in_any_order() -> None:
    (q, k, v), parts = states(10, 64, 3)
    reference, _ = dense.attention(q, k, v)
    for a, b, c in itertools.permutations(parts):
        merged = merge_states(*merge_states(*a, *b), *c)
        np.testing.assert_allclose(merged.out.astype(np.float64), reference, atol=2e-3)


def test_packed_states() -> None:
    _, (a, b) = states(3, 70)
    packed = [(out.reshape(10, 4, 64), lse.swapaxes(0, 1).reshape(4, 10)) for out, lse in (a, b)]
    out, lse = merge_states(*packed[0], *packed[1])
    expected, expected_lse = merge_states(*a, *b)
    np.testing.assert_array_equal(out, expected.reshape(10, 4, 64))
    np.testing.assert_array_equal(lse, expected_lse.swapaxes(0, 1).reshape(4, 10))


def test_results_are_written_in_place_even_into_a_state() -> None:
    _, (a, b) = states(3, 70)
    expected = merge_states(*a, *b)
    before = [x.copy() for x in b]
    out, lse = (np.full_like(x, np.nan) for x in a)
    result = merge_states(*a, *b, out=out, lse=lse)
    assert result.out is out
    assert result.lse is lse
    running = [x.copy() for x in a]
    merge_states(*running, *b, out=running[0], lse=running[1])
    for result in ((out, lse), running):
        for have, want in zip(result, expected, strict=True):
            np.testing.assert_array_equal(have, want)
    for have, want in zip(b, before, strict=True):
        np.testing.assert_array_equal(have, want)


def test_nan_of_a_row_that_saw_keys_stays() -> None:
    _, (a, b) = states(3, 70)
    a.out[0, 1, 2, 3] = np.nan
    out, _ = merge_states(*a, *b)
    assert np.argwhere(np.isnan(out)).tolist() == [[0, 1, 2, 3]]


def test_very_unequal_states() -> None:
    out = np.ones((1, 1, 1, 8), np.float16)
    for far in (200.0, 1e30):
        merged = merge_states(out, np.full((1, 1, 1), far, np.float32), 3 * out, np.full((1, 1, 1), -far, np.float32))
        np.testing.assert_array_equal(merged.out, out)
        assert merged.lse.item() == np.float32(far)


def test_empty_arrays() -> None:
    out, lse = np.zeros((0, 3, 2, 8), np.float16), np.zeros((0, 2, 3), np.float32)
    merged = merge_states(out, lse, out, lse)
    assert (merged.out.shape, merged.lse.shape) == (out.shape, lse.shape)


# --- User cases (public reports of other libraries) ---


def test_c05_two_empty_states() -> None:
    nothing = np.full((2, 3, 4, 8), np.nan, np.float16), np.full((2, 4, 3), -np.inf, np.float32)
    out, lse = merge_states(*nothing, *nothing)
    assert not out.any()
    assert np.isneginf(lse).all()
    _, (a, b) = states(3, 70)
    for out, lse in (a, b):  # half of the rows are empty, in one state or in both
        out[:, ::2], lse[:, :, ::2] = np.nan, -np.inf
    both = merge_states(*a, *b)
    assert not both.out[:, ::2].any()
    assert np.isneginf(both.lse[:, :, ::2]).all()
    assert np.isfinite(both.lse[:, :, 1::2]).all()
    empty = np.full_like(a.out, np.nan), np.full_like(a.lse, -np.inf)
    for merged in (merge_states(*a, *empty), merge_states(*empty, *a)):
        np.testing.assert_array_equal(merged.out[:, 1::2], a.out[:, 1::2])
        np.testing.assert_allclose(merged.lse, a.lse, rtol=1e-6)
        assert not merged.out[:, ::2].any()


def test_c27_a_long_prefix_and_a_short_suffix() -> None:
    (q, k, v), (prefix, suffix) = states(3072, 64)
    whole = cupyfa.attention(q, k, v, return_lse=True)
    merged = merge_states(*prefix, *suffix)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=1e-5)
    np.testing.assert_allclose(merged.out.astype(np.float32), whole.out.astype(np.float32), atol=1e-3)


def test_c47_strides_of_states() -> None:
    _, (a, b) = states(3, 70)
    expected = merge_states(*a, *b)
    views = []
    for out, lse in (a, b):
        turned = np.ascontiguousarray(out.transpose(2, 0, 3, 1)).transpose(1, 3, 0, 2)
        twice = np.full((2, 8, 3, 5), np.nan, np.float32)
        twice[:, :4, 1] = lse
        views += [turned, twice[:, :4, 1]]
    out, lse = (
        np.empty((4, 2, 5, 64), np.float16).transpose(1, 2, 0, 3),
        np.empty((5, 2, 4), np.float32).T.swapaxes(0, 1),
    )
    for merged in (merge_states(*views), merge_states(*views, out=out, lse=lse)):
        np.testing.assert_array_equal(merged.out, expected.out)
        np.testing.assert_array_equal(merged.lse, expected.lse)


# --- What is refused ---


def good() -> dict[str, Any]:
    out, lse = np.zeros((2, 3, 4, 8), np.float16), np.zeros((2, 4, 3), np.float32)
    return {"out_a": out, "lse_a": lse, "out_b": out.copy(), "lse_b": lse.copy()}


def read_only() -> Any:
    array = np.zeros((2, 3, 4, 8), np.float16)
    array.flags.writeable = False
    return array


def shared(arguments: dict[str, Any]) -> dict[str, Any]:
    memory = np.zeros(400, np.float16)
    lse = memory[190:238].view(np.float32).reshape(2, 4, 3)
    return arguments | {"out": memory[:192].reshape(2, 3, 4, 8), "lse": lse}


BAD: dict[str, tuple[dict[str, Any] | Callable[..., Any], type[Exception], str]] = {
    "list": ({"out_a": [1]}, TypeError, r"out_a is a list; pass NumPy arrays or CuPy arrays, not both"),
    "none": ({"lse_b": None}, TypeError, r"lse_b is a NoneType but out_a is a numpy.ndarray; pass NumPy arrays or"),
    "out list": ({"out": []}, TypeError, r"out is a list but out_a is a numpy.ndarray"),
    "int": ({"out_a": np.zeros((2, 3, 4, 8), int)}, TypeError, r"out_a has dtype int64; it must be one of float16, bf"),
    "lse": ({"lse_a": np.zeros((2, 4, 3), np.float16)}, TypeError, r"lse_a has dtype float16; it must be one of float"),
    "other": ({"out_b": np.zeros((2, 3, 4, 8), BF16)}, TypeError, r"out_b has dtype bfloat16; it must be float16, tha"),
    "other lse": ({"lse_b": np.zeros((2, 4, 3))}, TypeError, r"lse_b has dtype float64; it must be float32, that of l"),
    "out dtype": ({"out": np.zeros((2, 3, 4, 8), np.float32)}, TypeError, r"out has dtype float32; it must be float16"),
    "axes": ({"out_a": np.zeros((4, 8), np.float16)}, ValueError, r"out_a has 2 axes, shape \(4, 8\); it needs \(batc"),
    "shape": ({"out_b": np.zeros((2, 3, 4, 16), np.float16)}, ValueError, r"out_b has shape .* the shape of out_a, \("),
    "lse shape": ({"lse_a": np.zeros((2, 3, 4), np.float32)}, ValueError,
        r"lse_a has shape \(2, 3, 4\); it must have \(batch, heads, seqlen\) of out_a, \(2, 4, 3\)"),
    "out shape": ({"out": np.zeros((2, 3, 4, 1), np.float16)}, ValueError, r"out has shape \(2, 3, 4, 1\); it must"),
    "read-only": ({"out": read_only()}, ValueError, r"out is read-only; it must be writable"),
    "repeated": ({"lse": np.lib.stride_tricks.as_strided(np.zeros(9, np.float32), (2, 4, 3), (0, 4, 4))}, ValueError,
        r"lse has strides \(0, 4, 4\) bytes for shape \(2, 4, 3\); its elements must not overlap each other"),
    "shared": (shared, ValueError, r"lse shares memory with out; it must be an array of its own"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    changes, error, message = BAD[name]
    merge_states(**good())
    arguments = changes(good()) if callable(changes) else good() | changes
    with pytest.raises(error, match=f"^merge_states: {message}"):
        merge_states(**arguments)


def test_a_packed_lse_is_named_so() -> None:
    out, lse = np.zeros((6, 4, 8), np.float16), np.zeros((6, 4), np.float32)
    with pytest.raises(ValueError, match=r"lse_a has shape \(6, 4\); it must have \(heads, total\) of out_a, \(4, 6\)"):
        merge_states(out, lse, out, lse)
