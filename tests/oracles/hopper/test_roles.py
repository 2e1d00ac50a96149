"""The kernel's roles on the machine: conservation of payloads in every interleaving (specification 0x03)."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.hopper.machine import Machine
from cupyfa.oracles.hopper.pipeline import ConservationError, Ring, RingConsumer, RingProducer
from cupyfa.oracles.hopper.roles import Config, Consumer, Durations, load_order, run, warpgroup_names

exact = settings(deadline=None, derandomize=True, max_examples=200)

ONE = Config(consumers=1, pingpong=False)  # the smallest CTA that has all rings
SLOW = Durations(load=5, qk=3, softmax=4, pv=3, store=2)


def random_durations(seed):
    draw = random.Random(seed)
    short = lambda: draw.choice([0, 0, 1, 2, 7])  # noqa: E731
    return Durations(load=short, qk=short, softmax=short, pv=short, store=short)


@exact
@given(
    seed=st.integers(0, 2**32),
    tiles=st.lists(st.integers(0, 9), max_size=5),
    consumers=st.integers(1, 3),
    stages=st.integers(1, 4),
    q_stages=st.integers(1, 2),
    overlap=st.booleans(),
    pingpong=st.booleans(),
)
def test_every_interleaving_conserves_payloads(seed, tiles, consumers, stages, q_stages, overlap, pingpong):
    """`run` checks all events of all rings and the token; here the capacity bound at every moment as well."""
    config = Config(consumers, stages, q_stages, overlap, pingpong and consumers > 1)
    cta = run(config, tiles, random_durations(seed), seed=seed)
    assert cta.k.produced == cta.k.freed == cta.v.produced == cta.v.freed == sum(tiles)
    for ring in (cta.q, cta.k, cta.v):
        held, seen = 0, dict.fromkeys(cta.names, 0)
        for event in cta.machine.events:
            if event.target != ring.name:
                continue
            if event.action == "commit":
                held += 1
                assert held - min(seen.values()) <= ring.stages
            elif event.action == "release":
                seen[event.agent] += 1
                assert seen[event.agent] <= held


def test_machine_is_deterministic_for_a_seed():
    def events(seed):
        return run(Config(), [3, 2], random_durations(1), seed=seed).machine.events

    assert events(7) == events(7)
    assert events(7) != events(8)


def test_the_first_acquires_do_not_wait():
    cta = run(Config(stages=3), [6], SLOW)
    times = [e.time for e in cta.machine.events if e.action == "acquire" and e.target == "K"]
    assert times[:3] == [0, 0, 0]
    assert times[3] > 0


def test_k_is_given_back_while_v_of_the_same_block_is_needed():
    cta = run(ONE, [3], SLOW)
    release = {(e.target, e.ordinal): e.time for e in cta.machine.events if e.action == "release"}
    assert all(release["K", r] < release["V", r] for r in range(3))


def test_state_carries_over_between_tiles():
    """An odd number of blocks leaves the ring in the middle; the next tile goes on from there."""
    cta = run(Config(stages=2), [3, 3], SLOW)
    waits = [
        (e.stage, e.phase) for e in cta.machine.events if (e.agent, e.action, e.target) == ("consumer 0", "wait", "K")
    ]
    assert waits == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0)]


def test_an_empty_tile_moves_q_only():
    cta = run(Config(), [0, 0, 0], SLOW)
    assert (cta.k.produced, cta.v.produced, cta.q.produced) == (0, 0, 3)
    assert all(side == 0 for side in cta.token.waits.values())


@exact
@given(st.sets(st.integers(0, 60)), st.integers(1, 4), st.integers(0, 2**32))
def test_a_sparse_traversal_counts_the_selected_blocks(blocks, stages, seed):
    """J is how many blocks are selected, not how far apart the first and the last are."""
    selected = sorted(blocks, reverse=True)
    machine = Machine(seed)
    ring = Ring(machine, "K", stages, ["consumer"])

    def produce():
        side = RingProducer(ring)
        for block in selected:
            slot = yield from side.acquire()
            side.copy(slot, block)

    def consume():
        side = RingConsumer(ring, "consumer")
        for _ in selected:
            slot = yield from side.wait()
            side.release(slot)

    machine.spawn("producer", produce())
    machine.spawn("consumer", consume())
    machine.run()
    ring.check_conservation(selected)
    assert len(ring.acquired) == len(selected)


def test_load_order():
    assert load_order(0) == [("Q", 0)]
    assert load_order(1) == [("K", 0), ("Q", 0), ("V", 0)]
    assert load_order(3) == [("K", 0), ("Q", 0), ("K", 1), ("V", 0), ("K", 2), ("V", 1), ("V", 2)]


def test_conservation_compares_identities():
    cta = run(ONE, [3], SLOW)
    payloads = [(0, 2), (0, 1), (0, 0)]
    cta.k.check_conservation(payloads)
    with pytest.raises(ConservationError, match="K: acquired"):
        cta.k.check_conservation(payloads[:2])
    with pytest.raises(ConservationError, match="K: committed"):
        cta.k.check_conservation(payloads[::-1])
    cta.k.waited["consumer 0"][0] = (0, "other")
    with pytest.raises(ConservationError, match="K: consumer 0 used"):
        cta.k.check_conservation(payloads)
    cta.v.released["consumer 0"].pop()
    with pytest.raises(ConservationError, match="V: consumer 0 released"):
        cta.v.check_conservation(payloads)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: warpgroup_names(0), "0 consumers"),
        (lambda: load_order(-1), "-1 blocks"),
        (lambda: run(Config(), [1, -1]), r"tiles of \[1, -1\] blocks"),
        (lambda: run(Config(), [1], consumer=[Consumer]), "1 roles for 2 consumers"),
        (lambda: Ring(Machine(), "K", 0, ["consumer"]), "0 stages"),
        (lambda: Ring(Machine(), "K", 2, []), "0 consumers"),
        (lambda: run(Config(), [1], Durations(load=-1)), "copy is -1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
