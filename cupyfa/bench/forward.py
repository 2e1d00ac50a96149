"""The forward pass beside its peers. Run as ``python -m cupyfa bench forward``; ``--help`` lists the options."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupyfa.bench import first_call, host, manifest, notes
from cupyfa.bench.clocks import Clocks
from cupyfa.bench.columns import errors, line, quotient, speed
from cupyfa.bench.correctness import LIMIT_TEXT
from cupyfa.bench.manifest import Row
from cupyfa.bench.measure import measure_all
from cupyfa.bench.peers import BASELINE, PEERS, Availability, invite, why_not_here
from cupyfa.bench.problems import Cell
from cupyfa.bench.usage import add_timing, why_missing

__all__ = ["DESCRIPTION", "add_arguments", "cells", "format_notes", "format_table", "plot", "run"]

#: Of the command, for its help.
DESCRIPTION = (
    "Time cupyfa's forward pass beside every peer that imports. Exit status: 0; 1 if cupyfa was wrong somewhere; 2 "
    "without a GPU (with --plot: or the extra `bench`), or for wrong usage."
)


def cells(
    head_dims: Sequence[int], seqlens: Sequence[int], tokens: int, hidden: int, dtype: str = "bfloat16"
) -> list[Cell]:
    """List the problems: every head_dim, without and with the causal mask, at every length.

    Parameters
    ----------
    head_dims, seqlens : sequence of int
        The sizes.
    tokens : int
        batch * seqlen.
    hidden : int
        heads * head_dim.
    dtype : str
        Type of the arrays.

    Returns
    -------
    list of Cell
        In the order of the table.

    Raises
    ------
    ValueError
        A size does not divide.
    """
    for name, sizes, total in (("seqlen", seqlens, tokens), ("head_dim", head_dims, hidden)):
        for size in sizes:
            if size < 1 or total < size or total % size:
                whole = "tokens" if name == "seqlen" else "hidden"
                raise ValueError(f"--{name.replace('_', '-')} {size} does not divide --{whole} {total}")
    return [
        Cell(d, s, tokens // s, hidden // d, causal, dtype)
        for d in head_dims
        for causal in (False, True)
        for s in seqlens
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Output


def _columns(rows: Sequence[Row]) -> list[str]:
    """cupyfa, then everyone who was timed anywhere."""
    return ["cupyfa", *(peer.name for peer in PEERS if any(peer.name in row.timings for row in rows))]


def format_table(rows: Sequence[Row]) -> list[str]:
    """Return the figures as a Markdown table.

    Parameters
    ----------
    rows : sequence of Row
        The cells.

    Returns
    -------
    list of str
        The lines. ``wrong`` stands for who failed the check, ``refused`` for who raised an error, and a dash for who
        did not take part.
    """
    names = _columns(rows)
    titles = ["head_dim", "mask", "seqlen", *names, f"cupyfa / {BASELINE} [min..max]", "cupyfa error", "of limit"]
    lines = [line(*titles), "|" + "---:|" * len(titles)]
    for row in rows:
        cell = row.cell
        figures = [speed(row, name) for name in names]
        over = quotient(row.timings.get("cupyfa"), row.timings.get(BASELINE))
        lines.append(line(cell.head_dim, cell.mask, cell.seqlen, *figures, over, *errors(row)))
    return lines


def format_notes(rows: Sequence[Row], peers: Sequence[Availability], header: dict[str, Any]) -> list[str]:
    """Return what belongs below the table: conventions, machine, versions, who is absent or wrong.

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
    dtypes = sorted({row.cell.dtype for row in rows})
    lines = [
        f"Useful TFLOP/s, {', '.join(dtypes)}: 2\\*B\\*H\\*Sq\\*Sk\\*(d+dv) operations, causal halved. Medians; the "
        "ratio is formed within a round.",
        f"{manifest.CONVENTIONS['timing_boundary']}; interleaved batches of {header['batch_seconds']} s; inputs about "
        "N(0, 1).",
        f"Error: largest difference from float64 (sampled rows) and from {BASELINE} (everything). Limit: "
        f"{LIMIT_TEXT}.".replace("*", "\\*"),
        *notes.circumstances(rows, peers, header),
    ]
    return [f"* {note}" for note in lines]


def plot(rows: Sequence[Row], path: str) -> None:
    """Save a bar chart: a group for each cell, a bar for each contestant.

    Parameters
    ----------
    rows : sequence of Row
        The cells.
    path : str
        PNG or SVG, by its suffix.
    """
    names = _columns(rows)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(2.5 + 0.22 * len(rows) * len(names), 4.5), layout="constrained"
    )
    axes = figure.subplots()
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        positions = [group + (place - (len(names) - 1) / 2) * width for group in range(len(rows))]
        axes.bar(positions, [row.tflops(name) or 0.0 for row in rows], width, label=name)
    labels = [f"d{r.cell.head_dim}\n{r.cell.mask}\n{r.cell.seqlen}" for r in rows]
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylabel("useful TFLOP/s (causal halved)")
    axes.set_title("Attention forward, short interleaved batches, medians")
    axes.legend(ncols=len(names))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the command.
    """
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256], metavar="D")
    parser.add_argument("--seqlen", type=int, nargs="+", default=[1024, 4096, 16384], metavar="S")
    parser.add_argument("--tokens", type=int, default=16384, help="batch * seqlen (%(default)s)")
    parser.add_argument("--hidden", type=int, default=2048, help="heads * head_dim (%(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    add_timing(parser, [peer.name for peer in PEERS])
    parser.add_argument("--plot", metavar="PATH", help="save a bar chart, PNG or SVG (needs matplotlib)")


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
    try:
        problems = cells(options.head_dim, options.seqlen, options.tokens, options.hidden, options.dtype)
    except ValueError as error:
        print(f"bench forward: {error}", file=sys.stderr)
        return 2
    if reason := why_not_here() or (why_missing("matplotlib") if options.plot else None):
        print(reason, file=sys.stderr)
        return 2
    import cupy

    present, found = invite(PEERS, options.peers)
    clocks = Clocks(cupy.cuda.Device().pci_bus_id)
    with cupy.cuda.Stream.null:  # the legacy default stream, which is also torch's
        groups = [[cell] for cell in problems]
        rows = measure_all("forward", groups, present, options.rounds, clocks, options.batch_seconds)
        cost = host.measure()
    header = manifest.environment(clocks, found, options.batch_seconds)
    if options.json:
        manifest.write(options.json, header, rows, host.describe(cost))
    if options.plot:
        plot(rows, options.plot)
    print("\n".join([*format_table(rows), "", *format_notes(rows, found, header), "", *host.format_lines(cost)]))
    with tempfile.TemporaryDirectory() as cache:
        print("\n" + first_call.format_line(first_call.first_calls(Path(cache))))
    return 0 if all(row.checks["cupyfa"].passed for row in rows) else 1
