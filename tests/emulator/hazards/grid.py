"""Global memory, dependent launches, cluster launch control."""

from __future__ import annotations

from .pair import BARRIER, EXPECT, LOAD, STORE, TENSOR_LOAD, Pair

BOTH = {"resident": 2}
SPIN = "AGAIN: {} %r0, [%flags]; setp.ne.u32 %p0, %r0, 1; @%p0 bra AGAIN;"
CANCEL = "clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 [%s+16], [%s];"
FILLED = "mad.lo.u32 %r1, %t, 4, %s;\nst.shared.u32 [%r1+128], 1;\nfence.proxy.async;\nbar.sync 0;"


def message(
    name: str, send: str, receive: str, *, faulty_send: str = "", faulty_receive: str = "", block: int = 32
) -> Pair:
    """CTA 0 writes a word and raises a flag; CTA 1 polls the flag and reads the word."""
    return Pair(
        "GRID_GLOBAL_RACE",
        name,
        f"""
        @%cta1 bra RECEIVER;
        @%one st.global.u32 [%flags+64], 7;
        {_either(send, faulty_send)}
        bra END;
        RECEIVER:
        {_either(receive, faulty_receive)}
        @%one ld.global.u32 %r2, [%flags+64];
        END:
        """,
        block=block,
        grid=2,
        options=BOTH,
    )


def _either(right: str, faulty: str) -> str:
    def lines(text: str, sign: str) -> str:
        return "\n".join(sign + line for line in text.split("\n"))

    return lines(right, "+ ") + "\n" + lines(faulty, "- ") if faulty else right


RELEASE, ACQUIRE = "@%one st.release.gpu.global.u32 [%flags], 1;", SPIN.format("ld.acquire.gpu.global.u32")
RELAXED, POLL = "@%one st.relaxed.gpu.global.u32 [%flags], 1;", SPIN.format("ld.relaxed.gpu.global.u32")
FENCE = "fence.acq_rel.gpu;\n"

PAIRS = (
    Pair(
        "GRID_READ_BEFORE_GRIDDEP_WAIT",
        "a load in the prologue of a dependent launch",
        """
        - ld.global.u32 %r0, [%in];
        griddepcontrol.wait;
        + ld.global.u32 %r0, [%in];
        """,
        options={"programmatic": True},
    ),
    Pair(
        "GRID_READ_BEFORE_GRIDDEP_WAIT",
        "the warp that issues a copy is not ordered after the one that waits",
        f"""{BARRIER}
        @%warp1 griddepcontrol.wait;
        + bar.sync 0;
        @%one {EXPECT} [%s], 128;
        @%one {LOAD} [%s+128], [%in], 128, [%s];
        wait [%s], 0;
        """,
        block=64,
        options={"programmatic": True},
    ),
    Pair(
        "GRID_READ_BEFORE_GRIDDEP_WAIT",
        "a tensor copy in the prologue; the map itself is a parameter",
        f"""{BARRIER}
        + griddepcontrol.wait;
        prefetch.tensormap [%load_map];
        @%one {EXPECT} [%s], 128;
        @%one {TENSOR_LOAD} [%s+128], [%load_map, {{0, 0}}], [%s];
        wait [%s], 0;
        - griddepcontrol.wait;
        """,
        options={"programmatic": True},
    ),
    Pair(
        "GRID_GLOBAL_OUT_OF_BOUNDS",
        "the word behind a buffer",
        "- ld.global.u32 %r0, [%in+4096];\n+ ld.global.u32 %r0, [%in+4092];",
    ),
    Pair("GRID_GLOBAL_MISALIGNED", "8 bytes at 4", "- ld.global.u64 %rd0, [%in+4];\n+ ld.global.u64 %rd0, [%in+8];"),
    Pair(
        "GRID_GLOBAL_UNINITIALISED_READ",
        "an atomic on an accumulator that nobody has cleared",
        """
        + @%one st.global.u32 [%scratch], 0;
        bar.warp.sync 0xffffffff;
        red.global.add.u32 [%scratch], 1;
        """,
    ),
    Pair(
        "GRID_GLOBAL_UNINITIALISED_READ",
        "a bulk copy of more than was written",
        f"""{BARRIER}
        mad.wide.u32 %rd0, %t, 4, %scratch;
        st.global.u32 [%rd0], %t;
        fence.proxy.async;
        bar.warp.sync 0xffffffff;
        - mov.u32 %r0, 256;
        + mov.u32 %r0, 128;
        @%one {EXPECT} [%s], %r0;
        @%one {LOAD} [%s+128], [%scratch], %r0, [%s];
        wait [%s], 0;
        """,
    ),
    Pair(
        "GRID_GLOBAL_READ_ONLY",
        "a store to an input",
        "- @%one st.global.u32 [%in], 1;\n+ @%one st.global.u32 [%out], 1;",
    ),
    Pair(
        "GRID_GLOBAL_RACE",
        "two CTAs store to one word",
        """
        - @%one st.global.u32 [%flags], %g;
        + @%one red.global.add.u32 [%flags], %g;
        """,
        grid=2,
        options=BOTH,
    ),
    Pair(
        "GRID_GLOBAL_RACE",
        "atomics whose scope is the CTA",
        """
        - @%one red.relaxed.cta.global.add.u32 [%flags], 1;
        + @%one red.relaxed.gpu.global.add.u32 [%flags], 1;
        """,
        grid=2,
        options=BOTH,
    ),
    Pair(
        "GRID_GLOBAL_RACE",
        "a plain store beside atomics",
        """
        - @%cta0 st.global.u32 [%flags], 0;
        + @%cta0 st.relaxed.gpu.global.u32 [%flags], 0;
        @%cta1 red.relaxed.gpu.global.add.u32 [%flags], 1;
        """,
        grid=2,
        options=BOTH,
    ),
    message("a flag that is stored without a release", RELEASE, ACQUIRE, faulty_send=RELAXED),
    message("a flag that is loaded without an acquire", RELEASE, ACQUIRE, faulty_receive=POLL),
    message("a relaxed flag without the sender's fence", FENCE + RELAXED, ACQUIRE, faulty_send=RELAXED),
    message("a relaxed flag without the receiver's fence", RELEASE, f"{POLL}\n{FENCE}", faulty_receive=POLL),
    message(
        "fences of the scope of a CTA",
        FENCE + RELAXED,
        f"{POLL}\n{FENCE}",
        faulty_send="fence.acq_rel.cta;\n" + RELAXED,
    ),
    message("a release of the scope of a CTA", RELEASE, ACQUIRE, faulty_send=RELEASE.replace("gpu", "cta")),
    message("an acquire of the scope of a CTA", RELEASE, ACQUIRE, faulty_receive=ACQUIRE.replace("gpu", "cta")),
    message(
        "an atomic that raises the flag does not release",
        "@%one red.release.gpu.global.add.u32 [%flags], 1;",
        ACQUIRE,
        faulty_send="@%one red.relaxed.gpu.global.add.u32 [%flags], 1;",
    ),
    message(
        "the flag is raised before the fence",
        "membar.gl;\n@%one st.volatile.global.u32 [%flags], 1;",
        ACQUIRE,
        faulty_send="@%one st.volatile.global.u32 [%flags], 1;\nmembar.gl;",
    ),
    message(
        "one warp polls, and another one reads before they meet",
        RELEASE,
        f"@!%warp1 bra JOIN; {ACQUIRE} JOIN:\nbar.sync 0;",
        faulty_receive=f"@!%warp1 bra JOIN; {ACQUIRE} JOIN:",
        block=64,
    ),
    Pair(
        "GRID_GLOBAL_RACE",
        "a bulk reduction is published before it has been performed",
        f"""{FILLED}
        @%cta1 bra RECEIVER;
        @%one cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%flags+64], [%s+128], 64;
        @%one cp.async.bulk.commit_group;
        - @%one cp.async.bulk.wait_group.read 0;
        + @%one cp.async.bulk.wait_group 0;
        {RELEASE}
        bra END;
        RECEIVER:
        {ACQUIRE}
        @%one ld.global.u32 %r2, [%flags+64];
        END:
        """,
        grid=2,
        options=BOTH,
    ),
    Pair(
        "GRID_GLOBAL_RACE",
        "a bulk store where the other CTA's bulk reductions add",
        f"""{FILLED}
        - @%cta0 bra PLAIN;
        @%one cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%flags+64], [%s+128], 64;
        - bra JOIN;
        - PLAIN:
        - @%one {STORE} [%flags+64], [%s+128], 64;
        - JOIN:
        @%one cp.async.bulk.commit_group;
        @%one cp.async.bulk.wait_group 0;
        """,
        grid=2,
        options=BOTH,
    ),
    Pair(
        "GRID_CLC_AFTER_FAILURE",
        "another request after one that failed",
        f"""{BARRIER}
        @%one {EXPECT} [%s], 16;
        @%one {CANCEL}
        wait [%s], 0;
        + @%one {EXPECT} [%s], 16;
        - @%one {EXPECT} [%s], 16;
        - @%one {CANCEL}
        - wait [%s], 1;
        + @%one mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%s], 16;
        """,
        target="sm_100a",
    ),
)
