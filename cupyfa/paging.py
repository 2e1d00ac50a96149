"""Page tables from the lists of pages that other libraries keep."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cupyfa.errors import type_name

__all__ = ["page_table_from_csr"]


def page_table_from_csr(
    indptr: Any, indices: Any, last_page_len: Any, page_size: int, *, max_pages: int | None = None
) -> tuple[Any, Any]:
    """Turn lists of pages, one behind the other, into the arguments of :func:`cupyfa.attention_with_kvcache`.

    This is the form of FlashInfer (``paged_kv_indptr``, ``paged_kv_indices``, ``paged_kv_last_page_len``).

    Parameters
    ----------
    indptr : array, (batch + 1,)
        int32: the pages of sequence ``b`` are ``indices[indptr[b]:indptr[b + 1]]``. Ascending from 0 on.
    indices : array, (pages,)
        int32: pages of the cache. It may be longer than the last number of ``indptr``.
    last_page_len : array, (batch,)
        int32: how many keys the last page of each sequence has, from 0 to ``page_size``; without effect on a sequence
        that has no page.
    page_size : int
        Keys of a page.
    max_pages : int, optional
        Columns of the table; by default as many as the longest sequence has pages. CuPy arrays need it, because nobody
        reads their values on the host.

    Returns
    -------
    page_table : array, (batch, max_pages)
        int32, 0 behind the pages of a sequence.
    cache_seqlens : array, (batch,)
        int32: keys of each sequence, those of its last page included.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong; the message names it, what it is and what it must be.

    Notes
    -----
    The values of NumPy arrays are checked. Those of CuPy arrays are not: a sequence with more pages than ``max_pages``
    is cut to so many, and a number outside of a list is taken for the nearest one inside. The call does not wait for
    the GPU.

    A cache of FlashInfer in its layout NHD, ``kv`` of (num_pages, 2, page_size, heads, head_dim), is used as it is:
    ``k_cache, v_cache = kv[:, 0], kv[:, 1]``; in HND ``kv[:, 0].swapaxes(1, 2)``.

    Examples
    --------
    >>> import numpy as np
    >>> indptr, indices = np.array([0, 2, 2, 5], np.int32), np.array([7, 3, 0, 4, 1], np.int32)
    >>> page_table, cache_seqlens = page_table_from_csr(indptr, indices, np.array([5, 1, 16], np.int32), 16)
    >>> page_table.tolist(), cache_seqlens.tolist()
    ([[7, 3, 0], [0, 0, 0], [0, 4, 1]], [21, 0, 48])
    """
    xp = _library(indptr=indptr, indices=indices, last_page_len=last_page_len)
    batch = indptr.shape[0] - 1
    if batch < 0:
        raise ValueError("page_table_from_csr: indptr has 0 entries; it must have one more than there are sequences")
    if last_page_len.shape[0] != batch:
        raise ValueError(
            f"page_table_from_csr: last_page_len has {last_page_len.shape[0]} entries; it must have one for each of "
            f"the {batch} sequences"
        )
    page_size = _positive("page_size", page_size, 1)
    if max_pages is not None:
        max_pages = _positive("max_pages", max_pages, 0)
    if xp is np:
        longest = _check_values(indptr, indices, last_page_len, page_size)
        if max_pages is None:
            max_pages = longest
        if max_pages < longest:
            raise ValueError(
                f"page_table_from_csr: max_pages is {max_pages}, and a sequence has {longest} pages; it must be at "
                "least as many"
            )
    elif max_pages is None:
        raise TypeError(
            "page_table_from_csr: max_pages is None; for CuPy arrays it must be an int, because their values are not "
            "read on the host"
        )
    counts = xp.clip(indptr[1:] - indptr[:-1], 0, max_pages + 1)  # one more: too many
    column = xp.arange(max_pages, dtype=np.int32)
    page_table = xp.zeros((batch, max_pages), np.int32)
    if indices.size:
        places = xp.clip(indptr[:-1, None] + column, 0, indices.size - 1)
        page_table[...] = xp.where(column < counts[:, None], indices[places], 0)
    keys = (counts - 1) * page_size + xp.clip(last_page_len, 0, page_size)
    return page_table, xp.where(counts > 0, xp.minimum(keys, max_pages * page_size), 0).astype(np.int32)


def _library(**given: Any) -> Any:
    """Check what is an array of int32 with one axis, and return the module that all of them belong to."""
    first, cupy = given["indptr"], sys.modules.get("cupy")
    xp = np if isinstance(first, np.ndarray) or cupy is None else cupy
    for name, array in given.items():
        if not isinstance(array, xp.ndarray):
            raise TypeError(
                f"page_table_from_csr: {name} is a {type_name(type(array))}; it must be a numpy.ndarray or a "
                "cupy.ndarray, as the others"
            )
        if array.dtype != np.int32:
            raise TypeError(f"page_table_from_csr: {name} has dtype {array.dtype}; it must be int32")
        if array.ndim != 1:
            raise ValueError(f"page_table_from_csr: {name} has shape {array.shape}; it must have one axis")
    return xp


def _positive(name: str, value: Any, least: int) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"page_table_from_csr: {name} is {value!r}; it must be an integer")
    if value < least:
        raise ValueError(f"page_table_from_csr: {name} is {value}; it must be at least {least}")
    return int(value)


def _check_values(indptr: Any, indices: Any, last_page_len: Any, page_size: int) -> int:
    """Check the values of NumPy arrays, and return how many pages the longest sequence has."""
    begins = indptr.astype(np.int64)
    counts = np.diff(begins)
    for b in np.flatnonzero(counts < 0)[:1]:
        raise ValueError(f"page_table_from_csr: indptr[{b + 1}] is {begins[b + 1]}, less than indptr[{b}], {begins[b]}")
    for b in np.flatnonzero((begins < 0) | (begins > indices.size))[:1]:
        raise ValueError(
            f"page_table_from_csr: indptr[{b}] is {begins[b]}; it must be from 0 to the {indices.size} entries of "
            "indices"
        )
    for b in np.flatnonzero((counts > 0) & ((last_page_len < 0) | (last_page_len > page_size)))[:1]:
        raise ValueError(
            f"page_table_from_csr: last_page_len[{b}] is {last_page_len[b]}; it must be from 0 to page_size, "
            f"{page_size}"
        )
    used = indices[int(begins[0]) : int(begins[-1])]
    for i in np.flatnonzero(used < 0)[:1]:
        raise ValueError(f"page_table_from_csr: indices[{begins[0] + i}] is {used[i]}; a page is a number from 0 on")
    return int(counts.max(initial=0))
