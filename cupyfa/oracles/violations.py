"""The base of the errors that the state machines of the oracles raise, and the checks that several of them share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["ContractViolation", "check_broadcast", "check_indices", "check_range", "check_shape"]


class ContractViolation(ValueError):
    """A contract of the specification is broken; each subclass names one way to break it (specification 0x0E)."""


def check_range(where: str, low: float, high: float | None = None, /, **values: float) -> None:
    """Raise unless every value is in ``low .. high``, both included; a NaN never is (specification 0x0E).

    Parameters
    ----------
    where : str
        Start of the message.
    low, high : float
        The range; no `high`, no upper end.
    **values : float
        What is checked, by name.

    Raises
    ------
    ContractViolation
        Naming the value and its range.

    Examples
    --------
    >>> check_range("tile", 1, rows=128)
    >>> check_range("tile", 0, 31, lane=99)
    Traceback (most recent call last):
    cupyfa.oracles.violations.ContractViolation: tile: lane is 99; it must be in 0 .. 31
    """
    for name, value in values.items():
        if not (value >= low and (high is None or value <= high)):
            allowed = f"at least {low}" if high is None else f"in {low} .. {high}"
            raise ContractViolation(f"{where}: {name} is {value}; it must be {allowed}")


def check_shape(where: str, shape: tuple[int | str, ...], /, **arrays: npt.NDArray[np.generic]) -> None:
    """Raise unless every array has the shape; a word stands for an axis of any length (specification 0x0E).

    Parameters
    ----------
    where : str
        Start of the message.
    shape : tuple of int or str
        What is asked for.
    **arrays : numpy.ndarray
        What is checked, by name.

    Raises
    ------
    ContractViolation
        Naming the array, its shape and the one that it must have.

    Examples
    --------
    >>> check_shape("rmse", (2, "keys"), got=np.zeros((3, 4)))
    Traceback (most recent call last):
    cupyfa.oracles.violations.ContractViolation: rmse: got has shape (3, 4); it must be (2, keys)
    """
    for name, array in arrays.items():
        fits = array.ndim == len(shape) and all(
            isinstance(want, str) or have == want for have, want in zip(array.shape, shape, strict=True)
        )
        if not fits:
            wanted = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
            raise ContractViolation(f"{where}: {name} has shape {array.shape}; it must be ({wanted})")


def check_indices(where: str, indices: npt.NDArray[np.integer], size: int) -> None:
    """Raise unless the indices are one axis of numbers in ``0 .. size - 1`` (specification 0x0E).

    Parameters
    ----------
    where : str
        Start of the message.
    indices : numpy.ndarray
        What is checked.
    size : int
        One past the largest index.

    Raises
    ------
    ContractViolation
        Naming an index that is outside.

    Examples
    --------
    >>> check_indices("rows", np.array([0, 5]), 2)
    Traceback (most recent call last):
    cupyfa.oracles.violations.ContractViolation: rows: index 5 is outside 0 .. 1
    """
    check_shape(where, ("count",), indices=indices)
    outside = indices[(indices < 0) | (indices >= size)]
    if outside.size:
        raise ContractViolation(f"{where}: index {int(outside[0])} is outside 0 .. {size - 1}")


def check_broadcast(where: str, **operands: npt.ArrayLike) -> None:
    """Raise unless the operands broadcast against each other (specification 0x0E).

    Parameters
    ----------
    where : str
        Start of the message.
    **operands : array_like
        What is checked, by name.

    Raises
    ------
    ContractViolation
        Naming every operand and its shape.

    Examples
    --------
    >>> check_broadcast("fma_rn", a=[1.0, 2.0], b=[1.0, 2.0, 3.0])
    Traceback (most recent call last):
    cupyfa.oracles.violations.ContractViolation: fma_rn: a (2,), b (3,) do not broadcast
    """
    try:
        np.broadcast_shapes(*(np.shape(x) for x in operands.values()))
    except ValueError as error:
        shapes = ", ".join(f"{name} {np.shape(x)}" for name, x in operands.items())
        raise ContractViolation(f"{where}: {shapes} do not broadcast") from error
