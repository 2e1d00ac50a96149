"""``python -m tests.emulator.micro.assemble``: every module through ptxas for sm_90a, without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .families import FAMILIES, cases_of


def assemble(text: str) -> str:
    """What ptxas says; empty if all is well."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "micro.ptx"
        source.write_text(text)
        command = ["ptxas", "-arch=sm_90a", "-O3", "-o", str(Path(folder) / "micro.cubin"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()


def main(families: list[str]) -> int:
    failed = 0
    for family in families or FAMILIES:
        cases = cases_of(family)
        for module in dict.fromkeys(case.module for case in cases):
            start = time.monotonic()
            said = assemble(module.text)
            used = sum(case.module is module for case in cases)
            size, seconds = len(module.text) // 1024, time.monotonic() - start
            print(f"{family:16} {module.name:16} {used:4} cases {size:6} KiB {seconds:6.1f} s", flush=True)
            if said:
                failed += 1
                lines = module.text.splitlines()
                for message in said.splitlines()[:40]:
                    place = re.search(r"line (\d+)", message)
                    print(message.rpartition(";")[2], "|", lines[int(place[1]) - 1] if place else "")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
