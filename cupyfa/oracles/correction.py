"""Rescaling O: who takes part, and when (specification 0x05 and 0x09).

The softmax decides row by row that a frame moves; O is rescaled by a warp as a whole, because the copies between
tensor memory and registers need all of its lanes. So a warp votes: if any of its rows has ``gamma < 1``, all rows are
multiplied, each by its own gamma, and for the others that is 1.

In the two-stage schedule the product of the previous block is in flight while the next block's softmax runs. There are
two legal places for ``O *= gamma``, and each belongs to one bookkeeping of gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from .retained import Policy, RetainedSoftmax
from .violations import ContractViolation, check_shape

__all__ = ["DivergentCorrection", "rescale_by_vote", "rescale_per_lane", "two_stage"]

Array = npt.NDArray[np.floating]


class DivergentCorrection(ContractViolation):
    """The lanes of one warp disagree about entering a step that needs all of them (0x09)."""


def _groups(O: Array, gamma: Array, lanes: int) -> Array:
    """Check the shapes and return gamma as ``(warps, lanes)``."""
    if O.ndim != 2 or gamma.shape != (O.shape[0], 1):
        raise ValueError(f"correction: O {O.shape} and gamma {gamma.shape}; they must be (rows, dims) and (rows, 1)")
    if lanes < 1 or O.shape[0] % lanes:
        raise ValueError(f"correction: {O.shape[0]} rows are no multiple of the {lanes} rows of a warp")
    if not ((gamma >= 0) & (gamma <= 1)).all():
        raise ContractViolation("correction: gamma must be in [0, 1]; a frame only moves up")
    return gamma.reshape(-1, lanes)


def rescale_by_vote(O: Array, gamma: Array, *, lanes: int = 32) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Rescale O warp by warp; a warp without any ``gamma < 1`` skips the step (0x09).

    Parameters
    ----------
    O : numpy.ndarray
        ``(rows, head_dim_v)``, unnormalised.
    gamma : numpy.ndarray
        ``(rows, 1)``, in ``[0, 1]``.
    lanes : int, optional
        Rows per warp: 32 where a thread owns a row (Blackwell), 16 in WGMMA's accumulator (Hopper).

    Returns
    -------
    O : numpy.ndarray
        Rescaled; rows with ``gamma == 1`` are unchanged bit for bit.
    active : numpy.ndarray
        Booleans, ``(warps,)``: which warps did the work.

    Examples
    --------
    >>> gamma = np.ones((64, 1)); gamma[3] = 0.5
    >>> O, active = rescale_by_vote(np.full((64, 2), 8.0), gamma)
    >>> active.tolist(), O[:5, 0].tolist()
    ([True, False], [8.0, 8.0, 8.0, 4.0, 8.0])
    """
    active = np.any(_groups(O, gamma, lanes) < 1, axis=1)
    takes_part = np.repeat(active, lanes)[:, None]
    return np.where(takes_part, O * gamma, O), active


def rescale_per_lane(O: Array, gamma: Array, *, lanes: int = 32) -> Array:
    """Rescale with a branch per lane instead of a vote: what must not be done (0x09).

    Parameters
    ----------
    O, gamma, lanes
        As for `rescale_by_vote`.

    Returns
    -------
    numpy.ndarray
        O rescaled, if no warp diverges.

    Raises
    ------
    DivergentCorrection
        If some lanes of a warp have ``gamma < 1`` and others do not: the cooperative copy would wait for lanes that
        never come.

    Examples
    --------
    >>> rescale_per_lane(np.full((2, 1), 8.0), np.full((2, 1), 0.5), lanes=2).tolist()
    [[4.0], [4.0]]
    """
    enters = _groups(O, gamma, lanes) < 1
    for warp, lane in enumerate(enters):
        if lane.any() and not lane.all():
            raise DivergentCorrection(f"warp {warp}: {int(lane.sum())} of its {lanes} lanes enter the rescale of O")
    return np.where(gamma < 1, O * gamma, O)


def two_stage(
    scores: Sequence[npt.NDArray[np.float32]],
    values: Sequence[npt.NDArray[np.float32]],
    rescale: Literal["before", "after", "before with the new factor"],
    policy: Policy | None = None,
) -> tuple[Array, Array]:
    """Run the two-stage schedule: PV of block j - 1 while the softmax of block j is computed (0x05).

    Parameters
    ----------
    scores : sequence of numpy.ndarray
        Base-2 logits of each block, float32, ``(rows, keys)``.
    values : sequence of numpy.ndarray
        float32, ``(keys, head_dim_v)``, one per block.
    rescale : str
        ``"after"``: O is rescaled when its product is complete, by the factor of the softmax that ran meanwhile.
        ``"before"``: O is rescaled before the product is issued, by the factor that the *previous* softmax left, which
        has to be kept for it. ``"before with the new factor"`` moves the statement without the bookkeeping, and is
        wrong: it is here to be caught.
    policy : Policy, optional
        Threshold and offset; by default the reference is the running maximum.

    Returns
    -------
    out : numpy.ndarray
        float32, ``(rows, head_dim_v)``.
    lse : numpy.ndarray
        float32, ``(rows,)``.

    Examples
    --------
    >>> S = [np.float32([[0, 1]]), np.float32([[3, 2]]), np.float32([[1, 5]])]
    >>> V = [np.float32([[1], [2]]), np.float32([[3], [4]]), np.float32([[5], [6]])]
    >>> two_stage(S, V, "before")[0] == two_stage(S, V, "after")[0]
    array([[ True]])
    """
    if not scores or len(scores) != len(values):
        raise ValueError(f"two_stage: {len(scores)} score blocks and {len(values)} value blocks; need as many, and one")
    if rescale not in ("before", "after", "before with the new factor"):
        raise ContractViolation(f"two_stage: rescale is {rescale!r}; no such place")
    check_shape("two_stage", ("rows", "keys"), scores=scores[0], values=values[0])
    for j, (s, v) in enumerate(zip(scores, values, strict=True)):
        check_shape(f"two_stage: block {j}", (len(scores[0]), "keys"), scores=s)
        check_shape(f"two_stage: block {j}", (s.shape[1], values[0].shape[1]), values=v)
    policy = Policy(tau=0, omega=0) if policy is None else policy
    softmax = RetainedSoftmax(scores[0].shape[:1], policy, dtype=np.float32)
    O: Array = np.zeros((scores[0].shape[0], values[0].shape[1]), dtype=np.float32)
    P, gamma = softmax.update(scores[0])
    for j in range(1, len(scores)):
        old_gamma = gamma  # QK(j) is issued here
        if rescale == "before":
            O = O * old_gamma
        product = P @ values[j - 1]  # PV(j - 1) is in flight from here on ...
        P, gamma = softmax.update(scores[j])
        if rescale == "before with the new factor":
            O = O * gamma
        O = O + product  # ... to here
        if rescale == "after":
            O = O * gamma
    if rescale == "before":
        O = O * gamma
    inverse, lse = softmax.finish()
    return (O + P @ values[-1]) * inverse, lse
