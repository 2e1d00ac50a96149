"""The kernel against its twin, which has the same tiles, order and rounding points: much closer than any reference."""

from __future__ import annotations

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'")

from gpu.tools import attention_guarded, host, on_device  # noqa: E402
from hard_scores import FINITE, harden  # noqa: E402
from twins import assert_lse_of_twin, assert_within_two_ulp  # noqa: E402

import cupyfa  # noqa: E402
from cupyfa.oracles import online  # noqa: E402
from cupyfa.testing import Case, score_magnitude  # noqa: E402

TWINS = [
    Case("twin", 2, 256, 512, 4, 4, 64, "bfloat16"),
    Case("twin", 1, 1000, 1000, 4, 2, 64, "float16", True),
    Case("twin", 2, 333, 777, 6, 2, 64, "float16"),
    Case("twin", 1, 1500, 1400, 2, 1, 64, "bfloat16", True),  # tiles of 192 rows; the first 100 see no key
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
    check(case, *case.make_inputs())


@pytest.mark.parametrize("kind", FINITE)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernel_is_its_twin_for_hard_scores(dtype: str, head_dim: int, kind: str) -> None:
    case = Case("hard", 1, 500, 800, 4, 2, head_dim, dtype, True)
    Q, K, V = case.make_inputs()
    Q, K = harden(kind, Q, K)
    check(case, Q, K, V)


def check(case: Case, Q: np.ndarray, K: np.ndarray, V: np.ndarray) -> None:
    q, k, v = (cupy.asarray(x.view(np.uint16)).view(x.dtype) for x in (Q, K, V))
    selection = cupyfa.explain(q, k, v, **{name: on_device(x) for name, x in case.options.items()}).selection
    assert selection is not None
    spec = selection.spec
    result = attention_guarded(q, k, v, **case.options)
    twin, twin_lse = online.attention(
        Q, K, V, tile_m=spec.tile_m, tile_n=spec.tile_n, speculative=spec.speculative, **case.options
    )
    assert_within_two_ulp(host(result.out), twin)
    assert_lse_of_twin(
        host(result.lse), twin_lse, score_magnitude(Q, K, case.softmax_scale, case.options.get("softcap"))
    )
