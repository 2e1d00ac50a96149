"""Runs a family on the GPU in processes of their own: an error of one kernel loses its context, and no other case.

A family is cut into shards that run side by side. A case that fails ends its process; the rest of the shard runs in
another one. The first failures are taken apart: the first CTA with which the launch fails, the tensor maps and the
parameters.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .case import Case, Map
from .families import cases_of

SHARD, SHARDS = 20, {"refused": 3}  # cases
HANG = 60  # seconds that a process may take
BUDGET = 240  # seconds for a shard, however many of its cases fail
TAKEN_APART = 2  # failures of a shard
PACKAGE = __package__ or "tests.emulator.micro"
Result = dict[str, Any]


def shards(family: str) -> list[str]:
    """family:0, family:1 ..."""
    return [f"{family}:{i}" for i in range(-(-len(cases_of(family)) // SHARDS.get(family, SHARD)))]


def cases_in(shard: str) -> list[Case]:
    family, _, number = shard.partition(":")
    size = SHARDS.get(family, SHARD)
    return cases_of(family)[int(number) * size : (int(number) + 1) * size]


def log_of(shard: str, folder: Path) -> Path:
    return folder / f"{shard.replace(':', '.')}.jsonl"


# --- in the process of a shard -----------------------------------------------------------------------------------


def work(shard: str, folder: Path, skip: set[str], run: Callable[[Any, Case, Path], Result]) -> int:
    """A line for each case begun and ended; 1 after the first that fails."""
    from .hardware import Gpu

    gpu = Gpu()
    with log_of(shard, folder).open("a") as log:
        for case in cases_in(shard):
            if case.name in skip:
                continue
            log.write(json.dumps({"begin": case.name}) + "\n")
            log.flush()
            try:
                result = run(gpu, case, folder)
            except Exception as error:
                problems = [f"{type(error).__name__}: {error}", *gpu.told]
                log.write(json.dumps({"end": case.name, "problems": problems}) + "\n")
                return 1
            log.write(json.dumps({"end": case.name, "gpu": gpu.name, **result}) + "\n")
            log.flush()
    return 0


def first_clusters(case: Case, count: int) -> Case:
    """The case with the first clusters of its grid only; its results are not looked at."""
    return replace(case, grid=count * case.cluster)


# --- in the process that has them all ----------------------------------------------------------------------------


def process(arguments: list[str], folder: Path) -> tuple[int, list[str]]:
    """Exit code (-1: it was ended) and the last lines that it wrote."""
    command = [sys.executable, "-m", f"{PACKAGE}.goldens", *arguments, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    except subprocess.TimeoutExpired:
        return -1, [f"no end after {HANG} s"]
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-3:]


def supervise(shard: str, folder: Path) -> dict[str, Result]:
    """Results by case; a failed case has only problems."""
    log, results, apart = log_of(shard, folder), dict[str, Result](), 0
    names = [case.name for case in cases_in(shard)]
    end = time.monotonic() + BUDGET
    while len(results) < len(names) and time.monotonic() < end:
        _, said = process(["--worker", shard, "--skip", json.dumps(sorted(results))], folder)
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        fresh = {line["end"]: line for line in lines if "end" in line and line["end"] not in results}
        begun = [line["begin"] for line in lines if "begin" in line]
        if begun and begun[-1] not in results and begun[-1] not in fresh:
            fresh[begun[-1]] = {"problems": said or ["the process died"]}
        if not fresh:  # it did not get as far as a case
            return results | {name: {"problems": said} for name in names if name not in results}
        for name, result in fresh.items():
            if "record" not in result and apart < TAKEN_APART:
                apart += 1
                result["problems"] += take_apart(shard, name, folder)
        results |= fresh
    return results | {name: {"problems": ["not run"]} for name in names if name not in results}


def take_apart(shard: str, name: str, folder: Path) -> list[str]:
    """The fewest clusters with which the launch fails, by bisection: each try is a process."""
    case = next(case for case in cases_in(shard) if case.name == name)
    good, bad = 0, case.grid // case.cluster
    while bad - good > 1:
        middle = (good + bad) // 2
        code, _ = process(["--worker", shard, "--only", name, "--clusters", str(middle)], folder)
        good, bad = (middle, bad) if code == 0 else (good, middle)
    lines = [f"it takes {bad} of {case.grid // case.cluster} clusters to fail"]
    for argument in case.arguments:
        if isinstance(argument, Map):
            lines.append(f"tensor {argument.dtype} {argument.shape}, strides {argument.strides}, box {argument.box}")
        elif getattr(argument, "name", "") == "table":
            lines.append(f"its row of the table: {argument.initial()[bad - 1].tolist()}")  # type: ignore[union-attr]
    return lines


def run_part(shard: str, name: str, clusters: int) -> int:
    """In a process of its own, for take_apart."""
    from .hardware import Gpu

    Gpu().run(first_clusters(next(case for case in cases_in(shard) if case.name == name), clusters), 0xA5A5A5A5)
    return 0
