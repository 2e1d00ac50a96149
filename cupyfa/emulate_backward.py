"""The gradients of attention under the emulator: their kernels, their parameters, on NumPy arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cupyfa.backward_plan import plan_with_copies
from cupyfa.backward_problem import (
    GRADIENTS,
    BackwardArrays,
    BackwardProblem,
    check_backward_alignment,
    check_backward_overlap,
    fill_empty,
    with_gradients,
)
from cupyfa.backward_select import BackwardSelection, backward_config, select_backward
from cupyfa.copies import Copy
from cupyfa.emulate import ARCHITECTURES, is_aligned, kernel_of
from cupyfa.emulate_stage import Stage, launch_stages, tensor_maps
from cupyfa.emulator import EmulatedDevice, Run
from cupyfa.operand import Operand
from cupyfa.options import Options
from cupyfa.select import Config

__all__ = ["PreparedBackward", "prepare"]


@dataclasses.dataclass(frozen=True)
class PreparedBackward:
    """A call that is ready to run under any schedule.

    Attributes
    ----------
    problem, selection
        As on the GPU path.
    arrays : BackwardArrays
        With the gradients.
    stages : tuple of Stage
        In their order.
    copies : tuple of Copy and array
        With the memory of each.
    """

    problem: BackwardProblem
    selection: BackwardSelection
    arrays: BackwardArrays[Any]
    stages: tuple[Stage, ...]
    copies: tuple[tuple[Copy, Any], ...]

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
        if not self.stages:
            fill_empty(np, self.arrays)
        for copy, memory in self.copies:
            if copy.name not in GRADIENTS:
                copy.read(getattr(self.arrays, copy.name), memory)
        run = launch_stages(self.stages, self.selection.spec.arch, **options)
        for copy, memory in self.copies:
            if copy.name in GRADIENTS and run.verdict == "clean":
                copy.write(getattr(self.arrays, copy.name), memory)
        return run


def prepare(
    arrays: BackwardArrays[Any],
    options: Options,
    *,
    deterministic: bool = False,
    config: Config | None = None,
    arch: str = "sm_90a",
    sms: int | None = None,
) -> PreparedBackward:
    """Check NumPy arrays as a GPU call would, select, compile and pack.

    Parameters
    ----------
    arrays : BackwardArrays
        As the user passed them, of NumPy.
    options : Options
        Checked.
    deterministic : bool
        Checked.
    config : Mapping, optional
        As for :func:`cupyfa.attention_backward`.
    arch : str
        A key of :data:`cupyfa.emulate.ARCHITECTURES`.
    sms : int, optional
        Multiprocessors of the device; with few, a CTA walks all query heads that share its keys.

    Returns
    -------
    PreparedBackward
        Ready to launch.
    """
    # Device 0: the rules for arrays on a GPU hold.
    operands = arrays.map(
        lambda name, x: Operand(name, x.shape, x.strides, x.dtype, 0, name != "bias" or is_aligned(x))
    )
    target = ARCHITECTURES[arch] if sms is None else dataclasses.replace(ARCHITECTURES[arch], multiprocessors=sms)
    problem = BackwardProblem.of(operands, options, deterministic=deterministic, current_device=0)
    selection = select_backward(problem, target, backward_config(config))
    arrays = with_gradients(np.empty, arrays, problem)
    for name in GRADIENTS:
        if (gradient := getattr(arrays, name)) is not None and not gradient.flags.writeable:
            raise ValueError(f"attention: {name} is read-only; it must be writable")
    check_backward_overlap(problem, arrays.map(lambda _, x: x.__array_interface__["data"][0]))
    if problem.is_empty:
        return PreparedBackward(problem, selection, arrays, (), ())
    device = EmulatedDevice(arch, target.multiprocessors)
    at = arrays.map(lambda name, x: device.register(x, name=name, writable=name in GRADIENTS))
    check_backward_alignment(problem, at)
    strided = tuple(name for name, x in arrays.given().items() if not is_aligned(x))
    plan, copies = plan_with_copies(
        problem, selection, lambda spec: kernel_of(spec)[1], target, options.layout, strided
    )
    workspace = np.full(plan.workspace_bytes, 0xFF, np.uint8)  # NaN, and turns that never come
    at_workspace = device.register(workspace, name="workspace", writable=True, protocol=True)
    memory = {copy.name: np.empty(copy.size, np.uint8) for copy in copies}
    placed = {
        name: device.register(x, name=f"copy of {name}", writable=name in GRADIENTS) for name, x in memory.items()
    }

    packed = plan.pack(tensor_maps(device), at, at._replace(**placed), at_workspace)
    stages = tuple(
        Stage(spec, kernel_of(spec)[0].on(device), geometry, params)
        for spec, geometry, params in zip(plan.specs, plan.geometries, packed, strict=True)
    )
    return PreparedBackward(problem, selection, arrays, stages, tuple((x, memory[x.name]) for x in copies))
