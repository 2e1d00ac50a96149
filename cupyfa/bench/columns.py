"""Entries of a benchmark's table."""

from __future__ import annotations

from cupyfa.bench.harness import Timing, ratio
from cupyfa.bench.manifest import Row

__all__ = ["errors", "line", "quotient", "speed"]


def speed(row: Row, name: str) -> str:
    """Return the useful TFLOP/s of a contestant.

    Parameters
    ----------
    row : Row
        The cell.
    name : str
        The contestant.

    Returns
    -------
    str
        ``wrong`` for one that failed the check, ``refused`` for one that raised an error, and a dash for one that did
        not take part.
    """
    figure, check = row.tflops(name), row.checks.get(name)
    if figure is None:
        if check is None or check.passed:
            return "-"
        return "refused" if check.refused else "wrong"
    return f"{figure:.0f}"


def quotient(timing: Timing | None, baseline: Timing | None) -> str:
    """Return how many times as fast as the baseline a contestant is.

    Parameters
    ----------
    timing, baseline : Timing or None
        Of the same rounds; None for who was not timed.

    Returns
    -------
    str
        The median and the range, or a dash.
    """
    if timing is None or baseline is None:
        return "-"
    spread = ratio(timing, baseline)
    return f"{spread.median:.3f} [{spread.low:.3f}..{spread.high:.3f}]"


def errors(row: Row) -> tuple[str, str]:
    """Return cupyfa's largest error, and the largest share of the limit.

    Parameters
    ----------
    row : Row
        The cell.

    Returns
    -------
    tuple of str
        Dashes where there is none.
    """
    own = row.checks["cupyfa"]
    known = [error for error in (own.float64, own.peer) if error is not None]
    return f"{max(known):.1e}" if known else "-", "-" if own.share is None else f"{own.share:.2f}"


def line(*entries: object) -> str:
    """Return a line of a Markdown table.

    Parameters
    ----------
    *entries : object
        Its entries.

    Returns
    -------
    str
        The line.
    """
    return f"| {' | '.join(map(str, entries))} |"
