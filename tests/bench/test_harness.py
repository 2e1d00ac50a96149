"""Problems, correctness, timing and clocks, without a GPU."""

import contextlib
import dataclasses
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from cupyfa.bench import clocks as clocks_module
from cupyfa.bench.clocks import Clocks
from cupyfa.bench.correctness import LIMIT, agree, check_all
from cupyfa.bench.harness import Contestant, Spread, Timing, first_line, interleave, order, ratio, time_in_turn
from cupyfa.bench.problems import Cell, make_inputs, share_inputs
from cupyfa.oracles import dense, online
from cupyfa.oracles.mask import visible

SMALL = Cell(head_dim=16, seqlen=200, batch=2, heads=2, causal=True)


# --- problems ---


def test_flop_convention():
    full = Cell(head_dim=128, seqlen=4096, batch=4, heads=16, causal=False)
    causal = dataclasses.replace(full, causal=True)
    assert full.dense_flops == full.useful_flops == 2 * 4 * 16 * 4096 * 4096 * (128 + 128) == 549_755_813_888
    assert causal.dense_flops == full.dense_flops
    assert causal.useful_flops * 2 == full.useful_flops


def test_scheduled_flops_count_whole_tiles():
    full = Cell(head_dim=64, seqlen=256, batch=3, heads=5, causal=False)
    assert full.scheduled_flops(128, 128, 64) == full.dense_flops
    assert full.scheduled_flops(128, 128, 128) == 2 * full.dense_flops  # padded head_dim
    # Query tiles of 128: 1 and 2 key tiles of 128, of the 4 that there are.
    assert dataclasses.replace(full, causal=True).scheduled_flops(128, 128, 64) * 4 == full.dense_flops * 3
    # Half of the columns are those of v.
    assert full.scheduled_flops(128, 128, 64, 32) * 4 == full.dense_flops * 3
    # A ragged length: 2 x 2 tiles of 128 for 130 x 130.
    assert dataclasses.replace(full, seqlen=130).scheduled_flops(128, 128, 64) == full.dense_flops


WINDOWS = [(5, 0), (0, 0), (70, 70), (3, None), (None, 0), (None, 40), (300, 300)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("seqlen", [1, 128, 200])
def test_flops_of_a_window_are_those_of_visible_keys(seqlen, window):
    cell = Cell(head_dim=16, seqlen=seqlen, batch=3, heads=5, causal=False, window_size=window)
    seen = visible(seqlen, seqlen, False, window_size=window)
    assert cell.visible_pairs == seen.sum()
    assert cell.useful_flops == 3 * 5 * seen.sum() * 2 * (16 + 16)
    tile_m, tile_n = 32, 48
    tiles = [
        seen[row : row + tile_m, key : key + tile_n].any()
        for row in range(0, seqlen, tile_m)
        for key in range(0, seqlen, tile_n)
    ]
    assert cell.scheduled_flops(tile_m, tile_n, 32) == 3 * 5 * sum(tiles) * tile_m * tile_n * 2 * (32 + 32)


def test_causal_cuts_a_window():
    cell = Cell(head_dim=16, seqlen=100, batch=1, heads=1, causal=True, window_size=(7, 7))
    assert cell.useful_flops == dataclasses.replace(cell, causal=False, window_size=(7, 0)).useful_flops
    assert cell.mask == "7, 0"


def test_problem_in_words():
    assert str(SMALL) == "bfloat16 d16 causal S200 B2 H2"
    windowed = dataclasses.replace(
        SMALL, window_size=(64, 0), softcap=50.0, sink=True, alibi=True, bias="qk", heads_kv=1
    )
    assert str(windowed) == "bfloat16 d16 window (64, 0) S200 B2 H2/1 softcap 50, sink, ALiBi, bias qk float32"
    assert windowed.needs == {"window", "softcap", "sink", "alibi", "bias"}
    assert SMALL.needs == frozenset()
    wide = dataclasses.replace(SMALL, head_dim_v=8)
    assert (str(wide), wide.needs) == ("bfloat16 d16/8 causal S200 B2 H2", {"head_dim_v"})
    masks = {(None, None): "full", (None, 0): "causal", (3, None): "3, all", (None, 2): "all, 2", (0, 0): "0, 0"}
    plain = dataclasses.replace(SMALL, causal=False)
    assert {window: dataclasses.replace(plain, window_size=window).mask for window in masks} == masks


def test_problems_of_one_shape_share_their_arrays():
    cells = [SMALL, dataclasses.replace(SMALL, causal=False, sink=True, alibi=True, softcap=3.0)]
    plain, modified = share_inputs(cells, np)
    assert (plain.q is modified.q, plain.k is modified.k, plain.v is modified.v) == (True, True, True)
    assert plain.out is not modified.out
    assert plain.options == {"causal": True}
    assert set(modified.options) == {"causal", "softcap", "sink", "alibi_slopes"}
    assert modified.sink.shape == modified.alibi_slopes.shape == (2,)
    assert modified.alibi_slopes.tolist() == [2**-4, 2**-8]
    assert np.array_equal(make_inputs(cells[1], np).q, plain.q)


def test_inputs_are_random_and_out_is_poisoned():
    for dtype in ("bfloat16", "float16"):
        inputs = make_inputs(dataclasses.replace(SMALL, dtype=dtype), np)
        for x in (inputs.q, inputs.k, inputs.v):
            assert x.shape == SMALL.shape
            assert abs(float(x.astype(np.float32).std()) - 1) < 0.05
        assert not np.array_equal(inputs.q, inputs.k)
        assert np.isnan(inputs.out.astype(np.float32)).all()


# --- correctness ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_correct_implementations_stay_well_below_the_limit(dtype, causal):
    inputs = make_inputs(dataclasses.replace(SMALL, dtype=dtype, causal=causal), np)
    arrays = inputs.q, inputs.k, inputs.v
    exact, _ = dense.attention(*arrays, causal=causal)
    plain, _ = dense.same_precision(*arrays, causal=causal)
    tiled, _ = online.attention(*arrays, causal=causal)
    for actual, expected in ((plain, exact), (tiled, exact), (tiled, plain)):
        passed, largest, share = agree(actual, expected, dtype)
        assert passed
        assert 0 < share < 0.7
        assert largest < 0.03


def test_limit_is_exact():
    expected = np.array([[1.0, -0.5], [0.25, 0.0]], np.float32)
    limit = LIMIT * 2.0**-8  # of the first row
    assert agree(expected + np.array([[0, limit], [0, 0]], np.float32), expected, "bfloat16")[0]
    assert not agree(expected + np.array([[0, 1.01 * limit], [0, 0]], np.float32), expected, "bfloat16")[0]
    # The second row's own magnitude counts.
    passed, largest, share = agree(expected + np.array([[0, 0], [0, limit]], np.float32), expected, "bfloat16")
    assert not passed
    assert largest == limit
    assert share == pytest.approx(4)
    assert not agree(expected + np.array([[0, limit], [0, 0]], np.float32), expected, "float16")[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_never_agrees(bad):
    expected = np.ones((3, 4), np.float32)
    actual = expected.copy()
    actual[1, 2] = bad
    assert agree(actual, expected, "bfloat16") == (False, None, None)
    with np.errstate(invalid="ignore"):
        assert agree(actual, actual, "bfloat16") == (False, None, None)


def plain(inputs, name="plain"):
    return Contestant(name, lambda: dense.same_precision(inputs.q, inputs.k, inputs.v, causal=inputs.cell.causal)[0])


def spoiled(inputs, name, index, value):
    def call():
        out = plain(inputs).call()
        out[index] = value
        return out

    return Contestant(name, call)


def test_checks_find_who_is_wrong():
    inputs = make_inputs(SMALL, np)

    def crash():
        raise RuntimeError("no kernel image\nmore")

    checks = check_all(
        [
            Contestant("crash", crash),
            spoiled(inputs, "bad sample", (-1, -1, -1), 3),  # would be the reference, but float64 says no
            plain(inputs),
            Contestant("tiled", lambda: online.attention(inputs.q, inputs.k, inputs.v, causal=True)[0]),
            spoiled(inputs, "bad elsewhere", (0, 150, 0, 3), 2),  # no sampled row: the reference finds it
            spoiled(inputs, "unwritten", (0, 7), np.nan),
            Contestant("top-left", lambda: online.attention(inputs.q, inputs.k, inputs.v)[0]),  # another mask
        ],
        inputs,
    )
    assert [name for name, check in checks.items() if check.passed] == ["plain", "tiled"]
    assert checks["crash"].message == "RuntimeError: no kernel image"
    assert checks["bad sample"].message.startswith("differs from float64 by ")
    assert checks["plain"].reference == ""
    assert checks["plain"].peer is None
    assert checks["tiled"].reference == "plain"
    assert checks["tiled"].peer > 0
    assert checks["tiled"].share < 0.7
    assert checks["bad elsewhere"].float64 < 0.03 < checks["bad elsewhere"].peer
    assert checks["bad elsewhere"].message.startswith("differs from float64 or plain by ")
    assert "NaN" in checks["unwritten"].message
    assert checks["top-left"].share > 1


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 128, 300])
def test_every_length_can_be_checked(seqlen):
    inputs = make_inputs(dataclasses.replace(SMALL, seqlen=seqlen), np)
    assert check_all([plain(inputs)], inputs)["plain"].passed


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (20, 0)},
        {"window_size": (30, 30)},
        {"window_size": (None, 9)},
        {"window_size": (9, None)},
        {"softcap": 0.5},
        {"sink": True},
        {"alibi": True},
        {"alibi": True, "window_size": (50, 10), "softcap": 1.0, "sink": True},
        {"bias": "bhqk"},
        {"bias": "qk", "bias_dtype": "same", "window_size": (50, 10)},
        {"bias": "bk"},
    ],
    ids=str,
)
def test_who_leaves_an_option_out_is_found(options):
    cell = dataclasses.replace(SMALL, seqlen=300, causal=False, heads_kv=1, **options)
    inputs = make_inputs(cell, np)
    arrays = inputs.q, inputs.k, inputs.v

    def contestant(name, **options):
        return Contestant(name, lambda: dense.same_precision(*arrays, **options)[0])

    without = [contestant(name, **{k: v for k, v in inputs.options.items() if k != name}) for name in inputs.options]
    checks = check_all([*without, contestant("right", **inputs.options)], inputs)
    assert [name for name, check in checks.items() if check.passed] == ["causal", "right"]
    assert checks["right"].share < 0.7


# --- timing ---


def test_order_gives_everyone_every_place():
    assert [order(3, index) for index in range(7)] == [
        [0, 1, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0], [0, 2, 1], [1, 0, 2], [0, 1, 2],
    ]  # fmt: skip
    for count in range(1, 6):
        rounds = [order(count, index) for index in range(count)]
        assert all(sorted(places) == list(range(count)) for places in (*rounds, *zip(*rounds, strict=True)))


def test_spread_is_median_and_range():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)


def test_ratio_is_formed_within_a_round():
    # Both slow down from round to round; the ratio stays.
    ours, theirs = Timing(1, (1.0, 2.0, 4.0)), Timing(1, (1.5, 3.0, 5.0))
    assert ratio(ours, theirs) == Spread(1.5, 1.25, 1.5)
    assert ratio(ours, ours) == Spread(1.0, 1.0, 1.0)


class FakeTimer:
    """A machine that slows down by 1% with every batch."""

    def __init__(self, **seconds):
        self.seconds = seconds
        self.log = []

    def __call__(self, contestant, calls):
        self.log.append((contestant.name, calls))
        return self.seconds[contestant.name] * calls * (1 + 0.01 * len(self.log))


def test_interleave_rotates_and_fills_batches():
    timer = FakeTimer(a=1e-3, b=4e-3, c=1.0)
    names = "abc"
    timings = interleave([Contestant(name, lambda: None) for name in names], 4, timer)
    measured = [name for name, calls in timer.log[6:]]
    assert timer.log[:6] == [("a", 2), ("a", 5), ("b", 2), ("b", 5), ("c", 2), ("c", 5)]
    # One round that does not count, then four.
    assert measured == [*"abc", *"abc", *"bca", *"cab", *"cba"]
    assert [timings[name].calls for name in names] == [10, 2, 1]
    assert all(len(timings[name].seconds) == 4 for name in names)
    assert timings["a"].seconds[0] == pytest.approx(1e-3 * 1.10)  # the tenth batch of all
    assert ratio(timings["a"], timings["b"]).median == pytest.approx(4, rel=0.03)


def test_interleave_with_fixed_calls_and_with_nobody():
    timer = FakeTimer(a=1e-3)
    assert interleave([Contestant("a", lambda: None)], 2, timer, calls=2000)["a"].calls == 2000
    assert timer.log == [("a", 2000)] * 3
    assert interleave([], 2, timer) == {}


def test_problems_share_rounds_under_equal_names():
    timer = FakeTimer(a=1e-3)
    timings = time_in_turn([Contestant("a", lambda: None), Contestant("a", lambda: None)], 3, timer, calls=7)
    assert len(timer.log) == 2 * 4
    assert [len(timing.seconds) for timing in timings] == [3, 3]
    assert time_in_turn([], 2, timer) == []


def test_context_holds_during_output():
    state = []

    @contextlib.contextmanager
    def context():
        state.append("in")
        yield
        state.append("out")

    contestant = Contestant("x", lambda: state.append("call") or 7, lambda result: result + 1, context)
    assert contestant.output() == 8
    assert state == ["in", "call", "out"]


def test_first_line_is_short():
    assert first_line(ValueError("a\nb")) == "ValueError: a"
    assert first_line(KeyError()) == "KeyError"
    assert len(first_line(OSError("x" * 1000))) < 200


# --- clocks ---


def nvml(clock, driver=b"580.1"):
    def get_clock(handle, kind):
        assert (handle, kind) == ("gpu 0000:01:00.0", 1)
        if clock is None:
            raise RuntimeError("Not Supported")
        return clock

    module = types.ModuleType("pynvml")
    module.NVML_CLOCK_SM = 1
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByPciBusId = lambda bus: f"gpu {bus}"
    module.nvmlSystemGetDriverVersion = lambda: driver
    module.nvmlDeviceGetClockInfo = get_clock
    module.nvmlDeviceGetPowerUsage = lambda handle: 345_600
    return module


def test_clocks_from_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(1755))
    clocks = Clocks("0000:01:00.0")
    assert (clocks.source, clocks.driver) == ("pynvml", "580.1")
    assert clocks.read() == {"sm_mhz": 1755.0, "power_w": 345.6}
    monkeypatch.setitem(sys.modules, "pynvml", nvml(None, driver="580.2"))
    clocks = Clocks("0000:01:00.0")
    assert clocks.driver == "580.2"
    assert clocks.read() is None


def test_clocks_from_nvidia_smi(monkeypatch):
    answers = {"driver_version": "580.1\n", "clocks.sm,power.draw": "1980, 123.45\n"}

    def run(command, **_):
        assert command[0] == "nvidia-smi"
        assert command[-1] == "--id=0000:01:00.0"
        return types.SimpleNamespace(stdout=answers[command[1].removeprefix("--query-gpu=")])

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(clocks_module.subprocess, "run", run)
    clocks = Clocks("0000:01:00.0")
    assert (clocks.source, clocks.driver) == ("nvidia-smi", "580.1")
    assert clocks.read() == {"sm_mhz": 1980.0, "power_w": 123.45}
    answers["clocks.sm,power.draw"] = "[N/A], [N/A]\n"
    assert clocks.read() is None
    answers["clocks.sm,power.draw"] = ""
    assert clocks.read() is None


def test_clocks_of_nothing(monkeypatch):
    def run(command, **_):
        raise FileNotFoundError(command[0])

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(clocks_module.subprocess, "run", run)
    clocks = Clocks("0000:01:00.0")
    assert (clocks.source, clocks.driver, clocks.read()) == ("none", None, None)


def test_bfloat16_is_ml_dtypes():
    assert make_inputs(SMALL, np).q.dtype == ml_dtypes.bfloat16
