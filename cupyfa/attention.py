"""The public attention function: validate, select, load, launch. No arithmetic here."""

from __future__ import annotations

import functools
import sys
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from cupyfa._launch import ForwardLauncher
from cupyfa.errors import HazardError, type_name
from cupyfa.kernels import Kernel, load
from cupyfa.operand import Addresses, Arrays, Geometry, Layout, Operand
from cupyfa.options import Options, WindowSize, check_options, check_return_lse
from cupyfa.oracles import online
from cupyfa.plan import fill_without_keys, plan_forward
from cupyfa.problem import Problem, check_addresses, check_overlap
from cupyfa.select import Config, Device, Selection, config_items, select

__all__ = ["AttentionResult", "Prepared", "attention", "prepare"]


Backend = Literal["emulator"]


class AttentionResult(NamedTuple):
    """Output and logarithm of the row sums.

    Attributes
    ----------
    out : numpy.ndarray or cupy.ndarray
        Shape and dtype of ``q``, but for the last axis, which is as long as that of ``v``.
    lse : numpy.ndarray or cupy.ndarray
        float32, (batch, heads_q, seqlen_q), natural logarithm.
    """

    out: Any
    lse: Any


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: WindowSize = ...,
    softcap: float | None = ...,
    sink: Any = ...,
    alibi_slopes: Any = ...,
    layout: Layout = ...,
    return_lse: Literal[False] = ...,
    out: Any = ...,
    lse: Any = ...,
    backend: Backend | None = ...,
    config: Config | None = ...,
) -> Any: ...


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: WindowSize = ...,
    softcap: float | None = ...,
    sink: Any = ...,
    alibi_slopes: Any = ...,
    layout: Layout = ...,
    return_lse: Literal[True],
    out: Any = ...,
    lse: Any = ...,
    backend: Backend | None = ...,
    config: Config | None = ...,
) -> AttentionResult: ...


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float | None = None,
    sink: Any = None,
    alibi_slopes: Any = None,
    layout: Layout = "BSHD",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    backend: Backend | None = None,
    config: Config | None = None,
) -> Any:
    """Compute softmax(softmax_scale * Q K') V for every head, with the usual masks and score modifiers.

    CuPy arrays are computed by a CUDA kernel on the current stream, NumPy arrays by the oracle on the CPU.

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads_q, head_dim)
        float16 or ``ml_dtypes.bfloat16``. head_dim is a multiple of 8, at most 256. On the GPU the last axis is
        contiguous and the other strides and the address are multiples of 16 bytes; nothing is ever copied.
    k : array, (batch, seqlen_k, heads_kv, head_dim)
        Same dtype and place; query head ``h`` uses head ``h // (heads_q // heads_kv)``.
    v : array, (batch, seqlen_k, heads_kv, head_dim_v)
        Same dtype and place; head_dim_v is a multiple of 8, at most 256, and may differ from head_dim.
    softmax_scale : float, optional
        Factor of the scores, 1/sqrt(head_dim) by default. 0 and negative factors are fine.
    causal : bool
        Row ``i`` sees the keys ``j <= i + seqlen_k - seqlen_q`` (aligned bottom-right).
    window_size : tuple of int or None, (left, right)
        Row ``i`` sees the keys from ``i + seqlen_k - seqlen_q - left`` to ``i + seqlen_k - seqlen_q + right``, both
        included; None or -1 for no bound. With ``causal`` the right side is 0. Keys outside cost nothing.
    softcap : float, optional
        At most 1000. Scaled scores become ``softcap * tanh(score / softcap)``.
    sink : array, optional, (heads_q,)
        float32; a magnitude below 1e38, or -inf. One more logit of each row, which takes part in the softmax and has no
        value.
    alibi_slopes : array, optional, (heads_q,) or (batch, heads_q)
        float32. ``slope * |i + seqlen_k - seqlen_q - j|`` is taken from the scaled (and capped) score of row ``i`` and
        key ``j``.
    layout : {"BSHD", "BHSD"}
        ``"BHSD"``: q, k, v and out are (batch, heads, seqlen, head_dim).
    return_lse : bool
        Also return the logarithm of the row sums.
    out : array, optional
        (batch, seqlen_q, heads_q, head_dim_v), dtype of ``q``, written in place and returned; no memory in common with
        other arguments.
    lse : array, optional
        float32, (batch, heads_q, seqlen_q), written in place, whatever ``return_lse`` is.
    backend : {"emulator"}, optional
        ``"emulator"`` runs the kernel that CuPy arrays would get on an H200, instruction by instruction, on NumPy
        arrays (it needs ``pip install 'cupyfa[compile]'``); the rules for arrays on a GPU hold. :mod:`cupyfa.emulate`
        offers schedules, seeds and reports.
    config : Mapping, optional
        Fields of :class:`cupyfa.spec.FwdSpec` to override, for experiments: ``{"pingpong": False}``. Without effect on
        NumPy arrays, except under the emulator.

    Returns
    -------
    array or AttentionResult
        The output, or ``(out, lse)`` with ``return_lse``. A row that sees no key has output 0 and lse -inf, with a sink
        the sink.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong; the message names it, what it is and what it must be. Nothing was launched.
    UnsupportedError
        No kernel fits.
    CompileError, LaunchError
        The compiler or the driver failed.
    HazardError
        The emulator found a hazard in the kernel.

    Notes
    -----
    The algorithm is FlashAttention-3's (arXiv 2407.08608). Scores and sums are float32; the probabilities are rounded
    to the input dtype before they multiply V. Scaled scores up to a magnitude of 2^22 are meaningful: beyond, the
    rounding of a float32 product is no longer small against 1, and from about 2^27 on a row may come out as NaN.
    A scale of 0 stands for the smallest normal float32, which vanishes against scores up to 1e36.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 4, 2, 8)).astype(np.float16) for _ in range(3))
    >>> out, lse = attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, out.dtype, lse.shape
    ((1, 4, 2, 8), dtype('float16'), (1, 2, 4))
    >>> bool(np.all(out[:, 0] == v[:, 0]))  # the first row sees only the first key
    True
    """
    check_return_lse(return_lse)
    options = check_options(softmax_scale, causal, window_size, softcap, layout)
    arrays = Arrays(q, k, v, out, lse, sink, alibi_slopes)
    if backend is not None:
        if backend != "emulator":
            raise ValueError(f"attention: backend is {backend!r}; it must be 'emulator' or None")
        out, lse = _emulated(arrays, options, return_lse, config)
    elif isinstance(q, np.ndarray):
        _check_types(np.ndarray, arrays)
        if any(isinstance(array, np.ma.MaskedArray) for array in arrays):
            raise TypeError("attention: masked arrays are not supported; pass plain numpy.ndarray")
        if config is not None:
            config_items(config)
        out, lse = _on_cpu(arrays, options)
    else:
        out, lse = _on_gpu(arrays, options, return_lse, config)
    return AttentionResult(out, lse) if return_lse else out


def _check_types(kind: type, arrays: Arrays[Any]) -> None:
    """All arguments belong to one library: there is no silent transfer."""
    for name, array in zip(arrays._fields, arrays, strict=True):
        if not isinstance(array, kind) and not (array is None and name not in ("q", "k", "v")):
            raise TypeError(
                f"attention: {name} is a {type_name(type(array))} but q is a {type_name(kind)}; pass NumPy arrays "
                "(computed on the CPU) or CuPy arrays (computed on the GPU), not both"
            )


def _geometry(array: Any) -> Geometry | None:
    return None if array is None else (array.shape, array.strides, array.dtype, array.data.device_id)


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
    """

    problem: Problem
    selection: Selection
    kernel: Kernel | None
    launcher: ForwardLauncher | None


def prepare(arrays: Arrays[Any], options: Options, want_lse: bool, config: Config | None) -> Prepared:
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
        As in :func:`attention`.

    Returns
    -------
    Prepared
        The same object for the same geometry and options.
    """
    cupy = sys.modules.get("cupy")  # whoever has a CuPy array has imported CuPy
    if cupy is None or not isinstance(arrays.q, cupy.ndarray):
        raise TypeError(
            f"attention: q is a {type_name(type(arrays.q))}; it must be a numpy.ndarray or a cupy.ndarray "
            "(cupy.from_dlpack takes the GPU arrays of other libraries without a copy)"
        )
    _check_types(cupy.ndarray, arrays)
    items = None if config is None else config_items(config)
    geometries = tuple([_geometry(array) for array in arrays])
    return _prepare(geometries, options, want_lse, items, cupy.cuda.runtime.getDevice())


@functools.lru_cache(maxsize=1024)
def _prepare(
    geometries: tuple[Any, ...],  # Geometry or None, in the order of Arrays
    options: Options,
    want_lse: bool,
    config: tuple[tuple[str, Any], ...] | None,
    current_device: int,
) -> Prepared:
    operands = Arrays(*geometries).map(lambda name, geometry: Operand(name, *geometry))
    problem = Problem.from_operands(operands, options, want_lse=want_lse, current_device=current_device)
    device = Device.current()
    selection = select(problem, device, None if config is None else dict(config))
    if problem.is_empty:
        return Prepared(problem, selection, None, None)
    kernel = load(selection.spec, current_device)
    launcher = plan_forward(problem, kernel.traits, kernel.function, device, kernel.counters)
    return Prepared(problem, selection, kernel, launcher)


def _on_gpu(arrays: Arrays[Any], options: Options, want_lse: bool, config: Config | None) -> tuple[Any, Any]:
    problem, _, _, launcher = prepare(arrays, options, want_lse, config)
    cupy = sys.modules["cupy"]
    q, k, v, out, lse, sink, slopes = arrays
    if out is None:
        out = cupy.empty((*q.shape[:3], v.shape[3]), q.dtype)
    if lse is None and want_lse:
        lse = cupy.empty((problem.batch, problem.heads_q, problem.seqlen_q), np.float32)
    addresses = Addresses(
        q.data.ptr,
        k.data.ptr,
        v.data.ptr,
        out.data.ptr,
        0 if lse is None else lse.data.ptr,
        0 if sink is None else sink.data.ptr,
        0 if slopes is None else slopes.data.ptr,
    )
    check_addresses(problem, addresses)
    if launcher is not None:
        launcher(addresses, cupy.cuda.get_current_stream().ptr)
    else:
        fill_without_keys(out, lse, sink)
    return out, lse


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
    q, k, v, out, lse, sink, slopes = arrays
    for name, output in (("out", out), ("lse", lse)):
        if output is not None and not output.flags.writeable:
            raise ValueError(f"attention: {name} is read-only; it must be writable")
    if out is None:
        out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    if lse is None:
        lse = np.empty((problem.batch, problem.heads_q, problem.seqlen_q), np.float32)

    def address(x: Any) -> int:
        return 0 if x is None or 0 in x.shape else int(x.__array_interface__["data"][0])

    check_overlap(problem, Addresses(*[address(x) for x in (q, k, v, out, lse, sink, slopes)]))
    matrices = [x.transpose(0, 2, 1, 3) if options.layout == "BHSD" else x for x in (q, k, v, out)]
    online.attention(
        *matrices[:3],
        softmax_scale=problem.softmax_scale,
        window_size=(problem.left, problem.right),
        softcap=problem.softcap,
        sink=sink,
        alibi_slopes=slopes,
        out=matrices[3],
        lse=lse,
    )
    return out, lse
