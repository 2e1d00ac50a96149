"""Kernels that make no sense: well-formed statements in any order, with any addresses, descriptors and counts.

Whatever they do, the machine has to come back with a report.
"""

from __future__ import annotations

import random
import re
from typing import Any

from .pair import Pair

# {r} {d} {f} {x} {h} {p}: a register; {s}, {m}: an address in shared memory, of an mbarrier; {g}: in global memory;
# {a}: a generic one; {t}: a tensor map; {n}: a number; {l}: a label.
_ANY = """
ld.shared.u32 {r}, [{s}] | ld.shared.v4.b32 {{{r}, {r}, {r}, {r}}}, [{s}] | ld.shared.b64 {d}, [{s}]
st.shared.u32 [{s}], {r} | st.shared.v2.b64 [{s}], {{{d}, {d}}} | st.shared.b8 [{s}], {r}
st.release.cta.shared.u32 [{s}], {r} | ld.acquire.cluster.shared::cluster.u32 {r}, [{s}]
atom.shared.add.u32 {r}, [{s}], {r} | red.shared.max.s32 [{s}], {r} | atom.shared.cas.b64 {d}, [{s}], {d}, {d}
ld.u32 {r}, [{a}] | st.u32 [{a}], {r} | ld.v4.u32 {{{r}, {r}, {r}, {r}}}, [{a}] | ld.global.u32 {r}, [{g}]
ld.global.b64 {d}, [{g}] | st.global.v4.b32 [{g}], {{{r}, {r}, {r}, {r}}} | ld.volatile.global.u32 {r}, [{g}]
ld.acquire.gpu.global.u32 {r}, [{g}] | st.release.gpu.global.u32 [{g}], {r}
atom.acq_rel.gpu.global.inc.u32 {r}, [{g}], {r} | red.global.add.f32 [{g}], {f}
red.relaxed.cta.global.add.u32 [{g}], {r} | atom.global.exch.b64 {d}, [{g}], {d} | ld.param.u32 {r}, [in_+{n}]
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{r}, {r}, {r}, {r}}}, [{s}]
stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{s}], {{{r}, {r}}} | movmatrix.sync.aligned.m8n8.trans.b16 {r}, {r}
mapa.shared::cluster.u32 {r}, {r}, {r} | mapa.u64 {d}, {d}, {r} | getctarank.u64 {r}, {d} | cvta.shared.u64 {d}, {d}
cvta.to.global.u64 {d}, {d} | isspacep.shared {p}, {d} | mbarrier.init.shared::cta.b64 [{m}], {r}
mbarrier.init.shared::cta.b64 [{m}], {n} | mbarrier.inval.shared::cta.b64 [{m}]
mbarrier.arrive.shared::cta.b64 {d}, [{m}] | mbarrier.arrive.shared::cta.b64 _, [{m}], {n}
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{m}] | mbarrier.arrive_drop.shared::cta.b64 {d}, [{m}], {n}
mbarrier.arrive.noComplete.shared::cta.b64 {d}, [{m}], {n} | mbarrier.arrive.expect_tx.shared::cta.b64 _, [{m}], {r}
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{m}], {n}
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [{m}], {n} | mbarrier.test_wait.shared::cta.b64 {p}, [{m}], {d}
mbarrier.try_wait.parity.shared::cta.b64 {p}, [{m}], {r} | mbarrier.test_wait.parity.shared::cta.b64 {p}, [{m}], {n}
mbarrier.pending_count.b64 {r}, {d} | fence.proxy.async | fence.mbarrier_init.release.cluster | fence.acq_rel.gpu
membar.sys | fence.acq_rel.cta | bar.sync {r} | bar.sync 1, {r} | bar.arrive 2, 64 | barrier.sync 3, 32
bar.red.popc.u32 {r}, 4, {p} | bar.sync 0 | barrier.cluster.arrive.aligned | barrier.cluster.arrive.relaxed
barrier.cluster.wait | bar.warp.sync {r} | bar.warp.sync 0xffffffff | shfl.sync.idx.b32 {r}|{p}, {r}, {r}, {r}, {r}
shfl.sync.up.b32 {r}, {r}, {n}, {n}, 0xffffffff | vote.sync.ballot.b32 {r}, {p}, {r}
vote.sync.uni.pred {p}, {p}, 0xffffffff | match.any.sync.b32 {r}, {r}, 0xffffffff
match.all.sync.b64 {r}|{p}, {d}, {r} | redux.sync.add.s32 {r}, {r}, 0xffffffff | elect.sync {r}|{p}, {r}
activemask.b32 {r} | setmaxnreg.dec.sync.aligned.u32 24 | setmaxnreg.inc.sync.aligned.u32 240
setmaxnreg.dec.sync.aligned.u32 40 | cp.async.ca.shared.global [{s}], [{g}], 8
cp.async.cg.shared.global [{s}], [{g}], 16, {r} | cp.async.commit_group | cp.async.wait_group 1 | cp.async.wait_all
cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{m}] | cp.async.mbarrier.arrive.shared::cta.b64 [{m}]
cp.async.bulk.commit_group | cp.async.bulk.wait_group.read 0 | cp.async.bulk.wait_group 2 | griddepcontrol.wait
griddepcontrol.launch_dependents | nanosleep.u32 {r}
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{s}], [{g}], {r}, [{m}]
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{s}], [{g}], {n}, [{m}]
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [{s}], [{g}], {n}, [{m}], {h}
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{s}], [{s}], {n}, [{m}]
cp.async.bulk.global.shared::cta.bulk_group [{g}], [{s}], {n}
cp.async.bulk.global.shared::cta.bulk_group [{g}], [{s}], {r}
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{g}], [{s}], {n}
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [{g}], [{s}], {n}
cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u64 [{s}], [{s}], {n}, [{m}]
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [{s}], [{t}, {{{r}, {r}}}], [{m}]
cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [{s}], [{t}, {{{r}}}], [{m}]
{T1}.multicast::cluster [{s}], [{t}, {{{r}}}], [{m}], {h}
cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [{t}, {{{r}, {r}}}], [{s}]
cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [{t}, {{{r}, {r}, {r}, {r}, {r}}}], [{s}]
cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [{t}, {{{r}, {r}}}], [{s}] | add.u32 {r}, {r}, {r}
shl.b32 {r}, {r}, {n} | mov.b64 {d}, {{{r}, {r}}} | mov.b64 {{{r}, {r}}}, {d} | setp.lt.u32 {p}, {r}, {r}
div.u32 {r}, {r}, {r} | rem.s64 {d}, {d}, {d} | cvt.rzi.s32.f32 {r}, {f} | cvt.u16.u32 {h}, {r}
bfe.s64 {d}, {d}, {r}, {r} | mov.pred {p}, -1 | not.pred {p}, {p} | ex2.approx.f32 {f}, {f}
prmt.b32 {r}, {r}, {r}, {r} | mov.u32 {r}, %clock | bra {l} | brx.idx {r}, TABLE | exit | ret | trap
"""
_HOPPER = """
wgmma.fence.sync.aligned | wgmma.commit_group.sync.aligned | wgmma.wait_group.sync.aligned 0
wgmma.wait_group.sync.aligned 1
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f0, %f1, %f2, %f3}}, {d}, {d}, {p}, 1, 1, 0, 1
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f4, %f5, %f6, %f7}}, {{%r5, %r6, %r7, %r8}}, {d}, {p}, 1, -1, 0
wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2 {{%f0, %f1, %f2, %f3}}, {d}, {d}, 1, 1, 1
"""
_BLACKWELL = """
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{s}], {r}
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{s}], 64
tcgen05.dealloc.cta_group::1.sync.aligned.b32 {r}, 64 | tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned
tcgen05.ld.sync.aligned.32x32b.x2.b32 {{{r}, {r}}}, [{r}] | tcgen05.st.sync.aligned.16x64b.x1.b32 [{r}], {{{r}}}
tcgen05.ld.sync.aligned.16x256b.x1.b32 {{{r}, {r}, {r}, {r}}}, [{r}] | tcgen05.wait::ld.sync.aligned
tcgen05.wait::st.sync.aligned | tcgen05.fence::before_thread_sync | tcgen05.fence::after_thread_sync
tcgen05.shift.cta_group::1.down [{r}] | tcgen05.mma.cta_group::1.kind::f16 [{r}], {d}, {d}, {r}, {p}
tcgen05.mma.cta_group::1.kind::f16 [{r}], [{r}], {d}, {r}, {p}
tcgen05.mma.cta_group::2.kind::f16 [{r}], {d}, {d}, {r}, {p} | tcgen05.cp.cta_group::1.128x256b [{r}], {d}
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{m}]
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [{m}], {h}
clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 [{s}], [{m}]
tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [{s}], 32
tcgen05.dealloc.cta_group::2.sync.aligned.b32 {r}, {r}
"""
_REGISTERS = 9  # of each kind
_PREFIXES = {"r": "r", "d": "rd", "f": "f", "x": "fd", "h": "rs", "p": "p"}
_WORDS = (0, 1, 2, 7, 16, 31, 32, 63, 64, 96, 128, 255, 256, 1024, 8191, 65535, 1 << 20, 0xFFFFFF, 1 << 24, 0x80_0000)
_WORDS += (0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF, 0x8000490, 0x4000_0000)
_NUMBERS = (0, 1, 2, 4, 8, 15, 16, 31, 32, 48, 64, 128, 1024, 4080, 4096, 8192)
_LONG = ("%in", "%out", "%flags", "%scratch", "%load_map", "%store_map")


def _statements(text: str) -> list[str]:
    text = text.replace("{T1}", "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes")
    return [part.strip() for line in text.splitlines() if line for part in line.split(" | ")]


def kernel(seed: int) -> tuple[Pair, dict[str, Any]]:
    """A kernel, and the options of its launch."""
    choice = random.Random(seed)
    blackwell = choice.random() < 0.4
    tame = choice.random() < 0.6  # most operands mean something, so that the kernel comes farther
    statements = _statements(_ANY + (_BLACKWELL if blackwell else _HOPPER))

    def operand(letter: str, taken: set[str]) -> str:
        if letter in _PREFIXES:
            free = [name for i in range(_REGISTERS) if (name := f"%{_PREFIXES[letter]}{i}") not in taken]
            taken.add(name := choice.choice(free))
            return name
        if letter == "n":
            return str(choice.choice((16, 32, 128, 1024) if tame else _NUMBERS))
        if letter == "l":
            return f"L{choice.randrange(4)}"
        if letter == "m":
            return choice.choice(
                ("%s+8", "%s+16", "%s+8") if tame else ("%s", "%s+8", "%s+16", "%r0", "%s+4", "%s+8192")
            )
        if letter == "s":
            if tame:
                return f"%s+{choice.randrange(0, 4096, 128)}"
            return f"{choice.choice(('%s', '%s', '%s', '%r0', '%r1', '%r2'))}+{choice.choice(_NUMBERS)}"
        if letter == "g":
            if tame:
                return f"{choice.choice(('%out', '%flags', '%scratch', '%in'))}+{choice.randrange(0, 128, 16)}"
            return f"{choice.choice((*_LONG[:4], '%rd0'))}+{choice.choice(_NUMBERS)}"
        if letter == "t":
            return choice.choice(("%load_map", "%store_map") if tame else ("%load_map", "%store_map", "%rd0", "%in"))
        return f"%rd{choice.randrange(9)}+{choice.choice(_NUMBERS)}"

    lines = ["TABLE: .branchtargets L0, L1, L2, L3;"]
    for index in range(9):
        source = choice.choice((str(choice.choice(_WORDS)), "%t", "%l", "%s", "%s", "%c"))
        lines.append(f"mov.u32 %r{index}, {source};")
        if choice.random() < 0.3:
            lines.append(f"add.u32 %r{index}, %r{index}, {choice.choice(_WORDS)};")
        high = choice.choice(
            (0, 1, 0x7F01, 0x7F02, 0x7F03, 0x7E00, 0x7D00, 0x4000_0040, 0xFFFFFFFF, choice.getrandbits(32))
        )
        lines.append(f"mov.b64 %rd{index}, {{%r{choice.randrange(index + 1)}, {high}}};")
        if choice.random() < 0.4:
            lines.append(f"mov.b64 %rd{index}, {choice.choice(_LONG)};")
        lines.append(f"mov.f32 %f{index}, 0f{choice.getrandbits(32):08X};")
        lines.append(f"mov.u16 %rs{index}, {choice.choice((0, 1, 2, 3, 15, 0x8000, 0xFFFF))};")
        lines.append(
            f"setp.{choice.choice(('lt', 'ge', 'eq', 'ne'))}.u32 %p{index}, %t, {choice.choice((0, 1, 16, 32, 4096))};"
        )
    if tame:  # a descriptor, small coordinates, memory with values
        lines.append("mov.b64 %rd2, 0x1000080040;\nmov.u32 %r3, 1;\nmov.u32 %r4, 0x8000490;\nmov.u32 %r5, 128;")
        lines.append("mad.lo.u32 %r6, %t, 16, %s;\n@%p0 st.shared.v4.b32 [%r6], {%t, %t, %t, %t};")
    if tame or choice.random() < 0.7:
        lines.append(f"@%one mbarrier.init.shared::cta.b64 [%s+8], {choice.choice((1, 2, 32))};")
        lines.append("@%one mbarrier.init.shared::cta.b64 [%s+16], 1;")
        lines.append("fence.mbarrier_init.release.cluster;\nbar.sync 0;")
    length = choice.randrange(8, 40)
    for index in range(length):
        if index % (length // 4) == 0 and index // (length // 4) < 4:
            lines.append(f"L{index // (length // 4)}:")
        taken: set[str] = set()  # a statement must not write a register twice
        text = re.sub(r"\{(\w)\}", lambda found, taken=taken: operand(found[1], taken), choice.choice(statements))  # type: ignore[misc]
        text = text.replace("{{", "{").replace("}}", "}")
        rare = text.split()[0] in ("exit", "ret", "trap", "bra", "brx.idx")
        guarded = rare or choice.random() < 0.25
        guard = f"@{choice.choice(('', '!'))}%p{choice.randrange(9)} " if guarded else ""
        lines.append(f"{guard}{text};")
    block = choice.choice((1, 17, 32, 33, 64, 96, 128, 160, 256))
    cluster = choice.choice((1, 1, 2, 4))
    pair = Pair(
        "",
        f"seed {seed}",
        "\n".join(lines),
        block=block,
        grid=cluster * choice.choice((1, 1, 2, 3)),
        cluster=cluster,
        target="sm_100a" if blackwell else "sm_90a",
    )
    options = {
        "seed": seed,
        "resident": choice.choice((1, 2)),
        "shared": choice.choice((8192, 8192, 0, 16, 4096, 65536)),
        "checks": choice.random() < 0.9,
        "programmatic": choice.random() < 0.2,
        "review": choice.random() < 0.5,
        "record": choice.random() < 0.2,
        "strict_warpgroup": choice.random() < 0.2,
        "slots": choice.choice((512, 512, 512, 16, 0)),
        "max_instructions": 20_000,
    }
    return pair, options


def random_map(seed: int) -> bytes:
    """A tensor map whose fields nobody has checked."""
    choice = random.Random(seed)
    fields = bytearray(choice.getrandbits(8) for _ in range(128))
    fields[0:4] = (0x4D545543).to_bytes(4, "little")
    if choice.random() < 0.8:
        fields[4:8] = bytes(
            (choice.randrange(13), choice.randrange(1, 6), choice.choice((0, 32, 64, 128)), choice.randrange(2))
        )
        for start in (88, 108):  # box, element strides
            for index in range(5):
                value = choice.choice((0, 1, 2, 8, 16, 64, 256, 257)) if start == 88 else choice.choice((1, 1, 2, 8, 0))
                fields[start + 4 * index : start + 4 * index + 4] = value.to_bytes(4, "little")
        for index in range(5):
            fields[16 + 8 * index : 24 + 8 * index] = choice.choice((1, 8, 64, 1 << 31, 1 << 32)).to_bytes(8, "little")
        for index in range(4):
            fields[56 + 8 * index : 64 + 8 * index] = choice.choice((0, 16, 1 << 20, (1 << 40) - 16)).to_bytes(
                8, "little"
            )
        fields[8:16] = (0x7E00_0000_0000 + choice.randrange(0, 1 << 22, 16)).to_bytes(8, "little")
    return bytes(fields)
