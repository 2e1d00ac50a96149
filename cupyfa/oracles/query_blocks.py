"""Which query blocks a key tile has to visit: `cupyfa.oracles.mask.block_range` seen from the keys."""

from __future__ import annotations

from dataclasses import dataclass

from .mask import Window, window_bounds
from .violations import check_range

__all__ = ["QueryRange", "query_range"]


@dataclass(frozen=True)
class QueryRange:
    """The query blocks of one key tile, as block indices (0x0A).

    In blocks ``low <= m < full`` every row sees all keys of the tile, so that they need no mask. The others of
    ``first <= m < end`` have a row that does not see all of them. The tile visits no other block. A whole range that
    is empty has ``low == full``.
    """

    first: int
    low: int
    full: int
    end: int


def query_range(
    key_begin: int,
    key_end: int,
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    causal: bool,
    window_size: Window = (None, None),
) -> QueryRange:
    """Find the query blocks that the keys ``key_begin <= j < key_end`` visit (0x0A).

    Parameters
    ----------
    key_begin, key_end : int
        The key tile. `key_end` may lie past `seqlen_k`: keys that do not exist are seen by nobody, and a block whose
        rows see all that do exist is whole.
    seqlen_q, seqlen_k : int
        Number of queries and keys.
    tile_m : int
        Query rows per block.
    causal : bool
        Bottom-right aligned causal mask, see `cupyfa.oracles.mask.visible`.
    window_size : tuple of int or None, optional
        How many keys left and right of its diagonal a query sees, see `cupyfa.oracles.mask.window_bounds`.

    Returns
    -------
    QueryRange
        With ``d = seqlen_k - seqlen_q``, key ``j`` is seen by the rows from ``j - d - right`` to ``j - d + left``; so
        ``first`` and ``full`` follow from the first key, ``low`` and ``end`` from the last one.

    Examples
    --------
    >>> query_range(128, 256, 512, 512, 128, causal=True)
    QueryRange(first=1, low=2, full=4, end=4)
    >>> query_range(128, 256, 512, 512, 64, causal=True, window_size=(200, None))
    QueryRange(first=2, low=4, full=5, end=8)
    """
    check_range("query_range", 1, tile_m=tile_m)
    check_range("query_range", 0, key_begin=key_begin, key_end=key_end, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    left, right = window_bounds(causal, window_size)
    first_key, last_key = key_begin - (seqlen_k - seqlen_q), min(key_end, seqlen_k) - 1 - (seqlen_k - seqlen_q)

    def blocks_before(row: int) -> int:
        """How many blocks lie before a row; the last block may be ragged, and is before the end."""
        return -(-seqlen_q // tile_m) if row >= seqlen_q else max(0, row) // tile_m

    def blocks_up_to(row: int) -> int:
        return -(-min(max(0, row), seqlen_q) // tile_m)

    first = 0 if right is None else blocks_before(first_key - right)
    end = blocks_up_to(seqlen_q if left is None else last_key + left + 1)
    low = 0 if right is None else blocks_up_to(last_key - right)
    full = blocks_before(seqlen_q if left is None else first_key + left + 1)
    if key_begin >= seqlen_k or first >= end:
        return QueryRange(first, first, first, first)
    low = min(max(first, low), end)
    return QueryRange(first, low, min(max(low, full), end), end)
