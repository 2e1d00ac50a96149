"""What a kernel multiplies scores by: the numbers of the parameters that a softmax_scale and a softcap make."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

__all__ = ["Scales"]

_LOG2_E = math.log2(math.e)
_SMALLEST = float(np.finfo(np.float32).tiny)


class Scales(NamedTuple):
    """As ``FwdParams`` in ``cuda/params.h`` has them.

    Attributes
    ----------
    scale, scale_log2
        Of scores, or of capped ones, and in base 2.
    softcap_slope
        Of scores in a softcap; 0 without one.
    """

    scale: float
    scale_log2: float
    softcap_slope: float

    @classmethod
    def of(cls, softmax_scale: float, softcap: float | None) -> Scales:
        """Return the scales of a problem.

        The sign of `softmax_scale` is in the spec or in a flag. A scale of 0 becomes the smallest number: scores still
        vanish against it, but a masked score stays -inf, where -inf * 0 would be NaN. Capped scores are from -1 to 0.

        Parameters
        ----------
        softmax_scale : float
            Finite.
        softcap : float or None
            Positive; None: no cap.

        Returns
        -------
        Scales
            None of the first two is 0.

        Examples
        --------
        >>> Scales.of(-0.5, None).scale, Scales.of(0.5, 20.0).scale
        (0.5, 40.0)
        """
        scale = abs(softmax_scale) if softcap is None else 2 * softcap
        slope = 0.0 if softcap is None else 2 * _LOG2_E * abs(softmax_scale) / softcap
        return cls(max(scale, _SMALLEST), max(scale * _LOG2_E, _SMALLEST), slope)
