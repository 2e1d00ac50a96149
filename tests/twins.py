"""How close a kernel must be to its twin, `cupyfa.oracles.online`: much closer than to any reference."""

from __future__ import annotations

import numpy as np

from cupyfa.testing import ulp

__all__ = ["assert_lse_of_twin", "assert_within_two_ulp"]


def assert_within_two_ulp(out: np.ndarray, twin: np.ndarray) -> None:
    """Element by element, two ulp of the row's largest number.

    Before the last rounding, the two results differ by what the order of additions and the approximate exp2 leave,
    about 2**-20 of the row and a small part of an ulp, and by weights that were rounded to the other side: P comes
    close enough to a tie for that in about one of 4,000 (bfloat16) or 500 (float16) weights. Let u be the ulp of the
    type just below 1. A row's largest P is so close to 1 that it rounds to 1 in both; any other P is below 1, so that a
    flip moves it by at most u, and the output by at most u * max|v| / sum(P). The row's ulp is at least
    u * max|out| = u * max|P V| / sum(P). Their ratio is at most max|v| / max|P V|. For normal v, max|P V| is about
    sqrt(sum(P**2)) * max|v|, and sum(P**2) > 1: one flip makes less than one ulp, and several only happen in rows with
    so many keys that each flip is a small part of an ulp. The last rounding turns a difference below 1.5 ulp into at
    most 2. (The twin against itself with errors of that size in its scores and exponentials: 1 ulp at most.)

    Under a speculative softmax the largest P may be anything from 1 up, once its reference is old, and so it can flip
    as well: by up to 2 u of itself, an output that it makes alone by less than 2 ulp. Divided by it, the other P are as
    before, and a flip moves each by at most 2 u of itself.
    """
    assert out.dtype == twin.dtype
    have, want = out.astype(np.float64), twin.astype(np.float64)
    bound = 2 * ulp(np.abs(want).max(axis=-1, keepdims=True), twin.dtype)
    excess = np.abs(have - want) / bound
    assert excess.max() <= 1, f"{2 * excess.max():.2f} ulp at {np.unravel_index(excess.argmax(), excess.shape)}"


def assert_lse_of_twin(lse: np.ndarray, twin: np.ndarray, magnitude: np.ndarray) -> None:
    """The scores differ by the tensor core's truncation (see assert_lse_close), the rest by some units of 2**-22."""
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(twin))
    seen = ~np.isneginf(twin)
    have, want = lse[seen].astype(np.float64), twin[seen].astype(np.float64)
    bound = 2e-6 * np.maximum(1, np.abs(want)) + 2.0**-21 * magnitude[seen]
    excess = np.abs(have - want) / bound
    assert excess.max() <= 1, f"{excess.max():.2f} of the bound"
