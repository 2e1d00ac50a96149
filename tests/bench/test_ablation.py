"""The ablation with a fake timer, on NumPy arrays."""

import numpy as np
import pytest
from problems import make_problem

from cupyfa.bench import ablation
from cupyfa.bench.correctness import Check
from cupyfa.bench.harness import Timing
from cupyfa.bench.problems import Cell, make_inputs
from cupyfa.select import H200, select

CELL = Cell(head_dim=128, seqlen=64, batch=1, heads=2, causal=True)


@pytest.mark.parametrize("variants", [ablation.VARIANTS, ablation.SCHEDULERS])
def test_each_variant_is_another_kernel(variants):
    problem = make_problem(head_dim=128)
    specs = [select(problem, H200, config).spec for config in variants.values()]
    assert len(set(specs)) == len(specs)
    assert specs[0] == select(problem, H200).spec


def test_problems_are_those_of_the_paper_and_of_the_schedulers():
    listed = ablation.problems()
    assert listed[0][0] == Cell(128, 8448, 4, 16, False, "float16")
    assert {cell.heads_kv for cell, variants in listed if variants is ablation.SCHEDULERS} == {None, 1}
    assert all(cell.batch * cell.seqlen == 32768 for cell, variants in listed if variants is ablation.SCHEDULERS)


def test_contestants_are_named_after_their_variants():
    contestants = ablation.enter(make_inputs(CELL, np), ablation.SCHEDULERS)
    assert [contestant.name for contestant in contestants] == list(ablation.SCHEDULERS)
    outputs = [contestant.output() for contestant in contestants]  # NumPy arrays: config= is checked and not used
    assert all(np.array_equal(output, outputs[0]) for output in outputs)


def test_table():
    checks = {"a": Check(True), "b": Check(True), "c": Check(False, message="no")}
    timings = {"a": Timing(1, (1.0, 2.0)), "b": Timing(1, (2.0, 4.0))}
    lines = ablation.format_rows(CELL, checks, timings)
    assert lines[0] == str(CELL)
    assert lines[4:] == ["| a | 0 | 1.000 |", "| b | 0 | 0.500 |", "| c | no | - |", ""]


def test_without_a_gpu_it_says_so(bench, monkeypatch, capsys):
    monkeypatch.setattr(ablation, "why_not_here", lambda: "The benchmark needs a GPU.")
    assert bench("ablation") == 2
    assert capsys.readouterr().err == "The benchmark needs a GPU.\n"


def test_bad_option(bench, capsys):
    assert bench("ablation", "--rounds", "0") == 2
    assert "argument --rounds: it is 0; it must be at least 1" in capsys.readouterr().err
