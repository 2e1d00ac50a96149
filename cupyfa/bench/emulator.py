"""Speed of the emulator on one core. Run as ``python -m cupyfa bench emulator``; it needs no GPU.

The forward kernel of Hopper runs one problem without checks and with all of them, and a problem of the size that tests
and mutants have; a long PTX text is parsed and decoded. Every result is checked before it is timed. Times are CPU times
of the thread that runs it; it starts no other.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cupyfa import emulate
from cupyfa.bench.harness import Spread
from cupyfa.bench.usage import count
from cupyfa.compiler import compile_ptx
from cupyfa.emulate import Prepared
from cupyfa.emulator import _core
from cupyfa.emulator.decode import decode
from cupyfa.emulator.ptx import parse
from cupyfa.errors import CompileError
from cupyfa.oracles import dense
from cupyfa.testing import assert_close, random_array

__all__ = ["DESCRIPTION", "Figure", "add_arguments", "format_table", "long_text", "measure", "prepare", "run", "tasks"]

#: Of the command, for its help.
DESCRIPTION = (
    "Speed of the emulator, on one core. Exit status: 0; 1 if a target is missed; 2 without a compiler, or for wrong "
    "usage."
)

#: batch, seqlen_q, seqlen_k, heads, head_dim
SPEED, MUTANT = (1, 512, 512, 2, 128), (1, 300, 333, 1, 128)
LINES = 14_000


@dataclasses.dataclass(frozen=True)
class Figure:
    """What was measured.

    Attributes
    ----------
    name, unit : str
        What, and in which unit.
    value : Spread
        Over the rounds.
    target : float
        What it should not exceed; negative: what it should reach.
    """

    name: str
    value: Spread
    unit: str
    target: float

    @property
    def met(self) -> bool:
        """Whether the median meets the target."""
        return self.value.median >= -self.target if self.target < 0 else self.value.median <= self.target


def prepare(problem: Sequence[int], causal: bool = False) -> Prepared:
    """Prepare a problem and see that its kernel is clean and right.

    Parameters
    ----------
    problem : sequence of int
        batch, seqlen_q, seqlen_k, heads, head_dim.
    causal : bool
        The mask.

    Returns
    -------
    Prepared
        On one multiprocessor: a single CTA walks all tiles.
    """
    batch, seqlen_q, seqlen_k, heads, head_dim = problem
    shapes = ((batch, seqlen, heads, head_dim) for seqlen in (seqlen_q, seqlen_k, seqlen_k))
    q, k, v = (random_array(shape, "bfloat16", seed) for seed, shape in enumerate(shapes))
    prepared = emulate.prepare(q, k, v, causal=causal, sms=1)
    run = prepared.launch()
    if run.verdict != "clean":
        raise AssertionError(str(run))
    reference, _ = dense.attention(q, k, v, causal=causal)
    same_precision, _ = dense.same_precision(q, k, v, causal=causal)
    assert_close(prepared.out, reference, same_precision)
    return prepared


def long_text(ptx: str, symbol: str, lines: int) -> tuple[str, str]:
    """Repeat a kernel under other names until the text is long enough.

    Parameters
    ----------
    ptx : str
        A module with one kernel.
    symbol : str
        Its name.
    lines : int
        How long the text shall be.

    Returns
    -------
    tuple of str
        The text, and the name of one of its kernels.
    """
    start = ptx.rindex("\n", 0, ptx.index(f".entry {symbol}")) + 1
    depth = 0
    for brace in re.finditer("[{}]", ptx[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            break
    end = start + brace.end() + 1
    head, kernel, tail = ptx[:start], ptx[start:end], ptx[end:]
    count = -(-lines // kernel.count("\n"))
    copies = [kernel.replace(symbol, f"{symbol}_{i}") for i in range(count)]
    return "".join([head, *copies, tail]), f"{symbol}_0"


def tasks() -> Iterator[tuple[str, str, float, Callable[[], float]]]:
    """Yield what is measured: name, unit, target, and a call that measures it once."""
    speed, mutant = prepare(SPEED), prepare(MUTANT, causal=True)
    size = f"{SPEED[1]} x {SPEED[2]}, {SPEED[3]} heads, d{SPEED[4]}"

    def seconds(call: Callable[[], object]) -> Callable[[], float]:
        def once() -> float:
            begin = time.thread_time()
            call()
            return time.thread_time() - begin

        return once

    def milliseconds(prepared: Prepared, **options: Any) -> Callable[[], float]:
        once = seconds(lambda: prepared.launch(**options))
        return lambda: 1e3 * once()

    plain = milliseconds(speed, checks=False)
    instructions = speed.launch(checks=False).statistics["instructions"]
    yield f"forward {size}, without checks", "ms", 40, plain
    yield f"forward {size}, all checks", "ms", 80, milliseconds(speed)
    yield "instructions of warps, without checks", "million/s", -8, lambda: instructions / plain() / 1e3
    size = f"{MUTANT[1]} x {MUTANT[2]}, causal, d{MUTANT[4]}"
    yield f"run of a mutant, {size}, all checks", "ms", 50, milliseconds(mutant, policy="fine", strict_warpgroup=True)

    compiled = compile_ptx(speed.selection.spec)
    text, name = long_text(compiled.ptx, compiled.symbol, LINES)
    module = parse(text)
    yield f"parse {text.count(chr(10)):,} lines of PTX", "s", 1, seconds(lambda: parse(text))
    count = len(module.entries)
    yield f"decode one of its {count} kernels", "s", 1, seconds(lambda: decode(module, name))


def measure(rounds: int) -> list[Figure]:
    """Measure everything.

    Parameters
    ----------
    rounds : int
        How often; one more goes ahead.

    Returns
    -------
    list of Figure
        In the order of :func:`tasks`.
    """
    from tqdm import tqdm

    figures = []
    with tqdm(list(tasks()), desc="emulator", unit="task", file=sys.stderr) as progress:
        for name, unit, target, once in progress:
            progress.set_postfix_str(name)
            once()
            figures.append(Figure(name, Spread.of([once() for _ in range(rounds)]), unit, target))
    return figures


def format_table(figures: Sequence[Figure]) -> list[str]:
    """Return the figures as a Markdown table.

    Parameters
    ----------
    figures : sequence of Figure
        What was measured.

    Returns
    -------
    list of str
        The lines.
    """
    lines = ["| what | median [min..max] | unit | target | |", "|---|---:|---|---:|---|"]
    for figure in figures:
        v = figure.value
        target = f"{'at least' if figure.target < 0 else 'at most'} {abs(figure.target):g}"
        met = "" if figure.met else "missed"
        shown = f"{v.median:.3g} [{v.low:.3g}..{v.high:.3g}]"
        lines.append(f"| {figure.name} | {shown} | {figure.unit} | {target} | {met} |")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the command.
    """
    parser.add_argument("--rounds", type=count, default=9, help="rounds that count (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Run the command.

    Parameters
    ----------
    options : argparse.Namespace
        Of :func:`add_arguments`.

    Returns
    -------
    int
        Exit status, as in :data:`DESCRIPTION`.
    """
    try:
        figures = measure(options.rounds)
    except CompileError as error:
        if error.spec is not None:
            raise
        print(error, file=sys.stderr)
        return 2
    print("\n".join(format_table(figures)))
    print(f"\nOne thread, vector unit {_core.VECTOR_UNIT}, NumPy {np.__version__}; medians of {options.rounds} rounds.")
    return 0 if all(figure.met for figure in figures) else 1
