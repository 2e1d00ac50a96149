"""Gradients of packed sequences on the GPU: every kernel, neighbours, broken offsets, bits, and what users reported.

The table of gradients, in which packed sequences are, is held to the oracle in test_backward_gpu.py.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from gpu.test_backward_gpu import bandwidth_hog, there  # noqa: E402
from gpu.tools import bits, host, poison, same_bits  # noqa: E402
from gradients import guarded_gradients  # noqa: E402

import cupyfa  # noqa: E402
from cupyfa import attention_backward, attention_varlen_backward, debug  # noqa: E402
from cupyfa.oracles.packed import sequences  # noqa: E402
from cupyfa.testing import BackwardCase, PackedCase, assert_gradients_close, random_array  # noqa: E402

BF16 = np.dtype(ml_dtypes.bfloat16)


def of(*lengths: Any, dlse: bool = False, deterministic: bool = True, **options: Any) -> BackwardCase:
    return BackwardCase(PackedCase("here", *lengths, **options), dlse, deterministic)


#: Of every kernel, lengths around its tiles, and options that change what a key tile walks.
CASES = [
    of((700, 3, 0, 400, 128, 129), (650, 300, 5, 0, 128, 127), 4, 1, causal=True),
    of((700, 3, 0, 400), (900, 3, 7, 390), 4, 2, 128, "float16", causal=True, alibi=True, sink=True, dlse=True),
    of((300, 129, 500), (640, 128, 100), 4, 4, 128, window_size=(200, 50)),
    of((300, 129, 500), (640, 128, 100), 2, 2, 128, softcap=5.0, causal=True, used_q=(300, 7, 401), used_k=(1, 128, 9)),
    of((400, 65, 200), (300, 64, 500), 4, 2, 256, causal=True, before=70, behind=200),
    of((400, 65, 200), (300, 64, 500), 4, 2, 192, "float16", head_dim_v=128, window_size=(100, None)),
    of(tuple(range(100)), tuple(range(99, -1, -1)), 3, 3, 64, "float16", softcap=20.0, causal=True, sink=True),
]


@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "ordered"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_kernel(case: BackwardCase, deterministic: bool) -> None:
    arrays, options = there(case.make_arrays()), there(case.call_options) | {"deterministic": deterministic}
    guarded = guarded_gradients(arrays, options, cupy)
    result = attention_varlen_backward(**arrays, **options, **{name: x.array for name, x in guarded.items()})
    cupy.cuda.get_current_stream().synchronize()
    for name, x in guarded.items():
        x.check(name)
    assert_gradients_close(result, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_thousand_deterministic_repeats_are_bit_equal(case: BackwardCase) -> None:
    arrays, options = there(case.make_arrays()), there(case.call_options)
    first = attention_varlen_backward(**arrays, **options)
    outputs = {name: cupy.empty_like(x) for name, x in first._asdict().items() if x is not None}
    different = cupy.zeros((), np.int64)
    with bandwidth_hog():
        for _ in range(1000):
            for x in outputs.values():
                poison(x)
            attention_varlen_backward(**arrays, **options, **outputs)
            for name, x in outputs.items():
                different += (bits(x) != bits(getattr(first, name))).sum()
        assert int(different) == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sequence_has_the_bits_that_it_has_alone(head_dim: int) -> None:
    """No query heads share a key head, so no CTAs a key tile."""
    options: dict[str, Any] = {"causal": True, "deterministic": True}
    case = of((700, 150, 1), (600, 1400, 65), 2, 2, head_dim, causal=True)
    arrays = case.make_arrays()
    on_gpu = there(arrays)
    got = attention_varlen_backward(**on_gpu, **options)
    for rows, keys in sequences(arrays["cu_seqlens_q"], arrays["cu_seqlens_k"]):
        places = {"dout": rows, "q": rows, "k": keys, "v": keys, "out": rows}
        alone = {name: on_gpu[name][None, where] for name, where in places.items()}
        expected = attention_backward(**alone, lse=on_gpu["lse"][None, :, rows], **options)
        for x, y, where in zip(got[:3], expected[:3], (rows, keys, keys), strict=True):
            assert same_bits(x[where], y[0])


def test_a_neighbour_of_nan_changes_no_bit() -> None:
    case = of((700, 33, 530), (500, 90, 631), 4, 2, 128, causal=True)
    arrays = case.make_arrays()
    on_gpu = there(arrays)
    expected = attention_varlen_backward(**on_gpu, causal=True, deterministic=True)
    ranges = [*sequences(arrays["cu_seqlens_q"], arrays["cu_seqlens_k"])]
    for of_nan, (rows, keys) in enumerate(ranges):
        broken = {name: x.copy() for name, x in on_gpu.items()}
        for name, where in (("q", rows), ("dout", rows), ("out", rows), ("k", keys), ("v", keys)):
            poison(broken[name][where])
        broken["lse"][:, rows] = np.nan
        got = attention_varlen_backward(**broken, causal=True, deterministic=True)
        for i, (others, other_keys) in enumerate(ranges):
            for x, y, where in zip(got[:3], expected[:3], (others, other_keys, other_keys), strict=True):
                assert i == of_nan or same_bits(x[where], y[where])


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("offsets", [[0, 60, 40, 100], [-5, 40, 60, 100], [0, 40, 60, 2**31 - 1]], ids=str)
def test_broken_offsets_are_no_sequences(side: str, offsets: list[int]) -> None:
    case = of((40, 20, 40), causal=True, sink=True, dlse=True)
    arrays, options = there(case.make_arrays()), there(case.call_options)
    arrays[f"cu_seqlens_{side}"] = cupy.asarray(np.int32(offsets))
    guarded = guarded_gradients(arrays, options, cupy)
    attention_varlen_backward(**arrays, **options, **{name: x.array for name, x in guarded.items()})
    cupy.cuda.get_current_stream().synchronize()
    for name, x in guarded.items():
        x.check(name)
        assert not bool(bits(x.array).any()), name


@pytest.mark.parametrize("deterministic", [False, True])
def test_c62_a_captured_call_takes_the_lengths_of_each_replay(deterministic: bool) -> None:
    """As FA@1a58058a: turns and sums are those of each replay."""
    q, k, v, dout = (random_array((2000, heads, 128), BF16, n, xp=cupy) for n, heads in enumerate((4, 2, 2, 4)))
    cu = cupy.asarray(np.int32([0, 100, 2000]))
    out, lse = cupyfa.attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True)
    gradients = {name: cupy.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    given = (dout, q, k, v, out, lse, cu, cu)
    options: dict[str, Any] = {"causal": True, "deterministic": deterministic}
    size = cupyfa.backward_workspace_size(*given, **options)
    options["workspace"] = cupy.full(size, 0xFF, np.uint8)
    attention_varlen_backward(*given, **options, **gradients)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        attention_varlen_backward(*given, **options, **gradients)
        graph = stream.end_capture()
    for ends in ([0, 100, 2000], [0, 500, 2000], [0, 0, 1500], [3, 1999, 2000], [0, 2000, 2000]):
        cu[...] = cupy.asarray(np.int32(ends))
        out[...], lse[...] = cupyfa.attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True)
        for x in gradients.values():
            poison(x)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = attention_varlen_backward(*given, causal=True, deterministic=True)
        for name, x in gradients.items():
            if deterministic or name != "dq":
                assert same_bits(x, getattr(expected, name)), (name, ends)
            else:
                np.testing.assert_allclose(
                    host(x).astype(np.float32), host(expected.dq).astype(np.float32), atol=2**-7, rtol=2**-6
                )


def test_c37_more_sequences_than_a_grid_has_rows() -> None:
    count, length = 80_000, 16
    q, k, v, dout = (random_array((count * length, 1, 64), BF16, n, xp=cupy) for n in range(4))
    cu = cupy.arange(0, (count + 1) * length, length, dtype=np.int32)
    out, lse = cupyfa.attention_varlen(q, k, v, cu, cu, return_lse=True)
    got = attention_varlen_backward(dout, q, k, v, out, lse, cu, cu, deterministic=True)
    batched = [x.reshape(count, length, 1, 64) for x in (dout, q, k, v, out)]
    expected = attention_backward(*batched, lse.reshape(count, 1, length), deterministic=True)
    for x, y in zip(got[:3], expected[:3], strict=True):
        assert same_bits(x.reshape(y.shape), y)


def test_c08_nothing_is_written_where_keys_have_length_0() -> None:
    case = of((300, 50, 2), (0, 60, 0), causal=True)
    arrays = there(case.make_arrays())
    guarded = guarded_gradients(arrays, {}, cupy)
    attention_varlen_backward(**arrays, causal=True, **{name: x.array for name, x in guarded.items()})
    cupy.cuda.get_current_stream().synchronize()
    for name, x in guarded.items():
        x.check(name)
    assert not bool(bits(guarded["dq"].array[:300]).any())


def test_debug_names_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "DEBUG", True)
    arrays = there(of((40, 20), causal=True).make_arrays())
    attention_varlen_backward(**arrays, causal=True)
    arrays["cu_seqlens_k"] = cupy.asarray(np.int32([0, 61, 60]))
    with pytest.raises(ValueError, match=r"^attention: cu_seqlens_k\[2\] is 60, less than cu_seqlens_k\[1\], 61$"):
        attention_varlen_backward(**arrays, causal=True)


def test_gradients_of_no_keys_at_all() -> None:
    """The lse of a row is the sink."""
    case = of((5, 0, 7), (0, 0, 0), used_q=(3, 0, 7), sink=True, dlse=True)
    result = attention_varlen_backward(**there(case.make_arrays()), **there(case.call_options))
    assert_gradients_close(result, case)
