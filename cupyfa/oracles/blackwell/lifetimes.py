"""Who lives where in tensor memory, and when: two objects may share columns only if they never live together (0x07)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..violations import ContractViolation
from .events import Event, Log
from .tmem import ForwardMap, Region

__all__ = ["Live", "LiveAlias", "audit", "forward_timeline", "legal_alias", "live_intervals"]


class LiveAlias(ContractViolation):
    """Two objects live in the same columns at the same time (specification 0x07)."""


@dataclass(frozen=True)
class Live:
    """An object in its columns, from its first write to its last read (specification 0x07).

    Attributes
    ----------
    region : Region
        Name and columns.
    begin, end : int
        Half-open interval of time, in ordinals of an event log: alive at ``begin <= t < end``.
    block : int
        Key block it belongs to; -1 for an accumulator that outlives its blocks.
    """

    region: Region
    begin: int
    end: int
    block: int = -1

    def __post_init__(self) -> None:
        if self.begin >= self.end:
            raise ValueError(f"Live: {self.region.name} lives from {self.begin} to {self.end}, which is no time at all")


def legal_alias(x: Live, y: Live) -> bool:
    """Tell whether two objects may be where they are (specification 0x07).

    Parameters
    ----------
    x, y : Live
        Two objects of one CTA's view.

    Returns
    -------
    bool
        True if their columns are disjoint or their lives are: ``(C_x & C_y empty) or (L_x & L_y empty)``.

    Examples
    --------
    >>> S, P = Region("S0", 0, 128), Region("P0", 64, 64)
    >>> legal_alias(Live(S, 0, 5), Live(P, 5, 9)), legal_alias(Live(S, 0, 5), Live(P, 4, 9))
    (True, False)
    """
    return not x.region.overlaps(y.region) or x.end <= y.begin or y.end <= x.begin


def audit(objects: Sequence[Live]) -> None:
    """Check every pair of objects (specification 0x07).

    Parameters
    ----------
    objects : sequence of Live
        Everything that lives in one CTA's view.

    Raises
    ------
    LiveAlias
        Naming the first two that are alive together in shared columns. That both fit inside the 512 columns is no
        excuse: capacity cannot see this fault.

    Examples
    --------
    >>> audit([Live(Region("S0", 0, 128), 0, 5), Live(Region("O0", 256, 128), 0, 9)])
    """
    for x, y in itertools.combinations(objects, 2):
        if not legal_alias(x, y):
            columns = range(max(x.region.begin, y.region.begin), min(x.region.end, y.region.end))
            raise LiveAlias(
                f"{x.region.name} and {y.region.name} are both live in columns {columns.start} to {columns.stop - 1} "
                f"at times {max(x.begin, y.begin)} to {min(x.end, y.end) - 1}"
            )


def forward_timeline(layout: ForwardMap, key_blocks: int) -> list[Event]:
    """One work tile of the forward kernel, as far as tensor memory sees it (specification 0x07).

    Parameters
    ----------
    layout : ForwardMap
        Its Q stages decide how many score slots are worked on.
    key_blocks : int
        Blocks that the tile visits, at least 1.

    Returns
    -------
    list of Event
        In order. Per Q stage i and block j: the matrix warp issues ``S_i``; softmax loads it, which ends with the
        wait that closes the load; softmax stores ``P_i``; the matrix warp accumulates ``O_i`` from it; then ``S_i`` of
        the next block may overwrite both. The correction warps read ``O_i`` last.

    Examples
    --------
    >>> from cupyfa.oracles.blackwell.tmem import forward_map
    >>> [f"{e.action} {e.subject}" for e in forward_timeline(forward_map(128, 64, 1), 1)]
    ['issue S0', 'load S0', 'loaded S0', 'store P0', 'accumulate O0', 'consumed P0', 'drained O0']
    """
    if key_blocks < 1:
        raise ValueError(f"forward_timeline: key_blocks is {key_blocks}; a tile without keys never reaches the MMA")
    log = Log()
    stages = range(len(layout.O))
    for i in stages:
        log.add("mma", "issue", f"S{i}", 0)
    for j in range(key_blocks):
        for i in stages:
            log.add(f"softmax {i}", "load", f"S{i}", j)
            log.add(f"softmax {i}", "loaded", f"S{i}", j)
            log.add(f"softmax {i}", "store", f"P{i}", j)
            log.add("mma", "accumulate", f"O{i}", j)
            log.add("mma", "consumed", f"P{i}", j)
            if j + 1 < key_blocks:
                log.add("mma", "issue", f"S{i}", j + 1)
    for i in stages:
        log.add("correction", "drained", f"O{i}")
    return log.events


def live_intervals(layout: ForwardMap, events: Sequence[Event]) -> list[Live]:
    """Read the lives of S, P and O from a log (specification 0x07).

    Parameters
    ----------
    layout : ForwardMap
        Where they are.
    events : sequence of Event
        As `forward_timeline` gives them.

    Returns
    -------
    list of Live
        ``S_i`` lives from its issue to the end of its load, ``P_i`` from its store until the product has consumed it,
        ``O_i`` from the first product to its drain. Each block has an S and a P of its own.

    Raises
    ------
    ValueError
        If an object is born twice, dies unborn or never dies.

    Examples
    --------
    >>> from cupyfa.oracles.blackwell.tmem import forward_map
    >>> layout = forward_map(128, 128, 2)
    >>> lives = live_intervals(layout, forward_timeline(layout, 3))
    >>> len(lives)  # two slots of S and P for each of three blocks, and two accumulators
    14
    >>> audit(lives)
    """
    births = {"issue": "S", "store": "P", "accumulate": "O"}
    deaths = {"loaded": "S", "consumed": "P", "drained": "O"}
    regions = {region.name: region for region in layout.regions}
    born: dict[str, Event] = {}
    lives: list[Live] = []
    for event in events:
        if event.action in {**births, **deaths} and event.subject not in regions:
            raise ValueError(f"live_intervals: {event.action} of {event.subject!r}; the map has {', '.join(regions)}")
        if event.action in births:
            accumulates_again = event.action == "accumulate" and event.subject in born
            if event.subject in born and not accumulates_again:
                raise ValueError(f"live_intervals: {event.subject} is born again at {event.time} before it died")
            born.setdefault(event.subject, event)
        elif event.action in deaths:
            if event.subject not in born:
                raise ValueError(f"live_intervals: {event.subject} dies at {event.time} without having lived")
            birth = born.pop(event.subject)
            block = -1 if event.action == "drained" else birth.block
            lives.append(Live(regions[event.subject], birth.time, event.time, block))
    if born:
        raise ValueError(f"live_intervals: {', '.join(sorted(born))} never died")
    return lives
