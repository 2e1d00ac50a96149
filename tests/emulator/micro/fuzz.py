"""Random straight-line programs: integers, floats, conversions, predicates and shuffles over a few registers.

A module holds 500 programs, fifty to a kernel. A program takes its registers from a table of interesting words, works
on them for a few dozen instructions, and stores all of them; its golden is the CRC-32 of what it stored. Left out is
what PTX leaves open: approximations, division by zero, and the payload and sign of a NaN, which neg, abs and a move may
or may not keep (floats are made canonical before their bits are seen; nothing takes the sign of a float).

The driver's ptxas assembles them without optimisation. With it one program in a hundred does something else: it folds
neg.s32 into a saturating conversion (which then sees 2^31), cvt.rzi.s64.f32 and cvt.sat.s32.s64 into one conversion
(which takes a NaN for 0), bfe.s32 with a constant position over 31 into -1, and drops some and.b16 after a conversion
to e4m3x2. The records list those programs.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import data
from .case import Array, Case, Input, Module, Output
from .floats import SPECIAL32
from .fuzz_instructions import REGISTERS, Choice, instruction
from .integer import EDGES32
from .ptx import Kernel

MODULES, KERNELS, PROGRAMS = 20, 10, 50  # modules, kernels of a module, programs of a kernel
LANES, ROWS, LENGTH = 64, 64, 36
VECTORS = 5  # of four words that a program stores for each lane
GROUP = 5  # modules of a family
FAMILIES = tuple(f"fuzz{i}" for i in range(MODULES // GROUP))


def table() -> Array:
    """[row][lane][4]: integers in the first half of the rows, floats in the second."""
    count = ROWS * LANES * 4
    random = data.words(91, count)
    small = data.words(92, count) % np.uint32(200) - np.uint32(100)
    integers = np.array(EDGES32, np.uint32)[data.words(93, count) % np.uint32(len(EDGES32))]
    specials = np.array(SPECIAL32, np.uint32)[data.words(94, count) % np.uint32(len(SPECIAL32))]
    near = (random & np.uint32(0x807FFFFF)) | (
        (data.words(95, count) % np.uint32(24) + np.uint32(115)) << np.uint32(23)
    )
    choice = data.words(96, count) % np.uint32(4)
    whole = np.select([choice < 2, choice == 2], [random, integers], small)
    real = np.select([choice < 3], [near], specials)
    return np.where(np.arange(count) < count // 2, whole, real).astype(np.uint32).reshape(ROWS, LANES, 4)


def program(seed: int) -> tuple[list[str], list[str]]:
    """The instructions of a program and, for diagnosis, the spellings it uses."""
    choice = Choice(seed)
    lines: list[str] = []
    for names, half in (("r0 r1 r2 r3", 0), ("r4 r5 t0 t1", 0), ("f0 f1 f2 f3", 1), ("f4 x0 x1 x2", 1)):
        row = choice.below(ROWS // 2) + half * ROWS // 2
        vector = ", ".join(f"%{name}" for name in names.split())
        lines.append(f"ld.global.v4.b32 {{{vector}}}, [%in+{row * LANES * 16}];")
    lines += ["mov.b64 %d0, {%t0, %r0};", "mov.b64 %d1, {%t1, %r5};", "cvt.s64.s32 %d2, %r4;"]
    lines += ["cvt.u16.u32 %h0, %t0;", "cvt.u16.u32 %h1, %t1;"]
    lines += ["setp.lt.s32 %p0, %r0, %r1;", "setp.gt.f32 %p1, %f0, %f1;", "setp.ne.u16 %p2, %h0, %h1;"]
    spellings = []
    for _ in range(LENGTH):
        spelling, text = instruction(choice)
        spellings.append(spelling)
        lines.append(text)
    return lines, spellings


def store(number: int) -> Iterator[str]:
    """All registers, floats with one NaN."""
    for i in range(REGISTERS["f"]):
        yield f"setp.nan.f32 %pn, %f{i}, %f{i};"
        yield f"@%pn mov.b32 %f{i}, 0x7fffffff;"
    yield "mov.b32 %x0, {%h0, %h1};"
    yield "selp.b32 %x1, 1, 0, %p0;"
    yield "@%p1 or.b32 %x1, %x1, 2;"
    yield "@%p2 or.b32 %x1, %x1, 4;"
    for i in range(3):
        yield f"mov.b64 {{%y{2 * i}, %y{2 * i + 1}}}, %d{i};"
    words = [
        "r0",
        "r1",
        "r2",
        "r3",
        "r4",
        "r5",
        "f0",
        "f1",
        "f2",
        "f3",
        "f4",
        "y0",
        "y1",
        "y2",
        "y3",
        "y4",
        "y5",
        "x0",
        "x1",
        "x1",
    ]
    for vector in range(VECTORS):
        names = ", ".join(f"%{word}" for word in words[4 * vector : 4 * vector + 4])
        yield f"st.global.v4.b32 [%to+{(number * VECTORS + vector) * LANES * 16}], {{{names}}};"


def seed_of(module: int, kernel: int, number: int) -> int:
    return (module * KERNELS + kernel) * PROGRAMS + number


def kernel_text(module: int, index: int) -> str:
    kernel = Kernel(f"fuzz_{index}", "table:ptr out:ptr")
    kernel(
        ".reg .b32 %r<6>, %f<5>, %t<2>, %x<3>, %y<6>;",
        ".reg .b64 %d<3>, %w<2>, %in, %to;",
        ".reg .b16 %h<2>, %g;",
        ".reg .pred %p<3>, %pn;",
        "mov.u32 %r0, %tid.x;",
        "mad.wide.u32 %in, %r0, 16, %table;",
        "mad.wide.u32 %to, %r0, 16, %out;",
    )
    for number in range(PROGRAMS):
        kernel(f"// program {number}", *program(seed_of(module, index, number))[0], *store(number))
    return kernel.text()


@cache
def cases_of(module: int) -> list[Case]:
    """The kernels of a module."""
    text = Module(f"fuzz{module}", lambda: [kernel_text(module, index) for index in range(KERNELS)], optimise=False)
    inputs = Input("table", table)
    out = Output("out", "<u4", (PROGRAMS, VECTORS, LANES, 4))
    return [
        Case(f"fuzz{module}/{index}", text, f"fuzz_{index}", (inputs, out), block=LANES) for index in range(KERNELS)
    ]


def checksums(array: Array) -> npt.NDArray[np.uint32]:
    return np.array([zlib.crc32(np.ascontiguousarray(part).tobytes()) for part in array], np.uint32)


def modules_of(family: str) -> range:
    first = FAMILIES.index(family) * GROUP
    return range(first, first + GROUP)


def work(family: str, folder: Path) -> None:
    """On the GPU, in a process of its own: the checksums of a family's programs, [module][kernel][program]."""
    from .hardware import Gpu

    gpu, found, digests, optimised = Gpu(), [], [], []
    for module in modules_of(family):
        digest, other = hashlib.sha256(), replace(cases_of(module)[0].module, optimise=True)
        for index, case in enumerate(cases_of(module)):
            first, second = (gpu.run(case, pattern)["out"] for pattern in (0xA5A5A5A5, 0x3C3C3C3C))
            assert np.array_equal(first, second), f"{case.name} differs between two runs"
            found.append(checksums(first))
            digest.update(first.tobytes())
            differs = checksums(gpu.run(replace(case, module=other), 0)["out"]) != found[-1]
            optimised += [seed_of(module, index, int(number)) for number in np.flatnonzero(differs)]
        digests.append(digest.hexdigest())
    np.savez(
        folder / f"{family}.npz",
        checksums=np.array(found).reshape(GROUP, KERNELS, PROGRAMS),
        digests=digests,
        optimised=np.array(optimised, np.int64),
    )


def collect(family: str, folder: Path, records: dict[str, Any], arrays: dict[str, Any]) -> tuple[str, list[str]]:
    """Run a family; as goldens.collect."""
    start = time.monotonic()
    command = [
        sys.executable,
        "-m",
        f"{(__package__ or 'tests.emulator.micro')}.goldens",
        "--worker",
        family,
        str(folder),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        return f"{family:16} no end", [f"{family}: no end"]
    if done.returncode:
        return f"{family:16} failed", [f"{family}: {line}" for line in (done.stdout + done.stderr).splitlines()[-4:]]
    with np.load(folder / f"{family}.npz") as file:
        arrays[f"{family}:checksums"] = file["checksums"]
        digests, optimised = file["digests"].tolist(), file["optimised"].tolist()
    of_module = KERNELS * PROGRAMS
    records[family] = {
        f"fuzz{module}": {
            "text": fingerprint(module),
            "sha256": digest,
            "optimised_differ": [seed for seed in optimised if seed // of_module == module],
        }
        for module, digest in zip(modules_of(family), digests, strict=True)
    }
    line = f"{family:16} {GROUP * of_module} programs, {len(optimised)} other results when optimised"
    return f"{line} {time.monotonic() - start:7.1f} s", []


def fingerprint(module: int) -> str:
    digest = hashlib.sha256(cases_of(module)[0].module.text.encode())
    digest.update(table().tobytes())
    return digest.hexdigest()[:16]


def suspects(wrong: dict[int, bool]) -> list[str]:
    """Spellings by the share of the programs with them that are wrong. ``wrong``: by the program's seed."""
    seen, bad = Counter[str](), Counter[str]()
    for seed, failed in wrong.items():
        for spelling in set(program(seed)[1]):
            seen[spelling] += 1
            bad[spelling] += failed
    ranked = sorted(seen, key=lambda spelling: (-bad[spelling] / seen[spelling], -bad[spelling]))
    return [f"{spelling} {bad[spelling]}/{seen[spelling]}" for spelling in ranked if bad[spelling]][:12]
