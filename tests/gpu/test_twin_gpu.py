"""The kernel against its twin, which has the same tiles, order and rounding points: much closer than any reference."""

from __future__ import annotations

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from gpu.tools import attention_guarded, host  # noqa: E402

import cupyfa  # noqa: E402
from cupyfa.oracles import online  # noqa: E402
from cupyfa.testing import Case, score_magnitude, ulp  # noqa: E402

TWINS = [
    Case("twin", 2, 256, 512, 4, 4, 64, "bfloat16"),
    Case("twin", 1, 1000, 1000, 4, 2, 64, "float16", True),
    Case("twin", 2, 333, 777, 6, 2, 64, "float16"),
    Case("twin", 2, 384, 384, 4, 4, 128, "float16"),
    Case("twin", 1, 1023, 1025, 4, 1, 128, "bfloat16", True),
    Case("twin", 1, 600, 600, 2, 2, 128, "bfloat16", softmax_scale=-0.125),
    Case("twin", 1, 300, 200, 2, 1, 128, "float16", True),  # the first 100 rows see no key
    Case("twin", 1, 512, 640, 2, 2, 192, "bfloat16", True),
    Case("twin", 1, 257, 513, 4, 2, 192, "float16"),
    Case("twin", 1, 512, 512, 2, 2, 256, "float16", True),
    Case("twin", 1, 259, 901, 6, 3, 256, "bfloat16"),
    Case("twin", 1, 3000, 3000, 1, 1, 128, "bfloat16", True),
]


@pytest.mark.parametrize("case", TWINS, ids=lambda case: case.id)
def test_kernel_is_its_twin(case: Case) -> None:
    q, k, v = case.make_inputs(xp=cupy)
    traits = cupyfa.explain(q, k, v, **case.options).traits
    assert traits is not None
    result = attention_guarded(q, k, v, **case.options)
    Q, K, V = host(q), host(k), host(v)
    twin, twin_lse = online.attention(Q, K, V, tile_m=traits["tile_m"], tile_n=traits["tile_n"], **case.options)
    assert_within_two_ulp(host(result.out), twin)
    assert_lse_of_twin(host(result.lse), twin_lse, score_magnitude(Q, K, case.softmax_scale))


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
