"""``python -m cupyfa emulate``: one attention problem on the emulated kernel, against the oracle, and its replay."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa import emulate
from cupyfa.emulator import POLICIES, Finding, Run
from cupyfa.errors import CompileError
from cupyfa.oracles import dense
from cupyfa.testing import assert_close, assert_lse_close, guarded_empty, random_array, score_magnitude

__all__ = ["DESCRIPTION", "add_arguments", "run"]

#: Of the command, for its help.
DESCRIPTION = (
    "Run one attention problem on the emulated kernel, under one schedule or all, and hold the results to the oracle. "
    "Exit status: 0 if every run is clean and right, 1 if there is a hazard or a wrong result, 2 for wrong usage."
)

_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
#: Options that make a case, beside its policy and config.
_CASE = ("arch", "shape", "dtype", "causal", "sms", "seed", "data_seed", "strict_warpgroup")
_SHAPE = "batch,seqlen_q,seqlen_k,heads_q,heads_kv,head_dim"


def _shape(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != 6 or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not {_SHAPE}: six positive integers")
    return values


def _override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    try:
        return name, json.loads(value.lower())
    except json.JSONDecodeError:
        return name, value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the command.
    """
    add = parser.add_argument
    add("--arch", default="sm_90a", choices=sorted(emulate.ARCHITECTURES), help="the emulated device (sm_90a)")
    shape = (1, 300, 333, 2, 1, 128)
    add("--shape", type=_shape, default=shape, metavar=_SHAPE, help=f"the problem ({','.join(map(str, shape))})")
    add("--dtype", default="bfloat16", choices=sorted(_DTYPES), help="of q, k, v and out (bfloat16)")
    add("--causal", action="store_true", help="with the causal mask, aligned bottom-right")
    add("--sms", type=int, default=1, help="multiprocessors; few make a CTA walk many tiles (1)")
    add("--policy", default="all", choices=["all", *POLICIES], help="the schedule (all)")
    add("--seed", type=int, default=0, help="of the schedule (0)")
    add("--data-seed", type=int, default=0, help="of the inputs (0)")
    add(
        "--lenient-warpgroup",
        dest="strict_warpgroup",
        action="store_false",
        help="a wait of one warp proves the products of its whole warpgroup, not only the warp's own part",
    )
    add(
        "--config",
        type=_override,
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="another kernel, as config= of cupyfa.attention: pingpong=false, tile_n=64; may be repeated",
    )
    add("--json", type=pathlib.Path, metavar="FILE", help="write the reports, for --replay")
    add(
        "--replay",
        type=pathlib.Path,
        metavar="FILE",
        help="repeat the runs of a report that failed, with the options that they had",
    )


def run(options: argparse.Namespace, say: Callable[[str], object]) -> int:
    """Run the command.

    Parameters
    ----------
    options : argparse.Namespace
        Of :func:`add_arguments`.
    say : callable
        Prints a line.

    Returns
    -------
    int
        Exit status, as in :data:`DESCRIPTION`.
    """
    try:
        return _run(options, say)
    except (TypeError, ValueError, OSError, CompileError) as error:  # UnsupportedError is a ValueError
        sys.stderr.write(f"emulate: {error}\n")
        return 2


def _run(options: argparse.Namespace, say: Callable[[str], object]) -> int:
    if options.replay:
        cases = _failed(options.replay)
        if not cases:
            say(f"{options.replay} has no run that failed: nothing to repeat")
    else:
        policies = POLICIES if options.policy == "all" else [options.policy]
        cases = [{**_arguments(options), "policy": policy} for policy in policies]
    if options.json:
        options.json.open("a").close()  # not to be told only after the runs that it cannot be written
    reports = []
    found: dict[tuple[Any, ...], str] = {}
    for case in cases:
        report, wrong = _one(case)
        count, seconds = report.statistics.get("instructions", 0), report.statistics.get("seconds", 0.0)
        verdict = f"{report.verdict}, {'wrong result' if wrong else 'right result'}"
        say(f"{case['policy']:14s} seed {case['seed']}: {verdict}, {count:,} instructions in {seconds * 1e3:.0f} ms")
        if report.verdict != "clean" or wrong:
            what = _news(report, found)
            say("\n".join(part for part in (what, wrong, f"again: {_command(case)}") if part))
        reports.append({"arguments": case, "wrong": wrong, **json.loads(report.to_json())})
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1))
    return int(any(report["verdict"] != "clean" or report["wrong"] for report in reports))


def _failed(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the cases of a file of reports whose run failed."""
    try:
        reports = json.loads(path.read_text())
        cases = [r["arguments"] for r in reports if r["verdict"] != "clean" or r["wrong"]]
        if isinstance(reports, list) and all(set(case) == {*_CASE, "config", "policy"} for case in cases):
            return cases
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError(f"{path} is no file that `emulate --json` has written")


def _news(report: Run, found: dict[tuple[Any, ...], str]) -> str:
    """Return a report without the findings of earlier ones; ``found`` has them, with the policy that showed each."""

    def key(finding: Finding) -> tuple[Any, ...]:
        places = (place and place.index for place in (finding.place, finding.other))
        return (report.kernel, finding.severity, finding.hazard, *places)

    known = ", ".join(dict.fromkeys(found[key(f)] for f in report.findings if key(f) in found))
    new = tuple(f for f in report.findings if key(f) not in found)
    found.update({key(f): report.policy for f in new})
    if not known:
        return str(report)
    if not new:
        return f"same findings as {known}"
    _, *lines = str(dataclasses.replace(report, findings=new)).splitlines()
    return "\n".join([f"same findings as {known}, and", *lines])


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    return {**{name: getattr(options, name) for name in _CASE}, "config": dict(options.config)}


def _command(case: dict[str, Any]) -> str:
    """Return the command that repeats a case."""
    name = pathlib.Path(sys.executable).name
    python = "python" if not name or name.startswith("python") else name
    words = [f"{python} -m cupyfa emulate", "--shape", ",".join(str(n) for n in case["shape"])]
    for name in ("arch", "dtype", "policy", "seed", "data_seed", "sms"):
        words += ["--" + name.replace("_", "-"), str(case[name])]
    words += ["--causal"] if case["causal"] else []
    words += [] if case["strict_warpgroup"] else ["--lenient-warpgroup"]
    return " ".join([*words, *(f"--config {name}={value}" for name, value in case["config"].items())])


def _one(case: dict[str, Any]) -> tuple[Run, str]:
    """Run one case; returns its report, and what is wrong with the result."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = case["shape"]
    seed = 3 * case["data_seed"]
    shapes = ((batch, seqlen_q, heads_q, head_dim), *((batch, seqlen_k, heads_kv, head_dim),) * 2)
    q, k, v = (random_array(shape, _DTYPES[case["dtype"]], seed + i) for i, shape in enumerate(shapes))
    out, lse = guarded_empty(q.shape, q.dtype, np), guarded_empty((batch, heads_q, seqlen_q), np.float32, np)
    prepared = emulate.prepare(
        q,
        k,
        v,
        causal=case["causal"],
        out=out.array,
        lse=lse.array,
        config=case["config"] or None,
        arch=case["arch"],
        sms=case["sms"],
    )
    report = prepared.launch(
        policy=case["policy"], seed=case["seed"], strict_warpgroup=case["strict_warpgroup"], max_instructions=50_000_000
    )
    reference, reference_lse = dense.attention(q, k, v, causal=case["causal"])
    plain, _ = dense.same_precision(q, k, v, causal=case["causal"])
    try:
        out.check("out")
        lse.check("lse")
        assert_close(out.array, reference, plain, what="out")
        assert_lse_close(lse.array, reference_lse, score_magnitude=score_magnitude(q, k))
    except AssertionError as error:
        return report, str(error)
    return report, ""
