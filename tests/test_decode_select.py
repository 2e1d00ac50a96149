"""Which decode kernel computes a problem over a cache, and into how many splits its keys are cut."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyfa.cache_options import CacheArrays, check_cache_options
from cupyfa.cache_problem import CacheProblem
from cupyfa.decode_select import DecodeSelection, decode_config, select_decode
from cupyfa.errors import UnsupportedError
from cupyfa.operand import Operand
from cupyfa.select import H200, Device
from cupyfa.spec import DType

SMALL = Device((9, 0), 20, 2**20)


def operand(name: str, shape: tuple[int, ...], dtype: Any) -> Operand:
    strides = [np.dtype(dtype).itemsize]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * max(size, 1))
    return Operand(name, shape, tuple(strides), np.dtype(dtype), 0)


def problem_of(
    batch: int = 1,
    capacity: int = 4096,
    *,
    heads_q: int = 8,
    heads_kv: int = 8,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    seqlen_q: int = 1,
    page_size: int | None = None,
    dtype: Any = ml_dtypes.bfloat16,
    alibi: bool = False,
    **options: Any,
) -> CacheProblem:
    """A problem of those sizes; nobody has its memory."""
    rows, keys = (batch, capacity) if page_size is None else (batch * capacity // page_size, page_size)
    matrices: dict[str, tuple[int, ...]] = {
        "q": (batch, seqlen_q, heads_q, head_dim),
        "k_cache": (rows, keys, heads_kv, head_dim),
        "v_cache": (rows, keys, heads_kv, head_dim if head_dim_v is None else head_dim_v),
    }
    operands = {name: operand(name, shape, dtype) for name, shape in matrices.items()}
    operands["cache_seqlens"] = operand("cache_seqlens", (batch,), np.int32)
    if page_size is not None:
        operands["page_table"] = operand("page_table", (batch, capacity // page_size), np.int32)
    if alibi:
        operands["alibi_slopes"] = operand("alibi_slopes", (heads_q,), np.float32)
    return CacheProblem.of(CacheArrays(**operands), check_cache_options(**options), want_lse=True, current_device=0)


def select(*sizes: int, device: Device = H200, config: dict[str, int] | None = None, **more: Any) -> DecodeSelection:
    return select_decode(problem_of(*sizes, **more), device, decode_config(config))


def tile(selection: DecodeSelection) -> tuple[int, int, int, int]:
    spec = selection.spec
    return spec.tile_m, spec.stages, spec.key_groups, spec.residents


@pytest.mark.parametrize(
    ("batch", "heads_kv", "capacity", "splits", "cluster"),
    [
        (1, 8, 4096, 16, 1),  # as many as fill the multiprocessors once
        (1, 8, 131_072, 16, 1),
        (8, 8, 16_384, 2, 2),
        (16, 8, 32_768, 1, 1),
        (64, 8, 16_384, 1, 1),
        (1, 1, 131_072, 132, 1),
        (1, 1, 4096, 32, 1),  # each of two blocks
        (1, 1, 129, 2, 2),
        (1, 1, 128, 1, 1),
        (1, 1, 1, 1, 1),
        (3, 2, 1000, 8, 1),
    ],
)
def test_splits_fill_the_gpu(batch: int, heads_kv: int, capacity: int, splits: int, cluster: int) -> None:
    chosen = select(batch, capacity, heads_q=4 * heads_kv, heads_kv=heads_kv)
    assert (chosen.splits, chosen.blocks_per_split, chosen.cluster) == (splits, 0, cluster)
    assert chosen.parts == (0 if splits == cluster else splits * chosen.spec.key_groups)
    blocks = -(-capacity // 64)
    tiles = batch * heads_kv
    assert chosen.reason == f"{tiles} tiles on 132 multiprocessors, at most {blocks} blocks of 64 keys"


def test_splits_of_random_sizes() -> None:
    choice = random.Random(0)
    for _ in range(500):
        batch, heads, capacity = choice.randrange(1, 300), choice.randrange(1, 17), choice.randrange(1, 50_000)
        for device in (H200, SMALL):
            chosen = select(batch, capacity, heads_q=heads, heads_kv=heads, device=device)
            tiles, blocks = batch * heads, -(-capacity // 64)
            assert chosen.splits >= 1
            assert chosen.splits == 1 or tiles * chosen.splits <= device.multiprocessors
            assert chosen.splits == 1 or 2 * (chosen.splits - 1) < blocks
            more = select(batch, 2 * capacity, heads_q=heads, heads_kv=heads, device=device)
            assert more.splits >= chosen.splits


def test_rows_of_a_group_share_a_tile() -> None:
    assert tile(select(heads_q=64, heads_kv=8, seqlen_q=8)) == (64, 3, 1, 2)
    assert tile(select(heads_q=65, heads_kv=1))[0] == 128
    assert tile(select(heads_q=8, heads_kv=8, seqlen_q=65)) == (128, 3, 1, 1)
    assert tile(select(heads_q=8, heads_kv=8, seqlen_q=65, head_dim=256))[0] == 64  # O of two warpgroups does not fit
    assert tile(select(heads_q=8, heads_kv=8, seqlen_q=65, head_dim=256, head_dim_v=192))[0] == 128
    tiles = select(1, 4096, heads_q=16, heads_kv=2, seqlen_q=40)  # 320 rows in tiles of 128
    assert tiles.reason.startswith("6 tiles ")
    assert tiles.splits == 16  # each of two blocks of 128 keys


def test_two_warpgroups_of_rows_take_blocks_of_128_keys() -> None:
    for head_dim, head_dim_v, keys in ((64, 64, 128), (128, 128, 128), (136, 128, 64), (128, 136, 64), (192, 192, 64)):
        chosen = select(1, 256, seqlen_q=65, head_dim=head_dim, head_dim_v=head_dim_v)
        assert (chosen.spec.tile_m, chosen.spec.tile_n) == (128, keys)
        assert chosen.splits == 128 // keys  # each of two blocks
        assert chosen.reason.endswith(f"at most {256 // keys} blocks of {keys} keys")
    assert select(seqlen_q=64).spec.tile_n == 64
    cut: list[dict[str, int]] = [{"num_splits": 3}, {"split_size": 128}]
    for options in cut:  # a sum in steps of 64 keys, whatever the longest q
        assert tile(select(seqlen_q=65, **options)) == (128, 6, 1, 1)
        assert select(seqlen_q=65, **options).spec.tile_n == 64
    for config in ({"residents": 2}, {"key_groups": 2}):  # they leave half of the registers, or of the rings
        assert select(seqlen_q=65, config=config).spec.tile_n == 64


def test_two_ctas_share_a_multiprocessor_or_two_warpgroups_a_cta() -> None:
    for batch in (1, 16, 33):
        assert tile(select(batch, 4096)) == (64, 3, 1, 2)
    assert tile(select(33, 4096, head_dim=64)) == (64, 6, 1, 2)
    assert tile(select(33, 4096, head_dim=192)) == (64, 4, 2, 1)  # one slot of each ring, were there two CTAs
    assert tile(select(33, 4096, head_dim=192, num_splits=3)) == (64, 4, 1, 1)
    assert tile(select(33, 4096, head_dim=256))[2:] == (1, 1)
    assert tile(select(33, 4096, seqlen_q=65))[2:] == (1, 1)


HEAD_DIMS = range(32, 257, 32)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 65])
def test_shared_memory_holds_the_rings(seqlen_q: int, many: bool) -> None:
    for head_dim, head_dim_v in itertools.product(HEAD_DIMS, HEAD_DIMS):
        spec = select(40 if many else 1, head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=seqlen_q).spec
        panels, panels_v = -(-head_dim // 64), -(-head_dim_v // 64)
        rings = (panels * spec.tile_m + spec.stages * spec.tile_n * (panels + panels_v)) * 128
        parts = spec.key_groups * spec.tile_m * (head_dim_v + 8 + 1) * 4
        assert parts <= rings  # in the same memory
        assert spec.residents * (rings + 1024 + 1024) <= 228 * 1024  # the barriers, and what a CTA has beside its own
        assert 2 <= spec.stages <= 8
        assert spec.stages % spec.key_groups == 0  # or a slot would be of both groups
        assert spec.key_groups == 1 or spec.tile_m == 64
        # O of one warpgroup, or of two, has to fit into the registers of a multiprocessor.
        assert spec.tile_m // 64 * spec.key_groups * spec.residents <= (2 if head_dim_v <= 192 else 1)


def test_a_kernel_is_for_padded_head_dims() -> None:
    for head_dim, padded in ((8, 32), (32, 32), (40, 64), (72, 96), (80, 96), (128, 128), (136, 160), (256, 256)):
        spec = select(head_dim=head_dim, head_dim_v=8).spec
        assert (spec.head_dim, spec.head_dim_v, spec.tile_n) == (padded, 32, 64)
        assert select(head_dim=8, head_dim_v=head_dim).spec.head_dim_v == padded


def test_what_changes_instructions_and_nothing_else() -> None:
    plain = select().spec
    assert plain.dtype is DType.BFLOAT16
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"softcap": 30.0}, {"softcap": True}),
        ({"alibi": True}, {"alibi": True}),
        ({"dtype": np.float16}, {"dtype": DType.FLOAT16}),
    ]
    for options, fields in changes:
        assert select(**options).spec == dataclasses.replace(plain, **fields)
    data: list[dict[str, Any]] = [
        {"causal": True, "seqlen_q": 2},
        {"window_size": (100, 0)},
        {"softmax_scale": -3.0},
        {"page_size": 16},
        {"heads_q": 32},
    ]
    for options in data:
        assert select(**options).spec == plain


# --- Splits that the caller asks for ---


def test_num_splits_and_split_size() -> None:
    for splits in (1, 2, 3, 200):
        chosen = select(4, 1000, num_splits=splits)
        assert (chosen.splits, chosen.blocks_per_split) == (splits, 0)
        assert chosen.cluster == (2 if splits == 2 else 1)
        assert chosen.reason == f"num_splits {splits}"
    for size, splits, blocks in ((64, 16, 1), (128, 8, 2), (192, 6, 3), (512, 2, 8), (1024, 1, 16), (4096, 1, 64)):
        chosen = select(4, 1000, split_size=size)
        assert (chosen.splits, chosen.blocks_per_split, chosen.cluster) == (splits, blocks, 1)
        assert chosen.reason == f"split_size {size}"
    empty = select(4, 0, split_size=64)
    assert (empty.splits, empty.blocks_per_split) == (1, 1)


@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 2}, {"num_splits": 7}, {"split_size": 128}], ids=str
)
def test_the_order_of_sums_does_not_depend_on_the_batch(options: dict[str, int]) -> None:
    """Not on how many sequences there are, how long they can be, and whether another one has more queries."""
    for head_dim, head_dim_v in itertools.product(HEAD_DIMS, HEAD_DIMS):
        sizes = {"head_dim": head_dim, "head_dim_v": head_dim_v, **options}
        sums = set()
        for batch, capacity, seqlen_q in ((1, 128, 1), (1, 256, 1), (2, 300, 9), (300, 4096, 1), (3, 70_000, 100)):
            chosen = select(batch, capacity, heads_q=16, heads_kv=2, seqlen_q=seqlen_q, **sizes)
            of_capacity = chosen.splits if "num_splits" in options else None
            sums.add((of_capacity, chosen.blocks_per_split, chosen.cluster, chosen.spec.key_groups, chosen.spec.tile_n))
        assert len(sums) == 1, sizes


# --- config= ---


def test_a_config_overrides_the_choice() -> None:
    plain = select()
    for config in ({"tile_m": 128, "key_groups": 1}, {"stages": 2}, {"residents": 1}, {"key_groups": 1, "stages": 1}):
        chosen = select(config=config)
        assert {name: getattr(chosen.spec, name) for name in config} == config
        assert chosen.splits == plain.splits
    assert tile(select(config={"residents": 1})) == (64, 6, 2, 1)
    assert tile(select(config={"tile_m": 128})) == (128, 3, 1, 1)
    assert tile(select(config={"key_groups": 2, "residents": 2})) == (64, 2, 2, 2)
    two = select(head_dim=192, head_dim_v=128, config={"residents": 1})
    assert two.spec.stages == 4  # five would fit, but two groups need an even number


def test_what_a_config_is() -> None:
    assert decode_config(None) == decode_config({}) == ()
    assert decode_config({"tile_m": np.int64(64), "stages": 3}) == (("stages", 3), ("tile_m", 64))
    with pytest.raises(TypeError, match=r"^attention: config is 3; it must be a mapping of DecodeSpec fields or None$"):
        decode_config(3)  # type: ignore[arg-type]
    message = r"^attention: config has 'tile_n'; a cache has tile_m, stages, key_groups, residents$"
    with pytest.raises(ValueError, match=message):
        decode_config({"tile_n": 64})
    for value in (0, -1, True, 1.0, "2", None):
        with pytest.raises(
            TypeError, match=rf"^attention: config\['stages'\] is {value!r}; it must be a positive integ"
        ):
            decode_config({"stages": value})


# --- What has no kernel ---


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 1), (10, 0), (12, 0)])
def test_other_gpus_have_no_kernel(capability: tuple[int, int]) -> None:
    expected = (
        rf"^attention: no kernel for a cache on compute capability {capability[0]}\.{capability[1]}; it needs 9\.0$"
    )
    with pytest.raises(UnsupportedError, match=expected):
        select(device=Device(capability, 132, 2**20))
