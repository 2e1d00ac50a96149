"""Which keys a query row sees, and which key blocks a query tile has to visit.

The twin of ``cuda/mask.cuh``: `block_range` decides as ``BlockRange::of`` does and `TileMask.apply` as ``Mask::apply``,
but for a whole tile, where the kernel has the rows of a warpgroup and a thread's fragment of the scores. A ragged last
block has fewer columns here; the kernel masks the columns behind the last key. `visible` is the definition that both
are tested against.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .violations import ContractViolation, check_range, check_shape

__all__ = ["BlockRange", "TileMask", "block_range", "visible", "weighted_sum"]

Array = npt.NDArray[np.floating]


def visible(seqlen_q: int, seqlen_k: int, causal: bool, rows: slice = slice(None)) -> npt.NDArray[np.bool_]:
    """Tell for every (query, key) pair whether the query sees the key (0x01).

    Parameters
    ----------
    seqlen_q, seqlen_k : int
        Number of queries and keys.
    causal : bool
        If true, row ``i`` sees the keys ``j <= i + seqlen_k - seqlen_q``: the mask is aligned bottom-right, so that
        the last query sees every key. With more queries than keys the first rows see nothing.
    rows : slice, optional
        Only these queries; all of them by default.

    Returns
    -------
    numpy.ndarray
        Booleans, shape ``(seqlen_q, seqlen_k)``, or as many rows as `rows` selects.

    Examples
    --------
    >>> visible(2, 3, causal=True).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    check_range("visible", 0, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    row = np.arange(seqlen_q)[rows, None]
    if not causal:
        return np.ones((row.size, seqlen_k), dtype=np.bool_)
    return np.arange(seqlen_k)[None, :] <= row + (seqlen_k - seqlen_q)


@dataclass(frozen=True)
class BlockRange:
    """The key blocks of one query tile, as block indices (0x01).

    Blocks ``first <= n < full`` are seen whole by every row and need no mask; blocks ``full <= n < end`` need one;
    the tile visits no other block.
    """

    first: int
    full: int
    end: int


def block_range(row_begin: int, row_end: int, seqlen_q: int, seqlen_k: int, tile_n: int, causal: bool) -> BlockRange:
    """Find the key blocks that the query rows ``row_begin <= i < row_end`` visit (0x01).

    Parameters
    ----------
    row_begin, row_end : int
        The query tile. `row_end` may lie past `seqlen_q`: rows that do not exist only ever widen the range.
    seqlen_q, seqlen_k : int
        Number of queries and keys.
    tile_n : int
        Keys per block.
    causal : bool
        Bottom-right aligned causal mask, see `visible`.

    Returns
    -------
    BlockRange
        ``end`` follows from the keys that the last row sees, ``full`` from those that the first row sees:
        ``end = max(0, ceil(min(seqlen_k, row_end + seqlen_k - seqlen_q) / tile_n))`` and
        ``full = max(0, floor(min(seqlen_k, row_begin + 1 + seqlen_k - seqlen_q) / tile_n))`` when causal;
        `seqlen_k` alone replaces the minima otherwise.

    Examples
    --------
    >>> block_range(128, 256, 512, 512, 128, causal=True)
    BlockRange(first=0, full=1, end=2)
    >>> block_range(0, 128, 512, 500, 128, causal=False)  # the last block is ragged, so it is masked
    BlockRange(first=0, full=3, end=4)
    """
    check_range("block_range", 1, tile_n=tile_n)
    check_range("block_range", 0, row_begin=row_begin, row_end=row_end, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    shift = seqlen_k - seqlen_q
    keys_of_last_row = min(seqlen_k, row_end + shift) if causal else seqlen_k
    keys_of_first_row = min(seqlen_k, row_begin + 1 + shift) if causal else seqlen_k
    return BlockRange(
        first=0,
        full=max(0, keys_of_first_row // tile_n),
        end=max(0, -(-keys_of_last_row // tile_n)),
    )


@dataclass(frozen=True)
class TileMask:
    """The mask of one query tile, applied to its score blocks one at a time (0x01).

    Parameters
    ----------
    row_begin, row_end : int
        The query rows of the tile, both inside the sequence.
    seqlen_q, seqlen_k : int
        Number of queries and keys.
    tile_n : int
        Keys per block.
    causal : bool
        Bottom-right aligned causal mask, see `visible`.
    """

    row_begin: int
    row_end: int
    seqlen_q: int
    seqlen_k: int
    tile_n: int
    causal: bool

    def __post_init__(self) -> None:
        check_range("tile mask", 1, tile_n=self.tile_n)
        check_range("tile mask", 0, seqlen_q=self.seqlen_q, seqlen_k=self.seqlen_k)
        check_range("tile mask", 0, self.seqlen_q, row_end=self.row_end)
        check_range("tile mask", 0, self.row_end, row_begin=self.row_begin)

    @property
    def blocks(self) -> BlockRange:
        """The key blocks this tile visits."""
        return block_range(self.row_begin, self.row_end, self.seqlen_q, self.seqlen_k, self.tile_n, self.causal)

    def block(self, j: int) -> npt.NDArray[np.bool_]:
        """Tell which keys of block `j` each row sees.

        Parameters
        ----------
        j : int
            Block index.

        Returns
        -------
        numpy.ndarray
            Booleans, shape ``(row_end - row_begin, keys of block j)``; a ragged last block has fewer keys.
        """
        check_range("tile mask", 0, max(0, -(-self.seqlen_k // self.tile_n) - 1), block=j)
        key = np.arange(j * self.tile_n, min((j + 1) * self.tile_n, self.seqlen_k))[None, :]
        if not self.causal:
            return np.ones((self.row_end - self.row_begin, key.size), dtype=np.bool_)
        row = np.arange(self.row_begin, self.row_end)[:, None]
        return key <= row + (self.seqlen_k - self.seqlen_q)

    def apply(self, scores: Array, j: int) -> Array:
        """Replace the scores of unseen keys by -inf.

        Parameters
        ----------
        scores : numpy.ndarray
            Shape ``(..., row_end - row_begin, keys of block j)``, raw, or scaled by a positive factor: a factor of 0
            applied afterwards would compute ``-inf * 0``, and a negative one turn -inf into +inf.
        j : int
            Block index.

        Returns
        -------
        numpy.ndarray
            `scores` itself when every row sees the whole block, else a new array.
        """
        keys = max(0, min(self.tile_n, self.seqlen_k - j * self.tile_n))
        if scores.shape[-2:] != (self.row_end - self.row_begin, keys):
            raise ContractViolation(
                f"tile mask: scores of block {j} have shape {scores.shape}; "
                f"they must be (..., {self.row_end - self.row_begin}, {keys})"
            )
        if not self.causal or j < self.blocks.full:
            return scores
        return np.where(self.block(j), scores, scores.dtype.type(-np.inf))


def weighted_sum(P: Array, V: Array, seen: npt.NDArray[np.bool_] | None) -> Array:
    """Compute ``P @ V`` such that an unseen key contributes nothing, even where its value is NaN or infinite (0x01).

    A plain product would compute ``0 * NaN`` there. Finite values take exactly the plain product.

    Parameters
    ----------
    P : numpy.ndarray
        Weights, shape ``(..., rows, keys)``; 0 for unseen keys.
    V : numpy.ndarray
        Values, shape ``(..., keys, head_dim)``.
    seen : numpy.ndarray or None
        Booleans, shape ``(rows, keys)``; None if every row sees every key.

    Returns
    -------
    numpy.ndarray
        Shape ``(..., rows, head_dim)``.

    Examples
    --------
    >>> P = np.array([[1.0, 0.0], [0.5, 0.5]])
    >>> weighted_sum(P, np.array([[2.0], [np.nan]]), np.array([[True, False], [True, True]]))
    array([[ 2.],
           [nan]])
    """
    if P.ndim < 2 or V.ndim < 2 or P.shape[:-2] != V.shape[:-2] or P.shape[-1] != V.shape[-2]:
        raise ContractViolation(f"weighted_sum: P {P.shape} and V {V.shape}; need (..., rows, keys) and (..., keys, d)")
    if seen is not None:
        check_shape("weighted_sum", P.shape[-2:], seen=seen)
    finite = np.isfinite(V)
    everywhere = seen is None or bool(finite.all())
    total: Array = np.matmul(P, V if everywhere else np.where(finite, V, V.dtype.type(0)))
    if seen is None or everywhere:
        return total
    axes = tuple(axis for axis in range(V.ndim) if axis != V.ndim - 2)
    for key in np.flatnonzero(~finite.all(axis=axes)):
        special = np.where(finite[..., key, :], V.dtype.type(0), V[..., key, :])
        rows = seen[:, key]
        total[..., rows, :] += P[..., rows, key, None] * special[..., None, :]
    return total
