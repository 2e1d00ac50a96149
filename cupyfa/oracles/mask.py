"""Which keys a query row sees, and which key blocks a query tile has to visit.

The twin of ``cuda/mask.cuh``: `block_range` decides as ``BlockRange::of`` does and `TileMask.apply` as ``Mask::apply``,
but for a whole tile, where the kernel has the rows of a warpgroup and a thread's fragment of the scores. A ragged last
block has fewer columns here; the kernel masks the columns behind the last key. `visible` is the definition that both
are tested against.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from .violations import ContractViolation, check_range, check_shape

__all__ = ["BlockRange", "TileMask", "Window", "block_range", "visible", "weighted_sum", "window_bounds"]

Array = npt.NDArray[np.floating]
Window: TypeAlias = tuple[int | None, int | None]


def _bound(side: SupportsIndex | None) -> int | None:
    """Return one side of a window; raise unless it is an integer from -1 on, or None."""
    if side is None:
        return None
    number = operator.index(side)
    if number < -1:
        raise ValueError
    return None if number == -1 else number


def window_bounds(causal: bool, window_size: Window) -> Window:
    """Return how far each query sees, to the left and to the right of its diagonal (0x01).

    Parameters
    ----------
    causal : bool
        The right side is 0, whatever `window_size` says.
    window_size : tuple of int or None
        Keys to the left and to the right; None or -1 for no bound.

    Returns
    -------
    left, right : int or None
        Row ``i`` sees the keys ``i + d - left <= j <= i + d + right``, both included, with ``d = seqlen_k - seqlen_q``;
        None for no bound.

    Raises
    ------
    ValueError
        If there are not two sides, or one of them is no such number.

    Examples
    --------
    >>> window_bounds(True, (128, None)), window_bounds(True, (-1, 5)), window_bounds(False, (None, 5))
    ((128, 0), (None, 0), (None, 5))
    """
    try:
        left, right = map(_bound, window_size)
    except (TypeError, ValueError):
        raise ContractViolation(
            f"attention: window_size is {window_size}; each side must be an integer >= 0, or None or -1 for no bound"
        ) from None
    return left, 0 if causal else right


def visible(
    seqlen_q: int, seqlen_k: int, causal: bool, rows: slice = slice(None), window_size: Window = (None, None)
) -> npt.NDArray[np.bool_]:
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
    window_size : tuple of int or None, optional
        How many keys left and right of its diagonal a query sees, see `window_bounds`.

    Returns
    -------
    numpy.ndarray
        Booleans, shape ``(seqlen_q, seqlen_k)``, or as many rows as `rows` selects.

    Examples
    --------
    >>> visible(2, 3, causal=True).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    >>> visible(2, 3, causal=True, window_size=(1, None)).astype(int)
    array([[1, 1, 0],
           [0, 1, 1]])
    """
    check_range("visible", 0, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    diagonal = np.arange(seqlen_q)[rows] + (seqlen_k - seqlen_q)
    return _band(diagonal, np.arange(seqlen_k), window_bounds(causal, window_size))


def _band(diagonal: npt.NDArray[np.intp], key: npt.NDArray[np.intp], bounds: Window) -> npt.NDArray[np.bool_]:
    """Tell which of the keys lie around which diagonals: ``(rows, keys)``."""
    left, right = bounds
    seen = np.ones((diagonal.size, key.size), dtype=np.bool_)
    if left is not None:
        seen &= key >= diagonal[:, None] - left
    if right is not None:
        seen &= key <= diagonal[:, None] + right
    return seen


@dataclass(frozen=True)
class BlockRange:
    """The key blocks of one query tile, as block indices (0x01).

    Blocks ``low <= n < full`` are seen whole by every row and need no mask. Some row does not see the first keys of
    blocks ``first <= n < low``, or the last keys of blocks ``full <= n < end``; a block may be both, and `low` may lie
    past `end`. The tile visits no other block.
    """

    first: int
    full: int
    end: int
    low: int = 0


def block_range(
    row_begin: int,
    row_end: int,
    seqlen_q: int,
    seqlen_k: int,
    tile_n: int,
    causal: bool,
    window_size: Window = (None, None),
) -> BlockRange:
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
    window_size : tuple of int or None, optional
        How many keys left and right of its diagonal a query sees, see `window_bounds`.

    Returns
    -------
    BlockRange
        ``end`` follows from the last key of the last row, ``full`` from that of the first row: with
        ``d = seqlen_k - seqlen_q``, ``end = max(0, ceil(min(seqlen_k, row_end + d + right) / tile_n))`` and
        ``full = max(0, floor(min(seqlen_k, row_begin + 1 + d + right) / tile_n))``; without a bound to the right,
        `seqlen_k` alone replaces the minima. ``first`` follows from the first key of the first row, ``low`` from that
        of the last row: ``first = floor(max(0, row_begin + d - left) / tile_n)``, but less than a positive ``end``, and
        ``low = max(first, ceil((row_end - 1 + d - left) / tile_n))``; both are 0 without a bound to the left.

    Examples
    --------
    >>> block_range(128, 256, 512, 512, 128, causal=True)
    BlockRange(first=0, full=1, end=2, low=0)
    >>> block_range(0, 128, 512, 500, 128, causal=False)  # the last block is ragged, so it is masked
    BlockRange(first=0, full=3, end=4, low=0)
    >>> block_range(384, 512, 512, 512, 128, causal=True, window_size=(300, None))
    BlockRange(first=0, full=3, end=4, low=2)
    """
    check_range("block_range", 1, tile_n=tile_n)
    check_range("block_range", 0, row_begin=row_begin, row_end=row_end, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    left, right = window_bounds(causal, window_size)
    diagonal = row_begin + (seqlen_k - seqlen_q)  # of the first row
    last_diagonal = row_end - 1 + (seqlen_k - seqlen_q)
    keys_of_last_row = seqlen_k if right is None else min(seqlen_k, last_diagonal + right + 1)
    keys_of_first_row = seqlen_k if right is None else min(seqlen_k, diagonal + right + 1)
    end = max(0, -(-keys_of_last_row // tile_n))
    first = 0 if left is None else min(max(0, diagonal - left) // tile_n, max(0, end - 1))
    return BlockRange(
        first=first,
        full=max(0, keys_of_first_row // tile_n),
        end=end,
        low=first if left is None else max(first, -((left - last_diagonal) // tile_n)),
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
    window_size : tuple of int or None, optional
        How many keys left and right of its diagonal a query sees, see `window_bounds`.
    """

    row_begin: int
    row_end: int
    seqlen_q: int
    seqlen_k: int
    tile_n: int
    causal: bool
    window_size: Window = (None, None)

    def __post_init__(self) -> None:
        window_bounds(self.causal, self.window_size)
        check_range("tile mask", 1, tile_n=self.tile_n)
        check_range("tile mask", 0, seqlen_q=self.seqlen_q, seqlen_k=self.seqlen_k)
        check_range("tile mask", 0, self.seqlen_q, row_end=self.row_end)
        check_range("tile mask", 0, self.row_end, row_begin=self.row_begin)

    @property
    def blocks(self) -> BlockRange:
        """The key blocks this tile visits."""
        lengths = (self.seqlen_q, self.seqlen_k)
        return block_range(self.row_begin, self.row_end, *lengths, self.tile_n, self.causal, self.window_size)

    def is_whole(self, j: int) -> bool:
        """Tell whether block `j` needs no mask; a ragged last block may need none here.

        Parameters
        ----------
        j : int
            Index of a block that the tile visits.

        Returns
        -------
        bool
            Whether every row sees all keys of the block.
        """
        _, right = window_bounds(self.causal, self.window_size)
        blocks = self.blocks
        return blocks.low <= j and (right is None or j < blocks.full)

    def keys(self, j: int) -> npt.NDArray[np.intp]:
        """Return the keys of block `j`.

        Parameters
        ----------
        j : int
            Block index.

        Returns
        -------
        numpy.ndarray
            Their indices; a ragged last block has fewer than `tile_n`.
        """
        check_range("tile mask", 0, max(0, -(-self.seqlen_k // self.tile_n) - 1), block=j)
        return np.arange(j * self.tile_n, min((j + 1) * self.tile_n, self.seqlen_k))

    @property
    def diagonal(self) -> npt.NDArray[np.intp]:
        """The key that is aligned with each row; there may be none of that index."""
        return np.arange(self.row_begin, self.row_end) + (self.seqlen_k - self.seqlen_q)

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
        return _band(self.diagonal, self.keys(j), window_bounds(self.causal, self.window_size))

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
        if self.is_whole(j):
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
