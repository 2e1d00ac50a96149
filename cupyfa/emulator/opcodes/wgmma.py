"""Hopper's warpgroup matrix products."""

from __future__ import annotations

import re

from cupyfa.emulator.builder import DEFINED, USED, Builder
from cupyfa.emulator.isa import TYPES
from cupyfa.emulator.opcodes.forms import Expand, Form, Operands, family
from cupyfa.emulator.opcodes.spelling import Spelling
from cupyfa.emulator.syntax import PtxError, UnsupportedInstruction, Vector

_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
# K of an instruction: 32 bytes of each row.
_K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}


@family("wgmma")
def wgmma(spelling: Spelling) -> Form:
    """``wgmma``."""
    word = spelling.one_of(("mma_async", "fence", "commit_group", "wait_group"))
    spelling.require("sync", "aligned")
    if word == "fence":
        return Form("wgmma_fence")
    if word == "commit_group":
        return Form("wgmma_commit")
    if word == "wait_group":
        return Form("wgmma_wait", number=(0, (1 << 31) - 1))
    shape = next((found for part in spelling.rest if (found := _SHAPE.fullmatch(part))), None)
    if shape is None:
        raise UnsupportedInstruction(f"{spelling.text} without a shape m64nNkK")
    spelling.flag(shape[0])
    accumulator, a, b = spelling.types(3, "f16 f32 " + " ".join(_K))
    return Form("wgmma", expand=_product(spelling, int(shape[1]), int(shape[2]), accumulator, a, b))


def _product(spelling: Spelling, n: int, k: int, accumulator: str, a: str, b: str) -> Expand:
    """Return what writes the product; the operands decide where A is."""
    eight_bits = {a, b} <= {"e4m3", "e5m2"}
    if (a != b and not eight_bits) or a not in _K or accumulator not in ("f16", "f32"):
        raise UnsupportedInstruction(f"{spelling.text}: a product of these types")
    if accumulator == "f16" and not (eight_bits or a == "f16"):
        raise UnsupportedInstruction(f"{spelling.text}: f16 accumulators of .{a}")
    if _K[a] != k or n % 8 or not 8 <= n <= 256:
        raise UnsupportedInstruction(f"{spelling.text}: a shape of n {n}, k {k}")
    rows = n // 2 if accumulator == "f32" else n // 4
    sixteen = a in ("f16", "bf16")

    def expand(builder: Builder, operands: Operands) -> None:
        in_registers = len(operands) > 1 and isinstance(operands[1], Vector)
        majors = (1 if in_registers else 2) if sixteen else 0
        if len(operands) != 6 + majors:
            raise PtxError(f"expected {6 + majors} operands, got {len(operands)}")
        for item in builder.items(operands[0], rows):
            row = builder.register(item, "f32" if accumulator == "f32" else "b32")[0]
            # The accumulators are read as well, unless scale-d says otherwise.
            builder.put(row, DEFINED | USED)
        if in_registers:
            for item in builder.items(operands[1], 4):
                builder.use(item, "b32")
        else:
            builder.use(operands[1], "b64")
        builder.use(operands[2], "b64")
        builder.use_predicate(operands[3])
        negates = []
        for operand in operands[4:6]:
            scale = builder.literal(operand, -1, 1, "the scale")
            if not scale:
                raise PtxError("the scale must be 1 or -1")
            negates.append(int(scale < 0))
        major = [builder.literal(operand, 0, 1, "the major-ness") for operand in operands[6:]]
        major_a, major_b = (0, *major) if len(major) == 1 else major or (0, 0)
        attr = (int(in_registers), TYPES[b], n // 8, *negates, major_a, major_b)
        builder.emit("wgmma", accumulator, a, attr)

    return expand


@family("setmaxnreg")
def setmaxnreg(spelling: Spelling) -> Form:
    """``setmaxnreg``."""
    increases = spelling.one_of(("inc", "dec")) == "inc"
    spelling.require("sync", "aligned")
    spelling.type("u32")
    return Form("setmaxnreg", attr=(int(increases),), number=(24, 256))
