"""What a query tile costs: the key blocks it walks over, and a linear model on top (specification 0x0B).

``J_m`` is cheap metadata and orders the tiles of a causal dense problem correctly. It is no model of cycles: a window
clips it, block sparsity replaces it by the number of selected blocks, variable lengths make it depend on the batch, and
a split or a pair of CTAs changes what one block costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Blocks", "Costs", "TileCost", "causal_key_blocks", "check_costs", "check_positive", "visited_key_blocks"]

Blocks = npt.NDArray[np.int64]
Costs = Sequence[float] | npt.NDArray[np.floating] | npt.NDArray[np.integer]


def check_positive(**sizes: float) -> None:
    """Raise ValueError unless all sizes are positive and finite (0x0B).

    Parameters
    ----------
    **sizes : float
        Sizes by the name that the message shows.

    Raises
    ------
    ValueError
        Names the first size that is not.

    Examples
    --------
    >>> check_positive(tile_m=128, tile_n=0)
    Traceback (most recent call last):
    ValueError: scheduling: tile_n is 0; it must be positive and finite
    """
    for name, size in sizes.items():
        if not 0 < size < math.inf:
            raise ValueError(f"scheduling: {name} is {size}; it must be positive and finite")


def check_costs(costs: Costs) -> npt.NDArray[np.float64]:
    """Return costs as float64, or raise ValueError unless they are finite numbers, none of them negative (0x0B).

    Parameters
    ----------
    costs : array_like of float
        Of any shape.

    Returns
    -------
    numpy.ndarray
        float64, same shape.

    Raises
    ------
    ValueError
        Says what is wrong.

    Examples
    --------
    >>> check_costs([1, -2])
    Traceback (most recent call last):
    ValueError: scheduling: costs must be finite numbers, none of them negative
    """
    try:
        w = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"scheduling: costs are {costs!r}; they must be an array of numbers") from None
    if not np.isfinite(w).all() or (w < 0).any():
        raise ValueError("scheduling: costs must be finite numbers, none of them negative")
    return w


def _tile_ends(seqlen_q: int, tile_m: int) -> Blocks:
    """Return ``min((m + 1) * tile_m, seqlen_q)`` for every query tile ``m``."""
    tiles = -(-seqlen_q // tile_m)
    return np.minimum((np.arange(tiles, dtype=np.int64) + 1) * tile_m, seqlen_q)


def causal_key_blocks(seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int) -> Blocks:
    """Return ``J_m``, the key blocks of each query tile of aligned causal self-attention.

    ``J_m = min(ceil(S_k / N), ceil(min((m + 1) M, S_q) / N))`` (specification 0x0B). Query ``i`` is taken to be the
    position of key ``i``; where the lengths differ and the mask is aligned to the last key, use `visited_key_blocks`.

    Parameters
    ----------
    seqlen_q, seqlen_k : int
        ``S_q`` and ``S_k``, in tokens.
    tile_m, tile_n : int
        ``M`` query rows per tile and ``N`` keys per block.

    Returns
    -------
    numpy.ndarray
        int64, shape ``(ceil(S_q / M),)``: key blocks by query tile.

    Raises
    ------
    ValueError
        If a size is not positive.

    Examples
    --------
    >>> causal_key_blocks(768, 768, 128, 128)  # M = N on a square: J_m = m + 1
    array([1, 2, 3, 4, 5, 6])
    >>> causal_key_blocks(300, 300, 128, 80)  # the last tile ends at row 300, not at 384
    array([2, 4, 4])
    """
    check_positive(seqlen_q=seqlen_q, seqlen_k=seqlen_k, tile_m=tile_m, tile_n=tile_n)
    return np.minimum(-(-seqlen_k // tile_n), -(-_tile_ends(seqlen_q, tile_m) // tile_n))


def visited_key_blocks(
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    tile_n: int,
    causal: bool = True,
    window: tuple[int | None, int | None] = (None, None),
) -> Blocks:
    """Return the key blocks of each query tile under a mask that is aligned to the last query and key.

    Row ``i`` sees the keys ``i + shift - left <= j <= i + shift + right`` with ``shift = S_k - S_q``; a causal mask is
    ``right = 0``. A tile visits the blocks between the first key of its first row and the last key of its last row, so
    a window clips ``J_m`` from the left as causality does from the right (specification 0x0B).

    Parameters
    ----------
    seqlen_q, seqlen_k : int
        ``S_q`` and ``S_k``, in tokens; ``S_k`` may be 0.
    tile_m, tile_n : int
        Query rows per tile and keys per block.
    causal : bool, optional
        Whether no row sees a later key.
    window : tuple, optional
        ``(left, right)`` in keys, both inclusive; None is unbounded.

    Returns
    -------
    numpy.ndarray
        int64, shape ``(ceil(S_q / tile_m),)``; 0 for a tile that sees nothing.

    Raises
    ------
    ValueError
        If a size is not positive or a window side is negative.

    Examples
    --------
    >>> visited_key_blocks(512, 512, 128, 128)
    array([1, 2, 3, 4])
    >>> visited_key_blocks(512, 512, 128, 128, window=(127, None))
    array([1, 2, 2, 2])
    >>> visited_key_blocks(128, 512, 128, 128)  # the last queries see all the keys
    array([4])
    """
    check_positive(seqlen_q=seqlen_q, tile_m=tile_m, tile_n=tile_n)
    if seqlen_k < 0:
        raise ValueError(f"scheduling: seqlen_k is {seqlen_k}; it must not be negative")
    if len(window) != 2:
        raise ValueError(f"scheduling: window is {window}; it has two sides")
    left, right = window
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(f"scheduling: window is {window}; its sides must be None or at least 0")
    if causal:
        right = 0
    shift = seqlen_k - seqlen_q
    ends = _tile_ends(seqlen_q, tile_m)
    begins = np.arange(len(ends), dtype=np.int64) * tile_m
    last = np.full_like(ends, seqlen_k) if right is None else np.clip(ends + shift + right, 0, seqlen_k)
    first = np.zeros_like(ends) if left is None else np.clip(begins + shift - left, 0, seqlen_k)
    return np.where(last > first, -(-last // tile_n) - first // tile_n, 0)


@dataclass(frozen=True)
class TileCost:
    """The cost of a query tile: a fixed part and one part per key block.

    ``w = fixed + J * (qk + softmax + pv + load)`` (specification 0x0B). The defaults make the cost ``J`` itself: the
    proxy orders causal dense tiles correctly and is not a model of cycles.

    Attributes
    ----------
    fixed : float
        Prologue and epilogue, in the unit of the others (key blocks, cycles, ...).
    qk, softmax, pv, load : float
        Per key block: both products, the softmax, the copy of K and V that is not hidden.

    Raises
    ------
    ValueError
        If a part is negative or not finite.

    Examples
    --------
    >>> TileCost().of([1, 2, 3])
    array([1., 2., 3.])
    >>> TileCost(fixed=700, qk=512, softmax=256, pv=512, load=0).of([1, 4])
    array([1980., 5820.])
    """

    fixed: float = 0.0
    qk: float = 0.5
    softmax: float = 0.0
    pv: float = 0.5
    load: float = 0.0

    def __post_init__(self) -> None:
        for name, part in vars(self).items():
            if not 0 <= part < math.inf:
                raise ValueError(f"scheduling: the cost {name} is {part}; it must be finite and not negative")

    def of(self, blocks: Costs) -> npt.NDArray[np.float64]:
        """Return the costs of tiles that visit so many key blocks.

        Parameters
        ----------
        blocks : array_like of int
            ``J`` of each tile: the visible blocks, the selected ones if the mask is block-sparse, or those of one
            split.

        Returns
        -------
        numpy.ndarray
            float64, same shape.
        """
        return self.fixed + check_costs(blocks) * (self.qk + self.softmax + self.pv + self.load)
