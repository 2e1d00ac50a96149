"""Test inputs from a counter-based hash: the same bits in NumPy and on the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["random_array"]

_GOLDEN = 0x9E3779B97F4A7C15
_CHUNK = 1 << 24


def _finalize(x: Any) -> Any:
    """Apply the finalizer of splitmix64 to an array of uint64; multiplications wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_array(shape: Sequence[int], dtype: npt.DTypeLike, seed: int, *, xp: Any = np, amplitude: float = 1.0) -> Any:
    """Fill an array with reproducible, nearly normal numbers: the same bits from NumPy and from CuPy.

    Element ``n`` (C order) is a hash of ``n`` and `seed`, the finalizer of splitmix64. Its four 16-bit pieces are added
    up, which is exact, centred, which is exact, and multiplied once by a float32 constant: no step can differ between
    two machines, as a logarithm or a cosine could.

    Parameters
    ----------
    shape : sequence of int
        Shape of the result.
    dtype : data-type
        float16, bfloat16, float32 or float64; rounded once, from float32, to nearest even.
    seed : int
        Any integer. Different seeds give unrelated arrays.
    xp : module, optional
        ``numpy`` or ``cupy``.
    amplitude : float, optional
        Standard deviation. The mean is 0 and no element exceeds ``3.464 * amplitude``.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Contiguous. It is made in pieces, so that 2**31 elements need less than 1 GiB beside it.

    Examples
    --------
    >>> random_array((4,), np.float32, seed=0)
    array([ 1.4286195 ,  0.13914867, -1.4532249 ,  1.1192416 ], dtype=float32)
    """
    result = xp.empty(tuple(shape), dtype=dtype)
    flat = result.reshape(-1)
    # Four pieces, uniform on 0 .. 65535: their sum has mean 2 * 65535 and standard deviation sqrt((65536**2 - 1) / 3).
    scale = np.float32(amplitude / math.sqrt((65536.0**2 - 1.0) / 3.0))
    offset = _finalize(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))[0]
    for begin in range(0, flat.size, _CHUNK):
        end = min(begin + _CHUNK, flat.size)
        x = xp.arange(begin + 1, end + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + offset
        x = _finalize(x)
        piece = np.uint64(0xFFFF)
        total = (x & piece) + ((x >> np.uint64(16)) & piece) + ((x >> np.uint64(32)) & piece) + (x >> np.uint64(48))
        centred = total.astype(np.int32) - np.int32(2 * 65535)
        flat[begin:end] = (centred.astype(np.float32) * scale).astype(dtype)
    return result
