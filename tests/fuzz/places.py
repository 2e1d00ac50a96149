"""Where the elements of an array lie in memory: any order of axes, gaps, repeated axes, negative strides.

An array lies in a buffer of its own, amid canaries: what is read beside it is NaN, and what is written there shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyfa.testing import CANARY

_MARGIN = 512  # bytes before and after, at least
_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Place:
    """An array's geometry in its buffer; strides, offset and size are in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    offset: int
    size: int

    def view(self, buffer: Any) -> Any:
        """The array in a buffer of NumPy or CuPy."""
        if isinstance(buffer, np.ndarray):
            return np.ndarray(self.shape, self.dtype, buffer, self.offset, self.strides)
        return type(buffer)(self.shape, self.dtype, buffer.data + self.offset, self.strides)

    def fill(self, values: Any) -> np.ndarray[Any, Any]:
        """A buffer with these values, and canaries all around them."""
        words = np.full((self.size + 256) // 4, CANARY, np.uint32).view(np.uint8)
        begin = -words.ctypes.data % 256
        buffer = words[begin : begin + self.size]
        self.view(buffer)[...] = values
        return buffer

    def changes_outside(self, before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> int:
        """How many bytes of the buffer have changed that are not the array's."""
        expected = before.copy()
        self.view(expected)[...] = self.view(after)
        return int((expected != after).sum())


def draw_place(
    choice: random.Random,
    shape: Sequence[int],
    dtype: Any,
    *,
    for_tma: bool = True,
    may_repeat: bool = False,
    reverse: bool = False,
) -> Place:
    """Draw a place: dense half of the time.

    `for_tma` keeps to what the copy engine takes: the last axis is contiguous, all else a multiple of 16 bytes.
    `may_repeat` allows strides of 0, `reverse` makes a negative one where an axis has two elements.
    """
    dtype = np.dtype(dtype)
    unit = _ALIGNMENT // dtype.itemsize if for_tma else 1
    order = list(range(len(shape)))
    if choice.random() < 0.4:
        free = order[:-1] if for_tma else order
        order[: len(free)] = choice.sample(free, len(free))
    repeated = {axis for axis in order[: -1 if for_tma else None] if may_repeat and choice.random() < 0.1}
    sliced = choice.random() < 0.4
    first = 0 if for_tma else choice.randrange(_ALIGNMENT // dtype.itemsize)  # in elements, as are these
    strides, extent = [0] * len(shape), 1
    for axis in reversed(order):
        if axis in repeated:
            continue
        step, before, behind = 1, 0, 0
        if sliced:
            is_row = for_tma and axis == order[-1]
            step = 1 if is_row else choice.choice((1, 1, 2, 3))
            before, behind = (choice.randrange(3) * (unit if is_row else 1) for _ in range(2))
        if for_tma and axis == order[-1]:
            behind += -(before + max(1, shape[axis]) + behind) % unit
        strides[axis] = step * extent
        first += before * extent
        extent *= before + max(0, shape[axis] - 1) * step + 1 + behind
    long = [axis for axis in order if shape[axis] > 1 and strides[axis]]
    if reverse and long:
        axis = choice.choice(long)
        first += (shape[axis] - 1) * strides[axis]
        strides[axis] *= -1
    offset = _MARGIN + _ALIGNMENT * choice.randrange(8) + first * dtype.itemsize
    size = -(-(2 * _MARGIN + 9 * _ALIGNMENT + extent * dtype.itemsize) // 4) * 4
    return Place(tuple(shape), dtype, tuple(n * dtype.itemsize for n in strides), offset, size)
