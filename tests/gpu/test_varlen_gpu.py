"""Packed sequences on the GPU: the table, plans, capture, and what lies around the sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from gpu.tools import bits, host, no_allocation, poison, same_bits  # noqa: E402
from packed import call, hold_to_oracle  # noqa: E402

import cupyfa  # noqa: E402
from cupyfa import attention_varlen, debug, plan_varlen, workspace_size  # noqa: E402
from cupyfa.oracles import packed  # noqa: E402
from cupyfa.testing import PACKED_CASES, PackedCase, guarded_empty, random_array  # noqa: E402

CASE = PackedCase("varlen", (300, 0, 41, 700, 5), heads_q=6, heads_kv=2, head_dim=128, causal=True, behind=7)


def offsets(*lengths: int) -> Any:
    return cupy.asarray(np.cumsum([0, *lengths]).astype(np.int32))


def inputs(total: int, heads: int = 4, head_dim: int = 128) -> tuple[Any, Any, Any]:
    shape = (total, heads, head_dim)
    return tuple(random_array(shape, CASE.make_inputs()[0].dtype, i, xp=cupy) for i in range(3))  # type: ignore[return-value]


def guarded(arguments: dict[str, Any]) -> tuple[Any, Any]:
    q, v = arguments["q"], arguments["v"]
    return guarded_empty((*q.shape[:2], v.shape[2]), q.dtype, cupy), guarded_empty(q.shape[1::-1], np.float32, cupy)


@pytest.mark.parametrize("case", [*PACKED_CASES, CASE], ids=lambda case: case.id)
def test_case(case: PackedCase) -> None:
    arguments = call(case, cupy)
    before = {name: x.copy() for name, x in arguments.items() if isinstance(x, cupy.ndarray)}
    out, lse = guarded(arguments)
    result = attention_varlen(**arguments, out=out.array, lse=lse.array, return_lse=True)
    assert result.out is out.array
    assert result.lse is lse.array
    cupy.cuda.get_current_stream().synchronize()
    out.check("out")
    lse.check("lse")
    hold_to_oracle(case, host(result.out), host(result.lse))
    for name, old in before.items():
        same = bits(arguments[name]) == bits(old)
        assert bool(same.all()), f"{name} has changed"


def test_a_plan_gives_the_same_and_serves_many_calls() -> None:
    arguments = call(CASE, cupy)
    expected = attention_varlen(**arguments)
    plan = plan_varlen(**arguments)
    assert len(plan.get()) == 3 + 1 + 6 + 1 + 1
    assert list(plan.get()["seqlen_k"][:1]) == [700]
    for _ in range(3):
        assert same_bits(attention_varlen(**arguments, plan=plan), expected)
    garbage = {name: cupy.full_like(arguments[name], 2**30) for name in CASE.lengths}  # the plan has the lengths
    assert same_bits(attention_varlen(**(arguments | garbage), plan=plan), expected)


def test_a_plan_of_another_call_is_refused() -> None:
    arguments = call(CASE, cupy)
    plan = plan_varlen(**arguments)
    with pytest.raises(
        ValueError, match=r"^attention: plan was made for tiles_grow True but this call has False; plan_v"
    ):
        attention_varlen(**(arguments | {"causal": False}), plan=plan)
    with pytest.raises(ValueError, match=r"^attention: plan was made for total_q \d+ but this call has 1000"):
        attention_varlen(**(arguments | {"q": arguments["q"][:1000]}), plan=plan)
    with pytest.raises(TypeError, match=r"^attention: plan is a int; it must come from cupyfa.plan_varlen"):
        attention_varlen(**arguments, plan=3)  # type: ignore[arg-type]


def test_no_allocation_with_out_and_workspace() -> None:
    arguments = call(CASE, cupy)
    expected = attention_varlen(**arguments)
    size = workspace_size(**arguments)
    workspace, out = cupy.empty(size, np.uint8), poison(cupy.empty_like(expected))
    with no_allocation():
        attention_varlen(**arguments, out=out, workspace=workspace)
        plan = plan_varlen(**arguments, workspace=workspace)
        attention_varlen(**arguments, out=out, plan=plan)
    assert same_bits(out, expected)
    with pytest.raises(ValueError, match=rf"^attention: workspace has {size - 1} bytes .* needs {size}"):
        attention_varlen(**arguments, workspace=workspace[:-1])
    with pytest.raises(TypeError, match=r"^attention: workspace must be a cupy.ndarray of uint8"):
        attention_varlen(**arguments, workspace=cupy.empty(size, np.int8))


def test_c62_a_captured_call_takes_the_lengths_of_each_replay() -> None:
    q, k, v = inputs(2000)
    cu, out = offsets(100, 1900), cupy.empty_like(q)
    workspace = cupy.empty(workspace_size(q, k, v, cu, cu, causal=True), np.uint8)
    attention_varlen(q, k, v, cu, cu, causal=True, out=out, workspace=workspace)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        attention_varlen(q, k, v, cu, cu, causal=True, out=out, workspace=workspace)
        graph = stream.end_capture()
    for ends in ([0, 100, 2000], [0, 500, 2000], [0, 0, 1500], [3, 1999, 2000], [0, 2000, 2000]):
        cu[...] = cupy.asarray(np.int32(ends))
        poison(out)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert same_bits(out, attention_varlen(q, k, v, cu, cu, causal=True))


def test_a_captured_plan_serves_captured_calls() -> None:
    q, k, v = inputs(900)
    cu, out, again = offsets(100, 800), cupy.empty_like(q), cupy.empty_like(q)
    workspace = cupy.empty(workspace_size(q, k, v, cu, cu), np.uint8)
    attention_varlen(q, k, v, cu, cu)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        plan = plan_varlen(q, k, v, cu, cu, workspace=workspace)
        attention_varlen(q, k, v, cu, cu, out=out, plan=plan)
        attention_varlen(q, k, v, cu, cu, out=again, plan=plan)
        graph = stream.end_capture()
    cu[...] = offsets(450, 450)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    expected = attention_varlen(q, k, v, cu, cu)
    assert same_bits(out, expected)
    assert same_bits(again, expected)


def test_c37_more_sequences_than_a_grid_has_rows() -> None:
    count, length = 80_000, 16
    q, k, v = (x.reshape(count * length, 1, 64) for x in inputs(count * length, 1, 64))
    cu = cupy.arange(0, (count + 1) * length, length, dtype=np.int32)
    out = attention_varlen(q, k, v, cu, cu)
    batched = [x.reshape(count, length, 1, 64) for x in (q, k, v)]
    assert same_bits(out.reshape(count, length, 1, 64), cupyfa.attention(*batched, config={"tile_m": 128}))


def test_c13_unequal_lengths_return() -> None:
    q, k, v = inputs(3302)
    ends = np.int32([0, 1743, 3302])
    out = attention_varlen(q, k, v, cupy.asarray(ends), cupy.asarray(ends), causal=True)
    for begin, end in ((0, 1743), (1743, 3302)):
        alone = cupyfa.attention(*(x[None, begin:end] for x in (q, k, v)), causal=True)
        np.testing.assert_allclose(
            host(out[begin:end]).astype(np.float32), host(alone[0]).astype(np.float32), atol=2**-7
        )


@pytest.mark.parametrize("ends", [[0, 150, 140], [-1, 100, 200], [0, 100, 301], [2**31 - 1, -(2**31), 7]], ids=str)
def test_broken_offsets_do_no_harm(ends: list[int]) -> None:
    q, k, v = inputs(300)
    cu, good = cupy.asarray(np.array(ends, np.int32)), offsets(100, 200)
    for lengths in ((cu, good), (good, cu)):
        arguments = {"q": q, "k": k, "v": v}
        out, lse = guarded(arguments)
        attention_varlen(q, k, v, *lengths, out=out.array, lse=lse.array)
        cupy.cuda.Device().synchronize()
        out.check("out")
        lse.check("lse")
        assert not host(out.array).any()
        assert np.isneginf(host(lse.array)).all()
    assert np.isfinite(host(attention_varlen(q, k, v, good, good)).astype(np.float32)).all()  # the GPU is usable


@pytest.mark.parametrize("keys", [64, 63], ids=["copied", "gathered"])
def test_a_bias_is_0_behind_its_end(keys: int) -> None:
    q, k, v = inputs(300)
    cu = offsets(100, 200)
    whole = random_array((2, 4, 200, 200), np.float32, 3, xp=cupy)
    whole[:, :, 60:] = whole[..., keys:] = 0
    guard = guarded_empty((2, 4, 60, keys), np.float32, cupy)
    guard.array[...] = whole[:, :, :60, :keys]
    out = attention_varlen(q, k, v, cu, cu, bias=guard.array, causal=True)
    expected = attention_varlen(q, k, v, cu, cu, bias=whole, causal=True)
    cupy.cuda.Device().synchronize()
    guard.check("bias")
    np.testing.assert_allclose(host(out).astype(np.float32), host(expected).astype(np.float32), atol=2**-6)


def test_debug_names_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "DEBUG", True)
    q, k, v = inputs(300)
    good, bad = offsets(100, 200), cupy.asarray(np.int32([0, 301, 300]))
    attention_varlen(q, k, v, good, good)
    for function in (attention_varlen, plan_varlen):
        with pytest.raises(
            ValueError, match=r"^attention: cu_seqlens_k\[2\] is 300, less than cu_seqlens_k\[1\], 301$"
        ):
            function(q, k, v, good, bad)
    with pytest.raises(ValueError, match=r"^attention: seqused_q\[1\] is 201; it must be from 0 to 200"):
        attention_varlen(q, k, v, good, good, seqused_q=cupy.asarray(np.int32([1, 201])))
    with pytest.raises(ValueError, match=r"^attention: bias has 150 rows but sequence 1 has 200; it must have 1, "):
        attention_varlen(q, k, v, good, good, bias=cupy.zeros((150, 200), np.float32))


def test_c63_streams_do_not_share() -> None:
    q, k, v = inputs(1200)
    lengths = offsets(1000, 200), offsets(1, 1199)
    expected = [attention_varlen(q, k, v, cu, cu, causal=True) for cu in lengths]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in lengths]
    cupy.cuda.Device().synchronize()
    results: list[list[Any]] = [[], []]
    for _ in range(100):
        for stream, cu, outs in zip(streams, lengths, results, strict=True):
            with stream:
                outs.append(attention_varlen(q, k, v, cu, cu, causal=True))
    cupy.cuda.Device().synchronize()
    for outs, once in zip(results, expected, strict=True):
        assert all(same_bits(out, once) for out in outs)


def test_a_sequence_alone_has_the_same_bits() -> None:
    q, k, v = inputs(1500)
    cu = offsets(700, 300, 500)
    together = attention_varlen(q, k, v, cu, cu, causal=True, max_seqlen_q=2000)
    begin = 0
    for n in (700, 300, 500):
        one = offsets(n)
        rows = slice(begin, begin + n)
        alone = attention_varlen(q[rows], k[rows], v[rows], one, one, causal=True, max_seqlen_q=2000)
        assert same_bits(alone, together[rows])
        begin += n


def test_the_reference_of_many_random_lengths() -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        count = int(rng.integers(1, 40))
        lengths_q, lengths_k = (tuple(int(n) for n in rng.integers(0, 120, count)) for _ in range(2))
        used = tuple(int(rng.integers(0, n + 1)) for n in lengths_k)
        case = PackedCase(f"random {seed}", lengths_q, lengths_k, 4, 2, 64, causal=bool(seed % 2), used_k=used)
        out, lse = attention_varlen(**call(case, cupy), return_lse=True)
        hold_to_oracle(case, host(out), host(lse))
    assert len(list(packed.sequences(**case.lengths))) == count
