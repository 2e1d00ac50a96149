"""Attention over a cache under the emulator: its kernels, its parameters, on NumPy arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cupyfa.cache_options import CacheArrays, CacheOptions
from cupyfa.cache_problem import CacheProblem, check_cache_addresses, check_cache_overlap, with_outputs
from cupyfa.cache_values import check_length_of_all
from cupyfa.decode_plan import plan_decode
from cupyfa.decode_select import DecodeSelection, decode_config, select_decode
from cupyfa.emulate import ARCHITECTURES, kernel_of
from cupyfa.emulate_stage import Stage, check_numpy, launch_stages, tensor_maps
from cupyfa.emulator import EmulatedDevice, Run
from cupyfa.operand import Operand
from cupyfa.plan import fill_without_keys
from cupyfa.select import Config

__all__ = ["PreparedCache", "prepare"]

_REQUIRED = ("q", "k_cache", "v_cache")


@dataclasses.dataclass(frozen=True)
class PreparedCache:
    """A call that is ready to run under any schedule.

    Attributes
    ----------
    problem, selection
        As on the GPU path.
    arrays : CacheArrays
        With the outputs.
    stages : tuple of Stage
        In their order: what appends, what computes, what merges.
    """

    problem: CacheProblem
    selection: DecodeSelection
    arrays: CacheArrays[Any]
    stages: tuple[Stage, ...]

    def launch(self, **options: Any) -> Run:
        """Run all stages, until one is not clean.

        Parameters
        ----------
        **options
            As for :meth:`cupyfa.emulator.EmulatedKernel.launch`.

        Returns
        -------
        Run
            Of the last one that ran.
        """
        if self.problem.fills_outputs:
            fill_without_keys(self.arrays.out, self.arrays.lse, self.arrays.sink)
        return launch_stages(self.stages, self.selection.spec.arch, **options)


def prepare(
    arrays: CacheArrays[Any],
    length: int | None,
    options: CacheOptions,
    *,
    want_lse: bool = True,
    config: Config | None = None,
    arch: str = "sm_90a",
) -> PreparedCache:
    """Check NumPy arrays as a GPU call would, select, compile and pack.

    Parameters
    ----------
    arrays : CacheArrays
        As the user passed them.
    length : int or None
        ``cache_seqlens`` where it is a number for all sequences.
    options : CacheOptions
        Checked.
    want_lse : bool
        Allocate ``lse`` if the caller passed none.
    config : Mapping, optional
        As for :func:`cupyfa.attention_with_kvcache`.
    arch : str
        A key of :data:`cupyfa.emulate.ARCHITECTURES`.

    Returns
    -------
    PreparedCache
        Ready to launch.
    """
    check_numpy(arrays._asdict(), _REQUIRED)
    # Device 0: the rules for arrays on a GPU hold.
    operands = arrays.map(lambda name, x: Operand(name, x.shape, x.strides, x.dtype, 0))
    problem = CacheProblem.of(operands, options, want_lse=want_lse, current_device=0)
    if length is not None:
        check_length_of_all(length, problem)
    selection = select_decode(problem, ARCHITECTURES[arch], decode_config(config))
    arrays = with_outputs(np.empty, arrays, problem, want_lse)
    written = {"out", "lse"} | ({"k_cache", "v_cache"} if problem.seqlen_new else set())
    for name, x in arrays.given().items():
        if name in written and not x.flags.writeable:
            raise ValueError(f"attention: {name} is read-only; it must be writable")
    check_cache_overlap(problem, arrays.map(lambda _, x: x.__array_interface__["data"][0]))
    if problem.has_no_room:
        return PreparedCache(problem, selection, arrays, ())
    device = EmulatedDevice(arch, ARCHITECTURES[arch].multiprocessors)
    at = arrays.map(lambda name, x: device.register(x, name=name, writable=name in written) if x.size else 0)
    check_cache_addresses(problem, at)
    plan = plan_decode(problem, selection, lambda spec: kernel_of(spec)[1])
    workspace = np.empty(plan.workspace_bytes, np.uint8)
    at_workspace = device.register(workspace, name="workspace", writable=True) if workspace.size else 0

    packed = plan.pack(tensor_maps(device), at, length or 0, at_workspace)
    stages = tuple(
        Stage(step.spec, kernel_of(step.spec)[0].on(device), step.geometry, params)
        for step, params in zip(plan.steps, packed, strict=True)
    )
    return PreparedCache(problem, selection, arrays, stages)
