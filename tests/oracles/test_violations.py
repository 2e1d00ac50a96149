"""The checks that several oracles share."""

import numpy as np
import pytest

from cupyfa.oracles.violations import ContractViolation, check_broadcast, check_indices, check_range, check_shape


def test_what_fits_passes():
    check_range("x", 0, 3, low=0, high=3)
    check_range("x", 0, no_upper_end=10**9)
    check_shape("x", (2, "any"), a=np.zeros((2, 5)), b=np.zeros((2, 0)))
    check_shape("x", (), a=np.zeros(()))
    check_indices("x", np.array([0, 1, 1]), 2)
    check_broadcast("x", a=np.zeros((2, 1)), b=np.zeros(3), c=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_range("x", 0, 3, n=4), "x: n is 4; it must be in 0 .. 3"),
        (lambda: check_range("x", 1, n=0), "x: n is 0; it must be at least 1"),
        (lambda: check_range("x", 0, n=float("nan")), "n is nan"),
        (lambda: check_shape("x", (2,), a=np.zeros((2, 1))), r"a has shape \(2, 1\); it must be \(2,\)"),
        (lambda: check_shape("x", ("rows", 3), a=np.zeros((1, 2))), r"it must be \(rows, 3\)"),
        (lambda: check_indices("x", np.array([0, -1]), 2), "index -1 is outside 0 .. 1"),
        (lambda: check_indices("x", np.array([2]), 2), "index 2 is outside 0 .. 1"),
        (lambda: check_broadcast("x", a=np.zeros(2), b=np.zeros(3)), r"a \(2,\), b \(3,\) do not broadcast"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ContractViolation, match=message):
        call()
