"""Checks of arrays that every kind of problem makes: dtype, axes, heads, place, and what an output may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa.errors import UnsupportedError
from cupyfa.operand import Operand, overlaps_itself, share_memory
from cupyfa.options import Options
from cupyfa.spec import DType

__all__ = [
    "MAX_SEQLEN",
    "OF_OUT",
    "are_apart",
    "check_axes",
    "check_current_device",
    "check_devices",
    "check_dtypes",
    "check_given",
    "check_head_dim",
    "check_heads",
    "check_of_heads",
    "check_output",
    "check_seqlen",
    "check_strides",
    "check_unshared",
    "of_lse",
    "visible_bounds",
]

MAX_SEQLEN = 2**31 - 1024  # row coordinates of a tile that hangs over the end still fit an int
#: What a shape of out means, for messages.
OF_OUT = "the shape of q, with the head_dim of v"
_DTYPES = {np.dtype(np.float16): DType.FLOAT16, np.dtype(ml_dtypes.bfloat16): DType.BFLOAT16}
_MAX_HEAD_DIM = 256


def check_dtypes(q: Operand, *others: Operand) -> DType:
    """Check that all matrices have one dtype that there are kernels for.

    Parameters
    ----------
    q : Operand
        The queries.
    *others : Operand
        What has to have their dtype.

    Returns
    -------
    DType
        Of all of them.

    Raises
    ------
    TypeError
        Naming the array.
    """
    for operand in (q, *others):
        if operand.dtype not in _DTYPES:
            raise TypeError(
                f"attention: {operand.name} has dtype {operand.dtype}; it must be float16 or ml_dtypes.bfloat16"
            )
    for operand in others:
        if operand.dtype != q.dtype:
            raise TypeError(
                f"attention: {operand.name} has dtype {operand.dtype} but q has {q.dtype}; they must be equal"
            )
    return _DTYPES[q.dtype]


def check_axes(operand: Operand, axes: str) -> None:
    """Check the number of axes.

    Parameters
    ----------
    operand : Operand
        Any array.
    axes : str
        Those that it must have, in brackets.

    Raises
    ------
    ValueError
        Naming the array and the axes.
    """
    count = axes.count(",") + 1
    if len(operand.shape) != count:
        raise ValueError(
            f"attention: {operand.name} has {len(operand.shape)} axes, shape {operand.shape}; it needs {count}: {axes}"
        )


def check_heads(q: Operand, k: Operand, heads_q: int, heads_kv: int) -> None:
    """Check that each key head has equally many query heads.

    Parameters
    ----------
    q, k : Operand
        For their names.
    heads_q, heads_kv : int
        How many heads they have.

    Raises
    ------
    ValueError
        They have not.
    """
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        raise ValueError(
            f"attention: {q.name} has {heads_q} heads and {k.name} has {heads_kv}; the heads of {q.name} must be a "
            f"multiple of those of {k.name}"
        )


def check_head_dim(operand: Operand) -> None:
    """Check that there are kernels for the last axis of a matrix.

    Parameters
    ----------
    operand : Operand
        With a last axis.

    Raises
    ------
    UnsupportedError
        There are none.
    """
    if operand.shape[-1] == 0 or operand.shape[-1] % 8 or operand.shape[-1] > _MAX_HEAD_DIM:
        raise UnsupportedError(
            f"attention: {operand.name} has head_dim {operand.shape[-1]}; supported are the multiples of 8 from 8 "
            f"to {_MAX_HEAD_DIM}"
        )


def check_seqlen(operand: Operand, seqlen: int) -> None:
    """Check that the rows can be counted.

    Parameters
    ----------
    operand : Operand
        For its name.
    seqlen : int
        How many there are.

    Raises
    ------
    UnsupportedError
        Too many.
    """
    if seqlen > MAX_SEQLEN:
        raise UnsupportedError(f"attention: {operand.name} has seqlen {seqlen}; supported are at most {MAX_SEQLEN}")


def check_of_heads(operand: Operand, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check an array with a number for each head, in one of some shapes.

    Parameters
    ----------
    operand : Operand
        sink or alibi_slopes.
    shapes : dict
        Those that it may have, by what they mean.

    Raises
    ------
    TypeError, ValueError
        Naming the array and the shapes.
    """
    if operand.dtype != np.float32:
        raise TypeError(f"attention: {operand.name} has dtype {operand.dtype}; it must be float32")
    if operand.shape not in shapes.values():
        meanings, sizes = " or ".join(shapes), " or ".join(str(shape) for shape in shapes.values())
        raise ValueError(f"attention: {operand.name} has shape {operand.shape}; it must have {meanings}, {sizes}")


def check_given(operand: Operand, shape: tuple[int, ...], dtype: np.dtype[Any], meaning: str) -> None:
    """Check dtype and shape of an array that both are known of.

    Parameters
    ----------
    operand : Operand
        What the user passed, or what will be allocated.
    shape : tuple of int
        That it must have.
    dtype : numpy.dtype
        Likewise.
    meaning : str
        Of the shape.

    Raises
    ------
    TypeError, ValueError
        Naming the array.
    """
    if operand.dtype != dtype:
        raise TypeError(f"attention: {operand.name} has dtype {operand.dtype}; it must be {dtype}")
    if operand.shape != shape:
        raise ValueError(f"attention: {operand.name} has shape {operand.shape}; it must have {meaning}, {shape}")


def check_output(output: Operand, shape: tuple[int, ...], dtype: np.dtype[Any], meaning: str | None = None) -> None:
    """Check what is written: dtype, shape, and that each element has memory of its own.

    Parameters
    ----------
    output : Operand
        What the user passed, or what will be allocated.
    shape : tuple of int
        That it must have.
    dtype : numpy.dtype
        Likewise.
    meaning : str, optional
        Of the shape; by default that of out or lse.

    Raises
    ------
    TypeError, ValueError
        Naming the array.
    """
    if meaning is None:
        meaning = OF_OUT if output.name == "out" else of_lse(shape)
    check_given(output, shape, dtype, meaning)
    if overlaps_itself(output):
        raise ValueError(
            f"attention: {output.name} has strides {output.strides} bytes for shape {output.shape}; its elements must "
            "not overlap each other"
        )


def of_lse(shape: tuple[int, ...]) -> str:
    """Return what a shape of lse means.

    Parameters
    ----------
    shape : tuple of int
        With three axes, or packed with two.

    Returns
    -------
    str
        For messages.
    """
    return "(batch, heads_q, seqlen_q)" if len(shape) == 3 else "(heads_q, total_q)"


def are_apart(addresses: Iterable[int | None], spans: Iterable[tuple[int, int]]) -> bool:
    """Return whether arrays are behind each other, so that none of them can share memory with another.

    Parameters
    ----------
    addresses : iterable of int or None
        Of their first elements; None or 0 for an array that has none.
    spans : iterable of tuple of int
        `Operand.span` of each.

    Returns
    -------
    bool
        False also for interleaved slices of one buffer, which `check_unshared` tells apart.
    """
    behind = 0
    for begin, end in sorted((a + low, a + high) for a, (low, high) in zip(addresses, spans, strict=True) if a):
        if begin < behind:
            return False
        behind = max(behind, end)
    return True


def check_unshared(output: Operand, address: int, others: Sequence[tuple[Operand, int]]) -> None:
    """Check that what is written shares no memory with another array.

    Parameters
    ----------
    output : Operand
        What is written.
    address : int
        Of its first element.
    others : sequence of (Operand, int)
        The others and their addresses.

    Raises
    ------
    ValueError
        Naming both arrays.
    """
    for other, other_address in others:
        if share_memory(output, address, other, other_address):
            raise ValueError(
                f"attention: {output.name} shares memory with {other.name}; it must be an array of its own, because "
                "tiles are written while others are still read"
            )


def check_devices(q: Operand, others: dict[str, Operand]) -> None:
    """Check that all arrays are in one place.

    Parameters
    ----------
    q : Operand
        The queries.
    others : dict of Operand
        All arrays of the call, by name.

    Raises
    ------
    ValueError
        Naming the array that is elsewhere.
    """
    for operand in others.values():
        if operand.device != q.device:
            raise ValueError(
                f"attention: {operand.name} is on {_place(operand)} but q is on {_place(q)}; all arrays must be on one "
                "device"
            )


def _place(operand: Operand) -> str:
    return "the host (NumPy)" if operand.device is None else f"CUDA device {operand.device} (CuPy)"


def check_current_device(q: Operand, current_device: int | None) -> None:
    """Check that the arrays are on the device that would compute.

    Parameters
    ----------
    q : Operand
        One of them.
    current_device : int or None
        The current CUDA device.

    Raises
    ------
    ValueError
        Naming both devices.
    """
    if q.device != current_device:
        raise ValueError(
            f"attention: q is on CUDA device {q.device} but the current device is {current_device}; call it under "
            f"`with cupy.cuda.Device({q.device}):`"
        )


def check_strides(operand: Operand) -> None:
    """Check that an array whose elements are read one by one has them where a load can be.

    Parameters
    ----------
    operand : Operand
        Any array.

    Raises
    ------
    ValueError
        Naming the array and its strides.
    """
    step = operand.dtype.itemsize
    if any(stride % step for stride, size in zip(operand.strides, operand.shape, strict=True) if size > 1):
        raise ValueError(
            f"attention: {operand.name} has strides {operand.strides} bytes; they must be multiples of {step}"
        )


def visible_bounds(options: Options, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
    """Return the sides of the window that hide a key from a row; a causal mask stays one, whatever it hides.

    Parameters
    ----------
    options : Options
        Checked.
    seqlen_q, seqlen_k : int
        The most rows and keys that there can be.

    Returns
    -------
    tuple of int or None
        Left and right; None: all rows see all keys on that side.

    Raises
    ------
    UnsupportedError
        The right side is too long to be added to a key.
    """
    left = None if options.left is None or options.left >= seqlen_k - 1 else options.left
    right = None if options.right is None or options.right >= max(1, seqlen_q - 1) else options.right
    if right is not None and seqlen_k + right > MAX_SEQLEN:
        raise UnsupportedError(
            f"attention: window_size has the right side {right} with seqlen_k {seqlen_k}; supported are together at "
            f"most {MAX_SEQLEN}"
        )
    return left, right
