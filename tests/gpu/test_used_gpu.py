"""Batches of which each sequence uses a part, on the GPU: the table, capture, memory, debugging."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from gpu.tools import bits, host, no_allocation, poison, same_bits  # noqa: E402
from used import USED_CASES, UsedCase, hold_to_oracle  # noqa: E402

from cupyfa import attention, attention_varlen, debug, explain, workspace_size  # noqa: E402
from cupyfa.testing import guarded_empty, random_array  # noqa: E402

CASE = UsedCase("captured", 700, 900, (700, 300), (900, 411), heads_q=4, heads_kv=2, head_dim=128, causal=True)


def lengths(*values: int) -> Any:
    return cupy.asarray(np.int32(values))


@pytest.mark.parametrize("case", [*USED_CASES, CASE], ids=lambda case: case.id)
def test_case(case: UsedCase) -> None:
    arguments = case.call(cupy)
    before = {name: x.copy() for name, x in arguments.items() if isinstance(x, cupy.ndarray)}
    q, v = arguments["q"], arguments["v"]
    out = guarded_empty((*q.shape[:3], v.shape[3]), q.dtype, cupy)
    lse = guarded_empty((case.batch, case.heads_q, case.seqlen_q), np.float32, cupy)
    result = attention(**arguments, out=out.array, lse=lse.array, return_lse=True)
    assert result.out is out.array
    assert result.lse is lse.array
    cupy.cuda.get_current_stream().synchronize()
    out.check("out")
    lse.check("lse")
    hold_to_oracle(case, host(result.out), host(result.lse))
    for name, old in before.items():
        same = bits(arguments[name]) == bits(old)
        assert bool(same.all()), f"{name} has changed"


def test_a_captured_call_takes_the_lengths_of_each_replay() -> None:
    arguments = CASE.call(cupy)
    for name in "kv":
        arguments[name] = random_array(arguments[name].shape, arguments[name].dtype, 7, xp=cupy)
    used_q, used_k = arguments["seqused_q"], arguments["seqused_k"]
    out = cupy.empty_like(arguments["q"])
    workspace = cupy.empty(workspace_size(**arguments), np.uint8)
    attention(**arguments, out=out, workspace=workspace)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        attention(**arguments, out=out, workspace=workspace)
        graph = stream.end_capture()
    for rows, keys in (((700, 300), (900, 411)), ((1, 700), (900, 0)), ((0, 0), (5, 6)), ((700, 700), (900, 900))):
        used_q[...], used_k[...] = lengths(*rows), lengths(*keys)
        poison(out)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert same_bits(out, attention(**arguments))


def test_no_allocation_with_out_and_workspace() -> None:
    arguments = CASE.call(cupy)
    expected = attention(**arguments)
    size = workspace_size(**arguments)
    assert size == explain(**arguments).workspace_bytes
    workspace, out = cupy.empty(size, np.uint8), poison(cupy.empty_like(expected))
    with no_allocation():
        attention(**arguments, out=out, workspace=workspace)
    assert same_bits(out, expected)
    with pytest.raises(ValueError, match=rf"^attention: workspace has {size - 1} bytes .* needs {size}"):
        attention(**arguments, workspace=workspace[:-1])


def test_it_is_what_packed_sequences_give() -> None:
    arguments = CASE.call(cupy)
    used = {name: arguments[name] for name in ("seqused_q", "seqused_k")}
    packed = [arguments[name].reshape(-1, *arguments[name].shape[2:]) for name in "qkv"]
    offsets = lengths(0, 700, 1400), lengths(0, 900, 1800)
    expected = attention_varlen(*packed, *offsets, **used, causal=True, max_seqlen_q=700)
    assert same_bits(attention(**arguments).reshape(expected.shape), expected)


def test_debug_names_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "DEBUG", True)
    arguments = CASE.call(cupy)
    attention(**arguments)
    with pytest.raises(ValueError, match=r"^attention: seqused_k\[1\] is 901; it must be from 0 to 900, the rows of"):
        attention(**(arguments | {"seqused_k": lengths(900, 901)}))
