"""Calls under the emulator: bad input, results, hazards as exceptions, the command line, the rung of `explain`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nvrtc_tools import import_nvrtc
from odd_views import ODD_VIEWS, OddView, written

import cupyfa
from cupyfa import HazardError, UnsupportedError, emulate, emulate_command, emulate_stage
from cupyfa.emulator import POLICIES, EmulatedKernel, Finding, Place, Run
from cupyfa.emulator.mutate import Mutant, mutants
from cupyfa.explain import Rung
from cupyfa.oracles import dense
from cupyfa.spec import Bias
from cupyfa.testing import Case, assert_close, assert_lse_close, guarded_empty, random_array, score_magnitude

SHAPES = ((1, 130, 2, 64), (1, 150, 1, 64), (1, 150, 1, 64))


def inputs(dtype: Any = ml_dtypes.bfloat16) -> tuple[Any, Any, Any]:
    q, k, v = (random_array(shape, dtype, seed) for seed, shape in enumerate(SHAPES))
    return q, k, v


def strided(shape: tuple[int, ...]) -> Any:
    """An array that lies in one with 8 columns more."""
    *rest, columns = shape
    return guarded_empty((*rest, columns + 8), np.float16, np, poison=0.0).array[..., :columns]


@pytest.fixture
def nvrtc() -> None:
    import_nvrtc()


# --- arguments ---


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [1]}, TypeError, "attention: q is a list; the emulator needs a numpy.ndarray"),
        ({"v": None}, TypeError, "attention: v is a NoneType; the emulator needs a numpy.ndarray"),
        ({"out": 3}, TypeError, "attention: out is a int; the emulator needs a numpy.ndarray"),
        ({"arch": "sm_80"}, ValueError, "attention: arch is 'sm_80'; kernels exist for sm_90a"),
        ({"layout": "SBHD"}, ValueError, "attention: layout is 'SBHD'"),
        ({"causal": 3}, TypeError, "attention: causal is 3"),
        ({"k": np.zeros((1, 150, 1, 64))}, TypeError, "attention: k has dtype float64"),
        ({"config": {"tile": 3}}, ValueError, "attention: config has the field 'tile'"),
        ({"sms": 0}, ValueError, "sms"),
        ({"window_size": (1, 2, 3)}, TypeError, "attention: window_size is (1, 2, 3); it must be a pair (left, right)"),
        ({"window_size": (-2, 0)}, ValueError, "attention: window_size is (-2, 0); each side must be at least 0"),
        ({"softcap": 0}, ValueError, "attention: softcap is 0.0; it must be positive"),
        ({"sink": [0.0, 0.0]}, TypeError, "attention: sink is a list; the emulator needs a numpy.ndarray"),
        (
            {"sink": np.zeros(3, np.float32)},
            ValueError,
            "attention: sink has shape (3,); it must have (heads_q,), (2,)",
        ),
        ({"alibi_slopes": np.zeros(2)}, TypeError, "attention: alibi_slopes has dtype float64; it must be float32"),
        ({"alibi_slopes": 0.5}, TypeError, "attention: alibi_slopes is a float; the emulator needs a numpy.ndarray"),
        (
            {"bias": np.zeros((130, 150))},
            TypeError,
            "attention: bias has dtype float64; it must be float32, or bfloat16",
        ),
        ({"bias": 0.5}, TypeError, "attention: bias is a float; the emulator needs a numpy.ndarray"),
        (
            {"bias": np.zeros((150, 130), np.float32)},
            ValueError,
            "attention: bias has shape (150, 130); it must have 2 to 4 axes and broadcast to (batch, heads_q, ",
        ),
        (
            {"softcap": 9.0, "config": {"three_stage": True, "speculative": False}},
            ValueError,
            "attention: config has three_stage=True; that kernel is for comparisons",
        ),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str, nvrtc: None) -> None:
    arguments = dict(zip("qkv", inputs(), strict=True)) | changes
    with pytest.raises(error, match=re.escape(message)):
        emulate.prepare(**arguments)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_read_only_results(name: str, nvrtc: None) -> None:
    arrays = {"out": np.zeros(SHAPES[0], np.float16), "lse": np.zeros((1, 2, 130), np.float32)}
    arrays[name].flags.writeable = False
    with pytest.raises(ValueError, match=f"^attention: {name} is read-only; it must be writable$"):
        emulate.prepare(*inputs(np.float16), **arrays)


def test_arrays_must_be_as_a_gpu_needs_them(nvrtc: None) -> None:
    q, k, v = inputs(np.float16)
    with pytest.raises(UnsupportedError, match="head_dim"):
        emulate.prepare(*(x[..., :60] for x in (q, k, v)))
    steps = np.lib.stride_tricks.as_strided(np.zeros(3, np.float32), shape=(2,), strides=(6,))
    with pytest.raises(ValueError, match=r"^attention: sink has strides \(6,\) bytes; they must be multiples of 4$"):
        emulate.prepare(q, k, v, sink=steps)
    shifted = np.zeros(9, np.uint8)[1:].view(np.float32)
    with pytest.raises(ValueError, match=r"^attention: alibi_slopes begins at address 0x\w+; .* a multiple of 4 bytes"):
        emulate.prepare(q, k, v, alibi_slopes=shifted)


def test_results_may_not_lie_over_arrays_of_heads(nvrtc: None) -> None:
    q, k, v = inputs()
    lse = np.zeros((1, 2, 130), np.float32)
    with pytest.raises(ValueError, match=r"^attention: lse shares memory with sink; it must be an array of its own"):
        emulate.prepare(q, k, v, lse=lse, sink=lse[0, :, 7])


def test_strided_arrays_are_read_in_place(nvrtc: None) -> None:
    q, k, v = inputs(np.float16)
    k_wide = strided(SHAPES[1])
    k_wide[...] = k
    plain = emulate.attention(q, k, v, sms=1)
    other = emulate.attention(q, k_wide, v, sms=1)
    assert other.run.verdict == "clean"
    assert np.array_equal(plain.out, other.out)


# --- arrays that TMA does not take ---


def grouped(dtype: Any = np.float16) -> tuple[Any, Any, Any]:
    shapes = ((1, 130, 4, 64), (1, 150, 2, 64), (1, 150, 2, 64))
    q, k, v = (random_array(shape, dtype, seed) for seed, shape in enumerate(shapes))
    return q, k, v


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_arrays_anywhere_give_what_contiguous_ones_give(odd: OddView, dtype: Any, nvrtc: None) -> None:
    """C41, C42, C43 and C45: bit-equal, from and to views of buffers that hold NaN elsewhere."""
    q, k, v = grouped(dtype)
    expected = emulate.attention(q, k, v, causal=True)
    views = [odd.holding(np, x) for x in (q, k, v)]
    around, out = odd.poisoned(np, q.shape, dtype)
    before = [x.tobytes() for x in views]
    prepared = emulate.prepare(*views, causal=True, out=out)
    assert [part.copy.name for part in prepared.copied] == ["q", "k", "v", "out"]
    for policy in ("eager", "lazy"):
        assert prepared.launch(policy=policy).verdict == "clean"
        assert np.array_equal(out.view(np.uint16), expected.out.view(np.uint16))
        assert written(around) == out.size
        out.view(np.uint16)[...] = 0x7FFF
    assert np.array_equal(prepared.lse, expected.lse)
    assert [x.tobytes() for x in views] == before
    assert cupyfa.attention(*views, causal=True, out=out, backend="emulator") is out
    assert np.array_equal(out.view(np.uint16), expected.out.view(np.uint16))


@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_only_what_tma_does_not_take_is_copied(name: str, odd: OddView, nvrtc: None) -> None:
    arrays = dict(zip("qkv", grouped(), strict=True))
    arrays["out"] = np.empty_like(arrays["q"])
    prepared = emulate.prepare(**arrays | {name: odd.holding(np, arrays[name])})
    assert [part.copy.name for part in prepared.copied] == [name]


@pytest.mark.parametrize("odd", ODD_VIEWS[::3], ids=lambda odd: odd.id)
def test_packed_arrays_anywhere(odd: OddView, nvrtc: None) -> None:
    q, k, v = (x[0] for x in grouped())
    lengths = np.array([0, 40, 40, 130], np.int32), np.array([0, 50, 60, 150], np.int32)
    expected, expected_lse = cupyfa.attention_varlen(q, k, v, *lengths, return_lse=True, backend="emulator")
    around, out = odd.poisoned(np, q.shape, q.dtype)
    views = [odd.holding(np, x) for x in (q, k, v)]
    _, lse = cupyfa.attention_varlen(*views, *lengths, out=out, return_lse=True, backend="emulator")
    assert np.array_equal(out.view(np.uint16), expected.view(np.uint16))
    assert np.array_equal(lse, expected_lse)
    assert written(around) == out.size


@pytest.mark.parametrize("odd", ODD_VIEWS[::3], ids=lambda odd: odd.id)
def test_the_layout_bhsd_anywhere(odd: OddView, nvrtc: None) -> None:
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in grouped())
    expected = cupyfa.attention(q, k, v, layout="BHSD", backend="emulator")
    around, out = odd.poisoned(np, q.shape, q.dtype)
    views = [odd.holding(np, x) for x in (q, k, v)]
    cupyfa.attention(*views, layout="BHSD", out=out, backend="emulator")
    assert np.array_equal(out.view(np.uint16), expected.view(np.uint16))
    assert written(around) == out.size


def test_keys_that_repeat_at_odd_strides(nvrtc: None) -> None:
    q, k, v = inputs(np.float16)
    K, V = (np.broadcast_to(ODD_VIEWS[0].holding(np, x), (1, 150, 2, 64)) for x in (k, v))
    prepared = emulate.prepare(q, K, V)
    assert [part.memory.size for part in prepared.copied] == [k.nbytes, v.nbytes]
    assert prepared.launch().verdict == "clean"
    assert np.array_equal(prepared.out, emulate.attention(q, k, v).out)


def test_what_a_kernel_leaves_out_of_a_copy_is_no_number(nvrtc: None) -> None:
    _, out = ODD_VIEWS[0].poisoned(np, (1, 130, 4, 64), np.float16)
    prepared = emulate.prepare(*grouped(), out=out)
    assert prepared.launch(max_instructions=10).verdict != "clean"
    assert np.isnan(out).all()
    assert prepared.launch().verdict == "clean"
    assert not np.isnan(out).any()


def test_arrays_of_heads_and_lse_may_run_backwards(nvrtc: None) -> None:
    q, k, v = inputs()
    options: dict[str, Any] = {
        "sink": np.array([0.5, -1], np.float32),
        "alibi_slopes": np.array([[0.25, 0.5]], np.float32),
    }
    expected = emulate.attention(q, k, v, **options)
    backwards = {name: x[..., ::-1].copy()[..., ::-1] for name, x in options.items()}
    lse = np.full((1, 2, 130), np.nan, np.float32)[:, ::-1, ::-1]
    out = np.empty_like(q)
    prepared = emulate.prepare(q, k, v, out=out, lse=lse, **backwards)
    assert prepared.copied == ()
    assert prepared.launch().verdict == "clean"
    assert np.array_equal(out.view(np.uint16), expected.out.view(np.uint16))
    assert np.array_equal(lse, expected.lse)


# --- results ---


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_backend_of_attention_is_the_emulator(layout: Any, nvrtc: None) -> None:
    q, k, v = inputs()
    reference, reference_lse = dense.attention(q, k, v, causal=True)
    same_precision, _ = dense.same_precision(q, k, v, causal=True)
    magnitude = score_magnitude(q, k)
    if layout == "BHSD":
        q, k, v, reference, same_precision = (x.swapaxes(1, 2) for x in (q, k, v, reference, same_precision))
    out, lse = cupyfa.attention(q, k, v, causal=True, layout=layout, return_lse=True, backend="emulator")
    direct = emulate.attention(q, k, v, causal=True, layout=layout)
    assert np.array_equal(out.view(np.uint16), direct.out.view(np.uint16))
    assert np.array_equal(lse, direct.lse)
    assert direct.run.verdict == "clean"
    assert_close(out, reference, same_precision)
    assert_lse_close(lse, reference_lse, score_magnitude=magnitude)


SINK, SLOPES = np.array([0.5, -np.inf], np.float32), np.array([[0.25, 0.0]], np.float32)
OPTIONS: list[dict[str, Any]] = [
    {"window_size": (60, None)},
    {"window_size": (None, 9), "sink": SINK},
    {"window_size": (0, 0)},
    {"causal": True, "window_size": (40, None), "alibi_slopes": SLOPES},
    {"softcap": 3.0},
    {"causal": True, "window_size": (70, -1), "softcap": 1.5, "sink": SINK, "alibi_slopes": SLOPES[0]},
    {"bias": random_array((130, 150), np.float32, 7)},  # rows of 600 bytes, no multiple of 16
    {"bias": random_array((2, 1, 150), ml_dtypes.bfloat16, 7), "causal": True, "sink": SINK},
]


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_options_of_a_call(options: dict[str, Any], nvrtc: None) -> None:
    q, k, v = inputs()
    out, lse, run = emulate.attention(q, k, v, sms=1, **options)
    assert run.verdict == "clean", run
    reference, reference_lse = dense.attention(q, k, v, **options)
    assert_close(out, reference, dense.same_precision(q, k, v, **options)[0])
    assert_lse_close(lse, reference_lse, score_magnitude=score_magnitude(q, k, None, options.get("softcap")))
    other = cupyfa.attention(q, k, v, return_lse=True, backend="emulator", **options)
    assert np.array_equal(out.view(np.uint16), other.out.view(np.uint16))
    assert np.array_equal(lse, other.lse)


def test_arrays_of_heads_are_read_in_place(nvrtc: None) -> None:
    """In steps, and one number for all heads."""
    q, k, v = inputs()
    steps = np.full((2, 6), np.nan, np.float32)
    steps[:, 1] = 0.5, 0.25
    one = np.broadcast_to(np.float32(-0.5), 2)
    strided_out, strided_lse, run = emulate.attention(q, k, v, sms=1, sink=one, alibi_slopes=steps[:, 1])
    assert run.verdict == "clean"
    out, lse, _ = emulate.attention(q, k, v, sms=1, sink=one.copy(), alibi_slopes=steps[:, 1].copy())
    assert np.array_equal(strided_out.view(np.uint16), out.view(np.uint16))
    assert np.array_equal(strided_lse, lse)


def placed(bias: Any, width: int, offset: int) -> Any:
    """The same numbers in a wider array of NaN, `offset` elements behind the beginning of a row."""
    wide = np.full((*bias.shape[:-1], width), np.nan, bias.dtype)
    view = wide[..., offset : offset + bias.shape[-1]]
    view[...] = bias
    return view


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_bias_is_read_in_place(dtype: Any, nvrtc: None) -> None:
    """C43: slices that TMA takes, and those that begin or go on between its multiples of 16 bytes. None is copied."""
    q, k, v = (x[:, :70] for x in inputs())
    whole = random_array((1, 2, 70, 72), dtype, 7)
    bias = whole[..., :70]
    by_row, by_key, by_head = whole[:, :, :1, :70], whole[..., :1], whole[:, :1, :, :70]
    results = {}
    for name, view, access in (
        ("padded", bias, Bias.TILE),
        ("further", placed(bias, 96, 16), Bias.TILE),
        ("unaligned", placed(bias, 96, 1), Bias.GATHER),
        ("ragged", placed(bias, 75, 0), Bias.GATHER),
        ("turned", np.ascontiguousarray(bias.swapaxes(2, 3)).swapaxes(2, 3), Bias.GATHER),
        ("backwards", np.flip(np.flip(bias, (2, 3)).copy(), (2, 3)), Bias.GATHER),
        ("heads backwards", np.flip(np.flip(bias, 1).copy(), 1), Bias.GATHER),
        ("row", by_row, Bias.ROW),
        ("row again", np.broadcast_to(by_row, bias.shape), Bias.ROW),
        ("row unaligned", placed(by_row, 96, 1), Bias.GATHER),
        ("key", by_key, Bias.GATHER),
        ("key again", np.ascontiguousarray(by_key), Bias.GATHER),
        ("head", by_head, Bias.TILE),
        ("head again", np.broadcast_to(by_head, bias.shape), Bias.TILE),
        ("head ragged", placed(by_head, 75, 0), Bias.GATHER),
    ):
        prepared = emulate.prepare(q, k, v, sms=1, bias=view)
        assert prepared.selection.spec.bias is access, name
        assert prepared.launch().verdict == "clean", name
        options = {"bias": np.array(view)}
        reference, reference_lse = dense.attention(q, k, v, **options)
        assert_close(prepared.out, reference, dense.same_precision(q, k, v, **options)[0], context=name)
        assert_lse_close(prepared.lse, reference_lse, score_magnitude=score_magnitude(q, k), context=name)
        results[name] = prepared.out.view(np.uint16)
    for same in (
        ("padded", "further"),
        ("ragged", "unaligned", "turned", "backwards", "heads backwards"),
        ("row", "row again"),
        ("head", "head again"),
    ):
        for name in same[1:]:
            assert np.array_equal(results[same[0]], results[name]), name


def test_a_read_beside_a_bias_is_found(nvrtc: None) -> None:
    q, k, v = inputs()
    prepared = emulate.prepare(q, k, v, sms=1, bias=np.zeros((130, 150), np.float32))
    assert prepared.launch().verdict == "clean"
    params, row_stride = bytearray(prepared.params), 856  # its offset in FwdParams
    assert struct.unpack_from("<q", params, row_stride) == (150,)
    struct.pack_into("<q", params, row_stride, 151)
    wild = dataclasses.replace(prepared, params=bytes(params)).launch()
    assert wild.verdict == "error"
    assert any("cuda/hopper/bias.cuh" in str(finding) for finding in wild.findings)


@pytest.mark.parametrize("name", ["sink", "alibi_slopes"])
def test_a_read_beside_arrays_of_heads_is_found(name: str, nvrtc: None) -> None:
    """They are known to the device with their own bounds."""
    q, k, v = inputs()
    prepared = emulate.prepare(q, k, v, sms=1, **{name: np.zeros(2, np.float32)})
    assert prepared.launcher is not None
    good = prepared.launch()
    assert good.verdict == "clean"
    head_strides = {"sink": 560, "alibi_slopes": 576}  # offsets in FwdParams
    params = bytearray(prepared.params)
    assert struct.unpack_from("<q", params, head_strides[name]) == (1,)
    struct.pack_into("<q", params, head_strides[name], 1000)
    wild = dataclasses.replace(prepared, params=bytes(params)).launch()
    assert wild.verdict == "error"
    assert any("cuda/" in str(finding) for finding in wild.findings)


def test_nothing_to_launch_writes_the_sink(nvrtc: None) -> None:
    q, k, v = inputs()
    out, lse, run = emulate.attention(q, k[:, :0], v[:, :0], sink=SINK)
    assert run.verdict == "clean"
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(SINK[:, None], lse.shape))


def test_results_in_place(nvrtc: None) -> None:
    q, k, v = inputs()
    out, lse = np.empty_like(q), np.empty((1, 2, 130), np.float32)
    assert cupyfa.attention(q, k, v, out=out, lse=lse, backend="emulator") is out
    expected = emulate.attention(q, k, v)
    assert np.array_equal(out.view(np.uint16), expected.out.view(np.uint16))
    assert np.array_equal(lse, expected.lse)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"^attention: backend is 'cuda'; it must be 'emulator' or None$"):
        cupyfa.attention(*inputs(), backend="cuda")  # type: ignore[call-overload]


# --- hazards ---


def early_k_release(prepared: emulate.Prepared) -> Mutant:
    """The kernel without the wait that proves the scores, and with it that the product no longer reads K."""
    assert prepared.kernel is not None
    for mutant in mutants(prepared.kernel.program):
        calls = [Path(file).name for file, _ in mutant.place.callers]
        if mutant.operator == "drop" and "wgmma.wait_group" in mutant.place.text and "consumer.cuh" in calls:
            return mutant
    raise AssertionError("the kernel has no wait for a product")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, nvrtc: None) -> str:
    """Calls run a mutant in place of the kernel; its name."""
    launch = emulate.Prepared.launch

    def launch_mutant(self: emulate.Prepared, kernel: EmulatedKernel | None = None, **options: Any) -> Run:
        assert self.kernel is not None
        return launch(self, EmulatedKernel(self.kernel.device, mutant.program), **options)

    mutant = early_k_release(emulate.prepare(*inputs(), sms=1))
    monkeypatch.setattr(emulate.Prepared, "launch", launch_mutant)
    return mutant.name


def test_a_hazard_raises_and_carries_the_run(broken: str) -> None:
    with pytest.raises(HazardError) as caught:
        cupyfa.attention(*inputs(), backend="emulator")
    run = caught.value.run
    assert isinstance(run, Run)
    assert run.verdict == "error"
    assert "WGMMA_REGISTER_READ_IN_FLIGHT" in run.hazards
    assert "WGMMA_REGISTER_READ_IN_FLIGHT" in str(caught.value)
    assert re.search(r"^    against: cuda/ptx/wgmma.cuh:\d+ \(from cuda/hopper/gemm.cuh:\d+", str(run), re.MULTILINE)


def test_emulate_attention_reports_and_does_not_raise(broken: str) -> None:
    assert emulate.attention(*inputs(), sms=1).run.verdict == "error"


def test_a_report_is_short_and_its_json_complete(broken: str) -> None:
    run = emulate.attention(*inputs(), sms=1).run
    assert len(run.findings) > 20
    text = str(run)
    assert len(text.splitlines()) < 20 * len(set(run.hazards))
    assert re.search(r"^error: WGMMA_REGISTER_READ_IN_FLIGHT: at \d+ more pairs of places$", text, re.MULTILINE)
    assert len(json.loads(run.to_json())["findings"]) == len(run.findings)


def test_the_rule_for_warpgroups_is_strict_by_default(monkeypatch: pytest.MonkeyPatch, nvrtc: None) -> None:
    given: list[Any] = []
    launch = EmulatedKernel.launch

    def spy(self: EmulatedKernel, **options: Any) -> Run:
        given.append(options.get("strict_warpgroup"))
        return launch(self, **options)

    monkeypatch.setattr(EmulatedKernel, "launch", spy)
    emulate.attention(*inputs())
    emulate.attention(*inputs(), strict_warpgroup=False)
    command(*SMALL, "--policy", "lazy")
    command(*SMALL, "--policy", "lazy", "--lenient-warpgroup")
    assert given == [True, False, True, False]


# --- events ---


def test_events_tell_the_life_of_a_slot(nvrtc: None) -> None:
    prepared = emulate.prepare(*inputs(), sms=1)
    run = prepared.launch(record=True)
    assert prepared.launch().events == ()
    assert [event.time for event in run.events] == sorted(event.time for event in run.events)
    copies = [e for e in run.events if e.object >= 0 and "cp.async.bulk.tensor" in e.place.text]
    assert {e.kind for e in copies} == {"issue", "complete"}
    assert {e.warp for e in copies} == {0}  # the producer
    first = {(e.object, e.value): e.time for e in reversed(copies) if e.kind == "issue"}
    waits = {(e.object, e.value - 1): e.time for e in reversed(run.events) if e.kind == "wait" and e.object >= 0}
    assert all(waits[key] > time for key, time in first.items())
    stores = [e for e in run.events if e.object == -100]
    assert [e.kind for e in stores].count("issue") == [e.kind for e in stores].count("complete") > 0
    products = {e.object for e in run.events if e.place.text.startswith("wgmma.mma_async")}
    consumers = prepared.selection.spec.tile_m // 64
    assert products == {-201 - warpgroup for warpgroup in range(consumers)}


# --- the command ---


def command(*arguments: str) -> tuple[int, str]:
    """Run ``python -m cupyfa emulate`` in this process; exit status and what it says."""
    parser = argparse.ArgumentParser(prog="emulate")
    emulate_command.add_arguments(parser)
    lines: list[str] = []
    status = emulate_command.run(parser.parse_args(arguments), lines.append)
    return status, "\n".join(lines)


SMALL = ("--shape", "1,130,150,2,1,64", "--causal")


def test_command_runs_every_policy(nvrtc: None) -> None:
    status, text = command(*SMALL)
    assert status == 0
    assert [line.split()[0] for line in text.splitlines()] == list(POLICIES)
    assert all(": clean, right result, " in line for line in text.splitlines())


def test_command_with_a_config_and_one_policy(nvrtc: None, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ("--config", "pingpong=False", "--config", "tile_n=64", "--policy", "lazy", "--json", str(path))
    status, text = command(*SMALL, "--seed", "3", "--dtype", "float16", *options)
    assert (status, text.count("\n")) == (0, 0)
    assert text.startswith("lazy           seed 3: clean, right result, ")
    (report,) = json.loads(path.read_text())
    assert report["arguments"]["config"] == {"pingpong": False, "tile_n": 64}
    assert (report["verdict"], report["findings"], report["wrong"]) == ("clean", [], "")


def test_command_replays_what_failed(broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, again = tmp_path / "report.json", tmp_path / "again.json"
    status, text = command(*SMALL, "--policy", "lazy", "--json", str(path))
    assert status == 1
    assert ": error, " in text
    (line,) = (line for line in text.splitlines() if line.startswith("again: "))
    status, _ = command("--replay", str(path), "--json", str(again))
    assert status == 1
    (first,), (second,) = json.loads(path.read_text()), json.loads(again.read_text())
    for report in (first, second):
        del report["statistics"]["seconds"]
    assert first == second
    # The printed command repeats it too, and with the right kernel the failure is gone.
    words = line.removeprefix("again: python -m cupyfa emulate ").split()
    assert command(*words)[0] == 1
    monkeypatch.undo()
    assert command(*words)[0] == 0
    assert command("--replay", str(path))[0] == 0


def test_replay_of_clean_runs_runs_nothing(nvrtc: None, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command(*SMALL, "--policy", "eager", "--json", str(path))
    assert command("--replay", str(path)) == (0, f"{path} has no run that failed: nothing to repeat")


def test_findings_are_printed_once(broken: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    status, text = command(*SMALL, "--json", str(path))
    assert status == 1
    runs = re.split(rf"^(?=(?:{'|'.join(POLICIES)}) +seed )", text, flags=re.MULTILINE)[1:]
    assert len(runs) == len(POLICIES)
    assert runs[0].count("\nerror: ") > 1
    assert all("\nsame findings as eager" in run for run in runs[1:])
    assert sum(len(run) for run in runs[1:]) < 7 * len(runs[0])
    assert all(report["findings"] for report in json.loads(path.read_text()))  # JSON has them all
    words = text.splitlines()[-1].removeprefix("again: python -m cupyfa emulate ").split()
    assert "--lenient-warpgroup" not in words


def test_a_finding_that_is_new_is_printed_beside_those_that_are_not() -> None:
    here, there = (Place(i, "a.cu", i, (), "ld.shared.f32 %f0, [%r0]") for i in (1, 2))
    first, second = (
        Finding(name, "error", here, there, 0, 0, 1, "byte 0", "", 1) for name in ("SHARED_READ", "SHARED_WRITE")
    )
    seen: dict[tuple[Any, ...], str] = {}
    runs = [Run("k", "sm_90a", p, 0, f, {}) for p, f in (("eager", (first,)), ("lazy", (second, first)))]
    assert [emulate_command._news(run, seen) for run in (*runs, runs[1])] == [
        str(runs[0]),
        f"same findings as eager, and\n{second}",
        "same findings as lazy, eager",
    ]


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '[{"verdict": "error", "arguments": {"shape": 3}}]', "3"])
def test_replay_of_another_file(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    assert command("--replay", str(path)) == (2, "")
    assert capsys.readouterr().err == f"emulate: {path} is no file that `emulate --json` has written\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "1,9,9,3,2,64"), "emulate: attention: q has 3 heads and k has 2; "),
        (("--shape", "1,9,9,2,2,12"), "emulate: attention: q has head_dim 12; "),
        (("--config", "foo=1"), "emulate: attention: config has the field 'foo'; "),
        (("--sms", "0"), "emulate: sms is 0; "),
        (("--seed", "-1"), "emulate: launch: seed is -1; "),
        (("--replay", "/nowhere"), "emulate: [Errno 2] "),
        (("--json", "/nowhere/report.json"), "emulate: [Errno 2] "),
    ],
)
def test_user_errors_are_one_line(
    arguments: tuple[str, ...], message: str, nvrtc: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments) == (2, "")
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_a_wrong_result_is_a_failure(nvrtc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = emulate.Prepared.launch

    def spoil(self: emulate.Prepared, *arguments: Any, **options: Any) -> Run:
        run = launch(self, *arguments, **options)
        self.out[0, 0, 0, 0] += 1
        return run

    monkeypatch.setattr(emulate.Prepared, "launch", spoil)
    status, text = command(*SMALL, "--policy", "eager")
    assert status == 1
    assert "clean, wrong result, " in text
    assert "again: python -m cupyfa emulate --shape 1,130,150,2,1,64 " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--shape", "1,2,3"),
            "'1,2,3' is not batch,seqlen_q,seqlen_k,heads_q,heads_kv,head_dim: six positive integers",
        ),
        (("--shape", "1,2,3,4,x,64"), "six positive integers"),
        (("--shape", "1,0,3,4,4,64"), "six positive integers"),
        (("--config", "pingpong"), "'pingpong' is not FIELD=VALUE"),
        (("--policy", "fair"), "invalid choice"),
        (("--arch", "sm_80"), "invalid choice"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command(*arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# --- explain ---


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Rung | None]:
    """No kernel has been emulated yet. Returns what asks `explain` for the rung of `inputs`."""
    monkeypatch.setattr(emulate_stage, "_ran", set())
    monkeypatch.setattr(emulate_stage, "_found", set())
    return lambda: cupyfa.explain(*inputs(), arch="sm_90a").rung


def test_a_clean_run_reaches_the_rung_emulated(nvrtc: None, forgetful: Callable[[], Rung | None]) -> None:
    assert forgetful() is Rung.SASS
    emulate.attention(*inputs(), sms=1, checks=False)  # proves no order
    assert forgetful() is Rung.SASS
    emulate.attention(*inputs(), sms=1)
    assert forgetful() is Rung.EMULATED
    assert "rung    emulated: " in str(cupyfa.explain(*inputs(), arch="sm_90a"))
    other = cupyfa.explain(*inputs(), causal=True, arch="sm_90a")  # another kernel
    assert other.rung is Rung.SASS


def test_a_finding_takes_the_rung_away(
    nvrtc: None, forgetful: Callable[[], Rung | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = emulate.prepare(*inputs(), sms=1)
    prepared.launch()
    mutant = early_k_release(prepared)
    assert prepared.kernel is not None
    prepared.launch(EmulatedKernel(prepared.kernel.device, mutant.program))  # says nothing about the kernel itself
    assert forgetful() is Rung.EMULATED
    prepared.launch(max_instructions=10)
    assert forgetful() is Rung.SASS
    prepared.launch()
    assert forgetful() is Rung.SASS


def test_explain_does_not_import_the_emulator(nvrtc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate.attention(*inputs(), sms=1)
    modules = ("cupyfa.emulate", "cupyfa.emulate_stage")
    for name in modules:
        monkeypatch.delitem(sys.modules, name)
    assert cupyfa.explain(*inputs(), arch="sm_90a").rung is Rung.SASS
    assert not sys.modules.keys() & modules


def test_a_stopped_run_leaves_nothing_behind(nvrtc: None) -> None:
    """Its CTAs had drawn tiles; the next run draws them again."""
    case = Case("stopped", 1, 2048, 64, 2, 1, 64)
    prepared = emulate.prepare(*case.make_inputs(), sms=2)
    assert prepared.launch(max_instructions=20_000).hazards == ("PROGRESS_TIMEOUT",)
    prepared.out[...] = np.nan
    assert prepared.launch().verdict == "clean"
    assert not np.isnan(prepared.out.astype(np.float32)).any()


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(32, 96), (192, 128), (64, 256), (256, 40)])
def test_v_has_a_head_dim_of_its_own(head_dim: int, head_dim_v: int, nvrtc: None) -> None:
    case = Case("own", 1, 150, 275, 2, 1, head_dim, head_dim_v=head_dim_v)
    q, k, v = case.make_inputs()
    out, lse, run = emulate.attention(q, k, v, sms=1)
    assert run.verdict == "clean"
    reference, reference_lse = dense.attention(q, k, v)
    assert_close(out, reference, dense.same_precision(q, k, v)[0])
    assert_lse_close(lse, reference_lse, score_magnitude=score_magnitude(q, k))
