"""What an additive bias costs, beside the two floors under it: a part of ``python -m cupyfa bench options``.

A kernel with a bias cannot be faster than the bias can be read from memory, nor than the kernel without it. Both are
measured in the same run: the second under the same mask and in the same rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyfa.bench.columns import errors, line, quotient, speed
from cupyfa.bench.flex import FLEX
from cupyfa.bench.harness import Contestant, Timer, Timing, time_in_turn, time_on_gpu
from cupyfa.bench.manifest import Row
from cupyfa.bench.problems import Cell

__all__ = ["biases", "format_biases", "read_bandwidth"]

_NONE: dict[str, Any] = {"bias": "", "bias_dtype": "float32"}
_EACH: list[dict[str, Any]] = [
    {"bias": axes, "bias_dtype": dtype} for axes in ("bhqk", "qk", "bk") for dtype in ("same", "float32")
]
_BYTES = 2**32  # many times what L2 holds

_READ = r"""
extern "C" __global__ void read(const uint4* data, unsigned long long count, unsigned* result) {
  unsigned all = 0;
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const uint4 x = data[i];
    all |= x.x | x.y | x.z | x.w;
  }
  if (all) *result = all;  // the memory is zero: nothing is written, and nothing can be left out
}
"""


def biases() -> list[list[Cell]]:
    """List the problems: a bias of all axes, one that batches and heads share, and one that rows share as well.

    Returns
    -------
    list of list of Cell
        Those of a head_dim and mask share their rounds: the kernel without a bias first.
    """
    return [
        [
            dataclasses.replace(Cell(head_dim, 4096, 4, 2048 // head_dim, causal), **options)
            for options in (_NONE, *_EACH)
        ]
        for head_dim in (64, 128)
        for causal in (False, True)
    ]


def read_bandwidth(rounds: int, timer: Timer = time_on_gpu, batch_seconds: float = 0.010) -> float:
    """Measure how fast memory can be read.

    Parameters
    ----------
    rounds, timer, batch_seconds
        As for :func:`cupyfa.bench.harness.time_in_turn`.

    Returns
    -------
    float
        Bytes a second, by a kernel that does nothing else.
    """
    import cupy

    data, result = cupy.zeros(_BYTES, np.uint8), cupy.zeros(1, np.uint32)
    kernel = cupy.RawKernel(_READ, "read")
    ctas = 16 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    arguments = (data, np.uint64(_BYTES // 16), result)
    contestant = Contestant("read", lambda: kernel((ctas,), (256,), arguments))
    (timing,) = time_in_turn([contestant], rounds, timer, batch_seconds=batch_seconds)
    return _BYTES / timing.spread.median


def format_biases(rows: Sequence[Row], bandwidth: float) -> list[str]:
    """Return the figures as a Markdown table.

    Parameters
    ----------
    rows : sequence of Row
        The cells, those without a bias among them.
    bandwidth : float
        Bytes a second.

    Returns
    -------
    list of str
        Useful TFLOP/s, time, both floors, and which part of the smaller rate was reached.
    """
    titles = (
        *("head_dim", "mask", "bias", "cupyfa", "us", "read us", "of plain [min..max]", "of the smaller rate"),
        *(FLEX.name, f"cupyfa / {FLEX.name} [min..max]", "cupyfa error", "of limit"),
    )
    lines = [line(*titles), "|" + "---:|" * len(titles)]
    own = {row.cell: row.timings.get("cupyfa") for row in rows}
    for row in rows:
        cell, timing = row.cell, own[row.cell]
        plain = own.get(dataclasses.replace(cell, **_NONE))
        reading = cell.bias_bytes / bandwidth
        time = "-" if timing is None else f"{1e6 * timing.spread.median:.0f}"
        beside = speed(row, FLEX.name), quotient(timing, row.timings.get(FLEX.name)), *errors(row)
        name = f"{cell.bias} {cell.dtype if cell.bias_dtype == 'same' else cell.bias_dtype}" if cell.bias else "none"
        lines.append(
            line(
                *(cell.head_dim, cell.mask, name, speed(row, "cupyfa"), time, f"{1e6 * reading:.0f}"),
                *(quotient(timing, plain), _reached(timing, plain, reading)),
                *beside,
            )
        )
    return lines


def _reached(timing: Timing | None, plain: Timing | None, reading: float) -> str:
    """Return the part of the smaller one of two rates, each by its time."""
    if timing is None or plain is None:
        return "-"
    return f"{max(plain.spread.median, reading) / timing.spread.median:.3f}"
