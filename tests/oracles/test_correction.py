"""Rescaling O: the vote, why it must not be a branch per lane, and the two legal places in the two-stage schedule."""

import math

import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.correction import DivergentCorrection, rescale_by_vote, rescale_per_lane, two_stage
from cupyfa.oracles.retained import Policy, RetainedSoftmax

SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)


@SETTINGS
@given(
    st.lists(st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0, 2.0**-40]), min_size=64, max_size=64), st.sampled_from([16, 32])
)
def test_vote_equals_rescaling_every_row(factors, lanes):
    gamma = np.array(factors)[:, None]
    O = np.random.default_rng(0).standard_normal((64, 5))
    got, active = rescale_by_vote(O, gamma, lanes=lanes)
    np.testing.assert_array_equal(got, O * gamma)
    np.testing.assert_array_equal(active, (gamma < 1).reshape(-1, lanes).any(axis=1))
    np.testing.assert_array_equal(got[gamma[:, 0] == 1], O[gamma[:, 0] == 1])  # rows with 1 keep their bits


def test_branch_per_lane_diverges():
    O, gamma = np.ones((64, 2)), np.ones((64, 1))
    gamma[:32] = 0.5
    np.testing.assert_array_equal(rescale_per_lane(O, gamma), O * gamma)  # whole warps agree
    gamma[40] = 0.5
    with pytest.raises(DivergentCorrection, match="warp 1: 1 of its 32 lanes"):
        rescale_per_lane(O, gamma)
    assert rescale_by_vote(O, gamma)[1].tolist() == [True, True]


def test_threshold_saves_passes_over_o():
    """The vote works for a warp as soon as one row needs it; a threshold makes that rare."""
    rng = np.random.default_rng(1)
    scores = 2 * rng.standard_normal((64, 1024))
    passes = {}
    for tau in (0.0, 8.0):
        softmax, O, count = RetainedSoftmax((64,), Policy(tau, 0)), np.zeros((64, 4)), 0
        for n in range(0, 1024, 64):
            _, gamma = softmax.update(scores[:, n : n + 64])
            if n:
                O, active = rescale_by_vote(O, gamma)
                count += int(active.sum())
        passes[tau] = count
    assert passes == {0.0: 30, 8.0: 0}


@pytest.mark.parametrize(
    ("O", "gamma", "lanes", "message"),
    [
        (np.ones((4, 2)), np.ones(4), 2, r"they must be \(rows, dims\)"),
        (np.ones(4), np.ones((4, 1)), 2, r"they must be \(rows, dims\)"),
        (np.ones((4, 2)), np.ones((4, 1)), 3, "4 rows are no multiple of the 3"),
        (np.ones((4, 2)), np.ones((4, 1)), 0, "no multiple of the 0"),
    ],
)
def test_shapes_are_checked(O, gamma, lanes, message):
    for rescale in (rescale_by_vote, rescale_per_lane):
        with pytest.raises(ValueError, match=message):
            rescale(O, gamma, lanes=lanes)


def blocks(count, seed=0, rows=8, keys=16, rise=2.0):
    rng = np.random.default_rng(seed)
    scores = [(3 * rng.standard_normal((rows, keys)) + rise * j).astype(np.float32) for j in range(count)]
    return scores, [rng.standard_normal((keys, 4)).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("policy", [None, Policy(8, 0), Policy(4, 4)])
def test_both_placements_are_the_same_arithmetic(count, policy):
    scores, values = blocks(count)
    before, after = (two_stage(scores, values, place, policy) for place in ("before", "after"))
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[1], after[1])
    z = np.concatenate(scores, axis=1).astype(np.float64) * math.log(2)
    np.testing.assert_allclose(before[0], scipy.special.softmax(z, axis=1) @ np.concatenate(values), atol=2e-6)
    np.testing.assert_allclose(before[1], scipy.special.logsumexp(z, axis=1), rtol=1e-6)


def test_moving_the_rescale_without_its_factor_is_wrong():
    scores, values = blocks(5)
    right, _ = two_stage(scores, values, "before")
    wrong, lse = two_stage(scores, values, "before with the new factor")
    assert np.abs(wrong - right).max() > 0.1
    np.testing.assert_array_equal(lse, two_stage(scores, values, "after")[1])  # the statistics do not show it
    # With one block there is nothing to rescale, and with a maximum that never moves every factor is 1.
    for quiet in (blocks(1), blocks(5, rise=-200.0)):
        np.testing.assert_array_equal(two_stage(*quiet, "before with the new factor")[0], two_stage(*quiet, "after")[0])


def test_blocks_are_paired():
    scores, values = blocks(3)
    for s, v in ((scores, values[:2]), ([], [])):
        with pytest.raises(ValueError, match="need as many"):
            two_stage(s, v, "after")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rescale_by_vote(np.ones((2, 1)), np.full((2, 1), 1.5), lanes=2), r"gamma must be in"),
        (lambda: rescale_by_vote(np.ones((2, 1)), np.full((2, 1), np.nan), lanes=2), r"gamma must be in"),
        (lambda: two_stage(*blocks(2), "later"), r"rescale is 'later'"),
        (
            lambda: two_stage([*blocks(1)[0], np.ones((1, 16), np.float32)], blocks(2)[1], "after"),
            r"block 1: scores has shape \(1, 16\)",
        ),
        (
            lambda: two_stage(blocks(2)[0], [*blocks(1)[1], np.ones((16, 1), np.float32)], "after"),
            r"block 1: values has shape \(16, 1\)",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
