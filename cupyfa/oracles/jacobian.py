"""The softmax on the way back: the scalar of a row, and its Jacobian applied to a gradient (specification 0x0A)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .violations import ContractViolation

__all__ = ["delta_from_output", "delta_from_probabilities", "softmax_backward"]

Array = npt.NDArray[np.floating]


def _check_rows(where: str, **arrays: Array) -> None:
    """Raise unless the arrays have one shape, rows of something: a row must not be taken for all rows."""
    first = next(iter(arrays.values())).shape
    if not first or any(x.shape != first for x in arrays.values()):
        shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
        raise ContractViolation(f"{where}: {shapes} do not fit each other; they must be equal and have rows")


def delta_from_probabilities(P: Array, dP: Array) -> Array:
    """Return the row scalar as its definition says, ``delta_i = sum_j P_ij dP_ij`` (0x0A).

    Parameters
    ----------
    P, dP : numpy.ndarray
        ``(..., rows, keys)``.

    Returns
    -------
    numpy.ndarray
        ``(..., rows)``.

    Examples
    --------
    >>> delta_from_probabilities(np.array([[0.25, 0.75]]), np.array([[4.0, 8.0]]))
    array([7.])
    """
    _check_rows("delta_from_probabilities", P=P, dP=dP)
    delta: Array = (P * dP).sum(axis=-1)
    return delta


def delta_from_output(dO: Array, O: Array) -> Array:
    """Return the row scalar as kernels compute it, ``delta_i = dO_i . O_i`` (0x0A).

    Parameters
    ----------
    dO, O : numpy.ndarray
        ``(..., rows, head_dim_v)``.

    Returns
    -------
    numpy.ndarray
        ``(..., rows)``; equal to `delta_from_probabilities` because ``O = P V`` and ``dP = dO V'``.

    Examples
    --------
    >>> delta_from_output(np.array([[1.0, 2.0]]), np.array([[3.0, 2.0]]))
    array([7.])
    """
    _check_rows("delta_from_output", dO=dO, O=O)
    delta: Array = (dO * O).sum(axis=-1)
    return delta


def softmax_backward(P: Array, dP: Array, delta: Array) -> Array:
    """Return ``dS = P (dP - delta)``, the row Jacobian of the softmax applied to dP (0x0A).

    Parameters
    ----------
    P, dP : numpy.ndarray
        ``(..., rows, keys)``; P is 0 for unseen keys, where dS is 0 whatever dP holds.
    delta : numpy.ndarray
        ``(..., rows)``.

    Returns
    -------
    numpy.ndarray
        ``(..., rows, keys)``. Rows sum to zero as far as delta is that of P and dP.

    Examples
    --------
    >>> P, dP = np.array([[0.25, 0.75, 0.0]]), np.array([[4.0, 8.0, np.nan]])
    >>> softmax_backward(P, dP, np.array([7.0]))
    array([[-0.75,  0.75,  0.  ]])
    """
    if not P.ndim or P.shape != dP.shape or delta.shape != P.shape[:-1]:
        raise ValueError(f"softmax_backward: P {P.shape}, dP {dP.shape}, delta {delta.shape} do not fit each other")
    with np.errstate(invalid="ignore"):
        return np.where(P == 0, P.dtype.type(0), P * (dP - delta[..., None]))
