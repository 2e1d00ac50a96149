"""The kernels of a call of `attention_backward`: compiled in parallel, its workspace, and each kernel by itself."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cupyfa._launch import TensorMapGeometry, launch
from cupyfa.backward_dispatch import Prepared, prepare_backward
from cupyfa.backward_plan import backward_specs
from cupyfa.backward_problem import BackwardArrays, BackwardProblem
from cupyfa.backward_select import select_backward
from cupyfa.bench.gradients import BackwardCell, BackwardInputs
from cupyfa.bench.harness import Contestant
from cupyfa.kernels import load
from cupyfa.operand import Operand
from cupyfa.options import check_options
from cupyfa.select import Device
from cupyfa.spec import BwdSpec, PostprocessSpec, PreprocessSpec, Spec

__all__ = ["PARTS", "compile_all", "parts", "prepare", "specs"]

#: The kernels of a call, in their order.
PARTS = ("preprocess", "main", "postprocess")
_NAMES: dict[type[Spec], str] = {PreprocessSpec: "preprocess", BwdSpec: "main", PostprocessSpec: "postprocess"}


def specs(cell: BackwardCell, deterministic: bool, device: Device) -> tuple[Spec, ...]:
    """Return the kernels of a problem.

    Parameters
    ----------
    cell : BackwardCell
        The problem.
    deterministic : bool
        As for :func:`cupyfa.attention_backward`.
    device : Device
        The GPU.

    Returns
    -------
    tuple of Spec
        In the order in which they are launched.
    """
    dtype = cell.warmup_call["dtype"]
    shapes = {"dout": cell.shape_out, "q": cell.shape, "k": cell.shape_kv, "v": cell.shape_v, "out": cell.shape_out}
    operands = {name: Operand.contiguous(name, shape, dtype, 0) for name, shape in shapes.items()}
    operands["lse"] = Operand.contiguous("lse", (cell.batch, cell.heads, cell.seqlen), np.float32, 0)
    arrays, options = BackwardArrays(**operands), check_options(**cell.options)
    problem = BackwardProblem.of(arrays, options, deterministic=deterministic, current_device=0)
    return backward_specs(problem, select_backward(problem, device))


def compile_all(cells: Sequence[BackwardCell]) -> None:
    """Compile and load the kernels of some problems on the current device, in parallel.

    Parameters
    ----------
    cells : sequence of BackwardCell
        The problems.
    """
    import cupy

    index, device = cupy.cuda.runtime.getDevice(), Device.current()
    needed = dict.fromkeys(spec for cell in cells for order in (False, True) for spec in specs(cell, order, device))

    def load_there(spec: Spec) -> None:
        with cupy.cuda.Device(index):
            load(spec, index)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(load_there, needed))


def prepare(inputs: BackwardInputs, deterministic: bool) -> tuple[BwdSpec, Any]:
    """Select and load the kernels of a call.

    Parameters
    ----------
    inputs : BackwardInputs
        CuPy arrays.
    deterministic : bool
        As for :func:`cupyfa.attention_backward`.

    Returns
    -------
    spec : BwdSpec
        The main kernel.
    workspace : cupy.ndarray
        As much memory as the call needs.
    """
    import cupy

    prepared, _ = _prepare(inputs, deterministic)
    return prepared.selection.spec, cupy.empty(prepared.workspace_bytes, np.uint8)


def parts(inputs: BackwardInputs, workspace: Any) -> list[Contestant]:
    """Return the kernels of a call, each to be launched by itself.

    Those of a deterministic call are left out: its main kernel would wait for counters that the kernel before it sets.

    Parameters
    ----------
    inputs : BackwardInputs
        CuPy arrays.
    workspace : cupy.ndarray
        From `prepare`. What it holds is computed with, so a complete call has to have used it.

    Returns
    -------
    list of Contestant
        Named as in `PARTS`.
    """
    import cupy

    prepared, arrays = _prepare(inputs, False)
    plan = prepared.plan
    if plan is None:
        return []
    at: BackwardArrays[int] = BackwardArrays(*[0 if x is None else x.data.ptr for x in arrays])
    packed = plan.pack(TensorMapGeometry.encode, at, at, workspace.data.ptr)
    stream = cupy.cuda.get_current_stream().ptr
    return [
        Contestant(
            _NAMES[type(spec)],
            functools.partial(_launch_alone, kernel.function, geometry, stream, params, (arrays, workspace)),
        )
        for spec, kernel, geometry, params in zip(plan.specs, prepared.kernels, plan.geometries, packed, strict=True)
    ]


def _prepare(inputs: BackwardInputs, deterministic: bool) -> tuple[Prepared, BackwardArrays[Any]]:
    """Return the prepared call, and its arrays with gradients."""
    import cupy

    gradients = {f"d{name}": cupy.empty_like(getattr(inputs, name)) for name in "qkv"}
    arrays = BackwardArrays(inputs.dout, inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, **gradients)
    return prepare_backward(arrays, check_options(**inputs.cell.options), deterministic, None), arrays


def _launch_alone(function: Any, geometry: Any, stream: int, params: bytes, memory: Any) -> None:
    """Launch a kernel; `memory` keeps alive what its parameters point to."""
    launch(function, geometry, stream, params)
