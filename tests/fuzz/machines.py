"""What computes a problem: NumPy, the emulator or a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuzz.generators import Problem

Buffers = dict[str, np.ndarray[Any, Any]]
_PATIENCE = 30.0  # seconds for a kernel that takes less than a millisecond


@dataclass(frozen=True)
class Outcome:
    """What is there after a call, on the host: the buffers of the arrays that were passed, and the results."""

    buffers: Buffers
    results: dict[str, Any]


def on_numpy(problem: Problem, buffers: Buffers, **more: Any) -> Outcome:
    """By the oracle."""
    after = {name: buffer.copy() for name, buffer in buffers.items()}
    return Outcome(after, _call(problem, after, more))


def on_emulator(problem: Problem, buffers: Buffers) -> Outcome:
    """By the kernel, instruction by instruction."""
    return on_numpy(problem, buffers, backend="emulator")


def on_cuda(problem: Problem, buffers: Buffers) -> Outcome:
    """By the kernel."""
    import cupy

    there = {name: cupy.asarray(buffer) for name, buffer in buffers.items()}
    results = _call(problem, there, {})
    stream, begin = cupy.cuda.get_current_stream(), time.monotonic()
    while not stream.done:
        if time.monotonic() - begin > _PATIENCE:
            raise TimeoutError(f"the kernel hangs: not finished after {_PATIENCE:g} s")
    after = {name: buffer.get() for name, buffer in there.items()}
    return Outcome(after, {name: x.get() for name, x in results.items()})


MACHINES: dict[str, Callable[[Problem, Buffers], Outcome]] = {
    "numpy": on_numpy,
    "emulator": on_emulator,
    "cuda": on_cuda,
}


def _call(problem: Problem, buffers: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs; those that were passed have to be the ones that come back."""
    arrays = {name: place.view(buffers[name]) for name, place in problem.places.items()}
    results = problem.results(problem.function(**arrays, **problem.options, **more))
    for name, returned in results.items():
        assert arrays.get(name, returned) is returned, f"{name} was passed, and another array comes back"
    return {name: arrays[name] for name in problem.written if name in arrays} | results
