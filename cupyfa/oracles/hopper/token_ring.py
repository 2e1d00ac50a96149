"""Pingpong: a named-barrier token that orders who issues to the tensor cores (specification 0x04).

The token carries the right to issue, and nothing else: no row state, no proof that K or V has arrived. Each consumer
warpgroup waits on a barrier of its own, which takes 128 threads that wait and 128 of the predecessor that hand over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cupyfa.oracles.hopper.barriers import NamedBarrier
from cupyfa.oracles.hopper.machine import Machine, Program, require_cycles
from cupyfa.oracles.violations import ContractViolation

__all__ = [
    "TokenNotConserved",
    "TokenRing",
    "Turn",
    "WARPGROUP",
    "barrier_id",
    "exponential_share",
    "flow_shop_cycles",
    "flow_shop_limit",
    "handoffs",
    "participants",
    "predecessor",
    "rank",
    "serial_quanta_cycles",
    "successor",
    "uses_scheduler_barrier",
]

#: Threads of a warpgroup.
WARPGROUP = 128


class TokenNotConserved(ContractViolation):
    """Credits pending on barriers plus warpgroups that own the token are not exactly one (0x04)."""


def exponential_share(work_ratio: float, rate_ratio: float) -> float:
    """Return ``T_exp / T_mma`` from the ratios of work and of throughput (specification 0x04).

    Parameters
    ----------
    work_ratio : float
        Operations of the products per exponential.
    rate_ratio : float
        Throughput of the tensor cores over that of the exponential unit.

    Returns
    -------
    float
        ``(1 / work_ratio) * rate_ratio``.

    Examples
    --------
    >>> exponential_share(512, 256)
    0.5
    """
    if rate_ratio <= 0 or work_ratio <= 0:
        raise ValueError(f"pingpong: rate_ratio {rate_ratio} and work_ratio {work_ratio}; both are positive")
    return rate_ratio / work_ratio


def serial_quanta_cycles(quanta: int, products: float, softmax: float) -> float:
    """Return the time of quanta that never overlap: ``N (M + E)`` (specification 0x04).

    Parameters
    ----------
    quanta : int
        ``N``, bundles of products with their softmax.
    products, softmax : float
        ``M`` and ``E``, cycles of one bundle and of its softmax.

    Returns
    -------
    float
        Cycles.

    Examples
    --------
    >>> serial_quanta_cycles(2, 1.0, 0.5)
    3.0
    """
    if quanta < 0:
        raise ValueError(f"pingpong: {quanta} quanta; the number must not be negative")
    require_cycles("pingpong", products=products, softmax=softmax)
    return quanta * (products + softmax)


def flow_shop_cycles(quanta: int, products: float, softmax: float) -> float:
    """Return the time when one softmax runs under the next products: ``M + E + (N - 1) max(M, E)`` (0x04).

    Two engines, the tensor cores and the exponential units, each work on one quantum at a time.

    Parameters
    ----------
    quanta : int
        ``N >= 1``.
    products, softmax : float
        ``M`` and ``E``.

    Returns
    -------
    float
        Cycles.

    Examples
    --------
    >>> serial_quanta_cycles(2, 1.0, 0.5) / flow_shop_cycles(2, 1.0, 0.5)
    1.2
    """
    if quanta < 1:
        raise ValueError(f"pingpong: {quanta} quanta; there is at least one")
    require_cycles("pingpong", products=products, softmax=softmax)
    return products + softmax + (quanta - 1) * max(products, softmax)


def flow_shop_limit(products: float, softmax: float) -> float:
    """Return the speed-up of a long stream: ``(M + E) / max(M, E)``, at most 2 (specification 0x04).

    Parameters
    ----------
    products, softmax : float
        ``M`` and ``E``.

    Returns
    -------
    float
        The limit.

    Examples
    --------
    >>> flow_shop_limit(1.0, 0.5), flow_shop_limit(0.5, 0.5)  # 16-bit; FP8 halves the products
    (1.5, 2.0)
    """
    require_cycles("pingpong", products=products, softmax=softmax)
    if products == softmax == 0:
        raise ValueError("pingpong: products and softmax are both 0; a ratio needs one that is positive")
    return (products + softmax) / max(products, softmax)


def uses_scheduler_barrier(consumers: int, overlap: bool, tile_hdim: int) -> bool:
    """Tell whether the reference implementation switches pingpong on (specification 0x04).

    Parameters
    ----------
    consumers : int
        ``G``, consumer warpgroups: 1, 2 or 3.
    overlap : bool
        Overlap within a warpgroup (specification 0x05).
    tile_hdim : int
        Head dimension of the tile.

    Returns
    -------
    bool
        With overlap: two or three warpgroups and at most 128; without: exactly two.

    Examples
    --------
    >>> uses_scheduler_barrier(3, True, 128), uses_scheduler_barrier(3, False, 128)
    (True, False)
    """
    if consumers not in (1, 2, 3):
        raise ValueError(f"pingpong: {consumers} consumer warpgroups; a CTA has one to three")
    if tile_hdim < 1:
        raise ValueError(f"pingpong: tile_hdim is {tile_hdim}; it is positive")
    return consumers >= 2 and tile_hdim <= 128 if overlap else consumers == 2


def barrier_id(warpgroup: int, first: int = 2) -> int:
    """Return the barrier that a consumer waits on: ``B_g = B_0 + g`` (specification 0x04).

    Parameters
    ----------
    warpgroup : int
        ``g``, counted without the producer: physical warpgroup less one.
    first : int, optional
        ``B_0``; 2 in the reference implementation, 1 in this one.

    Returns
    -------
    int
        A named barrier, 0 to 15; 0 is the barrier of the whole CTA.

    Examples
    --------
    >>> barrier_id(0), barrier_id(2)
    (2, 4)
    """
    if warpgroup < 0 or first < 1 or first + warpgroup > 15:
        raise ValueError(f"pingpong: barrier {first} + {warpgroup}; named barriers are 1 to 15, 0 is the CTA's")
    return first + warpgroup


def predecessor(warpgroup: int, consumers: int) -> int:
    """Return ``(g - 1) mod G``, who hands the token to `warpgroup` (specification 0x04)."""
    _check_warpgroup(warpgroup, consumers)
    return (warpgroup - 1) % consumers


def successor(warpgroup: int, consumers: int) -> int:
    """Return ``(g + 1) mod G``, who gets the token from `warpgroup` (specification 0x04)."""
    _check_warpgroup(warpgroup, consumers)
    return (warpgroup + 1) % consumers


def _check_warpgroup(warpgroup: int, consumers: int) -> None:
    if not 0 <= warpgroup < consumers:
        raise ValueError(f"pingpong: warpgroup {warpgroup} of {consumers}; it is counted from 0, without the producer")


def participants(threads_per_warpgroup: int = WARPGROUP) -> int:
    """Return the threads of a barrier generation: one warpgroup that waits, one that arrives (0x04).

    Parameters
    ----------
    threads_per_warpgroup : int, optional
        ``W``.

    Returns
    -------
    int
        ``2 W``.

    Examples
    --------
    >>> participants()
    256
    """
    if threads_per_warpgroup < 1:
        raise ValueError(f"pingpong: {threads_per_warpgroup} threads in a warpgroup")
    return 2 * threads_per_warpgroup


def handoffs(blocks: int, overlap: bool) -> int:
    """Count the waits, and as many passes, of one consumer in one work tile (specification 0x04).

    Parameters
    ----------
    blocks : int
        ``J``; an empty tile makes no call at all.
    overlap : bool
        With overlap the first QK and the last PV run outside the ring: ``max(J - 1, 0)``. Without: ``J + 1``.

    Returns
    -------
    int
        The count.

    Examples
    --------
    >>> handoffs(5, overlap=False), handoffs(5, overlap=True), handoffs(1, overlap=True), handoffs(0, overlap=False)
    (6, 4, 0, 0)
    """
    if blocks < 0:
        raise ValueError(f"pingpong: {blocks} blocks")
    if blocks == 0:
        return 0
    return max(blocks - 1, 0) if overlap else blocks + 1


def rank(handoff: int, warpgroup: int, consumers: int) -> int:
    """Return ``h G + g``: each grant waits for the one of the rank just below, and the bootstrap grants rank 0 (0x04).

    Parameters
    ----------
    handoff : int
        ``h``, how many grants this warpgroup had before.
    warpgroup, consumers : int
        ``g`` and ``G``.

    Returns
    -------
    int
        The rank.

    Examples
    --------
    >>> [rank(h, g, 2) for h in range(2) for g in range(2)]
    [0, 1, 2, 3]
    """
    if handoff < 0:
        raise ValueError(f"pingpong: handoff {handoff}; grants are counted from 0")
    _check_warpgroup(warpgroup, consumers)
    return handoff * consumers + warpgroup


class TokenRing:
    """The barriers of all consumers, and a monitor of the token (specification 0x04).

    Parameters
    ----------
    machine : Machine
        Whose agents take turns.
    agents : sequence of str
        The consumer warpgroups, in order.
    first : int, optional
        ``B_0``.
    monitored : bool, optional
        If false, a lost or doubled token is no error by itself; its consequence is.
    """

    def __init__(self, machine: Machine, agents: Sequence[str], *, first: int = 2, monitored: bool = True) -> None:
        if not agents:
            raise ValueError("pingpong: nobody takes turns")
        self.machine, self.agents, self.monitored = machine, tuple(agents), monitored
        self.owners: set[str] = set()
        # One barrier more than groups, for whoever mistakes the physical index for the local one.
        self.barriers = [NamedBarrier(f"B{first + g}", self.owners.update) for g in range(len(agents) + 1)]
        self.grants: list[int] = []  # ranks, in order of time
        self.waits = dict.fromkeys(self.agents, 0)
        self.passes = dict.fromkeys(self.agents, 0)

    @property
    def credits(self) -> int:
        """Half-credits that lie on barriers whose owner has not come yet."""
        return sum(barrier.credits for barrier in self.barriers)

    def check(self) -> None:
        """Raise unless the token exists exactly once: pending credits + owners = 1."""
        if self.monitored and self.credits + len(self.owners) != 1:
            raise TokenNotConserved(f"{self.credits} credits pending, owners: {sorted(self.owners)}")

    def check_balance(self, calls: int) -> None:
        """Raise unless each consumer made so many waits and passes, and the credit rests on the first barrier."""
        for agent in self.agents:
            if (self.waits[agent], self.passes[agent]) != (calls, calls):
                raise TokenNotConserved(
                    f"{agent}: {self.waits[agent]} waits and {self.passes[agent]} passes, expected {calls} of each"
                )
        if [barrier.credits for barrier in self.barriers] != [1, *[0] * len(self.agents)]:
            raise TokenNotConserved("the credit does not rest on the first barrier")


class Turn:
    """One consumer's side of the token (twin of ``Turn`` in ``cuda/hopper/consumer.cuh``) (specification 0x04).

    Attributes
    ----------
    threads : int
        Participants of a generation.
    """

    threads: ClassVar[int] = 2 * WARPGROUP

    def __init__(self, ring: TokenRing, warpgroup: int) -> None:
        _check_warpgroup(warpgroup, len(ring.agents))
        self.ring, self.warpgroup = ring, warpgroup
        self.agent = ring.agents[warpgroup]

    def barrier_of_wait(self) -> int:
        """Return which of the ring's barriers this consumer waits on."""
        return self.warpgroup

    def bootstrap(self) -> None:
        """Leave the first half-credit on the first barrier: once per CTA, by one group, before it waits.

        The reference lets the first group do it, this library the last one, whose pass it stands for. The barrier
        cannot tell the difference.
        """
        self._hand_to(0, "bootstrap")

    def wait(self) -> Program:
        """Wait for the token."""
        ring, barrier = self.ring, self.ring.barriers[self.barrier_of_wait()]
        before = ring.agents[predecessor(self.warpgroup, len(ring.agents))]
        yield from barrier.sync(self.agent, WARPGROUP, self.threads, [before])
        granted = rank(ring.waits[self.agent], self.warpgroup, len(ring.agents))
        ring.waits[self.agent] += 1
        ring.grants.append(granted)
        ring.machine.emit(self.agent, "sync", barrier.name, ordinal=granted)
        ring.check()

    def pass_on(self) -> None:
        """Hand the token to the next group."""
        self.ring.owners.discard(self.agent)
        self.ring.passes[self.agent] += 1
        self._hand_to(successor(self.warpgroup, len(self.ring.agents)), "arrive")

    def _hand_to(self, g: int, action: str) -> None:
        barrier = self.ring.barriers[g]
        self.ring.machine.emit(self.agent, action, barrier.name)
        barrier.arrive(WARPGROUP, self.threads)
        self.ring.check()
