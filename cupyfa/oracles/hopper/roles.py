"""The forward kernel's roles on the machine: who loads, waits, issues and releases (specification 0x03 to 0x05).

Twins of ``cuda/hopper/producer.cuh`` and ``consumer.cuh`` within a tile, step by step and with the same names;
arithmetic is replaced by its duration. Between tiles the kernel does more: its producer loads the next tile's first K
and its Q before the last V, its consumers issue the next scores with the last output, and a role of its own stores O.
`run` plays a whole CTA over a list of tiles and checks that all was used and given back once. The events of a run are
what the notebook draws.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from cupyfa.oracles.hopper.machine import Machine, Program, Resource, Wait, Work
from cupyfa.oracles.hopper.pipeline import Ring, RingConsumer, RingProducer, Slot
from cupyfa.oracles.hopper.token_ring import TokenRing, Turn, handoffs
from cupyfa.oracles.hopper.wgmma_queue import Group, WgmmaQueue

__all__ = ["Config", "Consumer", "Cta", "Durations", "Producer", "load_order", "run", "warpgroup_names"]

Steps = Generator[Wait | Work, None, None]


@dataclass(frozen=True)
class Durations:
    """Cycles of each piece of work, for one key block. A callable is asked each time.

    Attributes
    ----------
    load : int or callable
        Copy of one K or V tile; Q takes the same.
    qk, pv : int or callable
        One product on the tensor cores.
    softmax : int or callable
        Masks, maximum, exponentials, sum.
    store : int or callable
        O to global memory.
    shared_softmax : bool
        Warpgroups share one exponential unit, as in the flow-shop model of 0x04.
    """

    load: int | Callable[[], int] = 0
    qk: int | Callable[[], int] = 0
    softmax: int | Callable[[], int] = 0
    pv: int | Callable[[], int] = 0
    store: int | Callable[[], int] = 0
    shared_softmax: bool = False

    def __call__(self, name: str) -> int:
        """Return a duration by name."""
        value: int | Callable[[], int] = getattr(self, name)
        return value() if callable(value) else value


@dataclass(frozen=True)
class Config:
    """What of the compile key shapes the schedule: fields as in ``cuda/spec.cuh`` (specification 0x03).

    Attributes
    ----------
    consumers : int
        Consumer warpgroups, ``G``.
    stages, q_stages : int
        Slots of the K and V rings, and of the Q ring.
    overlap : bool
        Two stages within a warpgroup.
    pingpong : bool
        Consumers take turns.
    """

    consumers: int = 2
    stages: int = 2
    q_stages: int = 1
    overlap: bool = True
    pingpong: bool = True

    def __post_init__(self) -> None:
        if self.consumers < 1 or self.stages < 1 or self.q_stages < 1:
            raise ValueError(f"forward: {self.consumers} consumers, {self.stages} and {self.q_stages} stages")
        if self.pingpong and self.consumers < 2:
            raise ValueError("forward: taking turns needs two consumer warpgroups")


def warpgroup_names(consumers: int) -> list[str]:
    """Return the agents' names of the consumer warpgroups (specification 0x03)."""
    if consumers < 1:
        raise ValueError(f"forward: {consumers} consumers; there is at least one")
    return [f"consumer {g}" for g in range(consumers)]


def load_order(blocks: int) -> list[tuple[str, int]]:
    """Return the producer's copies for one tile: K one block ahead of V, Q behind the first K (0x03).

    Parameters
    ----------
    blocks : int
        ``J``; an empty tile loads only Q, whose slot O needs.

    Returns
    -------
    list of tuple of str and int
        Ring and ordinal within the tile.

    Examples
    --------
    >>> " ".join(f"{ring}{r}" for ring, r in load_order(3))
    'K0 Q0 K1 V0 K2 V1 V2'
    """
    if blocks < 0:
        raise ValueError(f"forward: {blocks} blocks")
    order = [("K", 0)] if blocks else []
    order.append(("Q", 0))
    for r in range(blocks):
        if r + 1 < blocks:
            order.append(("K", r + 1))
        order.append(("V", r))
    return order


class Cta:
    """One CTA: its rings, its token, its engines (specification 0x03).

    Parameters
    ----------
    config : Config
        The kernel.
    durations : Durations, optional
        How long things take.
    seed : int, optional
        Chooses interleavings, see `Machine`.
    monitored : bool, optional
        See `Ring`.
    """

    def __init__(
        self, config: Config, durations: Durations | None = None, *, seed: int | None = None, monitored: bool = True
    ) -> None:
        self.config, self.durations = config, durations or Durations()
        self.machine = Machine(seed)
        self.names = warpgroup_names(config.consumers)
        tma = Resource(self.machine, "tma")
        self.tensor = Resource(self.machine, "tensor")
        self.exponential = Resource(self.machine, "exponential")

        def ring(name: str, stages: int, arrivals: int) -> Ring:
            """Build a ring whose copies share the TMA engine."""
            return Ring(
                self.machine,
                name,
                stages,
                self.names,
                arrivals=arrivals,
                copy_cycles=lambda: self.durations("load"),
                engine=tma,
                monitored=monitored,
            )

        # Each warp answers for its part of a product; a warpgroup's O leaves through one thread.
        self.q, self.k, self.v = ring("Q", config.q_stages, 1), ring("K", config.stages, 4), ring("V", config.stages, 4)
        self.token = TokenRing(self.machine, self.names, first=1, monitored=monitored)


class Producer:
    """The producer's program (twin of ``produce``). Subclasses are faults (specification 0x03)."""

    def __init__(self, cta: Cta) -> None:
        self.Q, self.K, self.V = RingProducer(cta.q), RingProducer(cta.k), RingProducer(cta.v)

    def run(self, tiles: Sequence[int]) -> Program:
        """Load all tiles; `tiles` holds the key blocks of each."""
        for tile, blocks in enumerate(tiles):
            yield from self.load_tile(tile, blocks)

    def load_tile(self, tile: int, blocks: int) -> Steps:
        """Load what one tile needs, in order of use."""
        for name, r in load_order(blocks):
            ring: RingProducer = getattr(self, name)
            slot = yield from ring.acquire()
            ring.copy(slot, (tile, blocks - 1 - r) if name != "Q" else tile)


class Consumer:
    """A consumer warpgroup's program (twin of ``Consumer``). Subclasses are faults (0x03)."""

    turn_type: type[Turn] = Turn

    def __init__(self, cta: Cta, warpgroup: int) -> None:
        self.cta, self.warpgroup, self.agent = cta, warpgroup, cta.names[warpgroup]
        self.Q, self.K, self.V = (RingConsumer(ring, self.agent) for ring in (cta.q, cta.k, cta.v))
        self.queue = WgmmaQueue(self.agent)
        self.turn = self.turn_type(cta.token, warpgroup)
        if cta.config.pingpong and warpgroup == cta.config.consumers - 1:
            self.bootstrap()

    def run(self, tiles: Sequence[int]) -> Program:
        """Compute all tiles; `tiles` holds the key blocks of each."""
        for tile, blocks in enumerate(tiles):
            q = yield from self.Q.wait()
            if blocks:
                yield from self.overlapped(q, blocks) if self.cta.config.overlap else self.without_overlap(q, blocks)
            yield from self.store(q, tile)

    def overlapped(self, q: Slot, blocks: int) -> Steps:
        """Run the two-stage loop over the key blocks of a tile."""
        k = yield from self.K.wait()
        self.issue_scores(q, k)
        yield from self.complete(0)  # proves S of the first block
        self.release_k(k)
        if blocks > 1:
            k = yield from self.K.wait()
        yield from self.softmax()
        self.queue.access("P")
        for r in range(1, blocks):
            yield from self.take_turn()
            self.issue_scores(q, k)
            v = yield from self.V.wait()
            self.issue_output(v)
            self.pass_turn()
            yield from self.complete(1)  # proves S of this block; O is still in flight
            self.release_k(k)
            yield from self.softmax()
            if r + 1 < blocks:
                k = yield from self.K.wait()
            yield from self.complete(0)  # proves O; P may be overwritten
            self.release_v(v)
            self.queue.access("O")
            self.queue.access("P")
        v = yield from self.V.wait()
        self.issue_output(v)
        yield from self.complete(0)  # proves the last O
        self.release_v(v)

    def without_overlap(self, q: Slot, blocks: int) -> Steps:
        """Run one block after the other."""
        yield from self.take_turn()
        for _ in range(blocks):
            k = yield from self.K.wait()
            self.issue_scores(q, k)
            self.pass_turn()
            yield from self.complete(0)  # proves S
            self.release_k(k)
            yield from self.softmax()
            self.queue.access("O")
            self.queue.access("P")
            yield from self.take_turn()
            v = yield from self.V.wait()
            self.issue_output(v)
            yield from self.complete(0)  # proves O
            self.release_v(v)
        self.drain_turn()

    def store(self, q: Slot, tile: int) -> Steps:
        """Store O through the slot of its Q, which no product may read any more."""
        self.queue.access("O")
        self.queue.release(q)
        self.cta.machine.emit(self.agent, "store", "O", ordinal=tile, duration=self.cta.durations("store"))
        yield Work(self.cta.durations("store"))
        self.Q.release(q)

    def issue_scores(self, q: Slot, k: Slot) -> None:
        """Issue S = Q K'."""
        self.queue.fence()
        self.queue.issue("S", None, (q, k))
        self._start(self.queue.commit("QK"), "qk", k)

    def issue_output(self, v: Slot) -> None:
        """Issue O += P V."""
        self.queue.fence()
        self.queue.issue("O", "P", (v,))
        self._start(self.queue.commit("PV"), "pv", v)

    def complete(self, pending: int) -> Steps:
        """Wait until at most `pending` of the newest products are in flight."""
        covered = self.queue.covered(pending)
        yield Wait(lambda: all(group.complete for group in covered), f"wgmma.wait_group {pending}", lambda: ["tensor"])
        self.queue.wait(pending)

    def softmax(self) -> Steps:
        """Turn scores into probabilities."""
        self.queue.access("S")
        cta, cycles = self.cta, self.cta.durations("softmax")
        if cta.durations.shared_softmax:
            yield from cta.exponential.use(cycles, "softmax", self.agent)
        else:
            cta.machine.emit(self.agent, "softmax", "S", duration=cycles)
            yield Work(cycles)

    def release_k(self, slot: Slot) -> None:
        """Give a K slot back."""
        self.queue.release(slot)
        self.K.release(slot)

    def release_v(self, slot: Slot) -> None:
        """Give a V slot back."""
        self.queue.release(slot)
        self.V.release(slot)

    def bootstrap(self) -> None:
        """Leave the first credit: once per CTA."""
        self.turn.bootstrap()

    def take_turn(self) -> Steps:
        """Wait for the token."""
        if self.cta.config.pingpong:
            yield from self.turn.wait()

    def pass_turn(self) -> None:
        """Hand the token on."""
        if self.cta.config.pingpong:
            self.turn.pass_on()

    def drain_turn(self) -> None:
        """Hand the token on after the last product of a tile."""
        self.pass_turn()

    def _start(self, group: Group, name: str, slot: Slot) -> None:
        machine = self.cta.machine
        end = self.cta.tensor.start(self.cta.durations(name), name.upper(), self.agent, slot.ordinal)
        reading = [(self.agent, tile) for tile in group.tiles if isinstance(tile, Slot)]
        for agent, tile in reading:
            tile.ring.reading.append((agent, tile))

        def finish() -> None:
            """Complete the group; its tiles are read no more."""
            group.complete = True
            for agent, tile in reading:
                tile.ring.reading.remove((agent, tile))

        machine.at(end, finish)


def run(
    config: Config,
    tiles: Sequence[int],
    durations: Durations | None = None,
    *,
    seed: int | None = None,
    monitored: bool = True,
    producer: type[Producer] = Producer,
    consumer: type[Consumer] | Sequence[type[Consumer]] = Consumer,
) -> Cta:
    """Play a CTA over a list of work tiles, and check conservation at the end (specification 0x03).

    Parameters
    ----------
    config : Config
        The kernel.
    tiles : sequence of int
        Key blocks ``J`` of each tile; 0 for a tile that sees no key.
    durations : Durations, optional
        All 0 by default: only order matters.
    seed : int, optional
        Chooses who goes first where several could.
    monitored : bool, optional
        Report causes, or only symptoms.
    producer, consumer : type, optional
        Roles; a sequence gives each warpgroup its own.

    Returns
    -------
    Cta
        With its machine's events.

    Raises
    ------
    ContractViolation
        Whatever contract is broken, `Deadlock` included.

    Examples
    --------
    >>> cta = run(Config(), [5, 0, 1], Durations(load=3, qk=2, softmax=2, pv=2))
    >>> cta.k.produced, cta.k.freed, cta.token.waits
    (6, 6, {'consumer 0': 4, 'consumer 1': 4})
    """
    roles = [consumer] * config.consumers if isinstance(consumer, type) else list(consumer)
    if len(roles) != config.consumers or any(blocks < 0 for blocks in tiles):
        raise ValueError(
            f"forward: {len(roles)} roles for {config.consumers} consumers and tiles of {list(tiles)} blocks; "
            "one role for each, and no negative count"
        )
    cta = Cta(config, durations, seed=seed, monitored=monitored)
    cta.machine.spawn("producer", producer(cta).run(tiles))
    for g, role in enumerate(roles):
        cta.machine.spawn(cta.names[g], role(cta, g).run(tiles))
    cta.machine.run()
    if monitored:
        payloads = [(t, n) for t, blocks in enumerate(tiles) for n in reversed(range(blocks))]
        cta.q.check_conservation(range(len(tiles)))
        cta.k.check_conservation(payloads)
        cta.v.check_conservation(payloads)
        if config.pingpong:
            cta.token.check_balance(sum(handoffs(blocks, config.overlap) for blocks in tiles))
    return cta
