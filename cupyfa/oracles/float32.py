"""Two float32 instructions that NumPy lacks, exact to the last bit: ``fma.rn.f32`` and ``add.rm.f32``.

Both compute in float64 first and then repair the one rounding too many. The tool is the error-free sum: for float64
``a`` and ``b``, ``s = fl(a + b)`` and ``e = (a - (s - b')) + (b - b')`` with ``b' = s - a`` give ``s + e = a + b``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .violations import check_broadcast

__all__ = ["add_rm", "fma_rn"]

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


def _two_sum(a: Float64Array, b: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return ``(s, e)`` with ``s = fl(a + b)`` and ``s + e == a + b`` exactly."""
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


def _widen(x: npt.ArrayLike) -> Float64Array:
    """Round to float32, as an operand of the instruction would be, and return it as float64."""
    return np.asarray(x, dtype=np.float32).astype(np.float64)


def fma_rn(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Float32Array:
    """Compute ``a * b + c`` with one rounding, to nearest even, as ``fma.rn.f32`` does (0x09).

    Parameters
    ----------
    a, b, c : array_like of float
        Broadcast against each other; rounded to float32 first where they are wider.

    Returns
    -------
    numpy.ndarray
        float32, subnormal results included.

    Notes
    -----
    The product of two float32 is exact in float64. The sum is rounded there *to odd*: an inexact sum gets the neighbour
    whose last bit is 1. Rounding that to float32 is the same as rounding the exact value (float64 has more than two
    bits to spare), whereas rounding to nearest twice is not.

    Examples
    --------
    >>> x = np.float32(1 + 2**-12)
    >>> float(fma_rn(x, x, -1)) == 2**-11 + 2**-24, float(x * x - np.float32(1)) == 2**-11
    (True, True)
    """
    check_broadcast("fma_rn", a=a, b=b, c=c)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        product = _widen(a) * _widen(b)
        s, e = _two_sum(product, _widen(c))
        bits = np.asarray(s).view(np.int64)
        # One step away from zero or towards it, whichever side the exact value lies on.
        odd = (bits + np.where((e > 0) == (s > 0), 1, -1)).view(np.float64)
        inexact_and_even = np.isfinite(e) & (e != 0) & (bits % 2 == 0)
        return np.where(inexact_and_even, odd, s).astype(np.float32)


def add_rm(a: npt.ArrayLike, b: npt.ArrayLike) -> Float32Array:
    """Compute ``a + b`` rounded towards minus infinity, as ``add.rm.f32`` does (0x09).

    Parameters
    ----------
    a, b : array_like of float
        Broadcast against each other; rounded to float32 first where they are wider.

    Returns
    -------
    numpy.ndarray
        float32: the largest value that is not above the exact sum. (An exact zero comes out as +0, where the
        instruction gives -0; nothing here depends on it.)

    Examples
    --------
    >>> float(add_rm(2.0**23, -0.25)) == 2**23 - 0.5, float(add_rm(2.0**23, 0.75)) == 2**23
    (True, True)
    """
    check_broadcast("add_rm", a=a, b=b)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        s, e = _two_sum(_widen(a), _widen(b))
        nearest = s.astype(np.float32)
        above = (nearest > s) | ((nearest == s) & (e < 0))
        return np.where(above, np.nextafter(nearest, np.float32(-np.inf)), nearest)
