"""ldmatrix, stmatrix and movmatrix: rows at the lanes' own addresses."""

from __future__ import annotations

from functools import partial

import numpy as np

from . import data
from .case import Array, Case, Input, Module, Output
from .ptx import Kernel

PREFIX = "matrix"
TILE = 8192  # bytes of shared memory
SHARED = TILE
FORMS = [(count, trans) for count in (1, 2, 4) for trans in ("", ".trans")]


def rows() -> Array:
    """Byte offsets of the lanes' rows: a permutation of distinct rows, in every launch another one for each warp."""
    order = np.argsort(data.words(51, 4 * 512).reshape(4, 512), axis=1)[:, :32]
    return (order * 16).astype(np.uint32)


def load_kernel() -> str:
    """Results of all forms: thread t's registers of form k at [k][t][4]."""
    kernel = Kernel("load", "bytes:ptr rows:ptr out:ptr")
    base, tid = kernel.smem(), kernel.tid()
    kernel.copy(base, "%bytes", TILE, shared_source=False)
    kernel("bar.sync 0;")
    row = kernel.set("r", f"ld.global.b32 $, [{kernel.offset('%rows', tid, 4)}]")
    kernel(f"add.u32 {row}, {row}, {base};")
    out = kernel.offset("%out", tid, 16)
    for k, (count, trans) in enumerate(FORMS):
        registers = [kernel.new("r") for _ in range(count)]
        kernel(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{', '.join(registers)}}}, [{row}];")
        kernel(*(f"st.global.b32 [{out}+{k * 2048 + 4 * i}], {register};" for i, register in enumerate(registers)))
    moved = kernel.set("r", f"ld.global.b32 $, [{kernel.offset('%bytes', tid, 4)}]")
    kernel(f"movmatrix.sync.aligned.m8n8.trans.b16 {moved}, {moved};")
    kernel(f"st.global.b32 [{out}+{len(FORMS) * 2048}], {moved};")
    return kernel.text()


def store_kernel(count: int, trans: str) -> str:
    """One warp for each CTA; what shared memory then holds."""
    kernel = Kernel(f"store_x{count}{trans.replace('.', '_')}", "bytes:ptr rows:ptr out:ptr")
    base, tid, cta = kernel.smem(), kernel.tid(), kernel.cta()
    kernel.fill(base, TILE, 0x5A5A5A5A)
    index = kernel.set("r", f"mad.lo.u32 $, {cta}, 32, {tid}")
    row = kernel.set("r", f"ld.global.b32 $, [{kernel.offset('%rows', index, 4)}]")
    source = kernel.offset("%bytes", index, 16)
    registers = [kernel.set("r", f"ld.global.b32 $, [{source}+{4 * i}]") for i in range(count)]
    kernel(
        f"add.u32 {row}, {row}, {base};",
        "bar.sync 0;",
        f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [{row}], {{{', '.join(registers)}}};",
        "bar.sync 0;",
    )
    kernel.copy(kernel.offset("%out", cta, TILE), base, TILE, shared_source=True)
    return kernel.text()


def cases() -> list[Case]:
    module = Module(PREFIX, lambda: [load_kernel(), *(store_kernel(count, trans) for count, trans in FORMS)])
    source = Input("bytes", partial(data.words, 52, TILE // 4))
    lanes = Input("rows", rows)
    names = (*(f"ldmatrix.x{count}{trans}" for count, trans in FORMS), "movmatrix")
    out = Output("out", "<u4", (len(names), 128, 4), names)
    found = [Case(f"{PREFIX}/load", module, "load", (source, lanes, out), block=128, shared=SHARED, keep=("out",))]
    for count, trans in FORMS:
        entry = f"store_x{count}{trans.replace('.', '_')}"
        out = Output("out", "<u4", (4, TILE // 4))
        found.append(Case(f"{PREFIX}/{entry}", module, entry, (source, lanes, out), grid=4, shared=SHARED))
    return found
