"""Warpgroup products: registers, descriptors, groups."""

from __future__ import annotations

from .pair import Pair

#: 2048 bytes of zeros, and in %rd0 a descriptor of them: no swizzle, leading offset 128, stride offset 256.
OPERAND = """
mad.lo.u32 %r1, %t, 16, %s;
st.shared.v4.u32 [%r1], {0, 0, 0, 0};
and.b32 %r0, %s, 0x3ffff;
shr.u32 %r0, %r0, 4;
or.b32 %r0, %r0, 0x80000;
mov.b64 %rd0, {%r0, 16};
"""
READY = OPERAND + "fence.proxy.async;\nbar.sync 0;"
FENCE, COMMIT, WAIT = (
    f"wgmma.{word};" for word in ("fence.sync.aligned", "commit_group.sync.aligned", "wait_group.sync.aligned 0")
)
_PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
SS = f"{_PRODUCT} {{%f0, %f1, %f2, %f3}}, %rd0, %rd0, 0, 1, 1, 0, 0;"
ADD = f"{_PRODUCT} {{%f0, %f1, %f2, %f3}}, %rd0, %rd0, 1, 1, 1, 0, 0;"
RS = f"{_PRODUCT} {{%f0, %f1, %f2, %f3}}, {{%r4, %r5, %r6, %r7}}, %rd0, 0, 1, 1, 0;"
A_REGISTERS = "\n".join(f"mov.u32 %r{i}, 0;" for i in range(4, 8))


def pair(hazard: str, fault: str, body: str) -> Pair:
    return Pair(hazard, fault, body, block=128)


PAIRS = (
    pair(
        "WGMMA_REGISTER_READ_IN_FLIGHT",
        "an accumulator is read before the wait",
        f"{READY}\n{FENCE}\n{SS}\n{COMMIT}\n+ {WAIT}\nadd.f32 %f8, %f0, %f0;\n- {WAIT}",
    ),
    pair(
        "WGMMA_REGISTER_READ_IN_FLIGHT",
        "the wait leaves the group in flight that is read",
        f"""{READY}
        {FENCE}
        {SS}
        {COMMIT}
        {SS.replace("%f0, %f1, %f2, %f3", "%f4, %f5, %f6, %f7")}
        {COMMIT}
        wgmma.wait_group.sync.aligned 1;
        - add.f32 %f8, %f4, %f4;
        + add.f32 %f8, %f0, %f0;
        {WAIT}
        """,
    ),
    pair(
        "WGMMA_REGISTER_WRITE_IN_FLIGHT",
        "an accumulator is overwritten before the wait",
        f"{READY}\n{FENCE}\n{SS}\n{COMMIT}\n+ {WAIT}\nmov.f32 %f0, 0f00000000;\n- {WAIT}",
    ),
    pair(
        "WGMMA_REGISTER_WRITE_IN_FLIGHT",
        "the A operand in registers is overwritten before the wait",
        f"{READY}\n{A_REGISTERS}\n{FENCE}\n{RS}\n{COMMIT}\n+ {WAIT}\nmov.u32 %r4, 1;\n- {WAIT}",
    ),
    pair("WGMMA_MISSING_FENCE", "none before the first product", f"{READY}\n+ {FENCE}\n{SS}\n{COMMIT}\n{WAIT}"),
    pair(
        "WGMMA_MISSING_FENCE",
        "accumulators are written after the fence",
        f"""{READY}
        - {FENCE}
        mov.f32 %f0, 0f00000000;
        mov.f32 %f1, 0f00000000;
        mov.f32 %f2, 0f00000000;
        mov.f32 %f3, 0f00000000;
        + {FENCE}
        {ADD}
        {ADD}
        {COMMIT}
        {WAIT}
        """,
    ),
    pair(
        "WGMMA_MISSING_FENCE",
        "A registers are written after the fence",
        f"{READY}\n- {FENCE}\n{A_REGISTERS}\n+ {FENCE}\n{RS}\n{COMMIT}\n{WAIT}",
    ),
    pair(
        "WGMMA_BAD_DESCRIPTOR",
        "the operand reaches outside the CTA's memory",
        f"{READY}\n{FENCE}\n- or.b64 %rd0, %rd0, 0x3f0000000000;\n{SS}\n{COMMIT}\n{WAIT}",
    ),
    pair(
        "WGMMA_UNCOMMITTED_AT_EXIT",
        "a product without a commit",
        f"{READY}\n{FENCE}\n{SS}\n+ {COMMIT}\n+ {WAIT}",
    ),
    # Shared memory by the rules of the async proxy.
    pair(
        "SHARED_MISSING_PROXY_FENCE",
        "a product reads what ordinary stores wrote",
        f"{OPERAND}\n+ fence.proxy.async;\nbar.sync 0;\n{FENCE}\n{SS}\n{COMMIT}\n{WAIT}",
    ),
    pair(
        "SHARED_WRITE_TO_BUFFER_BEING_READ",
        "an operand is overwritten before the product has read it",
        f"""{READY}
        {FENCE}
        {SS}
        {COMMIT}
        + {WAIT}
        + bar.sync 0;
        st.shared.v4.u32 [%r1], {{0, 0, 0, 0}};
        - {WAIT}
        """,
    ),
)
