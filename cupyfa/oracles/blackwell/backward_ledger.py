"""The backward ledger of one tile, for one CTA and for a CTA pair (specification 0x0A).

Five products share one tile, so the tensor cores have 2.5 times the forward's work; shared memory binds nevertheless,
because three of the products read both operands from it and dS and dQ pass through it. A pair of CTAs reads half of
each operand that both need, and halves dQ, at the price of exchanging half of dS. FlashAttention-4, arXiv 2603.05451,
section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..violations import ContractViolation
from .claims import Figure, Kind
from .ledger import PAPER, Rates, Tile, positive

__all__ = [
    "CONTRACTIONS",
    "BackwardLedger",
    "Contraction",
    "one_cta",
    "two_cta",
    "check_contractions",
    "dq_reduction_elements",
    "exchange_bytes",
    "MissingContraction",
]

# dQ leaves as float32, written to shared memory once and read from it once.
_DQ_BYTES = 2 * 4
# Passes over the exchanged half of dS that reproduce the paper's 384 cycles: staged, read out, received. The paper
# prints the figure without its derivation, so this decomposition is a reading of it.
_EXCHANGE_PASSES = 3


class MissingContraction(ContractViolation):
    """Not all five products of the backward pass were counted (specification 0x0A)."""


@dataclass(frozen=True)
class Contraction:
    """One of the five products (specification 0x0A).

    Attributes
    ----------
    name : str
        The result.
    operands : dict
        Operands read from shared memory, each with the share of it that one CTA of a pair reads. In `S`, `dP`, `dV` and
        `dK` the pair splits the operand that both CTAs need. In `dQ` a CTA has half the rows but twice the keys to sum
        over, so neither operand shrinks.
    """

    name: str
    operands: dict[str, float]


#: The products in the order of 0x0A. What is missing from the operands (P, and dS for dK) comes from tensor memory.
CONTRACTIONS = (
    Contraction("S", {"Q": 0.5, "K": 1}),
    Contraction("dP", {"dO": 0.5, "V": 1}),
    Contraction("dV", {"dO": 0.5}),
    Contraction("dK", {"Q": 0.5}),
    Contraction("dQ", {"dS": 1, "K": 1}),
)


@dataclass(frozen=True)
class BackwardLedger:
    """Resource times of one backward tile (specification 0x0A).

    Attributes
    ----------
    mma, exp : float
        Cycles of the tensor cores and of the exponential unit.
    operands, ds_write, ds_exchange, dq_staging : float
        Cycles of shared memory: operands of the products; dS written for dQ; dS sent to the peer CTA; dQ written and
        read on its way to global memory.

    Examples
    --------
    >>> ledger = one_cta(Tile(128, 128, 128))
    >>> ledger.mma, ledger.smem, ledger.exp, ledger.lower_bound.value
    (2560.0, 3328.0, 1024.0, 3328.0)
    """

    mma: float
    operands: float
    ds_write: float
    ds_exchange: float
    dq_staging: float
    exp: float

    @property
    def smem(self) -> float:
        """All shared-memory cycles, those of the exchange included."""
        return self.operands + self.ds_write + self.ds_exchange + self.dq_staging

    @property
    def excess(self) -> float:
        """Shared-memory cycles beyond the tensor cores' (negative if tensor cores bind)."""
        return self.smem - self.mma

    @property
    def lower_bound(self) -> Figure:
        """``max(T_mma, T_smem, T_exp)``: perfect overlap, no bubbles, barriers or tails (0x0A)."""
        return Figure(max(self.mma, self.smem, self.exp), "cycles", Kind.LOWER_BOUND)


def operand_elements(tile: Tile, *, pair: bool = False) -> float:
    """Count the operand elements that the products of one tile read from shared memory.

    One CTA: ``(Q + K) + (dO + V) + dO + Q + (dS + K) = 4 m d + 3 n d + m n``. One CTA of a pair:
    ``2 m d + 3 n d + m n`` (0x0A).

    Parameters
    ----------
    tile : Tile
        The tile.
    pair : bool, optional
        Whether the CTA works in a pair.

    Returns
    -------
    float
        Elements.

    Examples
    --------
    >>> operand_elements(Tile(1, 10, 100)), operand_elements(Tile(1, 10, 100), pair=True)
    (3410, 3210.0)
    """
    m, n, d = tile.m, tile.n, tile.d
    size = {"Q": m * d, "dO": m * d, "K": n * d, "V": n * d, "dS": m * n}
    return sum(
        size[name] * (share if pair else 1)
        for contraction in CONTRACTIONS
        for name, share in contraction.operands.items()
    )


def one_cta(tile: Tile, rates: Rates = PAPER) -> BackwardLedger:
    """Derive the backward ledger of a CTA that works alone.

    ``T_mma = 10 m n d / R_mma``, ``T_operands = b (4 m d + 3 n d + m n) / R_smem``, ``T_dS = b m n / R_smem``,
    ``T_dQ = 8 m d / R_smem``, ``T_exp = m n / R_exp``: with b = 2 and 128 bytes per cycle the specification's
    ``/ 64`` and ``/ 16`` (0x0A).

    Parameters
    ----------
    tile : Tile
        The tile.
    rates : Rates, optional
        The machine.

    Returns
    -------
    BackwardLedger
        Cycles.
    """
    m, n, d, b = tile.m, tile.n, tile.d, tile.itemsize
    return BackwardLedger(
        mma=len(CONTRACTIONS) * 2 * m * n * d / rates.mma,
        operands=b * operand_elements(tile) / rates.smem,
        ds_write=b * m * n / rates.smem,
        ds_exchange=0.0,
        dq_staging=_DQ_BYTES * m * d / rates.smem,
        exp=m * n / rates.exp,
    )


def two_cta(tile: Tile, rates: Rates = PAPER) -> BackwardLedger:
    """Derive the backward ledger of one CTA of a pair, for the same products per CTA as `one_cta`.

    Operands shrink to ``2 m d + 3 n d + m n`` elements and dQ to ``m / 2`` rows; the exchange adds three passes over
    ``m n / 2`` elements of dS (0x0A).

    Parameters
    ----------
    tile : Tile
        The tile of one CTA: ``m`` query rows, its own ``n`` keys of the pair's ``2 n``.
    rates : Rates, optional
        The machine.

    Returns
    -------
    BackwardLedger
        Cycles.

    Examples
    --------
    >>> ledger = two_cta(Tile(128, 128, 128))
    >>> ledger.operands, ledger.ds_write, ledger.ds_exchange, ledger.dq_staging, ledger.smem
    (1536.0, 256.0, 384.0, 512.0, 2688.0)
    """
    if tile.m % 2:
        raise ContractViolation(f"CTA pair: m must be even to be halved, not {tile.m}")
    m, n, d, b = tile.m, tile.n, tile.d, tile.itemsize
    return BackwardLedger(
        mma=len(CONTRACTIONS) * 2 * m * n * d / rates.mma,
        operands=b * operand_elements(tile, pair=True) / rates.smem,
        ds_write=b * m * n / rates.smem,
        ds_exchange=_EXCHANGE_PASSES * b * (m // 2) * n / rates.smem,
        dq_staging=_DQ_BYTES * (m // 2) * d / rates.smem,
        exp=m * n / rates.exp,
    )


def check_contractions(names: tuple[str, ...]) -> int:
    """Check which products somebody counted (specification 0x0A).

    Parameters
    ----------
    names : tuple of str
        Results of the products.

    Returns
    -------
    int
        Floating-point operations in units of ``m n d``: 10.

    Raises
    ------
    MissingContraction
        If one of the five is missing; S is the usual one, since the forward pass computed it, but did not keep it.

    Examples
    --------
    >>> check_contractions(("dP", "dV", "dK", "dQ"))
    Traceback (most recent call last):
    ...
    cupyfa.oracles.blackwell.backward_ledger.MissingContraction: products not counted: S
    """
    missing = [c.name for c in CONTRACTIONS if c.name not in names]
    if missing:
        raise MissingContraction(f"products not counted: {', '.join(missing)}")
    return 2 * len(CONTRACTIONS)


def exchange_bytes(m: int, n: int, itemsize: int = 2) -> int:
    """Return the bytes of dS that a pair exchanges: each CTA sends ``m / 2 x n``, together ``m n b`` (0x0A).

    Parameters
    ----------
    m, n : int
        Query rows, and keys of one CTA.
    itemsize : int, optional
        Bytes per element of dS.

    Returns
    -------
    int
        Bytes of both directions together.

    Examples
    --------
    >>> exchange_bytes(128, 128)
    32768
    """
    positive("exchange", m=m, n=n, itemsize=itemsize)
    if m % 2:
        raise ContractViolation(f"exchange: m must be even to be halved, not {m}")
    return 2 * (m // 2) * n * itemsize


def dq_reduction_elements(rows: int, d: int, key_partitions: int, cta_group: int) -> int:
    """Count the float32 elements of dQ that are added to global memory.

    Every group of CTAs that shares its keys adds each row once: ``rows * d * ceil(key_partitions / cta_group)`` (0x0A).

    Parameters
    ----------
    rows : int
        Query rows.
    d : int
        Head dimension.
    key_partitions : int
        CTAs that the keys are distributed over.
    cta_group : int
        1 or 2: how many of them sum before they add.

    Returns
    -------
    int
        Elements.

    Examples
    --------
    >>> [dq_reduction_elements(256, 128, 2, group) for group in (1, 2)]
    [65536, 32768]
    """
    positive("dQ reduction", rows=rows, d=d, key_partitions=key_partitions)
    if cta_group not in (1, 2):
        raise ContractViolation(f"dQ reduction: cta_group must be 1 or 2, not {cta_group}")
    return rows * d * ceil(key_partitions / cta_group)
