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
from cupyfa.operand import Arrays, Layout, Operand
from cupyfa.options import Options
from cupyfa.plan import fill_without_keys, plan_forward
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
    "bias_box_cols": 0,
    "bias_box_rows": 0,
    "bias_swizzle": 0,
    "persistent": 1,
    "dynamic": 0,
    "producer_registers": 40,
    "consumer_registers": 232,
}
#: What cuda/params.h has behind the tensor maps, in the notation of Python's struct.
LAYOUT = "<QqqqQQqqqfffiiiiiiIIIIIIxxxxQQ40x128xQqqqqiif"
FIELDS = (
    *("lse", "lse_stride_batch", "lse_stride_head", "lse_stride_row"),
    *("sink", "alibi_slopes", "sink_stride", "alibi_stride_batch", "alibi_stride_head"),
    *("scale_log2", "softcap_slope", "softcap", "seqlen_q", "seqlen_k", "q_step", "o_shift"),
    *("last_diagonal", "first_diagonal"),
    *("heads_q", "heads_per_kv", "heads_total", "tiles_m", "tiles", "heads_per_section", "plan", "tile_counter"),
    *("bias_data", "bias_stride_batch", "bias_stride_head", "bias_stride_row", "bias_stride_key"),
    *("bias_rows", "bias_keys", "scale"),
)
LOG2_E = math.log2(math.e)


def plan(problem: Problem, device: Device = H200, **traits: int) -> ForwardLauncher:
    return plan_forward(problem, TRAITS | traits, Function(0), device)


def params(launcher: ForwardLauncher) -> dict[str, Any]:
    """The fields of a packed FwdParams behind the tensor maps."""
    packed = launcher.pack(lambda geometry, address: bytes(128), (0,) * 8)
    return dict(zip(FIELDS, struct.unpack_from(LAYOUT, packed, 512), strict=True))


def test_sizes() -> None:
    assert params(plan(make_problem())) == {
        "lse": 0,
        "lse_stride_batch": 6 * 300,
        "lse_stride_head": 300,
        "lse_stride_row": 1,
        "sink": 0,
        "alibi_slopes": 0,
        "sink_stride": 0,
        "alibi_stride_batch": 0,
        "alibi_stride_head": 0,
        "scale_log2": float(np.float32(LOG2_E / 8)),
        "softcap_slope": 0.0,
        "softcap": 0.0,
        "seqlen_q": 300,
        "seqlen_k": 500,
        "q_step": 0,
        "o_shift": 0,
        "last_diagonal": 0,
        "first_diagonal": 0,
        "heads_q": 6,
        "heads_per_kv": 3,
        "heads_total": 12,
        "tiles_m": 3,
        "tiles": 36,
        "heads_per_section": 1,
        "plan": 0,
        "tile_counter": 0,
        "bias_data": 0,
        "bias_stride_batch": 0,
        "bias_stride_head": 0,
        "bias_stride_row": 0,
        "bias_stride_key": 0,
        "bias_rows": 0,
        "bias_keys": 0,
        "scale": 0.125,
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
        (0.5, 0.5 * LOG2_E),
        (-0.5, 0.5 * LOG2_E),
        (-1e-300, 2.0**-126),
        (None, 0.125 * LOG2_E),
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


@pytest.mark.parametrize("scale", [0.5, -0.5, 1e-30, None])
@pytest.mark.parametrize("cap", [50.0, 1, 0.0625, 1e-30])
def test_a_softcap_scales_what_is_left_of_the_scores(cap: float, scale: float | None) -> None:
    values = params(plan(make_problem(scale=scale, softcap=cap)))
    magnitude = 0.125 if scale is None else abs(scale)
    assert values["scale_log2"] == np.float32(2 * cap * LOG2_E)  # they are (tanh(x) - 1) / 2
    assert values["softcap"] == np.float32(cap)
    assert values["softcap_slope"] == np.float32(
        2 * LOG2_E * magnitude / cap
    )  # of e^(2x), from which the kernel has tanh(x)


def test_a_scale_of_zero_stays_zero_under_a_softcap() -> None:
    values = params(plan(make_problem(scale=0.0, softcap=3.0)))  # tanh(0) = 0: nothing is infinite times 0
    assert (values["scale_log2"], values["softcap_slope"]) == (np.float32(6 * LOG2_E), 0.0)


FLT_MAX, FLT_MIN = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


@pytest.mark.parametrize(
    ("scale", "cap"),
    [
        (1.0, FLT_MIN),
        (None, FLT_MIN),
        (1e38, 1.0),
        (1.15, FLT_MIN / 0.99),
        (1e38, 1000.0),
        (1e-38, 1000.0),
        (0.0, 1e-37),
    ],
)
def test_factors_of_an_accepted_softcap_are_finite(scale: float | None, cap: float) -> None:
    values = params(plan(make_problem(scale=scale, softcap=cap)))
    assert FLT_MIN <= values["scale_log2"] <= FLT_MAX
    assert 0 <= values["softcap_slope"] <= FLT_MAX


@pytest.mark.parametrize("seqlen_q", [1, 2, 300, 700])
@pytest.mark.parametrize(
    ("causal", "window", "last", "first"),
    [
        (False, (None, None), None, None),
        (True, (None, None), 0, None),
        (False, (None, 0), 0, None),
        (False, (0, None), None, 0),
        (False, (20, 30), 30, 20),
        (True, (20, 30), 0, 20),
        (True, (498, None), 0, 498),
        (True, (499, None), 0, None),  # the last row sees the first key
        (False, (7, 298), 298, 7),
        (False, (0, 0), 0, 0),
    ],
)
def test_diagonals(
    seqlen_q: int, causal: bool, window: tuple[int | None, int | None], last: int | None, first: int | None
) -> None:
    """The last and the first key of row i are i + last_diagonal and i + first_diagonal; 0 where nothing reads them."""
    problem = make_problem(seqlen_q=seqlen_q, causal=causal, window_size=window)
    values, diagonal = params(plan(problem)), 500 - seqlen_q
    if last is not None and 0 < last >= seqlen_q - 1:  # the first row sees the last key
        last = None
    assert values["last_diagonal"] == (0 if last is None else diagonal + last)
    assert values["first_diagonal"] == (0 if first is None else diagonal - first)
    row = np.arange(seqlen_q)[:, None]
    key = np.arange(500)[None, :]
    seen = np.ones((seqlen_q, 500), np.bool_)
    if problem.right is not None:
        seen &= key <= row + values["last_diagonal"]
    if problem.left is not None:
        seen &= key >= row + values["first_diagonal"]
    left, right = window
    expected = np.ones_like(seen)
    if left is not None:
        expected &= key >= row + 500 - seqlen_q - left
    if causal or right is not None:
        expected &= key <= row + 500 - seqlen_q + (0 if causal or right is None else right)
    np.testing.assert_array_equal(seen, expected)


def test_diagonals_of_the_longest_sequences_fit_an_int() -> None:
    longest = 2**31 - 1024
    one = {"batch": 1, "heads_q": 1, "heads_kv": 1, "head_dim": 8}
    # More queries than keys, the widest left side that hides a key: the most negative diagonal.
    tall = params(plan(make_problem(seqlen_q=longest, seqlen_k=longest, window_size=(longest - 2, None), **one)))
    assert tall["first_diagonal"] == -(longest - 2)
    wide = params(plan(make_problem(seqlen_q=2, seqlen_k=longest, window_size=(None, 0), **one)))
    assert wide["last_diagonal"] == longest - 2
    few = params(plan(make_problem(seqlen_q=longest, seqlen_k=3, window_size=(1, longest - 3), **one)))
    assert (few["first_diagonal"], few["last_diagonal"]) == (3 - longest - 1, 0)


def of_heads(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Operand:
    return Operand(name, shape, strides, np.dtype(np.float32), 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sink": True}, {"sink_stride": 1}),
        ({"alibi": True}, {"alibi_stride_batch": 0, "alibi_stride_head": 1}),
        ({"sink": of_heads("sink", (6,), (2**34,))}, {"sink_stride": 2**32}),
        ({"sink": of_heads("sink", (6,), (0,))}, {"sink_stride": 0}),
        ({"alibi": of_heads("alibi_slopes", (6,), (12,))}, {"alibi_stride_batch": 0, "alibi_stride_head": 3}),
        ({"alibi": of_heads("alibi_slopes", (2, 6), (24, 4))}, {"alibi_stride_batch": 6, "alibi_stride_head": 1}),
        ({"alibi": of_heads("alibi_slopes", (2, 6), (4, 8))}, {"alibi_stride_batch": 1, "alibi_stride_head": 2}),
    ],
    ids=str,
)
def test_strides_of_what_heads_have_are_in_elements(changes: dict[str, Any], expected: dict[str, int]) -> None:
    plain = params(plan(make_problem()))
    assert params(plan(make_problem(**changes))) == plain | expected


def test_addresses_of_what_heads_and_scores_have() -> None:
    problem = make_problem(sink=True, alibi=True, bias=(300, 500))
    packed = plan(problem).pack(lambda *_: bytes(128), (1, 2, 3, 4, 5, 6, 7, 8), 9)
    values = dict(zip(FIELDS, struct.unpack_from(LAYOUT, packed, 512), strict=True))
    names = ("lse", "sink", "alibi_slopes", "bias_data", "tile_counter")
    assert [values[name] for name in names] == [5, 6, 7, 8, 9]


def of_scores(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any = np.float32) -> Operand:
    return Operand("bias", shape, strides, np.dtype(dtype), 0)


@pytest.mark.parametrize(
    ("bias", "strides", "shape", "map_strides"),
    [
        # Strides in elements by batch, head, row and key; the map's shape, innermost first, and its strides in bytes.
        ((300, 500), (0, 0, 500, 1), (500, 300, 1, 1), (2000, 16, 16)),
        ((6, 300, 500), (0, 150_000, 500, 1), (500, 300, 6, 1), (2000, 600_000, 16)),
        ((2, 1, 300, 500), (150_000, 0, 500, 1), (500, 300, 1, 2), (2000, 16, 600_000)),
        ((2, 6, 300, 500), (900_000, 150_000, 500, 1), (500, 300, 6, 2), (2000, 600_000, 3_600_000)),
        ((6, 1, 500), (0, 500, 0, 1), (500, 1, 6, 1), (16, 2000, 16)),
        (of_scores((300, 500), (2**39, 4)), (0, 0, 2**37, 1), (500, 300, 1, 1), (2**39, 16, 16)),
        (of_scores((6, 300, 500), (1040, 6240, 2), np.float16), (0, 520, 3120, 1), (500, 300, 6, 1), (6240, 1040, 16)),
    ],
    ids=str,
)
def test_a_bias_that_tma_copies(
    bias: Any, strides: tuple[int, ...], shape: tuple[int, ...], map_strides: tuple[int, ...]
) -> None:
    launcher = plan(make_problem(bias=bias), bias_box_cols=32, bias_box_rows=128, bias_swizzle=64)
    values = params(launcher)
    assert tuple(values[f"bias_stride_{axis}"] for axis in ("batch", "head", "row", "key")) == strides
    assert (values["bias_rows"], values["bias_keys"]) == (300, 500)
    assert launcher.bias is not None
    assert (launcher.bias.shape, launcher.bias.strides, launcher.bias.box) == (shape, map_strides, (32, 128))
    assert (launcher.bias.swizzle, launcher.q.swizzle) == (64, 128)
    assert launcher.bias.dtype == ("float16" if isinstance(bias, Operand) and bias.dtype == np.float16 else "float32")


@pytest.mark.parametrize(
    ("bias", "strides"),
    [
        ((300, 1), (0, 0, 1, 0)),
        (of_scores((300, 500), (1202, 2), np.float16), (0, 0, 601, 1)),
        (of_scores((2, 6, 300, 500), (4, 2**40, 8, 0)), (1, 2**38, 2, 0)),
    ],
    ids=str,
)
def test_a_bias_that_is_gathered_has_no_map(bias: Any, strides: tuple[int, ...]) -> None:
    launcher = plan(make_problem(bias=bias))
    values = params(launcher)
    assert launcher.bias is None
    assert tuple(values[f"bias_stride_{axis}"] for axis in ("batch", "head", "row", "key")) == strides


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"scale": -0.5}, 0.5),
        ({"scale": 0.0}, 2.0**-126),
        ({"softcap": 15.0}, 30.0),
        ({"softcap": 15.0, "scale": 0.0}, 30.0),
    ],
    ids=str,
)
def test_natural_logits_have_a_scale_of_their_own(options: dict[str, Any], scale: float) -> None:
    assert params(plan(make_problem(bias=(300, 500), **options)))["scale"] == scale


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
    problem = Problem.from_operands(Arrays(q, k, v), Options(), want_lse=False, current_device=0)
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


@pytest.mark.parametrize("traits", [{"persistent": 0}, {"dynamic": 1}, {}], ids=str)
def test_windows_come_head_by_head(traits: dict[str, int]) -> None:
    """Their tiles are nearly equally long. A right side alone lets them grow as a causal mask does."""
    device = Device((9, 0), 24, 2**21)

    def section(**options: Any) -> int:
        return int(params(plan(make_problem(batch=10, **options), device, **traits))["heads_per_section"])

    assert section(window_size=(64, None)) == section(window_size=(64, 64)) == 1
    assert section(window_size=(64, None), causal=True) == 1
    assert section(window_size=(None, 0)) == section(window_size=(499, 0)) == section(causal=True) > 1
    assert section(window_size=(None, 20)) > 1
    assert section(window_size=(None, 299)) == 1  # hides nothing


# --- A model of cuda/tile_scheduler.cuh ---


def tiles_grow(problem: Problem) -> bool:
    """As FwdSpec::tiles_grow."""
    return problem.right is not None and problem.left is None


def tile_of(ordinal: int, p: dict[str, Any], *, grow: bool) -> tuple[int, int, int, int]:
    """(m, head, head_kv, batch) of a tile; line by line what TileScheduler does."""
    section = ordinal // (p["tiles_m"] * p["heads_per_section"])
    first_head = section * p["heads_per_section"]
    rest = ordinal - first_head * p["tiles_m"]
    heads = min(p["heads_per_section"], p["heads_total"] - first_head)
    m = rest // heads
    head_in_all = first_head + (rest - m * heads)
    batch = head_in_all // p["heads_q"]
    head = head_in_all - batch * p["heads_q"]
    return p["tiles_m"] - 1 - m if grow else m, head, head // p["heads_per_kv"], batch


def dealt(p: dict[str, Any], block: int, grid: int, *, grow: bool, persistent: bool) -> Iterator[int]:
    """The tiles of one CTA in its order."""
    number, round_ = block - grid, 0
    while grid + number < p["tiles"]:
        yield grid + number
        if not persistent:
            number = p["tiles"]
        else:
            number = round_ * grid + (grid - 1 - block if grow and round_ % 2 == 0 else block)
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
    grid, p, grow = launcher.geometry.grid, params(launcher), tiles_grow(problem)
    if scheduler == "dynamic":
        ordinals, counter = drawn(p, grid, np.random.default_rng(0))
        assert counter == 0  # ready for the next launch
    else:
        persistent = scheduler == "persistent"
        ordinals = [list(dealt(p, block, grid, grow=grow, persistent=persistent)) for block in range(grid)]
    return [[tile_of(ordinal, p, grow=grow) for ordinal in cta] for cta in ordinals]


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "right side": {"window_size": (None, 5)},
    "window": {"causal": True, "window_size": (100, None)},
}


@pytest.mark.parametrize("scheduler", ["one_tile", "persistent", "dynamic"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seed", range(40))
def test_every_tile_is_visited_once(seed: int, mask: str, scheduler: str) -> None:
    rng = np.random.default_rng(seed)
    heads_kv, group = (int(n) for n in rng.integers(1, 6, 2))
    batch, seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, (6, 1500, 3000)))
    device = Device((9, 0), int(rng.integers(1, 140)), int(2 ** rng.integers(16, 25)))
    problem = make_problem(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_kv * group, heads_kv=heads_kv, **MASKS[mask]
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


@pytest.mark.parametrize("window_size", [(None, None), (100, None), (100, 0)])
def test_full_tiles_of_a_head_are_neighbours(window_size: tuple[int | None, int | None]) -> None:
    """Those of a window too, all but the first of which are equally long."""
    problem = make_problem(seqlen_q=1024, window_size=window_size)
    work = all_visits(problem, Device((9, 0), 132, 2**30), "one_tile")
    assert [cta[0][:2] for cta in work[:9]] == [(m, 0) for m in range(8)] + [(0, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_host_model_of_the_balance_is_that_of_the_scheduler(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = {name: int(rng.integers(1, most)) for name, most in (("batch", 6), ("seqlen_q", 1500), ("seqlen_k", 3000))}
    device = Device((9, 0), int(rng.integers(1, 40)), int(2 ** rng.integers(16, 25)))
    right = int(rng.integers(0, sizes["seqlen_q"])) if seed % 2 else 0
    problem = make_problem(heads_q=6, heads_kv=2, window_size=(None, right), **sizes)
    costs = tile_costs(problem, TRAITS["tile_m"], TRAITS["tile_n"])
    times = [sum(costs[tile[0]] for tile in cta) for cta in all_visits(problem, device, "persistent")]
    section = params(plan(problem, device))["heads_per_section"]
    order = tile_order(costs, problem.batch * problem.heads_q, section)
    assert order.sum() == sum(times)
    assert balance(order, len(times)) == pytest.approx(sum(times) / len(times) / max(times))


# --- Without keys ---


@pytest.mark.parametrize("sink", [None, np.array([0.5, -np.inf, -3.0], np.float32)], ids=["plain", "sink"])
def test_rows_without_keys_have_the_sink(sink: Any) -> None:
    out, lse = np.full((2, 4, 3, 8), np.nan, np.float16), np.full((2, 3, 4), np.nan, np.float32)
    fill_without_keys(out, lse, sink)
    assert not out.any()
    expected = np.full(3, -np.inf, np.float32) if sink is None else sink
    np.testing.assert_array_equal(lse, np.broadcast_to(expected[:, None], lse.shape))


def test_rows_without_keys_and_without_lse() -> None:
    out = np.full((2, 0, 3, 8), np.nan, np.float16)
    fill_without_keys(out, None, np.zeros(3, np.float32))
    fill_without_keys(out, np.zeros((2, 3, 0), np.float32), np.zeros(3, np.float32))
    strided = np.full((1, 6, 4, 16), 7, np.float16)
    fill_without_keys(strided[:, ::2, :, :8], None, None)
    assert (strided[:, ::2, :, :8] == 0).all()
    assert (strided[:, 1::2] == 7).all()
    assert (strided[..., 8:] == 7).all()
