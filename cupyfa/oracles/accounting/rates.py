"""From operations and times to rates and ratios: the reconciliation table, four clocks, speedups (specification 0x0D).

Rows of one table differ by a factor of two if dense operations are used for a causal run, and by 2.5 if the backward
factor is forgotten; times differ by orders of magnitude between a kernel, a first call and a compilation. Nothing here
is a measurement: the rows are arithmetic on times that somebody else took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import NamedTuple

from .flops import AttentionShape, accounting_throughput, backward_flops

__all__ = [
    "Boundary",
    "Latency",
    "ReconciledRow",
    "end_to_end_speedup",
    "paper_problems",
    "peak_throughput",
    "reconciliation_table",
    "speedup",
]


class ReconciledRow(NamedTuple):
    """One row: which pass, operations counted by the papers' convention, seconds, TFLOP/s (0x0D)."""

    mode: str
    flops: Fraction
    seconds: float
    tflops: float


def reconciliation_table(
    shape: AttentionShape, forward_seconds: float, backward_seconds: float
) -> tuple[ReconciledRow, ...]:
    """Rate a time under each of the four numerators of a shape: dense and causal, forward and backward (0x0D).

    Parameters
    ----------
    shape : AttentionShape
        Its mask is ignored: both kinds are listed.
    forward_seconds, backward_seconds : float
        Times.

    Returns
    -------
    tuple of ReconciledRow
        Dense forward, causal forward, dense backward, causal backward.

    Examples
    --------
    >>> rows = reconciliation_table(AttentionShape(32, 16, 1024, 1024, 128, 128), 0.20e-3, 0.45e-3)
    >>> [round(row.tflops, 2) for row in rows]
    [1374.39, 687.19, 1527.1, 763.55]
    """
    dense = Fraction(shape.dense_flops)
    passes = (
        ("dense forward", dense, forward_seconds),
        ("causal forward", dense / 2, forward_seconds),
        ("dense backward", backward_flops(dense), backward_seconds),
        ("causal backward", backward_flops(dense / 2), backward_seconds),
    )
    return tuple(ReconciledRow(mode, n, t, accounting_throughput(n, t)) for mode, n, t in passes)


def paper_problems(total_tokens: int = 32 * 1024, hidden: int = 2048) -> list[AttentionShape]:
    """Return the shapes of the paper's main benchmark (0x0D): 1k to 32k tokens, batch by total, heads by hidden size.

    Parameters
    ----------
    total_tokens : int, optional
        ``B S``.
    hidden : int, optional
        ``H d`` for head dimensions 64 and 128; the shape with head dimensions (192, 128) has 16 heads.

    Returns
    -------
    list of AttentionShape
        Without masks; each is run with and without a causal one.

    Raises
    ------
    ValueError
        If the tokens are no whole batches of 32k, or the hidden size no whole heads of 128.

    Examples
    --------
    >>> sorted({(s.head_dim, s.head_dim_v, s.heads) for s in paper_problems()})
    [(64, 64, 32), (128, 128, 16), (192, 128, 16)]
    """
    if total_tokens <= 0 or total_tokens % (32 * 1024) or hidden <= 0 or hidden % 128:
        raise ValueError(
            f"accounting: total_tokens and hidden are {total_tokens} and {hidden};"
            " they must be positive multiples of 32768 and of 128"
        )
    heads = [(64, 64, hidden // 64), (128, 128, hidden // 128), (192, 128, 16)]
    lengths = [1024 * 2**i for i in range(6)]
    return [AttentionShape(total_tokens // s, h, s, s, d, dv) for d, dv, h in heads for s in lengths]


# --- Four clocks ---


class Boundary(Enum):
    """Which interval was timed (0x0D)."""

    DEVELOPER_COMPILE = "developer compile"
    COLD_FIRST_CALL = "cold first call"
    WARM_KERNEL = "warm kernel"
    END_TO_END = "end to end"


@dataclass(frozen=True)
class Latency:
    """The parts of a call, in seconds; each boundary sums other ones (0x0D).

    Attributes
    ----------
    compile, validation, lookup, load, launch : float
        From source to executable; argument checks; cache; module load; launch.
    kernel, preprocessing, packing, combine, framework : float
        The selected kernel alone; metadata; packing or paging; combination of splits; what the framework adds.

    Raises
    ------
    ValueError
        If a part is negative or not finite.
    """

    compile: float = 0.0
    validation: float = 0.0
    lookup: float = 0.0
    load: float = 0.0
    launch: float = 0.0
    kernel: float = 0.0
    preprocessing: float = 0.0
    packing: float = 0.0
    combine: float = 0.0
    framework: float = 0.0

    def __post_init__(self) -> None:
        for name, part in vars(self).items():
            if not 0 <= part < math.inf:
                raise ValueError(f"accounting: {name} takes {part} s; it must be finite and not negative")

    def within(self, boundary: Boundary) -> float:
        """Return the time inside a boundary.

        Parameters
        ----------
        boundary : Boundary
            Which clock.

        Returns
        -------
        float
            Seconds.

        Raises
        ------
        ValueError
            If it is no boundary.

        Examples
        --------
        >>> call = Latency(compile=2.5, kernel=1e-3, framework=2e-3)
        >>> call.within(Boundary.DEVELOPER_COMPILE), call.within(Boundary.END_TO_END)
        (2.5, 0.003)
        """
        if boundary is Boundary.DEVELOPER_COMPILE:
            return self.compile
        if boundary is Boundary.COLD_FIRST_CALL:
            return self.validation + self.lookup + self.compile + self.load + self.launch
        if boundary is Boundary.WARM_KERNEL:
            return self.kernel
        if boundary is not Boundary.END_TO_END:
            raise ValueError(f"accounting: {boundary!r} is no boundary; there are {', '.join(Boundary.__members__)}")
        return self.preprocessing + self.packing + self.kernel + self.combine + self.framework


# --- Ratios ---


def speedup(baseline_seconds: float, seconds: float) -> float:
    """Return ``S_{A/B} = t_B / t_A``: how many times A is faster than the baseline B (0x0D).

    Parameters
    ----------
    baseline_seconds, seconds : float
        ``t_B`` and ``t_A``, over the same boundary; `record.reconciled_speedup` checks that.

    Returns
    -------
    float
        A ratio of times.

    Examples
    --------
    >>> speedup(55, 2.5), round(speedup(45, 1.4), 2)
    (22.0, 32.14)
    """
    if not (0 < baseline_seconds < math.inf and 0 < seconds < math.inf):
        raise ValueError(f"accounting: times are {baseline_seconds} and {seconds}; they must be positive and finite")
    return baseline_seconds / seconds


def end_to_end_speedup(kernel_speedup: float, kernel_share: float) -> float:
    """Return what a faster kernel is worth to a whole: ``1 / (1 - share + share / speedup)`` (0x0D).

    Parameters
    ----------
    kernel_speedup : float
        Of the kernel alone.
    kernel_share : float
        Its part of the end-to-end time before, from 0 to 1.

    Returns
    -------
    float
        Of the whole, if nothing else changes.

    Examples
    --------
    >>> round(end_to_end_speedup(1.3, 0.2), 3)
    1.048
    """
    if not (kernel_speedup > 0 and 0 <= kernel_share <= 1):  # an infinite speedup is the limit of what a share is worth
        raise ValueError(
            f"accounting: the speedup is {kernel_speedup} and the share {kernel_share};"
            " the speedup must be positive and the share from 0 to 1"
        )
    return 1 / (1 - kernel_share + kernel_share / kernel_speedup)


def peak_throughput(multiprocessors: int, flops_per_cycle: int, hertz: float) -> float:
    """Return what the matrix units could do at a clock, in TFLOP/s: ``multiprocessors * flops_per_cycle * f`` (0x0D).

    Parameters
    ----------
    multiprocessors : int
        Of the device.
    flops_per_cycle : int
        Per multiprocessor: 4,096 dense bfloat16 operations on Hopper, 8,192 on Blackwell.
    hertz : float
        The clock that the datasheet assumes; a power limit may not allow it.

    Returns
    -------
    float
        TFLOP/s. A peak is no measurement; a dense-equivalent rate may exceed it.

    Examples
    --------
    >>> round(peak_throughput(132, 4096, 1.83e9))
    989
    """
    for name, value in (("multiprocessors", multiprocessors), ("flops_per_cycle", flops_per_cycle), ("hertz", hertz)):
        if not 0 < value < math.inf:
            raise ValueError(f"accounting: {name} is {value}; it must be positive and finite")
    return multiprocessors * flops_per_cycle * hertz / 1e12
