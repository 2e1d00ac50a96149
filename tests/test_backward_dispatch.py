"""Gradients of CuPy arrays up to the launch, with memory of NumPy: workspace, copies, the order of kernels."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cupy import Array, Stream, install
from odd_views import ODD_VIEWS, OddView, written
from test_backward_plan import traits

import cupyfa
from cupyfa import attention_backward, backward_dispatch, backward_workspace_size, explain_backward, kernels
from cupyfa._launch import Function
from cupyfa.select import H200
from cupyfa.testing import BackwardCase, Case, PackedCase

#: Two query heads share a key head, and each has CTAs of its own: dk and dv are sums of two parts.
CASE = BackwardCase(Case("here", 2, 70, 130, 4, 2, 64, "float16", True, sink=True), dlse=True)
#: Of 4 heads of 2 batches, of 128 rows: two numbers each, the sums, and those of a sink.
WHOLE_SIZE = 2 * (4 * 8 * 128) + 4 * 8 * 128 * 64 + 4 * 8 * 2
#: And of dk and dv, 2 heads of 2 batches, two tiles of 128 keys: two parts each.
SIZE = WHOLE_SIZE + 2 * (4 * 2 * 4 * 2 * 128 * 64)
KERNELS = ["bwd_preprocess.cu", "hopper/bwd.cu", *["bwd_postprocess.cu"] * 3, "bwd_sink.cu"]
#: Nobody shares key heads.
WHOLE = BackwardCase(Case("whole", 2, 70, 130, 4, 4, 64, "float16", True, sink=True), dlse=True)
WHOLE_KERNELS = ["bwd_preprocess.cu", "hopper/bwd.cu", "bwd_postprocess.cu", "bwd_sink.cu"]


class Gpu:
    """What was launched, and where TMA was sent."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.mapped: list[int] = []
        self.stream = Stream()

    def load(self, spec: Any, device: int) -> Any:
        assert device == 0
        return types.SimpleNamespace(spec=spec, traits=traits(spec), function=(spec.entry, Function(0)))

    def launch(self, function: Any, geometry: Any, stream: int, params: bytes) -> None:
        assert stream == Stream.ptr
        assert params
        self.launched.append(function[0])

    def encode(self, geometry: Any, address: int) -> bytes:
        assert address % 16 == 0
        assert all(stride % 16 == 0 and 0 <= stride < 2**40 for stride in geometry.strides)
        self.mapped.append(address)
        return bytes(128)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    gpu.stream = install(monkeypatch)
    monkeypatch.setattr(backward_dispatch, "load", gpu.load)
    monkeypatch.setattr(backward_dispatch, "launch", gpu.launch)
    monkeypatch.setattr(backward_dispatch, "TensorMapGeometry", gpu)
    monkeypatch.setattr(backward_dispatch.Device, "current", lambda: H200)
    backward_dispatch._prepare.cache_clear()
    yield gpu
    backward_dispatch._prepare.cache_clear()


def there(case: BackwardCase = CASE) -> dict[str, Any]:
    """Arrays and options of a call."""
    given = case.make_arrays() | case.call_options
    return {name: Array(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


def outputs(given: dict[str, Any]) -> dict[str, Any]:
    shapes = {f"d{name}": given[name].host for name in ("q", "k", "v", "sink") if name in given}
    return {name: Array(np.full_like(x, np.nan)) for name, x in shapes.items()}


def refuse(*arguments: Any) -> Any:
    raise AssertionError(f"memory was allocated: {arguments}")


def workspace(size: int) -> Any:
    """Bytes at a multiple of 16."""
    buffer = np.full(size + 32, 0xFF, np.uint8)
    begin = -buffer.ctypes.data % 16
    return Array(buffer[begin : begin + size])


@pytest.mark.parametrize(("case", "kernels"), [(CASE, KERNELS), (WHOLE, WHOLE_KERNELS)], ids=["parts", "whole"])
def test_a_call_launches_its_kernels_in_their_order(case: BackwardCase, kernels: list[str], gpu: Gpu) -> None:
    given = there(case)
    result = attention_backward(**given)
    assert gpu.launched == kernels
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v"), ("dsink", "sink")):
        made = getattr(result, name)
        assert (made.shape, made.dtype) == (given[like].shape, given[like].dtype)
    assert result.dbias is None
    at = [given[name].data.ptr for name in ("q", "k", "v", "dout")]
    # Where dk and dv are sums of parts, threads write them.
    assert gpu.mapped == [*at, *([result.dk.data.ptr, result.dv.data.ptr] if case is WHOLE else [])]


@pytest.mark.parametrize(
    ("case", "kernels", "needed"),
    [(CASE, KERNELS, SIZE), (WHOLE, WHOLE_KERNELS, WHOLE_SIZE)],
    ids=["parts", "whole"],
)
def test_a_call_with_all_memory_allocates_nothing(
    case: BackwardCase, kernels: list[str], needed: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = there(case)
    given |= outputs(given)
    size = backward_workspace_size(**given)
    assert size == needed
    assert gpu.launched == []  # nothing is computed for that
    monkeypatch.setattr("cupy.empty", refuse)
    result = attention_backward(**given, workspace=workspace(size))
    assert all(getattr(result, name) is given[name] for name in ("dq", "dk", "dv", "dsink"))
    assert gpu.launched == kernels
    with pytest.raises(ValueError, match=rf"^attention: workspace has {size - 1} bytes .* and needs {size} \(see"):
        attention_backward(**given, workspace=workspace(size - 1))
    with pytest.raises(TypeError, match=r"^attention: workspace must be a cupy\.ndarray of uint8 with one axis$"):
        attention_backward(**given, workspace=Array(np.zeros(size // 4, np.float32)))
    assert gpu.launched == kernels


def test_an_order_of_additions_needs_counters(gpu: Gpu) -> None:
    given = there()
    given.pop("deterministic")
    more = backward_workspace_size(**given, deterministic=True) - backward_workspace_size(**given)
    assert 0 < more < 1024
    with pytest.raises(TypeError, match=r"^attention: deterministic is 1; it must be True or False$"):
        backward_workspace_size(**given, deterministic=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
@pytest.mark.parametrize(("case", "kernels"), [(CASE, KERNELS), (WHOLE, WHOLE_KERNELS)], ids=["parts", "whole"])
def test_arrays_anywhere(
    case: BackwardCase, kernels: list[str], odd: OddView, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = there(case)
    for name in ("dout", "q", "k", "v", "out"):
        given[name] = Array(odd.holding(np, given[name].host))
    views, around = outputs(given), {}
    for name in ("dq", "dk", "dv"):
        around[name], view = odd.poisoned(np, given[name[1:]].shape, np.float16)
        views[name] = Array(view)
    size = backward_workspace_size(**given, **views)
    without = backward_workspace_size(**given)  # new gradients need no copies
    assert without < size if case is WHOLE else without == size  # nor do those that threads write
    memory = workspace(size)
    monkeypatch.setattr("cupy.empty", refuse)
    attention_backward(**given, **views, workspace=memory)
    assert gpu.launched == kernels
    begin = memory.data.ptr
    assert all(begin <= address < begin + size for address in gpu.mapped)
    # What TMA reads is there before the kernels, and what it writes is taken from there behind them: 0xFF is a NaN too.
    # What threads write is written by the kernels alone, of which there are none here.
    for name, address in zip(("q", "k", "v", "dout"), gpu.mapped, strict=False):
        host = given[name].host
        copy = memory.host[address - begin :][: host.nbytes].view(np.float16).reshape(host.shape)
        np.testing.assert_array_equal(copy, host)
    by_tma = {"dk": views["dk"].size, "dv": views["dv"].size} if case is WHOLE else {"dk": 0, "dv": 0}
    assert {name: written(x) for name, x in around.items()} == {"dq": 0} | by_tma


@pytest.mark.parametrize(
    "sizes", [(2, 0, 64, 4, 2), (0, 64, 64, 4, 2), (2, 64, 0, 4, 2), (2, 64, 64, 0, 2), (2, 64, 64, 0, 0)], ids=str
)
def test_nothing_is_launched_where_there_is_nothing(sizes: tuple[int, ...], gpu: Gpu) -> None:
    given = there(BackwardCase(Case("empty", *sizes, 64, "float16")))
    given |= outputs(given)
    assert backward_workspace_size(**given) == 0
    attention_backward(**given)
    assert gpu.launched == []
    assert not any(given[name].host.any() for name in ("dq", "dk", "dv"))


def test_arrays_of_numpy_need_no_workspace(gpu: Gpu) -> None:
    message = r"^attention: q is a numpy\.ndarray, which needs no workspace and no plan; pass CuPy arrays$"
    with pytest.raises(TypeError, match=message):
        backward_workspace_size(**CASE.make_arrays(), **CASE.call_options)


def test_a_workspace_is_nobody_elses(gpu: Gpu) -> None:
    given = there()
    shape, size = given["q"].shape, given["q"].nbytes
    memory = workspace(SIZE + size)
    given["q"] = Array(memory.host[SIZE - 64 :][:size].view(np.float16).reshape(shape))
    with pytest.raises(ValueError, match=r"^attention: workspace shares memory with q; it must be an array of its own"):
        attention_backward(**given, workspace=memory)
    assert gpu.launched == []


def test_a_geometry_is_prepared_once(gpu: Gpu) -> None:
    for _ in range(3):
        attention_backward(**there())
    assert backward_dispatch._prepare.cache_info().misses == 1
    assert gpu.launched == 3 * KERNELS


@pytest.mark.parametrize("name", ["lse", "dlse", "sink", "dsink"])
def test_numbers_that_threads_read_begin_at_a_multiple_of_their_size(name: str, gpu: Gpu) -> None:
    given = there()
    given |= outputs(given)
    host = given[name].host
    buffer = np.zeros(host.nbytes + 4, np.uint8)
    given[name] = Array(buffer[2 : 2 + host.nbytes].view(np.float32).reshape(host.shape))
    message = rf"^attention: {name} begins at address 0x\w+; it must be a multiple of 4 bytes \(a (copy|new array) is"
    for function in (attention_backward, backward_workspace_size):
        with pytest.raises(ValueError, match=message):
            function(**given)


# --- A bias ---

BIASED = dataclasses.replace(WHOLE, forward=dataclasses.replace(WHOLE.forward, bias="hqk"))


def test_a_bias_and_its_gradient(gpu: Gpu) -> None:
    """The rows of 130 numbers of a bias begin at multiples of 8 bytes: a copy of them has 132."""
    given = there(BIASED)
    assert backward_workspace_size(**given) == WHOLE_SIZE + 4 * 70 * 132 * 4 + 128
    result = attention_backward(**given)
    assert gpu.launched == [*WHOLE_KERNELS, "hopper/bwd_bias.cu"]
    assert (result.dbias.shape, result.dbias.dtype) == ((4, 70, 130), np.float32)
    at = [given[name].data.ptr for name in ("q", "k", "v", "dout")]
    main, of_bias = gpu.mapped[:7], gpu.mapped[7:]
    assert (main[:4], of_bias[:4]) == (at, at)
    assert of_bias[4:] == main[6:]  # the bias
    dbias = Array(np.zeros((4, 70, 130), np.float32))
    assert attention_backward(**given, dbias=dbias).dbias is dbias


def test_a_bias_that_tma_cannot_take_is_copied(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given = there(BIASED) | {"dbias": Array(np.zeros((4, 70, 130), np.float32))}
    given |= outputs(given)
    size = backward_workspace_size(**given)
    memory = workspace(size)
    monkeypatch.setattr("cupy.empty", refuse)
    attention_backward(**given, workspace=memory)
    begin = memory.data.ptr
    assert begin <= gpu.mapped[6] < begin + size
    copy = memory.host[gpu.mapped[6] - begin :][: 4 * 70 * 132 * 4].view(np.float32).reshape(4, 70, 132)
    np.testing.assert_array_equal(copy[..., :130], given["bias"].host)
    bias = np.zeros((4, 70, 132), np.float32)[..., :130]
    given["bias"] = Array(bias)
    assert backward_workspace_size(**given) == WHOLE_SIZE
    attention_backward(**given, workspace=memory)
    assert gpu.mapped[12 + 6] == bias.ctypes.data


def test_a_bias_that_begins_elsewhere_needs_a_copy(gpu: Gpu) -> None:
    """Its address is a part of what is prepared."""
    given = there(BIASED)
    memory = np.zeros(4 * 70 * 132 + 8, np.float32)
    first = -memory.ctypes.data % 16 // 4
    for begin, more in ((first, 0), (first + 1, 4 * 70 * 132 * 4 + 128)):
        given["bias"] = Array(memory[begin:][: 4 * 70 * 132].reshape(4, 70, 132)[..., :130])
        assert backward_workspace_size(**given) == WHOLE_SIZE + more


def test_what_has_no_kernel(gpu: Gpu) -> None:
    packed = there(BackwardCase(PackedCase("packed", (30, 50), bias="hqk")))
    with pytest.raises(cupyfa.UnsupportedError, match=r"^attention: no kernel computes the gradients of packed"):
        cupyfa.attention_varlen_backward(**packed)


def test_a_cold_kernel_under_capture(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernel that is not loaded is named, and what to do; once they are, the same call is captured."""
    monkeypatch.setattr(backward_dispatch, "load", kernels.load)
    monkeypatch.setattr(kernels, "_check_installation", lambda: None)
    gpu.stream.capturing = True
    message = "is not loaded yet, and a stream under capture cannot load it: call cupyfa.warmup before the capture"
    for function in (attention_backward, backward_workspace_size, explain_backward):
        with pytest.raises(cupyfa.CompileError, match=rf"^preprocess sm_90a float16 {re.escape(message)}$"):
            function(**there())
    shown = explain_backward(**CASE.make_arrays(), **CASE.call_options, arch="sm_90a")
    loaded = {(kernel.spec, 0): gpu.load(kernel.spec, 0) for kernel in shown.kernels}
    for missing in loaded:
        monkeypatch.setattr(kernels, "_kernels", {key: x for key, x in loaded.items() if key != missing})
        with pytest.raises(cupyfa.CompileError, match=rf"^{re.escape(str(missing[0]))} {re.escape(message)}$"):
            attention_backward(**there())
    assert gpu.launched == []
    monkeypatch.setattr(kernels, "_kernels", loaded)
    attention_backward(**there())
    assert gpu.launched == KERNELS


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize(("name", "count"), [("dout", 0), ("dk", 4)])
def test_a_copy_whose_kernel_does_not_load(name: str, count: int, capturing: bool, gpu: Gpu) -> None:
    class Cold(Array):
        def view(self, dtype: Any) -> Array:
            raise RuntimeError("cold")

    given = there(WHOLE)
    given |= outputs(given)
    odd = ODD_VIEWS[0]
    given[name] = Cold(odd.holding(np, given[name].host))
    gpu.stream.capturing = capturing
    message = r"^attention: an array has to be copied .*: make the same call once before the capture$"
    expected, match = (cupyfa.CompileError, message) if capturing else (RuntimeError, "^cold$")
    with pytest.raises(expected, match=match):
        attention_backward(**given)
    assert len(gpu.launched) == count
