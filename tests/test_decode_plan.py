"""Launches over a cache: the structs of cuda/decode_params.h, their fields, grids, tensor maps and workspace."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import numpy as np
import pytest
from nvrtc_tools import compile_ptx, initialiser
from test_cache_problem import problem_of
from test_decode_select import problem_of as problem_of_sizes

from cupyfa._decode import PARAMETER_SIZES, AppendPacking, CacheGeometry, CombinePacking, DecodePacking
from cupyfa.cache_options import CacheArrays
from cupyfa.cache_problem import CacheProblem
from cupyfa.decode_plan import DecodePlan, decode_specs, plan_decode
from cupyfa.decode_select import select_decode
from cupyfa.errors import UnsupportedError
from cupyfa.select import H200
from cupyfa.sources import read
from cupyfa.spec import AppendSpec, CombineSpec, Spec
from cupyfa.testing import CACHE_CASES, CacheCase

# What cuda/decode_params.h says, in the notation of Python's struct. Four strides, and the three numbers of a divisor.
PLACES = {
    **dict.fromkeys(("cache_seqlens", "page_table", "cache_batch_idx"), "Q"),
    **dict.fromkeys(("seqlens_stride", "table_stride_batch", "table_stride_page", "batch_idx_stride"), "q"),
    "cache_seqlen": "i",
    "page_size": "3I",
    **dict.fromkeys(("pages", "capacity"), "i"),
    "appended": "i4x",
}
ROTARY = {
    **dict.fromkeys(("cos", "sin"), "Q"),
    **dict.fromkeys(("cos_stride", "sin_stride"), "q"),
    **dict.fromkeys(("dim", "positions"), "i"),
    "interleaved": "i4x",
}
SHARE = {
    **dict.fromkeys(("heads_kv", "group", "tiles_m", "splits"), "3I"),
    **dict.fromkeys(("blocks_per_split", "box_rows", "seqlen_q", "total_q", "left", "right"), "i"),
    "cu_seqlens_q": "Q",
    "cu_seqlens_stride": "q",
}
DECODE = {
    **dict.fromkeys(("q", "out", "lse", "partial_out", "partial_lse", "sink", "alibi_slopes"), "Q"),
    **dict.fromkeys(("q_strides", "out_strides", "lse_strides"), "4q"),
    **dict.fromkeys(("sink_stride", "alibi_stride_batch", "alibi_stride_head"), "q"),
    **dict.fromkeys(("scale_log2", "softcap_slope", "softcap"), "f"),
    **dict.fromkeys(("negate_scores", "q_vectors", "head_dim", "head_dim_v"), "i"),
    **dict.fromkeys(("rotate_by_row", "batch", "heads_q"), "i"),
}
#: What DecodePacking takes, beside places and angles; addresses in its order.
SHARED = {**dict.fromkeys(("q", "out", "lse", "partial_out", "partial_lse", "cu_seqlens_q"), "Q"), **DECODE, **SHARE}
APPEND = {
    **dict.fromkeys(("k", "v", "k_cache", "v_cache"), "Q"),
    **dict.fromkeys(("k_strides", "v_strides", "k_cache_strides", "v_cache_strides"), "4q"),
    **dict.fromkeys(("batch", "heads_kv", "head_dim", "head_dim_v"), "i"),
}
COMBINE = {
    **dict.fromkeys(("partial_out", "partial_lse", "out", "lse", "cu_seqlens_q", "sink"), "Q"),
    **dict.fromkeys(("out_strides", "lse_strides"), "4q"),
    **dict.fromkeys(("cu_seqlens_stride", "sink_stride"), "q"),
    **dict.fromkeys(("parts", "batch", "heads_q", "seqlen_q", "total_q", "head_dim_v"), "i"),
}
FLAGS = ("negate_scores", "q_vectors", "rotate_by_row", "interleaved")
Values = dict[str, Any]


def format_of(layout: dict[str, str]) -> str:
    return "<" + "".join(layout.values())


def unpack(layout: dict[str, str], data: bytes, offset: int = 0) -> Values:
    """Each field by its name; strides as a tuple, a divisor as the number that it divides by."""
    values = iter(struct.unpack_from(format_of(layout), data, offset))

    def value(kind: str) -> Any:
        if kind not in ("4q", "3I"):
            return next(values)
        several = tuple(next(values) for _ in range(int(kind[0])))
        assert kind == "4q" or several == divisor(several[0])
        return several if kind == "4q" else several[0]

    return {name: value(kind) for name, kind in layout.items()}


def divisor(number: int) -> tuple[int, int, int]:
    """That number, and what n * multiplier >> shift needs to be n // number."""
    shift = 31 + (number - 1).bit_length()
    return number, -(-(2**shift) // number), shift


@pytest.mark.parametrize("number", [1, 2, 3, 5, 7, 24, 64, 132, 641, 2**16 - 1, 2**20 + 1, 2**30, 2**31 - 1])
def test_a_multiplication_divides(number: int) -> None:
    _, multiplier, shift = divisor(number)
    assert multiplier < 2**32
    for n in {0, 1, number - 1, number, number + 1, 2**31 - 1, 2**31 - 1 - (2**31 - 1) % number, 123_456_789}:
        for near in (n - 1, n):
            if 0 <= near < 2**31:
                assert near * multiplier >> shift == near // number


def fields_of(packed: bytes) -> Values:
    """The fields of any of the three structs, those of its members beside them; maps are bytes."""
    size = len(packed)
    if size == PARAMETER_SIZES["CombineParams"]:
        return unpack(COMBINE, packed)
    decode = size == PARAMETER_SIZES["DecodeParams"]
    layouts = (PLACES, SHARE, ROTARY, DECODE) if decode else (PLACES, ROTARY, APPEND)
    fields: Values = {"map_k": packed[:128], "map_v": packed[128:256]} if decode else {}
    at = 128 * len(fields)
    for layout in layouts:
        fields |= unpack(layout, packed, at)
        at += struct.calcsize(format_of(layout))
    return fields


def example(layout: dict[str, str], first: int) -> Values:
    """Values that tell their place, as large as their type; the lower half of a pointer."""
    values: Values = {}
    for i, (name, kind) in enumerate(layout.items(), first):
        if kind == "4q":
            values[name] = tuple(2**40 + 10 * i + n for n in range(4))
        else:
            values[name] = {"Q": 2**47 - i, "q": -(2**41) - i, "f": i / 64, "i": 2**30 + i, "3": 2**30 + i}[kind[0]]
        if name in FLAGS:
            values[name] = 1
    return values


OF_PLACES, OF_ROTARY = example(PLACES, 100), example(ROTARY, 200)
#: Names of the arguments of CacheGeometry where they are not those of the fields.
RENAMED = {"dim": "rotary_dim"}
ADDRESSES = ("cache_seqlens", "page_table", "cache_batch_idx", "cos", "sin", "cache_seqlen")


def geometry() -> CacheGeometry:
    fields = OF_PLACES | OF_ROTARY
    return CacheGeometry(**{RENAMED.get(name, name): x for name, x in fields.items() if name not in ADDRESSES})


def split(layout: dict[str, str], values: Values) -> tuple[tuple[int, ...], Values]:
    """Addresses, and all else."""
    pointers = [name for name, kind in layout.items() if kind == "Q"]
    return tuple(values[name] for name in pointers), {n: x for n, x in values.items() if n not in pointers}


def pack_examples() -> dict[str, tuple[bytes, Values]]:
    """Each struct with other values in all fields."""
    places = tuple((OF_PLACES | OF_ROTARY)[name] for name in ADDRESSES)
    k, v = bytes(range(128)), bytes(range(128, 256))
    decode, append, combine = example(SHARED, 300), example(APPEND, 400), example(COMBINE, 500)
    at, rest = split(SHARED, decode)
    decoding = DecodePacking(cache=geometry(), **rest).pack(k, v, places, at)
    at, rest = split(APPEND, append)
    appending = AppendPacking(cache=geometry(), **rest).pack(places, at)
    at, rest = split(COMBINE, combine)
    both = OF_PLACES | OF_ROTARY
    return {
        "DecodeParams": (decoding, {"map_k": k, "map_v": v} | both | decode),
        "AppendParams": (appending, both | append),
        "CombineParams": (CombinePacking(**rest).pack(at), combine),
    }


STRUCTS = ("DecodeParams", "AppendParams", "CombineParams")


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_hold_every_value_at_its_place(name: str) -> None:
    packed, values = pack_examples()[name]
    assert len(packed) == PARAMETER_SIZES[name]
    assert fields_of(packed) == values


def test_members_have_the_sizes_that_were_read() -> None:
    assert PARAMETER_SIZES["CachePlaces"] == struct.calcsize(format_of(PLACES))
    assert PARAMETER_SIZES["Rotary"] == struct.calcsize(format_of(ROTARY))


def text_of(layout: dict[str, str], values: Values) -> str:
    """A designated initialiser: in the order of the fields, else it is an error. Pointers are null."""

    def value(name: str, kind: str) -> str:
        if kind == "Q":
            return "nullptr"
        if kind in ("4q", "3I"):
            several = values[name] if kind == "4q" else divisor(values[name])
            return "{" + ", ".join(map(str, several)) + "}"
        return f"{values[name]}{'f' * (kind == 'f')}"

    return ", ".join(f".{name} = {value(name, kind)}" for name, kind in layout.items())


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_what_the_device_compiler_lays_out(name: str) -> None:
    packed, values = pack_examples()[name]
    own = text_of({"DecodeParams": DECODE, "AppendParams": APPEND, "CombineParams": COMBINE}[name], values)
    share = text_of(SHARE, values) + ", " if name == "DecodeParams" else ""
    maps = {n: ", ".join(map(str, struct.unpack("<16Q", values[f"map_{n}"]))) for n in "kv" if f"map_{n}" in values}
    text = "".join(f".{n} = {{{{{words}}}}}, " for n, words in maps.items())
    if name != "CombineParams":
        text += f".places = {{{text_of(PLACES, values)}}}, {share}.rotary = {{{text_of(ROTARY, values)}}}, "
    header = read("params.h") + read("decode_params.h").replace('#include "params.h"', "")
    source = f"{header}\n__constant__ cupyfa::{name} example = {{{text}{own}}};"
    data = initialiser(compile_ptx(source, "-std=c++20", "-arch=compute_90"), "example")
    theirs = fields_of(data.ljust(len(packed), b"\0"))
    assert len(data) == len(packed)
    pointers = {n for layout in (PLACES, ROTARY, SHARED, APPEND, COMBINE) for n, kind in layout.items() if kind == "Q"}
    assert theirs == {n: 0 if n in pointers else x for n, x in values.items()}


@pytest.mark.parametrize(("name", "value"), [("parts", 2**31), ("seqlen_q", -(2**31) - 1), ("sink_stride", 2**63)])
def test_a_value_that_does_not_fit_is_refused(name: str, value: int) -> None:
    _, rest = split(COMBINE, example(COMBINE, 500))
    with pytest.raises(OverflowError):
        CombinePacking(**rest | {name: value})


def test_what_cannot_be_packed() -> None:
    at, rest = split(SHARED, example(SHARED, 300))
    packing = DecodePacking(cache=geometry(), **rest)
    with pytest.raises(ValueError, match=r"^a tensor map has 128 bytes, got 128 and 3$"):
        packing.pack(bytes(128), b"abc", (0,) * 6, at)
    with pytest.raises(ValueError, match="values to unpack"):
        packing.pack(bytes(128), bytes(128), (0,) * 5, at)
    with pytest.raises(ValueError, match="values to unpack"):
        packing.pack(bytes(128), bytes(128), (0,) * 6, at[:-1])
    with pytest.raises(OverflowError):
        packing.pack(bytes(128), bytes(128), (2**64, 0, 0, 0, 0, 0), at)
    with pytest.raises(TypeError):
        DecodePacking(cache=None, **rest)  # type: ignore[arg-type]


# --- Plans ---


def plan_of(problem: CacheProblem, **config: int) -> DecodePlan:
    selection = select_decode(problem, H200, tuple(sorted(config.items())))

    def traits(spec: Spec) -> dict[str, int]:
        return {"threads": len(spec.entry), "shared_bytes": 1000 + len(spec.entry)}

    plan = plan_decode(problem, selection, traits)
    assert [step.spec for step in plan.steps] == [*decode_specs(problem, selection)]
    return plan


def encode(map_geometry: Any, address: int) -> bytes:
    return struct.pack("<16Q", address, *map_geometry.shape, *map_geometry.strides, *map_geometry.box, *range(6))


#: Where arrays are: the argument's index, and the last ones.
AT = CacheArrays(*(2**40 + 2**20 * i for i in range(len(CacheArrays._fields))))
WORKSPACE = 2**44


def packed_of(problem: CacheProblem, length: int = 0, **config: int) -> list[Values]:
    """The fields of each step, of arrays at AT."""
    given = CacheArrays(*(at if x is not None else None for at, x in zip(AT, problem.operands, strict=True)))
    plan = plan_of(problem, **config)
    workspace = WORKSPACE if plan.workspace_bytes else 0
    return [fields_of(packed) for packed in plan.pack(encode, given, length, workspace)]


CASE = CacheCase("plan", (100, 7, 30), heads_q=8, heads_kv=2, page_size=24, seqlen_q=3, causal=True, num_splits=5)
NEW = dataclasses.replace(CASE, seqlen_new=3, rotary_dim=32, head_dim=96, head_dim_v=40)


def test_what_a_call_launches() -> None:
    plan = plan_of(problem_of(NEW))
    append, decode, combine = (step.geometry for step in plan.steps)
    assert append.grid == 3 * 3  # a CTA for each new key
    assert decode.grid == 1 * 5 * 2 * 3
    assert combine.grid == 3 * 8 * 3
    assert [g.cluster_size for g in (append, decode, combine)] == [1, 1, 1]
    assert [g.programmatic for g in (append, decode, combine)] == [False, True, True]
    for step in plan.steps:  # as the kernel says
        assert (step.geometry.threads, step.geometry.shared_bytes) == (
            len(step.spec.entry),
            1000 + len(step.spec.entry),
        )
    assert plan.steps[0].spec == AppendSpec(problem_of(NEW).dtype)
    assert plan.steps[2].spec == CombineSpec(problem_of(NEW).dtype)


def test_the_first_launch_waits_for_all_before_it() -> None:
    for case in CACHE_CASES:
        programmatic = [step.geometry.programmatic for step in plan_of(problem_of(case)).steps]
        assert programmatic == [False, True, True][: len(programmatic)]


def test_two_splits_are_a_cluster() -> None:
    (step,) = plan_of(problem_of(dataclasses.replace(CASE, num_splits=2))).steps
    assert (step.geometry.cluster_size, step.geometry.grid) == (2, 1 * 2 * 2 * 3)


def test_tiles_of_many_rows() -> None:
    case = CacheCase("rows", (100, 7), heads_q=12, heads_kv=2, seqlen_q=40, num_splits=1)  # 240 rows of a head
    (step,) = plan_of(problem_of(case)).steps
    assert step.geometry.grid == 2 * 2 * 2
    (step,) = plan_of(problem_of(case), tile_m=64).steps
    assert step.geometry.grid == 4 * 2 * 2


def test_workspace_holds_what_splits_leave() -> None:
    plan = plan_of(problem_of(NEW))
    assert plan.partial_out_bytes == 5 * 3 * 8 * 3 * 40 * 4
    assert plan.workspace_bytes == 5 * 3 * 8 * 3 * (40 + 1) * 4
    for splits in (1, 2):
        plan = plan_of(problem_of(dataclasses.replace(NEW, num_splits=splits)))
        assert (plan.partial_out_bytes, plan.workspace_bytes) == (0, 0)
    packed = dataclasses.replace(CASE, lengths_q=(1, 9, 0), rows_of_nobody=2)
    assert plan_of(problem_of(packed)).workspace_bytes == 5 * 3 * 8 * 9 * (64 + 1) * 4  # 9: of the longest


def test_boxes_are_of_one_page_and_of_one_tile() -> None:
    for page_size, rows in ((1, 1), (3, 1), (8, 8), (16, 16), (24, 8), (48, 16), (64, 64), (96, 32), (256, 64)):
        (decode,) = packed_of(problem_of(dataclasses.replace(CASE, page_size=page_size, num_splits=1)))
        assert (decode["box_rows"], decode["page_size"]) == (rows, page_size)
    (decode,) = packed_of(problem_of(dataclasses.replace(CASE, page_size=None, num_splits=1)))
    assert (decode["box_rows"], decode["page_size"]) == (64, 101)  # a row of the cache is one page


def test_tensor_maps_are_of_the_caches() -> None:
    problem = problem_of(NEW)
    plan = plan_of(problem)
    pages = problem.cache_rows
    assert plan.k.shape == (96, 24, 2, pages)
    assert plan.k.strides == (2 * 96 * 2, 96 * 2, 24 * 2 * 96 * 2)
    assert plan.v.shape == (40, 24, 2, pages)
    assert plan.k.box == plan.v.box == (64, 8)
    assert (plan.k.swizzle, plan.k.l2_promotion) == (128, 128)
    one = plan_of(problem_of(CacheCase("one", (5,), heads_kv=1, heads_q=1)))
    assert one.k.strides == (128, 16, 16)  # those of axes with one index are never used


def test_fields_of_a_paged_problem() -> None:
    append, decode, combine = packed_of(problem_of(NEW))
    problem = problem_of(NEW)
    for step in (append, decode):
        assert (step["cache_seqlens"], step["page_table"]) == (AT.cache_seqlens, AT.page_table)
        assert (step["cos"], step["sin"], step["cache_batch_idx"]) == (AT.rotary_cos, AT.rotary_sin, 0)
        assert (step["page_size"], step["pages"], step["appended"]) == (24, problem.cache_rows, 3)
        assert step["capacity"] == problem.capacity == 6 * 24
        assert (step["seqlens_stride"], step["table_stride_batch"], step["table_stride_page"]) == (1, 6, 1)
        assert (step["dim"], step["positions"], step["interleaved"]) == (32, problem.rotary_positions, 0)
        assert (step["cos_stride"], step["sin_stride"]) == (16, 16)
        assert (step["heads_kv"], step["head_dim"], step["head_dim_v"], step["batch"]) == (2, 96, 40, 3)
    assert (append["k"], append["v"], append["k_cache"], append["v_cache"]) == (AT.k, AT.v, AT.k_cache, AT.v_cache)
    assert append["k_strides"] == (3 * 2 * 96, 2 * 96, 96, 1)
    assert append["v_strides"] == (3 * 2 * 40, 2 * 40, 40, 1)
    assert append["k_cache_strides"] == (24 * 2 * 96, 2 * 96, 96, 1)
    assert append["v_cache_strides"] == (24 * 2 * 40, 2 * 40, 40, 1)
    plan = plan_of(problem)
    assert decode["map_k"] == encode(plan.k, AT.k_cache)
    assert decode["map_v"] == encode(plan.v, AT.v_cache)
    parts = (WORKSPACE, WORKSPACE + plan.partial_out_bytes)
    for step in (decode, combine):
        assert (step["partial_out"], step["partial_lse"]) == parts
        assert (step["out"], step["lse"], step["cu_seqlens_q"], step["sink"]) == (AT.out, AT.lse, 0, 0)
        assert (step["heads_q"], step["seqlen_q"], step["total_q"]) == (8, 3, 0)
    assert (decode["splits"], combine["parts"]) == (5, 5)
    assert (decode["q"], decode["q_strides"]) == (AT.q, (3 * 8 * 96, 8 * 96, 96, 1))
    assert (decode["group"], decode["tiles_m"], decode["blocks_per_split"]) == (4, 1, 0)
    assert (decode["left"], decode["right"], decode["rotate_by_row"]) == (2**31 - 1, 0, 1)
    assert decode["scale_log2"] == np.float32(96**-0.5 * math.log2(math.e))
    assert (decode["softcap"], decode["softcap_slope"], decode["negate_scores"], decode["q_vectors"]) == (0, 0, 0, 1)


def test_fields_of_rows_and_options() -> None:
    case = CacheCase(
        "rows", (77, 77), one_length=True, softcap=5.0, softmax_scale=-0.25, sink=True, alibi=True, window_size=(9, 0),
        seqlen_q=2, split_size=64, spare=60,
    )  # fmt: skip
    decode, combine = packed_of(problem_of(case), length=77)
    assert (decode["cache_seqlens"], decode["cache_seqlen"], decode["page_table"]) == (0, 77, 0)
    assert (decode["page_size"], decode["capacity"], decode["pages"]) == (137, 137, 2)
    assert (decode["splits"], decode["blocks_per_split"]) == (3, 1)
    assert (decode["left"], decode["right"]) == (9, 0)
    assert decode["negate_scores"] == 1
    log2_e = math.log2(math.e)
    assert decode["scale_log2"] == np.float32(2 * 5.0 * log2_e)
    assert decode["softcap_slope"] == np.float32(2 * log2_e * 0.25 / 5.0)
    assert decode["softcap"] == 5.0
    assert (decode["alibi_slopes"], decode["alibi_stride_batch"], decode["alibi_stride_head"]) == (
        AT.alibi_slopes,
        4,
        1,
    )
    for step in (decode, combine):
        assert (step["sink"], step["sink_stride"]) == (AT.sink, 1)


def test_the_row_of_a_sequence_and_packed_queries() -> None:
    case = CacheCase("packed", (100, 64, 7), lengths_q=(1, 4, 2), batch_idx=True, spare=3, num_splits=1)
    (decode,) = packed_of(problem_of(case))
    assert (decode["cache_batch_idx"], decode["batch_idx_stride"]) == (AT.cache_batch_idx, 1)
    assert (decode["cu_seqlens_q"], decode["cu_seqlens_stride"]) == (AT.cu_seqlens_q, 1)
    assert (decode["seqlen_q"], decode["total_q"], decode["batch"], decode["pages"]) == (4, 7, 3, 6)


def test_no_scale_is_0() -> None:
    """A scale of 0 would make 0 * inf of a row without keys."""
    problem = dataclasses.replace(problem_of(dataclasses.replace(CASE, num_splits=1)), softmax_scale=0.0)
    (decode,) = packed_of(problem)
    assert decode["scale_log2"] == np.finfo(np.float32).tiny


@pytest.mark.parametrize(
    ("strides", "vectors"),
    [((1536, 512, 128, 2), 1), ((1544, 512, 128, 2), 0), ((1536, 520, 128, 2), 0), ((1536, 512, 136, 2), 0),
     ((3072, 1024, 256, 4), 0)],
)  # fmt: skip
def test_queries_are_loaded_in_vectors_where_they_can_be(strides: tuple[int, ...], vectors: int) -> None:
    problem = problem_of(CacheCase("vectors", (9, 3), seqlen_q=3, num_splits=1))
    (decode,) = packed_of(dataclasses.replace(problem, q=dataclasses.replace(problem.q, strides=strides)))
    assert decode["q_vectors"] == vectors
    one = dataclasses.replace(problem.q, shape=(1, 1, 1, 64), strides=(2, 2, 2, 2))
    assert packed_of(dataclasses.replace(problem, q=one))[0]["q_vectors"] == 1


def test_too_many_ctas_are_refused() -> None:
    problem = problem_of_sizes(2**20, 64, heads_q=64, heads_kv=16, num_splits=256)
    message = (
        rf"^attention: batch {2**20} with 64 heads, seqlen_q 1 and 256 splits makes {2**32} CTAs; at most "
        rf"{2**31 - 1} are supported: split the batch$"
    )
    with pytest.raises(UnsupportedError, match=message):
        plan_of(problem)
    plan_of(problem_of_sizes(2**20, 64, heads_q=64, heads_kv=16, num_splits=31))
