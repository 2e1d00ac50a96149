"""Warp roles: a partition of 16 warps, register targets that sum to 512, handoffs between roles."""

from dataclasses import replace

import pytest

from cupyfa.oracles.blackwell import contract, roles
from cupyfa.oracles.blackwell.claims import Kind, TargetCalledRegisterCount
from cupyfa.oracles.blackwell.roles import BACKWARD_1CTA, BACKWARD_2CTA, FORWARD, HANDOFFS, Role, check_partition
from cupyfa.oracles.violations import ContractViolation

TABLES = {"forward": FORWARD, "backward 1-CTA": BACKWARD_1CTA, "backward 2-CTA": BACKWARD_2CTA}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_roles_partition_the_warps(table):
    roles.check_partition(table)
    assert sorted(warp for role in table for warp in role.warps) == list(range(16))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_register_targets_sum_to_512(table):
    assert roles.check_budget(table) == 512


def test_role_tables():
    assert {r.name: (r.warps[0], r.warps[-1], r.registers) for r in FORWARD} == {
        "softmax H": (0, 3, 192),
        "softmax L": (4, 7, 192),
        "correction": (8, 11, 80),
        "mma": (12, 12, 48),
        "epilogue": (13, 13, 48),
        "load": (14, 14, 48),
        "spare": (15, 15, 48),
    }
    for table, targets in ((BACKWARD_1CTA, (152, 136, 136, 88, 88)), (BACKWARD_2CTA, (136, 136, 136, 104, 104))):
        assert tuple(role.registers for role in table[:5]) == targets
        assert [role.warps[0] for role in table] == [0, 4, 8, 12, 13, 14, 15]
        assert table[-1].registers == 24


def test_budget_equations():
    assert roles.budget(FORWARD) == 2 * 192 + 80 + 48
    assert 152 + 2 * 136 + max(88, 88) == roles.budget(BACKWARD_1CTA)
    assert 136 + 2 * 136 + max(104, 104) == roles.budget(BACKWARD_2CTA)


def test_a_warp_with_two_roles_or_none():
    with pytest.raises(roles.RoleOverlap, match="warp 12 is both mma and epilogue"):
        roles.check_partition((*FORWARD[:4], Role("epilogue", range(12, 14), 48, ""), *FORWARD[5:]))
    with pytest.raises(roles.RoleGap, match=r"\[15\]"):
        roles.check_partition(FORWARD[:-1])
    with pytest.raises(roles.RoleGap, match="warp 16 of 16"):
        roles.check_partition((*FORWARD, Role("more", range(16, 17), 48, "")))


@pytest.mark.parametrize("registers", [16, 260, 100])
def test_targets_that_setmaxnreg_does_not_take(registers):
    with pytest.raises(roles.IllegalTarget, match=str(registers)):
        roles.check_budget((replace(FORWARD[0], registers=registers), *FORWARD[1:]))


def test_budget_exceeded():
    with pytest.raises(roles.BudgetExceeded, match="520"):
        roles.check_budget((replace(FORWARD[0], registers=200), *FORWARD[1:]))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_target_is_no_compiled_register_count(table):
    for role in table:
        assert role.target.as_kind(Kind.REGISTER_TARGET) == role.registers
        with pytest.raises(TargetCalledRegisterCount, match=str(role.registers)):
            role.target.as_kind(Kind.COMPILED)


def test_backward_tables_mix_targets_in_one_warpgroup():
    # A kernel that follows the PTX manual cannot copy these: warps 12 to 15 need one value.
    assert roles.mixed_warpgroups(FORWARD) == []
    assert roles.mixed_warpgroups(BACKWARD_1CTA) == roles.mixed_warpgroups(BACKWARD_2CTA) == [3]
    uniform = tuple(replace(r, registers=104) if r.warps[0] >= 12 else r for r in BACKWARD_2CTA)
    assert roles.mixed_warpgroups(uniform) == []
    assert roles.check_budget(uniform) == 512


def test_handoffs_connect_roles():
    roles.check_handoffs(HANDOFFS, FORWARD)
    assert [h.name for h in HANDOFFS] == ["q", "kv", "s_p_o", "p_lastsplit", "o_acc", "sm_stats", "o_epi"]
    with pytest.raises(roles.UnknownRole, match="no warp is load"):
        roles.check_handoffs(HANDOFFS, [role for role in FORWARD if role.name != "load"])
    with pytest.raises(roles.UnknownRole, match="itself"):
        roles.check_handoffs([replace(HANDOFFS[0], consumers=("load",))], FORWARD)


def test_edges_of_the_schedule_name_handoffs():
    named = {edge.handoff for edge in contract.EDGES} - {""}
    assert named == {"s_p_o", "p_lastsplit", "sm_stats"}
    assert named <= {handoff.name for handoff in HANDOFFS}


@pytest.mark.parametrize("warps", [0, -4])
def test_bad_input(warps):
    with pytest.raises(ContractViolation, match=f"warps must be positive, not {warps}"):
        check_partition((), warps)
