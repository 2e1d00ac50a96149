"""Bulk and tensor copies: exit, tensor maps."""

from __future__ import annotations

from .pair import BARRIER, EXPECT, LOAD, MEET, STORE, Pair

TENSOR = "cp.async.bulk.tensor"
FILLED = "mad.lo.u32 %r0, %t, 4, %s;\nst.shared.u32 [%r0+128], %t;\nfence.proxy.async;\nbar.sync 0;"

PAIRS = (
    Pair(
        "BULK_EXIT_WITH_STORE_UNWAITED",
        "nobody waits for a bulk store to have read",
        f"""{FILLED}
        @%one {STORE} [%out], [%s+128], 128;
        @%one cp.async.bulk.commit_group;
        + @%one cp.async.bulk.wait_group.read 0;
        """,
    ),
    Pair(
        "BULK_EXIT_WITH_STORE_UNWAITED",
        "a wait before the commit covers nothing",
        f"""{FILLED}
        @%one {STORE} [%out], [%s+128], 128;
        + @%one cp.async.bulk.commit_group;
        @%one cp.async.bulk.wait_group 0;
        - @%one cp.async.bulk.commit_group;
        """,
    ),
    Pair(
        "BULK_EXIT_WITH_STORE_UNWAITED",
        "another thread than the issuer waits",
        f"""{FILLED}
        @%one {TENSOR}.2d.global.shared::cta.bulk_group [%store_map, {{0, 4}}], [%s+128];
        @%one cp.async.bulk.commit_group;
        - @%lane1 cp.async.bulk.wait_group 0;
        + @%lane0 cp.async.bulk.wait_group 0;
        """,
    ),
    Pair(
        "BULK_EXIT_WITH_LOAD_IN_FLIGHT",
        "nobody waits for a bulk load",
        f"""{BARRIER}
        @%one {EXPECT} [%s], 128;
        @%one {LOAD} [%s+128], [%in], 128, [%s];
        + wait [%s], 0;
        """,
    ),
    Pair(
        "BULK_EXIT_WITH_LOAD_IN_FLIGHT",
        "the peer of a multicast does not wait for its part",
        f"""{BARRIER}{MEET}
        mov.u16 %rs0, 3;
        .reg .pred %sends;
        and.pred %sends, %one, %rank0;
        @%one {EXPECT} [%s], 128;
        @%sends {LOAD}.multicast::cluster [%s+128], [%in], 128, [%s], %rs0;
        {MEET}
        - @%rank0 wait [%s], 0;
        + wait [%s], 0;
        """,
        grid=2,
        cluster=2,
    ),
    Pair(
        "BULK_BAD_TENSOR_MAP",
        "two dimensions of a map that has one more",
        f"""{BARRIER}
        @%one {EXPECT} [%s], 128;
        - @%one {TENSOR}.3d.shared::cta.global.mbarrier::complete_tx::bytes [%s+128], [%load_map, {{0, 0, 0}}], [%s];
        + @%one {TENSOR}.2d.shared::cta.global.mbarrier::complete_tx::bytes [%s+128], [%load_map, {{0, 0}}], [%s];
        + wait [%s], 0;
        """,
    ),
    Pair(
        "BULK_BAD_TENSOR_MAP",
        "an address that holds no map",
        f"""{BARRIER}
        @%one {EXPECT} [%s], 128;
        - @%one {TENSOR}.2d.shared::cta.global.mbarrier::complete_tx::bytes [%s+128], [%in, {{0, 0}}], [%s];
        + @%one {TENSOR}.2d.shared::cta.global.mbarrier::complete_tx::bytes [%s+128], [%load_map, {{0, 0}}], [%s];
        + wait [%s], 0;
        """,
    ),
)
