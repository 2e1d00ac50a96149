"""A list of instructions over a list of operands: thread i takes the i-th operands, row k is instruction k."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from .case import Array, Case, Input, Module, Output
from .ptx import Kernel

BLOCK = 128
DTYPES = {16: "<u2", 32: "<u4", 64: "<u8"}


class Op(NamedTuple):
    """``text``: instructions with $d for the result, $a $b ... for operands, $p $q and $t $u $w (16, 32, 64 bits) free.

    ``width``: of the result in bits; 1: a predicate, kept as 0 or 1 in 32 bits.
    """

    label: str
    text: str
    width: int = 32


def op(text: str, width: int = 32) -> Op:
    """An instruction whose label is its spelling (and any number in it)."""
    spelling, _, rest = text.partition(" ")
    numbers = re.findall(r"(?<![\w$.])-?(?:0x[0-9a-f]+|\d+)\b", rest)
    return Op(" ".join([spelling, *numbers]), text, width)


class Sweep(NamedTuple):
    """Operands by name: an array each, all of one length; 16, 32 or 64 bits wide."""

    name: str
    operands: dict[str, Callable[[], Array]]
    ops: tuple[Op, ...]

    def widths(self) -> dict[str, int]:
        return {label: 8 * make().itemsize for label, make in self.operands.items()}

    def rows(self, width: int) -> tuple[str, ...]:
        return tuple(op.label for op in self.ops if (op.width if op.width > 1 else 32) == width)

    def kernel(self, count: int) -> str:
        used = [width for width in DTYPES if self.rows(width)]
        parameters = [f"{label}:ptr" for label in self.operands] + [f"out{width}:ptr" for width in used]
        kernel = Kernel(self.name, " ".join(parameters))
        kernel(".reg .b16 %dd16, %t;\n.reg .b32 %dd32, %u;\n.reg .b64 %dd64, %w;\n.reg .pred %ddp, %p, %q;")
        index = kernel.set("r", f"mad.lo.u32 $, {kernel.cta()}, {BLOCK}, {kernel.tid()}")
        names = {}
        for label, width in self.widths().items():
            address = kernel.offset(f"%{label}", index, width // 8)
            names[label] = kernel.set({16: "h", 32: "r", 64: "d"}[width], f"ld.global.b{width} $, [{address}]")
        places = {width: kernel.offset(f"%out{width}", index, width // 8) for width in used}
        row = dict.fromkeys(DTYPES, 0)
        for op in self.ops:
            width = op.width if op.width > 1 else 32
            result = "%ddp" if op.width == 1 else f"%dd{width}"
            table = {"d": result, "p": "%p", "q": "%q", "t": "%t", "u": "%u", "w": "%w", **names}
            kernel(
                re.sub(r"\$(\w)", lambda match, table=table: table[match[1]], op.text)
                + ";" * (not op.text.endswith(" }"))
            )  # type: ignore[misc]
            if op.width == 1:
                kernel("selp.b32 %dd32, 1, 0, %ddp;")
            kernel(f"st.global.b{width} [{places[width]}+{row[width] * count * width // 8}], %dd{width};")
            row[width] += 1
        return kernel.text()


def pad(array: Array) -> Array:
    """Repeat the beginning until the length is a whole number of blocks."""
    return np.resize(array, -(-len(array) // BLOCK) * BLOCK)


def build(family: str, sweeps: Iterable[Sweep], *, keep: dict[str, tuple[str, ...]] | None = None) -> list[Case]:
    """One module, one case for each sweep. ``keep``: outputs to keep whole, by the sweep's name."""
    sweeps = list(sweeps)
    counts = {sweep.name: len(pad(next(iter(sweep.operands.values()))())) for sweep in sweeps}
    module = Module(family, lambda: [sweep.kernel(counts[sweep.name]) for sweep in sweeps])
    cases = []
    for sweep in sweeps:
        count = counts[sweep.name]
        inputs = [Input(label, lambda make=make: pad(make())) for label, make in sweep.operands.items()]
        outputs = [
            Output(f"out{width}", dtype, (len(rows), count), rows)
            for width, dtype in DTYPES.items()
            if (rows := sweep.rows(width))
        ]
        kept = (keep or {}).get(sweep.name, ())
        arguments = (*inputs, *outputs)
        cases.append(
            Case(f"{family}/{sweep.name}", module, sweep.name, arguments, grid=count // BLOCK, block=BLOCK, keep=kept)
        )
    return cases
