"""Copies of the matrices that the kernel cannot take where they are.

Tiles are moved by TMA, which needs an address and strides that are multiples of 16 bytes, and a contiguous last axis. A
matrix without them is copied into memory that has them, once per call, at the speed of memory; the kernel stays as it
is. What a copy is, and where it goes, follows from the geometry of the call alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from cupyfa.errors import UnsupportedError
from cupyfa.operand import TMA_MAX_STRIDE, Layout, Operand, rows_to_next, suits_tma
from cupyfa.problem import Problem

__all__ = ["Copy", "copies_of", "plan_copies", "with_copies"]

_MATRICES = ("q", "k", "v", "out")
_MAX_PACKED_ROW = 2**34  # FwdParams: packed_rows
_SPACING = 256  # bytes; copies begin at multiples of it


class Copy(NamedTuple):
    """Memory that the kernel reads or writes in place of a matrix.

    Attributes
    ----------
    operand : Operand
        What the kernel takes, in BSHD order; it repeats where the matrix does.
    shape : tuple of int
        Of the memory, with the axes of the user's array; 1 where that repeats.
    begin : int
        Where it begins in the workspace, in bytes.
    """

    operand: Operand
    shape: tuple[int, ...]
    begin: int

    @property
    def name(self) -> str:
        """Of which matrix."""
        return self.operand.name

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.operand.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte behind it in the workspace."""
        return self.begin + self.size

    def read(self, matrix: Any, memory: Any) -> None:
        """Copy the user's matrix.

        Parameters
        ----------
        matrix : array
            With the axes of ``shape``.
        memory : array
            uint8, `size` bytes of the same library.
        """
        first = tuple(slice(size) for size in self.shape)
        self._in(memory)[...] = _bits(matrix)[first]

    def write(self, matrix: Any, memory: Any) -> None:
        """Copy back, into the user's matrix.

        Parameters
        ----------
        matrix, memory : array
            As for `read`.
        """
        _bits(matrix)[...] = self._in(memory)

    def _in(self, memory: Any) -> Any:
        return memory.view(np.uint16).reshape(self.shape)


def _bits(matrix: Any) -> Any:
    """View 16-bit numbers as integers, which CuPy can copy whatever they stand for."""
    return matrix.view(np.uint16)


def plan_copies(problem: Problem, layout: Layout, unaligned: Collection[str], begin: int) -> tuple[Copy, ...]:
    """Return the copies that a call needs.

    Parameters
    ----------
    problem : Problem
        With the user's arrays.
    layout : {"BSHD", "BHSD"}
        Of the user's arrays, unless they are packed.
    unaligned : collection of str
        The matrices that TMA cannot take for their addresses.
    begin : int
        How much of the workspace is in use already.

    Returns
    -------
    tuple of Copy
        Almost always empty.

    Raises
    ------
    UnsupportedError
        TMA could not take the copy either.
    """
    if problem.is_empty:
        return ()
    return copies_of(problem, [getattr(problem, name) for name in _MATRICES], layout, unaligned, begin)


def copies_of(
    problem: Problem, matrices: Iterable[Operand], layout: Layout, unaligned: Collection[str], begin: int
) -> tuple[Copy, ...]:
    """Return the copies that matrices need.

    Parameters
    ----------
    problem : Problem
        That they belong to.
    matrices : iterable of Operand
        In BSHD order.
    layout, unaligned, begin
        As for `plan_copies`.

    Returns
    -------
    tuple of Copy
        In the order of the matrices.

    Raises
    ------
    UnsupportedError
        TMA could not take the copy either.
    """
    copies: list[Copy] = []
    packed = problem.packed is not None
    # K and V begin alike: where the strides of one tell another step from batch to batch, both are copied.
    apart = problem.used is not None and rows_to_next(problem.k) != rows_to_next(problem.v)
    for operand in matrices:
        name = operand.name
        if name in unaligned or _unreadable(operand, problem) is not None or (apart and name in ("k", "v")):
            shape, copied = _contiguous(operand, layout, problem.used is None)
            if (axis := _unreadable(copied, problem)) is not None:
                raise UnsupportedError(
                    f"attention: {name} has shape {operand.shape[packed:]}; a contiguous copy of it, which its strides "
                    f"or its address make necessary, has {copied.strides[axis]} bytes from one index of an axis to the "
                    "next, and no kernel takes that many"
                )
            copies.append(Copy(copied, shape[packed:], -(-begin // _SPACING) * _SPACING))
            begin = copies[-1].end
    return tuple(copies)


def with_copies(problem: Problem, copies: tuple[Copy, ...]) -> Problem:
    """Return the problem as the kernel gets it.

    Parameters
    ----------
    problem : Problem
        With the user's arrays.
    copies : tuple of Copy
        Of this problem.

    Returns
    -------
    Problem
        With the copies in place of what was copied.
    """
    changes: dict[str, Any] = {copy.name: copy.operand for copy in copies}
    return dataclasses.replace(problem, **changes) if changes else problem


def _unreadable(operand: Operand, problem: Problem) -> int | None:
    """Return the first axis along which no tensor map can describe a matrix, in BSHD order; None if it can."""
    planned = problem.planned
    if problem.used is not None and rows_to_next(operand) is None:
        return 0
    limits = (TMA_MAX_STRIDE, _MAX_PACKED_ROW if planned else TMA_MAX_STRIDE, TMA_MAX_STRIDE)
    for axis, limit in enumerate(limits):
        if operand.shape[axis] > 1 and not suits_tma(operand.strides[axis], limit):
            return axis
    return None if operand.strides[3] == operand.dtype.itemsize else 3


def _contiguous(operand: Operand, layout: Layout, repeating: bool) -> tuple[tuple[int, ...], Operand]:
    """Return the shape of a copy in the user's layout, and the copy in BSHD order.

    If `repeating`, axes along which the array repeats are not copied: keys that were broadcast to all heads stay one.
    """
    given = operand.in_bshd(layout)  # exchanging two axes undoes itself
    repeats = [repeating and stride == 0 and axis < 3 for axis, stride in enumerate(given.strides)]
    shape = tuple(1 if repeat else size for repeat, size in zip(repeats, given.shape, strict=True))
    dense = Operand.contiguous(operand.name, shape, operand.dtype, operand.device)
    strides = tuple(0 if repeat else stride for repeat, stride in zip(repeats, dense.strides, strict=True))
    return shape, dataclasses.replace(given, strides=strides).in_bshd(layout)
