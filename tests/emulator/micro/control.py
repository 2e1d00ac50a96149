"""Branches that diverge, jump tables, named barriers, loads and stores of every width, special registers."""

from __future__ import annotations

from functools import partial

import numpy as np

from . import data
from .case import Case, Input, Module, Output
from .ptx import Kernel

PREFIX = "control"
COUNT = 256


def divergent_kernel() -> str:
    """Each lane follows 3n+1 from its own number: as many rounds as it takes, one of two ways in each."""
    kernel = Kernel("divergent", "source:ptr out:ptr")
    index = kernel.set("r", f"mad.lo.u32 $, {kernel.cta()}, 64, {kernel.tid()}")
    n = kernel.set("r", f"ld.global.b32 $, [{kernel.offset('%source', index, 4)}]")
    rounds, sum_, odd, p = (
        kernel.set("r", "mov.u32 $, 0"),
        kernel.set("r", "mov.u32 $, 0"),
        kernel.new("r"),
        kernel.new("p"),
    )
    kernel(f"and.b32 {n}, {n}, 1023;", f"add.u32 {n}, {n}, 1;")
    again, even, join, end = (kernel.label() for _ in range(4))
    kernel(
        f"{again}:",
        f"setp.eq.u32 {p}, {n}, 1;",
        f"@{p} bra {end};",
        f"and.b32 {odd}, {n}, 1;",
        f"setp.eq.u32 {p}, {odd}, 0;",
        f"@{p} bra {even};",
        f"mad.lo.u32 {n}, {n}, 3, 1;",
        f"xor.b32 {sum_}, {sum_}, {n};",
        f"bra {join};",
        f"{even}:",
        f"shr.u32 {n}, {n}, 1;",
        f"mad.lo.u32 {sum_}, {sum_}, 31, {n};",
        f"{join}:",
        f"add.u32 {rounds}, {rounds}, 1;",
        f"bra.uni {again};".replace(".uni", ""),
        f"{end}:",
        "bar.warp.sync 0xffffffff;",
    )
    other = kernel.set("r", f"shfl.sync.bfly.b32 $, {sum_}, 1, 31, 0xffffffff")
    out = kernel.offset("%out", index, 12)
    kernel(*(f"st.global.b32 [{out}+{4 * i}], {r};" for i, r in enumerate((rounds, sum_, other))))
    return kernel.text()


def jump_kernel() -> str:
    """A jump table: five places, one of which leaves the kernel early."""
    kernel = Kernel("jump", "source:ptr out:ptr")
    index = kernel.set("r", f"mad.lo.u32 $, {kernel.cta()}, 64, {kernel.tid()}")
    n = kernel.set("r", f"ld.global.b32 $, [{kernel.offset('%source', index, 4)}]")
    out, which = kernel.offset("%out", index, 4), kernel.set("r", f"rem.u32 $, {n}, 5")
    targets, join = [kernel.label() for _ in range(5)], kernel.label()
    kernel(f"targets: .branchtargets {', '.join(targets)};", f"brx.idx {which}, targets;")
    bodies = (f"mul.lo.u32 {n}, {n}, 7", f"not.b32 {n}, {n}", "ret", f"popc.b32 {n}, {n}", f"brev.b32 {n}, {n}")
    for target, body in zip(targets, bodies, strict=True):
        kernel(f"{target}:", f"{body};", f"bra {join};")
    kernel(f"{join}:", f"st.global.b32 [{out}], {n};")
    return kernel.text()


def barrier_kernel() -> str:
    """Reductions over a CTA, and a named barrier on which two warps only arrive and two wait."""
    kernel = Kernel("barriers", "source:ptr out:ptr")
    base, tid, cta = kernel.smem(), kernel.tid(), kernel.cta()
    index = kernel.set("r", f"mad.lo.u32 $, {cta}, 128, {tid}")
    n = kernel.set("r", f"ld.global.b32 $, [{kernel.offset('%source', index, 4)}]")
    negative, one = kernel.set("p", f"setp.lt.s32 $, {n}, 0"), kernel.set("p", f"setp.eq.u32 $, {tid}, 77")
    out = kernel.offset("%out", index, 24)
    count = kernel.set("r", f"barrier.cta.red.popc.aligned.u32 $, 0, {negative}")
    q = kernel.new("p")
    results = [count]
    for operation in ("and", "or"):
        for predicate in (negative, one):
            kernel(f"barrier.cta.red.{operation}.aligned.pred {q}, 1, {predicate};")
            results.append(kernel.set("r", f"selp.b32 $, 1, 0, {q}"))
    writer, wait, join = kernel.set("p", f"setp.lt.u32 $, {tid}, 64"), kernel.label(), kernel.label()
    place = kernel.set("r", f"mad.lo.u32 $, {tid}, 4, {base}")
    read = kernel.set("r", "mov.u32 $, 0")
    kernel(
        f"@!{writer} bra {wait};",
        f"st.shared.b32 [{place}], {n};",
        "barrier.cta.arrive 3, 128;",
        f"bra {join};",
        f"{wait}:",
        "barrier.cta.sync 3, 128;",
        f"ld.shared.b32 {read}, [{place}+-256];",
        f"{join}:",
    )
    kernel(*(f"st.global.b32 [{out}+{4 * i}], {r};" for i, r in enumerate((*results, read))))
    return kernel.text()


def memory_kernel() -> str:
    """Loads and stores of all widths in global, shared, local, const and generic addresses."""
    static = "\n".join([".local .align 16 .b8 frame[64];", ".shared .align 16 .b8 part[4096];"])
    kernel = Kernel("memory", "source:ptr out:ptr", static=static)
    tid = kernel.tid()
    source, out = kernel.offset("%source", tid, 16), kernel.offset("%out", tid, 256)
    part, frame = kernel.set("r", "mov.u32 $, part"), kernel.set("r", "mov.u32 $, frame")
    kernel(f"mad.lo.u32 {part}, {tid}, 64, {part};")
    places = {"global": source, "shared": part, "local": frame}
    vector = [kernel.set("r", f"ld.global.b32 $, [{source}+{4 * i}]") for i in range(4)]
    names = "{" + ", ".join(vector) + "}"
    kernel(f"st.shared.v4.b32 [{part}], {names};", f"st.local.v4.b32 [{frame}], {names};")
    at = 0
    for space, place in places.items():
        for k, t in enumerate(("u8", "s8", "u16", "s16")):
            kernel(f"st.global.b32 [{out}+{at}], {kernel.set('r', f'ld.{space}.{t} $, [{place}+{4 * k + 2}]')};")
            at += 4
        wide = kernel.set("d", f"ld.{space}.s32 $, [{place}+4]")
        kernel(f"st.global.b64 [{out}+{at}], {wide};")
        at += 8
    bytes_ = [kernel.new("h") for _ in range(4)]
    kernel(
        f"ld.global.v4.u8 {{{', '.join(bytes_)}}}, [{source}+8];",
        f"st.shared.v2.b16 [{part}+16], {{{bytes_[3]}, {bytes_[0]}}};",
        f"st.shared.b8 [{part}+17], {bytes_[1]};",
        f"ld.shared.v2.b16 {{{bytes_[0]}, {bytes_[1]}}}, [{part}+16];",
        f"st.global.v2.b16 [{out}+{at}], {{{bytes_[0]}, {bytes_[1]}}};",
    )
    at += 8
    generic, generic_local = kernel.set("d", f"cvt.u64.u32 $, {part}"), kernel.set("d", f"cvt.u64.u32 $, {frame}")
    kernel(f"cvta.shared.u64 {generic}, {generic};", f"cvta.local.u64 {generic_local}, {generic_local};")
    for address in (generic, generic_local, source):
        value = kernel.set("d", f"ld.b64 $, [{address}+8]")
        kernel(f"st.b64 [{out}+{at}], {value};")
        at += 8
        for space in ("shared", "local", "global"):
            p = kernel.set("p", f"isspacep.{space} $, {address}")
            kernel(f"st.global.b32 [{out}+{at}], {kernel.set('r', f'selp.b32 $, 1, 0, {p}')};")
            at += 4
        at += 4
    kernel(f"and.b32 {tid}, {tid}, 15;", f"shl.b32 {tid}, {tid}, 2;")
    for space in ("const", "global"):
        table = kernel.set("d", f"mov.u64 $, table_{space}")
        kernel(f"mad.wide.u32 {table}, {tid}, 1, {table};")
        kernel(f"st.global.b32 [{out}+{at}], {kernel.set('r', f'ld.{space}.b32 $, [{table}]')};")
        at += 4
    assert at <= 192
    values = ", ".join(str(value) for value in data.words(81, 16).tolist())
    tables = [f".{space} .align 4 .b32 table_{space}[16] = {{{values}}};" for space in ("const", "global")]
    return "\n".join(tables) + "\n" + kernel.text()


SPECIAL = [
    "tid.x",
    "tid.y",
    "ntid.x",
    "ntid.y",
    "ctaid.x",
    "nctaid.x",
    "laneid",
    "lanemask_eq",
    "lanemask_lt",
    "lanemask_le",
    "lanemask_gt",
    "lanemask_ge",
    "clusterid.x",
    "nclusterid.x",
    "cluster_ctaid.x",
    "cluster_nctaid.x",
    "cluster_ctarank",
    "cluster_nctarank",
    "dynamic_smem_size",
]


def special_kernel() -> str:
    kernel = Kernel("special", "out:ptr", ".reqnctapercluster 2, 1, 1")
    index = kernel.set("r", f"mad.lo.u32 $, {kernel.cta()}, 64, {kernel.tid()}")
    out = kernel.offset("%out", index, 4)
    for i, name in enumerate(SPECIAL):
        kernel(f"st.global.b32 [{out}+{i * 1024}], {kernel.set('r', f'mov.u32 $, %{name}')};")
    return kernel.text()


def cases() -> list[Case]:
    texts = (divergent_kernel, jump_kernel, barrier_kernel, memory_kernel, special_kernel)
    module = Module(PREFIX, lambda: [text() for text in texts])
    source = Input("source", partial(data.words, 82, 4 * COUNT))
    rounds, jumped = Output("out", "<u4", (COUNT, 3)), Output("out", "<u4", (COUNT,))
    read = Output("out", "<u4", (64, 64), make=lambda: np.zeros((64, 64), np.uint32))
    special = Output("out", "<u4", (len(SPECIAL), 256), tuple(SPECIAL))
    return [
        Case(f"{PREFIX}/divergent", module, "divergent", (source, rounds), grid=4, block=64),
        Case(f"{PREFIX}/jump", module, "jump", (source, jumped), grid=4, block=64),
        Case(
            f"{PREFIX}/barriers",
            module,
            "barriers",
            (source, Output("out", "<u4", (256, 6))),
            grid=2,
            block=128,
            shared=1024,
        ),
        Case(f"{PREFIX}/memory", module, "memory", (source, read), block=64),
        Case(f"{PREFIX}/special", module, "special", (special,), grid=4, block=64, cluster=2, shared=512),
    ]
