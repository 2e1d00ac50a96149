"""The forward and host benchmarks with fake peers and fake clocks, on NumPy arrays."""

import argparse
import importlib.metadata
import json
import sys
import types

import numpy as np
import pytest
from bench.fakes import fake_cupy, install_fake_gpu

from cupyfa.bench import first_call, forward, host, manifest, peers
from cupyfa.bench.correctness import Check
from cupyfa.bench.harness import Contestant, Spread, Timing
from cupyfa.bench.manifest import Row
from cupyfa.bench.measure import measure as measure_group
from cupyfa.bench.measure import one_line
from cupyfa.bench.peers import PEERS, Availability, Peer
from cupyfa.bench.problems import Cell, make_inputs
from cupyfa.oracles import dense

CELL = Cell(head_dim=16, seqlen=64, batch=1, heads=2, causal=True)


def make_peer(name, call):
    return Peer(name, f"fake {name}", (), (), lambda inputs: Contestant(name, lambda: call(inputs)))


def right(inputs):
    return dense.same_precision(inputs.q, inputs.k, inputs.v, causal=inputs.cell.causal)[0]


def wrong(inputs):
    return right(inputs) * np.asarray(1.1, inputs.q.dtype)


def refuse(inputs):
    raise RuntimeError(f"head_dim {inputs.cell.head_dim} is not supported")


SECONDS = {"cupyfa": 1e-3, "cuDNN": 1.25e-3, "FA3": 2e-3}


def fake_timer(contestant, calls):
    return SECONDS[contestant.name] * calls


def measure(*present):
    return measure_group([make_inputs(CELL, np)], present, 3, fake_timer)[0]


# --- problems ---


def test_default_cells():
    parser = argparse.ArgumentParser()
    forward.add_arguments(parser)
    options = parser.parse_args([])
    cells = forward.cells(options.head_dim, options.seqlen, options.tokens, options.hidden, options.dtype)
    assert len(cells) == 18
    assert {(cell.batch * cell.seqlen, cell.heads * cell.head_dim) for cell in cells} == {(16384, 2048)}
    assert cells[0] == Cell(64, 1024, 16, 32, False)
    assert cells[-1] == Cell(256, 16384, 1, 8, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seqlen", "1000"], "--seqlen 1000 does not divide --tokens 16384"),
        (["--head-dim", "96"], "--head-dim 96 does not divide --hidden 2048"),
        (["--head-dim", "0"], "--head-dim 0 does not divide"),
        (["--rounds", "0"], "argument --rounds: it is 0; it must be at least 1"),
        (["--batch-seconds", "0"], "argument --batch-seconds: it is 0.0; it must be above 0 and at most 60"),
        (["--batch-seconds", "nan"], "argument --batch-seconds: it is nan; it must be above 0"),
        (["--batch-seconds", "x"], "argument --batch-seconds: it is 'x'; it must be a number of seconds"),
        (["--dtype", "float32"], "invalid choice"),
        (["--peers", "nobody"], "argument --peers: invalid choice: 'nobody'"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(bench, arguments, message, capsys):
    assert bench("forward", *arguments) == 2
    assert message in capsys.readouterr().err


# --- a cell ---


def test_cell_with_a_peer():
    row = measure(make_peer("cuDNN", right))
    assert list(row.checks) == ["cuDNN", "cupyfa"]
    assert all(check.passed for check in row.checks.values())
    assert row.checks["cupyfa"].reference == "cuDNN"
    assert row.timings["cupyfa"].calls == 10
    assert len(row.timings["cuDNN"].seconds) == 3
    lines = forward.format_table([row])
    assert lines[0] == (
        "| head_dim | mask | seqlen | cupyfa | cuDNN | cupyfa / cuDNN [min..max] | cupyfa error | of limit |"
    )
    assert lines[2].startswith("| 16 | causal | 64 | 0 | 0 | 1.250 [1.250..1.250] | ")
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")


def test_cell_alone():
    row = measure()
    assert row.checks["cupyfa"].passed
    assert row.checks["cupyfa"].reference == ""
    assert "| 16 | causal | 64 | 0 | - | " in forward.format_table([row])[2]


def test_wrong_and_refusing_peers_are_reported_and_not_timed():
    row = measure(make_peer("cuDNN", wrong), make_peer("flash", refuse), make_peer("FA3", right))
    assert set(row.timings) == {"FA3", "cupyfa"}
    assert row.checks["cupyfa"].reference == "FA3"  # the wrong one is nobody's reference
    text = "\n".join(forward.format_notes([row], [], HEADER))
    assert "* cuDNN, bfloat16 d16 causal S64 B1 H2: not timed: differs from float64 by" in text
    assert "not timed: RuntimeError: head_dim 16 is not supported" in text
    assert "WRONG" in one_line(row)


def test_a_peer_that_cannot_be_prepared():
    def prepare(inputs):
        raise ImportError("libfoo.so\nstack")

    row = measure(Peer("FA4", "fake", (), (), prepare))
    assert row.checks["FA4"] == Check(False, message="ImportError: libfoo.so", refused=True)
    assert set(row.timings) == {"cupyfa"}


def test_clocks_are_read_before_and_after():
    readings = iter([{"sm_mhz": 1.0, "power_w": 2.0}, {"sm_mhz": 3.0, "power_w": 4.0}])
    clocks = types.SimpleNamespace(read=lambda: next(readings))
    (row,) = measure_group([make_inputs(CELL, np)], [], 1, fake_timer, clocks)
    assert (row.before["sm_mhz"], row.after["sm_mhz"]) == (1.0, 3.0)


# --- output ---

HEADER = {
    "batch_seconds": 0.01,
    "gpu": "H200",
    "driver": "580.1",
    "nvrtc": "13.0",
    "cupy": "14.2",
    "torch": "2",
    "cudnn": 9,
    "cupyfa": "0",
}
BIG = Cell(128, 4096, 4, 16, False)


def big_row(cell=BIG):
    own = Timing(10, tuple(cell.useful_flops / (t * 1e12) for t in (600, 590, 640)))
    them = Timing(10, tuple(cell.useful_flops / (t * 1e12) for t in (500, 500, 500)))
    checks = {"cuDNN": Check(True, 1e-3), "cupyfa": Check(True, 1e-3, 2e-3, "cuDNN", 0.4), "flash": Check(False)}
    clock = {"sm_mhz": 1650.0, "power_w": 610.0}
    return Row(cell, None, checks, {"cupyfa": own, "cuDNN": them}, clock, clock)


def test_table_shows_useful_tflops_and_the_ratio():
    lines = forward.format_table([big_row()])
    assert lines[2] == "| 128 | full | 4096 | 600 | 500 | 1.200 [1.180..1.280] | 2.0e-03 | 0.40 |"


def test_table_tells_wrong_from_absent():
    other = big_row(Cell(128, 1024, 16, 16, True))
    other.timings["flash"] = other.timings["cuDNN"]
    other.checks["flash"] = Check(True)
    lines = forward.format_table([big_row(), other, measure()])
    assert lines[2].startswith("| 128 | full | 4096 | 600 | 500 | wrong | 1.200")
    assert lines[3].startswith("| 128 | causal | 1024 | 600 | 500 | 500 | 1.200")
    assert lines[4].startswith("| 16 | causal | 64 | 0 | - | - | - | ")


def test_notes_say_the_rules_and_who_is_absent():
    absent = Availability("FA3", "flash-attn 3", None, "ModuleNotFoundError: No module named 'flash_attn_interface'")
    text = "\n".join(forward.format_notes([big_row()], [absent, Availability("cuDNN", "SDPA", "2.11")], HEADER))
    for part in (
        "causal halved",
        "CUDA events around a batch of N calls",
        "interleaved batches of 0.01 s",
        "flash-attn 3 (FA3): absent: ModuleNotFoundError",
        "SDPA (cuDNN): 2.11",
        "SM 1650 to 1650 MHz, power 610 to 610 W",
        "H200, driver 580.1",
    ):
        assert part in text


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"bars.{suffix}"
    forward.plot([big_row(), measure()], str(path))
    assert path.stat().st_size > 1000


# --- peers ---


def test_absent_peers_have_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for availability in peers.probe_all(PEERS):
        assert availability.version is None
        assert "torch" in availability.reason


def fake_torch(available):
    torch = types.ModuleType("torch")
    torch.__version__ = "9.9"
    torch.cuda = types.SimpleNamespace(is_available=lambda: available)
    return torch


def test_peers_that_import_have_a_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(True))
    monkeypatch.setitem(sys.modules, "fake_attention", types.SimpleNamespace(__version__="1.2"))
    peer = Peer("x", "X", ("fake_attention",), ("no-such-distribution",), lambda inputs: None)
    assert peer.probe() == Availability("x", "X", "1.2")
    known = Peer("x", "X", ("fake_attention",), ("no-such-distribution", "numpy"), lambda inputs: None)
    assert known.probe().version == importlib.metadata.version("numpy")
    monkeypatch.setitem(sys.modules, "torch", fake_torch(False))
    assert peer.probe().reason == "torch finds no CUDA device"


def test_every_peer_has_its_own_column():
    assert [peer.name for peer in PEERS] == ["cuDNN", "flash", "FA3", "FA4", "FlashInfer"]
    assert PEERS[0].name == peers.BASELINE


# --- host ---


def test_host_lines():
    costs = {"cuDNN": Spread(22.04, 21.0, 25.0), "cupyfa": Spread(9.26, 9.0, 9.9)}
    lines = host.format_lines(host.HostCost(host.CELL, 2000, costs, {"flash": "RuntimeError: no"}))
    assert "2000 calls between two synchronisations" in lines[0]
    assert lines[2:] == [
        "* cupyfa: 9.3 us [9.0..9.9]",
        "* cuDNN: 22.0 us [21.0..25.0]",
        "* flash: not timed: RuntimeError: no",
    ]


# --- the command line ---


@pytest.mark.parametrize("command", ["forward", "backward", "ablation", "options", "host", "first-call"])
def test_without_a_gpu_it_says_so(bench, command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert bench(command) == 2
    message = capsys.readouterr().err
    assert message.startswith("The benchmark needs a GPU")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("capability", "message"), [(None, "no CUDA device"), ("80", "capability 8.0"), ("100", "capability 10.0")]
)
def test_other_gpus_are_refused(capability, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(capability))
    assert message in peers.why_not_here()
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy("90"))
    assert peers.why_not_here() is None


def test_the_extra_is_named_before_anything_runs(bench, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy("90"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("forward", "--plot", "bars.png") == 2
    assert capsys.readouterr().err == "The benchmark needs matplotlib: pip install 'cupyfa[bench]'\n"


def test_first_call_is_made_by_the_command_of_a_new_process(bench, monkeypatch, tmp_path, capsys):
    commands = []

    def run(command, **_):
        commands.append(command)
        return types.SimpleNamespace(returncode=0, stdout=json.dumps({"seconds": 0.5}))

    monkeypatch.setattr(first_call.subprocess, "run", run)
    assert first_call.first_calls(tmp_path) == [{"seconds": 0.5}] * 2
    assert commands[0] == commands[1]
    assert commands[0][:4] == [sys.executable, "-m", "cupyfa", "bench"]
    install_fake_gpu(monkeypatch)
    monkeypatch.setattr(first_call, "_child", lambda: print("the child"))
    assert bench(*commands[0][4:]) == 0
    assert capsys.readouterr().out == "the child\n"


def test_whole_run_with_a_fake_gpu(bench, monkeypatch, tmp_path, capsys):
    """Everything but the kernels: NumPy stands for CuPy, a table for the clock."""
    install_fake_gpu(monkeypatch)
    monkeypatch.setattr(host, "time_on_host", fake_timer)
    monkeypatch.setattr(measure_group, "__defaults__", (fake_timer, None, 0.01))
    monkeypatch.setattr(first_call, "first_calls", lambda cache: [{"seconds": 0.71}, {"seconds": 0.0271}])
    path = tmp_path / "bench.json"
    arguments = ["--head-dim", "16", "--seqlen", "64", "--tokens", "64", "--hidden", "32", "--json", str(path)]
    assert bench("forward", *arguments) == 0
    out, err = capsys.readouterr()
    assert "| 16 | full | 64 |" in out
    assert "| 16 | causal | 64 |" in out
    assert "* cupyfa: 1000.0 us" in out
    assert "0.71 s with compilation, 0.027 s in the next process" in out
    assert "absent: ModuleNotFoundError" in out
    assert "cupyfa ok" in err
    assert manifest.CONVENTIONS["regime"] in path.read_text(encoding="utf-8")
