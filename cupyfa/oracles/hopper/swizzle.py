"""Swizzled tiles in shared memory: where TMA, and ``stmatrix`` after it, put the bytes (specification 0x02).

Companion of ``cuda/layout.cuh``. Addresses are absolute, since the hardware exchanges chunks by address bits.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = ["Index", "Swizzle", "panel_addresses", "require_swizzle", "stmatrix_addresses", "swizzled"]

Index = npt.NDArray[np.int64]

THREADS = 128


class Swizzle(IntEnum):
    """Swizzle modes, by their code in bits 62 and 63 of a descriptor (specification 0x02)."""

    NONE = 0
    B128 = 1
    B64 = 2
    B32 = 3

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the atom, ``R``: 16 without swizzle (a core matrix)."""
        return {Swizzle.NONE: 16, Swizzle.B128: 128, Swizzle.B64: 64, Swizzle.B32: 32}[self]

    @property
    def atom_bytes(self) -> int:
        """Bytes of the atom of 8 rows, and the alignment at which the pattern repeats."""
        return 8 * self.row_bytes


def require_swizzle(mode: Swizzle) -> Swizzle:
    """Refuse a mode that is no `Swizzle`: a width such as 128 is not a code (specification 0x02).

    Parameters
    ----------
    mode : Swizzle
        What a caller calls a mode.

    Returns
    -------
    Swizzle
        The same.

    Examples
    --------
    >>> require_swizzle(Swizzle.B64).row_bytes
    64
    """
    if not isinstance(mode, Swizzle):
        raise TypeError(f"swizzle: the mode is {mode!r}; one of {', '.join(f'Swizzle.{m.name}' for m in Swizzle)}")
    return mode


def swizzled(address: npt.ArrayLike, mode: Swizzle) -> Index:
    """Exchange the 16-byte chunks of addresses as TMA and WGMMA do (specification 0x02).

    128 bytes: ``bits 6..4 ^= bits 9..7``; 64: ``bits 5..4 ^= bits 8..7``; 32: ``bit 4 ^= bit 7``; on absolute
    shared-memory addresses. It is its own inverse.

    Parameters
    ----------
    address : array_like of int
        Byte addresses, any shape.
    mode : Swizzle
        The mode.

    Returns
    -------
    numpy.ndarray
        int64, the same shape.

    Examples
    --------
    >>> swizzled([0, 128, 1024 + 128 * 7 + 16], Swizzle.B128)
    array([   0,  144, 2016])
    """
    require_swizzle(mode)
    address = np.asarray(address)
    if address.dtype.kind not in "iu" or (address.size and address.min() < 0):
        raise ValueError(f"swizzle: byte addresses are integers from 0 on, not {address.dtype} {address}")
    address = address.astype(np.int64)
    chunk_bits = {Swizzle.NONE: 0, Swizzle.B128: 7, Swizzle.B64: 3, Swizzle.B32: 1}[mode]
    result: Index = address ^ (((address >> 7) & chunk_bits) << 4)
    return result


def panel_addresses(start: int, rows: int, columns: int, itemsize: int, swizzle: Swizzle = Swizzle.B128) -> Index:
    """Return where TMA writes a tile: panels of ``R`` bytes, ``[panel][row][R]``, swizzled (0x02).

    Parameters
    ----------
    start : int
        Byte address, a multiple of the atom: then the pattern starts with the tile.
    rows, columns : int
        Of the tile; the columns fill whole panels.
    itemsize : int
        Bytes per element.
    swizzle : Swizzle, optional
        As in the tensor map.

    Returns
    -------
    numpy.ndarray
        int64, shape ``(rows, columns)``: the byte address of each element.

    Examples
    --------
    >>> panel_addresses(0, 8, 128, 2)[0, [0, 63, 64]]
    array([   0,  126, 1024])
    """
    width = require_swizzle(swizzle).row_bytes
    if start < 0 or min(rows, columns) < 1 or itemsize not in (1, 2, 4):
        raise ValueError(
            f"tile: start {start} from 0 on, {rows} rows and {columns} columns from 1 on, itemsize {itemsize} 1, 2 or 4"
        )
    if start % swizzle.atom_bytes:
        raise ValueError(f"tile: starts at {start}, no multiple of {swizzle.atom_bytes}: where the swizzle repeats")
    if columns * itemsize % width:
        raise ValueError(f"tile: {columns} columns do not fill panels of {width} bytes")
    row, byte = np.arange(rows)[:, None], itemsize * np.arange(columns)[None, :]
    return swizzled(start + byte // width * rows * width + row * width + byte % width, swizzle)


def stmatrix_addresses(start: int, rows: int, step: int) -> Index:
    """Return where lanes point ``stmatrix.x4`` to store 16 columns of a K-major tile (specification 0x02).

    Lane ``l`` of warp ``w`` gives the row ``16 w + l mod 16`` and the 16-byte chunk ``2 step + l / 16`` of its panel.

    Parameters
    ----------
    start : int
        Byte address of the warpgroup's first row in the first panel.
    rows : int
        Rows of the whole tile: the distance of panels.
    step : int
        Columns ``16 step`` to ``16 step + 15``.

    Returns
    -------
    numpy.ndarray
        int64, shape ``(128,)``: a 16-byte row of an 8 x 8 matrix for each thread.

    Examples
    --------
    >>> stmatrix_addresses(0, 64, 0)[[0, 1, 16, 17]]
    array([  0, 144,  16, 128])
    """
    if start < 0 or start % 1024 or rows < 64 or rows % 8 or step < 0:
        raise ValueError(
            f"stmatrix: start {start} is a multiple of 1024, rows {rows} one of 8 from 64 on, step {step} from 0 on"
        )
    thread = np.arange(THREADS)
    row, (panel, first) = 16 * (thread // 32) + thread % 16, divmod(2 * step, 8)
    linear = start + panel * rows * 128 + row * 128 + (first + thread % 32 // 16) * 16
    return swizzled(linear, Swizzle.B128)
