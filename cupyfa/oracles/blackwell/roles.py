"""Who does what: the warp roles of the FlashAttention-4 kernels, their register targets and their handoffs.

Sixteen warps, 512 threads. The tables are those of one pinned source (specification 0x08 and 0x0A); the algorithm does
not prescribe them. Register figures are what the source asks ``setmaxnreg`` for, never what a compiler allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..violations import ContractViolation
from .claims import Figure, Kind

__all__ = [
    "BACKWARD_1CTA",
    "BACKWARD_2CTA",
    "FORWARD",
    "HANDOFFS",
    "Handoff",
    "Role",
    "budget",
    "check_budget",
    "check_handoffs",
    "check_partition",
    "mixed_warpgroups",
    "BudgetExceeded",
    "IllegalTarget",
    "RoleGap",
    "RoleOverlap",
    "UnknownRole",
]

WARPS = 16
# 65,536 registers over 128 threads of a warpgroup.
REGISTER_BUDGET = 512


class RoleOverlap(ContractViolation):
    """A warp has two roles (specification 0x08)."""


class RoleGap(ContractViolation):
    """A warp has no role, or a role names a warp that does not exist (specification 0x08)."""


class BudgetExceeded(ContractViolation):
    """The warpgroups ask for more registers than a multiprocessor has: ``setmaxnreg`` would wait forever (0x08)."""


class IllegalTarget(ContractViolation):
    """A ``setmaxnreg`` value must be a multiple of 8 in 24 .. 256 (specification 0x08)."""


class UnknownRole(ContractViolation):
    """A handoff names a role that no warp has (specification 0x08)."""


@dataclass(frozen=True)
class Role:
    """Warps that run the same code (specification 0x08).

    Attributes
    ----------
    name : str
        What the role is called in events.
    warps : range
        Its warps in the CTA.
    registers : int
        The source's ``setmaxnreg`` target, registers per thread.
    does : str
        Its work.
    """

    name: str
    warps: range
    registers: int
    does: str

    @property
    def target(self) -> Figure:
        """The target as a figure that refuses to be called a compiled register count."""
        return Figure(self.registers, "registers/thread", Kind.REGISTER_TARGET)


#: Forward, two query stages, not causal, bfloat16, d = 128, one CTA (0x08).
FORWARD = (
    Role("softmax H", range(4), 192, "rows of the first query tile: scores to probabilities"),
    Role("softmax L", range(4, 8), 192, "rows of the second query tile"),
    Role("correction", range(8, 12), 80, "rescale O when the row maximum moved; last division, epilogue"),
    Role("mma", range(12, 13), 48, "allocate tensor memory; issue all products in order"),
    Role("epilogue", range(13, 14), 48, "store O, where the correction warps do not"),
    Role("load", range(14, 15), 48, "copies of Q, K and V"),
    Role("spare", range(15, 16), 48, "nothing, or the scheduler"),
)


def _backward(reduction: int, compute: int, load: int, mma: int, relay: int, empty: int) -> tuple[Role, ...]:
    return (
        Role("reduction", range(4), reduction, "dQ: tensor memory, registers, shared memory, global add"),
        Role("compute A", range(4, 8), compute, "P and dS of every other group of columns; dK/dV epilogue"),
        Role("compute B", range(8, 12), compute, "the columns between"),
        Role("mma", range(12, 13), mma, "issue the five products"),
        Role("load", range(13, 14), load, "copies of tiles and row statistics"),
        Role("relay", range(14, 15), relay, "pair only: turn the peer's copy into a local arrival"),
        Role("empty", range(15, 16), empty, "gives its registers away"),
    )


#: Backward, d = 128, one CTA (0x0A). The relay warp has no work and the empty role's target.
BACKWARD_1CTA = _backward(reduction=152, compute=136, load=88, mma=88, relay=24, empty=24)
#: Backward, d = 128, CTA pair (0x0A).
BACKWARD_2CTA = _backward(reduction=136, compute=136, load=104, mma=104, relay=104, empty=24)


@dataclass(frozen=True)
class Handoff:
    """One pipeline object of the forward kernel (0x08).

    Attributes
    ----------
    name : str
        What the source calls it, without its prefix.
    producers, consumers : tuple of str
        Roles.
    means : str
        What its completion proves.
    """

    name: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    means: str


_SOFTMAX = ("softmax H", "softmax L")

#: The handoffs of the forward kernel. ``s_p_o`` is a circuit and no queue: the MMA warp publishes S into it, and what
#: closes the stage from the other side is P from the softmax warps together with the rescaled O from the correction.
HANDOFFS = (
    Handoff("q", ("load",), ("mma",), "a query tile has arrived; freed after the last key block"),
    Handoff("kv", ("load",), ("mma",), "one ring stage of K or V has arrived; freed for the next copy"),
    Handoff("s_p_o", ("mma",), (*_SOFTMAX, "correction"), "S is complete; back: early P stored and O rescaled"),
    Handoff("p_lastsplit", _SOFTMAX, ("mma",), "the last columns of P are stored"),
    Handoff("o_acc", ("mma",), ("correction",), "the last product into O is complete"),
    Handoff("sm_stats", _SOFTMAX, ("correction",), "row maximum or sum is ready"),
    Handoff("o_epi", ("correction",), ("epilogue",), "the final O tile is in shared memory"),
)


def check_partition(roles: Iterable[Role], warps: int = WARPS) -> None:
    """Check that every warp has exactly one role (specification 0x08).

    Parameters
    ----------
    roles : iterable of Role
        The roles.
    warps : int, optional
        Warps of the CTA.

    Raises
    ------
    RoleOverlap, RoleGap
        If a warp has two roles, or none, or does not exist.

    Examples
    --------
    >>> check_partition(FORWARD)
    >>> check_partition(FORWARD[1:])
    Traceback (most recent call last):
    ...
    cupyfa.oracles.blackwell.roles.RoleGap: warps without a role: [0, 1, 2, 3]
    """
    if warps < 1:
        raise ContractViolation(f"roles: warps must be positive, not {warps}")
    owner: dict[int, str] = {}
    for role in roles:
        for warp in role.warps:
            if warp in owner:
                raise RoleOverlap(f"warp {warp} is both {owner[warp]} and {role.name}")
            if not 0 <= warp < warps:
                raise RoleGap(f"{role.name} names warp {warp} of {warps}")
            owner[warp] = role.name
    missing = [warp for warp in range(warps) if warp not in owner]
    if missing:
        raise RoleGap(f"warps without a role: {missing}")


def budget(roles: Iterable[Role]) -> int:
    """Sum the register targets, one per warpgroup: the largest among its warps (0x08, 0x0A).

    ``2 * 192 + 80 + 48`` forward, ``152 + 2 * 136 + max(88, 88)`` and ``136 + 2 * 136 + max(104, 104)`` backward.

    Parameters
    ----------
    roles : iterable of Role
        The roles.

    Returns
    -------
    int
        Registers of four threads, one of each warpgroup; times 128 the registers of the CTA.

    Examples
    --------
    >>> budget(FORWARD), budget(BACKWARD_1CTA), budget(BACKWARD_2CTA)
    (512, 512, 512)
    """
    groups: dict[int, int] = {}
    for role in roles:
        for warp in role.warps:
            groups[warp // 4] = max(groups.get(warp // 4, 0), role.registers)
    return sum(groups.values())


def check_budget(roles: Iterable[Role], limit: int = REGISTER_BUDGET) -> int:
    """Check the register targets (specification 0x08).

    Parameters
    ----------
    roles : iterable of Role
        The roles.
    limit : int, optional
        What the sum must not exceed.

    Returns
    -------
    int
        The sum.

    Raises
    ------
    IllegalTarget
        If a target is not one that ``setmaxnreg`` takes.
    BudgetExceeded
        If the sum is too large.
    """
    roles = tuple(roles)
    for role in roles:
        if not 24 <= role.registers <= 256 or role.registers % 8:
            raise IllegalTarget(f"{role.name}: {role.registers} is no multiple of 8 in 24 .. 256")
    total = budget(roles)
    if total > limit:
        raise BudgetExceeded(f"the warpgroups ask for {total} registers per thread together; there are {limit}")
    return total


def mixed_warpgroups(roles: Iterable[Role]) -> list[int]:
    """Find the warpgroups whose warps have different targets (specification 0x08).

    The PTX manual asks that all warps of a warpgroup execute the same ``setmaxnreg``. The pinned backward tables do not
    keep to that, so a kernel that follows the manual gives warps 12 to 15 one value.

    Parameters
    ----------
    roles : iterable of Role
        The roles.

    Returns
    -------
    list of int
        Warpgroups.

    Examples
    --------
    >>> mixed_warpgroups(FORWARD), mixed_warpgroups(BACKWARD_1CTA)
    ([], [3])
    """
    groups: dict[int, set[int]] = {}
    for role in roles:
        for warp in role.warps:
            groups.setdefault(warp // 4, set()).add(role.registers)
    return [group for group, targets in sorted(groups.items()) if len(targets) > 1]


def check_handoffs(handoffs: Iterable[Handoff], roles: Iterable[Role]) -> None:
    """Check that every handoff connects roles that exist and differ (specification 0x08).

    Parameters
    ----------
    handoffs : iterable of Handoff
        The pipeline objects.
    roles : iterable of Role
        The roles.

    Raises
    ------
    UnknownRole
        If a producer or consumer is no role, or one hands something to itself.
    """
    names = {role.name for role in roles}
    for handoff in handoffs:
        ends = (*handoff.producers, *handoff.consumers)
        unknown = [name for name in ends if name not in names]
        if unknown:
            raise UnknownRole(f"{handoff.name}: no warp is {unknown[0]}")
        if set(handoff.producers) & set(handoff.consumers):
            raise UnknownRole(f"{handoff.name}: a role hands over to itself")
