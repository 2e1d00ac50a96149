"""Issue, completion and visibility of a tcgen05 product are three events, and none implies the next (0x07).

The chain that makes an accumulator readable, and its columns writable again:

    mma -> commit -> (hardware completes) -> observe the mbarrier -> synchronise the other threads
        -> fence::after_thread_sync -> ld, 32 lanes per warp -> wait::ld -> reuse

`Accumulator` walks one product along it and refuses each step that comes too early. `SharedOperand` is the second
boundary: writes of ordinary threads to shared memory have to cross the proxy fence before a product reads them.
`implicit_order` says which pairs of operations need no commit between them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..violations import ContractViolation
from .events import Log
from .tmem import WARPS_PER_WARPGROUP, check_lanes, lane_band

__all__ = [
    "Accumulator",
    "EarlyReuse",
    "FenceBeforeCompletion",
    "ForeignCommit",
    "NothingInFlight",
    "Operation",
    "SharedOperand",
    "UnfencedOperand",
    "UnfinishedResult",
    "UnorderedOperations",
    "check_order",
    "implicit_order",
]


class UnfinishedResult(ContractViolation):
    """A load of an accumulator whose completion was not observed, or was observed but not fenced (0x07)."""


class FenceBeforeCompletion(ContractViolation):
    """A consumer fence before the warp knows that the product is complete: it publishes nothing (0x07)."""


class ForeignCommit(ContractViolation):
    """A commit by a thread that issued nothing: a commit covers only the operations of its own thread (0x07)."""


class NothingInFlight(ContractViolation):
    """A commit, completion or wait that has no operation to refer to (specification 0x07)."""


class EarlyReuse(ContractViolation):
    """An accumulator's columns are written again before every warp has closed its load (specification 0x07)."""


class UnfencedOperand(ContractViolation):
    """A product reads shared memory that ordinary threads wrote without a proxy fence and a barrier (0x07)."""


class UnorderedOperations(ContractViolation):
    """Two asynchronous operations that nothing orders, though one needs the other's result (0x07)."""


class _State(enum.Enum):
    FREE = enum.auto()
    ISSUED = enum.auto()
    COMMITTED = enum.auto()
    COMPLETE = enum.auto()


class Accumulator:
    """One accumulator in tensor memory, written by a matrix thread and read by the four warps of a warpgroup (0x07).

    Attributes
    ----------
    name : str
        ``"S0"``, ``"O1"``, ...
    log : Log
        What has happened.

    Parameters
    ----------
    name : str
        Used in events and messages.
    log : Log, optional
        Where to write events; a log of its own by default.

    Examples
    --------
    >>> S = Accumulator("S0")
    >>> S.issue(thread=0)
    >>> S.commit(thread=0)
    >>> S.complete()
    >>> S.observe(warp=0)
    >>> S.synchronize()  # the other warps learn it from warp 0
    >>> for warp in range(4):
    ...     S.fence(warp)
    ...     S.load(warp)
    ...     S.wait_load(warp)
    >>> S.reuse("P0")
    """

    def __init__(self, name: str, log: Log | None = None) -> None:
        self.name = name
        self.log = Log() if log is None else log
        self._state: _State
        self._free()

    def issue(self, thread: int) -> None:
        """Issue the product from one thread, which goes on; the result is not there yet."""
        if thread < 0:
            raise ValueError(f"{self.name}: thread {thread} issues; threads are counted from 0")
        if self._state is not _State.FREE:
            self.reuse("the next product")
        self._state, self._thread = _State.ISSUED, thread
        self.log.add("mma", "issue", self.name)

    def commit(self, thread: int) -> None:
        """Ask, from the same thread, for an arrival on an mbarrier once its operations are complete."""
        if self._state is not _State.ISSUED:
            raise NothingInFlight(f"commit without a product on {self.name} that it could cover")
        if thread != self._thread:
            raise ForeignCommit(f"thread {thread} commits what thread {self._thread} issued on {self.name}")
        self._state = _State.COMMITTED
        self.log.add("mma", "commit", self.name)

    def complete(self) -> None:
        """Note that the tensor core has finished and the mbarrier's phase has flipped."""
        if self._state is not _State.COMMITTED:
            raise NothingInFlight(f"nothing on {self.name} is committed that could complete")
        self._state = _State.COMPLETE
        self.log.add("tensor core", "complete", self.name)

    def observe(self, warp: int) -> None:
        """Wait on the mbarrier, as one warp, and get through."""
        lane_band(warp)
        if self._state is not _State.COMPLETE:
            raise UnfinishedResult(f"warp {warp} cannot pass the barrier of {self.name}: the phase has not flipped")
        self._observed.add(warp)
        self.log.add(f"warp {warp}", "observe", self.name)

    def synchronize(self) -> None:
        """Run a barrier of the warpgroup: if one warp has observed the completion, all know of it.

        An arrival alone is not a fence: each warp still needs its own.
        """
        if self._observed:
            self._observed.update(range(WARPS_PER_WARPGROUP))
        self.log.add("warpgroup", "synchronize", self.name)

    def fence(self, warp: int) -> None:
        """``tcgen05.fence::after_thread_sync``: what the warp has observed becomes visible to its later loads."""
        if warp not in self._observed:
            raise FenceBeforeCompletion(f"warp {warp} fences before it has observed the completion of {self.name}")
        self._fenced.add(warp)
        self.log.add(f"warp {warp}", "fence", self.name)

    def load(self, warp: int, lanes: range | None = None) -> None:
        """``tcgen05.ld`` of the warp's own 32 lanes, or of `lanes` inside them."""
        check_lanes(warp, lane_band(warp) if lanes is None else lanes)
        if warp not in self._observed:
            raise UnfinishedResult(f"warp {warp} loads {self.name} before it has observed its completion")
        if warp not in self._fenced:
            raise UnfinishedResult(f"warp {warp} loads {self.name} after the barrier, before fence::after_thread_sync")
        self._loading.add(warp)
        self.log.add(f"warp {warp}", "load", self.name)

    def wait_load(self, warp: int) -> None:
        """``tcgen05.wait::ld``: the registers hold the values, and the columns are no longer needed by this warp."""
        if warp not in self._loading:
            raise NothingInFlight(f"warp {warp} waits for a load of {self.name} that it has not issued")
        self._loading.discard(warp)
        self._loaded.add(warp)
        self.log.add(f"warp {warp}", "loaded", self.name)

    def reuse(self, writer: str) -> None:
        """Write something else to the columns: a product, or P over the tail of S."""
        if self._state is not _State.FREE:
            if self._state is not _State.COMPLETE:
                raise EarlyReuse(f"{writer} is written over {self.name} while its product is in flight")
            for warp in range(WARPS_PER_WARPGROUP):
                if warp in self._loading:
                    raise EarlyReuse(f"{writer} is written over {self.name} while warp {warp} loads it: no wait::ld")
                if warp not in self._loaded:
                    raise EarlyReuse(f"{writer} is written over {self.name} before warp {warp} has loaded it")
        self._free()
        self.log.add(writer, "overwrite", self.name)

    def _free(self) -> None:
        self._state = _State.FREE
        self._thread = -1
        self._observed: set[int] = set()
        self._fenced: set[int] = set()
        self._loading: set[int] = set()
        self._loaded: set[int] = set()


class SharedOperand:
    """Shared memory that a product reads as A or B (specification 0x07).

    A copy by TMA already belongs to the asynchronous proxy, and its mbarrier is enough. Ordinary stores have to be
    fenced by their writers (``fence.proxy.async``) and only then announced by a barrier. The completion of some
    product publishes nothing after the fact.

    Parameters
    ----------
    name : str
        Used in messages.

    Examples
    --------
    >>> operand = SharedOperand("sP")
    >>> operand.store()
    >>> operand.fence_proxy_async()
    >>> operand.barrier()
    >>> operand.read_by_mma()
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._missing = ["a writer", "a barrier"]

    def copy_by_tma(self) -> None:
        """Fill it by a bulk tensor copy, up to the wait on its mbarrier."""
        self._missing = []

    def store(self) -> None:
        """Write to it from ordinary threads."""
        self._missing = ["fence.proxy.async", "a barrier"]

    def fence_proxy_async(self) -> None:
        """Order the writers' stores before later accesses of the asynchronous proxy."""
        if self._missing[:1] == ["fence.proxy.async"]:
            self._missing = ["a barrier"]

    def barrier(self) -> None:
        """Let the writers tell the matrix thread. A barrier before the fence announces unfenced data."""
        if self._missing == ["a barrier"]:
            self._missing = []

    def read_by_mma(self) -> None:
        """Read it by a product."""
        if self._missing:
            raise UnfencedOperand(f"a product reads {self.name} without {' and '.join(self._missing)}")


@dataclass(frozen=True)
class Operation:
    """An asynchronous tcgen05 operation, as far as its order with others is concerned (specification 0x07).

    Attributes
    ----------
    name : str
        ``"mma"``, ``"cp"``, ``"shift"`` or ``"cp.4x256b"``.
    thread : int
        Who issues it.
    cta_group : int
        1 or 2.
    kind : str
        Of a product: ``"f16"``, ``"tf32"``, ``"f8f6f4"``, ``"i8"``.
    shape : tuple of int
        (M, N) of a product.
    accumulator : str
        What a product accumulates into.
    """

    name: str
    thread: int = 0
    cta_group: int = 1
    kind: str = "f16"
    shape: tuple[int, int] = (128, 128)
    accumulator: str = ""


_PIPELINED = frozenset({("cp", "mma"), ("shift", "mma"), ("shift", "cp.4x256b"), ("mma", "shift")})


def implicit_order(first: Operation, second: Operation) -> str | None:
    """Tell why two operations are *not* executed in the order in which they were issued (specification 0x07).

    Parameters
    ----------
    first, second : Operation
        Issued in this order.

    Returns
    -------
    str or None
        None if the hardware promises the order: same thread and CTA group, and one of ``cp -> mma``, ``shift -> mma``,
        ``shift -> cp.4x256b``, ``mma -> shift``, or ``mma -> mma`` with the same accumulator, shape and kind.
        Otherwise what is missing.

    Examples
    --------
    >>> S = Operation("mma", accumulator="S0")
    >>> implicit_order(S, S) is None
    True
    >>> implicit_order(S, Operation("mma", accumulator="O0"))
    'the accumulators differ: S0 and O0'
    """
    if first.thread != second.thread:
        return f"the threads differ: {first.thread} and {second.thread}"
    if first.cta_group != second.cta_group:
        return f"the CTA groups differ: {first.cta_group} and {second.cta_group}"
    if (first.name, second.name) in _PIPELINED:
        return None
    if (first.name, second.name) != ("mma", "mma"):
        return f"{first.name} followed by {second.name} is not a pipelined pair"
    for what, a, b in (
        ("accumulators", first.accumulator, second.accumulator),
        ("shapes", first.shape, second.shape),
        ("kinds", first.kind, second.kind),
    ):
        if a != b:
            return f"the {what} differ: {a} and {b}"
    return None


def check_order(first: Operation, second: Operation, *, waited: bool) -> None:
    """Refuse a dependence between two operations that nothing orders (specification 0x07).

    Parameters
    ----------
    first, second : Operation
        The second needs what the first leaves behind.
    waited : bool
        True if the first one's commit was waited for before the second was issued.

    Raises
    ------
    UnorderedOperations
        With the reason that `implicit_order` gives.

    Examples
    --------
    >>> check_order(Operation("mma", kind="f16"), Operation("mma", kind="f8f6f4"), waited=True)
    """
    reason = implicit_order(first, second)
    if reason and not waited:
        raise UnorderedOperations(f"{first.name} before {second.name} rests on issue order alone, but {reason}")
