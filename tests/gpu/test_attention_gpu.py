"""The kernels against the oracles, in every shape and every place that an array can have."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from bad_calls import BAD_CALLS, Where  # noqa: E402
from gpu.tools import (  # noqa: E402
    assign,
    attention_guarded,
    bits,
    check,
    host,
    is_nan,
    no_allocation,
    poison,
    require_memory,
    same_bits,
    spin,
    take,
)
from hard_scores import KINDS, harden  # noqa: E402
from odd_views import ODD_VIEWS, OddView, written  # noqa: E402

import cupyfa  # noqa: E402
from cupyfa._launch import TileCounters  # noqa: E402
from cupyfa.dispatch import prepare  # noqa: E402
from cupyfa.operand import Arrays  # noqa: E402
from cupyfa.options import check_options  # noqa: E402
from cupyfa.oracles import dense  # noqa: E402
from cupyfa.plan import plan_forward  # noqa: E402
from cupyfa.select import Device  # noqa: E402
from cupyfa.spec import Bias  # noqa: E402
from cupyfa.testing import CASES, Case, as_bshd, guarded_empty, random_array  # noqa: E402

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)

# Several tiles for each CTA, of different lengths, and three query heads to a key/value head.
BUSY = Case("busy", 3, 640, 640, 36, 12, 128, "bfloat16", True)


def make(shape: tuple[int, ...], seed: int, dtype: Any = BF16) -> Any:
    return random_array(shape, dtype, seed, xp=cupy)


def inputs(
    batch: int = 2,
    sq: int = 300,
    sk: int = 450,
    hq: int = 4,
    hkv: int = 2,
    d: int = 128,
    dtype: Any = BF16,
    seed: int = 0,
) -> tuple[Any, Any, Any]:
    kv = (batch, sk, hkv, d)
    return make((batch, sq, hq, d), seed, dtype), make(kv, seed + 1, dtype), make(kv, seed + 2, dtype)


# --- The table ---


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case) -> None:
    q, k, v = case.make_inputs(xp=cupy)
    out, lse = attention_guarded(q, k, v, layout=case.layout, **case.options)
    check(q, k, v, out, lse, context=case, layout=case.layout, **case.options)


def test_the_table_is_large() -> None:
    assert len(CASES) >= 150


def test_inputs_are_those_of_numpy() -> None:
    case = Case("test", 2, 33, 50, 4, 2, 72, "float16")
    for ours, theirs in zip(case.make_inputs(xp=cupy), case.make_inputs(), strict=True):
        assert np.array_equal(bits(host(ours)), bits(theirs))


# --- Determinism ---


def test_a_thousand_repeats_are_bit_equal() -> None:
    q, k, v = BUSY.make_inputs(xp=cupy)
    first, first_lse = attention_guarded(q, k, v, causal=True)
    out, lse = cupy.empty_like(first), cupy.empty_like(first_lse)
    different = cupy.zeros((), np.int64)
    for _ in range(1000):
        poison(out)
        poison(lse)
        cupyfa.attention(q, k, v, causal=True, out=out, lse=lse)
        different += (bits(out) != bits(first)).sum() + (bits(lse) != bits(first_lse)).sum()
    assert int(different) == 0
    check(q[-1:, :, -3:], k[-1:, :, -1:], v[-1:, :, -1:], out[-1:, :, -3:], lse[-1:, -3:], context=BUSY, causal=True)


def test_a_batch_at_a_time_is_the_same() -> None:
    # More addresses than the cache of tensor maps holds.
    q, k, v = inputs(batch=300, sq=70, sk=90, d=64)
    together = cupyfa.attention(q, k, v, causal=True)
    alone = poison(cupy.empty_like(q))
    for _, b in itertools.product(range(2), range(300)):
        cupyfa.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True, out=alone[b : b + 1])
    assert same_bits(alone, together)


# --- Memory layout ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 72, 128, 256])
def test_c43_sliced_views(d: int, causal: bool) -> None:
    # NaN all around: whatever is read or written beside the slices shows.
    def sliced(shape: tuple[int, ...], seed: int | None) -> tuple[Any, Any]:
        b, s, h, _ = shape
        buffer = cupy.full((b + 1, 2 * s + 3, 3 * h, d + 24), np.nan, F16)
        view = buffer[1:, 3::2, ::3, 8 : d + 8]
        assert view.shape == shape
        if seed is not None:
            view[...] = make(shape, seed, F16)
        return buffer, view

    shapes = (2, 133, 6, d), (2, 211, 2, d)
    (_, q), (_, k), (_, v) = sliced(shapes[0], 1), sliced(shapes[1], 2), sliced(shapes[1], 3)
    buffer, out = sliced(shapes[0], None)
    lse_buffer = cupy.full((133, 2, 12), np.nan, np.float32)
    lse = lse_buffer[:, :, ::2].transpose(1, 2, 0)
    result = cupyfa.attention(q, k, v, causal=causal, out=out, lse=lse, return_lse=True)
    assert result.out is out
    assert result.lse is lse
    check(q, k, v, out, lse, context=(d, causal), causal=causal)
    # Only the slices were written.
    assert int(cupy.isnan(buffer).sum()) == buffer.size - out.size
    assert int(cupy.isnan(lse_buffer).sum()) == lse_buffer.size - lse.size


def test_values_behind_the_sequence_do_not_matter() -> None:
    q, k, v = inputs(sk=450)
    poison(k[:, 333:])
    bits(v)[:, 333:] = 0x7F80  # infinity
    out, lse = attention_guarded(q, k[:, :333], v[:, :333])
    check(q, k[:, :333], v[:, :333], out, lse, context="NaN behind the last key")


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_interleaved_buffer(layout: str) -> None:
    buffer = make((2, 200, 4, 3, 64), 5)
    q, k, v, out = (as_bshd(buffer[:, :, i], layout) for i in range(4))
    poison(out)
    before = buffer[:, :, :3].copy()
    assert cupyfa.attention(q, k, v, out=out, layout=layout) is out
    assert same_bits(buffer[:, :, :3], before)
    check(q, k, v, out, None, context=layout, layout=layout)


@pytest.mark.parametrize("d", [64, 128, 200])
def test_bhsd_is_bit_equal_to_bshd(d: int) -> None:
    q, k, v = inputs(d=d)
    turned = [cupy.ascontiguousarray(as_bshd(x, "BHSD")) for x in (q, k, v)]
    one = attention_guarded(q, k, v, causal=True)
    other = attention_guarded(*turned, causal=True, layout="BHSD")
    assert same_bits(as_bshd(other.out, "BHSD"), one.out)
    assert same_bits(other.lse, one.lse)


def test_bhsd_allocates_in_the_callers_layout() -> None:
    q, k, v = (cupy.ascontiguousarray(as_bshd(x, "BHSD")) for x in inputs())
    out = cupyfa.attention(q, k, v, layout="BHSD")
    assert out.shape == q.shape
    assert out.flags.c_contiguous


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_broadcast_keys_and_values(axes: tuple[int, ...]) -> None:
    q, k, v = inputs(batch=3, hq=4, hkv=4)
    first = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))
    K, V = (cupy.broadcast_to(x[first], x.shape) for x in (k, v))
    assert all(K.strides[axis] == 0 for axis in axes)
    out, lse = attention_guarded(q, K, V, causal=True)
    check(q, K, V, out, lse, context=axes, causal=True)


def test_broadcast_queries() -> None:
    q, k, v = inputs(batch=3)
    Q = cupy.broadcast_to(q[:1, :, :1], q.shape)
    out, lse = attention_guarded(Q, k, v)
    check(Q, k, v, out, lse, context="q with strides 0")


@pytest.mark.parametrize("stride", [0, 2, 6, -32, 2**45])
def test_stride_of_an_axis_with_one_index_is_free(stride: int) -> None:
    q, k, v = inputs(batch=1, sq=1, sk=77, hq=1, hkv=1)

    def odd(x: Any) -> Any:
        strides = [stride if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)]
        return cupy.lib.stride_tricks.as_strided(x, shape=x.shape, strides=strides)

    out = odd(poison(cupy.empty_like(q)))
    assert cupyfa.attention(odd(q), odd(k), odd(v), out=out) is out
    check(q, k, v, out, None, context=stride)


# --- Arrays that TMA does not take ---


def odd_call(odd: OddView, dtype: Any = BF16, seed: int = 0) -> tuple[Any, Any, Any]:
    """C41, C42, C43 and C45: q, k, v and out, and the bits around out."""
    views = tuple(odd.holding(cupy, x) for x in inputs(dtype=dtype, seed=seed))
    around, out = odd.poisoned(cupy, (2, 300, 4, 128), dtype)
    return views, around, out


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_arrays_anywhere_give_what_contiguous_ones_give(odd: OddView, dtype: Any) -> None:
    expected = attention_guarded(*inputs(dtype=dtype), causal=True)
    views, around, out = odd_call(odd, dtype)
    before = [bits(x).copy() for x in views]
    assert cupyfa.explain(*views, causal=True).copied == ("q", "k", "v")
    result = cupyfa.attention(*views, causal=True, out=out, return_lse=True)
    assert result.out is out
    assert same_bits(out, expected.out)
    assert same_bits(result.lse, expected.lse)
    assert written(around) == out.size
    assert all(bool((bits(x) == old).all()) for x, old in zip(views, before, strict=True))
    assert same_bits(cupyfa.attention(*views, causal=True), expected.out)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_one_array_that_is_copied(name: str, layout: str) -> None:
    arrays = {x: as_bshd(array, layout) for x, array in zip("qkv", inputs(), strict=True)}
    arrays["out"] = poison(cupy.empty_like(arrays["q"]))
    expected = as_bshd(cupyfa.attention(*inputs()), layout)
    arrays[name] = ODD_VIEWS[0].holding(cupy, arrays[name])
    assert cupyfa.workspace_size(**arrays, layout=layout) == arrays[name].nbytes
    cupyfa.attention(**arrays, layout=layout)
    assert same_bits(arrays["out"], expected)


@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_copies_into_a_workspace_under_capture(odd: OddView) -> None:
    """Nothing is allocated; the workspace is full of NaN, and bytes behind its end stay."""
    views, around, out = odd_call(odd)
    lse = cupy.full((2, 4, 300), np.nan, np.float32)
    size = cupyfa.workspace_size(*views, out=out, causal=True)
    workspace = guarded_empty((size,), np.uint8, cupy, poison=0xFF)
    arguments: dict[str, Any] = {"causal": True, "out": out, "lse": lse, "workspace": workspace.array}
    cupyfa.attention(*views, **arguments)
    with no_allocation():
        cupyfa.attention(*views, **arguments)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream, no_allocation():
        stream.begin_capture()
        cupyfa.attention(*views, **arguments)
        graph = stream.end_capture()
    for seed in (10, 20):
        expected = cupyfa.attention(*inputs(seed=seed), causal=True, return_lse=True)
        for x, y in zip(views, inputs(seed=seed), strict=True):
            assign(x, y)
        poison(out)
        poison(lse)
        workspace.array.fill(0xFF)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert same_bits(out, expected.out)
        assert same_bits(lse, expected.lse)
        assert written(around) == out.size
        workspace.check("workspace")


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_packed_arrays_anywhere(odd: OddView, captured: bool) -> None:
    """A plan lies in the same workspace. With it, the kernel comes right behind CuPy's copies."""
    packed = [x.reshape(-1, *x.shape[2:]) for x in inputs()]
    lengths = [cupy.asarray(np.array(x, np.int32)) for x in ([0, 100, 100, 600], [0, 400, 450, 900])]
    expected = cupyfa.attention_varlen(*packed, *lengths, causal=True, return_lse=True)
    views = [odd.holding(cupy, x) for x in packed]
    around, out = odd.poisoned(cupy, packed[0].shape, BF16)
    lse = cupy.empty_like(expected.lse)
    size = cupyfa.workspace_size(*views, *lengths, causal=True, out=out)
    workspace = cupy.full(size, 0xFF, np.uint8)

    def both() -> None:
        plan = cupyfa.plan_varlen(*views, *lengths, causal=True, workspace=workspace)
        for planned in (None, plan):
            poison(out)
            poison(lse)
            cupyfa.attention_varlen(*views, *lengths, causal=True, out=out, lse=lse, workspace=workspace, plan=planned)
            assign(outs[int(planned is None)], out)
            assign(lses[int(planned is None)], lse)

    outs, lses = cupy.empty((2, *out.shape), BF16), cupy.empty((2, *lse.shape), np.float32)
    both()
    if captured:
        stream = cupy.cuda.Stream(non_blocking=True)
        poison(outs)
        poison(lses)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            both()
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    for i in range(2):
        assert same_bits(outs[i], expected.out)
        assert same_bits(lses[i], expected.lse)
    assert written(around) == out.size


def test_keys_that_repeat_at_odd_strides() -> None:
    q, k, v = inputs(batch=3, hq=4, hkv=4)
    K, V = (cupy.broadcast_to(ODD_VIEWS[0].holding(cupy, x[:1, :, :1]), x.shape) for x in (k, v))
    assert cupyfa.workspace_size(q, K, V) < k.nbytes  # one head of one batch, of each
    out, lse = attention_guarded(q, K, V, causal=True)
    check(q, K, V, out, lse, context="broadcast", causal=True)


def test_arrays_of_heads_and_lse_may_run_backwards() -> None:
    q, k, v = inputs()
    sink, slopes = (random_array((2, 4), np.float32, seed, xp=cupy) for seed in (7, 8))
    expected = attention_guarded(q, k, v, sink=sink[0], alibi_slopes=slopes)
    lse = poison(cupy.empty((2, 4, 300), np.float32))[::-1, ::-1, ::-1]
    backwards = sink[0, ::-1].copy()[::-1], slopes[::-1, ::-1].copy()[::-1, ::-1]
    out = cupyfa.attention(q, k, v, sink=backwards[0], alibi_slopes=backwards[1], lse=lse)
    assert same_bits(out, expected.out)
    assert same_bits(lse, expected.lse)


def test_keys_may_be_the_values_and_the_queries() -> None:
    x = make((2, 300, 4, 128), 3)
    out, lse = attention_guarded(x, x, x, causal=True)
    check(x, x, x, out, lse, context="q is k is v", causal=True)


def test_lse_alone_and_out_alone() -> None:
    q, k, v = inputs()
    expected = attention_guarded(q, k, v)
    assert same_bits(cupyfa.attention(q, k, v), expected.out)
    lse = guarded_empty((2, 4, 300), np.float32, cupy)
    out = cupyfa.attention(q, k, v, lse=lse.array)
    lse.check("lse")
    assert same_bits(out, expected.out)
    assert same_bits(lse.array, expected.lse)
    result = cupyfa.attention(q, k, v, return_lse=True)
    assert type(result) is cupyfa.AttentionResult
    assert same_bits(result.lse, expected.lse)


def test_a_call_with_outputs_allocates_nothing() -> None:
    q, k, v = inputs()
    out, lse = cupy.empty_like(q), cupy.empty((2, 4, 300), np.float32)
    cupyfa.attention(q, k, v, out=out, lse=lse)
    with no_allocation():
        cupyfa.attention(q, k, v, out=out, lse=lse)
    with pytest.raises(AssertionError, match="allocated"), no_allocation():
        cupyfa.attention(q, k, v)


# --- Sizes ---


def test_c38_more_than_65535_batches() -> None:
    q, k, v = inputs(batch=70_001, sq=3, sk=5, hq=2, hkv=1, d=64)
    out, lse = attention_guarded(q, k, v, causal=True)
    rows = np.array([0, 1, 32_767, 65_535, 65_536, 65_537, 70_000])
    sample = [take(x, rows, 0) for x in (q, k, v, out, lse)]
    check(*sample, context="70,001 batches", causal=True)
    assert not bool(is_nan(out).any())


def test_c38_more_than_65535_heads() -> None:
    q, k, v = inputs(batch=1, sq=3, sk=5, hq=70_002, hkv=23_334, d=64)
    out, lse = attention_guarded(q, k, v)
    kv = np.array([0, 1, 10_922, 21_845, 21_846, 23_333])
    heads = (3 * kv[:, None] + np.arange(3)).reshape(-1)
    Q, O = (take(x, heads, 2) for x in (q, out))
    check(Q, take(k, kv, 2), take(v, kv, 2), O, take(lse, heads, 1), context="70,002 heads")
    assert not bool(is_nan(out).any())


def test_queries_over_2_to_the_31_elements() -> None:
    require_memory(12)
    seqlen, heads, d = 2**18 + 200, 64, 128
    q = make((1, seqlen, heads, d), 1)
    assert q.size > 2**31
    k, v = make((1, 130, 1, d), 2), make((1, 130, 1, d), 3)
    out = poison(cupy.empty_like(q))
    lse = cupy.full((1, heads, seqlen), np.nan, np.float32)
    cupyfa.attention(q, k, v, out=out, lse=lse)
    rows = np.array([0, 127, 128, 131_071, 131_072, 200_001, 2**18 - 1, 2**18, seqlen - 1])
    check(take(q, rows, 1), k, v, take(out, rows, 1), take(lse, rows, 2), context="q over 2**31 elements")
    assert not bool(cupy.isnan(lse).any())
    assert not bool(is_nan(out[:, ::1009]).any())


def test_keys_over_2_to_the_31_elements() -> None:
    require_memory(8)
    seqlen, heads, d = 2**18 + 200, 64, 128
    k = make((1, seqlen, heads, d), 1)
    assert k.size > 2**31
    q = make((1, 3, heads, d), 2)
    out, lse = poison(cupy.empty_like(q)), cupy.full((1, heads, 3), np.nan, np.float32)
    cupyfa.attention(q, k, k, out=out, lse=lse, causal=True)
    for head in (0, 63):
        one = slice(head, head + 1)
        K = k[:, :, one]
        check(
            q[:, :, one], K, K, out[:, :, one], lse[:, one], context=f"k over 2**31 elements, head {head}", causal=True
        )
    assert not bool(is_nan(out).any())


def test_sum_does_not_drift_over_many_blocks() -> None:
    # A maximum that stays must shrink the sum by exactly 1. A factor wrong by 2^-24 in each of 1,024 blocks would show
    # as 6e-5; the rounding of the sum itself is far below the bound.
    q, k = make((1, 128, 1, 128), 1), make((1, 2**17, 1, 128), 2)
    _, lse = cupyfa.attention(q, k, k, return_lse=True)
    _, reference = dense.attention(host(q), host(k), host(k))
    np.testing.assert_allclose(host(lse), reference, rtol=0, atol=1e-5)


def test_strides_over_2_to_the_32_bytes() -> None:
    require_memory(10)
    buffer = cupy.empty((2**32,), BF16)
    shape, strides = (2, 100, 2, 64), (2**32, 2 * 64 * 2, 64 * 2, 2)
    parts = (buffer[i * 2**19 :] for i in range(4))
    q, k, v, out = (cupy.lib.stride_tricks.as_strided(part, shape=shape, strides=strides) for part in parts)
    for seed, x in enumerate((q, k, v)):
        assign(x, make(shape, seed))
    poison(out)
    cupyfa.attention(q, k, v, out=out)
    check(q, k, v, out, None, context="batches 4 GiB apart")


@pytest.mark.parametrize("begin", [0, 1], ids=["tma", "gathered"])
def test_c39_a_bias_of_more_than_2_to_the_32_elements(begin: int) -> None:
    """Its rows from 58,255 on are more than 2^32 elements behind its first one."""
    require_memory(30)
    seqlen = 73_728
    bias = cupy.empty((seqlen, seqlen + 4), np.float32)[:, begin : begin + seqlen]
    keys = cupy.arange(seqlen)
    for row in range(0, seqlen, 1024):
        rows = cupy.arange(row, row + 1024)[:, None]
        bias[row : row + 1024] = ((rows * 7 + keys * 13 + rows * keys % 31) % 101).astype(np.float32) / 16
    q, k, v = inputs(1, seqlen, seqlen, 1, 1, 64)
    expected = Bias.GATHER if begin else Bias.TILE
    assert cupyfa.explain(q, k, v, bias=bias).selection.spec.bias is expected
    out, lse = poison(cupy.empty_like(q)), cupy.full((1, 1, seqlen), np.nan, np.float32)
    cupyfa.attention(q, k, v, bias=bias, out=out, lse=lse)
    rows = np.array([0, 1, 29_127, 58_253, 58_254, 58_255, 58_256, 65_535, 73_600, 73_727])
    sample = take(q, rows, 1), host(k), host(v), take(out, rows, 1), take(lse, rows, 2)
    check(*sample, context="a bias over 2**32 elements", bias=host(bias[cupy.asarray(rows)]))
    assert not bool(cupy.isnan(lse).any())


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_c43_a_bias_is_read_in_place(dtype: Any) -> None:
    """Slices that TMA takes and those that it does not, beside NaN, in every order of axes."""
    q, k, v = inputs(sk=456)
    whole = cupy.full((2, 4, 300, 504), np.nan, np.float32).astype(dtype)
    bias = whole[..., 16:472]
    assign(bias, make((2, 4, 300, 456), 5, dtype))
    unaligned = cupy.full((2, 4, 300, 500), np.nan, np.float32).astype(dtype)[..., 3:459]
    assign(unaligned, bias)
    ragged = cupy.full((2, 4, 300, 459), np.nan, np.float32).astype(dtype)[..., :456]
    assign(ragged, bias)
    turned = cupy.ascontiguousarray(bias.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0)
    results = []
    for view, access in ((bias, Bias.TILE), (unaligned, Bias.GATHER), (ragged, Bias.GATHER), (turned, Bias.GATHER)):
        assert cupyfa.explain(q, k, v, bias=view).selection.spec.bias is access
        out, lse = attention_guarded(q, k, v, causal=True, bias=view)
        check(q, k, v, out, lse, context=access, causal=True, bias=view)
        results.append(out)
    assert same_bits(results[1], results[2])
    assert same_bits(results[1], results[3])


@pytest.mark.parametrize("axes", ["b", "h", "q", "k", "bh", "bhq", "bhqk"])
def test_a_bias_with_strides_of_zero(axes: str) -> None:
    q, k, v = inputs(sk=456)
    shape = [1 if axis in axes else size for axis, size in zip("bhqk", (2, 4, 300, 456), strict=True)]
    bias = make(tuple(shape), 5, np.float32)
    spread = cupy.broadcast_to(bias, (2, 4, 300, 456))
    out, lse = attention_guarded(q, k, v, bias=bias)
    check(q, k, v, out, lse, context=axes, bias=bias)
    assert same_bits(cupyfa.attention(q, k, v, bias=spread), out)


@pytest.mark.parametrize("config", [{"speculative": False}, {"overlap": False, "speculative": False}], ids=str)
def test_a_bias_and_the_exact_softmax(config: dict[str, Any]) -> None:
    for d, dtype in itertools.product((64, 128, 192, 256), (np.float32, BF16)):
        q, k, v = inputs(sk=456, d=d)
        bias = make((4, 300, 456), 5, dtype)
        out, lse = attention_guarded(q, k, v, causal=True, bias=bias, config=config)
        check(q, k, v, out, lse, context=(d, config), causal=True, bias=bias)


# --- config= ---

UNSPECIALIZED = {
    "warp_specialized": False, "q_stages": 1, "pingpong": False, "scheduler": "one_tile", "setmaxnreg": False
}  # fmt: skip
CONFIGS: list[tuple[int, dict[str, Any]]] = [
    *((d, {"overlap": False, "speculative": False}) for d in (64, 128, 192, 256)),
    *((d, {"speculative": False}) for d in (64, 128, 192, 256)),
    (128, {"speculative": False, "pingpong": True}),
    *(
        (d, {"three_stage": True, "speculative": False, "pingpong": False, "tile_m": tile_m, "tile_n": tile_n})
        for d, tile_m, tile_n in ((64, 128, 128), (64, 192, 80), (128, 128, 96), (128, 128, 128), (192, 128, 64))
    ),
    *((d, {"pingpong": True}) for d in (64, 128, 192, 256)),
    *((d, {"speculative": False, "rescale_threshold": 8}) for d in (64, 128, 256)),
    *((128, {"longest_first": False, "scheduler": scheduler}) for scheduler in ("one_tile", "persistent", "dynamic")),
    *((d, {"scheduler": scheduler}) for d in (64, 128, 192, 256) for scheduler in ("one_tile", "persistent")),
    *((d, {"tile_n": 64}) for d in (64, 128, 192, 256)),
    *((d, {"tile_m": 64, "setmaxnreg": False, "pingpong": False}) for d in (64, 128, 192, 256)),
    *((d, {"setmaxnreg": False}) for d in (64, 128)),
    *((d, {"q_stages": 1}) for d in (64, 128, 192)),
    *((d, {"stages": 1}) for d in (64, 128, 192, 256)),
    (64, {"stages": 4, "q_stages": 3}),
    (128, {"tile_n": 96, "stages": 3, "q_stages": 1}),
    (64, {"tile_m": 192, "tile_n": 96}),
    (64, {"overlap": False, "speculative": False, "scheduler": "one_tile", "stages": 1, "q_stages": 1}),
    (128, {"overlap": False, "speculative": False, "pingpong": False}),
    *((d, UNSPECIALIZED | {"speculative": speculative}) for d in (64, 128, 192, 256) for speculative in (False, True)),
    (64, UNSPECIALIZED | {"tile_m": 64, "stages": 4}),
]


@pytest.mark.parametrize(("d", "config"), CONFIGS, ids=str)
def test_config(d: int, config: dict[str, Any]) -> None:
    # 144 heads of 3 to 11 query tiles, most of them ragged: several tiles for each of 132 CTAs.
    for causal, sq, sk in ((False, 300, 411), (True, 700, 333)):
        q, k, v = inputs(batch=24, sq=sq, sk=sk, hq=6, hkv=3, d=d)
        out, lse = attention_guarded(q, k, v, causal=causal, config=config)
        last = slice(-1, None)
        context = (d, config, causal)
        check(q[last], k[last], v[last], out[last], lse[last], context=context, causal=causal)
        check(q[:1], k[:1], v[:1], out[:1], lse[:1], context=context, causal=causal)
        expected = cupyfa.attention(q, k, v, causal=causal, return_lse=True)
        if config.keys() <= {"scheduler", "longest_first", "q_stages", "stages"}:  # these change when, never what
            assert same_bits(out, expected.out)
            assert same_bits(lse, expected.lse)
        else:
            assert float(abs(out.astype(np.float32) - expected.out.astype(np.float32)).max()) < 0.05


@pytest.mark.parametrize("eights", [1, 2, 8])
def test_exponentials_on_the_fma_units(eights: int) -> None:
    """The polynomial is off by 8.8e-5 at most, and so are the sums of which the lse is the logarithm."""
    q, k, v = inputs(sq=500, sk=700)
    out, lse = attention_guarded(q, k, v, causal=True, config={"exp2_fma": eights})
    expected = cupyfa.attention(q, k, v, causal=True, return_lse=True)
    assert float(abs(out.astype(np.float32) - expected.out.astype(np.float32)).max()) < 0.05
    seen = expected.lse > -np.inf
    assert 0 < float(abs(lse - expected.lse)[seen].max()) < 1e-4
    assert bool((lse == expected.lse)[~seen].all())


def test_config_that_does_not_compile() -> None:
    q, k, v = inputs()
    with pytest.raises(cupyfa.CompileError, match=r"does not compile: .*error: .*exceed the shared memory of a CTA"):
        cupyfa.attention(q, k, v, config={"stages": 8})
    out, lse = attention_guarded(q, k, v)
    check(q, k, v, out, lse, context="after compile errors")


# --- Values ---


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("target", ["q", "k", "v"])
def test_a_poisoned_row_reaches_the_rows_that_attend_to_it(target: str, value: float, d: int) -> None:
    q, k, v = inputs(sq=300, sk=300, d=d)
    arrays = {"q": q, "k": k, "v": v}
    arrays[target][0, 200, 0, 3] = np.asarray(value, BF16)
    out, _ = attention_guarded(q, k, v, causal=True)
    bad = is_nan(out) | (bits(out) & 0x7FFF == 0x7F80)
    assert not bool(bad[1].any())  # the other batch
    reached = host(bad[0].any(axis=-1))  # (seqlen_q, heads_q)
    if target == "q":
        assert reached.sum() == reached[200, 0] == 1
    elif target == "k":  # the query heads of its group, from row 200 on; a score of -inf is no harm
        assert not reached[:200].any()
        assert not reached[:, 2:].any()
        assert reached[200:, :2].all() if np.isnan(value) else reached[200:, :2].any()
    else:
        traits = cupyfa.explain(q, k, v, causal=True).traits
        assert traits is not None
        block = 200 // traits["tile_n"] * traits["tile_n"]  # 0 * NaN reaches all rows of the tiles that visit the block
        first = block // traits["tile_m"] * traits["tile_m"]
        assert reached[200:, :2].all()
        assert not reached[:first, :2].any()
        assert not reached[:, 2:].any()


@pytest.mark.parametrize("amplitude", [30.0, 300.0])
def test_large_scores(amplitude: float) -> None:
    q, k, v = inputs(d=128)
    q = random_array(q.shape, BF16, 11, xp=cupy, amplitude=amplitude)
    k = random_array(k.shape, BF16, 12, xp=cupy, amplitude=amplitude)
    out, lse = attention_guarded(q, k, v)
    check(q, k, v, out, lse, context=f"amplitude {amplitude}")


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_hard_scores(kind: str, dtype: Any, causal: bool, speculative: bool) -> None:
    """Maxima that never grow, always grow, or are no numbers; with more queries than keys, the first rows see none."""
    Q, K, V = Case("hard", 1, 900 if causal else 500, 800, 4, 2, 128, dtype.name).make_inputs()
    Q, K = harden(kind, Q, K)
    q, k, v = (cupy.asarray(x.view(np.uint16)).view(dtype) for x in (Q, K, V))
    out, lse = attention_guarded(q, k, v, causal=causal, config={"speculative": speculative})
    with np.errstate(invalid="ignore"):
        check(q, k, v, out, lse, context=(kind, dtype, causal, speculative), causal=causal)


# --- Streams, graphs, threads ---


def test_c59_current_stream_is_used_and_the_call_does_not_wait() -> None:
    q, k, v = inputs()
    expected = attention_guarded(q, k, v)
    spin(1)
    late, out = poison(cupy.empty_like(q)), poison(cupy.empty_like(q))
    lse = poison(cupy.empty((2, 4, 300), np.float32))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        assign(late, q)
        poison(late)
        cupyfa.attention(late, k, v, out=out, lse=lse)  # everything is warm now
        stream.synchronize()
        assert bool(is_nan(out).all())
        spin()
        assign(late, q)
        cupyfa.attention(late, k, v, out=out, lse=lse)
        assert not stream.done  # the call came back while its input was not yet there
        stream.synchronize()
    assert same_bits(out, expected.out)
    assert same_bits(lse, expected.lse)


def test_results_are_allocated_on_the_current_stream() -> None:
    q, k, v = inputs(dtype=F16)
    expected = attention_guarded(q, k, v)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        out, lse = cupyfa.attention(q, k, v, return_lse=True)
        doubled = out + out
        stream.synchronize()
    assert same_bits(doubled, expected.out + expected.out)
    assert same_bits(lse, expected.lse)


def test_cuda_graph() -> None:
    q, k, v = inputs()
    out, lse = poison(cupy.empty_like(q)), cupy.full((2, 4, 300), np.nan, np.float32)
    cupyfa.attention(q, k, v, causal=True, out=out, lse=lse)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cupyfa.attention(q, k, v, causal=True, out=out, lse=lse)
        graph = stream.end_capture()
    for seed in (10, 20):
        for x, y in zip((q, k, v), inputs(seed=seed), strict=True):
            assign(x, y)
        poison(out)
        poison(lse)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        check(q, k, v, out, lse, context=f"replay {seed}", causal=True)


def test_launches_that_run_together_draw_their_own_tiles() -> None:
    # Several tiles for each CTA. Streams, and graphs that were captured on one stream, run side by side; a counter that
    # two of them shared would leave tiles out. Each counter is 0 again at the end, or the second round would.
    q, k, v = inputs(batch=3, sq=700, sk=700, hq=12, hkv=12, d=64)
    expected = cupyfa.attention(q, k, v, causal=True)
    outs = [cupy.empty_like(q) for _ in range(8)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in outs]
    cupy.cuda.Device().synchronize()
    graphs = []
    with streams[0]:
        for out in outs[:4]:
            streams[0].begin_capture()
            cupyfa.attention(q, k, v, causal=True, out=out)
            cupyfa.attention(q, k, v, causal=True, out=out)
            graphs.append(streams[0].end_capture())
    for _ in range(50):
        for out in outs:
            poison(out)
        cupy.cuda.Device().synchronize()
        for graph, stream in zip(graphs, streams, strict=False):
            graph.launch(stream)
        for out, stream in zip(outs[4:], streams[4:], strict=True):
            with stream:
                cupyfa.attention(q, k, v, causal=True, out=out)
        cupy.cuda.Device().synchronize()
        assert all(same_bits(out, expected) for out in outs)


def test_without_a_counter_tiles_are_dealt_out() -> None:
    q, k, v = inputs(batch=3, sq=700, sk=700, hq=12, hkv=12)
    expected = cupyfa.attention(q, k, v, causal=True)
    problem, _, kernel, launcher, *_ = prepare(Arrays(q, k, v), check_options(causal=True), False, None)
    assert kernel is not None
    assert launcher is not None
    assert launcher.counters is kernel.counters is not None
    without = plan_forward(problem, kernel.traits, kernel.function, Device.current(), TileCounters(0, 0))
    out = poison(cupy.empty_like(q))
    addresses = [*(x.data.ptr for x in (q, k, v, out)), 0, 0, 0, 0]
    without(addresses, cupy.cuda.get_current_stream().ptr)
    assert same_bits(out, expected)


def test_first_call_under_capture_is_refused() -> None:
    q, k, v = inputs(d=128)
    out = cupy.empty_like(q)
    config = {"tile_n": 80, "stages": 1}  # a kernel that no other test loads
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(cupyfa.CompileError, match=r"call cupyfa\.warmup before the capture"):
            cupyfa.attention(q, k, v, out=out, config=config)
        stream.end_capture()
    cupyfa.attention(q, k, v, out=out, config=config)
    check(q, k, v, out, None, context="after the refusal")


def test_a_thread_without_a_context() -> None:
    # A warm call with out= makes no call of the CUDA runtime that would give its thread a context.
    q, k, v = inputs()
    expected = cupyfa.attention(q, k, v)
    out, errors = poison(cupy.empty_like(q)), []
    cupyfa.attention(q, k, v, out=out)
    poison(out)
    cupy.cuda.Device().synchronize()

    def work() -> None:
        try:
            cupyfa.attention(q, k, v, out=out)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cupy.cuda.Device().synchronize()
    assert errors == []
    assert bool((bits(out) == bits(expected)).all())


def test_four_threads() -> None:
    # Every thread begins with a kernel that is new to the process: all want it at once.
    problems = [inputs(sq=257 + 16 * i, sk=300, d=128, dtype=F16, seed=7 * i) for i in range(4)]
    options: dict[str, Any] = {"softmax_scale": -0.125, "config": {"tile_n": 96}}
    results: list[list[Any]] = [[] for _ in problems]
    errors: list[BaseException] = []
    start = threading.Barrier(4)
    cupy.cuda.Device().synchronize()

    def work(i: int) -> None:
        try:
            start.wait()
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for _ in range(50):
                    results[i].append(cupyfa.attention(*problems[i], return_lse=True, **options))
                stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for (q, k, v), (first, *others) in zip(problems, results, strict=True):
        check(q, k, v, first.out, first.lse, context="four threads", softmax_scale=-0.125)
        assert len(others) == 49
        assert all(same_bits(other.out, first.out) and same_bits(other.lse, first.lse) for other in others)


# --- Bad calls ---


def test_bad_calls_leave_the_context_usable() -> None:
    calls = [call for call in BAD_CALLS if call.where is not Where.NUMPY]
    assert len(calls) >= 170
    wrong = []
    for call in calls:
        try:
            cupyfa.attention(**call.make(cupy))
        except Exception as error:
            if type(error) is not call.error or not re.match("attention: " + call.message, str(error)):
                wrong.append(f"{call.id}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{call.id}: was accepted")
    assert wrong == []
    q, k, v = inputs()
    out, lse = attention_guarded(q, k, v)
    check(q, k, v, out, lse, context="after bad calls")


def test_c60_array_of_another_device() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs; tests/test_problem.py does it with made-up operands")
    q, k, v = inputs()
    with cupy.cuda.Device(1):
        far = cupy.zeros(k.shape, k.dtype)
        with pytest.raises(ValueError, match=r"^attention: q is on CUDA device 0 but the current device is 1"):
            cupyfa.attention(q, k, v)
    with pytest.raises(ValueError, match=r"^attention: k is on CUDA device 1 \(CuPy\) but q is on CUDA device 0"):
        cupyfa.attention(q, far, v)
