"""Unequal tiles on equal workers: who computes a tile when, and when the last one ends (specification 0x0B).

A launch ends with its most loaded worker. This module has the two ways in which a tile finds its worker (whoever
is free first, or a fixed stride through the tile list) and the bounds between which the longest load, the makespan,
lies. What a tile costs is in `costs`; which tile comes first is decided in `orders`. Orders and
assignments are independent choices (FlashAttention-4, arXiv 2603.05451, section 3.3).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..violations import ContractViolation
from .costs import Costs, check_costs, check_positive

__all__ = [
    "Placement",
    "Schedule",
    "TileSetViolation",
    "grid_stride_schedule",
    "list_makespan_bound",
    "list_schedule",
    "makespan_lower_bound",
    "physical_grid",
]


class TileSetViolation(ContractViolation):
    """An order does not name every tile exactly once (0x0B)."""


# --- Bounds ---


def makespan_lower_bound(costs: Costs, workers: int) -> float:
    """Return ``max(sum(w) / P, max(w))``, below which no assignment can end (specification 0x0B).

    Parameters
    ----------
    costs : array_like of float
        ``w``, one per tile.
    workers : int
        ``P`` equal workers.

    Returns
    -------
    float
        In the unit of the costs; 0 without tiles.

    Examples
    --------
    >>> makespan_lower_bound([1, 2, 3, 4, 5, 6], 3)
    7.0
    """
    w = _check_costs(costs, workers)
    return max(float(w.sum()) / workers, float(w.max())) if w.size else 0.0


def list_makespan_bound(costs: Costs, workers: int) -> float:
    """Return ``sum(w) / P + (1 - 1 / P) max(w)``, which no first-free schedule exceeds, in whatever order.

    The worker that ends last was the least loaded one when it took its last tile, so its load was at most the average
    of the other tiles (R. L. Graham, 1969). Divided by ``sum(w) / P`` it says what any order can gain: the share of one
    longest tile in a worker's load. That share falls as the tiles become more; it explains why scheduling matters less
    for a long sequence in a fixed batch (specification 0x0B).

    Parameters
    ----------
    costs : array_like of float
        ``w``, one per tile.
    workers : int
        ``P`` equal workers.

    Returns
    -------
    float
        In the unit of the costs.

    Examples
    --------
    >>> list_makespan_bound([1, 2, 3, 4, 5, 6], 3)
    11.0
    """
    w = _check_costs(costs, workers)
    return float(w.sum()) / workers + (1 - 1 / workers) * float(w.max()) if w.size else 0.0


# --- Assignments ---


class Placement(NamedTuple):
    """One tile on one worker: the event from which a Gantt chart is drawn (0x0B)."""

    tile: int
    worker: int
    start: float
    finish: float


@dataclass(frozen=True)
class Schedule:
    """All placements of a launch, in the order in which the tiles were handed out (0x0B).

    Attributes
    ----------
    placements : tuple of Placement
        One per tile.
    workers : int
        ``P``; some of them may have had nothing to do.

    Raises
    ------
    ValueError
        If there is no worker, or a placement names one that does not exist.
    """

    placements: tuple[Placement, ...]
    workers: int

    def __post_init__(self) -> None:
        check_positive(workers=self.workers)
        for p in self.placements:
            if not 0 <= p.worker < self.workers:
                raise ValueError(f"scheduling: tile {p.tile} is placed on worker {p.worker} of {self.workers}")

    @property
    def loads(self) -> npt.NDArray[np.float64]:
        """Time at which each worker ends, float64 of shape ``(workers,)``."""
        loads = np.zeros(self.workers)
        for p in self.placements:
            loads[p.worker] = max(loads[p.worker], p.finish)
        return loads

    @property
    def makespan(self) -> float:
        """``C_max``: time at which the last worker ends."""
        return float(self.loads.max())

    @property
    def balance(self) -> float:
        """Mean of the loads over the longest: 1 when all workers end together, NaN without tiles."""
        return float(self.loads.mean() / self.makespan) if self.makespan else float("nan")


def _check_costs(costs: Costs, workers: int) -> npt.NDArray[np.float64]:
    check_positive(workers=workers)
    w = check_costs(costs)
    if w.ndim != 1:
        raise ValueError(f"scheduling: costs have the shape {w.shape}; they must be a vector")
    return w


def _check_order(order: Iterable[int] | None, tiles: int) -> list[int]:
    visits = list(range(tiles)) if order is None else list(order)
    if sorted(visits) != list(range(tiles)):
        raise TileSetViolation(f"scheduling: the order must name each of the {tiles} tiles exactly once")
    return [int(tile) for tile in visits]


def list_schedule(costs: Costs, order: Iterable[int] | None, workers: int) -> Schedule:
    """Give each tile, in order, to the worker that is free first; among equals, to the lowest.

    This is what a plain grid does (a multiprocessor takes the next CTA when one ends), what an atomic tile counter
    does, and what hardware-assisted work distribution does with its own order (specification 0x0B).

    Parameters
    ----------
    costs : array_like of float
        ``w`` by tile number.
    order : iterable of int or None
        Tile numbers in the order in which they are handed out; None is 0, 1, 2, ...
    workers : int
        ``P`` equal workers.

    Returns
    -------
    Schedule
        One placement per tile, in `order`.

    Raises
    ------
    TileSetViolation
        If the order leaves out or repeats a tile.
    ValueError
        If a cost is negative or there is no worker.

    Examples
    --------
    >>> costs = [1, 2, 3, 4, 5, 6]
    >>> list_schedule(costs, range(6), 3).loads, list_schedule(costs, reversed(range(6)), 3).loads
    (array([5., 7., 9.]), array([7., 7., 7.]))
    """
    w = _check_costs(costs, workers).tolist()
    free = [(0.0, worker) for worker in range(workers)]  # a heap: ties go to the lowest worker
    placements = []
    for tile in _check_order(order, len(w)):
        start, worker = free[0]
        placements.append(Placement(tile, worker, start, start + w[tile]))
        heapq.heapreplace(free, (start + w[tile], worker))
    return Schedule(tuple(placements), workers)


def physical_grid(tiles: int, multiprocessors: int, cluster: int = 1) -> int:
    """Return the CTAs of a persistent launch: one per multiprocessor, in whole clusters, at most one per tile (0x0B).

    Parameters
    ----------
    tiles : int
        Logical tiles; each cluster works on ``cluster`` of them.
    multiprocessors : int
        Of the device.
    cluster : int, optional
        CTAs per cluster.

    Returns
    -------
    int
        CTAs.

    Examples
    --------
    >>> physical_grid(4096, 132), physical_grid(100, 132), physical_grid(4096, 147, cluster=2)
    (132, 100, 146)
    """
    check_positive(tiles=tiles, multiprocessors=multiprocessors, cluster=cluster)
    if multiprocessors < cluster:
        raise ValueError(f"scheduling: a cluster of {cluster} does not fit {multiprocessors} multiprocessors")
    return min(-(-tiles // cluster), multiprocessors // cluster) * cluster


def grid_stride_schedule(costs: Costs, order: Iterable[int] | None, workers: int, alternate: bool = False) -> Schedule:
    """Let resident worker ``p`` take every ``P``-th tile of the order: ``next = current + P`` (specification 0x0B).

    The assignment follows from the geometry alone. Persistence is no balance: one residue class of the order may hold
    all the long tiles.

    Parameters
    ----------
    costs : array_like of float
        ``w`` by tile number.
    order : iterable of int or None
        Tile numbers by linear work index; None is 0, 1, 2, ...
    workers : int
        ``P``, the physical grid.
    alternate : bool, optional
        In every other round the workers take their tiles in reverse, as this library's kernels do for causal problems:
        index ``r P + p`` in even rounds and ``r P + P - 1 - p`` in odd ones.

    Returns
    -------
    Schedule
        One placement per tile, in `order`.

    Raises
    ------
    TileSetViolation
        If the order leaves out or repeats a tile.

    Examples
    --------
    >>> costs = [1, 2, 3, 4, 5, 6]
    >>> grid_stride_schedule(costs, None, 3).loads, grid_stride_schedule(costs, None, 3, alternate=True).loads
    (array([5., 7., 9.]), array([7., 7., 7.]))
    """
    w = _check_costs(costs, workers).tolist()
    clock = [0.0] * workers
    placements = []
    for index, tile in enumerate(_check_order(order, len(w))):
        turn, worker = divmod(index, workers)
        if alternate and turn % 2:
            worker = workers - 1 - worker
        placements.append(Placement(tile, worker, clock[worker], clock[worker] + w[tile]))
        clock[worker] += w[tile]
    return Schedule(tuple(placements), workers)
