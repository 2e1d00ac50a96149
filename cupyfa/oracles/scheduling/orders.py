"""In which order tiles are made available: lexical, longest first, and longest first in sections that fit into L2.

An order is a linearisation of logical coordinates (batch, head, query block) and nothing else: it neither keeps a CTA
resident nor hands out work (specification 0x0B). Longest first (LPT) shortens the tail of the launch. Over all heads at
once it also brings all keys and values into the active set, so FlashAttention-4 (arXiv 2603.05451, section 3.3)
applies it section by section: batches outermost, then sections of heads whose keys and values fit into L2 together,
then query blocks from long to short, then the heads of the section.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .costs import Costs, check_positive

__all__ = [
    "BETA23_L2_BYTES",
    "TileGrid",
    "WorkTile",
    "decode_sectioned",
    "heads_per_section",
    "key_value_bytes",
    "lexical_order",
    "longest_first_order",
    "order_costs",
    "sectioned_order",
]

#: The L2 heuristic of the audited FlashAttention-4 release, bytes; its comment says 40 MB. No hardware capacity.
BETA23_L2_BYTES = 50 * 1024 * 1024


class WorkTile(NamedTuple):
    """Logical coordinates of one tile; `head` is the query head (0x0B)."""

    batch: int
    head: int
    block: int


@dataclass(frozen=True)
class TileGrid:
    """The tiles of a problem whose sequences are equally long (0x0B).

    Attributes
    ----------
    batches, heads, blocks : int
        Batch size, query heads and query blocks.
    group : int
        Query heads per key/value head.

    Raises
    ------
    ValueError
        If a size is not positive or the heads are no whole groups.
    """

    batches: int
    heads: int
    blocks: int
    group: int = 1

    def __post_init__(self) -> None:
        check_positive(batches=self.batches, heads=self.heads, blocks=self.blocks, group=self.group)
        if self.heads % self.group:
            raise ValueError(f"scheduling: {self.heads} heads are no multiple of the group of {self.group}")

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.batches * self.heads * self.blocks

    def check(self, tile: int) -> None:
        """Raise ValueError unless there is a tile of this number.

        Parameters
        ----------
        tile : int
            From 0 to ``tiles - 1``.
        """
        if not 0 <= tile < self.tiles:
            raise ValueError(f"scheduling: tile {tile} does not exist; there are {self.tiles}")

    def tile(self, flat: int) -> WorkTile:
        """Return tile `flat` with the block fastest, then the head: the order of a plain launch grid.

        Parameters
        ----------
        flat : int
            From 0 to ``tiles - 1``.

        Returns
        -------
        WorkTile
            Its coordinates.

        Raises
        ------
        ValueError
            If there is no such tile.
        """
        self.check(flat)
        rest, block = divmod(flat, self.blocks)
        return WorkTile(*divmod(rest, self.heads), block)


def lexical_order(grid: TileGrid, reverse_blocks: bool = False) -> list[WorkTile]:
    """Return the tiles batch by batch, head by head, block by block (0x0B).

    Parameters
    ----------
    grid : TileGrid
        The tiles.
    reverse_blocks : bool, optional
        The last block of a head first: the longest, if the mask is causal. The order within a head only.

    Returns
    -------
    list of WorkTile
        All tiles.

    Examples
    --------
    >>> [tile.block for tile in lexical_order(TileGrid(1, 2, 3), reverse_blocks=True)]
    [2, 1, 0, 2, 1, 0]
    """
    tiles = [grid.tile(flat) for flat in range(grid.tiles)]
    return [t._replace(block=grid.blocks - 1 - t.block) for t in tiles] if reverse_blocks else tiles


def order_costs(order: Sequence[WorkTile], costs: Sequence[Costs]) -> npt.NDArray[np.float64]:
    """Look up the cost of every tile of an order (0x0B).

    Parameters
    ----------
    order : sequence of WorkTile
        Tiles.
    costs : sequence of array_like
        For each batch the costs by query block; a sequence of one serves all batches.

    Returns
    -------
    numpy.ndarray
        float64, shape ``(len(order),)``.

    Raises
    ------
    ValueError
        If a tile of the order has no cost.

    Examples
    --------
    >>> order_costs([WorkTile(0, 5, 1), WorkTile(1, 0, 0)], [[1.0, 2.0], [7.0]])
    array([2., 7.])
    """
    rows = [costs[0]] if len(costs) == 1 else list(costs)
    found = []
    for tile in order:
        row = 0 if len(rows) == 1 else tile.batch
        if not (0 <= row < len(rows) and 0 <= tile.block < len(rows[row])):
            raise ValueError(f"scheduling: there is no cost of {tile}")
        found.append(rows[row][tile.block])
    return np.array(found, dtype=np.float64)


def longest_first_order(order: Sequence[WorkTile], costs: Sequence[Costs]) -> list[WorkTile]:
    """Return all tiles by falling cost, the whole launch at once (LPT); equals keep their order (0x0B).

    The best of these orders for the makespan, and the worst for L2: tiles of all heads and batches are interleaved.

    Parameters
    ----------
    order : sequence of WorkTile
        Tiles.
    costs : sequence of array_like
        For each batch the costs by query block, see `order_costs`.

    Returns
    -------
    list of WorkTile
        The same tiles.

    Examples
    --------
    >>> order = longest_first_order(lexical_order(TileGrid(1, 2, 3)), [[1, 2, 3]])
    >>> [(tile.head, tile.block) for tile in order]
    [(0, 2), (1, 2), (0, 1), (1, 1), (0, 0), (1, 0)]
    """
    ranks = np.argsort(-order_costs(order, costs), kind="stable")
    return [order[int(i)] for i in ranks]


# --- Sections that fit into L2 ---


def key_value_bytes(seqlen_k: int, head_dim: int, head_dim_v: int, element_bytes: int = 2) -> int:
    """Return ``W = S_k (d_qk + d_v) b``, the keys and values of one key/value head (specification 0x0B).

    Parameters
    ----------
    seqlen_k : int
        Keys.
    head_dim, head_dim_v : int
        ``d_qk`` and ``d_v``.
    element_bytes : int, optional
        ``b``.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> key_value_bytes(8192, 128, 128) // 2**20  # MiB
    4
    """
    check_positive(seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim_v, element_bytes=element_bytes)
    return seqlen_k * (head_dim + head_dim_v) * element_bytes


def heads_per_section(
    bytes_per_head: int, l2_bytes: int = BETA23_L2_BYTES, heads: int | None = None, power_of_two: bool = True
) -> int:
    """Return how many key/value heads fit: the largest ``H`` with ``H W <= C_L2``, at least 1 (specification 0x0B).

    Parameters
    ----------
    bytes_per_head : int
        ``W``, see `key_value_bytes`.
    l2_bytes : int, optional
        ``C_L2``, the part of L2 that may hold keys and values.
    heads : int, optional
        Key/value heads that there are: no section has more.
    power_of_two : bool, optional
        Round down to a power of two, as the audited release does, so that its divisions are shifts.

    Returns
    -------
    int
        Key/value heads per section.

    Examples
    --------
    >>> heads_per_section(4 * 2**20), heads_per_section(4 * 2**20, power_of_two=False), heads_per_section(2**30)
    (8, 12, 1)
    """
    check_positive(bytes_per_head=bytes_per_head, l2_bytes=l2_bytes, heads=1 if heads is None else heads)
    fitting = max(1, l2_bytes // bytes_per_head)
    if power_of_two:
        fitting = 1 << (fitting.bit_length() - 1)
    return fitting if heads is None else min(fitting, heads)


def sectioned_order(
    grid: TileGrid, section: int, reverse_blocks: bool = True, across_batches: bool = False
) -> list[WorkTile]:
    """Return the tiles section by section; in a section block by block, the longest first; in a block head by head.

    All query heads of a key/value head stand in one section, next to each other, so that what they share is read once
    (specification 0x0B). The section that remains at the end is smaller and otherwise like the others.

    Parameters
    ----------
    grid : TileGrid
        The tiles.
    section : int
        Key/value heads per section.
    reverse_blocks : bool, optional
        Whether the last block comes first.
    across_batches : bool, optional
        Cut the sections from the flat list of all heads of all batches, as kernels do; else none crosses a batch.

    Returns
    -------
    list of WorkTile
        All tiles.

    Examples
    --------
    >>> order = sectioned_order(TileGrid(batches=1, heads=3, blocks=2), section=2)
    >>> [(tile.head, tile.block) for tile in order]
    [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (2, 0)]
    """
    check_positive(section=section)
    flat = [(batch, head) for batch in range(grid.batches) for head in range(grid.heads)]
    pool = len(flat) if across_batches else grid.heads
    blocks = range(grid.blocks)[::-1] if reverse_blocks else range(grid.blocks)
    order = []
    for begin in range(0, len(flat), pool):
        for first in range(begin, begin + pool, section * grid.group):
            heads = flat[first : min(first + section * grid.group, begin + pool)]
            order += [WorkTile(batch, head, block) for block in blocks for batch, head in heads]
    return order


def decode_sectioned(linear: int, grid: TileGrid, section: int, reverse_blocks: bool = True) -> WorkTile:
    """Return tile number `linear` of `sectioned_order` (across batches) by division, as a kernel finds it (0x0B).

    ``section, rest = divmod(linear, blocks * size)`` with ``size`` query heads per section; the last section divides
    by the heads that remain instead: ``block, head = divmod(rest, min(size, heads left))``. Dividing the residual
    section by the full size would name heads that do not exist.

    Parameters
    ----------
    linear : int
        From 0 to ``grid.tiles - 1``.
    grid : TileGrid
        The tiles.
    section : int
        Key/value heads per section.
    reverse_blocks : bool, optional
        Whether the last block comes first.

    Returns
    -------
    WorkTile
        Its coordinates.

    Raises
    ------
    ValueError
        If there is no such tile.

    Examples
    --------
    >>> decode_sectioned(4, TileGrid(batches=1, heads=3, blocks=2), section=2)
    WorkTile(batch=0, head=2, block=1)
    """
    check_positive(section=section)
    grid.check(linear)
    size = section * grid.group
    which, rest = divmod(linear, grid.blocks * size)
    remaining = grid.batches * grid.heads - which * size
    block, within = divmod(rest, min(size, remaining))
    batch, head = divmod(which * size + within, grid.heads)
    return WorkTile(batch, head, grid.blocks - 1 - block if reverse_blocks else block)
