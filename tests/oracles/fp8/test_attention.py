"""The FP8 attention twin against dense attention and against the plain FP8 algorithm (specification 0x06)."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles import dense
from cupyfa.oracles.formats import E4M3FN, E5M2
from cupyfa.oracles.fp8.attention import (
    OFFSET,
    Counters,
    attention,
    lse_of,
    raised_probabilities,
    same_precision,
)
from cupyfa.oracles.fp8.error import rmse
from cupyfa.oracles.fp8.operands import DescaleAxisMismatch, Float8, api_descale, quantize

PROPERTY = settings(max_examples=25, deadline=None, derandomize=True)


def problem(
    seed=0, batch=1, seqlen_q=40, seqlen_k=64, heads_q=4, heads_kv=2, d=32, dtype=np.float64, granularity="head"
):
    rng = np.random.default_rng(seed)
    block = 16 if granularity == "block" else None

    def operand(seqlen, heads, **options):
        x = rng.standard_normal((batch, seqlen, heads, d))
        return quantize(x, granularity, block=block, dtype=dtype, **options)

    q = operand(seqlen_q, heads_q, scale_heads=heads_kv)
    return q, operand(seqlen_k, heads_kv), operand(seqlen_k, heads_kv)


def reference(q, k, v, **options):
    return dense.attention(q.dequantize(), k.dequantize(), v.dequantize(), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
@pytest.mark.parametrize("tiles", [(128, 16), (16, 16), (7, 16)])
def test_without_rounding_of_p_it_is_attention(granularity, causal, tiles):
    q, k, v = problem(granularity=granularity)
    want, want_lse = reference(q, k, v, causal=causal)
    got, lse = attention(q, k, v, causal=causal, round_p=False, round_out=False, tile_m=tiles[0], tile_n=tiles[1])
    assert np.abs(got - want).max() < 1e-13
    assert np.abs(lse - want_lse).max() < 1e-13


@given(
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from([(1, 1), (5, 33), (33, 5), (64, 64)]),
    st.sampled_from([(4, 4), (4, 1), (6, 2)]),
    st.sampled_from(["tensor", "head", "block"]),
)
@PROPERTY
def test_close_to_the_plain_algorithm(seed, causal, lengths, heads, granularity):
    q, k, v = problem(seed, 2, *lengths, *heads, granularity=granularity, dtype=np.float32)
    want, want_lse = reference(q, k, v, causal=causal)
    plain, plain_lse = same_precision(q, k, v, causal=causal)
    got, lse = attention(q, k, v, causal=causal, tile_n=16)
    # A row that sees few keys can be exact in one and a step of E4M3 off in the other: 2**-4 of the largest value.
    largest = np.abs(want).max(initial=0)
    assert np.abs(got - want).max() <= np.abs(plain - want).max() + largest * 2**-4 * 0.5
    seen = np.isfinite(want_lse)
    assert np.array_equal(np.isneginf(lse), ~seen)
    assert np.abs(lse[seen] - want_lse[seen]).max(initial=0) < 1e-5
    assert np.abs(plain_lse[seen] - want_lse[seen]).max(initial=0) < 1e-5
    assert np.all(got.swapaxes(1, 2)[~seen] == 0)


def test_error_in_the_mean_is_that_of_the_plain_algorithm():
    q, k, v = problem(1, 1, 256, 512, 2, 1, 64, np.float32)
    want, _ = reference(q, k, v)
    assert rmse(attention(q, k, v)[0], want) <= 1.1 * rmse(same_precision(q, k, v)[0], want)


# The three numbers with one factor


@given(st.integers(0, 2**32), st.integers(0, 12))
@PROPERTY
def test_offset_cancels_exactly_before_p_is_rounded(seed, offset):
    rng = np.random.default_rng(seed)
    S, V = rng.standard_normal((6, 32)) * 4, rng.standard_normal((32, 8))
    u = np.exp(S - S.max(axis=1, keepdims=True))
    plain = (u @ V) / u.sum(axis=1, keepdims=True)
    raised = u * 2.0**offset
    # A power of two changes exponents only, so the quotient does not change at all (the specification allows 1.11e-16).
    assert np.array_equal((raised @ V) / raised.sum(axis=1, keepdims=True), plain)


@pytest.mark.parametrize("offset", [0, 4, 8])
def test_offset_inside_the_exponent_costs_a_rounding_error_only(offset):
    q, k, v = problem()
    base, base_lse = attention(q, k, v, offset=0, round_p=False, round_out=False)
    got, lse = attention(q, k, v, offset=offset, round_p=False, round_out=False)
    assert np.abs(got - base).max() < 4e-15
    assert np.abs(lse - base_lse).max() < 1e-14


def test_probabilities_fill_0_to_256():
    assert OFFSET == 8
    scores = np.random.default_rng(0).standard_normal((64, 128)) * 3
    u = raised_probabilities(scores, scores.max(axis=1, keepdims=True), OFFSET)
    assert u.max() == 2**8 == 256
    assert u.min() > 0
    assert u.max() < E4M3FN.max
    assert E4M3FN.max / 2**OFFSET == 1.75  # the headroom that is left for a stale maximum


def test_offset_of_a_row_without_keys():
    u = raised_probabilities(np.full((1, 4), -np.inf), np.full((1, 1), -np.inf), 8)
    assert np.array_equal(u, np.zeros((1, 4)))
    assert np.isneginf(lse_of(np.array([-np.inf]), np.array([0.0]), 8))


@pytest.mark.parametrize("forgotten", ["denominator", "lse"])
def test_offset_without_its_bookkeeping(forgotten):
    q, k, v = problem(heads_q=1, heads_kv=1)
    want, want_lse = reference(q, k, v)
    Q, K, V = (x.dequantize()[0, :, 0] for x in (q, k, v))
    S = Q @ K.T / math.sqrt(32)
    m = S.max(axis=1, keepdims=True)
    u = 2.0**OFFSET * np.exp(S - m)
    l = u.sum(axis=1, keepdims=True)
    assert np.abs(u @ V / l - want[0, :, 0]).max() < 1e-14
    if forgotten == "denominator":
        assert np.allclose(u @ V / (l / 2**OFFSET), 256 * want[0, :, 0], rtol=1e-12)
    else:
        assert np.allclose((m + np.log(l))[:, 0] - want_lse[0, 0], OFFSET * math.log(2), rtol=1e-12)
        assert np.allclose(lse_of(m / math.log(2), l, OFFSET)[:, 0], want_lse[0, 0], rtol=1e-12)


def test_offset_reduces_underflow_and_not_rounding():
    q, k, v = problem(3, 1, 64, 512, 1, 1, 64, np.float32)
    counters = {offset: Counters() for offset in (0, OFFSET)}
    errors = {}
    want, _ = reference(q, k, v, softmax_scale=0.5)
    for offset, counter in counters.items():
        got, _ = attention(q, k, v, softmax_scale=0.5, offset=offset, round_out=False, counters=counter)
        errors[offset] = rmse(got, want)
    assert counters[0].total == counters[OFFSET].total == 64 * 512
    assert counters[0].flushed > 2 * counters[OFFSET].flushed > 0
    assert counters[0].saturated == counters[OFFSET].saturated == 0
    assert errors[OFFSET] < errors[0]
    assert errors[OFFSET] > 1e-3  # what remains is the rounding of P, which no offset removes


def test_too_large_an_offset_saturates():
    q, k, v = problem(dtype=np.float32)
    counter = Counters()
    want, _ = reference(q, k, v)
    got, lse = attention(q, k, v, offset=9, counters=counter)  # the maximum of each row becomes 512
    assert counter.saturated > 0
    assert np.abs(got - want).max() > 2 * np.abs(attention(q, k, v)[0] - want).max()
    assert np.abs(lse - reference(q, k, v)[1]).max() < 1e-5  # the lse does not see it


def test_lost_tail():
    # One key far ahead of 1023 equal ones: each of those has probability 5e-5, less than half of E4M3's smallest
    # number, but together they are 5 % (FlashAttention issue 2731).
    d, seqlen = 128, 1024
    q, k, v = np.zeros((1, 1, 1, d)), np.zeros((1, seqlen, 1, d)), np.ones((1, seqlen, 1, 16))
    q[..., 0], k[0, :-1, 0, 0], v[0, -1] = 16, -7, 0
    one = np.ones((1, 1, 1), np.float32)
    operands = [quantize(x, descale=one) for x in (q, k, v)]
    want, _ = reference(*operands)
    assert abs(want.max() - 0.049) < 1e-3
    assert attention(*operands, offset=0)[0].max() == 0
    assert abs(attention(*operands)[0].max() / want.max() - 1) < 2**-3


# Formats, axes, shapes


def test_stations_have_the_formats_of_the_table():
    q, k, v = problem(dtype=np.float32)
    counter = Counters()
    out, lse = attention(q, k, v, counters=counter)
    assert out.dtype == lse.dtype == np.float32
    assert np.array_equal(out.astype(ml_dtypes.bfloat16).astype(np.float32), out)
    unrounded, _ = attention(q, k, v, round_out=False)
    assert not np.array_equal(unrounded, out)  # the accumulator is wider than the output
    assert counter.codes is not None
    assert counter.codes[0x80:].sum() == 0  # no negative probability, no NaN
    assert counter.codes[: E4M3FN.encode(np.array([256.0]))[0] + 1].sum() == counter.total


def test_row_sum_takes_unrounded_probabilities():
    # 1 + 2**-5 of the maximum is rounded away in P8, and must still be in the sum.
    q = quantize(np.ones((1, 1, 1, 16)), dtype=np.float64)
    values = np.zeros((1, 2, 1, 16))
    values[0, 1, 0, 0] = -1.0
    k = quantize(values, dtype=np.float64)
    v = quantize(np.ones((1, 2, 1, 16)), dtype=np.float64)
    p = math.exp(-0.3)
    out, lse = attention(q, k, v, softmax_scale=0.3, round_out=False)
    rounded = E4M3FN.round(np.array([256 * p]))[0] / 256
    assert rounded != p
    assert abs(lse.item() - math.log(1 + p)) < 1e-14
    assert abs(out.max() - (1 + rounded) / (1 + p)) < 1e-14


def test_descales_of_every_key_value_head_count():
    # As the public call has them: (batch, heads_kv), different everywhere, for Q too.
    rng = np.random.default_rng(0)
    heads_q, heads_kv, batch = 6, 2, 3
    descales = [api_descale(rng.uniform(0.5, 2, (batch, heads_kv)), batch, heads_kv) for _ in range(3)]
    shapes = [(batch, 17, heads_q, 32), (batch, 29, heads_kv, 32), (batch, 29, heads_kv, 32)]
    codes = [E4M3FN.encode(rng.standard_normal(shape)) for shape in shapes]
    operands = [Float8(c, d, c.shape[1]) for c, d in zip(codes, descales, strict=True)]
    want, _ = reference(*operands)
    got, _ = attention(*operands, round_p=False, round_out=False)
    assert np.abs(got - want).max() < 1e-5
    dropped = [Float8(c, np.ones_like(d), c.shape[1]) for c, d in zip(codes, descales, strict=True)]
    assert np.abs(attention(*dropped)[0] - want).max() > 0.1


def test_six_heads_on_one_decode():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in ((2, 1, 6, 128), (2, 129, 1, 128), (2, 129, 1, 128))]
    want, _ = dense.attention(*arrays)
    errors = {}
    for format in (E4M3FN, E5M2):
        out, _ = attention(*(quantize(x, format=format) for x in arrays))
        errors[format.name] = rmse(out, want)
        cosine = (out * want).sum() / math.sqrt((out**2).sum() * (want**2).sum())
        assert cosine > 0.99
    assert 0.35 < errors["float8_e4m3fn"] / errors["float8_e5m2"] < 0.65  # one fraction bit more


def test_v_descale_may_not_change_inside_a_key_block():
    q, k, v = problem(granularity="block")  # a descale per 16 keys
    attention(q, k, v, tile_n=16)
    attention(q, k, v, tile_n=8)
    for tile_n in (32, 24, 128):
        with pytest.raises(DescaleAxisMismatch, match="no multiple"):
            attention(q, k, v, tile_n=tile_n)


def test_shapes_are_checked():
    q, k, v = problem()
    for bad in ((q, k, v.rows([0])), (k, q, v)):
        for function in (attention, same_precision):
            with pytest.raises(ValueError, match="attention"):
                function(*bad)


@pytest.mark.parametrize("function", [attention, same_precision])
def test_no_keys(function):
    q, *_ = problem()
    nothing = quantize(np.zeros((1, 0, 2, 32)))
    out, lse = function(q, nothing, nothing)
    assert np.all(out == 0)
    assert np.all(np.isneginf(lse))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention(*problem(), tile_n=0), r"tile_n is 0"),
        (lambda: attention(*problem(), tile_m=-1), r"tile_m is -1"),
        (lambda: raised_probabilities(np.zeros((2, 3)), np.zeros(2), 8), r"m has shape \(2,\); it must be \(2, 1\)"),
        (lambda: lse_of(np.zeros((2, 1)), np.ones(2), 8), r"l has shape \(2,\)"),
        (lambda: Counters().record(np.ones(2), np.array([1, 256]), E4M3FN), r"must be in 0 .. 255"),
        (lambda: Counters().record(np.ones(2), np.array([1]), E4M3FN), r"codes has shape \(1,\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
