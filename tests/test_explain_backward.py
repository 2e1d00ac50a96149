"""What `explain_backward` says, without a GPU, and which kernels `warmup` takes from the shapes of such a call."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cupy import Array, install
from nvrtc_tools import import_nvrtc

import cupyfa
from cupyfa import backward_dispatch, explain_backward
from cupyfa.backward_select import BWD_CANDIDATES
from cupyfa.compiler import PtxasReport
from cupyfa.explain import Rung
from cupyfa.select import H200
from cupyfa.spec import BwdSpec, FwdSpec, PostprocessSpec, PreprocessSpec, SinkSpec
from cupyfa.testing import BackwardCase, Case

warmup = importlib.import_module("cupyfa.warmup")  # the function has its name


def case(seqlen_k: int = 300, head_dim: int = 120, heads_kv: int = 2, **options: Any) -> BackwardCase:
    flags = {name: options.pop(name, False) for name in ("dlse", "deterministic")}
    return BackwardCase(Case("test", 2, 70, seqlen_k, 4, heads_kv, head_dim, **options), **flags)


def explained(of: BackwardCase, **more: Any) -> cupyfa.BackwardExplanation:
    return explain_backward(**of.make_arrays(), **of.call_options, **more)


# --- On the CPU ---


def test_numpy_arrays_run_on_the_cpu() -> None:
    explanation = explained(case(causal=True, sink=True, dlse=True, deterministic=True))
    assert explanation.selection is None
    assert (explanation.kernels, explanation.workspace, explanation.workspace_bytes) == ((), (), 0)
    assert explanation.order == "that of the oracle: the same bits each time"
    assert str(explanation).splitlines() == [
        "gradients bfloat16: batch 2, seqlen 70 x 300, heads 4/2, head_dim 120, causal, sink, dlse, deterministic",
        "runs    on the CPU: NumPy arrays are computed by the oracle cupyfa.oracles.backward",
    ]


def test_packed_sequences_run_on_the_cpu() -> None:
    x, lse, offsets = np.zeros((9, 2, 64), np.float16), np.zeros((2, 9), np.float32), np.int32([0, 4, 9])
    assert str(explain_backward(x, x, x, x, x, lse, offsets, offsets)).splitlines() == [
        "gradients float16: packed sequences 2, 9 x 9 rows, heads 2/2, head_dim 64",
        "runs    on the CPU: NumPy arrays are computed by the oracle cupyfa.oracles.packed_backward",
    ]


# --- On Hopper, without one ---


def test_kernels_are_compiled_without_a_gpu() -> None:
    import_nvrtc()
    explanation = explained(case(causal=True, sink=True), arch="sm_90a")
    types_of = [PreprocessSpec, BwdSpec, PostprocessSpec, PostprocessSpec, PostprocessSpec, SinkSpec]
    assert [type(kernel.spec) for kernel in explanation.kernels] == types_of
    text = str(explanation)
    for kernel in explanation.kernels:
        assert kernel.rung in (Rung.SASS, Rung.EMULATED)  # if it has run in this process
        assert kernel.ptxas is not None
        lines = (
            f"kernel  {kernel.spec}\n        registers {kernel.ptxas.registers}; spills 0 bytes\n"
            f"        {kernel.rung.value}"
        )
        assert lines in text


def test_a_kernel_that_has_been_emulated() -> None:
    import_nvrtc()
    of = BackwardCase(Case("here", 1, 20, 30, 1, 1, 40, "float16"))
    cupyfa.attention_backward(**of.make_arrays(), **of.call_options, backend="emulator")
    assert [kernel.rung for kernel in explained(of, arch="sm_90a").kernels] == [Rung.EMULATED] * 3


@pytest.mark.parametrize(
    ("head_dim", "options", "chosen"),
    [
        (64, {}, 0),
        (64, {"softcap": 3.0}, 1),
        (120, {}, 2),
        (120, {"deterministic": True}, 4),
        (120, {"softcap": 3.0}, 6),
        (256, {}, 8),
    ],
    ids=["64", "softcap", "120", "deterministic", "120-softcap", "256"],
)
def test_each_row_has_its_reason(
    head_dim: int, options: dict[str, Any], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # the selection is enough
    explanation = explained(case(head_dim=head_dim, **options), arch="sm_90a")
    rows = [line for line in str(explanation).splitlines() if line.startswith(("chosen  ", "lost    "))]
    assert len(rows) == len(BWD_CANDIDATES)
    for number, (line, row) in enumerate(zip(rows, BWD_CANDIDATES, strict=True)):
        tiles = f"{row.tile_m}x{row.tile_n:<3} stages {row.q_stages}, {row.dout_stages}"
        mark = "chosen" if number == chosen else "lost  "
        assert line.startswith(f"{mark}  up to {row.widest:<8} {tiles}  ")
        reason = line[len(f"{mark}  up to {row.widest:<8} {tiles}  ") :]
        objection = r"head_dim \d+ exceeds \d+|it has no room for .+"
        if number == chosen:
            assert reason == row.reason
        else:
            later = "the row that is chosen comes before it"
            assert re.fullmatch(objection if number < chosen else f"{objection}|{later}", reason)


def test_the_workspace_is_told_part_by_part() -> None:
    import_nvrtc()
    explanation = explained(case(head_dim=64, sink=True, deterministic=True), arch="sm_90a")
    parts = dict(explanation.workspace)
    rows, keys = 128, 384  # whole tiles
    assert parts == {
        "lse": 4 * 8 * rows,
        "delta": 4 * 8 * rows,
        "sums of dq": 4 * 8 * rows * 64,
        "sums of dk": 4 * 2 * 4 * keys * 64,  # two parts
        "sums of dv": 4 * 2 * 4 * keys * 64,
        "turns": 4 * 8 * rows * 64 // 2048,
        "sums of dsink": 4 * 8 * 2,  # of 64 rows each
    }
    assert explanation.workspace_bytes is not None
    assert 0 <= explanation.workspace_bytes - sum(parts.values()) < 256 * len(parts)
    text = str(explanation)
    assert f"\nspace   {explanation.workspace_bytes} bytes of workspace\n" in text
    assert all(f"\n        {size} for {name}" in text for name, size in parts.items())


def test_copies_are_named() -> None:
    import_nvrtc()
    of = case(heads_kv=4)
    given = of.make_arrays() | of.call_options
    plain = explain_backward(**given, arch="sm_90a")
    assert plain.copied == ()
    assert "copied" not in str(plain)
    given["q"], given["dk"] = given["q"][:, ::-1], np.empty((2, 300, 4, 120), given["k"].dtype)[..., ::-1]
    explanation = explain_backward(**given, arch="sm_90a")
    assert explanation.copied == ("q", "dk")
    sizes = {"a copy of q": given["q"].nbytes, "a copy of dk": given["dk"].nbytes}
    assert dict(explanation.workspace) == sizes | dict(plain.workspace)
    assert "\ncopied  q, dk: TMA does not take that where it is" in str(explanation)


@pytest.mark.parametrize(
    ("seqlen_k", "heads_kv", "options", "line"),
    [
        (300, 4, {}, "parts   1: a CTA walks 1 query head of a key head, and writes dk and dv"),
        (10_000, 2, {}, "parts   1: a CTA walks all 2 query heads of a key head, and writes dk and dv"),
        (
            300,
            1,
            {},
            "parts   4: a CTA walks 1 of 4 query heads of a key head, to give more multiprocessors one; dk",
        ),
        (10_000, 1, {}, "parts   1: a CTA walks all 4 query heads of a key head, and writes"),
        (
            4_000,
            1,
            {},
            "parts   2: a CTA walks 2 of 4 query heads of a key head, to give more multiprocessors one;",
        ),
        (
            300,
            2,
            {},
            "order   in which key tiles add to dq: that in which the CTAs of key tiles come: the last bits may",
        ),
        (128, 2, {}, "order   in which key tiles add to dq: there is one key tile: the same bits each time"),
        (
            300,
            2,
            {"deterministic": True},
            "order   in which key tiles add to dq: from the last key tile to the first: the",
        ),
    ],
)
def test_who_adds_to_what(
    seqlen_k: int, heads_kv: int, options: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    made = {
        name: np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), shape, (0, 16, 16, 2))
        for name, shape in {"q": (2, 70, 4, 120), "k": (2, seqlen_k, heads_kv, 120)}.items()
    }
    q, k, lse = made["q"], made["k"], np.zeros((2, 4, 70), np.float32)
    text = str(explain_backward(q, q, k, k, q, lse, arch="sm_90a", **options))
    assert f"\n{line}" in text


def test_without_a_compiler_the_selection_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    explanation = explained(case(sink=True), arch="sm_90a")
    assert {kernel.rung for kernel in explanation.kernels} == {Rung.SOURCE}
    assert (explanation.workspace, explanation.workspace_bytes) == ((), None)
    text = str(explanation)
    assert "space" not in text
    assert "note    compiling without a GPU needs the cuda-bindings package: pip install 'cupyfa[compile]'" in text


def test_a_config_is_part_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    config = {"q_stages": 2, "dout_stages": 2, "setmaxnreg": False}
    text = str(explained(case(), config=config, arch="sm_90a"))
    assert "kernel  backward sm_90a bfloat16 d128 64x128 stages 2, 2 partial\n" in text


def test_nothing_is_launched_where_there_is_nothing() -> None:
    explanation = explained(case(seqlen_k=0), arch="sm_90a")
    assert (explanation.kernels, explanation.workspace_bytes) == ((), 0)
    assert str(explanation).endswith("\nnote    nothing to launch: an axis is empty")
    assert "parts " not in str(explanation)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"arch": "sm_80"}, ValueError, r"^explain: arch is 'sm_80'; it must be 'sm_90a' or None$"),
        ({"dlse": [1.0]}, TypeError, r"^explain: dlse is a list; it must be a numpy\.ndarray or a cupy\.ndarray$"),
        ({"lse": None}, TypeError, r"^explain: lse is a NoneType; it must be a numpy\.ndarray or a cupy\.ndarray$"),
        ({"deterministic": 1}, TypeError, r"^attention: deterministic is 1; it must be True or False$"),
        ({"config": {"tile_m": 64}}, ValueError, r"^attention: config has the field 'tile_m'; gradients can override"),
        ({"dsink": np.zeros(4, np.float32)}, ValueError, r"^attention: dsink is the gradient of sink, and there is no"),
        ({"softcap": 0.0}, ValueError, r"^attention: softcap is 0\.0; it must be positive"),
        ({"seqused_k": np.ones(2, np.int32)}, TypeError, r"^attention: gradients take seqused_k of packed sequences"),
    ],
    ids=str,
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    of = case()
    with pytest.raises(error, match=message):
        explain_backward(**(of.make_arrays() | of.call_options | change))


# --- CuPy arrays ---


class Loaded:
    """A kernel on a GPU that there is not."""

    def __init__(self, spec: Any, launched: bool) -> None:
        self.spec = spec
        self.traits = {"threads": 128, "shared_bytes": 0, "tile_m": 64}
        self.function = types.SimpleNamespace(launched=launched)
        self.ptxas = PtxasReport(40, 0, 0, (), "")


@pytest.fixture
def cupy_arrays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    install(monkeypatch)
    monkeypatch.setattr(backward_dispatch, "load", lambda spec, device: Loaded(spec, isinstance(spec, PreprocessSpec)))
    monkeypatch.setattr(backward_dispatch.Device, "current", lambda: H200)
    backward_dispatch._prepare.cache_clear()
    yield lambda of: {
        name: Array(x) if isinstance(x, np.ndarray) else x for name, x in (of.make_arrays() | of.call_options).items()
    }
    backward_dispatch._prepare.cache_clear()


def test_cupy_arrays_have_the_kernels_that_are_loaded(cupy_arrays: Any) -> None:
    given = cupy_arrays(BackwardCase(Case("run", 2, 70, 130, 4, 2, 40, "float16", sink=True)))
    begin = 4  # bytes behind a multiple of 16
    q = given["q"].host
    moved = np.zeros(q.nbytes + 32, np.uint8)
    moved = moved[-moved.ctypes.data % 16 + begin :][: q.nbytes].view(q.dtype).reshape(q.shape)
    explanation = explain_backward(**(given | {"q": Array(moved)}))
    assert explanation.kernels[0].rung is Rung.RUN
    assert Rung.RUN not in {kernel.rung for kernel in explanation.kernels[1:]}
    assert explanation.copied == ("q",)
    assert explanation.workspace_bytes == cupyfa.backward_workspace_size(**(given | {"q": Array(moved)}))
    assert cupyfa.backward_workspace_size(**given) == explain_backward(**given).workspace_bytes
    with pytest.raises(TypeError, match=r"^attention: k is a numpy\.ndarray but q is a "):
        explain_backward(**(given | {"k": given["k"].host}))


# --- warmup ---


def specs(**call: Any) -> tuple[Any, ...]:
    return warmup._specs(3, {"dtype": "bfloat16"} | call, H200)  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_warmup_takes_the_kernels_that_explain_shows(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    of = case(head_dim_v=80, causal=True, sink=True, alibi=True, deterministic=True, layout=layout)
    shown = explained(of, arch="sm_90a", config={"q_stages": 3})
    shapes = {name: of.make_arrays()[name].shape for name in ("q", "k", "v", "dout")}
    flags = {"sink": True, "alibi_slopes": True, "causal": True, "deterministic": True, "layout": layout}
    assert specs(**shapes, **flags, config={"q_stages": 3}) == tuple(kernel.spec for kernel in shown.kernels)


def test_warmup_compiles_each_kernel_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch)
    sys.modules["cupy"].cuda.Device = lambda index: contextlib.nullcontext()  # type: ignore[attr-defined]
    loaded: list[Any] = []
    monkeypatch.setattr(warmup, "load", lambda spec, device: loaded.append(spec))
    monkeypatch.setattr(warmup.Device, "current", lambda: H200)
    call = {"q": (2, 70, 4, 64), "k": (2, 300, 2, 64), "dtype": "float16", "sink": True}
    warm = cupyfa.warmup([call | {"dout": call["q"]}, call, call | {"dout": list(call["q"])}])
    assert [type(spec) for spec in warm] == [PreprocessSpec, BwdSpec, PostprocessSpec, SinkSpec, FwdSpec]
    assert sorted(map(str, loaded)) == sorted(map(str, warm))
    assert "warmup: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dout": True}, TypeError, r"^warmup: call 3: dout is True; it must be a shape, that of the output$"),
        (
            {"dout": (1, 9, 2, 32)},
            ValueError,
            r"^attention: dout has shape \(1, 9, 2, 32\); it must have the shape of q",
        ),
        ({"deterministic": "x"}, TypeError, r"^attention: deterministic is 'x'; it must be True or False$"),
        ({"colour": 1}, TypeError, r"^warmup: call 3 has colour; its arguments are "),
        ({"config": {"tile_m": 64}}, ValueError, r"^attention: config has the field 'tile_m'; gradients can override"),
        ({"softcap": -1.0}, ValueError, r"^attention: softcap is -1\.0; it must be positive"),
        ({"dlse": True}, TypeError, r"^warmup: call 3 has dlse; its arguments are q, k, v, dtype, .* for gradients"),
        ({"q": 9}, TypeError, r"^warmup: call 3: q is 9; it must be a shape$"),
        (
            {"q": (9, 2, 64)},
            ValueError,
            r"^warmup: call 3: q has shape \(9, 2, 64\); it must have 4 axes, or 3 and sequences beside it$",
        ),
        (
            {"sequences": 2},
            ValueError,
            r"^warmup: call 3: q has shape \(1, 9, 2, 64\); it must have 3 axes, because there are sequences$",
        ),
        ({"seqused_q": True}, TypeError, r"^attention: gradients take seqused_q of packed sequences only"),
    ],
    ids=str,
)
def test_wrong_calls_of_warmup(change: dict[str, Any], error: type[Exception], message: str) -> None:
    shape = (1, 9, 2, 64)
    with pytest.raises(error, match=message):
        specs(**({"q": shape, "k": shape, "dout": shape} | change))
    with pytest.raises(TypeError, match=r"^warmup: call 3 has no k; it needs the shapes q and k, and a dtype$"):
        specs(q=shape, dout=shape)


def test_they_are_public() -> None:
    assert {"explain_backward", "BackwardExplanation"} <= set(cupyfa.__all__)
