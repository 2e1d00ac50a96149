"""How close a kernel must be to the reference. The only place that states a tolerance."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupyfa.testing.canaries import to_numpy

__all__ = ["assert_close", "assert_lse_close", "score_magnitude", "ulp"]


def ulp(x: npt.ArrayLike, dtype: npt.DTypeLike) -> npt.NDArray[np.float64]:
    """Return the distance between neighbouring numbers of `dtype` at the magnitude of `x`.

    Parameters
    ----------
    x : array_like
        Finite numbers.
    dtype : data-type
        float16, bfloat16, float32 or float64.

    Returns
    -------
    numpy.ndarray
        float64, shape of `x`; never below the smallest subnormal number.

    Examples
    --------
    >>> float(ulp(1.5, np.float16)) == 2.0**-10, float(ulp(0.0, ml_dtypes.bfloat16)) == 2.0**-133
    (True, True)
    """
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    _, exponent = np.frexp(np.abs(np.asarray(x, dtype=np.float64)))
    # frexp puts 1.0 at exponent 1; zero, at exponent 0, must not count as large.
    exponent = np.where(np.asarray(x) == 0, info.minexp, exponent - 1)
    spacing: npt.NDArray[np.float64] = np.ldexp(1.0, np.maximum(exponent, info.minexp) - info.nmant)
    return spacing


def _fail(what: str, text: str, index: tuple[int, ...], context: object) -> None:
    """Raise the AssertionError of a comparison."""
    where = "[" + ", ".join(str(i) for i in index) + "]"
    raise AssertionError(f"{what}{where}: {text}" + ("" if context is None else f"\n  context: {context}"))


def _check_specials(actual: npt.NDArray[Any], expected: npt.NDArray[Any], what: str, context: object) -> None:
    """Raise unless both arrays are NaN, +inf and -inf at the same places."""
    for name, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = test(actual) != test(expected)
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            text = f"the {name} pattern differs at {int(wrong.sum())} of {wrong.size} places, here first: "
            _fail(what, text + f"got {actual[index]}, reference {expected[index]}", index, context)


#: The GPU takes numbers below 2**-126 for 0, among them the factor 1/sum of a row whose sink is that much larger than
#: all else: then its output is gone, up to that times a sum over all keys. A block's probabilities add up to as much as
#: 2**63 in the frame of an old maximum (SpeculativeSoftmax: eight sums below 2**60); this allows for 2**9 such blocks.
_FLUSHED = 2.0**-54


def _check_bound(
    actual: npt.NDArray[Any], expected: npt.NDArray[Any], bound: npt.NDArray[Any], rule: str, what: str, context: object
) -> None:
    """Raise unless ``|actual - expected| <= bound``, naming the element that exceeds its bound the most."""
    excess = np.abs(actual - expected) - bound
    # A bound that is NaN must not pass for one that holds.
    excess = np.where(np.isnan(excess), np.inf, excess)
    if excess.size and excess.max() > 0:
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(excess)), excess.shape))
        text = (
            f"got {actual[index]:.9g}, reference {expected[index]:.9g}: they differ by "
            f"{abs(actual[index] - expected[index]):.4g}, allowed is {np.broadcast_to(bound, excess.shape)[index]:.4g} "
            f"({rule}); {int((excess > 0).sum())} of {excess.size} elements are out of bounds"
        )
        _fail(what, text, index, context)


def assert_close(
    actual: Any,
    reference64: npt.NDArray[np.float64],
    same_precision: npt.NDArray[Any],
    *,
    factor: float = 1.25,
    row_factor: float | None = 2.0,
    floor: npt.ArrayLike = 0.0,
    what: str = "out",
    context: object = None,
) -> None:
    """Hold a result to the error that its number formats make unavoidable.

    Two rules, after the pattern of NaN, +inf and -inf has matched exactly:

    * everywhere, ``|actual - reference| <= factor * max|same_precision - reference| + 1 ulp``;
    * row by row (the last axis), with the maximum over that row alone,
      ``|actual - reference| <= row_factor * max_row|same_precision - reference| + 1 ulp`` of the row's largest element.

    The second is there because one maximum over the whole tensor is loose where results are small: the first row of a
    causal problem is of order 1 and has an error to match, while a row that averages over 4,000 keys is of order 0.02,
    so that a row sum which is wrong by 3 % would hide in the first row's error. A row has few elements, hence the wider
    factor; the online recurrence needs 0.22 of it over the whole table.

    Parameters
    ----------
    actual : numpy.ndarray or cupy.ndarray
        The result, in its output type.
    reference64 : numpy.ndarray
        float64, from `cupyfa.oracles.dense.attention`.
    same_precision : numpy.ndarray
        From `cupyfa.oracles.dense.same_precision`; never the twin of the kernel under test.
    factor : float, optional
        How much worse than `same_precision` the result may be. Loosen it only with a written reason.
    row_factor : float or None, optional
        The factor of the second rule; None leaves it out.
    floor : array_like, optional
        What each element may be off by beside that: for results that are small differences of large numbers, whose
        error is that of the order of additions and not of the number formats. Broadcast to the result.
    what : str, optional
        Name of the result, for the message.
    context : object, optional
        The case, the spec, the seed: printed on failure.

    Raises
    ------
    AssertionError
        Names the worst element, both values, the bound and the context.
    """
    have = to_numpy(actual)
    dtype = have.dtype
    if have.shape != reference64.shape or have.shape != same_precision.shape:
        raise AssertionError(f"{what}: shape {have.shape}, reference {reference64.shape}, {same_precision.shape}")
    with np.errstate(over="ignore", invalid="ignore"):
        have64, same64 = have.astype(np.float64), same_precision.astype(np.float64)
        # A value beyond the type's range has to come out infinite, as the rounded reference is.
        _check_specials(have64, reference64.astype(dtype).astype(np.float64), what, context)
    comparable = np.isfinite(have64) & np.isfinite(reference64)
    have64, reference = np.where(comparable, have64, 0.0), np.where(comparable, reference64, 0.0)
    yardstick = np.where(comparable & np.isfinite(same64), np.abs(same64 - reference), 0.0)
    if not have.size:
        return
    step = ulp(reference, dtype) + _FLUSHED
    allowed = np.broadcast_to(np.asarray(floor, np.float64), reference.shape)
    rule = f"{factor} * max|same precision - reference| + 1 ulp"
    _check_bound(have64, reference, factor * yardstick.max() + step + allowed, rule, what, context)
    if row_factor is not None:
        row_step = step.max(axis=-1, keepdims=True)
        rule = f"{row_factor} * the row's max|same precision - reference| + 1 ulp of the row"
        row_bound = row_factor * yardstick.max(axis=-1, keepdims=True) + row_step + allowed
        _check_bound(have64, reference, row_bound, rule, what, context)


def score_magnitude(
    q: Any, k: Any, softmax_scale: float | None = None, softcap: float | None = None
) -> npt.NDArray[np.float64]:
    """Bound every partial sum of the scaled scores of each row: ``|scale| * |q_i| * max_j |k_j|``, and the softcap.

    Parameters
    ----------
    q, k : numpy.ndarray or cupy.ndarray
        ``(batch, seqlen, heads, head_dim)``. Elements that are NaN or infinite are left out.
    softmax_scale : float, optional
        ``1 / sqrt(head_dim)`` by default.
    softcap : float, optional
        Added to the bound: a capped score is a difference of numbers up to twice as large, however small it is itself.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(batch, heads_q, seqlen_q)``, like an lse.

    Examples
    --------
    >>> x = np.ones((1, 2, 1, 16), dtype=np.float16)
    >>> score_magnitude(x, x)
    array([[[4., 4.]]])
    """
    norms = []
    for array in (to_numpy(q), to_numpy(k)):
        wide = np.nan_to_num(array.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0).astype(np.float64)
        norms.append(np.sqrt((wide * wide).sum(axis=-1)).transpose(0, 2, 1))
    rows, keys = norms
    scale = 1.0 / math.sqrt(q.shape[3]) if softmax_scale is None else abs(softmax_scale)
    magnitude = np.zeros(rows.shape)
    if rows.size and keys.size:
        longest_key = np.repeat(keys.max(axis=-1), rows.shape[1] // keys.shape[1], axis=1)
        magnitude += scale * rows * longest_key[:, :, None] + (softcap or 0.0)
    return magnitude


def assert_lse_close(
    actual: Any,
    reference64: npt.NDArray[np.float64],
    *,
    score_magnitude: npt.ArrayLike = 0.0,
    what: str = "lse",
    context: object = None,
) -> None:
    """Hold a float32 lse to ``4e-6 * max(1, |lse|) + 2**-21 * score_magnitude``, with an exact pattern of -inf.

    Parameters
    ----------
    actual : numpy.ndarray or cupy.ndarray
        float32, natural logarithm.
    reference64 : numpy.ndarray
        float64, from `cupyfa.oracles.dense.attention`.
    score_magnitude : array_like, optional
        From `score_magnitude`; the default of 0 is right for exact scores only.
    what : str, optional
        Name of the result, for the message.
    context : object, optional
        The case, the spec, the seed: printed on failure.

    Raises
    ------
    AssertionError
        Names the worst element, both values, the bound and the context.

    Notes
    -----
    The lse moves by at most as much as the largest change of a score, since its derivatives are probabilities; so its
    error is that of a score plus that of the closing arithmetic.

    * A score is a float32 sum. The tensor core adds 16 products at a time and truncates, so it errs by up to 2**-23 of
      the partial sum at each of the head_dim / 16 steps, always toward zero. Partial sums of random products stay
      within about ``3 / sqrt(head_dim)`` of ``|q| * |k|``; over the steps that makes, in units of
      ``2**-23 * |scale| * |q| * |k|``, ``3 * sqrt(head_dim) / 16``, or 3 at head_dim 256. The factor 2**-21 allows 4.
    * A softcap c makes no error of a score larger, but computes ``-2 c / (e + 1) + c``. With 2**-22 for the approximate
      exp2, 2**-23 for the reciprocal and 2**-24 for each of the two sums, all relative, that errs by less than 4 units
      of ``2**-23 * c``, most where the score is near -c. Hence c is part of the score magnitude.
    * A window, a sink and slopes need no more: keys are left out, the sink is part of the closing arithmetic, and what
      a slope takes from a score is small, large in the lse, or made up for by a score as large.
    * Scaling by ``softmax_scale * log2(e)`` in float32, subtracting the maximum, summing terms between 0 and 1, the
      approximate exp2 and log2, and the factor ln 2 make a few units of 2**-23 of ``|lse|``, or of 1 when the lse is
      smaller: 4e-6 is 34 of those.
    * The bound can still see one key missing out of n, which shifts the lse by about 1/n: at n = 10,000 and an lse of
      10 that is twice the first term.
    """
    have = to_numpy(actual)
    if have.dtype != np.float32:
        raise AssertionError(f"{what}: dtype {have.dtype}, it must be float32")
    if have.shape != reference64.shape:
        raise AssertionError(f"{what}: shape {have.shape}, reference {reference64.shape}")
    have64 = have.astype(np.float64)
    _check_specials(have64, reference64, what, context)
    finite = np.isfinite(reference64)
    have64, reference = np.where(finite, have64, 0.0), np.where(finite, reference64, 0.0)
    bound = 4e-6 * np.maximum(1.0, np.abs(reference)) + 2.0**-21 * np.asarray(score_magnitude, dtype=np.float64)
    _check_bound(have64, reference, bound, "4e-6 * max(1, |lse|) + 2**-21 * score magnitude", what, context)
