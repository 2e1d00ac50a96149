"""Coordinates, liveness and time of the circular shared-memory buffer (specification 0x03).

A place in the traversal of key blocks has a stage (which slot), an epoch (how often the ring has wrapped) and a parity
(which of two generations of the slot a barrier wait looks at). Three numbers that are easily confused: the ordinal
counts visits, the block index names data, the stage names memory. The machine that moves tiles is in `pipeline`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cupyfa.oracles.hopper.machine import Deadlock, find_cycle

__all__ = [
    "PipelineState",
    "Position",
    "barrier_count",
    "check_liveness",
    "ideal_cycles",
    "pipeline_speedup",
    "position",
    "positions",
    "serial_cycles",
    "speedup_limit",
    "wait_for_graph",
]


def barrier_count(stages: int) -> int:
    """Count the mbarriers of one Q slot, `stages` K slots and `stages` V slots: ``2 + 4 s`` (specification 0x02).

    Parameters
    ----------
    stages : int
        Slots of the K ring and of the V ring.

    Returns
    -------
    int
        A full and an empty barrier for each slot.

    Examples
    --------
    >>> barrier_count(2), 8 * barrier_count(2)  # and the bytes that they take
    (10, 80)
    """
    _check_stages(stages)
    slots = 1 + stages + stages
    return 2 * slots


@dataclass(frozen=True)
class PipelineState:
    """Index and phase packed into one integer that only counts up (specification 0x03).

    ``index = z mod s``, ``epoch = z div s``, ``parity = epoch mod 2``.

    Attributes
    ----------
    z : int
        The counter.
    stages : int
        Slots ``s`` of the ring.

    Examples
    --------
    >>> state = PipelineState.of_producer(2)
    >>> state.index, state.parity  # one generation ahead of the consumer: an empty ring can be filled at once
    (0, 1)
    >>> state = state.advanced().advanced()
    >>> state.index, state.parity
    (0, 0)
    """

    z: int
    stages: int

    def __post_init__(self) -> None:
        _check_stages(self.stages)
        if self.z < 0:
            raise ValueError(f"pipeline state: the counter is {self.z}; it starts at 0 and only grows")

    @classmethod
    def of_consumer(cls, stages: int) -> PipelineState:
        """Return the first state of a consumer: stage 0, full parity 0."""
        return cls(0, stages)

    @classmethod
    def of_producer(cls, stages: int) -> PipelineState:
        """Return the first state of the producer: stage 0, empty parity 1."""
        return cls(stages, stages)

    @property
    def index(self) -> int:
        """The slot."""
        return self.z % self.stages

    @property
    def epoch(self) -> int:
        """The raw phase: how often the ring has wrapped."""
        return self.z // self.stages

    @property
    def parity(self) -> int:
        """What a barrier wait compares."""
        return self.epoch % 2

    def advanced(self) -> PipelineState:
        """Return the next state. The parity flips exactly when the index wraps."""
        return PipelineState(self.z + 1, self.stages)


@dataclass(frozen=True)
class Position:
    """One row of the coordinate table.

    Attributes
    ----------
    ordinal : int
        ``r``, the place in the traversal.
    block : int
        ``n_r = n_max - 1 - r``, the key block: right to left.
    stage : int
        The slot.
    consumer_phase, full_parity : int
        Raw phase of the consumer, and what it waits for on the full barrier.
    producer_phase, empty_parity : int
        Raw phase of the producer, and what it waits for on the empty barrier.
    """

    ordinal: int
    block: int
    stage: int
    consumer_phase: int
    full_parity: int
    producer_phase: int
    empty_parity: int


def position(ordinal: int, stages: int, block_end: int) -> Position:
    """Return all coordinates of one traversal ordinal (specification 0x03).

    Parameters
    ----------
    ordinal : int
        ``r >= 0``.
    stages : int
        Slots ``s`` of the ring.
    block_end : int
        ``n_max``: one past the rightmost key block.

    Returns
    -------
    Position
        The coordinates.

    Examples
    --------
    >>> position(4, stages=2, block_end=5)
    Position(ordinal=4, block=0, stage=0, consumer_phase=2, full_parity=0, producer_phase=3, empty_parity=1)
    """
    if ordinal < 0:
        raise ValueError(f"ring position: the ordinal is {ordinal}; it starts at 0")
    consumer, producer = PipelineState(ordinal, stages), PipelineState(ordinal + stages, stages)
    return Position(
        ordinal,
        block_end - 1 - ordinal,
        consumer.index,
        consumer.epoch,
        consumer.parity,
        producer.epoch,
        producer.parity,
    )


def positions(blocks: int, stages: int) -> list[Position]:
    """Return the coordinate table of a traversal of `blocks` blocks.

    Parameters
    ----------
    blocks : int
        ``J``; with a block-sparse mask, the number of selected blocks.
    stages : int
        Slots ``s``.

    Returns
    -------
    list of Position
        Row ``r`` for ``r = 0 .. J-1``.

    Examples
    --------
    >>> [(p.block, p.stage, p.full_parity, p.empty_parity) for p in positions(5, 2)]
    [(4, 0, 0, 1), (3, 1, 0, 1), (2, 0, 1, 0), (1, 1, 1, 0), (0, 0, 0, 1)]
    """
    return [position(r, stages, blocks) for r in range(blocks)]


def _check_stages(stages: int) -> None:
    if stages < 1:
        raise ValueError(f"ring: {stages} stages; it needs at least one slot")


def wait_for_graph(
    blocks: int,
    stages: int,
    *,
    produced: Collection[int] | None = None,
    consumed: Collection[int] | None = None,
    released: Collection[int] | None = None,
    lag: int = 0,
) -> dict[str, tuple[str, ...]]:
    """Build the graph of who waits for whom in one ring (specification 0x03).

    ``produce(r)`` waits for ``release(r - s)`` once ``r >= s``; ``consume(r)`` waits for the commit of ``r``;
    ``release(r)`` follows ``consume(r)``. Each side also follows its own order.

    Parameters
    ----------
    blocks : int
        ``J``.
    stages : int
        ``s``.
    produced, consumed, released : collection of int, optional
        Which ordinals the producer fills and the consumers use and give back; all of them by default. A path of the
        program that forgets one is a smaller set.
    lag : int, optional
        The consumer gives item ``r`` back only after it has used item ``r + lag``, or its last one.

    Returns
    -------
    dict of str to tuple of str
        Edges from waiting to awaited; ``"produce 2"`` names the event for item 2.

    Examples
    --------
    >>> wait_for_graph(3, 2)["produce 2"]
    ('produce 1', 'release 0')
    """
    everything = range(blocks)
    produced, consumed = (everything if x is None else x for x in (produced, consumed))
    released = consumed if released is None else released
    graph: dict[str, tuple[str, ...]] = {}
    order = sorted(produced)
    for before, r in zip([-1, *order], order, strict=False):
        graph[f"produce {r}"] = _edges(before >= 0 and f"produce {before}", r >= stages and f"release {r - stages}")
    order = sorted(consumed)
    for before, r in zip([-1, *order], order, strict=False):
        graph[f"consume {r}"] = _edges(before >= 0 and f"consume {before}", f"produce {r}")
    for r in released:
        graph[f"release {r}"] = (f"consume {min(r + lag, max(order, default=r))}",)
    return graph


def _edges(*names: str | bool) -> tuple[str, ...]:
    return tuple(name for name in names if isinstance(name, str))


def check_liveness(graph: dict[str, tuple[str, ...]]) -> None:
    """Raise `Deadlock` if an event waits for itself, or for one that never happens.

    Parameters
    ----------
    graph : dict of str to tuple of str
        As `wait_for_graph` builds it.

    Notes
    -----
    Following a producer's wait backwards gives ``P_r <- R_(r-s) <- C_(r-s) <- P_(r-s)``: the ordinal shrinks by ``s``,
    and the first ``s`` acquires wait for nobody. So a ring whose sides name the same items, and release what they
    use, has no cycle.

    Examples
    --------
    >>> check_liveness(wait_for_graph(5, 2))
    >>> check_liveness(wait_for_graph(5, 2, lag=2))  # holds two slots and wants a third
    Traceback (most recent call last):
    cupyfa.oracles.hopper.machine.Deadlock: deadlock: produce 2 waits for release 0; ...consume 2 waits for produce 2
    """
    cycle = find_cycle(graph)
    if cycle:
        raise Deadlock({node: graph[node][-1] for node in cycle}, {node: graph[node] for node in cycle})
    orphans = {node: e for node, edges in graph.items() for e in edges if e not in graph}
    if orphans:
        raise Deadlock(
            {node: f"{e}, which never happens" for node, e in orphans.items()}, {n: (e,) for n, e in orphans.items()}
        )


def serial_cycles(blocks: int, load: float, compute: float) -> float:
    """Return the time without overlap: ``J (T_L + T_C)``.

    Parameters
    ----------
    blocks : int
        ``J``.
    load, compute : float
        Cycles to load a block, and to compute on it.

    Returns
    -------
    float
        Cycles.

    Examples
    --------
    >>> serial_cycles(5, 300, 500)
    4000
    """
    return blocks * (load + compute)


def ideal_cycles(blocks: int, load: float, compute: float, *, stages: int = 2) -> float:
    """Return the time when loads run under compute: ``T_L + T_C + (J - 1) max(T_L, T_C)`` (specification 0x03).

    Fill: the first block has to arrive. Steady state: the slower side sets the pace. Drain: the last block is computed.

    Parameters
    ----------
    blocks : int
        ``J >= 1``.
    load, compute : float
        Cycles to load a block, and to compute on it.
    stages : int, optional
        With one slot a load cannot begin before the block before it is released: the serial time.

    Returns
    -------
    float
        Cycles: a lower bound from dependencies, no prediction.

    Examples
    --------
    >>> ideal_cycles(5, 300, 500)
    2800
    """
    if blocks < 1 or stages < 1:
        raise ValueError(f"ring times: {blocks} blocks in {stages} stages; both start at 1")
    if stages == 1:
        return serial_cycles(blocks, load, compute)
    return load + compute + (blocks - 1) * max(load, compute)


def pipeline_speedup(blocks: int, load: float, compute: float) -> float:
    """Return ``S_J``, serial over ideal time of `blocks` blocks.

    Parameters
    ----------
    blocks : int
        ``J >= 1``.
    load, compute : float
        Cycles per block.

    Returns
    -------
    float
        The speed-up; 1 for a single block.

    Examples
    --------
    >>> round(pipeline_speedup(5, 300, 500), 2), pipeline_speedup(1, 300, 500)
    (1.43, 1.0)
    """
    return serial_cycles(blocks, load, compute) / ideal_cycles(blocks, load, compute)


def speedup_limit(load: float, compute: float) -> float:
    """Return ``S_inf = (T_L + T_C) / max(T_L, T_C)``, what `pipeline_speedup` tends to.

    Parameters
    ----------
    load, compute : float
        Cycles per block.

    Returns
    -------
    float
        The limit, at most 2.

    Examples
    --------
    >>> speedup_limit(300, 500)
    1.6
    """
    return (load + compute) / max(load, compute)
