"""The random problems of ``make gpu-fuzz``, by NumPy and a few by the emulator: they are right, and find faults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz import machines
from fuzz.dense import DenseProblem
from fuzz.lengths import LengthsProblem
from fuzz.machines import Buffers, Outcome
from fuzz.runner import SPECS, Pool, Verdict, run
from nvrtc_tools import import_nvrtc

import cupyfa
from cupyfa.copies import plan_copies
from cupyfa.select import CANDIDATES, H200
from cupyfa.spec import Bias, DType, PlanSpec
from cupyfa.warmup import _specs as kernels_of_call

TESTS = Path(__file__).resolve().parent
POOL = Pool(seed=0)
WRONG = "they differ by|pattern differs"
SOME = [POOL.problem(number) for number in range(1000)]


def wrong(verdicts: list[Verdict]) -> str:
    return "\n".join(verdict.report("again: {}") for verdict in verdicts if verdict.error is not None)


def copied(problem: DenseProblem | LengthsProblem) -> list[str]:
    """What TMA does not take for its strides."""
    return [copy.name for copy in plan_copies(problem.problem, problem.options.get("layout", "BSHD"), (), 0)]


def sequences(problem: DenseProblem | LengthsProblem, packed: bool) -> Any:
    """The lengths of a problem that has some."""
    found = getattr(problem, "sequences", None)
    return found if found is not None and found.packed is packed else None


# --- What is drawn ---


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kernels_are_of_every_kind(seed: int) -> None:
    pool = Pool(seed)
    specs = {pool.problem(number).spec for number in range(6 * SPECS)} - {None}
    assert len(specs) == len(pool) == SPECS
    assert {(spec.tile_m, spec.tile_n) for spec in specs} >= {(row.tile_m, row.tile_n) for row in CANDIDATES}
    assert {spec.dtype for spec in specs} == set(DType)
    assert {spec.bias for spec in specs} == set(Bias)
    for name in ("varlen", "causal", "window", "sink", "softcap", "alibi", "bias_float32", "negate_scores"):
        assert {getattr(spec, name) for spec in specs} == {False, True}, name


def test_warm_calls_are_of_every_kernel() -> None:
    pool = Pool(seed=3)
    specs = [kernels_of_call(0, call, H200) for call in pool.warm_calls()]
    assert [spec for spec, *_ in specs] == [spec for _, _, spec in pool._rows]
    assert all(rest == [PlanSpec()] * spec.varlen for spec, *rest in specs)


@pytest.mark.parametrize(
    ("what", "least"),
    [
        (lambda p: p.spec is None, 20),
        (lambda p: 1 in (p.shape.seqlen_q, p.shape.seqlen_k), 30),
        (lambda p: p.shape.seqlen_q > p.shape.seqlen_k > 0 and p.shape.causal, 50),
        (lambda p: p.spec and p.shape.batch * p.shape.heads_q * -(-p.shape.seqlen_q // p.spec.tile_m) > 132, 20),
        (lambda p: p.shape.layout == "BHSD", 300),
        (lambda p: p.shape.softmax_scale == 0, 50),
        (lambda p: (p.shape.softmax_scale or 0) < 0, 50),
        (lambda p: p.shape.head_dim % 32 and p.shape.head_dim_v % 32, 300),
        (lambda p: p.shape.slopes_of_batch and "alibi_slopes" in p.places, 50),
        *((lambda p, x=x: x in p.places and min(p.places[x].strides) < 0, 10) for x in ("q", "out", "lse")),
        *((lambda p, x=x: x in copied(p), 40) for x in ("q", "k", "v", "out")),
        (lambda p: p.spec and not copied(p), 300),
        (lambda p: 0 in p.places["k"].strides and p.shape.seqlen_k > 1, 50),
        (lambda p: any(s > n for s, n in zip(p.places["q"].strides, p.places["q"].strides[1:], strict=False)), 300),
        (lambda p: "out" not in p.places, 100),
        (lambda p: "lse" not in p.places and p.return_lse, 50),
        (lambda p: sequences(p, True) and 0 in sequences(p, True).lengths_q, 100),
        (lambda p: sequences(p, True) and any(sequences(p, True).gaps), 100),
        (lambda p: sequences(p, True) and sequences(p, True).used_k, 50),
        (lambda p: sequences(p, False) and p.spec, 100),
        *((lambda p, x=x: sequences(p, False) and x in copied(p), 10) for x in ("q", "k", "v", "out")),
        *((lambda p, x=x: p.values.special is not None and p.values.special[0] == x, 20) for x in "qkv"),
    ],
)
def test_rare_things_come_often_enough(what: Callable[[DenseProblem], bool], least: int) -> None:
    assert sum(bool(what(problem)) for problem in SOME) >= least


def test_a_problem_is_a_function_of_seed_and_number() -> None:
    for pool, same in ((POOL, True), (Pool(seed=1), False)):
        other = Pool(pool.seed).problem(77)
        assert other == pool.problem(77)
        assert (other == SOME[77]) is same
    for mine, theirs in zip(SOME[77].buffers().items(), POOL.problem(77).buffers().items(), strict=True):
        assert mine[0] == theirs[0]
        np.testing.assert_array_equal(mine[1], theirs[1])


def test_the_checks_of_a_gpu_refuse_nothing() -> None:
    for problem in SOME:
        assert problem.problem


# --- What is right ---


def test_numpy_is_right() -> None:
    verdicts = list(run(POOL, range(200), "numpy"))
    assert len(verdicts) == 200
    assert not wrong(verdicts)


def test_the_emulated_kernel_is_right() -> None:
    import_nvrtc()
    pool = Pool(seed=0, specs=48)
    numbers = [row + 48 * n for n in range(6) for row in (0, 11, 24, 35)]
    assert {pool.problem(number).shape.template.bias is Bias.NONE for number in numbers} == {False, True}
    verdicts = list(run(pool, numbers, "emulator"))
    assert len(verdicts) == 24
    assert not wrong(verdicts)


# --- What is found ---


def one_key_too_few(q: Any, k: Any, v: Any, **options: Any) -> Any:
    axis = 1 if options["layout"] == "BSHD" else 2
    keep = slice(0, max(1, k.shape[axis] - 1))
    return cupyfa.attention(q, *(x[:, keep] if axis == 1 else x[:, :, keep] for x in (k, v)), **options)


def without(name: str, value: Any = None) -> Callable[..., Any]:
    """Attention that does not know an option."""
    return lambda **arguments: cupyfa.attention(**(arguments | ({name: value} if name in arguments else {})))


def another_array(**arguments: Any) -> Any:
    result = cupyfa.attention(**arguments)
    return result._replace(out=result.out.copy()) if arguments["return_lse"] else result.copy()


def nan_everywhere(**arguments: Any) -> Any:
    """0 * NaN, as if every row visited every key."""
    result = cupyfa.attention(**arguments)
    if np.isnan(arguments["v"].astype(np.float32)).any():
        (result.out if arguments["return_lse"] else result)[...] = np.nan
    return result


def changes_an_input(**arguments: Any) -> Any:
    result = cupyfa.attention(**arguments)
    arguments["q"][...] = 0
    return result


def writes_less(**arguments: Any) -> Any:
    poisoned = arguments.get("out")
    result = cupyfa.attention(**arguments)
    if poisoned is not None and poisoned.size:
        poisoned[-1, -1, -1, -1] = np.nan
    return result


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (one_key_too_few, WRONG),
        (without("sink"), WRONG),
        (without("alibi_slopes"), WRONG),
        (without("bias"), WRONG),
        (without("softcap"), WRONG),
        (without("softmax_scale"), WRONG),
        (without("causal", False), WRONG),
        (without("window_size", (None, None)), WRONG),
        (another_array, "out was passed, and another array comes back"),
        (nan_everywhere, "the NaN pattern differs"),
        (changes_an_input, "q is an input and has changed"),
        (writes_less, "the NaN pattern differs"),
    ],
)
def test_a_fault_is_found(function: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseProblem, "function", staticmethod(function))
    error = next((verdict.error for verdict in run(POOL, range(400), "numpy") if verdict.error is not None), None)
    assert error is not None
    assert re.search(message, error), error


def no_keys(**arguments: Any) -> Any:
    """No sequence has a key."""
    return cupyfa.attention_varlen(**(arguments | {"seqused_k": np.zeros_like(arguments["cu_seqlens_k"][1:])}))


def without_lengths(function: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that does not know what is used."""
    return lambda **arguments: function(**(arguments | {"seqused_q": None, "seqused_k": None}))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("packed_function", no_keys),
        ("packed_function", without_lengths(cupyfa.attention_varlen)),
        ("used_function", without_lengths(cupyfa.attention)),
    ],
)
def test_a_fault_of_lengths_is_found(name: str, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LengthsProblem, name, staticmethod(function))
    error = next((verdict.error for verdict in run(POOL, range(400), "numpy") if verdict.error is not None), None)
    assert error is not None
    assert re.search(WRONG + "|of no sequence", error), error


@pytest.mark.parametrize("name", ["q", "out", "lse"])
def test_a_byte_beside_an_array_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(problem: DenseProblem, buffers: Buffers) -> Outcome:
        outcome = machines.on_numpy(problem, buffers)
        if name in outcome.buffers:
            outcome.buffers[name][0] ^= 1
        return outcome

    monkeypatch.setitem(machines.MACHINES, "numpy", machine)
    error = next(verdict.error for verdict in run(POOL, range(20), "numpy") if verdict.error is not None)
    assert error == f"{name}: 1 bytes beside it have changed"


def test_nothing_comes_after_a_fault_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(problem: DenseProblem, buffers: Buffers) -> Outcome:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setitem(machines.MACHINES, "cuda", machine)
    (verdict,) = run(POOL, range(5), "cuda")
    assert verdict.fatal
    report = verdict.report('make gpu-fuzz FUZZ_ARGS="--seed 0 --only {}"')
    assert report.startswith("problem 0: RuntimeError: an illegal memory access was encountered\n  attention by ")
    assert report.endswith('\n  again: make gpu-fuzz FUZZ_ARGS="--seed 0 --only 0"')


# --- The command ---


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "fuzz", *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_command() -> None:
    done = command("--machine", "numpy", "--only", "3", "5", "--seed", "7", "--specs", "10")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 of 2 problems of seed 7 over 10 kernels: 0 wrong; ")


def test_command_without_a_gpu() -> None:
    done = command()
    assert done.returncode == 2
    assert "error: --machine cuda: " in done.stderr
