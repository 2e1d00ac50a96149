"""Selection: a pure function with a reason for every candidate."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from problems import make_problem

import cupyfa
from cupyfa.operand import Operand
from cupyfa.problem import Problem
from cupyfa.select import CANDIDATES, H200, Device, config_items, select
from cupyfa.spec import Bias, DType, FwdSpec, Scheduler

BF16 = np.dtype(ml_dtypes.bfloat16)


def problem(head_dim: int = 128, dtype: Any = np.float16, causal: bool = False, scale: float | None = None) -> Problem:
    return make_problem(head_dim=head_dim, dtype=dtype, causal=causal, scale=scale)


@pytest.mark.parametrize("seqlen_q", [1, 1024, 1025, 100_000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_first_row_without_an_objection_is_chosen(head_dim: int, causal: bool, seqlen_q: int) -> None:
    posed = make_problem(head_dim=head_dim, causal=causal, seqlen_q=seqlen_q)
    selection = select(posed, H200)
    assert selection.spec.head_dim == selection.spec.head_dim_v == -(-head_dim // 32) * 32
    assert [verdict.candidate for verdict in selection.verdicts] == list(CANDIDATES)
    (chosen,) = (verdict for verdict in selection.verdicts if verdict.chosen)
    assert chosen.candidate is next(row for row in CANDIDATES if row.objection(posed) is None)
    assert chosen.candidate.spec(posed) == selection.spec
    assert chosen.reason == chosen.candidate.reason


def test_head_dim_of_v_is_padded_by_itself() -> None:
    for head_dim, head_dim_v, row in ((192, 128, "d192/128"), (136, 8, "d192/128"), (64, 72, "d128"), (8, 200, "d256")):
        posed = make_problem(head_dim=head_dim, head_dim_v=head_dim_v)
        selection = select(posed, H200)
        assert (selection.spec.head_dim, selection.spec.head_dim_v) == (
            -(-head_dim // 32) * 32,
            -(-head_dim_v // 32) * 32,
        )
        assert [verdict.candidate.name for verdict in selection.verdicts if verdict.chosen] == [row]


def test_candidates_are_in_order_and_cover_every_head_dim() -> None:
    kinds = {kind for row in CANDIDATES for kind in row.bias}
    assert kinds == {"no bias", "a bias of 16 bits", "a bias of float32", "a gathered bias"}
    for kind in kinds:
        sizes = [(row.head_dim, row.head_dim_v) for row in CANDIDATES if kind in row.bias]
        assert sizes == sorted(sizes)
        assert sizes[-1] == (256, 256)
    assert all(row.reason for row in CANDIDATES)


def test_every_loser_has_a_reason() -> None:
    for verdict in select(problem(128), H200).verdicts:
        if verdict.candidate.head_dim == 64:
            assert verdict.reason == "holds head_dim up to 64, the problem has 128"
        elif "no bias" not in verdict.candidate.bias:
            assert re.fullmatch(r"is for a .*bias.*, the problem has no bias", verdict.reason)
        elif verdict.candidate.head_dim > 128:
            assert verdict.reason == "d128 128x128 comes before it"
    wide = make_problem(head_dim=192, head_dim_v=192)
    reasons = {verdict.candidate.name: verdict.reason for verdict in select(wide, H200).verdicts[:10]}
    assert reasons["d192/128"] == "holds head_dim_v up to 128, the problem has 192"


def test_rows_with_a_limit_say_so() -> None:
    limited = [row for row in CANDIDATES if row.max_seqlen_q < math.inf]
    assert limited
    for row in limited:
        limit = int(row.max_seqlen_q)
        too_long = f"is for seqlen_q up to {limit}, or windows of up to {row.max_window} keys"
        for seqlen_q, objection in ((limit, None), (limit + 1, too_long)):
            posed = make_problem(head_dim=row.head_dim, seqlen_q=seqlen_q, dtype=BF16)
            assert row.objection(posed) == objection


def test_spec_takes_from_the_problem_what_the_problem_decides() -> None:
    plain = select(problem(192), H200).spec
    assert (plain.dtype, plain.causal, plain.negate_scores) == (DType.FLOAT16, False, False)
    assert select(problem(192, dtype=BF16), H200).spec == dataclasses.replace(plain, dtype=DType.BFLOAT16)
    assert select(problem(192, causal=True), H200).spec == dataclasses.replace(plain, causal=True)
    assert select(problem(192, scale=-0.1), H200).spec == dataclasses.replace(plain, negate_scores=True)
    for scale in (0.0, -0.0, 1e-30, 7.0):
        assert select(problem(192, scale=scale), H200).spec == plain


#: Options of a call, and the fields that they set.
OPTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"window_size": (64, None)}, ["window"]),
    ({"window_size": (None, 64)}, ["causal"]),
    ({"window_size": (64, 0)}, ["causal", "window"]),
    ({"window_size": (64, None), "causal": True}, ["causal", "window"]),
    ({"window_size": (-1, 0)}, ["causal"]),
    ({"window_size": (499, 299)}, []),  # hides nothing
    ({"softcap": 30.0}, ["softcap"]),
    ({"sink": True}, ["sink"]),
    ({"alibi": True}, ["alibi"]),
    ({"bias": (300, 500)}, ["bias_float32"]),
    ({"bias": (300, 500), "bias_dtype": np.float16}, []),
    (
        {"causal": True, "window_size": (9, 9), "softcap": 1, "sink": True, "alibi": True, "scale": -1.0},
        ["causal", "window", "softcap", "sink", "alibi", "negate_scores"],
    ),
]


@pytest.mark.parametrize(("options", "fields"), OPTIONS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_each_option_reaches_its_field(head_dim: int, options: dict[str, Any], fields: list[str]) -> None:
    spec = select(make_problem(head_dim=head_dim, **options), H200).spec
    names = ("causal", "window", "softcap", "sink", "alibi", "bias_float32", "negate_scores")
    assert {name for name in names if getattr(spec, name)} == set(fields)


@pytest.mark.parametrize(
    ("head_dim", "options", "tile"),
    [
        # Blocks of 128 keys cover a window of 64 + 1 + 64 with 384 keys, those of 64 with 256.
        *((d, {"window_size": (64, 64)}, (128, 64)) for d in (64, 128)),
        *((d, {"window_size": (64, 0)}, (128, 64)) for d in (64, 128)),
        *((d, {"window_size": (128, 0)}, (128, 128)) for d in (64, 128)),
        *((d, {"window_size": (1024, 0)}, (128, 128)) for d in (64, 128)),
        *((d, {"window_size": (128, 128)}, (128, 128)) for d in (64, 128)),
        (64, {"window_size": (1025, 0)}, (192, 96)),
        (64, {"window_size": (128, None)}, (192, 96)),
        (64, {}, (192, 96)),
        (64, {"softcap": 30.0}, (192, 64)),
        (64, {"alibi": True}, (192, 96)),
        (64, {"alibi": True, "window_size": (2000, 0)}, (192, 64)),
        (64, {"softcap": 30.0, "window_size": (128, 0)}, (128, 128)),
        (128, {"softcap": 30.0}, (128, 128)),
        (128, {"alibi": True}, (128, 128)),
        (128, {"softcap": 30.0, "alibi": True}, (128, 112)),
        (192, {"softcap": 30.0, "alibi": True}, (128, 80)),
    ],
    ids=str,
)
def test_rows_for_windows_and_score_modifiers(head_dim: int, options: dict[str, Any], tile: tuple[int, int]) -> None:
    spec = select(make_problem(head_dim=head_dim, seqlen_q=8192, seqlen_k=8192, **options), H200).spec
    assert (spec.tile_m, spec.tile_n) == tile


#: A bias of a problem with 300 queries and 500 keys, in float32 or float16, and how a kernel gets at it. Rows of 500
#: elements are 2000 or 1000 bytes, of which only the first number is a multiple of 16.
BIASES: list[tuple[tuple[int, ...] | Operand, Any, Bias]] = [
    ((300, 500), np.float32, Bias.TILE),
    ((2, 6, 300, 500), np.float32, Bias.TILE),
    ((6, 300, 500), np.float16, Bias.GATHER),
    ((1, 500), np.float16, Bias.ROW),
    ((2, 1, 1, 500), np.float32, Bias.ROW),
    ((2, 1, 1, 500), np.float16, Bias.GATHER),
    ((300, 1), np.float32, Bias.GATHER),
    ((1, 1), np.float32, Bias.GATHER),
    (Operand("bias", (300, 500), (2016, 4), np.dtype(np.float32), 0), None, Bias.TILE),
    (Operand("bias", (300, 500), (2016, 4), np.dtype(np.float32), 0, aligned=False), None, Bias.GATHER),
    (Operand("bias", (300, 500), (2004, 4), np.dtype(np.float32), 0), None, Bias.GATHER),
    (Operand("bias", (300, 500), (2**40, 4), np.dtype(np.float32), 0), None, Bias.GATHER),
    (Operand("bias", (300, 500), (4, 1200), np.dtype(np.float32), 0), None, Bias.GATHER),
    (Operand("bias", (6, 300, 500), (4, 12000, 24), np.dtype(np.float32), 0), None, Bias.GATHER),
    (Operand("bias", (6, 300, 500), (4, 12000, 4), np.dtype(np.float32), 0), None, Bias.GATHER),
    (Operand("bias", (300, 500), (0, 4), np.dtype(np.float32), 0), None, Bias.ROW),  # broadcast by NumPy
]


@pytest.mark.parametrize(("bias", "dtype", "access"), BIASES, ids=str)
def test_how_a_kernel_gets_at_a_bias(bias: tuple[int, ...] | Operand, dtype: Any, access: Bias) -> None:
    given = make_problem(bias=bias, bias_dtype=dtype)
    spec = select(given, H200).spec
    assert given.bias_access is spec.bias is access
    assert spec.bias_float32 == (given.bias.dtype == np.float32)


def test_one_row_or_one_key_takes_any_stride() -> None:
    one_row = Operand("bias", (1, 500), (12, 4), np.dtype(np.float32), 0)
    assert select(make_problem(seqlen_q=1, bias=one_row), H200).spec.bias is Bias.ROW
    one_key = Operand("bias", (300, 1), (16, 12), np.dtype(np.float32), 0)
    assert select(make_problem(seqlen_k=1, bias=one_key), H200).spec.bias is Bias.TILE


@pytest.mark.parametrize(
    ("head_dim", "bias", "dtype", "tile"),
    [
        (64, (300, 504), np.float32, (128, 64)),
        (64, (300, 504), np.float16, (128, 128)),
        (64, (300, 1), np.float16, (128, 64)),
        (128, (300, 504), np.float32, (128, 64)),
        (128, (300, 504), np.float16, (128, 96)),
        (128, (300, 1), np.float16, (128, 64)),
        (192, (300, 504), np.float32, (128, 64)),
        (192, (300, 504), np.float16, (128, 80)),
        (192, (300, 1), np.float32, (128, 64)),
        (256, (300, 504), np.float32, (128, 48)),
        (256, (300, 504), np.float16, (128, 48)),
        (256, (300, 1), np.float16, (128, 32)),
    ],
    ids=str,
)
def test_rows_for_biases(head_dim: int, bias: tuple[int, ...], dtype: Any, tile: tuple[int, int]) -> None:
    given = make_problem(head_dim=head_dim, seqlen_k=504, bias=bias, bias_dtype=dtype)
    selection = select(given, H200)
    assert (selection.spec.tile_m, selection.spec.tile_n) == tile
    fitting = [verdict for verdict in selection.verdicts if verdict.candidate.head_dim_v >= head_dim]
    lost = {verdict.reason for verdict in fitting if "no bias" in verdict.candidate.bias}
    assert len(lost) == 1
    assert re.match(r"is for no bias, the problem has a (gathered bias|bias of (16 bits|float32))$", lost.pop())


#: Kernels that are there to be measured against, by the field that says so; and what they need beside it.
COMPARED: dict[str, dict[str, Any]] = {
    "warp_specialized": {
        "q_stages": 1,
        "scheduler": Scheduler.ONE_TILE,
        "setmaxnreg": False,
        "warp_specialized": False,
    },
    "three_stage": {"speculative": False, "three_stage": True},
}


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize(
    "options", [{"window_size": (64, None)}, {"softcap": 30.0}, {"alibi": True}, {"bias": (300, 500)}], ids=str
)
def test_kernels_for_comparisons_refuse_options(options: dict[str, Any], name: str) -> None:
    config = COMPARED[name]
    message = (
        rf"^attention: config has {name}={config[name]}; that kernel is for comparisons, and has no packed sequences, "
        rf"no left side of a window, no softcap, no ALiBi and no bias: set {name}={not config[name]}$"
    )
    with pytest.raises(ValueError, match=message):
        select(make_problem(head_dim=128, **options), H200, config)
    with pytest.raises(ValueError, match=message):  # whatever else is wrong with the combination
        select(make_problem(head_dim=128, **options), H200, {name: config[name]})


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (None, 64)}, {"window_size": (499, None)}, {"sink": True}],
    ids=str,
)
def test_kernels_for_comparisons_have_the_rest(options: dict[str, Any], name: str) -> None:
    spec = select(make_problem(head_dim=128, **options), H200, COMPARED[name]).spec
    plain = select(make_problem(head_dim=128, **options), H200).spec
    assert spec == dataclasses.replace(plain, **COMPARED[name])


def test_selection_is_pure() -> None:
    one, two = (select(problem(72), H200, {"speculative": False}) for _ in range(2))
    assert (one.spec, one.verdicts, dict(one.overrides)) == (two.spec, two.verdicts, dict(two.overrides))
    other_hopper = Device((9, 0), 78, 50 * 2**20)
    assert select(problem(72), other_hopper).spec == select(problem(72), H200).spec


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (10, 3), (12, 0)])
def test_other_gpus_are_refused(capability: tuple[int, int]) -> None:
    major, minor = capability
    message = rf"^attention: the GPU has compute capability {major}\.{minor}; there are kernels for 9\.0 \(Hopper"
    with pytest.raises(cupyfa.UnsupportedError, match=message):
        select(problem(), Device(capability, 132, 2**25))


# --- config= ---

OVERRIDES: dict[str, Any] = {
    "tile_m": 192,
    "tile_n": 64,
    "stages": 3,
    "q_stages": 1,
    "bias_stages": 1,
    "overlap": False,
    "three_stage": True,
    "speculative": False,
    "rescale_threshold": 8,
    "exp2_fma": 2,
    "pingpong": True,
    "warp_specialized": False,
    "scheduler": Scheduler.ONE_TILE,
    "longest_first": False,
    "setmaxnreg": False,
}
#: What a field's other value needs beside it: see test_bad_configs.
NEEDS: dict[str, dict[str, Any]] = {
    "overlap": {"speculative": False},  # see test_bad_configs
    "three_stage": {"speculative": False},
    "rescale_threshold": {"speculative": False},
    "warp_specialized": {"q_stages": 1, "pingpong": False, "scheduler": Scheduler.ONE_TILE, "setmaxnreg": False},
}
DECIDED = {"dtype": DType.BFLOAT16, "head_dim": 64, "head_dim_v": 64, "bias": Bias.TILE} | dict.fromkeys(
    ("varlen", "causal", "window", "sink", "softcap", "alibi", "bias_float32", "negate_scores"), True
)


def test_every_field_is_either_free_or_decided_by_the_problem() -> None:
    assert OVERRIDES.keys() | DECIDED.keys() == {field.name for field in dataclasses.fields(FwdSpec)}


@pytest.mark.parametrize("name", OVERRIDES)
def test_config_overrides_one_field(name: str) -> None:
    base = NEEDS.get(name, {})
    posed = make_problem(head_dim=128, dtype=BF16, bias=(300, 504) if name == "bias_stages" else None, seqlen_k=504)
    plain = select(posed, H200, base)
    overrides = base | {name: OVERRIDES[name]}
    changed = select(posed, H200, overrides)
    assert changed.spec == dataclasses.replace(plain.spec, **overrides) != plain.spec
    assert dict(changed.overrides) == overrides
    assert dict(plain.overrides) == base


@pytest.mark.parametrize("name", DECIDED)
def test_config_cannot_override_the_problem(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^attention: config has the field '{name}'; it can override tile_m, tile_n, stages"
    ):
        select(problem(), H200, {name: DECIDED[name]})


def test_scheduler_may_be_given_by_name() -> None:
    assert select(problem(), H200, {"scheduler": "one_tile"}).spec.scheduler is Scheduler.ONE_TILE
    for member in Scheduler:
        assert config_items({"scheduler": member.value}) == (("scheduler", member),)


def test_numpy_scalars_are_numbers() -> None:
    assert config_items({"tile_n": np.int64(64), "overlap": np.bool_(False)}) == (("overlap", False), ("tile_n", 64))


def test_equal_configs_are_equal_keys() -> None:
    assert config_items({"tile_n": 64, "stages": 3}) == config_items({"stages": 3, "tile_n": 64})
    assert config_items({}) == ()


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (3, TypeError, r"^attention: config is 3; it must be a mapping of FwdSpec fields or None$"),
        ([("tile_n", 64)], TypeError, r"^attention: config is \[\('tile_n', 64\)\]; it must be a mapping"),
        ({"": 1}, ValueError, r"^attention: config has the field ''; it can override"),
        ({3: 1}, ValueError, r"^attention: config has the field 3; it can override"),
        ({"tile_n": True}, TypeError, r"^attention: config\['tile_n'\] is True; it must be an integer$"),
        (
            {"tile_n": 16},
            ValueError,
            r"^attention: config\['tile_n'\] is 16; it must be one of 32, 48, 64, 80, 96, 112",
        ),
        ({"tile_m": 256}, ValueError, r"^attention: config\['tile_m'\] is 256; it must be one of 64, 128, 192$"),
        ({"stages": 0}, ValueError, r"^attention: config\['stages'\] is 0; it must be one of 1, 2"),
        ({"q_stages": -1}, ValueError, r"^attention: config\['q_stages'\] is -1; it must be one of 1, 2"),
        ({"overlap": 0}, TypeError, r"^attention: config\['overlap'\] is 0; it must be True or False$"),
        ({"overlap": None}, TypeError, r"^attention: config\['overlap'\] is None; it must be True or False$"),
        (
            {"scheduler": []},
            ValueError,
            r"^attention: config\['scheduler'\] is \[\]; .* one of 'one_tile', 'persistent', 'dynamic'$",
        ),
        (
            {"overlap": False},
            ValueError,
            r"^attention: config has speculative=True with overlap=False; .*: set overlap=True, or speculative=False$",
        ),
        (
            {"rescale_threshold": 8},
            ValueError,
            r"^attention: config has rescale_threshold 8 with speculative=True; .*: set speculative=False, or resc",
        ),
        (
            {"exp2_fma": 1, "speculative": False},
            ValueError,
            r"^attention: config has exp2_fma 1 with speculative=False; .*: set speculative=True, or exp2_fma to 0$",
        ),
        ({"bias_stages": 0}, ValueError, r"^attention: config\['bias_stages'\] is 0; it must be one of 1, 2"),
        (
            {"bias_stages": 2},
            ValueError,
            r"^attention: config has bias_stages 2; no bias comes through a ring here: leave it out, or pass a",
        ),
        ({"exp2_fma": 9}, ValueError, r"^attention: config\['exp2_fma'\] is 9; it must be one of 0, 1, "),
        *(
            (
                {"three_stage": True, "speculative": False} | {name: value},
                ValueError,
                rf"^attention: config has three_stage=True with {name}={value}; .*: set {name}={not value}, or three_",
            )
            for name, value in (("overlap", False), ("speculative", True), ("pingpong", True))
        ),
        (
            {"three_stage": True, "speculative": False, "stages": 1},
            ValueError,
            r"^attention: config has three_stage=True with stages 1; .*: set stages to 2 or more, or three_",
        ),
        (
            {"tile_m": 64, "pingpong": True},
            ValueError,
            r"^attention: config has tile_m 64 with pingpong=True; pingpong needs two consumer",
        ),
        ({"tile_m": 64, "pingpong": False}, ValueError, r"^attention: config has tile_m 64 with setmaxnreg=True; "),
        (
            {"warp_specialized": False},
            ValueError,
            r"^attention: config has warp_specialized=False with q_stages=2, scheduler='dynamic', setmaxnreg=True; .*: "
            r"set q_stages=1, scheduler='one_tile', setmaxnreg=False$",
        ),
        (
            {**NEEDS["warp_specialized"], "warp_specialized": False, "pingpong": True, "stages": 1, "overlap": False},
            ValueError,
            r"^attention: config has warp_specialized=False with stages=1, overlap=False, pingpong=True; .*: "
            r"set stages=2, overlap=True, pingpong=False$",
        ),
    ],
    ids=str,
)
def test_bad_configs(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        select(problem(dtype=BF16), H200, config)
