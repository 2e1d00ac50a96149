"""The benchmark of gradients with fake peers, fake kernels and fake clocks, on NumPy arrays."""

import argparse
import contextlib
import dataclasses
import json
import sys
import types

import fake_cupy
import numpy as np
import pytest
from bench.fakes import install_fake_gpu

import cupyfa
from cupyfa import backward_dispatch
from cupyfa.bench import backward, backward_kernels, gradients
from cupyfa.bench.correctness import Check
from cupyfa.bench.gradients import DETERMINISTIC, BackwardCell, Triple, float64_gradients, make_backward_inputs
from cupyfa.bench.harness import Contestant, Timing
from cupyfa.bench.manifest import Row
from cupyfa.bench.peers import Availability, Peer
from cupyfa.bench.problems import Cell
from cupyfa.oracles import backward as oracle
from cupyfa.select import H200
from cupyfa.spec import BwdSpec, PostprocessSpec, PreprocessSpec

CELL = BackwardCell(head_dim=16, seqlen=100, batch=2, heads=2, causal=True)
WIDE = dataclasses.replace(CELL, head_dim=24, head_dim_v=16)
MAIN, *_ = [spec for spec in backward_kernels.specs(CELL, False, H200) if isinstance(spec, BwdSpec)]

SECONDS = {"cupyfa": 1e-3, DETERMINISTIC: 1.25e-3, "cuDNN": 1.5e-3, "flash": 2e-3}
PART_SECONDS = {"preprocess": 5e-5, "main": 9e-4, "postprocess": 6e-5}


def fake_timer(contestant, calls):
    return (SECONDS | PART_SECONDS)[contestant.name] * calls


def right(inputs):
    arrays = (inputs.dout, inputs.q, inputs.k, inputs.v)
    return Triple(*oracle.same_precision(*arrays, causal=inputs.cell.causal)[:3])


def wrong(inputs):
    result = right(inputs)
    return result._replace(dk=result.dk * np.asarray(1.1, result.dk.dtype))


def refuse(inputs):
    raise RuntimeError(f"head_dim {inputs.cell.head_dim} is not supported")


def make_peer(name, call):
    takes = frozenset({"head_dim_v"})
    return Peer(name, f"fake {name}", (), (), lambda inputs: Contestant(name, lambda: call(inputs)), takes)


@pytest.fixture
def kernels(monkeypatch):
    """There is no workspace, and the parts are names for the clock; returns the problems that were prepared."""
    prepared = []

    def prepare(inputs, deterministic):
        prepared.append(deterministic)
        return MAIN, None

    monkeypatch.setattr(backward_kernels, "prepare", prepare)
    fake = [Contestant(name, lambda: None) for name in PART_SECONDS]
    monkeypatch.setattr(backward_kernels, "parts", lambda inputs, workspace: fake)
    return prepared


def measure(*present, cell=CELL, timer=fake_timer, **options):
    return backward.measure(make_backward_inputs(cell, np), present, 3, np, timer, **options)


# --- problems ---


def test_default_cells():
    parser = argparse.ArgumentParser()
    backward.add_arguments(parser)
    options = parser.parse_args([])
    cells = backward.cells(options.head_dim, options.seqlen, options.tokens, options.hidden, options.dtype)
    assert len(cells) == 24
    assert {(cell.batch * cell.seqlen, cell.heads * cell.shape_v[3]) for cell in cells} == {(16384, 2048)}
    assert cells[0] == BackwardCell(64, 1024, 16, 32, False)
    assert cells[17] == BackwardCell(256, 16384, 1, 8, True)
    assert cells[-1] == BackwardCell(192, 16384, 1, 16, True, head_dim_v=128)
    assert str(cells[-1]) == "bfloat16 d192/128 causal S16384 B1 H16"


@pytest.mark.parametrize(("text", "sizes"), [("64", (64, 64)), ("192,128", (192, 128))])
def test_head_dims(text, sizes):
    assert backward.head_dims(text) == sizes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seqlen", "1000"], "bench backward: --seqlen 1000 does not divide --tokens 16384"),
        (["--head-dim", "64,96"], "--head-dim 96 does not divide --hidden 2048"),
        (["--head-dim", "0"], "argument --head-dim: it is '0'; it must be a head_dim, or two"),
        (["--head-dim", "64,"], "argument --head-dim: it is '64,'; it must be a head_dim, or two"),
        (["--head-dim", "1,2,3"], "argument --head-dim: it is '1,2,3'; it must be a head_dim, or two"),
        (["--rounds", "0"], "argument --rounds: it is 0; it must be at least 1"),
        (["--peers", "FA3"], "argument --peers: invalid choice: 'FA3'"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(bench, arguments, message, capsys):
    assert bench("backward", *arguments) == 2
    assert message in capsys.readouterr().err


def test_operations_are_two_and_a_half_times_those_of_the_forward_pass():
    for cell in (CELL, WIDE, dataclasses.replace(WIDE, causal=False), dataclasses.replace(CELL, window_size=(7, 0))):
        forward = Cell(**vars(cell))
        assert 2 * cell.useful_flops == 5 * forward.useful_flops
        assert 2 * cell.dense_flops == 5 * forward.dense_flops
    assert dataclasses.replace(WIDE, causal=False).useful_flops == 5 * 2 * 2 * 100 * 100 * (24 + 16)


def test_scheduled_operations_are_those_of_five_products():
    full = dataclasses.replace(WIDE, causal=False)
    # 2 x 2 tiles of 64; three products over the columns of q and k, two over those of v.
    assert full.scheduled_flops(64, 64, 64, 32) == 2 * 2 * 4 * 64 * 64 * 2 * (3 * 64 + 2 * 32)
    assert dataclasses.replace(full, causal=True).scheduled_flops(64, 64, 64, 32) * 4 == 3 * full.scheduled_flops(
        64, 64, 64, 32
    )


def test_inputs_have_the_result_of_the_forward_pass():
    inputs = make_backward_inputs(WIDE, np)
    assert (inputs.q.shape, inputs.v.shape) == ((2, 100, 2, 24), (2, 100, 2, 16))
    assert inputs.dout.shape == inputs.out.shape == (2, 100, 2, 16)
    out, lse = cupyfa.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
    np.testing.assert_array_equal(inputs.out, out)
    np.testing.assert_array_equal(inputs.lse, lse)
    assert all(abs(x.astype(np.float32)).max() > 1 for x in (inputs.q, inputs.k, inputs.v, inputs.dout))


@pytest.mark.parametrize("cell", [CELL, WIDE, dataclasses.replace(CELL, causal=False)], ids=str)
@pytest.mark.parametrize("chunk", [1024, 30])
def test_float64_is_the_oracle(cell, chunk, monkeypatch):
    monkeypatch.setattr(gradients, "_CHUNK", chunk)
    inputs = make_backward_inputs(cell, np)
    arrays = (inputs.dout, inputs.q, inputs.k, inputs.v)
    expected = oracle.attention_backward(*(x[-1:, :, -1:] for x in arrays), causal=cell.causal)
    for x, reference in zip(float64_gradients(inputs, np), expected[:3], strict=True):
        np.testing.assert_allclose(x, reference, rtol=0, atol=1e-12 * abs(reference).max())


# --- a cell ---


def test_cell_with_peers(kernels):
    row = measure(make_peer("cuDNN", right), make_peer("flash", right))
    assert list(row.checks) == ["cuDNN", "flash", "cupyfa", DETERMINISTIC]
    assert all(check.passed for check in row.checks.values())
    assert {row.checks[name].reference for name in ("flash", "cupyfa", DETERMINISTIC)} == {"cuDNN"}
    assert row.timings["cupyfa"].calls == 10
    assert {name: timing.spread.median for name, timing in row.parts.items()} == pytest.approx(PART_SECONDS)
    assert (row.spec, kernels) == (MAIN, [False, True])
    lines = backward.format_table([row])
    assert lines[0] == (
        "| head_dim | mask | seqlen | cupyfa | deterministic | cuDNN | flash | cupyfa / cuDNN [min..max] | "
        "deterministic / cuDNN [min..max] | preprocess us | main us | postprocess us | cupyfa error | of limit |"
    )
    ratios = "1.500 [1.500..1.500] | 1.200 [1.200..1.200]"
    assert lines[2].startswith(f"| 16 | causal | 100 | 0 | 0 | 0 | 0 | {ratios} | 50 | 900 | 60 | ")
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("cell", [CELL, WIDE], ids=str)
def test_cell_alone(kernels, cell):
    row = measure(cell=cell)
    assert row.checks["cupyfa"].passed
    assert row.checks[DETERMINISTIC].reference == "cupyfa"
    assert row.checks[DETERMINISTIC].peer == 0
    assert f"| {cell.head_dims} | causal | 100 | 0 | 0 | - | - | 50 | 900 | 60 | " in backward.format_table([row])[2]


def test_wrong_and_refusing_peers_are_told_apart_and_not_timed(kernels):
    row = measure(make_peer("cuDNN", refuse), make_peer("flash", wrong))
    assert set(row.timings) == {"cupyfa", DETERMINISTIC}
    assert "| 16 | causal | 100 | 0 | 0 | refused | wrong | - | - | 50 |" in backward.format_table([row])[2]
    text = "\n".join(backward.format_notes([row], [], HEADER))
    assert "* cuDNN, bfloat16 d16 causal S100 B2 H2: not timed: RuntimeError: head_dim 16 is not supported" in text
    assert "* flash, bfloat16 d16 causal S100 B2 H2: not timed: differs from float64 by" in text


def test_a_peer_that_cannot_be_prepared_refuses(kernels):
    row = measure(Peer("cuDNN", "fake", (), (), refuse))
    assert row.checks["cuDNN"] == Check(False, message="RuntimeError: head_dim 16 is not supported", refused=True)
    assert "| refused |" in backward.format_table([row])[2]


def test_a_wrong_kernel_has_no_figures(kernels, monkeypatch):
    own = cupyfa.attention_backward
    monkeypatch.setattr(
        cupyfa, "attention_backward", lambda *arrays, dq, **o: own(*arrays, **o)._replace(dq=dq)
    )  # not written
    row = measure(make_peer("cuDNN", right))
    assert set(row.timings) == {"cuDNN"}
    assert (row.spec, row.parts) == (None, {})
    assert row.checks["cupyfa"].message == "the result has NaN or infinite elements"
    assert "| wrong | wrong | 0 | - | - | - | - | - | - | - |" in backward.format_table([row])[2]


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_one_wrong_block_of_any_gradient_is_found(kernels, name):
    def spoiled(inputs):
        result = right(inputs)
        array = getattr(result, name).copy()
        array[0, -20:, 0] *= 1.05
        return result._replace(**{name: array})

    row = measure(make_peer("cuDNN", right), make_peer("flash", spoiled))
    assert not row.checks["flash"].passed
    assert row.checks["flash"].message.startswith("differs from float64 or cuDNN by")
    assert row.checks["cupyfa"].passed


def test_the_gpu_is_busy_before_a_cell_and_parts_have_their_own_rounds(kernels):
    log = []

    def timer(contestant, calls):
        log.append((contestant.name, calls))
        return fake_timer(contestant, calls)

    measure(make_peer("cuDNN", right), timer=timer)
    busy, rest = log[:3], [name for name, _ in log[3:]]
    assert busy == [(DETERMINISTIC, 2), (DETERMINISTIC, 5), (DETERMINISTIC, 40)]  # 50 ms
    first = rest.index("preprocess")
    assert set(rest[:first]) == {"cuDNN", "cupyfa", DETERMINISTIC}
    assert set(rest[first:]) == set(PART_SECONDS)


def test_clocks_are_read_around_the_rounds_of_all(kernels):
    readings = iter([{"sm_mhz": 1.0, "power_w": 2.0}, {"sm_mhz": 3.0, "power_w": 4.0}])
    row = measure(clocks=types.SimpleNamespace(read=lambda: next(readings)))
    assert (row.before["sm_mhz"], row.after["sm_mhz"]) == (1.0, 3.0)


# --- kernels ---


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernels_of_the_default_cells_are_three(deterministic):
    for head_dim, head_dim_v in ((64, 64), (128, 128), (256, 256), (192, 128)):
        cell = BackwardCell(head_dim, 16384, 1, 2048 // head_dim_v, True, head_dim_v=head_dim_v)
        found = backward_kernels.specs(cell, deterministic, H200)
        assert [type(spec) for spec in found] == [PreprocessSpec, BwdSpec, PostprocessSpec]
        assert (found[1].head_dim_v >= head_dim_v, found[1].deterministic) == (True, deterministic)


@pytest.fixture
def launches(monkeypatch):
    """Memory of the host stands for that of a GPU; returns what is launched there."""
    fake_cupy.install(monkeypatch)
    sys.modules["cupy"].empty_like = lambda array: fake_cupy.empty(array.shape, array.dtype)
    traits = {"threads": 384, "shared_bytes": 0, "tile_m": 64}
    loaded = types.SimpleNamespace
    monkeypatch.setattr(backward_dispatch, "load", lambda spec, _: loaded(spec=spec, traits=traits, function=str(spec)))
    monkeypatch.setattr(backward_dispatch.Device, "current", lambda: H200)
    log = []
    for module in (backward_dispatch, backward_kernels):
        monkeypatch.setattr(module, "launch", lambda *arguments: log.append(arguments))
        monkeypatch.setattr(module, "TensorMapGeometry", types.SimpleNamespace(encode=lambda *_: bytes(128)))
    backward_dispatch._prepare.cache_clear()
    yield log
    backward_dispatch._prepare.cache_clear()


def test_the_parts_are_the_launches_of_a_call(launches):
    host = make_backward_inputs(WIDE, np)
    names = ("q", "k", "v", "out", "dout", "lse")
    inputs = dataclasses.replace(host, **{name: fake_cupy.Array(getattr(host, name)) for name in names})
    spec, workspace = backward_kernels.prepare(inputs, False)
    assert (spec.head_dim, spec.head_dim_v, spec.causal, spec.deterministic) == (64, 64, True, False)
    assert backward_kernels.prepare(inputs, True)[0].deterministic
    xp = types.SimpleNamespace(empty=fake_cupy.empty)
    gradients.own_contestant(inputs, xp, False, workspace).output()
    whole, launches[:] = launches[:], []
    parts = backward_kernels.parts(inputs, workspace)
    assert tuple(part.name for part in parts) == backward_kernels.PARTS
    for part in parts:
        part.call()
    assert [x[0] for x in launches] == [x[0] for x in whole]  # functions
    assert [(x[1].grid, x[1].threads) for x in launches] == [(x[1].grid, x[1].threads) for x in whole]
    assert [x[2] for x in launches] == [7, 7, 7]  # the stream
    assert launches[0][3] == whole[0][3]  # of memory that both use: the gradients are not touched by the first kernel
    assert [len(x[3]) for x in launches] == [len(x[3]) for x in whole]


# --- torch ---


def test_torch_walks_the_graph_of_one_forward_pass(monkeypatch):
    """Torch is faked: its tensors are arrays, and its gradients those of the oracle."""
    log = []

    class Tensor(types.SimpleNamespace):
        def transpose(self, *axes):
            return Tensor(array=self.array.swapaxes(*axes))

        def detach(self):
            return self

        def requires_grad_(self):
            return self

    @contextlib.contextmanager
    def sdpa_kernel(backend):
        log.append(backend)
        yield

    def sdpa(*leaves, is_causal, enable_gqa):
        log.append((is_causal, enable_gqa))
        return leaves

    def grad(out, leaves, dout, retain_graph):
        assert (out, retain_graph) == (tuple(leaves), True)
        arrays = (dout.array, *(leaf.array for leaf in leaves))
        result = oracle.same_precision(*(x.swapaxes(1, 2) for x in arrays), causal=True)
        return [Tensor(array=x.swapaxes(1, 2)) for x in result[:3]]

    torch = types.ModuleType("torch")
    torch.autograd = types.SimpleNamespace(grad=grad)
    kinds = types.SimpleNamespace(CUDNN_ATTENTION="cuDNN's", FLASH_ATTENTION="flash's")
    modules = {
        "torch": torch,
        "torch.nn": types.ModuleType("torch.nn"),
        "torch.nn.functional": types.SimpleNamespace(scaled_dot_product_attention=sdpa),
        "torch.nn.attention": types.SimpleNamespace(SDPBackend=kinds, sdpa_kernel=sdpa_kernel),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gradients, "to_torch", lambda array: Tensor(array=array))
    monkeypatch.setattr(gradients, "tensors", lambda x: [Tensor(array=array) for array in (x.q, x.k, x.v)])
    monkeypatch.setattr(gradients, "from_torch", lambda tensor, dtype: tensor.array)
    inputs = make_backward_inputs(CELL, np)
    for peer in gradients.GRADIENT_PEERS:
        contestant = peer.prepare(inputs)
        assert contestant.name == peer.name
        for _ in range(2):
            for x, expected in zip(contestant.output(), right(inputs), strict=True):
                np.testing.assert_array_equal(x, expected)
    assert log == ["cuDNN's", (True, False), "flash's", (True, False)]


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


def test_a_row():
    cell = BackwardCell(192, 4096, 4, 16, False, head_dim_v=128)
    seconds = {"cupyfa": (500, 480, 520), DETERMINISTIC: (400, 400, 400), "cuDNN": (500, 500, 500)}
    timings = {
        name: Timing(10, tuple(cell.useful_flops / (x * 1e12) for x in rates)) for name, rates in seconds.items()
    }
    checks = {name: Check(True, 1e-3, 2e-3, "cuDNN", 0.4) for name in timings}
    parts = {name: Timing(10, (t,)) for name, t in PART_SECONDS.items()}
    lines = backward.format_table([Row(cell, MAIN, checks, timings, parts=parts)])
    assert lines[2] == (
        "| 192/128 | full | 4096 | 500 | 400 | 500 | 1.000 [0.960..1.040] | 0.800 [0.800..0.800] | 50 | 900 | 60 | "
        "2.0e-03 | 0.40 |"
    )


def test_notes_say_the_rules_and_who_is_absent(kernels):
    absent = Availability("flash", "torch SDPA, flash back end", None, "ModuleNotFoundError: No module named 'torch'")
    text = "\n".join(backward.format_notes([measure()], [absent], HEADER))
    for part in (
        "bfloat16: 2.5 times the 2\\*B\\*H\\*Sq\\*Sk\\*(d+dv) operations of the forward pass, causal halved",
        "with dq, dk, dv and workspace given",
        "interleaved batches of 0.01 s",
        "of the largest magnitude in 64 rows of the head",
        "torch SDPA, flash back end (flash): absent: ModuleNotFoundError",
        "H200, driver 580.1",
    ):
        assert part in text


# --- the command line ---


@pytest.fixture
def fake_gpu(kernels, monkeypatch):
    """NumPy stands for CuPy, a table for the clock; returns the problems whose kernels are compiled before."""
    install_fake_gpu(monkeypatch)
    for name in ("zeros_like", "zeros"):
        setattr(sys.modules["cupy"], name, getattr(np, name))
    monkeypatch.setattr(backward.measure, "__defaults__", (fake_timer, None, 0.01))
    compiled, forward = [], []
    monkeypatch.setattr(backward_kernels, "compile_all", compiled.extend)
    monkeypatch.setattr(cupyfa, "warmup", forward.extend)
    return compiled, forward


ARGUMENTS = ["--head-dim", "16", "24,16", "--seqlen", "64", "--tokens", "64", "--hidden", "32"]


def test_whole_run_with_a_fake_gpu(bench, fake_gpu, tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert bench("backward", *ARGUMENTS, "--json", str(path)) == 0
    out, err = capsys.readouterr()
    for start in ("16 | full", "16 | causal", "24/16 | full", "24/16 | causal"):
        assert f"| {start} | 64 | 0 | 0 | - | - | 50 | 900 | 60 |" in out
    assert "absent: ModuleNotFoundError" in out
    assert "bfloat16 d24/16 causal S64 B1 H2: cupyfa ok" in err
    compiled, forward = fake_gpu
    assert [(cell.head_dim, cell.causal) for cell in compiled] == [(16, False), (16, True), (24, False), (24, True)]
    assert forward == [cell.warmup_call for cell in compiled]
    assert (forward[-1]["q"], forward[-1]["v"]) == ((1, 64, 2, 24), (1, 64, 2, 16))
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["conventions"] == backward.CONVENTIONS
    assert record["rows"][-1]["problem"]["head_dim_v"] == 16
    assert "of dout 6" in record["rows"][-1]["inputs"]
    assert record["rows"][0]["spec"] == str(MAIN)
    assert record["rows"][0]["parts"]["main"]["seconds"] == pytest.approx([9e-4] * 7)


def test_a_wrong_deterministic_result_is_an_error(bench, fake_gpu, monkeypatch, capsys):
    own = cupyfa.attention_backward

    def spoiled(*arrays, deterministic, **others):
        result = own(*arrays, **others)
        return result._replace(dv=result.dv * 2) if deterministic else result

    monkeypatch.setattr(cupyfa, "attention_backward", spoiled)
    assert bench("backward", *ARGUMENTS, "--rounds", "1") == 1
    out, err = capsys.readouterr()
    assert "| 16 | full | 64 | 0 | wrong | - | - | 50 |" in out
    assert "deterministic WRONG" in err


def test_a_problem_without_a_kernel_is_no_traceback(bench, monkeypatch, capsys):
    install_fake_gpu(monkeypatch)
    cupy = sys.modules["cupy"]
    cupy.cuda.runtime = types.SimpleNamespace(getDevice=lambda: 0)
    monkeypatch.setattr(backward_kernels.Device, "current", lambda: H200)
    arguments = ["--head-dim", "512", "--seqlen", "64", "--tokens", "64", "--hidden", "512"]
    assert bench("backward", *arguments) == 2
    assert capsys.readouterr().err.startswith("bench backward: attention: ")
