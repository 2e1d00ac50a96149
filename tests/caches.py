"""What the tests of attention over a cache share: references, and the comparison with them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupyfa.oracles import dense, kvcache
from cupyfa.testing import CacheCase, assert_close, assert_lse_close, score_magnitude


def by_oracle(arrays: dict[str, Any], options: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    """Output and LSE by the oracle, which appends to copies of the caches."""
    copies = {name: arrays[name].copy() for name in ("k_cache", "v_cache")}
    return kvcache.attention(**(arrays | copies), **options, **more)


@functools.cache
def reference(case: CacheCase) -> tuple[Any, Any, Any, float]:
    """Output and LSE, the plain algorithm's output, and the magnitude of the scores."""
    arrays, options = case.make_arrays(), case.options
    out, lse = by_oracle(arrays, options, of_sequence=dense.attention)
    plain, _ = by_oracle(arrays, options, of_sequence=dense.same_precision)
    q, *keys = (
        np.nan_to_num(arrays[name].astype(np.float32)).reshape(-1, *arrays[name].shape[-2:])
        for name in ("q", "k_cache", "k")
        if name in arrays
    )
    magnitudes = score_magnitude(q[None], np.concatenate(keys)[None], case.softmax_scale, case.softcap)
    return out, lse, plain, float(magnitudes.max(initial=0))


def hold_to_oracle(case: CacheCase, out: Any, lse: Any) -> None:
    expected, expected_lse, plain, magnitude = reference(case)
    assert_close(out, expected, plain, context=case)
    assert_lse_close(lse, expected_lse, score_magnitude=magnitude, context=case)


def hold_to_caches(case: CacheCase, before: dict[str, Any], k_cache: Any, v_cache: Any) -> None:
    """Compare the caches of NumPy after a call, bit for bit: what was not appended to is as it was."""
    for have, want in zip((k_cache, v_cache), case.expected_caches(before), strict=True):
        np.testing.assert_array_equal(have.view(np.uint16), want.view(np.uint16))
