"""What a warpgroup may assume about its asynchronous products (specification 0x02 and 0x05; PTX ISA, "wgmma").

Groups have no names: they complete in order of age, and a wait proves all but the newest few. Until a wait covers a
group, its accumulator, its register operands and its shared tiles belong to the tensor cores. Fences are different:
`fence` orders registers, `proxy_fence` orders shared memory, and neither completes anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from cupyfa.oracles.violations import ContractViolation

__all__ = [
    "AccumulatorInFlight",
    "Group",
    "MissingFence",
    "OperandInFlight",
    "ReleaseBeforeCompletion",
    "StaleSharedOperand",
    "WgmmaQueue",
]


class AccumulatorInFlight(ContractViolation):
    """An accumulator is read or written before a wait covers the group that writes it (specification 0x02)."""


class OperandInFlight(ContractViolation):
    """A register operand is overwritten before a wait covers the group that reads it (specification 0x02)."""


class ReleaseBeforeCompletion(ContractViolation):
    """A shared tile is given back before a wait covers the group that reads it (specification 0x02)."""


class MissingFence(ContractViolation):
    """Registers touched by ordinary code go into a product without ``wgmma.fence`` (specification 0x02)."""


class StaleSharedOperand(ContractViolation):
    """A shared operand written by ordinary stores goes into a product without the async-proxy fence (0x02)."""


class Tile(Protocol):
    """A shared-memory operand that knows whether it may be read (specification 0x02)."""

    def require_readable(self, agent: str) -> None:
        """Raise unless the agent proved that it has landed."""


@dataclass(eq=False)
class Group:
    """A committed group of products (specification 0x02).

    Attributes
    ----------
    name : str
        For events; the hardware knows no names.
    accumulators, operands : frozenset of str
        Registers that it writes, and that it reads as matrix A.
    tiles : tuple
        Shared tiles that it reads.
    proven : bool
        A wait has covered it.
    complete : bool
        It has really finished, whether or not anybody knows.
    """

    name: str
    accumulators: frozenset[str]
    operands: frozenset[str]
    tiles: tuple[object, ...]
    proven: bool = False
    complete: bool = False


class WgmmaQueue:
    """The asynchronous products of one warpgroup (specification 0x02).

    Parameters
    ----------
    agent : str
        The warpgroup.

    Examples
    --------
    >>> queue = WgmmaQueue("consumer 0")
    >>> for product, accumulator in (("QK", "S"), ("PV", "O")):
    ...     queue.fence()
    ...     queue.issue(accumulator)
    ...     _ = queue.commit(product)
    >>> [group.name for group in queue.wait(1)]  # the older group: what it computes does not matter
    ['QK']
    >>> queue.access("S")
    >>> queue.access("O")
    Traceback (most recent call last):
    cupyfa.oracles.hopper.wgmma_queue.AccumulatorInFlight: consumer 0 touches O, which PV writes
    """

    def __init__(self, agent: str = "consumer") -> None:
        self.agent = agent
        self.groups: list[Group] = []
        self._unfenced: set[str] = set()  # touched by ordinary code since the last wgmma.fence
        self._hidden: set[str] = set()  # shared operands written through the generic proxy
        self._accumulators: set[str] = set()
        self._operands: set[str] = set()
        self._tiles: list[object] = []

    def fence(self) -> None:
        """``wgmma.fence``: earlier register accesses come before later products. It completes nothing."""
        self._unfenced.clear()

    def proxy_fence(self) -> None:
        """``fence.proxy.async``: earlier ordinary stores to shared memory are seen by the async proxy."""
        self._hidden.clear()

    def store_shared(self, operand: str) -> None:
        """Write a shared operand with ordinary stores."""
        self._check_free(operand)
        self._hidden.add(operand)

    def issue(self, accumulator: str, operand: str | None = None, tiles: Iterable[Tile] = ()) -> None:
        """Issue a product that adds to `accumulator`; matrix A is `operand` if it is not one of the tiles."""
        registers = {accumulator} | ({operand} if operand is not None else set())
        if registers & self._unfenced:
            raise MissingFence(f"{self.agent} issues with {sorted(registers & self._unfenced)} and no wgmma.fence")
        if operand in self._hidden:
            raise StaleSharedOperand(f"{self.agent} issues with {operand} and no async-proxy fence")
        for tile in tiles:
            tile.require_readable(self.agent)
            self._tiles.append(tile)
        self._accumulators.add(accumulator)
        if operand is not None:
            self._operands.add(operand)

    def commit(self, name: str) -> Group:
        """Close the group of all products since the last commit."""
        group = Group(name, frozenset(self._accumulators), frozenset(self._operands), tuple(self._tiles))
        self._accumulators, self._operands, self._tiles = set(), set(), []
        self.groups.append(group)
        return group

    def covered(self, pending: int) -> list[Group]:
        """Return the groups that ``wait_group pending`` proves: all but the newest `pending`."""
        if pending < 0:
            raise ValueError(f"wgmma: wait_group {pending}")
        return self.groups[: max(0, len(self.groups) - pending)]

    def wait(self, pending: int) -> list[Group]:
        """``wgmma.wait_group``: return the groups that it proves anew."""
        new = [group for group in self.covered(pending) if not group.proven]
        for group in new:
            group.proven = group.complete = True
        return new

    def access(self, register: str) -> None:
        """Touch an accumulator or a register operand with ordinary code."""
        self._check_free(register)
        self._unfenced.add(register)

    def release(self, tile: object) -> None:
        """Check that a shared tile may be given back."""
        for group in self._unproven():
            if tile in group.tiles:
                raise ReleaseBeforeCompletion(f"{self.agent} gives back a tile that {group.name} reads")

    def _check_free(self, register: str) -> None:
        if register in self._accumulators | self._operands:
            raise AccumulatorInFlight(f"{self.agent} touches {register} in an uncommitted product")
        for group in self._unproven():
            if register in group.accumulators:
                raise AccumulatorInFlight(f"{self.agent} touches {register}, which {group.name} writes")
            if register in group.operands:
                raise OperandInFlight(f"{self.agent} overwrites {register}, which {group.name} reads")

    def _unproven(self) -> list[Group]:
        return [group for group in self.groups if not group.proven]
