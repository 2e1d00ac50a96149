"""The Hopper machine (specification 0x02 to 0x05): what the forward kernel may rely on, as state machines and ledgers.

============= =======================================================================================
module        what it holds
============= =======================================================================================
`machine`     agents, waits, time, the deadlock report
`barriers`    mbarriers and named barriers
`ring`        coordinates of the circular buffer, fill, steady state and drain
`liveness`    its wait-for graph
`pipeline`    the ring as a machine, with a monitor that names the broken contract
`token_ring`  pingpong: the named-barrier token between consumer warpgroups
`wgmma_queue` what a wait on asynchronous products proves
`two_stage`   the two-stage loop of one warpgroup as a schedule
`ledger`      registers, shared memory, residency
`live_words`  register payload of the two-stage loop
`wgmma`       register fragments
`swizzle`     swizzled tiles in shared memory
`descriptors` matrix descriptors, and what they read
`roles`       the kernel's producer and consumers, played on the machine
============= =======================================================================================
"""

from cupyfa.oracles.hopper import (
    barriers,
    descriptors,
    ledger,
    live_words,
    liveness,
    machine,
    pipeline,
    ring,
    roles,
    swizzle,
    token_ring,
    two_stage,
    wgmma,
    wgmma_queue,
)

__all__ = [
    "barriers",
    "descriptors",
    "ledger",
    "live_words",
    "liveness",
    "machine",
    "pipeline",
    "ring",
    "roles",
    "swizzle",
    "token_ring",
    "two_stage",
    "wgmma",
    "wgmma_queue",
]
