"""How one CTA or a pair of CTAs splits a product: rows, columns, operands, barrier counts, and where D lands (0x07).

A pair widens M. It splits neither the reduction nor the 512 columns: each CTA keeps a view of its own. The CTAs of a
pair differ in the last bit of their cluster rank; the even one leads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..violations import ContractViolation
from .tmem import COLUMNS, LANES

__all__ = [
    "AccumulatorShape",
    "BPayload",
    "Cell",
    "MmaTile",
    "accumulator_cell",
    "accumulator_columns",
    "b_payload",
    "barrier_arrivals",
    "mma_tile_pv",
    "mma_tile_qk",
    "operand_slices",
    "output_rows",
]


class AccumulatorShape(ContractViolation):
    """M, N and the CTA group have no accumulator layout together (specification 0x07)."""


@dataclass(frozen=True)
class MmaTile:
    """The logical tile of one product, across the group (specification 0x07).

    Attributes
    ----------
    m, n, k : int
        Rows of the result, its columns, and the reduction.
    cluster : tuple of int
        CTAs in (M, N).
    """

    m: int
    n: int
    k: int
    cluster: tuple[int, int]


def _check(cta_group: int, *sizes: int) -> None:
    if cta_group not in (1, 2):
        raise ValueError(f"cta_group is {cta_group}; it must be 1 or 2")
    if min(sizes) <= 0:
        raise ValueError(f"tile sizes must be positive, got {sizes}")


def mma_tile_qk(tile_m: int, tile_n: int, head_dim: int, cta_group: int) -> MmaTile:
    """Tile of ``S = Q K'``: ``(group * M, N, d)`` (specification 0x07).

    Parameters
    ----------
    tile_m, tile_n : int
        Query rows per CTA and keys per block.
    head_dim : int
        Of Q and K.
    cta_group : int
        1 or 2.

    Returns
    -------
    MmaTile
        Only M grows with the group.

    Examples
    --------
    >>> mma_tile_qk(128, 128, 128, 2)
    MmaTile(m=256, n=128, k=128, cluster=(2, 1))
    """
    _check(cta_group, tile_m, tile_n, head_dim)
    return MmaTile(cta_group * tile_m, tile_n, head_dim, (cta_group, 1))


def mma_tile_pv(tile_m: int, tile_n: int, head_dim_v: int, cta_group: int) -> MmaTile:
    """Tile of ``O = P V``: ``(group * M, d_v, N)`` (specification 0x07).

    Parameters
    ----------
    tile_m, tile_n : int
        Query rows per CTA and keys per block.
    head_dim_v : int
        Of V and O.
    cta_group : int
        1 or 2.

    Returns
    -------
    MmaTile
        Only M grows with the group; the reduction is over all N keys in either mode.

    Examples
    --------
    >>> mma_tile_pv(128, 64, 128, 1)
    MmaTile(m=128, n=128, k=64, cluster=(1, 1))
    """
    _check(cta_group, tile_m, tile_n, head_dim_v)
    return MmaTile(cta_group * tile_m, head_dim_v, tile_n, (cta_group, 1))


def output_rows(tile: MmaTile, rank: int) -> range:
    """Rows of the paired tile that a CTA writes (specification 0x07).

    Parameters
    ----------
    tile : MmaTile
        Of either product.
    rank : int
        Rank of the CTA in its group.

    Returns
    -------
    range
        ``[rank * m / group, (rank + 1) * m / group)``.

    Examples
    --------
    >>> output_rows(mma_tile_qk(128, 128, 128, 2), 1)
    range(128, 256)
    """
    return operand_slices(tile, rank)[0]


def operand_slices(tile: MmaTile, rank: int) -> tuple[range, range, range]:
    """Tell which part of ``D[M, N] += A[M, K] B[K, N]`` a CTA keeps in its shared memory (specification 0x07).

    Parameters
    ----------
    tile : MmaTile
        Of either product.
    rank : int
        Rank of the CTA in its group.

    Returns
    -------
    rows, columns, reduction : range
        Rows of A, which are also its rows of D; columns (N) of B; and the reduction indices of both, which are all of
        them. So K is split over its keys in ``Q K'``, V over its head dimension in ``P V``.

    Examples
    --------
    >>> operand_slices(mma_tile_qk(128, 128, 64, 2), 1)
    (range(128, 256), range(64, 128), range(0, 64))
    """
    group = tile.cluster[0]
    if not 0 <= rank < group:
        raise ValueError(f"operand_slices: rank {rank} is not in a group of {group}")
    if tile.m % group or tile.n % group:
        raise AccumulatorShape(f"a tile of {tile.m} x {tile.n} cannot be shared by {group} CTAs")
    m, n = tile.m // group, tile.n // group
    return range(rank * m, (rank + 1) * m), range(rank * n, (rank + 1) * n), range(tile.k)


@dataclass(frozen=True)
class BPayload:
    """Bytes of the B operand in shared memory (specification 0x07).

    Attributes
    ----------
    per_cta : int
        In one CTA of the pair.
    pair : int
        In both CTAs of the pair.
    independent : int
        In two CTAs that do not cooperate.
    """

    per_cta: int
    pair: int
    independent: int

    @property
    def ratio(self) -> float:
        """``pair / independent``: a ledger of payload, not a speedup and not memory traffic."""
        return self.pair / self.independent


def b_payload(n: int, k: int, element_bytes: int, cta_group: int) -> BPayload:
    """Count the shared memory that B takes in two CTAs (specification 0x07).

    Parameters
    ----------
    n, k : int
        B is n by k.
    element_bytes : int
        Bytes per element.
    cta_group : int
        2: each CTA stages half of B and the pair shares it. 1: each CTA stages all of it.

    Returns
    -------
    BPayload
        Bytes per pipeline stage.

    Examples
    --------
    >>> b = b_payload(128, 128, 2, cta_group=2)
    >>> b.per_cta, b.pair, b.independent, b.ratio
    (16384, 32768, 65536, 0.5)
    """
    _check(cta_group, n, k, element_bytes)
    if n % cta_group:
        raise AccumulatorShape(f"B of {n} columns cannot be shared by {cta_group} CTAs")
    full = n * k * element_bytes
    per_cta = full // cta_group
    return BPayload(per_cta, 2 * per_cta, 2 * full)


def barrier_arrivals(threads_per_cta: int, cta_group: int) -> int:
    """Arrivals on a barrier between the matrix warp and other threads (specification 0x07).

    Parameters
    ----------
    threads_per_cta : int
        Threads of one CTA that arrive.
    cta_group : int
        1 or 2.

    Returns
    -------
    int
        ``threads_per_cta * cta_group``: the threads of both CTAs arrive at the leader's barrier, because only the
        leader's matrix warp waits.

    Examples
    --------
    >>> barrier_arrivals(256, 2)
    512
    """
    _check(cta_group, threads_per_cta)
    return threads_per_cta * cta_group


@dataclass(frozen=True, order=True)
class Cell:
    """A 32-bit cell of a group's tensor memory: the CTA is a coordinate of its own (specification 0x07).

    Attributes
    ----------
    cta : int
        Rank in the group.
    lane, column : int
        Address in that CTA's view, relative to the accumulator's base.
    """

    cta: int
    lane: int
    column: int


def accumulator_columns(m: int, n: int, cta_group: int, *, ws: bool = False) -> int:
    """Columns that the accumulator of a product takes in each CTA (specification 0x07).

    Parameters
    ----------
    m, n : int
        Rows (of the whole group) and columns of D.
    cta_group : int
        1 or 2.
    ws : bool, optional
        True for the ``.ws`` form of the instruction.

    Returns
    -------
    int
        n, or n / 2 where D is folded: the right half of its columns lies in the upper 64 lanes.

    Examples
    --------
    >>> accumulator_columns(256, 128, 2), accumulator_columns(128, 128, 2)
    (128, 64)
    """
    _check(cta_group, m, n)
    if n > COLUMNS // 2 or n % 8:
        raise AccumulatorShape(f"N = {n}; it must be a multiple of 8 and at most 256")
    if (m, cta_group, ws) in {(64, 1, False), (128, 1, False), (256, 2, False)}:
        return n
    if (m, cta_group, ws) in {(64, 1, True), (128, 2, False)}:
        return n // 2
    raise AccumulatorShape(f"M = {m} with cta_group::{cta_group}{' .ws' if ws else ''} is not a layout known here")


def accumulator_cell(row: int, column: int, m: int, n: int, cta_group: int, *, ws: bool = False) -> Cell:
    """Find the cell that holds ``D[row, column]`` (specification 0x07).

    Parameters
    ----------
    row, column : int
        Of the group's result.
    m, n : int
        Its size.
    cta_group : int
        1 or 2.
    ws : bool, optional
        True for the ``.ws`` form of the instruction.

    Returns
    -------
    Cell
        M = 128 per CTA: lane = row. M = 64 in one CTA: rows 16 i to 16 i + 15 in lanes 32 i to 32 i + 15. M = 64 per
        CTA of a pair, or ``.ws``: lane = row, plus 64 for the right half of the columns.

    Examples
    --------
    >>> accumulator_cell(130, 5, 256, 128, 2)
    Cell(cta=1, lane=2, column=5)
    >>> accumulator_cell(3, 70, 128, 128, 2)
    Cell(cta=0, lane=67, column=6)
    """
    columns = accumulator_columns(m, n, cta_group, ws=ws)
    if not (0 <= row < m and 0 <= column < n):
        raise ValueError(f"accumulator_cell: ({row}, {column}) is outside D of {m} x {n}")
    rows_per_cta = m // cta_group
    cta, local = divmod(row, rows_per_cta)
    if rows_per_cta == LANES:
        return Cell(cta, local, column)
    if columns == n:
        return Cell(cta, 32 * (local // 16) + local % 16, column)
    return Cell(cta, local + 64 * (column // columns), column % columns)
