"""Page tables from lists of pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyfa
from cupyfa import page_table_from_csr, paging
from cupyfa.testing import random_array


def int32(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def test_lists_become_rows() -> None:
    table, lengths = page_table_from_csr(int32(0, 2, 2, 5), int32(7, 3, 0, 4, 1, 99), int32(5, 1, 16), 16)
    assert table.dtype == lengths.dtype == np.int32
    assert table.tolist() == [[7, 3, 0], [0, 0, 0], [0, 4, 1]]
    assert lengths.tolist() == [21, 0, 48]


def test_a_table_may_be_wider_than_the_lists() -> None:
    table, lengths = page_table_from_csr(int32(0, 1, 1), int32(7), int32(3, 0), 4, max_pages=3)
    assert table.tolist() == [[7, 0, 0], [0, 0, 0]]
    assert lengths.tolist() == [3, 0]


@pytest.mark.parametrize("batch", [0, 3])
def test_no_pages(batch: int) -> None:
    nothing = np.zeros(batch, np.int32)
    for max_pages in (None, 2):
        table, lengths = page_table_from_csr(np.zeros(batch + 1, np.int32), int32(), nothing, 16, max_pages=max_pages)
        assert table.shape == (batch, max_pages or 0)
        assert lengths.tolist() == [0] * batch


def test_lists_may_begin_anywhere() -> None:
    table, lengths = page_table_from_csr(int32(1, 2, 3), int32(-1, 5, 6), int32(16, 0), 16)
    assert table.tolist() == [[5], [6]]
    assert lengths.tolist() == [16, 0]


def test_random_lists_list_by_list() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        page_size, batch = int(rng.integers(1, 20)), int(rng.integers(1, 9))
        lengths = rng.integers(0, 90, batch)
        counts = -(-lengths // page_size)
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        indices = rng.permutation(int(indptr[-1])).astype(np.int32)
        last = (lengths - np.maximum(counts - 1, 0) * page_size).astype(np.int32)
        table, seqlens = page_table_from_csr(indptr, indices, last, page_size)
        assert table.shape == (batch, counts.max())
        assert seqlens.tolist() == lengths.tolist()
        for b in range(batch):
            pages = indices[indptr[b] : indptr[b + 1]]
            assert table[b].tolist() == [*pages, *[0] * (counts.max() - len(pages))]


def test_a_cache_as_flashinfer_keeps_it() -> None:
    kv = random_array((6, 2, 16, 2, 64), np.float16, 0)
    q = random_array((2, 1, 4, 64), np.float16, 1)
    table, lengths = page_table_from_csr(int32(0, 2, 3), int32(5, 0, 2), int32(7, 16), 16)
    out = cupyfa.attention_with_kvcache(q, kv[:, 0], kv[:, 1], cache_seqlens=lengths, page_table=table)
    for b, (pages, length) in enumerate((([5, 0], 23), ([2], 16))):
        k, v = (kv[pages, n].reshape(1, -1, 2, 64)[:, :length] for n in range(2))
        np.testing.assert_array_equal(out[b], cupyfa.attention(q[b : b + 1], k, v)[0])


def test_unchecked_lists_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the GPU, where nobody looks at the values."""
    monkeypatch.setattr(paging, "_check_values", lambda *_: 0)
    lists = int32(0, 2, 2, 5), int32(7, 3, 0, 4, 1, 99), int32(16, 1, 5)
    table, lengths = page_table_from_csr(*lists, 16, max_pages=2)
    assert table.tolist() == [[7, 3], [0, 0], [0, 4]]
    assert lengths.tolist() == [32, 0, 32]  # two whole pages of three
    table, lengths = page_table_from_csr(int32(0, 2, 1, 9), int32(7, 3, 5), int32(50, 1, -3), 16, max_pages=3)
    assert table.tolist() == [[7, 3, 0], [0, 0, 0], [3, 5, 5]]
    assert lengths.tolist() == [32, 0, 48]


GOOD: dict[str, Any] = {
    "indptr": int32(0, 2, 3),
    "indices": int32(5, 0, 2),
    "last_page_len": int32(7, 16),
    "page_size": 16,
}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "list": ({"indptr": [0, 2, 3]}, TypeError, r"indptr is a list; it must be a numpy.ndarray or a cupy.ndarray"),
    "none": ({"indices": None}, TypeError, r"indices is a NoneType; it must be a numpy.ndarray"),
    "int64": ({"last_page_len": np.array([7, 16])}, TypeError, r"last_page_len has dtype int64; it must be int32"),
    "axes": ({"indices": np.zeros((3, 1), np.int32)}, ValueError, r"indices has shape \(3, 1\); it must have one axis"),
    "no entry": ({"indptr": int32()}, ValueError, r"indptr has 0 entries; it must have one more than there are seque"),
    "batch": ({"last_page_len": int32(7)}, ValueError, r"last_page_len has 1 entries; .* each of the 2 sequences"),
    "page_size": ({"page_size": 0}, ValueError, r"page_size is 0; it must be at least 1"),
    "float": ({"page_size": 16.0}, TypeError, r"page_size is 16.0; it must be an integer"),
    "bool": ({"max_pages": True}, TypeError, r"max_pages is True; it must be an integer"),
    "below": ({"max_pages": -1}, ValueError, r"max_pages is -1; it must be at least 0"),
    "too few": ({"max_pages": 1}, ValueError, r"max_pages is 1, and a sequence has 2 pages; it must be at least as ma"),
    "falling": ({"indptr": int32(0, 2, 1)}, ValueError, r"indptr\[2\] is 1, less than indptr\[1\], 2"),
    "beyond": ({"indptr": int32(0, 2, 4)}, ValueError, r"indptr\[2\] is 4; it must be from 0 to the 3 entries of ind"),
    "negative": ({"indptr": int32(-1, 2, 3)}, ValueError, r"indptr\[0\] is -1; it must be from 0 to the 3 entries"),
    "last": ({"last_page_len": int32(7, 17)}, ValueError, r"last_page_len\[1\] is 17; it must be from 0 to page_size,"),
    "last below": ({"last_page_len": int32(-1, 3)}, ValueError, r"last_page_len\[0\] is -1; it must be from 0 to page"),
    "page": ({"indices": int32(5, -2, 2)}, ValueError, r"indices\[1\] is -2; a page is a number from 0 on"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    changes, error, message = BAD[name]
    page_table_from_csr(**GOOD)
    with pytest.raises(error, match=f"^page_table_from_csr: {message}"):
        page_table_from_csr(**(GOOD | changes))
