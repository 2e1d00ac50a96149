"""What the tests of attention over a cache share: references, and the comparison with them."""

from __future__ import annotations

import functools
import random
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


def random_case(number: int) -> CacheCase:
    """Any sizes and options, in any combination that makes sense."""
    choice = random.Random(f"cache {number}")
    seqlen_new = choice.choice((0, 1, 1, 2, 7))
    lengths = [choice.choice((0, 1, 63, 64, 65, choice.randrange(300))) for _ in range(choice.randrange(1, 6))]
    page_size = choice.choice((None, 1, 3, 8, 16, 16, 24, 64, 128, 256))
    prefix = 0
    if page_size is not None and choice.random() < 0.3:
        prefix = min(length // page_size for length in lengths)
    one_length = choice.random() < 0.2
    heads_kv, head_dim = choice.choice((1, 1, 2, 3)), choice.choice((8, 40, 64, 64, 96, 128, 192, 256))
    packed = choice.random() < 0.3
    return CacheCase(
        f"random {number}",
        lengths=(lengths[0],) * len(lengths) if one_length else tuple(lengths),
        seqlen_q=choice.choice((1, 1, 1, 2, 4, 16, 33)),
        lengths_q=tuple(choice.choice((0, 1, 1, 5, 40)) for _ in lengths) if packed else None,
        rows_of_nobody=choice.randrange(3) if packed else 0,
        heads_q=heads_kv * choice.choice((1, 2, 3, 8)),
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=choice.choice((None, None, 8, 72, 128)),
        dtype=choice.choice(("float16", "bfloat16")),
        causal=choice.random() < 0.5,
        page_size=page_size,
        seqlen_new=seqlen_new,
        rotary_dim=2 * choice.randrange(1, head_dim // 2 + 1) if seqlen_new and choice.random() < 0.5 else 0,
        rotary_interleaved=choice.random() < 0.5,
        spare=choice.randrange(4),
        batch_idx=page_size is None and choice.random() < 0.4,
        one_length=one_length,
        prefix=0 if one_length else prefix,
        window_size=choice.choice(((None, None), (None, None), (choice.randrange(90), choice.randrange(9)), (5, None))),
        softcap=choice.choice((None, None, 15.0)),
        softmax_scale=choice.choice((None, None, -0.1)),
        sink=choice.random() < 0.3,
        alibi=choice.random() < 0.3,
        **choice.choice(({}, {"num_splits": choice.randrange(1, 9)}, {"split_size": 64 * choice.randrange(1, 4)})),
    )
