"""Attention over a cache, one sequence at a time: what `attention_with_kvcache` must give, whoever computes it.

A cache holds the keys of a sequence in a row of its own, or in pages that a table names in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import online
from .mask import Window, window_bounds
from .rotary import Rotary
from .violations import check_range

__all__ = ["Places", "append", "attention"]

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Places:
    """Where a cache keeps the keys of each sequence (0x0B).

    Parameters
    ----------
    page_table : numpy.ndarray, optional
        ``(batch, max_pages)``: the pages of each sequence, in the order of its keys. What lies behind the last page
        that is needed is not looked at.
    cache_batch_idx : numpy.ndarray, optional
        ``(batch,)``: the row of each sequence, without pages; by default sequence ``b`` has row ``b``.
    """

    page_table: Integers | None = None
    cache_batch_idx: Integers | None = None

    def of(self, cache: Array, sequence: int, begin: int, end: int) -> tuple[Any, Any]:
        """Return the indices of the first two axes of a cache that keys of a sequence have.

        Parameters
        ----------
        cache : numpy.ndarray
            ``(rows, capacity, heads, head_dim)``, or ``(pages, page_size, heads, head_dim)``.
        sequence : int
            Which one.
        begin, end : int
            Its keys ``begin <= i < end``.

        Returns
        -------
        tuple
            ``cache[places.of(...)]`` is ``(end - begin, heads, head_dim)``, to be read or written.
        """
        if self.page_table is None:
            row = sequence if self.cache_batch_idx is None else int(self.cache_batch_idx[sequence])
            check_range("cache", 0, cache.shape[1], end=end)
            check_range("cache", 0, cache.shape[0] - 1, row=row)
            return row, slice(begin, end)
        page_size = cache.shape[1]
        check_range("cache", 0, self.page_table.shape[1] * page_size, end=end)
        keys = np.arange(begin, end)
        pages = self.page_table[sequence, keys // page_size]
        for page in np.unique(pages):
            check_range("cache", 0, cache.shape[0] - 1, page=int(page))
        return pages, keys % page_size


def append(
    k_cache: Array,
    v_cache: Array,
    k: Array,
    v: Array,
    cache_seqlens: Integers | int,
    places: Places,
    rotary: Rotary | None = None,
) -> None:
    """Write new keys and values behind those that a cache has (0x0B).

    Parameters
    ----------
    k_cache, v_cache : numpy.ndarray
        As for `Places`; written in place.
    k, v : numpy.ndarray
        ``(batch, seqlen_new, heads, ...)``.
    cache_seqlens : numpy.ndarray or int
        How many each sequence has: ``(batch,)``, or one number for all.
    places : Places
        Where they go.
    rotary : Rotary, optional
        Turns each new key by its position in the sequence.

    Examples
    --------
    >>> cache = np.zeros((3, 2, 1, 1), np.float16)  # pages of two keys
    >>> new = np.ones((1, 2, 1, 1), np.float16)
    >>> append(cache, cache.copy(), new, new, np.int32([1]), Places(np.int32([[2, 0]])))
    >>> cache[..., 0, 0].tolist()
    [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    """
    (batch, seqlen_new), positions = k.shape[:2], np.arange(k.shape[1])
    for b, length in enumerate(_lengths(cache_seqlens, batch)):
        place = places.of(k_cache, b, length, length + seqlen_new)
        k_cache[place] = k[b] if rotary is None else rotary.turn(k[b], length + positions)
        v_cache[place] = v[b]


def _lengths(cache_seqlens: Integers | int, batch: int) -> list[int]:
    lengths: list[int] = np.broadcast_to(np.asarray(cache_seqlens), (batch,)).tolist()
    return lengths


def attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    cache_seqlens: Integers | int,
    page_table: Integers | None = None,
    cache_batch_idx: Integers | None = None,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    rotary_interleaved: bool = False,
    cu_seqlens_q: Integers | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    of_sequence: Callable[..., tuple[Array, Array]] = online.attention,
    **options: Any,
) -> tuple[Array, Array]:
    """Append to a cache, and compute attention over it (0x01).

    Parameters
    ----------
    q : numpy.ndarray
        ``(batch, seqlen_q, heads_q, head_dim)``, or with `cu_seqlens_q` ``(total_q, heads_q, head_dim)``.
    k_cache, v_cache : numpy.ndarray
        ``(rows, capacity, heads_kv, head_dim)`` and ``(rows, capacity, heads_kv, head_dim_v)``, or pages of them.
    cache_seqlens : numpy.ndarray or int
        How many keys each sequence has before the call: ``(batch,)``, or one number for all.
    page_table, cache_batch_idx : numpy.ndarray, optional
        As for `Places`.
    k, v : numpy.ndarray, optional
        ``(batch, seqlen_new, heads_kv, ...)``: are appended, and then seen.
    rotary_cos, rotary_sin : numpy.ndarray, optional
        As for `cupyfa.oracles.rotary.rotate`: new key ``i`` turns by position ``cache_seqlens + i``. So does query row
        ``i`` under a causal mask or a window; else all rows turn by ``cache_seqlens``.
    rotary_interleaved : bool, optional
        Which numbers are pairs.
    cu_seqlens_q : numpy.ndarray, optional
        ``(batch + 1,)``, ascending: where the rows of each sequence begin in a packed q.
    causal, window_size : optional
        Aligned with the last key, one that was appended included.
    sink : numpy.ndarray, optional
        ``(heads_q,)``.
    alibi_slopes : numpy.ndarray, optional
        ``(heads_q,)`` or ``(batch, heads_q)``.
    out, lse : numpy.ndarray, optional
        Written in place and returned if given.
    of_sequence : callable, optional
        The oracle of a sequence, `cupyfa.oracles.online.attention` by default.
    **options
        For `of_sequence`.

    Returns
    -------
    out : numpy.ndarray
        Like q, with the last axis of v, and the type that `of_sequence` gives. Rows of no sequence are 0.
    lse : numpy.ndarray
        ``(batch, heads_q, seqlen_q)``, or ``(heads_q, total_q)``; in rows of no sequence the sink, or -inf.

    Examples
    --------
    >>> cache = np.full((1, 4, 1, 8), np.nan, np.float16)
    >>> new = np.ones((1, 1, 1, 8), np.float16)
    >>> out, lse = attention(new, cache, cache, cache_seqlens=0, k=new, v=new)
    >>> out[0, 0, 0, 0].item(), cache[0, :, 0, 0].tolist()
    (1.0, [1.0, nan, nan, nan])
    """
    packed = cu_seqlens_q is not None
    offsets = np.arange(q.shape[0] + 1) * q.shape[1] if cu_seqlens_q is None else cu_seqlens_q
    rows = q.reshape(math.prod(q.shape[:-2]), *q.shape[-2:])
    (total_q, heads_q, _), batch = rows.shape, len(offsets) - 1
    places = Places(page_table, cache_batch_idx)
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    rows_turn = window_bounds(causal, window_size) != (None, None)
    seqlen_new = 0
    if k is not None and v is not None:
        append(k_cache, v_cache, k, v, cache_seqlens, places, rotary)
        seqlen_new = k.shape[1]

    options |= {"causal": causal, "window_size": window_size}
    no_keys = (np.empty((1, 0, *cache.shape[2:]), cache.dtype) for cache in (k_cache, v_cache))
    nothing = of_sequence(rows[None, :0], *no_keys, **options)  # for the types
    all_out = np.zeros((total_q, heads_q, v_cache.shape[-1]), nothing[0].dtype)
    all_lse = np.empty((heads_q, total_q), nothing[1].dtype)
    all_lse[...] = -np.inf if sink is None else sink[:, None]
    for b, length in enumerate(_lengths(cache_seqlens, batch)):
        own = slice(int(offsets[b]), int(offsets[b + 1]))
        of_q = rows[own]
        if rotary is not None:
            of_q = rotary.turn(of_q, length + np.arange(len(of_q)) * rows_turn)
        place = places.of(k_cache, b, 0, length + seqlen_new)
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        keys, values = k_cache[place], v_cache[place]
        result, of_rows = of_sequence(of_q[None], keys[None], values[None], sink=sink, alibi_slopes=slopes, **options)
        all_out[own], all_lse[:, own] = result[0], of_rows[0]

    def finish(values: Array, given: Array | None) -> Array:
        if given is None:
            return values
        given[...] = values
        return given

    if not packed:
        all_out = all_out.reshape(*q.shape[:-1], all_out.shape[-1])
        all_lse = all_lse.reshape(heads_q, *q.shape[:2]).swapaxes(0, 1)
    return finish(all_out, out), finish(all_lse, lse)
