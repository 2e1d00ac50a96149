"""Calls of `cupyfa.attention` that must be refused before anything is launched; one table for the CPU and the GPU."""

from __future__ import annotations

import enum
import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa import UnsupportedError
from cupyfa.testing import guarded_empty

BF16 = ml_dtypes.bfloat16
Q, KV = (1, 4, 4, 16), (1, 6, 2, 16)
#: Shape and dtype of each array of a good call.
GOOD: dict[str, tuple[tuple[int, ...], Any]] = {
    "q": (Q, np.float16),
    "k": (KV, np.float16),
    "v": (KV, np.float16),
    "out": (Q, np.float16),
    "lse": ((1, 4, 4), np.float32),
    "sink": ((4,), np.float32),
    "alibi_slopes": ((4,), np.float32),
    "bias": ((1, 4, 4, 6), np.float32),
}


class Where(enum.Enum):
    """For which arrays a call is bad."""

    BOTH = "NumPy and CuPy arrays"
    GPU_RULES = "CuPy arrays; NumPy would compute it. Without a GPU, operands that claim to be on one are checked"
    CUPY = "needs real CuPy arrays"
    NUMPY = "needs NumPy arrays"


@dataclass(frozen=True)
class BadCall:
    id: str
    make: Callable[[Any], dict[str, Any]]  # array module -> keyword arguments
    error: type[Exception]
    message: str  # regular expression, without the leading "attention: "
    where: Where = Where.BOTH


def zeros(xp: Any, shape: tuple[int, ...], dtype: Any = np.float16) -> Any:
    """An array at a multiple of 256 bytes."""
    return guarded_empty(shape, dtype, xp, poison=0.0).array


def qkv(
    xp: Any, q: tuple[int, ...] = Q, k: tuple[int, ...] = KV, v: tuple[int, ...] | None = None, dtype: Any = np.float16
) -> dict[str, Any]:
    return {"q": zeros(xp, q, dtype), "k": zeros(xp, k, dtype), "v": zeros(xp, k if v is None else v, dtype)}


def replace(**values: Any) -> Callable[[Any], dict[str, Any]]:
    """A good call but for these arguments."""
    return lambda xp: qkv(xp) | values


def retyped(name: str, dtype: Any) -> Callable[[Any], dict[str, Any]]:
    """A good call but for the dtype of one array."""
    return lambda xp: qkv(xp) | {name: zeros(xp, GOOD[name][0], dtype)}


def shaped(name: str, shape: tuple[int, ...], layout: str = "BSHD") -> Callable[[Any], dict[str, Any]]:
    """A good call but for the shape of one array."""
    return lambda xp: qkv(xp) | {name: zeros(xp, shape, GOOD[name][1]), "layout": layout}


def head_dim(d: int) -> Callable[[Any], dict[str, Any]]:
    return lambda xp: qkv(xp, (1, 4, 4, d), (1, 6, 2, d))


def seen_as(name: str, view: Callable[[Any], Any], wide: tuple[int, ...]) -> Callable[[Any], dict[str, Any]]:
    """A good call but for one array, which is a view of a larger one."""
    return lambda xp: qkv(xp) | {name: view(zeros(xp, wide, GOOD[name][1]))}


def as_strided(x: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A view with any strides, by NumPy or CuPy."""
    return importlib.import_module(type(x).__module__.split(".")[0]).lib.stride_tricks.as_strided(x, shape, strides)


def shifted(name: str, offset: int) -> Callable[[Any], dict[str, Any]]:
    """A good call but for one array that begins `offset` bytes behind an aligned address."""
    shape, dtype = GOOD[name]
    size = math.prod(shape) * np.dtype(dtype).itemsize

    def make(xp: Any) -> dict[str, Any]:
        buffer = zeros(xp, (size + 256,), np.uint8)
        return qkv(xp) | {name: buffer[offset : offset + size].view(dtype).reshape(shape)}

    return make


def strided(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Callable[[Any], dict[str, Any]]:
    """A good call but for an array with these strides, inside a large enough buffer."""

    def make(xp: Any) -> dict[str, Any]:
        view = xp.lib.stride_tricks.as_strided(zeros(xp, (65536,), GOOD[name][1]), shape=shape, strides=strides)
        return qkv(xp) | {name: view}

    return make


def overlapping(output: str, other: str, shift: int = 0) -> Callable[[Any], dict[str, Any]]:
    """A good call but for an output that begins `shift` elements behind the beginning of another array."""

    def make(xp: Any) -> dict[str, Any]:
        arguments, buffer = qkv(xp), zeros(xp, (4096,))
        for name, begin in ((other, 0), (output, shift)):
            shape, dtype = GOOD[name]
            arguments[name] = buffer.view(dtype)[begin : begin + math.prod(shape)].reshape(shape)
        return arguments

    return make


def same(output: str, other: str) -> Callable[[Any], dict[str, Any]]:
    """A good call but for an output that is an input."""

    def make(xp: Any) -> dict[str, Any]:
        arguments = qkv(xp, Q, Q)
        return arguments | {output: arguments[other]}

    return make


def read_only(name: str) -> Callable[[Any], dict[str, Any]]:
    def make(xp: Any) -> dict[str, Any]:
        arguments = shaped(name, GOOD[name][0])(xp)
        arguments[name].flags.writeable = False
        return arguments

    return make


def on_host(*names: str) -> Callable[[Any], dict[str, Any]]:
    """A good call but for arrays that are NumPy's."""

    def make(xp: Any) -> dict[str, Any]:
        return qkv(xp) | {name: zeros(np, *GOOD[name]) for name in names}

    return make


class Foreign:
    """An array of another library, as far as Python can tell."""

    def __init__(self, array: Any) -> None:
        for name in ("__cuda_array_interface__", "__array_interface__"):
            if hasattr(array, name):
                setattr(self, name, getattr(array, name))
        self.shape, self.dtype, self.strides = array.shape, array.dtype, array.strides


def foreign(name: str) -> Callable[[Any], dict[str, Any]]:
    def make(xp: Any) -> dict[str, Any]:
        return qkv(xp) | {name: Foreign(zeros(xp, *GOOD[name]))}

    return make


ARRAY = r"(numpy|cupy)\.ndarray"
NOT_AN_ARRAY = r"; it must be a numpy\.ndarray or a cupy\.ndarray"
MIXED = rf" but q is a {ARRAY}; pass NumPy arrays .* or CuPy arrays .*, not both"
DTYPE = r"; it must be float16 or ml_dtypes\.bfloat16$"
AXES = r"; it needs 4: \(batch, seqlen, heads, head_dim\)$"
SHARES = r"; it must be an array of its own"
FINITE = r"; it must be finite, and at most 2\.359e\+38$"
NUMBER = r"; it must be a number or None$"
LAYOUT = r"; it must be 'BSHD' or 'BHSD'$"
ALIGNED = r" begins at address 0x[0-9a-f]+; it must be a multiple of 4 bytes \({} is aligned\)$"
PAIR = r"; it must be a pair \(left, right\)$"
SIDE = r"; each side must be an integer or None$"
SIDE_BELOW = r"; each side must be at least 0, or None or -1 for no bound$"
CAP = r"; it must be positive, at least 1\.175e-38, or None for no cap$"
LARGE_CAP = "; supported are at most 1000: beyond, float32 would show its rounding in the output$"
RATIO = r"; softmax_scale / softcap must be at most 1\.179e\+38$"
FLOAT32 = r"; it must be float32$"
OF_HEADS = r"; it must have \(heads_q,\), \(4,\)$"
OF_BATCH = r"; it must have \(heads_q,\) or \(batch, heads_q\), \(4,\) or \(1, 4\)$"
OF_SCORES = r"; it must have 2 to 4 axes and broadcast to \(batch, heads_q, seqlen_q, seqlen_k\), \(1, 4, 4, 6\)$"
OF_BIAS = r"; it must be float32, or float16 as q$"
DIMS = r"; supported are the multiples of 8 from 8 to 256$"

BAD_CALLS: tuple[BadCall, ...] = (
    # Types
    BadCall("q-list", replace(q=[[1.0]]), TypeError, "q is a list" + NOT_AN_ARRAY),
    BadCall("q-none", replace(q=None), TypeError, "q is a NoneType" + NOT_AN_ARRAY),
    BadCall("q-float", replace(q=1.0), TypeError, "q is a float" + NOT_AN_ARRAY),
    BadCall("q-scalar", replace(q=np.float16(1)), TypeError, r"q is a numpy\.float16" + NOT_AN_ARRAY),
    BadCall("q-str", replace(q="q"), TypeError, "q is a str" + NOT_AN_ARRAY),
    BadCall("q-foreign", foreign("q"), TypeError, r"q is a \w+\.Foreign" + NOT_AN_ARRAY + r" \(cupy\.from_dlpack"),
    BadCall("k-list", replace(k=[1.0]), TypeError, "k is a list" + MIXED),
    BadCall("k-none", replace(k=None), TypeError, "k is a NoneType" + MIXED),
    BadCall("k-foreign", foreign("k"), TypeError, r"k is a \w+\.Foreign" + MIXED),
    BadCall("v-none", replace(v=None), TypeError, "v is a NoneType" + MIXED),
    BadCall("v-int", replace(v=7), TypeError, "v is a int" + MIXED),
    BadCall("v-bytes", replace(v=b"v"), TypeError, "v is a bytes" + MIXED),
    BadCall("out-list", replace(out=[]), TypeError, "out is a list" + MIXED),
    BadCall("out-true", replace(out=True), TypeError, "out is a bool" + MIXED),
    BadCall("lse-tuple", replace(lse=()), TypeError, "lse is a tuple" + MIXED),
    BadCall("lse-true", replace(lse=True), TypeError, "lse is a bool" + MIXED),
    BadCall("sink-list", replace(sink=[0.0] * 4), TypeError, "sink is a list" + MIXED),
    BadCall("sink-float", replace(sink=0.0), TypeError, "sink is a float" + MIXED),
    BadCall("sink-scalar", replace(sink=np.float32(0)), TypeError, r"sink is a numpy\.float32" + MIXED),
    BadCall("sink-foreign", foreign("sink"), TypeError, r"sink is a \w+\.Foreign" + MIXED),
    BadCall("slopes-list", replace(alibi_slopes=[0.5] * 4), TypeError, "alibi_slopes is a list" + MIXED),
    BadCall("slopes-true", replace(alibi_slopes=True), TypeError, "alibi_slopes is a bool" + MIXED),
    BadCall("slopes-foreign", foreign("alibi_slopes"), TypeError, r"alibi_slopes is a \w+\.Foreign" + MIXED),
    BadCall("k-on-host", on_host("k"), TypeError, r"k is a numpy\.ndarray but q is a cupy\.ndarray", Where.CUPY),
    BadCall("v-on-host", on_host("v"), TypeError, r"v is a numpy\.ndarray but q is a cupy\.ndarray", Where.CUPY),
    BadCall("q-on-host", on_host("q"), TypeError, r"k is a cupy\.ndarray but q is a numpy\.ndarray", Where.CUPY),
    BadCall("out-on-host", on_host("out"), TypeError, r"out is a numpy\.ndarray but q is a cupy", Where.CUPY),
    BadCall("lse-on-host", on_host("lse"), TypeError, r"lse is a numpy\.ndarray but q is a cupy", Where.CUPY),
    BadCall("sink-on-host", on_host("sink"), TypeError, r"sink is a numpy\.ndarray but q is a cupy", Where.CUPY),
    BadCall("bias-list", replace(bias=[[0.0] * 6] * 4), TypeError, "bias is a list" + MIXED),
    BadCall("bias-float", replace(bias=0.0), TypeError, "bias is a float" + MIXED),
    BadCall("bias-foreign", foreign("bias"), TypeError, r"bias is a \w+\.Foreign" + MIXED),
    BadCall("bias-on-host", on_host("bias"), TypeError, r"bias is a numpy\.ndarray but q is a", Where.CUPY),
    BadCall(
        "slopes-on-host", on_host("alibi_slopes"), TypeError, r"alibi_slopes is a numpy\.ndarray but q is a", Where.CUPY
    ),
    BadCall(
        "sink-on-device",
        lambda xp: qkv(np) | {"sink": zeros(xp, (4,), np.float32)},
        TypeError,
        r"sink is a cupy\.ndarray but q is a numpy",
        Where.CUPY,
    ),
    BadCall(
        "qkv-on-host",
        lambda xp: qkv(np) | {"out": zeros(xp, Q)},
        TypeError,
        r"out is a cupy\.ndarray but q is a numpy",
        Where.CUPY,
    ),
    # Dtypes
    BadCall("float32", lambda xp: qkv(xp, dtype=np.float32), TypeError, "q has dtype float32" + DTYPE),
    BadCall("float64", lambda xp: qkv(xp, dtype=np.float64), TypeError, "q has dtype float64" + DTYPE),
    BadCall("int8", lambda xp: qkv(xp, dtype=np.int8), TypeError, "q has dtype int8" + DTYPE),
    BadCall("uint16", lambda xp: qkv(xp, dtype=np.uint16), TypeError, "q has dtype uint16" + DTYPE),
    BadCall("complex64", lambda xp: qkv(xp, dtype=np.complex64), TypeError, "q has dtype complex64" + DTYPE),
    BadCall("bool", lambda xp: qkv(xp, dtype=np.bool_), TypeError, "q has dtype bool" + DTYPE),
    BadCall("q-bfloat16", retyped("q", BF16), TypeError, "k has dtype float16 but q has bfloat16; they must be equal"),
    BadCall("k-bfloat16", retyped("k", BF16), TypeError, "k has dtype bfloat16 but q has float16; they must be equal"),
    BadCall("v-bfloat16", retyped("v", BF16), TypeError, "v has dtype bfloat16 but q has float16; they must be equal"),
    BadCall("k-float32", retyped("k", np.float32), TypeError, "k has dtype float32" + DTYPE),
    BadCall("v-int32", retyped("v", np.int32), TypeError, "v has dtype int32" + DTYPE),
    BadCall("out-float32", retyped("out", np.float32), TypeError, "out has dtype float32; it must be float16$"),
    BadCall("out-bfloat16", retyped("out", BF16), TypeError, "out has dtype bfloat16; it must be float16$"),
    BadCall("lse-float16", retyped("lse", np.float16), TypeError, "lse has dtype float16; it must be float32$"),
    BadCall("lse-float64", retyped("lse", np.float64), TypeError, "lse has dtype float64; it must be float32$"),
    BadCall("sink-float16", retyped("sink", np.float16), TypeError, "sink has dtype float16" + FLOAT32),
    BadCall("sink-bfloat16", retyped("sink", BF16), TypeError, "sink has dtype bfloat16" + FLOAT32),
    BadCall("sink-float64", retyped("sink", np.float64), TypeError, "sink has dtype float64" + FLOAT32),
    BadCall("sink-int32", retyped("sink", np.int32), TypeError, "sink has dtype int32" + FLOAT32),
    BadCall(
        "slopes-float16", retyped("alibi_slopes", np.float16), TypeError, "alibi_slopes has dtype float16" + FLOAT32
    ),
    BadCall(
        "slopes-float64", retyped("alibi_slopes", np.float64), TypeError, "alibi_slopes has dtype float64" + FLOAT32
    ),
    BadCall("slopes-bool", retyped("alibi_slopes", np.bool_), TypeError, "alibi_slopes has dtype bool" + FLOAT32),
    BadCall("bias-bfloat16", retyped("bias", BF16), TypeError, "bias has dtype bfloat16" + OF_BIAS),
    BadCall("bias-float64", retyped("bias", np.float64), TypeError, "bias has dtype float64" + OF_BIAS),
    BadCall("bias-bool", retyped("bias", np.bool_), TypeError, "bias has dtype bool" + OF_BIAS),
    BadCall("bias-int32", retyped("bias", np.int32), TypeError, "bias has dtype int32" + OF_BIAS),
    BadCall(
        "bias-float16-of-bfloat16",
        lambda xp: qkv(xp, dtype=BF16) | {"bias": zeros(xp, (4, 6), np.float16)},
        TypeError,
        "bias has dtype float16; it must be float32, or bfloat16 as q$",
    ),
    # Ranks
    BadCall("q-0d", shaped("q", ()), ValueError, r"q has 0 axes, shape \(\)" + AXES),
    BadCall("q-1d", shaped("q", (16,)), ValueError, r"q has 1 axes, shape \(16,\)" + AXES),
    BadCall("q-2d", shaped("q", (4, 16)), ValueError, r"q has 2 axes, shape \(4, 16\)" + AXES),
    BadCall("q-3d", shaped("q", (4, 4, 16)), ValueError, r"q has 3 axes, shape \(4, 4, 16\)" + AXES),
    BadCall("q-5d", shaped("q", (1, *Q)), ValueError, r"q has 5 axes, shape \(1, 1, 4, 4, 16\)" + AXES),
    BadCall("k-3d", shaped("k", (6, 2, 16)), ValueError, r"k has 3 axes, shape \(6, 2, 16\)" + AXES),
    BadCall("v-5d", shaped("v", (*KV, 1)), ValueError, r"v has 5 axes, shape \(1, 6, 2, 16, 1\)" + AXES),
    BadCall(
        "k-3d-bhsd",
        shaped("k", (2, 6, 16), "BHSD"),
        ValueError,
        r"k has 3 axes.*4: \(batch, heads, seqlen, head_dim\)$",
    ),
    # Shapes
    BadCall("k-batch", shaped("k", (2, 6, 2, 16)), ValueError, "k has batch 2 but q has 1; they must be equal$"),
    BadCall("v-batch", shaped("v", (3, 6, 2, 16)), ValueError, "v has batch 3 but q has 1; they must be equal$"),
    BadCall("k-no-batch", shaped("k", (0, 6, 2, 16)), ValueError, "k has batch 0 but q has 1; they must be equal$"),
    BadCall(
        "k-head-dim", shaped("k", (1, 6, 2, 24)), ValueError, "k has head_dim 24 but q has 16; they must be equal$"
    ),
    BadCall(
        "v-head-dim",
        shaped("v", (1, 6, 2, 12)),
        UnsupportedError,
        "v has head_dim 12" + DIMS,
    ),
    BadCall("v-seqlen", shaped("v", (1, 7, 2, 16)), ValueError, "v has seqlen 7 but k has 6; they must be equal$"),
    BadCall("v-heads", shaped("v", (1, 6, 4, 16)), ValueError, "v has 4 heads but k has 2; they must be equal$"),
    BadCall("k-one-head", shaped("k", (1, 6, 1, 16)), ValueError, "v has 2 heads but k has 1; they must be equal$"),
    BadCall(
        "heads-3-by-2",
        shaped("q", (1, 4, 3, 16)),
        ValueError,
        "q has 3 heads and k has 2; the heads of q must be a multiple of those of k$",
    ),
    BadCall("heads-1-by-2", shaped("q", (1, 4, 1, 16)), ValueError, "q has 1 heads and k has 2; .* must be a multiple"),
    BadCall("heads-4-by-0", lambda xp: qkv(xp, Q, (1, 6, 0, 16)), ValueError, "q has 4 heads and k has 0; .* must be"),
    BadCall("heads-4-by-8", lambda xp: qkv(xp, Q, (1, 6, 8, 16)), ValueError, "q has 4 heads and k has 8; .* must be"),
    BadCall(
        "heads-bhsd",  # BSHD arrays under the other name of their axes: 4 "heads" by 6
        replace(layout="BHSD"),
        ValueError,
        "q has 4 heads and k has 6; the heads of q must be a multiple of those of k$",
    ),
    *(
        BadCall(f"head-dim-{d}", head_dim(d), UnsupportedError, f"q has head_dim {d}" + DIMS)
        for d in (0, 1, 4, 12, 100, 257, 264, 512)
    ),
    # Of each head
    BadCall("sink-of-kv", shaped("sink", (2,)), ValueError, r"sink has shape \(2,\)" + OF_HEADS),
    BadCall("sink-0d", shaped("sink", ()), ValueError, r"sink has shape \(\)" + OF_HEADS),
    BadCall("sink-one", shaped("sink", (1,)), ValueError, r"sink has shape \(1,\)" + OF_HEADS),
    BadCall("sink-batch", shaped("sink", (1, 4)), ValueError, r"sink has shape \(1, 4\)" + OF_HEADS),
    BadCall("sink-empty", shaped("sink", (0,)), ValueError, r"sink has shape \(0,\)" + OF_HEADS),
    BadCall("slopes-of-kv", shaped("alibi_slopes", (2,)), ValueError, r"alibi_slopes has shape \(2,\)" + OF_BATCH),
    BadCall("slopes-0d", shaped("alibi_slopes", ()), ValueError, r"alibi_slopes has shape \(\)" + OF_BATCH),
    BadCall("slopes-batch", shaped("alibi_slopes", (2, 4)), ValueError, r"alibi_slopes has shape \(2, 4\)" + OF_BATCH),
    BadCall("slopes-turned", shaped("alibi_slopes", (4, 1)), ValueError, r"alibi_slopes has shape \(4, 1\)" + OF_BATCH),
    BadCall(
        "slopes-3d", shaped("alibi_slopes", (1, 4, 1)), ValueError, r"alibi_slopes has shape \(1, 4, 1\)" + OF_BATCH
    ),
    # Of each score
    *(
        BadCall(
            f"bias-{name}", shaped("bias", shape), ValueError, rf"bias has shape {re.escape(str(shape))}" + OF_SCORES
        )
        for name, shape in {
            "0d": (),
            "1d": (6,),
            "5d": (1, 1, 4, 4, 6),
            "turned": (6, 4),
            "of-kv": (2, 4, 6),
            "batch": (2, 4, 4, 6),
            "rows": (3, 6),
            "keys": (4, 5),
            "of-scores-in-bshd": (1, 4, 6, 4),
            "no-keys": (4, 0),
        }.items()
    ),
    BadCall(
        "slopes-one-batch-of-two",
        lambda xp: qkv(xp, (2, *Q[1:]), (2, *KV[1:])) | {"alibi_slopes": zeros(xp, (1, 4), np.float32)},
        ValueError,
        r"alibi_slopes has shape \(1, 4\); it must have \(heads_q,\) or \(batch, heads_q\), \(4,\) or \(2, 4\)$",
    ),
    # Outputs
    BadCall(
        "out-seqlen", shaped("out", (1, 5, 4, 16)), ValueError, r"out has shape \(1, 5, 4, 16\); .* \(1, 4, 4, 16\)$"
    ),
    BadCall(
        "out-batch", shaped("out", (2, 4, 4, 16)), ValueError, r"out has shape \(2, .*; it must have the shape of q"
    ),
    BadCall(
        "out-3d", shaped("out", (4, 4, 16)), ValueError, r"out has shape \(4, 4, 16\); it must have the shape of q"
    ),
    BadCall("out-like-k", shaped("out", KV), ValueError, r"out has shape \(1, 6, 2, 16\); it must have the shape of q"),
    BadCall(
        "out-empty", shaped("out", (0, 4, 4, 16)), ValueError, r"out has shape \(0, .*; it must have the shape of q"
    ),
    BadCall(
        "out-bshd-of-bhsd",
        lambda xp: qkv(xp, (1, 4, 3, 16), (1, 2, 6, 16)) | {"out": zeros(xp, (1, 3, 4, 16)), "layout": "BHSD"},
        ValueError,
        r"out has shape \(1, 3, 4, 16\); it must have the shape of q, with the head_dim of v, \(1, 4, 3, 16\)$",
    ),
    BadCall(
        "lse-2d",
        shaped("lse", (4, 4)),
        ValueError,
        r"lse has shape \(4, 4\); .*\(batch, heads_q, seqlen_q\), \(1, 4, 4\)",
    ),
    BadCall(
        "lse-4d",
        shaped("lse", (1, 4, 4, 1)),
        ValueError,
        r"lse has shape \(1, 4, 4, 1\); .*\(batch, heads_q, seqlen_q\)",
    ),
    BadCall("lse-batch", shaped("lse", (2, 4, 4)), ValueError, r"lse has shape \(2, 4, 4\); .*\(1, 4, 4\)$"),
    BadCall(
        "lse-bsh",
        lambda xp: qkv(xp, (1, 5, 4, 16)) | {"lse": zeros(xp, (1, 5, 4), np.float32)},
        ValueError,
        r"lse has shape \(1, 5, 4\); it must have \(batch, heads_q, seqlen_q\), \(1, 4, 5\)$",
    ),
    BadCall(
        "out-broadcast",
        strided("out", Q, (512, 0, 32, 2)),
        ValueError,
        "out has strides .*; its elements must not overlap",
    ),
    BadCall(
        "out-windows",
        strided("out", Q, (512, 32, 32, 2)),
        ValueError,
        "out has strides .*; its elements must not overlap",
    ),
    BadCall(
        "out-half",
        strided("out", Q, (512, 128, 16, 2)),
        ValueError,
        "out has strides .*; its elements must not overlap",
    ),
    BadCall("lse-broadcast", strided("lse", (1, 4, 4), (64, 0, 4)), ValueError, "lse has strides .* must not overlap"),
    BadCall("lse-one-row", strided("lse", (1, 4, 4), (0, 16, 0)), ValueError, "lse has strides .* must not overlap"),
    BadCall("out-is-q", same("out", "q"), ValueError, "out shares memory with q" + SHARES),
    BadCall("out-is-k", same("out", "k"), ValueError, "out shares memory with k" + SHARES),
    BadCall("out-is-v", same("out", "v"), ValueError, "out shares memory with v" + SHARES),
    BadCall("out-in-q", overlapping("out", "q", 128), ValueError, "out shares memory with q" + SHARES),
    BadCall("out-in-k", overlapping("out", "k", 184), ValueError, "out shares memory with k" + SHARES),
    BadCall("out-in-v", overlapping("out", "v", 8), ValueError, "out shares memory with v" + SHARES),
    BadCall("out-in-q-unaligned", overlapping("out", "q", 127), ValueError, "out shares memory with q" + SHARES),
    BadCall("out-in-v-unaligned", overlapping("out", "v", 1), ValueError, "out shares memory with v" + SHARES),
    BadCall("lse-in-q", overlapping("lse", "q", 4), ValueError, "lse shares memory with q" + SHARES),
    BadCall("lse-in-k", overlapping("lse", "k", 92), ValueError, "lse shares memory with k" + SHARES),
    BadCall("lse-in-v", overlapping("lse", "v"), ValueError, "lse shares memory with v" + SHARES),
    BadCall("lse-in-out", overlapping("lse", "out", 16), ValueError, "lse shares memory with out" + SHARES),
    BadCall("out-in-sink", overlapping("out", "sink", 0), ValueError, "out shares memory with sink" + SHARES),
    BadCall(
        "out-in-slopes", overlapping("out", "alibi_slopes"), ValueError, "out shares memory with alibi_slopes" + SHARES
    ),
    BadCall("lse-in-sink", overlapping("lse", "sink", 3), ValueError, "lse shares memory with sink" + SHARES),
    BadCall(
        "lse-in-slopes",
        overlapping("lse", "alibi_slopes", 3),
        ValueError,
        "lse shares memory with alibi_slopes" + SHARES,
    ),
    BadCall("sink-in-lse", overlapping("sink", "lse", 15), ValueError, "lse shares memory with sink" + SHARES),
    BadCall(
        "slopes-in-out",
        overlapping("alibi_slopes", "out", 127),
        ValueError,
        "out shares memory with alibi_slopes" + SHARES,
    ),
    BadCall("out-in-bias", overlapping("out", "bias", 184), ValueError, "out shares memory with bias" + SHARES),
    BadCall("lse-in-bias", overlapping("lse", "bias", 95), ValueError, "lse shares memory with bias" + SHARES),
    BadCall("bias-in-lse", overlapping("bias", "lse", 15), ValueError, "lse shares memory with bias" + SHARES),
    BadCall("out-read-only", read_only("out"), ValueError, "out is read-only; it must be writable$", Where.NUMPY),
    BadCall("lse-read-only", read_only("lse"), ValueError, "lse is read-only; it must be writable$", Where.NUMPY),
    # Options
    BadCall("scale-nan", replace(softmax_scale=math.nan), ValueError, "softmax_scale is nan" + FINITE),
    BadCall("scale-inf", replace(softmax_scale=math.inf), ValueError, "softmax_scale is inf" + FINITE),
    BadCall("scale-minus-inf", replace(softmax_scale=-math.inf), ValueError, "softmax_scale is -inf" + FINITE),
    BadCall("scale-1e39", replace(softmax_scale=1e39), ValueError, r"softmax_scale is 1e\+39" + FINITE),
    BadCall("scale-minus-1e39", replace(softmax_scale=-(10**39)), ValueError, r"softmax_scale is -1e\+39" + FINITE),
    BadCall("scale-beyond-float", replace(softmax_scale=10**400), ValueError, "softmax_scale is inf" + FINITE),
    BadCall("scale-numpy-nan", replace(softmax_scale=np.float32(np.nan)), ValueError, "softmax_scale is nan" + FINITE),
    BadCall("scale-str", replace(softmax_scale="0.1"), TypeError, "softmax_scale is a str" + NUMBER),
    BadCall("scale-list", replace(softmax_scale=[0.1]), TypeError, "softmax_scale is a list" + NUMBER),
    BadCall("scale-complex", replace(softmax_scale=1j), TypeError, "softmax_scale is a complex" + NUMBER),
    BadCall(
        "scale-array",
        lambda xp: qkv(xp) | {"softmax_scale": zeros(xp, (1,), np.float32)},
        TypeError,
        rf"softmax_scale is a {ARRAY}" + NUMBER,
    ),
    BadCall("causal-int", replace(causal=1), TypeError, "causal is 1; it must be True or False$"),
    BadCall("causal-none", replace(causal=None), TypeError, "causal is None; it must be True or False$"),
    BadCall("causal-str", replace(causal="yes"), TypeError, "causal is 'yes'; it must be True or False$"),
    BadCall("window-int", replace(window_size=128), TypeError, "window_size is 128" + PAIR),
    BadCall("window-none", replace(window_size=None), TypeError, "window_size is None" + PAIR),
    BadCall("window-str", replace(window_size="12"), TypeError, "window_size is '12'" + PAIR),
    BadCall("window-one", replace(window_size=(1,)), TypeError, r"window_size is \(1,\)" + PAIR),
    BadCall("window-three", replace(window_size=[1, 2, 3]), TypeError, r"window_size is \[1, 2, 3\]" + PAIR),
    BadCall("window-empty", replace(window_size=()), TypeError, r"window_size is \(\)" + PAIR),
    BadCall("window-set", replace(window_size={1, 2}), TypeError, r"window_size is \{1, 2\}" + PAIR),
    BadCall("window-range", replace(window_size=range(2)), TypeError, r"window_size is range\(0, 2\)" + PAIR),
    BadCall(
        "window-array",
        lambda xp: qkv(xp) | {"window_size": zeros(xp, (2,), np.int32)},
        TypeError,
        r"window_size is array\(\[0, 0\], dtype=int32\)" + PAIR,
    ),
    BadCall("window-float", replace(window_size=(1.0, 2)), TypeError, r"window_size is \(1\.0, 2\)" + SIDE),
    BadCall("window-bool", replace(window_size=(True, 2)), TypeError, r"window_size is \(True, 2\)" + SIDE),
    BadCall("window-false", replace(window_size=(2, False)), TypeError, r"window_size is \(2, False\)" + SIDE),
    BadCall(
        "window-numpy-bool",
        replace(window_size=(np.True_, 2)),
        TypeError,
        r"window_size is \(np\.True_, 2\)" + SIDE,
    ),
    BadCall("window-nan", replace(window_size=(None, math.nan)), TypeError, r"window_size is \(None, nan\)" + SIDE),
    BadCall("window-digit", replace(window_size=("1", None)), TypeError, r"window_size is \('1', None\)" + SIDE),
    BadCall("window-nested", replace(window_size=((1,), 2)), TypeError, r"window_size is \(\(1,\), 2\)" + SIDE),
    BadCall("window-left-minus-2", replace(window_size=(-2, 0)), ValueError, r"window_size is \(-2, 0\)" + SIDE_BELOW),
    BadCall(
        "window-right-minus-2", replace(window_size=[None, -2]), ValueError, r"window_size is \[None, -2\]" + SIDE_BELOW
    ),
    BadCall(
        "window-numpy-minus-2",
        replace(window_size=(np.int64(-2), 1)),
        ValueError,
        r"window_size is \(np\.int64\(-2\), 1\)" + SIDE_BELOW,
    ),
    BadCall(  # the right side is replaced, and a bad one still is bad
        "window-causal-minus-3",
        replace(causal=True, window_size=(-1, -3)),
        ValueError,
        r"window_size is \(-1, -3\)" + SIDE_BELOW,
    ),
    BadCall("softcap-zero", replace(softcap=0), ValueError, r"softcap is 0\.0" + CAP),
    BadCall("softcap-minus-zero", replace(softcap=-0.0), ValueError, r"softcap is -0\.0" + CAP),
    BadCall("softcap-negative", replace(softcap=-50.0), ValueError, r"softcap is -50\.0" + CAP),
    BadCall("softcap-nan", replace(softcap=math.nan), ValueError, "softcap is nan" + CAP),
    BadCall("softcap-inf", replace(softcap=math.inf), ValueError, "softcap is inf" + CAP),
    BadCall("softcap-denormal", replace(softcap=1e-38), ValueError, "softcap is 1e-38" + CAP),
    BadCall("softcap-1001", replace(softcap=1001), UnsupportedError, r"softcap is 1001\.0" + LARGE_CAP),
    BadCall("softcap-1e39", replace(softcap=1e39), UnsupportedError, r"softcap is 1e\+39" + LARGE_CAP),
    BadCall("softcap-beyond-float", replace(softcap=10**400), ValueError, "softcap is inf" + CAP),
    BadCall("softcap-str", replace(softcap="50"), TypeError, "softcap is a str" + NUMBER),
    BadCall("softcap-bool", replace(softcap=True), TypeError, "softcap is a bool" + NUMBER),
    BadCall("softcap-complex", replace(softcap=1j), TypeError, "softcap is a complex" + NUMBER),
    BadCall("softcap-tuple", replace(softcap=(50.0,)), TypeError, "softcap is a tuple" + NUMBER),
    BadCall(
        "softcap-array",
        lambda xp: qkv(xp) | {"softcap": zeros(xp, (1,), np.float32)},
        TypeError,
        rf"softcap is a {ARRAY}" + NUMBER,
    ),
    BadCall(
        "softcap-below-the-scale",
        replace(softcap=1e-30, softmax_scale=-1e9),
        ValueError,
        r"softcap is 1e-30 with a softmax_scale of -1000000000\.0" + RATIO,
    ),
    BadCall(
        "softcap-least-below-a-scale-of-2",
        replace(softcap=1.2e-38, softmax_scale=2),
        ValueError,
        r"softcap is 1\.2e-38 with a softmax_scale of 2" + RATIO,
    ),
    BadCall("layout-lower", replace(layout="bshd"), ValueError, "layout is 'bshd'" + LAYOUT),
    BadCall("layout-sbhd", replace(layout="SBHD"), ValueError, "layout is 'SBHD'" + LAYOUT),
    BadCall("layout-none", replace(layout=None), ValueError, "layout is None" + LAYOUT),
    BadCall("layout-int", replace(layout=3), ValueError, "layout is 3" + LAYOUT),
    BadCall("layout-list", replace(layout=["BSHD"]), ValueError, r"layout is \['BSHD'\]" + LAYOUT),
    BadCall("config-int", replace(config=3), TypeError, "config is 3; it must be a mapping"),
    BadCall(
        "config-unknown",
        replace(config={"tile": 64}),
        ValueError,
        "config has the field 'tile'; it can override tile_m, tile_n, stages, q_stages, bias_stages, ",
    ),
    BadCall(
        "config-head-dim",
        replace(config={"head_dim": 128}),
        ValueError,
        "config has the field 'head_dim'",
    ),
    BadCall("config-causal", replace(config={"causal": True}), ValueError, "config has the field 'causal'"),
    BadCall(
        "config-tile-str",
        replace(config={"tile_n": "128"}),
        TypeError,
        r"config\['tile_n'\] is '128'; it must be an integer$",
    ),
    BadCall(
        "config-stages-float",
        replace(config={"stages": 2.0}),
        TypeError,
        r"config\['stages'\] is 2\.0; it must be an integer$",
    ),
    BadCall(
        "config-pingpong-int",
        replace(config={"pingpong": 1}),
        TypeError,
        r"config\['pingpong'\] is 1; it must be True or False$",
    ),
    BadCall(
        "config-speculative-none",
        replace(config={"speculative": None}),
        TypeError,
        r"config\['speculative'\] is None; it must be True or False$",
    ),
    BadCall(
        "config-speculative-without-overlap",
        replace(config={"speculative": True, "overlap": False}),
        ValueError,
        "config has speculative=True with overlap=False; .*: set overlap=True, or speculative=False$",
        Where.GPU_RULES,
    ),
    BadCall(
        "config-three-stages-speculative",
        replace(config={"three_stage": True}),
        ValueError,
        "config has three_stage=True with speculative=True; .*: set speculative=False, or three_stage=False$",
        Where.GPU_RULES,
    ),
    BadCall(
        "config-three-stages-window",
        replace(config={"three_stage": True, "speculative": False}, window_size=(3, None)),
        ValueError,
        "config has three_stage=True; that kernel is for comparisons, .*: set three_stage=False$",
        Where.GPU_RULES,
    ),
    BadCall(
        "config-without-warp-specialization-softcap",
        replace(config={"warp_specialized": False}, softcap=3),
        ValueError,
        "config has warp_specialized=False; that kernel is for comparisons, .*: set warp_specialized=True$",
        Where.GPU_RULES,
    ),
    BadCall("config-window", replace(config={"window": True}), ValueError, "config has the field 'window'"),
    BadCall(
        "config-without-warp-specialization",
        replace(config={"warp_specialized": False, "scheduler": "one_tile"}),
        ValueError,
        "config has warp_specialized=False with q_stages=3, setmaxnreg=True; .*: set q_stages=1, setmaxnreg=False$",
        Where.GPU_RULES,
    ),
    BadCall(
        "config-scheduler",
        replace(config={"scheduler": "fast"}),
        ValueError,
        r"config\['scheduler'\] is 'fast'; it must be one of 'one_tile', 'persistent', 'dynamic'$",
    ),
    BadCall("scale-bool", replace(softmax_scale=True), TypeError, "softmax_scale is a bool" + NUMBER),
    BadCall("return-lse-str", replace(return_lse="no"), TypeError, "return_lse is 'no'; it must be True or False$"),
    BadCall("return-lse-int", replace(return_lse=1), TypeError, "return_lse is 1; it must be True or False$"),
    # Memory
    BadCall("lse-address", shifted("lse", 2), ValueError, "lse" + ALIGNED.format("a new array"), Where.GPU_RULES),
    BadCall("sink-address", shifted("sink", 2), ValueError, "sink" + ALIGNED.format("a copy"), Where.GPU_RULES),
    BadCall(
        "slopes-address",
        shifted("alibi_slopes", 1),
        ValueError,
        "alibi_slopes" + ALIGNED.format("a copy"),
        Where.GPU_RULES,
    ),
    BadCall("bias-address", shifted("bias", 2), ValueError, "bias" + ALIGNED.format("a copy"), Where.GPU_RULES),
    BadCall(
        "bias-odd-strides",
        strided("bias", (4, 6), (26, 4)),
        ValueError,
        r"bias has strides \(0, 0, 26, 4\) bytes; they must be multiples of 4$",
        Where.GPU_RULES,
    ),
    BadCall(
        "bias-odd-strides-16",
        lambda xp: qkv(xp) | {"bias": as_strided(zeros(xp, (64,)), (4, 6), (15, 2))},
        ValueError,
        r"bias has strides \(0, 0, 15, 2\) bytes; they must be multiples of 2$",
        Where.GPU_RULES,
    ),
    BadCall(
        "bias-reversed-odd-strides",
        seen_as("bias", lambda x: as_strided(x[40:], (4, 6), (-26, 4)), (64,)),
        ValueError,
        r"bias has strides \(0, 0, -26, 4\) bytes; they must be multiples of 4$",
        Where.GPU_RULES,
    ),
    BadCall(
        "sink-odd-strides",
        strided("sink", (4,), (6,)),
        ValueError,
        r"sink has strides \(6,\) bytes; they must be multiples of 4$",
        Where.GPU_RULES,
    ),
    BadCall(
        "slopes-odd-strides",
        strided("alibi_slopes", (4,), (10,)),
        ValueError,
        r"alibi_slopes has strides \(0, 10\) bytes; they must be multiples of 4$",
        Where.GPU_RULES,
    ),
    BadCall(
        "out-reversed-q",
        lambda xp: (arguments := qkv(xp)) | {"out": arguments["q"][:, ::-1]},
        ValueError,
        "out shares memory with q" + SHARES,
    ),
    BadCall(
        "sink-reversed-odd-strides",
        seen_as("sink", lambda x: as_strided(x[6:], (4,), (-6,)), (12,)),
        ValueError,
        r"sink has strides \(-6,\) bytes; they must be multiples of 4$",
        Where.GPU_RULES,
    ),
    BadCall(
        "lse-odd-strides",
        seen_as("lse", lambda x: as_strided(x, (1, 4, 4), (104, 6, 26)), (1, 4, 40)),
        ValueError,
        r"lse has strides \(104, 6, 26\) bytes; they must be multiples of 4$",
        Where.GPU_RULES,
    ),
)
