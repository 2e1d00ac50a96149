"""What users of attention libraries reported, by its number in docs/user_cases.md: sizes and calls that need a GPU.

Smaller ones are in tests/emulator/test_user_cases.py and run here too.
"""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from gpu.tools import (  # noqa: E402
    attention_guarded,
    bits,
    check,
    host,
    is_nan,
    poison,
    require_memory,
    same_bits,
    take,
)

import cupyfa  # noqa: E402
from cupyfa.testing import random_array  # noqa: E402

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
Shape = tuple[int, int, int, int]


def make(shape: tuple[int, ...], seed: int, dtype: Any = BF16, amplitude: float = 1.0) -> Any:
    return random_array(shape, dtype, seed, xp=cupy, amplitude=amplitude)


def inputs(q: Shape, k: Shape, dtype: Any = BF16, seed: int = 0, head_dim_v: int | None = None) -> tuple[Any, Any, Any]:
    v = (*k[:3], head_dim_v or k[3])
    return make(q, seed, dtype), make(k, seed + 1, dtype), make(v, seed + 2, dtype)


# --- Empty, fully masked, ragged ---


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((2, 0, 16, 128), (2, 4096, 16, 128)),
        ((0, 64, 16, 128), (0, 4096, 16, 128)),
        ((0, 3952, 10, 64), (0, 16, 10, 64)),
    ],
)
@DTYPES
def test_c03_c10_no_queries_or_no_batch(q: Shape, k: Shape, dtype: Any) -> None:
    out, lse = cupyfa.attention(*inputs(q, k, dtype), causal=True, return_lse=True)
    assert (out.shape, out.dtype) == (q, dtype)
    assert (lse.shape, lse.dtype) == ((q[0], q[2], q[1]), np.float32)


@DTYPES
def test_c04_no_keys(dtype: Any) -> None:
    q, k, v = inputs((3, 70, 4, 128), (3, 0, 2, 128), dtype)
    for options in ({}, {"causal": True}, {"window_size": (5, 5)}):
        out, lse = attention_guarded(q, k, v, **options)
        assert not bool(bits(out).any())
        assert bool((lse == -np.inf).all())
        sink = cupy.asarray([0.5, -np.inf, 3, -2], np.float32)
        out, lse = attention_guarded(q, k, v, sink=sink, **options)
        assert not bool(bits(out).any())
        assert bool((lse == sink[None, :, None]).all())


@DTYPES
def test_c13_unequal_lengths_causal(dtype: Any) -> None:
    # The two sequences of the report, and each against the other: tiles of every number of blocks.
    for sq, sk in itertools.product((1743, 1559), repeat=2):
        q, k, v = inputs((1, sq, 4, 128), (1, sk, 2, 128), dtype)
        out, lse = attention_guarded(q, k, v, causal=True)
        check(q, k, v, out, lse, context=(sq, sk), causal=True)


# --- NaN and garbage, numerics ---


@DTYPES
def test_c19_bits_do_not_depend_on_what_ran_before(dtype: Any) -> None:
    q, k, v = inputs((7, 100, 64, 128), (7, 160, 16, 128), dtype)
    first = attention_guarded(q, k, v, causal=True)
    nothing = poison(cupy.empty_like(q)), poison(cupy.empty_like(k)), poison(cupy.empty_like(v))
    for _ in range(3):  # leaves NaN in every shared memory and register
        out, _ = attention_guarded(*nothing)
        assert bool(is_nan(out).all())
    again = attention_guarded(q, k, v, causal=True)
    assert same_bits(again.out, first.out)
    assert same_bits(again.lse, first.lse)
    check(q[:1], k[:1], v[:1], again.out[:1], again.lse[:1], context=dtype, causal=True)


@pytest.mark.parametrize("seqlen_k", [512, 1024])
def test_c28_the_last_row_alone_and_among_others(seqlen_k: int) -> None:
    q, k, v = inputs((1, 300, 8, 192), (1, seqlen_k, 2, 192), head_dim_v=128)
    among = attention_guarded(q, k, v, causal=True)
    alone = attention_guarded(q[:, -1:], k, v, causal=True)
    for out, lse in (alone, (among.out[:, -1:], among.lse[..., -1:])):
        check(q[:, -1:], k, v, out, lse, context=seqlen_k, causal=True)


@DTYPES
@pytest.mark.parametrize("slope", [-1.0, 1.0])
def test_c30_scores_that_change_by_1_from_key_to_key(slope: float, dtype: Any) -> None:
    q, k, v = inputs((2, 1025, 3, 64), (2, 1025, 3, 64), dtype)
    slopes = cupy.full(3, slope, np.float32)
    out, lse = attention_guarded(q, k, v, causal=True, alibi_slopes=slopes)
    assert bool(cupy.isfinite(lse).all())
    check(q, k, v, out, lse, context=slope, causal=True, alibi_slopes=slopes)


# --- Windows ---


def test_c31_long_windows_are_causal() -> None:
    q, k, v = inputs((1, 16384, 8, 128), (1, 16384, 8, 128), F16)
    causal = attention_guarded(q, k, v, causal=True)
    for left in (-1, 16384, 16383):
        window = attention_guarded(q, k, v, window_size=(left, 0))
        assert same_bits(window.out, causal.out)
        assert same_bits(window.lse, causal.lse)
    for row in (0, 8191, 16383):
        seen = slice(0, row + 1)
        at = slice(row, row + 1)
        check(q[:, at], k[:, seen], v[:, seen], causal.out[:, at], causal.lse[..., at], context=row)


# --- Sizes ---


def test_c35_many_short_sequences() -> None:
    q, k, v = inputs((8300, 1, 16, 128), (8300, 1, 16, 128))
    out, lse = attention_guarded(q, k, v)
    assert same_bits(out, v)  # of one key
    rows = np.array([0, 4095, 4096, 8191, 8192, 8299])
    check(*(take(x, rows, 0) for x in (q, k, v, out, lse)), context="8,300 batches")


def test_c36_four_million_keys() -> None:
    """Every row and column, by a closed form: scores are 0 but those of a few keys, and only these have values."""
    require_memory(6)
    seqlen_q, seqlen_k, d = 2048, 2**22, 128
    diagonal = seqlen_k - seqlen_q
    # Around what a counter of 2^k keys or elements could miss, and in the last blocks, where rows end.
    probes = np.unique([n + delta for n in (128, 2**16, 2**21, 2**22 - 2**11, 2**22 - 129) for delta in (-1, 0, 1)])
    probes = np.concatenate([[0, 1], probes, [seqlen_k - 2, seqlen_k - 1]])
    weights = 2 ** (np.arange(len(probes)) % 5)  # of a key for the rows with q = 1: exact in every format
    q, k, v = (cupy.zeros((1, n, 1, d), BF16) for n in (seqlen_q, seqlen_k, seqlen_k))
    on = (np.arange(seqlen_q) % 3 > 0).astype(BF16)
    Q, K, V = np.zeros((seqlen_q, d), BF16), np.zeros((len(probes), d), BF16), np.zeros((len(probes), d), BF16)
    Q[:, 7] = on
    K[:, 7] = np.log2(weights)
    V[np.arange(len(probes)), 5 * np.arange(len(probes))] = 2.0**20
    bits(q)[0, :, 0] = cupy.asarray(Q.view(np.uint16))
    for array, values in ((k, K), (v, V)):
        bits(array)[0, cupy.asarray(probes), 0] = cupy.asarray(values.view(np.uint16))
    out, lse = attention_guarded(q, k, v, causal=True, softmax_scale=math.log(2))

    seen = probes[None] <= np.arange(seqlen_q)[:, None] + diagonal
    weight = np.where(on[:, None] > 0, weights[None], 1) * seen
    total = np.arange(seqlen_q) + diagonal + 1 + (weight - seen).sum(axis=1)
    expected = np.zeros((seqlen_q, d))
    expected[:, 5 * np.arange(len(probes))] = 2.0**20 * weight / total[:, None]
    found = host(out)[0, :, 0].astype(np.float64)
    np.testing.assert_array_equal(found == 0, expected == 0)
    np.testing.assert_allclose(found, expected, rtol=2**-8)
    np.testing.assert_allclose(host(lse)[0, 0], np.log(total), rtol=0, atol=1e-6 * math.log(seqlen_k))


def test_c40_batches_beside_each_other_in_more_than_2_to_the_31_elements() -> None:
    """K is stored (seqlen, batch, head_dim): its rows are a batch apart."""
    require_memory(10)
    seqlen, batch, d = 2**17 + 300, 128, 128
    stored = make((seqlen, batch, d), 1)
    assert stored.size > 2**31
    k = stored.transpose(1, 0, 2)[:, :, None]
    q = make((batch, 3, 1, d), 2)
    out, lse = poison(cupy.empty_like(q)), poison(cupy.empty((batch, 1, 3), np.float32))
    cupyfa.attention(q, k, k, causal=True, out=out, lse=lse)
    assert not bool(is_nan(out).any())
    for b in (0, 1, 126, 127):
        one = slice(b, b + 1)
        check(q[one], k[one], k[one], out[one], lse[one], context=f"batch {b}", causal=True)


# --- Strides, head dims ---


def unaligned(kind: str, shape: Shape, seed: int) -> Any:
    """An array that begins, or whose rows begin, at any multiple of 2 bytes."""
    values = make(shape, seed, F16)
    if kind == "columns":
        view = cupy.full((*shape[:3], shape[3] + 1), np.nan, F16)[..., :-1]
    else:
        view = cupy.full(values.size + 1, np.nan, F16)[1:].reshape(shape)
    view[...] = values
    return view


@pytest.mark.parametrize("kind", ["columns", "offset"])
@pytest.mark.parametrize("names", ["q", "kv", "qkv"])
def test_c42_unaligned_arrays(names: str, kind: str) -> None:
    q, k, v = (
        unaligned(kind, (1, 65, 4, 64), seed) if name in names else make((1, 65, 4, 64), seed, F16)
        for seed, name in enumerate("qkv")
    )
    out, lse = attention_guarded(q, k, v, causal=True)
    check(q, k, v, out, lse, context=(names, kind), causal=True)


@pytest.mark.parametrize(("name", "axis"), list(itertools.product("qkv", range(4))))
def test_c45_negative_strides(name: str, axis: int) -> None:
    arrays = dict(zip("qkv", inputs((2, 70, 4, 64), (2, 70, 4, 64), F16), strict=True))
    arrays[name] = cupy.flip(arrays[name], axis)
    assert arrays[name].strides[axis] < 0
    out, lse = attention_guarded(**arrays, causal=True)
    check(**arrays, out=out, lse=lse, context=(name, axis), causal=True)


@DTYPES
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_c41_transposed_buffers(d: int, dtype: Any) -> None:
    q, k, v = (x.swapaxes(1, 2) for x in inputs((2, 4, 128, d), (2, 4, 128, d), dtype))
    dense = attention_guarded(*(cupy.ascontiguousarray(bits(x)).view(dtype) for x in (q, k, v)), causal=True)
    out = poison(cupy.empty((2, 4, 128, d), dtype)).swapaxes(1, 2)
    result = cupyfa.attention(q, k, v, causal=True, out=out, return_lse=True)
    assert same_bits(out, dense.out)
    assert same_bits(result.lse, dense.lse)
    check(q, k, v, out, result.lse, context=d, causal=True)


@pytest.mark.parametrize("d", [8, 16, 32])
@pytest.mark.parametrize("seqlen", [128, 256, 2048])
@DTYPES
def test_c46_small_head_dims(d: int, seqlen: int, dtype: Any) -> None:
    q, k, v = inputs((1, seqlen, 2, d), (1, seqlen, 1, d), dtype)
    out, lse = attention_guarded(q, k, v, causal=True)
    check(q, k, v, out, lse, context=(d, seqlen), causal=True)


@pytest.mark.parametrize("heads", [(96, 8), (14, 2), (9, 3), (6, 1), (21, 7)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 113])
@DTYPES
def test_c48_ratios_of_heads(heads: tuple[int, int], seqlen_q: int, dtype: Any) -> None:
    heads_q, heads_kv = heads
    q, k, v = inputs((2, seqlen_q, heads_q, 128), (2, 203, heads_kv, 128), dtype)
    out, lse = attention_guarded(q, k, v, causal=True)
    check(q, k, v, out, lse, context=heads, causal=True)


# --- Hangs, races, determinism ---


def test_c54_runs_of_tiles_without_keys() -> None:
    q, k, v = inputs((1, 8192, 16, 128), (1, 128, 1, 128))
    for window in ((64, 0), (64, 64)):
        out, lse = attention_guarded(q, k, v, window_size=window)
        begin = 8192 - 128 - window[1]  # of the rows that see a key
        assert not bool(bits(out[:, :begin]).any())
        assert bool((lse[..., :begin] == -np.inf).all())
        check(q[:, 7900:, :2], k, v, out[:, 7900:, :2], lse[:, :2, 7900:], context=window, window_size=window)


def test_c57_repeats_beside_other_work_are_bit_equal() -> None:
    q, k, v = inputs((300, 2048, 1, 128), (300, 128, 1, 128))
    expected = attention_guarded(q, k, v)
    out = cupy.empty_like(q)
    source, target = (cupy.empty(2**26, np.uint32) for _ in range(2))
    source.fill(1)
    traffic = cupy.cuda.Stream(non_blocking=True)
    different = cupy.zeros((), np.int64)
    cupy.cuda.Device().synchronize()
    for _ in range(200):
        with traffic:
            target[...] = source
        poison(out)
        cupyfa.attention(q, k, v, out=out)
        different += (bits(out) != bits(expected.out)).sum()
    assert int(different) == 0
    traffic.synchronize()
    last = slice(-1, None)
    check(q[last], k[last], v[last], expected.out[last], expected.lse[last], context="last batch")


# --- Streams, graphs, devices ---


def test_c63_two_streams_interleaved() -> None:
    problems = [inputs((2, 700, 12, 128), (2, 700, 12, 128), seed=10 * i) for i in range(2)]
    expected = [attention_guarded(*problem, causal=True) for problem in problems]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in problems]
    outs = [[poison(cupy.empty_like(q)) for _ in range(100)] for q, _, _ in problems]
    lses = [[poison(cupy.empty_like(e.lse)) for _ in range(100)] for e in expected]
    cupy.cuda.Device().synchronize()
    for round_, (stream, problem, out, lse) in itertools.product(
        range(100), list(zip(streams, problems, outs, lses, strict=True))
    ):
        with stream:
            cupyfa.attention(*problem, causal=True, out=out[round_], lse=lse[round_])
    cupy.cuda.Device().synchronize()
    for out, lse, one in zip(outs, lses, expected, strict=True):
        assert all(same_bits(x, one.out) for x in out)
        assert all(same_bits(x, one.lse) for x in lse)


def need_two_devices() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


def test_c60_arrays_of_the_second_device() -> None:
    need_two_devices()
    with cupy.cuda.Device(1):
        q, k, v = inputs((2, 300, 4, 128), (2, 450, 2, 128))
    with cupy.cuda.Device(0), pytest.raises(ValueError, match=r"q is on CUDA device 1 but the current device is 0"):
        cupyfa.attention(q, k, v)
    with cupy.cuda.Device(1):
        out, lse = attention_guarded(q, k, v, causal=True)
        check(q, k, v, out, lse, context="device 1", causal=True)


def test_c61_one_kernel_on_two_devices_by_four_threads() -> None:
    need_two_devices()
    config = {"tile_n": 64, "stages": 3}  # a kernel that no other test loads
    threads_of_device, errors, results = 2, [], []

    def work(device: int, seed: int) -> None:
        try:
            with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
                q, k, v = inputs((2, 300, 4, 128), (2, 450, 2, 128), seed=seed)
                for _ in range(20):
                    out, lse = cupyfa.attention(q, k, v, config=config, return_lse=True)
                stream.synchronize()
                results.append((device, q, k, v, out, lse))
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(device, 10 * device + i))
        for device, i in itertools.product((0, 1), range(threads_of_device))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(results) == len(threads)
    for device, q, k, v, out, lse in results:
        with cupy.cuda.Device(device):
            check(q, k, v, out, lse, context=f"device {device}")
