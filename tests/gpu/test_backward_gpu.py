"""Gradients on the GPU: the table, bits that repeat, views, and what users reported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from gpu.tools import bits, host, poison, same_bits  # noqa: E402
from gradients import guarded_gradients  # noqa: E402

import cupyfa  # noqa: E402
from cupyfa import attention_backward, attention_varlen_backward, attention_vjp  # noqa: E402
from cupyfa.oracles import backward  # noqa: E402
from cupyfa.testing import (  # noqa: E402
    BACKWARD_CASES,
    BackwardCase,
    Case,
    PackedCase,
    assert_close,
    assert_gradients_close,
    random_array,
)

BF16 = np.dtype(ml_dtypes.bfloat16)


def there(values: dict[str, Any]) -> dict[str, Any]:
    """The same with arrays on the GPU; 16 bits travel as integers."""

    def move(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        return cupy.asarray(x.view(np.uint16)).view(x.dtype) if x.dtype.itemsize == 2 else cupy.asarray(x)

    return {name: move(x) for name, x in values.items()}


def function_of(case: BackwardCase) -> Any:
    return attention_varlen_backward if case.packed else attention_backward


#: Those that have a kernel: all but packed sequences with a bias.
CASES = [case for case in BACKWARD_CASES if not (case.packed and case.forward.bias)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: BackwardCase) -> None:
    arrays, options = there(case.make_arrays()), there(case.call_options)
    before = {name: x.copy() for name, x in (arrays | options).items() if isinstance(x, cupy.ndarray)}
    guarded = guarded_gradients(arrays, options, cupy)
    outputs = {name: x.array for name, x in guarded.items()}
    result = function_of(case)(**arrays, **options, **outputs)
    cupy.cuda.get_current_stream().synchronize()
    for name, array in result._asdict().items():
        assert array is outputs.get(name)
    for name, x in guarded.items():
        x.check(name)
    for name, old in before.items():
        assert bool((bits((arrays | options)[name]) == bits(old)).all()), f"{name} has changed"
    assert_gradients_close(result, case)


@pytest.mark.parametrize("case", CASES[::9], ids=lambda case: case.id)
def test_gradients_are_made_if_they_are_not_given(case: BackwardCase) -> None:
    result = function_of(case)(**there(case.make_arrays()), **there(case.call_options))
    assert_gradients_close(result, case)


def test_vjp_is_the_two_calls() -> None:
    q, k, v = (random_array((2, 300, heads, 64), BF16, n, xp=cupy) for n, heads in enumerate((4, 2, 2)))
    sink = cupy.asarray(np.float32([0.5, 1, -1, 2]))
    (out, lse), pullback = attention_vjp(q, k, v, causal=True, sink=sink, return_lse=True)
    got = pullback(out, lse, deterministic=True)
    expected = attention_backward(out, q, k, v, out, lse, causal=True, sink=sink, dlse=lse, deterministic=True)
    assert all(same_bits(x, y) for x, y in zip(got[:4], expected[:4], strict=True))


# --- Bits that repeat ---


def of(*sizes: Any, dlse: bool = False, **options: Any) -> BackwardCase:
    return BackwardCase(Case("repeat", *sizes, **options), dlse, deterministic=True)


REPEATED = [
    of(2, 700, 700, 4, 4, 128, "bfloat16"),
    of(2, 700, 700, 4, 4, 64, "float16", True),
    of(2, 600, 700, 16, 2, 128, "bfloat16", True),
    of(2, 700, 600, 4, 2, 128, "bfloat16", window_size=(200, 50)),
    of(2, 500, 600, 4, 2, 64, "bfloat16", True, sink=True, bias="k", dlse=True),
    of(2, 500, 600, 4, 2, 64, "bfloat16", sink=True, bias="hqk", bias_dtype="same"),
    of(2, 500, 600, 4, 2, 128, "bfloat16", True, bias="qk"),
    of(2, 500, 600, 4, 2, 256, "float16", bias="bhq", sink=True, softcap=20.0),
    of(3, 300, 400, 4, 2, 256, "bfloat16", True, bias="hqk", softcap=20.0, alibi=True),
    BackwardCase(PackedCase("repeat", (700, 3, 0, 400), causal=True, heads_q=4, heads_kv=1), deterministic=True),
]


@contextlib.contextmanager
def bandwidth_hog() -> Iterator[None]:
    """Copies on another stream, as many as it takes."""
    stream = cupy.cuda.Stream(non_blocking=True)
    source, target = (cupy.zeros(2**28, np.uint8) for _ in range(2))
    with stream:
        for _ in range(2000):
            target[...] = source
    yield
    stream.synchronize()


@pytest.mark.parametrize("case", REPEATED, ids=lambda case: case.id)
def test_a_thousand_deterministic_repeats_are_bit_equal(case: BackwardCase) -> None:
    arrays, options = there(case.make_arrays()), there(case.call_options)
    first = function_of(case)(**arrays, **options)
    assert_gradients_close(first, case)
    names = [name for name, x in first._asdict().items() if x is not None]
    outputs = {name: cupy.empty_like(getattr(first, name)) for name in names}
    different = cupy.zeros((), np.int64)
    with bandwidth_hog():
        for _ in range(1000):
            for x in outputs.values():
                poison(x)
            function_of(case)(**arrays, **options, **outputs)
            for name, x in outputs.items():
                different += (bits(x) != bits(getattr(first, name))).sum()
        assert int(different) == 0


@pytest.mark.parametrize("case", REPEATED, ids=lambda case: case.id)
def test_the_order_of_additions_is_all_that_determinism_changes(case: BackwardCase) -> None:
    arrays, options = there(case.make_arrays()), there(case.call_options) | {"deterministic": False}
    assert_gradients_close(function_of(case)(**arrays, **options), case)


@pytest.mark.parametrize("axes", ["bhqk", "qk", "k", "hq", "h"])
def test_the_gradient_of_a_bias_is_the_same_each_time(axes: str) -> None:
    """No two thread blocks add to it, deterministic or not."""
    case = BackwardCase(Case("repeat", 2, 700, 700, 4, 2, 128, "bfloat16", True, sink=True, bias=axes))
    arrays, options = there(case.make_arrays()), there(case.call_options)
    first, different = attention_backward(**arrays, **options), cupy.zeros((), np.int64)
    assert_gradients_close(first, case)
    with bandwidth_hog():
        for _ in range(300):
            different += (bits(attention_backward(**arrays, **options).dbias) != bits(first.dbias)).sum()
        assert int(different) == 0


# --- Arrays of any place ---


@pytest.mark.parametrize("kind", ["columns", "offset", "rows", "reversed", "repeated"])
@pytest.mark.parametrize("dtype", ["float32", "same"])
def test_c43_a_bias_and_its_gradient_anywhere(kind: str, dtype: str) -> None:
    case = of(2, 150, 203, 4, 2, 128, "float16", True, bias="hqk", bias_dtype=dtype)
    arrays, options = there(case.make_arrays()), there(case.call_options)
    bias = options["bias"]
    nan = float("nan")
    if kind == "columns":
        views = [cupy.full((4, 150, 205), nan, bias.dtype)[..., 1:204] for _ in range(2)]
    elif kind == "offset":
        views = [cupy.full(bias.size + 1, nan, bias.dtype)[1:].reshape(bias.shape) for _ in range(2)]
    elif kind == "rows":
        views = [cupy.full((150, 4, 203), nan, bias.dtype).swapaxes(0, 1) for _ in range(2)]
    else:
        views = [cupy.full((4, 150, 406), nan, bias.dtype)[..., ::-2] for _ in range(2)]
    if kind == "repeated":
        bias[...] = bias[:1]
        views = [cupy.broadcast_to(bias[:1], bias.shape), views[1][:1]]
    else:
        views[0][...] = bias
    expected = attention_backward(**arrays, **options)
    got = attention_backward(**arrays, **(options | {"bias": views[0], "dbias": views[1]}))
    assert got.dbias is views[1]
    assert all(same_bits(x, y) for x, y in zip(got[:3], expected[:3], strict=True))
    if kind != "repeated":
        assert bool((got.dbias == expected.dbias).all())


def test_bhsd_is_bit_equal_to_bshd() -> None:
    case = of(2, 150, 200, 6, 2, 128, "bfloat16", True)
    arrays = there(case.make_arrays())
    expected = attention_backward(**arrays, causal=True, deterministic=True)
    turned = {name: x.swapaxes(1, 2) if x.ndim == 4 else x for name, x in arrays.items()}
    got = attention_backward(**turned, causal=True, deterministic=True, layout="BHSD")
    assert all(same_bits(x.swapaxes(1, 2), y) for x, y in zip(got[:3], expected[:3], strict=True))


@pytest.mark.parametrize("kind", ["columns", "offset", "rows", "broadcast"])
def test_c42_gradients_of_unaligned_arrays(kind: str) -> None:
    shape = (1, 65, 4, 64)
    arrays = there(BackwardCase(Case("c42", 1, 65, 65, 4, 4, 64, "float16", True)).make_arrays())
    views: dict[str, Any] = {}
    for name, x in arrays.items():
        if x.ndim != 4:
            views[name] = x
            continue
        if kind == "columns":
            view = cupy.full((*shape[:3], 65), np.nan, np.float16)[..., :64]
        elif kind == "offset":
            view = cupy.full(x.size + 1, np.nan, np.float16)[1:].reshape(shape)
        else:
            view = cupy.full((1, 130, 4, 64), np.nan, np.float16)[:, ::-2]
        view[...] = x
        views[name] = view
    if kind == "broadcast":
        ones = cupy.ones((), np.float16)
        views, arrays = (
            arrays | {"dout": cupy.broadcast_to(ones, shape)},
            arrays | {"dout": cupy.ones(shape, np.float16)},
        )
    options = {"causal": True, "deterministic": True}
    got, expected = attention_backward(**views, **options), attention_backward(**arrays, **options)
    assert all(same_bits(x, y) for x, y in zip(got[:3], expected[:3], strict=True))


# --- What users reported ---


def gradients(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> Any:
    """By way of the kernels in both directions, held to the oracles; arrays of NumPy."""
    arguments = there({"q": q, "k": k, "v": v} | options)
    (out, lse), pullback = attention_vjp(**arguments, return_lse=True)
    got = pullback(there({"dout": dout})["dout"])
    result = (host(out), host(lse))
    exact = backward.attention_backward(dout, q, k, v, *result, **options)
    plain = backward.same_precision(dout, q, k, v, *result, **options)
    for name, x, reference, yardstick in zip(got._fields, got, exact, plain, strict=True):
        if reference is not None:
            assert np.isfinite(host(x).astype(np.float32)).all()
            # What a bias gets was rounded to nothing less than float32, so that the order of additions shows.
            floor = 2.0**-19 * np.abs(reference).max() if name == "dbias" else 0.0
            assert_close(host(x), reference, yardstick, row_factor=None, floor=floor, what=name)
    return got


def numbers(q: tuple[int, ...], k: tuple[int, ...], dtype: Any, amplitude: float = 1.0) -> list[Any]:
    """q, k, v and dout."""
    arrays = [random_array(shape, dtype, n, amplitude=amplitude) for n, shape in enumerate((q, k, k))]
    return [*arrays, random_array(q, dtype, 3)]


def test_c01_gradients_of_more_queries_than_keys() -> None:
    dq, *_ = gradients(*numbers((1, 5, 1, 64), (1, 2, 1, 64), np.float16), causal=True)
    assert not host(dq)[:, :3].any()
    assert host(dq)[:, 4].any()


def test_c02_no_nan_in_gradients_of_rows_without_keys() -> None:
    q, k, v = (random_array((n, 1, 32), np.float16, i, xp=cupy, amplitude=3.0) for i, n in enumerate((256, 3, 3)))
    offsets = [cupy.asarray(np.int32(x)) for x in ([0, 76, 110, 256], [0, 1, 2, 3])]
    out, pullback = attention_vjp(q, k, v, *offsets, causal=True)
    dq, dk, dv, *_ = (x if x is None else host(x).astype(np.float32) for x in pullback(cupy.ones_like(out)))
    seen = [75, 109, 255]  # the last row of each sequence sees its only key
    assert not np.delete(dq, seen, axis=0).any()
    assert np.abs(dq).max() < 1e-4
    assert np.abs(dk).max() < 1e-4
    np.testing.assert_allclose(dv, 1, atol=2e-3)


def test_c18_gradients_of_rows_past_the_last_sequence_are_0() -> None:
    q, k, v, dout = (random_array((946, 16, 64), BF16, n, xp=cupy) for n in range(4))
    offsets = cupy.asarray(np.int32([0, 144, 432, 944]))
    out, pullback = attention_vjp(q, k, v, offsets, offsets)
    for x in (q, k, v, dout, out):
        poison(x[944:])
    for x in pullback(dout, **{name: poison(cupy.empty_like(q)) for name in ("dq", "dk", "dv")})[:3]:
        assert not host(bits(x[944:])).any()
        assert np.isfinite(host(x).astype(np.float32)).all()


def test_c23_an_lse_below_minus_88() -> None:
    q, k, v, dout = numbers((1, 704, 1, 64), (1, 704, 1, 64), BF16)
    gradients(np.abs(q), -np.abs(k), v, dout, softmax_scale=4.0, causal=True)


def test_c29_gradients_of_a_float32_bias_beside_bfloat16() -> None:
    bias = random_array((1, 4, 128, 128), np.float32, 4)
    assert gradients(*numbers((8, 128, 4, 32), (8, 128, 4, 32), BF16), bias=bias).dbias.dtype == np.float32


def test_c11_gradients_of_rows_of_the_most_negative_number_and_of_infinity() -> None:
    arrays = numbers((1, 200, 2, 64), (1, 200, 2, 64), BF16)
    bias = np.zeros((200, 200), np.float32)
    bias[:, 7] = np.finfo(np.float32).min
    bias[5] = -np.inf
    got = gradients(*arrays, bias=bias)
    assert not host(got.dq)[:, 5].any()
    assert not host(got.dbias)[5].any()
    assert not host(got.dbias)[:, 7].any()


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_c44_gradients_of_rows_that_are_no_multiple_of_16_bytes(dtype: Any) -> None:
    gradients(*numbers((2, 43, 4, 64), (2, 43, 4, 64), BF16), bias=random_array((2, 4, 43, 43), dtype, 4))


def test_c30_gradients_of_a_mask_and_a_bias_that_grows_with_the_distance() -> None:
    rows, keys = np.ogrid[:1025, :1025]
    arrays = numbers((1, 1025, 1, 64), (1, 1025, 1, 64), np.float16)
    gradients(*arrays, causal=True, bias=(rows - keys).astype(np.float32))


def test_c35_gradients_of_many_short_sequences() -> None:
    q, k, v, dout = (random_array((8300, 1, 16, 128), BF16, n, xp=cupy) for n in range(4))
    _, pullback = attention_vjp(q, k, v)
    dq, dk, dv, *_ = pullback(dout)
    assert same_bits(dv, dout)  # each row sees one key
    for x in (dq, dk):
        assert float(np.abs(host(x).astype(np.float32)).max()) < 1e-3


def test_c55_a_workspace_may_hold_anything() -> None:
    """Counters of turns that were never set would be waited for forever."""
    case = of(2, 300, 300, 6, 2, 64, "bfloat16", True)
    arrays = there(case.make_arrays())
    expected = attention_backward(**arrays, causal=True, deterministic=True)
    workspace = cupy.full(2**26, 0xFF, np.uint8)
    for _ in range(2):
        got = attention_backward(**arrays, causal=True, deterministic=True, workspace=workspace)
        assert all(same_bits(x, y) for x, y in zip(got[:3], expected[:3], strict=True))


def test_c56_the_backward_returns() -> None:
    gradients(*numbers((2, 256, 4, 64), (2, 256, 4, 64), BF16))
    q, k, v = (random_array((1024, heads, 64), BF16, heads, xp=cupy) for heads in (16, 8, 8))
    offsets = cupy.asarray(np.int32([0, 256, 512, 768, 1024]))
    out, pullback = attention_vjp(q, k, v, offsets, offsets)
    assert np.isfinite(host(pullback(out).dq).astype(np.float32)).all()


def test_c57_gradients_of_keys_are_the_same_each_time() -> None:
    """No two thread blocks add to them here, deterministic or not."""
    q, k, v, dout = (random_array((60, n, 4, 128), BF16, i, xp=cupy) for i, n in enumerate((2048, 128, 128, 2048)))
    _, pullback = attention_vjp(q, k, v)
    first, different = pullback(dout), cupy.zeros((), np.int64)
    with bandwidth_hog():
        for _ in range(1000):
            _, dk, dv, *_ = pullback(dout)
            different += (bits(dk) != bits(first.dk)).sum() + (bits(dv) != bits(first.dv)).sum()
        assert int(different) == 0


@pytest.mark.parametrize(("heads_q", "heads_kv", "causal"), [(12, 12, False), (16, 2, True)])
def test_c58_deterministic_is_bitwise(heads_q: int, heads_kv: int, causal: bool) -> None:
    shapes = [(2, 1024, heads, 64) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
    q, k, v, dout = (random_array(shape, np.float16, n, xp=cupy) for n, shape in enumerate(shapes))
    _, pullback = attention_vjp(q, k, v, causal=causal)
    first = pullback(dout, deterministic=True)
    with bandwidth_hog():
        for _ in range(200):
            got = pullback(dout, deterministic=True)
            assert all(same_bits(x, y) for x, y in zip(got[:3], first[:3], strict=True))


def test_gradients_of_arrays_of_the_other_library_are_refused() -> None:
    arrays = BackwardCase(Case("mixed", 1, 20, 30, 2, 1, 64)).make_arrays()
    device = there(arrays)
    for name in arrays:
        with pytest.raises(TypeError, match=r"^attention: \w+ is a (numpy|cupy)\.ndarray but q is a (numpy|cupy)\.nda"):
            attention_backward(**(device | {name: arrays[name]}))
    with pytest.raises(ValueError, match=r"^attention: dq shares memory with q; it must be an array of its own"):
        cupyfa.attention_backward(**device, dq=device["q"])
