"""The host model of the tile scheduler chooses sections that end evenly."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from problems import make_problem

from cupyfa.problem import Problem
from cupyfa.schedule import balance, heads_per_section, tile_costs, tile_order
from cupyfa.select import H200

BF16 = np.dtype(ml_dtypes.bfloat16)
TRAITS = {"tile_m": 128, "tile_n": 128, "persistent": 1, "dynamic": 0}
DYNAMIC = TRAITS | {"dynamic": 1}

# (batch, seqlen, heads_q, heads_kv, head_dim): heads of a section, if tiles are drawn and if they are dealt out. The
# first three are the benchmark's.
SECTIONS = {
    (16, 1024, 16, 16, 128): (64, 66),
    (4, 4096, 16, 16, 128): (16, 11),
    (1, 16384, 16, 16, 128): (8, 16),
    (2, 8192, 64, 64, 128): (8, 11),
    (2, 8192, 64, 8, 128): (64, 64),
}


def problem(
    batch: int, seqlen: int, heads_q: int, heads_kv: int, head_dim: int, causal: bool = True, **options: Any
) -> Problem:
    return make_problem(
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        dtype=BF16,
        causal=causal,
        **options,
    )


@pytest.mark.parametrize("shape", SECTIONS, ids=str)
def test_sections(shape: tuple[int, ...]) -> None:
    causal = problem(*shape)
    drawn, dealt = heads_per_section(causal, DYNAMIC, H200), heads_per_section(causal, TRAITS, H200)
    assert (drawn, dealt) == SECTIONS[shape]
    costs = tile_costs(causal, 128, 128)
    assert balance(tile_order(costs, shape[0] * shape[2], dealt), H200.multiprocessors) >= 0.97


@pytest.mark.parametrize("heads", [1, 2, 33, 34, 50, 132, 1000, 1001])
@pytest.mark.parametrize("seqlen", [128, 4096, 100_000])
def test_sections_of_drawn_tiles_are_nearly_equal(heads: int, seqlen: int) -> None:
    section = heads_per_section(problem(1, seqlen, heads, heads, 128), DYNAMIC, H200)
    assert 1 <= section <= heads
    sections = -(-heads // section)
    assert sections * section - heads < sections


def test_a_section_can_be_unlucky() -> None:
    # The reason for the model: 3 heads have keys and values in half of L2, and would end unevenly.
    costs = tile_costs(problem(1, 16384, 16, 16, 128), 128, 128)
    assert balance(tile_order(costs, 16, 3), H200.multiprocessors) < 0.85


def test_sections_are_whole_groups_of_query_heads() -> None:
    for heads_q, heads_kv in ((14, 2), (96, 8), (21, 7), (40, 1)):
        section = heads_per_section(problem(8, 3000, heads_q, heads_kv, 128), TRAITS, H200)
        assert section % (heads_q // heads_kv) == 0


def test_without_a_mask_there_is_nothing_to_even_out() -> None:
    assert heads_per_section(problem(4, 4096, 16, 16, 128, causal=False), TRAITS, H200) == 1


def test_one_cta_per_tile_is_not_modelled() -> None:
    one_tile = heads_per_section(problem(4, 4096, 16, 16, 128), TRAITS | {"persistent": 0}, H200)
    assert one_tile == heads_per_section(problem(4, 4096, 16, 16, 128), DYNAMIC, H200)


def test_a_huge_problem_is_not_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyfa.schedule.tile_costs", lambda *_: pytest.fail("modelled"))
    assert heads_per_section(problem(65_536, 1024, 16, 16, 64), TRAITS, H200) > 1
    assert heads_per_section(problem(1, 2**30, 1, 1, 8), TRAITS, H200) == 1


# --- Windows ---


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "right", "blocks"),
    [
        (512, 512, 0, [1, 2, 3, 4]),
        (512, 512, 1, [2, 3, 4, 4]),
        (512, 512, 128, [2, 3, 4, 4]),
        (512, 512, 129, [3, 4, 4, 4]),
        (512, 512, 510, [4, 4, 4, 4]),  # the first row misses one key
        (512, 512, 511, [4, 4, 4, 4]),
        (300, 300, 5, [2, 3, 3]),
        (300, 1000, 100, [8, 8, 8]),  # 828 + 100 keys, and all of them
        (600, 200, 128, [0, 0, 1, 2, 2]),  # the first 272 rows see nothing
        (600, 200, 399, [1, 2, 2, 2, 2]),
    ],
)
def test_a_right_side_ends_each_tile_later(seqlen_q: int, seqlen_k: int, right: int, blocks: list[int]) -> None:
    posed = make_problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, window_size=(None, right))
    costs = tile_costs(posed, 128, 128)
    assert (costs - costs.min() + min(blocks)).tolist() == blocks
    overhead = tile_costs(make_problem(seqlen_q=1, seqlen_k=128), 128, 128)[0] - 1
    assert (costs - overhead).tolist() == blocks


@pytest.mark.parametrize("right", [1, 127, 300])
def test_sections_of_a_right_side_end_evenly(right: int) -> None:
    posed = problem(4, 4096, 16, 16, 128, causal=False, window_size=(None, right))
    section = heads_per_section(posed, TRAITS, H200)
    assert section > 1
    assert balance(tile_order(tile_costs(posed, 128, 128), 64, section), H200.multiprocessors) >= 0.97
    assert heads_per_section(posed, DYNAMIC, H200) == heads_per_section(problem(4, 4096, 16, 16, 128), DYNAMIC, H200)


@pytest.mark.parametrize("traits", [TRAITS, DYNAMIC, TRAITS | {"persistent": 0}])
@pytest.mark.parametrize("window_size", [(128, None), (128, 0), (0, 0), (4094, 300)])
def test_tiles_of_a_window_need_no_sections(
    window_size: tuple[int | None, int | None], traits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupyfa.schedule.tile_costs", lambda *_: pytest.fail("modelled"))
    assert heads_per_section(problem(4, 4096, 16, 16, 128, causal=False, window_size=window_size), traits, H200) == 1
