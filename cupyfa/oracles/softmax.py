"""The softmax of score rows that arrive block by block, exact and speculative: twins of the kernel's.

`OnlineSoftmax` is ``cuda/softmax.cuh``, `SpeculativeSoftmax` is ``cuda/speculative_softmax.cuh``; the loop around them
is in `cupyfa.oracles.online`, which also says what still differs.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .logits import NaturalLogits, ScaledScores
from .violations import ContractViolation

__all__ = ["OnlineSoftmax", "SpeculativeSoftmax"]

Float32Array = npt.NDArray[np.float32]

# The accumulator layout of WGMMA: a warp has 16 of a warpgroup's 64 rows. Four threads share a row, and each of them
# has two neighbouring columns of every eight.
_WARP_ROWS = 16
_SUMS = 8


class _Softmax:
    """What the two kinds share: rows with a sum, against a reference."""

    def __init__(self, shape: tuple[int, ...], scale_log2: float | np.float32 | None) -> None:
        self.logits: ScaledScores | NaturalLogits
        self.logits = NaturalLogits() if scale_log2 is None else ScaledScores(scale_log2)
        self.sum: Float32Array = np.zeros((*shape, 1), dtype=np.float32)

    def _check(self, scores: Float32Array) -> None:
        """Refuse a block that is not made of this softmax' rows."""
        if scores.shape[:-1] != self.sum.shape[:-1] or not scores.shape[-1]:
            wanted = (*self.sum.shape[:-1], "keys")
            raise ContractViolation(f"softmax: scores have shape {scores.shape}; they must be {wanted}")

    def _exponentials(
        self, scores: Float32Array, scale: np.float32 | Float32Array, reference: Float32Array
    ) -> Float32Array:
        """Return ``exp2(fma(score, scale, -reference))``."""
        result = self._exponents(scores, scale, reference)
        np.exp2(result, out=result)
        return result

    def _exponents(
        self, scores: Float32Array, scale: np.float32 | Float32Array, reference: Float32Array
    ) -> Float32Array:
        """Return ``fma(score, scale, -reference)``: float64 holds the product exactly."""
        exponents = scores.astype(np.float64)
        exponents *= scale.astype(np.float64)
        exponents -= reference
        return exponents.astype(np.float32)

    def _finish(
        self, reference: Float32Array, empty: npt.NDArray[np.bool_], sink: Float32Array | None
    ) -> tuple[Float32Array, Float32Array]:
        """Return the factor that normalises O, and the lse."""
        zero, one = np.float32(0), np.float32(1)
        logit = np.full_like(reference, -np.inf) if sink is None else self.logits.of_natural(sink)
        # The sink may be the larger one: relative to it nothing overflows, and a row without keys has it as its lse.
        maximum = np.fmax(reference, logit)
        origin = np.where(np.isneginf(maximum), zero, maximum)
        shrink = self.logits.exponential(reference - origin)  # without a sink 1
        product = self.sum.astype(np.float64) * shrink
        total: Float32Array = (product + self.logits.exponential(logit - origin)).astype(np.float32)  # an fma
        # The sum of a row without keys is 0. It is NaN if all of a row's scores are: no maximum shows them.
        inverse: Float32Array = np.where(empty, self.sum, shrink * (one / np.where(empty, one, total)))
        lse = self.logits.lse(maximum, total)  # without keys and sink: -inf + -inf
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
    scale_log2 : float or None
        What makes logits in base 2 of the scores: rounded to float32, and positive, so that masked scores stay -inf.
        None: they are natural logits, see `cupyfa.oracles.logits`.
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

    def __init__(self, shape: tuple[int, ...], scale_log2: float | np.float32 | None, threshold: int = 0) -> None:
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
            scale = self.logits.scale(maximum)
            near = maximum * scale - self.maximum * scale <= self.threshold  # not where the old one is -inf
            maximum = np.where(_whole_warps(near), self.maximum, maximum)
        # A row that has seen no key has -inf: any finite reference makes its exponentials 0 rather than NaN.
        scale = self.logits.scale(maximum)
        reference = np.where(np.isneginf(maximum), np.float32(0), maximum * scale)
        shrink = np.exp2(self.maximum * scale - reference)
        self.maximum = maximum
        scores = self._exponentials(scores, scale, reference)
        self.sum = self.sum * shrink + scores.sum(axis=-1, keepdims=True)
        return scores, shrink

    def finish(self, sink: Float32Array | None = None) -> tuple[Float32Array, Float32Array]:
        """Close the rows.

        Parameters
        ----------
        sink : numpy.ndarray, optional
            float32, broadcast to ``(..., rows, 1)``: a further logit, a natural one, that has no value; -inf for none.

        Returns
        -------
        inverse : numpy.ndarray
            float32, ``(..., rows, 1)``: the factor that normalises O; 0 for a row without keys.
        lse : numpy.ndarray
            float32, ``(..., rows)``, natural logarithm; for a row without keys the sink, or -inf.
        """
        # Told by the maximum: a sum that has vanished otherwise must not pass for "no key".
        return self._finish(self.logits.kept(self.maximum), np.isneginf(self.maximum), sink)


class SpeculativeSoftmax(_Softmax):
    """The softmax against a retained maximum, with the kernel's decisions (0x09).

    A block's probabilities are taken relative to an old maximum, and summed: a row has eight sums in each block, of the
    columns that are congruent modulo 8. If those of a warp's 16 rows are all below `limit`, the block is done. If not,
    the 16 rows take their new maxima, and the block is computed again. Where a maximum grew so far that a like growth
    may put the next block out of range, the warp takes the new maxima of that one at once.

    It is `cupyfa.oracles.retained.RetainedSoftmax` with ``omega = 0`` and another condition (arXiv 2603.05451, section
    3.1.4, compares the maximum instead). A key is kept in the old frame for certain while it lies less than
    ``log2(limit / n)`` above the reference, where n is the number of columns in a sum, and never from ``log2(limit)``
    on: 56 to 60 for bfloat16 and 11 to 15 for float16 in blocks of 128.

    Attributes
    ----------
    reference : numpy.ndarray
        float32, ``(..., rows, 1)``: the maximum of the scores at hand when it was taken, scaled unless they are natural
        logits; the true one may be larger. -inf before the first key: no block is in range then.
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
    scale_log2 : float or None
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
        self, shape: tuple[int, ...], scale_log2: float | np.float32 | None, dtype: npt.DTypeLike, exp2_fma: int = 0
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
            # As in OnlineSoftmax, but kept maxima are compared.
            maximum = np.fmax(self.reference, self.logits.kept(np.fmax.reduce(scores, axis=-1, keepdims=True)))
            scale = self.logits.scale(maximum)
            reference = np.where(np.isneginf(maximum), np.float32(0), self.logits.in_frame(maximum, maximum))
            shrink = np.where(moves, np.exp2(self.logits.in_frame(self.reference, maximum) - reference), shrink)
            # So much in all columns of a sum makes it the limit. A first key tells nothing about the next block.
            expected = self.limit / -(-scores.shape[-1] // _SUMS)
            calm = (shrink > 1 / expected) | np.isneginf(self.reference)
            self.try_next = _whole_warps(calm)
            self.reference = np.where(moves, maximum, self.reference)
            probabilities = np.where(moves, self._exponentials(scores, scale, reference), probabilities)
            sums = _block_sums(probabilities)
        self.sum = self.sum * shrink + sums.sum(axis=-1, keepdims=True)
        return probabilities, shrink

    def _tried(self, scores: Float32Array) -> Float32Array:
        """Return the probabilities of a block relative to the references at hand."""
        scale, reference = self.logits.scale(self.reference), self.logits.in_frame(self.reference, self.reference)
        if not self.exp2_fma:
            return self._exponentials(scores, scale, reference)
        from .exp2.polynomial import exp2_polynomial  # noqa: PLC0415 - for comparisons: not with the library

        exponents = self._exponents(scores, scale, reference)
        probabilities = np.exp2(exponents)
        group = np.arange(scores.shape[-1]) // _SUMS
        on_fma = group * self.exp2_fma % 8 + self.exp2_fma >= 8  # evenly spread
        clamped = np.minimum(exponents[..., on_fma], np.float32(127))
        # A NaN, which the polynomial takes for a large number, is out of range either way.
        probabilities[..., on_fma] = np.where(np.isnan(clamped), clamped, exp2_polynomial(clamped))
        return probabilities

    def finish(self, sink: Float32Array | None = None) -> tuple[Float32Array, Float32Array]:
        """Close the rows.

        Parameters
        ----------
        sink : numpy.ndarray, optional
            As of `OnlineSoftmax.finish`.

        Returns
        -------
        inverse, lse : numpy.ndarray
            As of `OnlineSoftmax.finish`.
        """
        return self._finish(self.reference, np.isneginf(self.reference), sink)


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
