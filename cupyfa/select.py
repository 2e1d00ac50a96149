"""From a problem and a device to a kernel: a pure function over a table of candidates."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyfa.candidates import CANDIDATES, Candidate
from cupyfa.errors import UnsupportedError
from cupyfa.problem import Problem
from cupyfa.spec import Bias, FwdSpec, Scheduler

__all__ = ["CANDIDATES", "Candidate", "Config", "Device", "Selection", "Verdict", "config_items", "select"]

Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Device:
    """What selection and launch need to know about a GPU.

    Attributes
    ----------
    compute_capability : tuple of int
        (major, minor).
    multiprocessors : int
        Number of SMs.
    l2_bytes : int
        Size of the L2 cache.
    """

    compute_capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int

    @classmethod
    def current(cls) -> Device:
        """Return CuPy's current device."""
        import cupy  # noqa: PLC0415 - imported where a GPU is used

        return _device(cupy.cuda.runtime.getDevice())


@functools.cache
def _device(index: int) -> Device:
    import cupy  # noqa: PLC0415

    p = cupy.cuda.runtime.getDeviceProperties(index)
    return Device((p["major"], p["minor"]), p["multiProcessorCount"], p["l2CacheSize"])


#: An H200: for :func:`cupyfa.explain` on a machine without a GPU.
H200 = Device((9, 0), 132, 60 * 2**20)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a candidate.

    Attributes
    ----------
    candidate : Candidate
        The row.
    chosen : bool
        Whether it is the one.
    reason : str
        Why, or why not.
    """

    candidate: Candidate
    chosen: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Selection:
    """The chosen kernel and the fate of every candidate.

    Attributes
    ----------
    spec : FwdSpec
        The kernel.
    verdicts : tuple of Verdict
        In the order of the table.
    overrides : Mapping
        What ``config=`` changed.
    """

    spec: FwdSpec
    verdicts: tuple[Verdict, ...]
    overrides: Config


def select(problem: Problem, device: Device, config: Config | None = None) -> Selection:
    """Choose a kernel.

    Parameters
    ----------
    problem : Problem
        The checked problem.
    device : Device
        The GPU.
    config : Mapping, optional
        Fields of :class:`cupyfa.spec.FwdSpec` that override the chosen candidate's.

    Returns
    -------
    Selection
        The spec and the reasons.

    Raises
    ------
    UnsupportedError
        No kernel fits the device.
    TypeError, ValueError
        ``config`` names a field that a spec does not have, or that the problem decides, or has a value of another type.
    """
    if device.compute_capability != (9, 0):
        major, minor = device.compute_capability
        raise UnsupportedError(
            f"attention: the GPU has compute capability {major}.{minor}; there are kernels for 9.0 (Hopper: H100, "
            "H200). NumPy arrays run on the CPU"
        )
    best = next(row for row in CANDIDATES if row.objection(problem) is None)
    verdicts = tuple(Verdict(row, row is best, _reason(row, best, problem)) for row in CANDIDATES)
    overrides = {} if config is None else dict(config_items(config))
    spec = dataclasses.replace(best.spec(problem), **overrides)
    _check_combination(spec)
    return Selection(spec, verdicts, types.MappingProxyType(overrides))


def _reason(row: Candidate, best: Candidate, problem: Problem) -> str:
    if row is best:
        return row.reason
    if objection := row.objection(problem):
        return objection
    return f"{best.name} {best.tile_m}x{best.tile_n} comes before it"


_SWITCHES = ("overlap", "three_stage", "speculative", "pingpong", "warp_specialized", "longest_first", "setmaxnreg")
_SIZES = {
    "tile_m": (64, 128, 192),
    "tile_n": (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256),  # the shapes of cuda/ptx/wgmma.cuh
    "stages": range(1, 9),
    "q_stages": range(1, 9),
    "bias_stages": range(1, 9),
    "rescale_threshold": range(9),  # P reaches 2**8, and its sum over a row no more than float32 holds
    "exp2_fma": range(9),
}


def config_items(config: Config) -> tuple[tuple[str, Any], ...]:
    """Check ``config=`` and return its items, sorted, so that equal configurations are equal keys.

    Parameters
    ----------
    config : Mapping
        Fields of :class:`cupyfa.spec.FwdSpec`; a scheduler may be given by name.

    Returns
    -------
    tuple
        Pairs of name and value.

    Raises
    ------
    TypeError, ValueError
        A name is not a field that can be overridden, or no kernel has the value.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"attention: config is {config!r}; it must be a mapping of FwdSpec fields or None")
    return tuple(sorted((name, _config_value(name, value)) for name, value in config.items()))


def _config_value(name: str, value: Any) -> Any:
    what = f"attention: config[{name!r}] is {value!r}; it must be"
    if name in _SWITCHES:
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{what} True or False")
        return bool(value)
    if name in _SIZES:
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise TypeError(f"{what} an integer")
        if value not in _SIZES[name]:
            raise ValueError(f"{what} one of {', '.join(str(size) for size in _SIZES[name])}")
        return int(value)
    if name == "scheduler":
        if value not in [choice for member in Scheduler for choice in (member, member.value)]:
            raise ValueError(f"{what} one of {', '.join(repr(member.value) for member in Scheduler)}")
        return Scheduler(value)
    free = ", ".join((*_SIZES, *_SWITCHES, "scheduler"))
    raise ValueError(f"attention: config has the field {name!r}; it can override {free}")


#: What the kernel without warp specialization is written for, beside two stages or more.
_UNSPECIALIZED: dict[str, Any] = {
    "q_stages": 1,
    "overlap": True,
    "three_stage": False,
    "pingpong": False,
    "scheduler": Scheduler.ONE_TILE,
    "setmaxnreg": False,
}


def _listed(fields: Config) -> str:
    return ", ".join(f"{name}={getattr(value, 'value', value)!r}" for name, value in fields.items())


def _check_combination(spec: FwdSpec) -> None:
    """Refuse what the schedule cannot do; what exceeds shared memory is refused by the compiler."""
    if spec.varlen or spec.window or spec.softcap or spec.alibi or spec.bias is not Bias.NONE:
        for name, value in (("warp_specialized", False), ("three_stage", True)):
            if getattr(spec, name) is value:
                raise ValueError(
                    f"attention: config has {name}={value}; that kernel is for comparisons, and has no packed "
                    f"sequences, no left side of a window, no softcap, no ALiBi and no bias: set {name}={not value}"
                )
    if spec.bias_stages and spec.bias not in (Bias.TILE, Bias.ROW):
        raise ValueError(
            f"attention: config has bias_stages {spec.bias_stages}; no bias comes through a ring here: leave it out, "
            "or pass a bias that TMA can copy"
        )
    if not spec.warp_specialized:
        needed = {"stages": max(2, spec.stages)} | _UNSPECIALIZED
        changes = {name: value for name, value in needed.items() if getattr(spec, name) != value}
        if changes:
            raise ValueError(
                f"attention: config has warp_specialized=False with {_listed({n: getattr(spec, n) for n in changes})}; "
                "without a producer a CTA computes one tile, and copies under the products of its next block: set "
                f"{_listed(changes)}"
            )
    if spec.speculative and not spec.overlap:
        raise ValueError(
            "attention: config has speculative=True with overlap=False; a speculative softmax runs under the product "
            "of the block before: set overlap=True, or speculative=False"
        )
    if spec.rescale_threshold and spec.speculative:
        raise ValueError(
            f"attention: config has rescale_threshold {spec.rescale_threshold} with speculative=True; a speculative "
            "softmax has a range of its own: set speculative=False, or rescale_threshold to 0"
        )
    if spec.exp2_fma and not spec.speculative:
        raise ValueError(
            f"attention: config has exp2_fma {spec.exp2_fma} with speculative=False; what the polynomial makes of a "
            "NaN is seen by a speculative softmax only: set speculative=True, or exp2_fma to 0"
        )
    if spec.three_stage:
        for name, value, why in (
            ("overlap", False, "the scores of two blocks are under way while a softmax runs"),
            ("speculative", True, "its softmax is the exact one"),
            ("pingpong", True, "its warpgroups take no turns"),
        ):
            if getattr(spec, name) is value:
                raise ValueError(
                    f"attention: config has three_stage=True with {name}={value}; {why}: set {name}={not value}, or "
                    "three_stage=False"
                )
        if spec.stages < 2:
            raise ValueError(
                "attention: config has three_stage=True with stages 1; it waits for the next K while one is read: set "
                "stages to 2 or more, or three_stage=False"
            )
    if spec.tile_m == 64:
        for name in ("pingpong", "setmaxnreg"):
            if getattr(spec, name):
                raise ValueError(
                    f"attention: config has tile_m 64 with {name}=True; {name} needs two consumer warpgroups: set "
                    f"{name}=False, or tile_m to 128 or 192"
                )
