"""Bulk copies and reductions, cp.async, and plain access to the shared memory of another CTA."""

from __future__ import annotations

from functools import partial

import numpy as np

from . import data
from .case import Array, Case, Input, Module, Output, Word
from .ptx import Kernel

PREFIX = "bulk"
SIZE = 4096  # bytes of one CTA's data
BARRIER = 2 * SIZE
SHARED = BARRIER + 64
CLUSTER = ".reqnctapercluster 2, 1, 1"
MEET = ("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;")


def begin(kernel: Kernel) -> tuple[str, str, str, str]:
    """Base, barrier (initialised for one arrival), predicate of the first thread, CTA."""
    base, first, cta = kernel.smem(), kernel.first_thread(), kernel.cta()
    barrier = kernel.set("r", f"add.u32 $, {base}, {BARRIER}")
    kernel(f"@{first} mbarrier.init.shared::cta.b64 [{barrier}], 1;", "fence.mbarrier_init.release.cluster;")
    return base, barrier, first, cta


def end(kernel: Kernel, source: str, cta: str, came: str) -> str:
    """Copy SIZE bytes of the CTA out, and whether the barrier's phase came."""
    kernel(f"@{kernel.first_thread()} st.global.b32 [{kernel.offset('%came', cta, 4)}], {came};", "bar.sync 0;")
    kernel.copy(kernel.offset("%out", cta, SIZE), source, SIZE, shared_source=True)
    return kernel.text()


def load_kernel(name: str, space: str, *, multicast: bool = False) -> str:
    """A row of the table: source offset, place, bytes, mask."""
    kernel = Kernel(name, "source:ptr table:ptr out:ptr came:ptr", CLUSTER if multicast else "")
    base, barrier, first, cta = begin(kernel)
    kernel.fill(base, SIZE, 0x5A5A5A5A)
    row = kernel.offset("%table", cta, 32)
    offset, place, count, expected = (kernel.set("r", f"ld.global.b32 $, [{row}+{4 * i}]") for i in range(4))
    mask32 = kernel.set("r", f"ld.global.b32 $, [{row}+16]")
    address = kernel.offset("%source", offset, 1)
    kernel(f"add.u32 {place}, {place}, {base};", "fence.proxy.async;", "bar.sync 0;", *(MEET if multicast else ()))
    kernel(f"@{first} mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {expected};")
    spelling = f"cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes"
    if multicast:
        mask, sends = kernel.set("h", f"cvt.u16.u32 $, {mask32}"), kernel.set("p", f"setp.ne.u32 $, {mask32}, 0")
        kernel(f"and.pred {sends}, {sends}, {first};")
        kernel(f"@{sends} {spelling}.multicast::cluster [{place}], [{address}], {count}, [{barrier}], {mask};")
    else:
        kernel(f"@{first} {spelling} [{place}], [{address}], {count}, [{barrier}];")
    came = kernel.wait(barrier)
    kernel(*(MEET if multicast else ()))
    return end(kernel, base, cta, came)


def store_kernel(name: str, spelling: str) -> str:
    """A row of the table: place in shared memory, offset in the target, bytes. ``spelling``: copy or reduction."""
    kernel = Kernel(name, "source:ptr table:ptr target:ptr")
    base, first, cta = kernel.smem(), kernel.first_thread(), kernel.cta()
    kernel.copy(base, kernel.offset("%source", cta, SIZE), SIZE, shared_source=False)
    row = kernel.offset("%table", cta, 32)
    place, offset, count = (kernel.set("r", f"ld.global.b32 $, [{row}+{4 * i}]") for i in range(3))
    address = kernel.offset("%target", offset, 1)
    kernel(
        f"add.u32 {place}, {place}, {base};",
        "fence.proxy.async;",
        "bar.sync 0;",
        f"@{first} {spelling} [{address}], [{place}], {count};",
        f"@{first} cp.async.bulk.commit_group;",
        f"@{first} cp.async.bulk.wait_group 0;",
    )
    return kernel.text()


def peer_kernel(name: str, spelling: str) -> str:
    """Shared memory of the other CTA: rank r sends its bytes there, and its target holds numbers of its own before."""
    kernel = Kernel(name, "source:ptr before:ptr out:ptr came:ptr bytes:u32", CLUSTER)
    base, barrier, first, cta = begin(kernel)
    target = kernel.set("r", f"add.u32 $, {base}, {SIZE}")
    kernel.copy(base, kernel.offset("%source", cta, SIZE), SIZE, shared_source=False)
    kernel.copy(target, kernel.offset("%before", cta, SIZE), SIZE, shared_source=False)
    rank = kernel.set("r", "mov.u32 $, %cluster_ctarank")
    peer = kernel.set("r", f"xor.b32 $, {rank}, 1")
    there = kernel.set("r", f"mapa.shared::cluster.u32 $, {target}, {peer}")
    signal = kernel.set("r", f"mapa.shared::cluster.u32 $, {barrier}, {peer}")
    kernel(
        "fence.proxy.async;",
        *MEET,
        f"@{first} mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], %bytes;",
        f"@{first} {spelling} [{there}], [{base}], %bytes, [{signal}];",
    )
    came = kernel.wait(barrier)
    kernel(*MEET)
    return end(kernel, target, cta, came)


def remote_access_kernel() -> str:
    """st, ld, atom and red on the other CTA's shared memory, by shared::cluster and by generic addresses."""
    kernel = Kernel("remote_access", "out:ptr", CLUSTER)
    base, tid, cta = kernel.smem(), kernel.tid(), kernel.cta()
    kernel.fill(base, SIZE, 0x01010101)
    rank = kernel.set("r", "mov.u32 $, %cluster_ctarank")
    peer = kernel.set("r", f"xor.b32 $, {rank}, 1")
    there = kernel.set("r", f"mapa.shared::cluster.u32 $, {base}, {peer}")
    whose = kernel.set("r", f"getctarank.shared::cluster.u32 $, {there}")
    generic = kernel.set("d", f"cvt.u64.u32 $, {base}")
    kernel(f"cvta.shared.u64 {generic}, {generic};", f"mapa.u64 {generic}, {generic}, {peer};")
    whose2 = kernel.set("r", f"getctarank.u64 $, {generic}")
    own = kernel.set("r", f"mad.lo.u32 $, {tid}, 4, {there}")
    own64 = kernel.offset(generic, tid, 4)
    value = kernel.set("r", f"mad.lo.u32 $, {cta}, 1000, {tid}")
    old, back, back2 = kernel.new("r"), kernel.new("r"), kernel.new("r")
    kernel(
        *MEET,
        f"st.shared::cluster.b32 [{own}], {value};",
        f"st.b32 [{own64}+512], {value};",
        f"atom.shared::cluster.add.u32 {old}, [{own}+1024], {value};",
        f"red.shared::cluster.add.u32 [{there}+1536], {value};",
        f"atom.add.u32 {back}, [{own64}+1024], 5;",
        f"ld.shared::cluster.b32 {back2}, [{own}];",
    )
    out = kernel.offset("%out", kernel.set("r", f"mad.lo.u32 $, {cta}, 64, {tid}"), 32)
    for i, register in enumerate((whose, whose2, old, back, back2)):
        kernel(f"st.global.b32 [{out}+{4 * i}], {register};")
    kernel(*MEET)
    mine = kernel.set("r", f"mad.lo.u32 $, {tid}, 4, {base}")
    for i, at in enumerate((0, 512, 1024)):
        kernel(f"ld.shared.b32 {old}, [{mine}+{at}];", f"st.global.b32 [{out}+{20 + 4 * i}], {old};")
    return kernel.text()


def cp_async_kernel() -> str:
    """4, 8 and 16 bytes, with the rest of them zero from a size on, with an ignored source, and with an mbarrier."""
    kernel = Kernel("cp_async", "source:ptr sizes:ptr out:ptr came:ptr")
    base, barrier, first, cta = begin(kernel)
    kernel.fill(base, SIZE, 0x5A5A5A5A)
    tid = kernel.tid()
    size = kernel.set("r", f"ld.global.b32 $, [{kernel.offset('%sizes', tid, 4)}]")
    source, place = kernel.offset("%source", tid, 16), kernel.set("r", f"mad.lo.u32 $, {tid}, 16, {base}")
    odd = kernel.set("r", f"and.b32 $, {tid}, 1")
    ignore = kernel.set("p", f"setp.ne.u32 $, {odd}, 0")
    kernel(f"@{first} mbarrier.inval.shared.b64 [{barrier}];", f"@{first} mbarrier.init.shared.b64 [{barrier}], 64;")
    kernel("bar.sync 0;")
    four, eight = kernel.set("r", f"min.u32 $, {size}, 4"), kernel.set("r", f"min.u32 $, {size}, 8")
    kernel(
        f"cp.async.ca.shared.global [{place}], [{source}], 4;",
        f"cp.async.ca.shared.global [{place}+4], [{source}+1024], 4, {four};",
        f"cp.async.ca.shared.global [{place}+8], [{source}+8], 8, {eight};",
        "cp.async.commit_group;",
        f"cp.async.cg.shared.global [{place}+1024], [{source}+1024], 16, {size};",
        f"cp.async.cg.shared.global [{place}+2048], [{source}+2048], 16;",
        "cp.async.commit_group;",
        "cp.async.wait_group 1;",
        "cp.async.wait_all;",
        f"cp.async.cg.shared.global [{place}+3072], [{source}+3072], 16, {ignore};",
        f"cp.async.mbarrier.arrive.noinc.shared.b64 [{barrier}];",
    )
    return end(kernel, base, cta, kernel.wait(barrier))


GLOBAL_REDUCTIONS = {
    **{f"{r}.{t}": (t, "") for r in ("add", "min", "max") for t in ("u32", "s32", "u64")},
    **{f"{r}.s64": ("s64", "") for r in ("min", "max")},
    **{f"{r}.u32": ("small", "") for r in ("inc", "dec")},
    **{f"{r}.{t}": (t, "") for r in ("and", "or", "xor") for t in ("b32", "b64")},
    "add.f32": ("f32", ""),
    "add.f64": ("<f8", ""),
    **{f"{r}.{t}": (t, ".noftz" if r == "add" else "") for r in ("add", "min", "max") for t in ("f16", "bf16")},
}
SHARED_REDUCTIONS = {
    **{f"{r}.{t}": t for r in ("add", "min", "max") for t in ("u32", "s32")},
    "add.u64": "u64",
    "inc.u32": "small",
    "dec.u32": "small",
    **{f"{r}.b32": "b32" for r in ("and", "or", "xor")},
}


def spelling_of(reduction: str, noftz: str, where: str) -> str:
    operation, _, t = reduction.partition(".")
    return f"cp.reduce.async.bulk.{where}.{operation}{noftz}.{t}"


def numbers(seed: int, count: int, kind: str) -> Array:
    """``count`` bytes: random, or small numbers where the type is a float (or "small")."""
    if kind in ("f32", "<f8", "f16", "bf16"):
        return data.small(seed, count, kind).view(np.uint8)[:count].copy()
    if kind == "small":
        return data.small(seed, count // 4, "<u4", 0, 5).view(np.uint8)
    return data.words(seed, count // 4).view(np.uint8)


def kernels() -> list[str]:
    to_global, to_shared = "global.shared::cta.bulk_group", "shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    texts = [
        load_kernel("load_cluster", "shared::cluster"),
        load_kernel("multicast", "shared::cluster", multicast=True),
        store_kernel("store", f"cp.async.bulk.{to_global}"),
        peer_kernel("peer_copy", f"cp.async.bulk.{to_shared}"),
        remote_access_kernel(),
        cp_async_kernel(),
    ]
    for reduction, (_, noftz) in GLOBAL_REDUCTIONS.items():
        texts.append(store_kernel(entry(reduction), spelling_of(reduction, noftz, to_global)))
    for reduction in SHARED_REDUCTIONS:
        texts.append(peer_kernel("peer_" + entry(reduction), spelling_of(reduction, "", to_shared)))
    return texts


def entry(reduction: str) -> str:
    return "reduce_" + reduction.replace(".", "_")


def cases() -> list[Case]:
    module = Module(PREFIX, kernels)

    def table(rows: list[tuple[int, ...]]) -> Input:
        return Input("table", lambda: np.array([[*row, *[0] * (8 - len(row))] for row in rows], np.int32))

    came, out = Output("came", "<u4", (8,)), Output("out", "<u4", (8, SIZE // 4))
    source = Input("source", partial(data.words, 71, 16 * SIZE // 4))
    loads = [
        (0, 0, SIZE),
        (16, 32, 16),
        (48, 1024, 2048),
        (4096, 16, 4080),
        (32, 128, 48),
        (0, 4080, 16),
        (8192, 0, 1024),
        (16, 0, 32),
    ]
    plain = table([(*row, row[2]) for row in loads])
    both = [(0, 0, 1024, 2048, 3), (4096, 1024, 1024, 2048, 3), (16, 0, 2048, 0, 2), (0, 0, 1024, 2048, 0)]
    both += [(0, 0, 512, 1024, 1), (0, 2048, 512, 512, 1), (0, 512, 16, 16, 3), (0, 0, 0, 16, 0)]
    # A row whose CTA sends 512 bytes and is sent as many by its neighbour expects both.
    both[4:6] = [(0, 0, 512, 1024, 1), (64, 2048, 512, 0, 1)]
    given = (source, plain, out, came)
    found = [
        Case(f"{PREFIX}/load_cluster", module, "load_cluster", given, grid=8, block=64, shared=SHARED),
        Case(
            f"{PREFIX}/multicast",
            module,
            "multicast",
            (source, table(both), out, came),
            grid=8,
            block=64,
            cluster=2,
            shared=SHARED,
        ),
    ]
    stores = table([(0, 0, SIZE), (16, SIZE + 32, 16), (1024, 2 * SIZE, 2048), (48, 3 * SIZE - 48, 48)])
    target = Output("target", "<u4", (4 * SIZE // 4,), make=partial(data.words, 72, 4 * SIZE // 4))
    found.append(Case(f"{PREFIX}/store", module, "store", (source, stores, target), grid=4, block=64, shared=SHARED))
    for reduction, (kind, _) in GLOBAL_REDUCTIONS.items():
        given = (
            Input("source", partial(numbers, 73, 4 * SIZE, kind)),
            table([(0, 0, SIZE), (16, 32, 16), (1024, 0, 2048), (0, 2 * SIZE, 1024)]),
            Output("target", "u1", (4 * SIZE,), make=partial(numbers, 74, 4 * SIZE, kind)),
        )
        if reduction.startswith(("inc", "dec")):  # the order of overlapping rows would be seen
            given = (given[0], table([(0, 0, SIZE), (16, SIZE + 32, 16), (1024, 2 * SIZE, 2048)]), given[2])
        grid = 3 if reduction.startswith(("inc", "dec")) else 4
        name = entry(reduction)
        found.append(Case(f"{PREFIX}/{name}", module, name, given, grid=grid, block=64, shared=SHARED))
    pair, pair_came = Output("out", "<u4", (2, SIZE // 4)), Output("came", "<u4", (2,))
    peers = {"peer_copy": "b32"} | {"peer_" + entry(reduction): kind for reduction, kind in SHARED_REDUCTIONS.items()}
    for name, kind in peers.items():
        first, second = (
            Input("source", partial(numbers, 75, 2 * SIZE, kind)),
            Input("before", partial(numbers, 76, 2 * SIZE, kind)),
        )
        case = Case(
            f"{PREFIX}/{name}",
            module,
            name,
            (first, second, pair, pair_came, Word(2048)),
            grid=2,
            block=64,
            cluster=2,
            shared=SHARED,
        )
        found.append(case)
    remote = Output("out", "<u4", (2, 64, 8))
    found.append(
        Case(f"{PREFIX}/remote_access", module, "remote_access", (remote,), grid=2, block=64, cluster=2, shared=SHARED)
    )
    sizes = Input("sizes", lambda: (np.arange(64) * 5 % 17).astype(np.uint32))
    one, one_came = Output("out", "<u4", (1, SIZE // 4)), Output("came", "<u4", (1,))
    found.append(
        Case(f"{PREFIX}/cp_async", module, "cp_async", (source, sizes, one, one_came), block=64, shared=SHARED)
    )
    return found
