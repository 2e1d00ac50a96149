"""Shared memory: order, proxies, bounds."""

from __future__ import annotations

from .pair import BARRIER, EXPECT, LOAD, MEET, STORE, TENSOR_LOAD, Pair

ADD = "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32"
PEER = """
mov.u32 %r0, 1;
mapa.shared::cluster.u32 %r8, %s, %r0;
"""

PAIRS = (
    Pair(
        "SHARED_READ_OF_IN_FLIGHT_TMA_DATA",
        "nobody waits for a bulk copy",
        f"""{BARRIER}
        @%one {EXPECT} [%s], 128;
        @%one {LOAD} [%s+128], [%in], 128, [%s];
        + wait [%s], 0;
        ld.shared.u32 %r0, [%s+128];
        - wait [%s], 0;
        """,
    ),
    Pair(
        "SHARED_READ_OF_IN_FLIGHT_TMA_DATA",
        "one lane waits for a tensor copy, and another one relies on it",
        f"""{BARRIER}
        @%one {EXPECT} [%s], 128;
        @%one {TENSOR_LOAD} [%s+128], [%load_map, {{8, 4}}], [%s];
        @%lane0 wait [%s], 0;
        + bar.warp.sync 0xffffffff;
        @%lane1 ld.shared.u32 %r0, [%s+128];
        """,
    ),
    Pair(
        "SHARED_READ_OF_IN_FLIGHT_TMA_DATA",
        "the result of a bulk reduction is read before its barrier completes",
        f"""{BARRIER}
        mad.lo.u32 %r0, %t, 4, %s;
        st.shared.u32 [%r0+128], %t;
        st.shared.u32 [%r0+256], %t;
        fence.proxy.async;
        bar.sync 0;
        @%one {EXPECT} [%s], 128;
        @%one {ADD} [%s+128], [%s+256], 128, [%s];
        + wait [%s], 0;
        ld.shared.u32 %r0, [%s+128];
        - wait [%s], 0;
        """,
    ),
    Pair(
        "SHARED_READ_NOT_ORDERED_AFTER_WRITE",
        "a lane reads what another lane has just written",
        """
        @%lane0 st.shared.u32 [%s], %t;
        + bar.warp.sync 0xffffffff;
        ld.shared.u32 %r0, [%s];
        """,
    ),
    Pair(
        "SHARED_READ_NOT_ORDERED_AFTER_WRITE",
        "bar.arrive does not order the arriving warp's own reads",
        """
        @%lane0 st.shared.u32 [%s], 1;
        + bar.sync 1, 32;
        - bar.arrive 1, 32;
        @%lane1 ld.shared.u32 %r0, [%s];
        """,
    ),
    Pair(
        "SHARED_READ_NOT_ORDERED_AFTER_WRITE",
        "cp.async data is read before the wait for its group",
        """
        @%one st.shared.u32 [%s], 1;
        @%one cp.async.ca.shared.global [%s], [%in], 16;
        cp.async.commit_group;
        + cp.async.wait_group 0;
        - cp.async.wait_group 1;
        @%one ld.shared.u32 %r0, [%s];
        cp.async.wait_all;
        """,
    ),
    Pair(
        "SHARED_READ_NOT_ORDERED_AFTER_WRITE",
        "a relaxed load does not acquire what the flag's writer published",
        """
        mov.u32 %r1, 0;
        @%lane0 st.shared.u32 [%s], 0;
        bar.warp.sync 0xffffffff;
        @%lane0 st.shared.u32 [%s+16], 7;
        @%lane0 st.release.cta.shared.u32 [%s], 1;
        - @%lane1 ld.relaxed.cta.shared.u32 %r1, [%s];
        + @%lane1 ld.acquire.cta.shared.u32 %r1, [%s];
        @%lane1 ld.shared.u32 %r0, [%s+16];
        """,
    ),
    Pair(
        "SHARED_WRITE_NOT_ORDERED_AFTER_WRITE",
        "two lanes write the same word",
        """
        @%lane0 st.shared.u32 [%s], 1;
        + bar.warp.sync 0xffffffff;
        @%lane1 st.shared.u32 [%s], 2;
        """,
    ),
    Pair(
        "SHARED_WRITE_NOT_ORDERED_AFTER_WRITE",
        "a plain store beside atomics",
        """
        @%one st.shared.u32 [%s], 0;
        bar.warp.sync 0xffffffff;
        atom.shared.add.u32 %r0, [%s], 1;
        - @%lane1 st.shared.u32 [%s], 2;
        + @%lane1 atom.shared.add.u32 %r0, [%s], 2;
        """,
    ),
    Pair(
        "SHARED_WRITE_NOT_ORDERED_AFTER_WRITE",
        "a second bulk copy into a buffer whose first one is in flight",
        f"""{BARRIER}
        @%one {EXPECT} [%s], 64;
        @%one {LOAD} [%s+128], [%in], 64, [%s];
        + wait [%s], 0;
        - @%one {EXPECT} [%s+8], 64;
        + @%one {EXPECT} [%s], 64;
        - @%one {LOAD} [%s+128], [%in], 64, [%s+8];
        + @%one {LOAD} [%s+128], [%in], 64, [%s];
        - wait [%s], 0;
        - wait [%s+8], 0;
        + wait [%s], 1;
        """,
    ),
    Pair(
        "SHARED_WRITE_TO_BUFFER_BEING_READ",
        "a lane overwrites what another one may not have read",
        """
        @%lane1 st.shared.u32 [%s], 1;
        bar.warp.sync 0xffffffff;
        @%lane0 ld.shared.u32 %r0, [%s];
        + bar.warp.sync 0xffffffff;
        @%lane1 st.shared.u32 [%s], 2;
        """,
    ),
    Pair(
        "SHARED_WRITE_TO_BUFFER_BEING_READ",
        "a bulk copy refills a buffer that its consumer has not released",
        f"""{BARRIER}
        @%one {EXPECT} [%s], 128;
        @%one {LOAD} [%s+128], [%in], 128, [%s];
        wait [%s], 0;
        @%lane1 ld.shared.u32 %r0, [%s+128];
        + bar.warp.sync 0xffffffff;
        @%one {EXPECT} [%s], 128;
        @%one {LOAD} [%s+128], [%in], 128, [%s];
        wait [%s], 1;
        """,
    ),
    Pair(
        "SHARED_WRITE_TO_BUFFER_BEING_READ",
        "a buffer is written while a bulk store may still read it",
        f"""
        mad.lo.u32 %r0, %t, 4, %s;
        st.shared.u32 [%r0], %t;
        fence.proxy.async;
        bar.warp.sync 0xffffffff;
        @%one {STORE} [%out], [%s], 128;
        @%one cp.async.bulk.commit_group;
        + @%one cp.async.bulk.wait_group.read 0;
        @%one st.shared.u32 [%s], 9;
        - @%one cp.async.bulk.wait_group.read 0;
        """,
    ),
    Pair(
        "SHARED_MISSING_PROXY_FENCE",
        "a bulk store of data that ordinary stores wrote",
        f"""
        mad.lo.u32 %r0, %t, 4, %s;
        st.shared.u32 [%r0], %t;
        + fence.proxy.async;
        bar.warp.sync 0xffffffff;
        @%one {STORE} [%out], [%s], 128;
        @%one cp.async.bulk.commit_group;
        @%one cp.async.bulk.wait_group 0;
        """,
    ),
    Pair(
        "SHARED_READ_NOT_ORDERED_AFTER_WRITE",
        "each lane has fenced what it wrote for a bulk store, and none has heard of the others",
        f"""
        mad.lo.u32 %r0, %t, 4, %s;
        st.shared.u32 [%r0], %t;
        fence.proxy.async;
        + bar.warp.sync 0xffffffff;
        @%one {STORE} [%out], [%s], 128;
        @%one cp.async.bulk.commit_group;
        @%one cp.async.bulk.wait_group 0;
        """,
    ),
    Pair(
        "SHARED_MISSING_PROXY_FENCE",
        "the fence comes before the store that it should cover",
        """
        mad.lo.u32 %r0, %t, 4, %s;
        - fence.proxy.async.shared::cta;
        st.shared.u32 [%r0], %t;
        + fence.proxy.async.shared::cta;
        bar.sync 0;
        @%one cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%store_map, {0, 0}], [%s];
        @%one cp.async.bulk.commit_group;
        @%one cp.async.bulk.wait_group 0;
        """,
        block=64,
    ),
    Pair(
        "SHARED_MISSING_PROXY_FENCE",
        "review: a bulk copy refills what ordinary loads have read",
        f"""{BARRIER}
        @%one {EXPECT} [%s], 128;
        @%one {LOAD} [%s+128], [%in], 128, [%s];
        wait [%s], 0;
        ld.shared.u32 %r0, [%s+128];
        + fence.proxy.async;
        bar.warp.sync 0xffffffff;
        @%one {EXPECT} [%s], 128;
        @%one {LOAD} [%s+128], [%in], 128, [%s];
        wait [%s], 1;
        """,
        severity="review",
        options={"review": True},
    ),
    Pair(
        "SHARED_UNINITIALISED_READ",
        "nobody has written",
        """
        + @%one st.shared.u32 [%s+4], %t;
        bar.warp.sync 0xffffffff;
        ld.shared.u32 %r0, [%s+4];
        """,
    ),
    Pair(
        "SHARED_UNINITIALISED_READ",
        "a vector load reaches beyond what was written",
        """
        @%one st.shared.v2.u32 [%s], {%t, %t};
        bar.warp.sync 0xffffffff;
        - ld.shared.v4.u32 {%r0, %r1, %r2, %r3}, [%s];
        + ld.shared.v2.u32 {%r0, %r1}, [%s];
        """,
    ),
    Pair(
        "SHARED_UNINITIALISED_READ",
        "an atomic on a word without a value",
        """
        + @%one st.shared.u32 [%s], 0;
        bar.warp.sync 0xffffffff;
        red.shared.add.u32 [%s], 1;
        """,
    ),
    Pair(
        "SHARED_OUT_OF_BOUNDS",
        "a store behind the end",
        """
        - @%one st.shared.u32 [%s+8192], 1;
        + @%one st.shared.u32 [%s+8188], 1;
        """,
    ),
    Pair(
        "SHARED_OUT_OF_BOUNDS",
        "a bulk copy reaches over the end",
        f"""{BARRIER}
        @%one {EXPECT} [%s], 256;
        - @%one {LOAD} [%s+8064], [%in], 256, [%s];
        + @%one {LOAD} [%s+7936], [%in], 256, [%s];
        + wait [%s], 0;
        """,
    ),
    Pair(
        "SHARED_MISALIGNED",
        "a vector of 16 bytes at 8",
        """
        - @%one st.shared.v4.u32 [%s+8], {%t, %t, %t, %t};
        + @%one st.shared.v4.u32 [%s+16], {%t, %t, %t, %t};
        """,
    ),
    Pair(
        "SHARED_PEER_EXITED",
        "a CTA may end before its peer has written to it",
        f"""{MEET}{PEER}
        .reg .pred %sends;
        and.pred %sends, %one, %rank0;
        @%sends st.shared::cluster.u32 [%r8], 1;
        + barrier.cluster.arrive.aligned;
        + barrier.cluster.wait.aligned;
        """,
        grid=2,
        cluster=2,
    ),
    Pair(
        "SHARED_PEER_EXITED",
        "the last arrival at a peer's mbarrier, for which nobody waits",
        f"""{BARRIER}{MEET}{PEER}
        .reg .pred %sends;
        and.pred %sends, %one, %rank0;
        @%sends mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];
        + @%rank1 wait [%s], 0;
        """,
        grid=2,
        cluster=2,
    ),
)
