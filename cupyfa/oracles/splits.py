"""Keys of a sequence in several parts, each with an output of its own, and their merge: twin of split and combine.

The rows of a sequence, all query heads of a key head among them, see a range of blocks of 64 keys. It is cut into
splits; each split is attention over its keys alone, with a float32 output and the natural logarithm of its row sums,
and these two are all that the merge needs. Where a row sees nothing of a split, the logarithm is -inf.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import online
from .mask import Window, block_range
from .violations import ContractViolation, check_range

__all__ = ["BLOCK", "attention", "merge", "partials", "split_blocks"]

Array = npt.NDArray[Any]

#: Keys of a block: splits begin and end between two of them.
BLOCK = 64


def split_blocks(blocks: range, num_splits: int | None = None, split_size: int | None = None) -> list[range]:
    """Cut the blocks that rows see into splits (0x0B).

    Parameters
    ----------
    blocks : range
        Of `BLOCK` keys.
    num_splits : int, optional
        How many splits; more than there are blocks leaves some empty.
    split_size : int, optional
        Keys of a split, a multiple of `BLOCK`, counted from the first block on, instead: how a sequence is cut does not
        depend on its neighbours then, nor, but for the last split, on how long it is.

    Returns
    -------
    list of range
        The blocks of each split, in their order.

    Raises
    ------
    ValueError
        Neither or both are given, or one is none.

    Examples
    --------
    >>> split_blocks(range(2, 7), num_splits=3)
    [range(2, 3), range(3, 5), range(5, 7)]
    >>> split_blocks(range(2, 7), split_size=128)
    [range(2, 4), range(4, 6), range(6, 7)]
    """
    if (num_splits is None) == (split_size is None):
        raise ContractViolation(f"splits: num_splits is {num_splits} and split_size {split_size}; one is to be given")
    if num_splits is not None:
        check_range("splits", 1, num_splits=num_splits)
        return [blocks[s * len(blocks) // num_splits : (s + 1) * len(blocks) // num_splits] for s in range(num_splits)]
    assert split_size is not None
    check_range("splits", BLOCK, split_size=split_size)
    check_range("splits", 0, 0, split_size_behind_a_block=split_size % BLOCK)
    step = split_size // BLOCK
    return [blocks[begin : begin + step] for begin in range(0, len(blocks), step)]


def partials(
    q: Array,
    k: Array,
    v: Array,
    *,
    num_splits: int | None = None,
    split_size: int | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    **options: Any,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Compute attention over each split alone (0x01).

    Parameters
    ----------
    q, k, v, causal, window_size
        As for `cupyfa.oracles.online.attention`.
    num_splits, split_size
        As for `split_blocks`.
    **options
        For `cupyfa.oracles.online.attention`; no sink, which is of the whole row.

    Returns
    -------
    outs : numpy.ndarray
        float32, ``(splits, batch, seqlen_q, heads_q, head_dim_v)``, normalised.
    lses : numpy.ndarray
        float32, ``(splits, batch, heads_q, seqlen_q)``.
    """
    (batch, seqlen_q, heads_q, _), seqlen_k = q.shape, k.shape[1]
    seen = block_range(0, seqlen_q, seqlen_q, seqlen_k, BLOCK, causal, window_size)
    splits = split_blocks(range(seen.first, seen.end), num_splits, split_size)
    outs = np.empty((len(splits), batch, seqlen_q, heads_q, v.shape[3]), np.float32)
    lses = np.empty((len(splits), batch, heads_q, seqlen_q), np.float32)
    options |= {"causal": causal, "window_size": window_size, "tile_m": max(1, seqlen_q), "tile_n": BLOCK}
    for split, out, lse in zip(splits, outs, lses, strict=True):
        online.attention(q, k, v, **options, out=out, lse=lse, key_blocks=split)
    return outs, lses


def merge(outs: Array, lses: Array, sink: Array | None = None) -> tuple[Array, Array]:
    """Merge attention over parts of the keys into that over all of them (0x01).

    ``lse = log(sum(exp(lse_s)))`` and ``out = sum(exp(lse_s - lse) out_s)``, relative to the largest of them. A sink is
    one more part, without an output.

    Parameters
    ----------
    outs : numpy.ndarray
        ``(splits, batch, seqlen, heads, head_dim)``, normalised; any number of splits, none too.
    lses : numpy.ndarray
        ``(splits, batch, heads, seqlen)``, natural logarithms; -inf for a part that a row sees nothing of, whose
        output is not looked at.
    sink : numpy.ndarray, optional
        ``(heads,)``.

    Returns
    -------
    out : numpy.ndarray
        ``(batch, seqlen, heads, head_dim)``, type of `outs`; 0 where all parts are empty.
    lse : numpy.ndarray
        ``(batch, heads, seqlen)``; -inf there, or the sink.

    Examples
    --------
    >>> import math
    >>> outs = np.float32([4, 8, 99]).reshape(3, 1, 1, 1, 1)
    >>> lses = np.log(np.float32([3, 1, 0]) + np.float32(1e-38)).reshape(3, 1, 1, 1)
    >>> lses[2] = -np.inf
    >>> out, lse = merge(outs, lses)
    >>> round(out.item(), 5), round(lse.item(), 5) == round(math.log(4), 5)
    (5.0, True)
    """
    if sink is not None:
        of_rows = np.broadcast_to(sink[:, None].astype(lses.dtype), lses.shape[1:])
        lses = np.concatenate([lses, of_rows[None]])
        outs = np.concatenate([outs, np.zeros_like(outs, shape=(1, *outs.shape[1:]))])
    top = np.max(lses, axis=0, initial=-np.inf).astype(lses.dtype)
    reference = np.where(np.isneginf(top), lses.dtype.type(0), top)
    weights = np.exp(lses - reference)
    total = weights.sum(axis=0, dtype=lses.dtype)
    shares = (weights / np.where(total == 0, lses.dtype.type(1), total)).swapaxes(-1, -2)[..., None]
    empty = np.isneginf(lses).swapaxes(-1, -2)[..., None]
    out = (np.where(empty, outs.dtype.type(0), outs) * shares).sum(axis=0, dtype=outs.dtype)
    with np.errstate(divide="ignore"):
        return out, reference + np.log(total)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    num_splits: int | None = None,
    split_size: int | None = None,
    sink: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Compute attention in splits, and merge them (0x01).

    Parameters
    ----------
    q, k, v
        As for `cupyfa.oracles.online.attention`.
    num_splits, split_size
        As for `split_blocks`.
    sink : numpy.ndarray, optional
        ``(heads_q,)``.
    **options
        For `partials`.

    Returns
    -------
    out : numpy.ndarray
        Type of `q`.
    lse : numpy.ndarray
        float32.

    Examples
    --------
    >>> import math
    >>> x = np.ones((1, 300, 1, 8), np.float16)
    >>> out, lse = attention(x[:, :1], x, x, num_splits=3)
    >>> out.dtype, out.max().item(), round(lse.item(), 3) == round(8**0.5 + math.log(300), 3)
    (dtype('float16'), 1.0, True)
    """
    outs, lses = partials(q, k, v, num_splits=num_splits, split_size=split_size, **options)
    out, lse = merge(outs, lses, sink)
    with np.errstate(over="ignore"):
        return out.astype(q.dtype), lse
