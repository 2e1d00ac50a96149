"""The record beside a benchmark's table: what ran where, by which rules, and every figure; written as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import cupyfa
from cupyfa.bench.clocks import Clocks
from cupyfa.bench.correctness import LIMIT_TEXT, Check
from cupyfa.bench.harness import Timing, ratio
from cupyfa.bench.peers import BASELINE, Availability
from cupyfa.bench.problems import Cell
from cupyfa.spec import BwdSpec, FwdSpec

__all__ = ["CONVENTIONS", "Row", "describe_row", "environment", "write"]

#: The rules of the figures.
CONVENTIONS = {
    "flops": "useful: 2*B*H*Sq*Sk*(d+dv), causal halved, and with a window of the visible keys alone; "
    "dense_equivalent: without a mask; scheduled: whole tiles",
    "timing_boundary": "CUDA events around a batch of N calls, host overhead overlapped",
    "regime": "interleaved batches of batch_seconds: short ones at high clocks, those of 1 s at what power allows",
    "inputs": "cupyfa.testing.random_array, about N(0, 1), seeds 1, 2, 3, of a sink 4; the same arrays for everyone",
    "statistic": "median over rounds; a ratio is formed within a round; spread is the smallest and the largest",
    "correctness": f"each element within {LIMIT_TEXT}: sampled rows against float64, everything against the reference",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """Everything about one cell.

    Attributes
    ----------
    cell : Cell
        The problem.
    spec : FwdSpec, BwdSpec or None
        cupyfa's kernel; None if there is none.
    checks : Mapping
        Name to Check, for everyone who was run.
    timings : Mapping
        Name to Timing, for everyone who passed.
    before, after : Mapping or None
        Clock and power.
    parts : Mapping
        Name to Timing of a kernel of cupyfa's, launched by itself; empty if they were not timed.
    """

    cell: Cell
    spec: FwdSpec | BwdSpec | None
    checks: Mapping[str, Check]
    timings: Mapping[str, Timing]
    before: Mapping[str, float] | None = None
    after: Mapping[str, float] | None = None
    parts: Mapping[str, Timing] = dataclasses.field(default_factory=dict)

    @property
    def scheduled_flops(self) -> int | None:
        """Operations of cupyfa's kernel, which computes whole tiles; None if there is none."""
        spec = self.spec
        if spec is None:
            return None
        return self.cell.scheduled_flops(spec.tile_m, spec.tile_n, spec.head_dim, spec.head_dim_v)

    def tflops(self, name: str) -> float | None:
        """Return the useful TFLOP/s of a contestant; None if it was not timed."""
        timing = self.timings.get(name)
        return None if timing is None else self.cell.useful_flops / timing.spread.median / 1e12


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _host_cpu() -> str:
    """Return the model, where Linux tells it."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return models[0] if models else platform.machine()


def environment(clocks: Clocks | None, peers: Sequence[Availability], batch_seconds: float = 0.010) -> dict[str, Any]:
    """Describe the machine and the software.

    Parameters
    ----------
    clocks : Clocks or None
        None on a machine without a GPU.
    peers : sequence of Availability
        The peers, present or absent.
    batch_seconds : float
        Length of a timed batch.

    Returns
    -------
    dict
        Ready for JSON; what cannot be found out is None.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cupyfa": cupyfa.__version__,
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "host_cpu": _host_cpu(),
        "driver": None if clocks is None else clocks.driver,
        "clocks_from": None if clocks is None else clocks.source,
        "batch_seconds": batch_seconds,
        **_describe_cuda(),
        **_describe_torch(),
        "peers": [dataclasses.asdict(peer) for peer in peers],
    }


def _describe_cuda() -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(("gpu", "multiprocessors", "cuda_driver", "nvrtc", "cupy"))
    try:
        import cupy

        found["cupy"] = cupy.__version__
        found["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        p = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        driver = cupy.cuda.runtime.driverGetVersion()
    except Exception:  # no CuPy, no NVRTC, no driver: what was found so far stands
        return found
    found["gpu"], found["multiprocessors"] = p["name"].decode(), p["multiProcessorCount"]
    found["cuda_driver"] = f"{driver // 1000}.{driver % 1000 // 10}"
    return found


def _describe_torch() -> dict[str, Any]:
    try:
        torch = importlib.import_module("torch")
        return {"torch": str(torch.__version__), "cudnn": torch.backends.cudnn.version()}
    except Exception:
        return {"torch": None, "cudnn": None}


def describe_row(row: Row, baseline: str = BASELINE, conventions: Mapping[str, str] = CONVENTIONS) -> dict[str, Any]:
    """Describe a cell.

    Parameters
    ----------
    row : Row
        Its figures.
    baseline : str
        The contestant that ratios refer to.
    conventions : Mapping
        The rules of the figures.

    Returns
    -------
    dict
        Ready for JSON.
    """
    cell, spec, scheduled = row.cell, row.spec, row.scheduled_flops
    reference = row.timings.get(baseline)
    contestants: dict[str, Any] = {}
    for name, check in row.checks.items():
        entry: dict[str, Any] = {"correctness": dataclasses.asdict(check), "timing": None}
        if (timing := row.timings.get(name)) is not None:
            median = timing.spread.median
            entry["timing"] = {
                "calls": timing.calls,
                "rounds": len(timing.seconds),
                "seconds": timing.seconds,
                **{f"seconds_{key}": value for key, value in dataclasses.asdict(timing.spread).items()},
                "tflops_useful": row.tflops(name),
                "tflops_dense_equivalent": cell.dense_flops / median / 1e12,
                "tflops_scheduled": scheduled / median / 1e12 if name == "cupyfa" and scheduled is not None else None,
                f"speed_over_{baseline}": None if reference is None else dataclasses.asdict(ratio(timing, reference)),
            }
        contestants[name] = entry
    return {
        "problem": dataclasses.asdict(cell),
        "spec": None if spec is None else str(spec),
        "flops": {"useful": cell.useful_flops, "dense_equivalent": cell.dense_flops, "scheduled": scheduled},
        "timing_boundary": conventions["timing_boundary"],
        "regime": conventions["regime"],
        "inputs": conventions["inputs"],
        "clocks_before": row.before,
        "clocks_after": row.after,
        "contestants": contestants,
        "parts": {name: dataclasses.asdict(timing) for name, timing in row.parts.items()},
    }


def write(
    path: str,
    header: Mapping[str, Any],
    rows: Sequence[Row],
    host: Mapping[str, Any] | None,
    baseline: str = BASELINE,
    conventions: Mapping[str, str] = CONVENTIONS,
) -> None:
    """Write the manifest.

    Parameters
    ----------
    path : str
        The JSON file.
    header : Mapping
        From :func:`environment`.
    rows : sequence of Row
        The cells.
    host : Mapping or None
        The host cost, if it was measured.
    baseline : str
        The contestant that ratios refer to.
    conventions : Mapping
        The rules of the figures.
    """
    record = {
        "environment": header,
        "conventions": conventions,
        "rows": [describe_row(row, baseline, conventions) for row in rows],
        "host_cost": host,
    }
    text = json.dumps(record, indent=2, allow_nan=False)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
