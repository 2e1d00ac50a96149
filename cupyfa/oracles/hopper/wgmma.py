"""Where WGMMA finds its operands: register fragments, swizzled tiles and matrix descriptors (specification 0x02).

Companion of ``cuda/layout.cuh`` and ``cuda/ptx/wgmma.cuh``. The maps are whole arrays, so that tests can ask for
bijections; sources are the PTX ISA ("Register fragments and shared memory matrix layouts" of wgmma.mma_async).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = [
    "Descriptor",
    "Swizzle",
    "a_fragment",
    "accumulator",
    "fp8_key_order",
    "k_major",
    "k_major_addresses",
    "mn_major",
    "mn_major_addresses",
    "panel_addresses",
    "stmatrix_addresses",
    "swizzled",
]

Index = npt.NDArray[np.int64]

THREADS = 128
ADDRESS_BITS = 18  # of shared memory


class Swizzle(IntEnum):
    """Swizzle modes, by their code in bits 62 and 63 of a descriptor."""

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


def swizzled(address: npt.ArrayLike, mode: Swizzle) -> Index:
    """Exchange the 16-byte chunks of addresses as TMA and WGMMA do.

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
    address = np.asarray(address, dtype=np.int64)
    chunk_bits = {Swizzle.NONE: 0, Swizzle.B128: 7, Swizzle.B64: 3, Swizzle.B32: 1}[mode]
    result: Index = address ^ (((address >> 7) & chunk_bits) << 4)
    return result


def accumulator(columns: int) -> Index:
    """Map the accumulators of m64nN to the matrix (PTX ISA; identical in all types).

    Register ``i`` of thread ``t`` in warp ``w``, lane ``l``: row ``16 w + l / 4 + 8 (i / 2 mod 2)``, column
    ``8 (i / 4) + 2 (l mod 4) + i mod 2``.

    Parameters
    ----------
    columns : int
        ``N``: 8 to 256, a multiple of 8.

    Returns
    -------
    numpy.ndarray
        int64, shape ``(128, N / 2, 2)``: (row, column) of each thread's registers.

    Examples
    --------
    >>> accumulator(8)[5].tolist()  # thread 5: rows 1 and 9, columns 2 and 3
    [[1, 2], [1, 3], [9, 2], [9, 3]]
    """
    if not 8 <= columns <= 256 or columns % 8:
        raise ValueError(f"wgmma: N is {columns}; it is a multiple of 8 from 8 to 256")
    thread, i = np.arange(THREADS)[:, None], np.arange(columns // 2)[None, :]
    warp, lane = thread // 32, thread % 32
    row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
    return np.stack(np.broadcast_arrays(row, column), axis=-1)


def a_fragment(bits: int) -> Index:
    """Map the register operand A of one k-step, 64 rows by 32 bytes, to the matrix (PTX ISA).

    Register ``a_r``: row ``16 w + l / 4 + 8 (r mod 2)``, and the ``32 / bits`` elements from column
    ``(l mod 4 + 4 (r / 2)) * 32 / bits`` on.

    Parameters
    ----------
    bits : int
        Per element: 16 (k16) or 8 (k32).

    Returns
    -------
    numpy.ndarray
        int64, shape ``(128, 4, 32 / bits, 2)``: (row, column) of each element of each register, lowest bits first.

    Examples
    --------
    >>> a_fragment(16)[5, 2].tolist()  # thread 5, a2
    [[1, 10], [1, 11]]
    """
    if bits not in (8, 16):
        raise ValueError(f"wgmma: A has {bits} bits; register operands of 8 and 16 are modelled")
    per_register = 32 // bits
    thread = np.arange(THREADS)[:, None, None]
    r, e = np.arange(4)[None, :, None], np.arange(per_register)[None, None, :]
    warp, lane = thread // 32, thread % 32
    row = 16 * warp + lane // 4 + 8 * (r % 2)
    column = per_register * (lane % 4 + 4 * (r // 2)) + e
    return np.stack(np.broadcast_arrays(row, column), axis=-1)


def fp8_key_order() -> Index:
    """Find the order of keys in which V must be stored so that FP8 P needs no shuffle (specification 0x06).

    A thread packs its accumulators ``S_4r, S_4r+1, ...`` in the order of registers; operand column ``c`` then holds the
    key that this table names, within each group of 16, and ``V'`` needs its keys in the same order.

    Returns
    -------
    numpy.ndarray
        int64, shape ``(32,)``: the key at each operand position of one k32 step.

    Examples
    --------
    >>> fp8_key_order()[:16].tolist()
    [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    """
    scores = accumulator(32)
    operand = a_fragment(8)
    order = np.full(32, -1, dtype=np.int64)
    for r in range(4):
        # a_r takes the four accumulators of its own row (r mod 2) and half of the columns (r / 2).
        source = [8 * (r // 2) + 4 * (e // 2) + 2 * (r % 2) + e % 2 for e in range(4)]
        assert np.array_equal(scores[:, source, 0], operand[:, r, :, 0])
        order[operand[:, r, :, 1]] = scores[:, source, 1]
    return order


@dataclass(frozen=True)
class Descriptor:
    """A shared-memory matrix descriptor (PTX ISA, "Matrix descriptor format" of wgmma).

    Attributes
    ----------
    start : int
        Byte address, a multiple of 16 below 2^18; bits 0 to 13, in units of 16.
    leading : int
        Leading byte offset; bits 16 to 29, in units of 16.
    stride : int
        Stride byte offset; bits 32 to 45, in units of 16.
    base_offset : int
        Bits 49 to 51; 0 when the swizzle pattern repeats from the tile's start.
    swizzle : Swizzle
        Bits 62 and 63.

    Examples
    --------
    >>> hex(Descriptor(0x400, 16, 1024, 0, Swizzle.B128).encode())
    '0x4000004000010040'
    """

    start: int
    leading: int
    stride: int
    base_offset: int = 0
    swizzle: Swizzle = Swizzle.B128

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("leading", self.leading), ("stride", self.stride)):
            if not 0 <= value < 2**ADDRESS_BITS or value % 16:
                raise ValueError(f"descriptor: {name} is {value}; a multiple of 16 below 2^{ADDRESS_BITS}")
        if not 0 <= self.base_offset < 8:
            raise ValueError(f"descriptor: base offset {self.base_offset}; 0 to 7")

    def encode(self) -> int:
        """Return the 64 bits."""
        fields = ((self.start >> 4, 0), (self.leading >> 4, 16), (self.stride >> 4, 32), (self.base_offset, 49))
        return sum(value << bit for value, bit in (*fields, (int(self.swizzle), 62)))

    @classmethod
    def decode(cls, bits: int) -> Descriptor:
        """Read the 64 bits; bits that mean nothing must be 0."""
        start, leading, stride = ((bits >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
        descriptor = cls(start, leading, stride, bits >> 49 & 7, Swizzle(bits >> 62 & 3))
        if descriptor.encode() != bits:
            raise ValueError(f"descriptor {bits:#x}: bits outside the fields are set")
        return descriptor

    def advanced(self, offset: int) -> Descriptor:
        """Return the same operand, `offset` bytes further on: the low word plus ``offset / 16``."""
        return Descriptor(self.start + offset, self.leading, self.stride, self.base_offset, self.swizzle)


def k_major(start: int, swizzle: Swizzle = Swizzle.B128) -> Descriptor:
    """Describe an operand that is contiguous along K, one panel of ``R`` bytes wide: Q and K in Q K'.

    Parameters
    ----------
    start : int
        Byte address of the first row, plus 32 for each k-step inside the panel.
    swizzle : Swizzle, optional
        A swizzled mode; the leading offset is then not used.

    Returns
    -------
    Descriptor
        The stride leads to the next 8 rows.

    Examples
    --------
    >>> k_major(0, Swizzle.B64).stride
    512
    """
    if swizzle is Swizzle.NONE:
        raise ValueError("descriptor: without swizzle, K-major operands are laid out in core matrices")
    return Descriptor(start, 16, swizzle.atom_bytes, 0, swizzle)


def mn_major(start: int, k_rows: int, swizzle: Swizzle = Swizzle.B128) -> Descriptor:
    """Describe an operand that is contiguous along M or N (16 bit, trans = 1): V in P V.

    Parameters
    ----------
    start : int
        Byte address of the first row, plus 16 rows for each k-step.
    k_rows : int
        Rows of the tile, which is the extent of K; panels of ``R`` bytes follow each other.
    swizzle : Swizzle, optional
        A swizzled mode.

    Returns
    -------
    Descriptor
        The leading offset goes to the next panel, the stride to the next 8 rows of K.

    Examples
    --------
    >>> mn_major(0, k_rows=128).leading
    16384
    """
    if swizzle is Swizzle.NONE:
        raise ValueError("descriptor: without swizzle, the two offsets change places; not modelled")
    if k_rows < 16 or k_rows % 16:
        raise ValueError(f"descriptor: {k_rows} rows of K; a multiple of 16")
    return Descriptor(start, k_rows * swizzle.row_bytes, swizzle.atom_bytes, 0, swizzle)


def k_major_addresses(descriptor: Descriptor, rows: int, itemsize: int) -> Index:
    """Return what one k-step of a K-major operand reads: 32 bytes of each row.

    ``swizzle(start + (row / 8) SBO + (row mod 8) R + byte)``.

    Parameters
    ----------
    descriptor : Descriptor
        Swizzled, see `k_major`.
    rows : int
        64 for A, N for B.
    itemsize : int
        Bytes per element: 2 (k16) or 1 (k32).

    Returns
    -------
    numpy.ndarray
        int64, shape ``(rows, 32 / itemsize)``: the byte address of each element.

    Examples
    --------
    >>> k_major_addresses(k_major(1024), 8, 2)[1, :3]
    array([1168, 1170, 1172])
    """
    row, k = np.arange(rows)[:, None], np.arange(32 // itemsize)[None, :]
    width = descriptor.swizzle.row_bytes
    linear = descriptor.start + row // 8 * descriptor.stride + row % 8 * width + k * itemsize
    return swizzled(linear, descriptor.swizzle)


def mn_major_addresses(descriptor: Descriptor, columns: int) -> Index:
    """Return what one k16 step of an MN-major 16-bit operand reads.

    ``swizzle(start + (n / w) LBO + (k / 8) SBO + (k mod 8) R + 2 (n mod w))`` with ``w = R / 2`` elements per panel.

    Parameters
    ----------
    descriptor : Descriptor
        Swizzled, see `mn_major`.
    columns : int
        N (or M).

    Returns
    -------
    numpy.ndarray
        int64, shape ``(16, columns)``: the byte address of element ``[k, n]``.

    Examples
    --------
    >>> mn_major_addresses(mn_major(0, 16), 128)[0, [0, 63, 64]]
    array([   0,  126, 2048])
    """
    k, n = np.arange(16)[:, None], np.arange(columns)[None, :]
    width = descriptor.swizzle.row_bytes
    panel, inside = np.divmod(n, width // 2)
    linear = descriptor.start + panel * descriptor.leading + k // 8 * descriptor.stride + k % 8 * width + 2 * inside
    return swizzled(linear, descriptor.swizzle)


def panel_addresses(start: int, rows: int, columns: int, itemsize: int, swizzle: Swizzle = Swizzle.B128) -> Index:
    """Return where TMA writes a tile: panels of ``R`` bytes, ``[panel][row][R]``, swizzled.

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
    width = swizzle.row_bytes
    if start % swizzle.atom_bytes:
        raise ValueError(f"tile: starts at {start}, no multiple of {swizzle.atom_bytes}: where the swizzle repeats")
    if columns * itemsize % width:
        raise ValueError(f"tile: {columns} columns do not fill panels of {width} bytes")
    row, byte = np.arange(rows)[:, None], itemsize * np.arange(columns)[None, :]
    return swizzled(start + byte // width * rows * width + row * width + byte % width, swizzle)


def stmatrix_addresses(start: int, rows: int, step: int) -> Index:
    """Return where a warpgroup's lanes point ``stmatrix.x4`` to store 16 columns of accumulators into a K-major tile.

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
    thread = np.arange(THREADS)
    row, (panel, first) = 16 * (thread // 32) + thread % 16, divmod(2 * step, 8)
    linear = start + panel * rows * 128 + row * 128 + (first + thread % 32 // 16) * 16
    return swizzled(linear, Swizzle.B128)
