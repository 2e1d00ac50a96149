"""What the compiler makes of every candidate, without a GPU: no spills, no serialised WGMMA, the right registers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from nvrtc_tools import compile_ptx, import_nvrtc
from problems import make_problem
from sampling import sample
from test_backward_select import problem_of as problem_of_gradients
from test_decode_select import problem_of as problem_of_cache
from test_spec import SPEC

import cupyfa  # registers bfloat16 with NumPy, through ml_dtypes
from cupyfa import compiler
from cupyfa._launch import unpack_traits
from cupyfa.backward_select import BWD_CANDIDATES, BwdCandidate, bias_gradient_spec, select_backward
from cupyfa.compiler import CUPY_OPTIONS, Compiled, PtxasReport, check_versions, compile_offline, first_error, options
from cupyfa.decode_select import select_decode
from cupyfa.select import CANDIDATES, H200, Candidate, select
from cupyfa.sources import amalgamate
from cupyfa.spec import (
    AppendSpec,
    Bias,
    BiasGradientSpec,
    BwdSpec,
    CombineSpec,
    DecodeSpec,
    DType,
    FwdSpec,
    PostprocessSpec,
    PreprocessSpec,
    Scheduler,
    SinkSpec,
    Spec,
)

SHARED_BYTES = 227 * 1024
REGISTERS = 65_536


def spec_of(row: Candidate, *, dtype: DType, causal: bool, negate_scores: bool = False, **config: Any) -> FwdSpec:
    problem = make_problem(
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        seqlen_q=1,
        dtype=np.dtype(dtype.value),
        causal=causal,
        scale=-1.0 if negate_scores else 1.0,
    )
    return dataclasses.replace(row.spec(problem), **config)


#: Rows of problems without a bias.
UNBIASED = [row for row in CANDIDATES if "no bias" in row.bias]
#: Rows that problems without options take. Beside them, kernels for comparisons are compiled.
PLAIN = [
    row
    for i, row in enumerate(CANDIDATES)
    if any(
        select(make_problem(head_dim=row.head_dim, head_dim_v=row.head_dim_v, seqlen_q=n), H200).verdicts[i].chosen
        for n in (1, 2048)
    )
]
WIDE = next(row for row in PLAIN if row.head_dim == 128)
TABLE = [
    spec_of(row, dtype=dtype, causal=causal, negate_scores=negate)
    for row, causal in itertools.product(UNBIASED, (False, True))
    for dtype, negate in ((DType.FLOAT16, False), (DType.BFLOAT16, False), (DType.BFLOAT16, True))
]
#: head_dims that are not the largest of their row.
PADDED = [
    dataclasses.replace(spec_of(row, dtype=DType.BFLOAT16, causal=True), head_dim=row.head_dim - 32, head_dim_v=columns)
    for row in UNBIASED
    for columns in {row.head_dim_v, row.head_dim_v - 32}
]
#: Beside it, what the kernel without a producer needs.
UNSPECIALIZED: dict[str, Any] = {
    "warp_specialized": False,
    "q_stages": 1,
    "pingpong": False,
    "scheduler": Scheduler.ONE_TILE,
    "setmaxnreg": False,
}
SWITCHES: list[dict[str, Any]] = [
    {"overlap": False, "speculative": False},
    {"speculative": False},
    {"speculative": False, "rescale_threshold": 8},
    {"exp2_fma": 2},
    {"pingpong": True},
    {"scheduler": Scheduler.ONE_TILE},
    {"longest_first": False},
    {"scheduler": Scheduler.PERSISTENT},
    {"tile_m": 64, "setmaxnreg": False, "pingpong": False},
]
SWITCHED = [
    spec_of(row, dtype=DType.BFLOAT16, causal=causal, **switch)
    for (row, switch), causal in zip(itertools.product(PLAIN, SWITCHES), itertools.cycle((False, True)))
]
#: Causal or not, speculative or not, of either type one of two: they have the same registers.
UNSPECIALIZED_ALL = [
    spec_of(row, dtype=dtype, causal=causal, speculative=speculative, **UNSPECIALIZED)
    for row, causal, speculative in itertools.product(PLAIN, (False, True), (False, True))
    for dtype in (DType.FLOAT16 if causal == speculative else DType.BFLOAT16,)
]
#: Values of these fields: with the kernels of TABLE, which have none but the first, every pair of values of any two.
OPTIONS = ("causal", "window", "sink", "softcap", "alibi")
COMBINATIONS = [
    (True, True, True, True, False),
    (True, True, True, False, True),
    (False, True, False, True, True),
    (False, False, True, True, True),
]
#: Beside them, for rows that cannot have all of these.
MORE_COMBINATIONS = [
    (False, True, True, False, False),
    (False, True, False, True, False),
    (False, False, True, True, False),
]
#: Fields of a spec by what `Candidate.spills_with` calls them.
FIELD_OF = {"left": "window", "alibi_slopes": "alibi", "softcap": "softcap"}


def fitting(row: Candidate, values: tuple[bool, ...]) -> dict[str, bool]:
    """The options of a combination, without the first of those that together exceed the row's registers."""
    options = dict(zip(OPTIONS, values, strict=True))
    for names in row.spills_with:
        if all(options[FIELD_OF[name]] for name in names):
            options[FIELD_OF[names[0]]] = False
    return options


WITH_OPTIONS = [
    dataclasses.replace(
        spec_of(row, dtype=dtype, causal=False, negate_scores=dtype is DType.BFLOAT16), **fitting(row, values)
    )
    for i, row in enumerate(UNBIASED)
    for values, dtype in zip(
        [*COMBINATIONS, *(MORE_COMBINATIONS if row.spills_with else [])],
        itertools.islice(itertools.cycle(DType), i, None),
        strict=False,
    )
]
#: How a kernel gets at a bias of each kind, and whether that is float32.
ACCESSES = {
    "a bias of 16 bits": [(Bias.TILE, False), (Bias.ROW, False)],
    "a bias of float32": [(Bias.TILE, True), (Bias.ROW, True)],
    "a gathered bias": [(Bias.GATHER, False), (Bias.GATHER, True)],
}


def with_bias(row: Candidate) -> list[FwdSpec]:
    """Its kernels with few of the options, and with all: the most that registers have to hold."""
    return [
        dataclasses.replace(
            spec_of(row, dtype=dtype, causal=False),
            bias=access,
            bias_float32=is_float32,
            **dict(zip(OPTIONS, values, strict=True)),
        )
        for kind in row.bias
        for (access, is_float32), few in zip(
            ACCESSES.get(kind, []), ((False,) * 5, (True, True, True, False, False)), strict=False
        )
        for values, dtype in ((few, DType.FLOAT16), ((True,) * 5, DType.BFLOAT16))
    ]


BIASED = [spec for row in CANDIDATES if not row.packed for spec in with_bias(row)]
#: Sizes and biases for which packed sequences have rows of their own.
PACKED_APART = {(row.head_dim, row.head_dim_v, row.bias) for row in CANDIDATES if row.packed}
#: Of packed sequences, with the most options that a row takes.
PACKED = [
    dataclasses.replace(spec, varlen=True)
    for row in CANDIDATES
    if row.packed or (row.head_dim, row.head_dim_v, row.bias) not in PACKED_APART
    for spec in with_bias(row)[1:2]
    or [dataclasses.replace(spec_of(row, dtype=DType.FLOAT16, causal=False), **fitting(row, COMBINATIONS[0]))]
]
#: Kernels for comparisons have a sink as well.
COMPARED = [
    dataclasses.replace(spec_of(WIDE, dtype=DType.BFLOAT16, causal=True, **config), sink=True)
    for config in (UNSPECIALIZED, {"three_stage": True, "speculative": False, "tile_n": 96})
]
#: With 168 registers a thread, a speculative kernel for 192 rows keeps one of them in memory, outside of loops.
TIGHT = {spec for spec in UNSPECIALIZED_ALL if spec.tile_m == 192 and spec.speculative}
WITHOUT_SPILLS = {*TABLE, *PADDED, *UNSPECIALIZED_ALL, *WITH_OPTIONS, *BIASED, *PACKED, *COMPARED} - TIGHT
SPECS = list(
    dict.fromkeys([*TABLE, *PADDED, *SWITCHED, *UNSPECIALIZED_ALL, *WITH_OPTIONS, *BIASED, *PACKED, *COMPARED])
)


@functools.cache
def compiled(spec: Spec) -> Compiled:
    """Each spec is compiled once in a session."""
    import_nvrtc()
    return compile_offline(spec)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_kernel_compiles_clean(spec: FwdSpec) -> None:
    kernel = compiled(spec)
    report, traits = kernel.report, unpack_traits(kernel.traits_bytes)
    # What select() takes has no spills. A switch is there for comparisons, and may cost a register outside of loops.
    assert report.spill_bytes <= (0 if spec in WITHOUT_SPILLS else 80), report.text
    assert report.advisories == (), report.text
    assert re.findall(r"C7\d\d\d", report.text) == []
    threads = traits["threads"]
    assert threads == 128 * (spec.warp_specialized + spec.tile_m // 64)
    assert report.registers <= min(255, REGISTERS // threads // 8 * 8)
    if spec.setmaxnreg:
        producer, consumer = traits["producer_registers"], traits["consumer_registers"]
        assert 24 <= producer < report.registers < consumer <= 240
        assert producer % 8 == consumer % 8 == 0
        # More than the launch allocated, and setmaxnreg.inc waits for ever.
        assert 128 * producer + (threads - 128) * consumer <= report.registers * threads
    else:
        assert traits["producer_registers"] == traits["consumer_registers"] == 0
    assert ("setmaxnreg" in kernel.ptx) == spec.setmaxnreg
    assert 0 < traits["shared_bytes"] <= SHARED_BYTES
    assert (traits["tile_m"], traits["tile_n"], traits["cluster_size"]) == (spec.tile_m, spec.tile_n, 1)
    element = 4 if spec.bias_float32 else 2
    swizzle = next(span for span in (128, 64, 32) if spec.tile_n * element % span == 0)
    boxes = {
        Bias.TILE: (swizzle // element, spec.tile_m, swizzle),
        Bias.ROW: (-(-spec.tile_n // 64) * 64, 1, 0),
    }
    box = (traits["bias_box_cols"], traits["bias_box_rows"], traits["bias_swizzle"])
    assert box == boxes.get(spec.bias, (0, 0, 0))
    assert traits["persistent"] == (spec.scheduler is not Scheduler.ONE_TILE)
    assert traits["dynamic"] == (spec.scheduler is Scheduler.DYNAMIC)
    assert re.findall(r"^\.target (\w+)", kernel.ptx, re.MULTILINE) == ["sm_90a"]
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.symbol in kernel.ptx


@pytest.mark.parametrize("row", UNBIASED, ids=lambda row: f"{row.name}-{row.tile_m}x{row.tile_n}")
def test_options_are_compiled_in_pairs(row: Candidate) -> None:
    """Each row has every pair of values of two options, but for those that it has no registers for."""
    tile = (row.head_dim, row.head_dim_v, row.tile_m, row.tile_n)
    specs = [s for s in [*TABLE, *WITH_OPTIONS] if (s.head_dim, s.head_dim_v, s.tile_m, s.tile_n) == tile]
    refused = [{FIELD_OF[name] for name in names} for names in row.spills_with]
    for one, other in itertools.combinations(OPTIONS, 2):
        if {one} not in refused and {other} not in refused:
            expected = 3 if {one, other} in refused else 4
            assert len({(getattr(spec, one), getattr(spec, other)) for spec in specs}) == expected, (one, other)
    for spec in specs:
        assert not any(all(getattr(spec, name) for name in names) for names in refused)


def test_symbols_differ() -> None:
    symbols = [compiled(spec).symbol for spec in SPECS]
    assert len(set(symbols)) == len(SPECS)


def test_negated_scores_are_negated_by_the_tensor_core() -> None:
    for negate, expected in ((False, {"1"}), (True, {"-1"})):
        kernel = compiled(spec_of(CANDIDATES[-1], dtype=DType.FLOAT16, causal=False, negate_scores=negate))
        # wgmma from two descriptors: d, a-desc, b-desc, scale-d, imm-scale-a, imm-scale-b, trans-a, trans-b
        signs = set(re.findall(r"\}, %rd\d+, %rd\d+, \w+, (-?1), 1, 0, 0;", kernel.ptx))
        assert signs == expected


# --- Caches ---


def decode_spec(dtype: DType, head_dims: tuple[int, int], shape: str, *, softcap: bool, alibi: bool) -> DecodeSpec:
    """What `select_decode` takes: for few CTAs or many, for many rows, or with one group of keys by request."""
    batch, seqlen_q, splits = {"few": (1, 1, None), "many": (40, 1, None), "rows": (1, 65, None), "cut": (1, 1, 3)}[
        shape
    ]
    sizes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "seqlen_q": seqlen_q, "num_splits": splits}
    options = {"dtype": np.dtype(dtype.value), "softcap": 30.0 if softcap else None, "alibi": alibi}
    return select_decode(problem_of_cache(batch, **sizes, **options), H200).spec


#: Every pair of values of two of these: dtype, shape, softcap, ALiBi. Each head_dim, the largest under all shapes.
DECODE = [
    decode_spec(dtype, head_dims, shape, softcap=softcap, alibi=alibi)
    for dtype, head_dims, shape, softcap, alibi in (
        (DType.FLOAT16, (128, 128), "few", False, False),
        (DType.BFLOAT16, (128, 128), "many", False, False),
        (DType.BFLOAT16, (128, 128), "rows", True, True),
        (DType.FLOAT16, (192, 192), "rows", True, True),
        (DType.BFLOAT16, (192, 192), "few", True, True),
        (DType.FLOAT16, (64, 192), "many", True, True),
        (DType.BFLOAT16, (192, 128), "few", True, False),
        (DType.FLOAT16, (192, 128), "many", False, True),
        (DType.FLOAT16, (256, 256), "few", True, True),
        (DType.BFLOAT16, (256, 256), "cut", True, False),
        (DType.BFLOAT16, (128, 256), "many", False, True),
        (DType.FLOAT16, (224, 224), "cut", False, True),
        (DType.FLOAT16, (160, 160), "rows", True, False),
        (DType.BFLOAT16, (96, 96), "rows", False, True),
        (DType.FLOAT16, (64, 64), "many", True, False),
        (DType.BFLOAT16, (32, 32), "few", False, True),
        (DType.FLOAT16, (160, 160), "few", False, False),
        (DType.FLOAT16, (64, 64), "rows", True, False),
    )
]


def test_options_of_caches_are_compiled_in_pairs() -> None:
    fields = ("dtype", "tile_m", "tile_n", "key_groups", "residents", "softcap", "alibi")
    values = {name: sorted({getattr(spec, name) for spec in DECODE}, key=str) for name in fields}
    assert all(len(those) == 2 for those in values.values())
    assert {spec.head_dim for spec in DECODE} == {*range(32, 257, 32)}
    # No two of the first three together, and large blocks only with two warpgroups of rows.
    warpgroups = {("tile_m", 128), ("key_groups", 2), ("residents", 2)}
    never = [*map(set, itertools.combinations(warpgroups, 2))]
    never += [{("tile_n", 128), other} for other in (("tile_m", 64), ("key_groups", 2), ("residents", 2))]
    for one, other in itertools.combinations(fields, 2):
        seen = {(getattr(spec, one), getattr(spec, other)) for spec in DECODE}
        for pair in itertools.product(values[one], values[other]):
            if {(one, pair[0]), (other, pair[1])} not in never:
                assert pair in seen, (one, other, pair)


@pytest.mark.parametrize("spec", DECODE, ids=str)
def test_decode_compiles_clean(spec: DecodeSpec) -> None:
    kernel = compiled(spec)
    report, traits = kernel.report, unpack_traits(kernel.traits_bytes)
    assert (report.spill_bytes, report.advisories) == (0, ()), report.text
    assert report.stack_bytes <= 16  # the loop over columns of Q that are no vectors indexes four words
    assert re.findall(r"C7\d\d\d", report.text) == []
    threads = traits["threads"]
    moves = spec.tile_n == 128
    assert threads == (128 if moves else 64) + spec.tile_m * 2 * spec.key_groups
    assert spec.residents * threads * report.registers <= REGISTERS
    assert 0 < traits["shared_bytes"] <= SHARED_BYTES
    assert spec.residents * (traits["shared_bytes"] + 1024) <= 228 * 1024
    assert (traits["tile_m"], traits["tile_n"]) == (spec.tile_m, spec.tile_n)
    assert (traits["cluster_size"], traits["box_cols"]) == (1, 64)
    moved = (traits["producer_registers"], traits["consumer_registers"])
    assert moved == ((40, 232) if moves else (0, 0))
    assert 128 * moved[0] + spec.tile_m * 2 * moved[1] <= REGISTERS
    assert re.findall(r"setmaxnreg\.(...)\.sync\.aligned\.u32 (\d+);", kernel.ptx) == (
        [("inc", "232"), ("dec", "40")] if moves else []
    )
    assert re.findall(r"^\.target (\w+)", kernel.ptx, re.MULTILINE) == ["sm_90a"]


@pytest.mark.parametrize("spec", [kind(dtype) for kind in (AppendSpec, CombineSpec) for dtype in DType], ids=str)
def test_append_and_combine_compile_clean(spec: AppendSpec | CombineSpec) -> None:
    kernel = compiled(spec)
    report, traits = kernel.report, unpack_traits(kernel.traits_bytes)
    assert (report.spill_bytes, report.stack_bytes, report.advisories) == (0, 0, ()), report.text
    assert (traits["threads"], traits["shared_bytes"]) == ({"append.cu": 256, "combine.cu": 32}[spec.entry], 0)
    assert report.registers * traits["threads"] <= REGISTERS // 5  # many CTAs at a time hide the latency of memory


# --- Gradients ---

#: Switches of `BwdSpec`, and its type. Any two columns of ORTHOGONAL have every pair of values.
GRADIENT_OPTIONS = ("dtype", "causal", "window", "alibi", "partial", "softcap", "deterministic")
ORTHOGONAL = [
    (a, b, c, a != b, a != c, b != c, (a != b) != c) for a, b, c in itertools.product((False, True), repeat=3)
]


def gradient_spec(
    head_dims: tuple[int, int], values: tuple[bool, ...], bias: str = "", bias_dtype: str = "float32"
) -> BwdSpec:
    """What `select_backward` takes for a problem with those of GRADIENT_OPTIONS. `bias`: its axes; "as q" is a type."""
    bfloat16, causal, window, alibi, partial, softcap, deterministic = values
    dtype = np.dtype("bfloat16" if bfloat16 else "float16")
    problem = problem_of_gradients(
        heads_kv=2 if partial else 4,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=dtype,
        causal=causal,
        window_size=(30 if window else None, None),
        softcap=5.0 if softcap else None,
        alibi=alibi,
        bias=bias,
        bias_dtype=dtype if bias_dtype == "as q" else bias_dtype,
        deterministic=deterministic,
    )
    spec = select_backward(problem, H200).spec
    assert (spec.causal, spec.window, spec.alibi, spec.partial) == (causal, window, alibi, partial)
    assert (spec.softcap, spec.deterministic) == (softcap, deterministic)
    return spec


class OfRow(NamedTuple):
    """What a row of gradients is for.

    Attributes
    ----------
    head_dims : tuple of int
        The size.
    softcap, deterministic : bool or None
        Whether it is taken with a softcap and in a fixed order: always, never, or in either case (None).
    bias, bias_dtype : str
        Of those that it is compiled with.
    """

    head_dims: tuple[int, int]
    softcap: bool | None
    deterministic: bool | None
    bias: str = ""
    bias_dtype: str = "float32"


OF_ROWS = [
    OfRow((64, 64), False, None),
    OfRow((64, 64), None, None, "hqk"),
    OfRow((128, 128), False, False),
    OfRow((128, 128), False, False, "hqk"),
    OfRow((128, 128), False, True),
    OfRow((128, 128), False, True, "hqk"),
    OfRow((128, 128), True, None),
    OfRow((192, 128), False, False),
    OfRow((256, 256), None, None),
]
#: The same kernels for other sizes: parts of panels, and head dimensions that differ; and with other biases.
OTHER_SIZES = [
    OfRow((96, 96), False, None),
    OfRow((192, 128), True, None),
    OfRow((192, 192), None, None),
    OfRow((256, 128), None, None),
    OfRow((128, 256), None, None),
    OfRow((64, 64), True, None),
    OfRow((64, 64), True, None, "qk", "as q"),
    OfRow((96, 96), False, None, "hqk"),
    OfRow((96, 96), False, None, "hqk", "as q"),
    OfRow((128, 128), False, False, "bqk", "as q"),
    OfRow((128, 128), False, True, "qk", "as q"),
    OfRow((128, 128), True, None, "bhqk"),
    OfRow((192, 128), None, None, "hqk"),
    OfRow((192, 192), None, None, "hqk", "as q"),
    OfRow((256, 256), None, None, "hqk"),
    OfRow((256, 256), None, None, "hqk", "as q"),
    *(
        OfRow((n, n), None, None, axes, kind)
        for n in (64, 96, 128, 192, 256)
        for axes, kind in (("bk", "float32"), ("hq", "as q"))
    ),
]


def in_pairs(row: OfRow) -> list[BwdSpec]:
    """Kernels with every pair of values of two of GRADIENT_OPTIONS, but for those that are fixed."""
    return [
        gradient_spec(
            row.head_dims,
            (
                *values[:5],
                values[5] if row.softcap is None else row.softcap,
                values[6] if row.deterministic is None else row.deterministic,
            ),
            row.bias,
            row.bias_dtype,
        )
        for values in ORTHOGONAL
    ]


BY_ROW = [in_pairs(row) for row in OF_ROWS]
#: All that registers may have to hold.
MOST = [
    gradient_spec(
        row.head_dims,
        (number % 2 == 0, True, True, True, True, row.softcap is not False, row.deterministic is not False),
        row.bias,
        row.bias_dtype,
    )
    for number, row in enumerate([*OF_ROWS, *OTHER_SIZES])
]
GRADIENTS = list(
    dict.fromkeys(
        [
            *itertools.chain(*BY_ROW),
            *MOST,
            *(spec for row in OTHER_SIZES for spec in in_pairs(row)),
            gradient_spec((64, 128), (True, True, False, False, True, False, False)),
            gradient_spec((128, 64), (False, True, True, True, False, False, True)),
        ]
    )
)
#: The same for packed sequences, of which no CTAs share a key tile, and which have no bias.
PACKED_GRADIENTS = list(
    dict.fromkeys(dataclasses.replace(x, varlen=True, partial=False) for x in GRADIENTS if x.bias is Bias.NONE)
)
#: The kernels of the gradients of their biases.
BIAS_GRADIENTS = list(dict.fromkeys(bias_gradient_spec(spec) for spec in GRADIENTS if spec.bias is not Bias.NONE))
AROUND_GRADIENTS: list[Spec] = [
    *map(PreprocessSpec, DType),
    *dict.fromkeys(
        PostprocessSpec(dtype=x.dtype, head_dim=head_dim, tile_m=tile)
        for x in GRADIENTS
        for head_dim, tile in (
            (x.head_dim, x.tile_m),
            *([(x.head_dim, x.tile_n), (x.head_dim_v, x.tile_n)] if x.partial else []),
        )
    ),
    SinkSpec(),
]


@pytest.mark.parametrize(("row", "specs"), [*zip(BWD_CANDIDATES, BY_ROW, strict=True)], ids=lambda x: str(x)[:40])
def test_options_of_gradients_are_compiled_in_pairs(row: BwdCandidate, specs: list[BwdSpec]) -> None:
    """Each row has every pair of values of two options, but for those that another row has."""
    assert {(spec.head_dim, spec.head_dim_v) for spec in specs} == {(row.head_dim, row.head_dim_v)}
    tile = (row.tile_m, row.tile_n, row.q_stages, row.dout_stages)
    assert {(spec.tile_m, spec.tile_n, spec.q_stages, spec.dout_stages) for spec in specs} == {tile}
    choices = {name: {getattr(spec, name) for spec in specs} for name in GRADIENT_OPTIONS}
    fixed = {name for name, those in choices.items() if len(those) == 1}
    assert fixed <= {"softcap", "deterministic"}
    for one, other in itertools.combinations(GRADIENT_OPTIONS, 2):
        pairs = {(getattr(spec, one), getattr(spec, other)) for spec in specs}
        assert len(pairs) == len(choices[one]) * len(choices[other]), (one, other)


def test_what_a_row_of_gradients_is_compiled_with_is_all_that_it_takes() -> None:
    """A row is taken with a softcap, without, and in either order exactly if it is compiled so."""
    taken: dict[BwdCandidate, set[tuple[bool, bool]]] = {row: set() for row in BWD_CANDIDATES}
    widths = dict.fromkeys((row.head_dim, row.head_dim_v) for row in BWD_CANDIDATES)
    cases = itertools.product(widths, (False, True), (False, True), ("", "hqk"))
    for (head_dim, head_dim_v), softcap, deterministic, bias in cases:
        problem = problem_of_gradients(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            softcap=5.0 if softcap else None,
            deterministic=deterministic,
            bias=bias,
        )
        row = select_backward(problem, H200).candidate
        if (row.head_dim, row.head_dim_v) == (head_dim, head_dim_v):
            taken[row].add((softcap, deterministic))
    for row, specs in zip(BWD_CANDIDATES, BY_ROW, strict=True):
        assert taken[row] == {(spec.softcap, spec.deterministic) for spec in specs}


@pytest.mark.parametrize("spec", [*sample(GRADIENTS, 7), *sample(PACKED_GRADIENTS, 7)], ids=str)
def test_gradients_compile_clean(spec: BwdSpec) -> None:
    kernel = compiled(spec)
    report, traits = kernel.report, unpack_traits(kernel.traits_bytes)
    assert (report.spill_bytes, report.stack_bytes, report.advisories) == (0, 0, ()), report.text
    assert re.findall(r"C7\d\d\d", report.text) == []
    threads = traits["threads"]
    assert threads == 3 * 128  # a producer, and two consumer warpgroups
    assert report.registers == REGISTERS // threads // 8 * 8
    # Adders that loop over parts, or add one in pieces, do not have enough with 24 registers.
    moved = (40, 232) if spec.deterministic and (spec.tile_n == 64 or spec.head_dim % 64) else (24, 240)
    assert (traits["producer_registers"], traits["consumer_registers"]) == moved
    # More than the launch allocated, and setmaxnreg.inc waits for ever.
    assert 128 * moved[0] + (threads - 128) * moved[1] <= report.registers * threads
    assert sorted(re.findall(r"setmaxnreg\.(...)\.sync\.aligned\.u32 (\d+);", kernel.ptx)) == [
        ("dec", str(moved[0])),
        ("inc", str(moved[1])),
    ]
    assert 0 < traits["shared_bytes"] <= SHARED_BYTES
    assert (traits["tile_m"], traits["tile_n"]) == (spec.tile_m, spec.tile_n)
    assert (traits["cluster_size"], traits["box_cols"]) == (1, 64)
    assert re.findall(r"^\.target (\w+)", kernel.ptx, re.MULTILINE) == ["sm_90a"]
    expected = {
        "red.relaxed.gpu.global.add.v4.f32": not spec.deterministic,
        "cp.reduce.async.bulk": spec.deterministic,
        # Of parts, dK and dV leave as they are, for another kernel.
        "cp.async.bulk.tensor.4d.global": not spec.partial and not spec.varlen,
        "cp.async.bulk.tensor.5d.global": spec.varlen,
    }
    assert {name: name in kernel.ptx for name in expected} == expected


@pytest.mark.parametrize("spec", sample(BIAS_GRADIENTS, 15), ids=str)
def test_the_gradient_of_a_bias_compiles_clean(spec: BiasGradientSpec) -> None:
    kernel = compiled(spec)
    report, traits = kernel.report, unpack_traits(kernel.traits_bytes)
    assert (report.spill_bytes, report.stack_bytes, report.advisories) == (0, 0, ()), report.text
    assert re.findall(r"C7\d\d\d", report.text) == []
    assert traits["threads"] == 3 * 128  # producers, and two consumer warpgroups
    assert report.registers <= REGISTERS // traits["threads"] // 8 * 8  # nobody asks for more
    assert (traits["producer_registers"], traits["consumer_registers"]) == (0, 0)
    assert 0 < traits["shared_bytes"] <= SHARED_BYTES
    assert (traits["tile_m"], traits["tile_n"]) == (spec.tile_m, spec.tile_n)
    assert (traits["cluster_size"], traits["box_cols"]) == (1, 64)
    assert re.search(r"\b(red|atom)\.", kernel.ptx) is None  # no two CTAs add to the same number


@pytest.mark.parametrize("spec", AROUND_GRADIENTS, ids=str)
def test_kernels_around_gradients_compile_clean(spec: Spec) -> None:
    kernel = compiled(spec)
    report, traits = kernel.report, unpack_traits(kernel.traits_bytes)
    assert (report.spill_bytes, report.stack_bytes, report.advisories) == (0, 0, ()), report.text
    # A tile of rounded rows, each four words longer, so that a column of them is in all banks.
    rows = spec.tile_m * (2 * spec.head_dim + 16) if isinstance(spec, PostprocessSpec) else 0
    assert traits["shared_bytes"] == rows
    assert report.registers * traits["threads"] <= REGISTERS // 2


def test_gradients_without_setmaxnreg_have_too_few_registers() -> None:
    """It is for tools: dK and dV are 128 of the 168 registers that a launch gives a thread."""
    spec = dataclasses.replace(gradient_spec((128, 128), (False,) * 7), setmaxnreg=False)
    report = compiled(spec).report
    assert report.registers <= 168
    assert report.spill_bytes > 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"varlen": True, "partial": True}, "a CTA has all query heads of packed keys: set partial=False"),
        ({"q_stages": 1}, "the next scores are computed while this Q is read: set q_stages to 2 or more"),
        ({"q_stages": 4, "dout_stages": 4}, "tiles and stages exceed the shared memory of a CTA"),
        ({"head_dim": 256, "head_dim_v": 256, "tile_n": 64}, "tiles and stages exceed the shared memory of a CTA"),
    ],
    ids=str,
)
def test_gradients_that_cannot_be_are_a_compile_error(change: dict[str, Any], text: str) -> None:
    import_nvrtc()
    spec = dataclasses.replace(gradient_spec((128, 128), (False,) * 7), **change)
    with pytest.raises(cupyfa.CompileError) as caught:
        compile_offline(spec)
    headline = str(caught.value).splitlines()[0]
    assert headline.startswith(f"{spec} does not compile: cuda/hopper/bwd.cu(")
    assert text in headline


# --- SASS ---


@functools.cache
def nvdisasm() -> str:
    """Where the disassembler is, or a skip."""
    folders = [Path(folder, "nvidia") for folder in (*site.getsitepackages(), site.getusersitepackages())]
    folders += [Path(folder, "nvidia") for folder in sys.path if folder]
    found = shutil.which("nvdisasm") or next((str(p) for f in folders for p in f.glob("*/bin/nvdisasm")), None)
    if found is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    return found


def sass(spec: FwdSpec, folder: Path) -> list[str]:
    """The instructions of a kernel, without addresses and predicates."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled(spec).cubin)
    done = subprocess.run([nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*(.*?)\s*;", done.stdout, re.MULTILINE)


LOOPS = [
    spec_of(row, dtype=DType.BFLOAT16, causal=causal) for row, causal in zip(PLAIN, itertools.cycle((False, True)))
]
LOOPS.append(dataclasses.replace(SPEC, speculative=False))
LOOPS += [  # slopes and both limits take no exponential, and where a walk ends is no other code
    dataclasses.replace(spec_of(row, dtype=DType.BFLOAT16, causal=True), window=True, alibi=row.tile_m == 128)
    for row in PLAIN[1:3]
]
THREE_STAGES_OF_96 = dataclasses.replace(SPEC, three_stage=True, speculative=False, pingpong=False, tile_n=96)
LOOPS += [spec for spec in UNSPECIALIZED_ALL if spec.dtype is DType.BFLOAT16 and spec.tile_m == 128]


@pytest.mark.parametrize("spec", LOOPS, ids=str)
def test_softmax_runs_under_the_products(spec: FwdSpec, tmp_path: Path) -> None:
    code = sass(spec, tmp_path)

    def count(name: str, lines: list[str] = code) -> int:
        return sum(line.startswith(name) for line in lines)

    assert count("LDL") == count("STL") == 0  # no local memory
    # A speculative loop has two rounds, and one more and two ends behind it: for an even and an odd number of blocks.
    # An end issues the last product, with the first scores of the next tile if there is one, or else without. With a
    # single Q slot those scores wait for O; without warp specialization there is no next tile.
    rounds, ends = (3, 2) if spec.speculative else (1, 1)
    together = ends if spec.q_stages > 1 else 0
    tiles = 1 + (ends if spec.warp_specialized else 0)  # whose first scores are in the code
    scores, output = f"HGMMA.64x{spec.tile_n}x16.F32.BF16", f"HGMMA.64x{spec.head_dim_v}x16.F32.BF16"
    # With equal tiles the two products have one name; then both counts are their sum.
    expected = {scores: 0, output: 0}
    expected[scores] += (tiles + rounds) * spec.head_dim // 16
    expected[output] += (rounds + ends + together) * spec.tile_n // 16  # of the rounds, and of the last block
    assert {name: count(name) for name in expected} == expected

    waits = [i for i, line in enumerate(code) if line.startswith("WARPGROUP.DEPBAR.LE gsb0")]
    one_left = [i for i in waits if "0x1" in code[i]]  # the older product is there, the newer one in flight
    spans = [code[begin : next(i for i in waits if i > begin)] for begin in one_left]
    assert len(spans) == rounds + together
    assert all(count("HGMMA", span) == 0 for span in spans)
    under_scores = [span for span in spans if count("MUFU.EX2", span) == 0]
    assert len(under_scores) == together
    assert all(count("STSM", span) == spec.head_dim_v // 16 for span in under_scores)  # O of the last tile is staged
    # Of a thread: two rows of a quarter of the columns each, and two old maxima.
    exponentials = spec.tile_n // 2 + 2
    for span in spans:
        if count("MUFU.EX2", span) == 0:
            continue
        vote = 0
        if spec.speculative:  # those that are nearly always enough, the vote, and those that correct them
            vote = next(i for i, line in enumerate(span) if line.startswith("VOTE.ALL"))
            assert count("MUFU.EX2", span[:vote]) == spec.tile_n // 2
            assert count("SHFL", span[:vote]) == count("FMNMX", span[:vote]) == 0  # no maximum
        assert count("MUFU.EX2", span[vote:]) == exponentials
    in_rounds = rounds * (exponentials + spec.speculative * spec.tile_n // 2)
    assert count("MUFU.EX2") == exponentials + in_rounds  # of the first block, and of the rounds


#: Before a product, descriptors in ordinary registers are moved to uniform ones. One is enough: the address of Q.
MOST_MOVES = 3


@pytest.mark.parametrize("spec", [*LOOPS, THREE_STAGES_OF_96], ids=str)
def test_descriptors_are_in_uniform_registers(spec: FwdSpec, tmp_path: Path) -> None:
    """Else each step of a product moves some: the compiler could not prove that the lanes of a loop stay together."""
    code = sass(spec, tmp_path)
    products = [i for i, line in enumerate(code) if line.startswith("HGMMA")]
    runs = [[products[0]]]
    for before, after in itertools.pairwise(products):
        runs.append([]) if after - before > 60 else None
        runs[-1].append(after)
    moves = [sum(line.startswith("R2UR") for line in code[run[0] : run[-1]]) for run in runs]
    assert max(moves) <= MOST_MOVES, moves


def test_a_softcap_takes_two_approximations_of_a_score(tmp_path: Path) -> None:
    """An exponential and a reciprocal: of the first block, and of each of the rounds. The rest is as without it."""
    plain = spec_of(PLAIN[0], dtype=DType.BFLOAT16, causal=False)
    capped = sass(dataclasses.replace(plain, softcap=True), tmp_path)
    before = sass(plain, tmp_path)
    for name in ("MUFU.EX2", "MUFU.RCP"):
        more, less = (sum(line.startswith(name) for line in code) for code in (capped, before))
        assert more - less == 4 * plain.tile_n // 2
    for name in ("HGMMA", "MUFU.LG2", "VOTE.ALL"):
        one, other = (sum(line.startswith(name) for line in code) for code in (capped, before))
        assert one == other
    assert not [line for line in capped if line.startswith("MUFU.TANH")]


def test_without_overlap_no_product_is_in_flight(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, overlap=False, speculative=False)
    waits = [line for line in sass(spec, tmp_path) if line.startswith("WARPGROUP.DEPBAR.LE gsb0")]
    assert waits
    assert not [line for line in waits if "0x1" in line]


# --- Three stages ---

#: With the largest tiles for which ptxas leaves every softmax where it belongs.
THREE_STAGES = [
    spec_of(row, dtype=dtype, causal=causal, three_stage=True, speculative=False, pingpong=False, tile_n=tile_n)
    for row, tile_n in ((PLAIN[0], 96), (PLAIN[1], 64), (PLAIN[2], 96))
    for dtype, causal in itertools.product(DType, (False, True))
]


@pytest.mark.parametrize("spec", THREE_STAGES, ids=str)
def test_three_stages_compile_clean(spec: FwdSpec) -> None:
    report = compiled(spec).report
    assert (report.spill_bytes, report.stack_bytes, report.advisories) == (0, 0, ()), report.text


@pytest.mark.parametrize("spec", THREE_STAGES, ids=str)
def test_softmax_of_three_stages_runs_under_both_products(spec: FwdSpec, tmp_path: Path) -> None:
    code = [line.split()[0] for line in sass(spec, tmp_path)]
    both, exponentials = spec.head_dim // 16 + spec.tile_n // 16, spec.tile_n // 2 + 2
    rounds = 0
    begin = 0
    for wait in (i for i, name in enumerate(code) if name == "WARPGROUP.DEPBAR.LE"):
        products = [i for i in range(begin, wait) if code[i].startswith("HGMMA")]
        if len(products) == both:
            rounds += 1
            assert sum(name == "MUFU.EX2" for name in code[products[-1] : wait]) == exponentials
        begin = wait
    assert rounds == 2  # in the loop; the last softmax has one product, and the first has none


def test_three_stages_with_the_tile_of_the_paper_do_not_fit() -> None:
    """O, two S and P of 128x128 are 224 of 232 registers."""
    spec = dataclasses.replace(THREE_STAGES[-1], tile_n=128)
    report = compiled(spec).report
    assert report.spill_bytes > 0
    assert any("C75" in line for line in report.advisories)


# --- Options ---


def test_options() -> None:
    assert options(SPEC) == ("-std=c++20", "-arch=sm_90a", "--ptxas-options=-v", "-lineinfo", "--no-cache")


@pytest.mark.parametrize("order", [("-arch=sm_90a", "-arch=sm_90"), ("-arch=sm_90", "-arch=sm_90a")])
def test_architecture_with_the_a_wins_over_cupys(order: tuple[str, str]) -> None:
    import_nvrtc()
    source = 'extern "C" __global__ void f() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }'
    with_bounds = source.replace("void f", "void __launch_bounds__(384, 1) f")
    assert ".target sm_90a" in compile_ptx(with_bounds, *order)


def test_a_kernel_with_both_architectures_is_the_same() -> None:
    nvrtc = import_nvrtc()
    both = (*options(SPEC), *CUPY_OPTIONS, "-arch=sm_90")
    (_, program) = nvrtc.nvrtcCreateProgram(amalgamate(SPEC.entry).encode(), SPEC.entry.encode(), 0, None, None)
    for expression in (SPEC.name_expression, "&" + SPEC.traits_expression):
        nvrtc.nvrtcAddNameExpression(program, expression.encode())
    (status,) = nvrtc.nvrtcCompileProgram(program, len(both), [flag.encode() for flag in both])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    # Names of objects with internal linkage carry a hash of the options.
    ours, theirs = (
        re.sub(r"_fwd_cu_[0-9a-f]{8}_", "", text) for text in (compiled(SPEC).ptx, ptx.decode().rstrip("\0"))
    )
    assert ours == theirs


# --- Versions ---


@pytest.mark.parametrize("version", [(12, 9), (12, 10), (13, 0), (14, 1)])
@pytest.mark.parametrize("cupy", [None, "14.2.0", "14.2.0rc1", "14.10.0", "15.0.0b1"])
def test_new_enough(version: tuple[int, int], cupy: str | None) -> None:
    check_versions(version, cupy)


@pytest.mark.parametrize("version", [(12, 8), (12, 0), (11, 8)])
def test_old_nvrtc_is_refused(version: tuple[int, int]) -> None:
    message = (
        rf"^NVRTC {version[0]}\.{version[1]} is too old: .*NVRTC 12\.9 or newer is needed: "
        r"pip install --upgrade 'cupyfa\[cuda12\]'$"
    )
    with pytest.raises(cupyfa.CompileError, match=message):
        check_versions(version)


@pytest.mark.parametrize("version", ["14.1.1", "13.6.0", "14.0.0rc1"])
def test_old_cupy_is_refused(version: str) -> None:
    message = (
        rf"^CuPy {re.escape(version)} is too old: .*14\.2 or newer is needed: pip install --upgrade 'cupyfa\[cuda13\]'"
    )
    with pytest.raises(cupyfa.CompileError, match=message):
        check_versions((13, 0), version)


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    message = r"^compiling without a GPU needs the cuda-bindings package: pip install 'cupyfa\[compile\]'$"
    with pytest.raises(cupyfa.CompileError, match=message):
        compile_offline(SPEC)


def test_old_nvrtc_is_refused_before_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = import_nvrtc()
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, 12, 8))
    with pytest.raises(cupyfa.CompileError, match=r"^NVRTC 12\.8 is too old"):
        compile_offline(SPEC)


# --- Errors ---


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"head_dim": 112}, "head_dim and head_dim_v are padded to multiples of 32"),
        ({"head_dim_v": 288}, "head_dim and head_dim_v are padded to multiples of 32"),
        ({"tile_m": 256}, "one to three consumer warpgroups of 64 rows"),
        ({"tile_n": 120}, "P V takes 16 keys per instruction"),
        ({"stages": 0}, "a ring needs a slot"),
        ({"stages": 4}, "tiles and stages exceed the shared memory of a CTA"),
        ({"overlap": False}, "a speculative softmax is written for overlap: set overlap=True, or speculative=False"),
        ({"three_stage": True, "speculative": False, "overlap": False}, "three stages overlap: set overlap=True, or"),
        ({"three_stage": True}, "three stages are written for the exact softmax: set speculative=False, or"),
        ({"three_stage": True, "speculative": False}, "three stages take no turns: set pingpong=False, or"),
        (
            {"three_stage": True, "speculative": False, "pingpong": False, "stages": 1},
            "three stages wait for the next K while the last one is read: set stages to 2, or three_stage=False",
        ),
        ({"tile_m": 64, "setmaxnreg": False}, "taking turns needs two warpgroups"),
        ({"tile_m": 64, "pingpong": False}, "set setmaxnreg=False"),
        ({"warp_specialized": False}, "a CTA computes one tile: set scheduler=one_tile, q_stages=1"),
        (UNSPECIALIZED | {"pingpong": True}, "set pingpong=False, setmaxnreg=False"),
        (UNSPECIALIZED | {"setmaxnreg": True}, "set pingpong=False, setmaxnreg=False"),
        (UNSPECIALIZED | {"three_stage": True, "speculative": False}, "set overlap=True, three_stage=False, and "),
        (UNSPECIALIZED | {"stages": 1}, "set overlap=True, three_stage=False, and stages to 2 or more"),
        *(
            (
                config | {name: True},
                "windows, score modifiers and packed sequences are written for the roles and two st",
            )
            for name in ("varlen", "window", "softcap", "alibi")
            for config in (UNSPECIALIZED, {"three_stage": True, "speculative": False, "pingpong": False})
        ),
        (
            UNSPECIALIZED | {"bias": Bias.GATHER},
            "windows, score modifiers and packed sequences are written for the roles",
        ),
        ({"bias_float32": True}, "no bias has no type: set bias_float32=False"),
        ({"bias": Bias.TILE}, "a ring has slots: set bias_stages where TMA copies the bias"),
        ({"bias_stages": 2}, "a ring has slots: set bias_stages where TMA copies the bias"),
        ({"bias": Bias.TILE, "bias_stages": 2}, "tiles and stages exceed the shared memory of a CTA"),
        (UNSPECIALIZED | {"overlap": False, "speculative": False}, "set overlap=True, three_stage=False, and "),
    ],
    ids=str,
)
def test_a_spec_that_cannot_be_is_a_compile_error(change: dict[str, Any], text: str) -> None:
    import_nvrtc()
    spec = dataclasses.replace(SPEC, **change)
    with pytest.raises(cupyfa.CompileError) as caught:
        compile_offline(spec)
    headline = str(caught.value).splitlines()[0]
    assert headline.startswith(f"{spec} does not compile: cuda/hopper/fwd.cu(")
    assert text in headline
    assert caught.value.spec == spec
    assert headline.partition(": ")[2] in caught.value.log


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("a.cu(3): warning: w\n\n  a.cu(4): error: e1\n  a.cu(5): error: e2\n", "a.cu(4): error: e1"),
        ("nothing to see\nmore\n", "nothing to see"),
        ("\n \n", "no message"),
    ],
)
def test_first_error(log: str, expected: str) -> None:
    assert first_error(log) == expected


def test_traits_that_are_missing() -> None:
    with pytest.raises(cupyfa.CompileError, match=r"^the PTX of forward .* has no nothing$"):
        _ = dataclasses.replace(compiled(SPEC), traits_symbol="nothing").traits_bytes


# --- The report must see what it is there for ---

CLEAN = """ptxas info    : 32 bytes gmem
ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""
SPILLED = CLEAN.replace(
    "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill",
    "48 bytes stack frame, 40 bytes spill stores, 72 bytes spill",
)
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in the function 'f'\n"
)
IGNORED = (
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register "
    "requirements.\n"
)


def test_clean_report() -> None:
    report = PtxasReport.parse(CLEAN)
    assert (report.registers, report.spill_bytes, report.stack_bytes, report.advisories) == (168, 0, 0, ())
    assert report.text == CLEAN


def test_spills_are_seen() -> None:
    report = PtxasReport.parse(SPILLED)
    assert (report.registers, report.spill_bytes, report.stack_bytes) == (168, 112, 48)


@pytest.mark.parametrize(("line", "code"), [(SERIALISED, "C7510"), (IGNORED, "C7508")])
def test_advisories_are_seen(line: str, code: str) -> None:
    (advisory,) = PtxasReport.parse(line + CLEAN).advisories
    assert code in advisory
    assert PtxasReport.parse(CLEAN + line).advisories == (advisory,)


def test_warnings_are_seen() -> None:
    line = "a.cu(3): warning #177-D: variable declared but never referenced"
    assert PtxasReport.parse(line + "\n" + CLEAN).advisories == (line,)


def test_log_without_a_report() -> None:
    with pytest.raises(ValueError, match="the compiler's log holds no ptxas report"):
        PtxasReport.parse("")


def test_a_kernel_that_spills_is_seen_by_the_same_path() -> None:
    # Without setmaxnreg a consumer has the 168 registers of the launch, too few for O, S and P of 64x128.
    report = compiled(dataclasses.replace(SPEC, setmaxnreg=False)).report
    assert report.registers <= 168
    assert report.spill_bytes > 0
    assert report.stack_bytes > 0
    assert any("C75" in line for line in report.advisories)


def test_minimum_versions_are_the_documented_ones() -> None:
    assert (compiler.MIN_NVRTC, compiler.MIN_CUPY) == ((12, 9), (14, 2))
