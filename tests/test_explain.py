"""What `explain` says, without a GPU."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
from nvrtc_tools import import_nvrtc

import cupyfa
from cupyfa import explain
from cupyfa._launch import plan_bytes
from cupyfa.explain import Rung
from cupyfa.select import CANDIDATES
from cupyfa.spec import PlanSpec
from cupyfa.testing import Case


def inputs(**changes: Any) -> tuple[Any, Any, Any]:
    fields: dict[str, Any] = {"batch": 2, "seqlen_q": 33, "seqlen_k": 50, "heads_q": 4, "heads_kv": 2, "head_dim": 120}
    return Case("test", **fields | changes).make_inputs()


def test_numpy_arrays_run_on_the_cpu() -> None:
    explanation = explain(*inputs(), causal=True)
    assert explanation.backend == "numpy"
    assert explanation.selection is explanation.ptxas is explanation.traits is explanation.rung is None
    assert str(explanation).splitlines() == [
        "attention bfloat16: batch 2, seqlen 33 x 50, heads 4/2, head_dim 120, causal",
        "runs    on the CPU: NumPy arrays are computed by the oracle cupyfa.oracles.online",
    ]


SINK, SLOPES = np.zeros(4, np.float32), np.ones((2, 4), np.float32)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, ""),
        ({"window_size": (None, -1)}, ""),
        ({"window_size": (49, 32)}, ""),  # hides nothing
        ({"causal": True}, ", causal"),
        ({"window_size": (49, 0)}, ", causal"),
        ({"causal": True, "window_size": (7, 3)}, ", window (7, 0)"),
        ({"window_size": (7, None)}, ", window (7, None)"),
        ({"window_size": (None, 7)}, ", window (None, 7)"),
        ({"window_size": [np.int8(7), 31]}, ", window (7, 31)"),
        ({"softcap": 50}, ", softcap 50"),
        ({"softcap": 0.125}, ", softcap 0.125"),
        ({"sink": SINK}, ", sink"),
        ({"alibi_slopes": SLOPES}, ", alibi_slopes"),
        (
            {"causal": True, "window_size": (8, -1), "softcap": 30.0, "sink": SINK, "alibi_slopes": SLOPES[0]},
            ", window (8, 0), softcap 30, sink, alibi_slopes",
        ),
    ],
    ids=str,
)
def test_options_are_named(options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # the selection is enough
    first = "attention bfloat16: batch 2, seqlen 33 x 50, heads 4/2, head_dim 120" + text
    for arch in (None, "sm_90a"):
        assert str(explain(*inputs(), arch=arch, **options)).splitlines()[0] == first


@pytest.mark.parametrize(
    ("options", "switches"),
    [
        ({"window_size": (7, None)}, " window "),
        ({"window_size": (7, 3)}, " causal window "),
        ({"softcap": 50.0, "sink": SINK}, " sink softcap "),
        ({"alibi_slopes": SLOPES}, " alibi "),
    ],
    ids=str,
)
def test_options_are_part_of_the_kernel(
    options: dict[str, Any], switches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    (line,) = re.findall(r"^kernel  .*$", str(explain(*inputs(), arch="sm_90a", **options)), re.MULTILINE)
    assert switches in line


def test_a_kernel_with_all_options_is_compiled() -> None:
    import_nvrtc()
    options = {"causal": True, "window_size": (8, -1), "sink": SINK, "alibi_slopes": SLOPES}
    explanation = explain(*inputs(), arch="sm_90a", **options)
    assert explanation.rung is Rung.SASS
    assert explanation.selection is not None
    spec = explanation.selection.spec
    assert (spec.causal, spec.window, spec.sink, spec.softcap, spec.alibi) == (True, True, True, False, True)
    assert "spills 0 bytes" in str(explanation)


def test_kernel_of_numpy_arrays_is_compiled_without_a_gpu() -> None:
    import_nvrtc()
    explanation = explain(*inputs(), softmax_scale=-1.0, arch="sm_90a")
    assert explanation.backend == "cuda"
    assert explanation.rung is Rung.SASS
    assert explanation.selection is not None
    assert explanation.selection.spec.negate_scores
    assert explanation.ptxas is not None
    assert explanation.traits is not None
    text = str(explanation)
    assert f"kernel  {explanation.selection.spec}" in text
    assert f"registers {explanation.ptxas.registers} at launch" in text
    assert "spills 0 bytes" in text
    assert f"shared  {explanation.traits['shared_bytes']} bytes of a CTA" in text
    assert "rung    SASS: compiled to machine code, not run in this process" in text
    assert text.count("\nchosen ") == 1
    assert text.count("\nlost ") == len(CANDIDATES) - 1
    assert all(verdict.reason in text for verdict in explanation.selection.verdicts)
    assert " d128 128x128 " in text


def test_config_is_shown() -> None:
    import_nvrtc()
    explanation = explain(*inputs(), config={"overlap": False, "speculative": False, "tile_n": 64}, arch="sm_90a")
    assert "config  overlap=False, speculative=False, tile_n=64\n" in str(explanation)
    assert explanation.selection is not None
    assert not explanation.selection.spec.overlap
    assert explanation.traits is not None
    assert explanation.traits["tile_n"] == 64


def test_registers_that_are_not_moved() -> None:
    import_nvrtc()
    config = {"tile_m": 64, "setmaxnreg": False, "pingpong": False}
    assert "at launch, not moved; spills 0 bytes" in str(explain(*inputs(), config=config, arch="sm_90a"))


def test_without_a_compiler_the_selection_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    explanation = explain(*inputs(), arch="sm_90a")
    assert explanation.rung is Rung.SOURCE
    assert explanation.ptxas is explanation.traits is None
    text = str(explanation)
    assert "rung    source: selected, not compiled here" in text
    assert "note    compiling without a GPU needs the cuda-bindings package: pip install 'cupyfa[compile]'" in text


def test_a_config_that_does_not_compile_is_an_error() -> None:
    import_nvrtc()
    with pytest.raises(cupyfa.CompileError, match="tiles and stages exceed the shared memory of a CTA"):
        explain(*inputs(), config={"stages": 8}, arch="sm_90a")


def test_advisories_of_the_compiler_are_shown() -> None:
    import_nvrtc()
    text = str(explain(*inputs(), config={"setmaxnreg": False}, arch="sm_90a"))
    assert re.search(r"^ptxas   .*C7512", text, re.MULTILINE)


def test_bad_config_is_refused_without_an_arch() -> None:
    with pytest.raises(ValueError, match=r"^attention: config has the field 'tile'"):
        explain(*inputs(), config={"tile": 64})


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "", 90])
def test_bad_arch(arch: Any) -> None:
    with pytest.raises(ValueError, match=rf"^explain: arch is {arch!r}; it must be 'sm_90a' or None$"):
        explain(*inputs(), arch=arch)


@pytest.mark.parametrize("arch", [None, "sm_90a"])
def test_bad_arguments_are_refused_as_by_attention(arch: Any) -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"^attention: v has seqlen 49 but k has 50"):
        explain(q, k, v[:, 1:], arch=arch)
    with pytest.raises(ValueError, match=r"^attention: layout is 'x'"):
        explain(q, k, v, layout="x", arch=arch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^attention: layout is 'BHSD'; packed sequences have none"):
        explain(*packed_inputs(), layout="BHSD", arch=arch)
    with pytest.raises(TypeError, match=r"^attention: causal is 3"):
        explain(q, k, v, causal=3, arch=arch)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^attention: q has dtype float64"):
        explain(q.astype(np.float64), k, v, arch=arch)
    with pytest.raises(TypeError, match=r"^(attention|explain): k is a list"):
        explain(q, [1], v, arch=arch)
    with pytest.raises(TypeError, match=r"^(attention|explain): q is a list"):
        explain([1], k, v, arch=arch)
    with pytest.raises(TypeError, match=r"^attention: window_size is 3; it must be a pair"):
        explain(q, k, v, window_size=3, arch=arch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^attention: softcap is 0\.0; it must be positive"):
        explain(q, k, v, softcap=0.0, arch=arch)
    with pytest.raises(TypeError, match=r"^explain: sink is a list; it must be a numpy\.ndarray or a cupy\.ndarray$"):
        explain(q, k, v, sink=[0.0] * 4, arch=arch)
    with pytest.raises(ValueError, match=r"^attention: alibi_slopes has shape \(3,\); it must have \(heads_q,\) or"):
        explain(q, k, v, alibi_slopes=np.zeros(3, np.float32), arch=arch)


def test_rules_of_the_gpu_hold_for_arrays_of_heads() -> None:
    q, k, v = inputs()
    steps = np.lib.stride_tricks.as_strided(np.zeros(6, np.float32), shape=(4,), strides=(6,))
    explain(q, k, v, sink=steps)
    with pytest.raises(ValueError, match=r"^attention: sink has strides \(6,\) bytes; they must be multiples of 4$"):
        explain(q, k, v, sink=steps, arch="sm_90a")


@pytest.mark.parametrize("compiler", [False, True])
def test_copies_are_named(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler:
        import_nvrtc()
    else:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    q, k, v = inputs()
    assert explain(q, k, v, arch="sm_90a").copied == ()
    explanation = explain(q[:, ::-1], k, v[..., ::-1], arch="sm_90a")
    assert explanation.copied == ("q", "v")
    assert "\ncopied  q, v: TMA does not take that where it is\nrung " in str(explanation)
    assert explain(q[:, ::-1], k, v).copied == ()  # the oracle reads any array


OFFSETS = np.int32([0, 20, 20, 33]), np.int32([0, 10, 10, 50])


def packed_inputs() -> tuple[Any, ...]:
    return (*(x[0] for x in inputs()), *OFFSETS)


def test_packed_sequences_run_on_the_cpu() -> None:
    assert str(explain(*packed_inputs(), causal=True, seqused_k=np.int32([1, 0, 2]))).splitlines() == [
        "attention bfloat16: packed sequences 3, 33 x 50 rows, heads 4/2, head_dim 120, causal",
        "runs    on the CPU: NumPy arrays are computed by the oracle cupyfa.oracles.packed",
    ]


def test_the_plan_of_packed_sequences_is_named() -> None:
    import_nvrtc()
    explanation = explain(*packed_inputs(), causal=True, max_seqlen_q=20, arch="sm_90a")
    assert explanation.selection is not None
    assert explanation.selection.spec.varlen
    assert explanation.planner == PlanSpec()
    assert explanation.rung in (Rung.SASS, Rung.EMULATED)  # if its kernel has run in this process
    text = str(explanation)
    assert "\nplan    plan sm_90a: one CTA before the kernel; at most 7 query tiles of a head\n" in text
    assert f"\nspace   {plan_bytes(7)} bytes of workspace\nrung    {explanation.rung.value}" in text


def test_copies_of_packed_sequences_are_behind_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    q, *others = packed_inputs()
    explanation = explain(q[::-1], *others, arch="sm_90a")
    begin = -(-plan_bytes(7) // 256) * 256
    assert (explanation.copied, explanation.workspace_bytes) == (("q",), begin + q.nbytes)
    assert explanation.rung is Rung.SOURCE
    assert f"\nspace   {begin + q.nbytes} bytes of workspace\ncopied  q: TMA does not" in str(explanation)


def test_packed_arguments_are_refused_as_by_the_call() -> None:
    q, k, v, cu_q, cu_k = packed_inputs()
    bias = np.zeros((20, 9), np.float32)
    for arch in (None, "sm_90a"):
        with pytest.raises(TypeError, match=r"^attention: cu_seqlens_k is None; it must be an array of int32 with"):
            explain(q, k, v, cu_q, arch=arch)
        with pytest.raises(ValueError, match=r"^attention: bias has shape \(20, 9\); .* \(3, 4, 20, 10\)$"):
            explain(q, k, v, cu_q, cu_k, bias=bias, max_seqlen_q=20, max_seqlen_k=10, arch=arch)
        with pytest.raises(TypeError, match=r"^attention: max_seqlen_k is 1\.5; it must be an integer or None"):
            explain(q, k, v, cu_q, cu_k, max_seqlen_k=1.5, arch=arch)  # type: ignore[arg-type]
    nothing = explain(q[:0], k, v, cu_q * 0, cu_k, arch="sm_90a")
    assert (nothing.planner, nothing.workspace_bytes) == (None, 0)


def test_a_kernel_for_comparisons_without_windows_is_refused() -> None:
    config = {"three_stage": True, "speculative": False}
    with pytest.raises(ValueError, match=r"^attention: config has three_stage=True; that kernel is for comparisons"):
        explain(*inputs(), window_size=(3, 0), config=config, arch="sm_90a")


def test_bad_config_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^attention: config has the field 'tile'"):
        explain(*inputs(), config={"tile": 1}, arch="sm_90a")
