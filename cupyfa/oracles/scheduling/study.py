"""Orders compared on random batches: what scheduling gains, and why it gains less on long sequences (0x0B).

A first-free schedule exceeds the average load by at most one longest tile. For causal attention in tiles of ``M`` rows
on ``P`` workers that tile is ``2 P / (B H ceil(S / M))`` of the average load: what any order can gain shrinks with the
number of tiles. In a fixed batch it shrinks as ``1 / S``; in a fixed number of tokens ``B S`` it does not depend on
``S`` at all. Overheads per tile and traffic (`cache`) come on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .costs import TileCost, check_positive
from .makespan import Schedule, grid_stride_schedule, list_schedule, makespan_lower_bound
from .orders import WorkTile, longest_first_order, order_costs
from .varlen import VarlenProblem

__all__ = ["ASSIGNMENTS", "DISTRIBUTIONS", "ORDERS", "Comparison", "compare", "random_lengths", "tail_share"]

#: Length distributions by name: (generator, mean, number of sequences) -> positive floats with about that mean.
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, float, int], npt.NDArray[np.float64]]] = {
    "constant": lambda rng, mean, count: np.full(count, float(mean)),
    "uniform": lambda rng, mean, count: rng.uniform(0.25 * mean, 1.75 * mean, count),
    "lognormal": lambda rng, mean, count: mean * rng.lognormal(-0.5 * 0.8**2, 0.8, count),
    "bimodal": lambda rng, mean, count: np.where(rng.random(count) < 0.2, 4.2 * mean, 0.2 * mean),
}

#: Orders by name, from the plain one to the longest tile first over everything.
ORDERS: dict[str, Callable[[VarlenProblem], list[WorkTile]]] = {
    "lexical": lambda p: p.order(reverse_blocks=False),
    "reversed": lambda p: p.order(),
    "sectioned": lambda p: p.order(section=p.heads),
    "sorted batches": lambda p: p.order(section=p.heads, batches=p.virtual_to_actual()),
    "global longest first": lambda p: longest_first_order(p.order(reverse_blocks=False), p.key_blocks()),
}

#: Assignments by name.
ASSIGNMENTS: dict[str, Callable[[npt.NDArray[np.float64], int], Schedule]] = {
    "first free": lambda costs, workers: list_schedule(costs, None, workers),
    "grid stride": lambda costs, workers: grid_stride_schedule(costs, None, workers),
    "alternating stride": lambda costs, workers: grid_stride_schedule(costs, None, workers, alternate=True),
}


def random_lengths(distribution: str, mean: float, count: int, seed: int) -> tuple[int, ...]:
    """Draw the lengths of a batch (0x0B).

    Parameters
    ----------
    distribution : str
        A name in `DISTRIBUTIONS`.
    mean : float
        Expected tokens per sequence.
    count : int
        Sequences.
    seed : int
        Of the generator.

    Returns
    -------
    tuple of int
        At least 1 each.

    Raises
    ------
    ValueError
        If there is no such distribution, or the seed is negative.

    Examples
    --------
    >>> random_lengths("constant", 1024, 3, seed=0)
    (1024, 1024, 1024)
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"scheduling: no distribution {distribution!r}; there are {', '.join(DISTRIBUTIONS)}")
    check_positive(mean=mean, count=count)
    if seed < 0:
        raise ValueError(f"scheduling: seed is {seed}; it must not be negative")
    drawn = DISTRIBUTIONS[distribution](np.random.default_rng(seed), mean, count)
    return tuple(max(1, round(float(length))) for length in drawn)


def tail_share(seqlen: int, batch: int, heads: int, workers: int, tile: int = 128) -> float:
    """Return one longest causal tile as a share of the average load: ``P max(w) / sum(w)`` (0x0B).

    With ``T = ceil(S / M)`` query tiles of cost ``1 .. T`` it is ``2 P / (B H (T + 1))``. No order can gain more than
    ``(1 - 1 / P)`` of it over another, see `makespan.list_makespan_bound`.

    Parameters
    ----------
    seqlen, batch, heads : int
        ``S``, ``B`` and ``H``.
    workers : int
        ``P``.
    tile : int, optional
        ``M = N``.

    Returns
    -------
    float
        A ratio of times.

    Examples
    --------
    >>> [round(tail_share(seqlen, 4, 16, 132), 3) for seqlen in (1024, 8192)]  # a fixed batch
    [0.458, 0.063]
    """
    check_positive(seqlen=seqlen, batch=batch, heads=heads, workers=workers, tile=tile)
    return 2 * workers / (batch * heads * (-(-seqlen // tile) + 1))


@dataclass(frozen=True)
class Comparison:
    """Orders of one problem under one assignment (0x0B).

    Attributes
    ----------
    lower_bound : float
        See `makespan.makespan_lower_bound`.
    makespans : dict
        Makespan by name of the order.
    """

    lower_bound: float
    makespans: dict[str, float]

    def efficiency(self, order: str) -> float:
        """Return the lower bound over a makespan: 1 cannot be improved.

        Parameters
        ----------
        order : str
            A name in `ORDERS`.

        Returns
        -------
        float
            At most 1; NaN without tiles.

        Raises
        ------
        ValueError
            If there is no such order.
        """
        ends = self._makespan(order)
        return self.lower_bound / ends if ends else float("nan")

    def gain(self, order: str, baseline: str = "lexical") -> float:
        """Return by how much an order raises the speed over a baseline.

        Parameters
        ----------
        order, baseline : str
            Names in `ORDERS`.

        Returns
        -------
        float
            ``t_baseline / t_order - 1``; 0.05 is 5 % more FLOP/s. NaN without tiles.

        Raises
        ------
        ValueError
            If there is no such order.
        """
        before, after = self._makespan(baseline), self._makespan(order)
        return before / after - 1 if after else float("nan")

    def _makespan(self, order: str) -> float:
        if order not in self.makespans:
            raise ValueError(f"scheduling: no order {order!r}; there are {', '.join(self.makespans)}")
        return self.makespans[order]


def compare(
    problem: VarlenProblem, workers: int, cost: TileCost | None = None, assignment: str = "first free"
) -> Comparison:
    """Run all orders of a problem (0x0B).

    Parameters
    ----------
    problem : VarlenProblem
        The tiles.
    workers : int
        ``P``.
    cost : TileCost, optional
        Cost of a tile; one key block of overhead per tile by default.
    assignment : str, optional
        A name in `ASSIGNMENTS`.

    Returns
    -------
    Comparison
        Makespans in units of the cost.

    Raises
    ------
    ValueError
        If there is no such assignment.

    Examples
    --------
    >>> result = compare(VarlenProblem((768,)), 3, TileCost())
    >>> result.lower_bound, result.makespans["lexical"], result.makespans["reversed"]
    (7.0, 9.0, 7.0)
    """
    if assignment not in ASSIGNMENTS:
        raise ValueError(f"scheduling: no assignment {assignment!r}; there are {', '.join(ASSIGNMENTS)}")
    cost = TileCost(fixed=1.0) if cost is None else cost
    costs = [cost.of(blocks) for blocks in problem.key_blocks()]
    runs = {name: order_costs(order(problem), costs) for name, order in ORDERS.items()}
    return Comparison(
        makespan_lower_bound(next(iter(runs.values())), workers),
        {name: ASSIGNMENTS[assignment](w, workers).makespan for name, w in runs.items()},
    )
