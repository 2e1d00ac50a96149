"""What windows and modifiers of scores cost. Run as ``python -m cupyfa bench options``.

A window saves the keys outside of it, but the kernel computes whole tiles: the table shows the operations that count,
and those of the tiles. A softcap, a sink and ALiBi slopes add work to scores or rows: their cost is the ratio to the
kernel without them, under the same mask and in the same rounds. An additive bias has to be read as well: `biases`. The
peer is torch's flex_attention, which has no sink.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import cupyfa
from cupyfa.bench import manifest, notes
from cupyfa.bench.biases import biases, format_biases, read_bandwidth
from cupyfa.bench.clocks import Clocks
from cupyfa.bench.columns import errors, line, quotient, speed
from cupyfa.bench.correctness import LIMIT_TEXT
from cupyfa.bench.flex import FLEX
from cupyfa.bench.manifest import Row
from cupyfa.bench.measure import measure_all
from cupyfa.bench.peers import Availability, invite, why_not_here
from cupyfa.bench.problems import Cell
from cupyfa.bench.usage import add_timing

__all__ = [
    "DESCRIPTION",
    "WINDOWS",
    "add_arguments",
    "format_modifiers",
    "format_notes",
    "format_windows",
    "modifiers",
    "run",
    "windows",
]

#: Of the command, for its help.
DESCRIPTION = (
    "Time sliding windows, a softcap, a sink, ALiBi slopes and an additive bias, beside torch's flex_attention. Exit "
    "status: 0; 1 if cupyfa was wrong somewhere; 2 without a GPU, or for wrong usage."
)

_CAUSAL, _FULL = (None, 0), (None, None)

#: What the first table compares; without a bound to the left the window is the causal mask.
WINDOWS = ((128, 0), (256, 0), (1024, 0), (4096, 0), (64, 64), _CAUSAL, _FULL)

_PLAIN: dict[str, Any] = {"softcap": None, "sink": False, "alibi": False}
_ALL: dict[str, Any] = {"softcap": 50.0, "sink": True, "alibi": True}
_EACH = [_PLAIN, *(_PLAIN | {name: value} for name, value in _ALL.items())]


def windows() -> list[list[Cell]]:
    """List the problems of the windows.

    Returns
    -------
    list of list of Cell
        Those of a head_dim share their rounds.
    """
    return [
        [Cell(head_dim, 8192, 2, heads, False, heads_kv=8, window_size=window) for window in WINDOWS]
        for head_dim, heads in ((64, 64), (128, 32))
    ]


def modifiers() -> list[list[Cell]]:
    """List the problems of the modifiers of scores.

    Returns
    -------
    list of list of Cell
        Those of a head_dim that share their rounds: under each mask the plain kernel first.
    """
    groups = []
    for head_dim in (64, 128):
        full, causal, window = (
            Cell(head_dim, 4096, 4, 2048 // head_dim, False, window_size=size) for size in (_FULL, _CAUSAL, (1024, 0))
        )
        groups.append([dataclasses.replace(full, **options) for options in _EACH])
        groups.append(
            [
                *(dataclasses.replace(causal, **options) for options in _EACH),
                *(dataclasses.replace(window, **options) for options in (_PLAIN, _ALL)),
            ]
        )
    return groups


# ----------------------------------------------------------------------------------------------------------------------
# Output


def _beside_flex(row: Row) -> tuple[str, str, str, str]:
    """Return the peer's speed, the ratio to it, and what the check said."""
    ratio = quotient(row.timings.get("cupyfa"), row.timings.get(FLEX.name))
    return speed(row, FLEX.name), ratio, *errors(row)


_BESIDE_FLEX = (FLEX.name, f"cupyfa / {FLEX.name} [min..max]", "cupyfa error", "of limit")


def format_windows(rows: Sequence[Row]) -> list[str]:
    """Return the figures of the windows as a Markdown table.

    Parameters
    ----------
    rows : sequence of Row
        The cells.

    Returns
    -------
    list of str
        Useful TFLOP/s, those of the tiles that are computed, and time.
    """
    titles = ("head_dim", "heads", "window", "cupyfa", "scheduled", "useful part", "us", *_BESIDE_FLEX)
    lines = [line(*titles), "|" + "---:|" * len(titles)]
    for row in rows:
        cell, timing, scheduled = row.cell, row.timings.get("cupyfa"), row.scheduled_flops
        work, part, time = "-", "-", "-"
        if timing is not None:
            time = f"{1e6 * timing.spread.median:.0f}"
        if scheduled is not None:
            part = f"{cell.useful_flops / scheduled:.2f}"
        if timing is not None and scheduled is not None:
            work = f"{scheduled / timing.spread.median / 1e12:.0f}"
        heads = f"{cell.heads}/{cell.heads_kv or cell.heads}"
        lines.append(line(cell.head_dim, heads, cell.mask, speed(row, "cupyfa"), work, part, time, *_beside_flex(row)))
    return lines


def format_modifiers(rows: Sequence[Row]) -> list[str]:
    """Return the figures of the modifiers of scores as a Markdown table.

    Parameters
    ----------
    rows : sequence of Row
        The cells, the plain ones among them.

    Returns
    -------
    list of str
        Useful TFLOP/s, and the speed relative to the plain kernel under the same mask.
    """
    titles = ("head_dim", "mask", "options", "cupyfa", "of plain [min..max]", *_BESIDE_FLEX)
    lines = [line(*titles), "|" + "---:|" * len(titles)]
    own = {row.cell: row.timings.get("cupyfa") for row in rows}
    for row in rows:
        cell = row.cell
        of_plain = quotient(own[cell], own.get(dataclasses.replace(cell, **_PLAIN)))
        name = cell.modifiers or "plain"
        lines.append(line(cell.head_dim, cell.mask, name, speed(row, "cupyfa"), of_plain, *_beside_flex(row)))
    return lines


def format_notes(rows: Sequence[Row], peers: Sequence[Availability], header: dict[str, Any]) -> list[str]:
    """Return what belongs below the tables.

    Parameters
    ----------
    rows : sequence of Row
        The cells.
    peers : sequence of Availability
        All peers.
    header : dict
        From :func:`cupyfa.bench.manifest.environment`.

    Returns
    -------
    list of str
        Lines of Markdown.
    """
    lines = [
        "Useful TFLOP/s, bfloat16: 4\\*head_dim operations for each key that a row of a head sees. Scheduled: for each "
        "key of the tiles that cupyfa computes. Medians; ratios are formed within a round.",
        f"{manifest.CONVENTIONS['timing_boundary']}; interleaved batches of {header['batch_seconds']} s; inputs about "
        "N(0, 1).",
        f"Error: largest difference from float64 (sampled rows) and from {FLEX.name} (everything). Limit: "
        f"{LIMIT_TEXT}.".replace("*", "\\*"),
        *notes.circumstances(rows, peers, header),
    ]
    return [f"* {note}" for note in lines]


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the command.
    """
    add_timing(parser, [FLEX.name])


def run(options: argparse.Namespace) -> int:
    """Run the command.

    Parameters
    ----------
    options : argparse.Namespace
        Of :func:`add_arguments`.

    Returns
    -------
    int
        Exit status, as in :data:`DESCRIPTION`.
    """
    if reason := why_not_here():
        print(reason, file=sys.stderr)
        return 2
    import cupy

    present, found = invite([FLEX], options.peers)
    clocks = Clocks(cupy.cuda.Device().pci_bus_id)
    parts = windows(), modifiers(), biases()
    timing = present, options.rounds, clocks, options.batch_seconds
    with cupy.cuda.Stream.null:  # the legacy default stream, which is also torch's
        cupyfa.warmup([cell.warmup_call for groups in parts for group in groups for cell in group])
        windowed, modified, biased = (
            measure_all(title, groups, *timing)
            for title, groups in zip(("windows", "modifiers", "biases"), parts, strict=True)
        )
        bandwidth = read_bandwidth(options.rounds, batch_seconds=options.batch_seconds)
    rows = [*windowed, *modified, *biased]
    header = manifest.environment(clocks, found, options.batch_seconds)
    if options.json:
        manifest.write(options.json, header, rows, None, baseline=FLEX.name)
    tables = [*format_windows(windowed), "", *format_modifiers(modified), "", *format_biases(biased, bandwidth)]
    reading = (
        f"* Read us: the bytes of the bias at {bandwidth / 1e12:.2f} TB/s, as a kernel read memory that only reads."
    )
    print("\n".join([*tables, "", *format_notes(rows, found, header), reading]))
    return 0 if all(row.checks["cupyfa"].passed for row in rows) else 1
