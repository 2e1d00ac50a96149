"""Every check on arguments: what is refused, in which words, and what is not."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bad_calls import BAD_CALLS, KV, BadCall, Q, Where, qkv, zeros

import cupyfa
from cupyfa.errors import type_name
from cupyfa.operand import Layout, Operand
from cupyfa.problem import Problem, check_addresses, check_options, check_overlap
from cupyfa.select import H200, select
from cupyfa.spec import DType
from cupyfa.testing import as_bshd

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def as_if_on_gpu(
    *,
    q: Any,
    k: Any,
    v: Any,
    out: Any = None,
    lse: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    layout: Any = "BSHD",
    return_lse: Any = False,
    config: Any = None,
) -> Problem:
    """Check NumPy arrays as if they were CuPy arrays on device 0."""
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    softmax_scale, causal = check_options(softmax_scale, causal, layout, return_lse)
    problem = Problem.from_operands(
        *(None if x is None else Operand(name, x.shape, x.strides, x.dtype, 0) for name, x in arrays.items()),
        softmax_scale=softmax_scale,
        causal=causal,
        layout=layout,
        want_lse=False,
        current_device=0,
    )
    select(problem, H200, config)
    outputs = {"out": zeros(np, q.shape, q.dtype)} if out is None else {}
    check_addresses(problem, *(0 if x is None or not x.size else x.ctypes.data for x in (arrays | outputs).values()))
    return problem


def ids(calls: list[BadCall]) -> list[Any]:
    return [pytest.param(call, id=call.id) for call in calls]


def needs_arrays(call: BadCall) -> bool:
    return all(isinstance(x, np.ndarray) or (x is None and n in ("out", "lse")) for n, x in arrays_of(call).items())


def arrays_of(call: BadCall) -> dict[str, Any]:
    return {name: x for name, x in call.make(np).items() if name in ("q", "k", "v", "out", "lse")}


ON_CPU = [call for call in BAD_CALLS if call.where in (Where.BOTH, Where.NUMPY)]
BY_OPERANDS = [call for call in BAD_CALLS if call.where in (Where.BOTH, Where.GPU_RULES) and needs_arrays(call)]


def refused(call: BadCall, function: Any) -> None:
    with pytest.raises(call.error) as caught:
        function(**call.make(np))
    assert type(caught.value) is call.error
    assert re.match("attention: " + call.message, str(caught.value)), str(caught.value)


def test_the_table_is_large_and_its_names_are_unique() -> None:
    assert len({call.id for call in BAD_CALLS}) == len(BAD_CALLS)
    assert sum(call.where is not Where.NUMPY for call in BAD_CALLS) >= 80
    assert len(BY_OPERANDS) >= 80


@pytest.mark.parametrize("call", ids(ON_CPU))
def test_numpy_call_is_refused(call: BadCall) -> None:
    refused(call, cupyfa.attention)


@pytest.mark.parametrize("call", ids(BY_OPERANDS))
def test_gpu_call_is_refused_by_its_geometry(call: BadCall) -> None:
    refused(call, as_if_on_gpu)


@pytest.mark.parametrize("call", ids([call for call in BAD_CALLS if call.where is Where.GPU_RULES]))
def test_what_only_the_gpu_refuses_numpy_computes(call: BadCall) -> None:
    out = cupyfa.attention(**call.make(np))
    assert np.isfinite(out.astype(np.float32)).all()


def operand(name: str, shape: tuple[int, ...], dtype: Any = F16, device: int | None = 0, **changes: Any) -> Operand:
    return dataclasses.replace(Operand.contiguous(name, shape, dtype, device), **changes)


def pose(
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand | None = None,
    lse: Operand | None = None,
    *,
    layout: Layout = "BSHD",
    softmax_scale: float | None = None,
    want_lse: bool = False,
    device: int | None = 0,
) -> Problem:
    return Problem.from_operands(
        q, k, v, out, lse,
        softmax_scale=softmax_scale, causal=False, layout=layout, want_lse=want_lse, current_device=device,
    )  # fmt: skip


def good(**changes: Operand) -> dict[str, Operand]:
    return {"q": operand("q", Q), "k": operand("k", KV), "v": operand("v", KV), **changes}


# --- Devices ---


@pytest.mark.parametrize("name", ["k", "v", "out", "lse"])
def test_arrays_on_two_devices(name: str) -> None:
    shape, dtype = {"k": (KV, F16), "v": (KV, F16), "out": (Q, F16), "lse": ((1, 4, 4), F32)}[name]
    message = rf"^attention: {name} is on CUDA device 1 \(CuPy\) but q is on CUDA device 0 \(CuPy\); all arrays must"
    with pytest.raises(ValueError, match=message):
        pose(**good(**{name: operand(name, shape, dtype, device=1)}))


def test_array_of_the_host_beside_one_of_a_device() -> None:
    with pytest.raises(ValueError, match=r"^attention: k is on the host \(NumPy\) but q is on CUDA device 0 \(CuPy\)"):
        pose(**good(k=operand("k", KV, device=None)))


def test_device_that_is_not_current() -> None:
    message = (
        r"^attention: q is on CUDA device 0 but the current device is 2; call it under `with cupy\.cuda\.Device\(0\):`$"
    )
    with pytest.raises(ValueError, match=message):
        pose(**good(), device=2)


def test_problem_on_another_device_that_is_current() -> None:
    arrays = {name: dataclasses.replace(x, device=3) for name, x in good().items()}
    assert pose(**arrays, device=3).out.device == 3


# --- What no array of a test can be ---


def test_stride_that_a_tensor_map_cannot_hold() -> None:
    wide = operand("k", KV, strides=(2**41, 2**40, 32, 2))
    with pytest.raises(
        ValueError, match=r"^attention: k has stride 1099511627776 bytes on its seqlen axis; .* below 2\*\*40"
    ):
        pose(**good(k=wide))
    assert pose(**good(k=operand("k", KV, strides=(2**41, 2**40 - 16, 32, 2)))).k.strides[1] == 2**40 - 16


@pytest.mark.parametrize("name", ["q", "k"])
def test_sequence_that_an_int_cannot_count(name: str) -> None:
    longest = 2**31 - 1024
    for seqlen in (longest, longest + 1):
        shapes = (
            {"q": (1, seqlen, 1, 8), "k": (1, 4, 1, 8)} if name == "q" else {"q": (1, 4, 1, 8), "k": (1, seqlen, 1, 8)}
        )
        arrays = operand("q", shapes["q"]), operand("k", shapes["k"]), operand("v", shapes["k"])
        if seqlen == longest:
            assert pose(*arrays).batch == 1
        else:
            message = rf"^attention: {name} has seqlen {seqlen}; supported are at most {longest}$"
            with pytest.raises(cupyfa.UnsupportedError, match=message):
                pose(*arrays)


# --- Options ---


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), (1, 1.0), (0.5, 0.5), (np.float32(0.25), 0.25), (np.float64(-2), -2.0), (np.int64(0), 0.0)],
)
def test_scales_become_floats(given: Any, expected: float | None) -> None:
    scale, causal = check_options(given, np.bool_(True), "BHSD")
    assert scale == expected
    assert type(scale) is type(expected)
    assert causal is True


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.125, 1e38, 2.35e38])
def test_any_scale_that_float32_holds_is_kept(scale: float) -> None:
    assert pose(**good(), softmax_scale=scale).softmax_scale == scale


def test_default_scale() -> None:
    assert pose(**good()).softmax_scale == 1 / math.sqrt(16)


def test_type_names() -> None:
    assert [type_name(t) for t in (list, np.ndarray, np.float16)] == ["list", "numpy.ndarray", "numpy.float16"]


# --- What is fine ---


def test_sizes_and_dtypes() -> None:
    for dtype, expected in ((F16, DType.FLOAT16), (BF16, DType.BFLOAT16)):
        problem = pose(
            operand("q", (3, 5, 6, 24), dtype), operand("k", (3, 7, 2, 24), dtype), operand("v", (3, 7, 2, 24), dtype)
        )
        assert problem.dtype is expected
        sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.heads_kv, problem.head_dim)
        assert sizes == (3, 5, 7, 6, 2, 24)
        assert problem.out == operand("out", (3, 5, 6, 24), dtype)
        assert problem.lse is None


def test_lse_is_planned_when_wanted() -> None:
    assert pose(**good(), want_lse=True).lse == operand("lse", (1, 4, 4), F32)


def test_bhsd_is_a_view() -> None:
    q, k = operand("q", (2, 6, 5, 24)), operand("k", (2, 3, 7, 24))
    problem = pose(q, k, dataclasses.replace(k, name="v"), layout="BHSD")
    assert problem.q.shape == (2, 5, 6, 24)
    assert problem.q.strides == (6 * 5 * 48, 48, 5 * 48, 2)
    assert (problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.heads_kv) == (5, 7, 6, 3)
    assert problem.out.strides == problem.q.strides  # allocated in the caller's layout


def test_equal_geometry_is_an_equal_problem() -> None:
    assert pose(**good()) == pose(**good())
    assert hash(pose(**good())) == hash(pose(**good()))
    assert pose(**good()) != pose(**good(), softmax_scale=0.5)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_interleaved_slices_of_one_buffer(layout: str) -> None:
    # One buffer (batch, seqlen, q k v out, heads, head_dim): the four arrays interleave and share no byte.
    buffer = zeros(np, (2, 5, 4, 3, 16))
    arrays = {name: as_bshd(buffer[:, :, i], layout) for i, name in enumerate(("q", "k", "v", "out"))}
    assert as_if_on_gpu(**arrays, layout=layout).q.strides == (5 * 4 * 96, 4 * 96, 32, 2)
    one_row_up = np.lib.stride_tricks.as_strided(buffer[:, :, 2], shape=(2, 4, 3, 16), strides=buffer[:, :, 2].strides)
    with pytest.raises(ValueError, match="out shares memory with v"):
        as_if_on_gpu(q=buffer[:, :4, 0], k=buffer[:, :, 1], v=buffer[:, :, 2], out=one_row_up)


def test_outputs_that_touch_the_end_of_an_input() -> None:
    buffer = zeros(np, (3 * 256,))
    q, out, rest = (buffer[i * 256 : (i + 1) * 256].reshape(Q) for i in range(3))
    k = zeros(np, KV)
    lse = rest.view(np.float32).reshape(-1)[:16].reshape(1, 4, 4)
    assert as_if_on_gpu(q=q, k=k, v=k, out=out, lse=lse).lse is not None


def test_inputs_may_be_the_same_array() -> None:
    x = zeros(np, Q)
    assert as_if_on_gpu(q=x, k=x, v=x).heads_kv == 4


@pytest.mark.parametrize("stride", [0, 2, 6, -32, 2**50])
def test_stride_of_an_axis_with_one_index_is_free(stride: int) -> None:
    shape = (1, 1, 1, 16)
    odd = [operand(name, shape, strides=(stride, stride, stride, 2)) for name in ("q", "k", "v", "out")]
    problem = pose(*odd)
    assert problem.q.span == (0, 32)
    check_addresses(problem, 1024, 2048, 4096, 8192, 0)


def test_broadcast_keys_and_values() -> None:
    k = operand("k", (4, 6, 2, 16), strides=(0, 64, 32, 2))
    v = operand("v", (4, 6, 2, 16), strides=(0, 32, 0, 2))
    problem = pose(operand("q", (4, 4, 4, 16)), k, v)
    assert (problem.k.strides, problem.v.span) == ((0, 64, 32, 2), (0, 5 * 32 + 32))
    check_addresses(problem, 1024, 16384, 32768, 65536, 0)


@pytest.mark.parametrize(
    ("q", "k"), [((0, 4, 4, 16), (0, 6, 2, 16)), ((2, 0, 4, 16), (2, 6, 2, 16)), ((2, 4, 4, 16), (2, 0, 2, 16))]
)
def test_empty_problems(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    problem = as_if_on_gpu(**qkv(np, q, k))
    assert problem.is_empty
    assert not pose(**good()).is_empty


def test_heads_may_be_zero_on_both_sides() -> None:
    assert as_if_on_gpu(**qkv(np, (1, 4, 0, 16), (1, 6, 0, 16))).is_empty


def test_overlap_is_exact_for_strided_outputs() -> None:
    # Rows of q and out alternate; one element further they meet.
    q = operand("q", (1, 4, 1, 16), strides=(256, 64, 32, 2))
    problem = pose(q, operand("k", (1, 6, 1, 16)), operand("v", (1, 6, 1, 16)), dataclasses.replace(q, name="out"))
    check_overlap(problem, 4096, 65536, 65536, 4096 + 32, 0)
    for shift in (-30, 30, 64, 64 + 30, 3 * 64):
        with pytest.raises(ValueError, match=r"^attention: out shares memory with q; it must be an array of its own"):
            check_overlap(problem, 4096, 65536, 65536, 4096 + shift, 0)
    check_overlap(problem, 4096, 65536, 65536, 4096 + 256, 0)


def test_overlap_of_numpy_views_with_negative_strides() -> None:
    x, k = zeros(np, (1, 64, 4, 16)), zeros(np, KV)
    reversed_rows = x[:, ::-1]
    with pytest.raises(ValueError, match="out shares memory with q"):
        cupyfa.attention(reversed_rows, k, k, out=reversed_rows)
    with pytest.raises(ValueError, match="out shares memory with q"):
        cupyfa.attention(reversed_rows, k, k, out=x)
    out = zeros(np, x.shape)[:, ::-1]
    assert cupyfa.attention(reversed_rows, k, k, out=out) is out
