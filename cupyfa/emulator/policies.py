"""Who runs when: the schedules under which a kernel has to be right.

The machine's scheduler is a pure function of a policy and a seed. Eight policies are fixed; each stands for a way in
which real hardware may differ from the order in which a kernel's author thought of it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

__all__ = ["POLICIES", "policy_fields"]

_DEFAULT: dict[str, Any] = {
    "copies": 0.5,  # chance that a copy runs before the next warp does; 1: at once, 0: when nothing else can
    "products": 0.5,  # the same for wgmma and tcgen05
    "newest_first": False,
    "pieces": 3,  # parts in which a copy lands
    "quantum": 0,  # instructions of a warp before another may run, at random up to this; 0: until it has to wait
    "order": "round_robin",
    "spurious": 0.0,  # chance that try_wait fails although the phase is complete
    "impatient": False,  # try_wait for a phase that is open fails once before it suspends
    "random_elect": False,
}

#: name -> what differs from the defaults.
POLICIES: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        # Everything asynchronous is complete at the next instruction: what a naive model does.
        "eager": {"copies": 1.0, "products": 1.0, "pieces": 1},
        # Nothing asynchronous happens before somebody has to wait for it.
        "lazy": {"copies": 0.0, "products": 0.0},
        # Copies complete in the reverse of their order, products late.
        "reverse": {"newest_first": True, "copies": 0.3, "products": 0.0},
        # One engine starves, and with it a role: the first warps go first, or last.
        "late_products": {"copies": 1.0, "products": 0.0, "order": "first"},
        "late_copies": {"copies": 0.0, "products": 1.0, "order": "last", "impatient": True},
        # Warps in random order; barriers' waits fail spuriously, elect picks any lane.
        "random": {"order": "random", "quantum": 200, "spurious": 0.2, "random_elect": True},
        "fine": {"order": "random", "quantum": 8, "copies": 0.1, "products": 0.1, "spurious": 0.05},
        # Random priorities that seldom change (Burckhardt et al., "A randomized scheduler", ASPLOS 2010).
        "pct": {"order": "priorities", "quantum": 1000, "copies": 0.2, "products": 0.2},
    }
)


def policy_fields(name: str) -> dict[str, Any]:
    """Return all fields of a policy.

    Parameters
    ----------
    name : str
        A key of :data:`POLICIES`.

    Returns
    -------
    dict
        For the machine.
    """
    if name not in POLICIES:
        raise ValueError(f"policy is {name!r}; it must be one of {', '.join(POLICIES)}")
    return {**_DEFAULT, **POLICIES[name]}
