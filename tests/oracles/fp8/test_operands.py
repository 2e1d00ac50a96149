"""FP8 operands and the places where their descales may be applied (specification 0x06)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.formats import E4M3FN, E5M2
from cupyfa.oracles.fp8.operands import (
    LEGAL_POINTS,
    PRECISION,
    DescaleAxisMismatch,
    Float8,
    InvalidDescale,
    NotAdmitted,
    ScaleAfterSoftmax,
    ScaleOutsideSum,
    ScaleOutsideTensor,
    ValueOutOfRange,
    api_descale,
    check_admission,
    check_application,
    quantize,
)

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)


def softmax(S):
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    return P / P.sum(axis=-1, keepdims=True)


def blocks(seed=0, n=4, rows=8, d=16):
    """Q, K, V codes (as values) in `n` blocks of `rows`, with one descale per block."""
    rng = np.random.default_rng(seed)
    Q8, K8, V8 = (rng.integers(-8, 9, (n, rows, d)).astype(np.float64) for _ in range(3))
    dQ, dK, dV = (2.0 ** rng.integers(-4, 1, n) for _ in range(3))
    return Q8, K8, V8, dQ, dK, dV


def flat(values, descales):
    return (values * descales[:, None, None]).reshape(-1, values.shape[-1])


# Representation


def test_figures_of_e4m3fn():
    assert E4M3FN.max == 448
    assert E4M3FN.min_subnormal == 2**-9 == 0.001953125
    assert (E4M3FN.bits, E4M3FN.exponent_bits, E4M3FN.fraction_bits, E4M3FN.has_infinity) == (8, 4, 3, False)


def test_fp8_is_the_operands_and_nothing_else():
    eight_bit = {name for name, kind in PRECISION.items() if kind.startswith("float8")}
    assert eight_bit == {"Q, K, V", "P"}
    assert PRECISION["S"] == PRECISION["O"] == PRECISION["m, l"] == "float32"
    assert PRECISION["out"] == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((E5M2, 90, 128), "float8_e5m2"),
        ((E4M3FN, 89, 128), "89"),
        ((E4M3FN, 90, 120), "multiple of 16"),
        ((E4M3FN, 90, 0), "multiple of 16"),
        ((E4M3FN, 90, 128, False), "contiguous"),
    ],
)
def test_admission(arguments, reason):
    assert check_admission(E4M3FN, 90, 128) == "bfloat16"
    assert check_admission(E4M3FN, 100, 16) == "bfloat16"
    with pytest.raises(NotAdmitted, match=reason):
        check_admission(*arguments)


# Quantization


@given(
    st.integers(0, 2**32),
    st.sampled_from(["tensor", "head", "block"]),
    st.sampled_from([(1, 1, 1, 1), (2, 13, 4, 16), (1, 64, 2, 8), (3, 1, 2, 4)]),
    st.sampled_from([E4M3FN, E5M2]),
    st.floats(-20, 20),
)
@PROPERTY
def test_quantization_error_is_a_rounding_error(seed, granularity, shape, format, exponent):
    x = np.random.default_rng(seed).standard_normal(shape) * 2.0**exponent
    q = quantize(x, granularity, block=4 if granularity == "block" else None, format=format, dtype=np.float64)
    error = np.abs(q.dequantize() - x)
    rows = q.row_descales()[..., None]
    assert np.all(error <= np.maximum(np.abs(x) * format.epsilon / 2, rows * format.min_subnormal / 2) * (1 + 1e-12))
    assert np.nanmax(np.abs(q.values())) == format.max  # the largest value of some block is the largest code


def test_granularities_share_what_they_say():
    x = np.ones((2, 8, 4, 16))
    x[1, 5, 3, 7] = 448.0
    assert np.unique(quantize(x, "tensor").descale).tolist() == [1.0]
    head = quantize(x, "head").descale
    assert head.shape == (2, 4, 1)
    assert np.argwhere(head == 1).tolist() == [[1, 3, 0]]
    grouped = quantize(x, "head", scale_heads=2).descale  # one descale per key/value head, as the public call has it
    assert np.argwhere(grouped == 1).tolist() == [[1, 1, 0]]
    block = quantize(x, "block", block=4).descale
    assert block.shape == (2, 4, 2)
    assert np.argwhere(block == 1).tolist() == [[1, 3, 1]]


def test_ragged_last_block_and_zeros():
    x = np.zeros((1, 10, 1, 16))
    x[0, 9] = 3.0
    q = quantize(x, "block", block=4)
    assert q.descale.tolist() == [[[1.0, 1.0, np.float32(3 / 448)]]]
    assert np.array_equal(q.dequantize() > 0, x > 0)


def test_empty_sequences():
    q = quantize(np.zeros((1, 0, 2, 16)), "block", block=4)
    assert q.dequantize().shape == (1, 0, 2, 16)


def test_rows_keep_their_descales():
    x = np.random.default_rng(0).standard_normal((1, 40, 2, 16)) * np.arange(1, 41)[None, :, None, None]
    q = quantize(x, "block", block=8)
    index = [3, 39, 16]
    assert np.array_equal(q.rows(index).dequantize(), q.dequantize()[:, index])


def test_per_tensor_scale_spikes_on_heterogeneous_blocks():
    # One block lives at 1e6 times the size of the others. Under its scale they fall below the smallest subnormal.
    x = np.random.default_rng(0).standard_normal((1, 32, 1, 16))
    x[0, :8] *= 1e6

    def error(q):
        return np.abs(q.dequantize() - x)[0, 8:].max() / np.abs(x[0, 8:]).max()

    assert error(quantize(x, "tensor", dtype=np.float64)) == 1.0
    assert error(quantize(x, "block", block=8, dtype=np.float64)) < 2**-4


# Contracts of descales


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_invalid_descales(bad):
    codes = np.zeros((1, 4, 2, 16), np.uint8)
    with pytest.raises(InvalidDescale):
        Float8(codes, np.float32([[[1.0], [bad]]]), block=4)
    with pytest.raises(InvalidDescale):
        api_descale(np.float32([[1.0, bad]]), 1, 2)
    with pytest.raises(InvalidDescale):
        quantize(np.ones((1, 4, 2, 16)), descale=np.float32([[[1.0], [bad]]]))


def test_values_beyond_448_are_refused():
    x = np.full((1, 2, 1, 16), 449.0)
    one = np.ones((1, 1, 1), np.float32)
    with pytest.raises(ValueOutOfRange, match="449"):
        quantize(x, descale=one)
    # Without the check a byte comes back all the same, and the excess is gone.
    assert E4M3FN.round(np.array([449.0, 1e4])).tolist() == [448.0, 448.0]
    assert quantize(x - 1, descale=one).dequantize().max() == 448.0


@pytest.mark.parametrize(
    ("shape", "block"), [((1, 2), 4), ((1, 3, 1), 4), ((1, 2, 2), 4), ((2, 2, 1), 4), ((1, 0, 1), 4), ((1, 2, 1), 0)]
)
def test_descale_shapes(shape, block):
    with pytest.raises(DescaleAxisMismatch):
        Float8(np.zeros((1, 4, 2, 16), np.uint8), np.ones(shape, np.float32), block)


def test_the_public_call_takes_one_descale_per_key_value_head():
    assert api_descale(None, 2, 3).tolist() == np.ones((2, 3, 1)).tolist()  # a missing one is 1
    assert api_descale(np.float32([[1, 2]]), 1, 2).shape == (1, 2, 1)
    for shape in ((1, 2, 4), (1, 8), (2, 1), (2,)):  # per block, per query head, transposed, without a batch
        with pytest.raises(DescaleAxisMismatch):
            api_descale(np.ones(shape, np.float32), 1, 2)


@pytest.mark.parametrize("x", [np.zeros((2, 2)), np.full((1, 1, 1, 1), math.nan), np.full((1, 1, 1, 1), math.inf)])
def test_quantize_refuses(x):
    with pytest.raises(ValueError, match="fp8"):
        quantize(x)


@pytest.mark.parametrize(
    "options", [{"granularity": "row"}, {"granularity": "block"}, {"block": 4}, {"scale_heads": 3}, {"scale_heads": 0}]
)
def test_quantize_options(options):
    with pytest.raises(ValueError, match="fp8"):
        quantize(np.ones((1, 4, 2, 16)), **options)


def test_codes_are_bytes():
    with pytest.raises(ValueError, match="uint8"):
        Float8(np.zeros((1, 4, 2, 16), np.int8), np.ones((1, 2, 1), np.float32), 4)


# Where a descale may be applied


def test_table_of_application_points():
    legal = {(t, g, p) for (t, g), points in LEGAL_POINTS.items() for p in points}
    for tensor in ("q", "k", "v"):
        for granularity in ("tensor", "head", "block"):
            for point in ("score", "contribution", "finalize"):
                if (tensor, granularity, point) in legal:
                    check_application(tensor, granularity, point)
                    continue
                error = ScaleAfterSoftmax if tensor != "v" else ScaleOutsideTensor
                if tensor == "v" and point == "finalize":
                    error = ScaleOutsideSum
                with pytest.raises(error):
                    check_application(tensor, granularity, point)
    with pytest.raises(ValueError, match="no such application"):
        check_application("o", "head", "finalize")


def test_score_descales_before_softmax_are_exact():
    Q8, K8, _, dQ, dK, _ = blocks()
    S = np.einsum("ird,jcd->ijrc", Q8, K8) * (dQ[:, None] * dK)[:, :, None, None]
    S = S.swapaxes(1, 2).reshape(32, 32)
    assert np.array_equal(S, flat(Q8, dQ) @ flat(K8, dK).T)  # powers of two: exact in float64


def test_score_descales_after_softmax_are_another_function():
    Q8, K8, V8, dQ, dK, _ = blocks()
    V = V8.reshape(32, -1)
    right = softmax(flat(Q8, dQ) @ flat(K8, dK).T) @ V
    factor = np.repeat(dQ, 8)[:, None] * np.repeat(dK, 8)
    late = softmax(Q8.reshape(32, -1) @ K8.reshape(32, -1).T) * factor
    for P in (late, late / late.sum(axis=1, keepdims=True)):  # renormalizing does not repair it
        assert np.abs(P @ V - right).max() > 1.0


def test_q_descales_by_key_block_are_wrong_though_the_counts_match():
    Q8, K8, _, dQ, dK, _ = blocks()
    assert len(Q8) == len(K8)  # the reason why nothing complains
    S = np.einsum("ird,jcd->ijrc", Q8, K8)
    right, wrong = (
        softmax((S * factor[:, :, None, None]).swapaxes(1, 2).reshape(32, 32))
        for factor in (dQ[:, None] * dK, dQ[None, :] * dK)
    )
    assert np.abs(wrong - right).max() > 0.5
    # With other block counts the shape gives it away.
    with pytest.raises(DescaleAxisMismatch):
        Float8(np.zeros((1, 48, 1, 16), np.uint8), dQ.astype(np.float32)[None, None], block=8)


@given(st.integers(0, 2**32))
@PROPERTY
def test_v_descales_with_each_contribution_are_exact(seed):
    *_, V8, _, _, dV = blocks(seed)
    P = np.random.default_rng(seed).integers(0, 17, (5, 4, 8)).astype(np.float64)
    total = sum(dV[j] * (P[:, j] @ V8[j]) for j in range(4))
    assert np.array_equal(total, P.reshape(5, 32) @ flat(V8, dV))


def test_one_final_v_descale_works_only_if_it_is_constant():
    *_, V8, _, _, dV = blocks(seed=3)
    P = np.random.default_rng(1).integers(0, 17, (5, 32)).astype(np.float64)
    raw = P @ V8.reshape(32, -1)
    assert np.array_equal(0.25 * raw, P @ flat(V8, np.full(4, 0.25)))
    assert len(set(dV)) > 1
    right = P @ flat(V8, dV)
    for pulled_out in (dV[0], dV[-1], dV.mean(), dV.max()):
        assert np.abs(pulled_out * raw - right).max() > 0.05 * np.abs(right).max()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(np.ones((1, 4, 1, 16)), "block", block=0), r"block is 0"),
        (lambda: quantize(np.ones((1, 4, 1, 16))).rows([4]), r"index 4 is outside 0 .. 3"),
        (lambda: quantize(np.ones((1, 4, 1, 16))).rows([[0]]), r"indices has shape \(1, 1\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
