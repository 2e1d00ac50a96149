"""What there is to draw from. A function of the package joins with a module of its own and a row here."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from cupyfa.spec import FwdSpec
from fuzz import dense, lengths
from fuzz.places import Place


class Problem(Protocol):
    """A call with all that makes it."""

    #: Its kernel on Hopper; None: there is nothing to launch.
    spec: FwdSpec | None
    #: How its arrays are made; printed.
    values: Any
    #: What is called, with the arrays and the options by name.
    function: Callable[..., Any]
    #: Its arguments that are no arrays; `return_lse` among them.
    options: dict[str, Any]
    #: Where the arrays lie that are passed, by the names of their arguments.
    places: dict[str, Place]
    #: For `cupyfa.warmup`, if that can be told which kernel.
    warm_call: dict[str, Any] | None

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """What is in memory around each array."""

    def check(self, arrays: dict[str, Any], out: Any, lse: Any, *, by_kernel: bool) -> None:
        """Raise AssertionError if the outputs are wrong."""


class Generator(NamedTuple):
    """Draws problems for one function."""

    draw_templates: Callable[[random.Random, int], dict[FwdSpec, Any]]  # of so many kernels
    draw_problem: Callable[[random.Random, Any, FwdSpec], Problem]  # of a template and its kernel


GENERATORS = (
    Generator(dense.draw_templates, dense.draw_problem),
    Generator(lengths.draw_templates, lengths.draw_problem),
)
