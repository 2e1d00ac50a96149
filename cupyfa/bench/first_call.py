"""How long the first call takes: with compilation, and in the next process, from CuPy's disk cache.

Run as ``python -m cupyfa bench first-call``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes

import cupyfa
from cupyfa.bench.peers import why_not_here

__all__ = ["DESCRIPTION", "add_arguments", "first_calls", "format_line", "run"]

#: Of the command, for its help.
DESCRIPTION = "Time of the first call. Exit status: 0; 2 without a GPU, or for wrong usage."


def first_calls(cache: Path) -> list[dict[str, Any]]:
    """Make the first call of two processes that share a fresh cache.

    Parameters
    ----------
    cache : pathlib.Path
        An empty folder for CuPy's compiled kernels.

    Returns
    -------
    list of dict
        Of either process: ``seconds`` from the call to its result, imports and context creation excluded; ``rung`` and
        ``registers`` from ``cupyfa.explain``.
    """
    environment = os.environ | {"CUPY_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "cupyfa", "bench", "first-call", "--child"]
    said = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise RuntimeError(f"the first call failed:\n{done.stderr}")
        said.append(json.loads(done.stdout.splitlines()[-1]))
    return said


def format_line(calls: Sequence[dict[str, Any]]) -> str:
    """Return the result as a line of Markdown.

    Parameters
    ----------
    calls : sequence of dict
        From :func:`first_calls`.

    Returns
    -------
    str
        One line.
    """
    compiling, cached = (call["seconds"] for call in calls)
    return (
        f"First call, from the call to its result: {compiling:.2f} s with compilation, {cached:.3f} s in the next "
        "process (disk cache)."
    )


def _child() -> None:
    import cupy

    q = cupy.zeros((1, 300, 4, 128), ml_dtypes.bfloat16)
    k = cupy.zeros((1, 500, 2, 128), ml_dtypes.bfloat16)
    cupy.cuda.get_current_stream().synchronize()  # the context exists
    begin = time.perf_counter()
    cupyfa.attention(q, k, k, causal=True)
    cupy.cuda.get_current_stream().synchronize()
    seconds = time.perf_counter() - begin
    explanation = cupyfa.explain(q, k, k, causal=True)
    registers = explanation.ptxas and explanation.ptxas.registers
    rung = explanation.rung and explanation.rung.name
    print(json.dumps({"seconds": seconds, "rung": rung, "registers": registers}))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the command.
    """
    parser.add_argument("--child", action="store_true", help="make the call in this process and print JSON")


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
    if reason := why_not_here():
        print(reason, file=sys.stderr)
        return 2
    if options.child:
        _child()
        return 0
    with tempfile.TemporaryDirectory() as cache:
        print(format_line(first_calls(Path(cache))))
    return 0
