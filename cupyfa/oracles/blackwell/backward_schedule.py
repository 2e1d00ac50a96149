"""The backward loop of FlashAttention-4: equal offsets in tensor memory are a lifetime schedule (specification 0x0A).

A trace lists steps with what each reads and writes. Lives in tensor memory are read off the trace, first write to last
read, and two objects in the same columns must not live together. The trace also shows that all five products happen,
that P and dS never leave the tile, and that no step runs before what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..violations import ContractViolation
from .backward_ledger import CONTRACTIONS, check_contractions
from .backward_map import BackwardMap
from .lifetimes import Live, audit

__all__ = [
    "Step",
    "check",
    "lives",
    "trace_1cta",
    "trace_2cta",
    "trace_serial",
    "BrokenDependency",
    "GlobalMaterialization",
]

# Accumulators that the loop over query tiles sums into; the epilogue reads them once.
_SUMS = ("dV", "dK")
_TILE_LOCAL = ("S", "P", "dP", "dS")


class BrokenDependency(ContractViolation):
    """A step reads what no earlier step wrote (specification 0x0A)."""


class GlobalMaterialization(ContractViolation):
    """A score-sized matrix went to global memory: right gradients, but no FlashAttention any more (0x0A)."""


@dataclass(frozen=True)
class Step:
    """One step of the loop (specification 0x0A).

    Attributes
    ----------
    agent : str
        Role: ``"mma"``, ``"compute"``, ``"reduction"``, ``"relay"``.
    action : str
        What it makes.
    tile : int
        Query tile.
    reads, writes : tuple of str
        Objects. ``"dS.smem"`` is the copy of dS in shared memory; a name that ends in ``".global"`` is global memory.
    """

    agent: str
    action: str
    tile: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]


_STEPS = {
    "S": ("mma", ("Q", "K"), ("S",)),
    "P": ("compute", ("S",), ("P",)),
    "dP": ("mma", ("dO", "V"), ("dP",)),
    "dV": ("mma", ("P", "dO"), ("dV",)),
    "dS": ("compute", ("dP",), ("dS", "dS.smem")),
    "exchange": ("relay", ("dS.smem",), ("dS.full",)),
    "dK": ("mma", ("dS", "Q"), ("dK",)),
    "dQ": ("mma", ("dS.full", "K"), ("dQ",)),
    "reduce": ("reduction", ("dQ",), ("dQ.global",)),
    "epilogue": ("compute", ("dV", "dK"), ("dV.global", "dK.global")),
}


def step(action: str, tile: int, *, pair: bool = False) -> Step:
    """Return a step of the loop by what it makes (specification 0x0A).

    Parameters
    ----------
    action : str
        ``S``, ``P``, ``dP``, ``dV``, ``dS``, ``exchange``, ``dK``, ``dQ``, ``reduce`` or ``epilogue``.
    tile : int
        Query tile.
    pair : bool, optional
        A lone CTA reads its own dS for dQ; a pair reads what the exchange completed.

    Returns
    -------
    Step
        The step.
    """
    if action not in _STEPS or tile < 0:
        raise ContractViolation(f"backward loop: no step is {action!r} of tile {tile}; known are {', '.join(_STEPS)}")
    agent, reads, writes = _STEPS[action]
    if not pair:
        reads = tuple("dS.smem" if name == "dS.full" else name for name in reads)
    return Step(agent, action, tile, reads, writes)


def _trace(order: Sequence[tuple[str, int]], tiles: int, pair: bool) -> list[Step]:
    if tiles < 0:
        raise ContractViolation(f"backward loop: tiles must not be negative, not {tiles}")
    return [step(action, tile, pair=pair) for action, tile in order if 0 <= tile < tiles]


def trace_1cta(tiles: int) -> list[Step]:
    """Return the loop of one CTA: next S before dK and dQ of the tile at hand, then dP and dV of the next (0x0A).

    Parameters
    ----------
    tiles : int
        Query tiles.

    Returns
    -------
    list of Step
        Prologue, loop and tail. dQ takes the columns of dP and dS, so the next dP waits until dQ has been read.

    Examples
    --------
    >>> " ".join(f"{s.action}{s.tile}" for s in trace_1cta(2) if s.agent == "mma")
    'S0 dP0 dV0 S1 dK0 dQ0 dP1 dV1 dK1 dQ1'
    """
    order = [("S", 0), ("P", 0), ("dP", 0), ("dV", 0), ("dS", 0)]
    for j in range(tiles):
        order += [("S", j + 1), ("dK", j), ("dQ", j), ("P", j + 1), ("reduce", j)]
        order += [("dP", j + 1), ("dV", j + 1), ("dS", j + 1)]
    return _trace([*order, ("epilogue", tiles - 1)], tiles, pair=False)


def trace_2cta(tiles: int) -> list[Step]:
    """Return the loop of a pair: dQ of the previous tile runs between dP and dV of the current one (0x0A).

    Parameters
    ----------
    tiles : int
        Query tiles.

    Returns
    -------
    list of Step
        Prologue, loop and tail.

    Examples
    --------
    >>> " ".join(f"{s.action}{s.tile}" for s in trace_2cta(2) if s.agent == "mma")
    'S0 dP0 dV0 S1 dK0 dP1 dQ0 dV1 dK1 dQ1'
    """
    order = [("S", 0), ("P", 0), ("dP", 0), ("dV", 0), ("dS", 0), ("exchange", 0)]
    for j in range(tiles):
        order += [("S", j + 1), ("P", j + 1), ("dK", j), ("dP", j + 1), ("dQ", j), ("dV", j + 1)]
        order += [("dS", j + 1), ("exchange", j + 1), ("reduce", j)]
    return _trace([*order, ("epilogue", tiles - 1)], tiles, pair=True)


def trace_serial(tiles: int, *, pair: bool = False) -> list[Step]:
    """Return the loop without overlap between tiles: S, dP, dK, dV, dQ of one before the next (0x0A).

    Parameters
    ----------
    tiles : int
        Query tiles.
    pair : bool, optional
        With the exchange of a pair.

    Returns
    -------
    list of Step
        The loop.
    """
    actions = ("S", "P", "dP", "dS", "exchange", "dK", "dV", "dQ", "reduce")
    order = [(action, j) for j in range(tiles) for action in actions if pair or action != "exchange"]
    return _trace([*order, ("epilogue", tiles - 1)], tiles, pair)


def lives(trace: Sequence[Step], layout: BackwardMap) -> list[Live]:
    """Read the lives of all objects in tensor memory off a trace (specification 0x0A).

    Parameters
    ----------
    trace : sequence of Step
        The loop.
    layout : BackwardMap
        Where the objects are.

    Returns
    -------
    list of Live
        Per object and tile from its first write to its last read; sums (dV, dK) once, to the epilogue.
    """
    span: dict[tuple[str, int], tuple[int, int]] = {}
    for time, s in enumerate(trace):
        for name in (*s.writes, *s.reads):
            if name in layout.regions:
                key = (name, -1 if name in _SUMS else s.tile)
                begin, _ = span.get(key, (time, time))
                span[key] = (begin, time)
    return [Live(layout.regions[name], begin, end, tile) for (name, tile), (begin, end) in span.items() if end > begin]


def check(trace: Sequence[Step], layout: BackwardMap) -> None:
    """Check a trace against a map (specification 0x0A).

    Parameters
    ----------
    trace : sequence of Step
        The loop.
    layout : BackwardMap
        Where the objects are.

    Raises
    ------
    MissingContraction
        If a tile lacks one of the five products.
    GlobalMaterialization
        If S, P, dP or dS is written to global memory.
    BrokenDependency
        If a step reads what has not been written for its tile.
    LiveAlias
        If two objects live in the same columns at once.

    Examples
    --------
    >>> from cupyfa.oracles.blackwell.backward_map import map_1cta, map_2cta
    >>> check(trace_1cta(4), map_1cta())
    >>> check(trace_2cta(4), map_2cta())
    """
    products = {contraction.name for contraction in CONTRACTIONS}
    inputs = {"Q", "K", "V", "dO"}
    written: set[tuple[str, int]] = set()
    made: dict[int, list[str]] = {}
    for s in trace:
        for name in s.reads:
            if name not in inputs and (name, s.tile) not in written:
                raise BrokenDependency(f"{s.action} of tile {s.tile} reads {name}, which is not there yet")
        for name in s.writes:
            if name.endswith(".global") and name.split(".")[0] in _TILE_LOCAL:
                raise GlobalMaterialization(f"{s.action} of tile {s.tile} writes {name}")
        written.update((name, s.tile) for name in s.writes)
        made.setdefault(s.tile, []).extend(name for name in (s.action,) if name in products)
    for names in made.values():
        check_contractions(tuple(names))
    audit(lives(trace, layout))
