"""What the tests of packed sequences share: references, and the comparison with them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupyfa.oracles import dense, packed
from cupyfa.testing import PackedCase, assert_close, assert_lse_close, score_magnitude


def call(case: PackedCase, xp: Any = np) -> dict[str, Any]:
    """All arguments of `attention_varlen`."""
    q, k, v = case.make_inputs(xp=xp)
    rest = case.lengths | case.options
    arrays = {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in rest.items()}
    return {"q": q, "k": k, "v": v, **arrays}


@functools.cache
def reference(case: PackedCase) -> tuple[Any, Any, Any, float]:
    """Output and LSE, the plain algorithm's output, and the magnitude of the scores."""
    arguments = call(case)
    out, lse = packed.attention(**arguments, of_sequence=dense.attention)
    plain, _ = packed.attention(**arguments, of_sequence=dense.same_precision)
    q, k = (np.nan_to_num(arguments[name].astype(np.float32)) for name in "qk")
    return out, lse, plain, score_magnitude(q[None], k[None], None, case.softcap)


def hold_to_oracle(case: PackedCase, out: Any, lse: Any) -> None:
    expected, expected_lse, plain, magnitude = reference(case)
    assert_close(out, expected, plain, context=case)
    assert_lse_close(lse, expected_lse, score_magnitude=magnitude, context=case)
