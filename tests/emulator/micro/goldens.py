"""``python -m tests.emulator.micro.goldens FOLDER [FAMILY ...]``: run the cases on the GPU and write the goldens.

Every case runs twice, with different rubbish in shared memory: a result that differs is no golden. Families that are
not named keep the goldens that the repository has. supervise.py says how the work is cut into processes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import traceback
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from . import fuzz, golden
from .case import Case
from .families import FAMILIES, cases_of
from .supervise import run_part, shards, supervise, work

PATTERNS = (0xA5A5A5A5, 0x3C3C3C3C)
FAMILIES_AT_ONCE, PROCESSES = 4, 3  # processes of each family
# Every output whole, for diagnosis and not for the repository: what stands in one archive.
RAW = {
    "raw_wgmma_a": ("wgmma_half", "wgmma_special"),
    "raw_wgmma_b": ("wgmma_single", "wgmma_registers", "wgmma_fp8"),
    "raw_copies": ("tma_load", "tma_store", "refused", "bulk", "matrix"),
    "raw_convert": ("convert",),
    "raw_arithmetic": ("integer", "floats", "approximate", "atomics", "warp", "control", "mbarrier"),
}


def run_case(gpu: Any, case: Case) -> dict[str, Any]:
    """The record of a case: its entries and the problems that it has."""
    start = time.monotonic()
    first, second = (gpu.run(case, pattern) for pattern in PATTERNS)
    problems = []
    entries, kept = {}, {}
    for output in case.outputs:
        array = first[output.name]
        if not np.array_equal(array.view(np.uint8), second[output.name].view(np.uint8)):
            different = np.argwhere(array.view(f"u{array.itemsize}") != second[output.name].view(f"u{array.itemsize}"))
            problems.append(f"{output.name} differs between two runs, first at {different[0].tolist()}")
        if output.name == "came" and not (array == 1).all():
            problems.append(f"a barrier's phase did not come in CTAs {np.flatnonzero(array != 1).tolist()}")
        entries[output.name] = golden.entry(output, array)
        if output.name in case.keep:
            kept[f"{case.name}:{output.name}"] = array
    record = {"fingerprint": case.fingerprint(), "outputs": entries}
    whole = {f"{case.name}:{name}": array for name, array in first.items()}
    seconds = time.monotonic() - start
    return {"record": record, "kept": kept, "whole": whole, "problems": problems, "seconds": seconds}


def keep(gpu: Any, case: Case, folder: Path) -> dict[str, Any]:
    """Run a case; its arrays go to files."""
    result, stem = run_case(gpu, case), case.name.replace("/", ".")
    np.savez_compressed(folder / f"{stem}.raw.npz", **result.pop("whole"))
    for name, array in result.pop("kept").items():
        file = f"{stem}.{name.rpartition(':')[2]}.npy"
        np.save(folder / file, array)
        result.setdefault("files", {})[name] = file
    return result


def collect(family: str, folder: Path, records: dict[str, Any], arrays: dict[str, Any]) -> tuple[str, list[str]]:
    """Run a family and take its records over; a line for the table, and the problems."""
    start = time.monotonic()
    results = dict[str, dict[str, Any]]()
    try:
        with ThreadPoolExecutor(PROCESSES) as pool:
            for part in pool.map(lambda shard: supervise(shard, folder), shards(family)):
                results |= part
    except Exception:  # a bug of ours in one family; the others are worth having
        return f"{family:16} failed", traceback.format_exc().splitlines()
    good = {name: result for name, result in results.items() if not result["problems"]}
    records[family] = {name: result["record"] for name, result in good.items()}
    for result in good.values():
        arrays.update({name: np.load(folder / file) for name, file in result.get("files", {}).items()})
    problems = [f"{name}: {'; '.join(result['problems'])}" for name, result in results.items() if result["problems"]]
    outputs = sum(len(result["record"]["outputs"]) for result in good.values())
    seconds = time.monotonic() - start
    return f"{family:16} {len(good):5} of {len(results):5} cases, {outputs:5} outputs {seconds:7.1f} s", problems


def collect_refused(family: str, folder: Path, records: dict[str, Any], _: dict[str, Any]) -> tuple[str, list[str]]:
    """What the driver says of each case that it should not do; nothing if it does it."""
    start, results = time.monotonic(), dict[str, Any]()
    with ThreadPoolExecutor(PROCESSES) as pool:
        for part in pool.map(lambda shard: supervise(shard, folder), shards(family)):
            results |= part
    found = dict[str, Any]()
    for case in cases_of(family):
        said = "; ".join(results[case.name]["problems"])
        error = re.search(r"CUDA_ERROR_\w+", said)
        found[case.name] = {"fingerprint": case.fingerprint(), "error": error[0] if error else said}
    records[family] = found
    count, seconds = sum(bool(record["error"]) for record in found.values()), time.monotonic() - start
    lines = [f"{name}: {record['error'] or 'done'}" for name, record in found.items()]
    return f"{family:16} {count:5} of {len(found):5} cases refused {seconds:7.1f} s", lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--raw", action="store_true", help="write archives of all outputs as well")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="[]", help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--clusters", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        return run_part(given.worker, given.only, given.clusters)
    if given.worker in fuzz.FAMILIES:
        fuzz.work(given.worker, given.folder)
        return 0
    if given.worker:
        return work(given.worker, given.folder, set(json.loads(given.skip)), keep)
    collectors = dict.fromkeys(FAMILIES, collect) | {"refused": collect_refused}
    collectors |= dict.fromkeys(fuzz.FAMILIES, fuzz.collect)
    known = list(collectors)
    families = given.families or known
    try:
        records, arrays = golden.load()
    except FileNotFoundError:
        records, arrays = {}, {}
    records, arrays = dict(records), dict(arrays)
    start, problems = time.monotonic(), list[str]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(FAMILIES_AT_ONCE) as pool:
        futures = []
        for family in families:
            if family in FAMILIES:
                arrays = {name: array for name, array in arrays.items() if not name.startswith(f"{family}/")}
        for family in families:
            futures.append(pool.submit(collectors[family], family, Path(folder), records, arrays))
        for future in futures:
            line, found = future.result()
            print(line, flush=True)
            problems += found
        if given.raw:
            given.folder.mkdir(parents=True, exist_ok=True)
            write_raw(Path(folder), given.folder)
    records = {family: records[family] for family in known if family in records}
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "goldens.json").write_text(dump(records))
    np.savez_compressed(given.folder / "goldens.npz", **{name: arrays[name] for name in sorted(arrays)})
    sizes = [(given.folder / f"goldens.{kind}").stat().st_size // 1024 for kind in ("json", "npz")]
    print(f"json {sizes[0]} KiB, npz {sizes[1]} KiB with {len(arrays)} arrays, {time.monotonic() - start:.0f} s")
    print(f"{len(problems)} problems")
    print("\n".join(problem[: 1200 if number < 4 else 230] for number, problem in enumerate(problems[:40])))
    (given.folder / "problems.txt").write_text("\n".join(problems))
    return 0


def write_raw(source: Path, folder: Path) -> None:
    for name, families in RAW.items():
        files = [file for family in families for file in sorted(source.glob(f"{family}.*.raw.npz"))]
        if not files:
            continue
        with zipfile.ZipFile(folder / f"{name}.zip", "w") as archive:
            for file in files:
                archive.write(file, file.name)
        print(f"{name}.zip {(folder / f'{name}.zip').stat().st_size / 2**20:.1f} MiB")


def dump(records: dict[str, Any]) -> str:
    """One line for each case."""
    families = []
    for family, cases in records.items():
        lines = [f"{json.dumps(name)}: {json.dumps(record, separators=(',', ':'))}" for name, record in cases.items()]
        families.append(f"{json.dumps(family)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(families) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
