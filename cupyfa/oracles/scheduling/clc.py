"""Hardware-assisted work distribution (CLC): the token protocol, and the order that it does not keep (0x0B).

A CTA that is about to run out of work cancels a CTA of the grid that has not started, and computes its tile. The answer
is a work token in shared memory with one slot: requested, completed, read, released, requested again. It contains
coordinates of the launch grid in an order that the hardware chooses. The audited FlashAttention-4 release (arXiv
2603.05451 describes the design) turns them into attention coordinates by division and by reversing the blocks, and by
nothing else: the static path's L2 sections are not applied, so its locality is not promised.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..violations import ContractViolation
from .costs import Costs, check_costs, check_positive
from .makespan import Placement, Schedule, TileSetViolation
from .orders import TileGrid, WorkTile

__all__ = [
    "ClcEvent",
    "ClcToken",
    "ClcViolation",
    "MissingTail",
    "RequestAfterEnd",
    "ResponseNotWaited",
    "ResponseOverwritten",
    "TokenNotHeld",
    "WorkQueue",
    "clc_allowed",
    "clc_coordinates",
    "clc_schedule",
]


class ClcViolation(ContractViolation):
    """The work token is used against its protocol (0x0B)."""


class ResponseNotWaited(ClcViolation):
    """A response is read before the wait that proves its arrival (0x0B)."""


class ResponseOverwritten(ClcViolation):
    """Work is requested while the slot still holds a response that was not released (0x0B)."""


class TokenNotHeld(ClcViolation):
    """A wait without a request, or a release without a response (0x0B)."""


class RequestAfterEnd(ClcViolation):
    """Work is requested after a response said that there is none; what the hardware then does is undefined (0x0B)."""


class MissingTail(ClcViolation):
    """The producer leaves without its tail, while a response may still arrive in its shared memory (0x0B)."""


class ClcEvent(NamedTuple):
    """One act on a token: ordinal, CTA, action, parity of the slot, and the raw work item if it is known (0x0B)."""

    ordinal: int
    worker: int
    action: str
    phase: int
    work: int | None


class WorkQueue:
    """The CTAs of a launch grid that have not started (0x0B).

    Parameters
    ----------
    hardware_order : iterable of int
        Raw work items in the order in which the hardware gives them away. Nothing promises that it is rising.

    Raises
    ------
    TileSetViolation
        If an item is negative or comes twice: a CTA starts once, or is cancelled once.

    Examples
    --------
    >>> queue = WorkQueue([0, 1])
    >>> queue.cancel(), queue.cancel(), queue.cancel()
    (0, 1, None)
    """

    def __init__(self, hardware_order: Iterable[int]) -> None:
        items = list(hardware_order)
        if len(set(items)) != len(items) or min(items, default=0) < 0:
            raise TileSetViolation(f"clc: the work items {items} must differ and must not be negative")
        self._items = iter(items)

    def cancel(self) -> int | None:
        """Take one item.

        Returns
        -------
        int or None
            Raw work item; None if all have started.
        """
        return next(self._items, None)


class ClcToken:
    """One CTA's work token: a slot with a full and an empty phase, as a state machine with named errors.

    The legal loop is ``work = initial_work()``, then while ``work is not None``: compute it, `prefetch`, `wait`,
    ``work = current()``, `release`; at the end `tail` (specification 0x0B).

    Parameters
    ----------
    queue : WorkQueue
        Shared by all CTAs of the launch.
    worker : int, optional
        Number of the CTA, for the events.
    events : list of ClcEvent, optional
        Where the events go; CTAs may share one list.

    Examples
    --------
    >>> token = ClcToken(WorkQueue([7, 8]))
    >>> token.initial_work()
    7
    >>> token.prefetch(); token.wait(); token.current()
    8
    >>> token.prefetch()
    Traceback (most recent call last):
    cupyfa.oracles.scheduling.clc.ResponseOverwritten: clc: CTA 0 requests work before it released the last response
    """

    def __init__(self, queue: WorkQueue, worker: int = 0, events: list[ClcEvent] | None = None) -> None:
        self._queue = queue
        self._worker = worker
        self.events: list[ClcEvent] = [] if events is None else events
        self._state = "new"  # then: empty -> requested -> arrived -> empty ... -> closed
        self._response: int | None = None
        self._ended = False
        self._generation = 0

    def _emit(self, action: str, work: int | None = None) -> None:
        self.events.append(ClcEvent(len(self.events), self._worker, action, self._generation % 2, work))

    def initial_work(self) -> int | None:
        """Return the work that the CTA was launched with.

        Returns
        -------
        int or None
            Raw work item.

        Raises
        ------
        TokenNotHeld
            If the CTA has begun before.
        """
        if self._state != "new":
            raise TokenNotHeld(f"clc: CTA {self._worker} asks for its initial work twice")
        work = self._queue.cancel()
        self._state, self._ended = "empty", work is None
        self._emit("initial", work)
        return work

    def prefetch(self) -> None:
        """Request the next work; the response arrives asynchronously in the slot.

        Raises
        ------
        ResponseOverwritten, RequestAfterEnd, TokenNotHeld
            If the slot is not free, the work has ended, or the CTA has not begun.
        """
        if self._ended:
            raise RequestAfterEnd(f"clc: CTA {self._worker} requests work after it was told that there is none")
        if self._state in ("requested", "arrived"):
            raise ResponseOverwritten(f"clc: CTA {self._worker} requests work before it released the last response")
        if self._state != "empty":
            raise TokenNotHeld(f"clc: CTA {self._worker} requests work outside its loop")
        self._response = self._queue.cancel()
        self._state = "requested"
        self._emit("request")

    def wait(self) -> None:
        """Wait for the full phase: the response has arrived.

        Raises
        ------
        TokenNotHeld
            If nothing was requested: the wait would never end.
        """
        if self._state != "requested":
            raise TokenNotHeld(f"clc: CTA {self._worker} waits for a response that nobody requested")
        self._state = "arrived"
        self._emit("wait", self._response)

    def current(self) -> int | None:
        """Return the response.

        Returns
        -------
        int or None
            Raw work item; None if there is no more work.

        Raises
        ------
        ResponseNotWaited
            If no wait proves that it has arrived.
        """
        if self._state != "arrived":
            raise ResponseNotWaited(f"clc: CTA {self._worker} reads a response that it has not waited for")
        self._ended = self._response is None
        self._emit("read", self._response)
        return self._response

    def release(self) -> None:
        """Give the slot back; the phase of the next response differs.

        Raises
        ------
        TokenNotHeld
            If there is no response to release.
        """
        if self._state != "arrived":
            raise TokenNotHeld(f"clc: CTA {self._worker} releases a response that it does not hold")
        self._state = "empty"
        self._emit("release")
        self._generation += 1

    def tail(self) -> None:
        """Close the token: the producer may leave.

        Raises
        ------
        TokenNotHeld
            If a response is requested or held.
        """
        if self._state != "empty":
            raise TokenNotHeld(f"clc: CTA {self._worker} closes a token whose slot is {self._state}")
        self._state = "closed"
        self._emit("tail")

    def leave(self) -> None:
        """End the CTA.

        Raises
        ------
        MissingTail
            If the token was not closed.
        """
        if self._state != "closed":
            raise MissingTail(f"clc: CTA {self._worker} leaves without closing its token")


def clc_schedule(
    costs: Costs, hardware_order: Sequence[int], workers: int, events: list[ClcEvent] | None = None
) -> Schedule:
    """Run CTAs that obtain their work by the token protocol (0x0B).

    Parameters
    ----------
    costs : array_like of float
        By raw work item.
    hardware_order : sequence of int
        Raw work items in the order in which the hardware gives them away.
    workers : int
        Resident CTAs.
    events : list of ClcEvent, optional
        Receives the events of all tokens.

    Returns
    -------
    Schedule
        The same as first-free list scheduling of the hardware's order: dynamic assignment balances, it does not sort.

    Raises
    ------
    TileSetViolation
        If the order leaves out or repeats an item.
    ValueError
        If a cost is negative or there is no worker.

    Examples
    --------
    >>> clc_schedule([1, 2, 3, 4, 5, 6], range(6), 3).makespan
    9.0
    """
    w = check_costs(costs)
    check_positive(workers=workers)
    if sorted(hardware_order) != list(range(w.size)):
        raise TileSetViolation(f"clc: the hardware's order must name each of the {w.size} work items exactly once")
    queue = WorkQueue(hardware_order)
    tokens = [ClcToken(queue, worker, events) for worker in range(workers)]
    placements: list[Placement] = []
    running: list[tuple[float, int]] = []

    def begin(worker: int, work: int | None, now: float) -> None:
        if work is None:
            tokens[worker].tail()
            tokens[worker].leave()
            return
        placements.append(Placement(work, worker, now, now + float(w[work])))
        heapq.heappush(running, (placements[-1].finish, worker))

    for worker, token in enumerate(tokens):
        begin(worker, token.initial_work(), 0.0)
    while running:
        now, worker = heapq.heappop(running)
        token = tokens[worker]
        token.prefetch()
        token.wait()
        work = token.current()
        token.release()
        begin(worker, work, now)
    return Schedule(tuple(placements), workers)


def clc_coordinates(
    ctaid: tuple[int, int, int], grid: TileGrid, cluster: int = 1, splits: int = 1, reverse_blocks: bool = True
) -> tuple[WorkTile, int]:
    """Turn the raw grid coordinates of a response into attention coordinates, as the audited release does.

    The launch grid is ``(blocks * cluster, heads * splits, batches)``. ``block = x // cluster``, optionally reversed;
    ``head, split = divmod(y, splits)``. That is all: no section of heads, hence no L2 swizzle (specification 0x0B).

    Parameters
    ----------
    ctaid : tuple of int
        ``(x, y, z)`` of the first CTA of a cluster.
    grid : TileGrid
        The tiles; `blocks` counts tiles of a whole cluster.
    cluster : int, optional
        CTAs per cluster.
    splits : int, optional
        Parts into which the keys are split.
    reverse_blocks : bool, optional
        The last block first.

    Returns
    -------
    tile : WorkTile
        Attention coordinates.
    split : int
        Part of the keys.

    Raises
    ------
    ValueError
        If the coordinates lie outside the launch grid.

    Examples
    --------
    >>> clc_coordinates((2, 5, 0), TileGrid(batches=1, heads=4, blocks=3), cluster=2, splits=2)
    (WorkTile(batch=0, head=2, block=1), 1)
    """
    check_positive(cluster=cluster, splits=splits)
    if len(ctaid) != 3:
        raise ValueError(f"clc: {ctaid} must have the three coordinates of a launch grid")
    x, y, z = ctaid
    if not (0 <= x < grid.blocks * cluster and 0 <= y < grid.heads * splits and 0 <= z < grid.batches):
        raise ValueError(f"clc: {ctaid} lies outside the launch grid")
    block = x // cluster
    head, split = divmod(y, splits)
    return WorkTile(z, head, grid.blocks - 1 - block if reverse_blocks else block), split


def clc_allowed(requested: bool, causal: bool, varlen: bool, heads: int, heads_kv: int) -> bool:
    """Tell whether the audited release keeps a request for hardware-assisted distribution (specification 0x0B).

    It declines two cases in which its authors saw regressions: variable lengths with one key/value head per query head
    (more K/V blocks in flight, worse L2 behaviour), and dense non-causal attention (equal tiles: stealing is overhead).
    The answer is part of the compile key: it selects another kernel, not another run-time value.

    Parameters
    ----------
    requested : bool
        Whether the user asked for it.
    causal, varlen : bool
        The mask and whether lengths vary.
    heads, heads_kv : int
        Query and key/value heads.

    Returns
    -------
    bool
        Whether it is used.

    Examples
    --------
    >>> clc_allowed(True, causal=True, varlen=False, heads=16, heads_kv=16)
    True
    >>> clc_allowed(True, causal=True, varlen=True, heads=16, heads_kv=16)
    False
    """
    check_positive(heads=heads, heads_kv=heads_kv)
    if heads % heads_kv:
        raise ValueError(f"clc: {heads} heads are no multiple of the {heads_kv} key/value heads")
    return requested and not (varlen and heads == heads_kv) and (causal or varlen)
