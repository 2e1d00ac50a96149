"""In which order the tiles of a causal problem are computed, and how evenly they then end (specification 0x0B).

The host model of ``cuda/tile_scheduler.cuh``. Heads are taken in sections; within a section the longest tiles come
first. CTAs that draw their tiles end together by themselves. Those that are dealt them take them in rounds, in every
other round in reverse, and whether they end together depends on how the sections fall into the rounds: an unlucky
section size costs up to two fifths of the speed (measured), so it is chosen by this model.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupyfa.problem import Problem
from cupyfa.select import Device

__all__ = ["balance", "heads_per_section", "tile_costs", "tile_order"]

_TILE_OVERHEAD = 1.0  # of prologue and epilogue, in key blocks
_MAX_MODELLED_TILES = 2**15  # beyond, there are so many rounds that they even out by themselves


def tile_costs(problem: Problem, tile_m: int, tile_n: int) -> npt.NDArray[np.float64]:
    """Return the cost of each query tile of a head.

    Parameters
    ----------
    problem : Problem
        Its mask decides how many key blocks a tile walks over.
    tile_m, tile_n : int
        Tile of the kernel.

    Returns
    -------
    numpy.ndarray
        Key blocks, the tile's overhead included, by tile index.
    """
    shift = problem.seqlen_k - problem.seqlen_q
    rows_end = np.minimum(np.arange(1, -(-problem.seqlen_q // tile_m) + 1) * tile_m, problem.seqlen_q)
    visible = np.full_like(rows_end, problem.seqlen_k) if problem.right is None else rows_end + shift + problem.right
    blocks = -(-np.clip(visible, 0, problem.seqlen_k) // tile_n)
    return np.asarray(blocks + _TILE_OVERHEAD, dtype=np.float64)


def tile_order(costs: npt.NDArray[np.float64], heads: int, section: int) -> npt.NDArray[np.float64]:
    """Return the costs of all tiles in the order of the causal tile scheduler.

    Parameters
    ----------
    costs : numpy.ndarray
        By tile index, of one head.
    heads, section : int
        All heads, and heads of a section.

    Returns
    -------
    numpy.ndarray
        ``heads * len(costs)`` costs.
    """
    longest_first = costs[::-1]
    full, rest = divmod(heads, section)
    return np.concatenate([np.tile(np.repeat(longest_first, section), full), np.repeat(longest_first, rest)])


def balance(order: npt.NDArray[np.float64], workers: int) -> float:
    """Return how evenly persistent CTAs share tiles: the mean of their times over the longest.

    Parameters
    ----------
    order : numpy.ndarray
        Costs in the order of the scheduler.
    workers : int
        CTAs.

    Returns
    -------
    float
        1 when all end together.

    Examples
    --------
    >>> import numpy as np
    >>> balance(np.array([4.0, 3.0, 2.0, 1.0]), 2)  # 4 + 1 and 3 + 2
    1.0
    """
    rounds = np.zeros((-(-len(order) // workers), workers))
    rounds.reshape(-1)[: len(order)] = order
    rounds[1::2] = rounds[1::2, ::-1].copy()
    times = rounds.sum(axis=0)
    return float(times.mean() / times.max())


def heads_per_section(problem: Problem, traits: dict[str, int], device: Device) -> int:
    """Return how many query heads are processed together.

    Parameters
    ----------
    problem : Problem
        Not empty.
    traits : dict
        Of the kernel.
    device : Device
        The GPU.

    Returns
    -------
    int
        Sections of nearly equal size, about as many heads as have keys and values in half of L2. But so many that the
        CTAs of a head have about a quarter of its tiles under way, or that they are four: they walk close behind each
        other then, and a head's keys are read from memory once. At least a head for 16 CTAs (measured:
        docs/notes/hopper_forward.md). Tiles that are dealt out take the most even choice from twice to half of that.
    """
    heads = problem.batch * problem.heads_q
    if not problem.causal or problem.left is not None:
        return 1  # tiles are equally long, all or nearly: the tiles of a head are neighbours
    group = problem.heads_q // problem.heads_kv
    bytes_kv = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.q.dtype.itemsize
    tiles_m = -(-problem.seqlen_q // traits["tile_m"])
    quarter = 4 * device.multiprocessors // tiles_m
    spread = min(device.multiprocessors // 4, max(device.multiprocessors // 16, quarter))
    wanted = max(device.l2_bytes // 2 // bytes_kv * group, spread, 1)
    section = -(-heads // max(1, round(heads / wanted)))
    section = -(-section // group) * group  # whole groups of query heads, so that their key/value head is read once
    if traits["dynamic"] or not traits["persistent"] or heads * tiles_m > _MAX_MODELLED_TILES:
        return section
    costs = tile_costs(problem, traits["tile_m"], traits["tile_n"])
    sections = [s for s in range(section // 2 + 1, min(heads, 2 * section) + 1) if s % group == 0]
    sections.sort(key=lambda s: abs(s - section))
    sections = sections[:: -(-len(sections) // 64)]
    return max(sections, key=lambda s: round(balance(tile_order(costs, heads, s), device.multiprocessors), 2))
