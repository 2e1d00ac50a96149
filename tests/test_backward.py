"""Gradients: the public functions on the CPU, what they refuse, and the way back that cannot have other options."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from gradients import call

import cupyfa
from cupyfa import attention_backward, attention_varlen_backward, attention_vjp
from cupyfa.oracles import backward
from cupyfa.oracles.packed import sequences
from cupyfa.testing import BACKWARD_CASES, BackwardCase, PackedCase, assert_gradients_close, random_array

SMALL = [case for case in BACKWARD_CASES if not case.large]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_case(case: BackwardCase) -> None:
    assert_gradients_close(call(case), case)


@pytest.mark.parametrize("case", SMALL[::12], ids=lambda case: case.id)
def test_gradients_are_made_if_they_are_not_given(case: BackwardCase) -> None:
    function = attention_varlen_backward if case.packed else attention_backward
    made = function(**case.make_arrays(), **case.call_options)
    for name, given in call(case)._asdict().items():
        assert (given is None) == (getattr(made, name) is None)
        if given is not None:
            np.testing.assert_array_equal(getattr(made, name), given)
            assert getattr(made, name).dtype == given.dtype


# --- attention_vjp ---


@pytest.mark.parametrize("case", SMALL[::5], ids=lambda case: case.id)
def test_vjp_is_the_two_calls(case: BackwardCase) -> None:
    arrays, options = case.make_arrays(), case.call_options
    deterministic = options.pop("deterministic")
    inputs = {name: x for name, x in arrays.items() if name not in ("dout", "out", "lse", "dlse")}
    (out, lse), pullback = attention_vjp(**inputs, **options, return_lse=True)
    forward = cupyfa.attention_varlen if case.packed else cupyfa.attention
    for got, expected in zip((out, lse), forward(**inputs, **options, return_lse=True), strict=True):
        np.testing.assert_array_equal(got, expected)
    function = attention_varlen_backward if case.packed else attention_backward
    expected = function(**(arrays | {"out": out, "lse": lse}), **options)
    for _ in range(2):  # any number of times
        for got, of_function in zip(
            pullback(arrays["dout"], arrays.get("dlse"), deterministic=deterministic), expected, strict=True
        ):
            assert (got is None) == (of_function is None)
            if got is not None:
                np.testing.assert_array_equal(got, of_function)


def test_vjp_returns_what_attention_does() -> None:
    q, k, v = (random_array((1, 5, 2, 8), np.float16, n) for n in range(3))
    out = np.empty_like(q)
    result, _ = attention_vjp(q, k, v, out=out)
    assert result is out
    result, pullback = attention_vjp(q, k, v, return_lse=True)
    assert isinstance(result, cupyfa.AttentionResult)
    assert isinstance(pullback, cupyfa.Pullback)
    given = {name: np.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    gradients = pullback(out, **given)
    assert all(getattr(gradients, name) is x for name, x in given.items())


def test_options_of_the_way_back_cannot_be_others() -> None:
    q, k, v = (random_array((1, 5, 2, 8), np.float16, n) for n in range(3))
    window = [2, 0]
    out, pullback = attention_vjp(q, k, v, window_size=window, softcap=3.0)
    expected = pullback(out)
    window[0] = 0
    for got, before in zip(pullback(out)[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(got, before)
    with pytest.raises(TypeError, match="softcap"):
        pullback(out, softcap=4.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"return_lse": 1}, TypeError, "return_lse is 1; it must be True or False"),
        ({"causal": 1}, TypeError, "causal is 1; it must be True or False"),
        ({"max_seqlen_q": 3}, TypeError, "max_seqlen_q is for packed sequences, which have cu_seqlens_q and"),
        ({"seqused_k": np.int32([3])}, TypeError, "seqused_k is for packed sequences"),
        ({"plan": 3}, TypeError, "plan is for packed sequences"),
        ({"cu_seqlens_q": np.int32([0, 5])}, TypeError, "cu_seqlens_k is None; it must be an array of int32"),
        ({"cu_seqlens_k": np.int32([0, 5])}, TypeError, "cu_seqlens_q is None; it must be an array of int32"),
        (
            {"cu_seqlens_q": np.int32([0, 5]), "cu_seqlens_k": np.int32([0, 5]), "layout": "BHSD"},
            ValueError,
            "layout is 'BHSD'; packed sequences have none, it must be 'BSHD'",
        ),
    ],
)
def test_bad_options_of_vjp(options: dict[str, Any], error: type[Exception], message: str) -> None:
    q = np.zeros((1, 5, 2, 8), np.float16)
    with pytest.raises(error, match=f"^attention: {message}"):
        attention_vjp(q, q, q, **options)


def test_functions_of_gradients_take_the_same_options() -> None:
    names = {
        function.__name__: [*inspect.signature(function).parameters]
        for function in (cupyfa.attention, cupyfa.attention_varlen, attention_backward, attention_varlen_backward)
    }
    own = {"dout", "out", "lse", "dlse", "deterministic", "dq", "dk", "dv", "dsink", "dbias"}
    for ours, forward in (("attention_backward", "attention"), ("attention_varlen_backward", "attention_varlen")):
        not_here = {"return_lse", "out", "lse", "plan"}
        if forward == "attention":
            not_here |= {"seqused_q", "seqused_k"}  # gradients of a batch used in part: as packed sequences
        assert [x for x in names[ours] if x not in own] == [x for x in names[forward] if x not in not_here]
    of_pullback = {*inspect.signature(cupyfa.Pullback.__call__).parameters} - {"self"}
    assert of_pullback == own - {"out", "lse"} | {"workspace", "config"}
    vjp = [*inspect.signature(attention_vjp).parameters]
    assert {*vjp} == {*names["attention"], *names["attention_varlen"]}


# --- Arrays of any place ---


def test_views_give_what_contiguous_arrays_give() -> None:
    case = BackwardCase(next(x for x in SMALL if x.forward.id.startswith("dlse")).forward, dlse=True)
    arrays, options = case.make_arrays(), case.call_options
    expected = attention_backward(**arrays, **options)
    views = {name: np.repeat(x, 2, axis=-1)[..., ::2] for name, x in arrays.items()}
    views["lse"], views["dout"] = np.flip(np.flip(arrays["lse"], 2).copy(), 2), np.asfortranarray(arrays["dout"])
    wide = {name: np.full((*arrays[name[1:]].shape[:3], 300), np.nan, arrays["q"].dtype) for name in ("dq", "dk", "dv")}
    outputs = {name: x[..., : arrays[name[1:]].shape[-1]] for name, x in wide.items()}
    got = attention_backward(**views, **options, **outputs)
    for x, y in zip(got[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(x, y)
    assert all(np.isnan(x[..., outputs[name].shape[-1] :]).all() for name, x in wide.items())


def test_a_gradient_of_the_output_may_be_one_number() -> None:
    """That of a sum: an array that repeats it."""
    q, k, v = (random_array((2, 7, 2, 8), np.float16, n) for n in range(3))
    out, pullback = attention_vjp(q, k, v, causal=True)
    ones = np.broadcast_to(np.float16(1), out.shape)
    for got, expected in zip(pullback(ones)[:3], pullback(np.ones_like(out))[:3], strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_bias_that_a_view_repeats_has_one_gradient() -> None:
    q, k, v = (random_array((2, 7, 2, 8), np.float16, n) for n in range(3))
    bias = random_array((2, 1, 7), np.float32, 3)
    dbias = []
    for given in (bias, np.broadcast_to(bias, (2, 7, 7)), np.broadcast_to(bias, (2, 2, 7, 7))):
        out, pullback = attention_vjp(q, k, v, bias=given)
        dbias.append(pullback(out).dbias)
    assert [x.shape for x in dbias] == [(2, 1, 7), (2, 1, 7), (1, 2, 1, 7)]
    assert dbias[0].dtype == np.float32
    for x in dbias[1:]:
        np.testing.assert_array_equal(x.ravel(), dbias[0].ravel())


def test_a_gradient_is_rounded_once() -> None:
    """dV is the sum of dO here, where a second rounding would go the other way."""
    q, k, v = (np.zeros((1, n, 1, 8), ml_dtypes.bfloat16) for n in (3, 1, 1))
    out, pullback = attention_vjp(q, k, v)
    dout = np.zeros(out.shape, ml_dtypes.bfloat16)
    dout[0, :, 0, 0] = [1, 2.0**-8, 2.0**-14]
    assert float(pullback(dout).dv[0, 0, 0, 0]) == 1 + 2.0**-7


# --- Bad calls ---


def zeros(*shape: int, dtype: Any = np.float16) -> Any:
    return np.zeros(shape, dtype)


def rows(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


GOOD: dict[str, Any] = {
    "dout": zeros(2, 5, 4, 24),
    "q": zeros(2, 5, 4, 16),
    "k": zeros(2, 6, 2, 16),
    "v": zeros(2, 6, 2, 24),
    "out": zeros(2, 5, 4, 24),
    "lse": rows(2, 4, 5),
}
BIASED = {"bias": rows(4, 5, 6)}
SHARED = zeros(4096)
FOREIGN = {name: x for name, x in GOOD.items() if name != "dout"}


def part(begin: int, *shape: int, dtype: Any = np.float16) -> Any:
    """An array in the middle of shared memory."""
    return SHARED.view(dtype)[begin : begin + math.prod(shape)].reshape(shape)


OF_OUT = r"; it must have the shape of q, with the head_dim of v, \(2, 5, 4, 24\)$"
OF_ROWS = r"; it must have \(batch, heads_q, seqlen_q\), \(2, 4, 5\)$"
ITSELF = r"; its elements must not overlap each other$"
ALONE = r"; it must be an array of its own"
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q is no array": ({"q": [1.0]}, TypeError, r"q is a list; it must be a numpy.ndarray or a cupy.ndarray"),
    "dout is none": ({"dout": None}, TypeError, r"dout is a NoneType but q is a numpy.ndarray; pass NumPy arrays"),
    "out is none": ({"out": None}, TypeError, r"out is a NoneType but q is a numpy.ndarray"),
    "lse is none": ({"lse": None}, TypeError, r"lse is a NoneType but q is a numpy.ndarray"),
    "lse is a list": ({"lse": [0.0]}, TypeError, r"lse is a list but q is a numpy.ndarray"),
    "dlse is a number": ({"dlse": 0.0}, TypeError, r"dlse is a float but q is a numpy.ndarray"),
    "dq is true": ({"dq": True}, TypeError, r"dq is a bool but q is a numpy.ndarray"),
    "dout dtype": ({"dout": rows(2, 5, 4, 24)}, TypeError, r"dout has dtype float32; it must be float16$"),
    "dout other half": (
        {"dout": zeros(2, 5, 4, 24, dtype=ml_dtypes.bfloat16)}, TypeError,
        r"dout has dtype bfloat16; it must be float16$",
    ),
    "out dtype": ({"out": rows(2, 5, 4, 24)}, TypeError, r"out has dtype float32; it must be float16$"),
    "dout like q": ({"dout": zeros(2, 5, 4, 16)}, ValueError, r"dout has shape \(2, 5, 4, 16\)" + OF_OUT),
    "dout rank": ({"dout": zeros(5, 4, 24)}, ValueError, r"dout has shape \(5, 4, 24\)" + OF_OUT),
    "out of other rows": ({"out": zeros(2, 6, 4, 24)}, ValueError, r"out has shape \(2, 6, 4, 24\)" + OF_OUT),
    "lse of rows first": ({"lse": rows(2, 5, 4)}, ValueError, r"lse has shape \(2, 5, 4\)" + OF_ROWS),
    "lse dtype": ({"lse": zeros(2, 4, 5)}, TypeError, r"lse has dtype float16; it must be float32$"),
    "lse double": ({"lse": rows(2, 4, 5, dtype=np.float64)}, TypeError, r"lse has dtype float64; it must be float32$"),
    "dlse shape": ({"dlse": rows(2, 4, 5, 1)}, ValueError, r"dlse has shape \(2, 4, 5, 1\)" + OF_ROWS),
    "dlse dtype": ({"dlse": zeros(2, 4, 5)}, TypeError, r"dlse has dtype float16; it must be float32$"),
    "dq dtype": ({"dq": rows(2, 5, 4, 16)}, TypeError, r"dq has dtype float32; it must be float16$"),
    "dq shape": (
        {"dq": zeros(2, 5, 4, 24)}, ValueError,
        r"dq has shape \(2, 5, 4, 24\); it must have the shape of q, \(2, 5, 4, 16\)$",
    ),
    "dk of query heads": (
        {"dk": zeros(2, 6, 4, 16)}, ValueError, r"dk has shape .*; it must have the shape of k, \(2, 6, 2, 16\)$"
    ),
    "dv like k": (
        {"dv": zeros(2, 6, 2, 16)}, ValueError, r"dv has shape .*; it must have the shape of v, \(2, 6, 2, 24\)$"
    ),
    "dsink without a sink": ({"dsink": rows(4)}, ValueError, r"dsink is the gradient of sink, and there is none$"),
    "dbias without a bias": ({"dbias": rows(4, 5, 6)}, ValueError, r"dbias is the gradient of bias, and there is none"),
    "dsink shape": (
        {"sink": rows(4), "dsink": rows(2, 4)}, ValueError,
        r"dsink has shape \(2, 4\); it must have \(heads_q,\), \(4,\)$",
    ),
    "dsink dtype": ({"sink": rows(4), "dsink": zeros(4)}, TypeError, r"dsink has dtype float16; it must be float32$"),
    "dbias shape": (
        BIASED | {"dbias": rows(1, 4, 5, 6)}, ValueError,
        r"dbias has shape \(1, 4, 5, 6\); it must have the shape of bias, with 1 where it repeats, \(4, 5, 6\)$",
    ),
    "dbias of a view": (
        {"bias": np.broadcast_to(rows(4, 1, 6), (4, 5, 6)), "dbias": rows(4, 5, 6)}, ValueError,
        r"dbias has shape \(4, 5, 6\); it must have .*, \(4, 1, 6\)$",
    ),
    "dbias dtype": (BIASED | {"dbias": zeros(4, 5, 6)}, TypeError, r"dbias has dtype float16; it must be float32$"),
    "dq repeats": (
        {"dq": np.lib.stride_tricks.as_strided(zeros(999), (2, 5, 4, 16), (640, 128, 0, 2))}, ValueError,
        r"dq has strides \(640, 128, 0, 2\) bytes for shape \(2, 5, 4, 16\)" + ITSELF,
    ),
    "dq read-only": (
        {"dq": np.frombuffer(bytes(1280), np.float16).reshape(2, 5, 4, 16)}, ValueError, "dq is read-only; it must be"
    ),
    "dbias read-only": (
        BIASED | {"dbias": np.frombuffer(bytes(480), np.float32).reshape(4, 5, 6)}, ValueError, "dbias is read-only; it"
    ),
    "dq is q": ({"dq": GOOD["q"]}, ValueError, "dq shares memory with q" + ALONE),
    "dk is k": ({"dk": GOOD["k"]}, ValueError, "dk shares memory with k" + ALONE),
    "dv is v": ({"dv": GOOD["v"]}, ValueError, "dv shares memory with v" + ALONE),
    "dk in dq": (
        {"dq": part(0, 2, 5, 4, 16), "dk": part(639, 2, 6, 2, 16)}, ValueError, "dk shares memory with dq" + ALONE
    ),
    "dv in dk": (
        {"dk": part(100, 2, 6, 2, 16), "dv": part(0, 2, 6, 2, 24)}, ValueError, "dv shares memory with dk" + ALONE
    ),
    "dq in dout": (
        {"dout": part(0, 2, 5, 4, 24), "dq": part(959, 2, 5, 4, 16)}, ValueError, "dq shares memory with dout" + ALONE
    ),
    "dq in out": (
        {"out": part(0, 2, 5, 4, 24), "dq": part(959, 2, 5, 4, 16)}, ValueError, "dq shares memory with out" + ALONE
    ),
    "dk in lse": (
        {"lse": part(0, 2, 4, 5, dtype=np.float32), "dk": part(79, 2, 6, 2, 16)}, ValueError,
        "dk shares memory with lse" + ALONE,
    ),
    "dv in dlse": (
        {"dlse": part(0, 2, 4, 5, dtype=np.float32), "dv": part(79, 2, 6, 2, 24)}, ValueError,
        "dv shares memory with dlse" + ALONE,
    ),
    "dsink in dq": (
        {"sink": rows(4), "dsink": part(0, 4, dtype=np.float32), "dq": part(7, 2, 5, 4, 16)}, ValueError,
        "dsink shares memory with dq" + ALONE,
    ),
    "dsink is sink": (
        dict.fromkeys(("sink", "dsink"), rows(4)), ValueError, "dsink shares memory with sink" + ALONE
    ),
    "dbias is bias": (BIASED | {"dbias": BIASED["bias"]}, ValueError, "dbias shares memory with bias" + ALONE),
    "deterministic": ({"deterministic": 1}, TypeError, r"deterministic is 1; it must be True or False$"),
    "deterministic none": ({"deterministic": None}, TypeError, r"deterministic is None; it must be True or False$"),
    "workspace": ({"workspace": zeros(3)}, TypeError, r"workspace is for CuPy arrays; q is a numpy.ndarray, which"),
    "workspace under the emulator": (
        {"workspace": zeros(3), "backend": "emulator"}, TypeError, r"workspace is for CuPy arrays; q is a numpy.ndarray"
    ),
    "backend": ({"backend": "gpu"}, ValueError, r"backend is 'gpu'; it must be 'emulator' or None$"),
    "head_dim above 256": (
        {name: zeros(2, 5 if name == "q" else 6, 4 if name == "q" else 2, 264) for name in ("q", "k")},
        cupyfa.UnsupportedError, r"q has head_dim 264; supported are the multiples of 8 from 8 to 256$",
    ),
    "head_dim of v above 256": (
        {"v": zeros(2, 6, 2, 264), "out": zeros(2, 5, 4, 264), "dout": zeros(2, 5, 4, 264)},
        cupyfa.UnsupportedError, r"v has head_dim 264; supported are the multiples of 8 from 8 to 256$",
    ),
    "config": ({"config": 3}, TypeError, r"config is 3; it must be a mapping of BwdSpec fields or None$"),
    "config type": ({"config": {"q_stages": 2.0}}, TypeError, r"config\['q_stages'\] is 2.0; it must be an integer$"),
    "config value": ({"config": {"dout_stages": 9}}, ValueError, r"config\['dout_stages'\] is 9; it must be one of 1"),
    "config field": (
        {"config": {"tile_n": 64}}, ValueError,
        r"config has the field 'tile_n'; gradients can override q_stages, dout_stages, setmaxnreg$",
    ),
    "masked": (
        {"dout": np.ma.masked_array(GOOD["dout"])}, TypeError,
        r"masked arrays are not supported; pass plain numpy.ndarray",
    ),
    # What the forward pass would refuse
    "k dtype": ({"k": rows(2, 6, 2, 16)}, TypeError, r"k has dtype float32; it must be float16 or ml_dtypes.bfloat16$"),
    "q rank": ({"q": zeros(5, 4, 16)}, ValueError, r"q has 3 axes, shape \(5, 4, 16\); it needs 4"),
    "head_dim": ({"k": zeros(2, 6, 2, 24)}, ValueError, r"k has head_dim 24 but q has 16; they must be equal$"),
    "causal": ({"causal": None}, TypeError, r"causal is None; it must be True or False$"),
    "window": ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\); each side must be at least 0"),
    "softcap": ({"softcap": 0}, ValueError, r"softcap is 0.0; it must be positive"),
    "scale": ({"softmax_scale": math.nan}, ValueError, r"softmax_scale is nan; it must be finite"),
    "layout": ({"layout": "BDSH"}, ValueError, r"layout is 'BDSH'; it must be 'BSHD' or 'BHSD'$"),
    "sink": ({"sink": rows(2)}, ValueError, r"sink has shape \(2,\); it must have \(heads_q,\), \(4,\)$"),
    "slopes": ({"alibi_slopes": rows(3)}, ValueError, r"alibi_slopes has shape \(3,\); it must have"),
    "bias": ({"bias": rows(4, 5, 7)}, ValueError, r"bias has shape \(4, 5, 7\); it must have 2 to 4 axes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    changes, error, message = BAD[name]
    attention_backward(**GOOD)
    with pytest.raises(error, match=f"^attention: {message}"):
        attention_backward(**(GOOD | changes))


def test_gradients_of_another_layout_have_its_shapes() -> None:
    turned = {name: x.swapaxes(1, 2) if x.ndim == 4 else x for name, x in GOOD.items()}
    got = attention_backward(**turned, layout="BHSD")
    assert [x.shape for x in got[:3]] == [(2, 4, 5, 16), (2, 2, 6, 16), (2, 2, 6, 24)]
    with pytest.raises(ValueError, match=r"^attention: dout has shape \(2, 5, 4, 24\); it must .*, \(2, 4, 5, 24\)$"):
        attention_backward(**(turned | {"dout": GOOD["dout"]}), layout="BHSD")


PACKED: dict[str, Any] = {
    "dout": zeros(10, 4, 24),
    "q": zeros(10, 4, 16),
    "k": zeros(12, 2, 16),
    "v": zeros(12, 2, 24),
    "out": zeros(10, 4, 24),
    "lse": rows(4, 10),
    "cu_seqlens_q": np.int32([0, 4, 10]),
    "cu_seqlens_k": np.int32([0, 7, 12]),
}
OF_PACKED_ROWS = r"; it must have \(heads_q, total_q\), \(4, 10\)$"
BAD_PACKED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no offsets": ({"cu_seqlens_k": None}, TypeError, r"cu_seqlens_k is None; it must be an array of int32 with"),
    "four axes": ({"q": zeros(1, 10, 4, 16)}, ValueError, r"q has 4 axes, shape \(1, 10, 4, 16\); it needs 3: "),
    "int64": ({"cu_seqlens_q": np.array([0, 4, 10])}, TypeError, r"cu_seqlens_q has dtype int64; it must be int32"),
    "beyond": ({"cu_seqlens_k": np.int32([0, 7, 13])}, ValueError, r"cu_seqlens_k\[2\] is 13; .* 12 rows of k"),
    "used beyond": ({"seqused_k": np.int32([3, 6])}, ValueError, r"seqused_k\[1\] is 6; it must be from 0 to 5"),
    "max": ({"max_seqlen_q": -1}, ValueError, r"max_seqlen_q is -1; it must be at least 0"),
    "lse": ({"lse": rows(10, 4)}, ValueError, r"lse has shape \(10, 4\)" + OF_PACKED_ROWS),
    "dlse": ({"dlse": rows(10, 4)}, ValueError, r"dlse has shape \(10, 4\)" + OF_PACKED_ROWS),
    "dout": ({"dout": zeros(10, 4, 16)}, ValueError, r"dout has shape \(10, 4, 16\); it must have the shape of q,"),
    "out": ({"out": zeros(9, 4, 24)}, ValueError, r"out has shape \(9, 4, 24\); it must have the shape of q, with"),
    "dk": ({"dk": zeros(10, 2, 16)}, ValueError, r"dk has shape .*; it must have the shape of k, \(12, 2, 16\)$"),
    "bias": ({"bias": rows(5, 7)}, ValueError, r"bias has 5 rows but sequence 1 has 6; it must have 1, or as many"),
    "deterministic": ({"deterministic": "yes"}, TypeError, r"deterministic is 'yes'; it must be True or False$"),
    "workspace": ({"workspace": zeros(3)}, TypeError, r"workspace is for CuPy arrays"),
    "workspace under the emulator": (
        {"workspace": zeros(3), "backend": "emulator"}, TypeError, r"workspace is for CuPy arrays"
    ),
    "dq in the lengths": (
        {"cu_seqlens_q": part(0, 3, dtype=np.int32), "dq": part(5, 10, 4, 16)}, ValueError,
        "dq shares memory with cu_seqlens_q",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PACKED)
def test_bad_packed_calls(name: str) -> None:
    changes, error, message = BAD_PACKED[name]
    attention_varlen_backward(**PACKED)
    with pytest.raises(error, match=f"^attention: {message}"):
        attention_varlen_backward(**(PACKED | changes))


def test_nothing_was_written_if_a_call_was_refused() -> None:
    given = {name: np.ones_like(GOOD[name[1:]]) for name in ("dq", "dk")}
    with pytest.raises(ValueError, match="dv has shape"):
        attention_backward(**GOOD, **given, dv=zeros(1))
    assert all((x == 1).all() for x in given.values())


def test_arrays_of_cupy_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)
    there = {name: fake_cupy.Array(x) for name, x in GOOD.items()}
    with pytest.raises(ValueError, match=r"^attention: lse has shape \(2, 5, 4\)"):
        attention_backward(**(there | {"lse": fake_cupy.Array(rows(2, 5, 4))}))
    odd = np.lib.stride_tricks.as_strided(rows(99), (5, 6), (26, 4))
    with pytest.raises(ValueError, match=r"^attention: bias has strides \(0, 0, 26, 4\) bytes; they must be multiples"):
        attention_backward(**there, bias=fake_cupy.Array(odd))
    for name in ("dout", "out", "lse", "dlse", "dq", "dbias"):
        shape = {"dlse": GOOD["lse"], "dq": GOOD["q"], "dbias": GOOD["lse"]}.get(name, GOOD.get(name))
        with pytest.raises(TypeError, match=rf"^attention: {name} is a numpy.ndarray but q is a fake_cupy.Array; pass"):
            attention_backward(**(there | {name: shape}))
    with pytest.raises(TypeError, match=r"^attention: dout is a fake_cupy.Array but q is a numpy.ndarray"):
        attention_backward(**(GOOD | {"dout": there["dout"]}))


# --- The table, and the rule that holds gradients to it ---


def test_cases_have_their_own_names_and_are_small_unless_they_are_large() -> None:
    assert len({case.id for case in BACKWARD_CASES}) == len(BACKWARD_CASES)
    for case in SMALL:
        arrays = case.make_arrays()
        if isinstance(case.forward, PackedCase):
            lengths = [
                (rows.stop - rows.start, keys.stop - keys.start) for rows, keys in sequences(**case.forward.lengths)
            ]
            scores = case.forward.heads_q * sum(rows * keys for rows, keys in lengths)
        else:
            scores = math.prod(arrays["lse"].shape) * case.forward.seqlen_k
        assert scores <= 4 * 300 * 300


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dsink", "dbias"])
def test_a_gradient_that_is_off_by_a_little_is_found(name: str) -> None:
    case = next(x for x in SMALL if x.forward.id.startswith("mixed") and x.options.keys() >= {"sink", "bias"})
    good = call(case)
    assert_gradients_close(good, case)
    wrong = good._replace(**{name: (getattr(good, name).astype(np.float32) * 1.02).astype(getattr(good, name).dtype)})
    with pytest.raises(AssertionError, match=rf"^{name}\["):
        assert_gradients_close(wrong, case)
    with pytest.raises(AssertionError, match=rf"^{name}: "):
        assert_gradients_close(good._replace(**{name: None}), case)


@pytest.mark.parametrize(
    ("fault", "which"),
    [
        (lambda arrays, options: arrays.update(dlse=-arrays["dlse"]), "d[qk]"),
        (lambda arrays, options: arrays.update(lse=arrays["lse"] * np.float32(math.log2(math.e))), "d[qkv]"),
        (lambda arrays, options: arrays.update(out=np.roll(arrays["out"], 1, axis=1)), "d[qk]"),
        (lambda arrays, options: options.update(softmax_scale=0.0), "d[qkv]"),
        (lambda arrays, options: options.update(causal=not options["causal"]), "d[qkv]"),
    ],
    ids=["sign of dlse", "lse in base 2", "delta of another row", "scale", "mask"],
)
def test_faults_are_found(fault: Any, which: str) -> None:
    case = next(x for x in SMALL if x.id.startswith("dlse"))
    arrays, options = case.make_arrays(), case.call_options
    fault(arrays, options)
    with pytest.raises(AssertionError, match=rf"^{which}\["):
        assert_gradients_close(attention_backward(**arrays, **options), case)


def test_rows_with_one_key_may_differ_by_the_order_of_additions() -> None:
    """dP - delta is 0 there but for rounding, which no number format accounts for: that is what the floor is for."""
    case = next(x for x in SMALL if x.forward.id.startswith("lengths-b1-q64"))
    arrays, options = case.make_arrays(), case.options
    exact = backward.attention_backward(**arrays, **options)
    scale = np.linalg.norm(arrays["dout"][0, 0, 0].astype(float)) * np.linalg.norm(arrays["v"][0, 0, 0].astype(float))
    for error, is_fine in ((2.0**-22, True), (2.0**-16, False)):
        dq = exact.dq.copy()
        dq[0, 0, 0] += error * scale * arrays["k"][0, 0, 0].astype(float) * arrays["q"].shape[-1] ** -0.5
        rounded = [x.astype(arrays["q"].dtype) for x in (dq, exact.dk, exact.dv)]
        gradients = backward.Gradients(*rounded)
        if is_fine:
            assert_gradients_close(gradients, case)
        else:
            with pytest.raises(AssertionError, match=re.escape("dq[0, 0, 0, ")):
                assert_gradients_close(gradients, case)


@pytest.mark.parametrize("name", ["lengths-b2-q200-k65", "packed-sink"])
def test_gradients_of_what_sees_nothing_must_be_0(name: str) -> None:
    """No error is unavoidable there, and rounding has nothing to say."""
    case = next(x for x in SMALL if x.id.startswith(name) and x.options["causal"])
    good = call(case)
    assert_gradients_close(good, case)
    row = 100 if case.packed else (0, 5)  # a row of a sequence without keys, and one before the first diagonal
    assert not good.dq[row].any()
    wrong = good._replace(dq=good.dq.copy())
    wrong.dq[row] = 1e-6
    with pytest.raises(AssertionError, match=r"^dq\["):
        assert_gradients_close(wrong, case)


def test_packed_arrays_are_nan_where_nobody_looks() -> None:
    case = BackwardCase(PackedCase("nobody", (3, 5), before=2, behind=1), dlse=True)
    arrays = case.make_arrays()
    nobodys = [0, 1, 10]
    assert np.isnan(arrays["dout"][nobodys].astype(float)).all()
    assert np.isnan(arrays["dlse"][:, nobodys]).all()
    assert np.isfinite(arrays["dout"][2:10].astype(float)).all()
