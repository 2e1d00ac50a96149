"""Hopper against Blackwell: what one multiprocessor offers per cycle, and the ceilings that bound a kernel (0x07).

The rates are those of the simplified model of the FlashAttention-4 paper (arXiv 2603.05451). They show which resource
a schedule presses on; they leave out registers, L2, instruction issue and occupancy, and they are not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..violations import ContractViolation

__all__ = ["BLACKWELL", "HOPPER", "CeilingExceeded", "Machine", "check_ceilings", "exponential_share"]

REGISTERS_PER_SM = 2**16
MAX_REGISTERS_PER_THREAD = 255
SHARED_BYTES_PER_SM = 228 * 1024
RESERVED_SHARED_BYTES_PER_CTA = 1024
#: What is left for one CTA of the multiprocessor's shared memory: 227 KiB.
SHARED_BYTES_PER_CTA = SHARED_BYTES_PER_SM - RESERVED_SHARED_BYTES_PER_CTA


class CeilingExceeded(ContractViolation):
    """A CTA asks for more than one multiprocessor has (specification 0x07)."""


@dataclass(frozen=True)
class Machine:
    """One multiprocessor of a generation (specification 0x07).

    Attributes
    ----------
    name : str
        Generation.
    tensor_instruction : str
        The matrix instruction.
    accumulator : str
        Where it leaves its result.
    accumulator_tile : tuple of int
        (rows, columns) of a representative accumulator.
    mma_ops : int
        bfloat16 operations per cycle; a multiply-add counts as two.
    exponentials : int
        Exponentials per cycle on the special-function unit.
    shared_bytes : int
        Bytes read from shared memory per cycle.
    """

    name: str
    tensor_instruction: str
    accumulator: str
    accumulator_tile: tuple[int, int]
    mma_ops: int
    exponentials: int
    shared_bytes: int


HOPPER = Machine("Hopper", "wgmma", "registers", (64, 128), 4096, 16, 128)
BLACKWELL = Machine("Blackwell", "tcgen05.mma", "TMEM", (128, 128), 8192, 16, 128)


def exponential_share(machine: Machine, head_dim: int, head_dim_v: int | None = None) -> float:
    """Compare the time of the exponentials of a tile with that of its two products (specification 0x07).

    Parameters
    ----------
    machine : Machine
        Its rates.
    head_dim : int
        Of Q and K.
    head_dim_v : int, optional
        Of V; `head_dim` by default.

    Returns
    -------
    float
        ``(1 / exponentials) / (2 (d + d_v) / mma_ops)``: both per score, so the tile size cancels. Above 1 the
        exponentials take longer than the matrix unit.

    Examples
    --------
    >>> exponential_share(HOPPER, 128), exponential_share(BLACKWELL, 128)
    (0.5, 1.0)
    """
    if head_dim <= 0 or (head_dim_v is not None and head_dim_v <= 0):
        raise ValueError(f"exponential_share: head dimensions must be positive, got {head_dim} and {head_dim_v}")
    products = 2 * (head_dim + (head_dim if head_dim_v is None else head_dim_v)) / machine.mma_ops
    return 1 / machine.exponentials / products


def check_ceilings(threads: int, registers_per_thread: int, shared_bytes: int) -> None:
    """Refuse a CTA that no multiprocessor could hold (specification 0x07).

    Passing is necessary, never sufficient: whether a CTA or a cluster of two becomes resident is a question for the
    compiled kernel and the driver's cluster-occupancy query.

    Parameters
    ----------
    threads : int
        Threads of the CTA.
    registers_per_thread : int
        Registers at launch, before any of them are moved between warpgroups.
    shared_bytes : int
        Static and dynamic shared memory of the CTA, in bytes.

    Raises
    ------
    CeilingExceeded
        Naming the resource.

    Examples
    --------
    >>> check_ceilings(512, 128, 227 * 1024)  # sixteen warps fill the register file exactly
    """
    if threads < 1 or registers_per_thread < 1 or shared_bytes < 0:
        raise ValueError(
            f"check_ceilings: {threads} threads, {registers_per_thread} registers per thread, {shared_bytes} bytes; "
            "the first two are positive, the last is not negative"
        )
    if registers_per_thread > MAX_REGISTERS_PER_THREAD:
        raise CeilingExceeded(f"{registers_per_thread} registers per thread; the ceiling is {MAX_REGISTERS_PER_THREAD}")
    if threads * registers_per_thread > REGISTERS_PER_SM:
        total = threads * registers_per_thread
        raise CeilingExceeded(f"{total} registers for {threads} threads; a multiprocessor has {REGISTERS_PER_SM}")
    if shared_bytes > SHARED_BYTES_PER_CTA:
        raise CeilingExceeded(f"{shared_bytes} bytes of shared memory; a CTA may have {SHARED_BYTES_PER_CTA}")
