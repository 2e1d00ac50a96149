"""The tiled online recurrence: twin of the kernel's consumer loop, and the library's CPU backend.

The loop has the names, the order and the rounding points of the CUDA kernel, so that the two can be read side by side.
A query tile visits its key blocks from the last to the first, keeps a running row maximum ``m``, a row sum ``l`` and an
unnormalised output ``O``, and shrinks ``O`` and ``l`` whenever the maximum grows (arXiv 2407.08608, algorithm 1;
specification 0x01, 0x03 and 0x05). Asynchrony changes when the kernel does each step, never what it computes.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .dense import check_shapes, head_groups, resolve_scale
from .mask import TileMask, weighted_sum

Array = npt.NDArray[np.floating]
Float32Array = npt.NDArray[np.float32]

# Scores of one step over all the heads that are worked on together: they stay in a core's cache.
_STEP_BUDGET = 2**18


def round_to(x: Float32Array, dtype: npt.DTypeLike) -> Float32Array:
    """Round to the values that `dtype` can hold, to nearest even, and keep float32 as the container.

    Parameters
    ----------
    x : numpy.ndarray
        float32.
    dtype : data-type
        float16, bfloat16 or float32.

    Returns
    -------
    numpy.ndarray
        float32, same shape.

    Examples
    --------
    >>> float(round_to(np.float32([2049.0]), np.float16)[0])
    2048.0
    """
    return x.astype(dtype).astype(np.float32)


class OnlineSoftmax:
    """The softmax of score rows that arrive block by block, in base 2.

    Attributes
    ----------
    m : numpy.ndarray
        float32, ``(..., rows, 1)``: the largest score so far; -inf before the first.
    l : numpy.ndarray
        float32, ``(..., rows, 1)``: the sum of ``exp2(score - m)`` so far, of unrounded terms.

    Parameters
    ----------
    shape : tuple of int
        ``(..., rows)``.

    Examples
    --------
    >>> softmax = OnlineSoftmax((1,))
    >>> P, shrink = softmax.update(np.float32([[0.0, 1.0]]))
    >>> P, shrink
    (array([[0.5, 1. ]], dtype=float32), array([[0.]], dtype=float32))
    >>> P, shrink = softmax.update(np.float32([[3.0]]))
    >>> shrink
    array([[0.25]], dtype=float32)
    >>> inverse_sum, lse = softmax.finish()
    >>> float(inverse_sum[0, 0] * (1 + 0.25 * 1.5))
    1.0
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.m: Float32Array = np.full((*shape, 1), -np.inf, dtype=np.float32)
        self.l: Float32Array = np.zeros((*shape, 1), dtype=np.float32)

    def update(self, scores: Float32Array) -> tuple[Float32Array, Float32Array]:
        """Take in one block of scores.

        Parameters
        ----------
        scores : numpy.ndarray
            float32, ``(..., rows, keys)``: scaled by ``softmax_scale * log2(e)``, then masked with -inf.

        Returns
        -------
        P : numpy.ndarray
            float32, shape of `scores`: ``exp2(scores - m)`` with the new maximum, not rounded yet.
        shrink : numpy.ndarray
            float32, ``(..., rows, 1)``: the factor that brings what was accumulated under the old maximum to the new.
        """
        m = np.maximum(self.m, scores.max(axis=-1, keepdims=True))
        # While a row has seen no key its maximum is -inf; it is measured against 0 then, for -inf - -inf is NaN.
        reference = np.where(np.isneginf(m), np.float32(0), m)
        shrink = np.exp2(self.m - reference)
        P = np.exp2(scores - reference)
        self.m = m
        self.l = self.l * shrink + P.sum(axis=-1, keepdims=True)
        return P, shrink

    def finish(self) -> tuple[Float32Array, Float32Array]:
        """Close the rows.

        Returns
        -------
        inverse_sum : numpy.ndarray
            float32, ``(..., rows, 1)``: what the output has to be multiplied by; 1 for a row that saw no key.
        lse : numpy.ndarray
            float32, ``(..., rows)``, natural logarithm; -inf for a row that saw no key.
        """
        # Only an exact 0 means "no key": a NaN sum has to stay NaN, or a poisoned row would come out as zeros.
        inverse_sum: Float32Array = np.reciprocal(np.where(self.l == 0, np.float32(1), self.l))
        lse = (self.m + np.log2(self.l)) * np.float32(math.log(2))
        return inverse_sum, lse[..., 0]


def _forward_tile(
    Q: Float32Array,
    K: list[Float32Array],
    V: list[Float32Array],
    scale_log2: np.float32,
    mask: TileMask,
    dtype: npt.DTypeLike,
) -> tuple[Float32Array, Float32Array]:
    """Run the mainloop of one query tile: ``Q`` is (heads, rows, d); ``K[j]`` and ``V[j]`` are (heads, keys, d)."""
    blocks = mask.blocks
    softmax = OnlineSoftmax(Q.shape[:-1])
    O = np.zeros((*Q.shape[:-1], V[0].shape[-1]), dtype=np.float32)
    for j in reversed(range(blocks.first, blocks.end)):
        scores = mask.apply((Q @ K[j].swapaxes(-1, -2)) * scale_log2, j)
        scores, shrink = softmax.update(scores)
        O *= shrink
        O += weighted_sum(round_to(scores, dtype), V[j], None if j < blocks.full else mask.block(j))
    inverse_sum, lse = softmax.finish()
    return O * inverse_sum, lse


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    out: Array | None = None,
    lse: Float32Array | None = None,
    tile_m: int = 128,
    tile_n: int = 128,
) -> tuple[Array, Float32Array]:
    """Compute attention as the kernel does, block by block.

    Scores enter as ``q @ k.T * float32(softmax_scale * log2(e))`` and ``exp2`` replaces ``exp``. ``P`` is rounded to
    the input type before it multiplies ``v``; the row sum takes the unrounded values.

    Parameters
    ----------
    q : numpy.ndarray
        Shape ``(batch, seqlen_q, heads_q, head_dim)``; float16, bfloat16 or float32, any strides.
    k : numpy.ndarray
        Shape ``(batch, seqlen_k, heads_kv, head_dim)``, type of `q`.
    v : numpy.ndarray
        Shape ``(batch, seqlen_k, heads_kv, head_dim_v)``, type of `q`.
    softmax_scale : float, optional
        Factor on the scores, ``1 / sqrt(head_dim)`` by default. May be 0 or negative.
    causal : bool, optional
        Bottom-right aligned causal mask.
    out : numpy.ndarray, optional
        Written in place and returned if given: shape ``(batch, seqlen_q, heads_q, head_dim_v)``, type of `q`, any
        strides. It must not overlap an input.
    lse : numpy.ndarray, optional
        Likewise: float32, shape ``(batch, heads_q, seqlen_q)``.
    tile_m, tile_n : int, optional
        Query rows per tile and keys per block. They change rounding, never meaning.

    Returns
    -------
    out : numpy.ndarray
        Type of `q`; 0 in rows that see no key.
    lse : numpy.ndarray
        float32, natural logarithm; -inf in rows that see no key.

    Raises
    ------
    ValueError
        If the shapes do not fit each other.

    Notes
    -----
    NaN and infinities behave as in `cupyfa.oracles.dense.attention`. arXiv 2407.08608, algorithm 1.

    Examples
    --------
    >>> x = np.ones((1, 300, 2, 16), dtype=np.float16)
    >>> out, lse = attention(x, x, x, causal=True)
    >>> float(out.min()), round(float(lse[0, 0, -1]), 3) == round(4 + math.log(300), 3)
    (1.0, True)
    """
    check_shapes(q, k, v)
    (batch, seqlen_q, heads_q, head_dim), seqlen_k = q.shape, k.shape[1]
    out = _result("out", out, (batch, seqlen_q, heads_q, v.shape[3]), q.dtype)
    lse = _result("lse", lse, (batch, heads_q, seqlen_q), np.dtype(np.float32))
    if seqlen_k == 0:
        out[...] = 0
        lse[...] = -np.inf
        return out, lse

    scale_log2 = np.float32(resolve_scale(softmax_scale, head_dim) * math.log2(math.e))
    # As many heads at a time as keep one step's scores small; long sequences go one head at a time.
    step = min(seqlen_q, tile_m) * min(seqlen_k, tile_n)
    elements = _STEP_BUDGET * max(1, seqlen_q * seqlen_k // max(1, step)) if step else _STEP_BUDGET
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        for b, h, Q, K, V in head_groups(q, k, v, np.float32, min(elements, 2**23)):
            K_blocks = [K[:, n : n + tile_n] for n in range(0, seqlen_k, tile_n)]
            V_blocks = [V[:, n : n + tile_n] for n in range(0, seqlen_k, tile_n)]
            for row in range(0, seqlen_q, tile_m):
                rows = slice(row, min(row + tile_m, seqlen_q))
                mask = TileMask(rows.start, rows.stop, seqlen_q, seqlen_k, tile_n, causal)
                O, row_lse = _forward_tile(Q[:, rows], K_blocks, V_blocks, scale_log2, mask, q.dtype)
                out[b, rows, h] = O.astype(q.dtype)
                lse[b, h, rows] = row_lse
    return out, lse


def _result(name: str, array: Array | None, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return the caller's result array, checked, or a new one."""
    if array is None:
        return np.empty(shape, dtype=dtype)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"attention: {name} is {array.dtype} {array.shape}; it must be {dtype} {shape}")
    return array
