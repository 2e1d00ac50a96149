"""Online softmax against a retained reference: the running maximum may lag behind (specification 0x09).

A score ``s`` becomes the base-2 logit ``b = scale_log2 * s``. What a row has accumulated is expressed in a *frame*, the
retained base-2 reference ``r = scale_log2 * a``, with an offset ``omega`` that lifts P in its number format:

    D = sum 2**(b - r + omega)             N = sum 2**(b - r + omega) v

A block B of new logits proposes ``c = max(r, max B)``, and only a proposal that is far enough away is taken:

    r' = c  if  c - r > tau  else  r       gamma = 2**(r - r')
    D' = gamma D + sum 2**(b - r' + omega) N' = gamma N + sum 2**(b - r' + omega) v
    finish:  O = N / D                     lse = (r + log2 D - omega) ln 2

``gamma`` moves both states into the new frame, so frame and offset cancel: the result is attention for every tau and
omega. ``tau = 0, omega = 0`` is `cupyfa.oracles.softmax.OnlineSoftmax`, bit for bit. What the frame does decide is the
range of P, at most ``2**(tau + omega)``, and how often O must be rescaled (arXiv 2603.05451, section 3.1.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .float32 import fma_rn
from .formats import E4M3FN, E5M2, Format
from .violations import ContractViolation

__all__ = ["POLICIES", "Policy", "RangeExceeded", "RetainedSoftmax", "attend"]

Array = npt.NDArray[np.floating]
Booleans = npt.NDArray[np.bool_]
Exp2 = Callable[[Array], Array]


class RangeExceeded(ContractViolation):
    """``2**(tau + omega)`` does not fit the format that P is rounded to (0x09)."""


@dataclass(frozen=True)
class Policy:
    """How far the reference may lag, and where in its format P lies (0x09).

    Attributes
    ----------
    tau : float
        Threshold in base-2 units: the reference is kept while the maximum has grown by at most this. 0 always follows.
    omega : float
        Offset of the exponent; P of a key at the reference is ``2**omega``.

    Examples
    --------
    >>> Policy(tau=8, omega=0).largest, Policy(4, 4).headroom(E4M3FN)
    (256.0, 1.75)
    """

    tau: float
    omega: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tau) and self.tau >= 0):
            raise ValueError(f"policy: tau is {self.tau}; it must be finite and not negative")
        if not math.isfinite(self.omega):
            raise ValueError(f"policy: omega is {self.omega}; it must be finite")

    @property
    def largest(self) -> float:
        """The largest P that can occur, ``2**(tau + omega)``."""
        exponent = self.tau + self.omega
        return math.inf if exponent >= 1024 else float(2.0**exponent)

    def headroom(self, fmt: Format) -> float:
        """Return how many times the largest P fits into a format, ``fmt.max / largest``."""
        return fmt.max / self.largest if self.largest else math.inf

    def check(self, fmt: Format) -> None:
        """Raise unless every P fits.

        Parameters
        ----------
        fmt : Format
            What P is rounded to before it multiplies V.

        Raises
        ------
        RangeExceeded
            If ``2**(tau + omega)`` is above the largest finite value.
        """
        if self.largest > fmt.max:
            raise RangeExceeded(
                f"policy: 2**({self.tau} + {self.omega}) = {self.largest} exceeds {fmt.max} of {fmt.name}"
            )


POLICIES = {
    "bfloat16": Policy(tau=8, omega=0),
    "float16": Policy(tau=8, omega=0),
    E4M3FN.name: Policy(tau=4, omega=4),
    E5M2.name: Policy(tau=4, omega=8),
}
"""The pinned source's choice for each format of P."""


class RetainedSoftmax:
    """The softmax of score rows that arrive block by block, with a reference that follows only when it must (0x09).

    Attributes
    ----------
    reference : numpy.ndarray
        ``(..., rows, 1)``: the retained reference a, in units of the scores; -inf before the first key. A legal frame,
        *not* the running maximum: it lies up to ``tau / scale_log2`` below.
    maximum : numpy.ndarray
        ``(..., rows, 1)``: the true running maximum. For observation only; nothing is computed from it.
    sum : numpy.ndarray
        ``(..., rows, 1)``: the denominator D in the retained frame.
    rescales : numpy.ndarray
        int, ``(..., rows)``: how often the reference of a row moved while the row had accumulated something.

    Parameters
    ----------
    shape : tuple of int
        ``(..., rows)``.
    policy : Policy
        Threshold and offset.
    scale_log2 : float, optional
        ``softmax_scale * log2(e)``, positive; 1 if the scores are base-2 logits already. A threshold is compared with
        ``(candidate - retained) * scale_log2``, never with a difference of raw scores.
    dtype : type, optional
        float64, or float32 for the arithmetic of the kernels.
    vote_rows : int, optional
        Rows that decide together, as the 16 rows of a warp do: if one must move its reference, all of them take their
        candidates. 1, the default, decides row by row.
    exp2 : callable, optional
        What computes 2**x; NumPy's by default.

    Examples
    --------
    >>> softmax = RetainedSoftmax((1,), Policy(tau=2, omega=0))
    >>> for block in ([0.0], [1.0], [2.0]):
    ...     P, gamma = softmax.update(np.array([block]))
    >>> softmax.reference.item(), softmax.maximum.item(), P.item(), gamma.item()  # the frame is kept
    (0.0, 2.0, 4.0, 1.0)
    >>> P, gamma = softmax.update(np.array([[3.0]]))
    >>> softmax.reference.item(), P.item(), gamma.item(), softmax.sum.item() == (1 + 2 + 4) / 8 + 1
    (3.0, 1.0, 0.125, True)
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        policy: Policy,
        *,
        scale_log2: float = 1.0,
        dtype: type[np.float32] | type[np.float64] = np.float64,
        vote_rows: int = 1,
        exp2: Exp2 = np.exp2,
    ) -> None:
        if not (math.isfinite(scale_log2) and scale_log2 > 0):
            raise ValueError(f"softmax: scale_log2 is {scale_log2}; it must be positive, or masked scores turn to +inf")
        if not shape or min(shape) < 0:
            raise ValueError(f"softmax: shape is {shape}; it must be (..., rows)")
        if vote_rows < 1 or shape[-1] % vote_rows:
            raise ValueError(f"softmax: {shape[-1]} rows are no multiple of the {vote_rows} that decide together")
        self.policy, self.vote_rows, self.exp2, self.dtype = policy, vote_rows, exp2, dtype
        self.scale_log2 = dtype(scale_log2)
        self.reference: Array = np.full((*shape, 1), -np.inf, dtype=dtype)
        self.maximum: Array = self.reference.copy()
        self.sum: Array = np.zeros((*shape, 1), dtype=dtype)
        self.rescales = np.zeros(shape, dtype=np.int64)

    def _must_move(self, candidate: Array) -> Booleans:
        """Tell which rows take their candidate: those above the threshold, and those that vote with one."""
        with np.errstate(invalid="ignore"):  # -inf - -inf while a row has seen no key: NaN, which exceeds nothing
            above = (candidate - self.reference) * self.scale_log2 > self.dtype(self.policy.tau)
        groups = above.reshape(*above.shape[:-2], -1, self.vote_rows)
        together: Booleans = np.broadcast_to(groups.any(axis=-1, keepdims=True), groups.shape).reshape(above.shape)
        return together

    def _frame(self, reference: Array) -> Array:
        """Return the base-2 reference r, rounded once: whatever its rounding error, it is the same in P, gamma and lse.

        A row that has seen no key has a reference of -inf; it is measured against 0, for -inf - -inf is NaN.
        """
        return np.where(np.isneginf(reference), self.dtype(0), reference * self.scale_log2)

    def _exponent(self, s: Array, r: Array) -> Array:
        """Return ``scale_log2 * s - r + omega`` as kernels form it: one multiply-add, with a constant per row."""
        constant = self.dtype(self.policy.omega) - r
        if self.dtype is np.float32:
            return fma_rn(s, self.scale_log2, constant)
        x: Array = s * self.scale_log2 + constant
        return x

    def update(self, scores: Array) -> tuple[Array, Array]:
        """Take in one block of scores.

        Parameters
        ----------
        scores : numpy.ndarray
            ``(..., rows, keys)``, masked with -inf; rounded to `dtype` where it is wider.

        Returns
        -------
        P : numpy.ndarray
            Shape of `scores`: ``2**(scale_log2 * scores - r + omega)`` in the frame that holds after this block.
        gamma : numpy.ndarray
            ``(..., rows, 1)``: what everything accumulated so far must be multiplied by; 1 where the frame is kept.
        """
        s: Array = scores.astype(self.dtype)
        if s.shape[:-1] != self.sum.shape[:-1] or not s.shape[-1]:
            raise ValueError(f"softmax: scores have shape {s.shape}; they must be {(*self.sum.shape[:-1], 'keys')}")
        # fmax passes over a NaN score; its exponential is NaN, and so is the sum.
        largest: Array = np.fmax.reduce(s, axis=-1, keepdims=True)
        candidate: Array = np.fmax(self.reference, largest)
        reference: Array = np.where(self._must_move(candidate), candidate, self.reference)
        moved, first = reference != self.reference, np.isneginf(self.reference)
        r, old_r = self._frame(reference), self._frame(self.reference)
        with np.errstate(over="ignore", invalid="ignore"):  # a threshold too large, or an infinite score
            # What precedes the first key is nothing, whatever frame it is said to be in.
            gamma: Array = np.where(first & moved, self.dtype(0), self.exp2(old_r - r))
            P = self.exp2(self._exponent(s, r))
        self.rescales += (moved & ~first)[..., 0]
        self.maximum = np.fmax(self.maximum, largest)
        self.reference = reference
        self.sum = self.sum * gamma + P.sum(axis=-1, keepdims=True)
        return P, gamma

    def finish(self) -> tuple[Array, Array]:
        """Close the rows.

        Returns
        -------
        inverse : numpy.ndarray
            ``(..., rows, 1)``: the factor 1 / D that normalises the numerator; 0 for a row without keys.
        lse : numpy.ndarray
            ``(..., rows)``, natural logarithm, from the retained frame alone: ``(r + log2(D) - omega) * ln 2``; -inf
            for a row without keys.
        """
        empty = self.sum == 0
        divisor: Array = np.where(empty, self.dtype(1), self.sum)
        inverse: Array = np.where(empty, self.dtype(0), self.dtype(1) / divisor)
        with np.errstate(divide="ignore"):
            log2_sum = self._frame(self.reference) + np.log2(self.sum) - self.dtype(self.policy.omega)
        lse: Array = (log2_sum * self.dtype(math.log(2)))[..., 0]
        return inverse, lse


def attend(
    scores: Array,
    values: Array,
    policy: Policy,
    *,
    block: int,
    scale_log2: float = 1.0,
    dtype: type[np.float32] | type[np.float64] = np.float64,
    vote_rows: int = 1,
    p_format: Format | None = None,
    exp2: Exp2 = np.exp2,
) -> tuple[Array, Array, RetainedSoftmax]:
    """Run the recurrence over whole rows, numerator included (0x09).

    Parameters
    ----------
    scores : numpy.ndarray
        ``(rows, keys)``, masked with -inf.
    values : numpy.ndarray
        ``(keys, head_dim_v)``, finite.
    policy : Policy
        Threshold and offset.
    block : int
        Keys per block; the last block may be shorter. Blocks come in ascending order.
    scale_log2, dtype, vote_rows, exp2 : optional
        As for `RetainedSoftmax`.
    p_format : Format, optional
        What P is rounded to as an operand of ``P @ values``; D takes the unrounded P, as in the kernels.

    Returns
    -------
    out : numpy.ndarray
        `dtype`, ``(rows, head_dim_v)``; 0 in rows that see no key.
    lse : numpy.ndarray
        `dtype`, ``(rows,)``.
    softmax : RetainedSoftmax
        The state at the end: frame, true maximum, number of rescales.

    Examples
    --------
    >>> b, v = np.array([[0.0, 5.0, 9.0, 20.0]]), np.array([[1.0], [2.0], [3.0], [4.0]])
    >>> results = [attend(b, v, Policy(tau, omega), block=1)[0].item() for tau, omega in ((0, 0), (8, 0), (4, 4))]
    >>> max(results) - min(results) < 1e-15
    True
    """
    if scores.ndim != 2 or values.ndim != 2 or scores.shape[1] != values.shape[0]:
        raise ValueError(f"attend: scores {scores.shape} and values {values.shape}; need (rows, keys) and (keys, dims)")
    if block < 1:
        raise ValueError(f"attend: block is {block}; it must be at least 1")
    softmax = RetainedSoftmax(
        scores.shape[:1], policy, scale_log2=scale_log2, dtype=dtype, vote_rows=vote_rows, exp2=exp2
    )
    N: Array = np.zeros((scores.shape[0], values.shape[1]), dtype=dtype)
    for begin in range(0, scores.shape[1], block):
        P, gamma = softmax.update(scores[:, begin : begin + block])
        operand = P if p_format is None else p_format.round(P).astype(dtype)
        N = N * gamma + operand @ values[begin : begin + block].astype(dtype)
    inverse, lse = softmax.finish()
    return N * inverse, lse, softmax
