"""The right to use tensor memory: allocation, permit, deallocation, and what a pair of CTAs owes each other (0x07).

One `Kernel` stands for all the tcgen05 instructions of one kernel in one CTA or in one pair of CTAs. It checks the
order of collective events; it moves no data and lowers no instruction.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..violations import ContractViolation
from .events import Log
from .tmem import COLUMNS, GRANULE

__all__ = [
    "AllocationGrows",
    "CtaGroupMismatch",
    "EarlyPeerExit",
    "IllegalAllocation",
    "InactivePeer",
    "Issue",
    "Kernel",
    "LeakedAllocation",
    "MissingParticipant",
    "NotAllocated",
    "OutOfColumns",
    "PeerNotQuiescent",
    "PermitClosed",
    "issue_scope",
    "legal_allocations",
]


class IllegalAllocation(ContractViolation):
    """A size that is not a power of two between 32 and 512 columns (specification 0x07)."""


class AllocationGrows(ContractViolation):
    """An allocation larger than one before it in the same kernel (specification 0x07)."""


class PermitClosed(ContractViolation):
    """An allocation after the permit was relinquished (specification 0x07)."""


class OutOfColumns(ContractViolation):
    """No free columns are left: the instruction would block, and here nobody would free any (0x07)."""


class MissingParticipant(ContractViolation):
    """A collective that lacks the warp of one CTA (specification 0x07)."""


class CtaGroupMismatch(ContractViolation):
    """A kernel mixes tcgen05 instructions of both CTA groups (specification 0x07)."""


class InactivePeer(ContractViolation):
    """An operation while a CTA of its group, such as the peer, has not started or has exited (0x07)."""


class EarlyPeerExit(ContractViolation):
    """A CTA of a pair exits while the pair may still touch its tensor memory (specification 0x07)."""


class PeerNotQuiescent(ContractViolation):
    """A deallocation while a CTA of the group still has an access in flight (specification 0x07)."""


class NotAllocated(ContractViolation):
    """An access to, or a deallocation of, columns that are not allocated (specification 0x07)."""


class LeakedAllocation(ContractViolation):
    """A kernel that ends with columns still allocated (specification 0x07)."""


@dataclass(frozen=True)
class Issue:
    """Who issues an instruction (specification 0x07).

    Attributes
    ----------
    unit : str
        ``"thread"`` or ``"warp"``.
    ctas : int
        CTAs that issue it: 1, or 2 if each of a pair does.
    collective : bool
        True if all of them have to take part before it has an effect.
    """

    unit: str
    ctas: int
    collective: bool


_ALLOCATION = frozenset({"alloc", "dealloc", "relinquish_alloc_permit"})
_ASYNCHRONOUS = frozenset({"mma", "cp", "shift", "commit"})
_ACCESS = frozenset({"ld", "st", "wait::ld", "wait::st"})


def issue_scope(operation: str, cta_group: int) -> Issue:
    """Look up who issues a tcgen05 operation. One thread that issues is not one thread that computes (0x07).

    Parameters
    ----------
    operation : str
        Mnemonic after ``tcgen05.``: ``"alloc"``, ``"mma"``, ``"ld"``, ``"wait::ld"``, ...
    cta_group : int
        1 or 2.

    Returns
    -------
    Issue
        Allocation and its relatives: a warp of each CTA, together. ``mma``, ``cp``, ``shift``, ``commit``: one thread,
        of either CTA. ``ld``, ``st`` and their waits: a warp, in each CTA that has lanes to read.

    Examples
    --------
    >>> issue_scope("mma", 2), issue_scope("alloc", 2)
    (Issue(unit='thread', ctas=1, collective=False), Issue(unit='warp', ctas=2, collective=True))
    """
    _check_group(cta_group)
    if operation in _ALLOCATION:
        return Issue("warp", cta_group, True)
    if operation in _ASYNCHRONOUS:
        return Issue("thread", 1, False)
    if operation in _ACCESS:
        return Issue("warp", cta_group, False)
    raise ValueError(f"issue_scope: tcgen05.{operation} is unknown")


def legal_allocations() -> list[int]:
    """Return the sizes that can be allocated, in columns: the powers of two from 32 to 512 (0x07).

    Examples
    --------
    >>> legal_allocations()
    [32, 64, 128, 256, 512]
    """
    return [1 << bit for bit in range(GRANULE.bit_length() - 1, COLUMNS.bit_length())]


def _check_group(cta_group: int) -> None:
    if cta_group not in (1, 2):
        raise ValueError(f"cta_group is {cta_group}; it must be 1 or 2")


class Kernel:
    """Tensor memory of one kernel, in one CTA or in a pair (specification 0x07).

    Attributes
    ----------
    cta_group : int
        Mode of every tcgen05 instruction of the kernel.
    allocations : dict of int to int
        Base column -> columns, in order of allocation. Both CTAs of a pair have the same.
    log : Log
        What has happened.

    Parameters
    ----------
    cta_group : int
        1 or 2.

    Examples
    --------
    >>> kernel = Kernel(2)
    >>> kernel.start(0), kernel.start(1)
    (None, None)
    >>> base = kernel.allocate(512, ctas={0, 1})
    >>> kernel.begin(base, cta=1)  # the pair touches CTA 1's view
    >>> kernel.relinquish(ctas={0, 1})
    >>> kernel.end(base, cta=1)
    >>> kernel.deallocate(base, ctas={0, 1})
    >>> kernel.exit(0), kernel.exit(1)
    (None, None)
    """

    def __init__(self, cta_group: int) -> None:
        _check_group(cta_group)
        self.cta_group = cta_group
        self.allocations: dict[int, int] = {}
        self.log = Log()
        self._smallest = COLUMNS
        self._permit = True
        self._running: set[int] = set()
        self._in_flight: dict[tuple[int, int], int] = {}  # (base, cta) -> accesses

    @property
    def group(self) -> frozenset[int]:
        """Ranks of the CTAs that work together."""
        return frozenset(range(self.cta_group))

    def start(self, cta: int) -> None:
        """Note that a CTA has become resident."""
        self._check_rank(cta)
        self._running.add(cta)
        self.log.add(f"cta {cta}", "start", "cta")

    def allocate(self, columns: int, ctas: Collection[int]) -> int:
        """Allocate columns in every CTA of the group.

        Parameters
        ----------
        columns : int
            Power of two, 32 to 512, at most as many as the allocation before.
        ctas : collection of int
            Ranks whose warp executes the instruction; the whole group is needed.

        Returns
        -------
        int
            Base column, the same in each view.
        """
        if columns not in legal_allocations():
            raise IllegalAllocation(f"{columns} columns; legal are the powers of two {legal_allocations()}")
        if not self._permit:
            raise PermitClosed(f"{columns} columns are asked for after relinquish_alloc_permit")
        if columns > self._smallest:
            raise AllocationGrows(f"{columns} columns after {self._smallest}; sizes may not increase in a kernel")
        self._check_collective("alloc", ctas)
        base = self._first_fit(columns)
        self._smallest = columns
        self.allocations[base] = columns
        self.log.add("pair" if self.cta_group == 2 else "cta 0", "allocate", f"{base}:{base + columns}")
        return base

    def relinquish(self, ctas: Collection[int]) -> None:
        """Give up the right to allocate. What is allocated stays, live values and all."""
        self._check_collective("relinquish_alloc_permit", ctas)
        self._permit = False
        self.log.add("pair" if self.cta_group == 2 else "cta 0", "relinquish", "permit")

    def operate(self, cta_group: int) -> None:
        """Issue any tcgen05 instruction that names a CTA group, from one thread of a CTA that runs."""
        _check_group(cta_group)
        if cta_group != self.cta_group:
            raise CtaGroupMismatch(f"cta_group::{cta_group} in a kernel that uses cta_group::{self.cta_group}")
        self._check_running("mma")
        self.log.add("mma", "issue", f"cta_group::{cta_group}")

    def begin(self, base: int, cta: int) -> None:
        """Start an access to the columns at `base` in one CTA's view: a load, a store, or part of a product."""
        self._check_rank(cta)
        if base not in self.allocations:
            raise NotAllocated(f"access to columns at {base}, which are not allocated")
        self._in_flight[base, cta] = self._in_flight.get((base, cta), 0) + 1
        self.log.add(f"cta {cta}", "begin", str(base))

    def end(self, base: int, cta: int) -> None:
        """Note that an access is complete and was waited for."""
        if not self._in_flight.get((base, cta)):
            raise NotAllocated(f"no access of CTA {cta} to columns at {base} is in flight")
        self._in_flight[base, cta] -= 1
        self.log.add(f"cta {cta}", "end", str(base))

    def deallocate(self, base: int, ctas: Collection[int]) -> None:
        """Free an allocation in every CTA of the group, once nobody touches it any more, here or at the peer."""
        if base not in self.allocations:
            raise NotAllocated(f"deallocation of columns at {base}, which are not allocated")
        self._check_collective("dealloc", ctas)
        for cta in sorted(self.group):
            if self._in_flight.get((base, cta)):
                raise PeerNotQuiescent(f"deallocation at {base} while CTA {cta} has a live access")
        del self.allocations[base]
        self.log.add("pair" if self.cta_group == 2 else "cta 0", "deallocate", str(base))

    def exit(self, cta: int) -> None:
        """End a CTA. Nothing may be allocated, and no operation of the pair may still reach it."""
        self._check_rank(cta)
        live = [rank for (_, rank), count in self._in_flight.items() if count]
        if live and self.cta_group == 2:
            raise EarlyPeerExit(f"CTA {cta} exits while an access to the memory of CTA {live[0]} is in flight")
        if self.allocations:
            sizes = ", ".join(f"{columns} columns at {base}" for base, columns in self.allocations.items())
            raise LeakedAllocation(f"CTA {cta} exits with {sizes} still allocated")
        self._running.discard(cta)
        self.log.add(f"cta {cta}", "exit", "cta")

    def _first_fit(self, columns: int) -> int:
        """Find the lowest free base that is a multiple of the size."""
        for base in range(0, COLUMNS, columns):
            if all(base + columns <= b or b + n <= base for b, n in self.allocations.items()):
                return base
        raise OutOfColumns(f"{columns} columns; {COLUMNS - sum(self.allocations.values())} of {COLUMNS} are free")

    def _check_rank(self, cta: int) -> None:
        if cta not in self.group:
            raise ValueError(f"CTA rank {cta} is not in a group of {self.cta_group}")

    def _check_running(self, operation: str) -> None:
        for cta in sorted(self.group - self._running):
            raise InactivePeer(f"{operation} of cta_group::{self.cta_group} while CTA {cta} is not active")

    def _check_collective(self, operation: str, ctas: Collection[int]) -> None:
        for cta in ctas:
            self._check_rank(cta)
        self._check_running(operation)
        missing = sorted(self.group - set(ctas))
        if missing:
            raise MissingParticipant(f"{operation} of cta_group::{self.cta_group} lacks the warp of CTA {missing[0]}")
