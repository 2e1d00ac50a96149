"""The values of lengths, pages and rows: only the device has them, unless somebody waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupyfa.cache_options import CacheArrays
from cupyfa.cache_problem import CacheProblem

__all__ = ["check_cache_values", "check_length_of_all"]

Integers = npt.NDArray[np.int64]


def check_length_of_all(length: int, problem: CacheProblem) -> None:
    """Check a number of keys that holds for all sequences; the host knows it wherever the arrays are.

    Parameters
    ----------
    length : int
        ``cache_seqlens``.
    problem : CacheProblem
        Checked.

    Raises
    ------
    ValueError
        It is below 0, or too large.
    """
    _check_length("cache_seqlens", length, problem)
    rows = 1 if problem.total_q is not None or not problem.rows_turn else problem.seqlen_q
    _check_positions("cache_seqlens", length, rows, problem)


def check_cache_values(values: CacheArrays[Any], length: int | None, problem: CacheProblem) -> None:
    """Check the values of lengths, pages and rows, on the host.

    Parameters
    ----------
    values : CacheArrays
        cache_seqlens, page_table, cache_batch_idx and cu_seqlens_q: NumPy arrays, or None. Others are not looked at.
    length : int or None
        What holds for all sequences, instead of cache_seqlens.
    problem : CacheProblem
        Checked.

    Raises
    ------
    ValueError
        Naming the array and the sequence.
    """
    rows = _check_rows(values.cu_seqlens_q, problem)
    if values.cache_seqlens is None:
        lengths = np.full(problem.batch, length or 0, np.int64)
        names = ["cache_seqlens"] * problem.batch
        check_length_of_all(length or 0, problem)
    else:
        lengths = values.cache_seqlens.astype(np.int64)
        names = [f"cache_seqlens[{b}]" for b in range(problem.batch)]
    for name, n, of_sequence in zip(names, lengths.tolist(), rows.tolist(), strict=True):
        _check_length(name, n, problem)
        _check_positions(name, n, of_sequence if problem.rows_turn else min(1, of_sequence), problem)
    if values.page_table is not None:
        _check_pages(values.page_table.astype(np.int64), lengths, problem)
    if values.cache_batch_idx is not None:
        _check_batch_idx(values.cache_batch_idx.astype(np.int64), problem)


def _check_rows(offsets: npt.NDArray[np.int32] | None, problem: CacheProblem) -> Integers:
    """Check where sequences of a packed q begin, and return how many rows each has."""
    if offsets is None or problem.total_q is None:
        return np.full(problem.batch, problem.seqlen_q, np.int64)
    begins = offsets.astype(np.int64)
    rows = np.diff(begins)
    for b in np.flatnonzero(rows < 0)[:1]:
        raise ValueError(
            f"attention: cu_seqlens_q[{b + 1}] is {begins[b + 1]}, less than cu_seqlens_q[{b}], {begins[b]}"
        )
    for b in np.flatnonzero((begins < 0) | (begins > problem.total_q))[:1]:
        raise ValueError(
            f"attention: cu_seqlens_q[{b}] is {begins[b]}; it must be from 0 to the {problem.total_q} rows of q"
        )
    for b in np.flatnonzero(rows > problem.seqlen_q)[:1]:
        raise ValueError(
            f"attention: cu_seqlens_q gives sequence {b} {rows[b]} rows, more than max_seqlen_q, {problem.seqlen_q}"
        )
    return rows


def _check_length(name: str, length: int, problem: CacheProblem) -> None:
    if length < 0:
        raise ValueError(f"attention: {name} is {length}; it must be at least 0")
    if length + problem.seqlen_new > problem.capacity:
        new = f" and {problem.seqlen_new} keys are appended" if problem.seqlen_new else ""
        pages = "" if problem.page_size is None else f" ({problem.max_pages} pages of {problem.page_size})"
        raise ValueError(
            f"attention: {name} is {length}{new}; a sequence of the cache can have at most {problem.capacity} keys"
            f"{pages}"
        )


def _check_positions(name: str, length: int, rows: int, problem: CacheProblem) -> None:
    """Check that the tables turn every new key and query row of a sequence."""
    last = length + max(problem.seqlen_new, rows) - 1
    if problem.rotary_dim and last >= problem.rotary_positions and max(problem.seqlen_new, rows):
        raise ValueError(
            f"attention: {name} is {length}, so that positions up to {last} turn; rotary_cos has "
            f"{problem.rotary_positions}"
        )


def _check_batch_idx(rows: Integers, problem: CacheProblem) -> None:
    for b in np.flatnonzero((rows < 0) | (rows >= problem.cache_rows))[:1]:
        raise ValueError(
            f"attention: cache_batch_idx[{b}] is {rows[b]}; it must be from 0 to {problem.cache_rows - 1}, a row of "
            "the cache"
        )
    if problem.seqlen_new:
        _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
        for b in np.flatnonzero(first[inverse] != np.arange(rows.size))[:1]:
            raise ValueError(
                f"attention: cache_batch_idx[{b}] is {rows[b]}, and so is cache_batch_idx[{first[inverse][b]}]; "
                "sequences that keys are appended to must have rows of their own"
            )


def _check_pages(table: Integers, lengths: Integers, problem: CacheProblem) -> None:
    """Check the pages that are needed: that they exist, and that nobody sees what another sequence appends."""
    size = problem.page_size or 1
    place = np.arange(table.shape[1])
    keys = np.clip((lengths + problem.seqlen_new)[:, None] - place * size, 0, size)  # of each page of each sequence
    for b, i in np.argwhere((keys > 0) & ((table < 0) | (table >= problem.cache_rows)))[:1]:
        raise ValueError(
            f"attention: page_table[{b}, {i}] is {table[b, i]}; it must be from 0 to {problem.cache_rows - 1}, because "
            f"sequence {b} has {lengths[b] + problem.seqlen_new} keys in pages of {size}"
        )
    old = np.clip(lengths[:, None] - place * size, 0, size)
    used = np.argwhere(keys > 0)
    users: dict[int, list[tuple[int, int]]] = {}
    for b, i in used.tolist():
        users.setdefault(int(table[b, i]), []).append((b, i))
    for b, i in np.argwhere(keys > old).tolist():
        for c, j in users[int(table[b, i])]:
            if (b, i) != (c, j) and keys[c, j] > old[b, i]:
                raise ValueError(
                    f"attention: page_table[{b}, {i}] is {table[b, i]}, and so is page_table[{c}, {j}]; sequence {b} "
                    f"appends to that page from key {old[b, i]} on, and sequence {c} has {keys[c, j]} keys there: a "
                    "page can be shared only in front of what is appended"
                )
