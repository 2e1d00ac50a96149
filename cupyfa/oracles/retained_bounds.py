"""What can be said about the retained reference in advance: exactness, float32 error, the worst rows (0x09).

`exact_row` is the recurrence in rational arithmetic, where "equal" means equal. `float32_bound` says how far float32
may be from it. `staircase` makes the rows for which a threshold is hardest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from .formats import Format
from .retained import Policy
from .violations import check_range

__all__ = ["ExactRow", "Float32Bound", "exact_row", "float32_bound", "staircase"]

UNIT = 2.0**-24
"""Largest relative error of one float32 rounding."""


@dataclass(frozen=True)
class ExactRow:
    """One row after the recurrence, in rational numbers (0x09).

    Attributes
    ----------
    D, N : fractions.Fraction
        Denominator and numerator in the retained frame.
    reference : int
        The retained base-2 reference r.
    maximum : int
        The true maximum of the row.
    largest_P : fractions.Fraction
        The largest P on the way.
    omega : int
        Offset of the exponent.
    """

    D: Fraction
    N: Fraction
    reference: int
    maximum: int
    largest_P: Fraction
    omega: int

    @property
    def out(self) -> Fraction:
        """``N / D``, the attention output of the row."""
        return self.N / self.D

    @property
    def sum_exp2(self) -> Fraction:
        """``D 2**(r - omega)``, the sum of 2**b over the row: what the lse is the logarithm of."""
        return self.D * Fraction(2) ** (self.reference - self.omega)


def exact_row(
    logits: Sequence[int], values: Sequence[int | Fraction], *, block: int, tau: float, omega: int
) -> ExactRow:
    """Run the recurrence on one row without any rounding (0x09).

    Parameters
    ----------
    logits : sequence of int
        Base-2 logits; whole numbers, so that 2**b is rational.
    values : sequence of int or fractions.Fraction
        One value per key.
    block : int
        Keys per block.
    tau : float
        Threshold, not negative.
    omega : int
        Offset.

    Returns
    -------
    ExactRow
        State, frame and extremes. `out` and `sum_exp2` do not depend on block, tau or omega.

    Examples
    --------
    >>> row = exact_row([0, 1, 2], [1, 1, 4], block=1, tau=8, omega=0)
    >>> row.out, row.sum_exp2, row.reference, row.maximum
    (Fraction(19, 7), Fraction(7, 1), 0, 2)
    """
    if len(logits) != len(values) or not logits:
        raise ValueError(f"exact_row: {len(logits)} logits and {len(values)} values; need as many, and at least one")
    if block < 1 or not tau >= 0:
        raise ValueError(f"exact_row: block {block} must be at least 1 and tau {tau} not negative")
    two = Fraction(2)
    D = N = largest = Fraction(0)
    r: int | None = None
    for begin in range(0, len(logits), block):
        b, v = logits[begin : begin + block], values[begin : begin + block]
        candidate = max(b) if r is None else max(r, *b)
        if r is None:
            r = candidate
        elif candidate - r > tau:
            gamma = two ** (r - candidate)
            D, N, r = gamma * D, gamma * N, candidate
        P = [two ** (logit - r + omega) for logit in b]
        D += sum(P)
        N += sum(p * value for p, value in zip(P, v, strict=True))
        largest = max(largest, *P)
    assert r is not None
    return ExactRow(D=D, N=N, reference=r, maximum=max(logits), largest_P=largest, omega=omega)


@dataclass(frozen=True)
class Float32Bound:
    """How far the float32 recurrence may be from exact arithmetic (0x09).

    Attributes
    ----------
    sum : float
        Relative error of the denominator, and of the numerator measured against ``sum P |v|``.
    out : float
        Absolute error of the output, in units of ``max |v|``.
    lse : float
        Absolute error of the lse.
    """

    sum: float
    out: float
    lse: float


def float32_bound(
    keys: int,
    block: int,
    policy: Policy,
    magnitude: float,
    *,
    vote_rows: int = 1,
    exp2_error: float = 2.0**-22,
    p_format: Format | None = None,
) -> Float32Bound:
    """Bound the rounding error of the float32 recurrence (0x09).

    Parameters
    ----------
    keys, block : int
        Keys of the row and of a block.
    policy : Policy
        Threshold and offset.
    magnitude : float
        Largest ``|scale_log2 * score|`` among the keys that are not masked.
    vote_rows : int, optional
        Rows that decide together; `magnitude` is then the largest of all of them.
    exp2_error : float, optional
        Relative error of the exp2 in use.
    p_format : Format, optional
        What P is rounded to for the numerator.

    Returns
    -------
    Float32Bound
        The three bounds.

    Notes
    -----
    Let ``u = 2**-24``. The base-2 reference r is rounded, but the same in P, gamma and lse, so that its error cancels.
    The exponent of key i carries ``u |omega - r|`` from the constant of its row (nothing if omega is 0), ``u |x|`` from
    the multiply-add, and ``u`` times every later move of the frame. Let ``d_i = max b - b_i``. As the frame lies at
    most tau below the maximum, ``|x - omega| <= d_i + tau``, and the moves after key i add up to at most
    ``d_i + tau``. So the exponent is off by at most ``u (M [omega != 0] + 2 |omega| + 2 (tau + d_i))``, where M is the
    magnitude.

    The average of ``d_i`` under the softmax weights is at most ``log2(keys)``: it is their entropy minus the log of
    their sum. Hence the exponents need no assumption about how far the scores spread. To them come the exp2 of P, one
    exp2 and one product for each move of the frame (at most one per block, and at most ``2 M / tau`` for each row that
    has a vote), and ``block + J`` additions. What underflows is at most ``keys * 2**(tau + |omega| - 126)`` of the sum.

    Examples
    --------
    >>> bound = float32_bound(4096, 128, Policy(8, 0), magnitude=30.0)
    >>> bound.sum < 4e-5, bound.out == 2 * bound.sum / (1 - bound.sum)
    (True, True)
    """
    if keys < 1 or block < 1 or not magnitude >= 0:
        raise ValueError(f"float32_bound: keys {keys}, block {block}, magnitude {magnitude}")
    check_range("float32_bound", 1, vote_rows=vote_rows)
    check_range("float32_bound", 0, exp2_error=exp2_error)
    if policy.tau + abs(policy.omega) > 1000:  # far outside float32
        return Float32Bound(math.inf, math.inf, math.inf)
    blocks = -(-keys // block)
    moves = blocks - 1.0
    if policy.tau > 0:  # a row votes for a move when it has risen by more than tau, and it cannot leave [-M, M]
        moves = min(moves, vote_rows * 2 * magnitude / policy.tau)
    omega, spread = abs(policy.omega), math.log2(keys)
    constant = magnitude if omega else 0.0
    exponent = math.log(2) * UNIT * (constant + 2 * omega + 2 * (policy.tau + spread))
    products = exp2_error * (moves + 1) + UNIT * moves
    additions = UNIT * (min(block, keys) + blocks)
    underflow = keys * 2.0 ** (policy.tau + omega - 126)
    total = exponent + products + additions
    total = total / (1 - total) + underflow if total < 0.5 else math.inf  # with the terms of second order
    if total >= 1:
        return Float32Bound(math.inf, math.inf, math.inf)
    p_error = 0.0 if p_format is None else p_format.epsilon / 2 + keys * p_format.min_subnormal / 2 * 2.0**-policy.omega
    closing = 3 * UNIT * (magnitude + spread + policy.tau + 2 * omega)
    return Float32Bound(
        sum=total,
        out=2 * total / (1 - total) + p_error,
        lse=-math.log1p(-total) + closing,
    )


def staircase(blocks: int, block: int, step: float, *, first: float = 0.0) -> npt.NDArray[np.float64]:
    """Make a row of base-2 logits that rises from block to block, the adversary of a lazy reference (0x09).

    Parameters
    ----------
    blocks, block : int
        Number of blocks, and keys in each; all keys of a block are equal.
    step : float
        Rise per block. Just up to tau, P reaches its bound; just above, every block moves the frame.
    first : float, optional
        Logit of the first block.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(blocks * block,)``.

    Examples
    --------
    >>> staircase(3, 2, 8.0)
    array([ 0.,  0.,  8.,  8., 16., 16.])
    """
    if blocks < 1 or block < 1:
        raise ValueError(f"staircase: {blocks} blocks of {block} keys; both must be at least 1")
    return np.repeat(first + step * np.arange(blocks), block).astype(np.float64)
