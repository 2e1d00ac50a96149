"""The Hopper machine (specification 0x02 to 0x05): what the forward kernel may rely on, as state machines and ledgers.

============= =======================================================================================
module        what it holds
============= =======================================================================================
`machine`     agents, waits, time, the deadlock report
`barriers`    mbarriers and named barriers
`ring`        coordinates of the circular buffer, its wait-for graph, fill, steady state and drain
`pipeline`    the ring as a machine, with a monitor that names the broken contract
`token_ring`  pingpong: the named-barrier token between consumer warpgroups
`wgmma_queue` what a wait on asynchronous products proves
`two_stage`   the two-stage loop of one warpgroup as a schedule
`ledger`      registers, shared memory, residency
`wgmma`       register fragments, swizzles, matrix descriptors
`roles`       the kernel's producer and consumers, played on the machine
============= =======================================================================================
"""

from cupyfa.oracles.hopper import (
    barriers,
    ledger,
    machine,
    pipeline,
    ring,
    roles,
    token_ring,
    two_stage,
    wgmma,
    wgmma_queue,
)

__all__ = [
    "barriers",
    "ledger",
    "machine",
    "pipeline",
    "ring",
    "roles",
    "token_ring",
    "two_stage",
    "wgmma",
    "wgmma_queue",
]
