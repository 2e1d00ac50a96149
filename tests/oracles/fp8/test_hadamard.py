"""The signed Hadamard transform of Q and K (specification 0x06)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.formats import E4M3FN
from cupyfa.oracles.fp8 import hadamard
from cupyfa.oracles.fp8.error import FIXTURE_SEED, estimate, fixture, rmse
from cupyfa.oracles.fp8.hadamard import (
    NotOrthogonal,
    TransformMismatch,
    block_size,
    check_same_transform,
    coherence,
    random_signs,
    signed_hadamard,
    transform,
)

HEAD_DIMS = [1, 16, 32, 48, 64, 80, 96, 128, 192, 256]
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)


def in_order(a, b):
    """``a @ b`` with each sum taken from left to right, one rounding per term: the same on every machine."""
    total = np.zeros((a.shape[0], b.shape[1]))
    for n in range(a.shape[1]):
        total = total + a[:, n, None] * b[None, n, :]
    return total


def test_blocks_of_other_head_dims():
    assert block_size(192) == 64
    assert 192 // block_size(192) == 3
    assert {d: block_size(d) for d in HEAD_DIMS} == {
        1: 1, 16: 16, 32: 32, 48: 16, 64: 64, 80: 16, 96: 32, 128: 128, 192: 64, 256: 256,
    }  # fmt: skip
    with pytest.raises(ValueError, match="head_dim is 0"):
        block_size(0)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_orthogonal(head_dim):
    R = signed_hadamard(random_signs(head_dim, seed=head_dim))
    assert np.abs(R @ R.T - np.eye(head_dim)).max() < 1e-14
    assert np.abs(R.T @ R - np.eye(head_dim)).max() < 1e-14


def test_head_dim_192_mixes_three_blocks_of_64():
    R = signed_hadamard(random_signs(192, seed=1))
    for row in range(3):
        for column in range(3):
            block = R[64 * row : 64 * row + 64, 64 * column : 64 * column + 64]
            assert np.all(np.abs(block) == (0.125 if row == column else 0.0))


@given(st.sampled_from(HEAD_DIMS), st.integers(0, 2**32), st.integers(1, 5))
@PROPERTY
def test_fast_transform_is_the_matrix(head_dim, seed, rows):
    x = np.random.default_rng(seed).standard_normal((rows, 2, head_dim))
    signs = random_signs(head_dim, seed)
    assert np.abs(transform(x, signs) - x @ signed_hadamard(signs)).max() < 1e-13
    assert transform(x.astype(np.float32), signs).dtype == np.float32


def test_identity_of_the_fixture_in_float64():
    # The specification prints 1.78e-14 for its fixture; a sum from left to right gives exactly that.
    q, k, _ = fixture()
    R = signed_hadamard(random_signs(32, FIXTURE_SEED + 1))
    error = np.abs(in_order(in_order(q, R), in_order(k, R).T) - in_order(q, k.T)).max()
    assert f"{error:.2e}" == "1.78e-14"


@given(st.sampled_from(HEAD_DIMS), st.integers(0, 2**32))
@PROPERTY
def test_products_do_not_change(head_dim, seed):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((5, head_dim)), rng.standard_normal((7, head_dim))
    signs = random_signs(head_dim, seed)
    assert np.abs(transform(q, signs) @ transform(k, signs).T - q @ k.T).max() < 1e-12


def test_exact_before_and_approximate_after_quantization():
    q, k, _ = fixture()
    R = signed_hadamard(random_signs(32, FIXTURE_SEED + 1))
    exact = q @ k.T
    before = np.abs((q @ R) @ (k @ R).T - exact).max()
    after = np.abs(E4M3FN.round(q @ R) @ E4M3FN.round(k @ R).T - exact).max()
    assert before < 1e-13
    assert after > 0.1  # thirteen orders of magnitude worse: the identity says nothing about FP8


def test_q_and_k_need_the_same_transform():
    q, k, _ = fixture()
    R = signed_hadamard(random_signs(32, seed=1))
    other = signed_hadamard(random_signs(32, seed=2))
    check_same_transform(R, R)
    with pytest.raises(TransformMismatch):
        check_same_transform(R, other)
    assert np.abs((q @ R) @ (k @ other).T - q @ k.T).max() > 1.0


@pytest.mark.parametrize("fault", ["scaled", "sheared", "rectangular"])
def test_matrices_that_are_not_orthogonal(fault):
    R = signed_hadamard(random_signs(8, seed=1))
    bad = {"scaled": 2 * R, "sheared": R + np.eye(8) * 0.01, "rectangular": R[:4]}[fault]
    with pytest.raises(NotOrthogonal):
        check_same_transform(bad, R)


@pytest.mark.parametrize("signs", [[1, 0, 1, 1], [1, 2], [], [[1, 1]], [1, math.nan]])
def test_signs_are_signs(signs):
    with pytest.raises(NotOrthogonal):
        signed_hadamard(signs)
    with pytest.raises(ValueError, match="signs"):
        transform(np.zeros((1, 4)), signs)


def test_does_not_commute_with_rope():
    # One kernel may do both; but the transform must come after the rotation, which depends on the position.
    rng = np.random.default_rng(0)
    x, angle = rng.standard_normal(8), rng.uniform(0, 3, 4)

    def rope(y):
        a, b = y[:4], y[4:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)])

    signs = random_signs(8, seed=3)
    assert np.abs(transform(rope(x), signs) - rope(transform(x, signs))).max() > 0.1


def test_spreads_one_coordinate_over_all():
    x = np.zeros((1, 128))
    x[0, 77] = 448.0
    y = transform(x, random_signs(128, seed=5))
    assert np.all(np.abs(np.abs(y) - 448 / math.sqrt(128)) < 1e-9)


def make_pair(kind, rng, rows=256, d=128):
    """Q and K whose large channels coincide, avoid each other, or do not exist."""
    q, k = rng.standard_normal((rows, d)), rng.standard_normal((rows, d))
    if kind == "coincide":
        q[:, 0] *= 20
        k[:, 0] *= 20
    elif kind == "avoid":
        q[:, 0] *= 20
        k[:, 0] *= 0.05
    return q, k


@pytest.mark.parametrize(("kind", "verdict"), [("coincide", "helps"), ("avoid", "hurts"), ("none", "indifferent")])
def test_coherence_predicts_the_error_of_the_scores(kind, verdict):
    predicted, measured = [], []
    for seed in range(8):
        q, k = make_pair(kind, np.random.default_rng(seed))
        signs = random_signs(128, seed)
        plain = rmse(E4M3FN.round(q) @ E4M3FN.round(k).T, q @ k.T)
        mixed = rmse(E4M3FN.round(transform(q, signs)) @ E4M3FN.round(transform(k, signs)).T, q @ k.T)
        predicted.append(math.sqrt(coherence(q, k)))
        measured.append(plain / mixed)
    interval = estimate(np.log(np.array(measured) / np.array(predicted)))
    assert -math.log(1.15) < interval.low
    assert interval.high < math.log(1.15)
    if verdict == "helps":
        assert min(measured) > 3
    elif verdict == "hurts":
        assert max(measured) < 0.7
    else:
        assert 0.95 < min(measured) < max(measured) < 1.05


def test_coherence_limits():
    assert coherence(np.eye(8)[:1], np.eye(8)[:1]) == 8
    assert coherence(np.eye(8)[:1], np.eye(8)[1:2]) == 0
    assert coherence(np.ones((3, 8)), np.eye(8)) == 1
    weights = np.array([[1.0, 0.0]])
    assert coherence(np.eye(8)[:1], np.eye(8)[:2], weights) == 8
    for q, k, w in ((np.zeros((1, 8)), np.eye(8), None), (np.eye(8), np.eye(4), None), (np.eye(8), np.eye(8), weights)):
        with pytest.raises(ValueError, match="hadamard"):
            coherence(q, k, w)


def test_the_package_uses_scipys_matrix():
    from scipy.linalg import hadamard as sylvester

    assert np.array_equal(hadamard.signed_hadamard(np.ones(64)) * 8, sylvester(64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hadamard.random_signs(0, seed=1), r"head_dim is 0"),
        (lambda: hadamard.transform(np.float64(1.0), [1]), r"x is float64"),
        (lambda: hadamard.transform(np.ones(2, np.int64), [1, 1]), r"x is int64"),
        (
            lambda: hadamard.check_same_transform(np.zeros((0, 0)), np.zeros((0, 0))),
            r"transform of Q is not orthogonal",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
