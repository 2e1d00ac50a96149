"""How many floating-point operations a benchmark counts: three numerators and their conventions (specification 0x0D).

TFLOP/s is an accounting throughput: counted operations over a time. Only products count; exponentials, reductions and
recomputation stay in the time and out of the numerator. The same run has three legitimate numerators. *Useful* counts
the score pairs that the mask leaves, *scheduled* the whole tiles that the kernel issues for them, *dense-equivalent*
the full square whatever was skipped. They answer different questions and never share a column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from ..scheduling.costs import visited_key_blocks

__all__ = [
    "BACKWARD_FACTOR",
    "AttentionShape",
    "Numerators",
    "accounting_throughput",
    "backward_flops",
    "backward_matmul_flops",
    "causal_half_pairs",
    "numerators",
    "scheduled_pairs",
    "varlen_numerators",
    "visible_pairs",
]

#: Five products in a backward pass against two in a forward one; the convention of both papers.
BACKWARD_FACTOR = Fraction(5, 2)


def _check_not_negative(**counts: float | Fraction) -> None:
    for name, count in counts.items():
        if not 0 <= count < math.inf:
            raise ValueError(f"accounting: {name} is {count}; it must be finite and not negative")


@dataclass(frozen=True)
class AttentionShape:
    """One attention problem, as far as counting needs it (0x0D).

    Attributes
    ----------
    batch, heads : int
        ``B`` and the query heads ``H``.
    seqlen_q, seqlen_k : int
        ``S_q`` and ``S_k``.
    head_dim, head_dim_v : int
        ``d_qk`` and ``d_v``.
    heads_kv : int or None
        Key/value heads; None where every query head has its own. They change the bytes, never the operations.
    causal : bool
        Aligned to the last query and key.
    window : tuple
        ``(left, right)`` in keys, both inclusive; None is unbounded.

    Raises
    ------
    ValueError
        If a size is not positive, a window side is negative, or the heads are no whole groups.
    """

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    heads_kv: int | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
            if getattr(self, name) <= 0:
                raise ValueError(f"accounting: {name} is {getattr(self, name)}; it must be positive")
        if self.heads_kv is not None and (self.heads_kv <= 0 or self.heads % self.heads_kv):
            raise ValueError(f"accounting: {self.heads} heads are no multiple of the {self.heads_kv} key/value heads")
        sides = list(self.window)
        if len(sides) != 2 or any(side is not None and side < 0 for side in sides):
            raise ValueError(f"accounting: window is {self.window}; its two sides must be None or at least 0")

    @property
    def qk_flops(self) -> int:
        """``F_QK = 2 B H S_q S_k d_qk``."""
        return 2 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.head_dim

    @property
    def pv_flops(self) -> int:
        """``F_PV = 2 B H S_q S_k d_v``."""
        return 2 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.head_dim_v

    @property
    def dense_flops(self) -> int:
        """``F = 2 B H S_q S_k (d_qk + d_v)``; ``4 B H S^2 d`` where lengths and head dimensions are equal."""
        return self.qk_flops + self.pv_flops

    def flops_of(self, pairs: int) -> int:
        """Return the forward operations of so many score pairs per head: ``2 B H pairs (d_qk + d_v)``.

        Parameters
        ----------
        pairs : int
            Score pairs of one head.

        Returns
        -------
        int
            Operations.
        """
        _check_not_negative(pairs=pairs)
        return 2 * self.batch * self.heads * pairs * (self.head_dim + self.head_dim_v)


# --- Score pairs of one head ---


def visible_pairs(shape: AttentionShape) -> int:
    """Count the (query, key) pairs that the mask leaves.

    Row ``i`` sees the keys from ``max(0, i + shift - left)`` to ``min(S_k - 1, i + shift + right)`` with
    ``shift = S_k - S_q``; causal is ``right = 0``. On a causal square this is ``S (S + 1) / 2`` (specification 0x0D).

    Parameters
    ----------
    shape : AttentionShape
        The problem.

    Returns
    -------
    int
        Pairs of one head.

    Examples
    --------
    >>> visible_pairs(AttentionShape(1, 1, 1024, 1024, 64, 64, causal=True)) == 1024 * 1025 // 2
    True
    >>> visible_pairs(AttentionShape(1, 1, 4, 4, 64, 64, causal=True, window=(1, None)))  # 1 + 2 + 2 + 2
    7
    """
    left, right = shape.window
    if shape.causal:
        right = 0
    row = np.arange(shape.seqlen_q, dtype=np.int64) + (shape.seqlen_k - shape.seqlen_q)
    end = np.full_like(row, shape.seqlen_k) if right is None else np.minimum(shape.seqlen_k, row + right + 1)
    begin = np.zeros_like(row) if left is None else np.maximum(0, row - left)
    return int(np.maximum(0, end - begin).sum())


def causal_half_pairs(seqlen_q: int, seqlen_k: int) -> Fraction:
    """Return ``S_q S_k / 2``, the papers' convention for causal work (0x0D).

    The exact count of a square is larger by ``1 / S`` of it, and means little where the lengths differ.

    Parameters
    ----------
    seqlen_q, seqlen_k : int
        ``S_q`` and ``S_k``.

    Returns
    -------
    fractions.Fraction
        Pairs of one head; half a pair if both lengths are odd.

    Examples
    --------
    >>> causal_half_pairs(1024, 1024), causal_half_pairs(3, 3)
    (Fraction(524288, 1), Fraction(9, 2))
    """
    _check_not_negative(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return Fraction(seqlen_q * seqlen_k, 2)


def scheduled_pairs(shape: AttentionShape, tile_m: int, tile_n: int) -> int:
    """Count the pairs of all tiles that a kernel issues: ``M N`` for each visited block, masked ones whole (0x0D).

    Parameters
    ----------
    shape : AttentionShape
        The problem.
    tile_m, tile_n : int
        ``M`` query rows and ``N`` keys per tile.

    Returns
    -------
    int
        Pairs of one head.

    Examples
    --------
    >>> scheduled_pairs(AttentionShape(1, 1, 512, 512, 64, 64, causal=True), 128, 128) // 128**2
    10
    """
    blocks = visited_key_blocks(shape.seqlen_q, shape.seqlen_k, tile_m, tile_n, shape.causal, shape.window)
    return int(blocks.sum()) * tile_m * tile_n


# --- Numerators ---


@dataclass(frozen=True)
class Numerators:
    """Counted forward operations of one problem under every convention (0x0D).

    Attributes
    ----------
    useful : int
        Pairs that the mask leaves.
    paper : Fraction
        The papers' convention: half of the dense ones if causal. Without meaning for a window.
    scheduled : int
        Whole tiles, head dimensions padded to the tile.
    dense_equivalent : int
        The full square.
    """

    useful: int
    paper: Fraction
    scheduled: int
    dense_equivalent: int

    def __add__(self, other: Numerators) -> Numerators:
        """Sum over problems that one launch computes."""
        return Numerators(
            self.useful + other.useful,
            self.paper + other.paper,
            self.scheduled + other.scheduled,
            self.dense_equivalent + other.dense_equivalent,
        )


def numerators(shape: AttentionShape, tile_m: int, tile_n: int, tile_d: int | None = None) -> Numerators:
    """Count the forward operations of a problem under every convention (specification 0x0D).

    Parameters
    ----------
    shape : AttentionShape
        The problem.
    tile_m, tile_n : int
        Query rows and keys per tile of the kernel.
    tile_d : int, optional
        Head dimension that the kernel computes with, for both products; that of the problem by default.

    Returns
    -------
    Numerators
        Operations.

    Raises
    ------
    ValueError
        If `tile_d` is smaller than a head dimension: such a kernel would not compute the problem.

    Examples
    --------
    >>> n = numerators(AttentionShape(1, 1, 512, 512, 64, 64, causal=True), 128, 128)
    >>> n.useful, n.paper, n.scheduled, n.dense_equivalent
    (33619968, Fraction(33554432, 1), 41943040, 67108864)
    """
    if tile_d is not None and tile_d < max(shape.head_dim, shape.head_dim_v):
        raise ValueError(f"accounting: a tile of head_dim {tile_d} does not hold {shape.head_dim}, {shape.head_dim_v}")
    depth = shape.head_dim + shape.head_dim_v if tile_d is None else 2 * tile_d
    half = Fraction(1, 2) if shape.causal else Fraction(1)
    return Numerators(
        useful=shape.flops_of(visible_pairs(shape)),
        paper=shape.dense_flops * half,
        scheduled=2 * shape.batch * shape.heads * scheduled_pairs(shape, tile_m, tile_n) * depth,
        dense_equivalent=shape.dense_flops,
    )


def varlen_numerators(
    lengths: Iterable[tuple[int, int]], shape: AttentionShape, tile_m: int, tile_n: int
) -> Numerators:
    """Sum the numerators of sequences with their own lengths (0x0D).

    Dense-equivalent is the sum of the sequences' own squares. Counting one padded square per sequence is a fourth
    numerator and none of these.

    Parameters
    ----------
    lengths : iterable of (int, int)
        ``(S_q, S_k)`` of each sequence; one with a length of 0 has no work.
    shape : AttentionShape
        Heads, head dimensions and mask; its batch and lengths are replaced.
    tile_m, tile_n : int
        Query rows and keys per tile.

    Returns
    -------
    Numerators
        Operations of the whole batch.

    Examples
    --------
    >>> shape = AttentionShape(1, 2, 1, 1, 64, 64)
    >>> varlen_numerators([(128, 128), (256, 256)], shape, 128, 128).useful == 4 * 2 * 64 * (128**2 + 256**2)
    True
    """
    total = Numerators(0, Fraction(0), 0, 0)
    for seqlen_q, seqlen_k in lengths:
        _check_not_negative(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        if seqlen_q and seqlen_k:
            one = replace(shape, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
            total += numerators(one, tile_m, tile_n)
    return total


# --- Backward, and rates ---


def backward_flops(forward: int | Fraction) -> Fraction:
    """Return ``2.5`` times the forward operations, the papers' convention (0x0D).

    Parameters
    ----------
    forward : int or Fraction
        Operations under any convention.

    Returns
    -------
    fractions.Fraction
        Operations under the same convention.

    Examples
    --------
    >>> float(backward_flops(274_877_906_944)) / 1e9
    687.19476736
    """
    _check_not_negative(forward=forward)
    return BACKWARD_FACTOR * forward


def backward_matmul_flops(shape: AttentionShape, pairs: int) -> int:
    """Return the operations of the five backward products: ``2 B H pairs (3 d_qk + 2 d_v)`` (0x0D).

    ``S = Q K'``, ``dQ = dS K`` and ``dK = dS' Q`` contract or produce ``d_qk``; ``dP = dO V'`` and ``dV = P' dO`` have
    ``d_v``. It is 2.5 times forward only where the head dimensions are equal; for (192, 128) it is 2.6 times.

    Parameters
    ----------
    shape : AttentionShape
        The problem.
    pairs : int
        Score pairs of one head.

    Returns
    -------
    int
        Operations.

    Examples
    --------
    >>> shape = AttentionShape(1, 1, 128, 128, 192, 128)
    >>> backward_matmul_flops(shape, 128**2) / shape.dense_flops
    2.6
    """
    _check_not_negative(pairs=pairs)
    return 2 * shape.batch * shape.heads * pairs * (3 * shape.head_dim + 2 * shape.head_dim_v)


def accounting_throughput(flops: int | Fraction, seconds: float) -> float:
    """Return counted operations over time, in TFLOP/s (0x0D).

    Parameters
    ----------
    flops : int or Fraction
        Operations under one convention, which belongs beside the figure.
    seconds : float
        Measured time.

    Returns
    -------
    float
        TFLOP/s. With a dense-equivalent numerator it may exceed what the hardware can do.

    Raises
    ------
    ValueError
        If the time is not positive: a rate without a measured time is no measurement.

    Examples
    --------
    >>> round(accounting_throughput(4 * 32 * 1024 * 1024 * 16 * 128, 0.20e-3), 2)
    1374.39
    """
    _check_not_negative(flops=flops)
    if not 0 < seconds < math.inf:
        raise ValueError(f"accounting: the time is {seconds}; it must be positive and finite")
    return float(flops) / seconds / 1e12
