"""The benchmark of the options with a fake timer, on NumPy arrays."""

import dataclasses
import importlib
import json

import numpy as np
import pytest
from bench.fakes import install_fake_gpu
from problems import make_problem

import cupyfa
from cupyfa.bench import biases, options
from cupyfa.bench.correctness import Check
from cupyfa.bench.harness import Contestant, Timing
from cupyfa.bench.manifest import Row
from cupyfa.bench.measure import measure
from cupyfa.bench.peers import Availability, Peer
from cupyfa.bench.problems import Cell, share_inputs
from cupyfa.oracles import dense
from cupyfa.select import H200, select

SMALL = Cell(head_dim=16, seqlen=64, batch=1, heads=2, causal=False)
WINDOWED = dataclasses.replace(SMALL, window_size=(8, 0))
CAPPED = dataclasses.replace(SMALL, softcap=50.0)
BIASED = dataclasses.replace(SMALL, bias="qk")
PARTS = (options.windows(), options.modifiers(), biases.biases())
EVERY = [cell for groups in PARTS for group in groups for cell in group]


def kernel(cell):
    """The kernel that a call on arrays gets."""
    problem = make_problem(
        batch=cell.batch,
        seqlen_q=cell.seqlen,
        seqlen_k=cell.seqlen,
        heads_q=cell.heads,
        heads_kv=cell.heads_kv or cell.heads,
        head_dim=cell.head_dim,
        dtype=cell.warmup_call["dtype"],
        sink=cell.sink,
        alibi=cell.alibi,
        bias=cell.bias_shape if cell.bias else None,
        bias_dtype=cell.warmup_call.get("bias_dtype"),
        **cell.options,
    )
    return select(problem, H200).spec


# --- problems ---


def test_windows():
    groups = options.windows()
    assert [(g[0].head_dim, g[0].heads, g[0].heads_kv, g[0].seqlen, g[0].batch) for g in groups] == [
        (64, 64, 8, 8192, 2),
        (128, 32, 8, 8192, 2),
    ]
    masks = ["128, 0", "256, 0", "1024, 0", "4096, 0", "64, 64", "causal", "full"]
    assert all([cell.mask for cell in group] == masks for group in groups)
    causal, full = groups[0][-2:]
    assert causal.visible_pairs == 8192 * 8193 // 2
    assert full.useful_flops == full.dense_flops


def test_modifiers():
    groups = options.modifiers()
    assert {(cell.batch, cell.seqlen, cell.heads * cell.head_dim) for group in groups for cell in group} == {
        (4, 4096, 2048)
    }
    each = ["", "softcap 50", "sink", "ALiBi"]
    full, causal = groups[:2]
    assert [(cell.mask, cell.modifiers) for cell in full] == [("full", name) for name in each]
    assert [(cell.mask, cell.modifiers) for cell in causal] == [
        *(("causal", name) for name in each),
        ("1024, 0", ""),
        ("1024, 0", "softcap 50, sink, ALiBi"),
    ]
    assert [group[0].head_dim for group in groups] == [64, 64, 128, 128]


def test_biases():
    groups = biases.biases()
    assert [(group[0].head_dim, group[0].causal, group[0].bias) for group in groups] == [
        (64, False, ""),
        (64, True, ""),
        (128, False, ""),
        (128, True, ""),
    ]
    each = [(axes, dtype) for axes in ("bhqk", "qk", "bk") for dtype in ("same", "float32")]
    assert all([(cell.bias, cell.bias_dtype) for cell in group[1:]] == each for group in groups)
    full, causal = groups[2], groups[3]
    pairs = 4096 * 4096
    assert [cell.bias_bytes for cell in full] == [
        *(0, 4 * 16 * pairs * 2, 4 * 16 * pairs * 4, pairs * 2, pairs * 4),
        *(4 * 4096 * 2, 4 * 4096 * 4),
    ]
    assert causal[1].bias_bytes == 4 * 16 * (4096 * 4097 // 2) * 2
    assert causal[1].bias_shape == (4, 16, 4096, 4096)


def test_a_group_is_of_one_shape():
    for group in [group for groups in PARTS for group in groups]:
        assert len({(cell.shape, cell.shape_kv, cell.dtype) for cell in group}) == 1
        assert len(set(group)) == len(group)


@pytest.mark.parametrize("cell", EVERY, ids=str)
def test_the_kernel_that_is_warmed_up_is_the_one_that_is_timed(cell):
    (spec,) = importlib.import_module("cupyfa.warmup")._specs(0, cell.warmup_call, H200)
    assert spec == kernel(cell)
    assert cell.useful_flops <= cell.scheduled_flops(spec.tile_m, spec.tile_n, spec.head_dim)


# --- a group ---

SECONDS = {"cupyfa": 1e-3, "flex": 1.5e-3}


def fake_timer(contestant, calls):
    return SECONDS[contestant.name] * calls


def fake_flex(inputs):
    return Contestant("flex", lambda: dense.same_precision(inputs.q, inputs.k, inputs.v, **inputs.options)[0])


FLEX = Peer("flex", "fake", (), (), fake_flex, takes=frozenset({"window"}))


def test_a_group_shares_its_rounds():
    log = []

    def timer(contestant, calls):
        log.append(contestant.name)
        return fake_timer(contestant, calls)

    rows = measure(share_inputs([SMALL, WINDOWED, CAPPED], np), [FLEX], 2, timer)
    assert [row.cell for row in rows] == [SMALL, WINDOWED, CAPPED]
    assert [list(row.timings) for row in rows] == [["flex", "cupyfa"], ["flex", "cupyfa"], ["cupyfa"]]  # no softcap
    assert all(check.passed for row in rows for check in row.checks.values())
    assert log[10:15] == ["flex", "cupyfa", "flex", "cupyfa", "cupyfa"]  # after two batches of each: a round of all


def test_who_is_wrong_on_one_problem_is_timed_on_the_others():
    def prepare(inputs):  # without the window
        return Contestant("flex", lambda: dense.same_precision(inputs.q, inputs.k, inputs.v)[0])

    peer = dataclasses.replace(FLEX, prepare=prepare)
    plain, windowed = measure(share_inputs([SMALL, WINDOWED], np), [peer], 1, fake_timer)
    assert set(plain.timings) == {"flex", "cupyfa"}
    assert set(windowed.timings) == {"cupyfa"}
    assert "| wrong | - |" in options.format_windows([windowed])[2]


# --- output ---


def row_of(cell, own=(1e-3, 1e-3, 2e-3), flex=(2e-3, 3e-3, 2e-3)):
    timings = {"cupyfa": Timing(10, own)} | ({"flex": Timing(10, flex)} if flex else {})
    checks = {name: Check(True, 1e-3, None, "", 0.4) for name in timings}
    return Row(cell, kernel(cell), checks, timings)


def test_table_of_windows():
    cell = options.windows()[1][0]
    lines = options.format_windows([row_of(cell)])
    assert lines[0] == (
        "| head_dim | heads | window | cupyfa | scheduled | useful part | us | flex | cupyfa / flex [min..max] | "
        "cupyfa error | of limit |"
    )
    spec = kernel(cell)
    work = cell.scheduled_flops(spec.tile_m, spec.tile_n, spec.head_dim)
    useful, scheduled, part = cell.useful_flops / 1e9, work / 1e9, cell.useful_flops / work
    assert lines[2] == (
        f"| 128 | 32/8 | 128, 0 | {useful:.0f} | {scheduled:.0f} | {part:.2f} | 1000 | {useful / 2:.0f} | "
        "2.000 [1.000..3.000] | 1.0e-03 | 0.40 |"
    )
    assert len({line.count("|") for line in lines}) == 1


def test_table_of_modifiers():
    plain, capped, sink = options.modifiers()[0][:3]
    rows = [row_of(plain), row_of(capped, own=(2e-3, 1e-3, 4e-3)), row_of(sink, flex=None)]
    lines = options.format_modifiers(rows)
    assert lines[0] == (
        "| head_dim | mask | options | cupyfa | of plain [min..max] | flex | cupyfa / flex [min..max] | cupyfa error | "
        "of limit |"
    )
    assert lines[2].startswith("| 64 | full | plain | 550 | 1.000 [1.000..1.000] | 275 | 2.000 [1.000..3.000] |")
    assert lines[3].startswith("| 64 | full | softcap 50 | 275 | 0.500 [0.500..1.000] | 275 | 1.000 [0.500..3.000] |")
    assert lines[4].startswith("| 64 | full | sink | 550 | 1.000 [1.000..1.000] | - | - |")
    assert len({line.count("|") for line in lines}) == 1


def test_a_plain_kernel_that_was_wrong_is_no_measure():
    plain, capped = options.modifiers()[0][:2]
    bad = Row(plain, None, {"cupyfa": Check(False, message="differs")}, {})
    lines = options.format_modifiers([bad, row_of(capped)])
    assert lines[2].startswith("| 64 | full | plain | wrong | - | - | - | - | - |")
    assert lines[3].startswith("| 64 | full | softcap 50 | 550 | - | ")


def test_each_problem_has_its_plain_one():
    for group in options.modifiers():
        lines = options.format_modifiers([row_of(cell) for cell in group])
        assert all(line.split(" | ")[4] == "1.000 [1.000..1.000]" for line in lines[2:])


def test_table_of_biases():
    plain, same, float32 = biases.biases()[2][:3]
    rows = [row_of(plain), row_of(same, own=(1.25e-3, 1e-3, 4e-3)), row_of(float32, own=(2e-3, 2e-3, 2e-3), flex=None)]
    lines = biases.format_biases(rows, 2 * float32.bias_bytes / 3e-3)  # 1.5 ms for float32, half of that for bfloat16
    assert lines[0] == (
        "| head_dim | mask | bias | cupyfa | us | read us | of plain [min..max] | of the smaller rate | flex | "
        "cupyfa / flex [min..max] | cupyfa error | of limit |"
    )
    assert lines[2].startswith("| 128 | full | none | 550 | 1000 | 0 | 1.000 [1.000..1.000] | 1.000 | 275 | 2.000 [")
    assert lines[3].startswith("| 128 | full | bhqk bfloat16 | 440 | 1250 | 750 | 0.800 [0.500..1.000] | 0.800 | 275 |")
    assert lines[4].startswith(
        "| 128 | full | bhqk float32 | 275 | 2000 | 1500 | 0.500 [0.500..1.000] | 0.750 | - | - |"
    )
    assert len({line.count("|") for line in lines}) == 1
    bad = Row(plain, None, {"cupyfa": Check(False, message="differs")}, {})
    assert "| bhqk bfloat16 | 550 | 1000 | 1 | - | - |" in biases.format_biases([bad, row_of(same)], 4e15)[3]


HEADER = {
    "batch_seconds": 0.01,
    "gpu": "H200",
    "driver": "580.1",
    "nvrtc": "13.0",
    "cupy": "14.2",
    "torch": None,
    "cudnn": None,
    "cupyfa": "0",
}


def test_notes_say_the_rules_and_who_is_absent():
    absent = Availability("flex", "torch flex_attention", None, "ModuleNotFoundError: No module named 'torch'")
    text = "\n".join(options.format_notes([row_of(EVERY[0])], [absent], HEADER))
    for part in (
        "4\\*head_dim operations for each key that a row of a head sees",
        "CUDA events around a batch of N calls",
        "interleaved batches of 0.01 s",
        "torch flex_attention (flex): absent: ModuleNotFoundError",
        "H200, driver 580.1",
    ):
        assert part in text


# --- the command line ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "argument --rounds: it is 0; it must be at least 1"),
        (["--batch-seconds", "0"], "argument --batch-seconds: it is 0.0; it must be above 0 and at most 60"),
        (["--peers", "cuDNN"], "argument --peers: invalid choice: 'cuDNN'"),
        (["--seqlen", "1024"], "unrecognized arguments: --seqlen 1024"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(bench, arguments, message, capsys):
    assert bench("options", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def fake_gpu(monkeypatch):
    """NumPy stands for CuPy, and a table for the clock; returns the calls that are warmed up."""
    install_fake_gpu(monkeypatch)
    monkeypatch.setattr(measure, "__defaults__", (fake_timer, None, 0.01))
    monkeypatch.setattr(options, "windows", lambda: [[WINDOWED, SMALL]])
    monkeypatch.setattr(options, "modifiers", lambda: [[SMALL, CAPPED]])
    monkeypatch.setattr(options, "biases", lambda: [[SMALL, BIASED]])
    monkeypatch.setattr(options, "read_bandwidth", lambda rounds, batch_seconds: 4.25e12)
    warm = []
    monkeypatch.setattr(cupyfa, "warmup", warm.extend)
    return warm


def test_whole_run_with_a_fake_gpu(bench, fake_gpu, tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert bench("options", "--rounds", "2", "--json", str(path)) == 0
    out, err = capsys.readouterr()
    assert "| 16 | 2/2 | 8, 0 |" in out
    assert "| 16 | full | softcap 50 | 0 | 1.000 [1.000..1.000] | - | - |" in out
    assert "| 16 | full | qk float32 | 0 | 1000 | 0 | 1.000 [1.000..1.000] | 1.000 | - | - |" in out
    assert "* Read us: the bytes of the bias at 4.25 TB/s" in out
    assert "absent: ModuleNotFoundError" in out
    assert "bfloat16 d16 full S64 B1 H2 softcap 50: cupyfa ok" in err
    assert fake_gpu == [cell.warmup_call for cell in (WINDOWED, SMALL, SMALL, CAPPED, SMALL, BIASED)]
    record = json.loads(path.read_text(encoding="utf-8"))
    assert [row["problem"]["softcap"] for row in record["rows"]] == [None, None, None, 50.0, None, None]
    assert [row["problem"]["bias"] for row in record["rows"]] == ["", "", "", "", "", "qk"]
    assert record["rows"][0]["problem"]["window_size"] == [8, 0]
    assert record["rows"][0]["contestants"]["cupyfa"]["timing"]["speed_over_flex"] is None


def test_alone(bench, fake_gpu, capsys):
    assert bench("options", "--rounds", "1", "--peers") == 0
    assert "absent" not in capsys.readouterr().out


def test_a_wrong_result_is_an_error(bench, fake_gpu, monkeypatch, capsys):
    right = cupyfa.attention
    monkeypatch.setattr(cupyfa, "attention", lambda *arrays, softcap=None, **others: right(*arrays, **others) * 2)
    assert bench("options", "--rounds", "1") == 1
    out, err = capsys.readouterr()
    assert "| wrong |" in out
    assert "cupyfa WRONG" in err
