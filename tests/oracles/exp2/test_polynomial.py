"""exp2 by polynomial: the specification's figures, range reduction, exponent, clamp."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupyfa.oracles.exp2.polynomial import (
    DEGREE_3,
    HIGHEST,
    LOWEST,
    MAGIC,
    ExponentTooLarge,
    combine_exponent,
    exp2_hardware,
    exp2_polynomial,
    horner,
    measure,
    reduce_range,
    uniform_grid,
)

SETTINGS = settings(deadline=None, derandomize=True, max_examples=300)
ARGUMENTS = st.floats(-127, 127, width=32)


@pytest.fixture(scope="module")
def error():
    x = uniform_grid()
    return measure(exp2_polynomial(x), x)


def test_figures_of_the_deterministic_grid(error):
    """65,536 points i / 65536, degree 3, float32 multiply-adds."""
    assert f"{error.raw_max:.7e}" == "8.7683755e-05"
    assert f"{error.raw_mean:.7e}" == "5.4271432e-05"
    assert f"{error.bfloat16_max:.7e}" == "3.8975323e-03"
    assert f"{error.bfloat16_mean:.7e}" == "1.4095395e-03"
    assert f"{error.same_code:.4%}" == "99.0051%"
    assert error.within_one == 1.0


def test_figures_do_not_rest_on_our_bfloat16():
    x = uniform_grid()
    value, truth = exp2_polynomial(x), np.exp2(x.astype(np.float64))
    codes, ideal = (y.astype(np.float32).astype(ml_dtypes.bfloat16) for y in (value, truth))
    relative = np.abs(codes.astype(np.float64) - truth) / truth
    assert f"{relative.max():.7e} {relative.mean():.7e}" == "3.8975323e-03 1.4095395e-03"
    assert f"{(codes == ideal).mean():.4%}" == "99.0051%"


def test_order_of_evaluation_is_part_of_the_figures():
    x = uniform_grid()
    p0, p1, p2, p3 = (np.float32(p) for p in DEGREE_3)
    unfused = ((p3 * x + p2) * x + p1) * x + p0  # every product rounded
    assert (unfused != exp2_polynomial(x)).any()
    assert measure(unfused, x).raw_max != measure(exp2_polynomial(x), x).raw_max


def test_raw_and_consumed_accuracy_are_different_claims(error):
    """Before rounding the polynomial is about a thousand times worse than float32; as bfloat16 it cannot be told."""
    x = uniform_grid()
    hardware = measure(exp2_hardware(x), x)
    assert hardware.raw_max < 1.41e-7  # the real unit's figure
    assert error.raw_max > 500 * hardware.raw_max
    assert f"{hardware.bfloat16_max:.2e} {hardware.bfloat16_mean:.2e}" == "3.89e-03 1.41e-03"  # the ideal's row
    assert f"{error.bfloat16_mean:.2e}" == "1.41e-03"
    assert error.bfloat16_max < 1.003 * hardware.bfloat16_max
    assert hardware.same_code == 1.0


def test_a_float32_sensitive_consumer_sees_the_polynomial():
    x = uniform_grid()
    drift = [abs(values.astype(np.float64).sum() / np.exp2(x.astype(np.float64)).sum() - 1)
             for values in (exp2_polynomial(x), exp2_hardware(x))]  # fmt: skip
    assert drift[0] > 1e-6 > 10 * drift[1]


def test_coefficients_are_float32():
    assert [np.float32(p).item() for p in DEGREE_3] == list(DEGREE_3)
    assert [hex(np.float32(p).view(np.uint32)) for p in DEGREE_3[:0:-1]] == ["0x3d9df09d", "0x3e6906a4", "0x3f31f519"]


def test_magic_constant():
    assert float(MAGIC) == 12_582_912
    assert np.spacing(MAGIC) == 1
    assert np.spacing(MAGIC + HIGHEST) == np.spacing(MAGIC + LOWEST) == 1


@SETTINGS
@given(ARGUMENTS)
@example(-(2.0**-149))
@example(-0.0)
@example(127.0)
@example(-127.0)
@example(float(np.nextafter(np.float32(3), np.float32(0))))
def test_range_reduction_is_floor(x):
    y, n, f = (v.item() for v in reduce_range(x))
    assert n == math.floor(x)
    assert y == 12_582_912 + n
    assert 0 <= f <= 1
    assert f == np.float32(x - math.floor(x))
    assert (f == 1) == (x < 0 and x - math.floor(x) >= 1 - 2.0**-25)


def test_round_to_nearest_would_not_be_floor():
    x = np.float32([0.75, -0.25, 2.5])
    wrong = (x + MAGIC) - MAGIC
    assert wrong.tolist() == [1, 0, 2]
    assert reduce_range(x)[1].tolist() == [0, -1, 2]


@SETTINGS
@given(st.integers(-126, 127), st.floats(1, 2, width=32, exclude_max=True))
def test_exponent_reconstruction(n, p):
    assert combine_exponent(np.float32(MAGIC + n), np.float32(p)).item() == math.ldexp(p, n)


def test_exponent_reconstruction_carries_at_two():
    assert combine_exponent(MAGIC + np.float32([-1, 0, 126]), np.float32(2)).tolist() == [1, 2, 2.0**127]


@SETTINGS
@given(st.floats(-126, 127, width=32))
@example(-(2.0**-30))
def test_error_is_the_polynomials_over_the_whole_range(x):
    got, truth = exp2_polynomial(x).item(), math.pow(2, x)
    assert abs(got / truth - 1) < 8.78e-5


def test_whole_numbers_are_exact():
    n = np.arange(-126, 128)
    np.testing.assert_array_equal(exp2_polynomial(n), np.exp2(n.astype(np.float64)))


def test_clamp():
    """At and below -127 everything is 0; just above, the leading 1 is lost and the result is far too small."""
    below = np.float32([-127, -127.5, -1000, -3e38, -np.inf, np.nan])
    np.testing.assert_array_equal(exp2_polynomial(below), np.zeros(6, np.float32))
    inside = np.linspace(-126.999, -126.001, 50, dtype=np.float32)
    got = exp2_polynomial(inside)
    assert (got < np.finfo(np.float32).tiny).all()
    assert (got < np.exp2(inside.astype(np.float64))).all()
    assert exp2_polynomial(-126.0).item() == 2.0**-126


def test_without_the_clamp_the_exponent_wraps():
    y, _, f = reduce_range(-129.0)
    assert combine_exponent(y, horner(DEGREE_3, f)).item() < -1e37  # a huge number with a sign
    assert exp2_polynomial(-129.0).item() == 0


@pytest.mark.parametrize("x", [127.01, 128.0, 1e4, np.inf])
def test_positive_side_is_bounded(x):
    with pytest.raises(ExponentTooLarge, match="must not exceed 127"):
        exp2_polynomial([0.0, x])


def test_a_nan_is_swallowed():
    # fmax takes the number. A kernel that emulates must not count on a NaN score to show in P.
    assert exp2_polynomial(np.nan).item() == 0
    assert math.isnan(exp2_hardware(np.nan).item())


def test_hardware_stand_in_flushes_subnormals():
    assert exp2_hardware([-126.0, -126.5, -149.0]).tolist() == [2.0**-126, 0, 0]


def test_monotone_between_whole_numbers_and_across_them():
    x = np.linspace(-3, 3, 100_001, dtype=np.float32)
    got = exp2_polynomial(x)
    drops = np.diff(got) < 0
    assert drops.sum() <= 6  # only at a whole number may the value step, by the error at f = 1: p(1) < 2
    assert (np.abs(np.diff(got))[drops] < 2e-4 * got[:-1][drops]).all()
    assert horner(DEGREE_3, 1.0).item() < 2


@pytest.mark.parametrize("points", [0, 3, 2**25, -4])
def test_grid_has_exact_points(points):
    with pytest.raises(ValueError, match="power of two"):
        uniform_grid(points)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="they must be equal"):
        measure(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match="one or more numbers"):
        horner([], 0.5)
    assert exp2_polynomial(np.zeros((2, 3))).shape == (2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: combine_exponent(MAGIC + np.float32([0, 1]), np.float32([1, 1, 1])),
            r"y \(2,\), p \(3,\) do not broadcast",
        ),
        (lambda: reduce_range([0.0, np.nan]), r"an argument is NaN"),
        (lambda: reduce_range(2.0**23), r"beyond 2\*\*22"),
        (lambda: horner(np.ones((2, 2)), 0.5), r"one or more numbers"),
        (lambda: measure([], []), r"they must be equal"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
