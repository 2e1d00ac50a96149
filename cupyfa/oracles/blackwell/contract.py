"""What a forward trace has to respect, edge by edge, and what it computes (specification 0x08).

`EDGES` lists which event must come before which, and the error that names each broken edge. `check` finds the broken
one; `execute` runs a trace on real matrices, without looking at the edges, so that a broken one shows as wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..violations import ContractViolation
from .schedule import TILES, Event, early_columns, tensor_order

__all__ = [
    "EDGES",
    "Edge",
    "check",
    "execute",
    "EarlyOverwrite",
    "IncompleteSchedule",
    "OverlappedExponentials",
    "ProbabilitiesBeforeScores",
    "ProductBeforeFinalP",
    "ProductBeforeP",
    "ProductBeforeRescale",
    "RescaleBeforeProduct",
    "WrongTensorOrder",
]

Array = npt.NDArray[np.float64]


class ProbabilitiesBeforeScores(ContractViolation):
    """Softmax read S before its product was complete (specification 0x08)."""


class ProductBeforeP(ContractViolation):
    """P V was issued before the early columns of P were stored (specification 0x08)."""


class ProductBeforeFinalP(ContractViolation):
    """P V completed before the last columns of P were stored (specification 0x08)."""


class ProductBeforeRescale(ContractViolation):
    """P V was issued while O was still in the frame of the old row maximum (specification 0x08)."""


class RescaleBeforeProduct(ContractViolation):
    """O was rescaled before the product that belongs to the old frame had arrived in it (0x08)."""


class EarlyOverwrite(ContractViolation):
    """The next scores overwrote columns whose P was still being read (specification 0x08)."""


class OverlappedExponentials(ContractViolation):
    """Both softmax warpgroups used the exponential unit at once (specification 0x08)."""


class IncompleteSchedule(ContractViolation):
    """An event is missing or happens twice: startup or drain was forgotten (specification 0x08)."""


class WrongTensorOrder(ContractViolation):
    """The MMA warp issued products in another order than startup, steady state, drain (specification 0x08)."""


@dataclass(frozen=True)
class Edge:
    """``before`` of block ``j - behind`` must precede ``after`` of block ``j`` of the same query tile (0x08).

    Attributes
    ----------
    before, after : str
        Actions of `schedule.Event`.
    error : type
        What a violation is called.
    handoff : str
        The pipeline object of `roles.HANDOFFS` that carries the edge; empty where order within one role does.
    behind : int
        Blocks between the two.
    """

    before: str
    after: str
    error: type[ContractViolation]
    handoff: str
    behind: int = 0


#: The dependencies of the forward loop. That P's early part is ready, that all of it is, and that its columns may be
#: overwritten are three different events.
EDGES = (
    Edge("qk_issue", "s_ready", ProbabilitiesBeforeScores, ""),
    Edge("s_ready", "exp_begin", ProbabilitiesBeforeScores, "s_p_o"),
    Edge("exp_begin", "p_early", ProbabilitiesBeforeScores, ""),
    Edge("p_early", "p_final", ProductBeforeFinalP, ""),
    Edge("s_ready", "rescaled", RescaleBeforeProduct, "sm_stats"),
    Edge("pv_done", "rescaled", RescaleBeforeProduct, "s_p_o", behind=1),
    Edge("p_early", "pv_issue", ProductBeforeP, "s_p_o"),
    Edge("rescaled", "pv_issue", ProductBeforeRescale, "s_p_o"),
    Edge("pv_issue", "pv_done", ProductBeforeP, ""),
    Edge("p_final", "pv_done", ProductBeforeFinalP, "p_lastsplit"),
    Edge("pv_done", "qk_issue", EarlyOverwrite, "", behind=1),
)

_ACTIONS = {edge.before for edge in EDGES} | {edge.after for edge in EDGES}


def check(trace: Sequence[Event], blocks: int, q_stage: int = 2) -> None:
    """Check a trace of the forward loop; only the order of its events counts, not their times (0x08).

    Parameters
    ----------
    trace : sequence of Event
        The events, in order.
    blocks : int
        Key blocks.
    q_stage : int, optional
        Query tiles.

    Raises
    ------
    ContractViolation
        The subclass that names the broken contract.

    Examples
    --------
    >>> from cupyfa.oracles.blackwell.schedule import Durations, simulate
    >>> check(simulate(3, Durations(qk=512, pv=512, exp=1024)).events, blocks=3)
    """
    if blocks < 0 or q_stage not in (1, 2):
        raise ContractViolation(f"forward trace: blocks {blocks} must not be negative, q_stage {q_stage} be 1 or 2")
    position: dict[tuple[str, str, int], int] = {}
    for ordinal, event in enumerate(trace):
        key = (event.action, event.tile, event.block)
        if key in position:
            raise IncompleteSchedule(f"{event.action} of {event.tile}_{event.block} happens twice")
        position[key] = ordinal
    tiles = TILES[:q_stage]
    expected = {(action, tile, j) for action in _ACTIONS for tile in tiles for j in range(blocks)}
    if expected != position.keys():
        action, tile, j = min(expected ^ position.keys())
        word = "missing" if (action, tile, j) in expected else "not expected"
        raise IncompleteSchedule(f"{action} of {tile}_{j} is {word}")
    for edge in EDGES:
        for tile in tiles:
            for j in range(edge.behind, blocks):
                before, after = position[edge.before, tile, j - edge.behind], position[edge.after, tile, j]
                if before > after:
                    raise edge.error(
                        f"{edge.after} of {tile}_{j} comes before {edge.before} of {tile}_{j - edge.behind}"
                    )
    _check_exponentials(trace)
    _check_tensor_order(trace, blocks, q_stage)


def _check_exponentials(trace: Iterable[Event]) -> None:
    """Only one tile may be between ``exp_begin`` and ``p_final`` at a time."""
    inside: Event | None = None
    for event in trace:
        if event.action == "exp_begin":
            if inside is not None:
                raise OverlappedExponentials(
                    f"{event.tile}_{event.block} enters while {inside.tile}_{inside.block} uses the unit"
                )
            inside = event
        elif event.action == "p_final":
            inside = None


def _check_tensor_order(trace: Iterable[Event], blocks: int, q_stage: int) -> None:
    product = {"qk_issue": "QK", "pv_issue": "PV"}
    issued = [f"{product[e.action]}_{e.tile}_{e.block}" for e in trace if e.action in product]
    for got, wanted in zip(issued, tensor_order(blocks, q_stage), strict=True):
        if got != str(wanted):
            raise WrongTensorOrder(f"{got} was issued where {wanted} is due ({wanted.phase})")


def execute(trace: Iterable[Event], Q: Sequence[Array], K: Sequence[Array], V: Sequence[Array]) -> list[Array]:
    """Compute attention by letting every event of a trace do its work, in the trace's order (0x08).

    ``pv_issue`` reads the early columns of P, ``pv_done`` the others. S and P of a query tile share one array, as they
    share columns of tensor memory: the next scores overwrite P, read or not. Illegal traces are not refused; they
    compute something else.

    Parameters
    ----------
    trace : iterable of Event
        The events.
    Q : sequence of numpy.ndarray
        One ``(m, d)`` per query tile, scaled already.
    K, V : sequence of numpy.ndarray
        One ``(n, d)`` per key block.

    Returns
    -------
    list of numpy.ndarray
        O of each query tile, ``(m, d)``.
    """
    _check_operands(Q, K, V)
    index = {tile: n for n, tile in enumerate(TILES[: len(Q)])}
    rows, width = len(Q[0]), len(K[0])
    early = early_columns(width)
    slot = [np.full((rows, width), np.nan) for _ in Q]  # S, then P
    m, l = ([np.full((rows, 1), start) for _ in Q] for start in (-np.inf, 0.0))
    shrink = [np.ones((rows, 1)) for _ in Q]
    P = [np.empty((rows, width)) for _ in Q]
    O = [np.zeros((rows, V[0].shape[1])) for _ in Q]
    for event in trace:
        if event.tile not in index or not 0 <= event.block < len(K):
            raise ContractViolation(f"forward trace: {event.action} of {event.tile}_{event.block} has no operands")
        q, j = index[event.tile], event.block
        if event.action == "qk_issue":
            slot[q][:] = Q[q] @ K[j].T
        elif event.action == "s_ready":
            new = np.maximum(m[q], slot[q].max(axis=1, keepdims=True))
            shrink[q], m[q] = np.exp(m[q] - new), new
        elif event.action == "exp_begin":
            P[q] = np.exp(slot[q] - m[q])
            l[q] = l[q] * shrink[q] + P[q].sum(axis=1, keepdims=True)
        elif event.action == "p_early":
            slot[q][:, :early] = P[q][:, :early]
        elif event.action == "p_final":
            slot[q][:, early:] = P[q][:, early:]
        elif event.action == "rescaled":
            O[q] *= shrink[q]
        elif event.action == "pv_issue":
            O[q] += slot[q][:, :early] @ V[j][:early]
        elif event.action == "pv_done":
            O[q] += slot[q][:, early:] @ V[j][early:]
    return [numerator / total for numerator, total in zip(O, l, strict=True)]


def _check_operands(Q: Sequence[Array], K: Sequence[Array], V: Sequence[Array]) -> None:
    """Query tiles, and blocks of K and V, each of one shape and fitting each other."""
    shapes = [[x.shape for x in part] for part in (Q, K, V)]
    counts = 1 <= len(Q) <= len(TILES) and 1 <= len(K) == len(V)
    if not counts or any(len(set(part)) != 1 or len(part[0]) != 2 for part in shapes):
        raise ContractViolation(f"forward trace: Q, K and V must be matrices of one shape each, not {shapes}")
    (q,), (k,), (v,) = (set(part) for part in shapes)
    if q[1] != k[1] or k[0] != v[0]:
        raise ContractViolation(f"forward trace: Q {q}, K {k} and V {v} must be (m, d), (n, d) and (n, d_v)")
