"""Which byte holds which element: operand tiles in shared memory, and register fragments of tensor memory (0x07).

A tile of an operand is written by TMA with a swizzle and read by the tensor core through a descriptor. Both use the
same rule, exclusive-or on bits of the absolute address, so a descriptor may start inside a tile, which is how a product
walks along K. `tile_offset` is the closed form for whole tiles; `operand_address` is what the hardware does with a
descriptor; they are tested against each other.
"""

from __future__ import annotations

import enum

from ..violations import ContractViolation
from .descriptors import SmemDescriptor, Swizzle

__all__ = [
    "LD_SHAPES",
    "Major",
    "MisalignedTile",
    "fragment",
    "fragment_registers",
    "operand_address",
    "p_cell",
    "swizzle_address",
    "tile_offset",
]


class MisalignedTile(ContractViolation):
    """A swizzled tile that does not start where its pattern does (specification 0x07)."""


class Major(enum.Enum):
    """Which index of an operand is contiguous: K, or the other one (M of A, N of B) (specification 0x07)."""

    K = 0
    MN = 1


#: Bits of the address that are changed, and the distance to the bits they are combined with.
_SWIZZLE_BITS = {Swizzle.NONE: 0, Swizzle.B32: 1, Swizzle.B64: 2, Swizzle.B128: 3}


def swizzle_width(swizzle: Swizzle) -> int:
    """Bytes of one row of the pattern: 128, 64, 32, or 16 without a swizzle (specification 0x07)."""
    if not isinstance(swizzle, Swizzle):
        raise TypeError(f"swizzle_width: {swizzle!r} is no Swizzle; a width such as 128 is not a mode")
    if swizzle not in _SWIZZLE_BITS:
        raise ValueError(f"swizzle_width: {swizzle.name} is for transposed tf32 only and not modelled")
    return 16 << _SWIZZLE_BITS[swizzle]


def swizzle_address(address: int, swizzle: Swizzle) -> int:
    """Swizzle an absolute shared-memory address (specification 0x07).

    Parameters
    ----------
    address : int
        In bytes.
    swizzle : Swizzle
        ``B128``: bits 4 to 6 ^= bits 7 to 9; ``B64``: 4 to 5 ^= 7 to 8; ``B32``: 4 ^= 7; ``NONE``: nothing.

    Returns
    -------
    int
        Where the byte really is. Applying it twice gives the address back.

    Examples
    --------
    >>> swizzle_address(0x400 + 3 * 128, Swizzle.B128) - 0x400 - 3 * 128
    48
    """
    width = swizzle_width(swizzle)
    if address < 0:
        raise ValueError(f"swizzle_address: address is {address}; it must not be negative")
    mask = width // 16 - 1
    return address ^ ((address >> 7 & mask) << 4)


def tile_offset(row: int, col: int, rows: int, element_bytes: int, swizzle: Swizzle) -> int:
    """Byte of an element in a tile as TMA writes it: rows of one swizzle width, columns in panels (0x07).

    The same bytes serve an operand whichever way it is read. K-major, `row` is m or n and `col` is k; MN-major, `row`
    is k and `col` is m or n. That V has to be read transposed costs no copy: it is stored as [key][head dimension].

    Parameters
    ----------
    row, col : int
        Of the element.
    rows : int
        Rows of the tile, a multiple of 8.
    element_bytes : int
        1 or 2.
    swizzle : Swizzle
        As in the tensor map; the tile starts at a multiple of 8 rows of its width.

    Returns
    -------
    int
        Offset from the start of the tile. For 128 bytes and 2-byte elements:
        ``(col/64)*rows*128 + (row/8)*1024 + (row%8)*128 + (((col%64)/8) ^ (row%8))*16 + (col%8)*2``.

    Examples
    --------
    >>> tile_offset(1, 8, 128, 2, Swizzle.B128)  # chunk 1 of row 1 lands in place 0
    128
    """
    if row < 0 or col < 0 or row >= rows or rows % 8:
        raise ValueError(f"tile_offset: element ({row}, {col}) of a tile of {rows} rows, which must be a multiple of 8")
    if element_bytes not in (1, 2):
        raise ValueError(f"tile_offset: element_bytes is {element_bytes}; it must be 1 or 2")
    width = swizzle_width(swizzle)
    panel, byte = divmod(col * element_bytes, width)
    chunk, within = divmod(byte, 16)
    # Chunks are exchanged in units of 128 bytes of address: 64-byte rows share a key by twos, 32-byte rows by fours.
    key = row * width // 128 % (width // 16)
    return panel * rows * width + row * width + (chunk ^ key) * 16 + within


def operand_address(descriptor: SmemDescriptor, major: Major, mn: int, k: int, element_bytes: int) -> int:
    """Find the byte that the tensor core reads for one element of an operand (specification 0x07).

    Parameters
    ----------
    descriptor : SmemDescriptor
        Start, leading and stride byte offsets, swizzle.
    major : Major
        As in the instruction descriptor.
    mn, k : int
        Element within the instruction: m of A or n of B, and the reduction index.
    element_bytes : int
        1 or 2.

    Returns
    -------
    int
        Absolute shared-memory address.

    Notes
    -----
    K-major: rows of 8 make a group, groups are SBO apart; without a swizzle chunks of 16 bytes along k are LBO apart.
    MN-major: groups of 8 k are SBO apart (LBO without a swizzle), blocks along mn LBO apart (SBO without).

    Examples
    --------
    >>> d = SmemDescriptor(address=0x11000, lbo=16, sbo=1024, swizzle=Swizzle.B128)
    >>> hex(operand_address(d, Major.K, mn=9, k=0, element_bytes=2))
    '0x11490'
    """
    if not isinstance(major, Major):
        raise TypeError(f"operand_address: {major!r} is no Major")
    if mn < 0 or k < 0 or element_bytes not in (1, 2):
        raise ValueError(f"operand_address: element ({mn}, {k}) of {element_bytes} bytes")
    if descriptor.base_offset or descriptor.lbo_absolute:
        raise MisalignedTile("modelled are base offset 0 (the tile starts with its pattern) and relative LBO")
    width = swizzle_width(descriptor.swizzle)
    plain = descriptor.swizzle is Swizzle.NONE
    lbo, sbo = descriptor.lbo, descriptor.sbo
    if major is Major.K:
        # A swizzled row is contiguous along k, so LBO is unused; a step beyond the row needs a new descriptor.
        byte = k * element_bytes
        along_k = byte // 16 * lbo + byte % 16 if plain else byte
        linear = mn // 8 * sbo + mn % 8 * width + along_k
    else:
        per_block = width // element_bytes
        block_stride, group_stride = (sbo, lbo) if plain else (lbo, sbo)
        linear = mn // per_block * block_stride + k // 8 * group_stride + k % 8 * width + mn % per_block * element_bytes
    return swizzle_address(descriptor.address + linear, descriptor.swizzle)


def p_cell(row: int, k: int, element_bytes: int) -> tuple[int, int, int]:
    """Find an element of A when A is in tensor memory, as P is for ``O += P V`` (specification 0x07).

    Parameters
    ----------
    row : int
        Row of A, 0 to 127: the lane.
    k : int
        Reduction index: the key.
    element_bytes : int
        2 for 16-bit types, 1 for FP8.

    Returns
    -------
    lane, column, byte : int
        Column relative to the start of A, and the first byte inside its 32-bit cell: low k in the low bits. One
        instruction (16 keys in 16 bits, 32 in 8) is 8 columns.

    Examples
    --------
    >>> p_cell(5, 127, 2), p_cell(5, 127, 1)
    ((5, 63, 2), (5, 31, 3))
    """
    if not 0 <= row < 128 or k < 0 or element_bytes not in (1, 2):
        raise ValueError(f"p_cell: element ({row}, {k}) of {element_bytes} bytes")
    column, byte = divmod(k * element_bytes, 4)
    return row, column, byte


#: Shape of tcgen05.ld and .st -> (registers per thread at .x1, largest repetition).
LD_SHAPES = {"32x32b": (1, 128), "16x64b": (1, 128), "16x128b": (2, 64), "16x256b": (4, 32)}


def fragment_registers(shape: str, repetitions: int) -> int:
    """Count the registers per thread of ``tcgen05.ld.SHAPE.xN`` (specification 0x07).

    Examples
    --------
    >>> fragment_registers("32x32b", 32), fragment_registers("16x256b", 2)
    (32, 8)
    """
    if shape not in LD_SHAPES:
        raise ValueError(f"fragment_registers: shape {shape!r}; known are {', '.join(LD_SHAPES)}")
    registers, largest = LD_SHAPES[shape]
    if repetitions & (repetitions - 1) or not 1 <= repetitions <= largest:
        raise ValueError(f"fragment_registers: .x{repetitions} of {shape}; a power of two up to {largest} is allowed")
    return registers * repetitions


def fragment(shape: str, thread: int, register: int) -> tuple[int, int]:
    """Find the cell that a register of ``tcgen05.ld`` or ``tcgen05.st`` holds (specification 0x07).

    Parameters
    ----------
    shape : str
        A key of `LD_SHAPES`.
    thread : int
        Lane of the warp, 0 to 31.
    register : int
        Index of the register.

    Returns
    -------
    lane, column : int
        Relative to the address of the instruction.

    Examples
    --------
    >>> fragment("32x32b", 7, 5), fragment("16x256b", 7, 5)
    ((7, 5), (1, 15))
    """
    if not 0 <= thread < 32 or register < 0:
        raise ValueError(f"fragment: thread {thread}, register {register}")
    if shape == "32x32b":
        return thread, register
    if shape == "16x64b":
        return thread // 4 + 8 * (thread % 2), thread // 2 % 2 + 2 * register
    if shape == "16x128b":
        return thread // 4 + 8 * (register % 2), thread % 4 + 4 * (register // 2)
    if shape == "16x256b":
        lane = thread // 4 + 8 * (register // 2 % 2)
        return lane, register % 2 + 2 * (thread % 4) + 8 * (register // 4)
    raise ValueError(f"fragment: shape {shape!r}; known are {', '.join(LD_SHAPES)}")
