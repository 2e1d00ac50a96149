"""The tiled online recurrence: twin of the kernel's consumer loop, and the library's CPU backend.

`OnlineSoftmax` is ``cuda/softmax.cuh``, `SpeculativeSoftmax` is ``cuda/speculative_softmax.cuh``; the loop around them
is ``Consumer`` of ``cuda/hopper/consumer.cuh``. Names, order of steps, decisions and rounding points
are the kernel's. A query tile visits its key blocks from the last to the first, keeps the running ``maximum`` and
``sum`` of each row and an unnormalised output ``O``, and shrinks ``O`` and ``sum`` whenever the maximum grows (arXiv
2407.08608, algorithm 1; specification 0x01, 0x03 and 0x05), or only when it has grown far (0x09). Asynchrony changes
when the kernel does each step, never what it computes.

What still differs:

* The order of additions. BLAS adds the products of a score or an output in its own order and rounds to nearest; the
  tensor core adds several at a time and truncates. A row has one running sum here, the kernel eight, one for each sum
  of a block that decides in `SpeculativeSoftmax`. It adds the blocks that an `OnlineSoftmax` or a correction takes in
  to them term by term, and may contract the first product and sum of each into an fma.
* exp2 and log2 are good to about an ulp of float32 here; the GPU approximates them to about 2**-22. It also flushes
  subnormal numbers to 0.
* The fma of a score is rounded to float64 and then to float32: half an ulp off in about one of 2**29 cases.
* An unseen key adds nothing to the output here, whatever its value is; to rows that see another key the GPU adds
  ``0 * value``, which is NaN where the value is NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from .dense import check_shapes, head_groups, resolve_scale
from .exp2.polynomial import exp2_polynomial
from .mask import TileMask, weighted_sum
from .violations import ContractViolation, check_range

__all__ = ["OnlineSoftmax", "SpeculativeSoftmax", "attention", "round_to"]

Array = npt.NDArray[np.floating]
Float32Array = npt.NDArray[np.float32]

# Scores of one step over all the heads that are worked on together: they stay in a core's cache.
_STEP_BUDGET = 2**18
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
_LN2 = np.float32(math.log(2))
# The accumulator layout of WGMMA: a warp has 16 of a warpgroup's 64 rows. Four threads share a row, and each of them
# has two neighbouring columns of every eight.
_WARP_ROWS = 16
_SUMS = 8


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


class _Softmax:
    """What the two kinds share: rows with a sum, against a reference."""

    def __init__(self, shape: tuple[int, ...], scale_log2: float | np.float32) -> None:
        if not 0 < scale_log2 < math.inf:
            raise ContractViolation(f"softmax: scale_log2 is {scale_log2}; it must be positive and finite")
        self.scale_log2 = np.float32(scale_log2)
        self.sum: Float32Array = np.zeros((*shape, 1), dtype=np.float32)

    def scaled(self, maximum: Float32Array) -> Float32Array:
        """Return ``maximum * scale_log2``, rounded: the same maximum always gives the same reference.

        A maximum that stays then shrinks by exactly 1. An fma in the exponent of `shrink` would leave the rounding
        error of this product there, and the sum would drift by 2**-24 in each block.
        """
        return maximum * self.scale_log2

    def _check(self, scores: Float32Array) -> None:
        """Refuse a block that is not made of this softmax' rows."""
        if scores.shape[:-1] != self.sum.shape[:-1] or not scores.shape[-1]:
            wanted = (*self.sum.shape[:-1], "keys")
            raise ContractViolation(f"softmax: scores have shape {scores.shape}; they must be {wanted}")

    def _exponentials(self, scores: Float32Array, reference: Float32Array) -> Float32Array:
        """Return ``exp2(fma(score, scale_log2, -reference))``: float64 holds the product exactly."""
        exponents = scores.astype(np.float64)
        exponents *= np.float64(self.scale_log2)
        exponents -= reference
        result = exponents.astype(np.float32)
        np.exp2(result, out=result)
        return result

    def _finish(self, reference: Float32Array, empty: npt.NDArray[np.bool_]) -> tuple[Float32Array, Float32Array]:
        """Return the factor that normalises O, and the lse."""
        inverse: Float32Array = np.where(empty, np.float32(0), np.float32(1) / np.where(empty, np.float32(1), self.sum))
        lse = (reference + np.log2(self.sum)) * _LN2  # without keys: -inf + -inf
        return inverse, lse[..., 0]


class OnlineSoftmax(_Softmax):
    """The softmax of score rows that arrive block by block, in base 2 (0x01).

    Attributes
    ----------
    maximum : numpy.ndarray
        float32, ``(..., rows, 1)``: the largest raw score so far, with a threshold maybe an earlier one; -inf at first.
    sum : numpy.ndarray
        float32, ``(..., rows, 1)``: the sum of ``exp2(scale_log2 * (score - maximum))`` so far, of unrounded terms.

    Parameters
    ----------
    shape : tuple of int
        ``(..., rows)``.
    scale_log2 : float
        Rounded to float32. Positive, so that masked scores stay -inf.
    threshold : int, optional
        While no maximum of a warp's 16 rows has grown by more than this, in base 2, the old ones stay (0x09). With 0
        they always move. Row 0 is the first of a warp.

    Examples
    --------
    >>> softmax = OnlineSoftmax((1,), 0.5)
    >>> P, shrink = softmax.update(np.float32([[0.0, 2.0]]))
    >>> P, shrink
    (array([[0.5, 1. ]], dtype=float32), array([[0.]], dtype=float32))
    >>> P, shrink = softmax.update(np.float32([[6.0]]))
    >>> shrink
    array([[0.25]], dtype=float32)
    >>> inverse, lse = softmax.finish()
    >>> float(inverse[0, 0] * (1 + 0.25 * 1.5))
    1.0
    """

    def __init__(self, shape: tuple[int, ...], scale_log2: float | np.float32, threshold: int = 0) -> None:
        super().__init__(shape, scale_log2)
        self.threshold = threshold
        self.maximum: Float32Array = np.full((*shape, 1), -np.inf, dtype=np.float32)

    def update(self, scores: Float32Array) -> tuple[Float32Array, Float32Array]:
        """Take in one block of scores.

        Parameters
        ----------
        scores : numpy.ndarray
            float32, ``(..., rows, keys)``: raw, -inf where masked.

        Returns
        -------
        scores : numpy.ndarray
            float32, a new array: ``exp2(scale_log2 * (score - maximum))`` with the new maximum, not rounded yet.
        shrink : numpy.ndarray
            float32, ``(..., rows, 1)``: the factor that brings what was accumulated before into the frame of the new
            maximum.
        """
        self._check(scores)
        # fmax, as on the GPU, passes over a NaN score; its exponential is NaN, and so is the sum.
        maximum = np.fmax(self.maximum, np.fmax.reduce(scores, axis=-1, keepdims=True))
        if self.threshold:
            near = self.scaled(maximum) - self.scaled(self.maximum) <= self.threshold  # not where the old one is -inf
            maximum = np.where(_whole_warps(near), self.maximum, maximum)
        # A row that has seen no key has -inf: any finite reference makes its exponentials 0 rather than NaN.
        reference = np.where(np.isneginf(maximum), np.float32(0), self.scaled(maximum))
        shrink = np.exp2(self.scaled(self.maximum) - reference)
        self.maximum = maximum
        scores = self._exponentials(scores, reference)
        self.sum = self.sum * shrink + scores.sum(axis=-1, keepdims=True)
        return scores, shrink

    def finish(self) -> tuple[Float32Array, Float32Array]:
        """Close the rows.

        Returns
        -------
        inverse : numpy.ndarray
            float32, ``(..., rows, 1)``: the factor that normalises O; 0 for a row without keys.
        lse : numpy.ndarray
            float32, ``(..., rows)``, natural logarithm; -inf for a row without keys.
        """
        # Told by the maximum: a sum that has vanished otherwise must not pass for "no key".
        return self._finish(self.scaled(self.maximum), np.isneginf(self.maximum))


class SpeculativeSoftmax(_Softmax):
    """The softmax against a retained maximum, with the kernel's decisions (0x09).

    A block's probabilities are taken relative to an old maximum, and summed: a row has eight sums in each block, of the
    columns that are congruent modulo 8. If those of a warp's 16 rows are all below `limit`, the block is done. If not,
    the 16 rows take their new maxima, and the block is computed again. Where a maximum grew by a factor of `limit`, the
    warp expects the same of its next block and takes the new maxima at once.

    It is `cupyfa.oracles.retained.RetainedSoftmax` with ``omega = 0`` and another condition (arXiv 2603.05451, section
    3.1.4, compares the maximum instead). A key is kept in the old frame for certain while it lies less than
    ``log2(limit / n)`` above the reference, where n is the number of columns in a sum, and never from ``log2(limit)``
    on: 56 to 60 for bfloat16 and 11 to 15 for float16 in blocks of 128.

    Attributes
    ----------
    reference : numpy.ndarray
        float32, ``(..., rows, 1)``: the scaled maximum of the scores at hand when it was taken; the true one may be
        larger. -inf before the first key: no block is in range then.
    sum : numpy.ndarray
        float32, ``(..., rows, 1)``: the sum of ``exp2(scale_log2 * score - reference)`` so far, of unrounded terms.
    limit : numpy.float32
        A block is in range if its sums are below it.
    try_next : numpy.ndarray
        bool, ``(..., rows, 1)``: whether the next block is tried with the reference at hand: a warp's rows agree.
    corrections : int
        How many times a warp has taken new maxima. Each does so in its first block.
    untried : int
        How many of them without having tried the old ones. The first block of a warp, which has none, does not count.

    Parameters
    ----------
    shape : tuple of int
        ``(..., rows)``. Row 0 is the first of a warp.
    scale_log2 : float
        As in `OnlineSoftmax`.
    dtype : data-type
        What P is rounded to: float16 or bfloat16.
    exp2_fma : int, optional
        Of eight groups of eight columns, in so many the probabilities that are tried come from a polynomial (0x09).

    Examples
    --------
    >>> softmax = SpeculativeSoftmax((1,), 1.0, np.float16)
    >>> P, shrink = softmax.update(np.float32([[0.0, -1.0]]))
    >>> P, softmax.corrections
    (array([[1. , 0.5]], dtype=float32), 1)
    >>> P, shrink = softmax.update(np.float32([[14.0, 14.0]]))  # in range: these columns belong to two sums
    >>> P, float(shrink[0, 0]), softmax.corrections
    (array([[16384., 16384.]], dtype=float32), 1.0, 1)
    >>> P, shrink = softmax.update(np.float32([[15.0, 14.0]]))
    >>> P, float(shrink[0, 0]) == 2.0**-15, softmax.corrections
    (array([[1. , 0.5]], dtype=float32), True, 2)
    """

    LIMITS: Final = {"bfloat16": 2.0**60, "float16": 2.0**15}

    def __init__(
        self, shape: tuple[int, ...], scale_log2: float | np.float32, dtype: npt.DTypeLike, exp2_fma: int = 0
    ) -> None:
        super().__init__(shape, scale_log2)
        self.exp2_fma = exp2_fma
        name = np.dtype(dtype).name
        if name not in self.LIMITS:
            raise ContractViolation(f"softmax: dtype is {name}; it must be one of {', '.join(self.LIMITS)}")
        self.limit = np.float32(self.LIMITS[name])
        self.reference: Float32Array = np.full((*shape, 1), -np.inf, dtype=np.float32)
        self.try_next: npt.NDArray[np.bool_] = np.ones((*shape, 1), dtype=np.bool_)
        self.corrections = self.untried = 0

    def update(self, scores: Float32Array) -> tuple[Float32Array, Float32Array]:
        """Take in one block of scores.

        Parameters
        ----------
        scores : numpy.ndarray
            float32, ``(..., rows, keys)``: raw, -inf where masked. Column 0 is the first of a block.

        Returns
        -------
        scores : numpy.ndarray
            float32, a new array: ``exp2(scale_log2 * score - reference)`` with the reference after this block, not
            rounded yet.
        shrink : numpy.ndarray
            float32, ``(..., rows, 1)``: the factor that brings what was accumulated before into the frame of this
            reference: 1 in rows that were in range.
        """
        self._check(scores)
        with np.errstate(over="ignore", invalid="ignore"):  # out of range, or no reference yet: corrected below
            probabilities = self._tried(scores)
            sums = _block_sums(probabilities)
        in_range = np.all(sums < self.limit, axis=-1, keepdims=True)  # a NaN is not
        moves = ~_whole_warps(in_range & self.try_next)
        shrink = np.ones_like(self.sum)
        if moves.any():
            self.corrections += int(np.count_nonzero(moves[..., ::_WARP_ROWS, :]))
            self.untried += int(np.count_nonzero(~self.try_next[..., ::_WARP_ROWS, :]))
            # As in OnlineSoftmax, but scaled maxima are compared.
            maximum = np.fmax(self.reference, self.scaled(np.fmax.reduce(scores, axis=-1, keepdims=True)))
            reference = np.where(np.isneginf(maximum), np.float32(0), maximum)
            shrink = np.where(moves, np.exp2(self.reference - reference), shrink)
            # A first key tells nothing about the next block.
            calm = (shrink > 1 / self.limit) | np.isneginf(self.reference)
            self.try_next = _whole_warps(calm)
            self.reference = np.where(moves, maximum, self.reference)
            probabilities = np.where(moves, self._exponentials(scores, reference), probabilities)
            sums = _block_sums(probabilities)
        self.sum = self.sum * shrink + sums.sum(axis=-1, keepdims=True)
        return probabilities, shrink

    def _tried(self, scores: Float32Array) -> Float32Array:
        """Return the probabilities of a block relative to the references at hand."""
        if not self.exp2_fma:
            return self._exponentials(scores, self.reference)
        exponents = (scores.astype(np.float64) * np.float64(self.scale_log2) - self.reference).astype(np.float32)
        probabilities = np.exp2(exponents)
        group = np.arange(scores.shape[-1]) // _SUMS
        on_fma = group * self.exp2_fma % 8 + self.exp2_fma >= 8  # evenly spread
        clamped = np.minimum(exponents[..., on_fma], np.float32(127))
        # A NaN, which the polynomial takes for a large number, is out of range either way.
        probabilities[..., on_fma] = np.where(np.isnan(clamped), clamped, exp2_polynomial(clamped))
        return probabilities

    def finish(self) -> tuple[Float32Array, Float32Array]:
        """Close the rows.

        Returns
        -------
        inverse, lse : numpy.ndarray
            As of `OnlineSoftmax.finish`.
        """
        return self._finish(self.reference, np.isneginf(self.reference))


def _whole_warps(rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return, for each row, whether all rows of its warp are true: bool, ``(..., rows, 1)``."""
    warps = np.logical_and.reduceat(rows, np.arange(0, rows.shape[-2], _WARP_ROWS), axis=-2)
    return np.repeat(warps, _WARP_ROWS, axis=-2)[..., : rows.shape[-2], :]


def _block_sums(probabilities: Float32Array) -> Float32Array:
    """Return a block's sums, each of one thread and column parity: float32, ``(..., rows, 8)``, in order of columns."""
    sums = np.zeros((*probabilities.shape[:-1], _SUMS), dtype=np.float32)
    for begin in range(0, probabilities.shape[-1], _SUMS):
        columns = probabilities[..., begin : begin + _SUMS]
        sums[..., : columns.shape[-1]] += columns
    return sums


def _mainloop(
    softmax: OnlineSoftmax | SpeculativeSoftmax,
    Q: Float32Array,
    K: list[Float32Array],
    V: list[Float32Array],
    mask: TileMask,
    dtype: npt.DTypeLike,
) -> Float32Array:
    """Return the unnormalised output of a tile: ``Q`` is (heads, rows, d); ``K[j]``, ``V[j]`` are (heads, keys, d)."""
    blocks = mask.blocks
    O = np.zeros((*Q.shape[:-1], V[0].shape[-1]), dtype=np.float32)
    for j in reversed(range(blocks.first, blocks.end)):
        scores = Q @ K[j].swapaxes(-1, -2)
        if j >= blocks.full:
            scores = mask.apply(scores, j)
        scores, shrink = softmax.update(scores)
        O *= shrink
        P = round_to(scores, dtype)
        O += weighted_sum(P, V[j], mask.block(j) if j >= blocks.full else None)
    return O


def _consume(
    Q: Float32Array,
    K: Float32Array,
    V: Float32Array,
    scale: float,
    causal: bool,
    tiles: tuple[int, int],
    dtype: npt.DTypeLike,
    make_softmax: Callable[[tuple[int, ...], np.float32], OnlineSoftmax | SpeculativeSoftmax],
) -> tuple[Array, Float32Array]:
    """Work through the query tiles of some heads; every array is (heads, seqlen, d)."""
    (heads, seqlen_q, _), seqlen_k, (tile_m, tile_n) = Q.shape, K.shape[1], tiles
    if scale < 0:
        Q = -Q
    # A scale of 0 becomes the smallest number: scores still vanish against it, but a masked score stays -inf.
    scale_log2 = np.float32(max(abs(scale) * math.log2(math.e), _SMALLEST_SCALE))
    K_blocks = [K[:, n : n + tile_n] for n in range(0, seqlen_k, tile_n)]
    V_blocks = [V[:, n : n + tile_n] for n in range(0, seqlen_k, tile_n)]
    out = np.empty((heads, seqlen_q, V.shape[-1]), dtype=dtype)
    lse = np.empty((heads, seqlen_q), dtype=np.float32)
    for row in range(0, seqlen_q, tile_m):
        rows = slice(row, min(row + tile_m, seqlen_q))
        mask = TileMask(rows.start, rows.stop, seqlen_q, seqlen_k, tile_n, causal)
        softmax = make_softmax((heads, rows.stop - rows.start), scale_log2)
        O = _mainloop(softmax, Q[:, rows], K_blocks, V_blocks, mask, dtype)
        inverse, lse[:, rows] = softmax.finish()
        out[:, rows] = (O * inverse).astype(dtype)
    return out, lse


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
    speculative: bool = False,
    rescale_threshold: int = 0,
    exp2_fma: int = 0,
) -> tuple[Array, Float32Array]:
    """Compute attention as the kernel does, block by block (0x01).

    Scores are ``q @ k.T``, or ``-q @ k.T`` for a negative scale; ``exp2`` replaces ``exp``, with the factor
    ``float32(abs(softmax_scale) * log2(e))`` in its argument. ``P`` is rounded to the input type before it multiplies
    ``v``; the row sum takes the unrounded values.

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
    speculative : bool, optional
        With `SpeculativeSoftmax`, for float16 and bfloat16.
    rescale_threshold : int, optional
        Of `OnlineSoftmax`.
    exp2_fma : int, optional
        Of `SpeculativeSoftmax`.

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
    NaN and infinities behave as in `cupyfa.oracles.dense.attention`, except for a score of -inf under a scale of 0,
    which counts as masked where ``0 * -inf`` is NaN, and for an infinity in V whose probability rounds to 0:
    ``0 * inf`` is NaN. arXiv 2407.08608, algorithm 1.

    Examples
    --------
    >>> x = np.ones((1, 300, 2, 16), dtype=np.float16)
    >>> out, lse = attention(x, x, x, causal=True)
    >>> float(out.min()), round(float(lse[0, 0, -1]), 3) == round(4 + math.log(300), 3)
    (1.0, True)
    """
    check_shapes(q, k, v)
    check_range("attention", 1, tile_m=tile_m, tile_n=tile_n)
    (batch, seqlen_q, heads_q, head_dim), seqlen_k = q.shape, k.shape[1]
    out = _result("out", out, (batch, seqlen_q, heads_q, v.shape[3]), q.dtype)
    lse = _result("lse", lse, (batch, heads_q, seqlen_q), np.dtype(np.float32))
    if seqlen_k == 0:
        out[...] = 0
        lse[...] = -np.inf
        return out, lse

    def make_softmax(shape: tuple[int, ...], scale_log2: np.float32) -> OnlineSoftmax | SpeculativeSoftmax:
        if speculative:
            return SpeculativeSoftmax(shape, scale_log2, q.dtype, exp2_fma)
        return OnlineSoftmax(shape, scale_log2, rescale_threshold)

    scale = resolve_scale(softmax_scale, head_dim)
    elements = _group_size(seqlen_q, seqlen_k, tile_m, tile_n)
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        for b, h, Q, K, V in head_groups(q, k, v, np.float32, elements):
            out[b, :, h], lse[b, h] = _consume(Q, K, V, scale, causal, (tile_m, tile_n), q.dtype, make_softmax)
    return out, lse


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
