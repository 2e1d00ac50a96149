"""Views of 16-bit numbers that TMA does not take where they are, in buffers that show what was written beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_POISON = 0x7FFF  # a NaN in both formats


@dataclass(frozen=True)
class OddView:
    """How a matrix with the axes (..., rows, heads, columns) lies in a buffer.

    Attributes
    ----------
    id : str
        For pytest.
    buffer : Callable
        Shape of the view -> shape of the buffer.
    view : Callable
        The buffer and the shape of the view -> the view.
    """

    id: str
    buffer: Callable[[tuple[int, ...]], tuple[int, ...]]
    view: Callable[[Any, tuple[int, ...]], Any]

    def poisoned(self, xp: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        """Return the bits of a new buffer, all of them NaN, and the view into it."""
        bits = xp.full(self.buffer(shape), _POISON, np.uint16)
        view = self.view(bits.view(dtype), shape)
        assert view.shape == shape
        return bits, view

    def holding(self, xp: Any, matrix: Any) -> Any:
        """Return a view of a new buffer that holds this matrix."""
        _, view = self.poisoned(xp, matrix.shape, matrix.dtype)
        view.view(np.uint16)[...] = matrix.view(np.uint16)
        return view


def written(bits: Any) -> int:
    """How many numbers of a buffer that was poisoned are none now."""
    return int((bits != _POISON).sum())


def _wider(columns: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    return lambda shape: (*shape[:-1], shape[-1] + columns)


def _same(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


ODD_VIEWS = (
    OddView("columns-of-more", _wider(1), lambda buffer, shape: buffer[..., : shape[-1]]),
    OddView("columns-from-the-second", _wider(8), lambda buffer, shape: buffer[..., 1 : shape[-1] + 1]),
    OddView(
        "one-element-on",
        lambda shape: (math.prod(shape) + 2,),
        lambda buffer, shape: buffer[1:-1].reshape(shape),
    ),
    OddView(
        "every-other-column",
        lambda shape: (*shape[:-1], 2 * shape[-1]),
        lambda buffer, shape: buffer[..., 1::2],
    ),
    OddView(
        "columns-before-rows",
        lambda shape: (*shape[:-3], shape[-1], shape[-2], shape[-3]),
        lambda buffer, shape: buffer.swapaxes(-3, -1),
    ),
    OddView("rows-backwards", _same, lambda buffer, shape: buffer[..., ::-1, :, :]),
    OddView("heads-backwards", _same, lambda buffer, shape: buffer[..., ::-1, :]),
    OddView("columns-backwards", _same, lambda buffer, shape: buffer[..., ::-1]),
)
