"""Named barriers and the cluster barrier."""

from __future__ import annotations

from .pair import Pair

HALVES = "setp.lt.u32 %p0, %l, 16;"

PAIRS = (
    Pair(
        "BARRIER_COUNT_MISMATCH",
        "two users of a barrier expect different numbers of threads",
        """
        @%warp0 bar.arrive 1, 64;
        - @%warp1 bar.sync 1, 96;
        + @%warp1 bar.sync 1, 64;
        """,
        block=96,
    ),
    Pair("BARRIER_COUNT_MISMATCH", "no multiple of a warp", "- bar.sync 1, 48;\n+ bar.sync 1, 64;", block=64),
    Pair("BARRIER_COUNT_MISMATCH", "more threads than the CTA has", "- bar.sync 1, 96;\n+ bar.sync 1, 64;", block=64),
    Pair(
        "BARRIER_COUNT_MISMATCH",
        "more warps come than a generation expects",
        """
        - bar.arrive 1, 64;
        - bar.arrive 1, 96;
        + bar.sync 1, 96;
        """,
        block=96,
    ),
    Pair(
        "BARRIER_LEFTOVER",
        "an arrival that nobody uses",
        "@%warp0 bar.arrive 1, 64;\n+ @%warp1 bar.sync 1, 64;",
        block=64,
    ),
    Pair(
        "BARRIER_ALIGNED_BARRIER_MULTI_SITE",
        "the halves of a warp stand at different instructions",
        f"""{HALVES}
        @%p0 bra LOW;
        - bar.sync 1, 32;
        + barrier.sync 1, 32;
        bra END;
        LOW:
        - bar.sync 1, 32;
        + barrier.sync 1, 32;
        END:
        """,
    ),
    Pair(
        "BARRIER_ALIGNED_BARRIER_MULTI_SITE",
        "warps of a warpgroup execute different wgmma",
        """
        and.b32 %r0, %s, 0x3ffff;
        shr.u32 %r0, %r0, 4;
        or.b32 %r0, %r0, 0x80000;
        mov.b64 %rd0, {%r0, 16};
        mad.lo.u32 %r1, %t, 16, %s;
        st.shared.v4.u32 [%r1], {0, 0, 0, 0};
        fence.proxy.async;
        bar.sync 0;
        wgmma.fence.sync.aligned;
        - @%warp0 bra FIRST;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd0, %rd0, 0, 1, 1, 0, 0;
        - bra END;
        - FIRST:
        - wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd0, %rd0, 0, 1, 1, 0, 0;
        - END:
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        """,
        block=128,
    ),
    Pair("BARRIER_ID_RANGE", "a CTA has sixteen", "mov.u32 %r0, 15;\n- mov.u32 %r0, 16;\nbar.sync %r0;"),
    Pair(
        "BARRIER_CLUSTER_BARRIER_UNPAIRED",
        "a wait without an arrival",
        "+ barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;",
        grid=2,
        cluster=2,
    ),
    Pair(
        "BARRIER_CLUSTER_BARRIER_UNPAIRED",
        "two arrivals without a wait",
        """
        barrier.cluster.arrive.aligned;
        + barrier.cluster.wait.aligned;
        barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned;
        """,
        grid=2,
        cluster=2,
    ),
)
