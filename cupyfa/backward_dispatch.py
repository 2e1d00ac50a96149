"""From checked options to gradients: NumPy arrays by the oracle, CuPy arrays by kernels."""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import numpy as np

from cupyfa import debug
from cupyfa._launch import TensorMapGeometry, launch
from cupyfa.backward_launches import BackwardPlan
from cupyfa.backward_plan import plan_with_copies
from cupyfa.backward_problem import (
    GRADIENTS,
    BackwardArrays,
    BackwardProblem,
    check_backward_alignment,
    check_backward_overlap,
    check_backward_workspace,
    fill_empty,
    with_gradients,
)
from cupyfa.backward_select import BackwardSelection, backward_config, select_backward
from cupyfa.copies import Copy
from cupyfa.errors import HazardError
from cupyfa.kernels import Kernel, load
from cupyfa.lengths import check_lengths
from cupyfa.libraries import (
    aligned_geometry,
    check_numpy,
    cupy_of,
    geometry,
    warm_under_capture,
    workspace_memory,
)
from cupyfa.operand import LENGTHS, Operand
from cupyfa.options import Options
from cupyfa.oracles import backward, packed_backward
from cupyfa.select import Device

__all__ = ["Prepared", "differentiate", "prepare_backward", "prepare_backward_there"]

_REQUIRED = frozenset({"dout", "q", "k", "v", "out", "lse"})


def differentiate(
    arrays: BackwardArrays[Any], options: Options, deterministic: bool, backend: Any, config: Any, workspace: Any
) -> BackwardArrays[Any]:
    """Compute the gradients of attention wherever the arrays are.

    Parameters
    ----------
    arrays : BackwardArrays
        As the user passed them.
    options : Options
        Checked.
    deterministic : bool
        Checked.
    backend, config, workspace
        As the user passed them: see :func:`cupyfa.attention_backward`.

    Returns
    -------
    BackwardArrays
        With all gradients.
    """
    if backend is not None and backend != "emulator":
        raise ValueError(f"attention: backend is {backend!r}; it must be 'emulator' or None")
    if backend is None and not isinstance(arrays.q, np.ndarray):
        return _on_gpu(arrays, options, deterministic, config, workspace)
    check_numpy(arrays, _REQUIRED)
    if workspace is not None:
        raise TypeError("attention: workspace is for CuPy arrays; q is a numpy.ndarray, which needs none")
    if backend is not None:
        return _emulated(arrays, options, deterministic, config)
    backward_config(config)
    return _on_cpu(arrays, options, deterministic)


class Prepared(NamedTuple):
    """Everything about a call that does not depend on addresses.

    Attributes
    ----------
    problem : BackwardProblem
        The checked problem.
    selection : BackwardSelection
        The chosen kernel and the reasons.
    plan : BackwardPlan or None
        Its launches; None: there is nothing to launch.
    kernels : tuple of Kernel
        Of its steps.
    copies : tuple of Copy
        Of the matrices that TMA cannot take where they are, in the workspace.
    workspace_bytes : int
        All that a call needs.
    """

    problem: BackwardProblem
    selection: BackwardSelection
    plan: BackwardPlan | None
    kernels: tuple[Kernel, ...]
    copies: tuple[Copy, ...]
    workspace_bytes: int


def prepare_backward(
    arrays: BackwardArrays[Any], options: Options, deterministic: bool, config: Any, unaligned: tuple[str, ...] = ()
) -> Prepared:
    """Check CuPy arrays, select and load their kernels; once per geometry.

    Parameters
    ----------
    arrays : BackwardArrays
        As the user passed them.
    options : Options
        Checked.
    deterministic : bool
        Checked.
    config : Mapping or None
        As for :func:`cupyfa.attention_backward`.
    unaligned : tuple of str
        From :func:`cupyfa.backward_problem.check_backward_alignment`.

    Returns
    -------
    Prepared
        The same object for the same geometry and options.
    """
    cupy = cupy_of(arrays, _REQUIRED)
    geometries = BackwardArrays(*[geometry(array) for array in arrays])
    if arrays.bias is not None:
        geometries = geometries._replace(bias=aligned_geometry(arrays.bias))
    device = cupy.cuda.runtime.getDevice()
    return _prepare(geometries, options, deterministic, backward_config(config), device, unaligned)


def prepare_backward_there(arrays: BackwardArrays[Any], options: Options, deterministic: bool, config: Any) -> Prepared:
    """Check CuPy arrays, select and load their kernels, for the addresses that they have.

    Parameters
    ----------
    arrays, options, deterministic, config
        As for `prepare_backward`.

    Returns
    -------
    Prepared
        With the copies that a call would make. Gradients that are not passed will be new arrays, which need none.
    """
    prepared = prepare_backward(arrays, options, deterministic, config)
    unaligned = check_backward_alignment(prepared.problem, _addresses(arrays))
    return prepare_backward(arrays, options, deterministic, config, unaligned) if unaligned else prepared


def _addresses(arrays: BackwardArrays[Any]) -> BackwardArrays[int]:
    return BackwardArrays(*[0 if x is None else x.data.ptr for x in arrays])


@functools.lru_cache(maxsize=1024)
def _prepare(
    geometries: tuple[Any, ...],  # Geometry or None, in the order of BackwardArrays
    options: Options,
    deterministic: bool,
    config: tuple[tuple[str, Any], ...],
    current_device: int,
    unaligned: tuple[str, ...],
) -> Prepared:
    problem = _problem(geometries, options, deterministic, current_device)
    device = Device.current()
    selection = select_backward(problem, device, config)
    if problem.is_empty:
        return Prepared(problem, selection, None, (), (), 0)
    plan, copies = plan_with_copies(
        problem, selection, lambda spec: load(spec, current_device).traits, device, options.layout, unaligned
    )
    kernels = tuple(load(spec, current_device) for spec in plan.specs)
    return Prepared(problem, selection, plan, kernels, copies, plan.workspace_bytes)


@functools.lru_cache(maxsize=1024)
def _problem(
    geometries: tuple[Any, ...],  # Geometry or None, in the order of BackwardArrays
    options: Options,
    deterministic: bool,
    current_device: int | None,
) -> BackwardProblem:
    operands = BackwardArrays(*geometries).map(lambda name, geometry: Operand(name, *geometry))
    return BackwardProblem.of(operands, options, deterministic=deterministic, current_device=current_device)


def _on_gpu(
    arrays: BackwardArrays[Any], options: Options, deterministic: bool, config: Any, workspace: Any
) -> BackwardArrays[Any]:
    prepared = prepare_backward_there(arrays, options, deterministic, config)
    cupy = sys.modules["cupy"]
    arrays = with_gradients(cupy.empty, arrays, prepared.problem)
    at = _addresses(arrays)
    check_backward_overlap(prepared.problem, at)
    if debug.DEBUG and prepared.problem.forward.planned and not cupy.cuda.get_current_stream().is_capturing():
        lengths = {name: getattr(arrays, name) for name in LENGTHS}
        check_lengths({name: None if x is None else x.get() for name, x in lengths.items()}, prepared.problem.forward)
    if prepared.plan is None:
        fill_empty(cupy, arrays)
        return arrays
    memory = workspace_memory(prepared.workspace_bytes, workspace)
    if workspace is not None:
        check_backward_workspace(prepared.problem, at, memory.data.ptr, prepared.workspace_bytes)
    parts = {copy.name: memory[copy.begin : copy.end] for copy in prepared.copies}
    for copy in prepared.copies:
        if copy.name not in GRADIENTS:
            with warm_under_capture():
                copy.read(getattr(arrays, copy.name), parts[copy.name])
    copied = at._replace(**{name: part.data.ptr for name, part in parts.items()}) if parts else at
    packed = prepared.plan.pack(TensorMapGeometry.encode, at, copied, memory.data.ptr)
    stream = cupy.cuda.get_current_stream().ptr
    for kernel, launch_geometry, params in zip(prepared.kernels, prepared.plan.geometries, packed, strict=True):
        launch(kernel.function, launch_geometry, stream, params)
    for copy in prepared.copies:
        if copy.name in GRADIENTS:
            with warm_under_capture():
                copy.write(getattr(arrays, copy.name), parts[copy.name])
    return arrays


def _emulated(arrays: BackwardArrays[Any], options: Options, deterministic: bool, config: Any) -> BackwardArrays[Any]:
    from cupyfa import emulate_backward  # noqa: PLC0415 - imported when asked for

    prepared = emulate_backward.prepare(arrays, options, deterministic=deterministic, config=config)
    run = prepared.launch()
    if run.verdict in ("error", "incomplete"):
        raise HazardError(run)
    return prepared.arrays


def _on_cpu(arrays: BackwardArrays[Any], options: Options, deterministic: bool) -> BackwardArrays[Any]:
    geometries = tuple(None if x is None else (x.shape, x.strides, x.dtype, None) for x in arrays)
    problem = _problem(geometries, options, deterministic, None)
    for name in GRADIENTS:
        output = getattr(arrays, name)
        if output is not None and not output.flags.writeable:
            raise ValueError(f"attention: {name} is read-only; it must be writable")
    arrays = with_gradients(np.empty, arrays, problem)
    check_backward_overlap(problem, arrays.map(lambda _, x: x.__array_interface__["data"][0]))
    forward = problem.forward
    given: dict[str, Any] = {
        "dlse": arrays.dlse,
        "softmax_scale": forward.softmax_scale,
        "window_size": (forward.left, forward.right),
        "softcap": forward.softcap,
        "sink": arrays.sink,
        "alibi_slopes": arrays.alibi_slopes,
        "bias": arrays.bias,
    }
    dout, q, k, v, out = (getattr(arrays, name) for name in ("dout", "q", "k", "v", "out"))
    if forward.packed is not None:
        lengths = {name: getattr(arrays, name) for name in LENGTHS}
        check_lengths(lengths, forward)
        wide = packed_backward.attention_backward(dout, q, k, v, out, arrays.lse, **lengths, **given)
    else:
        turned = options.layout == "BHSD"
        dout, q, k, v, out = (x.swapaxes(1, 2) if turned else x for x in (dout, q, k, v, out))
        wide = backward.attention_backward(dout, q, k, v, out, arrays.lse, **given)
        if turned:
            wide = wide._replace(**{name: getattr(wide, name).swapaxes(1, 2) for name in ("dq", "dk", "dv")})
    with np.errstate(over="ignore", invalid="ignore"):
        for name in GRADIENTS:
            if (output := getattr(arrays, name)) is not None:
                output[...] = getattr(wide, name)
    return arrays
