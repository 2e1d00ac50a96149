"""The producer that transposes V in shared memory, as a state machine (specification 0x06).

V arrives by TMA contiguous along features, in the stages ``Vt``. A producer warpgroup of four warps reads each stage
(``ldmatrix.trans``), reorders bytes, and writes it K-major into the stages ``V`` that the consumers read. One tile
goes through nine steps:

    1 TMA writes Vt[s]            4 reorder bytes (prmt)          7 commit V[s] to the consumers
    2 wait Vt[s].full             5 stmatrix into V[s]            8 barrier of the 128 producer threads
    3 ldmatrix.trans              6 fence to the async proxy      9 release Vt[s] to TMA

Step 8 is there because four warps share the stage: the first one to finish must not hand Vt back while another still
reads it. `TransposeProducer` runs any order of the steps and raises an error where an order breaks a contract; each
step is an event, so that a picture can be drawn from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..violations import ContractViolation, check_range

__all__ = [
    "WARPS",
    "CommitWithoutWrites",
    "EarlyRelease",
    "EarlyTranspose",
    "Event",
    "OverwriteLiveTile",
    "ReadBeforeCommit",
    "TransposeProducer",
    "UnpublishedWrites",
    "run",
    "shared_memory_bytes",
    "tile_steps",
]

WARPS = 4
"""Warps of the producer warpgroup: 128 threads instead of the one warp that a plain TMA producer needs."""

_BY_WARP = ("load", "store", "fence", "barrier")
_BY_STAGE = ("issue", "arrive", "commit", "release", "consume")


class EarlyTranspose(ContractViolation):
    """A warp reads Vt before its copy has arrived, or writes V before it has read Vt (0x06)."""


class OverwriteLiveTile(ContractViolation):
    """A stage is written while it still holds a tile that somebody needs (0x06)."""


class UnpublishedWrites(ContractViolation):
    """V is committed although a warp's writes have not been fenced: the matrix unit may read old bytes (0x06)."""


class CommitWithoutWrites(ContractViolation):
    """V is committed before every warp has written its part: the tile is partly old (0x06)."""


class EarlyRelease(ContractViolation):
    """Vt is handed back to TMA before all warps have passed the barrier behind their reads and writes (0x06)."""


class ReadBeforeCommit(ContractViolation):
    """A consumer reads a stage of V that has not been committed (0x06)."""


@dataclass(frozen=True)
class Event:
    """One step: `ordinal` counts from 0; `agent` is ``"tma"``, ``"warp0"`` to ``"warp3"`` or ``"consumer"`` (0x06)."""

    ordinal: int
    agent: str
    action: str
    stage: int
    tile: int


@dataclass
class _Stage:
    """Vt and V stage of one index. Sets hold the warps that have done a step for the present tile."""

    tile: int = -1
    arrived: bool = False
    vt_live: bool = False
    v_live: bool = False
    committed: bool = False
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    fenced: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)


class TransposeProducer:
    """Stages of Vt and V, with every rule checked at the step that breaks it (0x06).

    Parameters
    ----------
    stages : int
        Number of Vt stages, and of V stages.

    Attributes
    ----------
    events : list of Event
        What happened.

    Examples
    --------
    >>> machine = TransposeProducer(stages=1)
    >>> machine.issue(0)
    >>> machine.load(0, warp=0)
    Traceback (most recent call last):
    cupyfa.oracles.fp8.transpose.EarlyTranspose: ...
    """

    def __init__(self, stages: int) -> None:
        if stages < 1:
            raise ValueError(f"fp8: {stages} stages; at least one is needed")
        self._stages = [_Stage() for _ in range(stages)]
        self._issued = 0
        self.events: list[Event] = []

    def _stage(self, stage: int, warp: int = 0) -> _Stage:
        check_range("fp8 transpose", 0, len(self._stages) - 1, stage=stage)
        check_range("fp8 transpose", 0, WARPS - 1, warp=warp)
        return self._stages[stage]

    def _emit(self, agent: str, action: str, stage: int) -> _Stage:
        state = self._stages[stage]
        self.events.append(Event(len(self.events), agent, action, stage, state.tile))
        return state

    def issue(self, stage: int) -> None:
        """Start the copy of the next tile into ``Vt[stage]``: step 1."""
        state = self._stage(stage)
        if state.vt_live:
            raise OverwriteLiveTile(f"fp8: TMA writes Vt[{stage}], which still holds tile {state.tile}")
        state.tile = self._issued
        state.vt_live, state.arrived = True, False
        state.read, state.written, state.fenced, state.passed = set(), set(), set(), set()
        self._issued += 1
        self._emit("tma", "issue", stage)

    def arrive(self, stage: int) -> None:
        """Complete the copy: ``Vt[stage].full``."""
        if not self._stage(stage).vt_live:
            raise EarlyTranspose(f"fp8: a copy into Vt[{stage}] arrives that was never issued")
        self._emit("tma", "arrive", stage).arrived = True

    def load(self, stage: int, warp: int) -> None:
        """Wait for the copy and read one warp's part of it: steps 2 and 3."""
        state = self._stage(stage, warp)
        if not (state.vt_live and state.arrived):
            raise EarlyTranspose(f"fp8: warp {warp} reads Vt[{stage}] before its copy has arrived")
        self._emit(f"warp{warp}", "load", stage).read.add(warp)

    def store(self, stage: int, warp: int) -> None:
        """Reorder the warp's bytes and write them into ``V[stage]``: steps 4 and 5."""
        state = self._stage(stage, warp)
        if warp not in state.read:
            raise EarlyTranspose(f"fp8: warp {warp} writes V[{stage}] before it has read Vt[{stage}]")
        if state.v_live:
            raise OverwriteLiveTile(f"fp8: warp {warp} writes V[{stage}] before the consumers have released it")
        self._emit(f"warp{warp}", "store", stage).written.add(warp)

    def fence(self, stage: int, warp: int) -> None:
        """Make the warp's writes visible to the async proxy, by which the matrix unit reads: step 6."""
        state = self._stage(stage, warp)
        self._emit(f"warp{warp}", "fence", stage)
        if warp in state.written:
            state.fenced.add(warp)

    def commit(self, stage: int) -> None:
        """Hand ``V[stage]`` to the consumers: step 7."""
        state = self._stage(stage)
        if len(state.written) < WARPS:
            raise CommitWithoutWrites(f"fp8: V[{stage}] is committed after {len(state.written)} of {WARPS} warps wrote")
        if len(state.fenced) < WARPS:
            raise UnpublishedWrites(f"fp8: V[{stage}] is committed but {WARPS - len(state.fenced)} warps did not fence")
        self._emit("producer", "commit", stage)
        state.committed = state.v_live = True

    def barrier(self, stage: int, warp: int) -> None:
        """Arrive with one warp at the barrier of the 128 producer threads: step 8."""
        state = self._stage(stage, warp)
        if warp not in state.written:
            raise EarlyTranspose(f"fp8: warp {warp} closes stage {stage} before it has written V[{stage}]")
        self._emit(f"warp{warp}", "barrier", stage).passed.add(warp)

    def release(self, stage: int) -> None:
        """Hand ``Vt[stage]`` back to TMA: step 9."""
        state = self._stage(stage)
        if len(state.passed) < WARPS:
            raise EarlyRelease(f"fp8: Vt[{stage}] is released after {len(state.passed)} of {WARPS} warps closed it")
        self._emit("producer", "release", stage).vt_live = False

    def consume(self, stage: int) -> None:
        """Let a consumer run ``P @ V`` on ``V[stage]`` and release it."""
        state = self._stage(stage)
        if not state.committed:
            raise ReadBeforeCommit(f"fp8: a consumer reads V[{stage}], which is not committed")
        self._emit("consumer", "consume", stage)
        state.committed = state.v_live = False


def tile_steps(stage: int, warps: Iterable[int] = range(WARPS)) -> Iterator[tuple[str, int, int | None]]:
    """Yield the steps of one tile in a legal order (0x06).

    Parameters
    ----------
    stage : int
        Where the tile lives.
    warps : iterable of int, optional
        Order in which the warps take their turns.

    Yields
    ------
    tuple
        ``(method of TransposeProducer, stage, warp or None)``.
    """
    order = list(warps)
    yield "issue", stage, None
    yield "arrive", stage, None
    for action in ("load", "store", "fence"):
        for warp in order:
            yield action, stage, warp
    yield "commit", stage, None
    for warp in order:
        yield "barrier", stage, warp
    yield "release", stage, None
    yield "consume", stage, None


def run(steps: Iterable[tuple[str, int, int | None]], stages: int = 1) -> TransposeProducer:
    """Run steps on a new machine (0x06).

    Parameters
    ----------
    steps : iterable of tuple
        As from `tile_steps`.
    stages : int, optional
        Number of stages.

    Returns
    -------
    TransposeProducer
        With its events.

    Examples
    --------
    >>> [e.action for e in run(tile_steps(0)).events if e.agent in ("tma", "producer", "consumer")]
    ['issue', 'arrive', 'commit', 'release', 'consume']
    """
    machine = TransposeProducer(stages)
    for action, stage, warp in steps:
        if action not in (_BY_WARP if warp is not None else _BY_STAGE):
            raise ContractViolation(f"fp8 transpose: no step {action!r} of warp {warp}")
        arguments = (stage,) if warp is None else (stage, warp)
        getattr(machine, action)(*arguments)
    return machine


def shared_memory_bytes(
    tile_m: int, tile_n: int, head_dim: int, head_dim_v: int, stages: int = 2, transpose: bool = True
) -> dict[str, int]:
    """Return the shared memory of an FP8 forward tile, one byte per element (0x06).

    Parameters
    ----------
    tile_m, tile_n : int
        Query rows and keys per tile.
    head_dim, head_dim_v : int
        Of Q and K, and of V.
    stages : int, optional
        Of K, of V, and of Vt.
    transpose : bool, optional
        Whether V is transposed in the kernel, which needs the stages Vt beside V.

    Returns
    -------
    dict
        Bytes of ``Q``, ``K``, ``V`` and ``Vt``.

    Examples
    --------
    >>> {name: n / 1024 for name, n in shared_memory_bytes(128, 224, 128, 128).items()}  # KiB
    {'Q': 16.0, 'K': 56.0, 'V': 56.0, 'Vt': 56.0}
    """
    check_range("fp8", 1, tile_m=tile_m, tile_n=tile_n, head_dim=head_dim, head_dim_v=head_dim_v, stages=stages)
    return {
        "Q": tile_m * head_dim,
        "K": stages * tile_n * head_dim,
        "V": stages * tile_n * head_dim_v,
        "Vt": stages * tile_n * head_dim_v if transpose else 0,
    }
