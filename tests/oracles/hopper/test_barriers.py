"""mbarriers and named barriers, and what breaks without them (specification 0x02 and 0x04)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.hopper.barriers import ArrivalOverflow, MBarrier, NamedBarrier, ParticipantMismatch
from cupyfa.oracles.hopper.machine import Deadlock, Machine, Resource, Work
from cupyfa.oracles.hopper.pipeline import EarlyRead, EarlyReuse, Ring, RingConsumer, RingProducer

exact = settings(deadline=None, derandomize=True, max_examples=200)


# --- mbarrier ---


@exact
@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_phase_needs_all_arrivals_and_all_bytes(arrivals, boxes, order):
    barrier = MBarrier(arrivals)
    barrier.arrive(expect=sum(boxes))
    steps = [("bytes", n) for n in boxes] + [("arrival", 1)] * (arrivals - 1)
    order.shuffle(steps)
    for i, (kind, n) in enumerate(steps):
        assert not barrier.passed(0), (i, steps)
        barrier.complete_bytes(n) if kind == "bytes" else barrier.arrive(n)
    assert barrier.passed(0)
    assert not barrier.passed(1)
    assert (barrier.pending, barrier.transactions) == (arrivals, 0)  # ready for the next phase


def test_the_phase_before_the_first_counts_as_complete():
    assert MBarrier(1).passed(1)
    assert not MBarrier(1).passed(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MBarrier(0), "at least one arrival"),
        (lambda: MBarrier(1).arrive(0), "0 arrivals"),
        (lambda: MBarrier(1).arrive(expect=-1), "-1 bytes"),
        (lambda: MBarrier(1).complete_bytes(-1), "-1 bytes have landed"),
        (lambda: MBarrier(1).passed(2), "parity 2"),
        (lambda: NamedBarrier("B0").arrive(0, 256), "0 threads"),
        (lambda: NamedBarrier("B0").arrive(128, 0), "a barrier of 0"),
        (lambda: Work(-1), "work is -1"),
        (lambda: Resource(Machine(), "tma").start(-1, "copy"), "tma: copy is -1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_mbarrier_refuses_too_many_arrivals():
    with pytest.raises(ArrivalOverflow, match="2 arrivals at an mbarrier phase that misses 1"):
        MBarrier(1).arrive(2)
    with pytest.raises(ValueError, match="at least one arrival"):
        MBarrier(0)


# --- Failures of 0x02: each synchronisation domain left out ---


def two_sided(produce, consume, cycles=lambda: 10):
    machine = Machine()
    ring = Ring(machine, "K", 2, ["consumer"], copy_cycles=cycles)
    machine.spawn("producer", produce(RingProducer(ring)))
    machine.spawn("consumer", consume(RingConsumer(ring, "consumer")))
    machine.run()


def produce_one(side, **options):
    slot = yield from side.acquire()
    side.copy(slot, 0, **options)


def read_one(side):
    slot = yield from side.wait()
    slot.require_readable("consumer")
    side.release(slot)


class TestTransactionBytes:
    def test_exact(self):
        two_sided(lambda side: produce_one(side, pieces=2), read_one)

    def test_too_few_release_the_reader_early(self):
        cycles = iter([1, 50])  # of the two boxes
        with pytest.raises(EarlyRead, match="16384 bytes are still in flight"):
            two_sided(lambda side: produce_one(side, expect=16_384, pieces=2), read_one, lambda: next(cycles))

    def test_too_many_hang_it(self):
        with pytest.raises(Deadlock, match=r"consumer waits for K.full\[0\]"):
            two_sided(lambda side: produce_one(side, expect=65_536), read_one)

    def test_an_arrival_alone_proves_nothing(self):
        with pytest.raises(EarlyRead, match="still in flight"):
            two_sided(lambda side: produce_one(side, expect=0), read_one)

    def test_boxes_divide_the_tile(self):
        with pytest.raises(ValueError, match="3 boxes do not divide"):
            two_sided(lambda side: produce_one(side, pieces=3), read_one)


class TestWithoutThePipeline:
    def test_consumer_that_does_not_wait_reads_a_partial_tile(self):
        def peek(side):
            yield Work(3)
            side.peek().require_readable("consumer")

        with pytest.raises(EarlyRead, match="bytes are still in flight"):
            two_sided(produce_one, peek)

    def test_landed_by_luck_is_no_proof(self):
        def peek(side):
            yield Work(30)
            side.peek().require_readable("consumer")

        with pytest.raises(EarlyRead, match="without having waited"):
            two_sided(produce_one, peek)
        with pytest.raises(EarlyRead, match="it holds nothing yet"):
            two_sided(lambda side: iter(()), peek)

    def test_producer_that_does_not_acquire_overwrites(self):
        def careless(side):
            for r in range(3):
                if r < 2:
                    slot = yield from side.acquire()
                else:
                    yield Work(100)
                    slot = type(slot)(side.ring, 0, 2, 0)
                side.copy(slot, r)

        def reads_for_long(side):
            slot = yield from side.wait()
            yield Work(1000)
            side.release(slot)

        with pytest.raises(EarlyReuse, match=r"K\[0\] is filled with item 2 before consumer released item 0"):
            two_sided(careless, reads_for_long)


def test_ring_needs_a_stage_and_a_consumer():
    with pytest.raises(ValueError, match="0 stages"):
        Ring(Machine(), "K", 0, ["consumer"])
    with pytest.raises(ValueError, match="0 consumers"):
        Ring(Machine(), "K", 2, [])


# --- Named barriers ---


def test_one_barrier_for_all_groups_mixes_generations():
    """The design that the ring of barriers avoids: a fast group meets itself."""
    completed = []
    barrier = NamedBarrier("B", completed.append)
    barrier.arrive(128, 256, waiter="WG0, turn 0")
    barrier.arrive(128, 256, waiter="WG0, turn 1")
    assert completed == [["WG0, turn 0", "WG0, turn 1"]]


def test_a_cta_wide_barrier_includes_the_producer():
    machine = Machine()
    barrier = NamedBarrier("B0")
    for g in range(2):
        machine.spawn(f"WG{g}", barrier.sync(f"WG{g}", 128, 384, ["producer"]))
    with pytest.raises(Deadlock) as caught:
        machine.run()
    assert caught.value.graph["WG1"] == ("producer",)


def test_overrun():
    barrier = NamedBarrier("B")
    barrier.arrive(128, 192)
    with pytest.raises(ParticipantMismatch, match="256 threads at a barrier of 192"):
        barrier.arrive(128, 192)
