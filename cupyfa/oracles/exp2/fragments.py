"""Which entries of a score row go to the polynomial and which to the exponential unit (specification 0x09).

A row is cut into fragments of 32 entries. Within fragment ``j`` of ``F`` the entries go in pairs ``(k, k + 1)``; a pair
takes the polynomial exactly if

    k mod freq >= freq - res      and      start <= j < F - 1

and ``freq = 0`` turns it off. The last fragment always stays with the exponential unit, and the first `start` do too.
So the fraction is a consequence of three integers and the row length, never a setting of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .polynomial import DEGREE_3, exp2_hardware, exp2_polynomial

__all__ = ["FRAGMENT", "TUNING", "Emulation", "mixed_exp2"]

FRAGMENT = 32
"""Entries per fragment."""


@dataclass(frozen=True)
class Emulation:
    """The three integers that decide who computes which exponential (0x09).

    Attributes
    ----------
    freq : int
        Period within a fragment, in entries; 0 for no emulation at all.
    res : int
        How many entries at the end of each period are emulated; even, at most `freq`.
    start : int
        First fragment that takes part.

    Examples
    --------
    >>> Emulation(freq=10, res=4, start=1).count(128)
    24
    >>> Emulation(10, 4, 1).emulated(128).reshape(4, 32).sum(axis=1).tolist()
    [0, 12, 12, 0]
    """

    freq: int
    res: int
    start: int

    def __post_init__(self) -> None:
        if self.freq < 0 or self.res < 0 or self.start < 0:
            raise ValueError(f"emulation: {self} has a negative number")
        if self.freq % 2 or self.res % 2 or (self.freq and self.res > self.freq):
            raise ValueError(f"emulation: {self}; freq and res must be even, as entries go in pairs, and res <= freq")

    def emulated(self, keys: int) -> npt.NDArray[np.bool_]:
        """Tell which entries of a row are emulated.

        Parameters
        ----------
        keys : int
            Entries of the row; a multiple of 32.

        Returns
        -------
        numpy.ndarray
            Booleans, shape ``(keys,)``.
        """
        if keys < FRAGMENT or keys % FRAGMENT:
            raise ValueError(f"emulation: a row of {keys} entries is no multiple of a fragment of {FRAGMENT}")
        if self.freq == 0:
            return np.zeros(keys, dtype=np.bool_)
        fragment, entry = np.divmod(np.arange(keys), FRAGMENT)
        k = entry - entry % 2  # the pair decides by its first entry
        chosen: npt.NDArray[np.bool_] = (k % self.freq >= self.freq - self.res) & (fragment >= self.start)
        return chosen & (fragment < keys // FRAGMENT - 1)

    def count(self, keys: int) -> int:
        """Return how many entries of a row of `keys` are emulated."""
        return int(self.emulated(keys).sum())


TUNING = {
    "SM100 2-CTA full d=128": Emulation(10, 4, 1),
    "SM100 1-CTA causal d=128": Emulation(16, 4, 1),
    "SM100 2-CTA full d=192": Emulation(16, 4, 0),
    "SM100 1-CTA causal d=192": Emulation(32, 4, 1),
    "SM100 2-CTA d=256": Emulation(14, 6, 0),
    "SM103": Emulation(0, 4, 0),
}
"""The pinned source's choices. SM103 computes exponentials faster and needs none."""


def mixed_exp2(
    x: npt.ArrayLike, emulation: Emulation, coefficients: npt.ArrayLike = DEGREE_3
) -> npt.NDArray[np.float32]:
    """Compute 2**x of score rows, part by the polynomial and part by the exponential unit (0x09).

    Parameters
    ----------
    x : array_like of float
        Shape ``(..., keys)``, `keys` a multiple of 32; rounded to float32.
    emulation : Emulation
        Who computes which entry.
    coefficients : array_like of float, optional
        The polynomial; degree 3 by default.

    Returns
    -------
    numpy.ndarray
        float32, same shape.

    Examples
    --------
    >>> x = np.full(128, 0.5)
    >>> int((mixed_exp2(x, Emulation(16, 4, 0)) != np.float32(2**0.5)).sum())
    24
    """
    x32 = np.asarray(x, dtype=np.float32)
    if x32.ndim < 1:
        raise ValueError("mixed_exp2: a number has no fragments; give rows of entries")
    emulated = emulation.emulated(x32.shape[-1])
    result = exp2_hardware(x32)
    result[..., emulated] = exp2_polynomial(x32[..., emulated], coefficients)
    return result
