"""Why the forward order must not decide the turns of a deterministic dQ: two objectives meet (specification 0x0B).

In a causal backward pass the CTA of key block ``n`` walks over the query blocks ``m = n, n + 1, ...`` and adds into
each ``dQ_m`` in a fixed turn. Block 0 has the longest walk, so longest first (LPT) starts it first. If the turns
follow, block ``n`` finds ``n`` others before it at its very first step, and everybody queues behind block 0. Shortest
first (SPT) gives the first turn of row ``m`` to block ``m``, which arrives there at its first step. The semaphores, the
bridge over missing writers and the turns of grouped heads are in `reductions` (0x0A); here only their cost to a
schedule is counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..reductions import Deadlock, dense_lock, spt_lock
from .costs import check_positive

__all__ = ["TurnDeadlock", "TurnTrace", "causal_turns"]


class TurnDeadlock(Deadlock):
    """Every resident CTA waits for the turn of a CTA that cannot start before one of them ends (0x0B)."""


@dataclass(frozen=True)
class TurnTrace:
    """What happened in a causal backward pass with dQ turns (0x0B).

    Attributes
    ----------
    start, finish : numpy.ndarray
        float64 by key block, in steps of one query block.
    stalled : numpy.ndarray
        float64 by key block: steps for which the CTA was resident and waited for its turn.
    writers : tuple of tuple of int
        For each query block the key blocks that added to it, in order.
    """

    start: npt.NDArray[np.float64]
    finish: npt.NDArray[np.float64]
    stalled: npt.NDArray[np.float64]
    writers: tuple[tuple[int, ...], ...]

    @property
    def makespan(self) -> float:
        """Step at which the last CTA ends."""
        return float(self.finish.max())


def causal_turns(blocks: int, start_order: Sequence[int], workers: int, descending_turns: bool) -> TurnTrace:
    """Run the CTAs of one causal head whose dQ additions take turns (0x0B).

    CTA ``n`` does ``blocks - n`` steps of time 1, at ``m = n .. blocks - 1``; its step at ``m`` ends when its work is
    done and all earlier turns of row ``m`` are over. Descending turns are ``m, m - 1, ..., 0`` (shortest first),
    ascending ones ``0, 1, ..., m`` (the order in which longest first starts them).

    Parameters
    ----------
    blocks : int
        Key blocks, and query blocks.
    start_order : sequence of int
        Key blocks in the order in which workers take them.
    workers : int
        Resident CTAs at a time; a worker keeps its CTA until it ends.
    descending_turns : bool
        Whether the highest key block of a row adds first.

    Returns
    -------
    TurnTrace
        Times and the order of the additions.

    Raises
    ------
    TurnDeadlock
        If a resident CTA waits for one that never starts.
    ValueError
        If the order is no permutation of the blocks.

    Examples
    --------
    >>> causal_turns(4, [3, 2, 1, 0], 4, descending_turns=True).stalled
    array([0., 0., 0., 0.])
    >>> causal_turns(4, [0, 1, 2, 3], 4, descending_turns=False).stalled
    array([0., 1., 2., 3.])
    """
    check_positive(blocks=blocks, workers=workers)
    if sorted(start_order) != list(range(blocks)):
        raise ValueError(f"scheduling: the start order must name each of {blocks} key blocks once")
    start, finish = np.zeros(blocks), np.full(blocks, np.nan)
    clock, position = np.zeros(blocks), np.arange(blocks)  # of resident CTAs: time, and the next query block
    turn_end = np.zeros(blocks)  # when the last addition to each row ended
    writers: list[list[int]] = [[] for _ in range(blocks)]
    free = [0.0] * min(workers, blocks)
    waiting, resident = list(start_order), set[int]()
    while waiting or resident:
        while waiting and free:
            n = waiting.pop(0)
            start[n] = clock[n] = heapq.heappop(free)
            resident.add(n)
        ready = [n for n in resident if _has_turn(n, int(position[n]), writers, descending_turns)]
        if not ready:
            raise TurnDeadlock(f"scheduling: CTAs {sorted(resident)} wait for turns of CTAs that have not started")
        # Any of them: all CTAs add to the last row, so they end in the order of its turns whoever steps first here.
        n = ready[0]
        m = int(position[n])
        clock[n] = turn_end[m] = max(clock[n] + 1, turn_end[m])
        writers[m].append(n)
        position[n] += 1
        if position[n] == blocks:
            finish[n] = clock[n]
            resident.remove(n)
            heapq.heappush(free, float(clock[n]))
    stalled = finish - start - (blocks - np.arange(blocks))
    return TurnTrace(start, finish, stalled, tuple(map(tuple, writers)))


def _has_turn(n: int, m: int, writers: Sequence[Sequence[int]], descending_turns: bool) -> bool:
    """Tell whether all earlier turns of row `m`, which sees the key blocks up to `m`, are over."""
    return len(writers[m]) == (spt_lock(n, m + 1) if descending_turns else dense_lock(n))
