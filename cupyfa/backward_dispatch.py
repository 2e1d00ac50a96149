"""From checked options to gradients: NumPy arrays by the oracle, CuPy arrays by kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from cupyfa.backward_problem import (
    GRADIENTS,
    BackwardArrays,
    BackwardProblem,
    check_backward_overlap,
    with_gradients,
)
from cupyfa.errors import UnsupportedError
from cupyfa.lengths import check_lengths
from cupyfa.libraries import aligned_geometry, check_numpy, cupy_of, geometry
from cupyfa.operand import LENGTHS, Operand
from cupyfa.options import Options
from cupyfa.oracles import backward, packed_backward

__all__ = ["differentiate", "prepare_backward"]

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
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"attention: config is {config!r}; it must be a mapping or None")
    if backend is not None:
        return _emulated(arrays)
    if not isinstance(arrays.q, np.ndarray):
        return _on_gpu(arrays, options, deterministic)
    if workspace is not None:
        raise TypeError("attention: workspace is for CuPy arrays; q is a numpy.ndarray, which needs none")
    return _on_cpu(arrays, options, deterministic)


def prepare_backward(arrays: BackwardArrays[Any], options: Options, deterministic: bool) -> BackwardProblem:
    """Check CuPy arrays; once per geometry.

    Parameters
    ----------
    arrays : BackwardArrays
        As the user passed them.
    options : Options
        Checked.
    deterministic : bool
        Checked.

    Returns
    -------
    BackwardProblem
        The same object for the same geometry and options.
    """
    cupy = cupy_of(arrays, _REQUIRED)
    geometries = BackwardArrays(*[geometry(array) for array in arrays])
    if arrays.bias is not None:
        geometries = geometries._replace(bias=aligned_geometry(arrays.bias))
    return _problem(geometries, options, deterministic, cupy.cuda.runtime.getDevice())


@functools.lru_cache(maxsize=1024)
def _problem(
    geometries: tuple[Any, ...],  # Geometry or None, in the order of BackwardArrays
    options: Options,
    deterministic: bool,
    current_device: int | None,
) -> BackwardProblem:
    operands = BackwardArrays(*geometries).map(lambda name, geometry: Operand(name, *geometry))
    return BackwardProblem.of(operands, options, deterministic=deterministic, current_device=current_device)


def _on_gpu(arrays: BackwardArrays[Any], options: Options, deterministic: bool) -> NoReturn:
    prepare_backward(arrays, options, deterministic)
    raise UnsupportedError("attention: there are no kernels for gradients yet; NumPy arrays run on the CPU")


def _emulated(arrays: BackwardArrays[Any]) -> NoReturn:
    check_numpy(arrays, _REQUIRED)
    raise UnsupportedError("attention: there are no kernels for gradients yet that could be emulated")


def _on_cpu(arrays: BackwardArrays[Any], options: Options, deterministic: bool) -> BackwardArrays[Any]:
    check_numpy(arrays, _REQUIRED)
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
