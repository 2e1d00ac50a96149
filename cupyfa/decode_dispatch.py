"""From checked options of attention over a cache to results: NumPy arrays by the oracle, CuPy arrays by kernels."""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import numpy as np

from cupyfa import debug
from cupyfa._launch import TensorMapGeometry, launch
from cupyfa.cache_options import CacheArrays, CacheOptions
from cupyfa.cache_problem import (
    CacheProblem,
    check_cache_addresses,
    check_cache_overlap,
    check_cache_workspace,
    with_outputs,
)
from cupyfa.cache_values import check_cache_values, check_length_of_all
from cupyfa.decode_plan import DecodePlan, plan_decode
from cupyfa.decode_select import DecodeSelection, decode_config, select_decode
from cupyfa.errors import HazardError
from cupyfa.kernels import Kernel, load
from cupyfa.libraries import check_numpy, cupy_of, geometry, workspace_memory
from cupyfa.operand import Operand
from cupyfa.oracles import kvcache
from cupyfa.plan import fill_without_keys
from cupyfa.select import Device

__all__ = ["Prepared", "attend_cache", "prepare_cache"]

_REQUIRED = frozenset({"q", "k_cache", "v_cache"})
_VALUES = ("cache_seqlens", "page_table", "cache_batch_idx", "cu_seqlens_q")


def attend_cache(
    arrays: CacheArrays[Any],
    length: int | None,
    options: CacheOptions,
    want_lse: bool,
    backend: Any,
    config: Any,
    workspace: Any,
) -> tuple[Any, Any]:
    """Append to a cache and compute attention over it, wherever the arrays are.

    Parameters
    ----------
    arrays : CacheArrays
        As the user passed them.
    length : int or None
        ``cache_seqlens`` where it is a number for all sequences.
    options : CacheOptions
        Checked.
    want_lse : bool
        Whether the caller returns lse.
    backend, config, workspace
        As the user passed them: see :func:`cupyfa.attention_with_kvcache`.

    Returns
    -------
    tuple of array
        out and lse; lse may be None if it was not wanted.
    """
    if backend is not None and backend != "emulator":
        raise ValueError(f"attention: backend is {backend!r}; it must be 'emulator' or None")
    if backend is None and not isinstance(arrays.q, np.ndarray):
        return _on_gpu(arrays, length, options, want_lse, config, workspace)
    check_numpy(arrays, _REQUIRED)
    if workspace is not None:
        raise TypeError("attention: workspace is for CuPy arrays; q is a numpy.ndarray, which needs none")
    if backend is not None:
        return _emulated(arrays, length, options, want_lse, config)
    decode_config(config)
    return _on_cpu(arrays, length, options)


def _on_cpu(arrays: CacheArrays[Any], length: int | None, options: CacheOptions) -> tuple[Any, Any]:
    operands = arrays.map(lambda name, x: Operand(name, x.shape, x.strides, x.dtype, None))
    problem = CacheProblem.of(operands, options, want_lse=True, current_device=None)
    check_cache_values(arrays, length, problem)
    written = ("out", "lse", "k_cache", "v_cache") if arrays.k is not None else ("out", "lse")
    for name in written:
        array = getattr(arrays, name)
        if array is not None and not array.flags.writeable:
            raise ValueError(f"attention: {name} is read-only; it must be writable")
    arrays = with_outputs(np.empty, arrays, problem, want_lse=True)
    check_cache_overlap(problem, arrays.map(lambda _, x: x.__array_interface__["data"][0]))
    # The sides of the window as the user gave them: those of the problem forget one that hides nothing, and with it
    # how positions turn.
    given = arrays._replace(cache_seqlens=length if arrays.cache_seqlens is None else arrays.cache_seqlens)
    kvcache.attention(
        **given._asdict(),
        rotary_interleaved=options.rotary_interleaved,
        softmax_scale=problem.softmax_scale,
        window_size=(options.attention.left, options.attention.right),
        softcap=problem.softcap,
    )
    return arrays.out, arrays.lse


def prepare_cache(arrays: CacheArrays[Any], options: CacheOptions, want_lse: bool, config: Any) -> Prepared:
    """Check CuPy arrays, select and load their kernels; once per geometry.

    Parameters
    ----------
    arrays : CacheArrays
        As the user passed them.
    options : CacheOptions
        Checked.
    want_lse : bool
        Whether the caller returns lse.
    config : Mapping or None
        As in :func:`cupyfa.attention_with_kvcache`.

    Returns
    -------
    Prepared
        The same object for the same geometry and options.
    """
    cupy = cupy_of(arrays, _REQUIRED)
    geometries = CacheArrays(*[geometry(array) for array in arrays])
    return _prepare(geometries, options, want_lse, decode_config(config), cupy.cuda.runtime.getDevice())


def _on_gpu(
    arrays: CacheArrays[Any], length: int | None, options: CacheOptions, want_lse: bool, config: Any, workspace: Any
) -> tuple[Any, Any]:
    prepared = prepare_cache(arrays, options, want_lse, config)
    cupy, problem = sys.modules["cupy"], prepared.problem
    if length is not None:
        check_length_of_all(length, problem)
    arrays = with_outputs(cupy.empty, arrays, problem, want_lse)
    addresses = CacheArrays(*[None if x is None else x.data.ptr for x in arrays])
    check_cache_addresses(problem, addresses)
    check_cache_overlap(problem, addresses)
    if debug.DEBUG:
        _check_values_on_gpu(arrays, length, problem)
    if problem.fills_outputs:
        fill_without_keys(arrays.out, arrays.lse, arrays.sink)
    if prepared.plan is not None:
        size = prepared.plan.workspace_bytes
        memory = workspace_memory(size, workspace)  # to be kept until the launches
        if workspace is not None:
            check_cache_workspace(problem, addresses, memory.data.ptr, size)
        at = memory.data.ptr if size else 0
        packed = prepared.plan.pack(TensorMapGeometry.encode, addresses, length or 0, at)
        stream = cupy.cuda.get_current_stream().ptr
        for step, kernel, params in zip(prepared.plan.steps, prepared.kernels, packed, strict=True):
            launch(kernel.function, step.geometry, stream, params)
    return arrays.out, arrays.lse


class Prepared(NamedTuple):
    """Everything about a call that does not depend on addresses.

    Attributes
    ----------
    problem : CacheProblem
        The checked problem.
    selection : DecodeSelection
        The chosen kernel and the splits.
    plan : DecodePlan or None
        Its launches; None: there is nothing to launch.
    kernels : tuple of Kernel
        Of its steps.
    """

    problem: CacheProblem
    selection: DecodeSelection
    plan: DecodePlan | None
    kernels: tuple[Kernel, ...]


@functools.lru_cache(maxsize=1024)
def _prepare(
    geometries: tuple[Any, ...],  # Geometry or None, in the order of CacheArrays
    options: CacheOptions,
    want_lse: bool,
    config: tuple[tuple[str, int], ...],
    current_device: int,
) -> Prepared:
    operands = CacheArrays(*geometries).map(lambda name, geometry: Operand(name, *geometry))
    problem = CacheProblem.of(operands, options, want_lse=want_lse, current_device=current_device)
    selection = select_decode(problem, Device.current(), config)
    if problem.has_no_room:
        return Prepared(problem, selection, None, ())
    plan = plan_decode(problem, selection, lambda spec: load(spec, current_device).traits)
    return Prepared(problem, selection, plan, tuple(load(step.spec, current_device) for step in plan.steps))


def _check_values_on_gpu(arrays: CacheArrays[Any], length: int | None, problem: CacheProblem) -> None:
    """Wait for lengths, pages and rows, and check them; a stream under capture has none yet."""
    if sys.modules["cupy"].cuda.get_current_stream().is_capturing():
        return
    values = {name: array.get() for name in _VALUES if (array := getattr(arrays, name)) is not None}
    check_cache_values(CacheArrays(None, None, None, **values), length, problem)


def _emulated(
    arrays: CacheArrays[Any], length: int | None, options: CacheOptions, want_lse: bool, config: Any
) -> tuple[Any, Any]:
    from cupyfa import emulate_cache  # noqa: PLC0415 - imported when asked for

    prepared = emulate_cache.prepare(arrays, length, options, want_lse=want_lse, config=config)
    run = prepared.launch()
    if run.verdict in ("error", "incomplete"):
        raise HazardError(run)
    return prepared.arrays.out, prepared.arrays.lse
