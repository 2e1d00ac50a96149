"""Attention over a cache: the public function on the CPU, and what it refuses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from caches import by_oracle, hold_to_caches, hold_to_oracle, random_case

import cupyfa
from cupyfa import attention_with_kvcache
from cupyfa.oracles import dense, splits
from cupyfa.testing import CACHE_CASES, CacheCase, assert_close, guarded_empty, random_array


def run(case: CacheCase, arrays: dict[str, Any] | None = None, **more: Any) -> Any:
    """Output and LSE of the public function."""
    arrays = case.make_arrays() if arrays is None else arrays
    return attention_with_kvcache(**arrays, **(case.options | case.splits | more), return_lse=True)


@pytest.mark.parametrize("case", CACHE_CASES, ids=lambda case: case.id)
def test_case(case: CacheCase) -> None:
    arrays = case.make_arrays()
    before = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    shape = arrays["q"].shape
    out = guarded_empty((*shape[:-1], arrays["v_cache"].shape[-1]), arrays["q"].dtype)
    lse = guarded_empty(shape[1::-1] if case.lengths_q else (shape[0], shape[2], shape[1]), np.float32)
    result = run(case, arrays, out=out.array, lse=lse.array)
    assert result.out is out.array
    assert result.lse is lse.array
    out.check("out")
    lse.check("lse")
    hold_to_oracle(case, *result)
    hold_to_caches(case, before, arrays["k_cache"], arrays["v_cache"])
    for name in before.keys() - {"k_cache", "v_cache"}:
        np.testing.assert_array_equal(arrays[name], before[name])


@pytest.mark.parametrize("number", range(100))
def test_random_case(number: int) -> None:
    case = random_case(number)
    arrays = case.make_arrays()
    before = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    hold_to_oracle(case, *run(case, arrays))
    hold_to_caches(case, before, arrays["k_cache"], arrays["v_cache"])
    if case.num_splits or case.split_size:
        cut = {"num_splits": case.num_splits, "split_size": case.split_size}
        hold_to_oracle(case, *by_oracle(before, case.options | cut, of_sequence=splits.attention))


def test_cases_have_their_own_names() -> None:
    assert len({case.id for case in CACHE_CASES}) == len(CACHE_CASES)


def test_cases_are_what_they_are_for() -> None:
    for case in CACHE_CASES:
        arrays = case.make_arrays()
        unused = np.isnan(arrays["k_cache"][..., 0, 0].astype(np.float32))
        keys = sum(case.lengths)
        if case.prefix:
            assert case.page_size is not None
            keys -= (case.batch - 1) * case.prefix * case.page_size
        assert unused.size - unused.sum() == keys
        assert arrays["k_cache"].shape[:3] == arrays["v_cache"].shape[:3]
        if case.page_size is not None and case.spare:
            assert (arrays["page_table"] >= arrays["k_cache"].shape[0]).any()
    assert {case.page_size for case in CACHE_CASES} >= {None, 1, 3, 16, 24, 64, 128, 256}
    assert {n for case in CACHE_CASES for n in case.lengths} >= {0, 1, 63, 64, 65, 1000}
    assert {case.seqlen_new for case in CACHE_CASES} >= {0, 1, 5}
    assert {case.num_splits for case in CACHE_CASES} >= {None, 1, 2, 5, 64}


def test_shapes_of_the_result() -> None:
    case = CacheCase("shapes", (9, 3), seqlen_q=2, head_dim=64, head_dim_v=40)
    out = attention_with_kvcache(**case.make_arrays())
    assert out.shape == (2, 2, 4, 40)
    assert np.array_equal(out, run(case).out)
    assert run(case).lse.shape == (2, 4, 2)
    assert run(dataclasses.replace(case, lengths_q=(2, 1))).lse.shape == (4, 3)


def test_a_full_cache_is_attention() -> None:
    case = CacheCase("full", (70, 70), seqlen_q=5, causal=True, spare=0, heads_q=4, heads_kv=2)
    arrays = case.make_arrays()
    out, lse = run(case, arrays)
    q, k, v = (arrays[name] for name in ("q", "k_cache", "v_cache"))
    expected, expected_lse = cupyfa.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


def test_pages_and_rows_give_the_same() -> None:
    rows = CacheCase("rows", (70, 5, 33), seqlen_q=3, causal=True, seqlen_new=2, spare=11)
    arrays = rows.make_arrays()
    paged = CacheCase("pages", (70, 5, 33), seqlen_q=3, causal=True, seqlen_new=2, page_size=16)
    in_pages = paged.make_arrays() | {name: arrays[name] for name in "qkv"}
    for b, length in enumerate(rows.lengths):
        for name in ("k_cache", "v_cache"):
            for i in range(length):
                in_pages[name][in_pages["page_table"][b, i // 16], i % 16] = arrays[name][b, i]
    for a, b in zip(run(rows, arrays), run(paged, in_pages), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_cache_is_written_in_place_through_any_view() -> None:
    case = CacheCase("views", (9, 3), seqlen_new=2, heads_q=2, heads_kv=2)
    arrays = case.make_arrays()
    both = np.stack([arrays["k_cache"], arrays["v_cache"]], axis=1)  # as FlashInfer keeps them
    in_hnd = both.swapaxes(2, 3).copy().swapaxes(2, 3)
    views = arrays | {"k_cache": in_hnd[:, 0], "v_cache": in_hnd[:, 1]}
    before = {name: x.copy() for name, x in arrays.items()}
    np.testing.assert_array_equal(run(case, views).out, run(case, arrays).out)
    hold_to_caches(case, before, in_hnd[:, 0], in_hnd[:, 1])


def test_a_loop_of_steps_is_attention_at_once() -> None:
    steps, heads = 20, 2
    q, k, v = (random_array((2, steps, heads, 64), np.float16, seed) for seed in range(3))
    k_cache, v_cache = (np.full((8, 6, heads, 64), np.nan, np.float16) for _ in "kv")
    table, lengths = np.int32([[3, 1, 7, 0], [5, 2, 4, 6]]), np.zeros(2, np.int32)
    outs = []
    for step in range(steps):
        new = np.s_[:, step : step + 1]
        outs.append(
            attention_with_kvcache(
                q[new], k_cache, v_cache, cache_seqlens=lengths, page_table=table, k=k[new], v=v[new], causal=True
            )
        )
        lengths += 1
    reference, _ = dense.attention(q, k, v, causal=True)
    plain, _ = dense.same_precision(q, k, v, causal=True)
    assert_close(np.concatenate(outs, axis=1), reference, plain)


def test_no_queries_append_all_the_same() -> None:
    case = CacheCase("no queries", (9, 3), seqlen_q=0, seqlen_new=2)
    arrays = case.make_arrays()
    before = {name: x.copy() for name, x in arrays.items()}
    assert run(case, arrays).out.shape == (2, 0, 4, 64)
    hold_to_caches(case, before, arrays["k_cache"], arrays["v_cache"])


def test_no_sequences() -> None:
    nothing, pages = np.zeros((0, 1, 4, 16), np.float16), np.zeros((0, 16, 2, 16), np.float16)
    table, lengths = np.zeros((0, 3), np.int32), np.zeros(0, np.int32)
    out, lse = attention_with_kvcache(nothing, pages, pages, cache_seqlens=lengths, page_table=table, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 1, 4, 16), (0, 4, 1))


def test_no_pages() -> None:
    q, pages = np.ones((2, 1, 4, 16), np.float16), np.zeros((0, 16, 2, 16), np.float16)
    table = np.full((2, 3), 9, np.int32)
    out, lse = attention_with_kvcache(q, pages, pages, cache_seqlens=0, page_table=table, return_lse=True)
    assert not out.any()
    assert np.isneginf(lse).all()


# --- What is refused ---


def zeros(*shape: int, dtype: Any = np.float16) -> Any:
    return np.zeros(shape, dtype)


def rows() -> dict[str, Any]:
    """A good call with rows."""
    return {
        "q": zeros(2, 1, 4, 16),
        "k_cache": zeros(2, 32, 2, 16),
        "v_cache": zeros(2, 32, 2, 16),
        "cache_seqlens": np.int32([5, 30]),
        "k": zeros(2, 2, 2, 16),
        "v": zeros(2, 2, 2, 16),
        "rotary_cos": zeros(32, 4),
        "rotary_sin": zeros(32, 4),
        "causal": True,
    }


def paged() -> dict[str, Any]:
    """A good call with pages."""
    return {
        "q": zeros(2, 1, 4, 16),
        "k_cache": zeros(6, 8, 2, 16),
        "v_cache": zeros(6, 8, 2, 16),
        "cache_seqlens": np.int32([5, 20]),
        "page_table": np.int32([[5, 2, 9, 9], [0, 1, 3, 9]]),
        "k": zeros(2, 2, 2, 16),
        "v": zeros(2, 2, 2, 16),
    }


def packed() -> dict[str, Any]:
    """A good call with packed queries."""
    changes = {"q": zeros(5, 4, 16), "cu_seqlens_q": np.int32([0, 1, 4]), "max_seqlen_q": 3}
    return {name: x for name, x in (paged() | changes).items() if name not in ("k", "v")}


def read_only(*shape: int) -> Any:
    array = zeros(*shape)
    array.flags.writeable = False
    return array


NONE = dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin"))
Bad = tuple[Callable[[], dict[str, Any]], dict[str, Any], type[Exception], str]
BAD: dict[str, Bad] = {
    # Types
    "q list": (rows, {"q": [1]}, TypeError, r"q is a list; it must be a numpy.ndarray or a cupy.ndarray"),
    "no cache": (rows, {"k_cache": None}, TypeError, r"k_cache is a NoneType but q is a numpy.ndarray"),
    "list": (rows, {"v_cache": [1]}, TypeError, r"v_cache is a list but q is a numpy.ndarray"),
    "masked": (rows, {"k": np.ma.zeros((2, 2, 2, 16), np.float16)}, TypeError, "masked arrays are not supported"),
    "no lengths": (rows, {"cache_seqlens": None}, TypeError, r"cache_seqlens is None; it must be an array of int32"),
    "bool": (rows, {"cache_seqlens": True}, TypeError, r"cache_seqlens is True; it must be an array of int32 .* or an"),
    "float": (rows, {"cache_seqlens": 3.0}, TypeError, r"cache_seqlens is 3.0; it must be an array"),
    "lengths list": (rows, {"cache_seqlens": [5, 30]}, TypeError, r"cache_seqlens is a list but q is a numpy"),
    "return_lse": (rows, {"return_lse": 1}, TypeError, r"return_lse is 1; it must be True or False"),
    "interleaved": (rows, {"rotary_interleaved": 1}, TypeError, r"rotary_interleaved is 1; it must be True or False"),
    "splits float": (rows, {"num_splits": 2.0}, TypeError, r"num_splits is 2.0; it must be an integer or None"),
    "split bool": (rows, {"split_size": True}, TypeError, r"split_size is True; it must be an integer or None"),
    "max float": (packed, {"max_seqlen_q": 3.5}, TypeError, r"max_seqlen_q is 3.5; it must be an integer or None"),
    "config": (rows, {"config": 3}, TypeError, r"config is 3; it must be a mapping of DecodeSpec fields or None"),
    "workspace": (rows, {"workspace": zeros(3)}, TypeError, r"workspace is for CuPy arrays; q is a numpy.ndarray"),
    "workspace under the emulator": (
        rows, {"workspace": zeros(3), "backend": "emulator"}, TypeError, r"workspace is for CuPy arrays"
    ),
    "causal": (rows, {"causal": 1}, TypeError, r"causal is 1; it must be True or False"),
    # Dtypes
    "float32": (rows, {"q": zeros(2, 1, 4, 16, dtype=np.float32)}, TypeError, r"q has dtype float32; it must be float"),
    "cache dtype": (rows, {"v_cache": zeros(2, 32, 2, 16, dtype=ml_dtypes.bfloat16)}, TypeError,
        r"v_cache has dtype bfloat16 but q has float16; they must be equal"),
    "new dtype": (rows, {"k": zeros(2, 2, 2, 16, dtype=ml_dtypes.bfloat16)}, TypeError, r"k has dtype bfloat16 but q"),
    "table dtype": (rows, {"rotary_sin": zeros(32, 4, dtype=ml_dtypes.bfloat16)}, TypeError,
        r"rotary_sin has dtype bfloat16 but q has float16"),
    "int64": (rows, {"cache_seqlens": np.array([5, 30])}, TypeError, r"cache_seqlens has dtype int64; it must be int3"),
    "pages int64": (paged, {"page_table": np.zeros((2, 4), np.int64)}, TypeError, r"page_table has dtype int64; it mu"),
    "idx uint32": (rows, {"cache_batch_idx": np.uint32([0, 1])}, TypeError, r"cache_batch_idx has dtype uint32; it mu"),
    "offsets": (packed, {"cu_seqlens_q": np.array([0, 1, 4])}, TypeError, r"cu_seqlens_q has dtype int64; it must be"),
    "lse dtype": (rows, {"lse": zeros(2, 4, 1)}, TypeError, r"lse has dtype float16; it must be float32"),
    "sink dtype": (rows, {"sink": zeros(4)}, TypeError, r"sink has dtype float16; it must be float32"),
    # What goes together
    "k alone": (rows, NONE | {"k": zeros(2, 2, 2, 16)}, ValueError, r"k was passed without v; they go together"),
    "v alone": (rows, NONE | {"v": zeros(2, 2, 2, 16)}, ValueError, r"v was passed without k; they go together"),
    "cos alone": (rows, {"rotary_sin": None}, ValueError, r"rotary_cos was passed without rotary_sin; they go"),
    "sin alone": (rows, {"rotary_cos": None}, ValueError, r"rotary_sin was passed without rotary_cos; they go"),
    "rotary alone": (rows, {"k": None, "v": None}, ValueError, r"rotary_cos was passed without k; positions turn"),
    "both places": (paged, {"cache_batch_idx": np.int32([0, 1])}, ValueError,
        r"cache_batch_idx was passed with page_table; .*: leave one out"),
    "offsets alone": (packed, {"max_seqlen_q": None}, ValueError, r"cu_seqlens_q was passed without max_seqlen_q; it"),
    "max alone": (rows, {"max_seqlen_q": 3}, ValueError, r"max_seqlen_q is 3 without cu_seqlens_q; it is for packed"),
    "both splits": (rows, {"num_splits": 2, "split_size": 64}, ValueError, r"num_splits is 2 and split_size is 64; at"),
    # Options
    "no splits": (rows, {"num_splits": 0}, ValueError, r"num_splits is 0; it must be from 1 to 256, or None"),
    "many splits": (rows, {"num_splits": 257}, ValueError, r"num_splits is 257; it must be from 1 to 256, or None"),
    "odd split": (rows, {"split_size": 96}, ValueError, r"split_size is 96; it must be a positive multiple of 64"),
    "no split": (rows, {"split_size": 0}, ValueError, r"split_size is 0; it must be a positive multiple of 64"),
    "max below": (packed, {"max_seqlen_q": -1}, ValueError, r"max_seqlen_q is -1; it must be at least 0"),
    "backend": (rows, {"backend": "gpu"}, ValueError, r"backend is 'gpu'; it must be 'emulator' or None"),
    "window": (rows, {"window_size": (-3, 0)}, ValueError, r"window_size is \(-3, 0\); each side must be at least 0"),
    # Axes and shapes
    "q axes": (rows, {"q": zeros(2, 4, 16)}, ValueError, r"q has 3 axes, shape \(2, 4, 16\); it needs 4: \(batch, seq"),
    "packed axes": (packed, {"q": zeros(1, 5, 4, 16)}, ValueError, r"q has 4 axes, .*; it needs 3: \(total, heads, he"),
    "cache axes": (rows, {"k_cache": zeros(64, 2, 16)}, ValueError, r"k_cache has 3 axes.* 4: \(rows, capacity, heads"),
    "page axes": (paged, {"v_cache": zeros(48, 2, 16)}, ValueError, r"v_cache has 3 axes.* 4: \(num_pages, page_size,"),
    "new axes": (rows, {"k": zeros(2, 2, 16)}, ValueError, r"k has 3 axes, .* 4: \(batch, seqlen, heads, head_dim\)"),
    "cos axes": (rows, {"rotary_cos": zeros(32)}, ValueError, r"rotary_cos has 1 axes, .* 2: \(positions, rotary_dim"),
    "table axes": (paged, {"page_table": np.int32([0, 1])}, ValueError, r"page_table has 1 axes, .*\(batch, max_pages"),
    "lengths axes": (rows, {"cache_seqlens": np.int32([[5, 30]])}, ValueError, r"cache_seqlens has 2 axes, .* needs 1"),
    "offsets axes": (packed, {"cu_seqlens_q": np.int32([[0, 4]])}, ValueError, r"cu_seqlens_q has 2 axes, .* needs 1"),
    "no offsets": (packed, {"cu_seqlens_q": np.int32([])}, ValueError, r"cu_seqlens_q has 0 entries; it must have one"),
    "lengths": (rows, {"cache_seqlens": np.int32([5])}, ValueError, r"cache_seqlens has 1 entries; .* of the 2 sequen"),
    "table rows": (paged, {"page_table": np.zeros((3, 4), np.int32)}, ValueError,
        r"page_table has 3 rows; it must have one for each of the 2 sequences"),
    "idx": (rows, {"cache_batch_idx": np.int32([0])}, ValueError, r"cache_batch_idx has 1 entries; .* the 2 sequences"),
    "batch": (rows, {"k_cache": zeros(3, 32, 2, 16), "v_cache": zeros(3, 32, 2, 16)}, ValueError,
        r"k_cache has 3 rows for 2 sequences; they must be equal, unless cache_batch_idx or page_table"),
    "head_dim": (rows, {"k_cache": zeros(2, 32, 2, 8)}, ValueError, r"k_cache has head_dim 8 but q has 16; they must"),
    "caches": (rows, {"v_cache": zeros(2, 31, 2, 16)}, ValueError,
        r"v_cache has shape \(2, 31, 2, 16\) but k_cache has \(2, 32, 2, 16\); only the last axis may differ"),
    "heads": (rows, {"q": zeros(2, 1, 3, 16)}, ValueError, r"q has 3 heads and k_cache has 2; the heads of q must be"),
    "new batch": (rows, {"k": zeros(1, 2, 2, 16)}, ValueError,
        r"k has shape \(1, 2, 2, 16\); it must have \(batch, seqlen_new, heads_kv, head_dim\), \(2, 2, 2, 16\), as k_"),
    "new values": (rows, {"v": zeros(2, 3, 2, 16)}, ValueError, r"v has shape .*\(2, 2, 2, 16\), as v_cache and k hav"),
    "empty pages": (paged, {"k_cache": zeros(6, 0, 2, 16), "v_cache": zeros(6, 0, 2, 16)}, ValueError,
        r"k_cache has shape \(6, 0, 2, 16\), pages of 0 keys; a page must have at least 1"),
    "tables": (rows, {"rotary_sin": zeros(31, 4)}, ValueError, r"rotary_sin has shape \(31, 4\) but rotary_cos has "),
    "wide rotary": (rows, {"rotary_cos": zeros(32, 9), "rotary_sin": zeros(32, 9)}, ValueError,
        r"rotary_cos has shape \(32, 9\), for a rotary_dim of 18; it must be from 2 to head_dim, 16"),
    "no rotary": (rows, {"rotary_cos": zeros(32, 0), "rotary_sin": zeros(32, 0)}, ValueError, r".* a rotary_dim of 0;"),
    "strided rotary": (rows, {"rotary_cos": zeros(32, 8)[:, ::2]}, ValueError,
        r"rotary_cos has strides \(16, 4\) bytes; it must be contiguous along its last axis"),
    "strided lengths": (rows, {"cache_seqlens": np.int32([5, 0, 30, 0])[::2]}, ValueError,
        r"cache_seqlens has strides \(8,\) bytes; it must be contiguous$"),
    "strided pages": (paged, {"page_table": np.zeros((4, 2), np.int32).T}, ValueError,
        r"page_table has strides \(4, 8\) bytes; it must be contiguous along its last axis"),
    "out": (rows, {"out": zeros(2, 1, 4, 8)}, ValueError, r"out has shape \(2, 1, 4, 8\); it must have the shape of q"),
    "lse": (packed, {"lse": zeros(5, 4, dtype=np.float32)}, ValueError, r"lse has shape .*\(heads_q, total_q\), \(4, "),
    "slopes": (rows, {"alibi_slopes": zeros(3, 4, dtype=np.float32)}, ValueError, r"alibi_slopes has shape \(3, 4\)"),
    # Values
    "negative": (rows, {"cache_seqlens": np.int32([5, -1])}, ValueError, r"cache_seqlens\[1\] is -1; it must be at le"),
    "too long": (rows, {"cache_seqlens": np.int32([31, 5])}, ValueError,
        r"cache_seqlens\[0\] is 31 and 2 keys are appended; a sequence of the cache can have at most 32 keys$"),
    "too long for pages": (paged, {"cache_seqlens": np.int32([5, 31])}, ValueError,
        r"cache_seqlens\[1\] is 31 and 2 keys .* at most 32 keys \(4 pages of 8\)$"),
    "too long to read": (packed, {"cache_seqlens": np.int32([5, 33])}, ValueError,
        r"cache_seqlens\[1\] is 33; a sequence of the cache can have at most 32 keys \(4 pages of 8\)$"),
    "negative for all": (rows, {"cache_seqlens": -1}, ValueError, r"cache_seqlens is -1; it must be at least 0"),
    "too long for all": (rows, {"cache_seqlens": 31}, ValueError, r"cache_seqlens is 31 and 2 keys are appended; a"),
    "page beyond": (paged, {"page_table": np.int32([[6, 2, 9, 9], [0, 1, 3, 9]])}, ValueError,
        r"page_table\[0, 0\] is 6; it must be from 0 to 5, because sequence 0 has 7 keys in pages of 8"),
    "page below": (paged, {"page_table": np.int32([[5, 2, 9, 9], [0, 1, -1, 9]])}, ValueError,
        r"page_table\[1, 2\] is -1; it must be from 0 to 5, because sequence 1 has 22 keys"),
    "page appended twice": (paged, {"page_table": np.int32([[3, 2, 9, 9], [0, 1, 3, 9]])}, ValueError,
        r"page_table\[0, 0\] is 3, and so is page_table\[1, 2\]; sequence 0 appends to that page from key 5 on, and "
        r"sequence 1 has 6 keys there"),
    "page seen elsewhere": (paged, {"page_table": np.int32([[5, 2, 9, 9], [0, 5, 3, 9]])}, ValueError,
        r"page_table\[0, 0\] is 5, and so is page_table\[1, 1\]; sequence 0 appends to that page from key 5 on, and "
        r"sequence 1 has 8 keys there"),
    "page twice in one": (paged, {"page_table": np.int32([[5, 2, 9, 9], [0, 3, 3, 9]])}, ValueError,
        r"page_table\[1, 2\] is 3, and so is page_table\[1, 1\]; sequence 1 appends"),
    "row beyond": (rows, {"cache_batch_idx": np.int32([0, 2])}, ValueError, r"cache_batch_idx\[1\] is 2; .* 0 to 1, a"),
    "row below": (rows, {"cache_batch_idx": np.int32([-1, 1])}, ValueError, r"cache_batch_idx\[0\] is -1; it must be"),
    "row twice": (rows, {"cache_batch_idx": np.int32([1, 1])}, ValueError,
        r"cache_batch_idx\[1\] is 1, and so is cache_batch_idx\[0\]; sequences that keys are appended to"),
    "falling": (packed, {"cu_seqlens_q": np.int32([0, 3, 2])}, ValueError, r"cu_seqlens_q\[2\] is 2, less than cu_seq"),
    "offset below": (packed, {"cu_seqlens_q": np.int32([-1, 1, 4])}, ValueError, r"cu_seqlens_q\[0\] is -1; .* 5 rows"),
    "offset beyond": (packed, {"cu_seqlens_q": np.int32([3, 5, 6])}, ValueError, r"cu_seqlens_q\[2\] is 6; .* 5 rows"),
    "long rows": (packed, {"cu_seqlens_q": np.int32([0, 0, 4])}, ValueError,
        r"cu_seqlens_q gives sequence 1 4 rows, more than max_seqlen_q, 3"),
    "positions": (rows, {"rotary_cos": zeros(31, 4), "rotary_sin": zeros(31, 4)}, ValueError,
        r"cache_seqlens\[1\] is 30, so that positions up to 31 turn; rotary_cos has 31"),
    "positions of rows": (rows, {"q": zeros(2, 3, 4, 16)}, ValueError, r"cache_seqlens\[1\] is 30, .* up to 32 turn; "),
    "positions of all": (rows, {"q": zeros(2, 4, 4, 16), "cache_seqlens": 29}, ValueError,
        r"cache_seqlens is 29, so that positions up to 32 turn; rotary_cos has 32"),
    # Memory
    "out of cache": (rows, {"out": "k_cache"}, ValueError, r"out shares memory with k_cache; it must be an array of i"),
    "out of q": (rows, {"out": "q"}, ValueError, r"out shares memory with q; it must be an array of its own"),
    "new of cache": (rows, {"k": "k_cache"}, ValueError, r"k_cache shares memory with k; it must be an array of its"),
    "cache of cache": (rows, {"v_cache": "k_cache"}, ValueError, r"v_cache shares memory with k_cache; it must be an"),
    "one row": (rows, {"k_cache": np.broadcast_to(zeros(1, 32, 2, 16), (2, 32, 2, 16))}, ValueError,
        r"k_cache has strides \(0, 64, 32, 2\) bytes for shape .*; keys are appended to it, so its elements must not"),
    "read-only cache": (rows, {"v_cache": read_only(2, 32, 2, 16)}, ValueError, r"v_cache is read-only; it must be"),
    "read-only out": (rows, {"out": read_only(2, 1, 4, 16)}, ValueError, r"out is read-only; it must be writable"),
}  # fmt: skip
UNSUPPORTED: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any], str]] = {
    "narrow": (rows, NONE | {name: zeros(2, 32, 2, 12) for name in ("q", "k_cache", "v_cache")},
        r"q has head_dim 12; supported are the multiples of 8 from 8 to 256"),
    "wide": (rows, NONE | {"v_cache": zeros(2, 32, 2, 264)}, r"v_cache has head_dim 264; supported are"),
    "softcap": (rows, {"softcap": 1e4}, r"softcap is 10000.0; supported are at most 1000"),
}  # fmt: skip


def in_memory_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace an array that is the name of another one by a view of that."""
    shapes = {name: x.shape for name, x in rows().items() if isinstance(x, np.ndarray)} | {"out": (2, 1, 4, 16)}
    views = {
        name: arguments[other].reshape(-1)[: np.prod(shapes[name])].reshape(shapes[name])
        for name, other in arguments.items()
        if isinstance(other, str) and other in arguments
    }
    return arguments | views


@pytest.mark.parametrize("good", [rows, paged, packed], ids=lambda good: good.__name__)
def test_good_calls_are_good(good: Callable[[], dict[str, Any]]) -> None:
    attention_with_kvcache(**good())


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    good, changes, error, message = BAD[name]
    arguments = in_memory_of(good() | changes)
    arrays = {name: x.copy() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    with pytest.raises(error, match=f"^attention: {message}"):
        attention_with_kvcache(**arguments)
    for array, before in arrays.items():  # nothing was written
        np.testing.assert_array_equal(arguments[array], before)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_calls(name: str) -> None:
    good, changes, message = UNSUPPORTED[name]
    with pytest.raises(cupyfa.UnsupportedError, match=f"^attention: {message}"):
        attention_with_kvcache(**(good() | changes))


def test_pages_may_be_shared_in_front_of_what_is_appended() -> None:
    shared = paged() | {"cache_seqlens": np.int32([8, 20]), "page_table": np.int32([[0, 2, 9, 9], [0, 1, 3, 9]])}
    attention_with_kvcache(**shared)
    reads = {name: x for name, x in shared.items() if name not in ("k", "v")}
    everywhere = {"page_table": np.zeros((2, 4), np.int32)}
    attention_with_kvcache(**(reads | everywhere))  # nothing is appended
    with pytest.raises(ValueError, match=r"^attention: page_table\[0, 1\] is 0, and so is page_table\[0, 0\]"):
        attention_with_kvcache(**(shared | everywhere))


def test_tables_are_as_long_as_positions_get() -> None:
    arguments = rows() | {"q": zeros(2, 4, 4, 16), "causal": False}
    attention_with_kvcache(**arguments)  # all rows turn by the position of the first new key
    for masked in ({"causal": True}, {"window_size": (5, None)}, {"window_size": (None, 99)}):
        with pytest.raises(ValueError, match=r"^attention: cache_seqlens\[1\] is 30, so that positions up to 33 turn"):
            attention_with_kvcache(**(arguments | masked))


def test_a_row_may_be_read_twice() -> None:
    arguments = {name: x for name, x in rows().items() if name[0] != "r" and name not in ("k", "v")}
    attention_with_kvcache(**(arguments | {"cache_batch_idx": np.int32([1, 1])}))


def test_options_are_those_of_packed_sequences() -> None:
    ours = inspect.signature(attention_with_kvcache).parameters
    theirs = inspect.signature(cupyfa.attention_varlen).parameters
    left_out = {"bias", "cu_seqlens_k", "max_seqlen_k", "seqused_q", "seqused_k", "plan", "k", "v"}
    assert set(theirs) - set(ours) <= left_out
    shared = [name for name in theirs if name in ours and name not in left_out]
    assert [name for name in ours if name in shared] == shared


# --- User cases (public reports of other libraries) ---


def test_c15_c16_nan_behind_the_last_key() -> None:
    q = np.full((2, 1, 1, 64), 0.5, np.float16)
    k, v = (np.full((2, 3, 1, 64), 1, np.float16) for _ in "kv")
    lengths = np.int32([1, 3])
    clean = attention_with_kvcache(q, k, v, cache_seqlens=lengths, return_lse=True)
    k[0, 1:] = v[0, 1:] = np.nan
    for a, b in zip(attention_with_kvcache(q, k, v, cache_seqlens=lengths, return_lse=True), clean, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
    case = CacheCase("c16", (32, 64, 96, 48), heads_q=8, heads_kv=8, spare=32)
    hold_to_oracle(case, *run(case))


def test_c14_a_negative_length_is_refused_and_0_is_fine() -> None:
    case = CacheCase("c14", (0, 5), dtype="float16")
    hold_to_oracle(case, *run(case))
    with pytest.raises(ValueError, match=r"^attention: cache_seqlens\[0\] is -1; it must be at least 0"):
        run(case, case.make_arrays() | {"cache_seqlens": np.int32([-1, 5])})


def test_c17_nan_in_the_last_page() -> None:
    case = CacheCase("c17", (13,), page_size=4, dtype="float16", spare=0)
    arrays = case.make_arrays()
    assert np.isnan(arrays["v_cache"]).any()
    hold_to_oracle(case, *run(case, arrays))


def test_c21_lengths_beyond_the_page_table() -> None:
    q, pages = np.zeros((1, 1, 1, 64), np.float16), np.zeros((3, 16, 1, 64), np.float16)
    call = {"q": q, "k_cache": pages, "v_cache": pages.copy(), "page_table": np.int32([[1, 2]])}
    with pytest.raises(ValueError, match=r"^attention: cache_seqlens\[0\] is 40; .* at most 32 keys \(2 pages of 16\)"):
        attention_with_kvcache(**call, cache_seqlens=np.int32([40]))
    with pytest.raises(ValueError, match=r"^attention: cache_seqlens\[0\] is 32 and 1 keys are appended; .* 32 keys"):
        attention_with_kvcache(**call, cache_seqlens=np.int32([32]), k=q, v=q)


@pytest.mark.parametrize("window", [(20, 0), (0, 0), (0, 7)])
@pytest.mark.parametrize("cut", [{}, {"num_splits": 3}, {"split_size": 64}], ids=str)
def test_c33_a_bound_of_0_is_a_bound(window: tuple[int, int], cut: dict[str, int]) -> None:
    case = CacheCase("c33", (300, 64, 1), seqlen_q=9, window_size=window, **cut)
    out, lse = run(case)
    hold_to_oracle(case, out, lse)
    if window == (0, 0):  # each row sees the key of its own place
        arrays = case.make_arrays()
        np.testing.assert_array_equal(out[0, :, 0], arrays["v_cache"][0, 291:300, 0])


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_c49_pages_of_192_and_128_numbers(page_size: int) -> None:
    rows = CacheCase("c49", (300, 70), seqlen_q=64, causal=True, head_dim=192, head_dim_v=128, heads_q=16, heads_kv=16)
    paged = dataclasses.replace(rows, page_size=page_size)
    arrays, in_pages = rows.make_arrays(), paged.make_arrays()
    for b, length in enumerate(rows.lengths):
        for i in range(0, length, page_size):
            page, count = in_pages["page_table"][b, i // page_size], min(page_size, length - i)
            for name in ("k_cache", "v_cache"):
                in_pages[name][page, :count] = arrays[name][b, i : i + count]
    for a, b in zip(run(rows, arrays), run(paged, in_pages), strict=True):
        np.testing.assert_array_equal(a, b)


def test_c50_one_length_for_all() -> None:
    case = CacheCase("c50", (77, 77, 77), one_length=True, page_size=16, seqlen_new=1, spare=5)
    arrays = case.make_arrays()
    assert arrays["cache_seqlens"] == 77
    assert arrays["k_cache"].shape[0] != case.batch
    expected = by_oracle(case.make_arrays() | {"cache_seqlens": np.full(3, 77, np.int32)}, case.options)
    for a, b in zip(run(case, arrays), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_c52_one_long_sequence_among_short_ones_in_splits() -> None:
    case = CacheCase(
        "c52", (512,) * 64, lengths_q=(*(1,) * 40, 512, *(1,) * 23), heads_q=6, heads_kv=2, head_dim=128, causal=True,
        dtype="float16",
    )  # fmt: skip
    arrays = case.make_arrays()
    whole, whole_lse = by_oracle(arrays, case.options)
    out, lse = by_oracle(arrays, case.options | {"num_splits": 4}, of_sequence=splits.attention)
    assert np.abs(out.astype(np.float32) - whole.astype(np.float32)).max() <= 2e-3
    np.testing.assert_allclose(lse, whole_lse, atol=1e-5)
    np.testing.assert_array_equal(run(case, arrays, num_splits=4).out, whole)


def test_c53_a_neighbour_changes_no_bits() -> None:
    among = CacheCase(
        "c53", (30, 9, 10), lengths_q=(1, 9, 10), heads_q=14, heads_kv=2, page_size=16, causal=True, split_size=64
    )
    arrays = among.make_arrays()
    out, lse = run(among, arrays)
    alone = arrays | {
        "q": arrays["q"][:1],
        "page_table": arrays["page_table"][:1],
        "cache_seqlens": arrays["cache_seqlens"][:1],
        "cu_seqlens_q": arrays["cu_seqlens_q"][:2],
    }
    one, lse_of_one = run(among, alone, max_seqlen_q=1)
    np.testing.assert_array_equal(out[:1], one)
    np.testing.assert_array_equal(lse[:, :1], lse_of_one)
