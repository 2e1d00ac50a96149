"""Two kernels that differ in one fault.

The text of a pair is that of both kernels, as a difference: a line that begins with "-" belongs to the faulty kernel
only, one that begins with "+" to the right one. All have the same parameters and the same names for what they start
with (PRELUDE), so that a body holds only what matters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from emulator.ptx_text import DECLARATIONS, module
from numpy.typing import NDArray

from cupyfa.emulator import EmulatedDevice, EmulatedKernel, Run

#: Bytes of dynamic shared memory unless a pair says otherwise, and of each buffer.
SHARED, BUFFER = 8192, 4096
_HEAD = ".extern .shared .align 1024 .b8 smem[];"
_BUFFERS = ("in", "out", "flags", "scratch")
_MAPS = ("load_map", "store_map")
_PARAMETERS = ", ".join(
    [f".param .u64 {name}_" for name in _BUFFERS] + [f".param .align 64 .b8 {name}_[128]" for name in _MAPS]
)
PRELUDE = f"""
{DECLARATIONS}
.reg .b32 %t, %l, %w, %s, %c, %g;    // thread, lane, warp, shared memory, rank in the cluster, CTA
.reg .b64 %in, %out, %flags, %scratch, %load_map, %store_map;
.reg .pred %one, %lane0, %lane1, %warp0, %warp1, %rank0, %rank1, %cta0, %cta1;
mov.u32 %t, %tid.x;
and.b32 %l, %t, 31;
shr.u32 %w, %t, 5;
mov.u32 %s, smem;
mov.u32 %c, %cluster_ctarank;
mov.u32 %g, %ctaid.x;
setp.eq.u32 %one, %t, 0;
setp.eq.u32 %lane0, %l, 0;
setp.eq.u32 %lane1, %l, 1;
setp.eq.u32 %warp0, %w, 0;
setp.eq.u32 %warp1, %w, 1;
setp.eq.u32 %rank0, %c, 0;
setp.eq.u32 %rank1, %c, 1;
setp.eq.u32 %cta0, %g, 0;
setp.eq.u32 %cta1, %g, 1;
ld.param.u64 %in, [in_];
ld.param.u64 %out, [out_];
ld.param.u64 %flags, [flags_];
ld.param.u64 %scratch, [scratch_];
mov.b64 %load_map, load_map_;
cvta.param.u64 %load_map, %load_map;
mov.b64 %store_map, store_map_;
cvta.param.u64 %store_map, %store_map;
"""
#: Two mbarriers for one arrival each at the start of shared memory, ready for all and for the TMA.
BARRIER = """
@%one mbarrier.init.shared::cta.b64 [%s], 1;
@%one mbarrier.init.shared::cta.b64 [%s+8], 1;
@%one fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
#: The CTAs of a cluster meet.
MEET = """
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
TENSOR_LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _,"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _,"

_WAIT = re.compile(r"(?:@(!?)(%\w+) )?wait (.*);")


def _statement(line: str) -> str:
    """``[@p] wait [barrier], parity;`` stands for the loop of a try_wait."""
    found = _WAIT.fullmatch(line)
    if not found:
        return line
    negated, guard, operands = found.groups()
    skip = f"@{'' if negated else '!'}{guard} bra END; " if guard else ""
    loop = f"AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %came, {operands}; @!%came bra AGAIN;"
    return f"{{ .reg .pred %came; {skip}{loop} END: }}"


@cache
def text(body: str, faulty: bool, target: str) -> str:
    """The PTX of one of the two kernels."""
    lines = []
    for line in map(str.strip, body.splitlines()):
        if line[:1] in ("-", "+") and (line[0] == "-") != faulty:
            continue
        lines.append(_statement(line.lstrip("-+ ")))
    return module(f"{PRELUDE}{chr(10).join(lines)}\nret;", _PARAMETERS, _HEAD, target)


@dataclass(frozen=True)
class Pair:
    """A fault and its absence.

    ``faulty`` and ``right`` are launch options of one of the two kernels, beside ``options`` of both.
    """

    hazard: str
    fault: str
    body: str
    block: int = 32
    grid: int = 1
    cluster: int = 1
    severity: str = "error"
    target: str = "sm_90a"
    options: Mapping[str, Any] = field(default_factory=dict)
    faulty: Mapping[str, Any] = field(default_factory=dict)
    right: Mapping[str, Any] = field(default_factory=dict)
    patch: Callable[[NDArray[np.void]], None] | None = None  # changes the decoded records of the faulty kernel

    def __str__(self) -> str:
        return f"{self.hazard}: {self.fault}"

    def run(self, faulty: bool, *, maps: Sequence[bytes] = (), **options: Any) -> Run:
        """One of the two kernels under a policy.

        Buffers: in (an input), out, flags (for synchronisation, zero), scratch (without values).
        """
        device = EmulatedDevice(self.target, sms=4)
        arrays = {name: np.arange(BUFFER // 4, dtype=np.uint32) for name in ("in", "out")}
        addresses = {name: device.register(x, name=name, writable=name == "out") for name, x in arrays.items()}
        flags = device.register(np.zeros(64, np.uint32), name="flags", protocol=True)
        scratch = device.register(np.zeros(BUFFER // 4, np.uint32), name="scratch", initialised=False)
        maps = maps or [
            device.tensor_map(addresses[name], dtype="uint32", shape=(32, 32), strides=(128,), box=(8, 4), swizzle=0)
            for name in ("in", "out")
        ]
        given = {"shared": SHARED, "cluster": self.cluster, "grid": self.grid, "block": self.block}
        given |= {**self.options, **(self.faulty if faulty else self.right), **options}
        kernel = device.load(text(self.body, faulty, self.target)).kernel()
        if faulty and self.patch is not None:
            code = kernel.program.code.copy()
            self.patch(code)
            kernel = EmulatedKernel(device, replace(kernel.program, code=code))
        return kernel.launch(params=[addresses["in"], addresses["out"], flags, scratch, *maps], **given)
