"""The gradients beside those of torch. Run as ``python -m cupyfa bench backward``; ``--help`` lists the options.

A call is all kernels of `attention_backward`, into gradients and a workspace that are there already, with additions in
any order and in one order. Torch walks the graph of a forward pass that was made before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import cupyfa
from cupyfa.bench import backward_kernels, forward, manifest, notes
from cupyfa.bench.clocks import Clocks
from cupyfa.bench.columns import errors, line, quotient, speed
from cupyfa.bench.correctness import Check
from cupyfa.bench.gradients import (
    DETERMINISTIC,
    GRADIENT_LIMIT_TEXT,
    GRADIENT_PEERS,
    BackwardCell,
    BackwardInputs,
    check_gradients,
    make_backward_inputs,
    own_contestant,
)
from cupyfa.bench.harness import Timer, interleave, keep_busy, time_on_gpu
from cupyfa.bench.manifest import Row
from cupyfa.bench.measure import one_line
from cupyfa.bench.peers import BASELINE, Availability, Peer, invite, prepare_all, why_not_here
from cupyfa.bench.usage import add_timing
from cupyfa.errors import UnsupportedError

__all__ = [
    "CONVENTIONS",
    "DESCRIPTION",
    "add_arguments",
    "cells",
    "format_notes",
    "format_table",
    "head_dims",
    "measure",
    "run",
]

#: Of the command, for its help.
DESCRIPTION = (
    "Time cupyfa's gradients, deterministic or not, beside torch's. Exit status: 0; 1 if cupyfa was wrong somewhere; 2 "
    "without a GPU, or for wrong usage."
)

_OWN = ("cupyfa", DETERMINISTIC)
_BUSY_SECONDS = 0.05  # before the timing of a problem

#: The rules of the figures.
CONVENTIONS = manifest.CONVENTIONS | {
    "flops": "useful: 2.5 times the 2*B*H*Sq*Sk*(d+dv) of the forward pass, causal halved; dense_equivalent: without a "
    "mask; scheduled: whole tiles, 3 products over d and 2 over dv",
    "inputs": "cupyfa.testing.random_array, about N(0, 1), seeds 1, 2, 3, of dout 6; the same arrays for everyone",
    "correctness": f"each element within {GRADIENT_LIMIT_TEXT}: one head against float64, everything against the "
    "reference",
    "parts": "each kernel of the call that is not deterministic by itself, in rounds of their own",
}


def head_dims(text: str) -> tuple[int, int]:
    """Read a head_dim, or that of q and k and that of v; a type for argparse.

    Parameters
    ----------
    text : str
        What the user wrote.

    Returns
    -------
    tuple of int
        Of q and k, and of v.

    Raises
    ------
    argparse.ArgumentTypeError
        It is neither one positive integer nor two.
    """
    parts = text.split(",")
    try:
        sizes = [int(part) for part in parts]
    except ValueError:
        sizes = []
    if len(sizes) not in (1, 2) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a head_dim, or two: that of q and k, that of v")
    return sizes[0], sizes[-1]


def cells(
    sizes: Sequence[tuple[int, int]], seqlens: Sequence[int], tokens: int, hidden: int, dtype: str = "bfloat16"
) -> list[BackwardCell]:
    """List the problems: all head dimensions, without and with the causal mask, at every length.

    Parameters
    ----------
    sizes : sequence of tuple of int
        head_dim of q and k, and of v.
    seqlens : sequence of int
        Of queries and keys.
    tokens : int
        batch * seqlen.
    hidden : int
        heads * head_dim of v.
    dtype : str
        Type of the arrays.

    Returns
    -------
    list of BackwardCell
        In the order of the table.

    Raises
    ------
    ValueError
        A size does not divide.
    """
    return [
        BackwardCell(d, c.seqlen, c.batch, c.heads, c.causal, c.dtype, head_dim_v=None if d == dv else dv)
        for d, dv in sizes
        for c in forward.cells([dv], seqlens, tokens, hidden, dtype)
    ]


def measure(
    inputs: BackwardInputs,
    peers: Sequence[Peer],
    rounds: int,
    xp: Any,
    timer: Timer = time_on_gpu,
    clocks: Clocks | None = None,
    batch_seconds: float = 0.010,
) -> Row:
    """Check and time a problem.

    Parameters
    ----------
    inputs : BackwardInputs
        Its arrays.
    peers : sequence of Peer
        Those that are present.
    rounds : int
        Rounds of the timing.
    xp : module
        Of the arrays.
    timer, clocks, batch_seconds
        As for :func:`cupyfa.bench.measure.measure`.

    Returns
    -------
    Row
        With the parts of cupyfa's time, unless it was wrong.
    """
    contestants, failed = prepare_all(inputs, peers)
    spec, workspace = backward_kernels.prepare(inputs, False)
    contestants.append(own_contestant(inputs, xp, False, workspace))
    contestants.append(own_contestant(inputs, xp, True, backward_kernels.prepare(inputs, True)[1]))
    checks = {name: Check(False, message=reason, refused=True) for name, reason in failed.items()}
    checks |= check_gradients(contestants, inputs, xp)
    passed = [contestant for contestant in contestants if checks[contestant.name].passed]
    kernels = backward_kernels.parts(inputs, workspace) if checks["cupyfa"].passed else []
    for contestant in passed[-1:]:
        keep_busy(contestant, timer, _BUSY_SECONDS)
    before = None if clocks is None else clocks.read()
    timings = interleave(passed, rounds, timer, batch_seconds=batch_seconds)
    after = None if clocks is None else clocks.read()
    parts = interleave(kernels, rounds, timer, batch_seconds=batch_seconds)
    return Row(inputs.cell, spec if checks["cupyfa"].passed else None, checks, timings, before, after, parts)


# ----------------------------------------------------------------------------------------------------------------------
# Output


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
    names = [*_OWN, *(peer.name for peer in GRADIENT_PEERS if any(peer.name in row.checks for row in rows))]
    titles = (
        *("head_dim", "mask", "seqlen", *names),
        *(f"{name} / {BASELINE} [min..max]" for name in _OWN),
        *(f"{name} us" for name in backward_kernels.PARTS),
        *("cupyfa error", "of limit"),
    )
    lines = [line(*titles), "|" + "---:|" * len(titles)]
    for row in rows:
        cell, baseline = row.cell, row.timings.get(BASELINE)
        microseconds = (
            f"{1e6 * row.parts[name].spread.median:.0f}" if name in row.parts else "-"
            for name in backward_kernels.PARTS
        )
        lines.append(
            line(
                *(cell.head_dims, cell.mask, cell.seqlen),
                *(speed(row, name) for name in names),
                *(quotient(row.timings.get(name), baseline) for name in _OWN),
                *(*microseconds, *errors(row)),
            )
        )
    return lines


def format_notes(rows: Sequence[Row], peers: Sequence[Availability], header: dict[str, Any]) -> list[str]:
    """Return what belongs below the table: conventions, machine, versions, who is absent, who refused or was wrong.

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
        f"Useful TFLOP/s, {', '.join(dtypes)}: 2.5 times the 2\\*B\\*H\\*Sq\\*Sk\\*(d+dv) operations of the forward "
        "pass, causal halved. Medians; ratios are formed within a round.",
        f"A call is all kernels of attention_backward, with dq, dk, dv and workspace given; {DETERMINISTIC}: with "
        "deterministic=True. Torch: autograd.grad of a graph that is kept.",
        f"{CONVENTIONS['timing_boundary']}; interleaved batches of {header['batch_seconds']} s; inputs about N(0, 1).",
        "preprocess, main, postprocess: each kernel of the first column by itself, in rounds of their own; in a call "
        "each begins under the end of the one before.",
        f"Error: largest difference from float64 (one head) and from {BASELINE} (everything). Limit: "
        f"{GRADIENT_LIMIT_TEXT}.".replace("*", "\\*"),
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
    parser.add_argument(
        "--head-dim",
        type=head_dims,
        nargs="+",
        default=[(64, 64), (128, 128), (256, 256), (192, 128)],
        metavar="D[,DV]",
        help="head_dim, with that of v behind it if it is another one (64 128 256 192,128)",
    )
    parser.add_argument("--seqlen", type=int, nargs="+", default=[1024, 4096, 16384], metavar="S")
    parser.add_argument("--tokens", type=int, default=16384, help="batch * seqlen (%(default)s)")
    parser.add_argument("--hidden", type=int, default=2048, help="heads * head_dim of v (%(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    add_timing(parser, [peer.name for peer in GRADIENT_PEERS])


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
        print(f"bench backward: {error}", file=sys.stderr)
        return 2
    if reason := why_not_here():
        print(reason, file=sys.stderr)
        return 2
    import cupy
    from tqdm import tqdm

    present, found = invite(GRADIENT_PEERS, options.peers)
    clocks = Clocks(cupy.cuda.Device().pci_bus_id)
    rows = []
    with cupy.cuda.Stream.null:  # the legacy default stream, which is also torch's
        try:
            cupyfa.warmup([cell.warmup_call for cell in problems])
            backward_kernels.compile_all(problems)
        except UnsupportedError as error:
            print(f"bench backward: {error}", file=sys.stderr)
            return 2
        with tqdm(problems, desc="backward", unit="cell", file=sys.stderr) as progress:
            for cell in progress:
                progress.set_postfix_str(str(cell))
                inputs = make_backward_inputs(cell, cupy)
                row = measure(
                    inputs, present, options.rounds, cupy, clocks=clocks, batch_seconds=options.batch_seconds
                )  # fmt: skip
                progress.write(f"{cell}: {one_line(row)}", file=sys.stderr)
                rows.append(row)
    header = manifest.environment(clocks, found, options.batch_seconds)
    if options.json:
        manifest.write(options.json, header, rows, None, conventions=CONVENTIONS)
    print("\n".join([*format_table(rows), "", *format_notes(rows, found, header)]))
    return 0 if all(row.checks[name].passed for row in rows for name in _OWN) else 1
