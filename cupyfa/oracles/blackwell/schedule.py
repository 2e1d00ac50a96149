"""The forward schedule of FlashAttention-4: tensor order, split P, and a timeline (specification 0x08).

Two query tiles, H and L, share the tensor cores and the exponential unit. While one tile's scores become probabilities
the other tile's products run. The timeline below is a model: it takes durations from the resource ledger and waits only
for what the handoffs name. `contract` checks a trace of it edge by edge, `contract.execute` computes attention with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..violations import ContractViolation
from .claims import Figure, Kind
from .ledger import PAPER, Rates, Tile, forward, positive

__all__ = [
    "TILES",
    "Durations",
    "Event",
    "TensorOp",
    "Timeline",
    "choose_q_stage",
    "early_columns",
    "issue_order_figure",
    "simulate",
    "tensor_order",
]

#: Names of the query tiles of one CTA.
TILES = ("H", "L")


def early_columns(n: int) -> int:
    """Return how many columns of P are published first: ``32 floor((3 n / 4) / 32)`` (0x08).

    Parameters
    ----------
    n : int
        Keys of the tile.

    Returns
    -------
    int
        Columns after which the product with V may be issued; it needs the others to finish.

    Examples
    --------
    >>> early_columns(128)
    96
    """
    positive("split P", n=n)
    return 32 * (3 * n // 4 // 32)


def choose_q_stage(packed_rows: int, m_block: int = 128) -> int:
    """Return how many query tiles the pinned interface gives a CTA: two as soon as one does not hold all rows (0x08).

    Parameters
    ----------
    packed_rows : int
        Query rows of one head, times the query heads that are packed into its rows.
    m_block : int, optional
        Rows per query tile.

    Returns
    -------
    int
        1 or 2; as many softmax warpgroups work. Dedicated kernels have rules of their own.

    Examples
    --------
    >>> choose_q_stage(128), choose_q_stage(129)
    (1, 2)
    """
    positive("query stages", packed_rows=packed_rows, m_block=m_block)
    return 2 if packed_rows > m_block else 1


@dataclass(frozen=True)
class TensorOp:
    """One product in the order in which the MMA warp issues it (specification 0x08).

    Attributes
    ----------
    product : str
        ``"QK"`` or ``"PV"``.
    tile : str
        ``"H"`` or ``"L"``.
    block : int
        Key block.
    phase : str
        ``"startup"``, ``"steady"`` or ``"drain"``.
    """

    product: str
    tile: str
    block: int
    phase: str

    def __str__(self) -> str:
        return f"{self.product}_{self.tile}_{self.block}"


def tensor_order(blocks: int, q_stage: int = 2) -> tuple[TensorOp, ...]:
    """List the products of one work tile in issue order.

    Startup: the scores of all query tiles. Steady: output of a tile, then its next scores, which overwrite the P just
    consumed. Drain: the last outputs (0x08).

    Parameters
    ----------
    blocks : int
        Key blocks; 0 leaves nothing to issue.
    q_stage : int, optional
        Query tiles, 1 or 2.

    Returns
    -------
    tuple of TensorOp
        ``2 * q_stage * blocks`` products.

    Examples
    --------
    >>> " ".join(str(op) for op in tensor_order(2))
    'QK_H_0 QK_L_0 PV_H_0 QK_H_1 PV_L_0 QK_L_1 PV_H_1 PV_L_1'
    """
    if blocks < 0 or q_stage not in (1, 2):
        raise ContractViolation(f"tensor order: blocks {blocks} must not be negative, q_stage {q_stage} be 1 or 2")
    tiles = TILES[:q_stage]

    def ops() -> Iterator[TensorOp]:
        """Yield the products in startup, steady state and drain."""
        if blocks:
            yield from (TensorOp("QK", tile, 0, "startup") for tile in tiles)
        for j in range(blocks):
            for tile in tiles:
                last = j + 1 == blocks
                yield TensorOp("PV", tile, j, "drain" if last else "steady")
                if not last:
                    yield TensorOp("QK", tile, j + 1, "steady")

    return tuple(ops())


def issue_order_figure(blocks: int, q_stage: int = 2) -> Figure:
    """Return the number of products in the issue order, as a figure that refuses to be called a timeline (0x08).

    Parameters
    ----------
    blocks, q_stage : int
        As for `tensor_order`.

    Returns
    -------
    Figure
        Of kind ``ISSUE_ORDER``.
    """
    return Figure(len(tensor_order(blocks, q_stage)), "products", Kind.ISSUE_ORDER)


@dataclass(frozen=True)
class Durations:
    """Cycles of the steps for one query tile and one key block (specification 0x08).

    Attributes
    ----------
    qk, pv : float
        The two products.
    exp : float
        The exponentials of one tile; they run alone on the unit.
    rescale : float
        The correction of O.
    """

    qk: float
    pv: float
    exp: float
    rescale: float = 0.0

    def __post_init__(self) -> None:
        """Check the durations."""
        positive("durations", qk=self.qk, pv=self.pv, exp=self.exp)
        if self.rescale < 0:
            raise ContractViolation(f"durations: rescale must not be negative, not {self.rescale}")

    @classmethod
    def from_ledger(cls, tile: Tile, rates: Rates = PAPER, rescale: float = 0.0) -> Durations:
        """Take the durations of one query tile from the forward ledger; the two products share its tensor time.

        Parameters
        ----------
        tile : Tile
            One query tile and one key block.
        rates : Rates, optional
            The machine.
        rescale : float, optional
            Cycles of the correction, which the ledger leaves out.

        Returns
        -------
        Durations
            Cycles.

        Examples
        --------
        >>> Durations.from_ledger(Tile(128, 128, 128))
        Durations(qk=512.0, pv=512.0, exp=1024.0, rescale=0.0)
        """
        ledger = forward(tile, rates)
        return cls(qk=ledger.mma / 2, pv=ledger.mma / 2, exp=ledger.exp, rescale=rescale)


@dataclass(frozen=True)
class Event:
    """An instant of the timeline (specification 0x08).

    Attributes
    ----------
    time : float
        Cycles from the start.
    agent : str
        Role, as in `roles.FORWARD`.
    action : str
        ``qk_issue``, ``s_ready``, ``exp_begin``, ``p_early``, ``p_final`` (the end of the exponentials), ``rescaled``,
        ``pv_issue`` or ``pv_done``.
    tile : str
        ``"H"`` or ``"L"``.
    block : int
        Key block.
    phase : str
        Phase of the tensor order that the event belongs to.
    """

    time: float
    agent: str
    action: str
    tile: str
    block: int
    phase: str


@dataclass
class Timeline:
    """Events in order of time, and the busy intervals ``(agent, label, begin, end)`` of the drawn picture (0x08).

    Attributes
    ----------
    events : list of Event
        In an order that respects every handoff; events of equal time stay in the order of cause and effect.
    spans : list of tuple
        ``(resource, label, begin, end)`` in cycles; resources are ``"tensor"``, ``"exp"`` and ``"correction"``.
    """

    events: list[Event] = field(default_factory=list)
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)

    @property
    def makespan(self) -> float:
        """Cycles until the last event."""
        return max((event.time for event in self.events), default=0.0)

    def busy(self, resource: str) -> float:
        """Sum the spans of a resource, in cycles.

        Parameters
        ----------
        resource : str
            ``"tensor"``, ``"exp"`` or ``"correction"``.

        Returns
        -------
        float
            Cycles.
        """
        return sum(end - begin for name, _, begin, end in self.spans if name == resource)


def simulate(
    blocks: int, durations: Durations, *, q_stage: int = 2, tile_n: int = 128, split_p: bool = True
) -> Timeline:
    """Run the schedule: every step starts as soon as its unit is free and its handoffs have arrived.

    Operand copies are taken to be on time (the ring that sees to that is 0x03). The products run in issue order on one
    unit; the exponentials of H and L never overlap, as the paper demands; a product with V starts on the early columns
    of P and cannot end before the last ones are there.

    Parameters
    ----------
    blocks : int
        Key blocks.
    durations : Durations
        Cycles per step.
    q_stage : int, optional
        Query tiles, 1 or 2.
    tile_n : int, optional
        Keys per block, for `early_columns`.
    split_p : bool, optional
        False publishes P once, complete.

    Returns
    -------
    Timeline
        Events and spans.

    Examples
    --------
    >>> durations = Durations.from_ledger(Tile(128, 128, 128))
    >>> [simulate(blocks, durations).makespan for blocks in (1, 2, 8)]
    [2816.0, 4864.0, 17152.0]
    """
    run = _Run(tensor_order(blocks, q_stage), durations, early_columns(tile_n) / tile_n if split_p else 1.0)
    for op in run.order:
        if op.product == "QK":
            run.scores(op)
        else:
            # The row maximum is known when S is ready, so correction and exponentials start together.
            run.softmax(op)
            run.rescale(op)
            run.output(op)
    run.line.events.sort(key=lambda e: e.time)  # stable: cause stays before effect
    return run.line


class _Run:
    """When each unit is free and each handoff arrives, while a schedule is laid out in issue order."""

    def __init__(self, order: tuple[TensorOp, ...], durations: Durations, early: float) -> None:
        self.order, self.durations, self.early = order, durations, early
        self.line = Timeline()
        self.tensor_free = self.exp_free = 0.0
        self.s_ready: dict[str, float] = {}
        self.published = self.complete = self.rescaled = 0.0  # of the tile at hand

    def scores(self, op: TensorOp) -> None:
        """Lay out a product Q K'."""
        begin = self.tensor_free
        self.tensor_free = self.s_ready[op.tile] = begin + self.durations.qk
        self._span("tensor", op, begin, self.tensor_free)
        self._event(begin, "mma", "qk_issue", op)
        self._event(self.tensor_free, "mma", "s_ready", op)

    def softmax(self, op: TensorOp) -> None:
        """Lay out the exponentials that the product `op` consumes."""
        begin = max(self.exp_free, self.s_ready[op.tile])
        self.published = begin + self.early * self.durations.exp
        self.exp_free = self.complete = begin + self.durations.exp
        self._span("exp", op, begin, self.complete)
        for time, action in ((begin, "exp_begin"), (self.published, "p_early"), (self.complete, "p_final")):
            self._event(time, f"softmax {op.tile}", action, op)

    def rescale(self, op: TensorOp) -> None:
        """Lay out the correction of O before `op` adds to it."""
        begin = self.s_ready[op.tile]
        self.rescaled = begin + self.durations.rescale
        self._span("correction", op, begin, self.rescaled)
        self._event(self.rescaled, "correction", "rescaled", op)

    def output(self, op: TensorOp) -> None:
        """Lay out a product P V: it starts on the early columns and waits inside for the last ones."""
        begin = max(self.tensor_free, self.published, self.rescaled)
        rest = max(begin + self.early * self.durations.pv, self.complete)
        self.tensor_free = rest + (1 - self.early) * self.durations.pv
        self._span("tensor", op, begin, self.tensor_free)
        self._event(begin, "mma", "pv_issue", op)
        self._event(self.tensor_free, "mma", "pv_done", op)

    def _span(self, resource: str, op: TensorOp, begin: float, end: float) -> None:
        label = str(op) if resource == "tensor" else f"{op.tile}_{op.block}"
        self.line.spans.append((resource, label, begin, end))

    def _event(self, time: float, agent: str, action: str, op: TensorOp) -> None:
        self.line.events.append(Event(time, agent, action, op.tile, op.block, op.phase))
