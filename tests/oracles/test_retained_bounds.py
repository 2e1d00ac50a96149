"""The float32 recurrence stays within its stated bounds, and the bounds mean something."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.formats import BFLOAT16, E4M3FN, FLOAT16
from cupyfa.oracles.retained import POLICIES, Policy, attend
from cupyfa.oracles.retained_bounds import exact_row, float32_bound, staircase

SETTINGS = settings(deadline=None, derandomize=True, max_examples=80)


def errors(scores, v, policy, *, block, scale_log2=1.0, **options):
    """Largest error of out (in units of max |v|) and of lse, of float32 against float64; and the bounds on them."""
    scores = scores.astype(np.float32)
    v = v.astype(np.float32)
    scale_log2 = float(np.float32(scale_log2))
    # The exact result is that of the float32 inputs, with the maximum as reference.
    b = scores.astype(np.float64) * scale_log2
    m = b.max(axis=1, keepdims=True)
    P = np.exp2(b - m)
    expected = P @ v.astype(np.float64) / P.sum(axis=1, keepdims=True)
    expected_lse = (m + np.log2(P.sum(axis=1, keepdims=True)))[:, 0] * math.log(2)
    out, lse, _ = attend(scores, v, policy, block=block, scale_log2=scale_log2, dtype=np.float32, **options)
    bound = float32_bound(
        scores.shape[1],
        block,
        policy,
        float(np.abs(b).max()),
        vote_rows=options.get("vote_rows", 1),
        p_format=options.get("p_format"),
    )
    return np.abs(out - expected).max() / np.abs(v).max(), np.abs(lse - expected_lse).max(), bound


@SETTINGS
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 2.0, 20.0, 300.0]),
    drift=st.sampled_from([0.0, 1.0, -1.0]),
    policy=st.sampled_from([Policy(0, 0), Policy(8, 0), Policy(4, 4), Policy(4, 8), Policy(30, 0)]),
    block=st.sampled_from([1, 8, 64]),
    scale_log2=st.sampled_from([1.0, 0.18, 1e-3]),
    vote_rows=st.sampled_from([1, 16]),
)
def test_float32_stays_within_the_bound(seed, spread, drift, policy, block, scale_log2, vote_rows):
    rng = np.random.default_rng(seed)
    scores = spread * rng.standard_normal((16, 128)) + drift * spread * np.linspace(0, 4, 128)
    out, lse, bound = errors(
        scores, rng.standard_normal((128, 4)), policy, block=block, scale_log2=scale_log2, vote_rows=vote_rows
    )
    assert out <= bound.out
    assert lse <= bound.lse


@pytest.mark.parametrize("policy", [Policy(8, 0), Policy(4, 4)])
@pytest.mark.parametrize("step", ["tau", "above", "small"])
def test_monotone_rows_stay_within_the_bound(policy, step):
    size = {"tau": policy.tau, "above": policy.tau * (1 + 2**-20), "small": 0.37}[step]
    scores = np.stack([staircase(64, 8, size, first=first) for first in (0.0, -100.3, 17.7)])
    v = np.random.default_rng(0).standard_normal((512, 4))
    out, lse, bound = errors(scores, v, policy, block=8)
    assert out <= bound.out
    assert lse <= bound.lse


@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16, E4M3FN])
def test_rounded_p_stays_within_the_bound(fmt):
    rng = np.random.default_rng(9)
    scores = 3 * rng.standard_normal((64, 512))
    out, _, bound = errors(scores, rng.standard_normal((512, 4)), POLICIES[fmt.name], block=64, p_format=fmt)
    assert fmt.epsilon / 100 < out <= bound.out


def test_bound_is_of_use():
    """Within 200 times what happens, and far below the faults that it has to tell apart."""
    rng = np.random.default_rng(2)
    scores = 5 * rng.standard_normal((256, 1024))
    v = rng.standard_normal((1024, 8))
    out, lse, bound = errors(scores, v, Policy(8, 0), block=32)
    # What happens depends on the order in which BLAS adds: it was up to 110 times below.
    assert bound.out < 200 * out
    assert bound.lse < 200 * lse
    assert bound.out < 1e-4


def test_bound_does_not_depend_on_the_spread_but_on_the_magnitude():
    near, far = (float32_bound(512, 64, Policy(8, 0), magnitude) for magnitude in (10.0, 1000.0))
    assert near.sum < far.sum < 2 * near.sum  # by the moves that it may take
    assert near.lse < far.lse < 20 * near.lse
    near, far = (float32_bound(512, 64, Policy(4, 4), magnitude) for magnitude in (10.0, 1000.0))
    assert near.sum < far.sum < 20 * near.sum
    assert near.sum < float32_bound(512, 64, Policy(4, 8), 10.0).sum


def test_rounding_of_the_rows_constant_is_in_the_bound():
    """omega - r is rounded once per frame: apart for frames on two sides of a power of two, never if omega is 0."""
    rng = np.random.default_rng(6)
    scores = np.sort(2.0**17 + rng.uniform(-1, 1, (200, 2)), axis=1)  # two blocks of one key, the second one higher
    v = np.array([[0.0], [1.0]])
    lifted, _, bound = errors(scores, v, Policy(0, 0.305), block=1)
    plain, _, plain_bound = errors(scores, v, Policy(0, 0), block=1)
    assert 10 * plain_bound.out < lifted <= bound.out
    assert plain <= plain_bound.out


def test_no_bound_where_float32_says_nothing():
    assert float32_bound(64, 8, Policy(4, 4), 1e9).out == math.inf
    assert float32_bound(64, 8, Policy(120, 4), 10.0).sum == math.inf  # 2**-126 is no longer small beside the sum
    assert float32_bound(64, 8, Policy(0, -2000), 10.0, p_format=BFLOAT16).lse == math.inf


def test_exact_row_rejects_nonsense():
    for logits, values in (([], []), ([1], [1, 2])):
        with pytest.raises(ValueError, match="need as many"):
            exact_row(logits, values, block=1, tau=0, omega=0)
    with pytest.raises(ValueError, match="tau -1"):
        exact_row([1], [1], block=1, tau=-1, omega=0)
    with pytest.raises(ValueError, match="block 0"):
        exact_row([1], [1], block=0, tau=0, omega=0)


def test_exact_row_keeps_one_frame():
    """tau decides D and N, never their quotient."""
    rows = [exact_row([0, 3, 9, 20], [1, 2, 3, 4], block=1, tau=tau, omega=2) for tau in (0, 8, 100)]
    assert [row.reference for row in rows] == [20, 20, 0]
    assert [row.D for row in rows] == [Fraction(4 * (2**20 + 2**9 + 2**3 + 1), 2**20)] * 2 + [
        Fraction(4 * (2**20 + 2**9 + 2**3 + 1))
    ]
    assert len({row.out for row in rows}) == 1
    assert len({row.sum_exp2 for row in rows}) == 1


@pytest.mark.parametrize("call", [lambda: staircase(0, 1, 1.0), lambda: staircase(1, 0, 1.0)])
def test_staircase_is_not_empty(call):
    with pytest.raises(ValueError, match="staircase"):
        call()


@pytest.mark.parametrize("arguments", [(0, 1, 1.0), (1, 0, 1.0), (1, 1, -1.0), (1, 1, math.nan)])
def test_bound_checks_its_arguments(arguments):
    keys, block, magnitude = arguments
    with pytest.raises(ValueError, match="float32_bound"):
        float32_bound(keys, block, Policy(0, 0), magnitude)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: float32_bound(1, 1, Policy(0, 0), 1.0, vote_rows=0), r"vote_rows is 0"),
        (lambda: float32_bound(1, 1, Policy(0, 0), 1.0, exp2_error=math.nan), r"exp2_error is nan"),
        (lambda: staircase(0, 1, 1.0), r"staircase"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
