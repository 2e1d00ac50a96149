"""What a Hopper CTA needs and what a multiprocessor has: registers, shared memory, barriers (specification 0x02).

All figures are capacities and payloads, computed from the tile. What is allocated, and whether it spills, only the
compiled kernel says. What the two-stage loop keeps alive is in `live_words`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cupyfa.oracles.hopper.machine import Deadlock
from cupyfa.oracles.hopper.ring import barrier_count
from cupyfa.oracles.violations import ContractViolation

__all__ = [
    "DivergentCollective",
    "OverBudget",
    "REFERENCE_REGISTERS",
    "RegisterPool",
    "SM90",
    "SharedMemory",
    "ThreadRegisters",
    "ownership",
    "resident_blocks",
    "setmaxnreg",
    "shared_memory",
    "tile_bytes",
]

KIB = 1024
WARPGROUP = 128


class OverBudget(ContractViolation):
    """A tile needs more of a resource than there is (specification 0x02)."""


class DivergentCollective(ContractViolation):
    """Warps of one warpgroup execute different ``setmaxnreg``: it is collective (specification 0x02)."""


@dataclass(frozen=True)
class _Limits:
    """Capacities of a multiprocessor of compute capability 9.0 (Hopper tuning guide)."""

    registers: int = 65_536
    registers_per_thread: int = 255
    blocks: int = 32
    threads: int = 2_048
    shared_bytes: int = 228 * KIB
    reserved_bytes_per_block: int = 1 * KIB
    opt_in_above: int = 48 * KIB

    @property
    def shared_bytes_per_block(self) -> int:
        """Bytes that one CTA can address: all but what CUDA reserves."""
        return self.shared_bytes - self.reserved_bytes_per_block


#: Capacities of a Hopper multiprocessor.
SM90 = _Limits()


@dataclass(frozen=True)
class ThreadRegisters:
    """Registers per thread that the two roles ask for (specification 0x02)."""

    producer: int
    consumer: int


#: What the reference implementation asks for, by number of consumer warpgroups (specification 0x02).
REFERENCE_REGISTERS: Mapping[int, ThreadRegisters] = {
    1: ThreadRegisters(56, 256),
    2: ThreadRegisters(24, 240),
    3: ThreadRegisters(32, 160),
}


def setmaxnreg(registers: int) -> int:
    """Check an operand of ``setmaxnreg``: 24 to 256, a multiple of 8 (specification 0x02).

    Parameters
    ----------
    registers : int
        Registers per thread.

    Returns
    -------
    int
        The same.

    Examples
    --------
    >>> setmaxnreg(240)
    240
    """
    if not 24 <= registers <= 256 or registers % 8:
        raise ValueError(f"setmaxnreg {registers}: a multiple of 8 from 24 to 256")
    return registers


def ownership(consumers: int, registers: ThreadRegisters) -> int:
    """Add up the registers that a producer warpgroup and its consumers ask for: ``128 (p + G c)`` (specification 0x02).

    Parameters
    ----------
    consumers : int
        ``G``, consumer warpgroups.
    registers : ThreadRegisters
        ``p`` and ``c``.

    Returns
    -------
    int
        32-bit registers of the CTA.

    Raises
    ------
    OverBudget
        If the multiprocessor has fewer.

    Examples
    --------
    >>> [ownership(g, r) for g, r in REFERENCE_REGISTERS.items()]
    [39936, 64512, 65536]
    """
    if consumers < 1:
        raise ValueError(f"register ledger: {consumers} consumer warpgroups")
    total = WARPGROUP * (setmaxnreg(registers.producer) + consumers * setmaxnreg(registers.consumer))
    if total > SM90.registers:
        raise OverBudget(f"{total} registers asked for, {SM90.registers} in a multiprocessor")
    return total


class RegisterPool:
    """The registers of a CTA while its warpgroups reallocate them (specification 0x02).

    Parameters
    ----------
    warpgroups : int
        Producer and consumers.
    launch : int
        Registers per thread at launch, equal for all.

    Examples
    --------
    >>> pool = RegisterPool(3, 168)
    >>> pool.request(0, [24] * 4)
    >>> pool.request(1, [240] * 4), pool.request(2, [240] * 4), pool.free
    (None, None, 0)
    """

    def __init__(self, warpgroups: int, launch: int) -> None:
        if warpgroups < 1 or not 1 <= launch <= SM90.registers_per_thread:
            raise ValueError(f"register pool: {warpgroups} warpgroups launched with {launch} registers per thread")
        self.held = [launch] * warpgroups
        self.total = WARPGROUP * sum(self.held)

    @property
    def free(self) -> int:
        """Registers that nobody holds."""
        return self.total - WARPGROUP * sum(self.held)

    def can(self, warpgroup: int, registers: int) -> bool:
        """Tell whether a request would be granted now; an increase waits for registers otherwise."""
        if not 0 <= warpgroup < len(self.held):
            raise ValueError(f"register pool: warpgroup {warpgroup} of {len(self.held)}")
        return WARPGROUP * (setmaxnreg(registers) - self.held[warpgroup]) <= self.free

    def request(self, warpgroup: int, registers_of_warps: list[int]) -> None:
        """Execute ``setmaxnreg`` in the four warps of a warpgroup.

        Raises `DivergentCollective` if they disagree, `Deadlock` if the increase can never be granted because nobody
        else will give anything back.
        """
        if len(registers_of_warps) != 4 or len(set(registers_of_warps)) != 1:
            raise DivergentCollective(f"warpgroup {warpgroup}: its four warps ask for {registers_of_warps}")
        registers = registers_of_warps[0]
        if not self.can(warpgroup, registers):
            who = f"warpgroup {warpgroup}"
            missing = WARPGROUP * (registers - self.held[warpgroup])
            raise Deadlock({who: f"{missing} registers, {self.free} are free"}, {who: ()})
        self.held[warpgroup] = registers


def tile_bytes(rows: int, cols: int, itemsize: int) -> int:
    """Return the bytes of a tile, which is what its copy must be announced to carry: ``B d b`` (specification 0x02).

    Parameters
    ----------
    rows, cols : int
        Of the tile; parts outside the tensor count, they arrive as zeros.
    itemsize : int
        Bytes per element, ``b``.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> tile_bytes(128, 128, 2)
    32768
    """
    if min(rows, cols, itemsize) < 1:
        raise ValueError(f"tile: {rows} x {cols} elements of {itemsize} bytes")
    return rows * cols * itemsize


@dataclass(frozen=True)
class SharedMemory:
    """Payload of a CTA's shared memory, in bytes: a lower bound without alignment (specification 0x02)."""

    q: int
    k: int
    v: int
    p: int
    barriers: int
    payload: int


def shared_memory(
    tile_m: int,
    tile_n: int,
    head_dim: int,
    head_dim_v: int,
    itemsize: int,
    stages: int,
    *,
    p_in_shared: bool = False,
    q_in_registers: bool = False,
) -> SharedMemory:
    """Add up the shared-memory payload (specification 0x02).

    ``|Q| + s |K| + s |V| + |P|``. When Q is kept in registers, V takes over its place, and the sum is
    ``max(|Q|, s |V|) + s |K| + |P|``.

    Parameters
    ----------
    tile_m, tile_n : int
        ``B_M`` query rows and ``B_N`` keys.
    head_dim, head_dim_v : int
        ``d`` and ``d_v``.
    itemsize : int
        ``b``, bytes per element.
    stages : int
        ``s``, slots of the K ring and of the V ring.
    p_in_shared : bool, optional
        P goes through shared memory, ``B_M B_N b`` bytes.
    q_in_registers : bool, optional
        Q is captured before V needs its place.

    Returns
    -------
    SharedMemory
        Parts and total in bytes; the barriers come on top of the payload.

    Examples
    --------
    >>> shared_memory(128, 128, 128, 128, 2, 2).payload // 1024
    160
    >>> shared_memory(128, 128, 128, 128, 2, 2, q_in_registers=True).payload // 1024
    128
    """
    q = tile_bytes(tile_m, head_dim, itemsize)
    k = stages * tile_bytes(tile_n, head_dim, itemsize)
    v = stages * tile_bytes(tile_n, head_dim_v, itemsize)
    p = tile_bytes(tile_m, tile_n, itemsize) if p_in_shared else 0
    payload = (max(q, v) if q_in_registers else q + v) + k + p
    return SharedMemory(q, k, v, p, 8 * barrier_count(stages), payload)


def resident_blocks(threads: int, registers_per_thread: int, shared_bytes: int) -> int:
    """Return how many CTAs fit into a multiprocessor at once (specification 0x02).

    Parameters
    ----------
    threads : int
        Per CTA, a multiple of 32.
    registers_per_thread : int
        As compiled; a warp allocates in units of 256.
    shared_bytes : int
        Dynamic and static, per CTA.

    Returns
    -------
    int
        The smallest of what registers, shared memory, threads and the block limit allow; 0 if not even one fits.

    Examples
    --------
    >>> resident_blocks(384, 168, 227 * 1024), resident_blocks(128, 32, 0)
    (1, 16)
    """
    if threads < 32 or threads % 32 or registers_per_thread < 1 or shared_bytes < 0:
        raise ValueError(f"residency: {threads} threads, {registers_per_thread} registers, {shared_bytes} bytes")
    if shared_bytes > SM90.shared_bytes_per_block or registers_per_thread > SM90.registers_per_thread:
        return 0
    per_warp = -(-32 * registers_per_thread // 256) * 256
    return min(
        SM90.blocks,
        SM90.threads // threads,
        SM90.registers // (per_warp * (threads // 32)),
        SM90.shared_bytes // (shared_bytes + SM90.reserved_bytes_per_block),
    )
