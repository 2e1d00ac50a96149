"""mbarriers: what one thread sees of phases, pending counts and transaction bytes, by hand and by random programs.

The bits of a state are opaque in PTX: only what test_wait and pending_count say of it is a result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from . import data
from .case import Case, Module, Output
from .ptx import Kernel

PREFIX = "mbarrier"
Step = tuple[str, int]

BOTH = [("parity", 0), ("parity", 1)]
PROGRAMS: dict[str, list[Step]] = {
    "fresh": [("init", 3), *BOTH, ("init", 1), *BOTH],
    "counts": [
        *[("init", 7), ("arrive", 2), ("pending", 0), ("arrive", 1), ("pending", 0), *BOTH, ("state", 0)],
        *[("arrive", 4), ("pending", 0), *BOTH, ("state", 0), ("state", 2), ("arrive", 7), *BOTH, ("arrive", 6), *BOTH],
    ],
    "one_by_one": [("init", 2), *[("arrive", 1), *BOTH, ("state", 0), ("pending", 0)] * 6],
    "no_complete": [
        *[("init", 5), ("no_complete", 2), ("pending", 0), *BOTH, ("no_complete", 2), ("pending", 0), ("state", 0)],
        *[("arrive", 1), *BOTH, ("state", 0), ("state", 1), ("pending", 0)],
    ],
    "drop": [
        *[("init", 4), ("drop", 1), ("pending", 0), *BOTH, ("arrive", 3), *BOTH, ("arrive", 2), *BOTH, ("arrive", 1)],
        *[*BOTH, ("drop", 2), ("arrive", 1), *BOTH, ("arrive", 1), *BOTH, ("pending", 0), ("arrive", 1), *BOTH],
    ],
    "expect_first": [
        ("init", 1),
        ("expect", 64),
        *BOTH,
        ("arrive", 1),
        *BOTH,
        ("complete", 48),
        *BOTH,
        ("complete", 16),
        *BOTH,
    ],
    "complete_first": [("init", 1), ("complete", 64), *BOTH, ("expect", 64), *BOTH, ("arrive", 1), *BOTH],
    "expect_last": [("init", 1), ("complete", 32), ("arrive", 1), *BOTH, ("expect", 32), *BOTH, ("state", 0)],
    "bytes_early": [
        ("init", 2),
        ("complete", 32),
        ("arrive", 1),
        *BOTH,
        ("arrive_tx", 32),
        *BOTH,
        ("state", 0),
        ("pending", 0),
    ],
    "arrive_expect": [
        *[("init", 2), ("arrive_tx", 128), ("pending", 0), *BOTH, ("complete", 128), *BOTH, ("arrive_tx", 16), *BOTH],
        *[("complete", 16), *BOTH, ("state", 0), ("arrive", 2), *BOTH],
    ],
    "largest": [("init", 1), ("expect", (1 << 20) - 1), ("arrive", 1), *BOTH, ("complete", (1 << 20) - 1), *BOTH],
    "largest_count": [
        ("init", (1 << 20) - 1),
        ("arrive", (1 << 20) - 2),
        ("pending", 0),
        *BOTH,
        ("arrive", 1),
        ("pending", 0),
        *BOTH,
    ],
    "inval": [
        ("init", 1),
        ("arrive", 1),
        *BOTH,
        ("inval", 0),
        ("init", 2),
        *BOTH,
        ("arrive", 1),
        *BOTH,
        ("arrive", 1),
        *BOTH,
    ],
}


@dataclass
class Model:
    """Just enough of a barrier to write programs that PTX defines; no result comes from it."""

    expected: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    states: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = self.expected

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.expected

    def step(self, name: str, value: int) -> None:
        if name in ("arrive", "no_complete", "drop", "arrive_tx"):
            self.states.append(self.phase)
            if name == "arrive_tx":
                self.bytes, value = self.bytes + value, 1
            self.expected -= value if name == "drop" else 0
            self.pending -= value
        elif name in ("expect", "complete"):
            self.bytes += value if name == "expect" else -value
        self.settle()

    def allows(self, name: str, value: int) -> bool:
        if name == "state":
            return value < len(self.states) and self.states[-1 - value] >= self.phase - 1
        if name == "pending":
            return value < len(self.states)
        if name == "no_complete":
            return value < self.pending
        if name == "drop" and value >= self.expected:
            return False
        if name in ("arrive", "arrive_tx", "drop"):
            count, added = (1, value) if name == "arrive_tx" else (value, 0)
            # No more arrivals may be due while bytes came early: whether expect_tx ends a phase is a case by hand.
            return count <= self.pending and (count < self.pending or self.bytes + added >= 0)
        return True


def random_program(seed: int, length: int = 90) -> list[Step]:
    """Steps that the model allows; the phase comes to an end often enough since bytes that are due are sent."""
    random = iter(data.words(seed, 64 * length).tolist())
    model = Model(1 + next(random) % 6)
    steps: list[Step] = [("init", model.expected)]
    names = ("arrive", "arrive", "arrive_tx", "no_complete", "drop", "expect", "complete", "state", "pending")
    while len(steps) < length:
        name, value = names[next(random) % len(names)], 1 + next(random) % 3
        if name in ("arrive_tx", "expect", "complete"):
            value = 16 * (next(random) % 5)
        if model.bytes and (model.pending == 0 or next(random) % 3 == 0):
            name, value = ("complete", model.bytes) if model.bytes > 0 else ("expect", -model.bytes)
        elif name in ("state", "pending"):
            value -= 1
        elif name == "drop" and next(random) % 4:
            continue
        if model.allows(name, value):
            model.step(name, value)
            steps += [(name, value), *BOTH]
    return steps


TEXT = {
    "init": "mbarrier.init.shared.b64 [{bar}], {value};",
    "inval": "mbarrier.inval.shared.b64 [{bar}];",
    "arrive": "mbarrier.arrive.shared.b64 {state}, [{bar}], {value};",
    "no_complete": "mbarrier.arrive.noComplete.shared.b64 {state}, [{bar}], {value};",
    "drop": "mbarrier.arrive_drop.shared.b64 {state}, [{bar}], {value};",
    "arrive_tx": "mbarrier.arrive.expect_tx.shared.b64 {state}, [{bar}], {value};",
    "expect": "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{bar}], {value};",
    "complete": "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [{bar}], {value};",
}


def labels(steps: Iterable[Step]) -> tuple[str, ...]:
    """Of the results: the step's number and text."""
    return tuple(
        f"{i}: {name} {value}" for i, (name, value) in enumerate(steps) if name in ("parity", "state", "pending")
    )


def program_kernel(name: str, steps: list[Step]) -> str:
    """Thread 0 runs it. "state n" and "pending n" ask about the n-th last state."""
    kernel = Kernel(name, "out:ptr", static=".shared .align 8 .b64 barrier;")
    bar, first, end = kernel.set("r", "mov.u32 $, barrier"), kernel.first_thread(), kernel.label()
    kernel(f"@!{first} bra {end};")
    p, states, slot = kernel.new("p"), [], 0
    for step, value in steps:
        if step in TEXT:
            state = kernel.new("d") if "{state}" in TEXT[step] else ""
            states += [state] if state else []
            kernel(TEXT[step].format(bar=bar, value=value, state=state))
            continue
        if step == "parity":
            kernel(f"mbarrier.test_wait.parity.shared.b64 {p}, [{bar}], {value};")
            result = kernel.set("r", f"selp.b32 $, 1, 0, {p}")
        elif step == "state":
            kernel(f"mbarrier.test_wait.shared.b64 {p}, [{bar}], {states[-1 - value]};")
            result = kernel.set("r", f"selp.b32 $, 1, 0, {p}")
        else:
            result = kernel.set("r", f"mbarrier.pending_count.b64 $, {states[-1 - value]}")
        kernel(f"st.global.b32 [%out+{4 * slot}], {result};")
        slot += 1
    kernel(f"{end}:")
    return kernel.text()


# CTA 1 acts on the barrier of CTA 0, which looks at it after each step.
REMOTE = {
    "arrive": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{bar}], {value};",
    "drop": "mbarrier.arrive_drop.release.cluster.shared::cluster.b64 _, [{bar}], {value};",
    "arrive_tx": "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [{bar}], {value};",
    "expect": "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [{bar}], {value};",
    "complete": "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [{bar}], {value};",
}
REMOTE_STEPS: list[Step] = [
    *[("arrive", 1), ("arrive", 2), ("arrive", 1), ("arrive_tx", 64), ("complete", 64), ("arrive", 3), ("drop", 1)],
    *[("arrive", 3), ("expect", 32), ("arrive", 3), ("complete", 16), ("complete", 16), ("complete", 8), ("arrive", 2)],
    *[("arrive_tx", 8), ("arrive", 3)],
]


def remote_kernel() -> str:
    kernel = Kernel("remote", "out:ptr", ".reqnctapercluster 2, 1, 1", static=".shared .align 8 .b64 barrier;")
    bar, first = kernel.set("r", "mov.u32 $, barrier"), kernel.first_thread()
    rank = kernel.set("r", "mov.u32 $, %cluster_ctarank")
    other = kernel.set("r", f"mapa.shared::cluster.u32 $, {bar}, 0")
    owner, guest = kernel.set("p", f"setp.eq.u32 $, {rank}, 0"), kernel.set("p", f"setp.eq.u32 $, {rank}, 1")
    kernel(f"and.pred {owner}, {owner}, {first};", f"and.pred {guest}, {guest}, {first};")
    kernel(f"@{first} mbarrier.init.shared.b64 [{bar}], 4;", "fence.mbarrier_init.release.cluster;")
    p = kernel.new("p")
    meet = ("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;")
    kernel(*meet)
    for i, (step, value) in enumerate(REMOTE_STEPS):
        kernel(f"@{guest} {REMOTE[step].format(bar=other, value=value)}", *meet)
        for parity in (0, 1):
            kernel(f"mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 {p}, [{bar}], {parity};")
            result = kernel.set("r", f"selp.b32 $, 1, 0, {p}")
            kernel(f"@{owner} st.global.b32 [%out+{8 * i + 4 * parity}], {result};")
        kernel(*meet)
    return kernel.text()


def try_wait_kernel() -> str:
    """Four warps arrive and wait in a ring of eight phases; each thread counts the phases that it has passed."""
    kernel = Kernel("try_wait", "out:ptr", static=".shared .align 8 .b64 barrier;")
    bar, first, tid = kernel.set("r", "mov.u32 $, barrier"), kernel.first_thread(), kernel.tid()
    kernel(f"@{first} mbarrier.init.shared.b64 [{bar}], 128;", "bar.sync 0;")
    passed, p, state = kernel.set("r", "mov.u32 $, 0"), kernel.new("p"), kernel.new("d")
    phase, retry_state, retry_parity = kernel.label(), kernel.label(), kernel.label()
    parity = kernel.new("r")
    kernel(
        f"{phase}:",
        f"mbarrier.arrive.shared.b64 {state}, [{bar}];",
        f"{retry_state}:",
        f"mbarrier.try_wait.shared.b64 {p}, [{bar}], {state};",
        f"@!{p} bra {retry_state};",
        f"and.b32 {parity}, {passed}, 1;",
        f"{retry_parity}:",
        f"mbarrier.try_wait.parity.shared.b64 {p}, [{bar}], {parity}, 100;",
        f"@!{p} bra {retry_parity};",
        f"add.u32 {passed}, {passed}, 1;",
        "bar.sync 0;",
        f"setp.lt.u32 {p}, {passed}, 8;",
        f"@{p} bra {phase};",
        f"st.global.b32 [{kernel.offset('%out', tid, 4)}], {passed};",
    )
    return kernel.text()


def cases() -> list[Case]:
    programs = PROGRAMS | {f"random{seed}": random_program(seed) for seed in range(16)}

    def texts() -> list[str]:
        return [*(program_kernel(*item) for item in programs.items()), remote_kernel(), try_wait_kernel()]

    module = Module(PREFIX, texts)
    found = []
    for name, steps in programs.items():
        rows = labels(steps)
        hazards = ("MBARRIER_REINIT",) if name == "fresh" else ()  # undefined in PTX; the H200 just does it
        out = Output("out", "<u4", (len(rows),), rows)
        found.append(Case(f"{PREFIX}/{name}", module, name, (out,), hazards=hazards))
    rows = tuple(f"{i}: {step} {value}, parity {p}" for i, (step, value) in enumerate(REMOTE_STEPS) for p in (0, 1))
    out = Output("out", "<u4", (len(rows),), rows)
    found.append(Case(f"{PREFIX}/remote", module, "remote", (out,), grid=2, cluster=2))
    found.append(Case(f"{PREFIX}/try_wait", module, "try_wait", (Output("out", "<u4", (128,)),), block=128))
    return found
