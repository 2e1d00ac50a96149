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
from cupyfa import AttentionResult, attention, emulate
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
    magnitude = score_magnitude(Q, K, case.softmax_scale, case.options.get("softcap"))
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


# --- Windows, caps, sinks and slopes ---


def close(a: Any, b: Any) -> bool:
    """Equal but for the order of additions."""
    return bool(np.allclose(a.astype(np.float32), b.astype(np.float32), rtol=2e-2, atol=2e-2))


@pytest.mark.parametrize(
    "same",
    [
        [{}, {"window_size": (None, None)}, {"window_size": (-1, -1)}, {"window_size": [49, 32]}, {"softcap": None}],
        [{"causal": True}, {"window_size": (None, 0)}, {"causal": True, "window_size": (-1, 5)}],
        [{"causal": True, "window_size": (7, None)}, {"window_size": (np.int64(7), 0)}],
    ],
    ids=["full", "causal", "window"],
)
def test_windows_have_several_names(same: list[dict[str, Any]]) -> None:
    q, k, v = inputs()
    first, *others = (attention(q, k, v, return_lse=True, **options) for options in same)
    for other in others:
        assert same_bits(other.out, first.out)
        assert same_bits(other.lse, first.lse)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "window_size"), [(33, 50, (5, 3)), (33, 50, (0, 0)), (50, 33, (4, 7)), (9, 70, (20, None))]
)
def test_a_row_sees_the_keys_of_its_window(seqlen_q: int, seqlen_k: int, window_size: tuple[int, int | None]) -> None:
    """Each row alone, over the keys that the definition names."""
    q, k, v = inputs(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse = attention(q, k, v, window_size=window_size, return_lse=True)
    left, right = window_size
    for row in range(seqlen_q):
        diagonal = row + seqlen_k - seqlen_q
        begin = max(0, diagonal - left)
        end = max(begin, seqlen_k if right is None else min(seqlen_k, diagonal + right + 1))
        alone = attention(q[:, row : row + 1], k[:, begin:end], v[:, begin:end], return_lse=True)
        assert close(out[:, row : row + 1], alone.out)
        assert np.allclose(lse[..., row : row + 1], alone.lse, rtol=1e-4)


def test_keys_outside_a_window_do_not_count() -> None:
    q, k, v = inputs(seqlen_q=50)
    expected = attention(q, k, v, window_size=(3, 2), return_lse=True)
    k[:, 30:], v[:, 30:] = 60_000, np.nan  # rows up to 27 see none of these
    out, lse = attention(q, k, v, window_size=(3, 2), return_lse=True)
    assert same_bits(out[:, :28].copy(), expected.out[:, :28].copy())
    assert same_bits(lse[..., :28].copy(), expected.lse[..., :28].copy())
    assert np.isnan(out[:, 28:].astype(np.float32)).all(axis=-1).all()


def test_a_window_of_one_key_gives_its_value() -> None:
    q, k, v = inputs(seqlen_q=50)
    assert same_bits(attention(q, k, v, window_size=(0, 0)), np.repeat(v, 2, axis=2))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 4)}, {"softcap": 2.0}], ids=str)
def test_a_sink_is_one_more_logit_without_a_value(options: dict[str, Any]) -> None:
    q, k, v = inputs(seqlen_q=50, seqlen_k=40)  # a causal mask leaves 10 rows without a key
    sink = np.array([0.0, -3.0, 5.0, -np.inf], np.float32)
    plain = attention(q, k, v, return_lse=True, **options)
    out, lse = attention(q, k, v, sink=sink, return_lse=True, **options)
    column = sink[None, :, None]
    expected_lse = np.logaddexp(plain.lse, column)
    assert np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    with np.errstate(invalid="ignore"):
        share = np.where(np.isneginf(plain.lse), 0, np.exp(plain.lse - expected_lse))
    assert close(out, plain.out.astype(np.float32) * share.transpose(0, 2, 1)[..., None])
    seen_nothing = np.isneginf(plain.lse).transpose(0, 2, 1)
    assert not out[seen_nothing].any()


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = inputs(seqlen_q=60)
    out, lse = attention(q, k, v, causal=True, sink=np.full(4, -np.inf, np.float32), return_lse=True)
    expected = attention(q, k, v, causal=True, return_lse=True)
    assert close(out, expected.out)
    assert np.allclose(lse, expected.lse, rtol=1e-6)
    assert np.isneginf(lse[..., :10]).all()


def test_a_softcap_bounds_the_scores() -> None:
    q, k, v = inputs(amplitude=20.0)
    lse = attention(q, k, v, softcap=0.5, return_lse=True).lse
    assert (lse >= np.log(50) - 0.5 - 1e-5).all()
    assert (lse <= np.log(50) + 0.5 + 1e-5).all()
    mirrored = attention(q, -k, v, softcap=0.5, softmax_scale=-1 / math.sqrt(24), return_lse=True).lse
    assert np.allclose(lse, mirrored, rtol=1e-5)


def test_slopes_take_the_distance_from_the_diagonal() -> None:
    q, k, v = inputs(seqlen_q=20, seqlen_k=30)
    slopes = np.array([0.5, 0.25, 0.0, -0.125], np.float32)
    out, lse = attention(np.zeros_like(q), k, v, alibi_slopes=slopes, return_lse=True)
    distance = np.abs(np.arange(20)[:, None] + 10 - np.arange(30)[None, :])
    logits = -slopes[:, None, None] * distance
    weights = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    assert np.allclose(lse, np.logaddexp.reduce(logits, axis=-1), rtol=1e-5)
    values = np.repeat(v.astype(np.float32), 2, axis=2)
    assert close(out, np.einsum("hij,bjhd->bihd", weights, values))


def test_slopes_may_differ_by_batch() -> None:
    q, k, v = inputs()
    slopes = np.array([[0.5, 0.25, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4]], np.float32)
    out = attention(q, k, v, alibi_slopes=slopes)
    for batch in range(2):
        one = slice(batch, batch + 1)
        assert same_bits(out[one].copy(), attention(q[one], k[one], v[one], alibi_slopes=slopes[batch]))
    shared = attention(q, k, v, alibi_slopes=slopes[0])
    assert same_bits(shared, attention(q, k, v, alibi_slopes=np.broadcast_to(slopes[0], (2, 4))))


def test_a_bias_is_added_to_the_scores() -> None:
    q, k, v = inputs()
    bias = random_array((2, 4, 33, 50), np.float32, 5)
    out, lse = attention(q, k, v, softmax_scale=-0.2, bias=bias, return_lse=True)
    Q, K, V = (x.astype(np.float32) for x in (q, np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2)))
    logits = -0.2 * np.einsum("bihd,bjhd->bhij", Q, K) + bias
    weights = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    assert np.allclose(lse, np.logaddexp.reduce(logits, axis=-1), rtol=1e-5, atol=1e-5)
    assert close(out, np.einsum("bhij,bjhd->bihd", weights, V))


def test_a_bias_by_another_name() -> None:
    """As slopes, as a mask, as a shift of all scores, as nothing."""
    q, k, v = inputs()
    slopes = np.array([0.5, 0.25, 0.0, 1.0], np.float32)
    distance = np.abs(np.arange(33)[:, None] + 17 - np.arange(50)).astype(np.float32)
    by_slopes = attention(q, k, v, alibi_slopes=slopes, return_lse=True)
    by_bias = attention(q, k, v, bias=-slopes[:, None, None] * distance, return_lse=True)
    assert close(by_bias.out, by_slopes.out)
    assert np.allclose(by_bias.lse, by_slopes.lse, rtol=1e-5)
    plain = attention(q, k, v, causal=True, return_lse=True)
    hidden = np.where(np.arange(50) > np.arange(33)[:, None] + 17, -np.inf, 0).astype(np.float16)
    shifted = attention(q, k, v, bias=hidden.astype(q.dtype) + q.dtype.type(3), return_lse=True)
    assert close(shifted.out, plain.out)
    assert np.allclose(shifted.lse, plain.lse + 3, rtol=1e-5)


BIAS = random_array((2, 4, 33, 50), np.float32, 6)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(
    "index",
    [np.s_[:1], np.s_[:, :1], np.s_[:, :, :1], np.s_[..., :1], np.s_[0], np.s_[0, 0], np.s_[0, 0, :1, :1]],
    ids=str,
)
def test_a_bias_is_broadcast(index: Any, dtype: Any) -> None:
    q, k, v = inputs()
    bias = BIAS[index].astype(dtype)
    expected = attention(q, k, v, bias=np.broadcast_to(bias, (2, 4, 33, 50)).copy(), return_lse=True)
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    assert same_bits(out, expected.out)
    assert same_bits(lse, expected.lse)


def test_a_bias_in_any_place() -> None:
    """C43: NumPy arrays have no rules."""
    q, k, v = inputs()
    expected = attention(q, k, v, bias=BIAS)
    wide = np.zeros((2, 4, 40, 101), np.float32)
    wide[..., 3:36, 1::2] = BIAS
    turned = np.ascontiguousarray(BIAS.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0)
    backwards = BIAS[:, :, ::-1, ::-1].copy()[:, :, ::-1, ::-1]
    unaligned = np.zeros(BIAS.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(BIAS.shape)
    unaligned[...] = BIAS
    unaligned.flags.writeable = False
    for bias in (wide[..., 3:36, 1::2], turned, backwards, unaligned):
        assert same_bits(attention(q, k, v, bias=bias), expected)


def test_a_masked_bias_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^attention: masked arrays are not supported; pass plain numpy\.ndarray$"):
        attention(*inputs(), bias=np.ma.zeros((33, 50), np.float32))


def test_arrays_of_heads_in_any_place() -> None:
    """NumPy arrays have no rules: backwards, in steps, unaligned, read-only."""
    q, k, v = inputs()
    sink, slopes = np.array([0.5, -1, 2, 0], np.float32), np.array([0.5, 0.25, 0, 1], np.float32)
    expected = attention(q, k, v, sink=sink, alibi_slopes=slopes)
    backwards = sink[::-1].copy()[::-1]
    unaligned = np.zeros(17, np.uint8)[1:].view(np.float32)
    unaligned[:] = slopes
    unaligned.flags.writeable = False
    assert same_bits(attention(q, k, v, sink=backwards, alibi_slopes=unaligned), expected)


OPTIONS: dict[str, Any] = {
    "window_size": (6, 2),
    "softcap": 3.0,
    "sink": np.array([0.5, -1, 2, -np.inf], np.float32),
    "alibi_slopes": np.array([0.5, 0.25, 0, 1], np.float32),
    "bias": BIAS[0],
}


def test_all_options_in_the_layout_bhsd() -> None:
    q, k, v = inputs()
    expected = attention(q, k, v, return_lse=True, **OPTIONS)
    turned = [np.ascontiguousarray(as_bshd(x, "BHSD")) for x in (q, k, v)]
    out, lse = attention(*turned, layout="BHSD", return_lse=True, **OPTIONS)
    assert same_bits(np.ascontiguousarray(as_bshd(out, "BHSD")), expected.out)
    assert same_bits(lse, expected.lse)


def test_options_leave_their_arrays_alone() -> None:
    q, k, v = inputs()
    before = {name: x.copy() for name, x in OPTIONS.items() if isinstance(x, np.ndarray)}
    attention(q, k, v, **OPTIONS)
    assert all(same_bits(OPTIONS[name], x) for name, x in before.items())


@pytest.mark.parametrize("name", ["sink", "alibi_slopes"])
def test_masked_arrays_of_heads_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"^attention: masked arrays are not supported; pass plain numpy\.ndarray$"):
        attention(*inputs(), **{name: np.ma.zeros(4, np.float32)})


@pytest.mark.parametrize(
    "shape", [{"seqlen_k": 0}, {"batch": 0}, {"seqlen_q": 0}, {"heads_q": 0, "heads_kv": 0}], ids=str
)
def test_empty_axes_with_a_sink_and_a_bias(shape: dict[str, int]) -> None:
    q, k, v = inputs(**shape)
    sink = np.array([0.5, -1, 2, -np.inf], np.float32)[: q.shape[2]]
    bias = np.zeros((q.shape[1], k.shape[1]), np.float32)
    out, lse = attention(q, k, v, sink=sink, bias=bias, window_size=(3, 3), return_lse=True)
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(sink[:, None], lse.shape))


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
    options = ("softmax_scale", "causal", "window_size", "softcap", "sink", "alibi_slopes", "bias")
    options += ("seqused_q", "seqused_k", "layout")
    names = ("q", "k", "v", *options, "return_lse", "out", "lse", "workspace", "backend", "config")
    assert tuple(parameters) == names
    assert [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values()] == [False] * 3 + [True] * 16
    overloads = typing.get_overloads(attention)
    assert len(overloads) == 2
    assert all(tuple(inspect.signature(overload).parameters) == names for overload in overloads)


@pytest.mark.parametrize("function", [cupyfa.explain, emulate.prepare, emulate.attention])
def test_others_take_the_same_options(function: Any) -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (attention, function))
    shared = [name for name in ours if name not in ("return_lse", "backend", "out", "lse", "workspace", "config")]
    used = ("seqused_q", "seqused_k")  # where packed sequences have them, or behind the options
    assert [name for name in theirs if name in shared and name not in used] == [x for x in shared if x not in used]
    assert all(theirs[name].default == ours[name].default for name in shared)


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
