"""FLOP numerators against brute force, and against what the benchmarks of this repository count."""

import dataclasses
import doctest
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.bench.problems import Cell
from cupyfa.oracles.accounting import flops
from cupyfa.oracles.accounting.flops import (
    AttentionShape,
    Numerators,
    accounting_throughput,
    backward_flops,
    backward_matmul_flops,
    causal_half_pairs,
    numerators,
    scheduled_pairs,
    varlen_numerators,
    visible_pairs,
)
from cupyfa.oracles.mask import visible

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=150)
LENGTH = st.integers(1, 200)
PRINTED = AttentionShape(32, 16, 1024, 1024, 128, 128)


def test_doctests():
    assert doctest.testmod(flops).failed == 0


# --- Dense ---


def test_dense_forward_of_the_printed_shape():
    assert PRINTED.dense_flops == 4 * 32 * 1024 * 1024 * 16 * 128 == 274_877_906_944


def test_dense_forward_is_the_sum_of_two_products():
    shape = AttentionShape(2, 3, 5, 7, 11, 13)
    q, k, v = np.ones((5, 11)), np.ones((7, 11)), np.ones((7, 13))
    # A product of (m, k) and (k, n) has m * n * k multiplications and as many additions: count the multiplications.
    qk = sum(int(q[i] @ k[j]) for i in range(5) for j in range(7))
    pv = sum(int(np.ones(7) @ v[:, c]) for _ in range(5) for c in range(13))
    assert (shape.qk_flops, shape.pv_flops) == (2 * 2 * 3 * qk, 2 * 2 * 3 * pv)
    assert shape.dense_flops == shape.qk_flops + shape.pv_flops


def test_grouped_heads_change_no_operations():
    grouped = dataclasses.replace(PRINTED, heads_kv=2)
    assert grouped.dense_flops == PRINTED.dense_flops
    assert numerators(grouped, 128, 128) == numerators(PRINTED, 128, 128)


# --- Masks ---


def seen_by(shape):
    i = np.arange(shape.seqlen_q)[:, None] + shape.seqlen_k - shape.seqlen_q
    j = np.arange(shape.seqlen_k)[None, :]
    left, right = shape.window
    seen = np.ones((shape.seqlen_q, shape.seqlen_k), bool)
    if left is not None:
        seen &= j >= i - left
    if shape.causal or right is not None:
        seen &= j <= i + (0 if shape.causal else right)
    return seen


@EXAMPLES
@given(
    seqlen_q=LENGTH,
    seqlen_k=LENGTH,
    causal=st.booleans(),
    left=st.none() | st.integers(0, 150),
    right=st.none() | st.integers(0, 150),
    tile_m=st.integers(1, 70),
    tile_n=st.integers(1, 70),
)
def test_useful_and_scheduled_against_the_mask(seqlen_q, seqlen_k, causal, left, right, tile_m, tile_n):
    shape = AttentionShape(2, 3, seqlen_q, seqlen_k, 8, 16, causal=causal, window=(left, right))
    seen = seen_by(shape)
    if left is None and right is None:
        np.testing.assert_array_equal(seen, visible(seqlen_q, seqlen_k, causal))
    count = numerators(shape, tile_m, tile_n)
    assert visible_pairs(shape) == seen.sum()
    assert count.useful == 2 * 2 * 3 * int(seen.sum()) * (8 + 16)
    touched = 0
    for m in range(0, seqlen_q, tile_m):
        blocks = np.unique(np.flatnonzero(seen[m : m + tile_m].any(axis=0)) // tile_n)
        touched += len(range(blocks[0], blocks[-1] + 1)) if blocks.size else 0
    assert scheduled_pairs(shape, tile_m, tile_n) == touched * tile_m * tile_n
    assert count.useful <= count.scheduled
    assert count.useful <= count.dense_equivalent


@EXAMPLES
@given(seqlen=st.integers(1, 3000))
def test_causal_exact_is_triangular_and_half_is_a_convention(seqlen):
    shape = AttentionShape(1, 1, seqlen, seqlen, 64, 64, causal=True)
    exact, half = visible_pairs(shape), causal_half_pairs(seqlen, seqlen)
    assert exact == seqlen * (seqlen + 1) // 2
    assert exact / half - 1 == Fraction(1, seqlen)  # the relative difference of the conventions


def test_half_says_little_when_lengths_differ():
    decode = AttentionShape(1, 1, 1, 4096, 128, 128, causal=True)
    assert visible_pairs(decode) == 4096 == 2 * causal_half_pairs(1, 4096)
    wide = AttentionShape(1, 1, 4096, 1, 128, 128, causal=True)
    assert visible_pairs(wide) == 1


def test_three_numerators_of_one_window():
    shape = AttentionShape(1, 16, 8192, 8192, 128, 128, causal=True, window=(1023, None))
    count = numerators(shape, 128, 128)
    assert count.useful < count.scheduled < count.dense_equivalent / 7
    seconds = float(count.scheduled) / 700e12  # at 700 TFLOP/s of issued work
    assert accounting_throughput(count.dense_equivalent, seconds) > 5 * 989  # over the peak, and no physical rate
    assert accounting_throughput(count.useful, seconds) < 700


def test_padding_is_scheduled_and_not_useful():
    shape = AttentionShape(1, 1, 130, 130, 96, 96)
    count = numerators(shape, 128, 128, tile_d=128)
    assert count.useful == count.dense_equivalent == 4 * 130 * 130 * 96
    assert count.scheduled == 4 * 256 * 256 * 128


def test_varlen_is_the_sum_of_its_sequences_and_not_of_padded_ones():
    shape = AttentionShape(1, 4, 1, 1, 64, 64, causal=True)
    lengths = [(128, 128), (768, 768), (256, 256), (512, 512), (0, 0), (1, 4096)]
    total = varlen_numerators(lengths, shape, 128, 128)
    parts = [numerators(dataclasses.replace(shape, seqlen_q=q, seqlen_k=k), 128, 128) for q, k in lengths if q and k]
    assert total.useful == sum(p.useful for p in parts)
    assert total == sum(parts, Numerators(0, Fraction(0), 0, 0))
    padded = numerators(dataclasses.replace(shape, batch=6, seqlen_q=768, seqlen_k=4096), 128, 128)
    assert padded.dense_equivalent > 10 * total.dense_equivalent


# --- Backward ---


def test_backward_is_two_and_a_half_forward():
    assert backward_flops(PRINTED.dense_flops) == Fraction(5, 2) * 274_877_906_944
    assert backward_matmul_flops(PRINTED, 1024 * 1024) == backward_flops(PRINTED.dense_flops)


def test_the_factor_is_a_convention_for_unequal_head_dims():
    deepseek = AttentionShape(1, 16, 1024, 1024, 192, 128)
    assert Fraction(backward_matmul_flops(deepseek, 1024 * 1024), deepseek.dense_flops) == Fraction(13, 5)


def test_five_products():
    shape = AttentionShape(1, 1, 5, 7, 11, 13)
    q, k, v, do = np.ones((5, 11)), np.ones((7, 11)), np.ones((7, 13)), np.ones((5, 13))
    p = ds = np.ones((5, 7))
    products = [(q, k.T), (do, v.T), (p.T, do), (ds, k), (ds.T, q)]
    assert backward_matmul_flops(shape, 35) == sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in products)


# --- The benchmarks of this repository ---


@EXAMPLES
@given(
    head_dim=st.sampled_from([16, 64, 96, 128]),
    seqlen=st.integers(1, 2000),
    batch=st.integers(1, 4),
    heads=st.integers(1, 5),
    causal=st.booleans(),
    tile=st.sampled_from([(128, 128), (128, 80), (192, 128), (64, 96)]),
)
def test_benchmarks_count_by_these_conventions(head_dim, seqlen, batch, heads, causal, tile):
    cell = Cell(head_dim, seqlen, batch, heads, causal)
    shape = AttentionShape(batch, heads, seqlen, seqlen, head_dim, head_dim, causal=causal)
    count = numerators(shape, *tile, tile_d=128)
    assert cell.dense_flops == count.dense_equivalent
    assert cell.useful_flops == count.paper  # "useful" there is the papers' half, not the triangle
    assert cell.scheduled_flops(*tile, 128) == count.scheduled


# --- Bad input ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dataclasses.replace(PRINTED, head_dim_v=0), "head_dim_v is 0; it must be positive"),
        (lambda: dataclasses.replace(PRINTED, heads_kv=3), "16 heads are no multiple of the 3"),
        (lambda: dataclasses.replace(PRINTED, window=(None, -1)), "window is"),
        (lambda: dataclasses.replace(PRINTED, window=(1, 2, 3)), "window is"),
        (lambda: numerators(PRINTED, 128, 128, tile_d=64), "head_dim 64 does not hold 128"),
        (lambda: numerators(PRINTED, 0, 128), "tile_m is 0"),
        (lambda: varlen_numerators([(0, -5)], PRINTED, 128, 128), "seqlen_k is -5"),
        (lambda: causal_half_pairs(-1, 4), "seqlen_q is -1"),
        (lambda: PRINTED.flops_of(-1), "pairs is -1"),
        (lambda: backward_matmul_flops(PRINTED, -1), "pairs is -1"),
        (lambda: backward_flops(-1), "forward is -1"),
        (lambda: accounting_throughput(-1, 1.0), "flops is -1"),
        (lambda: accounting_throughput(1, 0.0), "the time is 0.0"),
        (lambda: accounting_throughput(1, -1.0), "the time is -1.0"),
        (lambda: accounting_throughput(1, float("nan")), "the time is nan"),
        (lambda: accounting_throughput(1, float("inf")), "the time is inf"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
