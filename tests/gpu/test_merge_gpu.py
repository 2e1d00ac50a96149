"""Merged states and page tables of CuPy arrays: as NumPy has them, without a wait for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from gpu.tools import host, same_bits, spin  # noqa: E402

from cupyfa import merge_states, page_table_from_csr  # noqa: E402
from cupyfa.testing import random_array  # noqa: E402


def states(xp: Any, dtype: Any) -> tuple[Any, ...]:
    """Two states, some rows of which are empty: of one, of the other, of both."""
    outs = [random_array((2, 9, 4, 64), dtype, seed) for seed in range(2)]
    lses = [random_array((2, 4, 9), np.float32, 2 + seed, amplitude=5) for seed in range(2)]
    for out, lse, empty in zip(outs, lses, (slice(0, 4), slice(2, 6)), strict=True):
        out[:, empty], lse[:, :, empty] = np.nan, -np.inf
    # CuPy has no bfloat16 constructor: the bits travel as integers.
    arrays = (outs[0], lses[0], outs[1], lses[1])
    return tuple(xp.asarray(x.view(f"u{x.itemsize}")).view(x.dtype) for x in arrays)


def while_the_stream_is_busy(call: Callable[[], Any]) -> Any:
    """The result of a second call, which must come back before the GPU has begun with it."""
    call()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        call()
        stream.synchronize()
        spin(1)
        stream.synchronize()
        spin()
        result = call()
        assert not stream.done
        stream.synchronize()
    return result


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_states_are_merged_as_by_numpy(dtype: Any) -> None:
    on_gpu = states(cupy, dtype)
    merged = while_the_stream_is_busy(lambda: merge_states(*on_gpu))
    expected = merge_states(*states(np, dtype))
    assert (merged.out.dtype, merged.lse.dtype) == (expected.out.dtype, expected.lse.dtype)
    tolerance = {2: 2.0**-7 if dtype is ml_dtypes.bfloat16 else 2.0**-10, 4: 1e-6, 8: 1e-12}[np.dtype(dtype).itemsize]
    have, want = (np.asarray(x).astype(np.float64) for x in (host(merged.out), expected.out))
    np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(host(merged.lse), expected.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_states_are_merged_in_place(dtype: Any) -> None:
    out_a, lse_a, out_b, lse_b = states(cupy, dtype)
    expected = merge_states(out_a, lse_a, out_b, lse_b)
    result = merge_states(out_a, lse_a, out_b, lse_b, out=out_a, lse=lse_a)
    assert result.out is out_a
    assert result.lse is lse_a
    assert same_bits(out_a, expected.out)
    assert same_bits(lse_a, expected.lse)


def test_libraries_are_not_mixed() -> None:
    out_a, lse_a, out_b, _ = states(cupy, np.float16)
    with pytest.raises(TypeError, match=r"^merge_states: lse_b is a numpy.ndarray but out_a is a cupy.ndarray"):
        merge_states(out_a, lse_a, out_b, lse_a.get())
    with pytest.raises(TypeError, match=r"^page_table_from_csr: indices is a numpy.ndarray; it must be a"):
        page_table_from_csr(cupy.zeros(2, np.int32), np.zeros(1, np.int32), cupy.zeros(1, np.int32), 16, max_pages=1)


LISTS = tuple(np.array(x, np.int32) for x in ([0, 2, 2, 5], [7, 3, 0, 4, 1, 99], [5, 1, 16]))


def test_page_tables_are_those_of_numpy() -> None:
    lists = tuple(map(cupy.asarray, LISTS))
    table, lengths = while_the_stream_is_busy(lambda: page_table_from_csr(*lists, 16, max_pages=4))
    expected = page_table_from_csr(*LISTS, 16, max_pages=4)
    assert table.dtype == lengths.dtype == np.int32
    np.testing.assert_array_equal(host(table), expected[0])
    np.testing.assert_array_equal(host(lengths), expected[1])


def test_numbers_outside_of_a_list_are_cut() -> None:
    table, lengths = page_table_from_csr(*map(cupy.asarray, LISTS), 16, max_pages=2)
    assert table.get().tolist() == [[7, 3], [0, 0], [0, 4]]
    assert lengths.get().tolist() == [21, 0, 32]
    _, lengths = page_table_from_csr(*map(cupy.asarray, (*LISTS[:2], LISTS[2][::-1].copy())), 16, max_pages=2)
    assert lengths.get().tolist() == [32, 0, 32]  # two whole pages of three, whatever the third one has
    wrong = [np.array(x, np.int32) for x in ([0, 2, 1, 9], [7, 3, 5], [50, 1, -3])]
    table, lengths = page_table_from_csr(*map(cupy.asarray, wrong), 16, max_pages=3)
    assert table.get().tolist() == [[7, 3, 0], [0, 0, 0], [3, 5, 5]]
    assert lengths.get().tolist() == [32, 0, 48]


def test_cupy_arrays_need_the_width_of_the_table() -> None:
    with pytest.raises(TypeError, match=r"^page_table_from_csr: max_pages is None; for CuPy arrays it must be an int"):
        page_table_from_csr(*map(cupy.asarray, LISTS), 16)
