"""2**x without the exponential unit: range reduction, a polynomial, an integer addition (specification 0x09).

    x  = max(x, -127)
    y  = x + C  rounded down,  C = 2**23 + 2**22        the integer part sits in the low bits of y
    n  = y - C = floor(x),     f = x - n in [0, 1]
    p  = p0 + f (p1 + f (p2 + f p3))                    three dependent fused multiply-adds
    2**x = bits of p  +  (bits of y << 23)              n is added to the exponent field

All of it is float32, in the order of the kernels, bit for bit (arXiv 2603.05451, section 3.1.3). Two facts of the
finite precision are easy to miss and are part of the contract here:

* ``f`` reaches 1 exactly, where x lies a little below an integer and ``x - n`` rounds up. The polynomial is used on
  the closed interval.
* At the clamp, n = -127 leaves an exponent field of 0: everything at or below -127, -inf included, becomes exactly 0,
  and between -127 and -126 the result is a subnormal whose leading 1 is lost. So is a NaN, because ``max`` drops it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..float32 import add_rm, fma_rn
from ..formats import BFLOAT16
from ..violations import ContractViolation, check_broadcast

__all__ = [
    "DEGREE_3",
    "HIGHEST",
    "LOWEST",
    "MAGIC",
    "Exp2Error",
    "ExponentTooLarge",
    "combine_exponent",
    "exp2_hardware",
    "exp2_polynomial",
    "horner",
    "measure",
    "reduce_range",
    "uniform_grid",
]

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

DEGREE_3 = (1.0, 0.6951461434364319, 0.22756439447402954, 0.07711908966302872)
"""The kernels' coefficients, lowest power first; each is a float32. p0 = 1 makes integers exact."""

MAGIC = np.float32(2**23 + 2**22)
"""Float32 values around it are whole numbers, so that adding it with rounding down is ``floor``."""

LOWEST = np.float32(-127)
"""Lower clamp of the argument."""

HIGHEST = np.float32(127)
"""Largest argument for which the exponent field stays a number's."""


class ExponentTooLarge(ContractViolation):
    """An argument above 127: the addition would carry into infinity, or into the sign (0x09)."""


def reduce_range(x: npt.ArrayLike) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Split ``x`` into ``floor(x)`` and a fraction, by an addition that rounds down (0x09).

    Parameters
    ----------
    x : array_like of float
        Any shape, in ``[-2**22, 2**22]`` (`exp2_polynomial` clamps first); rounded to float32 where it is wider.

    Returns
    -------
    y : numpy.ndarray
        float32, ``MAGIC + floor(x)``: its low bits hold the integer.
    n : numpy.ndarray
        float32, ``floor(x)``.
    f : numpy.ndarray
        float32, ``x - n`` rounded to nearest; in ``[0, 1]``.

    Examples
    --------
    >>> y, n, f = reduce_range([-0.25, 3.5, -(2.0**-30)])
    >>> n.tolist(), f.tolist()
    ([-1.0, 3.0, -1.0], [0.75, 0.5, 1.0])
    """
    x32 = np.asarray(x, dtype=np.float32)
    if not (np.abs(x32) <= 2**22).all():
        raise ContractViolation("reduce_range: an argument is NaN, or beyond 2**22, where MAGIC rounds to no integer")
    y = add_rm(x32, MAGIC)
    n = y - MAGIC
    return y, n, x32 - n


def horner(coefficients: npt.ArrayLike, f: npt.ArrayLike) -> Float32Array:
    """Evaluate a polynomial by Horner's rule, one float32 fused multiply-add per degree (0x09).

    Parameters
    ----------
    coefficients : array_like of float
        Lowest power first, rounded to float32.
    f : array_like of float
        Argument, any shape, rounded to float32.

    Returns
    -------
    numpy.ndarray
        float32, shape of `f`: ``p0 + f (p1 + f (p2 + ...))``.

    Examples
    --------
    >>> horner([1.0, 2.0, 4.0], [0.0, 0.5, 1.0])
    array([1., 3., 7.], dtype=float32)
    """
    p = np.asarray(coefficients, dtype=np.float32)
    if p.ndim != 1 or p.size < 1:
        raise ValueError(f"horner: coefficients have shape {p.shape}; they must be one or more numbers")
    value: Float32Array = np.full(np.shape(f), p[-1], dtype=np.float32)
    for coefficient in p[-2::-1]:
        value = fma_rn(value, f, coefficient)
    return value


def combine_exponent(y: Float32Array, p: Float32Array) -> Float32Array:
    """Multiply ``p`` by ``2**n`` by adding ``n`` to its exponent field (0x09).

    Parameters
    ----------
    y : numpy.ndarray
        float32, ``MAGIC + n``. Shifted left by 23, all of it but the low 9 bits falls out, and what is left is
        ``n * 2**23`` modulo 2**32.
    p : numpy.ndarray
        float32 in ``[1, 2]``; at 2 its own exponent takes part, as it should.

    Returns
    -------
    numpy.ndarray
        float32. Where ``n = -127`` the field becomes 0 and the value a subnormal without the leading 1.

    Examples
    --------
    >>> combine_exponent(MAGIC + np.float32([-1, 0, 5, -127]), np.float32([1.5, 1.5, 1.0, 1.0]))
    array([ 0.75,  1.5 , 32.  ,  0.  ], dtype=float32)
    """
    check_broadcast("combine_exponent", y=y, p=p)
    shifted = np.asarray(y, dtype=np.float32).view(np.uint32) << np.uint32(23)
    return (np.asarray(p, dtype=np.float32).view(np.uint32) + shifted).view(np.float32)


def exp2_polynomial(x: npt.ArrayLike, coefficients: npt.ArrayLike = DEGREE_3) -> Float32Array:
    """Compute 2**x as the kernels do without the exponential unit (0x09).

    Parameters
    ----------
    x : array_like of float
        Any shape, at most 127; rounded to float32. Below -127 it is clamped, -inf and NaN included.
    coefficients : array_like of float, optional
        Polynomial on ``[0, 1]``, lowest power first; degree 3 by default.

    Returns
    -------
    numpy.ndarray
        float32, same shape. Between -126 and 127 its relative error is that of the polynomial (8.8e-5 for degree 3).

    Raises
    ------
    ExponentTooLarge
        If an argument is above 127. A softmax whose reference is stale by at most tau stays far below.

    Examples
    --------
    >>> exp2_polynomial([-2.0, 0.0, 0.5, 10.0, -126.0, -127.0, -np.inf]).tolist()[:4]
    [0.25, 1.0, 1.4141..., 1024.0]
    >>> exp2_polynomial([-126.0, -127.0, -np.inf, np.nan]).tolist() == [2.0**-126, 0, 0, 0]
    True
    """
    x32 = np.asarray(x, dtype=np.float32)
    if np.any(x32 > HIGHEST):
        raise ExponentTooLarge(f"exp2: an argument is {float(np.nanmax(x32))}; it must not exceed {float(HIGHEST)}")
    y, _, f = reduce_range(np.fmax(x32, LOWEST))  # fmax is the instruction's: of a NaN and a number, the number
    return combine_exponent(y, horner(coefficients, f))


def exp2_hardware(x: npt.ArrayLike) -> Float32Array:
    """Compute 2**x rounded correctly to float32: the stand-in for the exponential unit (0x09).

    Parameters
    ----------
    x : array_like of float
        Any shape; rounded to float32.

    Returns
    -------
    numpy.ndarray
        float32, same shape. The real unit errs by up to about 2**-22, this by 2**-24; it flushes subnormals.

    Examples
    --------
    >>> exp2_hardware([0.0, 1.0, -np.inf, 128.0])
    array([ 1.,  2.,  0., inf], dtype=float32)
    """
    with np.errstate(over="ignore", under="ignore"):
        value = np.exp2(np.asarray(x, dtype=np.float32).astype(np.float64)).astype(np.float32)
    return np.where(value < np.finfo(np.float32).tiny, np.float32(0), value)


def uniform_grid(points: int = 65_536) -> Float32Array:
    """Return ``i / points`` for ``i = 0 .. points - 1``: the deterministic grid of the specification's figures (0x09).

    Parameters
    ----------
    points : int, optional
        A power of two up to 2**24, so that every point is a float32.

    Returns
    -------
    numpy.ndarray
        float32 in ``[0, 1)``.

    Examples
    --------
    >>> uniform_grid(4)
    array([0.  , 0.25, 0.5 , 0.75], dtype=float32)
    """
    if points < 1 or points & (points - 1) or points > 2**24:
        raise ValueError(f"uniform_grid: {points} points; a power of two up to 2**24 keeps them exact")
    return (np.arange(points) / points).astype(np.float32)


@dataclass(frozen=True)
class Exp2Error:
    """How far an exp2 is from the truth, before and after its result is rounded to bfloat16 (0x09).

    Attributes
    ----------
    raw_max, raw_mean : float
        Relative error of the float32 result against float64.
    bfloat16_max, bfloat16_mean : float
        Relative error after rounding to bfloat16, against the unrounded truth.
    same_code : float
        Fraction of results with the bfloat16 code of the truth, which is rounded by way of float32 as the value is.
    within_one : float
        Fraction whose code is at most one step away from it.
    """

    raw_max: float
    raw_mean: float
    bfloat16_max: float
    bfloat16_mean: float
    same_code: float
    within_one: float


def measure(values: npt.ArrayLike, x: npt.ArrayLike) -> Exp2Error:
    """Compare approximations of 2**x with float64, and their bfloat16 roundings with the rounding of the truth (0x09).

    Parameters
    ----------
    values : array_like of float32
        Approximations.
    x : array_like of float
        The arguments, same shape.

    Returns
    -------
    Exp2Error
        Errors and fractions.

    Examples
    --------
    >>> x = uniform_grid()
    >>> error = measure(exp2_polynomial(x), x)
    >>> f"{error.raw_max:.2e} {error.bfloat16_max:.2e} {error.same_code:.2%}"
    '8.77e-05 3.90e-03 99.01%'
    """
    value, argument = np.asarray(values), np.asarray(x, dtype=np.float64)
    if value.shape != argument.shape or not value.size:
        raise ValueError(f"measure: values have shape {value.shape}, arguments {argument.shape}; they must be equal")
    truth = np.exp2(argument)
    # The comparison is with a perfect float32 exp2, so the truth passes through float32 too. Without that detour one
    # more point of the 65,536 agrees.
    codes, ideal = BFLOAT16.encode(value), BFLOAT16.encode(truth.astype(np.float32))
    raw = np.abs(value.astype(np.float64) - truth) / truth
    rounded = np.abs(BFLOAT16.decode(codes) - truth) / truth
    steps = np.abs(codes.astype(np.int64) - ideal.astype(np.int64))
    return Exp2Error(
        raw_max=float(raw.max()),
        raw_mean=float(raw.mean()),
        bfloat16_max=float(rounded.max()),
        bfloat16_mean=float(rounded.mean()),
        same_code=float((steps == 0).mean()),
        within_one=float((steps <= 1).mean()),
    )
