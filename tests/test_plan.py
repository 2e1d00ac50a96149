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
    "persistent": 1,
    "dynamic": 0,
    "producer_registers": 40,
    "consumer_registers": 232,
}
FIELDS = ("lse", "lse_stride_batch", "lse_stride_head", "lse_stride_row", "scale_log2", "seqlen_q", "seqlen_k")
FIELDS += ("heads_q", "heads_per_kv", "heads_total", "tiles_m", "tiles", "heads_per_section", "tile_counter")


def plan(problem: Problem, device: Device = H200, **traits: int) -> ForwardLauncher:
    return plan_forward(problem, TRAITS | traits, Function(0), device)


def params(launcher: ForwardLauncher) -> dict[str, Any]:
    """The fields of a packed FwdParams behind the tensor maps."""
    packed = launcher.pack(lambda geometry, address: bytes(128), 0, 0, 0, 0, 0)
    return dict(zip(FIELDS, struct.unpack_from("<QqqqfiiIIIIIIxxxxQ", packed, 512), strict=True))


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
        "tile_counter": 0,
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
    assert (launcher.q.box, launcher.k.box, launcher.v.box, launcher.o.box) == (
        (64, 128),
        (64, 80),
        (64, 80),
        (64, 128),
    )
    assert {m.dtype for m in (launcher.q, launcher.k, launcher.v, launcher.o)} == {"float16"}
    assert plan(make_problem(dtype=np.dtype(ml_dtypes.bfloat16))).q.dtype == "bfloat16"


def test_v_and_out_have_a_head_dim_of_their_own() -> None:
    launcher = plan(make_problem(head_dim=192, head_dim_v=128))
    assert (launcher.q.shape[0], launcher.k.shape[0], launcher.v.shape[0], launcher.o.shape[0]) == (192, 192, 128, 128)


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


def test_sections_of_causal_problems() -> None:
    device = Device((9, 0), 24, 2**21)  # half is 1 MiB: 8 heads of 500 * 64 * 2 * 2 = 128,000 bytes
    many = make_problem(causal=True, batch=10)
    fitting = 8 * 3
    for traits in ({"persistent": 0}, {"dynamic": 1}):
        assert params(plan(many, device, **traits))["heads_per_section"] == 30  # 60 heads in two sections
    section = params(plan(many, device))["heads_per_section"]
    assert fitting // 2 <= section <= 2 * fitting
    assert section % 3 == 0  # whole groups: a key/value head is read once
    long = make_problem(causal=True, seqlen_k=100_000, batch=10)
    assert params(plan(long, device, dynamic=1))["heads_per_section"] == 6  # at most four CTAs on a head
    assert params(plan(make_problem(causal=True), H200, dynamic=1))["heads_per_section"] == 12  # no more than there are
    assert params(plan(make_problem(batch=10), device))["heads_per_section"] == 1


# --- A model of cuda/tile_scheduler.cuh ---


def tile_of(ordinal: int, p: dict[str, Any], *, causal: bool) -> tuple[int, int, int, int]:
    """(m, head, head_kv, batch) of a tile; line by line what TileScheduler does."""
    section = ordinal // (p["tiles_m"] * p["heads_per_section"])
    first_head = section * p["heads_per_section"]
    rest = ordinal - first_head * p["tiles_m"]
    heads = min(p["heads_per_section"], p["heads_total"] - first_head)
    m = rest // heads
    head_in_all = first_head + (rest - m * heads)
    batch = head_in_all // p["heads_q"]
    head = head_in_all - batch * p["heads_q"]
    return p["tiles_m"] - 1 - m if causal else m, head, head // p["heads_per_kv"], batch


def dealt(p: dict[str, Any], block: int, grid: int, *, causal: bool, persistent: bool) -> Iterator[int]:
    """The tiles of one CTA in its order."""
    number, round_ = block - grid, 0
    while grid + number < p["tiles"]:
        yield grid + number
        if not persistent:
            number = p["tiles"]
        else:
            number = round_ * grid + (grid - 1 - block if causal and round_ % 2 == 0 else block)
            round_ += 1


def drawn(p: dict[str, Any], grid: int, rng: np.random.Generator) -> tuple[list[list[int]], int]:
    """The tiles of all CTAs, which draw in any order, and what is in the counter at the end."""
    tiles: list[list[int]] = [[block] for block in range(grid)]
    counter, busy = 0, list(range(grid))
    while busy:
        block = busy[int(rng.integers(len(busy)))]
        number, counter = counter, counter + 1
        if grid + number < p["tiles"]:
            tiles[block].append(grid + number)
        else:
            busy.remove(block)
            if number == p["tiles"] - 1:
                counter = 0
    return tiles, counter


def all_visits(problem: Problem, device: Device, scheduler: str) -> list[list[tuple[int, int, int, int]]]:
    traits = {"persistent": int(scheduler != "one_tile"), "dynamic": int(scheduler == "dynamic")}
    launcher = plan(problem, device, **traits)
    grid, p, causal = launcher.geometry.grid, params(launcher), problem.causal
    if scheduler == "dynamic":
        ordinals, counter = drawn(p, grid, np.random.default_rng(0))
        assert counter == 0  # ready for the next launch
    else:
        persistent = scheduler == "persistent"
        ordinals = [list(dealt(p, block, grid, causal=causal, persistent=persistent)) for block in range(grid)]
    return [[tile_of(ordinal, p, causal=causal) for ordinal in cta] for cta in ordinals]


@pytest.mark.parametrize("scheduler", ["one_tile", "persistent", "dynamic"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seed", range(40))
def test_every_tile_is_visited_once(seed: int, causal: bool, scheduler: str) -> None:
    rng = np.random.default_rng(seed)
    heads_kv, group = (int(n) for n in rng.integers(1, 6, 2))
    batch, seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, (6, 1500, 3000)))
    device = Device((9, 0), int(rng.integers(1, 140)), int(2 ** rng.integers(16, 25)))
    problem = make_problem(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_kv * group, heads_kv=heads_kv, causal=causal
    )
    seen = Counter(tile for cta in all_visits(problem, device, scheduler) for tile in cta)
    tiles_m = -(-seqlen_q // 128)
    expected = {(m, h, h // group, b) for m in range(tiles_m) for h in range(heads_kv * group) for b in range(batch)}
    assert set(seen) == expected
    assert set(seen.values()) == {1}


def test_persistent_ctas_share_the_work() -> None:
    work = all_visits(make_problem(batch=16, seqlen_q=2048, causal=True), Device((9, 0), 132, 2**25), "persistent")
    assert max(map(len, work)) - min(map(len, work)) <= 1
    assert max(map(len, work)) > 1


def test_causal_tiles_come_longest_first_within_a_section() -> None:
    work = all_visits(make_problem(seqlen_q=1024, causal=True), Device((9, 0), 132, 2**30), "one_tile")
    rows = [cta[0][0] for cta in work]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == 7


def test_full_tiles_of_a_head_are_neighbours() -> None:
    work = all_visits(make_problem(seqlen_q=1024), Device((9, 0), 132, 2**30), "one_tile")
    assert [cta[0][:2] for cta in work[:9]] == [(m, 0) for m in range(8)] + [(0, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_host_model_of_the_balance_is_that_of_the_scheduler(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = {name: int(rng.integers(1, most)) for name, most in (("batch", 6), ("seqlen_q", 1500), ("seqlen_k", 3000))}
    device = Device((9, 0), int(rng.integers(1, 40)), int(2 ** rng.integers(16, 25)))
    problem = make_problem(heads_q=6, heads_kv=2, causal=True, **sizes)
    costs = tile_costs(problem, TRAITS["tile_m"], TRAITS["tile_n"])
    times = [sum(costs[tile[0]] for tile in cta) for cta in all_visits(problem, device, "persistent")]
    section = params(plan(problem, device))["heads_per_section"]
    order = tile_order(costs, problem.batch * problem.heads_q, section)
    assert order.sum() == sum(times)
    assert balance(order, len(times)) == pytest.approx(sum(times) / len(times) / max(times))
