"""Which kernel computes the gradients of a problem, why not another one, and what has none."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyfa.backward_problem import BackwardArrays, BackwardProblem
from cupyfa.backward_select import (
    BWD_CANDIDATES,
    BackwardSelection,
    backward_config,
    bias_gradient_spec,
    select_backward,
)
from cupyfa.errors import UnsupportedError
from cupyfa.operand import Operand
from cupyfa.options import check_options
from cupyfa.select import H200, Device
from cupyfa.spec import Bias, DType


def problem_of(
    batch: int = 1,
    seqlen_q: int = 200,
    seqlen_k: int = 300,
    *,
    heads_q: int = 4,
    heads_kv: int = 2,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: Any = ml_dtypes.bfloat16,
    dlse: bool = False,
    sink: bool = False,
    alibi: bool = False,
    bias: str = "",
    bias_dtype: Any = np.float32,
    bias_aligned: bool = True,
    deterministic: bool = False,
    packed: bool = False,
    used: bool = False,
    strides: dict[str, tuple[int, ...]] | None = None,
    **options: Any,
) -> BackwardProblem:
    """A problem of those sizes; nobody has its memory. Packed: `batch` sequences in arrays of these lengths.

    `bias`: the axes that it has, of "bhqk".
    """
    columns = head_dim if head_dim_v is None else head_dim_v
    rows, keys = (batch, seqlen_q, heads_q), (batch, seqlen_k, heads_kv)
    matrices = {"q": (*rows, head_dim), "k": (*keys, head_dim), "v": (*keys, columns), "out": (*rows, columns)}
    matrices |= {"dout": matrices["out"]} | {f"d{name}": matrices[name] for name in "qkv"}
    numbers: dict[str, tuple[int, ...]] = {"lse": (batch, heads_q, seqlen_q)}
    numbers |= {"dlse": numbers["lse"]} if dlse else {}
    lengths = {}
    if packed:
        matrices = {name: shape[1:] for name, shape in matrices.items()}
        numbers = {name: shape[1:] for name, shape in numbers.items()}
        lengths = {f"cu_seqlens_{side}": (batch + 1,) for side in "qk"}
        lengths |= {f"seqused_{side}": (batch,) for side in "qk" if used}
    numbers |= {"sink": (heads_q,)} if sink else {}
    numbers |= {"alibi_slopes": (heads_q,)} if alibi else {}
    operands = {name: Operand.contiguous(name, shape, np.dtype(dtype), 0) for name, shape in matrices.items()}
    operands |= {name: Operand.contiguous(name, shape, np.float32, 0) for name, shape in numbers.items()}
    operands |= {name: Operand.contiguous(name, shape, np.int32, 0) for name, shape in lengths.items()}
    if bias:
        sizes = {"b": batch, "h": heads_q, "q": seqlen_q, "k": seqlen_k}
        shape = tuple(sizes[axis] if axis in bias else 1 for axis in "bhqk")[0 if "b" in bias else 1 :]
        contiguous = Operand.contiguous("bias", shape, np.dtype(bias_dtype), 0)
        operands["bias"] = dataclasses.replace(contiguous, aligned=bias_aligned)
    for name, those in (strides or {}).items():
        operands[name] = dataclasses.replace(operands[name], strides=those)
    return BackwardProblem.of(
        BackwardArrays(**operands), check_options(**options), deterministic=deterministic, current_device=0
    )


def select(device: Device = H200, config: dict[str, Any] | None = None, **problem: Any) -> BackwardSelection:
    return select_backward(problem_of(**problem), device, backward_config(config))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "softcap", "deterministic", "expected"),
    [
        (64, None, None, False, (128, 128, 2, 2)),
        (64, None, None, True, (128, 128, 2, 2)),
        (64, None, 3.0, False, (64, 128, 2, 2)),
        (64, None, 3.0, True, (64, 128, 2, 2)),
        (8, None, None, False, (128, 128, 2, 2)),
        (72, None, None, False, (64, 128, 3, 3)),
        (96, None, None, True, (64, 128, 2, 2)),
        (128, None, None, False, (64, 128, 3, 3)),
        (64, 128, None, False, (64, 128, 3, 3)),
        (128, 64, None, True, (64, 128, 2, 2)),
        (128, None, 3.0, False, (128, 64, 2, 1)),
        (128, None, 3.0, True, (128, 64, 2, 1)),
        (72, None, 3.0, False, (128, 64, 2, 1)),
        (40, 72, 3.0, False, (128, 64, 2, 1)),
        (136, None, None, False, (64, 64, 2, 1)),
        (136, 8, None, False, (128, 64, 2, 1)),
        (192, 128, None, False, (128, 64, 2, 1)),
        (192, 128, None, True, (64, 64, 2, 1)),
        (192, 128, 3.0, False, (64, 64, 2, 1)),
        (192, 192, None, False, (64, 64, 2, 1)),
        (64, 256, None, False, (64, 64, 2, 1)),
        (256, None, None, True, (64, 64, 2, 1)),
        (256, None, 3.0, True, (64, 64, 2, 1)),
    ],
)
def test_tiles_and_slots(
    head_dim: int, head_dim_v: int | None, softcap: float | None, deterministic: bool, expected: tuple[int, ...]
) -> None:
    selection = select(head_dim=head_dim, head_dim_v=head_dim_v, softcap=softcap, deterministic=deterministic)
    spec = selection.spec
    assert (spec.tile_m, spec.tile_n, spec.q_stages, spec.dout_stages) == expected
    assert (spec.softcap, spec.deterministic, spec.setmaxnreg) == (softcap is not None, deterministic, True)
    chosen = BWD_CANDIDATES.index(selection.candidate)
    assert selection.objections.index(None) == chosen
    assert len(selection.objections) == len(BWD_CANDIDATES)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "softcap", "padded"),
    [
        (8, 8, None, (64, 64)),
        (64, 64, None, (64, 64)),
        (72, 40, None, (96, 64)),
        (40, 96, None, (64, 96)),
        (104, 72, None, (128, 96)),
        (128, 128, None, (128, 128)),
        (64, 64, 3.0, (64, 64)),
        # Warpgroups share the keys of these, and each has at least half a panel of 64 columns.
        (72, 40, 3.0, (128, 64)),
        (136, 8, None, (192, 64)),
        (64, 192, None, (64, 192)),
        (192, 128, None, (192, 128)),
        (200, 136, None, (256, 192)),
        (256, 256, None, (256, 256)),
    ],
)
def test_head_dims_are_filled_up(
    head_dim: int, head_dim_v: int, softcap: float | None, padded: tuple[int, int]
) -> None:
    selection = select(head_dim=head_dim, head_dim_v=head_dim_v, softcap=softcap)
    spec = selection.spec
    assert (spec.head_dim, spec.head_dim_v) == padded
    assert spec.head_dim == selection.candidate.columns(head_dim)
    assert spec.head_dim_v == selection.candidate.columns(head_dim_v)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, ""),
        ({"causal": True}, "causal"),
        ({"window_size": (30, None)}, "window"),
        ({"window_size": (None, 30)}, "causal"),
        ({"window_size": (0, 0)}, "causal window"),
        ({"causal": True, "window_size": (30, None)}, "causal window"),
        ({"alibi": True}, "alibi"),
        ({"sink": True, "dlse": True, "softmax_scale": -0.5}, ""),  # data, not instructions
        ({"softcap": 5.0}, "softcap"),
    ],
    ids=str,
)
def test_options_are_fields(options: dict[str, Any], fields: str, dtype: DType) -> None:
    spec = select(dtype=np.dtype(dtype.value), **options).spec
    assert spec.dtype is dtype
    assert {name for name in ("causal", "window", "softcap", "alibi", "deterministic") if getattr(spec, name)} == {
        *fields.split()
    }


def test_each_row_is_somebodys_and_has_a_reason() -> None:
    chosen = {
        select(head_dim=head_dim, head_dim_v=head_dim_v, softcap=softcap, deterministic=deterministic, **bias).candidate
        for head_dim, head_dim_v in dict.fromkeys((row.head_dim, row.head_dim_v) for row in BWD_CANDIDATES)
        for softcap in (None, 5.0)
        for deterministic in (False, True)
        for bias in ({}, {"bias": "qk"}, {"bias": "qk", "bias_dtype": ml_dtypes.bfloat16})
    }
    assert chosen == {*BWD_CANDIDATES}
    assert len({row.reason for row in BWD_CANDIDATES}) == len(BWD_CANDIDATES)


WIDE, WIDE_V, CAPPED, WAITS, BIAS_16, BIAS_32 = (
    "head_dim 128 exceeds 64",
    "head_dim_v 128 exceeds 64",
    "it has no room for the slopes of a softcap",
    "it has no room for a dQ that waits for its turn",
    "it has no room for a bias of 16 bits",
    "it has no room for a bias of 32 bits",
)


@pytest.mark.parametrize(
    ("options", "objections"),
    [
        ({}, (WIDE, WIDE, *[None] * 7)),
        ({"deterministic": True}, (WIDE, WIDE, WAITS, WAITS, None, None, None, WAITS, None)),
        ({"softcap": 5.0}, (WIDE, WIDE, *[CAPPED] * 4, None, CAPPED, None)),
        ({"softcap": 5.0, "deterministic": True}, (WIDE, WIDE, *[CAPPED] * 4, None, CAPPED, None)),
        ({"head_dim": 64}, (None,) * 9),
        ({"head_dim": 64, "softcap": 5.0}, (CAPPED, None, *[CAPPED] * 4, None, CAPPED, None)),
        ({"head_dim": 64, "head_dim_v": 128}, (WIDE_V, WIDE_V, *[None] * 7)),
        ({"bias": "qk"}, (WIDE, WIDE, BIAS_32, None, BIAS_32, None, BIAS_32, BIAS_32, None)),
        (
            {"bias": "qk", "deterministic": True},
            (WIDE, WIDE, WAITS, WAITS, BIAS_32, None, BIAS_32, WAITS, None),
        ),
        (
            {"bias": "bhqk", "bias_dtype": ml_dtypes.bfloat16},
            (WIDE, WIDE, BIAS_16, None, None, None, BIAS_16, BIAS_16, None),
        ),
        ({"bias": "k"}, (WIDE, WIDE, *[None] * 7)),  # a row, and a column, take no shared memory of tiles
        ({"bias": "bq", "deterministic": True}, (WIDE, WIDE, WAITS, WAITS, None, None, None, WAITS, None)),
    ],
    ids=str,
)
def test_objections(options: dict[str, Any], objections: tuple[str | None, ...]) -> None:
    assert select(**options).objections == objections


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sizes_decide_about_parts_alone(head_dim: int) -> None:
    few = select(seqlen_q=1, seqlen_k=1, head_dim=head_dim).spec
    many = select(seqlen_q=4096, seqlen_k=8192, batch=70_000, heads_q=64, head_dim=head_dim).spec
    assert (few.partial, many.partial) == (True, False)
    assert dataclasses.replace(few, partial=False) == many


# --- A bias ---


@pytest.mark.parametrize(
    ("axes", "kind"),
    [
        ("", Bias.NONE), ("bhqk", Bias.TILE), ("qk", Bias.TILE), ("bk", Bias.ROW), ("k", Bias.ROW), ("hq", Bias.COLUMN),
        ("bh", Bias.COLUMN),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_axes_of_a_bias_decide_how_it_is_read(axes: str, kind: Bias, dtype: Any) -> None:
    problem = problem_of(bias=axes, bias_dtype=dtype, dtype=np.float16, causal=True, softcap=5.0)
    spec = select_backward(problem, H200).spec
    assert problem.bias_kind is spec.bias is kind
    assert spec.bias_float32 == (dtype == np.float32 and kind is not Bias.NONE)


def test_a_bias_of_one_query_or_one_key_has_one_row_or_column() -> None:
    assert select(seqlen_q=1, bias="hqk").spec.bias is Bias.ROW
    assert select(seqlen_k=1, bias="hqk").spec.bias is Bias.COLUMN
    assert select(seqlen_q=1, seqlen_k=1, bias="hqk").spec.bias is Bias.COLUMN


@pytest.mark.parametrize(
    ("head_dims", "stages"), [((64, 64), 3), ((40, 72), 2), ((128, 128), 2), ((192, 128), 1), ((64, 256), 1)]
)
def test_the_kernel_of_the_gradient_of_a_bias(head_dims: tuple[int, int], stages: int) -> None:
    """It has the scores of the other kernel."""
    options: dict[str, Any] = {"causal": True, "window_size": (30, None), "softcap": 5.0, "alibi": True}
    for name, value in options.items():
        spec = select(head_dim=head_dims[0], head_dim_v=head_dims[1], bias="hk", **{name: value}).spec
        of_bias = bias_gradient_spec(spec)
        assert of_bias.stages == stages
        shared = ("dtype", "head_dim", "head_dim_v", "causal", "window", "softcap", "alibi", "bias", "bias_float32")
        assert all(getattr(spec, field) == getattr(of_bias, field) for field in shared)
    assert str(of_bias).startswith("gradient of a bias sm_90a bfloat16 d")
    assert str(of_bias).endswith(f" stages {stages} alibi bias_float32 bias row")


# --- Query heads that share a key head ---


@pytest.mark.parametrize(
    ("sizes", "heads_per_part", "parts"),
    [
        ({"heads_q": 8, "heads_kv": 1}, 1, 8),  # a head for each CTA
        ({"heads_q": 4, "heads_kv": 4}, 1, 1),
        ({"heads_q": 64, "heads_kv": 1, "seqlen_k": 3 * 128}, 2, 32),  # 44 would fit, but 22 would have one head
        ({"heads_q": 10, "heads_kv": 2, "seqlen_k": 33 * 128}, 3, 2),  # the last part has two heads
        ({"heads_q": 14, "heads_kv": 2, "seqlen_k": 13 * 128}, 2, 4),
        ({"heads_q": 8, "heads_kv": 1, "seqlen_k": 66 * 128}, 4, 2),
        ({"heads_q": 8, "heads_kv": 1, "seqlen_k": 66 * 128 + 1}, 8, 1),  # two parts need more CTAs than the GPU has
        ({"heads_q": 8, "heads_kv": 1, "seqlen_k": 132 * 128}, 8, 1),
        ({"heads_q": 16, "heads_kv": 2, "batch": 40}, 8, 1),
        ({"heads_q": 8, "heads_kv": 1, "seqlen_k": 33 * 128}, 2, 4),
        ({"heads_q": 8, "heads_kv": 1, "seqlen_k": 33 * 128, "head_dim": 256}, 4, 2),  # tiles of 64 keys
    ],
    ids=str,
)
def test_who_shares_a_key_tile(sizes: dict[str, int], heads_per_part: int, parts: int) -> None:
    selection = select(**sizes)
    assert (selection.heads_per_part, selection.parts) == (heads_per_part, parts)
    assert selection.spec.partial == (parts > 1)


def test_a_smaller_gpu_has_fewer_parts() -> None:
    sizes = {"heads_q": 8, "heads_kv": 1, "seqlen_k": 33 * 128}
    assert select(Device((9, 0), 78, 2**25), **sizes).parts == 2


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 64, 71])
@pytest.mark.parametrize("tile", [128, 64])
def test_parts_have_all_query_heads_and_no_more_ctas_than_the_gpu(group: int, tile: int) -> None:
    shared = 0
    for key_tiles in (1, 2, 3, 5, 11, 26, 44, 65, 66, 67, 131, 132, 133, 1000):
        selection = select(
            heads_q=group, heads_kv=1, seqlen_k=key_tiles * tile, head_dim={128: 64, 64: 256}[tile], seqlen_q=1
        )
        assert selection.spec.tile_n == tile
        heads_per_part, parts = selection.heads_per_part, selection.parts
        assert (parts - 1) * heads_per_part < group <= parts * heads_per_part  # none without heads
        assert parts == 1 or parts * key_tiles <= H200.multiprocessors
        # Parts of fewer heads would be too many.
        if heads_per_part > 1:
            assert -(-group // (heads_per_part - 1)) * key_tiles > H200.multiprocessors
        shared += parts > 1
    assert shared == (0 if group == 1 else 9)


# --- Packed sequences ---


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_sequences_are_a_field(head_dim: int) -> None:
    """Their tiles and slots are those of others; no CTAs share a key tile, for nobody has counted them."""
    few = select(batch=3, heads_q=8, heads_kv=1, head_dim=head_dim, packed=True)
    assert (few.spec.varlen, few.spec.partial, few.heads_per_part, few.parts) == (True, False, 8, 1)
    equal = select(batch=3, heads_q=8, heads_kv=1, head_dim=head_dim)
    assert not equal.spec.varlen
    assert dataclasses.replace(few.spec, varlen=False, partial=True) == equal.spec
    assert few.candidate == equal.candidate


def test_how_many_packed_sequences_there_are_decides_about_nothing() -> None:
    specs = {
        select(batch=batch, seqlen_q=total, seqlen_k=2 * total, packed=True, used=used).spec
        for batch, total, used in ((1, 7, False), (70_000, 2**20, True), (70_000, 3, False))
    }
    assert len(specs) == 1


@pytest.mark.parametrize("heads_kv", [0, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_arrays_without_heads_have_a_kernel_that_nobody_launches(heads_kv: int, packed: bool) -> None:
    selection = select(heads_q=0, heads_kv=heads_kv, packed=packed)
    assert (selection.heads_per_part, selection.parts) == (1, 1)


# --- What has no kernel ---


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_another_architecture(capability: tuple[int, int]) -> None:
    message = (
        rf"^attention: the GPU has compute capability {capability[0]}\.{capability[1]}; gradients have kernels for "
        r"9\.0 \(Hopper: H100, H200\)\. NumPy arrays run on the CPU$"
    )
    with pytest.raises(UnsupportedError, match=message):
        select(Device(capability, 132, 2**25))


@pytest.mark.parametrize("sizes", [{"head_dim": 264}, {"head_dim": 64, "head_dim_v": 264}], ids=str)
def test_a_wide_head_dim(sizes: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match=r"^attention: .*head_dim(_v)? 264"):
        select(**sizes)


def test_the_last_row_takes_whatever_the_checks_let_pass() -> None:
    last = BWD_CANDIDATES[-1]
    widest = max(max(row.head_dim, row.head_dim_v) for row in BWD_CANDIDATES)
    assert last.head_dim == last.head_dim_v == widest
    assert last.objection(problem_of(head_dim=widest, softcap=5.0, deterministic=True, bias="hqk")) is None
    wider = widest + 8
    message = rf"^attention: q has head_dim {wider}; supported are the multiples of 8 from 8 to {widest}$"
    with pytest.raises(UnsupportedError, match=message):
        select(head_dim=wider)


# --- config= ---


def test_config_overrides_fields() -> None:
    config = {"q_stages": np.int64(2), "dout_stages": 1, "setmaxnreg": np.bool_(False)}
    spec = select(config=config).spec
    assert (spec.q_stages, spec.dout_stages, spec.setmaxnreg) == (2, 1, False)
    assert backward_config(config) == (("dout_stages", 1), ("q_stages", 2), ("setmaxnreg", False))
    assert [type(value) for _, value in backward_config(config)] == [int, int, bool]
    assert backward_config(None) == backward_config({}) == ()


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (3, TypeError, "config is 3; it must be a mapping of BwdSpec fields or None"),
        ([("q_stages", 2)], TypeError, "config is [('q_stages', 2)]; it must be a mapping of BwdSpec fields or None"),
        ({"q_stages": 2.0}, TypeError, "config['q_stages'] is 2.0; it must be an integer"),
        ({"q_stages": True}, TypeError, "config['q_stages'] is True; it must be an integer"),
        ({"q_stages": 1}, ValueError, "config['q_stages'] is 1; it must be one of 2, 3, 4"),
        ({"q_stages": 5}, ValueError, "config['q_stages'] is 5; it must be one of 2, 3, 4"),
        ({"dout_stages": 0}, ValueError, "config['dout_stages'] is 0; it must be one of 1, 2, 3, 4"),
        ({"setmaxnreg": 1}, TypeError, "config['setmaxnreg'] is 1; it must be True or False"),
        (
            {"tile_m": 64},
            ValueError,
            "config has the field 'tile_m'; gradients can override q_stages, dout_stages, setmaxnreg",
        ),
    ],
    ids=str,
)
def test_bad_config(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape('attention: ' + message)}$"):
        backward_config(config)
