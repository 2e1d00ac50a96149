"""Instructions that the lanes of a warp execute together, and the register pool."""

from __future__ import annotations

from .pair import Pair

HALVES = "setp.lt.u32 %p0, %l, 16;"
GROUPS = "setp.lt.u32 %p0, %t, 128;"

PAIRS = (
    Pair(
        "WARP_DIVERGENT_ALIGNED_OP",
        "half of a warp at an aligned barrier",
        f"{HALVES}\n- @%p0 bar.sync 0;\n+ bar.sync 0;",
    ),
    Pair(
        "WARP_DIVERGENT_ALIGNED_OP",
        "a full member mask in divergent code",
        f"""{HALVES}
        - @%p0 shfl.sync.bfly.b32 %r0, %l, 1, 31, 0xffffffff;
        + @%p0 shfl.sync.bfly.b32 %r0, %l, 1, 31, 0x0000ffff;
        """,
    ),
    Pair(
        "WARP_DIVERGENT_ALIGNED_OP",
        "a lane that the mask does not name",
        """
        - vote.sync.ballot.b32 %r0, %one, 0x0000ffff;
        + vote.sync.ballot.b32 %r0, %one, 0xffffffff;
        """,
    ),
    Pair(
        "WARP_DIVERGENT_ALIGNED_OP",
        "a warp barrier of other lanes; those that have ended are not waited for",
        f"""{HALVES}
        @!%p0 exit;
        - bar.warp.sync 0xffff0000;
        + bar.warp.sync 0xffffffff;
        """,
    ),
    Pair(
        "WARP_SHUFFLE_INACTIVE_LANE",
        "a lane reads one outside the member mask",
        f"""{HALVES}
        - @%p0 shfl.sync.bfly.b32 %r0, %l, 16, 31, 0x0000ffff;
        + @%p0 shfl.sync.bfly.b32 %r0, %l, 8, 31, 0x0000ffff;
        """,
    ),
    Pair(
        "WARP_NOT_UNIFORM",
        "the lanes name different barriers",
        """
        mov.u32 %r0, 1;
        - and.b32 %r0, %l, 1;
        barrier.sync %r0, 32;
        """,
    ),
    Pair(
        "REGISTERS_SETMAXNREG_BAD",
        "dec to more registers than the warp has",
        f"""{GROUPS}
        - setmaxnreg.dec.sync.aligned.u32 232;
        + setmaxnreg.dec.sync.aligned.u32 120;
        """,
        block=128,
        options={"launch_registers": 128},
    ),
    Pair(
        "REGISTERS_POOL_DEADLOCK",
        "two warpgroups ask for more than a third one has given back",
        f"""{GROUPS}
        @%p0 bra PRODUCER;
        setmaxnreg.inc.sync.aligned.u32 240;
        bra END;
        PRODUCER:
        - setmaxnreg.dec.sync.aligned.u32 40;
        + setmaxnreg.dec.sync.aligned.u32 24;
        END:
        """,
        block=384,
        options={"launch_registers": 168},
    ),
)
