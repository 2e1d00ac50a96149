"""The producer that transposes V: legal orders run, each broken rule has a name (specification 0x06)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.fp8.transpose import (
    WARPS,
    CommitWithoutWrites,
    EarlyRelease,
    EarlyTranspose,
    OverwriteLiveTile,
    ReadBeforeCommit,
    TransposeProducer,
    UnpublishedWrites,
    run,
    shared_memory_bytes,
    tile_steps,
)
from cupyfa.oracles.violations import ContractViolation

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


def test_order_of_the_nine_steps():
    events = run(tile_steps(0)).events
    actions = list(dict.fromkeys(e.action for e in events))
    assert actions == ["issue", "arrive", "load", "store", "fence", "commit", "barrier", "release", "consume"]
    assert [e.ordinal for e in events] == list(range(len(events)))
    assert sum(e.action == "barrier" for e in events) == WARPS == 4


def test_the_barrier_has_128_threads():
    assert WARPS * 32 == 128


@given(st.data(), st.integers(1, 3), st.integers(1, 6))
@PROPERTY
def test_every_interleaving_that_respects_the_rules_runs(data, stages, tiles):
    """Warps advance in any order; commit, release and reuse come when they may."""
    machine = TransposeProducer(stages)
    for tile in range(tiles):
        stage = tile % stages
        machine.issue(stage)
        machine.arrive(stage)
        position = dict.fromkeys(range(WARPS), 0)
        committed = False
        while any(p < 4 for p in position.values()) or not committed:
            choices = [w for w, p in position.items() if p < 4]
            ready = not committed and all(p >= 3 for p in position.values())
            choice = data.draw(st.sampled_from(choices + (["commit"] if ready else [])))
            if choice == "commit":
                machine.commit(stage)
                committed = True
            else:
                getattr(machine, ("load", "store", "fence", "barrier")[position[choice]])(stage, choice)
                position[choice] += 1
        for last in data.draw(st.permutations(["release", "consume"])):
            getattr(machine, last)(stage)
    consumed = [e.tile for e in machine.events if e.action == "consume"]
    assert consumed == list(range(tiles))


@given(st.data())
@PROPERTY
def test_leaving_out_any_one_step_is_caught(data):
    # Two tiles through one stage, so that a missing release or consume shows too.
    steps = [*tile_steps(0), *tile_steps(0)]
    left_out = data.draw(st.integers(0, len(steps) // 2 - 1))
    with pytest.raises(ContractViolation):
        run(steps[:left_out] + steps[left_out + 1 :])


def without(action, warp):
    return [step for step in tile_steps(0) if step != (action, 0, warp)]


@pytest.mark.parametrize("warp", range(WARPS))
@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("load", EarlyTranspose),
        ("store", CommitWithoutWrites),
        ("fence", UnpublishedWrites),
        ("barrier", EarlyRelease),
    ],
)
def test_a_warp_that_skips_a_step(action, error, warp):
    with pytest.raises(error):
        run(without(action, warp))


def test_release_before_the_collective_closes():
    # Warp 0 is done and hands Vt back; warps 1 to 3 have not read it. TMA would overwrite what they still need.
    machine = TransposeProducer(1)
    machine.issue(0)
    machine.arrive(0)
    for step in (machine.load, machine.store, machine.fence, machine.barrier):
        step(0, 0)
    with pytest.raises(EarlyRelease, match="1 of 4"):
        machine.release(0)
    with pytest.raises(OverwriteLiveTile):
        machine.issue(0)


def test_read_before_the_copy_arrives():
    machine = TransposeProducer(1)
    with pytest.raises(EarlyTranspose):
        machine.load(0, 0)
    machine.issue(0)
    with pytest.raises(EarlyTranspose):
        machine.load(0, 0)


def test_v_is_overwritten_before_the_consumers_release_it():
    steps = [step for step in tile_steps(0) if step[0] != "consume"]
    with pytest.raises(OverwriteLiveTile, match="consumers"):
        run([*steps, *tile_steps(0)])


def test_consumer_reads_before_commit():
    with pytest.raises(ReadBeforeCommit):
        run([step for step in tile_steps(0) if step[0] != "commit"])


def test_write_before_read_and_close_before_write():
    machine = TransposeProducer(1)
    machine.issue(0)
    machine.arrive(0)
    with pytest.raises(EarlyTranspose):
        machine.store(0, 0)
    with pytest.raises(EarlyTranspose):
        machine.barrier(0, 0)


def test_a_fence_before_the_write_publishes_nothing():
    machine = TransposeProducer(1)
    machine.issue(0)
    machine.arrive(0)
    for warp in range(WARPS):
        machine.load(0, warp)
        machine.fence(0, warp)
        machine.store(0, warp)
    with pytest.raises(UnpublishedWrites):
        machine.commit(0)


def test_stages_are_needed():
    with pytest.raises(ValueError, match="0 stages"):
        TransposeProducer(0)


def test_shared_memory_of_the_extra_stages():
    sizes = shared_memory_bytes(128, 224, 128, 128)
    assert {name: size // 1024 for name, size in sizes.items()} == {"Q": 16, "K": 56, "V": 56, "Vt": 56}
    assert sum(sizes.values()) <= 227 * 1024
    # One byte per value does not make the second copy free: K, V and Vt of FP8 need 3/4 of what K and V do in 16 bit.
    assert (sizes["K"] + sizes["V"] + sizes["Vt"]) / (2 * (sizes["K"] + sizes["V"])) == 0.75
    assert shared_memory_bytes(128, 224, 128, 128, transpose=False)["Vt"] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TransposeProducer(2).issue(2), r"stage is 2; it must be in 0 .. 1"),
        (lambda: TransposeProducer(1).issue(-1), r"stage is -1"),
        (lambda: TransposeProducer(1).load(0, warp=WARPS), r"warp is 4"),
        (lambda: TransposeProducer(1).arrive(0), r"never issued"),
        (lambda: run([("sleep", 0, None)]), r"no step 'sleep'"),
        (lambda: run([("load", 0, None)]), r"no step 'load' of warp None"),
        (lambda: shared_memory_bytes(128, 0, 128, 128), r"tile_n is 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
