"""How one tile of dQ reaches global memory: the steps of the reduction warps, in an order that proves something (0x0A).

Four warps load their rows from tensor memory and stage them in shared memory; fence and barrier publish all of it to
the copy engine; one bulk addition takes it to global memory. That the engine has *read* the stage allows its reuse;
only that the addition is *complete* allows the release of the writer's turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..violations import ContractViolation

__all__ = [
    "StagingEvent",
    "StagingMachine",
    "run",
    "staging_trace",
    "AddBeforeBarrier",
    "AddBeforeFence",
    "AddOutOfTurn",
    "EarlyRelease",
    "EarlyReuse",
    "IncompleteReduction",
    "StageBeforeLoad",
]

#: The reduction warps.
REDUCTION_WARPS = (0, 1, 2, 3)
_EACH_WARP = ("load", "stage", "fence", "barrier")
_ELECTED = ("bulk_add", "wait_read", "wait_complete", "release")


class AddOutOfTurn(ContractViolation):
    """The bulk addition was issued although the semaphore shows another turn (specification 0x0A)."""


class StageBeforeLoad(ContractViolation):
    """A warp staged rows that it had not loaded from tensor memory (specification 0x0A)."""


class AddBeforeFence(ContractViolation):
    """A warp's writes were not fenced towards the asynchronous proxy (specification 0x0A)."""


class AddBeforeBarrier(ContractViolation):
    """The bulk addition was issued before all reduction warps had met (specification 0x0A)."""


class EarlyReuse(ContractViolation):
    """The stage was written again while the copy engine might still read it (specification 0x0A)."""


class EarlyRelease(ContractViolation):
    """The turn was released before the bulk addition was complete (specification 0x0A)."""


class IncompleteReduction(ContractViolation):
    """A tile's addition or release is missing at the end (specification 0x0A)."""


@dataclass(frozen=True)
class StagingEvent:
    """One step of one tile's reduction (specification 0x0A).

    Attributes
    ----------
    action : str
        ``wait_turn``, ``load``, ``stage``, ``fence``, ``barrier``, ``bulk_add``, ``wait_read``, ``wait_complete`` or
        ``release``.
    tile : int
        The tile, which here is its turn as well.
    warp : int
        Reduction warp, for the steps that every warp does; -1 for the elected thread.
    """

    action: str
    tile: int
    warp: int = -1


def staging_trace(tiles: int) -> list[StagingEvent]:
    """Return a right trace for several tiles through one stage (specification 0x0A).

    Parameters
    ----------
    tiles : int
        Tiles, in the order of their turns.

    Returns
    -------
    list of StagingEvent
        The steps.

    Examples
    --------
    >>> [event.action for event in staging_trace(1) if event.warp <= 0]
    ['wait_turn', 'load', 'stage', 'fence', 'barrier', 'bulk_add', 'wait_read', 'wait_complete', 'release']
    """
    if tiles < 0:
        raise ContractViolation(f"reduction: tiles must not be negative, not {tiles}")
    events = []
    for tile in range(tiles):
        events.append(StagingEvent("wait_turn", tile))
        for action in _EACH_WARP:
            events += [StagingEvent(action, tile, warp) for warp in REDUCTION_WARPS]
        events += [StagingEvent(a, tile) for a in _ELECTED]
    return events


@dataclass
class StagingMachine:
    """One stage of shared memory and one semaphore; takes an event at a time (specification 0x0A).

    Attributes
    ----------
    semaphore : int
        Turns released so far.
    added : list of int
        Tiles in the order of their bulk additions.
    """

    semaphore: int = 0
    added: list[int] = field(default_factory=list)
    _seen: dict[int, set[tuple[str, int]]] = field(default_factory=dict)

    def step(self, event: StagingEvent) -> None:
        """Take one event.

        Parameters
        ----------
        event : StagingEvent
            The event.

        Raises
        ------
        ContractViolation
            The subclass that names what the event lacks.
        """
        warps = REDUCTION_WARPS if event.action in _EACH_WARP else (-1,)
        if event.warp not in warps or event.action not in ("wait_turn", *_EACH_WARP, *_ELECTED):
            raise ContractViolation(f"reduction: warp {event.warp} knows no step {event.action!r}")
        seen = self._seen.setdefault(event.tile, set())
        check = getattr(self, f"_{event.action}", None)
        if check is not None:
            check(event, seen)
        seen.add((event.action, event.warp))

    def finish(self, tiles: int) -> None:
        """Check that every tile was added and released.

        Parameters
        ----------
        tiles : int
            Tiles.

        Raises
        ------
        IncompleteReduction
            If one was not.
        """
        if tiles < 0:
            raise ContractViolation(f"reduction: tiles must not be negative, not {tiles}")
        if self.added != list(range(tiles)) or self.semaphore != tiles:
            raise IncompleteReduction(f"added {self.added}, released {self.semaphore} of {tiles}")

    def _stage(self, event: StagingEvent, seen: set[tuple[str, int]]) -> None:
        if ("load", event.warp) not in seen:
            raise StageBeforeLoad(f"warp {event.warp} stages rows of tile {event.tile} that it has not loaded")
        for tile in self.added:
            if ("wait_read", -1) not in self._seen[tile] and ("wait_complete", -1) not in self._seen[tile]:
                raise EarlyReuse(f"warp {event.warp} overwrites the stage while tile {tile} may still be read from it")
        # A fence or barrier before the write says nothing about it.
        seen -= {("fence", event.warp), ("barrier", event.warp)}

    def _bulk_add(self, event: StagingEvent, seen: set[tuple[str, int]]) -> None:
        if ("wait_turn", -1) not in seen or self.semaphore != event.tile:
            raise AddOutOfTurn(f"tile {event.tile} adds while the semaphore is {self.semaphore}")
        for warp in REDUCTION_WARPS:
            if ("fence", warp) not in seen or ("stage", warp) not in seen:
                raise AddBeforeFence(f"the rows of warp {warp} of tile {event.tile} are not published")
        for warp in REDUCTION_WARPS:
            if ("barrier", warp) not in seen:
                raise AddBeforeBarrier(f"warp {warp} has not met the others before tile {event.tile} is added")
        self.added.append(event.tile)

    def _wait_read(self, event: StagingEvent, seen: set[tuple[str, int]]) -> None:
        if ("bulk_add", -1) not in seen:
            raise IncompleteReduction(f"tile {event.tile} waits for an addition that was never issued")

    _wait_complete = _wait_read

    def _release(self, event: StagingEvent, seen: set[tuple[str, int]]) -> None:
        if ("wait_complete", -1) not in seen:
            raise EarlyRelease(f"the turn of tile {event.tile} is released before its addition is complete")
        self.semaphore += 1


def run(events: Iterable[StagingEvent], tiles: int) -> list[int]:
    """Feed a trace to a fresh machine (specification 0x0A).

    Parameters
    ----------
    events : iterable of StagingEvent
        The trace.
    tiles : int
        Tiles that it should reduce.

    Returns
    -------
    list of int
        Tiles in the order of their additions.

    Raises
    ------
    ContractViolation
        As `StagingMachine` says.

    Examples
    --------
    >>> run(staging_trace(3), 3)
    [0, 1, 2]
    """
    machine = StagingMachine()
    for event in events:
        machine.step(event)
    machine.finish(tiles)
    return machine.added
