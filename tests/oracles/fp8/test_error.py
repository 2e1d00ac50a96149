"""The error tables of FP8 attention: the specification's seed, many seeds, the paper's table 3 (specification 0x06).

Sizes of the last: the paper names the distribution, not the sizes. We take head_dim 64, 128 and 256 and up to 8192
tokens, which are among the sizes that it benchmarks. Descales come from all rows; errors are measured on 256 query rows
of each head, drawn at random, because a CPU has no time for all of them.
"""

import math
import random

import numpy as np
import pytest

from cupyfa.oracles.fp8.error import (
    FIXTURE_SEED,
    PAPER_TABLE_3,
    VARIANTS,
    estimate,
    fixture,
    geometric_estimate,
    half_precision_rmse,
    outlier_normal,
    persistent_fixture,
    reference,
    rmse,
    variant_rmse,
)
from cupyfa.oracles.fp8.hadamard import coherence, random_signs
from cupyfa.oracles.fp8.operands import quantize

SEEDS = 200
ROWS = 256
SMALL = {"softmax_scale": 1.0, "block_q": 8, "block_k": 8}  # what the specification's table was made with


def errors(make, seeds, variants=VARIANTS, **options):
    """Errors of each variant, shape (seeds,); the same inputs for all of them, other signs for every seed."""
    table = {variant: np.empty(seeds) for variant in variants}
    for seed in range(seeds):
        inputs = make(seed)
        want = reference(*inputs, softmax_scale=options.get("softmax_scale"))
        signs = random_signs(inputs[0].shape[1], seed)
        for variant in variants:
            table[variant][seed] = variant_rmse(*inputs, variant, want=want, signs=signs, **options)
    return table


def ratio(table, a, b):
    return geometric_estimate(table[a] / table[b])


# The specification's seed


def test_fixture_has_one_outlier_per_tensor():
    rng = random.Random(FIXTURE_SEED)
    for x in fixture():
        outliers = 0
        for got in x.ravel():
            normal = rng.gauss(0, 1)
            if rng.random() < 0.001:
                outliers += 1
                normal += rng.gauss(0, 10)
            assert got == normal
        assert outliers == 1


@pytest.mark.parametrize(
    ("variant", "printed"), [("tensor", "0.04762"), ("block", "0.04066"), ("block+hadamard", "0.05024")]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_printed_errors_of_the_fixture(variant, printed, dtype):
    assert f"{variant_rmse(*fixture(), variant, dtype=dtype, **SMALL):.5f}" == printed


@pytest.mark.parametrize(("variant", "printed"), [("block", "0.23677"), ("block+hadamard", "0.08066")])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_printed_errors_of_persistent_outliers(variant, printed, dtype):
    assert f"{variant_rmse(*persistent_fixture(), variant, dtype=dtype, **SMALL):.5f}" == printed


def test_the_transform_hurts_on_the_specifications_seed():
    assert variant_rmse(*fixture(), "block+hadamard", **SMALL) > 1.2 * variant_rmse(*fixture(), "block", **SMALL)


# Many seeds


@pytest.mark.parametrize("softmax_scale", [1.0, None])
def test_small_fixtures_of_the_papers_distribution(softmax_scale):
    """At 32 x 32 the transform is about a coin toss: a large entry of Q hardly ever meets one of K."""
    options = SMALL | {"softmax_scale": softmax_scale}
    table = errors(fixture, SEEDS, ("block", "block+hadamard"), **options)
    gain = ratio(table, "block", "block+hadamard")
    assert 0.9 < gain.low < gain.high < 1.1
    hurts = float((table["block+hadamard"] > table["block"]).mean())
    assert 0.4 < hurts < 0.6


@pytest.mark.parametrize("softmax_scale", [1.0, None])
def test_persistent_outliers_are_where_it_helps(softmax_scale):
    options = SMALL | {"softmax_scale": softmax_scale}
    table = errors(persistent_fixture, SEEDS, ("block", "block+hadamard"), **options)
    assert ratio(table, "block", "block+hadamard").low > 1.75
    assert float((table["block+hadamard"] > table["block"]).mean()) < 0.1


def avoiding(seed, size=64):
    """Channel 0 is large in Q and small in K: coherence below 1."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((size, size)) for _ in range(3))
    q[:, 0] = 40.0 * np.sign(q[:, 0])
    k[:, 0] *= 0.02
    return q, k, v


def on_the_grid(seed, size=64):
    """Small integers, which E4M3 holds exactly as long as nobody mixes them."""
    rng = np.random.default_rng(seed)
    q, k = (rng.integers(-4, 5, (size, size)).astype(float) for _ in range(2))
    q[:, 0], k[:, 0] = 7, -7
    return q, k, rng.standard_normal((size, size))


@pytest.mark.parametrize(("make", "at_least"), [(avoiding, 3.0), (on_the_grid, 3.0)])
def test_where_it_hurts(make, at_least):
    table = errors(make, 30, ("tensor", "tensor+hadamard"), softmax_scale=0.125)
    assert ratio(table, "tensor+hadamard", "tensor").low > at_least
    assert np.all(table["tensor+hadamard"] > table["tensor"])


def test_seeds_differ_in_their_verdict():
    # The reason for the intervals: among the first twenty seeds there is one to prove either claim.
    table = errors(fixture, 20, ("block", "block+hadamard"), **SMALL)
    gains = table["block"] / table["block+hadamard"]
    assert gains.min() < 0.8
    assert gains.max() > 1.25


# The paper's table 3


def sampled(seqlen, d, seeds, names=tuple(PAPER_TABLE_3)):
    """Errors of all variants, and of float16, at one size, each of shape (seeds,)."""
    table = {name: [] for name in names}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        q, k, v = (outlier_normal((seqlen, d), rng) for _ in range(3))
        inputs = {"rows": np.sort(rng.choice(seqlen, ROWS, replace=False))}
        inputs["want"] = reference(q[inputs["rows"]], k, v)
        signs = random_signs(d, seed)
        for name, values in table.items():
            if name in VARIANTS:
                values.append(variant_rmse(q, k, v, name, signs=signs, **inputs))
            else:
                values.append(half_precision_rmse(q, k, v, keep_float32=name.startswith("flash"), **inputs))
    return {name: np.array(values) for name, values in table.items()}


@pytest.fixture(scope="module")
def large():
    return sampled(8192, 128, seeds=8)


def pooled(values):
    """Root mean square over seeds: what one number for many heads is."""
    return math.sqrt(np.square(values).mean())


def check_ordering(table):
    """The order of the FP8 rows of the paper's table: each 95 % interval over seeds excludes the opposite."""
    assert ratio(table, "tensor", "block+hadamard").low > 1.4
    assert ratio(table, "tensor", "tensor+hadamard").low > 1.2
    assert ratio(table, "block", "block+hadamard").low > 1.2
    # Blocks change little beside that. Which way, so few seeds cannot tell: the paper has 9.3e-3 to 9.1e-3.
    blocks = ratio(table, "tensor+hadamard", "block+hadamard")
    assert blocks.low < PAPER_TABLE_3["tensor+hadamard"] / PAPER_TABLE_3["block+hadamard"] < blocks.high
    assert blocks.high < ratio(table, "tensor", "tensor+hadamard").mean


def test_table_3_ordering(large):
    check_ordering(large)
    # Any float16 is far from any FP8, and FlashAttention's float32 softmax beats a softmax kept in float16.
    assert ratio(large, "block+hadamard", "baseline float16").low > 15
    assert ratio(large, "baseline float16", "flash float16").low > 1
    assert ratio(large, "tensor", "block").low < 1 < ratio(large, "tensor", "block").high  # both 2.4e-2 in the paper


@pytest.mark.parametrize(("seqlen", "d"), [(2048, 128), (4096, 64), (2048, 256)])
def test_table_3_ordering_at_other_sizes(seqlen, d):
    check_ordering(sampled(seqlen, d, 6, VARIANTS))


@pytest.mark.parametrize("name", PAPER_TABLE_3)
def test_table_3_magnitudes(large, name):
    # Other inputs than the paper's, of unknown size: yet each row comes out within a quarter.
    assert 0.8 < pooled(large[name]) / PAPER_TABLE_3[name] < 1.25


def test_the_papers_ratio(large):
    reported = PAPER_TABLE_3["tensor"] / PAPER_TABLE_3["block+hadamard"]
    assert round(reported, 1) == 2.6
    assert 0.8 < pooled(large["tensor"]) / pooled(large["block+hadamard"]) / reported < 1.25


def test_why_it_helps_at_length():
    """Large entries of Q and K meet rarely, but where they do the score is large, and softmax looks there."""
    for seqlen, d, low, high in ((32, 32, 0.9, 2.0), (4096, 128, 4.0, 40.0)):
        plain, weighted = [], []
        for seed in range(4):
            rng = np.random.default_rng(seed)
            q, k = outlier_normal((min(seqlen, ROWS), d), rng), outlier_normal((seqlen, d), rng)
            S = q @ k.T / math.sqrt(d)
            P = np.exp(S - S.max(axis=1, keepdims=True))
            plain.append(coherence(q, k))
            weighted.append(coherence(q, k, P / P.sum(axis=1, keepdims=True)))
        assert 0.9 < np.mean(plain) < 1.1
        assert low < np.mean(weighted) < high


# Bookkeeping


def test_signs_do_not_matter_without_a_transform():
    q, k, v = fixture(1)
    a = variant_rmse(q, k, v, "block", signs=random_signs(32, 1), **SMALL)
    assert a == variant_rmse(q, k, v, "block", signs=random_signs(32, 2), **SMALL)
    default = variant_rmse(q, k, v, "block+hadamard", **SMALL)
    assert default == variant_rmse(q, k, v, "block+hadamard", signs=random_signs(32, FIXTURE_SEED + 1), **SMALL)


def test_sampled_rows_are_rows_of_the_whole():
    q, k, v = fixture(2)
    rows = np.arange(32)
    whole = variant_rmse(q, k, v, "block", **SMALL)
    assert whole == pytest.approx(variant_rmse(q, k, v, "block", rows=rows, **SMALL), rel=1e-6)
    halves = [variant_rmse(q, k, v, "block", rows=rows[part::2], **SMALL) for part in (0, 1)]
    assert math.sqrt((halves[0] ** 2 + halves[1] ** 2) / 2) == pytest.approx(whole, rel=1e-6)


def test_distribution():
    x = outlier_normal((2000, 1000), np.random.default_rng(0))
    assert abs(x.mean()) < 0.003
    assert abs(x.var() - 1.1) < 0.02
    rate = (np.abs(x) > 6).mean()  # N(0, 1) does not get there; N(0, 101) does in 55 % of all cases
    assert abs(rate - 0.001 * math.erfc(6 / math.sqrt(2 * 101))) < 1e-4


def test_intervals():
    e = estimate([1.0, 2.0, 3.0, 4.0])
    assert e.n == 4
    assert e.mean == 2.5
    half = 3.182446305284263 * math.sqrt(5 / 3) / 2  # Student's t with 3 degrees of freedom
    assert math.isclose(e.high - e.mean, half)
    assert str(estimate([1.0, 1.0])) == "1 [1, 1]"
    for too_few in ([], [1.0]):
        with pytest.raises(ValueError, match="two seeds"):
            estimate(too_few)


def test_unknown_variant():
    with pytest.raises(ValueError, match="head"):
        variant_rmse(*fixture(size=4), "head")


def test_exact_inputs_have_exact_scores():
    q, *_ = on_the_grid(0)
    x = quantize(q[None, :, None] * 64, "tensor")  # 7 * 64 = 448: the descale is 1
    assert rmse(x.dequantize()[0, :, 0], q * 64) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rmse(np.zeros(4), np.zeros((3, 1))), r"got has shape \(4,\); it must be \(3, 1\)"),
        (lambda: rmse(np.zeros(0), np.zeros(0)), r"size is 0"),
        (lambda: fixture(size=0), r"size is 0"),
        (lambda: persistent_fixture(size=0), r"size is 0"),
        (lambda: outlier_normal((2, -1), np.random.default_rng(0)), r"axis is -1"),
        (lambda: reference(np.zeros(4), np.zeros((4, 4)), np.zeros((4, 4))), r"q has shape \(4,\)"),
        (lambda: variant_rmse(*fixture(size=4), "block", rows=np.array([4])), r"index 4 is outside 0 .. 3"),
        (lambda: variant_rmse(*fixture(size=4), "block", block_k=0), r"block is 0"),
        (lambda: variant_rmse(*fixture(size=4), "tensor", want=np.zeros((1, 4))), r"got has shape \(4, 4\)"),
        (
            lambda: half_precision_rmse(
                *fixture(size=4), rows=np.array([-1]), want=np.zeros((1, 4)), keep_float32=True
            ),
            r"index -1",
        ),
        (lambda: estimate([1.0, 2.0], level=1.0), r"level is 1.0"),
        (lambda: geometric_estimate([1.0, 0.0]), r"not positive"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
