"""Attention over sequences of different lengths, one at a time: what must come out, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyfa.oracles import online

__all__ = ["attention", "bias_of", "of_batch", "sequences"]

Array = npt.NDArray[Any]
Lengths = npt.NDArray[np.int32]


def sequences(
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths,
    seqused_q: Lengths | None = None,
    seqused_k: Lengths | None = None,
) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of each sequence in the packed q, and those of its keys (0x0B).

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : numpy.ndarray
        Where the sequences begin, and where the last one ends: ``(batch + 1,)``, ascending.
    seqused_q, seqused_k : numpy.ndarray, optional
        How many rows of each are used, all by default; what is beyond 0 or the length counts as that.

    Yields
    ------
    tuple of slice
        Query rows and key rows.

    Examples
    --------
    >>> list(sequences(np.int32([0, 3, 5]), np.int32([0, 4, 4]), seqused_q=np.int32([2, 2])))
    [(slice(0, 2, None), slice(0, 4, None)), (slice(3, 5, None), slice(4, 4, None))]
    """

    def rows(cu_seqlens: Lengths, seqused: Lengths | None, i: int) -> slice:
        begin, end = int(cu_seqlens[i]), int(cu_seqlens[i + 1])
        return slice(begin, end if seqused is None else begin + min(max(int(seqused[i]), 0), end - begin))

    for i in range(len(cu_seqlens_q) - 1):
        yield rows(cu_seqlens_q, seqused_q, i), rows(cu_seqlens_k, seqused_k, i)


def attention(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths,
    *,
    seqused_q: Lengths | None = None,
    seqused_k: Lengths | None = None,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    of_sequence: Callable[..., tuple[Array, Array]] = online.attention,
    **options: Any,
) -> tuple[Array, Array]:
    """Compute attention over packed sequences (0x01).

    Parameters
    ----------
    q : numpy.ndarray
        Shape ``(total_q, heads_q, head_dim)``.
    k : numpy.ndarray
        Shape ``(total_k, heads_kv, head_dim)``.
    v : numpy.ndarray
        Shape ``(total_k, heads_kv, head_dim_v)``.
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k : numpy.ndarray
        As for `sequences`.
    sink : numpy.ndarray, optional
        ``(heads_q,)``.
    alibi_slopes : numpy.ndarray, optional
        ``(heads_q,)`` or ``(batch, heads_q)``.
    bias : numpy.ndarray, optional
        Broadcast to ``(batch, heads_q, rows, keys)`` of the longest sequences: row ``i`` and key ``j`` of a sequence
        get ``bias[sequence, head, i, j]``.
    out, lse : numpy.ndarray, optional
        Written in place and returned if given.
    of_sequence : callable, optional
        The oracle of a sequence, `cupyfa.oracles.online.attention` by default.
    **options
        For `of_sequence`.

    Returns
    -------
    out : numpy.ndarray
        ``(total_q, heads_q, head_dim_v)``, the type that `of_sequence` gives. Rows of no sequence are rows that see no
        key: 0.
    lse : numpy.ndarray
        ``(heads_q, total_q)``; in rows of no sequence the sink, or -inf.

    Examples
    --------
    >>> x = np.ones((5, 1, 8), np.float16)
    >>> out, lse = attention(x, x, x, np.int32([0, 2, 4]), np.int32([0, 2, 5]))
    >>> out[:, 0, 0].tolist()  # the last row belongs to no sequence
    [1.0, 1.0, 1.0, 1.0, 0.0]
    """
    heads_q, total_q = q.shape[1], q.shape[0]
    nothing = of_sequence(q[None, :0], k[None, :0], v[None, :0], **options)  # for the types
    out = np.empty((total_q, heads_q, v.shape[2]), nothing[0].dtype) if out is None else out
    lse = np.empty((heads_q, total_q), nothing[1].dtype) if lse is None else lse
    out[...] = 0
    lse[...] = -np.inf if sink is None else sink[:, None]
    for i, (rows, keys) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)):
        slopes = alibi_slopes[i] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        result, of_rows = of_sequence(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            sink=sink,
            alibi_slopes=slopes,
            bias=None if bias is None else bias_of(bias, i, rows.stop - rows.start, keys.stop - keys.start),
            **options,
        )
        out[rows], lse[:, rows] = result[0], of_rows[0]
    return out, lse


def of_batch(
    q: Array,
    k: Array,
    v: Array,
    *,
    seqused_q: Lengths | None = None,
    seqused_k: Lengths | None = None,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    of_sequence: Callable[..., tuple[Array, Array]] = online.attention,
    **options: Any,
) -> tuple[Array, Array]:
    """Compute attention over a batch of which each sequence uses its first rows and keys (0x01).

    Parameters
    ----------
    q : numpy.ndarray
        Shape ``(batch, seqlen_q, heads_q, head_dim)``.
    k : numpy.ndarray
        Shape ``(batch, seqlen_k, heads_kv, head_dim)``.
    v : numpy.ndarray
        Shape ``(batch, seqlen_k, heads_kv, head_dim_v)``.
    seqused_q, seqused_k : numpy.ndarray, optional
        ``(batch,)``: how many rows and keys, all by default; what is beyond 0 or the length counts as that.
    sink, alibi_slopes, of_sequence, **options
        As for `attention`.
    bias : numpy.ndarray, optional
        Broadcast to ``(batch, heads_q, seqlen_q, seqlen_k)``.
    out, lse : numpy.ndarray, optional
        Written in place and returned if given.

    Returns
    -------
    out : numpy.ndarray
        ``(batch, seqlen_q, heads_q, head_dim_v)``, the type that `of_sequence` gives; 0 in rows that are not used.
    lse : numpy.ndarray
        ``(batch, heads_q, seqlen_q)``; in such rows the sink, or -inf.

    Examples
    --------
    >>> x = np.ones((2, 3, 1, 8), np.float16)
    >>> out, lse = of_batch(x, x, x, seqused_q=np.int32([3, 1]), seqused_k=np.int32([2, 3]))
    >>> out[:, :, 0, 0].tolist()
    [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    """
    (batch, seqlen_q, heads_q, _), seqlen_k = q.shape, k.shape[1]
    nothing = of_sequence(q[:1, :0], k[:1, :0], v[:1, :0], **options)  # for the types
    out = np.empty((batch, seqlen_q, heads_q, v.shape[3]), nothing[0].dtype) if out is None else out
    lse = np.empty((batch, heads_q, seqlen_q), nothing[1].dtype) if lse is None else lse
    of_q, of_k = (np.arange(2, dtype=np.int32) * seqlen for seqlen in (seqlen_q, seqlen_k))
    for i in range(batch):
        attention(
            q[i],
            k[i],
            v[i],
            of_q,
            of_k,
            seqused_q=None if seqused_q is None else seqused_q[i : i + 1],
            seqused_k=None if seqused_k is None else seqused_k[i : i + 1],
            sink=sink,
            alibi_slopes=alibi_slopes[i] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes,
            bias=bias[i : i + 1] if bias is not None and bias.ndim == 4 and bias.shape[0] > 1 else bias,
            out=out[i],
            lse=lse[i],
            of_sequence=of_sequence,
            **options,
        )
    return out, lse


def bias_of(bias: Array, sequence: int, rows: int, keys: int) -> Array:
    """Return the bias of a sequence; an axis with one index, or one of a view that repeats it, has any length (0x01).

    Parameters
    ----------
    bias : numpy.ndarray
        Of all sequences, as for `attention`.
    sequence, rows, keys : int
        Which one, and how many rows and keys it has.

    Returns
    -------
    numpy.ndarray
        A view with four axes.

    Examples
    --------
    >>> bias_of(np.zeros((2, 1, 9, 9)), 1, 3, 5).shape
    (1, 1, 3, 5)
    """
    axes = bias[(None,) * (4 - bias.ndim)]
    repeats = [size == 1 or not stride for size, stride in zip(axes.shape, axes.strides, strict=True)]
    parts = (slice(sequence, sequence + 1), slice(None), slice(rows), slice(keys))
    return axes[tuple(slice(1) if repeat else part for repeat, part in zip(repeats, parts, strict=True))]
