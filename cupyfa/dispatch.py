"""From checked options to results: on the GPU by a kernel, on NumPy arrays by the oracle or by the emulator.

The public functions differ in what they take; what becomes of it is decided here.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyfa import debug
from cupyfa._launch import ForwardLauncher
from cupyfa.copies import Copy, plan_copies, with_copies
from cupyfa.errors import HazardError, type_name
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
from cupyfa.operand import LENGTHS, Addresses, Arrays, Operand, host_addresses
from cupyfa.options import Options
from cupyfa.oracles import online, packed
from cupyfa.packing import Packing, Planner, read_plan
from cupyfa.plan import fill_without_keys, plan_forward
from cupyfa.problem import Problem, check_alignment, check_overlap, check_workspace
from cupyfa.select import Config, Device, Selection, config_items, select
from cupyfa.spec import PlanSpec

__all__ = ["Backend", "Prepared", "VarlenPlan", "attend", "make_plan", "prepare", "prepare_there"]

Backend = Literal["emulator"]


class Prepared(NamedTuple):
    """Everything about a call that does not depend on addresses.

    Attributes
    ----------
    problem : Problem
        The checked problem.
    selection : Selection
        The chosen spec and the reasons.
    kernel : Kernel or None
        None: there is nothing to launch.
    launcher : ForwardLauncher or None
        The prepared launch.
    planner : Planner or None
        Of sequences whose lengths are arrays.
    copies : tuple of Copy
        Of the matrices that the kernel cannot take where they are.
    workspace_bytes : int
        What the plan and the copies need.
    """

    problem: Problem
    selection: Selection
    kernel: Kernel | None
    launcher: ForwardLauncher | None
    planner: Planner | None
    copies: tuple[Copy, ...]
    workspace_bytes: int


@dataclasses.dataclass(frozen=True)
class VarlenPlan:
    """Which tiles packed sequences have, and in which order they are computed: made and kept on the GPU.

    It holds the lengths as they were. Calls that differ in data only, the layers of a model for one, can share it.

    Attributes
    ----------
    packing : Packing
        What it was made for, beside the lengths.
    buffer : cupy.ndarray
        uint8; where it is.
    """

    packing: Packing
    buffer: Any = dataclasses.field(repr=False)

    def get(self) -> npt.NDArray[np.void]:
        """Copy the tiles to the host, to look at them; this waits for the GPU.

        Returns
        -------
        numpy.ndarray
            A row for each query tile, with the fields of ``PackedTile`` in ``cuda/params.h``.
        """
        return read_plan(self.buffer.get())


def attend(
    arrays: Arrays[Any],
    options: Options,
    want_lse: bool,
    backend: Backend | None,
    config: Config | None,
    plan: VarlenPlan | None = None,
    workspace: Any = None,
) -> tuple[Any, Any]:
    """Compute attention wherever the arrays are.

    Parameters
    ----------
    arrays : Arrays
        As the user passed them.
    options : Options
        Checked.
    want_lse : bool
        Whether the caller returns lse.
    backend, config, plan, workspace
        As the user passed them: see :func:`cupyfa.attention_varlen`.

    Returns
    -------
    tuple of array
        out and lse; lse may be None if it was not wanted.
    """
    if backend is not None and backend != "emulator":
        raise ValueError(f"attention: backend is {backend!r}; it must be 'emulator' or None")
    if backend is None and not isinstance(arrays.q, np.ndarray):
        return _on_gpu(arrays, options, want_lse, config, plan, workspace)
    check_numpy(arrays)
    for name, value in (("plan", plan), ("workspace", workspace)):
        if value is not None:
            raise TypeError(f"attention: {name} is for CuPy arrays; q is a numpy.ndarray, which needs none")
    if backend is not None:
        return _emulated(arrays, options, want_lse, config)
    if config is not None:
        config_items(config)
    return _on_cpu(arrays, options)


def prepare(
    arrays: Arrays[Any], options: Options, want_lse: bool, config: Config | None, unaligned: tuple[str, ...] = ()
) -> Prepared:
    """Check CuPy arrays, select and load their kernel; once per geometry.

    Parameters
    ----------
    arrays : Arrays
        As the user passed them.
    options : Options
        Checked.
    want_lse : bool
        Whether the caller returns lse.
    config : Mapping or None
        As in :func:`cupyfa.attention`.
    unaligned : tuple of str
        From :func:`cupyfa.problem.check_alignment`.

    Returns
    -------
    Prepared
        The same object for the same geometry and options.
    """
    cupy = cupy_of(arrays)
    items = None if config is None else config_items(config)
    geometries = Arrays(*[geometry(array) for array in arrays])
    if arrays.bias is not None:
        geometries = geometries._replace(bias=aligned_geometry(arrays.bias))
    return _prepare(geometries, options, want_lse, items, cupy.cuda.runtime.getDevice(), unaligned)


def prepare_there(arrays: Arrays[Any], options: Options, config: Config | None) -> Prepared:
    """Check CuPy arrays, select and load their kernel, for the addresses that they have.

    Parameters
    ----------
    arrays, options, config
        As for `prepare`.

    Returns
    -------
    Prepared
        With the copies that a call would make.
    """
    prepared = prepare(arrays, options, False, config)
    unaligned = check_alignment(prepared.problem, _addresses(arrays, arrays.out, arrays.lse))
    return prepare(arrays, options, False, config, unaligned) if unaligned else prepared


@functools.lru_cache(maxsize=1024)
def _prepare(
    geometries: tuple[Any, ...],  # Geometry or None, in the order of Arrays
    options: Options,
    want_lse: bool,
    config: tuple[tuple[str, Any], ...] | None,
    current_device: int,
    unaligned: tuple[str, ...],
) -> Prepared:
    operands = Arrays(*geometries).map(lambda name, geometry: Operand(name, *geometry))
    problem = Problem.from_operands(operands, options, want_lse=want_lse, current_device=current_device)
    device = Device.current()
    selection = select(problem, device, None if config is None else dict(config))
    if problem.is_empty:
        return Prepared(problem, selection, None, None, None, (), 0)
    kernel = load(selection.spec, current_device)
    size = Packing.of(problem, selection, device).plan_bytes if problem.planned else 0
    # Behind the plan: one that was made in this workspace before is still there.
    copies = plan_copies(problem, options.layout, unaligned, size)
    readable = with_copies(problem, copies)
    planner = None
    if problem.planned:
        plan_kernel = load(PlanSpec(), current_device)
        planner = Planner.of(Packing.of(readable, selection, device), plan_kernel.function, plan_kernel.traits)
    launcher = plan_forward(readable, kernel.traits, kernel.function, device, kernel.counters)
    return Prepared(problem, selection, kernel, launcher, planner, copies, copies[-1].end if copies else size)


def _on_gpu(
    arrays: Arrays[Any],
    options: Options,
    want_lse: bool,
    config: Config | None,
    plan: VarlenPlan | None,
    workspace: Any,
) -> tuple[Any, Any]:
    prepared = prepare(arrays, options, want_lse, config)
    problem, _, _, launcher, planner, copies, _ = prepared
    cupy = sys.modules["cupy"]
    out, lse = arrays.out, arrays.lse
    if out is None:
        out = cupy.empty((*arrays.q.shape[:-1], arrays.v.shape[-1]), arrays.q.dtype)
    if lse is None and want_lse:
        lse = cupy.empty(problem.lse_shape, np.float32)
    addresses = _addresses(arrays, out, lse)
    unaligned = check_alignment(problem, addresses)
    check_overlap(problem, addresses)
    if unaligned:
        prepared = prepare(arrays, options, want_lse, config, unaligned)
        launcher, copies = prepared.launcher, prepared.copies
    stream = cupy.cuda.get_current_stream().ptr
    if debug.DEBUG and problem.planned and plan is None:
        _check_lengths_on_gpu(arrays, problem)
    if launcher is None:
        fill_without_keys(out, lse, arrays.sink)
    elif planner is None and not copies:
        launcher(addresses, stream)
    else:
        _launch_in_workspace(prepared, launcher, arrays, out, addresses, stream, plan, workspace)
    return out, lse


def _launch_in_workspace(
    prepared: Prepared,
    launcher: ForwardLauncher,
    arrays: Arrays[Any],
    out: Any,
    addresses: Addresses,
    stream: int,
    plan: VarlenPlan | None,
    workspace: Any,
) -> None:
    """Launch a kernel that needs a plan or copies: copy what it reads, plan, compute, copy what it has written."""
    problem, planner, copies, size = prepared.problem, prepared.planner, prepared.copies, prepared.workspace_bytes
    at_plan = plan_bytes = 0
    if plan is not None and planner is not None:
        at_plan, plan_bytes = _planned(plan, planner.packing).data.ptr, planner.packing.plan_bytes
    if copies or plan is None:
        memory = workspace_memory(size, workspace)
        if workspace is not None:
            used = copies[0].begin if plan_bytes else 0
            check_workspace(problem, addresses, memory.data.ptr + used, size - used, (at_plan, plan_bytes))
    parts = {copy.name: memory[copy.begin : copy.end] for copy in copies}
    if copies:
        with warm_under_capture():
            for copy in copies:
                if copy.name != "out":
                    copy.read(getattr(arrays, copy.name), parts[copy.name])
        addresses = addresses._replace(**{name: part.data.ptr for name, part in parts.items()})
    if planner is not None and plan is None:
        at_plan = memory.data.ptr
        planner(addresses, at_plan, stream)
    launcher(addresses, stream, at_plan)
    if "out" in parts:
        with warm_under_capture():
            copies[-1].write(out, parts["out"])


def _addresses(arrays: Arrays[Any], out: Any, lse: Any) -> Addresses:
    q, k, v, _, _, sink, slopes, bias, *lengths = arrays
    return Addresses(
        q.data.ptr,
        k.data.ptr,
        v.data.ptr,
        0 if out is None else out.data.ptr,
        0 if lse is None else lse.data.ptr,
        0 if sink is None else sink.data.ptr,
        0 if slopes is None else slopes.data.ptr,
        0 if bias is None else bias.data.ptr,
        *[0 if x is None else x.data.ptr for x in lengths],
    )


def _planned(plan: VarlenPlan, packing: Packing) -> Any:
    """Return the memory of the user's plan, if it suits the call."""
    if not isinstance(plan, VarlenPlan):
        raise TypeError(
            f"attention: plan is a {type_name(type(plan))}; it must come from cupyfa.plan_varlen, or be None"
        )
    for field in dataclasses.fields(packing) if plan.packing != packing else ():
        theirs, ours = getattr(plan.packing, field.name), getattr(packing, field.name)
        if theirs != ours:
            raise ValueError(
                f"attention: plan was made for {field.name} {theirs} but this call has {ours}; plan_varlen with the "
                "same arguments makes one that suits it"
            )
    if plan.buffer.data.device_id != sys.modules["cupy"].cuda.runtime.getDevice():
        raise ValueError(f"attention: plan is on CUDA device {plan.buffer.data.device_id}, not on the current one")
    return plan.buffer


def make_plan(arrays: Arrays[Any], options: Options, config: Config | None, workspace: Any) -> VarlenPlan:
    """Make the plan of a call, without the call.

    Parameters
    ----------
    arrays : Arrays
        As the user passed them: CuPy arrays.
    options : Options
        Checked.
    config, workspace
        As the user passed them: see :func:`cupyfa.plan_varlen`.

    Returns
    -------
    VarlenPlan
        Once the stream has come there.
    """
    problem, selection, _, _, planner, *_ = prepare(arrays, options, False, config)
    if planner is None:  # no rows, or no keys: the call will need nothing
        return VarlenPlan(Packing.of(problem, selection, Device.current()), workspace_memory(0, workspace))
    if debug.DEBUG:
        _check_lengths_on_gpu(arrays, problem)
    buffer = workspace_memory(planner.packing.plan_bytes, workspace)
    stream = sys.modules["cupy"].cuda.get_current_stream().ptr
    planner(_addresses(arrays, None, None), buffer.data.ptr, stream)
    return VarlenPlan(planner.packing, buffer)


def _emulated(arrays: Arrays[Any], options: Options, want_lse: bool, config: Config | None) -> tuple[Any, Any]:
    from cupyfa import emulate  # noqa: PLC0415 - imported when asked for

    prepared = emulate.prepare_arrays(arrays, options, want_lse=want_lse, config=config)
    run = prepared.launch()
    if run.verdict in ("error", "incomplete"):
        raise HazardError(run)
    return prepared.out, prepared.lse


def _on_cpu(arrays: Arrays[Any], options: Options) -> tuple[Any, Any]:
    operands = arrays.map(lambda name, x: Operand(name, x.shape, x.strides, x.dtype, None))
    problem = Problem.from_operands(operands, options, want_lse=True, current_device=None)
    for name, output in (("out", arrays.out), ("lse", arrays.lse)):
        if output is not None and not output.flags.writeable:
            raise ValueError(f"attention: {name} is read-only; it must be writable")
    out, lse = arrays.out, arrays.lse
    if out is None:
        out = np.empty((*arrays.q.shape[:-1], arrays.v.shape[-1]), arrays.q.dtype)
    if lse is None:
        lse = np.empty(problem.lse_shape, np.float32)
    check_overlap(problem, host_addresses(arrays._replace(out=out, lse=lse)))
    given: dict[str, Any] = {
        "softmax_scale": problem.softmax_scale,
        "window_size": (problem.left, problem.right),
        "softcap": problem.softcap,
        "sink": arrays.sink,
        "alibi_slopes": arrays.alibi_slopes,
        "bias": arrays.bias,
        "lse": lse,
    }
    matrices = (arrays.q, arrays.k, arrays.v, out)
    if problem.packed is not None:
        lengths = {name: getattr(arrays, name) for name in LENGTHS}
        check_lengths(lengths, problem)
        q, k, v, o = matrices
        packed.attention(q, k, v, **lengths, **given, out=o)
    else:
        q, k, v, o = (x.transpose(0, 2, 1, 3) if options.layout == "BHSD" else x for x in matrices)
        if problem.used is None:
            online.attention(q, k, v, **given, out=o)
        else:
            used = {name: getattr(arrays, name) for name in ("seqused_q", "seqused_k")}
            check_lengths(used, problem)
            packed.of_batch(q, k, v, **used, **given, out=o)
    return out, lse


def _check_lengths_on_gpu(arrays: Arrays[Any], problem: Problem) -> None:
    """Wait for the lengths and check them; a stream under capture has none yet."""
    if sys.modules["cupy"].cuda.get_current_stream().is_capturing():
        return
    lengths = {name: getattr(arrays, name) for name in LENGTHS}
    check_lengths({name: None if x is None else x.get() for name, x in lengths.items()}, problem)
