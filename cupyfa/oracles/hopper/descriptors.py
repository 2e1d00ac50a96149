"""Matrix descriptors of WGMMA, and the bytes that a product reads through one (specification 0x02).

Companion of ``cuda/ptx/wgmma.cuh``. The maps are whole arrays, so that tests can ask for bijections; source is the PTX
ISA ("Register fragments and shared memory matrix layouts" of wgmma.mma_async).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyfa.oracles.hopper.swizzle import Index, Swizzle, require_swizzle, swizzled

__all__ = ["Descriptor", "k_major", "k_major_addresses", "mn_major", "mn_major_addresses"]

ADDRESS_BITS = 18  # of shared memory


@dataclass(frozen=True)
class Descriptor:
    """A shared-memory matrix descriptor (PTX ISA, "Matrix descriptor format" of wgmma) (specification 0x02).

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
        require_swizzle(self.swizzle)
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
        if not 0 <= bits < 2**64:
            raise ValueError(f"descriptor {bits:#x}: not a 64-bit word")
        start, leading, stride = ((bits >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
        descriptor = cls(start, leading, stride, bits >> 49 & 7, Swizzle(bits >> 62 & 3))
        if descriptor.encode() != bits:
            raise ValueError(f"descriptor {bits:#x}: bits outside the fields are set")
        return descriptor

    def advanced(self, offset: int) -> Descriptor:
        """Return the same operand, `offset` bytes further on: the low word plus ``offset / 16``."""
        return Descriptor(self.start + offset, self.leading, self.stride, self.base_offset, self.swizzle)


def k_major(start: int, swizzle: Swizzle = Swizzle.B128) -> Descriptor:
    """Describe an operand that is contiguous along K, one panel of ``R`` bytes wide: Q and K in Q K' (0x02).

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
    if require_swizzle(swizzle) is Swizzle.NONE:
        raise ValueError("descriptor: without swizzle, K-major operands are laid out in core matrices")
    return Descriptor(start, 16, swizzle.atom_bytes, 0, swizzle)


def mn_major(start: int, k_rows: int, swizzle: Swizzle = Swizzle.B128) -> Descriptor:
    """Describe an operand that is contiguous along M or N (16 bit, trans = 1): V in P V (specification 0x02).

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
    if require_swizzle(swizzle) is Swizzle.NONE:
        raise ValueError("descriptor: without swizzle, the two offsets change places; not modelled")
    if k_rows < 16 or k_rows % 16:
        raise ValueError(f"descriptor: {k_rows} rows of K; a multiple of 16")
    return Descriptor(start, k_rows * swizzle.row_bytes, swizzle.atom_bytes, 0, swizzle)


def k_major_addresses(descriptor: Descriptor, rows: int, itemsize: int) -> Index:
    """Return what one k-step of a K-major operand reads: 32 bytes of each row (specification 0x02).

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
    if rows < 8 or rows % 8 or itemsize not in (1, 2):
        raise ValueError(f"descriptor: {rows} rows of {itemsize}-byte elements; a multiple of 8 rows, 1 or 2 bytes")
    row, k = np.arange(rows)[:, None], np.arange(32 // itemsize)[None, :]
    width = descriptor.swizzle.row_bytes
    linear = descriptor.start + row // 8 * descriptor.stride + row % 8 * width + k * itemsize
    return swizzled(linear, descriptor.swizzle)


def mn_major_addresses(descriptor: Descriptor, columns: int) -> Index:
    """Return what one k16 step of an MN-major 16-bit operand reads (specification 0x02).

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
    if columns < 8 or columns % 8:
        raise ValueError(f"descriptor: {columns} columns; a multiple of 8")
    k, n = np.arange(16)[:, None], np.arange(columns)[None, :]
    width = descriptor.swizzle.row_bytes
    panel, inside = np.divmod(n, width // 2)
    linear = descriptor.start + panel * descriptor.leading + k // 8 * descriptor.stride + k % 8 * width + 2 * inside
    return swizzled(linear, descriptor.swizzle)
