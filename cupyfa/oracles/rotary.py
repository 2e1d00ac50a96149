"""Rotary position embedding: pairs of numbers of a head turn by an angle that their position gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .violations import ContractViolation, check_indices

__all__ = ["Rotary"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rotary:
    """Tables of angles, and which numbers of a head are pairs (0x01).

    Parameters
    ----------
    cos, sin : numpy.ndarray
        ``(positions, rotary_dim / 2)``, any float type: of each position and pair.
    interleaved : bool, optional
        Whether pairs are ``(2 j, 2 j + 1)``; else they are ``(j, j + rotary_dim / 2)``.
    """

    cos: Array
    sin: Array
    interleaved: bool = False

    def turn(self, x: Array, positions: npt.NDArray[np.integer]) -> Array:
        """Turn the pairs of each head: in float32, each product and sum rounded, and the result once to the type of x.

        Parameters
        ----------
        x : numpy.ndarray
            ``(seqlen, heads, head_dim)``, any float type.
        positions : numpy.ndarray
            ``(seqlen,)``, integers: of each row.

        Returns
        -------
        numpy.ndarray
            A new array, shape and type of `x`; what lies behind the pairs is as it was.

        Raises
        ------
        ValueError
            A position lies outside of the tables, or they are wider than a head.

        Examples
        --------
        >>> x, right_angle = np.float32([[[1, 2, 3, 4, 5]]]), (np.float32([[0, 0]]), np.float32([[1, 1]]))
        >>> Rotary(*right_angle).turn(x, np.array([0])).tolist()
        [[[-3.0, -4.0, 1.0, 2.0, 5.0]]]
        >>> Rotary(*right_angle, interleaved=True).turn(x, np.array([0])).tolist()
        [[[-2.0, 1.0, -4.0, 3.0, 5.0]]]
        """
        half = self.cos.shape[1]
        if self.cos.shape != self.sin.shape or 2 * half > x.shape[-1]:
            raise ContractViolation(
                f"rotary: cos has shape {self.cos.shape} and sin {self.sin.shape}, for heads of {x.shape[-1]}"
            )
        check_indices("rotary", positions, self.cos.shape[0])
        first, second = slice(half), slice(half, 2 * half)
        if self.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        a, b = x[..., first].astype(np.float32), x[..., second].astype(np.float32)
        cos, sin = (table[positions, None].astype(np.float32) for table in (self.cos, self.sin))
        turned = x.copy()
        turned[..., first] = (a * cos - b * sin).astype(x.dtype)
        turned[..., second] = (b * cos + a * sin).astype(x.dtype)
        return turned
