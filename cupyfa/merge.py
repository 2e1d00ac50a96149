"""Attention over two sets of keys, merged into attention over both."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa.attention import AttentionResult
from cupyfa.errors import type_name
from cupyfa.operand import Operand, overlaps_itself, share_memory

__all__ = ["merge_states"]

_OUT_DTYPES = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))
_LSE_DTYPES = tuple(map(np.dtype, (np.float32, np.float64)))


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None
) -> AttentionResult:
    """Merge attention of the same queries over two disjoint sets of keys into attention over both.

    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b``, for a prefix
    that sequences share and the rest of each, or for keys on several GPUs. It is associative: any number of states can
    be merged one by one.

    Parameters
    ----------
    out_a : array, (batch, seqlen, heads, head_dim) or (total, heads, head_dim)
        float16, ``ml_dtypes.bfloat16``, float32 or float64. Any strides will do, here and below.
    lse_a : array, (batch, heads, seqlen) or (heads, total)
        float32 or float64, natural logarithm. -inf where a row saw no key; its output does not matter then, NaN
        included.
    out_b, lse_b : array
        The other state: shapes and dtypes of ``out_a`` and ``lse_a``. A sink belongs to one of the two only.
    out, lse : array, optional
        Shapes and dtypes of the others, written in place and returned. They may be the arrays of a state.

    Returns
    -------
    AttentionResult
        ``(out, lse)``. Where both saw no key, 0 and -inf.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong; the message names it, what it is and what it must be. Nothing was written.

    Notes
    -----
    Computed in float32, or in float64 where an argument has that, relative to the larger of the two logarithms. CuPy
    arrays are merged on the current stream by some elementwise kernels, without a wait for the GPU.

    Examples
    --------
    >>> import cupyfa, numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, n, 2, 8)).astype(np.float16) for n in (3, 9, 9))
    >>> whole = cupyfa.attention(q, k, v, return_lse=True)
    >>> parts = [cupyfa.attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in (np.s_[:4], np.s_[4:])]
    >>> merged = merge_states(*parts[0], *parts[1])
    >>> bool(np.allclose(merged.out, whole.out, atol=2e-3)), bool(np.allclose(merged.lse, whole.lse))
    (True, True)
    """
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, "out": out, "lse": lse}
    xp = _library(given)
    _check(given)
    double = np.dtype(np.float64) in (out_a.dtype, lse_a.dtype)
    dtype = np.dtype(np.float64 if double else np.float32)
    zero, one = dtype.type(0), dtype.type(1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # as on the GPU: log(0) is -inf
        a, b = lse_a.astype(dtype), lse_b.astype(dtype)
        top = xp.maximum(a, b)
        reference = xp.where(top == -np.inf, zero, top)  # exp(-inf + inf) would be NaN
        weight_a, weight_b = xp.exp(a - reference), xp.exp(b - reference)
        total = weight_a + weight_b
        share = one / xp.where(total == zero, one, total)
        merged = _weighted(xp, out_a, a, weight_a * share) + _weighted(xp, out_b, b, weight_b * share)
        merged, merged_lse = merged.astype(out_a.dtype), (reference + xp.log(total)).astype(lse_a.dtype)
    for given_array, values in ((out, merged), (lse, merged_lse)):
        if given_array is not None:
            # As integers, which every kernel of CuPy can copy.
            integers = f"u{values.dtype.itemsize}"
            given_array.view(integers)[...] = values.view(integers)
    return AttentionResult(merged if out is None else out, merged_lse if lse is None else lse)


def _weighted(xp: Any, out: Any, lse: Any, share: Any) -> Any:
    """Return a state's part of the output; where it saw no key, what it holds does not matter."""
    saw_none = (lse == -np.inf).swapaxes(-1, -2)[..., None]
    return xp.where(saw_none, lse.dtype.type(0), out.astype(lse.dtype)) * share.swapaxes(-1, -2)[..., None]


def _library(given: dict[str, Any]) -> Any:
    """Return the module that all arrays belong to."""
    first, cupy = given["out_a"], sys.modules.get("cupy")
    xp = np if isinstance(first, np.ndarray) or cupy is None else cupy
    for name, array in given.items():
        if not isinstance(array, xp.ndarray) and not (array is None and name in ("out", "lse")):
            of_first = "" if name == "out_a" else f" but out_a is a {type_name(type(first))}"
            raise TypeError(
                f"merge_states: {name} is a {type_name(type(array))}{of_first}; pass NumPy arrays or CuPy arrays, not "
                "both"
            )
    return xp


def _check(given: dict[str, Any]) -> None:
    first, logs = given["out_a"], given["lse_a"]
    if first.ndim not in (3, 4):
        raise ValueError(
            f"merge_states: out_a has {first.ndim} axes, shape {first.shape}; it needs (batch, seqlen, heads, "
            "head_dim) or (total, heads, head_dim)"
        )
    for name, array, dtypes in (("out_a", first, _OUT_DTYPES), ("lse_a", logs, _LSE_DTYPES)):
        if array.dtype not in dtypes:
            allowed = ", ".join(str(dtype) for dtype in dtypes)
            raise TypeError(f"merge_states: {name} has dtype {array.dtype}; it must be one of {allowed}")
    *batch, rows, heads, _ = first.shape
    shapes = {"out": first.shape, "lse": (*batch, heads, rows)}
    for name, array in given.items():
        if array is None:
            continue
        kind = name.split("_")[0]
        dtype = first.dtype if kind == "out" else logs.dtype
        if array.dtype != dtype:
            raise TypeError(f"merge_states: {name} has dtype {array.dtype}; it must be {dtype}, that of {kind}_a")
        if array.shape != shapes[kind]:
            meaning = "(batch, heads, seqlen)" if batch else "(heads, total)"
            wanted = "the shape of out_a" if kind == "out" else f"{meaning} of out_a"
            raise ValueError(f"merge_states: {name} has shape {array.shape}; it must have {wanted}, {shapes[kind]}")
    _check_outputs(given["out"], given["lse"])


def _check_outputs(out: Any, lse: Any) -> None:
    """Check that each element of the outputs has memory of its own; they may well be the inputs."""
    outputs: list[tuple[Operand, int]] = []
    for name, array in (("out", out), ("lse", lse)):
        if array is None:
            continue
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ValueError(f"merge_states: {name} is read-only; it must be writable")
        operand = Operand(name, array.shape, array.strides, array.dtype, None)
        if overlaps_itself(operand):
            raise ValueError(
                f"merge_states: {name} has strides {array.strides} bytes for shape {array.shape}; its elements must "
                "not overlap each other"
            )
        outputs.append((operand, array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr))
    if len(outputs) == 2 and share_memory(*outputs[0], *outputs[1]):
        raise ValueError("merge_states: lse shares memory with out; it must be an array of its own")
