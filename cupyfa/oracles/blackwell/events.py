"""What the state machines of this package write down: one event after the other, so that a notebook can draw them."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Event", "Log"]


@dataclass(frozen=True)
class Event:
    """One step of a state machine (specification 0x07).

    Attributes
    ----------
    time : int
        Ordinal of the event in its log, from 0. Not a duration: nothing here measures cycles.
    agent : str
        Who acts: ``"mma"``, ``"softmax 0"``, ``"warp 3"``, ...
    action : str
        What it does: ``"issue"``, ``"commit"``, ``"load"``, ...
    subject : str
        What it acts on: ``"S0"``, ``"P1"``, ...
    block : int
        Key block the event belongs to, or -1 where there is none.
    """

    time: int
    agent: str
    action: str
    subject: str
    block: int = -1


@dataclass
class Log:
    """Events in the order in which they happened (specification 0x07).

    Examples
    --------
    >>> log = Log()
    >>> log.add("mma", "issue", "S0", block=2)
    0
    >>> log.events[0].subject
    'S0'
    """

    events: list[Event] = field(default_factory=list)

    def add(self, agent: str, action: str, subject: str, block: int = -1) -> int:
        """Append an event and return its time."""
        time = len(self.events)
        self.events.append(Event(time, agent, action, subject, block))
        return time
