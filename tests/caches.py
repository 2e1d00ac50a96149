"""What the tests of attention over a cache share: references, and the comparison with them."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import numpy as np

from cupyfa.oracles import dense, kvcache
from cupyfa.testing import CacheCase, assert_close, assert_lse_close, random_array, score_magnitude


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


def as_documented(arrays: dict[str, Any], seqlen_new: int = 0) -> dict[str, Any]:
    """The call that one with broken lengths, pages or rows stands for, with its new keys in place.

    Lengths end at 0 and at the capacity, and pages that are none are zeros: those of one more page, the last of the
    caches that are returned. No key is appended there.
    """
    fixed = arrays | {name: np.concatenate([arrays[name], 0 * arrays[name][:1]]) for name in ("k_cache", "v_cache")}
    pages, size = arrays["k_cache"].shape[:2]
    of_page = lambda x: np.where((x >= 0) & (x < pages), x, pages).astype(np.int32)  # noqa: E731
    batch = arrays["cache_seqlens"].size
    rows = of_page(arrays.get("cache_batch_idx", np.arange(batch)))
    table = of_page(arrays["page_table"]) if "page_table" in arrays else rows[:, None]
    capacity = table.shape[1] * size
    lengths = np.clip(arrays["cache_seqlens"].astype(np.int64), 0, capacity)
    for b, i in itertools.product(range(batch), range(seqlen_new)):
        page, row = divmod(int(lengths[b]) + i, size)
        if page < table.shape[1] and table[b, page] < pages:
            fixed["k_cache"][table[b, page], row] = arrays["k"][b, i]
            fixed["v_cache"][table[b, page], row] = arrays["v"][b, i]
    fixed["cache_seqlens"] = np.minimum(lengths + seqlen_new, capacity).astype(np.int32)
    fixed |= {"page_table": table} if "page_table" in arrays else {"cache_batch_idx": rows}
    return {name: x for name, x in fixed.items() if name not in ("k", "v")}


def hold_to_documented(
    arrays: dict[str, Any], options: dict[str, Any], seqlen_new: int, out: Any, lse: Any, k_cache: Any, v_cache: Any
) -> None:
    """Compare a call that had broken values with what they stand for; `arrays` are those before the call."""
    fixed = as_documented(arrays, seqlen_new)
    reference, reference_lse = by_oracle(fixed, options, of_sequence=dense.attention)
    plain, _ = by_oracle(fixed, options, of_sequence=dense.same_precision)
    heads = (x.reshape(1, -1, *x.shape[-2:]) for x in (fixed["q"], fixed["k_cache"]))
    magnitude = float(score_magnitude(*heads, options.get("softmax_scale"), options.get("softcap")).max(initial=0))
    assert_close(out, reference, plain, context=sorted(arrays))
    assert_lse_close(lse, reference_lse, score_magnitude=magnitude, context=sorted(arrays))
    for name, have in (("k_cache", k_cache), ("v_cache", v_cache)):
        np.testing.assert_array_equal(have.view(np.uint16), fixed[name][:-1].view(np.uint16), err_msg=name)


def without_nan(case: CacheCase) -> dict[str, Any]:
    """The arrays of a case, with numbers wherever a cache has no keys: broken lengths lead there."""
    arrays = case.make_arrays()
    for n, name in enumerate(("k_cache", "v_cache"), 5):
        arrays[name] = random_array(arrays[name].shape, arrays[name].dtype, n)
    return arrays


_ROWS = CacheCase("rows", (100, 64, 3, 150), head_dim=64)
_NEW = CacheCase("new keys", (100, 64, 3, 150), seqlen_new=3, seqlen_q=3, causal=True, dtype="float16", num_splits=3)
_PAGES = CacheCase("pages", (100, 64, 3, 150), page_size=16, num_splits=2, heads_q=2)
_NEW_PAGES = CacheCase("new pages", (100, 64, 3, 150), page_size=24, seqlen_new=3, head_dim=128, sink=True)
_OWN_ROWS = CacheCase("own rows", (100, 64, 3, 150), batch_idx=True, seqlen_new=2, spare=2)
_LENGTHS = [[-1, 2**31 - 1, -(2**31), 5], [10**6, 0, 149, -7], [152, 153, 154, 155], [2**31 - 2, 175, 176, 177]]
#: A case, and what is wrong.
BROKEN: dict[str, tuple[CacheCase, dict[str, Any]]] = {
    f"{case.name}, lengths {lengths}": (case, {"cache_seqlens": lengths})
    for case in (_ROWS, _NEW, _PAGES, _NEW_PAGES, _OWN_ROWS)
    for lengths in _LENGTHS
}
BROKEN |= {
    f"{case.name}, page {page}": (case, {"page": page})
    for case in (_PAGES, _NEW_PAGES)
    for page in (-1, 2**30, -(2**31), 2**31 - 1, None)
}
BROKEN |= {
    f"own rows {rows}": (_OWN_ROWS, {"cache_batch_idx": rows}) for rows in ([-1, 3, 1, 6], [2**30, 0, -(2**31), 2])
}
BROKEN["pages and lengths"] = (_NEW_PAGES, {"page": -5, "cache_seqlens": [500, -3, 2**31 - 1, 7]})


def broken(name: str) -> tuple[CacheCase, dict[str, Any]]:
    """A case and its arrays, NumPy, with the values of `BROKEN`."""
    case, wrong = BROKEN[name]
    arrays = without_nan(case)
    if "page" in wrong:  # of every sequence one page that has keys, or is to have them
        pages = len(arrays["k_cache"])
        page = pages if wrong["page"] is None else wrong["page"]
        for b, i in enumerate((0, 2, 0, (case.lengths[3] + case.seqlen_new - 1) // (case.page_size or 1))):
            arrays["page_table"][b, i] = page
    return case, arrays | {name: np.array(x, np.int64).astype(np.int32) for name, x in wrong.items() if name != "page"}


#: Packed queries of which all sequences but the first have offsets that are none.
FIRST_ROWS = CacheCase("broken", (70, 9, 30), lengths_q=(5, 3, 1), causal=True, page_size=16, sink=True, num_splits=3)
BROKEN_OFFSETS = {
    "falling": [0, 5, 3, 3],
    "negative": [0, 5, -1, 9],
    "beyond": [0, 5, 100, 9],
    "garbage": [0, 5, -(2**31), 2**31 - 1],
}


def hold_to_first_rows(out: Any, lse: Any) -> None:
    """Compare a result of `FIRST_ROWS` with broken offsets: nobody has the other rows."""
    arrays = FIRST_ROWS.make_arrays() | {"cu_seqlens_q": np.int32([0, 5, 5, 5])}
    expected, expected_lse = by_oracle(arrays, FIRST_ROWS.options)
    np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), atol=2**-7)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


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
