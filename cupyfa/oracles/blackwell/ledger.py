"""Cycles that one attention tile asks of each resource of a Blackwell multiprocessor (specification 0x08 and 0x0A).

The model has three rates and nothing else: tensor operations, shared-memory bytes, exponentials. Its use is to name the
resource that binds, not to predict a time: registers, tensor memory, barriers, issue slots, L2, tails and the epilogue
are all left out. FlashAttention-4, arXiv 2603.05451, sections 3.1.1 (forward) and 3.2 (backward).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isclose

from ..violations import ContractViolation
from .claims import Figure, Kind

__all__ = [
    "PAPER",
    "Rates",
    "Tile",
    "Ledger",
    "forward",
    "forward_smem_bytes",
    "crossover_head_dim",
    "exp_to_mma",
    "smem_to_mma",
    "check_forward_smem",
    "query_rows",
    "check_query_rows",
    "sensitivity",
    "CollapsedCoordinates",
    "DroppedCeilings",
    "LedgerMismatch",
]

# Rows and columns of the accumulator that one modelled tensor instruction covers.
INSTRUCTION = 128


class DroppedCeilings(ContractViolation):
    """Operand bytes were counted per element; instructions read whole 128-wide operands (0x08)."""


class LedgerMismatch(ContractViolation):
    """Operand bytes that no version of the ledger yields (specification 0x08)."""


class CollapsedCoordinates(ContractViolation):
    """Query stages, CTA group and tile rows were taken for one another (specification 0x08)."""


def positive(contract: str, **values: float) -> None:
    """Raise `ContractViolation` naming the first value that is not positive (specification 0x08).

    Parameters
    ----------
    contract : str
        What the values belong to.
    **values : float
        The values, by name.
    """
    for name, value in values.items():
        if not value > 0:
            raise ContractViolation(f"{contract}: {name} must be positive, not {value}")


@dataclass(frozen=True)
class Rates:
    """What one multiprocessor does in one cycle (specification 0x08).

    Attributes
    ----------
    mma : float
        Tensor operations (a multiply-add is two), FLOP/cycle.
    smem : float
        Shared-memory traffic, bytes/cycle.
    exp : float
        Exponentials, operations/cycle.

    Examples
    --------
    >>> PAPER.scaled(exp=2)
    Rates(mma=8192, smem=128, exp=32)
    """

    mma: float = 8192
    smem: float = 128
    exp: float = 16

    def __post_init__(self) -> None:
        positive("rates", mma=self.mma, smem=self.smem, exp=self.exp)

    def scaled(self, mma: float = 1, smem: float = 1, exp: float = 1) -> Rates:
        """Multiply rates, for the sensitivity tables.

        Parameters
        ----------
        mma, smem, exp : float, optional
            Factors.

        Returns
        -------
        Rates
            The new machine.
        """
        return Rates(self.mma * mma, self.smem * smem, self.exp * exp)


#: The B200 rates of the FlashAttention-4 paper's model, in bfloat16.
PAPER = Rates()


@dataclass(frozen=True)
class Tile:
    """A tile of ``m`` query rows, ``n`` keys and head dimension ``d`` (Q, K and V alike) (specification 0x08).

    Attributes
    ----------
    m, n, d : int
        Shape, elements.
    itemsize : int
        Bytes per element of the operands.
    """

    m: int
    n: int
    d: int
    itemsize: int = 2

    def __post_init__(self) -> None:
        positive("tile", m=self.m, n=self.n, d=self.d, itemsize=self.itemsize)


@dataclass(frozen=True)
class Ledger:
    """Resource times of one tile (specification 0x08).

    Attributes
    ----------
    mma, smem, exp : float
        Cycles.

    Examples
    --------
    >>> ledger = forward(Tile(128, 128, 128))
    >>> ledger, ledger.binding
    (Ledger(mma=1024.0, smem=768.0, exp=1024.0), ('mma', 'exp'))
    >>> ledger.lower_bound.value, ledger.serial.value
    (1024.0, 2816.0)
    """

    mma: float
    smem: float
    exp: float

    @property
    def binding(self) -> tuple[str, ...]:
        """The resources whose time is the largest, in the order of the fields."""
        times = {"mma": self.mma, "smem": self.smem, "exp": self.exp}
        largest = max(times.values())
        return tuple(name for name, time in times.items() if isclose(time, largest, rel_tol=1e-12))

    @property
    def lower_bound(self) -> Figure:
        """``max(T_mma, T_smem, T_exp)``: all modelled resources overlap perfectly (0x08)."""
        return Figure(max(self.mma, self.smem, self.exp), "cycles", Kind.LOWER_BOUND)

    @property
    def serial(self) -> Figure:
        """``T_mma + T_smem + T_exp``: none overlap. No upper bound either, since resources are left out (0x08)."""
        return Figure(self.mma + self.smem + self.exp, "cycles", Kind.SERIAL_SUM)


def forward_smem_bytes(tile: Tile, *, ceilings: bool = True) -> float:
    """Count the shared-memory bytes that the two forward products read.

    ``QK'`` reads both operands from shared memory, ``PV`` only V, since P comes from tensor memory:
    ``b ceil(m/128) ceil(n/128) (128 d + 128 d) + b ceil(m/128) ceil(d/128) 128 n`` (0x08).

    Parameters
    ----------
    tile : Tile
        The tile.
    ceilings : bool, optional
        False drops the ceilings, which is right only where 128 divides the shape: ``3 b m n d / 128``.

    Returns
    -------
    float
        Bytes.

    Examples
    --------
    >>> forward_smem_bytes(Tile(192, 96, 160)), forward_smem_bytes(Tile(192, 96, 160), ceilings=False)
    (262144, 138240.0)
    """
    if not ceilings:
        return 3 * tile.itemsize * tile.m * tile.n * tile.d / INSTRUCTION
    rows, keys, dims = (ceil(extent / INSTRUCTION) for extent in (tile.m, tile.n, tile.d))
    scores = rows * keys * (INSTRUCTION * tile.d + INSTRUCTION * tile.d)
    output = rows * dims * (INSTRUCTION * tile.n)
    return tile.itemsize * (scores + output)


def forward(tile: Tile, rates: Rates = PAPER) -> Ledger:
    """Derive the forward ledger of one tile.

    ``T_mma = 4 m n d / R_mma`` (two products of ``2 m n d``), ``T_smem = bytes / R_smem``, ``T_exp = m n / R_exp``
    (0x08; arXiv 2603.05451, section 3.1.1 and table 1).

    Parameters
    ----------
    tile : Tile
        The tile.
    rates : Rates, optional
        The machine; the paper's B200 by default.

    Returns
    -------
    Ledger
        Cycles. Work scales with the shape, operand reads with whole instructions.

    Examples
    --------
    >>> forward(Tile(192, 96, 160)).binding
    ('smem',)
    """
    return Ledger(
        mma=4 * tile.m * tile.n * tile.d / rates.mma,
        smem=forward_smem_bytes(tile) / rates.smem,
        exp=tile.m * tile.n / rates.exp,
    )


def exp_to_mma(d: float, rates: Rates = PAPER) -> float:
    """Return ``T_exp / T_mma = R_mma / (4 d R_exp)``; the tile's shape cancels (0x08).

    Parameters
    ----------
    d : float
        Head dimension.
    rates : Rates, optional
        The machine.

    Returns
    -------
    float
        The ratio; 1 at `crossover_head_dim`.
    """
    positive("ratio", d=d)
    return rates.mma / (4 * d * rates.exp)


def smem_to_mma(itemsize: int = 2, rates: Rates = PAPER) -> float:
    """Return ``T_smem / T_mma = 3 b R_mma / (512 R_smem)`` for tiles that 128 divides (0x08).

    Parameters
    ----------
    itemsize : int, optional
        Bytes per element, ``b``.
    rates : Rates, optional
        The machine.

    Returns
    -------
    float
        The ratio.

    Examples
    --------
    >>> smem_to_mma()
    0.75
    """
    positive("ratio", itemsize=itemsize)
    return 3 * itemsize * rates.mma / (4 * INSTRUCTION * rates.smem)


def crossover_head_dim(rates: Rates = PAPER) -> float:
    """Return the head dimension at which tensor and exponential time tie: ``d* = R_mma / (4 R_exp)`` (0x08).

    Parameters
    ----------
    rates : Rates, optional
        The machine.

    Returns
    -------
    float
        Exponentials bind below it, products above.

    Examples
    --------
    >>> crossover_head_dim()
    128.0
    """
    return rates.mma / (4 * rates.exp)


def check_forward_smem(tile: Tile, claimed: float) -> None:
    """Check somebody's count of operand bytes against `forward_smem_bytes` (specification 0x08).

    Parameters
    ----------
    tile : Tile
        The tile.
    claimed : float
        Bytes.

    Raises
    ------
    DroppedCeilings
        If the count is the one without ceilings.
    LedgerMismatch
        If it is wrong in another way.
    """
    bytes_read, bare = forward_smem_bytes(tile), forward_smem_bytes(tile, ceilings=False)
    if claimed == bytes_read:
        return
    if isclose(claimed, bare):
        raise DroppedCeilings(f"{claimed:g} bytes count elements; whole 128-wide operands are {bytes_read:g} bytes")
    raise LedgerMismatch(f"{claimed:g} bytes; the ledger has {bytes_read:g}")


def query_rows(q_stage: int, cta_group: int, m_block: int = 128) -> int:
    """Return the query rows of one logical work group: ``q_stage * cta_group * m_block`` (0x08).

    Parameters
    ----------
    q_stage : int
        Query tiles that one CTA works on, 1 or 2.
    cta_group : int
        CTAs that issue products together, 1 or 2.
    m_block : int, optional
        Rows per query tile.

    Returns
    -------
    int
        Rows.

    Examples
    --------
    >>> [query_rows(*c) for c in ((1, 1), (2, 1), (2, 2))]
    [128, 256, 512]
    """
    if q_stage not in (1, 2) or cta_group not in (1, 2):
        raise ContractViolation(f"work group: q_stage {q_stage} and cta_group {cta_group} must each be 1 or 2")
    positive("work group", m_block=m_block)
    return q_stage * cta_group * m_block


def check_query_rows(claimed: int, q_stage: int, cta_group: int, m_block: int = 128) -> None:
    """Check a claimed row count of a work group; 256 is right for one configuration, not for every one (0x08).

    Parameters
    ----------
    claimed : int
        Rows, say the paper's M = 256.
    q_stage, cta_group, m_block : int
        As for `query_rows`.

    Raises
    ------
    CollapsedCoordinates
        If the claim belongs to another configuration.
    """
    rows = query_rows(q_stage, cta_group, m_block)
    if claimed != rows:
        raise CollapsedCoordinates(
            f"{claimed} rows claimed; {q_stage} query stages x {cta_group} CTAs x {m_block} rows are {rows}"
        )


def sensitivity(tile: Tile, factors: dict[str, dict[str, float]], rates: Rates = PAPER) -> dict[str, Ledger]:
    """Derive the forward ledger of one tile on machines whose rates are multiplied (0x08: sensitivity).

    Parameters
    ----------
    tile : Tile
        The tile.
    factors : dict
        Arguments of `Rates.scaled` by name of the machine.
    rates : Rates, optional
        The machine that is varied.

    Returns
    -------
    dict
        Ledgers by name.

    Examples
    --------
    >>> sensitivity(Tile(128, 128, 128), {"twice the exponentials": {"exp": 2}})["twice the exponentials"].binding
    ('mma',)
    """
    for name, factor in factors.items():
        if not factor.keys() <= {"mma", "smem", "exp"}:
            raise ContractViolation(f"sensitivity: {name} varies {', '.join(factor)}; rates are mma, smem, exp")
    return {name: forward(tile, rates.scaled(**factor)) for name, factor in factors.items()}
