"""The command of ``make gpu-fuzz``."""

from __future__ import annotations

import argparse
import os
import sys
import time

from devices import why_no_gpu
from tqdm import tqdm

import cupyfa
from fuzz.machines import MACHINES
from fuzz.runner import SPECS, Pool, run

_MOST_FAILURES = 10


def main() -> int:
    """Exit status: 0 if all problems are right, 1 if one is not, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="make gpu-fuzz", description="Hold random problems to the oracles.")
    parser.add_argument("--seed", type=int, default=0, help="of the kernels and the problems")
    parser.add_argument("--count", type=int, default=2000, help="how many problems")
    parser.add_argument("--only", type=int, nargs="+", metavar="K", help="the problems of these numbers")
    parser.add_argument("--specs", type=int, default=SPECS, help="over how many kernels")
    parser.add_argument("--machine", choices=MACHINES, default="cuda", help="what computes; cuda by default")
    options = parser.parse_args()
    if options.machine == "cuda" and (reason := why_no_gpu()):
        parser.error(f"--machine cuda: {reason}")

    begin = time.perf_counter()
    pool = Pool(options.seed, options.specs)
    numbers = options.only or range(options.count)
    if options.machine == "cuda":
        some = [pool.problem(number).warm_call for number in options.only or ()]
        cupyfa.warmup([call for call in some if call is not None] if some else pool.warm_calls())
    ready = time.perf_counter()
    done = wrong = 0
    for verdict in tqdm(run(pool, numbers, options.machine), desc="fuzz", total=len(numbers)):
        done += 1
        if verdict.error is not None:
            wrong += 1
            tqdm.write(verdict.report(_again(options)))
        if verdict.fatal or wrong == _MOST_FAILURES:
            break
    print(
        f"{done} of {len(numbers)} problems of seed {options.seed} over {len(pool)} kernels: {wrong} wrong; "
        f"{ready - begin:.0f} s to compile, {time.perf_counter() - ready:.0f} s to compute",
        flush=True,
    )
    if done and verdict.fatal:
        os._exit(1)  # a usual exit would wait for the kernel that hangs
    return 1 if wrong else 0


def _again(options: argparse.Namespace) -> str:
    """The beginning of the command that repeats a problem."""
    arguments = f"--seed {options.seed}"
    arguments += f" --specs {options.specs}" if options.specs != SPECS else ""
    arguments += f" --machine {options.machine}" if options.machine != "cuda" else ""
    return f'make gpu-fuzz FUZZ_ARGS="{arguments} --only {{}}"'


if __name__ == "__main__":
    sys.exit(main())
