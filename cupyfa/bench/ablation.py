"""What each part of the forward kernel is worth. Run as ``python -m cupyfa bench ablation``.

Every variant is the shipped kernel with some fields of its spec changed, checked like any contestant and timed in the
same rounds. The problems are those of FlashAttention-3's ablation (arXiv 2407.08608, table 2: batch 4, seqlen 8448, 16
heads, head_dim 128, float16), the same in bfloat16, and causal problems of growing length for the schedulers, with as
many key/value heads as query heads and with one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import cupyfa
from cupyfa.bench import three_stage
from cupyfa.bench.correctness import Check, check_all
from cupyfa.bench.harness import Contestant, Timing, interleave, ratio
from cupyfa.bench.peers import why_not_here
from cupyfa.bench.problems import Cell, Inputs, make_inputs
from cupyfa.bench.usage import count

__all__ = [
    "DESCRIPTION",
    "SCHEDULERS",
    "SHIPPED",
    "VARIANTS",
    "add_arguments",
    "enter",
    "format_rows",
    "problems",
    "run",
]

#: Of the command, for its help.
DESCRIPTION = (
    "Time the forward kernel with parts of it switched off. Exit status: 0; 1 if a variant was wrong somewhere; 2 "
    "without a GPU (with --registers: a compiler), or for wrong usage."
)

#: The name of the kernel that `attention` runs.
SHIPPED = "shipped"

_EXACT = {"speculative": False}
_NO_OVERLAP = _EXACT | {"overlap": False}  # without overlap there is no speculative softmax
_PINGPONG = {"pingpong": True}
_RESCALE = {"rescale_threshold": 8}
# The largest tile that has registers for a second S: see three_stage.py.
_TILE_OF_THREE_STAGES = _EXACT | {"tile_n": 96}
_ONE_TILE = {"q_stages": 1, "scheduler": "one_tile"}
_UNSPECIALIZED = _ONE_TILE | {"warp_specialized": False, "pingpong": False, "setmaxnreg": False}

#: Name -> what is changed. The exact softmax, with pingpong, is FlashAttention-3's. A variant without warp
#: specialization is to be compared with the line before it; moving registers belongs to the specialization.
VARIANTS: dict[str, dict[str, Any]] = {
    SHIPPED: {},
    "pingpong": _PINGPONG,
    "exact softmax": _EXACT,
    "exact, pingpong": _EXACT | _PINGPONG,
    "exact, rescaled only after a growth by 2**8": _EXACT | _RESCALE,
    "exact, pingpong, rescaled only after a growth by 2**8": _EXACT | _PINGPONG | _RESCALE,
    "an eighth of the exponentials on FMA units": {"exp2_fma": 1},
    "a quarter of the exponentials on FMA units": {"exp2_fma": 2},
    "exact, tile of three stages": _TILE_OF_THREE_STAGES,
    "exact, three stages": _TILE_OF_THREE_STAGES | {"three_stage": True},
    "exact, no overlap": _NO_OVERLAP,
    "exact, no overlap, pingpong": _NO_OVERLAP | _PINGPONG,
    "one Q slot, tiles one after the other": {"q_stages": 1},
    "tiles dealt out": {"scheduler": "persistent"},
    "one CTA per tile": {"scheduler": "one_tile"},
    "one CTA per tile, one Q slot": _ONE_TILE,
    "one CTA per tile, one Q slot, no warp specialization": _UNSPECIALIZED,
    "exact, one CTA per tile, one Q slot": _EXACT | _ONE_TILE,
    "exact, one CTA per tile, one Q slot, no warp specialization": _EXACT | _UNSPECIALIZED,
    "all of it off": _NO_OVERLAP | _ONE_TILE,
    "one consumer warpgroup": {"tile_m": 64, "setmaxnreg": False},
}

#: Name -> what is changed, for the table of the schedulers: longest first in sections, or head by head.
SCHEDULERS: dict[str, dict[str, Any]] = {
    "drawn": {"scheduler": "dynamic"},
    "dealt out": {"scheduler": "persistent"},
    "one CTA per tile": {"scheduler": "one_tile"},
    "drawn, head by head": {"scheduler": "dynamic", "longest_first": False},
    "dealt out, head by head": {"scheduler": "persistent", "longest_first": False},
    "one CTA per tile, head by head": {"scheduler": "one_tile", "longest_first": False},
}


def problems() -> list[tuple[Cell, Mapping[str, dict[str, Any]]]]:
    """List the problems and the variants that are timed on each.

    Returns
    -------
    list of tuple
        In the order of the output.
    """
    paper = [Cell(128, 8448, 4, 16, causal, dtype) for dtype in ("float16", "bfloat16") for causal in (False, True)]
    lengths = [
        Cell(128, seqlen, 32768 // seqlen, heads, causal=True, heads_kv=heads_kv)
        for heads, heads_kv in ((16, None), (8, 1))
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384, 32768)
    ]
    return [*((cell, VARIANTS) for cell in paper), *((cell, SCHEDULERS) for cell in lengths)]


def enter(inputs: Inputs, variants: Mapping[str, dict[str, Any]]) -> list[Contestant]:
    """Prepare the variants.

    Parameters
    ----------
    inputs : Inputs
        The arrays.
    variants : Mapping
        Name to ``config=``.

    Returns
    -------
    list of Contestant
        In their order.
    """
    q, k, v, out, causal = inputs.q, inputs.k, inputs.v, inputs.out, inputs.cell.causal

    def contestant(name: str, config: dict[str, Any]) -> Contestant:
        return Contestant(name, lambda: cupyfa.attention(q, k, v, causal=causal, out=out, config=config))

    return [contestant(name, config) for name, config in variants.items()]


def format_rows(cell: Cell, checks: Mapping[str, Check], timings: Mapping[str, Timing]) -> list[str]:
    """Return a problem's figures as a Markdown table.

    Parameters
    ----------
    cell : Cell
        The problem.
    checks, timings : Mapping
        By the name of the variant.

    Returns
    -------
    list of str
        TFLOP/s, and the speed relative to the first variant, of which the ratio is formed within a round.
    """
    first = next(iter(checks))
    lines = [f"{cell}", "", f"| variant | TFLOP/s | of {first} |", "|---|---:|---:|"]
    for name, check in checks.items():
        timing = timings.get(name)
        if timing is None:
            lines.append(f"| {name} | {check.message or 'wrong'} | - |")
            continue
        speed = cell.useful_flops / timing.spread.median / 1e12
        share = f"{ratio(timing, timings[first]).median:.3f}" if first in timings else "-"
        lines.append(f"| {name} | {speed:.0f} | {share} |")
    return [*lines, ""]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Of the command.
    """
    parser.add_argument("--rounds", type=count, default=5, help="rounds of the timing (%(default)s)")
    parser.add_argument(
        "--registers",
        action="store_true",
        help="instead, compile the three-stage kernels and print their spills and advisories; needs no GPU",
    )


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
    if options.registers:
        return _registers()
    if reason := why_not_here():
        print(reason, file=sys.stderr)
        return 2
    import cupy
    from tqdm import tqdm

    from cupyfa.bench.harness import time_on_gpu

    good = True
    with cupy.cuda.Stream.null, tqdm(problems(), desc="ablation", unit="problem", file=sys.stderr) as progress:
        for cell, variants in progress:
            progress.set_postfix_str(str(cell))
            inputs = make_inputs(cell, cupy)
            contestants = enter(inputs, variants)
            checks = check_all(contestants, inputs)
            timings = interleave([c for c in contestants if checks[c.name].passed], options.rounds, time_on_gpu)
            progress.write("\n".join(format_rows(cell, checks, timings)), file=sys.stdout)
            good = good and all(check.passed for check in checks.values())
    return 0 if good else 1


def _registers() -> int:
    try:
        print("\n".join(three_stage.table([*three_stage.measure()])))
    except cupyfa.CompileError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
