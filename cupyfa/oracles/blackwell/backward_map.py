"""The backward kernels' maps of tensor memory, per CTA, and where their widths come from (specification 0x0A).

Offsets alone do not say how wide an object is: that follows from the shape of the product that writes it and from the
CTA group, whose layout may fold an accumulator into half the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..violations import ContractViolation
from .cta_group import accumulator_columns
from .tmem import Region

__all__ = ["BackwardMap", "check_width", "map_1cta", "map_192_2cta", "map_2cta", "UnprovenWidth"]


class UnprovenWidth(ContractViolation):
    """A width was read off the offsets; the CTA group's accumulator layout decides it (specification 0x0A)."""


@dataclass(frozen=True)
class BackwardMap:
    """Columns of tensor memory, per CTA (specification 0x0A).

    Attributes
    ----------
    regions : dict
        `Region` by object. Operands in 16 bit (P, dS) take half as many columns as a float32 accumulator.
    """

    regions: dict[str, Region]

    @property
    def columns(self) -> int:
        """One past the last column used."""
        return max(region.end for region in self.regions.values())


def _map(**regions: tuple[int, int]) -> BackwardMap:
    return BackwardMap({name: Region(name, begin, width) for name, (begin, width) in regions.items()})


def map_1cta(tile: int = 128, d: int = 128) -> BackwardMap:
    """Return the map of one CTA: S -> P at 0, then dV, then dP -> dS -> dQ, then dK (0x0A).

    Parameters
    ----------
    tile : int, optional
        Query rows and keys of the tile.
    d : int, optional
        Head dimension.

    Returns
    -------
    BackwardMap
        512 columns for 128 x 128 and d = 128.

    Examples
    --------
    >>> {name: (r.begin, r.end) for name, r in map_1cta().regions.items()}["dQ"]
    (256, 384)
    """
    scores, sums = accumulator_columns(tile, tile, 1), accumulator_columns(tile, d, 1)
    dP = scores + sums
    return _map(
        S=(0, scores),
        P=(0, tile // 2),
        dV=(scores, sums),
        dP=(dP, scores),
        dS=(dP, tile // 2),
        dQ=(dP, sums),
        dK=(dP + max(scores, sums), sums),
    )


def map_2cta(tile: int = 128, d: int = 128) -> BackwardMap:
    """Return the map of one CTA of a pair: dQ of the previous tile sits beside P, in the tail of S (0x0A).

    The pair's scores are 256 keys x 128 query rows, 128 rows and all 128 columns in each CTA; its dQ is 128 rows, 64 in
    each CTA, folded into half the columns. So S needs 128 columns, P and dQ 64 each: dQ may be written once S has
    been read, and not before. The 64 columns that the specification states for "S/P" are those of P.

    Parameters
    ----------
    tile : int, optional
        Query rows, and keys of one CTA.
    d : int, optional
        Head dimension.

    Returns
    -------
    BackwardMap
        512 columns for 128 x 128 and d = 128.

    Examples
    --------
    >>> {name: (r.begin, r.end) for name, r in map_2cta().regions.items() if name in ("S", "P", "dQ")}
    {'S': (0, 128), 'P': (0, 64), 'dQ': (64, 128)}
    """
    scores, sums = accumulator_columns(2 * tile, tile, 2), accumulator_columns(2 * tile, d, 2)
    dP = scores + sums
    return _map(
        S=(0, scores),
        P=(0, tile // 2),
        dQ=(d // 2, accumulator_columns(tile, d, 2)),
        dV=(scores, sums),
        dP=(dP, scores),
        dS=(dP, tile // 2),
        dK=(dP + scores, sums),
    )


def map_192_2cta(tile: int = 128) -> BackwardMap:
    """Return the map of the pair for d = 192 and d_v = 128: another contract, with S, dP and dQ staggered (0x0A).

    Parameters
    ----------
    tile : int, optional
        Query rows, and keys of one CTA.

    Returns
    -------
    BackwardMap
        512 columns.

    Examples
    --------
    >>> {name: (r.begin, r.end) for name, r in map_192_2cta().regions.items() if name in ("S", "dP", "dQ")}
    {'S': (320, 448), 'dP': (384, 512), 'dQ': (416, 512)}
    """
    dV, dK = accumulator_columns(2 * tile, 128, 2), accumulator_columns(2 * tile, 192, 2)
    scores = accumulator_columns(2 * tile, tile, 2)
    return _map(
        dV=(0, dV),
        dK=(dV, dK),
        S=(dV + dK, scores),
        P=(dV + dK, tile // 2),
        dP=(dV + dK + tile // 2, scores),
        dS=(dV + dK + tile // 2, tile // 2),
        dQ=(416, accumulator_columns(tile, 192, 2)),
    )


def check_width(region: Region, m: int, n: int, cta_group: int) -> None:
    """Check the width of an accumulator's region against the layout of the product that writes it (0x0A).

    Parameters
    ----------
    region : Region
        The region.
    m, n, cta_group : int
        Shape of the product, and CTAs that issue it together.

    Raises
    ------
    UnprovenWidth
        If the product needs another number of columns.

    Examples
    --------
    >>> check_width(Region("dQ", 64, 64), m=128, n=128, cta_group=2)
    >>> check_width(Region("S", 0, 64), m=256, n=128, cta_group=2)
    Traceback (most recent call last):
    ...
    cupyfa.oracles.blackwell.backward_map.UnprovenWidth: S: 64 columns mapped, but 256 x 128 in CTA group 2 \
writes 128
    """
    needed = accumulator_columns(m, n, cta_group)
    if region.width != needed:
        raise UnprovenWidth(
            f"{region.name}: {region.width} columns mapped, but {m} x {n} in CTA group {cta_group} writes {needed}"
        )
