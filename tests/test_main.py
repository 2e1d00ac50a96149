"""The command line, on the CPU: GPUs are hidden from it."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from nvrtc_tools import import_nvrtc

import cupyfa
from cupyfa.select import CANDIDATES
from cupyfa.support import support_table


def run(*arguments: str, start: tuple[str, str] = ("-m", "cupyfa")) -> subprocess.CompletedProcess[str]:
    """Run ``python -m cupyfa`` where no GPU is seen, outside the source tree."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error", *start, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment, timeout=300)


def test_info() -> None:
    done = run("info")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["cupyfa", cupyfa.__version__]
    assert lines[1].startswith(f"python   {platform.python_version()}, numpy {np.__version__}, scipy ")
    assert any(line.startswith("cupy ") for line in lines)
    assert "forward attention, sm_90a (Hopper)" in lines
    for row in CANDIDATES:
        limit = f"seqlen_q up to {row.max_seqlen_q}: " if row.max_seqlen_q < math.inf else ""
        expected = f"{row.name} tile {row.tile_m}x{row.tile_n} {limit}{row.reason}"
        assert expected.split() in [line.split() for line in lines]


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_info_without_cupy() -> None:
    lines = run("info").stdout.splitlines()
    assert "cupy     not installed: pip install 'cupyfa[cuda13]' or 'cupyfa[cuda12]'" in lines
    assert any(line.startswith("nvrtc    ") for line in lines)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_info_with_cupy() -> None:
    done = run("info")
    assert "(needs 14.2)" in done.stdout
    assert "device   no CUDA device" in done.stdout


def test_demo_on_the_cpu_says_so() -> None:
    done = run("demo")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("attention, bfloat16, causal: q (1, 512, 4, 128), k and v (1, 512, 2, 128)\n")
    assert "within the tolerance" in done.stdout
    assert "runs    on the CPU" in done.stdout
    assert "There is no Hopper GPU here, so this ran on the CPU." in done.stdout
    assert "with compilation" not in done.stdout
    assert "kernel  forward sm_90a bfloat16 d128" in done.stdout


def test_demo_shows_the_kernel_under_the_emulator() -> None:
    import_nvrtc()
    lines = run("demo").stdout.splitlines()
    for policy in ("eager", "lazy"):
        (line,) = (line for line in lines if line.startswith(f"{policy} "))
        assert "(1, 200, 2, 128)" in line
        assert ": clean, within the tolerance; " in line


def test_demo_without_a_compiler_says_what_is_missing() -> None:
    script = "import sys; sys.modules['cuda.bindings'] = None; from cupyfa.__main__ import demo; demo()"
    done = run(start=("-c", script))
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "not here: compiling without a GPU needs the cuda-bindings package: pip install 'cupyfa[compile]'"
        in done.stdout
    )
    assert "rung    source: selected, not compiled here" in done.stdout


def test_help() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("info", "demo", "support", "emulate", "bench"))


def test_support() -> None:
    done = run("support")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == support_table() + "\n"


def test_benchmark_without_a_gpu_says_so() -> None:
    done = run("bench", "forward")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("The benchmark needs a GPU")
    assert "--head-dim" in run("bench", "forward", "--help").stdout


def test_the_process_of_a_first_call_says_that_it_needs_a_gpu() -> None:
    done = run("bench", "first-call", "--child")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("The benchmark needs a GPU")


def test_wrong_arguments_of_emulate_are_no_traceback() -> None:
    done = run("emulate", "--sms", "0")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "emulate: sms is 0; it must be positive\n")
    assert "Exit status: 0 " in run("emulate", "--help").stdout


@pytest.mark.parametrize("arguments", [(), ("nothing",), ("info", "--what")])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m cupyfa")
