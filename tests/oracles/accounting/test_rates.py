"""The printed tables: counted work and rates, compile times; and the clocks that must not be mixed."""

import doctest
import math

import pytest

from cupyfa.oracles.accounting import rates
from cupyfa.oracles.accounting.flops import AttentionShape, accounting_throughput
from cupyfa.oracles.accounting.rates import (
    Boundary,
    Latency,
    end_to_end_speedup,
    paper_problems,
    peak_throughput,
    reconciliation_table,
    speedup,
)

SHAPE = AttentionShape(32, 16, 1024, 1024, 128, 128)
ROWS = {row.mode: row for row in reconciliation_table(SHAPE, 0.20e-3, 0.45e-3)}


def test_doctests():
    assert doctest.testmod(rates).failed == 0


@pytest.mark.parametrize(
    ("mode", "giga", "seconds", "tflops"),
    [
        ("dense forward", 274.878, 0.20e-3, 1374.39),
        ("causal forward", 137.439, 0.20e-3, 687.19),
        ("dense backward", 687.195, 0.45e-3, 1527.10),
        ("causal backward", 343.597, 0.45e-3, 763.55),
    ],
)
def test_reconciliation_table(mode, giga, seconds, tflops):
    row = ROWS[mode]
    assert round(float(row.flops) / 1e9, 3) == giga
    assert row.seconds == seconds
    assert round(row.tflops, 2) == tflops


def test_dense_operations_for_a_causal_run_double_the_figure():
    """0x0E measurement failure: the same time under the wrong numerator."""
    causal, wrong = ROWS["causal forward"], accounting_throughput(SHAPE.dense_flops, 0.20e-3)
    assert wrong == 2 * causal.tflops
    peak = peak_throughput(132, 4096, 1.83e9)
    assert causal.tflops < peak < wrong  # here the mistake shows: no Hopper can do that


def test_forgetting_the_backward_factor_understates():
    assert accounting_throughput(SHAPE.dense_flops, 0.45e-3) * 2.5 == pytest.approx(ROWS["dense backward"].tflops)


@pytest.mark.parametrize(("before", "after", "printed"), [(55, 2.5, 22.0), (45, 1.4, 32.14)])
def test_compile_speedups(before, after, printed):
    assert round(speedup(before, after), 2) == printed


def test_a_compile_speedup_is_no_kernel_speedup():
    """0x0E measurement failure: 32 times faster to compile, and not faster to run."""
    templates = Latency(compile=45, load=0.05, launch=1e-5, kernel=1e-3, framework=1e-3)
    dsl = Latency(compile=1.4, load=0.05, launch=1e-5, kernel=1e-3, framework=1e-3)
    by_clock = {b: speedup(templates.within(b), dsl.within(b)) for b in Boundary}
    assert round(by_clock[Boundary.DEVELOPER_COMPILE]) == 32
    assert by_clock[Boundary.COLD_FIRST_CALL] < by_clock[Boundary.DEVELOPER_COMPILE]
    assert by_clock[Boundary.WARM_KERNEL] == by_clock[Boundary.END_TO_END] == 1


def test_each_boundary_has_its_own_parts():
    parts = dict.fromkeys(Latency.__dataclass_fields__, 0.0)
    names = {b: {name for name in parts if Latency(**{**parts, name: 1.0}).within(b)} for b in Boundary}
    assert names[Boundary.DEVELOPER_COMPILE] == {"compile"}
    assert names[Boundary.COLD_FIRST_CALL] == {"validation", "lookup", "compile", "load", "launch"}
    assert names[Boundary.WARM_KERNEL] == {"kernel"}
    assert names[Boundary.END_TO_END] == {"preprocessing", "packing", "kernel", "combine", "framework"}


def test_one_side_with_preprocessing_changes_the_ratio():
    """0x0E measurement failures: warm-up, compilation, packing or allocation counted for one contestant only."""
    a = Latency(kernel=1.0e-3, packing=0.3e-3, compile=2.0)
    b = Latency(kernel=1.2e-3, packing=0.3e-3, compile=2.0)
    fair = speedup(b.within(Boundary.WARM_KERNEL), a.within(Boundary.WARM_KERNEL))
    mixed = speedup(b.within(Boundary.END_TO_END), a.within(Boundary.WARM_KERNEL))
    assert fair == pytest.approx(1.2)
    assert mixed == pytest.approx(1.5)
    cold = speedup(b.within(Boundary.COLD_FIRST_CALL), a.within(Boundary.WARM_KERNEL))
    assert cold > 1000


def test_a_best_case_is_no_multiplier_for_a_deployment():
    """0x0E measurement failure: 1.3 times in the kernel, by the kernel's share of the whole."""
    assert end_to_end_speedup(1.3, 1.0) == pytest.approx(1.3)
    assert round(end_to_end_speedup(1.3, 0.3), 3) == 1.074
    assert end_to_end_speedup(1.3, 0.0) == 1
    assert end_to_end_speedup(math.inf, 0.3) == pytest.approx(1 / 0.7)  # even an infinitely fast kernel


def test_paper_benchmark_shapes():
    problems = paper_problems()
    assert sorted({s.seqlen_q for s in problems}) == [1024, 2048, 4096, 8192, 16384, 32768]
    assert {s.batch * s.seqlen_q for s in problems} == {32 * 1024}
    assert {(s.head_dim, s.heads) for s in problems if s.head_dim == s.head_dim_v} == {(64, 32), (128, 16)}
    assert {s.heads * s.head_dim for s in problems if s.head_dim == s.head_dim_v} == {2048}
    assert {s.heads for s in problems if (s.head_dim, s.head_dim_v) == (192, 128)} == {16}
    for s in problems:
        if s.head_dim == s.head_dim_v:
            assert s.dense_flops == 4 * s.seqlen_q**2 * s.head_dim * s.heads * s.batch
    assert next(s for s in problems if s.seqlen_q == 1024 and s.head_dim == 128) == SHAPE


def test_shares_of_the_peak():
    assert round(740 / peak_throughput(132, 4096, 1.83e9), 2) == 0.75  # H100: "about 75 %"
    share = 1613 / 2250  # B200, 2.25 PFLOP/s of dense bfloat16
    assert peak_throughput(148, 8192, 1.85e9) == pytest.approx(2250, rel=0.005)
    assert math.floor(100 * share) == 71  # "about 71 %" is cut off: it is 71.7 %
    assert round(100 * share, 1) == 71.7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: speedup(1, 0), "times are 1 and 0"),
        (lambda: speedup(math.inf, 1), "times are inf and 1"),
        (lambda: end_to_end_speedup(2, 1.5), "share from 0 to 1"),
        (lambda: end_to_end_speedup(0, 0.5), "the speedup is 0"),
        (lambda: peak_throughput(0, 1, 1), "multiprocessors is 0; it must be positive"),
        (lambda: peak_throughput(1, 1, math.inf), "hertz is inf"),
        (lambda: paper_problems(total_tokens=1000), "total_tokens and hidden are 1000 and 2048"),
        (lambda: paper_problems(hidden=64), "total_tokens and hidden are 32768 and 64"),
        (lambda: Latency(kernel=-1.0), "kernel takes -1.0 s"),
        (lambda: Latency().within("warm kernel"), "'warm kernel' is no boundary; there are DEVELOPER_COMPILE"),
        (lambda: reconciliation_table(SHAPE, 0.0, 1.0), "the time is 0.0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
