"""Coordinates, liveness and times of the ring (specification 0x03): every printed figure, and what they rest on."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.hopper.liveness import check_liveness, wait_for_graph
from cupyfa.oracles.hopper.machine import Deadlock, find_cycle
from cupyfa.oracles.hopper.ring import (
    PipelineState,
    barrier_count,
    ideal_cycles,
    pipeline_speedup,
    position,
    positions,
    serial_cycles,
    speedup_limit,
)
from cupyfa.oracles.hopper.roles import Config, Durations, run

exact = settings(deadline=None, derandomize=True, max_examples=100)
BLOCKS, STAGES = st.integers(0, 40), st.integers(1, 6)


def test_coordinate_table():
    """s = 2, J = 5, blocks 4 to 0: all seven columns."""
    table = [dataclasses.astuple(p) for p in positions(5, 2)]
    assert table == [
        (0, 4, 0, 0, 0, 1, 1),
        (1, 3, 1, 0, 0, 1, 1),
        (2, 2, 0, 1, 1, 2, 0),
        (3, 1, 1, 1, 1, 2, 0),
        (4, 0, 0, 2, 0, 3, 1),
    ]
    assert [p.stage for p in positions(5, 2)].count(0) == 3  # three generations of one slot


@exact
@given(st.integers(0, 200), STAGES)
def test_coordinates_follow_the_formulas(r, s):
    p = position(r, s, block_end=1000)
    assert (p.stage, p.consumer_phase, p.full_parity) == (r % s, r // s, (r // s) % 2)
    assert p.block == 999 - r
    assert p.producer_phase == p.consumer_phase + 1  # one generation ahead
    assert p.empty_parity == 1 - p.full_parity


@exact
@given(st.integers(0, 200), STAGES)
def test_phase_flips_exactly_when_the_index_wraps(z, s):
    state, following = PipelineState(z, s), PipelineState(z, s).advanced()
    assert following.index == (state.index + 1) % s
    assert following.parity == state.parity ^ (state.index == s - 1)


@exact
@given(st.integers(0, 100), STAGES)
def test_one_parity_bit_tells_neighbouring_generations_of_a_slot_apart(r, s):
    """And only those: two generations apart they look the same, which is why a ring may run at most one round ahead."""
    rows = positions(r + 2 * s + 1, s)
    assert rows[r].full_parity != rows[r + s].full_parity
    assert rows[r].full_parity == rows[r + 2 * s].full_parity


def test_initial_states():
    consumer, producer = PipelineState.of_consumer(2), PipelineState.of_producer(2)
    assert (consumer.z, consumer.index, consumer.parity) == (0, 0, 0)
    assert (producer.z, producer.index, producer.parity) == (2, 0, 1)


@pytest.mark.parametrize(("stages", "count", "size"), [(1, 6, 48), (2, 10, 80), (3, 14, 112), (4, 18, 144)])
def test_barrier_count(stages, count, size):
    assert barrier_count(stages) == 2 + 4 * stages == count
    assert 8 * barrier_count(stages) == size


# --- The wait-for graph ---


@exact
@given(BLOCKS, STAGES)
def test_a_ring_has_no_cycle(blocks, stages):
    check_liveness(wait_for_graph(blocks, stages))


@exact
@given(st.integers(1, 40), STAGES)
def test_following_a_producers_wait_backwards_shrinks_the_ordinal_by_s(blocks, stages):
    graph = wait_for_graph(blocks, stages)
    r = blocks - 1
    steps = 0
    while r >= stages:
        assert f"release {r - stages}" in graph[f"produce {r}"]
        assert graph[f"release {r - stages}"] == (f"consume {r - stages}",)
        assert f"produce {r - stages}" in graph[f"consume {r - stages}"]
        r, steps = r - stages, steps + 1
    assert not [edge for edge in graph[f"produce {r}"] if edge.startswith("release")]  # the free base case
    assert steps == (blocks - 1) // stages


@exact
@given(st.integers(2, 30), STAGES, st.integers(0, 8))
def test_a_consumer_may_hold_fewer_slots_than_there_are(blocks, stages, lag):
    """Releasing `lag` items late needs more than `lag` slots, or a tile that fits into the ring."""
    graph = wait_for_graph(blocks, stages, lag=lag)
    if lag < stages or blocks <= stages:
        check_liveness(graph)
    else:
        with pytest.raises(Deadlock) as caught:
            check_liveness(graph)
        assert {node.split()[0] for node in caught.value.cycle} == {"produce", "release", "consume"}


@exact
@given(st.data())
def test_a_block_that_is_never_produced_blocks_its_consumer(data):
    blocks, stages = data.draw(st.integers(1, 30)), data.draw(STAGES)
    skipped = data.draw(st.integers(0, blocks - 1))
    graph = wait_for_graph(blocks, stages, produced=set(range(blocks)) - {skipped})
    with pytest.raises(Deadlock, match=f"consume {skipped} waits for produce {skipped}, which never happens"):
        check_liveness(graph)


@exact
@given(st.data())
def test_a_release_that_is_forgotten_blocks_the_producer_one_round_later(data):
    stages = data.draw(STAGES)
    blocks = data.draw(st.integers(stages + 1, stages + 30))
    forgotten = data.draw(st.integers(0, blocks - 1 - stages))
    graph = wait_for_graph(blocks, stages, released=set(range(blocks)) - {forgotten})
    with pytest.raises(
        Deadlock, match=f"produce {forgotten + stages} waits for release {forgotten}, which never happens"
    ):
        check_liveness(graph)


def test_find_cycle_in_a_long_chain():
    chain = {str(i): (str(i + 1),) for i in range(100_000)}
    assert find_cycle(chain) == ()
    assert len(find_cycle({**chain, "100000": ("0",)})) == 100_001


# --- Time ---


def test_printed_times():
    assert serial_cycles(5, 300, 500) == 4_000
    assert ideal_cycles(5, 300, 500) == 300 + 500 + 4 * 500 == 2_800
    assert f"{pipeline_speedup(5, 300, 500):.2f}" == "1.43"
    assert speedup_limit(300, 500) == pytest.approx(1.6)


def test_one_block_or_one_stage_gains_nothing():
    assert pipeline_speedup(1, 300, 500) == 1
    assert ideal_cycles(5, 300, 500, stages=1) == serial_cycles(5, 300, 500)


@exact
@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 1000))
def test_speedup_grows_to_its_limit(blocks, load, compute):
    now, later, limit = (
        pipeline_speedup(blocks, load, compute),
        pipeline_speedup(blocks + 1, load, compute),
        speedup_limit(load, compute),
    )
    assert 1 <= now <= later + 1e-12 <= limit + 1e-9
    assert limit <= 2
    assert pipeline_speedup(10**9, load, compute) == pytest.approx(limit, rel=1e-6)


@exact
@given(st.integers(1, 12), st.integers(0, 50), st.integers(1, 50), st.integers(1, 4))
def test_the_machine_takes_exactly_the_ideal_time(blocks, load, compute, stages):
    """Fill, steady state and drain, played out by a producer and a consumer on real barriers."""
    from cupyfa.oracles.hopper.machine import Machine, Resource, Work
    from cupyfa.oracles.hopper.pipeline import Ring, RingConsumer, RingProducer

    machine = Machine()
    ring = Ring(machine, "KV", stages, ["consumer"], copy_cycles=lambda: load, engine=Resource(machine, "tma"))

    def produce():
        side = RingProducer(ring)
        for r in range(blocks):
            slot = yield from side.acquire()
            side.copy(slot, r)

    def consume():
        side = RingConsumer(ring, "consumer")
        for _ in range(blocks):
            slot = yield from side.wait()
            yield Work(compute)
            side.release(slot)

    machine.spawn("producer", produce())
    machine.spawn("consumer", consume())
    machine.run()
    assert machine.now == ideal_cycles(blocks, load, compute, stages=stages)
    ring.check_conservation(range(blocks))
    # The first s acquires are in the program and return at once.
    acquires = [event.time for event in machine.events if event.action == "acquire"]
    assert acquires[:stages] == [0] * min(stages, blocks)


def test_the_kernels_own_order_hides_loads_as_well():
    """K leads V by a block, so one round of the whole kernel takes the longer of two copies and the serial chain."""
    cta = run(Config(consumers=1, pingpong=False, overlap=False), [20], Durations(load=10, qk=10, softmax=10, pv=10))
    assert cta.machine.now == 10 + 10 + 20 * 30  # K and Q of the first block; then 30 of compute hide 20 of copies


# --- Bad input ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PipelineState(0, 0), "ring: 0 stages"),
        (lambda: PipelineState(-1, 2), "starts at 0"),
        (lambda: position(-1, 2, 5), "ordinal is -1"),
        (lambda: barrier_count(0), "ring: 0 stages"),
        (lambda: ideal_cycles(0, 1, 1), "0 blocks in 2 stages"),
        (lambda: ideal_cycles(1, 1, 1, stages=0), "1 blocks in 0 stages"),
        (lambda: ideal_cycles(3, -300, 500), "load is -300"),
        (lambda: ideal_cycles(3, 300, float("nan")), "compute is nan"),
        (lambda: serial_cycles(-1, 300, 500), "-1 blocks"),
        (lambda: serial_cycles(1, 300, float("inf")), "compute is inf"),
        (lambda: pipeline_speedup(1, 0, 0), "a ratio needs one that is positive"),
        (lambda: speedup_limit(0, 0), "a ratio needs one that is positive"),
        (lambda: speedup_limit(1, -1), "compute is -1"),
        (lambda: position(5, 2, 5), "would be block -1"),
        (lambda: positions(-3, 2), "-3 blocks"),
        (lambda: positions(0, 0), "ring: 0 stages"),
        (lambda: wait_for_graph(-1, 2), "-1 blocks"),
        (lambda: wait_for_graph(3, 0), "0 stages"),
        (lambda: wait_for_graph(3, 2, lag=-1), "lag -1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
