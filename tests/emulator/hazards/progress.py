"""Kernels that do not end as they should."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cupyfa.emulator import isa

from .pair import ARRIVE, BARRIER, EXPECT, LOAD, Pair
from .wgmma import COMMIT, FENCE, READY, SS, WAIT


def unknown_type(code: NDArray[np.void]) -> None:
    """The decoder lets nothing through that the machine does not execute, so this is a record that it never writes."""
    code["type"][code["operation"] == isa.OPERATIONS["lg2"]] = isa.TYPES["b128"]


PAIRS = (
    Pair("PROGRESS_DEADLOCK", "an mbarrier that nobody signals", f"{BARRIER}\n+ @%one {ARRIVE} [%s];\nwait [%s], 0;"),
    Pair(
        "PROGRESS_DEADLOCK",
        "more bytes are expected than are copied",
        f"""{BARRIER}
        - @%one {EXPECT} [%s], 144;
        + @%one {EXPECT} [%s], 128;
        @%one {LOAD} [%s+128], [%in], 128, [%s];
        wait [%s], 0;
        """,
    ),
    Pair(
        "PROGRESS_DEADLOCK",
        "two warps wait for one another at different barriers",
        """
        - @%warp0 bar.sync 1, 64;
        - @%warp0 bar.sync 2, 64;
        - @%warp1 bar.sync 2, 64;
        - @%warp1 bar.sync 1, 64;
        + bar.sync 1, 64;
        + bar.sync 2, 64;
        """,
        block=64,
    ),
    Pair(
        "PROGRESS_DEADLOCK",
        "a warp that ends does not count as arrived where a barrier has a count",
        """
        @%warp0 bra END;
        - bar.sync 1, 64;
        + bar.sync 0;
        END:
        """,
        block=64,
    ),
    Pair(
        "PROGRESS_DEADLOCK",
        "three warps of a warpgroup wait for a product of four",
        f"{READY}\n- setp.lt.u32 %p0, %t, 96;\n- @!%p0 exit;\n{FENCE}\n{SS}\n{COMMIT}\n{WAIT}",
        block=128,
    ),
    Pair(
        "PROGRESS_TIMEOUT",
        "a flag is polled that nobody raises",
        """
        + @%cta0 st.release.gpu.global.u32 [%flags], 1;
        @%cta0 bra END;
        AGAIN:
        ld.acquire.gpu.global.u32 %r0, [%flags];
        setp.ne.u32 %p0, %r0, 1;
        @%p0 bra AGAIN;
        END:
        """,
        grid=2,
        options={"resident": 2, "max_instructions": 100_000},
    ),
    Pair(
        "PROGRESS_TIMEOUT",
        "a loop without an end, under the default limits",
        """
        AGAIN:
        add.u32 %r0, %r0, 1;
        setp.ne.u32 %p0, %r0, 100;
        - setp.eq.u32 %p0, %t, %t;
        @%p0 bra AGAIN;
        """,
    ),
    Pair("PROGRESS_TRAP", "trap", "- trap;"),
    Pair(
        "PROGRESS_SLOTS_EXHAUSTED",
        "more mbarriers than clock slots",
        f"{BARRIER}\n@%one {ARRIVE} [%s];\nwait [%s], 0;",
        faulty={"slots": 1},
    ),
    Pair(
        "DECODE_UNSUPPORTED",
        "a record of a type that the machine does not know for its operation",
        "lg2.approx.f32 %f0, %f0;\nmov.b32 %r0, %f0;\n@%one st.global.u32 [%out], %r0;",
        patch=unknown_type,
    ),
)
