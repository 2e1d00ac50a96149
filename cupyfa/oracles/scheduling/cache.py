"""Keys and values in L2 while a schedule runs: the other half of why an order is good or bad (specification 0x0B).

A least-recently-used cache of key/value blocks, read by all workers in the order of time. It has no bandwidth and no
latency: it counts which reads leave L2. The `makespan` and these misses pull an order in two directions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .costs import Costs, check_costs, check_positive
from .makespan import Schedule, TileSetViolation
from .orders import WorkTile, order_costs

__all__ = ["CacheTraffic", "key_value_traffic"]


@dataclass(frozen=True)
class CacheTraffic:
    """What the tiles of a schedule read (0x0B).

    Attributes
    ----------
    reads : int
        Key/value blocks that tiles read.
    misses : int
        Reads that had to leave L2.
    compulsory : int
        Different blocks: no order has fewer misses.
    heads_in_flight : int
        The most key/value heads that were in work at one moment.
    """

    reads: int
    misses: int
    compulsory: int
    heads_in_flight: int

    @property
    def refetches(self) -> float:
        """How often the average block comes from memory; 1 is the best."""
        return self.misses / self.compulsory if self.compulsory else float("nan")


def key_value_traffic(
    schedule: Schedule,
    order: Sequence[WorkTile],
    blocks: Sequence[Costs],
    capacity: int,
    group: int = 1,
) -> CacheTraffic:
    """Count the reads of key/value blocks that miss in a least-recently-used L2 (0x0B).

    A tile of ``J`` key blocks reads them from the last to the first, evenly over its time: block ``J - 1 - r`` at
    ``start + r (finish - start) / J``. Reads of all workers are merged by time; equals by the order of the tiles.

    Parameters
    ----------
    schedule : Schedule
        Of tiles ``0, 1, ...``, which are those of `order`.
    order : sequence of WorkTile
        Coordinates of tile 0, 1, ...
    blocks : sequence of array_like of int
        For each batch the key blocks by query block; a sequence of one serves all batches.
    capacity : int
        Key/value blocks that L2 holds: ``C_L2 / (N (d_qk + d_v) b)``.
    group : int, optional
        Query heads per key/value head.

    Returns
    -------
    CacheTraffic
        The counts.

    Raises
    ------
    TileSetViolation
        If the schedule has other tiles than the order.
    ValueError
        If a tile has no number of key blocks, or it is no whole number.

    Examples
    --------
    >>> from .makespan import list_schedule
    >>> order = [WorkTile(0, 0, 1), WorkTile(0, 0, 0)]
    >>> key_value_traffic(list_schedule([2, 1], None, 1), order, [[1, 2]], capacity=2)
    CacheTraffic(reads=3, misses=2, compulsory=2, heads_in_flight=1)
    """
    check_positive(capacity=capacity, group=group)
    if len(schedule.placements) != len(order):
        raise TileSetViolation(f"scheduling: {len(schedule.placements)} placements for {len(order)} tiles")
    if sorted(place.tile for place in schedule.placements) != list(range(len(order))):
        raise TileSetViolation(f"scheduling: the schedule must place each of the {len(order)} tiles exactly once")
    counts = check_costs(order_costs(order, blocks))
    if (counts % 1 != 0).any():
        raise ValueError("scheduling: the key blocks of a tile must be a whole number")
    times, keys = [], []
    for place in schedule.placements:
        tile = order[place.tile]
        steps = int(counts[place.tile])
        times.append(place.start + np.arange(steps) * (place.finish - place.start) / max(1, steps))
        keys += [(tile.batch, tile.head // group, j) for j in range(steps - 1, -1, -1)]
    merged = np.argsort(np.concatenate([np.zeros(0), *times]), kind="stable")
    cache: OrderedDict[tuple[int, int, int], None] = OrderedDict()
    misses = 0
    for read in merged.tolist():
        key = keys[read]
        if key in cache:
            cache.move_to_end(key)
            continue
        misses += 1
        cache[key] = None
        if len(cache) > capacity:
            cache.popitem(last=False)
    return CacheTraffic(len(keys), misses, len(set(keys)), _heads_in_flight(schedule, order, group))


def _heads_in_flight(schedule: Schedule, order: Sequence[WorkTile], group: int) -> int:
    """Return the largest number of key/value heads in work at once; ends count before starts."""
    events = []
    for place in schedule.placements:
        head = (order[place.tile].batch, order[place.tile].head // group)
        events += [(place.start, 1, head), (place.finish, -1, head)]
    active: dict[tuple[int, int], int] = {}
    most = 0
    for _, change, head in sorted(events, key=lambda e: (e[0], e[1])):
        active[head] = active.get(head, 0) + change
        if not active[head]:
            del active[head]
        most = max(most, len(active))
    return most
