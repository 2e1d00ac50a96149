"""Calls on CuPy arrays up to the launch, with memory of NumPy: what goes into the workspace, and when."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cupy import Array, Stream, empty, install
from odd_views import ODD_VIEWS, OddView, written
from test_plan import TRAITS

import cupyfa
from cupyfa import debug, dispatch, packing
from cupyfa._launch import ForwardLauncher, Function
from cupyfa.operand import Addresses
from cupyfa.oracles import online, packed
from cupyfa.plan import plan_forward
from cupyfa.select import H200
from cupyfa.spec import Bias, PlanSpec, Spec
from cupyfa.testing import random_array

OFFSETS = np.array([0, 3, 3, 9], np.int32)


def memory(address: int, size: int) -> Any:
    """Those bytes."""
    at = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}
    return np.asarray(types.SimpleNamespace(__array_interface__=at))


def matrix(geometry: Any, address: int) -> Any:
    """What TMA sees, as (batch, seqlen, heads, head_dim)."""
    assert address % 16 == 0
    assert all(stride % 16 == 0 and 0 <= stride < 2**40 for stride in geometry.strides)
    columns, *sizes = geometry.shape
    if len(sizes) == 4:  # see FwdParams
        shape, strides = (1, sizes[2] - 1, sizes[1], columns), (0, *geometry.strides[:2], 2)
    else:
        shape = (sizes[2], sizes[0], sizes[1], columns)
        strides = (geometry.strides[2], geometry.strides[0], geometry.strides[1], 2)
    size = 2 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    elements = memory(address, size).view(np.float16)
    return np.lib.stride_tricks.as_strided(elements, shape=shape, strides=strides)


def bias_of(problem: Any, address: int) -> Any:
    """What threads load from."""
    if problem.bias is None:
        return None
    low, high = problem.bias.span
    bytes_there = memory(address + low, high - low)
    return np.ndarray(problem.bias.shape, problem.bias.dtype, bytes_there, -low, problem.bias.strides)


class Gpu:
    """What was launched; attention is the oracle's, and a plan is the bytes 1."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.stream = Stream()

    def load(self, spec: Spec, device: int) -> Any:
        return types.SimpleNamespace(spec=spec, traits=TRAITS, function=Function(0), ptxas=None, counters=None)

    def plan(self, function: Any, geometry: Any, stream: int, params: tuple[int, int]) -> None:
        at, size = params
        memory(at, size)[...] = 1
        self.launched.append("plan")

    def launcher(self, problem: Any, *arguments: Any) -> Any:
        real = plan_forward(problem, *arguments)
        return lambda addresses, stream, plan=0: self.attention(real, problem, Addresses(*addresses), stream, plan)

    def attention(self, real: ForwardLauncher, problem: Any, at: Addresses, stream: int, plan: int) -> None:
        q, k, v, out = (matrix(getattr(real, name), address) for name, address in zip("qkvo", at, strict=False))
        assert stream == Stream.ptr
        if problem.packed is None:
            bias = bias_of(problem, at.bias)
            out[...] = online.attention(q, k, v, window_size=(problem.left, problem.right), bias=bias)[0]
        else:
            assert (memory(plan, 64) == 1).all()
            packed.attention(
                *(x[0] for x in (q, k, v)),
                **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), OFFSETS),
                window_size=(problem.left, problem.right),
                bias=bias_of(problem, at.bias),
                out=out[0],
            )
        self.launched.append("attention")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    gpu.stream = install(monkeypatch)
    monkeypatch.setattr(dispatch, "load", gpu.load)
    monkeypatch.setattr(dispatch, "plan_forward", gpu.launcher)
    monkeypatch.setattr(dispatch.Device, "current", lambda: H200)
    monkeypatch.setattr(packing.Packing, "pack", lambda self, addresses, plan: (plan, self.plan_bytes))
    monkeypatch.setattr(packing, "launch", gpu.plan)
    dispatch._prepare.cache_clear()
    yield gpu
    dispatch._prepare.cache_clear()


def host_inputs() -> tuple[Any, Any, Any]:
    shapes = (2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16)
    q, k, v = (random_array(shape, np.float16, seed) for seed, shape in enumerate(shapes))
    return q, k, v


def inputs() -> tuple[Any, Any, Any]:
    q, k, v = map(Array, host_inputs())
    return q, k, v


def odd_inputs(odd: OddView) -> tuple[Any, Any, Any]:
    q, k, v = (Array(odd.holding(np, x)) for x in host_inputs())
    return q, k, v


def odd_output(odd: OddView) -> tuple[Any, Any]:
    around, out = odd.poisoned(np, (2, 9, 4, 16), np.float16)
    return around, Array(out)


def workspace(size: int) -> Any:
    """Bytes at a multiple of 16, and of nothing more."""
    buffer = np.full(size + 32, 0xFF, np.uint8)
    begin = (16 - buffer.ctypes.data) % 32
    return Array(buffer[begin : begin + size])


def packed_call(odd: OddView | None = None) -> tuple[Any, ...]:
    matrices = inputs() if odd is None else odd_inputs(odd)
    return (*(x[0] for x in matrices), Array(OFFSETS), Array(OFFSETS))


EXPECTED = cupyfa.attention(*host_inputs(), causal=True)


def test_aligned_arrays_are_used_where_they_are(gpu: Gpu) -> None:
    q, k, v = inputs()
    assert cupyfa.workspace_size(q, k, v, causal=True) == 0
    np.testing.assert_array_equal(cupyfa.attention(q, k, v, causal=True).host, EXPECTED)
    assert gpu.launched == ["attention"]
    assert cupyfa.explain(q, k, v).copied == ()
    assert "copied" not in str(cupyfa.explain(q, k, v))


@pytest.mark.parametrize("given", [False, True], ids=["new memory", "workspace"])
@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_arrays_anywhere(odd: OddView, given: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    views, (around, out) = odd_inputs(odd), odd_output(odd)
    size = cupyfa.workspace_size(*views, out=out, causal=True)
    assert size == 2304 + 1280 + 1280 + 2304  # k and v have 1152 bytes; each begins at a multiple of 256
    options: dict[str, Any] = {"workspace": workspace(size)} if given else {}
    if given:
        monkeypatch.delattr("cupy.empty")  # nothing is allocated
    assert cupyfa.attention(*views, causal=True, out=out, **options) is out
    np.testing.assert_array_equal(out.host, EXPECTED)
    assert written(around) == out.size
    assert "\ncopied  q, k, v: TMA does not take that where it is\n" in str(cupyfa.explain(*views))


def test_an_output_that_is_new_is_not_copied(gpu: Gpu) -> None:
    views = odd_inputs(ODD_VIEWS[0])
    assert cupyfa.workspace_size(*views) == 2304 + 1280 + 1152
    np.testing.assert_array_equal(cupyfa.attention(*views, causal=True).host, EXPECTED)


@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_packed_arrays_anywhere(odd: OddView, gpu: Gpu) -> None:
    arguments, (around, outs) = packed_call(odd), odd_output(odd)
    out = outs[0]
    reference = cupyfa.attention_varlen(*(x[0] for x in host_inputs()), OFFSETS, OFFSETS, causal=True)
    bytes_there = workspace(cupyfa.workspace_size(*arguments, out=out, causal=True))
    cupyfa.attention_varlen(*arguments, causal=True, out=out, workspace=bytes_there)
    np.testing.assert_array_equal(out.host, reference)
    assert written(around) == out.size
    assert gpu.launched == ["plan", "attention"]
    # A plan in the same workspace survives the copies behind it.
    plan = cupyfa.plan_varlen(*arguments, causal=True, workspace=bytes_there)
    for _ in range(2):
        out.host[...] = np.nan
        cupyfa.attention_varlen(*arguments, causal=True, out=out, workspace=bytes_there, plan=plan)
        np.testing.assert_array_equal(out.host, reference)
    assert gpu.launched == ["plan", "attention", "plan", "attention", "attention"]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("begin", "access"), [(0, Bias.TILE), (1, Bias.GATHER)])
def test_a_bias_is_used_where_it_is(begin: int, access: Bias, backwards: bool, gpu: Gpu) -> None:
    """Beside copies of the matrices, too; its address decides about the kernel."""
    there = workspace(9 * 16 * 4 + 16).host[4 * begin :][: 9 * 16 * 4].view(np.float32).reshape(9, 16)[:, :9]
    bias = there[::-1] if backwards else there
    bias[...] = random_array((9, 9), np.float32, 3)
    expected = cupyfa.attention(*host_inputs(), bias=bias)
    for matrices in (inputs(), odd_inputs(ODD_VIEWS[0])):
        size = cupyfa.workspace_size(*matrices, bias=Array(bias))
        assert size == cupyfa.workspace_size(*matrices)
        out = cupyfa.attention(*matrices, bias=Array(bias), workspace=workspace(size) if size else None)
        np.testing.assert_array_equal(out.host, expected)
        chosen = cupyfa.explain(*matrices, bias=Array(bias)).selection.spec
        assert chosen.bias is (Bias.GATHER if backwards else access)


def test_a_bias_that_is_not_aligned(gpu: Gpu) -> None:
    bias = Array(workspace(9 * 9 * 4 + 16).host[2:][: 9 * 9 * 4].view(np.float32).reshape(9, 9))
    message = r"^attention: bias begins at address 0x\w+; it must be a multiple of 4 bytes \(a copy is aligned\)$"
    for function in (cupyfa.attention, cupyfa.explain, cupyfa.workspace_size):
        with pytest.raises(ValueError, match=message):
            function(*inputs(), bias=bias)
    assert gpu.launched == []


def test_a_bias_of_packed_sequences(gpu: Gpu) -> None:
    """Its kernel has a plan of its own, and the longest sequence is one that the call knows."""
    bias = random_array((3, 4, 6, 9), np.float32, 3)
    expected = cupyfa.attention_varlen(*(x[0] for x in host_inputs()), OFFSETS, OFFSETS, bias=bias[:, :, :, :6])
    arguments, known = packed_call(), {"bias": Array(bias), "max_seqlen_q": 6, "max_seqlen_k": 8}
    size = cupyfa.workspace_size(*arguments, **known)
    out = cupyfa.attention_varlen(*arguments, **known, workspace=workspace(size))
    np.testing.assert_array_equal(out.host, expected)
    explanation = cupyfa.explain(*arguments, **known)
    assert (explanation.planner, explanation.workspace_bytes) == (PlanSpec(), size)
    plan = cupyfa.plan_varlen(*arguments, **known)
    np.testing.assert_array_equal(cupyfa.attention_varlen(*arguments, **known, plan=plan).host, expected)
    assert gpu.launched == ["plan", "attention", "plan", "attention"]
    with pytest.raises(ValueError, match=r"^attention: plan was made for tile_n 64 but this call has 128; plan_varlen"):
        cupyfa.attention_varlen(*arguments, plan=plan)
    with pytest.raises(ValueError, match=r"^attention: bias has shape \(3, 4, 6, 9\); .* \(3, 4, 7, 8\)$"):
        cupyfa.attention_varlen(*arguments, **(known | {"max_seqlen_q": 7}))


def test_debug_looks_at_the_bias_of_the_longest_sequence(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    short = empty((5, 9), np.float32)
    cupyfa.plan_varlen(*packed_call(), bias=short)
    monkeypatch.setattr(debug, "DEBUG", True)
    for function in (cupyfa.attention_varlen, cupyfa.plan_varlen):
        with pytest.raises(ValueError, match=r"^attention: bias has 5 rows but sequence 2 has 6; it must have 1, "):
            function(*packed_call(), bias=short)


def test_a_workspace_over_a_bias(gpu: Gpu) -> None:
    views = odd_inputs(ODD_VIEWS[0])
    buffer = workspace(cupyfa.workspace_size(*views))
    bias = buffer[256 : 256 + 9 * 9 * 4].view(np.float32).reshape((9, 9))
    with pytest.raises(ValueError, match=r"^attention: workspace shares memory with bias; it must be an array of its"):
        cupyfa.attention(*views, bias=bias, workspace=buffer)
    assert gpu.launched == []


def test_a_plan_alone_needs_no_workspace(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = packed_call()
    plan, out = cupyfa.plan_varlen(*arguments), empty(arguments[0].shape, np.float16)
    monkeypatch.delattr("cupy.empty")
    cupyfa.attention_varlen(*arguments, out=out, plan=plan)
    assert gpu.launched == ["plan", "attention"]


def test_a_workspace_that_is_too_small(gpu: Gpu) -> None:
    views = odd_inputs(ODD_VIEWS[0])
    size = cupyfa.workspace_size(*views)
    with pytest.raises(ValueError, match=rf"^attention: workspace has {size - 1} bytes .* needs {size} \(see cupyfa\."):
        cupyfa.attention(*views, workspace=workspace(size - 1))
    assert gpu.launched == []


def test_a_workspace_over_the_output(gpu: Gpu) -> None:
    views = odd_inputs(ODD_VIEWS[0])
    size = cupyfa.workspace_size(*views)
    buffer = workspace(size + 16 + views[0].nbytes)
    out = buffer[-views[0].nbytes :].view(np.float16).reshape(views[0].shape)
    with pytest.raises(
        ValueError, match=r"^attention: workspace shares memory with out; it must be an array of its own"
    ):
        cupyfa.attention(*views, out=out, workspace=buffer[32:])
    assert gpu.launched == []
    cupyfa.attention(*views, causal=True, out=out, workspace=buffer)  # which is longer than what is used
    np.testing.assert_array_equal(out.host, EXPECTED)


def test_a_workspace_over_a_plan(gpu: Gpu) -> None:
    arguments = packed_call(ODD_VIEWS[0])
    size = cupyfa.workspace_size(*arguments)
    buffer = workspace(size + 2048)
    plan = cupyfa.plan_varlen(*arguments, workspace=buffer[2048:])
    with pytest.raises(
        ValueError, match=r"^attention: workspace shares memory with plan; it must be an array of its own"
    ):
        cupyfa.attention_varlen(*arguments, plan=plan, workspace=buffer)
    assert gpu.launched == ["plan"]


def test_overlap_is_that_of_the_users_arrays(gpu: Gpu) -> None:
    q, k, v = odd_inputs(ODD_VIEWS[0])
    with pytest.raises(ValueError, match=r"^attention: out shares memory with q; it must be an array of its own"):
        cupyfa.attention(q, k, v, out=q[:, ::-1])
    assert gpu.launched == []


@pytest.mark.parametrize("capturing", [False, True])
def test_a_copy_whose_kernel_does_not_load(capturing: bool, gpu: Gpu) -> None:
    class Cold(Array):
        def view(self, dtype: Any) -> Array:
            raise RuntimeError("cold")

    gpu.stream.capturing = capturing
    message = r"^attention: an array has to be copied .*: make the same call once before the capture$"
    q, k, v = odd_inputs(ODD_VIEWS[0])
    expected, match = (cupyfa.CompileError, message) if capturing else (RuntimeError, "^cold$")
    with pytest.raises(expected, match=match) as caught:
        cupyfa.attention(q, Cold(k.host), v)
    assert str(caught.value.__cause__ if capturing else caught.value) == "cold"
    assert gpu.launched == []


def test_empty_arrays_at_any_address(gpu: Gpu) -> None:
    q, k, v = odd_inputs(ODD_VIEWS[2])
    assert cupyfa.workspace_size(q, k[:, :0], v[:, :0]) == 0
    around, out = odd_output(ODD_VIEWS[2])
    cupyfa.attention(q, k[:, :0], v[:, :0], out=out)
    assert not out.host.any()
    assert written(around) == out.size
    assert gpu.launched == []
