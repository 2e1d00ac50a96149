"""What there is to draw from. A function of the package joins with a module of its own and a row here."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from cupyfa.spec import BwdSpec, FwdSpec
from fuzz import dense, gradients, lengths
from fuzz.places import Place


class Problem(Protocol):
    """A call with all that makes it."""

    #: Its kernel on Hopper, the main one of several; None: there is nothing to launch.
    spec: FwdSpec | BwdSpec | None
    #: How its arrays are made; printed.
    values: Any
    #: What is called, with the arrays and the options by name.
    function: Callable[..., Any]
    #: Its arguments that are no arrays.
    options: dict[str, Any]
    #: Where the arrays lie that are passed, by the names of their arguments.
    places: dict[str, Place]
    #: Which arrays are outputs; those that are not passed are made by the function.
    written: tuple[str, ...]
    #: For `cupyfa.warmup`, if that can be told which kernel.
    warm_call: dict[str, Any] | None

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """What is in memory around each array."""

    def results(self, returned: Any) -> dict[str, Any]:
        """What the function has returned, by the names of the outputs."""

    def check(self, arrays: dict[str, Any], results: dict[str, Any], *, by_kernel: bool) -> None:
        """Raise AssertionError if the outputs are wrong: those that were passed, and those that came back."""


class Generator(NamedTuple):
    """Draws problems for one function."""

    draw_templates: Callable[[random.Random, int], dict[Any, Any]]  # of so many kernels: specs, and what makes them
    draw_problem: Callable[[random.Random, Any, Any], Problem]  # of a template and its kernel
    share: int  # of the kernels: at least as many as its table has rows, where there are 60


GENERATORS = (
    Generator(dense.draw_templates, dense.draw_problem, 23),
    Generator(lengths.draw_templates, lengths.draw_problem, 23),
    Generator(gradients.draw_templates, gradients.draw_problem, 14),
)
