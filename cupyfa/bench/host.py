"""Host cost of a warm call: thousands of calls on a small problem between two synchronisations.

The GPU's part is a few microseconds and runs behind the host, so the time between the synchronisations over the number
of calls is what a call costs its caller. Run as ``python -m cupyfa bench host``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping
from typing import Any

from cupyfa.bench.correctness import check_all
from cupyfa.bench.harness import Contestant, Spread, interleave
from cupyfa.bench.peers import enter, why_not_here
from cupyfa.bench.problems import Cell, make_inputs
from cupyfa.bench.usage import count

__all__ = [
    "CELL",
    "DESCRIPTION",
    "HostCost",
    "add_arguments",
    "describe",
    "format_lines",
    "measure",
    "run",
    "time_on_host",
]

#: Of the command, for its help.
DESCRIPTION = (
    "Host cost of a warm call. Exit status: 0; 1 if cupyfa was not timed; 2 without a GPU, or for wrong usage."
)

#: Small enough for the host to be the slower one.
CELL = Cell(head_dim=64, seqlen=128, batch=1, heads=2, causal=False)


@dataclasses.dataclass(frozen=True)
class HostCost:
    """What was measured.

    Attributes
    ----------
    cell : Cell
        The problem.
    calls : int
        Calls of a batch.
    microseconds : Mapping
        Name to Spread of one call, over the batches.
    failed : Mapping
        Name to reason, for who was not timed.
    """

    cell: Cell
    calls: int
    microseconds: Mapping[str, Spread]
    failed: Mapping[str, str]


def time_on_host(contestant: Contestant, calls: int) -> float:
    """Time a batch of calls between two synchronisations of the stream.

    Parameters
    ----------
    contestant : Contestant
        What to run.
    calls : int
        Number of calls.

    Returns
    -------
    float
        Seconds of the batch.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    call = contestant.call
    with contestant.context():
        stream.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        stream.synchronize()
        return time.perf_counter() - begin


def measure(calls: int = 2000, rounds: int = 9, cell: Cell = CELL) -> HostCost:
    """Measure cupyfa and the peers that are present.

    Parameters
    ----------
    calls : int
        Calls of a batch.
    rounds : int
        Batches of a contestant.
    cell : Cell
        The problem.

    Returns
    -------
    HostCost
        Microseconds of a call.
    """
    import cupy

    inputs = make_inputs(cell, cupy)
    contestants, failed = enter(inputs)
    checks = check_all(contestants, inputs)
    failed |= {name: check.message for name, check in checks.items() if not check.passed}
    timings = interleave([c for c in contestants if checks[c.name].passed], rounds, time_on_host, calls=calls)
    spreads = {name: Spread.of([1e6 * s for s in timing.seconds]) for name, timing in timings.items()}
    return HostCost(cell, calls, spreads, failed)


def describe(cost: HostCost) -> dict[str, Any]:
    """Describe the result for the manifest.

    Parameters
    ----------
    cost : HostCost
        The result.

    Returns
    -------
    dict
        Ready for JSON.
    """
    boundary = f"host clock around {cost.calls} calls between two synchronisations"
    return {**dataclasses.asdict(cost), "timing_boundary": boundary, "statistic": "median, smallest, largest batch"}


def format_lines(cost: HostCost) -> list[str]:
    """Return the result as lines of Markdown.

    Parameters
    ----------
    cost : HostCost
        The result.

    Returns
    -------
    list of str
        One line for each contestant, after a line that says what was measured.
    """
    lines = [f"Host cost of a warm call, {cost.cell}, {cost.calls} calls between two synchronisations:", ""]
    shown = sorted(cost.microseconds, key=lambda name: name != "cupyfa")
    lines += [f"* {name}: {_microseconds(cost.microseconds[name])}" for name in shown]
    lines += [f"* {name}: not timed: {reason}" for name, reason in cost.failed.items()]
    return lines


def _microseconds(spread: Spread) -> str:
    return f"{spread.median:.1f} us [{spread.low:.1f}..{spread.high:.1f}]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the command.
    """
    parser.add_argument("--calls", type=count, default=2000, help="calls between two synchronisations")
    parser.add_argument("--rounds", type=count, default=9, help="batches of each contestant")


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

    with cupy.cuda.Stream.null:  # the legacy default stream, which is also torch's
        cost = measure(options.calls, options.rounds)
    print("\n".join(format_lines(cost)))
    return 0 if "cupyfa" in cost.microseconds else 1
