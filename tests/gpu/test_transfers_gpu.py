"""A call copies nothing to the host, and waits for nothing.

Shown three times over: by hooks of what CuPy offers for it; by a capture in global mode, where whatever synchronises or
allocates fails, and every copy is a node of the graph; and by calls that come back while their stream is busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from gpu.tools import is_nan, poison, same_bits, spin  # noqa: E402

import cupyfa  # noqa: E402
from cupyfa._launch import PARAMETER_SIZES  # noqa: E402
from cupyfa.testing import random_array  # noqa: E402

BF16 = np.dtype(ml_dtypes.bfloat16)
KERNEL, MEMCPY = 0, 1  # of CUgraphNodeType

#: Options of a call, of which "heads" stands for an array with a number for each head.
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 20)},
    "softcap": {"softcap": 30.0},
    "sink": {"sink": "heads"},
    "alibi": {"alibi_slopes": "heads"},
    "all": {"causal": True, "window_size": (100, 0), "softcap": 30.0, "sink": "heads", "alibi_slopes": "heads"},
    "dealt out": {"config": {"scheduler": "persistent"}},
    "one tile": {"config": {"scheduler": "one_tile"}},
}
EVERY_CALL = pytest.mark.parametrize("name", CALLS)


def arguments(name: str, seqlen_q: int = 300) -> dict[str, Any]:
    """A call, without its outputs."""
    q, k, v = (
        random_array((2, seqlen, heads, 128), BF16, seed, xp=cupy)
        for seed, (seqlen, heads) in enumerate([(seqlen_q, 4), (450, 2), (450, 2)])
    )
    of_heads = cupy.linspace(-1, 1, 4, dtype=np.float32)
    return {"q": q, "k": k, "v": v} | {n: of_heads if x == "heads" else x for n, x in CALLS[name].items()}


def outputs(seqlen_q: int = 300) -> dict[str, Any]:
    return {
        "out": poison(cupy.empty((2, seqlen_q, 4, 128), BF16)),
        "lse": poison(cupy.empty((2, 4, seqlen_q), np.float32)),
    }


# --- Hooks ---


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[str, int]]]:
    """What is copied to the host, with its bytes, and what waits."""
    seen: list[tuple[str, int]] = []

    def spy(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, args[0].nbytes if owner is cupy.ndarray else 0))
            return original(*args, **kwargs)

        patch.setattr(owner, name, call)

    with pytest.MonkeyPatch.context() as patch:
        spy(cupy.ndarray, "get")
        for owner in (cupy.cuda.Stream, cupy.cuda.ExternalStream, cupy.cuda.Event):
            spy(owner, "synchronize")
        for name in dir(cupy.cuda.runtime):
            if re.fullmatch(r"memcpy(?!D|H|Kind)\w*|(stream|device|event)Synchronize|malloc\w*|free\w*", name):
                spy(cupy.cuda.runtime, name)
        yield seen


def test_the_hooks_see_copies_and_waits() -> None:
    x = cupy.zeros(5, np.float32)
    with watched() as seen:
        x.get()
        cupy.asnumpy(x)
        cupy.cuda.get_current_stream().synchronize()
        cupy.cuda.runtime.deviceSynchronize()
    get = [("get", 20), ("synchronize", 0)]
    assert seen == [*get, *get, ("synchronize", 0), ("deviceSynchronize", 0)]


@EVERY_CALL
def test_a_call_copies_nothing_and_waits_for_nothing(name: str) -> None:
    call = arguments(name)
    cupyfa.attention(**call)
    with watched() as seen:
        cupyfa.attention(**call)
        cupyfa.attention(**call, return_lse=True)
        cupyfa.attention(**call, **outputs())
    assert seen == []


def test_the_first_call_of_a_kernel_reads_its_sizes_and_nothing_else() -> None:
    call = arguments("plain") | {"config": {"tile_n": 80, "stages": 3, "q_stages": 1}}  # no other test loads it
    cupyfa.attention(**arguments("plain"))  # makes the counters of the device, once
    with watched() as seen:
        cupyfa.attention(**call)
    assert seen == [("get", PARAMETER_SIZES["KernelTraits"]), ("synchronize", 0)]


# --- Capture ---


@contextlib.contextmanager
def capture(stream: Any) -> Iterator[list[int]]:
    """A capture in which nothing unsafe may be called by any thread; afterwards, the kinds of the graph's nodes."""
    kinds: list[int] = []
    with stream:
        stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeGlobal)
        try:
            yield kinds
        finally:
            graph = stream.end_capture()
        kinds += kinds_of_nodes(graph.graph)


def kinds_of_nodes(graph: int) -> list[int]:
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t()
    assert driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    if not nodes:
        return []  # the driver takes no empty array
    assert driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    return kinds


def test_a_capture_sees_copies_and_waits() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    x, y = cupy.zeros(8, np.float32), cupy.zeros(8, np.float32)
    cupy.cuda.Device().synchronize()
    with capture(stream) as kinds:
        y.data.copy_from_device_async(x.data, x.nbytes, stream)
    assert kinds == [MEMCPY]
    for unsafe in (cupy.cuda.runtime.deviceSynchronize, stream.synchronize, x.get):
        with pytest.raises(RuntimeError, match=r"(?i)captur"), capture(stream):
            unsafe()
    with capture(stream) as kinds:
        pass
    assert kinds == []


@EVERY_CALL
def test_a_call_is_one_node_of_a_graph(name: str) -> None:
    call, results = arguments(name), outputs()
    expected = cupyfa.attention(**call, return_lse=True)
    cupy.cuda.Device().synchronize()
    with capture(cupy.cuda.Stream(non_blocking=True)) as kinds:
        cupyfa.attention(**call, **results)
    assert kinds == [KERNEL]
    assert bool(is_nan(results["out"]).all())  # captured, not run
    cupyfa.attention(**call, **results)
    assert same_bits(results["out"], expected.out)


def test_a_call_without_keys_copies_nothing() -> None:
    call = arguments("sink")
    call |= {name: call[name][:, :0] for name in "kv"}
    results = outputs()
    cupyfa.attention(**call, **results)
    cupy.cuda.Device().synchronize()
    with capture(cupy.cuda.Stream(non_blocking=True)) as kinds:
        cupyfa.attention(**call, **results)
    assert MEMCPY not in kinds


# --- A busy stream ---


@EVERY_CALL
def test_a_call_comes_back_while_its_stream_is_busy(name: str) -> None:
    seqlens = 300, 311 + list(CALLS).index(name)  # the second one is new to the process: prepared now, not compiled
    calls = [arguments(name, seqlen) for seqlen in seqlens]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        spin(1)
        cupyfa.attention(**calls[0])
        cupy.empty(2**24, np.uint8)  # the pool has memory for the results now, and need not ask the driver for it
        stream.synchronize()
        spin()
        results = [cupyfa.attention(**call, return_lse=True) for call in calls]
        assert not stream.done
        stream.synchronize()
    for call, result in zip(calls, results, strict=True):
        assert same_bits(result.out, cupyfa.attention(**call))
