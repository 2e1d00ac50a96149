"""Tensor memory: geometry, addresses, who may touch which lanes, and the S/P/O map of the forward kernel (0x07).

One CTA sees 128 lanes by 512 columns of 32-bit cells. Two CTAs that work as a pair see two such memories, with equal
numeric addresses, and never one of 1024 columns. A value is therefore named by its address *and* its CTA *and* the
time during which it lives; `lifetimes` holds the last of these, `allocation` the right to use any column at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..violations import ContractViolation

__all__ = [
    "AddressOutOfView",
    "ForwardMap",
    "LaneNotOwned",
    "MapExceedsCapacity",
    "Region",
    "UnknownBase",
    "check_lanes",
    "decode",
    "encode",
    "forward_map",
    "known_base",
    "lane_band",
    "logical_columns",
    "size_bytes",
]

COLUMNS = 512
LANES = 128
CELL_BYTES = 4
#: The smallest allocation, in columns.
GRANULE = 32
LANES_PER_WARP = 32
WARPS_PER_WARPGROUP = LANES // LANES_PER_WARP


class AddressOutOfView(ContractViolation):
    """A lane or column that no CTA's view of tensor memory has (specification 0x07)."""


class LaneNotOwned(ContractViolation):
    """A warp loads or stores a lane outside the 32 that belong to it (specification 0x07)."""


class MapExceedsCapacity(ContractViolation):
    """The S/P/O map needs more than 512 columns (specification 0x07)."""


class UnknownBase(ContractViolation):
    """The base address is taken to be 0 although the allocation is not the whole memory (0x07)."""


def size_bytes(columns: int = COLUMNS) -> int:
    """Size of some columns of tensor memory (specification 0x07).

    Parameters
    ----------
    columns : int, optional
        0 to 512; all of them by default.

    Returns
    -------
    int
        ``columns * 128 lanes * 4 bytes``.

    Examples
    --------
    >>> size_bytes(), size_bytes(GRANULE)
    (262144, 16384)
    """
    if not 0 <= columns <= COLUMNS:
        raise AddressOutOfView(f"{columns} columns; one CTA's view has {COLUMNS}")
    return columns * LANES * CELL_BYTES


def encode(lane: int, column: int) -> int:
    """Pack a tensor-memory address: ``lane << 16 | column`` (specification 0x07).

    Parameters
    ----------
    lane : int
        0 to 127.
    column : int
        0 to 511. A larger one does not reach into the peer CTA; it is an error.

    Returns
    -------
    int
        32-bit address inside one CTA's view.

    Examples
    --------
    >>> encode(37, 384)
    2425216
    """
    if not 0 <= lane < LANES:
        raise AddressOutOfView(f"lane {lane}; a view has lanes 0 to {LANES - 1}")
    if not 0 <= column < COLUMNS:
        raise AddressOutOfView(f"column {column}; a view has columns 0 to {COLUMNS - 1}, a pair has two views, not one")
    return lane << 16 | column


def decode(address: int) -> tuple[int, int]:
    """Unpack a tensor-memory address (specification 0x07).

    Parameters
    ----------
    address : int
        As `encode` gives it.

    Returns
    -------
    lane, column : int
        Where the cell is.

    Examples
    --------
    >>> decode(2425216)
    (37, 384)
    """
    lane, column = address >> 16, address & 0xFFFF
    encode(lane, column)
    return lane, column


def lane_band(warp: int) -> range:
    """Lanes that a warp may load and store: ``32 * (warp % 4)`` and the 31 after it (specification 0x07).

    Parameters
    ----------
    warp : int
        Index of the warp in its CTA. Only its place inside the warpgroup matters, so a warpgroup covers all 128 lanes,
        and two warps that share rows must agree modulo 4.

    Returns
    -------
    range
        32 lanes.

    Examples
    --------
    >>> [lane_band(warp) for warp in (0, 1, 2, 7)]
    [range(0, 32), range(32, 64), range(64, 96), range(96, 128)]
    """
    if warp < 0:
        raise ValueError(f"lane_band: warp {warp} is negative")
    first = LANES_PER_WARP * (warp % WARPS_PER_WARPGROUP)
    return range(first, first + LANES_PER_WARP)


def check_lanes(warp: int, lanes: range) -> None:
    """Refuse a load or store of lanes that belong to another warp (specification 0x07).

    Parameters
    ----------
    warp : int
        Index of the warp in its CTA.
    lanes : range
        Lanes that the instruction touches.

    Raises
    ------
    LaneNotOwned
        Naming the first lane outside the warp's band.

    Examples
    --------
    >>> check_lanes(2, range(64, 96))
    """
    band = lane_band(warp)
    for lane in lanes:
        encode(lane, 0)
        if lane not in band:
            raise LaneNotOwned(f"warp {warp} touches lane {lane}; it owns lanes {band.start} to {band.stop - 1}")


def known_base(columns: int) -> int:
    """Return the base address that an allocation of this size has without being asked (specification 0x07).

    Parameters
    ----------
    columns : int
        Size of the allocation.

    Returns
    -------
    int
        0, which only an allocation of all 512 columns implies.

    Raises
    ------
    UnknownBase
        For any smaller one, whose base is whatever the allocator wrote to shared memory.

    Examples
    --------
    >>> known_base(512)
    0
    """
    if columns != COLUMNS:
        raise UnknownBase(f"an allocation of {columns} columns may start anywhere; read the address that was returned")
    return 0


@dataclass(frozen=True)
class Region:
    """A named interval of columns, ``[begin, begin + width)``, in all 128 lanes (specification 0x07).

    Attributes
    ----------
    name : str
        ``"S0"``, ``"P1"``, ...
    begin : int
        First column.
    width : int
        Number of columns.
    """

    name: str
    begin: int
    width: int

    def __post_init__(self) -> None:
        if self.begin < 0 or self.width < 1:
            raise ValueError(f"Region: {self.name} is {self.width} columns at {self.begin}; positive, from 0 on")

    @property
    def end(self) -> int:
        """The column after the last one."""
        return self.begin + self.width

    def overlaps(self, other: Region) -> bool:
        """Tell whether the two share a column."""
        return self.begin < other.end and other.begin < self.end

    def contains(self, other: Region) -> bool:
        """Tell whether every column of the other is a column of this one."""
        return self.begin <= other.begin and other.end <= self.end


@dataclass(frozen=True)
class ForwardMap:
    """Where the scores, the probabilities and the outputs of the forward kernel are (specification 0x07).

    Attributes
    ----------
    S : tuple of Region
        Two score slots, float32.
    P : tuple of Region
        A probability slot in each score slot, in the input type.
    O : tuple of Region
        One output accumulator per Q stage, float32.
    """

    S: tuple[Region, ...]
    P: tuple[Region, ...]
    O: tuple[Region, ...]

    @property
    def regions(self) -> tuple[Region, ...]:
        """S, P and O in this order."""
        return self.S + self.P + self.O

    @property
    def columns(self) -> int:
        """Columns that the map spans; the kernel allocates all 512 even if it needs fewer."""
        return max(region.end for region in self.regions)


def logical_columns(tile_n: int, head_dim_v: int, q_stages: int) -> int:
    """Columns that two score slots and the outputs need (specification 0x07).

    Parameters
    ----------
    tile_n : int
        Keys per block, N.
    head_dim_v : int
        Value head dimension, d_v.
    q_stages : int
        Query tiles in flight, 1 or 2.

    Returns
    -------
    int
        ``2 N + q_stages * d_v``; may exceed the 512 that exist.

    Examples
    --------
    >>> logical_columns(128, 128, 2), logical_columns(128, 192, 1), logical_columns(128, 192, 2)
    (512, 448, 640)
    """
    if tile_n <= 0 or head_dim_v <= 0 or q_stages not in (1, 2):
        raise ValueError(
            f"logical_columns: tile_n {tile_n} and head_dim_v {head_dim_v} must be positive, q_stages {q_stages} 1 or 2"
        )
    return 2 * tile_n + q_stages * head_dim_v


def forward_map(tile_n: int, head_dim_v: int, q_stages: int, p_bits: int = 16) -> ForwardMap:
    """Lay out tensor memory for the forward kernel (specification 0x07).

    Parameters
    ----------
    tile_n : int
        Keys per block, N; even.
    head_dim_v : int
        Value head dimension, d_v.
    q_stages : int
        Query tiles in flight, 1 or 2.
    p_bits : int, optional
        Bits of one probability: 16, or 8 for FP8.

    Returns
    -------
    ForwardMap
        ``S_i`` at ``i N``, ``O_i`` at ``2 N + i d_v``, ``P_i`` at the middle of ``S_i`` and ``ceil(N p_bits / 32)``
        columns wide. In 16 bits P takes exactly the second half of S; in 8 bits it starts at the same column and takes
        a quarter.

    Raises
    ------
    MapExceedsCapacity
        If ``2 N + q_stages * d_v > 512``.

    Examples
    --------
    >>> layout = forward_map(128, 128, 2)
    >>> [(region.name, region.begin, region.end) for region in layout.P + layout.O]
    [('P0', 64, 128), ('P1', 192, 256), ('O0', 256, 384), ('O1', 384, 512)]
    """
    needed = logical_columns(tile_n, head_dim_v, q_stages)
    if tile_n % 2 or p_bits not in (8, 16):
        raise ValueError(f"forward_map: tile_n {tile_n} must be even, p_bits {p_bits} 8 or 16")
    if needed > COLUMNS:
        raise MapExceedsCapacity(
            f"the map needs {needed} columns (2*{tile_n} for S, {q_stages}*{head_dim_v} for O); there are {COLUMNS}"
        )
    p_width = math.ceil(tile_n * p_bits / 32)
    return ForwardMap(
        S=tuple(Region(f"S{i}", i * tile_n, tile_n) for i in range(2)),
        P=tuple(Region(f"P{i}", i * tile_n + tile_n // 2, p_width) for i in range(2)),
        O=tuple(Region(f"O{i}", 2 * tile_n + i * head_dim_v, head_dim_v) for i in range(q_stages)),
    )
