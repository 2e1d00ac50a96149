"""From a problem to a launch: the numbers that a kernel gets, and that its schedule visits each tile once."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from problems import make_problem

import cupyfa
from cupyfa._launch import ForwardLauncher, Function
from cupyfa.operand import Layout, Operand
from cupyfa.plan import plan_forward
from cupyfa.problem import Problem
from cupyfa.schedule import balance, tile_costs, tile_order
from cupyfa.select import H200, Device

TRAITS = {
    "threads": 384,
    "shared_bytes": 197_632,
    "cluster_size": 1,
    "tile_m": 128,
    "tile_n": 80,
    "box_cols": 64,
    "box_rows_o": 64,
    "persistent": 1,
    "producer_registers": 24,
    "consumer_registers": 240,
}
FIELDS = ("lse", "lse_stride_batch", "lse_stride_head", "lse_stride_row", "scale_log2", "seqlen_q", "seqlen_k")
FIELDS += ("heads_q", "heads_per_kv", "heads_total", "tiles_m", "tiles", "heads_per_section")


def plan(problem: Problem, device: Device = H200, **traits: int) -> ForwardLauncher:
    return plan_forward(problem, TRAITS | traits, Function(0), device)


def params(launcher: ForwardLauncher) -> dict[str, Any]:
    """The fields of a packed FwdParams behind the tensor maps."""
    packed = launcher.pack(lambda geometry, address: bytes(128), 0, 0, 0, 0, 0)
    return dict(zip(FIELDS, struct.unpack_from("<QqqqfiiIIIIII", packed, 512), strict=True))


def test_sizes() -> None:
    assert params(plan(make_problem())) == {
        "lse": 0,
        "lse_stride_batch": 6 * 300,
        "lse_stride_head": 300,
        "lse_stride_row": 1,
        "scale_log2": float(np.float32(math.log2(math.e) / 8)),
        "seqlen_q": 300,
        "seqlen_k": 500,
        "heads_q": 6,
        "heads_per_kv": 3,
        "heads_total": 12,
        "tiles_m": 3,
        "tiles": 36,
        "heads_per_section": 1,
    }


@pytest.mark.parametrize(("seqlen_q", "tiles_m"), [(1, 1), (127, 1), (128, 1), (129, 2), (256, 2), (257, 3)])
def test_ragged_tiles_count(seqlen_q: int, tiles_m: int) -> None:
    values = params(plan(make_problem(seqlen_q=seqlen_q)))
    assert (values["tiles_m"], values["tiles"]) == (tiles_m, 12 * tiles_m)


def test_geometry_comes_from_the_traits() -> None:
    geometry = plan(make_problem()).geometry
    assert (geometry.grid, geometry.threads, geometry.shared_bytes, geometry.cluster_size) == (36, 384, 197_632, 1)
    assert not geometry.programmatic
    other = plan(make_problem(), threads=256, shared_bytes=1000, tile_m=64).geometry
    assert (other.grid, other.threads, other.shared_bytes) == (60, 256, 1000)


@pytest.mark.parametrize(("persistent", "grid"), [(1, 132), (0, 24_000)])
def test_persistent_kernels_get_one_cta_per_multiprocessor(persistent: int, grid: int) -> None:
    big = make_problem(batch=1000, seqlen_q=512)
    assert plan(big, persistent=persistent).geometry.grid == grid
    assert plan(big, Device((9, 0), 78, 2**20)).geometry.grid == 78


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (0.0, 2.0**-126),
        (-0.0, 2.0**-126),
        (1e-300, 2.0**-126),
        (0.5, 0.5 * math.log2(math.e)),
        (-0.5, 0.5 * math.log2(math.e)),
        (-1e-300, 2.0**-126),
        (None, 0.125 * math.log2(math.e)),
    ],
)
def test_scale_is_a_magnitude_in_base_2_and_never_zero(scale: float | None, expected: float) -> None:
    assert params(plan(make_problem(scale=scale)))["scale_log2"] == np.float32(expected)


@pytest.mark.parametrize("scale", [2e38, 3e38, float(np.finfo(np.float32).max)])
def test_a_scale_that_is_accepted_stays_finite(scale: float) -> None:
    try:
        problem = make_problem(scale=scale)
    except ValueError as error:
        assert "softmax_scale" in str(error)  # noqa: PT017 - refusing it is as good
        return
    assert math.isfinite(params(plan(problem))["scale_log2"])


@pytest.mark.parametrize(
    ("layout", "q", "k"), [("BSHD", (768, 128), (256, 128)), ("BHSD", (128, 38_400), (128, 64_000))]
)
def test_tensor_maps_follow_the_strides(layout: Layout, q: tuple[int, int], k: tuple[int, int]) -> None:
    launcher = plan(make_problem(layout=layout))
    assert launcher.q.shape == launcher.o.shape == (64, 300, 6, 2)
    assert launcher.k.shape == launcher.v.shape == (64, 500, 2, 2)
    assert launcher.q.strides == launcher.o.strides == (*q, 6 * 300 * 128)
    assert launcher.k.strides == launcher.v.strides == (*k, 2 * 500 * 128)
    assert (launcher.q.box, launcher.k.box, launcher.v.box, launcher.o.box) == ((64, 128), (64, 80), (64, 80), (64, 64))
    assert {m.dtype for m in (launcher.q, launcher.k, launcher.v, launcher.o)} == {"float16"}
    assert plan(make_problem(dtype=np.dtype(ml_dtypes.bfloat16))).q.dtype == "bfloat16"


def test_stride_of_an_axis_with_one_index_is_replaced() -> None:
    problem = make_problem(batch=1, heads_kv=1)
    odd = dataclasses.replace(problem, k=dataclasses.replace(problem.k, strides=(7, 128, -6, 2)))
    assert plan(odd).k.strides == (128, 16, 16)


def test_lse_strides_are_in_elements() -> None:
    lse = Operand("lse", (2, 6, 300), (16 * 300 * 8, 4, 16 * 8), np.dtype(np.float32), 0)
    values = params(plan(make_problem(lse=lse)))
    assert [values[name] for name in FIELDS[1:4]] == [4 * 300 * 8, 1, 4 * 8]
    nobody = params(plan(make_problem(want_lse=False)))
    assert [nobody[name] for name in FIELDS[1:4]] == [0, 0, 0]


@pytest.mark.parametrize(("batch", "fine"), [(2**31 - 1, True), (2**31, False)])
def test_too_many_tiles(batch: int, fine: bool) -> None:
    k = Operand("k", (batch, 1, 1, 8), (16, 16, 16, 2), np.dtype(np.float16), 0)
    q, v = dataclasses.replace(k, name="q"), dataclasses.replace(k, name="v")
    problem = Problem.from_operands(
        q, k, v, None, None, softmax_scale=None, causal=False, layout="BSHD", want_lse=False, current_device=0
    )
    if fine:
        assert params(plan(problem))["tiles"] == batch
        return
    message = (
        rf"^attention: batch {batch} \* heads 1 \* 1 query tiles are {batch} tiles; at most {2**31 - 1} are supported"
    )
    with pytest.raises(cupyfa.UnsupportedError, match=message):
        plan(problem)


def test_sections_of_causal_problems_fit_half_of_l2() -> None:
    device = Device((9, 0), 24, 2**21)  # half is 1 MiB: 8 heads of 500 * 64 * 2 * 2 = 128,000 bytes
    many = make_problem(causal=True, batch=10)
    fitting = 8 * 3
    assert params(plan(many, device, persistent=0))["heads_per_section"] == fitting
    section = params(plan(many, device))["heads_per_section"]
    assert fitting // 4 <= section <= fitting
    assert section % 3 == 0  # whole groups: a key/value head is read once
    long = make_problem(causal=True, seqlen_k=100_000, batch=10)
    assert params(plan(long, device))["heads_per_section"] == 3  # at least one key/value head
    assert (
        params(plan(make_problem(causal=True), H200, persistent=0))["heads_per_section"] == 12
    )  # no more than there are
    assert params(plan(make_problem(batch=10), device))["heads_per_section"] == 1


# --- A model of cuda/tile_scheduler.cuh ---


def visits(
    p: dict[str, Any], block: int, grid: int, *, causal: bool, persistent: bool
) -> Iterator[tuple[int, int, int, int]]:
    """The tiles of one CTA in its order, as (m, head, head_kv, batch); line by line what TileScheduler does."""
    ordinal, round_ = block, 0
    while ordinal < p["tiles"]:
        section = ordinal // (p["tiles_m"] * p["heads_per_section"])
        first_head = section * p["heads_per_section"]
        rest = ordinal - first_head * p["tiles_m"]
        heads = min(p["heads_per_section"], p["heads_total"] - first_head)
        m = rest // heads
        head_in_all = first_head + (rest - m * heads)
        batch = head_in_all // p["heads_q"]
        head = head_in_all - batch * p["heads_q"]
        yield p["tiles_m"] - 1 - m if causal else m, head, head // p["heads_per_kv"], batch
        if not persistent:
            ordinal = p["tiles"]
        else:
            round_ += 1
            ordinal = round_ * grid + (grid - 1 - block if causal and round_ % 2 == 1 else block)


def all_visits(problem: Problem, device: Device, persistent: bool) -> list[list[tuple[int, int, int, int]]]:
    launcher = plan(problem, device, persistent=int(persistent))
    grid, p = launcher.geometry.grid, params(launcher)
    return [list(visits(p, block, grid, causal=problem.causal, persistent=persistent)) for block in range(grid)]


@pytest.mark.parametrize("persistent", [False, True], ids=["one_tile", "persistent"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seed", range(40))
def test_every_tile_is_visited_once(seed: int, causal: bool, persistent: bool) -> None:
    rng = np.random.default_rng(seed)
    heads_kv, group = (int(n) for n in rng.integers(1, 6, 2))
    batch, seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, (6, 1500, 3000)))
    device = Device((9, 0), int(rng.integers(1, 140)), int(2 ** rng.integers(16, 25)))
    problem = make_problem(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_kv * group, heads_kv=heads_kv, causal=causal
    )
    seen = Counter(tile for cta in all_visits(problem, device, persistent) for tile in cta)
    tiles_m = -(-seqlen_q // 128)
    expected = {(m, h, h // group, b) for m in range(tiles_m) for h in range(heads_kv * group) for b in range(batch)}
    assert set(seen) == expected
    assert set(seen.values()) == {1}


def test_persistent_ctas_share_the_work() -> None:
    work = all_visits(make_problem(batch=16, seqlen_q=2048, causal=True), Device((9, 0), 132, 2**25), True)
    assert max(map(len, work)) - min(map(len, work)) <= 1
    assert max(map(len, work)) > 1


def test_causal_tiles_come_longest_first_within_a_section() -> None:
    work = all_visits(make_problem(seqlen_q=1024, causal=True), Device((9, 0), 132, 2**30), False)
    rows = [cta[0][0] for cta in work]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == 7


def test_full_tiles_of_a_head_are_neighbours() -> None:
    work = all_visits(make_problem(seqlen_q=1024), Device((9, 0), 132, 2**30), False)
    assert [cta[0][:2] for cta in work[:9]] == [(m, 0) for m in range(8)] + [(0, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_host_model_of_the_balance_is_that_of_the_scheduler(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = {name: int(rng.integers(1, most)) for name, most in (("batch", 6), ("seqlen_q", 1500), ("seqlen_k", 3000))}
    device = Device((9, 0), int(rng.integers(1, 40)), int(2 ** rng.integers(16, 25)))
    problem = make_problem(heads_q=6, heads_kv=2, causal=True, **sizes)
    costs = tile_costs(problem, TRAITS["tile_m"], TRAITS["tile_n"])
    times = [sum(costs[tile[0]] for tile in cta) for cta in all_visits(problem, device, True)]
    section = params(plan(problem, device))["heads_per_section"]
    order = tile_order(costs, problem.batch * problem.heads_q, section)
    assert order.sum() == sum(times)
    assert balance(order, len(times)) == pytest.approx(sum(times) / len(times) / max(times))
