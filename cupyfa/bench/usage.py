"""What the commands share: types of options, the options of a timing beside peers, and what has to be installed."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

__all__ = ["add_timing", "count", "seconds", "why_missing"]


def count(text: str) -> int:
    """Read an option that is at least 1; a type for argparse.

    Parameters
    ----------
    text : str
        What the user wrote.

    Returns
    -------
    int
        Its value.

    Raises
    ------
    argparse.ArgumentTypeError
        It is no integer, or below 1.
    """
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be an integer") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {value}; it must be at least 1")
    return value


def seconds(text: str) -> float:
    """Read the length of a batch; a type for argparse.

    Parameters
    ----------
    text : str
        What the user wrote.

    Returns
    -------
    float
        Its value.

    Raises
    ------
    argparse.ArgumentTypeError
        It is no number, not above 0, or above a minute.
    """
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a number of seconds") from None
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError(f"it is {value}; it must be above 0 and at most 60")
    return value


def add_timing(parser: argparse.ArgumentParser, peers: Sequence[str]) -> None:
    """Declare the options of a timing beside peers.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the command.
    peers : sequence of str
        Who may take part.
    """
    parser.add_argument("--rounds", type=count, default=7, help="rounds of the timing (%(default)s)")
    parser.add_argument(
        "--batch-seconds",
        type=seconds,
        default=0.010,
        metavar="T",
        help="length of a batch (%(default)s); with 1 or more the GPU runs at the clocks that its power allows",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=peers,
        default=list(peers),
        metavar="NAME",
        help=f"who may take part beside cupyfa: {', '.join(peers)}; without a name nobody; how hot the GPU is depends "
        "on the company (all)",
    )
    parser.add_argument("--json", metavar="PATH", help="write the manifest with all figures")


def why_missing(*packages: str) -> str | None:
    """Return one sentence if a package of the extra ``bench`` is not installed.

    Parameters
    ----------
    *packages : str
        Top-level names of what the command imports.

    Returns
    -------
    str or None
        It names the packages and the extra.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"The benchmark needs {' and '.join(missing)}: pip install 'cupyfa[bench]'" if missing else None
