"""fma and directed addition against rational arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupyfa.oracles.float32 import add_rm, fma_rn

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SETTINGS = settings(deadline=None, derandomize=True, max_examples=400)
LARGEST = Fraction(float(np.finfo(np.float32).max))


def neighbours(exact):
    """The float32 values just below or at, and just above or at, a rational number."""
    near = np.float32(float(exact))
    below = near if Fraction(float(near)) <= exact else np.nextafter(near, np.float32(-np.inf))
    above = near if Fraction(float(near)) >= exact else np.nextafter(near, np.float32(np.inf))
    return below, above


def nearest_even(exact):
    below, above = neighbours(exact)
    down, up = exact - Fraction(float(below)), Fraction(float(above)) - exact
    if down == up:
        return below if int(below.view(np.uint32)) % 2 == 0 else above
    return below if down < up else above


@SETTINGS
@given(FLOATS, FLOATS, FLOATS)
@example(1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60)  # a tie but for the last operand, which a float64 sum drops
@example(1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-60))
@example(1 + 2.0**-12, 1 + 2.0**-12, -1.0)
@example(2.0**-80, 2.0**-68, 2.0**-149)  # subnormal: a tie of the last place
@example(2.0**-80, 2.0**-70, 2.0**-149)
def test_fma_rounds_once(a, b, c):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) <= LARGEST:
        got = fma_rn(a, b, c)
        assert got.dtype == np.float32
        assert float(got) == float(nearest_even(exact))


def test_rounding_twice_is_not_enough():
    a, b = (np.random.default_rng(n).integers(1, 2**12, 2000) * 2.0**-12 + 1 for n in (0, 1))
    tie = (a * b * 2**24) % 2 == 1  # the product lies halfway between two float32 values in [1, 2), or on one in [2, 4)
    a, b = a[tie & (a * b < 2)], b[tie & (a * b < 2)]
    assert len(a) > 100
    for c in (2.0**-70, -(2.0**-70)):
        twice = (a * b + c).astype(np.float32)  # float64 first: c is lost, and the tie goes to even
        once = fma_rn(a, b, c)
        assert (once != twice).any()
        direction = np.sign(once.astype(np.float64) - a * b)
        assert (direction == np.sign(c)).all()


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        (np.inf, 1, 1, np.inf),
        (1, 1, -np.inf, -np.inf),
        (np.inf, 0, 1, np.nan),
        (np.nan, 1, 1, np.nan),
        (1e38, 1e38, -np.inf, -np.inf),
        (3e38, 2, 0, np.inf),
        (3e38, 2, -3e38, np.float32(3e38)),
    ],
)
def test_fma_special_values(a, b, c, expected):
    np.testing.assert_array_equal(fma_rn(a, b, c), np.float32(expected))


@SETTINGS
@given(FLOATS, FLOATS)
@example(2.0**23 + 2.0**22, -(2.0**-40))
@example(2.0**23 + 2.0**22, 0.5)
@example(1.0, -1.0)
def test_add_rounds_down(a, b):
    exact = Fraction(a) + Fraction(b)
    if abs(exact) <= LARGEST:
        assert float(add_rm(a, b)) == float(neighbours(exact)[0])


def test_operands_are_broadcast():
    assert fma_rn(np.ones((2, 1)), np.ones(3), 1).shape == (2, 3)
    assert add_rm(np.ones((2, 1)), np.ones(3)).shape == (2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fma_rn(np.ones(2), np.ones(3), 0), r"fma_rn: a \(2,\), b \(3,\), c \(\) do not broadcast"),
        (lambda: add_rm(np.ones((2, 2)), np.ones(3)), r"add_rm: a \(2, 2\), b \(3,\) do not broadcast"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
