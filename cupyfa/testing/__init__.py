"""What the tests of an attention kernel need: inputs, guards, tolerances and cases.

Everything works without a GPU and without CuPy; pass ``xp=cupy`` to get the same on the GPU. Users who validate a
kernel of their own can import it too:

>>> import numpy as np
>>> from cupyfa.oracles import dense, online
>>> case = CASES[0]
>>> q, k, v = case.make_inputs()
>>> reference, reference_lse = dense.attention(q, k, v, **case.options)
>>> yardstick, _ = dense.same_precision(q, k, v, **case.options)
>>> out, lse = online.attention(q, k, v, **case.options)
>>> assert_close(out, reference, yardstick, context=case)
>>> assert_lse_close(lse, reference_lse, score_magnitude=score_magnitude(q, k), context=case)
"""

from cupyfa.testing.backward_cases import BACKWARD_CASES, BackwardCase
from cupyfa.testing.canaries import CANARY, Guarded, guarded_empty
from cupyfa.testing.case import Case, as_bshd
from cupyfa.testing.cases import CASES
from cupyfa.testing.gradients import assert_gradients_close
from cupyfa.testing.inputs import random_array
from cupyfa.testing.kvcache_cases import CACHE_CASES, CacheCase
from cupyfa.testing.packed_cases import PACKED_CASES, PackedCase
from cupyfa.testing.tolerance import assert_close, assert_lse_close, score_magnitude, ulp

__all__ = [
    "BACKWARD_CASES",
    "CACHE_CASES",
    "CANARY",
    "CASES",
    "PACKED_CASES",
    "BackwardCase",
    "CacheCase",
    "Case",
    "Guarded",
    "PackedCase",
    "as_bshd",
    "assert_close",
    "assert_gradients_close",
    "assert_lse_close",
    "guarded_empty",
    "random_array",
    "score_magnitude",
    "ulp",
]
