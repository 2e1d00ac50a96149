"""Barriers of two kinds: mbarriers count arrivals and bytes, named barriers count threads (specification 0x02, 0x04).

An mbarrier lives in shared memory and is tested by parity. A named barrier is one of 16 of a CTA; it counts the threads
that wait as well as those that only arrive, and starts over by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cupyfa.oracles.hopper.machine import Program, Wait
from cupyfa.oracles.violations import ContractViolation

__all__ = ["ArrivalOverflow", "MBarrier", "NamedBarrier", "ParticipantMismatch"]


class ArrivalOverflow(ContractViolation):
    """More arrivals reached a barrier phase than it was initialised for (specification 0x02)."""


class ParticipantMismatch(ContractViolation):
    """Two halves of a barrier generation disagree about the number of threads, or too many arrive (0x04)."""


@dataclass
class MBarrier:
    """An mbarrier: a phase completes when no arrival and no byte is outstanding (specification 0x02).

    Both conditions are needed: arrivals say that a copy was asked for, bytes that it has landed.

    Attributes
    ----------
    arrivals : int
        Arrivals that a phase takes.
    completed : int
        Phases completed so far.
    pending : int
        Arrivals that the current phase still misses.
    transactions : int
        Bytes that the current phase still misses.

    Examples
    --------
    >>> full = MBarrier(1)
    >>> full.passed(1), full.passed(0)  # the phase before the first one counts as complete
    (True, False)
    >>> full.arrive(expect=32768)
    >>> full.passed(0)  # arrived, but the copy has not landed
    False
    >>> full.complete_bytes(32768)
    >>> full.passed(0)
    True
    """

    arrivals: int
    completed: int = 0
    pending: int = field(init=False)
    transactions: int = 0

    def __post_init__(self) -> None:
        if self.arrivals < 1:
            raise ValueError(f"mbarrier: a phase needs at least one arrival, not {self.arrivals}")
        self.pending = self.arrivals

    def passed(self, parity: int) -> bool:
        """Tell whether the phase of this parity has completed, as ``mbarrier.try_wait.parity`` does."""
        if parity not in (0, 1):
            raise ValueError(f"mbarrier: parity {parity}; it is 0 or 1")
        return self.completed % 2 != parity

    def arrive(self, count: int = 1, *, expect: int = 0) -> None:
        """Arrive `count` times and expect so many bytes more."""
        if count < 1 or expect < 0:
            raise ValueError(f"mbarrier: {count} arrivals that expect {expect} bytes; at least one, none negative")
        if count > self.pending:
            raise ArrivalOverflow(f"{count} arrivals at an mbarrier phase that misses {self.pending}")
        self.transactions += expect
        self.pending -= count
        self._complete()

    def complete_bytes(self, count: int) -> None:
        """Take note of bytes that have landed."""
        if count < 0:
            raise ValueError(f"mbarrier: {count} bytes have landed; the number must not be negative")
        self.transactions -= count
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.completed += 1
            self.pending = self.arrivals


@dataclass
class NamedBarrier:
    """A CTA's named barrier: a reusable generation, not a flag (PTX ISA, "bar, barrier") (specification 0x04).

    Attributes
    ----------
    name : str
        Name in events.
    on_complete : callable
        Told, when a generation completes, which agents waited for it.
    arrived : int
        Threads that have come to the current generation.
    expected : int
        Threads that the current generation takes, as its first participant said.
    credits : int
        Arrivals among them that do not wait.
    generation : int
        Generations completed.

    Examples
    --------
    >>> barrier = NamedBarrier("B0")
    >>> barrier.arrive(128, 256)
    >>> barrier.generation, barrier.credits
    (0, 1)
    >>> barrier.arrive(128, 256)
    >>> barrier.generation, barrier.credits
    (1, 0)
    """

    name: str
    on_complete: Callable[[Sequence[str]], None] = lambda waiters: None
    arrived: int = 0
    expected: int = 0
    credits: int = 0
    generation: int = 0
    waiters: list[str] = field(default_factory=list)

    def arrive(self, threads: int, expected: int, *, waiter: str | None = None) -> None:
        """Arrive with `threads` threads. The last arrival completes the generation and starts the next."""
        if threads < 1 or expected < 1:
            raise ValueError(f"{self.name}: {threads} threads arrive at a barrier of {expected}; both start at 1")
        if self.arrived and expected != self.expected:
            raise ParticipantMismatch(f"{self.name}: one side counts to {self.expected}, the other to {expected}")
        self.arrived += threads
        self.expected = expected
        if waiter is None:
            self.credits += 1
        else:
            self.waiters.append(waiter)
        if self.arrived > expected:
            raise ParticipantMismatch(f"{self.name}: {self.arrived} threads at a barrier of {expected}")
        if self.arrived == expected:
            waiters, self.waiters = self.waiters, []
            self.arrived = self.expected = self.credits = 0
            self.generation += 1
            self.on_complete(waiters)

    def sync(self, agent: str, threads: int, expected: int, needs: Sequence[str] = ()) -> Program:
        """Arrive and wait for the end of this generation."""
        generation = self.generation
        self.arrive(threads, expected, waiter=agent)
        what = f"{self.name}, which has {self.arrived} of {expected} threads"
        yield Wait(lambda: self.generation > generation, what, lambda: needs)
