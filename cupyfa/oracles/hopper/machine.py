"""A CTA as a handful of agents: steps, waits, time, and a deadlock report (the engine of the Hopper oracles).

An agent is a generator that yields a `Wait` (go on when something holds) or a `Work` (go on after some cycles); between
two yields it runs undisturbed. Engines that work on their own (TMA, tensor cores) are `Resource` objects plus callbacks
in the future. Everything that happens is an `Event`, so that a run can be checked, counted or drawn.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from cupyfa.oracles.violations import ContractViolation

__all__ = [
    "Deadlock",
    "Event",
    "Machine",
    "Program",
    "Resource",
    "Wait",
    "Work",
    "find_cycle",
    "require_cycles",
]


class Deadlock(ContractViolation):
    """Nothing can run any more although agents are unfinished (specification 0x03).

    Attributes
    ----------
    blocked : dict of str to str
        For each waiting agent, what it waits for.
    graph : dict of str to tuple of str
        The wait-for graph: for each waiting agent, the agents that could let it go on.
    cycle : tuple of str
        Agents that wait for each other, or empty when somebody waits for an agent that has already left.
    """

    def __init__(self, blocked: Mapping[str, str], graph: Mapping[str, tuple[str, ...]]) -> None:
        self.blocked = dict(blocked)
        self.graph = dict(graph)
        self.cycle = find_cycle(graph)
        lines = [f"{agent} waits for {what}" for agent, what in blocked.items()]
        super().__init__("deadlock: " + "; ".join(lines))


def find_cycle(graph: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Find nodes that wait for each other in a wait-for graph (specification 0x03).

    Parameters
    ----------
    graph : mapping of str to sequence of str
        An edge ``a -> b`` says that ``a`` waits for ``b``. Nodes without an entry wait for nobody.

    Returns
    -------
    tuple of str
        A cycle in order, each node once; empty if the graph has none.

    Examples
    --------
    >>> find_cycle({"a": ["b"], "b": ["c"], "c": ["b"]})
    ('b', 'c')
    >>> find_cycle({"a": ["b"], "b": ["c"]})
    ()
    """
    finished: set[str] = set()
    for root in graph:
        # Depth first with an explicit stack: chains are as long as the traversal.
        path: list[str] = [root]
        on_path = {root}
        pending: list[list[str]] = [list(graph.get(root, ()))]
        while path:
            if path[-1] in finished or not pending[-1]:
                on_path.discard(path[-1])
                finished.add(path.pop())
                pending.pop()
                continue
            node = pending[-1].pop()
            if node in on_path:
                return tuple(path[path.index(node) :])
            if node not in finished:
                path.append(node)
                on_path.add(node)
                pending.append(list(graph.get(node, ())))
    return ()


@dataclass(frozen=True)
class Event:
    """Something that happened (specification 0x03).

    Attributes
    ----------
    time : float
        When it began, in cycles.
    agent : str
        Who did it: a role, or an engine such as ``"tma"``.
    action : str
        What: ``"acquire"``, ``"copy"``, ``"wait"``, ``"release"``, ``"sync"``, ``"arrive"``, ``"softmax"``, ...
    target : str
        On which object: a ring, a barrier, a product.
    stage, phase, ordinal : int or None
        Ring coordinates where they apply: slot, parity and traversal ordinal.
    duration : float
        Cycles that it took.
    """

    time: float
    agent: str
    action: str
    target: str = ""
    stage: int | None = None
    phase: int | None = None
    ordinal: int | None = None
    duration: float = 0


@dataclass(frozen=True)
class Wait:
    """Go on when `ready` holds (specification 0x03).

    Attributes
    ----------
    ready : callable
        The condition.
    what : str
        The condition in words, for a deadlock report.
    needs : callable
        Names the agents that can make it true, asked when nothing else runs.
    """

    ready: Callable[[], bool]
    what: str
    needs: Callable[[], Iterable[str]] = tuple


def require_cycles(contract: str, **cycles: float) -> None:
    """Raise unless every duration is finite and not negative (specification 0x03).

    Parameters
    ----------
    contract : str
        What the durations belong to.
    **cycles : float
        The durations, by name.

    Examples
    --------
    >>> require_cycles("ring times", load=-300)
    Traceback (most recent call last):
    ValueError: ring times: load is -300; a duration is finite and not negative
    """
    for name, value in cycles.items():
        if not 0 <= value < inf:
            raise ValueError(f"{contract}: {name} is {value}; a duration is finite and not negative")


@dataclass(frozen=True)
class Work:
    """Go on after some cycles (specification 0x03)."""

    cycles: float

    def __post_init__(self) -> None:
        require_cycles("machine", work=self.cycles)


Program = Generator[Wait | Work, None, None]


@dataclass
class _Agent:
    name: str
    program: Program
    wake: float = 0
    wait: Wait | None = None
    on_exit: Callable[[], None] | None = None


class Machine:
    """Run agents until all have left (specification 0x03).

    Parameters
    ----------
    seed : int, optional
        With a seed, whoever could move next is chosen at random among all that can; without one, in order of creation.
        Together with random durations this reaches every interleaving.

    Attributes
    ----------
    now : float
        The current cycle.
    events : list of Event
        What happened so far.

    Examples
    --------
    >>> machine = Machine()
    >>> box = []
    >>> def giver():
    ...     yield Work(5)
    ...     box.append("tile")
    >>> def taker():
    ...     yield Wait(lambda: bool(box), "the box to be filled", lambda: ["giver"])
    ...     machine.emit("taker", "take", box.pop())
    >>> machine.spawn("taker", taker())
    >>> machine.spawn("giver", giver())
    >>> machine.run()
    >>> machine.events
    [Event(time=5, agent='taker', action='take', target='tile', stage=None, phase=None, ordinal=None, duration=0)]
    """

    def __init__(self, seed: int | None = None) -> None:
        self.now: float = 0
        self.events: list[Event] = []
        self._random = None if seed is None else random.Random(seed)
        self._agents: list[_Agent] = []
        self._future: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def spawn(self, name: str, program: Program, on_exit: Callable[[], None] | None = None) -> None:
        """Add an agent; `on_exit` is called when its program ends."""
        self._agents.append(_Agent(name, program, self.now, None, on_exit))

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at a later time."""
        self._order += 1
        heapq.heappush(self._future, (max(time, self.now), self._order, action))

    def emit(
        self,
        agent: str,
        action: str,
        target: str = "",
        *,
        stage: int | None = None,
        phase: int | None = None,
        ordinal: int | None = None,
        start: float | None = None,
        duration: float = 0,
    ) -> None:
        """Record an event; it begins now unless `start` says otherwise."""
        time = self.now if start is None else start
        self.events.append(Event(time, agent, action, target, stage, phase, ordinal, duration))

    def run(self) -> None:
        """Run until all agents have left; raise `Deadlock` when nothing can move."""
        while True:
            due = bool(self._future) and self._future[0][0] <= self.now
            able = [agent for agent in self._agents if self._can_move(agent)]
            if due or able:
                self._move(due, able)
            elif not self._advance_time():
                if self._agents:
                    waits = {a.name: a.wait for a in self._agents if a.wait is not None}
                    raise Deadlock(
                        {n: w.what for n, w in waits.items()}, {n: tuple(w.needs()) for n, w in waits.items()}
                    )
                return

    def _can_move(self, agent: _Agent) -> bool:
        return agent.wake <= self.now and (agent.wait is None or agent.wait.ready())

    def _move(self, due: bool, able: list[_Agent]) -> None:
        choice = 0 if self._random is None else self._random.randrange(int(due) + len(able))
        if due and choice == 0:
            heapq.heappop(self._future)[2]()
            return
        agent = able[choice - int(due)]
        agent.wait = None
        try:
            request = next(agent.program)
        except StopIteration:
            self._agents.remove(agent)
            if agent.on_exit is not None:
                agent.on_exit()
            return
        if isinstance(request, Work):
            agent.wake = self.now + request.cycles
        else:
            agent.wait = request

    def _advance_time(self) -> bool:
        times = [agent.wake for agent in self._agents if agent.wake > self.now]
        if self._future:
            times.append(self._future[0][0])
        if not times:
            return False
        self.now = min(times)
        return True


@dataclass
class Resource:
    """An engine that does one thing at a time, in order: TMA, tensor cores, exponential unit (specification 0x03).

    Attributes
    ----------
    machine : Machine
        Whose time it lives in.
    name : str
        Its name in events.
    free : float
        When it has nothing left to do.
    """

    machine: Machine
    name: str
    free: float = 0

    def start(self, cycles: float, action: str, target: str = "", ordinal: int | None = None) -> float:
        """Queue work asynchronously; return when it will be complete."""
        require_cycles(self.name, **{action: cycles})
        begin = max(self.machine.now, self.free)
        self.free = begin + cycles
        self.machine.emit(self.name, action, target, ordinal=ordinal, start=begin, duration=cycles)
        return self.free

    def use(self, cycles: float, action: str, target: str = "", ordinal: int | None = None) -> Program:
        """Queue work and wait for its end."""
        yield Work(self.start(cycles, action, target, ordinal) - self.machine.now)
