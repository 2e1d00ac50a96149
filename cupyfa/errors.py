"""The exceptions of cupyfa. Wrong arguments raise TypeError or ValueError, as everywhere in Python."""

from __future__ import annotations

__all__ = ["CompileError", "LaunchError", "UnsupportedError"]


class UnsupportedError(ValueError):
    """The arguments are meaningful, but no kernel fits them; the message says what would fit."""


class CompileError(RuntimeError):
    """A kernel did not compile, or the installed compiler cannot compile it."""


class LaunchError(RuntimeError):
    """The CUDA driver refused a call; the message names its CUresult."""
