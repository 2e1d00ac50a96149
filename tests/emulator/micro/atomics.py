"""atom and red. Each thread first works on a word of its own (the old value is the result), then all on a few words.

The numbers are small integers, so that the order of the contended additions cannot be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from . import data
from .case import Array, Case, Input, Module, Output
from .ptx import Kernel

PREFIX = "atomics"
THREADS = 128
CONTENDED = 8


class Atomic(NamedTuple):
    reduction: str
    type: str
    size: int
    number: str  # format of the numbers, "words" for random bits
    suffix: str = ""

    @property
    def spelling(self) -> str:
        return f"{self.reduction}{self.suffix}.{self.type}"

    @property
    def contended(self) -> bool:
        """Whether the outcome does not depend on the order."""
        return self.reduction not in ("exch", "cas")


def atomics() -> Iterator[Atomic]:
    for reduction in ("add", "min", "max"):
        yield Atomic(reduction, "u32", 4, "words")
        yield Atomic(reduction, "s32", 4, "words")
        yield Atomic(reduction, "u64", 8, "words")
        if reduction != "add":
            yield Atomic(reduction, "s64", 8, "words")
    for reduction in ("inc", "dec"):
        yield Atomic(reduction, "u32", 4, "<u4")
    for reduction in ("and", "or", "xor", "exch", "cas"):
        yield Atomic(reduction, "b32", 4, "words")
        yield Atomic(reduction, "b64", 8, "words")
    yield Atomic("add", "f32", 4, "f32")
    yield Atomic("add", "f64", 8, "<f8")
    yield Atomic("add", "f16", 2, "f16", ".noftz")
    yield Atomic("add", "f16x2", 4, "f16", ".noftz")
    yield Atomic("add", "bf16", 2, "bf16", ".noftz")
    yield Atomic("add", "bf16x2", 4, "bf16", ".noftz")
    yield Atomic("cas", "b16", 2, "words")


def values(atomic: Atomic, seed: int, count: int) -> Array:
    if atomic.number == "words":
        return data.words(seed, count * atomic.size // 4 + 1).view(np.uint8)[: count * atomic.size]
    low = 0 if atomic.number.startswith("<u") else -3
    numbers = data.small(seed, count * atomic.size, atomic.number, low, 3)
    return numbers.view(np.uint8)[: count * atomic.size]


def memory(seed: int) -> Array:
    """What stands in the words before: for atomic k THREADS own words and CONTENDED common ones, 8 bytes apart each."""
    found = [values(atomic, seed + k, (THREADS + CONTENDED) * 8 // atomic.size) for k, atomic in enumerate(atomics())]
    return np.concatenate(found)


def operands(seed: int) -> Array:
    """The operand of thread t for atomic k, 8 bytes each; compare values sometimes equal what is in memory."""
    found = [values(atomic, seed + k, THREADS * 8 // atomic.size) for k, atomic in enumerate(atomics())]
    return np.concatenate(found)


def compared() -> Array:
    """The compare values of cas: every other thread's is the old value, in the layout of operands."""
    old = memory(60).reshape(-1, THREADS + CONTENDED, 8)[:, :THREADS].copy()
    other = operands(62).reshape(-1, THREADS, 8)
    old[:, ::2] = other[:, ::2]
    return old.reshape(-1)


KINDS = {2: "h", 4: "r", 8: "d"}
STRIDE = 8 * (THREADS + CONTENDED)


def kernel_text(space: str) -> str:
    """atom on the thread's word, red on a common word. In shared memory the words are copied in and out."""
    total = STRIDE * len(list(atomics()))
    kernel = Kernel(f"atomics_{space}", "memory:ptr operands:ptr compared:ptr old:ptr")
    tid = kernel.tid()
    if space == "shared":
        base = kernel.smem()
        kernel.copy(base, "%memory", total, shared_source=False)
        kernel("bar.sync 0;")
        own = kernel.set("r", f"mad.lo.u32 $, {tid}, 8, {base}")
        slot = kernel.set("r", f"and.b32 $, {tid}, {CONTENDED - 1}")
        common = kernel.set("r", f"mad.lo.u32 $, {slot}, 8, {base}")
    else:
        own = kernel.offset("%memory", tid, 8)
        slot = kernel.set("r", f"and.b32 $, {tid}, {CONTENDED - 1}")
        common = kernel.offset("%memory", slot, 8)
    source, wanted, old = (kernel.offset(f"%{name}", tid, 8) for name in ("operands", "compared", "old"))
    for k, atomic in enumerate(atomics()):
        kind, bits, at = KINDS[atomic.size], 8 * atomic.size, 8 * THREADS * k
        value = kernel.set(kind, f"ld.global.b{bits} $, [{source}+{at}]")
        result = kernel.new(kind)
        compare = ""
        if atomic.reduction == "cas":
            compare = kernel.set(kind, f"ld.global.b{bits} $, [{wanted}+{at}]") + ", "
        place = f"[{own}+{k * STRIDE}]"
        kernel(f"atom.{space}.{atomic.spelling} {result}, {place}, {compare}{value};")
        kernel(f"st.global.b{bits} [{old}+{at}], {result};")
        if atomic.reduction in ("inc", "dec"):
            value = kernel.set("r", "mov.u32 $, 5")  # with bounds of the threads' own the order would be seen
        if atomic.contended:
            kernel(f"red.{space}.{atomic.spelling} [{common}+{k * STRIDE + 8 * THREADS}], {value};")
    if space == "shared":
        kernel("bar.sync 0;")
        kernel.copy("%memory", base, total, shared_source=True)
    return kernel.text()


VECTORS = [
    ("add", "f32", 2, ""),
    ("add", "f32", 4, ""),
    *((r, t, n, ".noftz") for r in ("add", "min", "max") for t in ("f16", "bf16") for n in (2, 4, 8)),
    *((r, t, n, ".noftz") for r in ("add", "min", "max") for t in ("f16x2", "bf16x2") for n in (2, 4)),
]


def vector_kernel() -> str:
    """red of vectors: four threads to a place of 16 bytes."""
    kernel = Kernel("vectors", "memory:ptr operands:ptr")
    tid = kernel.tid()
    place = kernel.offset("%memory", kernel.set("r", f"shr.u32 $, {tid}, 2"), 16)
    source = kernel.offset("%operands", tid, 16)
    for k, (reduction, t, count, suffix) in enumerate(VECTORS):
        size = {"f16": 16, "bf16": 16}.get(t, 32)
        kind = "h" if size == 16 else "r"
        registers = [kernel.new(kind) for _ in range(count)]
        at = k * THREADS * 16
        kernel(*(f"ld.global.b{size} {r}, [{source}+{at + size // 8 * i}];" for i, r in enumerate(registers)))
        vector = f"{{{', '.join(registers)}}}"
        kernel(f"red.global.v{count}.{t}.{reduction}{suffix} [{place}+{k * THREADS * 4}], {vector};")
    return kernel.text()


def vector_values(seed: int, threads: int) -> Array:
    numbers = {"f32": "f32", "f16": "f16", "f16x2": "f16", "bf16": "bf16", "bf16x2": "bf16"}
    found = [
        data.small(seed + k, 8 * threads, numbers[t]).view(np.uint8)[: 16 * threads]
        for k, (_, t, _, _) in enumerate(VECTORS)
    ]
    return np.concatenate(found)


def cases() -> list[Case]:
    module = Module(PREFIX, lambda: [kernel_text("global"), kernel_text("shared"), vector_kernel()])
    names = tuple(atomic.spelling for atomic in atomics())
    found = []
    for space in ("global", "shared"):
        words = Output(
            "memory",
            "<u8",
            (len(names), THREADS + CONTENDED),
            names,
            lambda: memory(60).view("<u8").reshape(-1, THREADS + CONTENDED),
        )
        old = Output("old", "<u8", (len(names), THREADS), names)
        given = (words, Input("operands", partial(operands, 61)), Input("compared", compared), old)
        found.append(
            Case(f"{PREFIX}/{space}", module, f"atomics_{space}", given, block=THREADS, shared=STRIDE * len(names))
        )
    labels = tuple(f"{reduction}.v{count}.{t}" for reduction, t, count, _ in VECTORS)
    places = THREADS // 4
    words = Output(
        "memory",
        "<u4",
        (len(VECTORS), places * 4),
        labels,
        lambda: vector_values(63, places).view("<u4").reshape(len(VECTORS), -1),
    )
    given = (words, Input("operands", partial(vector_values, 64, THREADS)))
    found.append(Case(f"{PREFIX}/vectors", module, "vectors", given, block=THREADS))
    return found
