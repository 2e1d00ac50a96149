"""Attention over a cache of keys and values, as in decoding."""

from __future__ import annotations

from typing import Any

from cupyfa.attention import AttentionResult
from cupyfa.cache_options import CacheArrays, check_cache_length, check_cache_options
from cupyfa.decode_dispatch import attend_cache
from cupyfa.dispatch import Backend
from cupyfa.options import WindowSize, check_flag
from cupyfa.select import Config

__all__ = ["attention_with_kvcache"]


def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float | None = None,
    sink: Any = None,
    alibi_slopes: Any = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    split_size: int | None = None,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    backend: Backend | None = None,
    config: Config | None = None,
) -> Any:
    """Append keys and values to a cache, and compute attention of a few queries over all that it has.

    Each sequence has its own length, and its keys are in a row of the cache, or in pages that a table names.

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads_q, head_dim)
        As for :func:`cupyfa.attention`. With ``cu_seqlens_q`` it is (total_q, heads_q, head_dim).
    k_cache : array, (batch, capacity, heads_kv, head_dim)
        Same dtype and place. With ``cache_batch_idx`` it may have more rows or fewer. With ``page_table`` it is
        (num_pages, page_size, heads_kv, head_dim), with any page_size from 1 on. Never copied: on the GPU its last axis
        is contiguous, and its address and other strides are multiples of 16 bytes.
    v_cache : array, (batch, capacity, heads_kv, head_dim_v)
        Likewise; only the last axis may differ from that of ``k_cache``.
    cache_seqlens : array, (batch,), or int
        int32, contiguous: how many keys each sequence has in the cache before the call. An int holds for all of them.
        The call does not advance them.
    page_table : array, optional, (batch, max_pages)
        int32, contiguous along the last axis: the pages of each sequence, in the order of its keys. A sequence can have
        ``max_pages * page_size`` keys; entries behind its last page are not used. Sequences can share the pages of a
        common beginning, but not a page that one of them appends to where another has keys.
    cache_batch_idx : array, optional, (batch,)
        int32, contiguous: the row of each sequence, without ``page_table``; by default sequence ``b`` has row ``b``.
        Where keys are appended, no two sequences have the same.
    k : array, optional, (batch, seqlen_new, heads_kv, head_dim)
        New keys, written to ``k_cache`` in place: key ``i`` of sequence ``b`` behind the ``cache_seqlens[b] + i`` that
        are there. Queries see them.
    v : array, optional, (batch, seqlen_new, heads_kv, head_dim_v)
        New values, likewise.
    rotary_cos, rotary_sin : array, optional, (positions, rotary_dim / 2)
        dtype of ``q``, contiguous along the last axis; rotary_dim is at most head_dim. The first rotary_dim numbers of
        each new key and each query turn by the angle of their position, in float32, before the key is written: new key
        ``i`` by position ``cache_seqlens + i``; query row ``i`` by the same with ``causal`` or a window, without either
        all rows by ``cache_seqlens``.
    rotary_interleaved : bool
        Pairs are the numbers ``2 j`` and ``2 j + 1``; else ``j`` and ``j + rotary_dim / 2``.
    cu_seqlens_q : array, optional, (batch + 1,)
        int32, contiguous: sequence ``b`` has the rows from ``cu_seqlens_q[b]`` up to ``cu_seqlens_q[b + 1]`` of ``q``.
    max_seqlen_q : int, optional
        The most rows that a sequence has; needed with ``cu_seqlens_q``, because nobody reads that on the host.
    softmax_scale, causal, window_size, softcap, sink
        As for :func:`cupyfa.attention`, by sequence: aligned with its last key, new ones included.
    alibi_slopes : array, optional, (heads_q,) or (batch, heads_q)
        As for :func:`cupyfa.attention`.
    return_lse : bool
        Also return the logarithm of the row sums.
    num_splits : int, optional
        Into how many parts the keys of each sequence are split, to be computed side by side and merged: from 1 to 256.
        By default chosen by sizes. On the CPU without effect.
    split_size : int, optional
        Keys of a part, a multiple of 64, instead of their number: then the result for a sequence does not depend on
        what is computed beside it.
    out : array, optional
        Shape of ``q`` but for the last axis, which is that of ``v_cache``; dtype of ``q``. Written in place and
        returned.
    lse : array, optional
        float32, (batch, heads_q, seqlen_q), or (heads_q, total_q). Written in place.
    workspace : array, optional
        uint8: memory for the parts of split keys, on the GPU.
    backend, config
        As for :func:`cupyfa.attention`.

    Returns
    -------
    array or AttentionResult
        The output, or ``(out, lse)`` with ``return_lse``. Rows that see no key, and those of no sequence, have output 0
        and lse -inf, with a sink the sink.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, LaunchError, HazardError
        As for :func:`cupyfa.attention`. Nothing was written, the cache included.

    Notes
    -----
    Lengths, pages and rows that lie outside of the cache, positions outside of the tables, and shared places of new
    keys are a ValueError that names the sequence for NumPy arrays, and for CuPy arrays with ``CUPYFA_DEBUG=1`` in the
    environment, at the price of a wait for the GPU in each call. Without that the device takes the nearest number that
    is allowed, and never reads or writes outside of an array. An int for ``cache_seqlens`` is always checked.

    What a cache holds behind the last key of a sequence does not matter, NaN included.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = np.zeros((2, 5, 16, 2, 8), np.float16)  # 5 pages of 16 keys, of 2 heads of 8
    >>> page_table = np.array([[3, 1], [0, 4]], np.int32)  # 2 sequences, of at most 32 keys
    >>> cache_seqlens = np.array([0, 15], np.int32)
    >>> for step in range(3):
    ...     q, k, v = rng.standard_normal((3, 2, 1, 2, 8)).astype(np.float16)
    ...     out = attention_with_kvcache(
    ...         q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=page_table, k=k, v=v, causal=True
    ...     )
    ...     cache_seqlens += 1
    >>> out.shape, bool(np.all(k_cache[3, 2] == k[0, 0])), bool(np.all(v_cache[4, 1] == v[1, 0]))
    ((2, 1, 2, 8), True, True)
    """
    check_flag("return_lse", return_lse)
    options = check_cache_options(
        softmax_scale,
        causal,
        window_size,
        softcap,
        max_seqlen_q=max_seqlen_q,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        split_size=split_size,
    )
    length = check_cache_length(cache_seqlens)
    arrays = CacheArrays(
        q,
        k_cache,
        v_cache,
        out,
        lse,
        k,
        v,
        sink,
        alibi_slopes,
        rotary_cos,
        rotary_sin,
        cache_seqlens if length is None else None,
        page_table,
        cache_batch_idx,
        cu_seqlens_q,
    )
    out, lse = attend_cache(arrays, length, options, bool(return_lse), backend, config, workspace)
    return AttentionResult(out, lse) if return_lse else out
