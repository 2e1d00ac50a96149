"""Check and time cells: each alone, or several of one shape in the same rounds."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import cupyfa
from cupyfa.bench.clocks import Clocks
from cupyfa.bench.correctness import Check, check_all
from cupyfa.bench.harness import Contestant, Timer, time_in_turn, time_on_gpu
from cupyfa.bench.manifest import Row
from cupyfa.bench.peers import Peer, enter
from cupyfa.bench.problems import Cell, Inputs, share_inputs
from cupyfa.spec import FwdSpec

__all__ = ["measure", "measure_all", "one_line"]


def measure(
    group: Sequence[Inputs],
    peers: Sequence[Peer],
    rounds: int,
    timer: Timer = time_on_gpu,
    clocks: Clocks | None = None,
    batch_seconds: float = 0.010,
) -> list[Row]:
    """Check some problems, and time all of them in the same rounds.

    Parameters
    ----------
    group : sequence of Inputs
        The arrays of each problem.
    peers : sequence of Peer
        Those that are present.
    rounds : int
        Rounds of the timing.
    timer : Callable
        As for :func:`cupyfa.bench.harness.time_in_turn`.
    clocks : Clocks, optional
        Read before and after.
    batch_seconds : float
        As for :func:`cupyfa.bench.harness.time_in_turn`.

    Returns
    -------
    list of Row
        In their order. Who is wrong has a check and no timing; the figures of one round stand at one index.
    """
    judged = [_judge(inputs, peers) for inputs in group]
    entries = [(index, contestant) for index, (_, passed) in enumerate(judged) for contestant in passed]
    before = None if clocks is None else clocks.read()
    timings = time_in_turn([contestant for _, contestant in entries], rounds, timer, batch_seconds=batch_seconds)
    after = None if clocks is None else clocks.read()
    rows = []
    for index, (inputs, (checks, _)) in enumerate(zip(group, judged, strict=True)):
        own = {entry.name: timing for (i, entry), timing in zip(entries, timings, strict=True) if i == index}
        spec = _spec(inputs) if checks["cupyfa"].passed else None
        rows.append(Row(inputs.cell, spec, checks, own, before, after))
    return rows


def _judge(inputs: Inputs, peers: Sequence[Peer]) -> tuple[dict[str, Check], list[Contestant]]:
    """Return the verdicts, and who passed."""
    contestants, failed = enter(inputs, peers)
    checks = {name: Check(False, message=reason, refused=True) for name, reason in failed.items()}
    checks |= check_all(contestants, inputs)
    return checks, [contestant for contestant in contestants if checks[contestant.name].passed]


def _spec(inputs: Inputs) -> FwdSpec | None:
    selection = cupyfa.explain(inputs.q, inputs.k, inputs.v, **inputs.options).selection
    return None if selection is None else selection.spec


def measure_all(
    title: str,
    groups: Sequence[Sequence[Cell]],
    peers: Sequence[Peer],
    rounds: int,
    clocks: Clocks,
    batch_seconds: float,
) -> list[Row]:
    """Measure groups one after the other, with a progress bar.

    Parameters
    ----------
    title : str
        Of the bar.
    groups : sequence of sequence of Cell
        The cells of a group are of one shape and share its rounds.
    peers, rounds, clocks, batch_seconds
        As for :func:`measure`.

    Returns
    -------
    list of Row
        Of all cells, in their order.
    """
    import cupy
    from tqdm import tqdm

    rows = []
    with tqdm(total=sum(map(len, groups)), desc=title, unit="cell", file=sys.stderr) as progress:
        for group in groups:
            progress.set_postfix_str(str(group[0]))
            for row in measure(share_inputs(group, cupy), peers, rounds, clocks=clocks, batch_seconds=batch_seconds):
                progress.write(f"{row.cell}: {one_line(row)}", file=sys.stderr)
                rows.append(row)
            progress.update(len(group))
    return rows


def one_line(row: Row) -> str:
    """Tell who was right, by how much.

    Parameters
    ----------
    row : Row
        The cell.

    Returns
    -------
    str
        One line.
    """
    parts = []
    for name, check in row.checks.items():
        known = check.peer if check.peer is not None else check.float64
        figure = "" if known is None else f" {known:.1e} from {check.reference or 'float64'}"
        parts.append(
            f"{name} {'ok' if check.passed else 'WRONG'}{figure}{' ' + check.message if check.message else ''}"
        )
    return "; ".join(parts)
