"""Launches of gradients: the structs of cuda/bwd_params.h, their fields, grids, tensor maps, workspace and copies."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nvrtc_tools import compile_ptx, initialiser
from test_backward_select import problem_of

from cupyfa._backward import (
    PARAMETER_SIZES,
    BackwardPacking,
    BiasGradientPacking,
    PostprocessPacking,
    PreprocessPacking,
    SinkPacking,
)
from cupyfa._launch import TensorMapGeometry
from cupyfa.backward_bias import bias_copy
from cupyfa.backward_launches import BackwardPlan
from cupyfa.backward_plan import backward_specs, plan_with_copies
from cupyfa.backward_problem import BackwardArrays, BackwardProblem
from cupyfa.backward_select import BWD_CANDIDATES, BwdCandidate, backward_config, select_backward
from cupyfa.copies import Copy
from cupyfa.errors import UnsupportedError
from cupyfa.operand import Operand
from cupyfa.select import H200, Device
from cupyfa.sources import read
from cupyfa.spec import Bias, BiasGradientSpec, BwdSpec, PlanSpec, PostprocessSpec, PreprocessSpec, SinkSpec, Spec

Values = dict[str, Any]

# What cuda/bwd_params.h says, in the notation of Python's struct. A tensor map is 16 words, strides are four.
MAPS = ("q", "k", "v", "dout", "dk", "dv", "bias")
BWD = {
    **dict.fromkeys(MAPS, "16Q"),
    **dict.fromkeys(("dk_parts", "dv_parts", "lse_log2", "delta", "dq", "turns", "alibi_slopes", "plan"), "Q"),
    **dict.fromkeys(("alibi_stride_batch", "alibi_stride_head"), "q"),
    "bias_data": "Q",
    "bias_strides": "4q",
    "bias_rows": "Q",
    **dict.fromkeys(("scale_log2", "scale", "softcap_slope", "softcap_log2", "logit_scale", "softcap"), "f"),
    **dict.fromkeys(("seqlen_q", "seqlen_k", "last_diagonal", "first_diagonal"), "i"),
    **dict.fromkeys(("heads_q", "heads_kv", "heads_per_kv", "heads_per_part", "parts"), "I"),
    **dict.fromkeys(("tiles_m", "tiles_n", "heads_per_section"), "I"),
}
#: In the order in which the packing takes them.
BWD_ADDRESSES = (
    *("lse_log2", "delta", "dq", "turns", "alibi_slopes", "dk_parts", "dv_parts", "plan", "bias_data", "bias_rows"),
)
#: Its first field is a `BwdParams`.
BIAS_GRADIENT = {
    "scores": f"{PARAMETER_SIZES['BwdParams'] // 8}Q",
    "dbias": "Q",
    "strides": "4q",
    **dict.fromkeys(("batches", "heads", "rows", "keys", "batch"), "i"),
}
PREPROCESS = {
    **dict.fromkeys(("out", "dout", "lse", "dlse", "sink"), "Q"),
    **dict.fromkeys(("out_strides", "dout_strides", "lse_strides", "dlse_strides"), "4q"),
    "sink_stride": "q",
    **dict.fromkeys(("lse_log2", "delta", "dsink", "bias"), "Q"),
    "bias_strides": "4q",
    **dict.fromkeys(("bias_rows", "dq"), "Q"),
    "dq_head": "q",
    **dict.fromkeys(("turns", "cu_seqlens_q", "seqused_q", "plan"), "Q"),
    "turns_head": "I",
    "tile_m": "i",
    "lse_factor": "f",
    "bias_float32": "i",
    **dict.fromkeys(("seqlen_q", "rows", "head_dim_v"), "i"),
    "heads_q": "I",
    "vectors": "i",
}
SINK = {"parts": "Q", "dsink": "Q", "dsink_stride": "q", "batch": "i", "parts_head": "i"}
POSTPROCESS = {
    "sums": "Q",
    "part_stride": "q",
    "out": "Q",
    "out_strides": "4q",
    **dict.fromkeys(("cu_seqlens", "seqused", "plan"), "Q"),
    "scale": "f",
    **dict.fromkeys(("parts", "seqlen", "head_dim"), "i"),
    **dict.fromkeys(("heads", "tiles"), "I"),
    "vectors": "i",
}
#: Of the kernel in front of them, where sequences are packed.
PLAN = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "plan"), "Q"),
    "sequences": "I",
    **dict.fromkeys(("rows_q", "rows_k", "q_step", "k_step", "total_q", "total_k", "tile_m", "tile_n", "window"), "i"),
    **dict.fromkeys(("heads_q", "heads_per_kv", "keys_in_l2", "multiprocessors"), "I"),
    **dict.fromkeys(("tiles_grow", "longest_first"), "i"),
}
LAYOUTS = {
    "PreprocessParams": PREPROCESS,
    "BwdParams": BWD,
    "PostprocessParams": POSTPROCESS,
    "SinkParams": SINK,
    "BiasGradientParams": BIAS_GRADIENT,
}
PACKINGS: dict[str, Callable[..., Any]] = {
    "PreprocessParams": PreprocessPacking,
    "BwdParams": BackwardPacking,
    "PostprocessParams": PostprocessPacking,
    "SinkParams": SinkPacking,
    "BiasGradientParams": BiasGradientPacking,
}


def unpack(layout: dict[str, str], data: bytes) -> Values:
    """Each field by its name; several words as a tuple. Behind them is nothing but padding."""
    form = "<" + "".join(layout.values())
    values = iter(struct.unpack_from(form, data))
    assert 0 <= len(data) - struct.calcsize(form) < 64
    return {
        name: tuple(next(values) for _ in range(int(kind[:-1]))) if len(kind) > 1 else next(values)
        for name, kind in layout.items()
    }


def example(layout: dict[str, str]) -> Values:
    """Values that tell their place, as large as their type; the lower half of a pointer."""
    values: Values = {}
    for i, (name, kind) in enumerate(layout.items()):
        if len(kind) > 1:
            values[name] = tuple(2**40 + 100 * i + n for n in range(int(kind[:-1])))
        else:
            values[name] = {"Q": 2**47 - i, "q": -(2**41) - i, "f": i / 64, "i": 2**30 + i, "I": 2**31 + i}[kind]
    if "heads_per_kv" in values:
        values |= {"heads_q": 3 * 2**29, "heads_kv": 2**29, "heads_per_kv": 3}
    values |= {name: 1 for name in ("vectors", "bias_float32") if name in values}
    return values


def pack(name: str, values: Values) -> bytes:
    """By the packing of a struct, which takes numbers once, and addresses for each call."""
    layout = LAYOUTS[name]
    own = {n: x for n, x in values.items() if layout[n][-1] != "Q" and n not in ("vectors", "heads_per_kv")}
    addresses = tuple(values[n] for n, kind in layout.items() if kind == "Q")
    packing = PACKINGS[name](**own)
    if name == "BwdParams":
        in_order = tuple(values[n] for n in BWD_ADDRESSES)
        return packing.pack(tuple(struct.pack("<16Q", *values[n]) for n in MAPS), in_order)
    if name == "BiasGradientParams":
        return packing.pack(struct.pack(f"<{layout['scores']}", *values["scores"]), *addresses)
    if "vectors" in values:
        return packing.pack(addresses, values["vectors"])
    return packing.pack(*addresses)


@pytest.mark.parametrize("name", LAYOUTS)
def test_structs_hold_every_value_at_its_place(name: str) -> None:
    values = example(LAYOUTS[name])
    packed = pack(name, values)
    assert len(packed) == PARAMETER_SIZES[name]
    assert unpack(LAYOUTS[name], packed) == values


@pytest.mark.parametrize("name", LAYOUTS)
def test_structs_are_what_the_device_compiler_lays_out(name: str) -> None:
    """A designated initialiser: in the order of the fields, else it is an error. Pointers are null."""
    values = example(LAYOUTS[name])

    def text(field: str, kind: str) -> str:
        several = ", ".join(map(str, values[field])) if len(kind) > 1 else ""
        return {
            "Q": "nullptr",
            "16Q": f"{{{{{several}}}}}",
            "4q": f"{{{several}}}",
            "f": f"{values[field]}f",
            "I": f"{values[field]}u",
            BIAS_GRADIENT["scores"]: "{}",
        }.get(kind, str(values[field]))

    fields = ", ".join(f".{field} = {text(field, kind)}" for field, kind in LAYOUTS[name].items())
    header = read("params.h") + read("bwd_params.h").replace('#include "params.h"', "")
    source = f"{header}\n__constant__ cupyfa::{name} example = {{{fields}}};"
    data = initialiser(compile_ptx(source, "-std=c++20", "-arch=compute_90"), "example")
    assert len(data) == PARAMETER_SIZES[name]
    null: Values = {field: 0 for field, kind in LAYOUTS[name].items() if kind == "Q"}
    null |= {"scores": (0,) * len(values["scores"])} if "scores" in values else {}
    assert unpack(LAYOUTS[name], data) == values | null


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("BwdParams", "seqlen_q", 2**31),
        ("BwdParams", "tiles_n", -1),
        ("BwdParams", "heads_per_part", 2**32),
        ("BwdParams", "parts", -1),
        ("PreprocessParams", "rows", 2**31),
        ("PreprocessParams", "dq_head", 2**63),
        ("PostprocessParams", "heads", 2**32),
        ("PostprocessParams", "parts", 2**31),
        ("PostprocessParams", "part_stride", 2**63),
        ("SinkParams", "dsink_stride", 2**63),
        ("BiasGradientParams", "rows", 2**31),
    ],
)
def test_a_value_that_does_not_fit_is_refused(name: str, field: str, value: int) -> None:
    with pytest.raises(OverflowError):
        pack(name, example(LAYOUTS[name]) | {field: value})


def test_what_cannot_be_packed() -> None:
    values = example(BWD)
    packing = BackwardPacking(**{n: values[n] for n, kind in BWD.items() if kind[-1] != "Q" and n != "heads_per_kv"})
    maps, at = (bytes(128),) * 7, (0,) * 10
    for wrong in ((bytes(128),) * 6, (*maps[:6], b"abc")):
        with pytest.raises(ValueError, match=r"^seven tensor maps have 128 bytes each, got \[128, 128, 128, 128, 128"):
            packing.pack(wrong, at)
    with pytest.raises(ValueError, match="values to unpack"):
        packing.pack(maps, at[1:])
    with pytest.raises(OverflowError):
        packing.pack(maps, (2**64, *at[1:]))
    of_bias = BiasGradientPacking(strides=(0, 0, 0, 0), batches=1, heads=1, rows=1, keys=1, batch=1)
    with pytest.raises(ValueError, match=rf"^BwdParams have {PARAMETER_SIZES['BwdParams']} bytes, got 3$"):
        of_bias.pack(b"abc", 0)


# --- Plans ---

#: Rows of a CTA of the first kernel; what others have to say tells who they are.
ROWS = 64


def traits(spec: Spec) -> dict[str, int]:
    return {"threads": len(spec.entry), "shared_bytes": 1000 + len(spec.entry), "tile_m": ROWS}


def plan_of(
    problem: BackwardProblem, *unaligned: str, device: Device = H200, **config: Any
) -> tuple[BackwardPlan, tuple[Copy, ...]]:
    selection = select_backward(problem, device, backward_config(config))
    return plan_with_copies(problem, selection, traits, device, "BSHD", unaligned)


def encode(geometry: Any, address: int) -> bytes:
    words = (address, *geometry.shape, *geometry.strides, *geometry.box, *range(6))
    return struct.pack("<16Q", *words[:16])


#: Where arrays are, and copies of all of them.
AT, COPIES = (BackwardArrays(*(begin + 2**20 * i for i in range(19))) for begin in (2**40, 2**41))
WORKSPACE = 2**44


def packed_of(problem: BackwardProblem, *unaligned: str, **more: Any) -> dict[str, Values]:
    """The fields of each struct, of arrays at AT; those of roundings by the name of the gradient."""
    plan, copies = plan_of(problem, *unaligned, **more)
    at: BackwardArrays[Any] = BackwardArrays(
        *(a if x is not None else None for a, x in zip(AT, problem.operands, strict=True))
    )
    copied = at._replace(**{copy.name: getattr(COPIES, copy.name) for copy in copies})
    packed = plan.pack(encode, at, copied, WORKSPACE)
    assert len(packed) == len(plan.specs) == len(plan.geometries)
    rounded = [x.name for x in plan.roundings]
    names = ["PlanParams"] * (plan.planning is not None) + ["PreprocessParams", "BwdParams", *rounded]
    names += ["SinkParams"] * (problem.dsink is not None) + ["BiasGradientParams"] * (problem.dbias is not None)
    layouts = LAYOUTS | {"PlanParams": PLAN} | dict.fromkeys(rounded, POSTPROCESS)
    return {name: unpack(layouts[name], data) for name, data in zip(names, packed, strict=True)}


#: Three query heads share a key head: each has a CTA of its own, for 18 key tiles leave most of the GPU idle.
PROBLEM = problem_of(3, 200, 300, heads_q=6, heads_kv=2, head_dim=128, head_dim_v=40, causal=True)
#: Nobody shares key heads.
WHOLE = problem_of(3, 200, 300, heads_q=6, heads_kv=6, head_dim=128, head_dim_v=40, causal=True)
EVERYTHING: Values = {"sink": True, "dlse": True, "alibi": True, "deterministic": True}


def test_what_a_call_launches() -> None:
    problem = problem_of(3, 200, 300, heads_q=6, heads_kv=6, **EVERYTHING)
    plan, copies = plan_of(problem)
    assert copies == ()
    selection = select_backward(problem, H200)
    spec = selection.spec
    assert (spec.tile_m, spec.tile_n, spec.partial, selection.parts) == (64, 128, False, 1)
    assert plan.specs == backward_specs(problem, selection)
    assert plan.specs == (
        PreprocessSpec(spec.dtype),
        spec,
        PostprocessSpec(dtype=spec.dtype, head_dim=128, tile_m=64),
        SinkSpec(),
    )
    assert [x.grid for x in plan.geometries] == [3 * 6 * 4, 3 * 6 * 3, 3 * 6 * 4, 6]
    assert [x.programmatic for x in plan.geometries] == [False, True, True, True]  # the first waits for all before it
    assert all(x.cluster_size == 1 for x in plan.geometries)
    for geometry, kernel in zip(plan.geometries, plan.specs, strict=True):  # as the kernel says
        assert (geometry.threads, geometry.shared_bytes) == (len(kernel.entry), 1000 + len(kernel.entry))


def test_what_a_call_with_parts_launches() -> None:
    problem = problem_of(3, 200, 300, heads_q=6, heads_kv=2, head_dim=192, head_dim_v=128, **EVERYTHING)
    plan, _ = plan_of(problem)
    selection = select_backward(problem, H200)
    spec = selection.spec
    assert (spec.tile_m, spec.tile_n, spec.partial, selection.parts) == (64, 64, True, 3)
    assert plan.specs == backward_specs(problem, selection)
    assert plan.specs == (
        PreprocessSpec(spec.dtype),
        spec,
        PostprocessSpec(dtype=spec.dtype, head_dim=192, tile_m=64),  # rows of queries
        PostprocessSpec(dtype=spec.dtype, head_dim=192, tile_m=64),  # and of keys
        PostprocessSpec(dtype=spec.dtype, head_dim=128, tile_m=64),
        SinkSpec(),
    )
    key_tiles = 3 * 2 * 5
    assert [x.grid for x in plan.geometries] == [3 * 6 * 4, 3 * key_tiles, 3 * 6 * 4, key_tiles, key_tiles, 6]
    assert [x.programmatic for x in plan.geometries] == [False, *[True] * 5]


def test_rows_of_sums_are_those_of_their_tiles() -> None:
    plan, _ = plan_of(PROBLEM)
    assert [(x.head_dim, x.tile_m) for x in plan.specs if isinstance(x, PostprocessSpec)] == [
        (128, 64),
        (128, 128),
        (64, 128),
    ]


def test_no_kernel_sums_a_sink_that_there_is_not() -> None:
    for problem, kernels in ((WHOLE, 3), (PROBLEM, 5)):
        plan, _ = plan_of(problem)
        assert len(plan.specs) == len(plan.geometries) == kernels
        assert not any(isinstance(spec, SinkSpec) for spec in plan.specs)
        assert (plan.sink, plan.dsink, plan.turns) == (None, None, None)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 200, 300), (2, 129, 64), (5, 64, 1000)], ids=str)
@pytest.mark.parametrize("options", [{}, {"sink": True}, {"deterministic": True}, EVERYTHING], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_places_in_the_workspace_do_not_overlap(
    sizes: tuple[int, ...], options: Values, head_dim: int, heads_kv: int
) -> None:
    problem = problem_of(*sizes, heads_q=4, heads_kv=heads_kv, head_dim=head_dim, **options)
    plan, copies = plan_of(problem, "k", "dq", "dv")
    parts = select_backward(problem, H200).parts
    sums = [x.sums for x in plan.roundings]
    others = [x for x in (plan.lse_log2, plan.delta, plan.turns, plan.dsink) if x is not None]
    assert len(sums) == (3 if parts > 1 else 1)
    assert len(others) == 2 + ("deterministic" in options) + ("sink" in options)
    # What threads write, dq, and dv of parts, they write wherever it is.
    assert [copy.name for copy in copies] == (["k"] if parts > 1 else ["k", "dv"])
    spans = sorted([(x.begin, x.begin + x.size) for x in sums + others] + [(copy.begin, copy.end) for copy in copies])
    assert spans[0][0] == 0
    for (_, end), (begin, _) in itertools.pairwise(spans):
        assert 0 <= begin - end < 256
    assert all(begin % 256 == 0 and begin < end for begin, end in spans)
    assert [(copy.begin, copy.end) for copy in copies] == spans[: len(copies)]  # before what the kernels have
    assert plan.workspace_bytes == spans[-1][1]


@pytest.mark.parametrize(
    ("sizes", "tile_m", "tile_n", "padded", "parts"),
    [
        ({"head_dim": 64}, 128, 128, (64, 64), 3),
        ({"head_dim": 128, "head_dim_v": 40}, 64, 128, (128, 64), 3),
        ({"head_dim": 192, "head_dim_v": 128}, 64, 64, (192, 128), 3),
        ({"head_dim": 96, "head_dim_v": 72}, 64, 128, (96, 96), 3),
        ({"head_dim": 256, "softcap": 5.0}, 64, 64, (256, 256), 3),
        ({"head_dim": 64, "heads_kv": 6}, 128, 128, (64, 64), 1),
        ({"head_dim": 256, "heads_kv": 6}, 64, 64, (256, 256), 1),
        ({"head_dim": 128, "heads_kv": 1}, 64, 128, (128, 128), 6),
    ],
    ids=str,
)
def test_places_are_as_large_as_what_they_hold(
    sizes: Values, tile_m: int, tile_n: int, padded: tuple[int, int], parts: int
) -> None:
    heads_kv = sizes.get("heads_kv", 2)
    plan, _ = plan_of(problem_of(3, 200, 300, **({"heads_q": 6, "heads_kv": 2} | sizes), **EVERYTHING))
    rows, keys = 256, -(-300 // tile_n) * tile_n  # filled up to tiles
    assert plan.lse_log2.size == plan.delta.size == 4 * 3 * 6 * rows
    of_gradients = {x.name: x.sums.size for x in plan.roundings}
    assert of_gradients.pop("dq") == 4 * 3 * 6 * rows * padded[0]
    in_parts = {
        f"d{name}": 4 * parts * 3 * heads_kv * keys * head_dim for name, head_dim in zip("kv", padded, strict=True)
    }
    assert of_gradients == (in_parts if parts > 1 else {})
    assert plan.turns is not None
    assert plan.turns.size == 4 * 3 * 6 * (rows // 64) * (padded[0] // 32)
    assert plan.dsink is not None
    assert plan.dsink.size == 4 * 3 * 6 * (rows // ROWS)


@pytest.mark.parametrize("row", [row for row in BWD_CANDIDATES if row.deterministic], ids=lambda row: row.reason)
def test_every_part_of_dq_has_a_counter(row: BwdCandidate) -> None:
    """A part without one would wait for ever. The kernel checks that none is smaller than what has one here."""
    assert "static_assert(DqPart<S>::columns >= 32," in read("hopper/bwd/storage.cuh")
    options: Values = {"softcap": 5.0 if row.softcap else None, "window_size": (30, None), "deterministic": True}
    options |= {"bias": "qk"} if row.bias_bytes == 4 else {}
    sizes = {"head_dim": row.head_dim, "head_dim_v": row.head_dim_v, "heads_q": 3, "heads_kv": 3}
    problem = problem_of(2, 200, 300, **sizes, **options)
    assert select_backward(problem, H200).candidate == row
    fields, (plan, _) = packed_of(problem), plan_of(problem)
    counters = fields["PreprocessParams"]["turns_head"]  # which it sets to zero
    assert counters * 64 * 32 == fields["BwdParams"]["tiles_m"] * row.tile_m * row.head_dim
    assert plan.turns is not None
    assert plan.turns.size == 4 * 2 * 3 * counters


def test_tensor_maps() -> None:
    maps = maps_of(problem_of(7, 200, 300, heads_q=30, heads_kv=10, head_dim=128, head_dim_v=40))
    assert maps["q"].shape == (128, 200, 30, 7)
    assert maps["q"].strides == (2 * 30 * 128, 2 * 128, 2 * 200 * 30 * 128)
    assert maps["dout"].shape == (40, 200, 30, 7)
    assert maps["k"].shape == maps["dk"].shape == (128, 300, 10, 7)
    assert maps["v"].shape == maps["dv"].shape == (40, 300, 10, 7)
    assert maps["v"].strides == (2 * 10 * 40, 2 * 40, 2 * 300 * 10 * 40)
    assert {x.swizzle for x in maps.values()} == {128}


@pytest.mark.parametrize(
    ("options", "queries", "keys"),
    [
        ({"head_dim": 64}, 128, 128),
        ({"head_dim": 128}, 64, 128),
        ({"head_dim": 256}, 64, 64),
        ({"head_dim": 128, "softcap": 5.0}, 128, 64),
    ],
    ids=str,
)
def test_boxes_of_tensor_maps_are_tiles(options: Values, queries: int, keys: int) -> None:
    maps = maps_of(problem_of(3, heads_q=4, heads_kv=4, **options))
    boxes = {"q": queries, "dout": queries, "k": keys, "v": keys, "dk": 64, "dv": 64}
    assert {name: x.box for name, x in maps.items()} == {name: (64, rows) for name, rows in boxes.items()}


def test_gradients_in_parts_have_no_tensor_maps() -> None:
    assert {*maps_of(PROBLEM)} == {"q", "k", "v", "dout"}
    fields = packed_of(PROBLEM)["BwdParams"]
    assert fields["dk"] == fields["dv"] == (0,) * 16


def maps_of(problem: BackwardProblem) -> dict[str, TensorMapGeometry]:
    plan, _ = plan_of(problem)
    return {name: x for name, x in zip(MAPS, plan.maps, strict=True) if x is not None}


def test_a_stride_of_an_axis_with_one_index_is_none() -> None:
    one = problem_of(1, 5, 7, heads_q=1, heads_kv=1, strides={"q": (2, 256, 6, 2), "dk": (0, 256, -6, 2)})
    _, copies = plan_of(one)
    assert copies == ()
    maps = maps_of(one)
    assert (maps["q"].strides, maps["dk"].strides) == ((256, 16, 16), (256, 16, 16))


@pytest.mark.parametrize(("problem", "heads_kv", "parts"), [(WHOLE, 6, 1), (PROBLEM, 2, 3)], ids=["whole", "parts"])
def test_fields_of_the_main_kernel(problem: BackwardProblem, heads_kv: int, parts: int) -> None:
    fields = packed_of(problem)["BwdParams"]
    plan, _ = plan_of(problem)
    for name, geometry in maps_of(problem).items():
        assert fields[name] == struct.unpack("<16Q", encode(geometry, getattr(AT, name)))
    assert (fields["lse_log2"], fields["delta"]) == (WORKSPACE, WORKSPACE + plan.delta.begin)
    sums = {x.name: WORKSPACE + x.sums.begin for x in plan.roundings}
    assert (fields["dq"], fields["turns"], fields["alibi_slopes"]) == (sums["dq"], 0, 0)
    assert (fields["dk_parts"], fields["dv_parts"]) == (sums.get("dk", 0), sums.get("dv", 0))
    assert len({*sums.values()}) == (3 if parts > 1 else 1)
    assert fields["scale"] == np.float32(128**-0.5)
    assert fields["scale_log2"] == np.float32(128**-0.5 * math.log2(math.e))
    assert (fields["softcap_slope"], fields["softcap_log2"]) == (0, 0)
    assert (fields["seqlen_q"], fields["seqlen_k"]) == (200, 300)
    assert (fields["last_diagonal"], fields["first_diagonal"]) == (100, 0)
    assert (fields["heads_q"], fields["heads_kv"], fields["heads_per_kv"]) == (6, heads_kv, 6 // heads_kv)
    assert (fields["heads_per_part"], fields["parts"]) == (1, parts)
    assert (fields["tiles_m"], fields["tiles_n"]) == (4, 3)


def test_fields_of_parts() -> None:
    """The last part has what is left of the query heads."""
    fields = packed_of(problem_of(11, 64, 384, heads_q=10, heads_kv=2))["BwdParams"]
    assert (fields["heads_per_kv"], fields["heads_per_part"], fields["parts"]) == (5, 3, 2)
    assert fields["tiles_n"] == 3


def test_fields_of_options() -> None:
    problem = problem_of(2, 200, 300, softcap=5.0, softmax_scale=-0.25, window_size=(9, 30), **EVERYTHING)
    packed = packed_of(problem)
    main, before = packed["BwdParams"], packed["PreprocessParams"]
    plan, _ = plan_of(problem)
    log2_e = math.log2(math.e)
    assert main["scale"] == packed["dq"]["scale"] == packed["dk"]["scale"] == -0.25
    assert packed["dv"]["scale"] == 1
    assert main["scale_log2"] == np.float32(2 * 5 * log2_e)
    assert main["softcap_slope"] == np.float32(2 * log2_e * -0.25 / 5)
    assert main["softcap_log2"] == np.float32(5 * log2_e)
    assert (main["logit_scale"], main["softcap"], before["lse_factor"]) == (10, 5, np.float32(log2_e))
    assert main["bias_strides"] == (0, 0, 0, 0)
    assert (main["last_diagonal"], main["first_diagonal"]) == (130, 91)
    assert (main["alibi_slopes"], main["alibi_stride_batch"], main["alibi_stride_head"]) == (AT.alibi_slopes, 0, 1)
    assert plan.turns is not None
    assert main["turns"] == before["turns"] == WORKSPACE + plan.turns.begin
    assert before["turns_head"] == 4 * 4  # of a tile of 64 queries, one for 32 columns of 128
    assert (before["dlse"], before["dlse_strides"]) == (AT.dlse, (4 * 200, 1, 200, 0))
    assert (before["sink"], before["sink_stride"]) == (AT.sink, 1)
    assert plan.dsink is not None
    sum_of_sink = packed["SinkParams"]
    assert before["dsink"] == sum_of_sink["parts"] == WORKSPACE + plan.dsink.begin
    assert (sum_of_sink["dsink"], sum_of_sink["dsink_stride"]) == (AT.dsink, 1)
    assert (sum_of_sink["batch"], sum_of_sink["parts_head"]) == (2, 4)


def test_fields_of_the_kernels_around_it() -> None:
    packed = packed_of(PROBLEM)
    plan, _ = plan_of(PROBLEM)
    before, after = packed["PreprocessParams"], packed["dq"]
    sums = {x.name: WORKSPACE + x.sums.begin for x in plan.roundings}
    assert (before["out"], before["dout"], before["lse"], before["dlse"]) == (AT.out, AT.dout, AT.lse, 0)
    assert before["out_strides"] == before["dout_strides"] == (200 * 6 * 40, 6 * 40, 40, 1)
    assert before["lse_strides"] == (6 * 200, 1, 200, 0)
    assert (before["sink"], before["dsink"], before["turns"]) == (0, 0, 0)
    assert (before["lse_log2"], before["delta"]) == (WORKSPACE, WORKSPACE + plan.delta.begin)
    assert before["dq"] == after["sums"] == sums["dq"]
    assert (before["seqlen_q"], before["rows"], before["head_dim_v"], before["heads_q"]) == (200, 256, 40, 6)
    assert before["dq_head"] == 256 * 128
    assert (after["out"], after["out_strides"]) == (AT.dq, (200 * 6 * 128, 6 * 128, 128, 1))
    assert (after["seqlen"], after["head_dim"], after["heads"], after["tiles"]) == (200, 128, 6, 4)
    assert (after["parts"], after["scale"]) == (1, np.float32(128**-0.5))
    assert (before["vectors"], after["vectors"]) == (1, 1)
    for name, columns, padded, scale in (("dk", 128, 128, np.float32(128**-0.5)), ("dv", 40, 64, 1)):
        after = packed[name]
        assert (after["sums"], after["out"]) == (sums[name], getattr(AT, name))
        assert after["out_strides"] == (300 * 2 * columns, 2 * columns, columns, 1)
        assert (after["seqlen"], after["head_dim"], after["heads"], after["tiles"]) == (300, columns, 2, 3)
        # (parts, batch, heads, tiles, rows of a tile, columns)
        assert (after["parts"], after["part_stride"]) == (3, 3 * 2 * 3 * 128 * padded)
        assert (after["scale"], after["vectors"]) == (scale, 1)


@pytest.mark.parametrize(
    ("name", "strides"),
    [
        ("out", (4 * 200 * 128 * 2, 4 * 128 * 2, 130 * 2, 2)),
        ("dout", (4 * 201 * 128 * 2, 4 * 128 * 2 + 8, 128 * 2, 2)),
        ("dq", (4 * 200 * 128 * 2 + 8, 4 * 128 * 2, 128 * 2, 2)),
        ("dq", (4 * 200 * 256 * 2, 4 * 256 * 2, 256 * 2, 4)),
        ("dk", (2 * 300 * 128 * 2 + 8, 2 * 128 * 2, 128 * 2, 2)),
        ("dv", (2 * 300 * 130 * 2, 2 * 130 * 2, 130 * 2, 2)),
        ("dv", (-2 * 300 * 128 * 2, 2 * 128 * 2, 128 * 2, 2)),
    ],
)
def test_rows_are_vectors_where_they_can_be(name: str, strides: tuple[int, ...]) -> None:
    packed = packed_of(problem_of(2, 200, 300, strides={name: strides}))
    vectors = {x: fields["vectors"] for x, fields in packed.items() if "vectors" in fields}
    backwards = name == "dv" and strides[0] < 0  # those are multiples of 16 bytes, too
    slow = {name if name in vectors else "PreprocessParams"} if not backwards else set()
    assert vectors == {x: int(x not in slow) for x in ("PreprocessParams", "dq", "dk", "dv")}


def test_rows_that_begin_anywhere_are_no_vectors() -> None:
    plan, _ = plan_of(PROBLEM)
    for name, expected in (
        ("out", [0, 1, 1, 1]),
        ("dout", [0, 1, 1, 1]),
        ("dq", [1, 0, 1, 1]),
        ("dk", [1, 1, 0, 1]),
        ("dv", [1, 1, 1, 0]),
    ):
        at = AT._replace(**{name: getattr(AT, name) + 2})
        before, _, *after = plan.pack(encode, at, at, WORKSPACE)
        vectors = [unpack(PREPROCESS, before)["vectors"], *(unpack(POSTPROCESS, x)["vectors"] for x in after)]
        assert vectors == expected, name


@pytest.mark.parametrize(
    ("options", "device", "heads"),
    [
        ({}, H200, 1),
        ({"causal": True, "heads_kv": 4}, H200, 12),  # all of them
        ({"causal": True}, H200, 12),  # of each of two parts
        ({"causal": True, "head_dim": 256, "seqlen_k": 64 * 40}, H200, 3),
        ({"causal": True, "seqlen_k": 128 * 40}, H200, 3),
        ({"causal": True, "seqlen_k": 128 * 40}, Device((9, 0), 78, 2**25), 1),
        ({"causal": True, "seqlen_k": 128 * 1000}, H200, 1),
        ({"causal": True, "window_size": (30, None)}, H200, 1),  # tiles are of one length
    ],
    ids=str,
)
def test_heads_of_a_section(options: Values, device: Device, heads: int) -> None:
    fields = packed_of(problem_of(3, **options), device=device)
    assert fields["BwdParams"]["heads_per_section"] == heads


# --- Packed sequences ---

#: 5 sequences in 1000 rows and 700 keys.
PACKED = problem_of(5, 1000, 700, heads_q=6, heads_kv=2, causal=True, packed=True, used=True, **EVERYTHING)


def test_what_a_packed_call_launches() -> None:
    plan, _ = plan_of(PACKED)
    spec = select_backward(PACKED, H200).spec
    assert (spec.tile_m, spec.tile_n, spec.varlen) == (64, 128, True)
    assert plan.specs == (
        PlanSpec(),
        PreprocessSpec(spec.dtype),
        spec,
        PostprocessSpec(dtype=spec.dtype, head_dim=128, tile_m=64),
        SinkSpec(),
    )
    # Whole tiles, and one that is not full for each sequence and for what is before, between and behind them.
    tiles_m, tiles_n = 1000 // 64 + 5 + 2, 700 // 128 + 2 * 5 + 1
    assert [x.grid for x in plan.geometries] == [1, 6 * tiles_m, 2 * tiles_n, 6 * tiles_m, 6]
    assert [x.programmatic for x in plan.geometries] == [False, *[True] * 4]


def test_places_of_packed_sequences() -> None:
    plan, _ = plan_of(PACKED)
    rows = 64 * (1000 // 64 + 5 + 2)
    (dq,) = plan.roundings
    assert plan.planning is not None
    assert plan.plan is not None
    assert plan.turns is not None
    assert plan.dsink is not None
    assert plan.plan.size == plan.planning.plan_bytes >= 32 * (700 // 128 + 2 * 5 + 1)
    assert plan.lse_log2.size == plan.delta.size == 4 * 6 * rows
    assert dq.sums.size == 4 * 6 * rows * 128
    assert plan.turns.size == 4 * 6 * (rows // 64) * 4
    assert plan.dsink.size == 4 * 6 * (rows // ROWS)
    places = sorted((x.begin, x.size) for x in (plan.plan, plan.lse_log2, plan.delta, dq.sums, plan.turns, plan.dsink))
    assert places[0][0] == 0
    for (begin, size), (other, _) in itertools.pairwise(places):
        assert 0 <= other - begin - size < 256
    assert plan.workspace_bytes == sum(places[-1])


def test_fields_of_packed_sequences() -> None:
    packed = packed_of(PACKED)
    plan, _ = plan_of(PACKED)
    main, before, after = packed["BwdParams"], packed["PreprocessParams"], packed["dq"]
    tiles = 1000 // 64 + 5 + 2
    assert plan.plan is not None
    assert {x["plan"] for x in (packed["PlanParams"], before, main, after)} == {WORKSPACE + plan.plan.begin}
    assert (before["cu_seqlens_q"], before["seqused_q"]) == (AT.cu_seqlens_q, AT.seqused_q)
    assert (after["cu_seqlens"], after["seqused"]) == (AT.cu_seqlens_q, AT.seqused_q)
    assert (main["last_diagonal"], main["first_diagonal"]) == (0, 0)  # of equal lengths
    assert (main["tiles_m"], main["heads_per_part"], main["parts"]) == (tiles, 3, 1)
    assert (before["tile_m"], before["rows"], before["seqlen_q"]) == (64, 64 * tiles, 1000)
    assert before["out_strides"][1:] == after["out_strides"][1:] == (6 * 128, 128, 1)
    assert before["lse_strides"][1:] == (1, 1000, 0)
    assert (after["seqlen"], after["tiles"], after["heads"]) == (1000, tiles, 6)
    assert packed["SinkParams"]["batch"] == 1


def test_a_plan_of_key_tiles_takes_keys_for_queries() -> None:
    fields = packed_of(PACKED)["PlanParams"]
    assert (fields["cu_seqlens_q"], fields["cu_seqlens_k"]) == (AT.cu_seqlens_k, AT.cu_seqlens_q)
    assert (fields["seqused_q"], fields["seqused_k"]) == (AT.seqused_k, AT.seqused_q)
    assert (fields["sequences"], fields["total_q"], fields["total_k"]) == (5, 700, 1000)
    assert (fields["tile_m"], fields["tile_n"], fields["heads_q"], fields["heads_per_kv"]) == (128, 64, 2, 1)
    assert (fields["tiles_grow"], fields["longest_first"]) == (1, 1)
    of_row = 3 * (2 * 128 + 2 * 128 + 4 * 128)  # of Q, dO and the sum of dQ, of three heads
    assert fields["keys_in_l2"] == H200.l2_bytes // 2 // of_row
    window = packed_of(problem_of(5, 1000, 700, window_size=(20, 9), packed=True))["PlanParams"]
    assert (window["window"], window["tiles_grow"]) == (30, 0)
    assert (window["seqused_q"], window["seqused_k"]) == (0, 0)


def test_tensor_maps_of_packed_sequences_have_their_ends() -> None:
    maps = maps_of(PACKED)
    assert {*maps} == {*MAPS} - {"bias"}
    for name, x in maps.items():
        total, heads = (1000, 6) if name in ("q", "dout") else (700, 2)
        row = 2 * heads * 128
        assert x.shape == (128, 2**30, heads, total + 1, 2**30 + 1)
        assert x.strides == (row, 2 * 128, row, 2**34 - row)
        assert x.box == (64, {"q": 64, "dout": 64, "k": 128, "v": 128}.get(name, 64))


def test_too_many_rows_of_packed_sequences_are_refused() -> None:
    rows = 64 * (2**20 // 64 + 2**26 + 2)
    message = (
        rf"^attention: {2**26} packed sequences of {2**20} rows are {rows} rows in tiles of their own; at most "
        rf"{2**31 - 1} are supported: make several calls$"
    )
    with pytest.raises(UnsupportedError, match=message):
        plan_of(problem_of(2**26, 2**20, 5, packed=True))


# --- Copies ---


def test_what_tma_takes_is_copied_where_it_must_be() -> None:
    """Of the others, threads read and write every element where it is."""
    _, copies = plan_of(WHOLE, "dout", "q", "k", "v", "out", "dq", "dk", "dv")
    assert [copy.name for copy in copies] == ["dout", "q", "k", "v", "dk", "dv"]
    packed = packed_of(WHOLE, "k", "dv", "dout")
    main = packed["BwdParams"]
    at = {name: main[name][0] for name in MAPS[:6]}
    expected = {name: getattr(COPIES if name in ("k", "dv", "dout") else AT, name) for name in at}
    assert at == expected
    assert packed["PreprocessParams"]["dout"] == AT.dout


def test_gradients_in_parts_are_written_where_they_are() -> None:
    """A copy of them would be written over them afterwards."""
    _, copies = plan_of(PROBLEM, "dout", "q", "k", "v", "out", "dq", "dk", "dv")
    assert [copy.name for copy in copies] == ["dout", "q", "k", "v"]
    packed = packed_of(PROBLEM, "dk", "dv")
    assert {name: packed[name]["out"] for name in ("dq", "dk", "dv")} == {"dq": AT.dq, "dk": AT.dk, "dv": AT.dv}


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("heads_q", [2, 4])
def test_matrices_that_run_backwards_are_copied(axis: int, heads_q: int) -> None:
    strides = [2 * 300 * 2 * 128, 2 * 2 * 128, 2 * 128, 2]
    strides[axis] = -strides[axis]
    turned = {"k": tuple(strides), "dv": tuple(strides)}
    plan, copies = plan_of(problem_of(3, heads_q=heads_q, strides=turned))
    assert [copy.name for copy in copies] == (["k", "dv"] if heads_q == 2 else ["k"])  # threads write parts
    expected, _ = plan_of(problem_of(3, heads_q=heads_q))
    assert [x and encode(x, 0) for x in plan.maps] == [x and encode(x, 0) for x in expected.maps]  # those of copies
    assert plan.workspace_bytes - expected.workspace_bytes == -(-copies[-1].end // 256) * 256


# --- A bias ---

#: The axes that it has, how kernels take it, and how many CTAs compute its gradient, of 4 x 3 tiles a head.
BIASES = [
    ("bhqk", Bias.TILE, 3 * 6 * 12),
    ("hqk", Bias.TILE, 6 * 12),
    ("bqk", Bias.TILE, 3 * 12),
    ("qk", Bias.TILE, 12),
    ("bhk", Bias.ROW, 3 * 6 * 3),
    ("k", Bias.ROW, 3),
    ("bhq", Bias.COLUMN, 3 * 6 * 4),
    ("q", Bias.COLUMN, 4),
    ("h", Bias.COLUMN, 6),
]


@pytest.mark.parametrize(("axes", "kind", "ctas"), BIASES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_a_call_with_a_bias_launches(axes: str, kind: Bias, ctas: int, head_dim: int) -> None:
    problem = problem_of(3, 200, 300, heads_q=6, heads_kv=6, head_dim=head_dim, bias=axes, sink=True)
    plan, copies = plan_of(problem)
    spec = plan.specs[1]
    assert isinstance(spec, BwdSpec)
    assert (spec.bias, spec.bias_float32, copies) == (kind, True, ())
    assert plan.specs[-1] == BiasGradientSpec(
        dtype=spec.dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        stages={64: 3, 128: 2, 256: 1}[head_dim],
        causal=False,
        window=False,
        softcap=False,
        alibi=False,
        bias=kind,
        bias_float32=True,
    )
    assert plan.geometries[-1].grid == ctas
    assert [x.programmatic for x in plan.geometries] == [False, *[True] * 4]
    # What the first kernel leaves of a column is beside the lse of its rows.
    assert (plan.bias_rows is None) == (kind is not Bias.COLUMN)
    if plan.bias_rows is not None:
        assert plan.bias_rows.size == plan.lse_log2.size
        assert plan.delta.begin + plan.delta.size <= plan.bias_rows.begin


@pytest.mark.parametrize(("axes", "kind", "_"), BIASES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_fields_of_a_bias(axes: str, kind: Bias, _: int, head_dim: int) -> None:
    problem = problem_of(
        3, 200, 300, heads_q=6, heads_kv=6, head_dim=head_dim, bias=axes, softcap=5.0, causal=True, alibi=True
    )
    packed, (plan, _) = packed_of(problem), plan_of(problem)
    before, main, after = (packed[name] for name in ("PreprocessParams", "BwdParams", "BiasGradientParams"))
    sizes = {"b": 3, "h": 6, "q": 200, "k": 300}
    dense = {axis: math.prod(sizes[x] for x in axes[i + 1 :]) for i, axis in enumerate(axes)}
    strides = tuple(dense.get(axis, 0) for axis in "bqhk")
    assert before["bias_strides"] == main["bias_strides"] == after["strides"] == strides
    assert (before["lse_factor"], before["bias_float32"]) == (1, 1)
    assert (main["logit_scale"], main["softcap"]) == (10, 5)
    rows = 0 if plan.bias_rows is None else WORKSPACE + plan.bias_rows.begin
    assert (before["bias"], before["bias_rows"], main["bias_rows"]) == (AT.bias if rows else 0, rows, rows)
    assert main["bias_data"] == AT.bias
    assert after["dbias"] == AT.dbias
    assert tuple(after[x] for x in ("batches", "heads", "rows", "keys")) == tuple(
        sizes[x] if x in axes else 1 for x in "bhqk"
    )
    assert after["batch"] == 3
    scores = unpack(BWD, struct.pack(f"<{BIAS_GRADIENT['scores']}", *after["scores"]))
    tiles = {"tiles_m": 4, "tiles_n": 3, "heads_per_part": 1, "parts": 1, "heads_per_section": 1}
    own = {*tiles, *MAPS}
    assert {x: scores[x] for x in tiles} == tiles
    assert {x: y for x, y in scores.items() if x not in own} == {x: y for x, y in main.items() if x not in own}
    for name, rows_of_box in (("q", 64), ("dout", 64), ("k", 128), ("v", 128)):
        geometry = next(x for n, x in zip(MAPS, plan.maps, strict=True) if n == name)
        assert geometry is not None
        box = TensorMapGeometry(geometry.dtype, geometry.shape, geometry.strides, (64, rows_of_box))
        assert scores[name] == struct.unpack("<16Q", encode(box, getattr(AT, name)))
    assert scores["dk"] == scores["dv"] == (0,) * 16
    if kind is not Bias.TILE:
        assert main["bias"] == scores["bias"] == (0,) * 16


def test_rows_of_a_bias_are_counted_in_tiles_of_its_kernel() -> None:
    """The other one has 128 queries a step, and fills heads up to multiples of that."""
    problem = problem_of(3, 200, 300, heads_q=6, heads_kv=6, head_dim=64, bias="k")
    packed = packed_of(problem)
    assert (packed["BwdParams"]["tiles_m"], packed["PreprocessParams"]["rows"]) == (2, 256)
    assert (
        unpack(BWD, struct.pack(f"<{BIAS_GRADIENT['scores']}", *packed["BiasGradientParams"]["scores"]))["tiles_m"] == 4
    )


@pytest.mark.parametrize(("dtype", "cols"), [(np.float32, 32), (ml_dtypes.bfloat16, 64)])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_the_tensor_map_of_a_bias(dtype: Any, cols: int, head_dim: int) -> None:
    size = np.dtype(dtype).itemsize
    problem = problem_of(7, 200, 304, heads_q=30, heads_kv=10, head_dim=head_dim, bias="hqk", bias_dtype=dtype)
    bias = maps_of(problem)["bias"]
    assert bias.dtype == np.dtype(dtype).name
    assert bias.shape == (304, 200, 30, 1)
    assert bias.strides == (304 * size, 200 * 304 * size, 16)
    assert (bias.box, bias.swizzle) == ((cols, 64), 128)
    plan, _ = plan_of(problem)
    assert plan.dbias is not None
    of_gradient = plan.dbias.maps[MAPS.index("bias")]
    assert of_gradient is not None
    assert encode(of_gradient, 0) == encode(bias, 0)


@pytest.mark.parametrize(
    ("strides", "aligned", "copied"),
    [
        (None, True, False),
        (None, False, True),
        ((200 * 304 * 4, 304 * 4, -4), True, True),
        ((200 * 305 * 4, 305 * 4, 4), True, True),  # rows that do not begin at multiples of 16 bytes
        ((200 * 304 * 8, 304 * 8, 8), True, True),
        ((0, 304 * 4, 4), True, False),
        ((0, 304 * 8, 8), True, True),
        ((304 * 4, 0, -4), False, False),  # threads load a row, and a column, wherever it is
        ((8, 24, 0), False, False),
    ],
    ids=str,
)
def test_a_bias_that_tma_cannot_take_is_copied(strides: tuple[int, ...] | None, aligned: bool, copied: bool) -> None:
    sizes = {"heads_q": 6, "heads_kv": 6, "bias": "hqk", "bias_aligned": aligned}
    problem = problem_of(3, 200, 304, **sizes, strides={} if strides is None else {"bias": strides})
    plan, copies = plan_of(problem)
    assert [copy.name for copy in copies] == ["bias"] * copied
    if not copied:
        return
    (copy,) = copies
    own = strides is None or strides[0] != 0
    assert copy.shape == (1, 6 if own else 1, 200, 304)
    assert copy.operand.strides == (0, 200 * 304 * 4 if own else 0, 304 * 4, 4)
    assert copy.begin == 0
    assert copy.end <= plan.lse_log2.begin
    fields = packed_of(problem)
    assert fields["BwdParams"]["bias"][0] == COPIES.bias
    _, copies = plan_of(problem, "k", "q")
    assert [copy.name for copy in copies] == ["q", "k", "bias"]  # behind those of matrices
    assert all(x.end <= y.begin < x.end + 256 for x, y in itertools.pairwise(copies))


@pytest.mark.parametrize("shape", [(3, 6, 20, 30), (6, 20, 30), (20, 30), (3, 1, 20, 30), (1, 1, 20, 30)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_copy_of_a_bias_has_its_values(shape: tuple[int, ...], dtype: Any) -> None:
    """Rows are filled up to multiples of 16 bytes; a view that repeats is not repeated."""
    whole = np.arange(math.prod(shape), dtype=dtype).reshape(shape)
    for bias in (whole, np.broadcast_to(whole[:1], shape)) if len(shape) > 2 else (whole,):
        problem = problem_of(3, 20, 30, heads_q=6, heads_kv=6, dtype=np.float16)
        full = np.broadcast_to(bias, (3, 6, 20, 30))
        strides = tuple(
            0 if n == 1 else s for n, s in zip((1,) * (4 - bias.ndim) + bias.shape, full.strides, strict=True)
        )
        operand = Operand("bias", full.shape, strides, bias.dtype, 0)
        problem = dataclasses.replace(problem, forward=dataclasses.replace(problem.forward, bias=operand))
        copy = bias_copy(problem, 100)
        assert copy is not None
        assert copy.begin == 256
        assert copy.shape[2:] == (20, 32)
        memory = np.zeros(copy.size, np.uint8)
        copy.read(bias, memory)
        got = np.lib.stride_tricks.as_strided(memory.view(dtype), (3, 6, 20, 30), copy.operand.strides)
        np.testing.assert_array_equal(got, full)


# --- Limits ---


@pytest.mark.parametrize("sizes", [(2**20, 64, 64, 2**11, 64), (2**20, 1, 2**18, 64, 64)], ids=str)
def test_too_many_ctas_are_refused(sizes: tuple[int, ...]) -> None:
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = sizes
    problem = problem_of(batch, seqlen_q, seqlen_k, heads_q=heads_q, heads_kv=heads_kv, head_dim=64)
    most = batch * max(heads_q * 2, heads_kv * -(-seqlen_k // 128))
    message = (
        rf"^attention: batch {batch} with {heads_q} heads, seqlen_q {seqlen_q} and seqlen_k {seqlen_k} makes {most} "
        rf"CTAs; at most {2**31 - 1} are supported: split the batch$"
    )
    with pytest.raises(UnsupportedError, match=message):
        plan_of(problem)


def test_more_heads_than_a_grid_has_rows() -> None:
    plan, _ = plan_of(problem_of(65_537, 1, 2, heads_q=4, heads_kv=2, head_dim=64))
    assert [x.grid for x in plan.geometries] == [65_537 * 4 * 2, 65_537 * 2, 65_537 * 4]


def test_specs_say_what_they_are() -> None:
    spec = select_backward(problem_of(head_dim=192, head_dim_v=64, softcap=2.0, **EVERYTHING), H200).spec
    assert isinstance(spec, BwdSpec)
    assert str(spec) == (
        "backward sm_90a bfloat16 d192/64 64x64 stages 2, 1 softcap alibi partial deterministic setmaxnreg"
    )
    for field in ("causal", "partial"):
        assert dataclasses.replace(spec, **{field: not getattr(spec, field)}) != spec
    packed = dataclasses.replace(spec, varlen=True)
    assert str(packed) == str(spec).replace("softcap", "varlen softcap")
    problem = problem_of(head_dim_v=64, sink=True)
    names = [x.name_expression for x in backward_specs(problem, select_backward(problem, H200))]
    assert len({*names}) == len(names) == 6
