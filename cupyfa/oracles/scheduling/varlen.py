"""Sequences of different lengths: sorting the batches, and finding a tile without sorting (specification 0x0B).

Two designs that are easily taken for each other. The paper (FlashAttention-4, arXiv 2603.05451, section 3.3) sorts the
batches once by how long their longest tile takes and keeps the map from virtual to actual batches. The audited release
keeps the batches as they came and finds the owner of a flat tile number by prefix sums over groups of 31 batches; the
longest block comes first only within a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..violations import ContractViolation
from .costs import Blocks, TileCost, check_positive, visited_key_blocks
from .orders import WorkTile

__all__ = ["BATCHES_PER_SCAN", "Lookup", "VarlenProblem", "WorkMapViolation"]


#: A warp sums the tiles of 31 batches; its last lane carries the total.
BATCHES_PER_SCAN = 31


class WorkMapViolation(ContractViolation):
    """A virtual-to-actual map is no permutation of the batches (0x0B)."""


@dataclass(frozen=True)
class Lookup:
    """How a flat tile number was resolved (0x0B).

    Attributes
    ----------
    tile : WorkTile
        The coordinates.
    scans : int
        Groups of batches whose tiles were summed on the way.
    """

    tile: WorkTile
    scans: int


@dataclass(frozen=True)
class VarlenProblem:
    """A batch of sequences and the tiles that it is cut into (0x0B).

    Attributes
    ----------
    lengths_q : tuple of int
        Query tokens of each sequence; 0 is legitimate.
    lengths_k : tuple of int or None
        Key tokens; None where they equal the query tokens.
    heads, tile_m, tile_n : int
        Query heads, query rows per tile, keys per block.
    causal : bool
        Aligned to the last query and key.

    Raises
    ------
    ValueError
        If sizes are not positive, a length is negative, or the two lists differ in length.

    Examples
    --------
    >>> problem = VarlenProblem((128, 768, 256, 512))
    >>> problem.worktiles, problem.virtual_to_actual()
    ([1, 6, 2, 4], [1, 3, 2, 0])
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...] | None = None
    heads: int = 1
    tile_m: int = 128
    tile_n: int = 128
    causal: bool = True

    def __post_init__(self) -> None:
        check_positive(heads=self.heads, tile_m=self.tile_m, tile_n=self.tile_n)
        if len(self.keys) != len(self.lengths_q):
            raise ValueError(f"scheduling: {len(self.keys)} key lengths for {len(self.lengths_q)} query lengths")
        if min((*self.lengths_q, *self.keys), default=0) < 0:
            raise ValueError("scheduling: lengths must not be negative")

    @property
    def keys(self) -> tuple[int, ...]:
        """Key tokens of each sequence."""
        return self.lengths_q if self.lengths_k is None else self.lengths_k

    @property
    def worktiles(self) -> list[int]:
        """Query tiles of one head of each sequence: ``ceil(S_q / M)``."""
        return [-(-q // self.tile_m) for q in self.lengths_q]

    def key_blocks(self) -> list[Blocks]:
        """Return the key blocks by query tile, for each sequence.

        Returns
        -------
        list of numpy.ndarray
            int64, shape ``(worktiles[b],)``.
        """
        return [
            visited_key_blocks(q, k, self.tile_m, self.tile_n, self.causal) if q else np.zeros(0, dtype=np.int64)
            for q, k in zip(self.lengths_q, self.keys, strict=True)
        ]

    def virtual_to_actual(self, cost: TileCost | None = None) -> list[int]:
        """Sort the sequences by the estimated time of their longest tile, the longest first; equals as they came.

        Not by the number of tiles: a decode request of one query row over a long context has one tile, and it may be
        the longest of all (specification 0x0B).

        Parameters
        ----------
        cost : TileCost, optional
            The estimate; the number of key blocks by default.

        Returns
        -------
        list of int
            The actual batch by virtual batch. It depends on the lengths only, so it can be kept with the metadata.

        Examples
        --------
        >>> VarlenProblem((512, 1), lengths_k=(512, 8192)).virtual_to_actual()
        [1, 0]
        """
        cost = cost or TileCost()
        longest = [float(cost.of(blocks).max()) if len(blocks) else -1.0 for blocks in self.key_blocks()]
        return sorted(range(len(longest)), key=lambda batch: -longest[batch])

    def _batch_tiles(self, batch: int, section: int, reverse_blocks: bool) -> list[WorkTile]:
        blocks = range(self.worktiles[batch])
        return [
            WorkTile(batch, head, block)
            for first in range(0, self.heads, section)
            for block in (blocks[::-1] if reverse_blocks else blocks)
            for head in range(first, min(first + section, self.heads))
        ]

    def order(
        self, section: int = 1, reverse_blocks: bool = True, batches: Sequence[int] | None = None
    ) -> list[WorkTile]:
        """Return all tiles, batch after batch.

        Parameters
        ----------
        section : int, optional
            Query heads that are in work together.
        reverse_blocks : bool, optional
            The last query block first, within a section.
        batches : sequence of int, optional
            The actual batches in their order, see `virtual_to_actual`; as they came by default.

        Returns
        -------
        list of WorkTile
            All tiles; their `batch` is the actual one.

        Raises
        ------
        WorkMapViolation
            If `batches` is no permutation.

        Examples
        --------
        >>> problem = VarlenProblem((128, 256))
        >>> [tuple(tile) for tile in problem.order(batches=problem.virtual_to_actual())]
        [(1, 0, 1), (1, 0, 0), (0, 0, 0)]
        """
        check_positive(section=section)
        batches = range(len(self.lengths_q)) if batches is None else batches
        if sorted(batches) != list(range(len(self.lengths_q))):
            raise WorkMapViolation(f"scheduling: {list(batches)} must name each of {len(self.lengths_q)} batches once")
        return [tile for batch in batches for tile in self._batch_tiles(batch, section, reverse_blocks)]

    def locate(self, flat: int, section: int = 1, reverse_blocks: bool = True) -> Lookup | None:
        """Resolve a flat tile number as the audited release does: prefix sums over the batches as they came.

        Each scan sums ``heads * worktiles`` of up to 31 batches; the first inclusive sum above `flat` names the batch.
        The rest is divided as in `orders.decode_sectioned`. No map of sorted batches is read.

        Parameters
        ----------
        flat : int
            Linear tile number, at least 0.
        section : int, optional
            Query heads that are in work together.
        reverse_blocks : bool, optional
            The last query block first, within a section.

        Returns
        -------
        Lookup or None
            The tile; None past the last one.

        Raises
        ------
        ValueError
            If the number is negative.

        Examples
        --------
        >>> problem = VarlenProblem((128, 768, 256, 512))
        >>> problem.locate(1).tile, problem.locate(13)
        (WorkTile(batch=1, head=0, block=5), None)
        """
        check_positive(section=section)
        if flat < 0:
            raise ValueError(f"scheduling: tile {flat} does not exist")
        counts = np.array(self.worktiles, dtype=np.int64) * self.heads
        begin = 0
        for scan, first in enumerate(range(0, len(counts), BATCHES_PER_SCAN)):
            ends = begin + np.cumsum(counts[first : first + BATCHES_PER_SCAN])
            if flat >= ends[-1]:
                begin = int(ends[-1])
                continue
            lane = int(np.argmax(ends > flat))
            within = flat - (int(ends[lane - 1]) if lane else begin)
            return Lookup(self._divide(first + lane, within, section, reverse_blocks), scan + 1)
        return None

    def _divide(self, batch: int, within: int, section: int, reverse_blocks: bool) -> WorkTile:
        blocks = self.worktiles[batch]
        which, rest = divmod(within, section * blocks)
        block, head = divmod(rest, min(section, self.heads - which * section))
        return WorkTile(batch, which * section + head, blocks - 1 - block if reverse_blocks else block)
