"""The exceptions of cupyfa. Wrong arguments raise TypeError or ValueError, as everywhere in Python."""

from __future__ import annotations

__all__ = ["CompileError", "HazardError", "LaunchError", "UnsupportedError", "type_name"]


class UnsupportedError(ValueError):
    """The arguments are meaningful, but no kernel fits them; the message says what would fit."""


class CompileError(RuntimeError):
    """A kernel did not compile, or the installed compiler cannot compile it.

    Parameters
    ----------
    message : str
        The first line says what is wrong.
    spec : object, optional
        The :class:`cupyfa.spec.FwdSpec` that did not compile.
    log : str
        What the compiler said.

    Attributes
    ----------
    spec : object
        As given.
    log : str
        As given; file names in it are those below ``cuda/``.
    """

    def __init__(self, message: str, *, spec: object = None, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.spec = spec
        self.log = log


class LaunchError(RuntimeError):
    """The CUDA driver refused a call; the message names its CUresult."""


class HazardError(RuntimeError):
    """The emulator found a hazard in a kernel, or could not run it; the message is the report.

    Parameters
    ----------
    run : object
        The :class:`cupyfa.emulator.Run`.

    Attributes
    ----------
    run : object
        As given.
    """

    def __init__(self, run: object) -> None:
        super().__init__(str(run))
        self.run = run


def type_name(kind: type) -> str:
    """Return the short name of a type, for messages.

    Parameters
    ----------
    kind : type
        Any type.

    Returns
    -------
    str
        Such as ``numpy.ndarray``, ``torch.Tensor`` or ``list``.
    """
    return (
        kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}.{kind.__qualname__}"
    )
