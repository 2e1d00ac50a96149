"""The problems of a benchmark, their operation counts and their arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa.testing import random_array

__all__ = ["Cell", "Inputs", "make_inputs"]

_NAN_BITS = 0x7FC1  # a NaN in bfloat16 and in float16


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem of a benchmark.

    Attributes
    ----------
    head_dim, seqlen, batch, heads : int
        The shape; query and key lengths and head counts are equal.
    causal : bool
        Whether the mask is causal.
    dtype : str
        ``"bfloat16"`` or ``"float16"``.
    heads_kv : int or None
        Key/value heads; None: as many as query heads.
    """

    head_dim: int
    seqlen: int
    batch: int
    heads: int
    causal: bool
    dtype: str = "bfloat16"
    heads_kv: int | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, seqlen, heads, head_dim)."""
        return self.batch, self.seqlen, self.heads, self.head_dim

    @property
    def dense_flops(self) -> int:
        """Operations without a mask: 2 * B * H * Sq * Sk * (d + dv)."""
        return 2 * self.batch * self.heads * self.seqlen * self.seqlen * (self.head_dim + self.head_dim)

    @property
    def useful_flops(self) -> int:
        """Operations that count: the dense ones, halved where the mask is causal."""
        return self.dense_flops // 2 if self.causal else self.dense_flops

    def scheduled_flops(self, tile_m: int, tile_n: int, tile_d: int) -> int:
        """Return the operations of a kernel that computes whole tiles.

        Parameters
        ----------
        tile_m, tile_n, tile_d : int
            Query rows, keys and head_dim of a tile.

        Returns
        -------
        int
            Tiles that the mask leaves, times their operations.
        """
        steps = 0
        for end in range(tile_m, self.seqlen + tile_m, tile_m):
            keys = min(end, self.seqlen) if self.causal else self.seqlen
            steps += -(-keys // tile_n)
        return 2 * self.batch * self.heads * steps * tile_m * tile_n * 2 * tile_d

    def __str__(self) -> str:
        """Return the problem on one line."""
        mask = "causal" if self.causal else "full"
        heads = f"H{self.heads}" + (f"/{self.heads_kv}" if self.heads_kv else "")
        return f"{self.dtype} d{self.head_dim} {mask} S{self.seqlen} B{self.batch} {heads}"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays that all contestants share.

    Attributes
    ----------
    cell : Cell
        The problem.
    q, k, v : array
        (batch, seqlen, heads, head_dim), nearly N(0, 1).
    out : array
        Where cupyfa writes; full of NaN at first.
    """

    cell: Cell
    q: Any
    k: Any
    v: Any
    out: Any


def make_inputs(cell: Cell, xp: Any) -> Inputs:
    """Make the arrays of a problem.

    Parameters
    ----------
    cell : Cell
        The problem.
    xp : module
        ``cupy`` or ``numpy``.

    Returns
    -------
    Inputs
        Random q, k, v and a poisoned out.
    """
    dtype = np.dtype(ml_dtypes.bfloat16 if cell.dtype == "bfloat16" else np.float16)
    shape_kv = (cell.batch, cell.seqlen, cell.heads_kv or cell.heads, cell.head_dim)
    q, k, v = (random_array(s, dtype, seed, xp=xp) for seed, s in enumerate((cell.shape, shape_kv, shape_kv), start=1))
    out = xp.empty(cell.shape, dtype)
    out.view(np.uint16)[...] = _NAN_BITS
    return Inputs(cell, q, k, v, out)
