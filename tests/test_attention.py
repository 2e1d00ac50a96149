"""The public function on NumPy arrays: values, outputs in place, and what comes back."""

from __future__ import annotations

import inspect
import math
import typing
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyfa
from cupyfa import AttentionResult, attention
from cupyfa.oracles import dense, online
from cupyfa.testing import (
    CASES,
    Case,
    as_bshd,
    assert_close,
    assert_lse_close,
    guarded_empty,
    random_array,
    score_magnitude,
)

BF16 = np.dtype(ml_dtypes.bfloat16)


def cheap(case: Case) -> bool:
    return case.batch * case.heads_q * case.seqlen_q * max(1, case.seqlen_k) * case.head_dim < 2e8


# Every group of the table, a few cases of each: what the oracle computes has tests of its own.
SAMPLE = [
    case
    for group in dict.fromkeys(case.group for case in CASES)
    for case in [case for case in CASES if case.group == group and cheap(case)][::5]
]


def inputs(**changes: Any) -> tuple[Any, Any, Any]:
    fields: dict[str, Any] = {"batch": 2, "seqlen_q": 33, "seqlen_k": 50, "heads_q": 4, "heads_kv": 2, "head_dim": 24}
    return Case("test", **fields | changes).make_inputs()


def same_bits(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_sample_holds_every_group() -> None:
    assert {case.group for case in SAMPLE} == {case.group for case in CASES} - {"persistent"} | (
        {"persistent"} if any(cheap(case) for case in CASES if case.group == "persistent") else set()
    )
    assert len(SAMPLE) >= 30


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.id)
def test_case(case: Case) -> None:
    q, k, v = case.make_inputs()
    before = [x.tobytes() for x in (q, k, v)]
    out = guarded_empty((*q.shape[:3], v.shape[3]), q.dtype)
    lse = guarded_empty((case.batch, case.heads_q, case.seqlen_q), np.float32)
    result = attention(q, k, v, layout=case.layout, return_lse=True, out=out.array, lse=lse.array, **case.options)
    assert result.out is out.array
    assert result.lse is lse.array
    out.check("out")
    lse.check("lse")
    assert [x.tobytes() for x in (q, k, v)] == before
    Q, K, V, O = (as_bshd(x, case.layout) for x in (q, k, v, out.array))
    reference, reference_lse = dense.attention(Q, K, V, **case.options)
    plain, _ = dense.same_precision(Q, K, V, **case.options)
    assert_close(O, reference, plain, context=case)
    magnitude = score_magnitude(Q, K, case.softmax_scale)
    assert_lse_close(lse.array, reference_lse, score_magnitude=magnitude, context=case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_result_types(dtype: str) -> None:
    q, k, v = inputs(dtype=dtype)
    out = attention(q, k, v)
    assert type(out) is np.ndarray
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert out.flags.c_contiguous
    result = attention(q, k, v, return_lse=True)
    assert type(result) is AttentionResult
    assert result._fields == ("out", "lse")
    assert (result.lse.shape, result.lse.dtype) == ((2, 4, 33), np.dtype(np.float32))
    assert same_bits(result.out, out)


def test_default_is_the_oracles() -> None:
    q, k, v = inputs()
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = online.attention(q, k, v, causal=True)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)


def test_out_alone_is_returned_and_written_in_place() -> None:
    q, k, v = inputs()
    out = np.full_like(q, np.nan)
    assert attention(q, k, v, out=out) is out
    assert same_bits(out, attention(q, k, v))


def test_lse_is_written_even_if_it_is_not_returned() -> None:
    q, k, v = inputs()
    lse = np.full((2, 4, 33), np.nan, np.float32)
    out = attention(q, k, v, lse=lse)
    assert type(out) is np.ndarray
    assert same_bits(lse, attention(q, k, v, return_lse=True).lse)


def test_strided_outputs_keep_their_gaps() -> None:
    q, k, v = inputs()
    out_buffer = np.full((2, 33, 4, 32), 7, q.dtype)
    lse_buffer = np.full((2, 33, 8), 7, np.float32)
    out, lse = out_buffer[..., 4:28], lse_buffer[:, :, ::2].transpose(0, 2, 1)
    result = attention(q, k, v, out=out, lse=lse, return_lse=True)
    assert result.out is out
    assert result.lse is lse
    expected = attention(q, k, v, return_lse=True)
    assert same_bits(np.ascontiguousarray(out), expected.out)
    assert same_bits(np.ascontiguousarray(lse), expected.lse)
    assert (out_buffer[..., :4] == 7).all()
    assert (out_buffer[..., 28:] == 7).all()
    assert (lse_buffer[:, :, 1::2] == 7).all()


@pytest.mark.parametrize("causal", [False, True])
def test_bhsd_is_the_same_problem(causal: bool) -> None:
    q, k, v = inputs(dtype="bfloat16")
    expected = attention(q, k, v, causal=causal, return_lse=True)
    turned = [np.ascontiguousarray(as_bshd(x, "BHSD")) for x in (q, k, v)]
    out, lse = attention(*turned, causal=causal, layout="BHSD", return_lse=True)
    assert out.shape == (2, 4, 33, 24)
    assert same_bits(np.ascontiguousarray(as_bshd(out, "BHSD")), expected.out)
    assert same_bits(lse, expected.lse)  # (batch, heads, seqlen) in either layout


def test_views_without_order() -> None:
    q, k, v = inputs()
    odd = [np.asfortranarray(q), k[:, ::-1][:, ::-1], np.broadcast_to(v[:1, :, :1], v.shape)]
    assert same_bits(attention(*odd), attention(q, k, np.ascontiguousarray(odd[2])))


@pytest.mark.parametrize("scale", [0, 1, -1, 0.25, np.float32(0.25), np.int8(2)])
def test_scales_of_any_number_type(scale: Any) -> None:
    q, k, v = inputs()
    assert same_bits(attention(q, k, v, softmax_scale=scale), attention(q, k, v, softmax_scale=float(scale)))


def test_default_scale_is_one_over_root_head_dim() -> None:
    q, k, v = inputs()
    assert same_bits(attention(q, k, v), attention(q, k, v, softmax_scale=1 / math.sqrt(24)))
    assert not same_bits(attention(q, k, v), attention(q, k, v, softmax_scale=0.1))


def test_causal_is_aligned_at_the_bottom_right() -> None:
    q, k, v = inputs(seqlen_q=3, seqlen_k=5)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    changed = v.copy()
    changed[:, 3:] = 9
    other = attention(q, k, changed, causal=True)
    assert same_bits(other[:, 0], out[:, 0])  # row 0 sees the keys 0 to 2
    assert not same_bits(other[:, 1], out[:, 1])
    assert np.isfinite(lse).all()


def test_rows_without_keys() -> None:
    q, k, v = inputs(seqlen_q=5, seqlen_k=2)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :3] == 0).all()
    assert np.isneginf(lse[:, :, :3]).all()
    assert np.isfinite(lse[:, :, 3:]).all()


@pytest.mark.parametrize(
    "shape", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0, "heads_kv": 0}], ids=str
)
def test_empty_axes(shape: dict[str, int]) -> None:
    q, k, v = inputs(**shape)
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_config_has_no_effect_on_numpy() -> None:
    q, k, v = inputs()
    assert same_bits(attention(q, k, v, config={"tile_n": 64}), attention(q, k, v))


def test_first_row_of_a_causal_square_is_the_first_value() -> None:
    q, k, v = inputs(seqlen_q=50)
    out = attention(q, k, v, causal=True)
    assert same_bits(np.ascontiguousarray(out[:, 0]), np.repeat(v[:, 0], 2, axis=1))


def test_signature() -> None:
    parameters = inspect.signature(attention).parameters
    names = ("q", "k", "v", "softmax_scale", "causal", "layout", "return_lse", "out", "lse", "backend", "config")
    assert tuple(parameters) == names
    assert [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values()] == [False] * 3 + [True] * 8
    assert len(typing.get_overloads(attention)) == 2


def test_public_names() -> None:
    assert all(hasattr(cupyfa, name) for name in cupyfa.__all__)
    assert issubclass(cupyfa.UnsupportedError, ValueError)
    assert issubclass(cupyfa.CompileError, RuntimeError)
    assert issubclass(cupyfa.LaunchError, RuntimeError)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (
        random_array((1, 70, 1, 16), BF16, seed, amplitude=amplitude) for seed, amplitude in enumerate((1e3, 1e3, 1))
    )
    out, lse = attention(q, k, v, return_lse=True)
    reference, reference_lse = dense.attention(q, k, v)
    assert_close(out, reference, dense.same_precision(q, k, v)[0])
    assert_lse_close(lse, reference_lse, score_magnitude=score_magnitude(q, k))
