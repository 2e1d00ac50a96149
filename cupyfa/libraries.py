"""NumPy or CuPy: all arrays of a call belong to one library, and nothing is transferred silently."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyfa.errors import CompileError, type_name
from cupyfa.operand import TMA_ALIGNMENT, Geometry

__all__ = [
    "aligned_geometry",
    "check_arrays",
    "check_numpy",
    "cupy_of",
    "geometry",
    "warm_under_capture",
    "workspace_memory",
]

_MATRICES = frozenset("qkv")


def check_arrays(kind: type, arrays: Any, required: frozenset[str] = _MATRICES) -> None:
    """Check that all arguments are arrays of one library.

    Parameters
    ----------
    kind : type
        Of its arrays.
    arrays : NamedTuple
        As the user passed them.
    required : frozenset of str
        Those that may not be None.

    Raises
    ------
    TypeError
        Naming the argument.
    """
    if {*map(type, arrays)} <= {kind, types.NoneType} and not any(getattr(arrays, name) is None for name in required):
        return  # the usual call
    for name, array in zip(arrays._fields, arrays, strict=True):
        if not isinstance(array, kind) and not (array is None and name not in required):
            raise TypeError(
                f"attention: {name} is a {type_name(type(array))} but q is a {type_name(kind)}; pass NumPy arrays "
                "(computed on the CPU) or CuPy arrays (computed on the GPU), not both"
            )


def check_numpy(arrays: Any, required: frozenset[str] = _MATRICES) -> None:
    """Check that all arguments are plain arrays of NumPy.

    Parameters
    ----------
    arrays : NamedTuple
        As the user passed them.
    required : frozenset of str
        Those that may not be None.

    Raises
    ------
    TypeError
        Naming the argument.
    """
    check_arrays(np.ndarray, arrays, required)
    if any(isinstance(array, np.ma.MaskedArray) for array in arrays):
        raise TypeError("attention: masked arrays are not supported; pass plain numpy.ndarray")


def cupy_of(arrays: Any, required: frozenset[str] = _MATRICES) -> Any:
    """Check that all arguments are arrays of CuPy.

    Parameters
    ----------
    arrays : NamedTuple
        As the user passed them.
    required : frozenset of str
        Those that may not be None.

    Returns
    -------
    module
        ``cupy``, which whoever has such an array has imported.

    Raises
    ------
    TypeError
        Naming the argument.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(arrays.q, cupy.ndarray):
        if isinstance(arrays.q, np.ndarray):  # of a function that says what a call needs, not of the call
            raise TypeError("attention: q is a numpy.ndarray, which needs no workspace and no plan; pass CuPy arrays")
        raise TypeError(
            f"attention: q is a {type_name(type(arrays.q))}; it must be a numpy.ndarray or a cupy.ndarray "
            "(cupy.from_dlpack takes the GPU arrays of other libraries without a copy)"
        )
    check_arrays(cupy.ndarray, arrays, required)
    return cupy


def geometry(array: Any) -> Geometry | None:
    """Return all of a CuPy array but its address and data.

    Parameters
    ----------
    array : cupy.ndarray or None
        Any.

    Returns
    -------
    Geometry or None
        None for None.
    """
    return None if array is None else (array.shape, array.strides, array.dtype, array.data.device_id)


def aligned_geometry(array: Any) -> tuple[Any, ...]:
    """Return the geometry of a CuPy array, and whether it begins where TMA can take it from.

    Parameters
    ----------
    array : cupy.ndarray
        A bias: its kernel depends on that.

    Returns
    -------
    tuple
        Geometry, and a bool.
    """
    return (array.shape, array.strides, array.dtype, array.data.device_id, array.data.ptr % TMA_ALIGNMENT == 0)


def workspace_memory(size: int, workspace: Any) -> Any:
    """Return memory for intermediate results.

    Parameters
    ----------
    size : int
        Bytes.
    workspace : cupy.ndarray or None
        The caller's.

    Returns
    -------
    cupy.ndarray
        That, or a new array, which CuPy frees in the stream's order.

    Raises
    ------
    TypeError, ValueError
        The caller's is too small, or not what it should be.
    """
    cupy = sys.modules["cupy"]
    if workspace is None:
        return cupy.empty(size, np.uint8)
    if not isinstance(workspace, cupy.ndarray) or workspace.dtype != np.uint8 or workspace.ndim != 1:
        raise TypeError("attention: workspace must be a cupy.ndarray of uint8 with one axis")
    if workspace.size < size or (workspace.size > 1 and workspace.strides[0] != 1):
        raise ValueError(
            f"attention: workspace has {workspace.size} bytes with stride {workspace.strides[0]}; it must be "
            f"contiguous, and needs {size} (see cupyfa.workspace_size)"
        )
    if workspace.data.device_id != cupy.cuda.runtime.getDevice() or workspace.data.ptr % 16:
        raise ValueError("attention: workspace must be on the current device, at a multiple of 16 bytes")
    return workspace


@contextlib.contextmanager
def warm_under_capture() -> Iterator[None]:
    """Say what to do if CuPy has to load a kernel for a copy where it cannot.

    Yields
    ------
    None
        To who copies what TMA cannot take where it is.

    Raises
    ------
    CompileError
        In place of what CuPy raised, if the current stream is under capture.
    """
    capturing = sys.modules["cupy"].cuda.get_current_stream().is_capturing()
    try:
        yield
    except Exception as error:
        if not capturing:
            raise
        raise CompileError(
            "attention: an array has to be copied because TMA cannot take it where it is, and a stream under capture "
            "could not load CuPy's kernel for it: make the same call once before the capture"
        ) from error
