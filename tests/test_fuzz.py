"""The random problems of ``make gpu-fuzz``, by NumPy and a few by the emulator: they are right, and find faults."""

from __future__ import annotations

import itertools
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
from fuzz.gradients import GradientsProblem
from fuzz.lengths import LengthsProblem
from fuzz.machines import Buffers, Outcome
from fuzz.runner import SPECS, Pool, Verdict, run
from nvrtc_tools import import_nvrtc

import cupyfa
from cupyfa.backward_plan import plan_with_copies
from cupyfa.backward_select import BWD_CANDIDATES, BackwardSelection, select_backward
from cupyfa.copies import plan_copies
from cupyfa.select import CANDIDATES, H200
from cupyfa.spec import Bias, BwdSpec, DType, FwdSpec, PlanSpec
from cupyfa.warmup import _specs as kernels_of_call

TESTS = Path(__file__).resolve().parent
POOL = Pool(seed=0)
WRONG = "they differ by|pattern differs"
FORWARD_ROWS = (0, 11, 24, 35)  # of 48 kernels
ALL = [POOL.problem(number) for number in range(1300)]
SOME = [problem for problem in ALL if not isinstance(problem, GradientsProblem)]
FORWARD = [number for number, problem in enumerate(ALL) if not isinstance(problem, GradientsProblem)]
GRADIENTS = {number: problem for number, problem in enumerate(ALL) if isinstance(problem, GradientsProblem)}


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
    backward = {spec for spec in specs if isinstance(spec, BwdSpec)}
    assert_of_every_kind(specs - backward)
    assert {spec.dtype for spec in backward} == set(DType)
    tiles = {(spec.tile_m, spec.tile_n, spec.q_stages) for spec in backward}
    assert tiles >= {(row.tile_m, row.tile_n, row.q_stages) for row in BWD_CANDIDATES}
    assert {spec.bias for spec in backward} >= {Bias.NONE, Bias.TILE}
    for name in ("causal", "window", "softcap", "alibi", "partial", "deterministic"):
        assert {getattr(spec, name) for spec in backward} == {False, True}, name


def assert_of_every_kind(specs: set[Any]) -> None:
    """Kernels of the forward pass."""
    assert {(spec.tile_m, spec.tile_n) for spec in specs} >= {(row.tile_m, row.tile_n) for row in CANDIDATES}
    assert {spec.dtype for spec in specs} == set(DType)
    assert {spec.bias for spec in specs} == {*Bias} - {Bias.COLUMN}  # which gradients have
    for name in ("varlen", "causal", "window", "sink", "softcap", "alibi", "bias_float32", "negate_scores"):
        assert {getattr(spec, name) for spec in specs} == {False, True}, name


def test_warm_calls_are_of_every_kernel() -> None:
    pool = Pool(seed=3)
    specs = [kernels_of_call(0, call, H200) for call in pool.warm_calls()]
    main = [next(spec for spec in those if isinstance(spec, (FwdSpec, BwdSpec))) for those in specs]
    assert main == [spec for _, _, spec in pool._rows]
    for (first, *rest), spec in zip(specs, main, strict=True):
        if isinstance(spec, FwdSpec):
            assert (first, rest) == (spec, [PlanSpec()] * spec.varlen)


@pytest.mark.parametrize("specs", [1, 2, 10, 24, 48, SPECS])
def test_a_pool_has_as_many_kernels_as_it_may_have(specs: int) -> None:
    assert len(Pool(seed=5, specs=specs)) == specs


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


@pytest.mark.parametrize(
    ("what", "least"),
    [
        (lambda p: p.spec is None, 3),
        (lambda p: p.spec and p.shape.seqlen_q > p.spec.tile_m and p.shape.seqlen_k > p.spec.tile_n, 40),
        (lambda p: p.spec and p.shape.seqlen_k > 2 * p.spec.tile_n, 30),
        (lambda p: p.spec and selected(p).heads_per_part > 1, 15),
        (lambda p: p.spec and selected(p).parts > 1, 80),
        (lambda p: p.shape.seqlen_q > p.shape.seqlen_k > 0 and p.shape.causal, 20),
        (lambda p: p.shape.layout == "BHSD", 80),
        (lambda p: p.shape.head_dim % 32 and p.shape.head_dim_v % 32, 100),
        (lambda p: p.shape.head_dim != p.shape.head_dim_v, 80),
        (lambda p: (p.shape.softmax_scale or 0) < 0, 5),
        (lambda p: p.deterministic, 80),
        (lambda p: "dlse" in p.places, 80),
        (lambda p: "sink" in p.places and "dsink" not in p.places, 5),
        (lambda p: "bias" in p.places and "dbias" not in p.places, 5),
        (lambda p: "bias" in p.places and 1 in p.shape.bias_shape, 30),
        (lambda p: not {"dq", "dk", "dv"} & p.places.keys(), 1),
        *((lambda p, x=x: x not in p.places, 30) for x in ("dq", "dk", "dv")),
        *((lambda p, x=x: x in p.places and min(p.places[x].strides) < 0, 1) for x in ("dout", "q", "dlse", "dq")),
        *((lambda p, x=x: p.spec and x in copied_of_gradients(p), 4) for x in ("dout", "q", "k", "v", "dk", "dv")),
        *((lambda p, x=x: 0 in p.places[x].strides, 20) for x in ("dout", "q", "k", "v")),
    ],
)
def test_rare_gradients_come_often_enough(what: Callable[[GradientsProblem], bool], least: int) -> None:
    assert sum(bool(what(problem)) for problem in GRADIENTS.values()) >= least


def selected(problem: GradientsProblem) -> BackwardSelection:
    """How its kernel is launched on an H200."""
    return select_backward(problem.problem, H200)


def copied_of_gradients(problem: GradientsProblem) -> list[str]:
    """What TMA does not take for its strides."""
    none = dict.fromkeys(("threads", "shared_bytes"), 0) | {"tile_m": 64}
    layout = problem.shape.layout
    _, copies = plan_with_copies(problem.problem, selected(problem), lambda spec: none, H200, layout, ())
    return [copy.name for copy in copies]


@pytest.mark.parametrize("number", [17, 40, 110], ids=["dense", "lengths", "gradients"])
def test_a_problem_is_a_function_of_seed_and_number(number: int) -> None:
    for pool, same in ((POOL, True), (Pool(seed=1), False)):
        other = Pool(pool.seed).problem(number)
        assert other == pool.problem(number)
        assert (other == ALL[number]) is same
    for mine, theirs in zip(ALL[number].buffers().items(), POOL.problem(number).buffers().items(), strict=True):
        assert mine[0] == theirs[0]
        np.testing.assert_array_equal(mine[1], theirs[1])


def test_the_checks_of_a_gpu_refuse_nothing() -> None:
    for problem in ALL:
        assert problem.problem


# --- What is right ---


def test_numpy_is_right() -> None:
    verdicts = list(run(POOL, range(200), "numpy"))
    assert len(verdicts) == 200
    assert not wrong(verdicts)


def test_the_emulated_kernel_is_right() -> None:
    import_nvrtc()
    pool = Pool(seed=0, specs=48)
    numbers = [row + 48 * n for n in range(6) for row in FORWARD_ROWS]
    assert {pool.problem(number).shape.template.bias is Bias.NONE for number in numbers} == {False, True}
    verdicts = list(run(pool, numbers, "emulator"))
    assert len(verdicts) == 24
    assert not wrong(verdicts)


def test_the_emulated_gradients_are_right() -> None:
    import_nvrtc()
    pool = Pool(seed=0, specs=10)
    numbers = [row + 10 * n for n in range(8) for row in (8, 9)]
    problems = [pool.problem(number) for number in numbers]
    assert {type(problem) for problem in problems} == {GradientsProblem}
    verdicts = list(run(pool, numbers, "emulator"))
    assert len(verdicts) == 16
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
    error = next((verdict.error for verdict in run(POOL, FORWARD[:400], "numpy") if verdict.error is not None), None)
    assert error is not None
    assert re.search(message, error), error


def without_option(name: str, value: Any = None) -> Callable[..., Any]:
    """Gradients that do not know an option."""
    return lambda **arguments: cupyfa.attention_backward(**(arguments | ({name: value} if name in arguments else {})))


def without_sink(**arguments: Any) -> Any:
    given = {name: x for name, x in arguments.items() if name not in ("sink", "dsink")}
    result = cupyfa.attention_backward(**given)
    return result._replace(dsink=arguments.get("dsink")) if "sink" in arguments else result


def of_one_query_head(**arguments: Any) -> Any:
    """dk and dv that lack all but the first of the query heads that share a key head."""
    result = cupyfa.attention_backward(**arguments)
    axis = 2 if arguments["layout"] == "BSHD" else 1
    group = arguments["q"].shape[axis] // max(1, arguments["k"].shape[axis])
    first = tuple(slice(None, None, group) if n == axis else slice(None) for n in range(4))
    of_heads = ("dout", "q", "out")
    fewer = {name: arguments[name][first] for name in of_heads}
    fewer |= {name: arguments[name][:, ::group] for name in ("lse", "dlse") if name in arguments}
    for name in ("sink", "alibi_slopes"):
        if name in arguments:
            fewer[name] = arguments[name][..., ::group]
    others = {x: arguments[x] for x in arguments if x not in (*fewer, "dq", "dk", "dv", "dsink")}
    less = cupyfa.attention_backward(**fewer, **others)
    result.dk[...], result.dv[...] = less.dk, less.dv
    return result


def another_gradient(**arguments: Any) -> Any:
    result = cupyfa.attention_backward(**arguments)
    return result._replace(dk=result.dk.copy())


def writes_less_of_a_gradient(**arguments: Any) -> Any:
    result = cupyfa.attention_backward(**arguments)
    if result.dv.size:
        result.dv[-1, -1, -1, -1] = np.nan
    return result


def changes_dout(**arguments: Any) -> Any:
    result = cupyfa.attention_backward(**arguments)
    arguments["dout"][...] = 0
    return result


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (without_option("softcap"), WRONG),
        (without_option("softmax_scale"), WRONG),
        (without_option("causal", False), WRONG),
        (without_option("window_size", (None, None)), WRONG),
        (without_option("alibi_slopes"), WRONG),
        (without_option("dlse"), WRONG),
        (without_sink, "dsink"),
        (of_one_query_head, "^d[kv].*they differ by"),
        (another_gradient, "dk was passed, and another array comes back"),
        (writes_less_of_a_gradient, "the NaN pattern differs"),
        (changes_dout, "dout is an input and has changed"),
    ],
)
def test_a_fault_of_gradients_is_found(
    function: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradientsProblem, "function", staticmethod(function))
    verdicts = run(POOL, itertools.islice(GRADIENTS, 60), "numpy")
    error = next((verdict.error for verdict in verdicts if verdict.error is not None), None)
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
    error = next((verdict.error for verdict in run(POOL, FORWARD[:400], "numpy") if verdict.error is not None), None)
    assert error is not None
    assert re.search(WRONG + "|of no sequence", error), error


@pytest.mark.parametrize("name", ["q", "out", "lse", "dlse", "dk"])
def test_a_byte_beside_an_array_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(problem: DenseProblem, buffers: Buffers) -> Outcome:
        outcome = machines.on_numpy(problem, buffers)
        if name in outcome.buffers:
            outcome.buffers[name][0] ^= 1
        return outcome

    monkeypatch.setitem(machines.MACHINES, "numpy", machine)
    error = next(verdict.error for verdict in run(POOL, range(60), "numpy") if verdict.error is not None)
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
