"""Coordinates and time of the circular shared-memory buffer (specification 0x03).

A place in the traversal of key blocks has a stage (which slot), an epoch (how often the ring has wrapped) and a parity
(which of two generations of the slot a barrier wait looks at). Three numbers that are easily confused: the ordinal
counts visits, the block index names data, the stage names memory. Who waits for whom is in
`liveness`, the machine that moves tiles in `pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupyfa.oracles.hopper.machine import require_cycles

__all__ = [
    "PipelineState",
    "Position",
    "barrier_count",
    "ideal_cycles",
    "pipeline_speedup",
    "position",
    "positions",
    "serial_cycles",
    "speedup_limit",
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
    """One row of the coordinate table (specification 0x03).

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
    if block_end <= ordinal:
        raise ValueError(
            f"ring position: ordinal {ordinal} of {block_end} blocks would be block {block_end - 1 - ordinal}"
        )
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
    """Return the coordinate table of a traversal of `blocks` blocks (specification 0x03).

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
    if blocks < 0:
        raise ValueError(f"ring positions: {blocks} blocks; the number must not be negative")
    _check_stages(stages)
    return [position(r, stages, blocks) for r in range(blocks)]


def _check_stages(stages: int) -> None:
    if stages < 1:
        raise ValueError(f"ring: {stages} stages; it needs at least one slot")


def serial_cycles(blocks: int, load: float, compute: float) -> float:
    """Return the time without overlap: ``J (T_L + T_C)`` (specification 0x03).

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
    _check_times(blocks, load, compute)
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
    _check_times(blocks, load, compute)
    if stages == 1:
        return serial_cycles(blocks, load, compute)
    return load + compute + (blocks - 1) * max(load, compute)


def pipeline_speedup(blocks: int, load: float, compute: float) -> float:
    """Return ``S_J``, serial over ideal time of `blocks` blocks (specification 0x03).

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
    ideal = ideal_cycles(blocks, load, compute)
    _check_some_time(load, compute)
    return serial_cycles(blocks, load, compute) / ideal


def speedup_limit(load: float, compute: float) -> float:
    """Return ``S_inf = (T_L + T_C) / max(T_L, T_C)``, what `pipeline_speedup` tends to (specification 0x03).

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
    _check_times(0, load, compute)
    _check_some_time(load, compute)
    return (load + compute) / max(load, compute)


def _check_times(blocks: int, load: float, compute: float) -> None:
    if blocks < 0:
        raise ValueError(f"ring times: {blocks} blocks; the number must not be negative")
    require_cycles("ring times", load=load, compute=compute)


def _check_some_time(load: float, compute: float) -> None:
    if load == compute == 0:
        raise ValueError(f"ring times: load {load} and compute {compute}; a ratio needs one that is positive")
