"""``python -m cupyfa emulate``: one attention problem on the emulated kernel, against the oracle, and its replay."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa import emulate
from cupyfa.emulator import POLICIES, Run
from cupyfa.oracles import dense
from cupyfa.testing import assert_close, assert_lse_close, guarded_empty, random_array, score_magnitude

__all__ = ["add_arguments", "run"]

_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
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
    parser.add_argument("--arch", default="sm_90a", choices=sorted(emulate.ARCHITECTURES))
    parser.add_argument("--shape", type=_shape, default=(1, 300, 333, 2, 1, 128), metavar=_SHAPE)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(_DTYPES))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--sms", type=int, default=1, help="multiprocessors; few make a CTA walk many tiles (1)")
    parser.add_argument("--policy", default="all", choices=["all", *POLICIES], help="the schedule (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--data-seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--strict-warpgroup", action="store_true", help="a wait proves only the calling warp's part")
    parser.add_argument("--config", type=_override, action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the reports, for --replay")
    parser.add_argument("--replay", type=pathlib.Path, metavar="FILE", help="repeat the runs of a report that failed")


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
        Exit status: 0 if every run is clean and right.
    """
    if options.replay:
        reports = json.loads(options.replay.read_text())
        cases = [r["arguments"] for r in reports if r["verdict"] != "clean" or r["wrong"]]
    else:
        policies = POLICIES if options.policy == "all" else [options.policy]
        cases = [{**_arguments(options), "policy": policy} for policy in policies]
    reports = []
    for case in cases:
        report, wrong = _one(case)
        count, seconds = report.statistics.get("instructions", 0), report.statistics.get("seconds", 0.0)
        verdict = f"{report.verdict}, {'wrong result' if wrong else 'right result'}"
        say(f"{case['policy']:14s} seed {case['seed']}: {verdict}, {count:,} instructions in {seconds * 1e3:.0f} ms")
        if report.verdict != "clean" or wrong:
            say("\n".join(part for part in (str(report), wrong, f"again: {_command(case)}") if part))
        reports.append({"arguments": case, "wrong": wrong, **json.loads(report.to_json())})
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1))
    return int(any(report["verdict"] != "clean" or report["wrong"] for report in reports))


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    names = ("arch", "shape", "dtype", "causal", "sms", "seed", "data_seed", "strict_warpgroup")
    return {**{name: getattr(options, name) for name in names}, "config": dict(options.config)}


def _command(case: dict[str, Any]) -> str:
    """Return the command that repeats a case."""
    words = ["python -m cupyfa emulate", "--shape", ",".join(str(n) for n in case["shape"])]
    for name in ("arch", "dtype", "policy", "seed", "data_seed", "sms"):
        words += ["--" + name.replace("_", "-"), str(case[name])]
    words += [f"--{name.replace('_', '-')}" for name in ("causal", "strict_warpgroup") if case[name]]
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
