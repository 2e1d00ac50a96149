"""Shared-memory pipelines with real barriers and a monitor (specification 0x02 and 0x03; twin of ``cuda/ring.cuh``).

`Ring` holds slots and mbarriers that can be misused in every way the hardware allows. A monitor watches and raises the
error that names the broken contract, at its cause; with ``monitored=False`` only what corrupts data or hangs is an
error, so that the late symptom shows instead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass

from cupyfa.oracles.hopper.barriers import MBarrier
from cupyfa.oracles.hopper.machine import Machine, Program, Resource, Wait, Work
from cupyfa.oracles.hopper.ring import PipelineState, positions
from cupyfa.oracles.violations import ContractViolation

__all__ = [
    "ConservationError",
    "DanglingArrival",
    "EarlyRead",
    "EarlyReuse",
    "ReleaseBeforeProduction",
    "Ring",
    "RingConsumer",
    "RingProducer",
    "Slot",
    "StaleGeneration",
]


class EarlyRead(ContractViolation):
    """A slot is read although nobody proved that its tile has landed, or it has landed in part only (0x03)."""


class EarlyReuse(ContractViolation):
    """A slot is filled again while the tile in it is still needed (specification 0x03)."""


class StaleGeneration(ContractViolation):
    """A wait took the completion of one generation of a slot for that of another (specification 0x03)."""


class ReleaseBeforeProduction(ContractViolation):
    """A slot is given back that its releaser does not hold: ``released <= produced`` breaks (0x03)."""


class ConservationError(ContractViolation):
    """Acquires, commits, waits and releases are not the same payloads, each once (specification 0x03)."""


class DanglingArrival(ContractViolation):
    """An arrival reaches a barrier in the shared memory of a CTA that has exited (specification 0x03)."""


@dataclass(frozen=True)
class Slot:
    """A slot in the hands of one side: where, which generation, which payload it should hold (0x03)."""

    ring: Ring
    stage: int
    ordinal: int
    parity: int

    def require_readable(self, agent: str) -> None:
        """Raise unless `agent` has proved that the tile of this ordinal is here."""
        self.ring.require_readable(self, agent)


@dataclass
class _Content:
    """What a slot really holds."""

    ordinal: int = -1
    payload: Hashable = None
    bytes_in_flight: int = 0


class Ring:
    """The slots, the barriers and the monitor (specification 0x03).

    Parameters
    ----------
    machine : Machine
        Whose agents use it.
    name : str
        Name in events.
    stages : int
        Number of slots.
    consumers : sequence of str
        Agents that must all release a slot before it is empty.
    producer : str, optional
        The agent that fills it.
    arrivals : int, optional
        Arrivals of one consumer's release: 1 for a warpgroup's elected thread, 4 when each warp answers for itself.
    tile_bytes : int, optional
        Bytes of a tile.
    copy_cycles : callable, optional
        Cycles of one copy; called for each.
    engine : Resource, optional
        Copies that share an engine follow each other.
    monitored : bool, optional
        If false, only what corrupts data or hangs is an error, not the cause of it: the late symptom becomes visible.
    """

    def __init__(
        self,
        machine: Machine,
        name: str,
        stages: int,
        consumers: Sequence[str],
        *,
        producer: str = "producer",
        arrivals: int = 1,
        tile_bytes: int = 32_768,
        copy_cycles: Callable[[], float] = lambda: 0,
        engine: Resource | None = None,
        monitored: bool = True,
    ) -> None:
        if stages < 1 or not consumers:
            raise ValueError(f"ring: {stages} stages and {len(consumers)} consumers; it needs at least one of each")
        if arrivals < 1 or tile_bytes < 1:
            raise ValueError(f"ring: {arrivals} arrivals for a tile of {tile_bytes} bytes; both start at 1")
        self.machine, self.name, self.stages = machine, name, stages
        self.consumers, self.producer, self.arrivals = tuple(consumers), producer, arrivals
        self.tile_bytes, self.copy_cycles, self.engine, self.monitored = tile_bytes, copy_cycles, engine, monitored
        self.full = [MBarrier(1) for _ in range(stages)]
        self.empty = [MBarrier(arrivals * len(self.consumers)) for _ in range(stages)]
        self.content = [_Content() for _ in range(stages)]
        self.acquired: list[tuple[int, int, int]] = []  # (ordinal, stage, parity), as each side counts it
        self.committed: list[tuple[int, Hashable]] = []
        self.waited: dict[str, list[tuple[int, Hashable]]] = {c: [] for c in self.consumers}
        self.released: dict[str, list[int]] = {c: [] for c in self.consumers}
        self.reading: list[tuple[str, Slot]] = []  # asynchronous readers that are really running
        self.open = True  # the CTA whose shared memory holds the barriers has not exited

    @property
    def produced(self) -> int:
        """Payloads committed so far."""
        return len(self.committed)

    @property
    def freed(self) -> int:
        """Payloads that every consumer has released."""
        return min(len(ordinals) for ordinals in self.released.values())

    def holders(self, ordinal: int) -> list[str]:
        """Return who has not given an item back; nobody holds what comes before the first."""
        return [c for c in self.consumers if ordinal >= 0 and ordinal not in self.released[c]]

    def require_readable(self, slot: Slot, agent: str) -> None:
        """Raise unless the agent waited for this generation and all of it is there."""
        content = self.content[slot.stage]
        where = f"{agent} reads {self.name}[{slot.stage}] as item {slot.ordinal}"
        if content.bytes_in_flight:
            raise EarlyRead(f"{where}, of which {content.bytes_in_flight} bytes are still in flight")
        if content.ordinal < 0:
            raise EarlyRead(f"{where}, but it holds nothing yet")
        if content.ordinal != slot.ordinal:
            raise StaleGeneration(f"{where}, but it holds item {content.ordinal}")
        if self.monitored and slot.ordinal not in {ordinal for ordinal, _ in self.waited[agent]}:
            raise EarlyRead(f"{where} without having waited for it")

    def require_reusable(self, stage: int, ordinal: int) -> None:
        """Raise if the tile in this slot is still needed."""
        late = self.holders(ordinal - self.stages)
        if self.monitored and late:
            raise EarlyReuse(
                f"{self.name}[{stage}] is filled with item {ordinal} before {', '.join(late)} released "
                f"item {ordinal - self.stages}"
            )
        running = [agent for agent, slot in self.reading if slot.stage == stage and slot.ordinal != ordinal]
        if running:
            raise EarlyReuse(f"{self.name}[{stage}] is filled with item {ordinal} while {running[0]} reads it")

    def check_capacity(self) -> None:
        """Raise unless ``0 <= produced - freed <= stages``."""
        if not 0 <= self.produced - self.freed <= self.stages:
            raise ConservationError(
                f"{self.name}: {self.produced} produced and {self.freed} released in a ring of {self.stages}"
            )

    def check_conservation(self, payloads: Sequence[Hashable]) -> None:
        """Raise unless each payload was acquired, committed, waited for and released once, in this order.

        Equal counts would not be enough: every event must carry the same stage, parity and payload.
        """
        expected = list(enumerate(payloads))
        coordinates = [(r, p.stage, p.empty_parity) for r, p in enumerate(positions(len(payloads), self.stages))]
        if self.acquired != coordinates:
            raise ConservationError(f"{self.name}: acquired {self.acquired}, expected {coordinates}")
        if self.committed != expected:
            raise ConservationError(f"{self.name}: committed {self.committed}, expected {expected}")
        for consumer in self.consumers:
            if self.waited[consumer] != expected:
                raise ConservationError(f"{self.name}: {consumer} used {self.waited[consumer]}, expected {expected}")
            if sorted(self.released[consumer]) != [r for r, _ in expected]:
                raise ConservationError(
                    f"{self.name}: {consumer} released {self.released[consumer]} of {len(expected)} items"
                )


class RingProducer:
    """The producer's walk: acquire a slot, then copy into it (specification 0x03)."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.state = PipelineState.of_producer(ring.stages)
        self.ordinal = 0

    def acquire(self) -> Generator[Wait | Work, None, Slot]:
        """Wait until the next slot is empty."""
        ring, stage, parity = self.ring, self.state.index, self.state.parity
        slot = Slot(ring, stage, self.ordinal, parity)

        what = f"{ring.name}.empty[{stage}] parity {parity} (item {self.ordinal})"
        before = self.ordinal - ring.stages
        yield Wait(lambda: ring.empty[stage].passed(parity), what, lambda: ring.holders(before))
        ring.require_reusable(stage, self.ordinal)
        ring.acquired.append((self.ordinal, stage, parity))
        ring.machine.emit(ring.producer, "acquire", ring.name, stage=stage, phase=parity, ordinal=self.ordinal)
        self.advance()
        return slot

    def advance(self) -> None:
        """Move the coordinates. Ownership moves by `acquire` and `copy` only."""
        self.state = self.state.advanced()
        self.ordinal += 1

    def copy(self, slot: Slot, payload: Hashable, *, expect: int | None = None, pieces: int = 1) -> None:
        """Start the copy of a tile; the full barrier completes when all expected bytes have landed.

        `expect` bytes are announced, the tile's by default; `pieces` boxes land one by one.
        """
        ring, machine = self.ring, self.ring.machine
        content = ring.content[slot.stage]
        if pieces < 1 or ring.tile_bytes % pieces:
            raise ValueError(f"ring: {pieces} boxes do not divide a tile of {ring.tile_bytes} bytes")
        ring.require_reusable(slot.stage, slot.ordinal)
        content.ordinal, content.payload, content.bytes_in_flight = slot.ordinal, payload, ring.tile_bytes
        ring.full[slot.stage].arrive(expect=ring.tile_bytes if expect is None else expect)
        ring.committed.append((slot.ordinal, payload))
        ring.check_capacity()
        machine.emit(ring.producer, "commit", ring.name, stage=slot.stage, ordinal=slot.ordinal)

        def land() -> None:
            """Let one box arrive."""
            content.bytes_in_flight -= ring.tile_bytes // pieces
            ring.full[slot.stage].complete_bytes(ring.tile_bytes // pieces)

        for _ in range(pieces):
            cycles = ring.copy_cycles()
            if ring.engine is None:
                end = machine.now + cycles
                machine.emit("tma", "copy", ring.name, stage=slot.stage, ordinal=slot.ordinal, duration=cycles)
            else:
                end = ring.engine.start(cycles, "copy", ring.name, slot.ordinal)
            machine.at(end, land)

    def tail(self) -> Program:
        """Wait until every slot that was used is empty again: nobody will arrive here any more.

        It produces nothing; the state moves on, the counts do not.
        """
        state = self.state
        for _ in range(min(self.ring.stages, self.ordinal)):
            empty, parity = self.ring.empty[state.index], state.parity
            yield Wait(lambda e=empty, p=parity: e.passed(p), f"{self.ring.name}.empty[{state.index}] (tail)")  # type: ignore[misc]
            state = state.advanced()
        self.ring.machine.emit(self.ring.producer, "tail", self.ring.name)


class RingConsumer:
    """One consumer's walk: wait for a slot, later give it back (specification 0x03)."""

    def __init__(self, ring: Ring, agent: str) -> None:
        if agent not in ring.consumers:
            raise ValueError(f"ring {ring.name}: {agent} is none of its consumers")
        self.ring, self.agent = ring, agent
        self.state = PipelineState.of_consumer(ring.stages)
        self.ordinal = 0

    def peek(self) -> Slot:
        """Return the next slot without proof of anything."""
        return Slot(self.ring, self.state.index, self.ordinal, self.state.parity)

    def wait(self) -> Generator[Wait | Work, None, Slot]:
        """Wait until the next slot is full."""
        ring, slot = self.ring, self.peek()
        what = f"{ring.name}.full[{slot.stage}] parity {slot.parity} (item {slot.ordinal})"
        yield Wait(lambda: ring.full[slot.stage].passed(slot.parity), what, lambda: [ring.producer])
        content = ring.content[slot.stage]
        ring.waited[self.agent].append((slot.ordinal, content.payload))
        ring.machine.emit(self.agent, "wait", ring.name, stage=slot.stage, phase=slot.parity, ordinal=slot.ordinal)
        generation, completed = slot.ordinal // ring.stages, ring.full[slot.stage].completed - 1
        if ring.monitored and completed != generation:
            raise StaleGeneration(
                f"{self.agent} took generation {completed} of {ring.name}[{slot.stage}] for {generation}, "
                f"that of item {slot.ordinal}"
            )
        ring.require_readable(slot, self.agent)
        self.advance()
        return slot

    def advance(self) -> None:
        """Move the coordinates. Ownership moves by `release` only."""
        self.state = self.state.advanced()
        self.ordinal += 1

    def release(self, slot: Slot) -> None:
        """Give a slot back; the caller has proved that it has stopped reading it."""
        ring = self.ring
        if not ring.open:
            raise DanglingArrival(f"{self.agent} releases {ring.name}[{slot.stage}] of a CTA that has exited")
        if ring.monitored and slot.ordinal not in {ordinal for ordinal, _ in ring.waited[self.agent]}:
            raise ReleaseBeforeProduction(
                f"{self.agent} releases item {slot.ordinal} of {ring.name}, which it never held"
            )
        if ring.monitored and slot.ordinal in ring.released[self.agent]:
            raise ReleaseBeforeProduction(f"{self.agent} releases item {slot.ordinal} of {ring.name} a second time")
        ring.released[self.agent].append(slot.ordinal)
        ring.machine.emit(self.agent, "release", ring.name, stage=slot.stage, ordinal=slot.ordinal)
        ring.empty[slot.stage].arrive(ring.arrivals)
        if ring.monitored:
            ring.check_capacity()
