"""The tiled online recurrence: twin of the kernel's consumer loop, and the library's CPU backend.

The loop is ``Consumer`` of ``cuda/hopper/consumer.cuh``, and the softmax in it is in `cupyfa.oracles.softmax`. Names,
order of steps, decisions and rounding points are the kernel's. A query tile visits its key blocks from the last to
the first, keeps the running ``maximum`` and ``sum`` of each row and an unnormalised output ``O``, and shrinks ``O``
and ``sum`` whenever the maximum grows (arXiv 2407.08608, algorithm 1; specification 0x01, 0x03 and 0x05), or only
when it has grown far (0x09). Asynchrony changes when the kernel does each step, never what it computes.

What still differs:

* The order of additions. BLAS adds the products of a score or an output in its own order and rounds to nearest; the
  tensor core adds several at a time and truncates. A row has one running sum here, the kernel eight, one for each sum
  of a block that decides in `SpeculativeSoftmax`. It adds the blocks that an `OnlineSoftmax` or a correction takes in
  to them term by term, and may contract the first product and sum of each into an fma.
* exp2, log2 and reciprocals are good to about an ulp of float32 here; the GPU approximates them to about 2**-22. It
  also flushes subnormal numbers to 0.
* An fma is rounded to float64 and then to float32: half an ulp off in about one of 2**29 cases.
* An unseen key adds nothing to the output here, whatever its value is; to rows that see another key the GPU adds
  ``0 * value``, which is NaN where the value is NaN or infinite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .dense import check_shapes, check_softcap, head_groups, per_head, per_score, resolve_scale
from .mask import TileMask, Window, weighted_sum, window_bounds
from .score_mod import ScoreMod
from .softmax import OnlineSoftmax, SpeculativeSoftmax
from .violations import check_range

__all__ = ["OnlineSoftmax", "SpeculativeSoftmax", "attention", "round_to"]

Array = npt.NDArray[np.floating]
Float32Array = npt.NDArray[np.float32]

# Scores of one step over all the heads that are worked on together: they stay in a core's cache.
_STEP_BUDGET = 2**18


def round_to(x: Float32Array, dtype: npt.DTypeLike) -> Float32Array:
    """Round to the values that `dtype` can hold, to nearest even, and keep float32 as the container (0x01).

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


def _mainloop(
    softmax: OnlineSoftmax | SpeculativeSoftmax,
    Q: Float32Array,
    K: list[Float32Array],
    V: list[Float32Array],
    mask: TileMask,
    score_mod: ScoreMod,
    dtype: npt.DTypeLike,
    key_blocks: range,
) -> Float32Array:
    """Return the unnormalised output of a tile: ``Q`` is (heads, rows, d); ``K[j]``, ``V[j]`` are (heads, keys, d)."""
    blocks = mask.blocks
    O = np.zeros((*Q.shape[:-1], V[0].shape[-1]), dtype=np.float32)
    for j in reversed(range(max(blocks.first, key_blocks.start), min(blocks.end, key_blocks.stop))):
        masked = j >= blocks.full or j < blocks.low
        scores = score_mod.apply(score_mod.cap(Q @ K[j].swapaxes(-1, -2)), mask, j)
        if masked:
            scores = mask.apply(scores, j)
        scores, shrink = softmax.update(scores)
        O *= shrink
        P = round_to(scores, dtype)
        O += weighted_sum(P, V[j], mask.block(j) if masked else None)
    return O


def _consume(
    Q: Float32Array,
    K: Float32Array,
    V: Float32Array,
    score_mod: ScoreMod,
    sink: Float32Array | None,
    tiles: tuple[int, int],
    dtypes: tuple[npt.DTypeLike, npt.DTypeLike],
    key_blocks: range,
    make_mask: Callable[[int, int], TileMask],
    make_softmax: Callable[[tuple[int, ...], np.float32 | None], OnlineSoftmax | SpeculativeSoftmax],
) -> tuple[Array, Float32Array]:
    """Work through the query tiles of some heads; every array is (heads, seqlen, d), and `sink` is (heads, 1, 1).

    The types are those of ``P`` and of the output.
    """
    (heads, seqlen_q, _), seqlen_k, (tile_m, tile_n), (dtype, out_dtype) = Q.shape, K.shape[1], tiles, dtypes
    if score_mod.scale < 0:
        Q = -Q
    K_blocks = [K[:, n : n + tile_n] for n in range(0, seqlen_k, tile_n)]
    V_blocks = [V[:, n : n + tile_n] for n in range(0, seqlen_k, tile_n)]
    out = np.empty((heads, seqlen_q, V.shape[-1]), dtype=out_dtype)
    lse = np.empty((heads, seqlen_q), dtype=np.float32)
    for row in range(0, seqlen_q, tile_m):
        rows = slice(row, min(row + tile_m, seqlen_q))
        softmax = make_softmax((heads, rows.stop - rows.start), score_mod.scale_of_softmax)
        mask = make_mask(rows.start, rows.stop)
        O = _mainloop(softmax, Q[:, rows], K_blocks, V_blocks, mask, score_mod, dtype, key_blocks)
        inverse, shifted = softmax.finish(None if sink is None else sink - score_mod.shift)
        lse[:, rows] = shifted + score_mod.shift
        out[:, rows] = (O * inverse).astype(out_dtype)
    return out, lse


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float | None = None,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    out: Array | None = None,
    lse: Float32Array | None = None,
    tile_m: int = 128,
    tile_n: int = 128,
    speculative: bool = False,
    rescale_threshold: int = 0,
    exp2_fma: int = 0,
    key_blocks: range | None = None,
) -> tuple[Array, Float32Array]:
    """Compute attention as the kernel does, block by block (0x01).

    Scores are ``q @ k.T``, or ``-q @ k.T`` for a negative scale; ``exp2`` replaces ``exp``, with the factor
    ``float32(abs(softmax_scale) * log2(e))`` in its argument. With a softcap, scores become ``(tanh(x) - 1) / 2``
    before the mask, and that factor ``float32(2 * softcap * log2(e))``: the softmax does not see the shift, and the lse
    gets it back at the end. With slopes, scores become logits in base 2, and the factor is 1. With a bias, they become
    natural logits, by ``fma(score, float32(abs(softmax_scale)), bias)``, and the factor is ``float32(log2(e))``. ``P``
    is rounded to the input type before it multiplies ``v``; the row sum takes the unrounded values, and a sink joins it
    at the end.

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
    window_size, softcap, sink, alibi_slopes, bias : optional
        As for `cupyfa.oracles.dense.attention`.
    out : numpy.ndarray, optional
        Written in place and returned if given: shape ``(batch, seqlen_q, heads_q, head_dim_v)``, type of `q`, any
        strides. It must not overlap an input.
    lse : numpy.ndarray, optional
        Likewise: float32, shape ``(batch, heads_q, seqlen_q)``.
    tile_m, tile_n : int, optional
        Query rows per tile and keys per block. They change rounding, never meaning.
    speculative : bool, optional
        With `SpeculativeSoftmax`, for float16 and bfloat16.
    rescale_threshold : int, optional
        Of `OnlineSoftmax`.
    exp2_fma : int, optional
        Of `SpeculativeSoftmax`.
    key_blocks : range, optional
        Only these blocks of `tile_n` keys, as if a row saw no other: the part of a split, whose output is not rounded.

    Returns
    -------
    out : numpy.ndarray
        Type of `q`, or with `key_blocks` float32; 0 in rows that see no key.
    lse : numpy.ndarray
        float32, natural logarithm; in rows that see no key the sink, or -inf.

    Raises
    ------
    ValueError
        If the shapes do not fit each other, or an option is none.

    Notes
    -----
    NaN and infinities behave as in `cupyfa.oracles.dense.attention`, except for a score of -inf under a scale of 0,
    which counts as masked where ``0 * -inf`` is NaN, and for an infinity in V whose probability rounds to 0:
    ``0 * inf`` is NaN. arXiv 2407.08608, algorithm 1.

    A capped score errs by about ``2**-23 * softcap`` even where it is small, because it is taken relative to the cap:
    from 1e4 on, that shows in the output.

    Examples
    --------
    >>> x = np.ones((1, 300, 2, 16), dtype=np.float16)
    >>> out, lse = attention(x, x, x, causal=True)
    >>> float(out.min()), round(float(lse[0, 0, -1]), 3) == round(4 + float(np.log(300)), 3)
    (1.0, True)
    """
    check_shapes(q, k, v)
    check_range("attention", 1, tile_m=tile_m, tile_n=tile_n)
    check_softcap(softcap)
    window_bounds(causal, window_size)
    (batch, seqlen_q, heads_q, head_dim), seqlen_k = q.shape, k.shape[1]
    slopes = per_head("alibi_slopes", alibi_slopes, batch, heads_q, np.float32, of_batch=True)
    sinks = per_head("sink", sink, batch, heads_q, np.float32)
    bias = per_score(bias, (batch, heads_q, seqlen_q, seqlen_k))
    out_dtype = q.dtype if key_blocks is None else np.dtype(np.float32)
    out = _result("out", out, (batch, seqlen_q, heads_q, v.shape[3]), out_dtype)
    lse = _result("lse", lse, (batch, heads_q, seqlen_q), np.dtype(np.float32))

    def make_mask(begin: int, end: int) -> TileMask:
        return TileMask(begin, end, seqlen_q, seqlen_k, tile_n, causal, window_size)

    def make_softmax(shape: tuple[int, ...], scale_log2: np.float32 | None) -> OnlineSoftmax | SpeculativeSoftmax:
        if speculative:
            return SpeculativeSoftmax(shape, scale_log2, q.dtype, exp2_fma)
        return OnlineSoftmax(shape, scale_log2, rescale_threshold)

    scale = resolve_scale(softmax_scale, head_dim)
    elements = _group_size(seqlen_q, seqlen_k, tile_m, tile_n)
    if key_blocks is None:
        key_blocks = range(-(-seqlen_k // tile_n))
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        if seqlen_k == 0:
            out[...] = 0
            _, lse[...] = OnlineSoftmax(lse.shape, 1.0).finish(_columns(sinks))
            return out, lse
        for b, h, Q, K, V in head_groups(q, k, v, np.float32, elements):
            score_mod = ScoreMod(scale, softcap, _columns(slopes, b, h), None if bias is None else bias[b, h])
            out[b, :, h], lse[b, h] = _consume(
                Q,
                K,
                V,
                score_mod,
                _columns(sinks, b, h),
                (tile_m, tile_n),
                (q.dtype, out.dtype),
                key_blocks,
                make_mask,
                make_softmax,
            )
    return out, lse


def _columns(values: Array | None, *pairs: npt.NDArray[np.intp]) -> Array | None:
    """Return the values of some (batch, head) pairs, all by default, for all rows and keys: ``(..., 1, 1)``."""
    return None if values is None else values[pairs][..., None, None]


def _group_size(seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int) -> int:
    """How many scores the heads that are worked on together may have, so that one step's stay within the budget."""
    step = min(seqlen_q, tile_m) * min(seqlen_k, tile_n)
    return min(_STEP_BUDGET * max(1, seqlen_q * seqlen_k // step), 2**23) if step else _STEP_BUDGET


def _result(name: str, array: Array | None, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return the caller's result array, checked, or a new one."""
    if array is None:
        return np.empty(shape, dtype=dtype)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"attention: {name} is {array.dtype} {array.shape}; it must be {dtype} {shape}")
    return array
