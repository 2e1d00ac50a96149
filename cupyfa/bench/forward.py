"""The forward pass beside its peers. Run as ``python -m cupyfa bench forward``; ``--help`` lists the options."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cupyfa
from cupyfa.bench import first_call, host, manifest
from cupyfa.bench.clocks import Clocks
from cupyfa.bench.correctness import LIMIT_TEXT, Check, check_all
from cupyfa.bench.harness import Timer, interleave, ratio, time_on_gpu
from cupyfa.bench.manifest import Row
from cupyfa.bench.peers import BASELINE, PEERS, Availability, Peer, enter, probe_all, why_not_here
from cupyfa.bench.problems import Cell, Inputs, make_inputs
from cupyfa.bench.usage import count, why_missing

__all__ = ["DESCRIPTION", "add_arguments", "cells", "format_notes", "format_table", "measure_cell", "plot", "run"]

#: Of the command, for its help.
DESCRIPTION = (
    "Time cupyfa's forward pass beside every peer that imports. Exit status: 0; 1 if cupyfa was wrong somewhere; 2 "
    "without a GPU or the extra `bench`, or for wrong usage."
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


def measure_cell(
    inputs: Inputs,
    peers: Sequence[Peer],
    rounds: int,
    timer: Timer = time_on_gpu,
    clocks: Clocks | None = None,
    batch_seconds: float = 0.010,
) -> Row:
    """Check and time one problem.

    Parameters
    ----------
    inputs : Inputs
        The arrays.
    peers : sequence of Peer
        Those that are present.
    rounds : int
        Rounds of the timing.
    timer : Callable
        As for :func:`cupyfa.bench.harness.interleave`.
    clocks : Clocks, optional
        Read before and after.
    batch_seconds : float
        As for :func:`cupyfa.bench.harness.interleave`.

    Returns
    -------
    Row
        Who is wrong has a check and no timing.
    """
    contestants, failed = enter(inputs, peers)
    checks = {name: Check(False, message=reason) for name, reason in failed.items()}
    checks |= check_all(contestants, inputs)
    before = None if clocks is None else clocks.read()
    passed = [c for c in contestants if checks[c.name].passed]
    timings = interleave(passed, rounds, timer, batch_seconds=batch_seconds)
    after = None if clocks is None else clocks.read()
    spec = None
    if checks["cupyfa"].passed:
        selection = cupyfa.explain(inputs.q, inputs.k, inputs.v, causal=inputs.cell.causal).selection
        spec = None if selection is None else selection.spec
    return Row(inputs.cell, spec, checks, timings, before, after)


# ----------------------------------------------------------------------------------------------------------------------
# Output


def _columns(rows: Sequence[Row]) -> list[str]:
    """cupyfa, then everyone who was timed anywhere."""
    return ["cupyfa", *(peer.name for peer in PEERS if any(peer.name in row.timings for row in rows))]


def _tflops(row: Row, name: str) -> float | None:
    timing = row.timings.get(name)
    return None if timing is None else row.cell.useful_flops / timing.spread.median / 1e12


def format_table(rows: Sequence[Row]) -> list[str]:
    """Return the figures as a Markdown table.

    Parameters
    ----------
    rows : sequence of Row
        The cells.

    Returns
    -------
    list of str
        The lines. ``wrong`` stands for who failed the check, and a dash for who did not take part.
    """
    names = _columns(rows)
    titles = ["head_dim", "mask", "seqlen", *names, f"cupyfa / {BASELINE} [min..max]", "cupyfa error", "of limit"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---:|" * len(titles)]
    for row in rows:
        cell = row.cell
        figures = []
        for name in names:
            speed, check = _tflops(row, name), row.checks.get(name)
            wrong = "wrong" if check is not None and not check.passed else "-"
            figures.append(wrong if speed is None else f"{speed:.0f}")
        quotient, own = "-", row.checks["cupyfa"]
        if "cupyfa" in row.timings and BASELINE in row.timings:
            r = ratio(row.timings["cupyfa"], row.timings[BASELINE])
            quotient = f"{r.median:.3f} [{r.low:.3f}..{r.high:.3f}]"
        errors = [error for error in (own.float64, own.peer) if error is not None]
        error = f"{max(errors):.1e}" if errors else "-"
        share = "-" if own.share is None else f"{own.share:.2f}"
        mask = "causal" if cell.causal else "full"
        lines.append(
            f"| {' | '.join([str(cell.head_dim), mask, str(cell.seqlen), *figures, quotient, error, share])} |"
        )
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
        f"{header['gpu']}, driver {header['driver']}, NVRTC {header['nvrtc']}, CuPy {header['cupy']}, torch "
        f"{header['torch']}, cuDNN {header['cudnn']}, cupyfa {header['cupyfa']}.",
    ]
    seen = [row.after for row in rows if row.after is not None]
    if seen:
        mhz, watts = [x["sm_mhz"] for x in seen], [x["power_w"] for x in seen]
        lines.append(
            f"After a cell: SM {min(mhz):.0f} to {max(mhz):.0f} MHz, power {min(watts):.0f} to {max(watts):.0f} W."
        )
    lines += [f"{peer.title} ({peer.name}): {peer.version}" for peer in peers if peer.version is not None]
    lines += [f"{peer.title} ({peer.name}): absent: {peer.reason}" for peer in peers if peer.version is None]
    for row in rows:
        lines += [f"{name}, {row.cell}: not timed: {c.message}" for name, c in row.checks.items() if not c.passed]
    return [f"* {line}" for line in lines]


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
        axes.bar(positions, [_tflops(row, name) or 0.0 for row in rows], width, label=name)
    labels = [f"d{r.cell.head_dim}\n{'causal' if r.cell.causal else 'full'}\n{r.cell.seqlen}" for r in rows]
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylabel("useful TFLOP/s (causal halved)")
    axes.set_title("Attention forward, short interleaved batches, medians")
    axes.legend(ncols=len(names))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a number of seconds") from None
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError(f"it is {value}; it must be above 0 and at most 60")
    return value


def _measure_all(
    problems: Sequence[Cell], peers: Sequence[Peer], rounds: int, clocks: Clocks, batch_seconds: float
) -> list[Row]:
    import cupy
    from tqdm import tqdm

    rows = []
    with tqdm(problems, desc="forward", unit="cell", file=sys.stderr) as progress:
        for cell in progress:
            progress.set_postfix_str(str(cell))
            row = measure_cell(make_inputs(cell, cupy), peers, rounds, clocks=clocks, batch_seconds=batch_seconds)
            progress.write(f"{cell}: {_one_line(row)}", file=sys.stderr)
            rows.append(row)
    return rows


def _one_line(row: Row) -> str:
    """Who was right, by how much."""
    parts = []
    for name, check in row.checks.items():
        known = check.peer if check.peer is not None else check.float64
        figure = "" if known is None else f" {known:.1e} from {check.reference or 'float64'}"
        parts.append(
            f"{name} {'ok' if check.passed else 'WRONG'}{figure}{' ' + check.message if check.message else ''}"
        )
    return "; ".join(parts)


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
    parser.add_argument("--rounds", type=count, default=7, help="rounds of the timing (%(default)s)")
    parser.add_argument(
        "--batch-seconds",
        type=_seconds,
        default=0.010,
        metavar="T",
        help="length of a batch (%(default)s); with 1 or more the GPU runs at the clocks that its power allows",
    )
    names = [peer.name for peer in PEERS]
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"who may take part beside cupyfa: {', '.join(names)}; how hot the GPU is depends on the company (all)",
    )
    parser.add_argument("--json", metavar="PATH", help="write the manifest with all figures")
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
    if reason := why_not_here() or why_missing("tqdm", *(["matplotlib"] if options.plot else [])):
        print(reason, file=sys.stderr)
        return 2
    import cupy

    invited = [peer for peer in PEERS if peer.name in options.peers]
    found = probe_all(invited)
    present = [peer for peer, availability in zip(invited, found, strict=True) if availability.version is not None]
    clocks = Clocks(cupy.cuda.Device().pci_bus_id)
    with cupy.cuda.Stream.null:  # the legacy default stream, which is also torch's
        rows = _measure_all(problems, present, options.rounds, clocks, options.batch_seconds)
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
