"""The way of dQ to global memory: every skipped step is refused for its name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell import dq_staging
from cupyfa.oracles.blackwell.dq_staging import REDUCTION_WARPS, StagingEvent, run, staging_trace
from cupyfa.oracles.violations import ContractViolation

TILES = 2


def without(action, tile=0, warp=None):
    return [e for e in staging_trace(TILES) if (e.action, e.tile) != (action, tile) or warp not in (None, e.warp)]


def swapped(first, second, tile=0):
    """Swap the blocks of two actions of one tile that follow each other."""
    trace = staging_trace(TILES)
    a = [e for e in trace if (e.action, e.tile) == (first, tile)]
    b = [e for e in trace if (e.action, e.tile) == (second, tile)]
    begin = trace.index(a[0])
    assert trace[begin : begin + len(a) + len(b)] == a + b
    trace[begin : begin + len(a) + len(b)] = b + a
    return trace


def test_right_order():
    assert run(staging_trace(3), 3) == [0, 1, 2]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_warps_interleave_freely(data):
    head, tail = staging_trace(1)[:1], staging_trace(1)[-4:]
    own = {w: [e for e in staging_trace(1) if e.warp == w] for w in REDUCTION_WARPS}
    middle = []
    while any(own.values()):
        warp = data.draw(st.sampled_from([w for w in REDUCTION_WARPS if own[w]]))
        middle.append(own[warp].pop(0))
    assert run(head + middle + tail, 1) == [0]


@pytest.mark.parametrize(
    ("trace", "error"),
    [
        (without("wait_turn"), dq_staging.AddOutOfTurn),
        (without("load", warp=2), dq_staging.StageBeforeLoad),
        (without("stage", warp=1), dq_staging.AddBeforeFence),
        (without("fence", warp=3), dq_staging.AddBeforeFence),
        (without("barrier", warp=0), dq_staging.AddBeforeBarrier),
        (swapped("barrier", "bulk_add"), dq_staging.AddBeforeBarrier),
        (swapped("stage", "fence"), dq_staging.AddBeforeFence),
        (without("wait_complete"), dq_staging.EarlyRelease),
        (swapped("wait_complete", "release"), dq_staging.EarlyRelease),
        (without("release"), dq_staging.AddOutOfTurn),
        (without("release", tile=1), dq_staging.IncompleteReduction),
        (without("bulk_add"), dq_staging.IncompleteReduction),
    ],
)
def test_a_missing_or_early_step(trace, error):
    with pytest.raises(error):
        run(trace, TILES)


def test_reading_is_enough_for_reuse_but_not_for_release():
    # The engine has read the stage: it may be written again.
    trace = staging_trace(TILES)
    late = [e for e in trace if e.tile == 0 and e.action in ("wait_complete", "release")]
    rest = [e for e in trace if e not in late]
    position = rest.index(StagingEvent("wait_turn", 1))
    stages = [e for e in rest[position + 1 :] if e.action in ("load", "stage")]
    others = [e for e in rest[position:] if e not in stages]
    assert run([*rest[:position], *stages, *late, *others], TILES) == [0, 1]
    # Without that wait it may not, and the wait does not stand in for completion.
    with pytest.raises(dq_staging.EarlyReuse, match="tile 0"):
        run([e for e in [*rest[:position], *stages] if e.action != "wait_read"], TILES)
    with pytest.raises(dq_staging.EarlyRelease):
        run(without("wait_complete"), TILES)


def test_unknown_step():
    with pytest.raises(ContractViolation, match="knows no step"):
        run([StagingEvent("bulk_add", 0, warp=2)], 1)
    with pytest.raises(ContractViolation, match="knows no step"):
        run([StagingEvent("guess", 0)], 1)


@pytest.mark.parametrize(
    "call", [lambda: dq_staging.staging_trace(-1), lambda: dq_staging.run(dq_staging.staging_trace(0), -1)]
)
def test_bad_input(call):
    with pytest.raises(ContractViolation, match="tiles must not be negative, not -1"):
        call()
