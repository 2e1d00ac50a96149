"""Where the coefficients of exp2 come from: the best polynomial in the sense of the relative error.

The kernels' degree-3 coefficients are given (`cupyfa.oracles.exp2.polynomial.DEGREE_3`). For other degrees, and to see
how good those are, this module solves

    minimise over p1 .. pd:   max over 0 <= f <= 1 of  | p(f) / 2**f - 1 |,     p(f) = 1 + p1 f + ... + pd f**d

by Remez exchange in float64, and rounds the result to float32. The constant is fixed to 1, so that 2**n is exact for
whole n. There are d free coefficients, hence d + 1 extrema of equal size and alternating sign; f = 1 is one of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["fit"]

Float64Array = npt.NDArray[np.float64]

_GRID = 2**16  # intervals on which the extrema are looked for
_ROUNDS = 30


def _solve(points: Float64Array) -> Float64Array:
    """Return 1, p1 .. pd such that the error at the d + 1 points is equal in size and alternates in sign."""
    degree = len(points) - 1
    powers = points[:, None] ** np.arange(1, degree + 1) * np.exp2(-points)[:, None]
    signs = (-1.0) ** np.arange(degree + 1)
    solution = np.linalg.solve(np.column_stack([powers, signs]), 1 - np.exp2(-points))
    return np.concatenate([[1.0], solution[:degree]])


def _extrema(coefficients: Float64Array, grid: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return where the relative error is largest between its sign changes, and how large it is there."""
    error = np.polynomial.polynomial.polyval(grid, coefficients) * np.exp2(-grid) - 1
    changes = np.flatnonzero(np.diff(np.sign(error[1:])) != 0) + 2
    parts = np.split(np.arange(1, len(grid)), changes - 1)
    where = np.array([part[np.argmax(np.abs(error[part]))] for part in parts])
    return grid[where], error[where]


def fit(degree: int) -> tuple[float, ...]:
    """Find the polynomial of a degree that approximates 2**f on [0, 1] best, with constant term 1 (0x09).

    Parameters
    ----------
    degree : int
        1 to 6. (From degree 6 on float32 evaluation, not the polynomial, decides the error.)

    Returns
    -------
    tuple of float
        ``degree + 1`` coefficients, lowest power first, each rounded to float32.

    Raises
    ------
    ValueError
        If the degree is out of range.

    Examples
    --------
    >>> [round(p, 4) for p in fit(3)]  # the kernels' own: 1, 0.6951, 0.2276, 0.0771
    [1.0, 0.6951, 0.2276, 0.0771]
    """
    if not 1 <= degree <= 6:
        raise ValueError(f"fit: degree is {degree}; it must be 1 to 6")
    grid = np.linspace(0.0, 1.0, _GRID + 1)
    points = (0.5 - 0.5 * np.cos(np.linspace(0.0, np.pi, degree + 2)))[1:]
    for _ in range(_ROUNDS):
        coefficients = _solve(points)
        points, sizes = _extrema(coefficients, grid)
        if np.ptp(np.abs(sizes)) <= 1e-6 * np.abs(sizes).max():
            break
    else:
        raise RuntimeError(f"fit: the exchange for degree {degree} did not settle")
    return tuple(float(p) for p in coefficients.astype(np.float32))
