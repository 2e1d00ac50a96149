"""From a spec to a kernel on a device: compiled at first use by CuPy's RawModule, and kept."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import os
import pathlib
import threading
from typing import Any

import numpy as np

from cupyfa._launch import PARAMETER_SIZES, Function, TileCounters, unpack_traits
from cupyfa.compiler import PtxasReport, check_versions, compile_key, first_error, options
from cupyfa.errors import CompileError
from cupyfa.sources import amalgamate
from cupyfa.spec import Spec

__all__ = ["Kernel", "load"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel loaded on a device.

    Attributes
    ----------
    spec : Spec
        Its compile key.
    function : Function
        CUfunction, and whether it has run.
    traits : dict
        Threads, shared memory and tile sizes, read back from the compiled module.
    attributes : dict
        What the driver says: ``num_regs``, ``local_size_bytes`` and others.
    ptxas : PtxasReport or None
        The compiler's report, None if it was lost (it is kept beside CuPy's cache).
    counters : TileCounters or None
        From which its tiles are drawn; None if they are dealt out.
    module : object
        Keeps the code loaded.
    """

    spec: Spec
    function: Function
    traits: dict[str, int]
    attributes: dict[str, int]
    ptxas: PtxasReport | None
    counters: TileCounters | None
    module: Any = dataclasses.field(repr=False)


#: For as many streams and captured launches of a device.
_TILE_COUNTERS = 2**16

_locks: dict[tuple[Spec, int], threading.Lock] = {}
_kernels: dict[tuple[Spec, int], Kernel] = {}


def load(spec: Spec, device: int) -> Kernel:
    """Return the kernel of a spec on a device, which is the current one; the first call compiles.

    Parameters
    ----------
    spec : Spec
        The compile key.
    device : int
        The current CUDA device.

    Returns
    -------
    Kernel
        Loaded and ready to launch; the same object for the same arguments.

    Raises
    ------
    CompileError
        The compiler or CuPy is too old, or the kernel does not compile.
    """
    key = (spec, device)
    if (kernel := _kernels.get(key)) is not None:
        return kernel
    with _locks.setdefault(key, threading.Lock()):  # threads that want the same kernel wait for one compilation
        if key not in _kernels:
            _kernels[key] = _compile(spec, device)
        return _kernels[key]


@functools.cache
def _check_installation() -> None:
    import cupy  # noqa: PLC0415 - imported where a GPU is used

    check_versions(cupy.cuda.nvrtc.getVersion(), cupy.__version__)


def _compile(spec: Spec, device: int) -> Kernel:
    import cupy  # noqa: PLC0415

    _check_installation()
    if cupy.cuda.get_current_stream().is_capturing():
        raise CompileError(
            f"{spec} is not loaded yet, and a stream under capture cannot load it: call cupyfa.warmup before the "
            "capture",
            spec=spec,
        )
    traits_expression = "&" + spec.traits_expression
    module = cupy.RawModule(
        code=amalgamate(spec.entry), options=options(spec), name_expressions=(spec.name_expression, traits_expression)
    )
    log = io.StringIO()
    try:
        module.compile(log_stream=log)
    except cupy.cuda.compiler.CompileException as error:
        raise CompileError(f"{spec} does not compile: {first_error(str(error))}", spec=spec, log=str(error)) from error
    raw_kernel = module.get_function(spec.name_expression)
    function = Function(raw_kernel.kernel.ptr)
    traits = unpack_traits(_read_traits(module, traits_expression))
    function.allow_shared_memory(traits["shared_bytes"])
    return Kernel(
        spec=spec,
        function=function,
        traits=traits,
        attributes=dict(raw_kernel.attributes),
        ptxas=_keep_report(spec, log.getvalue()),
        counters=_tile_counters(device) if traits["dynamic"] else None,
        module=(module, raw_kernel),
    )


@functools.cache
def _tile_counters(device: int) -> TileCounters:
    """Return the counters of a device, which is the current one."""
    import cupy  # noqa: PLC0415

    zeros = cupy.zeros(_TILE_COUNTERS, np.uint32)
    cupy.cuda.get_current_stream().synchronize()  # launches on other streams do not wait for this one
    return TileCounters(zeros.data.ptr, zeros.size, zeros)


def _read_traits(module: Any, expression: str) -> bytes:
    import cupy  # noqa: PLC0415

    # RawModule.get_global does not translate name expressions; the mapping is what its get_function uses.
    pointer = module.get_global(module.module.mapping[expression])
    size = PARAMETER_SIZES["KernelTraits"]
    return bytes(cupy.ndarray((size,), dtype=cupy.uint8, memptr=pointer).get())


def _keep_report(spec: Spec, log: str) -> PtxasReport | None:
    """Keep a fresh log beside CuPy's cached cubin, which has none, or find the log of an earlier process there."""
    from cupy.cuda import nvrtc  # noqa: PLC0415

    digest = hashlib.sha256("\0".join((*compile_key(spec), str(nvrtc.getVersion()))).encode()).hexdigest()
    cache = os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")  # as CuPy documents it
    path = pathlib.Path(os.path.expanduser(cache), f"cupyfa-{digest[:32]}.ptxas.txt")
    try:
        if log:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_text(log, encoding="utf-8")
            os.replace(part, path)  # other processes see all of it or nothing
        else:
            log = path.read_text(encoding="utf-8")
        return PtxasReport.parse(log)
    except (OSError, ValueError):
        return None  # a cache that cannot be written, was emptied or damaged costs the report but not the kernel
