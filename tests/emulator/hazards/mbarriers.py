"""mbarriers: initialisation, counts, phases."""

from __future__ import annotations

from .pair import ARRIVE, BARRIER, EXPECT, LOAD, Pair

INIT = "@%one mbarrier.init.shared::cta.b64 [%s],"
#: Lane 0 has seen the first phase of the barrier complete.
ONE_PHASE = f"{BARRIER}\n@%one {ARRIVE} [%s];\nwait [%s], 0;"
TWO_LANES = "setp.lt.u32 %p0, %t, 2;"

PAIRS = (
    Pair(
        "MBARRIER_NOT_INITIALISED",
        "an arrival before the initialisation",
        f"""
        - @%one {ARRIVE} [%s];
        {INIT} 1;
        + @%one {ARRIVE} [%s];
        """,
    ),
    Pair(
        "MBARRIER_NOT_INITIALISED",
        "an arrival after the invalidation",
        f"""
        {INIT} 1;
        + @%one {ARRIVE} [%s];
        @%one mbarrier.inval.shared.b64 [%s];
        - @%one {ARRIVE} [%s];
        """,
    ),
    Pair(
        "MBARRIER_INIT_NOT_VISIBLE",
        "another lane arrives at once",
        f"""
        {INIT} 1;
        + bar.warp.sync 0xffffffff;
        @%lane1 {ARRIVE} [%s];
        """,
    ),
    Pair(
        "MBARRIER_INIT_NOT_VISIBLE",
        "relaxed arrivals at the cluster barrier publish initialisations only after their fence",
        f"""
        {INIT} 1;
        + fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed.aligned;
        barrier.cluster.wait.aligned;
        xor.b32 %r0, %c, 1;
        mapa.shared::cluster.u32 %r8, %s, %r0;
        @%one mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];
        wait [%s], 0;
        """,
        grid=2,
        cluster=2,
    ),
    Pair(
        "MBARRIER_INIT_NOT_FENCED",
        "a bulk copy signals a barrier whose initialisation the async proxy need not see",
        f"""
        {INIT} 1;
        + fence.mbarrier_init.release.cluster;
        bar.sync 0;
        @%one {EXPECT} [%s], 128;
        @%one {LOAD} [%s+128], [%in], 128, [%s];
        wait [%s], 0;
        """,
    ),
    Pair(
        "MBARRIER_INIT_NOT_FENCED",
        "the fence is executed by a thread that initialised nothing",
        f"""
        {INIT} 1;
        - @!%one fence.mbarrier_init.release.cluster;
        + @%one fence.mbarrier_init.release.cluster;
        bar.sync 0;
        @%one {EXPECT} [%s], 128;
        @%one {LOAD} [%s+128], [%in], 128, [%s];
        wait [%s], 0;
        """,
        block=64,
    ),
    Pair(
        "MBARRIER_REINIT",
        "initialised twice",
        f"""
        {INIT} 1;
        + @%one mbarrier.inval.shared.b64 [%s];
        {INIT} 1;
        """,
    ),
    Pair(
        "MBARRIER_OVER_ARRIVAL",
        "two arrivals in one instruction at a barrier for one",
        f"""{BARRIER}
        - @%one {ARRIVE} [%s], 2;
        + @%one {ARRIVE} [%s], 1;
        """,
    ),
    Pair(
        "MBARRIER_TX_RANGE",
        "more bytes are expected than the counter holds",
        f"""{BARRIER}
        mov.u32 %r0, 1048575;
        - mov.u32 %r0, 1048576;
        @%one mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%s], %r0;
        @%one mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%s], %r0;
        """,
    ),
    Pair(
        "MBARRIER_TX_RANGE",
        "more bytes are expected, with the arrival",
        f"""{BARRIER}
        mov.u32 %r0, 1048575;
        - mov.u32 %r0, 1048576;
        @%one {EXPECT} [%s], %r0;
        @%one mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%s], %r0;
        """,
    ),
    # Two lanes issue in one instruction, so that no policy can complete the first copy before the second is issued.
    *[
        Pair(
            hazard,
            "fewer bytes are expected than two copies bring",
            f"""{BARRIER}{TWO_LANES}
            mad.lo.u32 %r0, %t, 128, %s;
            - @%one {EXPECT} [%s], 128;
            + @%one {EXPECT} [%s], 256;
            @%p0 {LOAD} [%r0+128], [%in], 128, [%s];
            wait [%s], 0;
            - @%one {EXPECT} [%s], 128;
            - wait [%s], 1;
            """,
        )
        for hazard in ("MBARRIER_FLIP_WITH_TMA_IN_FLIGHT", "MBARRIER_TMA_COMPLETES_IN_LATER_PHASE")
    ],
    Pair(
        "MBARRIER_PHASE_SKEW",
        "the waiter takes the phase after the next one, of the same parity, for the next one",
        f"""{ONE_PHASE}
        @%one {ARRIVE} [%s];
        - @%one {ARRIVE} [%s];
        - @%one {ARRIVE} [%s];
        wait [%s], 1;
        """,
    ),
    Pair(
        "MBARRIER_LEFT_MID_PHASE",
        "one of two arrivals has come at the end",
        f"""
        {INIT} 2;
        @%one {ARRIVE} [%s];
        + @%one {ARRIVE} [%s];
        """,
        severity="review",
    ),
    Pair(
        "MBARRIER_LEFT_MID_PHASE",
        "bytes are expected that never come",
        f"""{BARRIER}
        - @%one mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%s], 64;
        + @%one {ARRIVE} [%s];
        """,
        severity="review",
    ),
    Pair("MBARRIER_COUNT_RANGE", "a count of zero", f"- {INIT} 0;\n+ {INIT} 1;"),
    Pair("MBARRIER_COUNT_RANGE", "a count of 2^20", f"- {INIT} 1048576;\n+ {INIT} 1048575;"),
)
