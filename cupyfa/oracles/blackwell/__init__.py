"""The Blackwell machine and FlashAttention-4's schedule on it, as contracts on the CPU (0x07, 0x08, 0x0A).

Arithmetic and event order only: nothing here lowers an instruction, and no figure comes from a Blackwell device.

=================== =================================================================================
module              what it holds
=================== =================================================================================
`machine`           rates of one multiprocessor against Hopper's, and the ceilings of a CTA
`tmem`              geometry of tensor memory, addresses, lane bands, the S/P/O map
`lifetimes`         who lives in which columns when; which aliases are legal
`allocation`        allocation sizes, the permit, collectives of a pair, exit
`cta_group`         how one CTA or a pair splits a product; where the accumulator lands
`completion`        issue, commit, completion, fence, load, reuse; what issue order alone guarantees
`descriptors`       instruction and shared-memory descriptors
`layouts`           operand bytes in shared memory, register fragments of tensor memory
`dispatch`          when the reference implementation works in pairs, and what it admits
`events`            the log that the state machines write
`ledger`            cycles that one tile asks of each resource
`roles`             warp roles, register targets, handoffs
`schedule`          tensor order of the forward pass, split P, a timeline
`contract`          what a forward trace has to respect, edge by edge
`backward_ledger`   the ledger of the five backward products, one CTA and pair
`backward_map`      tensor memory of the backward pass
`backward_schedule` the backward loop
`exchange`          the exchange of dS between the CTAs of a pair, as data movement
`relay`             how the peer's half of dS becomes visible
`dq_staging`        how a tile of dQ reaches global memory
`claims`            what a figure may be called
=================== =================================================================================
"""

from . import (
    allocation,
    backward_ledger,
    backward_map,
    backward_schedule,
    claims,
    completion,
    contract,
    cta_group,
    descriptors,
    dispatch,
    dq_staging,
    events,
    exchange,
    layouts,
    ledger,
    lifetimes,
    machine,
    relay,
    roles,
    schedule,
    tmem,
)

__all__ = [
    "allocation",
    "backward_ledger",
    "backward_map",
    "backward_schedule",
    "claims",
    "completion",
    "contract",
    "cta_group",
    "descriptors",
    "dispatch",
    "dq_staging",
    "events",
    "exchange",
    "layouts",
    "ledger",
    "lifetimes",
    "machine",
    "relay",
    "roles",
    "schedule",
    "tmem",
]
