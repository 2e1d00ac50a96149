"""What the commands share: the type of an option that counts, and what has to be installed."""

from __future__ import annotations

import argparse
import importlib.util

__all__ = ["count", "why_missing"]


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
