"""Allocation, permit and pair contracts; each fault fails under its own name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell.allocation import (
    AllocationGrows,
    CtaGroupMismatch,
    EarlyPeerExit,
    IllegalAllocation,
    InactivePeer,
    Kernel,
    LeakedAllocation,
    MissingParticipant,
    NotAllocated,
    OutOfColumns,
    PeerNotQuiescent,
    PermitClosed,
    issue_scope,
    legal_allocations,
)


def running(cta_group):
    kernel = Kernel(cta_group)
    for cta in kernel.group:
        kernel.start(cta)
    return kernel


@pytest.mark.parametrize("cta_group", [1, 2])
def test_whole_life(cta_group):
    kernel = running(cta_group)
    group = kernel.group
    base = kernel.allocate(512, group)
    assert base == 0, "an allocation of everything starts at column 0"
    kernel.operate(cta_group)
    for cta in group:
        kernel.begin(base, cta)
    kernel.relinquish(group)
    assert kernel.allocations == {0: 512}, "relinquishing frees nothing"
    for cta in group:
        kernel.end(base, cta)
    kernel.deallocate(base, group)
    for cta in sorted(group):
        kernel.exit(cta)
    actions = [event.action for event in kernel.log.events]
    assert actions.index("allocate") < actions.index("relinquish") < actions.index("deallocate") < actions.index("exit")


def test_legal_sizes():
    assert legal_allocations() == [32, 64, 128, 256, 512]
    for columns in legal_allocations():
        assert running(1).allocate(columns, {0}) == 0


@pytest.mark.parametrize("columns", [96, 0, 16, 48, 33, 1024, -32])
def test_illegal_size(columns):
    with pytest.raises(IllegalAllocation, match=f"{columns} columns; legal are the powers of two"):
        running(1).allocate(columns, {0})


def test_size_increases():
    kernel = running(1)
    kernel.allocate(64, {0})
    with pytest.raises(AllocationGrows, match="128 columns after 64"):
        kernel.allocate(128, {0})
    kernel.allocate(64, {0})  # equal is not larger


def test_size_increases_even_after_a_deallocation():
    kernel = running(1)
    kernel.deallocate(kernel.allocate(64, {0}), {0})
    with pytest.raises(AllocationGrows):
        kernel.allocate(512, {0})


def test_permit_is_closed():
    kernel = running(1)
    kernel.allocate(64, {0})
    kernel.relinquish({0})
    with pytest.raises(PermitClosed):
        kernel.allocate(32, {0})


def test_512_columns_then_relinquish_then_allocate_again():
    kernel = running(2)
    kernel.allocate(512, {0, 1})
    kernel.relinquish({0, 1})
    with pytest.raises(PermitClosed):
        kernel.allocate(512, {0, 1})


def test_mixed_cta_groups():
    kernel = running(2)
    kernel.operate(2)
    with pytest.raises(CtaGroupMismatch, match="cta_group::1 in a kernel that uses cta_group::2"):
        kernel.operate(1)


@pytest.mark.parametrize("operation", ["allocate", "operate"])
def test_peer_not_active(operation):
    kernel = Kernel(2)
    kernel.start(0)
    with pytest.raises(InactivePeer, match="CTA 1 is not active"):
        kernel.allocate(512, {0, 1}) if operation == "allocate" else kernel.operate(2)


def test_peer_exited():
    kernel = running(2)
    kernel.exit(1)
    with pytest.raises(InactivePeer):
        kernel.operate(2)


@pytest.mark.parametrize("ctas", [{0}, {1}])
@pytest.mark.parametrize("collective", ["allocate", "relinquish", "deallocate"])
def test_one_warp_does_not_make_a_collective(collective, ctas):
    kernel = running(2)
    (missing,) = kernel.group - ctas
    if collective == "allocate":
        with pytest.raises(MissingParticipant, match=f"alloc .* lacks the warp of CTA {missing}"):
            kernel.allocate(512, ctas)
        return
    base = kernel.allocate(512, {0, 1})
    with pytest.raises(MissingParticipant, match=f"lacks the warp of CTA {missing}"):
        kernel.relinquish(ctas) if collective == "relinquish" else kernel.deallocate(base, ctas)


@pytest.mark.parametrize("cta", [0, 1])
def test_deallocation_while_the_peer_is_not_quiet(cta):
    kernel = running(2)
    base = kernel.allocate(256, {0, 1})
    kernel.begin(base, 0)
    kernel.begin(base, 1)
    kernel.end(base, 1 - cta)  # one of the two has finished, which is not enough
    with pytest.raises(PeerNotQuiescent, match=f"CTA {cta} has a live access"):
        kernel.deallocate(base, {0, 1})
    kernel.end(base, cta)
    kernel.deallocate(base, {0, 1})


def test_peer_exits_early():
    kernel = running(2)
    base = kernel.allocate(512, {0, 1})
    kernel.begin(base, 0)
    with pytest.raises(EarlyPeerExit, match="CTA 1 exits while an access to the memory of CTA 0"):
        kernel.exit(1)


@pytest.mark.parametrize("cta_group", [1, 2])
def test_leak(cta_group):
    kernel = running(cta_group)
    kernel.allocate(128, kernel.group)
    kernel.relinquish(kernel.group)
    with pytest.raises(LeakedAllocation, match="128 columns at 0"):
        kernel.exit(0)


def test_use_after_free():
    kernel = running(1)
    base = kernel.allocate(128, {0})
    kernel.deallocate(base, {0})
    with pytest.raises(NotAllocated):
        kernel.begin(base, 0)
    with pytest.raises(NotAllocated):
        kernel.deallocate(base, {0})
    with pytest.raises(NotAllocated, match="no access"):
        kernel.end(base, 0)


def test_no_columns_left():
    kernel = running(1)
    kernel.allocate(512, {0})
    with pytest.raises(OutOfColumns, match="0 of 512 are free"):
        kernel.allocate(32, {0})


def test_ranks_and_groups_are_checked():
    for cta_group in (0, 3):
        with pytest.raises(ValueError, match="must be 1 or 2"):
            Kernel(cta_group)
    with pytest.raises(ValueError, match="rank 1"):
        running(1).allocate(512, {0, 1})
    with pytest.raises(ValueError, match="rank 2"):
        running(2).start(2)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.lists(st.one_of(st.sampled_from([32, 64, 128, 256, 512]), st.integers(0, 5).map(lambda i: -1 - i)), max_size=24)
)
def test_allocations_never_overlap(steps):
    """Positive: allocate so many columns; negative: free the n-th live allocation."""
    kernel = running(1)
    smallest, live = 512, {}
    for step in steps:
        if step < 0:
            if live:
                base = sorted(live)[(-1 - step) % len(live)]
                kernel.deallocate(base, {0})
                del live[base]
            continue
        try:
            base = kernel.allocate(step, {0})
        except AllocationGrows:
            assert step > smallest
            continue
        except OutOfColumns:
            used = {c for b, n in live.items() for c in range(b, b + n)}
            assert all(used & set(range(b, b + step)) for b in range(0, 512, step))
            continue
        assert step <= smallest
        columns = set(range(base, base + step))
        assert base + step <= 512
        assert not any(columns & set(range(b, b + n)) for b, n in live.items())
        smallest = step
        live[base] = step
    assert kernel.allocations == live


def test_who_issues_what():
    for operation in ("alloc", "dealloc", "relinquish_alloc_permit"):
        for group in (1, 2):
            issue = issue_scope(operation, group)
            assert (issue.unit, issue.ctas, issue.collective) == ("warp", group, True)
    for operation in ("mma", "cp", "shift", "commit"):
        for group in (1, 2):
            issue = issue_scope(operation, group)
            assert (issue.unit, issue.ctas, issue.collective) == ("thread", 1, False)
    for operation in ("ld", "st", "wait::ld", "wait::st"):
        assert issue_scope(operation, 2).unit == "warp"
    with pytest.raises(ValueError, match="unknown"):
        issue_scope("ldmatrix", 1)
    with pytest.raises(ValueError, match="must be 1 or 2"):
        issue_scope("mma", 4)
