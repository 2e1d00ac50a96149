"""Outputs between canaries: writes outside of an array, and elements that nobody wrote, become visible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Guarded", "guarded_empty"]

CANARY = 0x7FC1DEAD
_CANARY_BYTES = np.array([CANARY], dtype="<u4").view(np.uint8)
_ALIGNMENT = 256


def to_numpy(array: Any) -> npt.NDArray[Any]:
    """Bring an array to the CPU.

    Parameters
    ----------
    array : numpy.ndarray or cupy.ndarray
        Any array; CuPy's have ``get``.

    Returns
    -------
    numpy.ndarray
        The same values.
    """
    return array.get() if hasattr(array, "get") else np.asarray(array)


def _address(array: Any) -> int:
    """Return the address of an array's first byte, on the CPU or on the GPU."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


@dataclass
class Guarded:
    """An array between two canaries; made by `guarded_empty`.

    Attributes
    ----------
    array : numpy.ndarray or cupy.ndarray
        The array itself, to be given to the code under test.
    buffer : numpy.ndarray or cupy.ndarray
        The uint8 buffer that it is a view of.
    begin, end : int
        Where it begins and ends in the buffer, in bytes.
    """

    array: Any
    buffer: Any = field(repr=False)
    begin: int
    end: int

    def check(self, what: str = "array") -> None:
        """Compare every byte of both canaries.

        Parameters
        ----------
        what : str, optional
            Name of the array, for the message.

        Raises
        ------
        AssertionError
            If a byte has changed. Tells on which side, how many bytes, and how far the nearest one is from the array.
        """
        broken = []
        for side, part in (("before", self.buffer[: self.begin]), ("after", self.buffer[self.end :])):
            phase = 0 if side == "before" else self.end
            have = to_numpy(part)
            bad = np.flatnonzero(have != np.resize(np.roll(_CANARY_BYTES, -(phase % 4)), have.size))
            if bad.size:
                distance = self.begin - int(bad[-1]) if side == "before" else int(bad[0]) + 1
                broken.append(f"{bad.size} bytes {side} it, the nearest one {distance} bytes from its edge")
        if broken:
            raise AssertionError(
                f"canary broken around {what} {self.array.dtype} {tuple(self.array.shape)}: " + "; ".join(broken)
            )


def guarded_empty(
    shape: Sequence[int], dtype: npt.DTypeLike, xp: Any = np, poison: float = math.nan, guard_bytes: int = 4096
) -> Guarded:
    """Make an array that shows what was never written, and what was written outside it.

    Parameters
    ----------
    shape : sequence of int
        Shape of the array.
    dtype : data-type
        A float type, or any other with a `poison` it can hold.
    xp : module, optional
        ``numpy`` or ``cupy``.
    poison : float, optional
        What the array is filled with.
    guard_bytes : int, optional
        Canary bytes before and after, at least. They hold 0x7FC1DEAD, beginning with the very next byte.

    Returns
    -------
    Guarded
        Its ``array`` begins at a multiple of 256 bytes.

    Examples
    --------
    >>> guarded = guarded_empty((2, 3), np.float32)
    >>> guarded.array[...] = 1
    >>> guarded.check()
    >>> guarded.buffer[guarded.end] = 0  # one byte too far
    >>> guarded.check("out")
    Traceback (most recent call last):
        ...
    AssertionError: canary broken around out float32 (2, 3): 1 bytes after it, the nearest one 1 bytes from its edge
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    words = -(-(size + 2 * guard_bytes + _ALIGNMENT) // 4)
    pattern = xp.full(words, CANARY, dtype=np.uint32)
    buffer = pattern.view(np.uint8)
    begin = guard_bytes + -(_address(pattern) + guard_bytes) % _ALIGNMENT
    array = buffer[begin : begin + size].view(dtype).reshape(tuple(shape))
    array[...] = np.asarray(poison).astype(dtype)
    return Guarded(array, buffer, begin, begin + size)
