"""The compile key: cupyfa/spec.py says what cuda/spec.cuh says, and each field counts."""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from problems import make_problem

from cupyfa.compiler import compile_key
from cupyfa.select import H200, select
from cupyfa.sources import read
from cupyfa.spec import AppendSpec, Bias, CombineSpec, DecodeSpec, DType, FwdSpec, Scheduler

SPEC = FwdSpec(
    dtype=DType.BFLOAT16,
    head_dim=128,
    head_dim_v=128,
    tile_m=128,
    tile_n=128,
    stages=2,
    q_stages=2,
    varlen=False,
    causal=False,
    window=False,
    sink=False,
    softcap=False,
    alibi=False,
    bias=Bias.NONE,
    bias_float32=False,
    bias_stages=0,
    negate_scores=False,
    overlap=True,
    three_stage=False,
    speculative=True,
    rescale_threshold=0,
    exp2_fma=0,
    pingpong=True,
    warp_specialized=True,
    scheduler=Scheduler.PERSISTENT,
    longest_first=True,
    setmaxnreg=True,
)
DECODE = DecodeSpec(
    dtype=DType.BFLOAT16,
    head_dim=128,
    head_dim_v=128,
    tile_m=64,
    tile_n=64,
    stages=6,
    key_groups=2,
    residents=1,
    softcap=False,
    alibi=False,
)
BF16 = np.dtype(ml_dtypes.bfloat16)


def another(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        return next(member for member in type(value) if member is not value)
    return value + 64


@pytest.mark.parametrize(
    ("spec", "name"), [(spec, field.name) for spec in (SPEC, DECODE) for field in dataclasses.fields(spec)]
)
def test_each_field_is_part_of_the_key(spec: FwdSpec | DecodeSpec, name: str) -> None:
    changed = dataclasses.replace(spec, **{name: another(getattr(spec, name))})
    assert changed != spec
    assert compile_key(changed) != compile_key(spec)
    assert changed.name_expression != spec.name_expression
    assert changed.traits_expression != spec.traits_expression
    assert str(changed) != str(spec)


def test_kernels_of_one_field_have_one_key_each() -> None:
    keys = {compile_key(kind(dtype)) for kind in (AppendSpec, CombineSpec) for dtype in DType}
    assert len(keys) == 4
    assert {key[0] for key in keys} >= {"cupyfa::append_kv<cupyfa::DType::bfloat16>"}


def test_short_form_names_another_head_dim_of_v() -> None:
    assert " d128/64 " in str(dataclasses.replace(SPEC, head_dim_v=64))


def test_equal_specs_have_equal_keys() -> None:
    twin = dataclasses.replace(SPEC)
    assert twin == SPEC
    assert hash(twin) == hash(SPEC)
    assert compile_key(twin) == compile_key(SPEC)


def test_key_holds_name_options_and_source() -> None:
    key = compile_key(SPEC)
    assert key[0] == SPEC.name_expression
    assert "-arch=sm_90a" in key
    assert key[-1].startswith('#line 1 "cuda/hopper/fwd.cu"')


def test_name_expression_is_the_cpp_designated_initialiser() -> None:
    assert SPEC.template_argument == (
        "cupyfa::FwdSpec{.dtype=cupyfa::DType::bfloat16, .head_dim=128, .head_dim_v=128, .tile_m=128, .tile_n=128, "
        ".stages=2, .q_stages=2, .varlen=false, .causal=false, .window=false, .sink=false, .softcap=false, "
        ".alibi=false, .bias=cupyfa::Bias::none, .bias_float32=false, .bias_stages=0, "
        ".negate_scores=false, .overlap=true, .three_stage=false, .speculative=true, .rescale_threshold=0, "
        ".exp2_fma=0, .pingpong=true, .warp_specialized=true, .scheduler=cupyfa::Scheduler::persistent, "
        ".longest_first=true, .setmaxnreg=true}"
    )
    assert SPEC.name_expression == f"cupyfa::hopper::forward<{SPEC.template_argument}>"
    assert SPEC.traits_expression == f"cupyfa::hopper::forward_traits<{SPEC.template_argument}>"


def test_short_form() -> None:
    assert str(SPEC) == (
        "forward sm_90a bfloat16 d128 128x128 stages 2 q_stages 2 persistent overlap speculative pingpong setmaxnreg"
    )
    assert str(dataclasses.replace(SPEC, warp_specialized=False)) == f"{SPEC} not warp_specialized"
    names = ("varlen", "causal", "window", "sink", "softcap", "alibi", "bias_float32", "negate_scores")
    for name in names:
        assert f" persistent {name} overlap " in str(dataclasses.replace(SPEC, **{name: True}))
    every = dataclasses.replace(SPEC, **dict.fromkeys(names, True))
    assert f" persistent {' '.join(names)} overlap " in str(every)
    assert str(dataclasses.replace(SPEC, bias=Bias.GATHER)) == f"{SPEC} bias gather"


# --- The mirror ---

HEADER = re.sub(r"//[^\n]*", "", read("spec.cuh"))


@pytest.mark.parametrize("spec", [FwdSpec, DecodeSpec])
def test_fields_and_their_order_are_those_of_the_header(spec: type[FwdSpec | DecodeSpec]) -> None:
    body = re.search(rf"struct {spec.__name__} \{{(.*?)\n\}};", HEADER, re.DOTALL)
    assert body is not None
    in_header = re.findall(r"^  (\w+) (\w+);", body[1], re.MULTILINE)
    assert in_header == [(str(field.type), field.name) for field in dataclasses.fields(spec)]


def test_the_key_of_a_decode_kernel() -> None:
    argument = (
        "cupyfa::DecodeSpec{.dtype=cupyfa::DType::bfloat16, .head_dim=128, .head_dim_v=128, .tile_m=64, .tile_n=64, "
        ".stages=6, .key_groups=2, .residents=1, .softcap=false, .alibi=false}"
    )
    assert DECODE.name_expression == f"cupyfa::hopper::decode_attention<{argument}>"
    assert DECODE.traits_expression == f"cupyfa::hopper::decode_traits<{argument}>"
    assert str(DECODE) == "decode sm_90a bfloat16 d128 64x64 stages 6 key_groups 2 residents 1"
    assert str(dataclasses.replace(DECODE, head_dim_v=64, softcap=True, alibi=True)) == (
        "decode sm_90a bfloat16 d128/64 64x64 stages 6 key_groups 2 residents 1 softcap alibi"
    )


@pytest.mark.parametrize("kind", [Bias, DType, Scheduler])
def test_enumerators_are_those_of_the_header(kind: type[enum.Enum]) -> None:
    body = re.search(rf"enum class {kind.__name__} : int \{{(.*?)\}}", HEADER, re.DOTALL)
    assert body is not None
    assert [name.strip() for name in body[1].split(",") if name.strip()] == [member.value for member in kind]


# --- What is data, and what is not ---


def key_of(**changes: Any) -> tuple[str, ...]:
    return compile_key(select(make_problem(**{"head_dim": 128} | changes), H200).spec)


@pytest.mark.parametrize(
    "data",
    [
        {"batch": 70_000},
        {"seqlen_q": 1},
        {"seqlen_k": 8193},
        {"heads_q": 96},
        {"heads_kv": 1},
        {"head_dim": 120},
        {"scale": 0.0},
        {"scale": 3.5},
        {"window_size": (499, None)},
        {"window_size": (None, 299)},
        {"padding": 8},
        {"want_lse": False},
        {"layout": "BHSD"},
    ],
    ids=str,
)
def test_run_time_data_is_not_part_of_the_key(data: dict[str, Any]) -> None:
    assert key_of(**data) == key_of()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"window_size": (1, None)}, {"window_size": (498, None)}),
        ({"causal": True}, {"window_size": (None, 7)}),
        ({"causal": True, "window_size": (128, None)}, {"window_size": (200, 200)}),
        ({"softcap": 50.0}, {"softcap": 1e-3}),
        ({"bias": (300, 500)}, {"bias": (2, 6, 300, 500)}),
        ({"bias": (300, 1)}, {"bias": (2, 1, 1, 1)}),
    ],
    ids=str,
)
def test_how_wide_a_window_and_how_high_a_cap_are_is_data(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert key_of(**one) == key_of(**two) != key_of()


CODE: list[dict[str, Any]] = [
    {"scale": -0.5},
    {"causal": True},
    {"window_size": (64, None)},
    {"window_size": (64, 64)},
    {"softcap": 50.0},
    {"sink": True},
    {"alibi": True},
    {"bias": (300, 500)},
    {"bias": (300, 504), "seqlen_k": 504, "bias_dtype": np.float16},
    {"bias": (1, 500)},
    {"bias": (300, 501), "seqlen_k": 501},
    {"dtype": BF16},
    {"head_dim": 64},
    {"head_dim": 136},
]


def test_what_changes_instructions_is() -> None:
    assert len({key_of(**code) for code in [{}, *CODE]}) == len(CODE) + 1
