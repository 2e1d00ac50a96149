"""What makes logits of raw scores: scale, softcap, bias and slopes. The twin of ``cuda/score_mod.cuh``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .mask import TileMask

__all__ = ["ScoreMod", "fma"]

Array = npt.NDArray[np.floating]
Float32Array = npt.NDArray[np.float32]

_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
_LOG2_E = math.log2(math.e)


def fma(a: Float32Array | np.float32, b: Float32Array, c: Float32Array | np.float32) -> Float32Array:
    """Return ``a * b + c``, rounded to float64 and then to float32: float64 holds the product exactly (0x01).

    Parameters
    ----------
    a, b, c : numpy.ndarray
        float32.

    Returns
    -------
    numpy.ndarray
        float32. `cupyfa.oracles.float32.fma_rn` rounds once, and takes far longer.

    Examples
    --------
    >>> float(fma(np.float32(3), np.float32([2.0]), np.float32(1))[0])
    7.0
    """
    result: Float32Array = (a * b.astype(np.float64) + c).astype(np.float32)
    return result


@dataclass(frozen=True)
class ScoreMod:
    """What makes logits of the raw scores of some heads: by itself, or as the scale of the softmax (0x01).

    Attributes
    ----------
    scale : float
        Factor of the scores; its sign is the caller's part, in Q.
    softcap : float or None
        What scaled scores are capped at.
    slopes : numpy.ndarray or None
        float32, ``(heads, 1, 1)``.
    bias : numpy.ndarray or None
        ``(heads, seqlen_q, seqlen_k)``.
    """

    scale: float
    softcap: float | None
    slopes: Float32Array | None
    bias: Array | None

    def _factor(self, base: float) -> np.float32:
        """Return what makes logits of the scores, capped or not; the sign of the scale is in Q."""
        scale = abs(self.scale) if self.softcap is None else 2 * self.softcap
        # A scale of 0 becomes the smallest number: scores still vanish against it, but a masked score stays -inf.
        return np.float32(max(scale * base, _SMALLEST_SCALE))

    @property
    def scale_of_softmax(self) -> np.float32 | None:
        """What the softmax scales by: 1 where it gets logits, None where these are natural ones."""
        if self.bias is not None:
            return None
        return self._factor(_LOG2_E) if self.slopes is None else np.float32(1)

    @property
    def shift(self) -> np.float32:
        """By how much the softmax' logits are too small: natural."""
        return np.float32(self.softcap or 0)

    def cap(self, scores: Float32Array) -> Float32Array:
        """Return ``(tanh(scaled score / softcap) - 1) / 2``, or without a softcap the scores.

        Parameters
        ----------
        scores : numpy.ndarray
            Raw ones.

        Returns
        -------
        numpy.ndarray
            float32, same shape.
        """
        if self.softcap is None:
            return scores
        # c tanh(x) - c = -2 c / (exp(2 x) + 1), which is 0 or -2 c once the exponential is infinite or 0.
        e = np.exp2(scores * np.float32(2 * _LOG2_E * abs(self.scale) / self.softcap))
        result: Float32Array = np.float32(1) / (np.float32(-1) - e)
        return result

    def derivative(self, capped: Float32Array) -> Float32Array:
        """Return what a capped and scaled score changes by when the scaled one does: ``1 - tanh(x)^2``.

        Parameters
        ----------
        capped : numpy.ndarray
            From `cap`, with a softcap.

        Returns
        -------
        numpy.ndarray
            float32, same shape.
        """
        result: Float32Array = np.float32(-4) * capped * (np.float32(1) + capped)
        return result

    def apply(self, capped: Float32Array, mask: TileMask, j: int) -> Float32Array:
        """Return what the softmax gets of block `j` where it is not masked.

        Parameters
        ----------
        capped : numpy.ndarray
            From `cap`: ``(heads, rows, keys of the block)``.
        mask : TileMask
            Of the rows.
        j : int
            Index of the block.

        Returns
        -------
        numpy.ndarray
            float32, same shape.
        """
        scores = capped
        if self.bias is not None:
            of_block = self.bias[:, mask.row_begin : mask.row_end, mask.keys(j)]
            scores = fma(self._factor(1), scores, of_block.astype(np.float32))
        if self.slopes is None:
            return scores
        distance = np.abs(mask.keys(j) - mask.diagonal[:, None]).astype(np.float32)
        if self.bias is not None:
            return fma(-self.slopes, distance, scores)
        return fma(-(self.slopes * np.float32(_LOG2_E)), distance, scores * self._factor(_LOG2_E))
