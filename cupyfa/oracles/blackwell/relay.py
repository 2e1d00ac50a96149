"""How the peer's half of dS becomes visible to the product that reads it: the relay protocol (specification 0x0A).

Each CTA writes the half that the peer needs, tells the peer's barrier how many bytes to expect, and copies. The peer's
relay warp waits for the bytes and arrives at the leader CTA's barrier; the leader's MMA warp waits for both relays and
issues dQ; then both CTAs move on to the next generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..violations import ContractViolation

__all__ = [
    "ORDER",
    "RelayEvent",
    "RelayMachine",
    "relay_trace",
    "run",
    "CopyBeforeWrite",
    "EarlyReuse",
    "IncompleteRelay",
    "IncompleteTransaction",
    "MissingExpectTx",
    "MissingMmaWait",
    "MissingRelayArrival",
    "MissingRelayWait",
    "PhaseDisagreement",
]

PAIR = (0, 1)
LEADER = 0
#: The order of 0x0A, as one CTA sees it.
ORDER = (
    "write_xchg",
    "expect_tx",
    "remote_copy",
    "relay_wait",
    "relay_arrive",
    "mma_wait",
    "mma_dQ",
    "phase_toggle",
)


class CopyBeforeWrite(ContractViolation):
    """The exchange half was copied before it was written and fenced (specification 0x0A)."""


class MissingExpectTx(ContractViolation):
    """Bytes came that the barrier was not told of: its count cannot prove completion (specification 0x0A)."""


class IncompleteTransaction(ContractViolation):
    """The relay warp went on before all expected bytes were there (specification 0x0A)."""


class MissingRelayWait(ContractViolation):
    """The relay warp arrived at the leader without having waited for the bytes (specification 0x0A)."""


class MissingRelayArrival(ContractViolation):
    """The MMA warp went on before both CTAs' relays had arrived (specification 0x0A)."""


class MissingMmaWait(ContractViolation):
    """dQ was issued without a wait for the leader's barrier: the peer half may not be visible (0x0A)."""


class PhaseDisagreement(ContractViolation):
    """The two CTAs take different generations for the live one (specification 0x0A)."""


class EarlyReuse(ContractViolation):
    """A CTA went on to the next generation before the product had read this one (specification 0x0A)."""


class IncompleteRelay(ContractViolation):
    """The trace ends in the middle of a generation (specification 0x0A)."""


@dataclass(frozen=True)
class RelayEvent:
    """One step (specification 0x0A).

    Attributes
    ----------
    cta : int
        CTA that acts.
    agent : str
        ``"compute"``, ``"relay"`` or ``"mma"``.
    action : str
        One of `ORDER`.
    generation : int
        Query tile; its parity is the phase that a barrier wait names.
    nbytes : int
        For ``expect_tx`` and ``remote_copy``: bytes, at the peer.
    """

    cta: int
    agent: str
    action: str
    generation: int
    nbytes: int = 0

    @property
    def phase(self) -> int:
        """Parity of the generation."""
        return self.generation % 2


def relay_trace(generations: int, nbytes: int) -> list[RelayEvent]:
    """Return a right trace (specification 0x0A).

    Parameters
    ----------
    generations : int
        Query tiles.
    nbytes : int
        Bytes that each CTA sends: ``m / 2 * n * b``.

    Returns
    -------
    list of RelayEvent
        Both CTAs act in turn. Only the leader waits and issues, and it toggles after its product.

    Examples
    --------
    >>> [event.action for event in relay_trace(1, 16384) if event.cta == 0] == list(ORDER)
    True
    """
    if generations < 0 or nbytes < 1:
        raise ContractViolation(f"relay: generations {generations} must not be negative, nbytes {nbytes} be positive")
    agents = {"relay_wait": "relay", "relay_arrive": "relay", "mma_wait": "mma", "mma_dQ": "mma"}
    return [
        RelayEvent(cta, agents.get(action, "compute"), action, g, nbytes if action in ORDER[1:3] else 0)
        for g in range(generations)
        for action in ORDER
        for cta in PAIR
        if cta == LEADER or action not in ("mma_wait", "mma_dQ")
    ]


@dataclass
class _Cta:
    generation: int = 0
    done: set[str] = field(default_factory=set)
    expected: int = 0
    arrived: int = 0


@dataclass
class RelayMachine:
    """The barriers of a pair; takes one event at a time and refuses those that prove nothing (0x0A).

    Attributes
    ----------
    relays : int
        Arrivals at the leader's barrier in this generation.
    log : list of RelayEvent
        Events so far.
    """

    relays: int = 0
    log: list[RelayEvent] = field(default_factory=list)
    _ctas: tuple[_Cta, _Cta] = field(default_factory=lambda: (_Cta(), _Cta()))

    def step(self, event: RelayEvent) -> None:
        """Take one event.

        Parameters
        ----------
        event : RelayEvent
            The event.

        Raises
        ------
        ContractViolation
            The subclass that names what the event lacks.
        """
        if event.cta not in PAIR or event.action not in ORDER:
            raise ContractViolation(f"relay: CTA {event.cta} knows no step {event.action!r}")
        if event.nbytes < 0:
            raise ContractViolation(f"relay: {event.action} of {event.nbytes} bytes; the number must not be negative")
        own, peer = self._ctas[event.cta], self._ctas[1 - event.cta]
        apart = own.generation != peer.generation and event.action != "phase_toggle"
        if event.generation != own.generation or apart:
            raise PhaseDisagreement(
                f"{event.action} of CTA {event.cta} names generation {event.generation}; "
                f"the CTAs are in {self._ctas[0].generation} and {self._ctas[1].generation}"
            )
        own.done.add(event.action)
        getattr(self, f"_{event.action.lower()}")(event, own, peer)
        self.log.append(event)

    def finish(self) -> None:
        """Check that no generation is left open.

        Raises
        ------
        IncompleteRelay
            If one is.
        """
        for rank, cta in enumerate(self._ctas):
            if cta.done:
                raise IncompleteRelay(f"CTA {rank} ends generation {cta.generation} after {sorted(cta.done)}")

    def _write_xchg(self, event: RelayEvent, own: _Cta, peer: _Cta) -> None:
        pass

    def _expect_tx(self, event: RelayEvent, own: _Cta, peer: _Cta) -> None:
        peer.expected += event.nbytes

    def _remote_copy(self, event: RelayEvent, own: _Cta, peer: _Cta) -> None:
        if "write_xchg" not in own.done:
            raise CopyBeforeWrite(f"CTA {event.cta} copies a half that it has not written")
        if peer.arrived + event.nbytes > peer.expected:
            raise MissingExpectTx(
                f"CTA {event.cta} sends {event.nbytes} bytes; CTA {1 - event.cta} expects "
                f"{peer.expected - peer.arrived} more"
            )
        peer.arrived += event.nbytes

    def _relay_wait(self, event: RelayEvent, own: _Cta, peer: _Cta) -> None:
        if not own.expected or own.arrived < own.expected:
            raise IncompleteTransaction(f"CTA {event.cta} has {own.arrived} of {own.expected} expected bytes")

    def _relay_arrive(self, event: RelayEvent, own: _Cta, peer: _Cta) -> None:
        if "relay_wait" not in own.done:
            raise MissingRelayWait(f"the relay of CTA {event.cta} arrives without having waited")
        self.relays += 1

    def _mma_wait(self, event: RelayEvent, own: _Cta, peer: _Cta) -> None:
        if self.relays < len(PAIR):
            raise MissingRelayArrival(f"{self.relays} of {len(PAIR)} relays have arrived at the leader")

    def _mma_dq(self, event: RelayEvent, own: _Cta, peer: _Cta) -> None:
        if "mma_wait" not in own.done:
            raise MissingMmaWait("dQ is issued without a wait for the leader's barrier")

    def _phase_toggle(self, event: RelayEvent, own: _Cta, peer: _Cta) -> None:
        issued = "mma_dQ" in self._ctas[LEADER].done or peer.generation > own.generation
        if not issued:
            raise EarlyReuse(f"CTA {event.cta} leaves generation {own.generation} before dQ was issued")
        own.generation += 1
        own.expected = own.arrived = 0
        own.done = set()
        if own.generation == peer.generation:
            self.relays = 0


def run(events: Iterable[RelayEvent]) -> list[RelayEvent]:
    """Feed a trace to a fresh machine (specification 0x0A).

    Parameters
    ----------
    events : iterable of RelayEvent
        The trace.

    Returns
    -------
    list of RelayEvent
        The accepted events: all of them.

    Raises
    ------
    ContractViolation
        As `RelayMachine` says.

    Examples
    --------
    >>> len(run(relay_trace(3, 16384)))
    42
    >>> run(event for event in relay_trace(1, 16384) if event.action != "expect_tx")
    Traceback (most recent call last):
    ...
    cupyfa.oracles.blackwell.relay.MissingExpectTx: CTA 0 sends 16384 bytes; CTA 1 expects 0 more
    """
    machine = RelayMachine()
    for event in events:
        machine.step(event)
    machine.finish()
    return machine.log
