"""Every hazard of tensor memory: one change to a right kernel makes the emulator name it, the kernel itself is clean.

The kernel is attention without a softmax, twice over one S: S = A B, P = bf16(S), O += P V. Four warps convert, a fifth
has a thread that issues. Each statement that a test changes has a name, in brackets at the start of its line.
"""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator.tcgen05_kernels import HEAD, SWIZZLES, Image, copy_to_shared, descriptor_of, instruction_descriptor

from cupyfa.emulator.device import EmulatedDevice
from cupyfa.emulator.policies import POLICIES
from cupyfa.emulator.report import Run

N = 64  # columns of S and O, and the depth of both products
ROUNDS = 2
A, B, V, SLOT = 1024, 1024 + 16384, 1024 + 16384 + 8192, 40960
P_COLUMN, O_COLUMN = 64, 128
QK = instruction_descriptor("bf16", "bf16", "f32", 128, N)
FIELDS = 1 << 16 | (1024 >> 4) << 32 | 1 << 46 | SWIZZLES[128] << 61
PV = instruction_descriptor("bf16", "bf16", "f32", 128, N, b_mn=1)


def listing(first: int, count: int, name: str = "s") -> str:
    return "{" + ", ".join(f"%{name}{i}" for i in range(first, first + count)) + "}"


def wait(barrier: str, parity: int, name: str) -> str:
    loop = name.replace("-", "_")
    return f"""
{loop}:
[{name}] mbarrier.try_wait.parity.shared::cta.b64 %p, [{barrier}], {parity};
[{name}] @!%p bra {loop};"""


def products(kind: str, source: str, b: str, step: int, idesc: int, enable: int, label: str) -> str:
    lines = []
    for i in range(N // 16):
        lines.append(f"add.u64 %db, {b}, {step * i >> 4};")
        operand = f"[%tmem+{P_COLUMN + 8 * i}]"
        if source:
            lines.append(f"add.u64 %da, {source}, {2 * i};")
            operand = "%da"
        lines.append(f"setp.ne.u32 %enable, {enable or i}, 0;")
        lines.append(f"[{label}] tcgen05.mma.cta_group::1.kind::f16 [{kind}], {operand}, %db, {idesc}, %enable;")
    return "\n".join(lines)


def commit(barrier: str, name: str) -> str:
    return f"[{name}] tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{barrier}];"


def issuer() -> str:
    lines = [
        descriptor_of(register, offset, FIELDS) for register, offset in (("%abase", A), ("%bbase", B), ("%vbase", V))
    ]
    for i in range(ROUNDS):
        lines.append(products("%tmem", "%abase", "%bbase", 32, QK, 0, f"qk-{i}"))
        lines.append(commit("%s_full", f"commit-s-{i}"))
        lines.append(wait("%p_full", i % 2, f"wait-p-{i}"))
        lines.append(f"[after-p-{i}] tcgen05.fence::after_thread_sync;")
        lines.append(products("%o", "", "%vbase", 2048, PV, i, f"pv-{i}"))
    lines.append(commit("%o_full", "commit-o"))
    return "\n".join(lines)


def convert() -> str:
    lines = []
    for i in range(ROUNDS):
        lines.append(wait("%s_full", i % 2, f"wait-s-{i}"))
        lines.append(f"[after-s-{i}] tcgen05.fence::after_thread_sync;")
        lines.append(f"[load-s-{i}] tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {listing(0, N)}, [%lane];")
        lines.append(f"[wait-ld-{i}] tcgen05.wait::ld.sync.aligned;")
        lines += [f"cvt.rn.bf16x2.f32 %q{j}, %s{2 * j + 1}, %s{2 * j};" for j in range(N // 2)]
        target = f"[%lane+{P_COLUMN}]"
        lines.append(f"[store-p-{i}] tcgen05.st.sync.aligned.32x32b.x{N // 2}.b32 {target}, {listing(0, N // 2, 'q')};")
        lines.append(f"[wait-st-{i}] tcgen05.wait::st.sync.aligned;")
        lines.append(f"[before-p-{i}] tcgen05.fence::before_thread_sync;")
        lines.append(f"[arrive-p-{i}] mbarrier.arrive.shared::cta.b64 _, [%p_full];")
    return "\n".join(lines)


KERNEL = f"""{HEAD}
.entry k(.param .u64 pa, .param .u64 pb, .param .u64 pv, .param .u64 pout)
{{
.reg .b32 %tmem, %o, %tid, %base, %slot, %lane, %s_full, %p_full, %o_full, %x<8>, %s<{N}>, %q<{N // 2}>;
.reg .b64 %a, %b, %v, %out, %t<4>, %abase, %bbase, %vbase, %da, %db;
.reg .pred %p, %enable, %first;
ld.param.u64 %a, [pa];
ld.param.u64 %b, [pb];
ld.param.u64 %v, [pv];
ld.param.u64 %out, [pout];
mov.u32 %tid, %tid.x;
mov.u32 %base, smem;
add.u32 %slot, %base, {SLOT};
add.u32 %s_full, %slot, 8;
add.u32 %p_full, %slot, 16;
add.u32 %o_full, %slot, 24;
setp.eq.u32 %first, %tid, 0;
@%first mbarrier.init.shared::cta.b64 [%s_full], 1;
@%first mbarrier.init.shared::cta.b64 [%p_full], 128;
@%first mbarrier.init.shared::cta.b64 [%o_full], 1;
@%first fence.mbarrier_init.release.cluster;
setp.lt.u32 %p, %tid, 32;
@!%p bra allocated;
[alloc] tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 256;
[relinquish] tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
allocated:
{copy_to_shared("a", A, 16384, cta="0", threads=160)}
{copy_to_shared("b", B, 8192, cta="0", threads=160)}
{copy_to_shared("v", V, 8192, cta="0", threads=160)}
[proxy] fence.proxy.async.shared::cta;
bar.sync 0;
ld.shared.b32 %tmem, [%slot];
add.u32 %o, %tmem, {O_COLUMN};
and.b32 %lane, %tid, 96;
shl.b32 %lane, %lane, 16;
add.u32 %lane, %lane, %tmem;
setp.ge.u32 %p, %tid, 128;
@!%p bra convert;
setp.eq.u32 %p, %tid, 128;
@!%p bra done;
{issuer()}
bra done;
convert:
{convert()}
{wait("%o_full", 0, "wait-o")}
[after-o] tcgen05.fence::after_thread_sync;
[load-o] tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {listing(0, N)}, [%lane+{O_COLUMN}];
[wait-ld-o] tcgen05.wait::ld.sync.aligned;
mul.wide.u32 %t0, %tid, 4;
add.u64 %out, %out, %t0;
{chr(10).join(f"st.global.b32 [%out+{512 * i}], %s{i};" for i in range(N))}
done:
[sync] bar.sync 0;
setp.lt.u32 %p, %tid, 32;
@!%p bra end;
[dealloc] tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 256;
end:
ret;
}}
"""


def changed(*changes: str) -> str:
    """The kernel with statements dropped (``-name``), replaced (``name=text``), moved behind or put in front of others.

    ``one>other`` moves the statement ``one`` behind ``other``; ``name+text`` puts a text in front of a statement.
    """
    lines = KERNEL.split("\n")
    for change in changes:
        kind, name, text = re.fullmatch(r"(-?)([\w-]+)(?:[=>+].*)?", change, re.S), "", ""
        assert kind, change
        name, text = kind[2], change[len(kind[1] + kind[2]) :]
        where = [i for i, line in enumerate(lines) if line.startswith(f"[{name}]")]
        assert where, name
        if text.startswith("="):
            lines[where[0]] = text[1:]
        elif text.startswith("+"):
            lines.insert(where[0], text[1:])
        elif text.startswith(">"):
            moved = [lines.pop(i) for i in reversed(where)][::-1]
            behind = max(i for i, line in enumerate(lines) if line.startswith(f"[{text[1:]}]"))
            lines[behind + 1 : behind + 1] = moved
        else:
            lines = [line for i, line in enumerate(lines) if i not in where]
    return re.sub(r"^\[[\w-]+\] ", "", "\n".join(lines), flags=re.M)


def run(text: str, **options: Any) -> tuple[np.ndarray, np.ndarray, Run]:
    """Run a variant of the kernel: O, what it should be, and the report."""
    rng = np.random.default_rng(1)
    a, b, v = (rng.integers(-2, 3, (rows, N)).astype(ml_dtypes.bfloat16) for rows in (128, N, N))
    s = (a.astype(np.float64) @ b.astype(np.float64).T).astype(ml_dtypes.bfloat16)
    wanted = ROUNDS * s.astype(np.float64) @ v.astype(np.float64)
    device = EmulatedDevice("sm_100a")
    images = [Image.of(a, False, 128).data, Image.of(b, False, 128).data, Image.of(v.T.copy(), True, 128).data]
    out = np.zeros((N, 128), np.float32)
    params = [device.register(array) for array in (*images, out)]
    report = device.load(text).launch(grid=1, block=160, shared=SLOT + 64, params=params, **options)
    return out.T, wanted, report


@pytest.mark.parametrize("policy", POLICIES)
def test_the_kernel_is_right(policy: str) -> None:
    out, wanted, report = run(changed(), policy=policy, seed=1)
    np.testing.assert_array_equal(out, wanted)
    assert report.findings == (), report


LOAD = "tcgen05.ld.sync.aligned.32x32b"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"
OTHER = "tcgen05.dealloc.cta_group::1.sync.aligned.b32"
STORE_OF_S = "tcgen05.st.sync.aligned.32x32b.x1.b32"

# One change, or a few that belong together, and the hazards that it makes under every schedule; of a frozenset any one:
# which access comes first is then the schedule's choice.
FAULTS: dict[str, tuple[tuple[str, ...], set[str] | frozenset[str]]] = {
    # orders between the issuer and the warps
    "no fence::after before a load": (("-after-s-0",), {"TMEM_MISSING_FENCE"}),
    "no fence::after before the second load": (("-after-s-1",), {"TMEM_MISSING_FENCE"}),
    "no fence::before after a store": (("-before-p-0",), {"TMEM_MISSING_FENCE"}),
    "fence::before too early": (("before-p-0>wait-ld-0",), {"TMEM_MISSING_FENCE"}),
    "no fence::after before a product": (("-after-p-0",), {"TMEM_MISSING_FENCE"}),
    "load of S without its wait": (("-wait-s-0",), {"TMEM_READ_OF_IN_FLIGHT_MMA"}),
    "load of O without its wait": (("-wait-o",), {"TMEM_OVERWRITE_WHILE_READ", "TMEM_DEALLOC_IN_USE"}),
    "commit between the products": (
        ("commit-s-1=", "qk-1+" + commit("%s_full", "x")[4:]),
        frozenset({"TMEM_OVERWRITE_WHILE_READ", "TMEM_READ_OF_IN_FLIGHT_MMA"}),
    ),
    "product without its wait": (
        ("-wait-p-1",),
        frozenset({"TMEM_OVERWRITE_WHILE_READ", "TMEM_READ_OF_UNFINISHED_STORE"}),
    ),
    # completion of loads and stores
    "no wait::st": (("-wait-st-0",), {"TMEM_READ_OF_UNFINISHED_STORE"}),
    "wait::st after the arrival": (("wait-st-0>arrive-p-0",), {"TMEM_READ_OF_UNFINISHED_STORE"}),
    "no wait::ld": (("-wait-ld-o",), {"TMEM_REGISTER_READ_BEFORE_WAIT", "TMEM_DEALLOC_IN_USE"}),
    "load after the arrival": (
        ("load-s-0>arrive-p-0", "wait-ld-0>arrive-p-0", "wait-ld-0>load-s-0"),
        {"TMEM_OVERWRITE_WHILE_READ"},
    ),
    "load of an own store without wait::st": (
        (f"wait-st-0+{LOAD}.x1.b32 {{%x0}}, [%lane+{P_COLUMN}];\ntcgen05.wait::ld.sync.aligned;",),
        {"TMEM_READ_OF_UNFINISHED_STORE"},
    ),
    "store over an own load without wait::ld": (
        (f"wait-ld-0+{STORE_OF_S} [%lane], {{%x0}};",),
        {"TMEM_OVERWRITE_WHILE_READ"},
    ),
    "store into what a product reads": (
        (f"load-o+{STORE_OF_S} [%lane+{P_COLUMN}], {{%x0}};", "wait-o>load-o"),
        {"TMEM_OVERWRITE_WHILE_READ"},
    ),
    # allocation
    "columns that are no power of two": (("alloc=" + f"{ALLOC} [%slot], 192;",), {"TMEM_BAD_COLUMNS"}),
    "deallocation of another number": ((f"dealloc={OTHER} %tmem, 128;",), {"TMEM_NOT_ALLOCATED", "TMEM_LEAK"}),
    "too few columns": ((f"alloc={ALLOC} [%slot], 128;",), {"TMEM_NOT_ALLOCATED", "TMEM_LEAK"}),
    "growing allocations": (
        (
            f"alloc={ALLOC} [%slot+32], 32;\n{ALLOC} [%slot], 256;",
            f"dealloc+ld.shared.b32 %x0, [%slot+32];\n{OTHER} %x0, 32;",
        ),
        {"TMEM_ALLOC_GROWS"},
    ),
    "allocation after the permit is given up": (("alloc>relinquish",), {"TMEM_ALLOC_AFTER_RELINQUISH"}),
    "no deallocation": (("-dealloc",), {"TMEM_LEAK"}),
    "deallocation before others load": (("-sync",), frozenset({"TMEM_NOT_ALLOCATED", "TMEM_DEALLOC_IN_USE"})),
    "mixed groups": (
        ("relinquish=tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;",),
        {"TMEM_MIXED_CTA_GROUP"},
    ),
    # places
    "lanes of another warp": ((f"load-o={LOAD}.x{N}.b32 {listing(0, N)}, [%o];",), {"TMEM_LANE_VIOLATION"}),
    "columns outside": ((f"load-o={LOAD}.x{N}.b32 {listing(0, N)}, [%lane+224];",), {"TMEM_NOT_ALLOCATED"}),
    "cells that nobody wrote": (
        (f"load-o={LOAD}.x{N}.b32 {listing(0, N)}, [%lane+192];",),
        {"TMEM_UNINITIALISED_READ"},
    ),
    "accumulation onto nothing": (
        (f"qk-0=tcgen05.mma.cta_group::1.kind::f16 [%tmem], %da, %db, {QK}, 1;",),
        {"TMEM_UNINITIALISED_READ"},
    ),
    # descriptors and shared memory
    "M of 96": (
        (f"qk-0=tcgen05.mma.cta_group::1.kind::f16 [%tmem], %da, %db, {QK - (2 << 24)}, 0;",),
        {"TMEM_BAD_DESCRIPTOR"},
    ),
    "Hopper's matrix descriptor": (
        ("qk-0+and.b64 %da, %da, 0x3fffffffffff;",),
        {"TMEM_BAD_DESCRIPTOR"},
    ),
    "no proxy fence": (("-proxy",), {"SHARED_MISSING_PROXY_FENCE"}),
    "operand overwritten while it is read": (
        (f"wait-s-0+st.shared.b32 [%base+{A}], %x0;",),
        frozenset({"SHARED_WRITE_TO_BUFFER_BEING_READ", "SHARED_READ_NOT_ORDERED_AFTER_WRITE"}),
    ),
}


#: What this file tests, for test_hazards.py.
HAZARDS = {hazard for _, wanted in FAULTS.values() for hazard in wanted if hazard.startswith("TMEM")}
HAZARDS |= {"TMEM_CROSS_ACCUMULATOR_ORDER"}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str) -> None:
    changes, wanted = FAULTS[name]
    text = changed(*changes)
    for policy in POLICIES:
        report = run(text, policy=policy, seed=2, max_instructions=100_000)[2]
        found = set(report.hazards)
        assert wanted & found if isinstance(wanted, frozenset) else wanted <= found, report


def test_a_missing_wait_leaves_no_number_in_the_registers() -> None:
    assert np.isnan(run(changed("-wait-ld-o"))[0]).all()


def test_lenient_runs_compute_with_what_the_scoreboard_gives() -> None:
    text = changed("-wait-ld-0", "-wait-ld-1", "-wait-ld-o", "-after-s-0", "-before-p-1")
    out, wanted, report = run(text, lenient_tcgen05=True)
    np.testing.assert_array_equal(out, wanted)
    assert {(f.hazard, f.severity) for f in report.findings} == {
        ("TMEM_REGISTER_READ_BEFORE_WAIT", "information"),
        ("TMEM_MISSING_FENCE", "information"),
    }


def test_order_across_accumulators_is_noted_once() -> None:
    # P lies in S: the second S overwrites what the first product with V may still read.
    text = changed().replace(f"[%lane+{P_COLUMN}]", "[%lane]")
    for i in range(N // 16):
        text = text.replace(f"[%tmem+{P_COLUMN + 8 * i}]", f"[%tmem+{8 * i}]")
    out, wanted, report = run(text, policy="lazy")
    np.testing.assert_array_equal(out, wanted)
    assert [(f.hazard, f.severity) for f in report.findings] == [("TMEM_CROSS_ACCUMULATOR_ORDER", "information")]


def test_unsupported_formats_are_named() -> None:
    e2m3 = QK & ~0x1F80 | 3 << 7
    text = changed(f"qk-0=tcgen05.mma.cta_group::1.kind::f8f6f4 [%tmem], %da, %db, {e2m3}, 0;")
    report = run(text)[2]
    assert report.verdict == "incomplete"
    assert "E2M3" in report.findings[0].detail
