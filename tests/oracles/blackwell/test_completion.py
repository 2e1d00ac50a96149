"""The completion chain: every step is needed, in its place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell.completion import (
    Accumulator,
    EarlyReuse,
    FenceBeforeCompletion,
    ForeignCommit,
    NothingInFlight,
    Operation,
    SharedOperand,
    UnfencedOperand,
    UnfinishedResult,
    UnorderedOperations,
    check_order,
    implicit_order,
)
from cupyfa.oracles.blackwell.tmem import LaneNotOwned
from cupyfa.oracles.violations import ContractViolation


def chain():
    """The positive trace: method name and arguments of each step."""
    yield "issue", (0,)
    yield "commit", (0,)
    yield "complete", ()
    yield "observe", (0,)
    yield "synchronize", ()
    for warp in range(4):
        yield "fence", (warp,)
    for warp in range(4):
        yield "load", (warp,)
    for warp in range(4):
        yield "wait_load", (warp,)
    yield "reuse", ("P0",)


def play(steps):
    S = Accumulator("S0")
    for name, arguments in steps:
        getattr(S, name)(*arguments)
    return S


def test_positive_trace():
    S = play(chain())
    actions = [(event.agent, event.action) for event in S.log.events]
    order = [actions.index(step) for step in (("mma", "issue"), ("mma", "commit"), ("tensor core", "complete"))]
    for warp in range(4):
        order.append(actions.index((f"warp {warp}", "fence")))
        load, closed = actions.index((f"warp {warp}", "load")), actions.index((f"warp {warp}", "loaded"))
        assert order[-1] < load < closed < actions.index(("P0", "overwrite"))
    assert order == sorted(order)


def test_the_accumulator_can_be_used_again():
    play([*chain(), *chain()])


@pytest.mark.parametrize(
    ("dropped", "error", "message"),
    [
        (("issue", (0,)), NothingInFlight, "commit without a product"),
        (("commit", (0,)), NothingInFlight, "nothing on S0 is committed"),
        (("complete", ()), UnfinishedResult, "phase has not flipped"),
        (("observe", (0,)), FenceBeforeCompletion, "before it has observed"),
        (("synchronize", ()), FenceBeforeCompletion, "warp 1 fences before"),
        (("fence", (0,)), UnfinishedResult, "before fence::after_thread_sync"),
        (("fence", (3,)), UnfinishedResult, "warp 3 loads S0 after the barrier"),
        (("load", (2,)), NothingInFlight, "warp 2 waits for a load"),
        (("wait_load", (1,)), EarlyReuse, "while warp 1 loads it: no wait::ld"),
    ],
)
def test_each_step_is_needed(dropped, error, message):
    steps = list(chain())
    steps.remove(dropped)
    with pytest.raises(error, match=message):
        play(steps)


def test_load_before_completion():
    with pytest.raises(UnfinishedResult, match="before it has observed its completion"):
        play([("issue", (0,)), ("load", (0,))])
    with pytest.raises(UnfinishedResult):
        play([("issue", (0,)), ("commit", (0,)), ("load", (0,))])


def test_completion_that_nobody_waited_for_is_no_permission():
    with pytest.raises(UnfinishedResult):
        play([("issue", (0,)), ("commit", (0,)), ("complete", ()), ("load", (0,))])


def test_a_barrier_does_not_replace_the_fence():
    steps = [step for step in chain() if step[0] not in ("fence",)]
    with pytest.raises(UnfinishedResult, match="before fence::after_thread_sync"):
        play(steps)


def test_a_fence_cannot_come_first():
    with pytest.raises(FenceBeforeCompletion):
        play([("issue", (0,)), ("commit", (0,)), ("fence", (0,))])


def test_a_barrier_among_warps_that_know_nothing_tells_nothing():
    with pytest.raises(FenceBeforeCompletion):
        play([("issue", (0,)), ("commit", (0,)), ("complete", ()), ("synchronize", ()), ("fence", (0,))])


def test_another_threads_commit():
    with pytest.raises(ForeignCommit, match="thread 32 commits what thread 0 issued"):
        play([("issue", (0,)), ("commit", (32,))])


def test_p_over_a_score_that_a_warp_has_not_loaded():
    steps = [step for step in chain() if step not in (("load", (3,)), ("wait_load", (3,)))]
    with pytest.raises(EarlyReuse, match="P0 is written over S0 before warp 3 has loaded it"):
        play(steps)


def test_the_next_product_may_not_overwrite_one_in_flight():
    with pytest.raises(EarlyReuse, match="the next product is written over S0 while its product is in flight"):
        play([("issue", (0,)), ("issue", (0,))])


@pytest.mark.parametrize("lanes", [range(128), range(64, 65), range(31, 33)])
def test_warp_0_owns_32_lanes(lanes):
    steps = [step for step in chain() if step[0] not in ("load", "wait_load", "reuse")]
    with pytest.raises(LaneNotOwned, match="warp 0 touches lane"):
        play([*steps, ("load", (0, lanes))])


STEPS = [*dict.fromkeys(chain())]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.sampled_from(STEPS), max_size=60))
def test_no_order_of_steps_reads_an_unfinished_result(steps):
    """Whatever is tried, what the machine lets through is safe: checked on the log, without its state."""
    S = Accumulator("S0")
    for name, arguments in steps:
        try:
            getattr(S, name)(*arguments)
        except ContractViolation:
            continue
    complete, fenced, open_loads = False, set(), set()
    for event in S.log.events:
        warp = event.agent
        if event.action in ("issue", "overwrite"):
            assert not open_loads
            complete, fenced = False, set()
        elif event.action == "complete":
            complete = True
        elif event.action == "fence":
            assert complete
            fenced.add(warp)
        elif event.action == "load":
            assert complete
            assert warp in fenced
            open_loads.add(warp)
        elif event.action == "loaded":
            open_loads.discard(warp)


def test_operands_in_shared_memory():
    operand = SharedOperand("sK")
    with pytest.raises(UnfencedOperand, match="a writer and a barrier"):
        operand.read_by_mma()
    operand.copy_by_tma()
    operand.read_by_mma()  # the copy belongs to the asynchronous proxy already
    operand.store()
    with pytest.raises(UnfencedOperand, match=r"fence\.proxy\.async and a barrier"):
        operand.read_by_mma()
    operand.fence_proxy_async()
    with pytest.raises(UnfencedOperand, match="without a barrier"):
        operand.read_by_mma()
    operand.barrier()
    operand.read_by_mma()


def test_a_barrier_before_the_fence_announces_nothing():
    operand = SharedOperand("sP")
    operand.store()
    operand.barrier()
    operand.fence_proxy_async()
    with pytest.raises(UnfencedOperand, match="without a barrier"):
        operand.read_by_mma()


def test_fences_do_not_replace_a_writer_or_a_barrier():
    empty = SharedOperand("sK")
    empty.fence_proxy_async()
    empty.barrier()
    with pytest.raises(UnfencedOperand, match="a writer"):
        empty.read_by_mma()
    written = SharedOperand("sP")
    written.store()
    written.fence_proxy_async()
    written.fence_proxy_async()
    with pytest.raises(UnfencedOperand, match="a barrier"):
        written.read_by_mma()


def test_completion_does_not_publish_an_unfenced_operand():
    operand = SharedOperand("sdS")
    operand.store()
    play(chain())  # some product completes
    with pytest.raises(UnfencedOperand):
        operand.read_by_mma()


S = Operation("mma", accumulator="S0")


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (S, S, None),
        (S, Operation("mma", accumulator="O0"), "accumulators differ"),
        (S, Operation("mma", accumulator="S0", shape=(128, 64)), "shapes differ"),
        (S, Operation("mma", accumulator="S0", kind="f8f6f4"), "kinds differ"),
        (S, Operation("mma", accumulator="S0", cta_group=2), "CTA groups differ"),
        (S, Operation("mma", accumulator="S0", thread=1), "threads differ"),
        (Operation("cp"), S, None),
        (Operation("shift"), S, None),
        (Operation("shift"), Operation("cp.4x256b"), None),
        (S, Operation("shift"), None),
        (S, Operation("cp"), "not a pipelined pair"),
        (Operation("cp", thread=1), S, "threads differ"),
    ],
)
def test_issue_order_guarantees_little(first, second, reason):
    found = implicit_order(first, second)
    if reason is None:
        assert found is None
        check_order(first, second, waited=False)
    else:
        assert found is not None
        assert reason in found
        with pytest.raises(UnorderedOperations, match=reason):
            check_order(first, second, waited=False)
    check_order(first, second, waited=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Accumulator("S0").issue(-1), "S0: thread -1 issues"),
        (lambda: Accumulator("S0").observe(-1), "warp -1 is negative"),
        (lambda: Accumulator("S0").load(-1), "warp -1 is negative"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
