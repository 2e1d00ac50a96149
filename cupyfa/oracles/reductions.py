"""Ordered reductions: who adds to a gradient when, and what float32 makes of the order (specification 0x0A).

Several tiles add to the same rows of dQ, several query heads to the same dK and dV. Float32 addition is not
associative, so a repeatable result needs a declared order of writers. Each writer holds a turn ``lock``; a semaphore
counts finished writers, and a writer adds when the count equals its turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .violations import ContractViolation, check_range

__all__ = [
    "Addition",
    "Outcome",
    "Writer",
    "causal_writers",
    "dense_lock",
    "gqa_lock",
    "run_writers",
    "spt_lock",
    "sum_in_order",
    "Deadlock",
    "DuplicateTurn",
]


class Deadlock(ContractViolation):
    """Writers wait for a turn that will never come (0x0A)."""


class DuplicateTurn(ContractViolation):
    """Two writers hold one turn: their order is not declared (0x0A)."""


def dense_lock(n_block: int) -> int:
    """Return the turn of a key tile for dQ without a mask: ``n_block`` (0x0A).

    Parameters
    ----------
    n_block : int
        Key tile.

    Returns
    -------
    int
        Its turn.
    """
    if n_block < 0:
        raise ContractViolation(f"turn: n_block must not be negative, not {n_block}")
    return n_block


def spt_lock(n_block: int, n_block_max: int) -> int:
    """Return the turn of a key tile for dQ under shortest-first causal order: ``n_block_max - 1 - n_block`` (0x0A).

    Parameters
    ----------
    n_block : int
        Key tile.
    n_block_max : int
        One past the last key tile that the query tile sees.

    Returns
    -------
    int
        Its turn: the tile on the diagonal, which sees fewest query tiles, goes first.

    Examples
    --------
    >>> {n: spt_lock(n, 4) for n in (3, 2, 1)}
    {3: 0, 2: 1, 1: 2}
    """
    if not 0 <= n_block < n_block_max:
        raise ContractViolation(f"turn: n_block {n_block} must be in 0 .. {n_block_max - 1}")
    return n_block_max - 1 - n_block


def gqa_lock(head: int, heads_per_kv: int) -> int:
    """Return the turn of a query head for the dK and dV of its key/value head: ``head % heads_per_kv`` (0x0A).

    Parameters
    ----------
    head : int
        Query head.
    heads_per_kv : int
        Query heads per key/value head.

    Returns
    -------
    int
        Its turn.

    Examples
    --------
    >>> [gqa_lock(head, 4) for head in range(8)]
    [0, 1, 2, 3, 0, 1, 2, 3]
    """
    if head < 0 or heads_per_kv < 1:
        raise ContractViolation(f"turn: head {head} must not be negative, heads_per_kv {heads_per_kv} be positive")
    return head % heads_per_kv


def causal_writers(blocks: Iterable[int]) -> tuple[list[int], dict[int, int]]:
    """Order the valid key tiles of one query tile shortest first (0x0A).

    Parameters
    ----------
    blocks : iterable of int
        Valid key tiles.

    Returns
    -------
    order : list of int
        Tiles in the order in which they add.
    locks : dict
        Turn of each.

    Examples
    --------
    >>> causal_writers([1, 2, 3])
    ([3, 2, 1], {3: 0, 2: 1, 1: 2})
    """
    order = sorted(blocks, reverse=True)
    if len(set(order)) < len(order):
        raise ContractViolation(f"turn: key tiles {order} name one tile twice")
    return order, {n: spt_lock(n, order[0] + 1) for n in order}


def sum_in_order(values: Sequence[float], order: Iterable[int] | None = None) -> np.float32:
    """Add float32 values one after the other, rounding after each (0x0A).

    Parameters
    ----------
    values : sequence of float
        The contributions.
    order : iterable of int, optional
        Indices in order of addition; as they stand by default.

    Returns
    -------
    numpy.float32
        The sum.

    Examples
    --------
    >>> contributions = [1e8, 1.0, -1e8, 3.0]
    >>> float(sum_in_order(contributions)), float(sum_in_order(contributions, [0, 2, 1, 3]))
    (3.0, 4.0)
    """
    indices = list(range(len(values)) if order is None else order)
    if sorted(indices) != list(range(len(values))):
        raise ContractViolation(f"sum_in_order: order {indices} must name each of 0 .. {len(values) - 1} once")
    total = np.float32(0)
    for index in indices:
        total = np.float32(total + np.float32(values[index]))
    return total


@dataclass(frozen=True)
class Writer:
    """A tile, or a head, that adds to a gradient (0x0A).

    Attributes
    ----------
    name : int
        Key tile or query head.
    lock : int
        Its turn.
    value : float
        What it adds (one element stands for all).
    latency : float
        Time from the issue of its bulk addition to its completion.
    ready : float
        Time at which it has its contribution; its work starts when it is launched.
    """

    name: int
    lock: int
    value: float = 0.0
    latency: float = 1.0
    ready: float = 0.0

    def __post_init__(self) -> None:
        check_range(f"writer {self.name}", 0, lock=self.lock, latency=self.latency, ready=self.ready)


@dataclass(frozen=True)
class Addition:
    """An event of the reduction (0x0A).

    Attributes
    ----------
    time : float
        When.
    writer : int
        Name of the writer; -1 for the bridge.
    action : str
        ``"add"`` (issued), ``"added"`` (complete), ``"release"`` or ``"bridge"``.
    semaphore : int
        Its value after the event.
    """

    time: float
    writer: int
    action: str
    semaphore: int


@dataclass(frozen=True)
class Outcome:
    """What a run of writers did (0x0A).

    Attributes
    ----------
    order : tuple of int
        Writers in the order in which their additions took effect.
    total : numpy.float32
        The float32 sum in that order.
    events : tuple of Addition
        Everything that happened.
    """

    order: tuple[int, ...]
    total: np.float32
    events: tuple[Addition, ...]


def run_writers(
    writers: Sequence[Writer],
    *,
    turns: int | None = None,
    slots: int | None = None,
    ordered: bool = True,
    bridge: bool = False,
    early_release: bool = False,
) -> Outcome:
    """Run writers to the end, or to the point where none can go on (0x0A).

    Parameters
    ----------
    writers : sequence of Writer
        In the order of launch.
    turns : int, optional
        Turns that the schedule declares, one past the largest lock by default. A turn that nobody holds is a missing
        slot.
    slots : int, optional
        Writers that can be resident at once; the others are launched as residents finish. All of them by default.
    ordered : bool, optional
        False lets every writer add as soon as it is ready: order of arrival.
    bridge : bool, optional
        Whether missing slots are advanced over.
    early_release : bool, optional
        Release the turn when the addition is issued, before it is complete.

    Returns
    -------
    Outcome
        Order, sum and events.

    Raises
    ------
    Deadlock
        If writers wait for a turn that cannot come: a missing slot without a bridge, or all slots taken by writers
        whose predecessors have not been launched.
    DuplicateTurn
        If two writers hold the same turn.

    Examples
    --------
    >>> late_first = [Writer(0, 0, 1e8, ready=9.0), Writer(1, 1, 1.0), Writer(2, 2, -1e8), Writer(3, 3, 3.0)]
    >>> run_writers(late_first).order, float(run_writers(late_first).total)
    ((0, 1, 2, 3), 3.0)
    >>> run_writers(late_first[:1] + late_first[2:])
    Traceback (most recent call last):
    ...
    cupyfa.oracles.reductions.Deadlock: turn 1 has no writer; after [0], writers [2, 3] wait forever
    >>> run_writers(late_first[:1] + late_first[2:], bridge=True).order
    (0, 2, 3)
    """
    run = _Run(writers, turns, slots, ordered, bridge, early_release)
    while len(run.done) < len(writers):
        run.step()
    total = sum_in_order([w.value for w in run.done])
    return Outcome(tuple(w.name for w in run.done), total, tuple(run.events))


class _Run:
    """The state of one run: who waits for a slot, who is resident, whose addition is on its way."""

    def __init__(
        self,
        writers: Sequence[Writer],
        turns: int | None,
        slots: int | None,
        ordered: bool,
        bridge: bool,
        early_release: bool,
    ) -> None:
        self.held = _held(writers) if ordered else {}
        self.turns = max((w.lock for w in writers), default=-1) + 1 if turns is None else turns
        self.free = len(writers) if slots is None else slots
        if self.free < 1 and writers:
            raise ContractViolation(f"reduction: slots must be positive, not {slots}")
        if self.turns <= max(self.held, default=-1):
            raise ContractViolation(f"reduction: {self.turns} turns do not cover turn {max(self.held)}")
        self.ordered, self.bridge, self.early_release = ordered, bridge, early_release
        self.waiting = list(writers)
        self.resident: list[tuple[float, Writer]] = []  # with the time at which each has its contribution
        self.finishing: list[tuple[float, int, Writer]] = []
        self.done: list[Writer] = []
        self.events: list[Addition] = []
        self.now, self.semaphore = 0.0, 0
        self.most_events = 3 * len(writers) + self.turns  # add, added, release; a bridge over each missing slot
        self._advance()

    def step(self) -> None:
        """Launch what fits, then take the next event: an addition starts, or one completes."""
        while self.waiting and self.free:
            writer = self.waiting.pop(0)
            self.resident.append((self.now + writer.ready, writer))
            self.free -= 1
        allowed = [x for x in self.resident if not self.ordered or x[1].lock == self.semaphore]
        first = min(allowed, key=lambda x: x[0], default=None)
        begin = None if first is None else max(self.now, first[0])
        if first is not None and begin is not None and (not self.finishing or begin <= self.finishing[0][0]):
            self.now = begin
            self.resident.remove(first)
            self._log(first[1].name, "add")
            heapq.heappush(self.finishing, (begin + first[1].latency, len(self.events), first[1]))
            if self.early_release:
                self._release(first[1])
        elif self.finishing:
            self.now, _, writer = heapq.heappop(self.finishing)
            self.done.append(writer)
            self.free += 1
            self._log(writer.name, "added")
            if not self.early_release:
                self._release(writer)
        else:
            self._deadlock()

    def _log(self, writer: int, action: str) -> None:
        if len(self.events) >= self.most_events:  # no legal run gets here: a fault of the machine must not hang it
            raise RuntimeError(f"reduction: more than {self.most_events} events; the last is {self.events[-1]}")
        self.events.append(Addition(self.now, writer, action, self.semaphore))

    def _release(self, writer: Writer) -> None:
        if self.ordered:
            self.semaphore += 1
            self._log(writer.name, "release")
            self._advance()

    def _advance(self) -> None:
        while self.ordered and self.bridge and self.semaphore < self.turns and self.semaphore not in self.held:
            self.semaphore += 1
            self._log(-1, "bridge")

    def _deadlock(self) -> None:
        stuck = sorted(w.name for w in (*(w for _, w in self.resident), *self.waiting))
        after = f"after {[w.name for w in self.done]}, writers {stuck} wait forever"
        if self.semaphore not in self.held:
            raise Deadlock(f"turn {self.semaphore} has no writer; {after}")
        raise Deadlock(f"turn {self.semaphore} belongs to writer {self.held[self.semaphore].name}, no slot; {after}")


def _held(writers: Sequence[Writer]) -> Mapping[int, Writer]:
    held: dict[int, Writer] = {}
    for writer in writers:
        if writer.lock in held:
            raise DuplicateTurn(f"writers {held[writer.lock].name} and {writer.name} both hold turn {writer.lock}")
        held[writer.lock] = writer
    return held
