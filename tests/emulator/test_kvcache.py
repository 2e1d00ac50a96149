"""Attention over a cache under the emulator: kernels and oracle, broken lengths and pages, and planted faults."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest
from caches import (
    BROKEN,
    BROKEN_OFFSETS,
    FIRST_ROWS,
    broken,
    by_oracle,
    hold_to_caches,
    hold_to_documented,
    hold_to_first_rows,
    hold_to_oracle,
    random_case,
)
from nvrtc_tools import import_nvrtc

import cupyfa
from cupyfa import compiler, emulate, emulate_cache, sources
from cupyfa.cache_options import CacheArrays, check_cache_options
from cupyfa.emulate_cache import PreparedCache
from cupyfa.emulator import POLICIES
from cupyfa.testing import CACHE_CASES, CacheCase

CASE = {case.id: case for case in CACHE_CASES}


def label(x: Any) -> str:
    return x.id if isinstance(x, CacheCase) else str(x)


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


def prepare(case: CacheCase, config: dict[str, int] | None = None, **changes: Any) -> PreparedCache:
    """A call whose outputs are NaN. Nobody looks at the values of lengths, pages and rows."""
    given = case.make_arrays() | case.options | case.splits | changes
    length = given.pop("cache_seqlens") if case.one_length else None
    arrays = {name: given.pop(name) for name in CacheArrays._fields if name in given}
    q, v = arrays["q"], arrays["v_cache"]
    out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    out.view(np.uint16)[...] = 0x7FFF
    lse = np.full((*q.shape[:-3], *q.shape[-2:-4:-1]), np.nan, np.float32)
    options = check_cache_options(**given)
    return emulate_cache.prepare(CacheArrays(**arrays, out=out, lse=lse), length, options, config=config)


def hold_to_all(case: CacheCase, prepared: PreparedCache) -> None:
    """The output, its lse and the caches."""
    arrays = prepared.arrays
    hold_to_oracle(case, arrays.out, arrays.lse)
    hold_to_caches(case, case.make_arrays(), arrays.k_cache, arrays.v_cache)


def check(case: CacheCase, config: dict[str, int] | None = None, **options: Any) -> PreparedCache:
    prepared = prepare(case, config)
    run = prepared.launch(**options)
    assert run.verdict == "clean", run
    hold_to_all(case, prepared)
    return prepared


@pytest.mark.parametrize("case", CACHE_CASES, ids=label)
def test_kernel_is_right(case: CacheCase) -> None:
    check(case)


# --- Other schedules, other kernels ---

#: A case of every kind of synchronisation: one CTA, clusters, splits, both groups of keys, one ring or two, tails.
SCHEDULED = [
    CASE[name]
    for name in (
        "mixed-d128-bf16-h8x2-q1",
        "mixed-d64-fp16-h8x2-q1-page16",
        "wide-d256-fp16-h4x1-q2-causal",
        "narrow_values-d192x128-bf16-h4x1-q1-page24-new1",
        "forty_rows-d64-fp16-h4x1-q40-page16-causal",
        "pages_of_one-d128-bf16-h4x1-q1-page1",
        "pages_of_sixteen-d128-bf16-h8x2-q1-page16-new1",
        "window_to_the_right-d64-bf16-h4x1-q16-splits2",
        "all_options-d128-bf16-h8x2-q5-page16-new5-causal-split64",
        "two_splits-d128-fp16-h8x2-q1-splits2",
        "five_splits-d64-bf16-h4x1-q4-page64-new1-causal-splits5",
        "packed-d128-bf16-h4x1-packed-page24-new2-causal-splits2",
    )
]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_schedule(policy: str) -> None:
    for seed, case in enumerate(SCHEDULED):
        check(case, policy=policy, seed=seed)


CONFIGS: list[dict[str, int]] = [
    {"tile_m": 128},
    {"tile_m": 128, "stages": 1},
    {"tile_m": 64, "stages": 2},
    {"tile_m": 64, "stages": 1, "key_groups": 1},
    {"tile_m": 64, "stages": 4, "key_groups": 2, "residents": 1},
    {"tile_m": 128, "residents": 1, "stages": 3},
    {"tile_m": 64, "residents": 3, "key_groups": 1, "stages": 2},
    {"tile_m": 64, "residents": 2, "key_groups": 2, "stages": 2},
]
CONFIGURED = [
    CASE[name]
    for name in (
        "mixed-d64-fp16-h8x2-q1-page16",
        "forty_rows-d64-fp16-h4x1-q40-page16-causal",
        "alibi-d64-bf16-h4x1-q4-page16-causal",
        "five_splits-d64-bf16-h4x1-q4-page64-new1-causal-splits5",
    )
]


@pytest.mark.parametrize(("config", "policy"), [*zip(CONFIGS, POLICIES, strict=True)], ids=str)
def test_other_kernels(config: dict[str, int], policy: str) -> None:
    for case in CONFIGURED:
        prepared = check(case, config, policy=policy)
        assert {name: getattr(prepared.selection.spec, name) for name in config} == config


@pytest.mark.parametrize(("number", "policy"), [*zip(range(25), itertools.cycle(POLICIES), strict=False)])
def test_random_case(number: int, policy: str) -> None:
    check(random_case(number), policy=policy, seed=number)


#: Where kernels read what no other kernel of the call writes: lengths and places, q, angles, slopes and sinks.
AT_ONCE = {"kv_cache.cuh", "queries.cuh", "rotary.cuh", "consumer.cuh", "merge.cuh"}


def read_too_early(prepared: PreparedCache) -> set[str]:
    """Files that read too early when a kernel may begin before that in front of it has ended; all else is right."""
    files: set[str] = set()
    for stage in prepared.stages:
        run = stage.launch(programmatic=stage.geometry.programmatic)
        assert set(run.hazards) <= {"GRID_READ_BEFORE_GRIDDEP_WAIT"}, run
        for finding in run.findings:
            files |= set(re.findall(r"CTA \d+ warp \d+: (?:\S*/)?(\S+):\d+", str(finding)))
    return files - AT_ONCE


@pytest.mark.parametrize("case", [case for case in CACHE_CASES if not case.sink], ids=label)
def test_a_kernel_waits_for_the_one_in_front_of_it(case: CacheCase) -> None:
    """But for a sink, which the merge reads at once: no kernel of the call writes it."""
    prepared = prepare(case)
    assert read_too_early(prepared) == set()
    hold_to_all(case, prepared)


def test_the_public_function() -> None:
    case = CASE["pages_of_sixteen-d128-bf16-h8x2-q1-page16-new1"]
    arrays = case.make_arrays()
    before = {name: x.copy() for name, x in arrays.items()}
    out, lse = cupyfa.attention_with_kvcache(
        **arrays, **case.options, **case.splits, backend="emulator", return_lse=True
    )
    hold_to_oracle(case, out, lse)
    hold_to_caches(case, before, arrays["k_cache"], arrays["v_cache"])


def test_stages_are_those_that_are_needed() -> None:
    entries = {
        name: [stage.spec.entry for stage in prepare(CASE[name]).stages]
        for name in (
            "window_of_one-d64-bf16-h4x1-q1-splits3",
            "two_splits-d128-fp16-h8x2-q1-splits2",
            "five_splits-d64-bf16-h4x1-q4-page64-new1-causal-splits5",
        )
    }
    assert [*entries.values()] == [
        ["hopper/decode.cu", "combine.cu"],
        ["hopper/decode.cu"],  # a cluster merges two parts itself
        ["append.cu", "hopper/decode.cu", "combine.cu"],
    ]


# --- The same bits in any batch ---

INVARIANT = CacheCase("alone", (700,), lengths_q=(3,), heads_q=14, heads_kv=2, page_size=16, causal=True, sink=True)


@pytest.mark.parametrize("head_dim", [64, 192])  # two CTAs of a multiprocessor, or one
@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 2}, {"num_splits": 5}, {"split_size": 384}], ids=str
)
def test_c53_a_sequence_has_its_bits_in_any_batch(options: dict[str, int], head_dim: int) -> None:
    """Beside sequences with more queries, and with more keys: they need other tiles, and other tables."""
    alone = prepare(dataclasses.replace(INVARIANT, head_dim=head_dim, **options))
    assert alone.launch().verdict == "clean"
    for lengths, lengths_q in (((700, 5), (3, 1)), ((700, 65, 1400), (3, 10, 9))):
        case = dataclasses.replace(INVARIANT, lengths=lengths, lengths_q=lengths_q, head_dim=head_dim, **options)
        arrays, first = case.make_arrays(), alone.arrays
        arrays["q"][:3] = first.q
        for name in ("k_cache", "v_cache"):
            pages = getattr(first, name)[first.page_table[0, :44]]
            arrays[name][arrays["page_table"][0, :44]] = pages
        together = prepare(case, **arrays)
        assert together.launch().verdict == "clean"
        for name in ("out", "lse"):
            own, other = (getattr(x.arrays, name) for x in (alone, together))
            own, other = (own, other[:3]) if name == "out" else (own, other[:, :3])
            np.testing.assert_array_equal(own.view(np.uint8), np.ascontiguousarray(other).view(np.uint8))


# --- Values that only the device sees ---


@pytest.mark.parametrize(("name", "policy"), [*zip(BROKEN, itertools.cycle(POLICIES), strict=False)])
def test_broken_values_do_what_is_documented(name: str, policy: str) -> None:
    case, arrays = broken(name)
    prepared = prepare(case, **{name: x.copy() for name, x in arrays.items()})
    run = prepared.launch(policy=policy)
    assert run.verdict == "clean", run
    have = prepared.arrays
    hold_to_documented(arrays, case.options, case.seqlen_new, have.out, have.lse, have.k_cache, have.v_cache)


@pytest.mark.parametrize("name", BROKEN_OFFSETS)
def test_broken_offsets_make_no_rows(name: str) -> None:
    prepared = prepare(FIRST_ROWS, cu_seqlens_q=np.array(BROKEN_OFFSETS[name], np.int32))
    run = prepared.launch()
    assert run.verdict == "clean", run
    hold_to_first_rows(prepared.arrays.out, prepared.arrays.lse)


def test_a_sequence_has_no_more_rows_than_was_said() -> None:
    case = CacheCase("cut", (70, 9), lengths_q=(2, 7), causal=True)
    prepared = prepare(case, max_seqlen_q=4)
    assert prepared.launch().verdict == "clean"
    assert not prepared.arrays.out[6:].any()
    assert np.isneginf(prepared.arrays.lse[:, 6:]).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_beyond_the_tables_are_the_last(interleaved: bool) -> None:
    case = CacheCase("rotary", (200, 5), seqlen_new=4, seqlen_q=4, rotary_dim=32, rotary_interleaved=interleaved)
    tables = {name: case.make_arrays()[name][:7] for name in ("rotary_cos", "rotary_sin")}
    prepared = prepare(case, **tables)
    assert prepared.launch().verdict == "clean"
    long = {name: np.concatenate([table, np.repeat(table[-1:], 300, 0)]) for name, table in tables.items()}
    out, lse = by_oracle(case.make_arrays() | long, case.options)
    np.testing.assert_allclose(prepared.arrays.out.astype(np.float32), out.astype(np.float32), atol=2**-6)
    np.testing.assert_allclose(prepared.arrays.lse, lse, atol=1e-3)


def test_one_length_of_all_is_checked_at_once() -> None:
    case = CacheCase("one length", (60, 60), one_length=True)
    with pytest.raises(
        ValueError, match=r"^attention: cache_seqlens is 62; a sequence of the cache can have at most 61"
    ):
        prepare(case, cache_seqlens=62)


# --- Planted faults ---

DECODE, CONSUMER, MERGE = (f"hopper/{name}" for name in ("decode.cu", "decode/consumer.cuh", "decode/merge.cuh"))
PRODUCER, QUERIES, SHARE = (f"hopper/decode/{name}.cuh" for name in ("producer", "queries", "share"))
PLACES, APPEND, COMBINE, ROTARY = "kv_cache.cuh", "append.cu", "combine.cu", "rotary.cuh"
#: With long parts, for both key groups; in a cluster of two, and with a merge of three.
LONG = CacheCase("long", (700, 333), dtype="float16", num_splits=1)
WIDE = dataclasses.replace(LONG, head_dim=192)  # without overlap
PAIR = CacheCase("pair", (700, 333, 5), dtype="float16", num_splits=2, page_size=16)
THREE = CacheCase("three", (700, 333, 0), dtype="float16", num_splits=3, seqlen_new=1)
ROWS = CacheCase("rows", (130, 41), seqlen_q=20, heads_q=4, causal=True, dtype="float16")
WINDOW = CacheCase("window", (500, 90), window_size=(70, 0), seqlen_q=3, dtype="float16", num_splits=2)
TURNING = CacheCase("turning", (100, 7), seqlen_new=3, seqlen_q=3, rotary_dim=32, causal=True, dtype="float16")
PAIRED = dataclasses.replace(TURNING, rotary_interleaved=True)
STILL = dataclasses.replace(TURNING, causal=False)
SLOPES = CacheCase("slopes", (150, 33), alibi=True, seqlen_q=4, causal=True, dtype="float16", num_splits=1)
CAPPED = CacheCase("capped", (150, 33), softcap=2.0, dtype="float16", num_splits=3)
SUNK = CacheCase("sunk", (150, 33, 0), sink=True, dtype="float16", num_splits=3)
SUNK_WHOLE = dataclasses.replace(SUNK, num_splits=2)
MANY = CacheCase("many", (64 * 40, 3), dtype="float16", num_splits=40)
CUT = CacheCase("cut", (500, 129), dtype="float16", split_size=128)
PACKED = CacheCase("packed", (100, 64, 7), lengths_q=(1, 4, 2), causal=True, heads_q=4, dtype="float16", num_splits=3)
ELSEWHERE = CacheCase("elsewhere", (65, 200, 3), batch_idx=True, spare=3, seqlen_new=2, dtype="float16")
NEGATIVE = CacheCase("negative", (150, 33), softmax_scale=-0.2, dtype="float16")
WIDE_MERGE = CacheCase("wide", (150, 33), head_dim=32, head_dim_v=192, dtype="float16", num_splits=3)

Fault = tuple[str, str, str, CacheCase]
CLUSTER_BARRIER = r"  ptx::barrier_cluster_arrive\(\);\n  ptx::barrier_cluster_wait\(\);  // "
FENCE = r"ptx::fence_proxy_async_shared_cta\(\);\n"
#: Faults of order, which the checks find under one schedule or another. Name: file, pattern, replacement, a case.
RACES: dict[str, Fault] = {
    "blocks are not waited for": (CONSUMER, r"wait_parity\(slot\.full, this->parity_\);.*", "", LONG),
    "slots are not waited for": (PRODUCER, r"wait_parity\(slot\.empty, this->parity_\);.*", "", LONG),
    "the barriers of blocks expect nothing": (PRODUCER, r"if \(threadIdx\.x % 32 == 0\) ptx::mbarrier_a.*", "", LONG),
    "the first scores are read in flight": (CONSUMER, r"complete<0>\(scores\);  // proves S of the first.*", "", LONG),
    "scores are read in flight": (CONSUMER, r"complete<1>\(scores\);.*", "", LONG),
    "O is read in flight": (CONSUMER, r"complete<0>\(O\);.*(\n.*\n\s*scale_rows)", r"\1", LONG),
    "the last O is read in flight": (CONSUMER, r"complete<0>\(O\);  // proves the last O", "", LONG),
    "K is released early": (
        CONSUMER,
        r"complete<1>\(scores\);(.*)\n\s*release\(k\);",
        r"release(k);\ncomplete<1>(scores);",
        LONG,
    ),
    "V is released early": (
        CONSUMER,
        r"complete<0>\(O\);(.*)\n\s*release\(v\);(\n\s*scale_rows)",
        r"release(v);\ncomplete<0>(O);\2",
        LONG,
    ),
    "K is not released": (CONSUMER, r"\n\s*release\(k\);(\n\s*j \+=)", r"\1", LONG),
    "scores are read in flight, without overlap": (CONSUMER, r"complete<0>\(scores\);  // proves S_j", "", WIDE),
    "O is read in flight, without overlap": (CONSUMER, r"complete<0>\(O\);.*(\n.*\n    \}\n  \}\n)", r"\1", WIDE),
    "K is released early, without overlap": (
        CONSUMER,
        r"complete<0>\(scores\);  // proves S_j\n\s*release\(k\);",
        r"release(k);\ncomplete<0>(scores);",
        WIDE,
    ),
    "V is released early, without overlap": (
        CONSUMER,
        r"complete<0>\(O\);.*\n\s*release\(v\);(\n    \}\n  \}\n)",
        r"release(v);\ncomplete<0>(O);\1",
        WIDE,
    ),
    "V is released by one warp": (CONSUMER, r"if \(lane\(\) == 0\) cupyfa", "if (threadIdx.x == 0) cupyfa", LONG),
    "Q is not fenced": (
        CONSUMER,
        r"load_queries<S>\(p_, share_, tile\);\n\s*" + FENCE,
        "load_queries<S>(p_, share_, tile);\n",
        LONG,
    ),
    "Q is not waited for": (
        CONSUMER,
        r"ptx::bar_sync\(consumers_barrier, S\.consumer_threads\(\)\);  // proves Q",
        "",
        LONG,
    ),
    "zeros of V are not fenced": (CONSUMER, r"    \}\n\s*" + FENCE + r"\s*\}\n", "    }\n }\n", LONG),
    "zeros of V are not waited for": (CONSUMER, r"ptx::bar_sync\(tail_barrier.*", "", ROWS),
    "parts are left in rings that are read": (
        CONSUMER,
        r"ptx::bar_sync\(consumers_barrier, S\.consumer_threads\(\)\);  // proves that all b.*",
        "",
        LONG,
    ),
    "parts are merged too early": (DECODE, CLUSTER_BARRIER + r"proves the parts.*", "", PAIR),
    "parts of a cluster are merged too early": (
        DECODE,
        CLUSTER_BARRIER + r"proves the parts.*",
        "__syncthreads();",
        PAIR,
    ),
    "a CTA leaves while its part is read": (DECODE, CLUSTER_BARRIER + r"proves that nobody.*", "", PAIR),
    "barriers are not initialised in time": (DECODE, r"  __syncthreads\(\);.*", "", LONG),
    "lanes wait for as many warps as one": (DECODE, r"storage\.v_barriers, 4 \*", "storage.v_barriers,", LONG),
    "descriptors leave the CTA": (
        "layout.cuh",
        r"return address & 0x3ffff;",
        "return address;",
        dataclasses.replace(PAIR, head_dim=128),
    ),
}
#: Faults that begin a kernel too early. Nothing but `read_too_early` shows them.
EARLY: dict[str, Fault] = {
    "caches are read before keys are appended": (PRODUCER, r"  ptx::griddepcontrol_wait\(\);.*", "", THREE),
    "splits are merged before they are there": (COMBINE, r"^  ptx::griddepcontrol_wait\(\);.*", "", THREE),
}
#: Faults of what is computed.
WRONG: dict[str, Fault] = {
    "zeros of V are not written": (CONSUMER, r"if \(\(block \+ 1\) \* .*_k\) clear", "if (false) clear", LONG),
    "zeros begin a row late": (CONSUMER, r"clear_tail\(v, share_", "clear_tail(v, 1 + share_", LONG),
    "rows of the second warpgroup are those of the first": (
        CONSUMER,
        r"warpgroup_rows \* row_group\(\) \+ 16",
        "16",
        ROWS,
    ),
    "both rows of a thread have one limit": (CONSUMER, r"lane\(\) / 4 \+ 8 \* r;", "lane() / 4;", ROWS),
    "a group takes blocks of both": (CONSUMER, r"j \+= S\.key_groups;", "j += 1;", LONG),
    "a group takes blocks of both, without overlap": (CONSUMER, r"j \+= S\.key_groups\)", "j += 1)", WIDE),
    "O stays in its frame": (CONSUMER, r"      scale_rows\(O, shrink\);", "", LONG),
    "O stays in its frame, without overlap": (
        CONSUMER,
        r"scale_rows\(O, weigh\(scores, j, mask, softmax\)\);",
        "weigh(scores, j, mask, softmax);",
        WIDE,
    ),
    "the cap is not added back": (
        CONSUMER,
        r"partial_lse\[number\] = lse\.row\[r\] \+ shift\(\)",
        "partial_lse[number] = lse.row[r]",
        CAPPED,
    ),
    "a slope rises": (CONSUMER, r"= -p_\.alibi", "= p_.alibi", SLOPES),
    "slopes of the first sequence": (CONSUMER, r"share_\.sequence \* p_\.alibi_stride_batch \+ ", "", SLOPES),
    "both rows have one slope": (CONSUMER, r"const int r = i / 2 % 2;", "const int r = 0;", SLOPES),
    "slopes count from the block": (CONSUMER, r"block \* S\.tile_n \+ column\(\)", "column()", SLOPES),
    "parts weigh the same": (MERGE, r"const float weight = .*", "const float weight = 1.f;", PAIR),
    "a group's part is left out": (
        MERGE,
        r"count_\(ptx::cluster_nctarank\(\) \* S\.key_groups\)",
        "count_(ptx::cluster_nctarank())",
        LONG,
    ),
    "the parts are all of the first CTA": (MERGE, r", i / S\.key_groups\); \}", ", 0); }", PAIR),
    "lse is in base 2": (MERGE, r"ptx::lg2_approx_ftz\(sum\), ln_2", "ptx::lg2_approx_ftz(sum), 1.f", LONG),
    "a cluster forgets the sink": (
        MERGE,
        r"== minus_infinity \? 0\.f : 1\.f;",
        "== minus_infinity ? 0.f : 0.f;",
        SUNK_WHOLE,
    ),
    "the sink is of the first head": (MERGE, r"p_\.sink\[of\.head \* ", "p_.sink[0 * ", SUNK_WHOLE),
    "partial results are of the first sequence": (
        CONSUMER,
        r"part \* p_\.batch \+ share_\.sequence",
        "part * p_.batch",
        THREE,
    ),
    "packed rows are those of the first sequence": (
        MERGE,
        r"share_\.queries\.begin \+ row\.query",
        "row.query",
        dataclasses.replace(PACKED, num_splits=1),
    ),
    "keys of the first head": (
        PRODUCER,
        r"at\.row, share\.head_kv,",
        "at.row, 0,",
        dataclasses.replace(LONG, heads_kv=2),
    ),
    "boxes of a block are of one page": (
        PRODUCER,
        r"share\.keys\.at\(block \* S\.tile_n \+ row\)",
        "share.keys.at(block * S.tile_n)",
        PAIR,
    ),
    "columns beyond 64 are the first": (
        PRODUCER,
        r"panel \* panel_cols,",
        "0,",
        dataclasses.replace(LONG, head_dim=128),
    ),
    "the sign of a scale is lost": (QUERIES, r"p\.negate_scores \? 0x80008000 : 0", "0", NEGATIVE),
    "queries are those of the first sequence": (QUERIES, r"share\.sequence \* p\.q_strides\.batch", "0", LONG),
    "queries do not turn": (QUERIES, r" && p\.rotary\.dim == 0", "", TURNING),
    "all rows turn by one position": (QUERIES, r"\(p\.rotate_by_row \? at\.query : 0\)", "0", TURNING),
    "rows turn by their own position": (QUERIES, r"\(p\.rotate_by_row \? at\.query : 0\)", "at.query", STILL),
    "the diagonal is aligned at the top": (SHARE, r"query \+ seqlen_k - queries\.count;", "query;", ROWS),
    "the window begins a key late": (
        SHARE,
        r"\? 0 : diagonal\(query\) - p_\.left;",
        "? 0 : diagonal(query) - p_.left + 1;",
        WINDOW,
    ),
    "a query sees one key more": (SHARE, r"p_\.right \+ 1; *$", "p_.right + 2;", ROWS),
    "the last block is left out": (
        SHARE,
        r"\+ S\.tile_n - 1\) / S\.tile_n;\n\s*const int count",
        ") / S.tile_n;\n const int count",
        LONG,
    ),
    "splits are cut a block early": (SHARE, r"min\(count, from \+ size\)", "min(count, from + size - 1)", CUT),
    "splits repeat a block": (
        SHARE,
        r"part_of\(count, split \+ 1\);",
        "min(count, part_of(count, split + 1) + 1);",
        PAIR,
    ),
    "pages are those of the first sequence": (PLACES, r"sequence_ \* p_\.table_stride_batch \+ ", "", PAIR),
    "rows of a page repeat": (
        PLACES,
        r"key - number \* int\(p_\.page_size\.divisor\)",
        "0",
        dataclasses.replace(PAIR, page_size=128),
    ),
    "lengths are those of the first sequence": (
        PLACES,
        r"cache_seqlens\[sequence \* p\.seqlens_stride\]",
        "cache_seqlens[0]",
        LONG,
    ),
    "new keys are not seen": (PLACES, r"min\(before_ \+ p_\.appended, p_\.capacity\)", "before_", THREE),
    "a sequence has the row of its number": (PLACES, r"p_\.cache_batch_idx == nullptr \?", "true ?", ELSEWHERE),
    "new keys are one late": (APPEND, r"cached\.before\(\) \+ i;", "cached.before() + i + 1;", THREE),
    "new values are those of the first token": (
        APPEND,
        r"sequence \* p\.v_strides\.batch \+ i \* p\.v_strides\.row",
        "sequence * p.v_strides.batch",
        ELSEWHERE,
    ),
    "new values turn like keys": (
        APPEND,
        r"return element<dtype>\(p\.v, begin \+ column \* p\.v_strides\.column\);",
        "return rotated<dtype>(p.rotary, key, column, [&](int c) { return element<dtype>(p.v, begin + c); });",
        TURNING,
    ),
    "new keys turn by the first position": (
        APPEND,
        r"rotated<dtype>\(p\.rotary, key,",
        "rotated<dtype>(p.rotary, cached.before(),",
        TURNING,
    ),
    "angles turn the other way": (ROTARY, r"second \? other : -other", "second ? -other : other", TURNING),
    "neighbours are of one half": (
        ROTARY,
        r"interleaved \? column % 2 != 0 :",
        "interleaved ? column >= half :",
        PAIRED,
    ),
    "columns behind the rotary ones turn": (ROTARY, r"  if \(column >= rotary\.dim\) return x;\n", "", TURNING),
    "the merge has 16 splits": (COMBINE, r"base < p\.parts;", "base < 1;", MANY),
    "the merge repeats the weights of 32 splits": (
        COMBINE,
        r"weight = base == 0 \? first_weight : weigh\(lse\(base \+ lane\)\);",
        "weight = first_weight;",
        MANY,
    ),
    "the merge adds up the weights of 32 splits": (COMBINE, r"sum \+= weigh\(lse\(part\)\);", "{}", MANY),
    "the merge has no sink": (COMBINE, r"warp_sum\(sum\) \+ weigh\(sink\)", "warp_sum(sum)", SUNK),
    "the merge has columns up to 128": (
        COMBINE,
        r"begin < columns; begin \+= 4 \* warp_lanes",
        "begin < 1; ++begin",
        WIDE_MERGE,
    ),
    "packed rows are merged to the first sequence": (
        COMBINE,
        r"at_row = queries\.begin \+ row;",
        "at_row = row;",
        PACKED,
    ),
    "nobody's rows are merged": (COMBINE, r"if \(row >= queries\.count\)", "if (false)", PACKED),
}
#: What broken values of `BROKEN` do without the checks of the device.
UNCHECKED: dict[str, tuple[str, str, str, str]] = {
    "lengths are not clamped to the capacity": (
        PLACES, r"min\(max\(length, 0\), p\.capacity\)", "max(length, 0)",
        "new keys, lengths [2147483646, 175, 176, 177]",
    ),
    "lengths below 0 are taken": (PLACES, r"max\(length, 0\)", "length", "new keys, lengths [1000000, 0, 149, -7]"),
    "keys are appended to a full cache": (
        APPEND, r"key >= p\.places\.capacity \|\| ", "", "new keys, lengths [152, 153, 154, 155]",
    ),
    "keys are appended to no page": (APPEND, r" \|\| row\.page < 0", "", "new pages, page -1"),
    "pages beyond the cache are taken": (PLACES, r" && page < p_\.pages", "", "new pages, page None"),
    "rows beyond the cache are taken": (PLACES, r" && page < p_\.pages", "", "own rows [-1, 3, 1, 6]"),
    "the table is read behind its end": (
        PLACES, r"  if \(key >= p_\.capacity\) return \{-1, 0\};\n", "", "pages, lengths [152, 153, 154, 155]",
    ),
    "offsets below 0 are taken": (PLACES, r"begin < 0 \|\| ", "", "negative"),
    "offsets beyond q are taken": (PLACES, r" \|\| end > total_q", "", "beyond"),
}  # fmt: skip


def named(faults: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("fault", faults, ids=lambda name: name.replace(" ", "_"))


def plant(fault: tuple[str, str, str, Any], patch: pytest.MonkeyPatch) -> None:
    file, old, new, _ = fault
    read = sources.read

    def edited(path: str) -> str:
        text, count = re.subn(old, new, read(path), flags=re.MULTILINE) if path == file else (read(path), 1)
        assert count == 1, f"{path} holds {old!r} {count} times: the kernel has changed, so must the fault"
        return text

    patch.setattr(sources, "read", edited)
    patch.setattr(compiler, "amalgamate", sources.amalgamate.__wrapped__)
    patch.setattr(emulate_cache, "kernel_of", functools.cache(emulate.kernel_of.__wrapped__))


def config_of(case: CacheCase) -> dict[str, int] | None:
    """Two key groups where one CTA has all keys."""
    return {"residents": 1, "key_groups": 2, "stages": 4} if case.num_splits == 1 else None


def launches(case: CacheCase) -> Any:
    """The call under one schedule after the other, and what was found; a kernel that hangs is stopped."""
    for seed, policy in itertools.product(range(2), POLICIES):
        prepared = prepare(case, config_of(case))
        limits = {"max_instructions": 5_000_000, "max_idle": 200_000}
        yield prepared, prepared.launch(policy=policy, seed=seed, stop_at_error=True, **limits)


@named(RACES)
def test_a_fault_of_order_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = RACES[fault][3]
    assert all(run.verdict == "clean" for _, run in launches(case))
    plant(RACES[fault], monkeypatch)
    assert any(run.verdict == "error" for _, run in launches(case))


@named(EARLY)
def test_a_kernel_that_begins_too_early_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = EARLY[fault][3]
    assert read_too_early(prepare(case)) == set()
    plant(EARLY[fault], monkeypatch)
    assert read_too_early(prepare(case)) != set()


@named(WRONG)
def test_a_wrong_result_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = WRONG[fault][3]
    check(case, config_of(case))
    plant(WRONG[fault], monkeypatch)
    prepared, run = next(iter(launches(case)))
    if run.verdict == "clean":
        with pytest.raises(AssertionError, match=r"^(out|lse)\[|Arrays are not equal"):
            hold_to_all(case, prepared)


def check_broken(name: str) -> None:
    if name in BROKEN_OFFSETS:
        test_broken_offsets_make_no_rows(name)
    else:
        test_broken_values_do_what_is_documented(name, "eager")


@named(UNCHECKED)
def test_a_missing_check_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = UNCHECKED[fault][3]
    plant(UNCHECKED[fault], monkeypatch)
    with pytest.raises(AssertionError, match=r"^(out|lse)\[|not equal|== 'clean'"):
        check_broken(name)
