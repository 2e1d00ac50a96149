"""What the scores of a softmax are: how they become logits in base 2, and in which base a row is closed.

The twins of ``ScaledScores`` and ``NaturalLogits`` in ``cuda/logits.cuh``.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .violations import ContractViolation

__all__ = ["NaturalLogits", "ScaledScores"]

Float32Array = npt.NDArray[np.float32]

_LN2 = np.float32(math.log(2))
_LOG2_E = np.float32(math.log2(math.e))


class ScaledScores:
    """Scores that a positive number turns into logits in base 2; rows are closed in base 2 (0x01).

    Parameters
    ----------
    scale_log2 : float
        Rounded to float32. Positive, so that masked scores stay -inf.

    Examples
    --------
    >>> ScaledScores(0.5).kept(np.float32([3.0]))
    array([1.5], dtype=float32)
    """

    def __init__(self, scale_log2: float | np.float32) -> None:
        if not 0 < scale_log2 < math.inf:
            raise ContractViolation(f"softmax: scale_log2 is {scale_log2}; it must be positive and finite")
        self.scale_log2 = np.float32(scale_log2)

    def scale(self, maximum: Float32Array) -> np.float32 | Float32Array:
        """Return the factor of the scores of rows with these maxima."""
        return self.scale_log2

    def kept(self, maximum: Float32Array) -> Float32Array:
        """Return what a retained reference keeps of a maximum: the product, rounded.

        A maximum that stays then shrinks by exactly 1. An fma in the exponent of `shrink` would leave the rounding
        error of this product there, and the sum would drift by 2**-24 in each block.
        """
        return maximum * self.scale_log2

    def in_frame(self, kept: Float32Array, of: Float32Array) -> Float32Array:
        """Return a kept maximum as the reference of exponents, in the frame of another one."""
        return kept

    def of_natural(self, logit: Float32Array) -> Float32Array:
        """Return a natural logit in the base of the references."""
        return logit * _LOG2_E

    def exponential(self, logit: Float32Array) -> Float32Array:
        """Return the exponential of a difference of references."""
        result: Float32Array = np.exp2(logit)
        return result

    def lse(self, reference: Float32Array, total: Float32Array) -> Float32Array:
        """Return the natural logarithm of a sum relative to a reference."""
        return (reference + np.log2(total)) * _LN2


class NaturalLogits:
    """Scores that are natural logits, of any size: a bias may be the most negative number of its type (0x01).

    In base 2 that overflows, and a row of nothing else would pass for one that sees no key. So large maxima have
    another factor: two floats that differ do so by 2**104 there, and any factor makes an exponential of 0 of that.

    Examples
    --------
    >>> NaturalLogits().scale(np.float32([3.0, np.finfo(np.float32).min]))
    array([1.442695, 0.5     ], dtype=float32)
    """

    def scale(self, maximum: Float32Array) -> Float32Array:
        """Return the factor of the scores of rows with these maxima."""
        return np.where(np.abs(maximum) > np.float32(2.0**127), np.float32(0.5), _LOG2_E)

    def kept(self, maximum: Float32Array) -> Float32Array:
        """Return what a retained reference keeps of a maximum: all of it."""
        return maximum

    def in_frame(self, kept: Float32Array, of: Float32Array) -> Float32Array:
        """Return a kept maximum as the reference of exponents, in the frame of another one."""
        return kept * self.scale(of)

    def of_natural(self, logit: Float32Array) -> Float32Array:
        """Return a natural logit in the base of the references."""
        return logit

    def exponential(self, logit: Float32Array) -> Float32Array:
        """Return the exponential of a difference of references."""
        result: Float32Array = np.exp2(logit * _LOG2_E)
        return result

    def lse(self, reference: Float32Array, total: Float32Array) -> Float32Array:
        """Return the natural logarithm of a sum relative to a reference."""
        result: Float32Array = (np.log2(total) * np.float64(_LN2) + reference).astype(np.float32)  # an fma
        return result
