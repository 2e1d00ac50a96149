"""Overlap of products and softmax inside one warpgroup (specification 0x05; arXiv 2407.08608, algorithm 2).

``QK(j) -> softmax(j) -> PV(j)`` is a chain, but QK(j) needs nothing of PV(j-1): issued first and waited for by age, its
softmax runs under PV(j-1). `schedule` writes that loop as a list of acts, `check` runs it against the rules of
`wgmma_queue` and of the recurrence, `timeline` gives it a duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cupyfa.oracles.hopper.machine import Event, require_cycles
from cupyfa.oracles.hopper.wgmma_queue import (
    AccumulatorInFlight,
    OperandInFlight,
    ReleaseBeforeCompletion,
    WgmmaQueue,
)
from cupyfa.oracles.violations import ContractViolation

__all__ = [
    "Act",
    "FrameMismatch",
    "MissingProduct",
    "check",
    "earliest_wait",
    "schedule",
    "serial_units",
    "timeline",
    "two_stage_units",
]


class MissingProduct(ContractViolation):
    """A step uses a value that has not been computed, or not been used up yet (specification 0x05)."""


class FrameMismatch(ContractViolation):
    """O and P meet in different frames of the running maximum (specification 0x05)."""


_KINDS = frozenset(
    ("issue_qk", "issue_pv", "wait", "release_k", "release_v", "softmax", "rescale_o", "convert_p", "store_o")
)


@dataclass(frozen=True)
class Act:
    """A step of a schedule (specification 0x05).

    Attributes
    ----------
    kind : str
        ``issue_qk``, ``issue_pv``, ``wait`` (``tile`` is then the number of pending groups), ``release_k``,
        ``release_v``, ``softmax``, ``rescale_o``, ``convert_p`` or ``store_o``.
    tile : int
        The key block's ordinal.
    """

    kind: str
    tile: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS or self.tile < 0:
            raise ValueError(f"two-stage schedule: no act is {self.kind!r} of tile {self.tile}")

    def __str__(self) -> str:
        return f"{self.kind}({self.tile})"


def schedule(blocks: int, *, overlap: bool = True, rescale_first: bool = False) -> list[Act]:
    """Write one consumer's loop (specification 0x05).

    Parameters
    ----------
    blocks : int
        ``J >= 1``.
    overlap : bool, optional
        Two stages: the next scores are issued before the products of the block before. Otherwise one after the other.
    rescale_first : bool, optional
        Rescale O between the issue of QK and that of PV, in the shadow of QK, rather than after the last wait.

    Returns
    -------
    list of Act
        In program order.

    Examples
    --------
    >>> [str(act) for act in schedule(2)][4:10]  # the steady pair of tile 1
    ['convert_p(0)', 'issue_qk(1)', 'issue_pv(0)', 'wait(1)', 'release_k(1)', 'softmax(1)']
    """
    if blocks < 1:
        raise ValueError(f"two-stage schedule: {blocks} blocks; there is at least one")
    acts = [Act("issue_qk", 0), Act("wait", 0), Act("release_k", 0), Act("softmax", 0), Act("convert_p", 0)]
    for j in range(1, blocks):
        first = [Act("rescale_o", j - 1)] if rescale_first and j > 1 else []
        last = [] if rescale_first else [Act("rescale_o", j)]
        qk, pv = Act("issue_qk", j), Act("issue_pv", j - 1)
        if overlap:
            acts += [qk, *first, pv, Act("wait", 1), Act("release_k", j), Act("softmax", j), Act("wait", 0)]
            acts += [Act("release_v", j - 1)]
        else:
            acts += [*first, pv, Act("wait", 0), Act("release_v", j - 1), qk, Act("wait", 0), Act("release_k", j)]
            acts += [Act("softmax", j)]
        acts += [*last, Act("convert_p", j)]
    if rescale_first and blocks > 1:
        acts.append(Act("rescale_o", blocks - 1))
    return [
        *acts,
        Act("issue_pv", blocks - 1),
        Act("wait", 0),
        Act("release_v", blocks - 1),
        Act("store_o", blocks - 1),
    ]


class _Landed:
    """A tile that is always there: `check` looks at one warpgroup, the rings have their own oracle."""

    def require_readable(self, agent: str) -> None:
        """Accept."""


@dataclass
class _State:
    """Which values exist while a schedule runs."""

    queue: WgmmaQueue = field(default_factory=WgmmaQueue)
    k: dict[int, _Landed] = field(default_factory=dict)
    v: dict[int, _Landed] = field(default_factory=dict)
    scores: int = -1  # tile whose scores S holds
    softened: bool = True  # they have become exponentials
    converted: bool = True  # and P
    probabilities: int = -1  # tile whose P is in the operand registers
    frame: int = -1  # tile whose maximum O refers to; -1: O is still empty
    accumulated: int = -1


def check(acts: Sequence[Act]) -> None:
    """Run a schedule against the rules of asynchronous products and of the recurrence (specification 0x05).

    Parameters
    ----------
    acts : sequence of Act
        As `schedule` writes it, or a mutation.

    Raises
    ------
    AccumulatorInFlight, OperandInFlight, ReleaseBeforeCompletion
        A wait is missing or covers the wrong group.
    MissingProduct
        The order of the steps breaks ``QK -> softmax -> P -> PV``.
    FrameMismatch
        O was not brought into the frame of the P that it is to take.

    Examples
    --------
    >>> check(schedule(5))
    >>> late = schedule(2)
    >>> late[7] = Act("wait", 2)
    >>> check(late)
    Traceback (most recent call last):
    cupyfa.oracles.hopper.wgmma_queue.ReleaseBeforeCompletion: consumer gives back a tile that QK(1) reads
    """
    state = _State()
    for act in acts:
        getattr(_Rules, act.kind)(state, act.tile)
    blocks = 1 + max((act.tile for act in acts if act.kind == "issue_qk"), default=-1)
    if state.accumulated != blocks - 1:
        raise MissingProduct(f"O holds the products up to {state.accumulated} of {blocks} blocks")


class _Rules:
    """What each act needs and does."""

    @staticmethod
    def issue_qk(s: _State, j: int) -> None:
        """Issue S = Q K' of a block; the scores before it must have become P."""
        if not s.converted:
            raise MissingProduct(f"QK({j}) overwrites the scores of {s.scores} before P was formed from them")
        s.queue.fence()
        s.k[j] = _Landed()
        s.queue.issue("S", None, [s.k[j]])
        s.queue.commit(f"QK({j})")
        s.scores, s.softened, s.converted = j, False, False

    @staticmethod
    def issue_pv(s: _State, j: int) -> None:
        """Issue O += P V; P and O must be in one frame."""
        if s.probabilities != j:
            raise MissingProduct(f"PV({j}) finds the probabilities of {s.probabilities}")
        if s.frame not in (-1, j):
            raise FrameMismatch(f"PV({j}) adds P of frame {j} to O of frame {s.frame}")
        s.queue.fence()
        s.v[j] = _Landed()
        s.queue.issue("O", "P", [s.v[j]])
        s.queue.commit(f"PV({j})")
        s.frame, s.accumulated = j, j

    @staticmethod
    def wait(s: _State, pending: int) -> None:
        """Wait until at most `pending` groups are unproven."""
        s.queue.wait(pending)

    @staticmethod
    def softmax(s: _State, j: int) -> None:
        """Update the row state and exponentiate the scores of a block, once."""
        s.queue.access("S")
        if s.scores != j or s.softened:
            raise MissingProduct(f"softmax({j}) finds the scores of {s.scores}")
        s.softened = True

    @staticmethod
    def convert_p(s: _State, j: int) -> None:
        """Form P from the exponentiated scores."""
        s.queue.access("P")
        if s.scores != j or not s.softened:
            raise MissingProduct(f"P({j}) is formed before softmax({j})")
        s.converted, s.probabilities = True, j

    @staticmethod
    def rescale_o(s: _State, j: int) -> None:
        """Bring O into the frame of a maximum that is known."""
        s.queue.access("O")
        if s.scores < j or (s.scores == j and not s.softened):
            raise MissingProduct(f"O is rescaled to the maximum of {j}, which is not known")
        s.frame = j

    @staticmethod
    def release_k(s: _State, j: int) -> None:
        """Give back a slot of K."""
        if j not in s.k:
            raise MissingProduct(f"K of {j} is given back before its product was issued")
        s.queue.release(s.k[j])

    @staticmethod
    def release_v(s: _State, j: int) -> None:
        """Give back a slot of V."""
        if j not in s.v:
            raise MissingProduct(f"V of {j} is given back before its product was issued")
        s.queue.release(s.v[j])

    @staticmethod
    def store_o(s: _State, j: int) -> None:
        """Read O, which must hold all products."""
        s.queue.access("O")
        if s.accumulated != j:
            raise MissingProduct(f"O is stored with the products up to {s.accumulated} only")


def earliest_wait(kind: str) -> int:
    """Find the wait of a steady pair after which an act first is legal (specification 0x05).

    It moves the act through the pair and lets `check` decide.

    Parameters
    ----------
    kind : str
        ``softmax`` (reads S_j), ``release_k``, ``rescale_o``, ``convert_p`` (overwrites P) or ``release_v``.

    Returns
    -------
    int
        1 or 0, for ``wait_group 1`` or ``wait_group 0``.

    Examples
    --------
    >>> earliest_wait("softmax"), earliest_wait("convert_p")
    (1, 0)
    """
    if kind not in ("softmax", "release_k", "rescale_o", "convert_p", "release_v"):
        raise ValueError(f"two-stage schedule: no wait makes {kind} legal")
    pair = [Act("issue_qk", 1), Act("issue_pv", 0), Act("wait", 1), Act("wait", 0)]
    tile = 0 if kind == "release_v" else 1
    for place in range(2, 5):
        state = _State()
        try:
            for act in [*schedule(2)[:5], *pair[:place], Act(kind, tile)]:
                getattr(_Rules, act.kind)(state, act.tile)
                if act == pair[0]:  # what follows softmax acts as if it had run: here only the waits matter
                    state.softened = kind != "softmax"
        except (AccumulatorInFlight, OperandInFlight, ReleaseBeforeCompletion):
            continue
        break
    return pair[place - 1].tile


def timeline(acts: Sequence[Act], qk: float, softmax: float, pv: float) -> tuple[float, list[Event]]:
    """Time a schedule on one tensor core and one scalar path (specification 0x05).

    Products run in order of issue; the scalar path stops at a wait until the groups that it covers are complete.

    Parameters
    ----------
    acts : sequence of Act
        The schedule.
    qk, softmax, pv : float
        ``M_Q``, ``E`` and ``M_V`` in any unit. Everything else takes no time.

    Returns
    -------
    tuple of float and list of Event
        The end, and the events of ``"tensor"`` and ``"scalar"``.

    Examples
    --------
    >>> timeline(schedule(5), 1, 1, 1)[0], timeline(schedule(5, overlap=False), 1, 1, 1)[0]
    (11, 15)
    """
    require_cycles("two-stage schedule", qk=qk, softmax=softmax, pv=pv)
    now: float = 0
    ends: list[float] = []
    events: list[Event] = []
    for act in acts:
        if act.kind in ("issue_qk", "issue_pv"):
            start, length = max([now, *ends[-1:]]), qk if act.kind == "issue_qk" else pv
            ends.append(start + length)
            events.append(Event(start, "tensor", act.kind[-2:].upper(), ordinal=act.tile, duration=length))
        elif act.kind == "wait":
            now = max([now, *ends[: max(0, len(ends) - act.tile)][-1:]])
        elif act.kind == "softmax":
            events.append(Event(now, "scalar", "softmax", ordinal=act.tile, duration=softmax))
            now += softmax
    return max([now, *ends[-1:]]), events


def serial_units(blocks: int, qk: float, softmax: float, pv: float) -> float:
    """Return the time without overlap: ``J (M_Q + E + M_V)`` (specification 0x05).

    Parameters
    ----------
    blocks : int
        ``J``.
    qk, softmax, pv : float
        ``M_Q``, ``E``, ``M_V``.

    Returns
    -------
    float
        In the unit of the arguments.

    Examples
    --------
    >>> serial_units(5, 1, 1, 1)
    15
    """
    if blocks < 0:
        raise ValueError(f"two-stage schedule: {blocks} blocks; the number must not be negative")
    require_cycles("two-stage schedule", qk=qk, softmax=softmax, pv=pv)
    return blocks * (qk + softmax + pv)


def two_stage_units(blocks: int, qk: float, softmax: float, pv: float) -> float:
    """Return the bound of the two-stage loop: ``M_Q + E + (J - 1)(M_Q + max(E, M_V)) + M_V`` (0x05).

    Softmax of a block needs its QK, so a steady pair takes QK and then the longer of softmax and PV.

    Parameters
    ----------
    blocks : int
        ``J >= 1``.
    qk, softmax, pv : float
        ``M_Q``, ``E``, ``M_V``.

    Returns
    -------
    float
        In the unit of the arguments.

    Examples
    --------
    >>> two_stage_units(5, 1, 1, 1)
    11
    """
    if blocks < 1:
        raise ValueError(f"two-stage schedule: {blocks} blocks; there is at least one")
    require_cycles("two-stage schedule", qk=qk, softmax=softmax, pv=pv)
    return qk + softmax + (blocks - 1) * (qk + max(softmax, pv)) + pv
