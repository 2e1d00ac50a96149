"""The ring as a machine: each failure of specification 0x03, by its cause and by its symptom."""

import pytest

from cupyfa.oracles.hopper.barriers import ArrivalOverflow
from cupyfa.oracles.hopper.machine import Deadlock, Machine, Work
from cupyfa.oracles.hopper.pipeline import (
    ConservationError,
    DanglingArrival,
    EarlyRead,
    EarlyReuse,
    ReleaseBeforeProduction,
    Ring,
    RingConsumer,
    RingProducer,
    StaleGeneration,
)
from cupyfa.oracles.hopper.ring import PipelineState
from cupyfa.oracles.hopper.roles import Config, Consumer, Cta, Durations, Producer, load_order, run
from cupyfa.oracles.hopper.wgmma_queue import ReleaseBeforeCompletion

ONE = Config(consumers=1, pingpong=False)  # the smallest CTA that has all rings
SLOW = Durations(load=5, qk=3, softmax=4, pv=3, store=2)


TILES = [3, 3, 3]


def expect(error, message=None, *, tiles=TILES, config=ONE, **roles):
    with pytest.raises(error, match=message) as caught:
        run(config, tiles, SLOW, **roles)
    return caught.value


class ResetsProducer(Producer):
    """Starts each tile as if the ring were new."""

    def load_tile(self, tile, blocks):
        self.K.state = PipelineState.of_producer(self.K.ring.stages)
        return super().load_tile(tile, blocks)


class ResetsConsumer(Consumer):
    def overlapped(self, q, blocks):
        self.K.state = PipelineState.of_consumer(self.K.ring.stages)
        return super().overlapped(q, blocks)


class TestStateResetAtATileBorder:
    def test_producer_overwrites_a_live_stage(self):
        message = r"K\[0\] is filled with item 2 before consumer 0 released item 0"
        expect(EarlyReuse, message, tiles=[2, 2], producer=ResetsProducer)

    def test_consumer_takes_an_old_generation(self):
        message = r"consumer 0 reads K\[0\] as item 1, but it holds item 0"
        expect(StaleGeneration, message, tiles=[1, 1], consumer=ResetsConsumer)

    def test_consumer_waits_for_a_generation_that_is_over(self):
        error = expect(Deadlock, tiles=[2, 2], consumer=ResetsConsumer)
        assert error.blocked["consumer 0"] == "K.full[0] parity 0 (item 2)"

    @pytest.mark.parametrize("blocks", range(1, 13))
    def test_it_only_goes_well_by_coincidence(self, blocks):
        """When each tile moves a ring of 2 by whole periods of 4 items, resetting changes nothing."""
        if blocks % 4 == 0:
            run(ONE, [blocks] * 3, SLOW, producer=ResetsProducer, consumer=ResetsConsumer)
        else:
            with pytest.raises((StaleGeneration, EarlyReuse, Deadlock, ArrivalOverflow)):
                run(ONE, [blocks] * 3, SLOW, producer=ResetsProducer, consumer=ResetsConsumer)


class SkipsABlock(Producer):
    """Leaves out the block of ordinal 1, which the consumers expect: another idea of what is visible."""

    def load_tile(self, tile, blocks):
        for name, r in load_order(blocks):
            if (tile, r, name != "Q") == (0, 1, True):
                continue
            ring = getattr(self, name)
            slot = yield from ring.acquire()
            ring.copy(slot, (tile, blocks - 1 - r) if name != "Q" else tile)


class TestProducerSkipsABlock:
    def test_the_last_block_never_comes(self):
        error = expect(Deadlock, tiles=[3], producer=SkipsABlock)
        assert error.blocked["consumer 0"].startswith("K.full[0] parity 1 (item 2)")
        assert error.graph["consumer 0"] == ("producer",)

    def test_until_then_the_payloads_are_the_wrong_ones(self):
        """In the middle of a longer run the next tile's block fills the gap: counts agree, identities do not."""

        class AddsOneLater(SkipsABlock):
            def run(self, tiles):
                yield from super().run(tiles)
                for ring in (self.K, self.V):
                    slot = yield from ring.acquire()
                    ring.copy(slot, "filler")

        config = Config(consumers=1, pingpong=False, q_stages=2)
        expect(ConservationError, r"K: committed .*\(1, \(0, 0\)\)", tiles=[3, 3], config=config, producer=AddsOneLater)


class LeavesWithoutReleasingV(Consumer):
    def release_v(self, slot):
        if slot.ordinal != 2:
            super().release_v(slot)


def test_a_path_that_leaves_without_releasing_v_stops_the_producer_at_the_wrap():
    error = expect(Deadlock, consumer=LeavesWithoutReleasingV)
    assert error.blocked["producer"] == "V.empty[0] parity 1 (item 4)"
    assert error.graph["producer"] == ("consumer 0",)
    assert set(error.cycle) == {"producer", "consumer 0"}


class ReleasesKEarly(Consumer):
    """Before the wait that proves QK."""

    early = True

    def issue_scores(self, q, k):
        super().issue_scores(q, k)
        if self.early:
            self.release_k(k)
            self.early = False
            self.release_k = lambda slot: None


class ReleasesKBlindly(ReleasesKEarly):
    """The same without asking the queue: only the data can tell."""

    def issue_scores(self, q, k):
        Consumer.issue_scores(self, q, k)
        self.K.release(k)

    def release_k(self, slot):
        pass


class ReleasesVEarly(Consumer):
    def issue_output(self, v):
        super().issue_output(v)
        self.release_v(v)
        self.release_v = lambda slot: None


class ReleasesVBlindly(Consumer):
    def issue_output(self, v):
        super().issue_output(v)
        self.V.release(v)

    def release_v(self, slot):
        pass


class TestReleaseBeforeTheLastReader:
    def test_k(self):
        expect(ReleaseBeforeCompletion, "gives back a tile that QK reads", consumer=ReleasesKEarly)

    def test_v(self):
        expect(ReleaseBeforeCompletion, "gives back a tile that PV reads", consumer=ReleasesVEarly)

    @pytest.mark.parametrize("role", [ReleasesKBlindly, ReleasesVBlindly])
    def test_the_symptom_depends_on_timing(self, role):
        """Unproven releases corrupt only when the copy comes in time: all counters stay balanced."""
        fast = Durations(load=1, qk=40, softmax=1, pv=40)
        with pytest.raises(EarlyReuse, match="while consumer 0 reads it"):
            run(ONE, [9], fast, consumer=role)
        lucky = Durations(load=1, qk=0, softmax=50, pv=0)
        run(ONE, [9], lucky, consumer=role)


class AdvancesWithoutRelease(Consumer):
    def release_k(self, slot):
        self.queue.release(slot)  # the state has moved on; nobody told the barrier


def test_advancing_without_a_release_looks_like_progress_for_one_round():
    error = expect(Deadlock, consumer=AdvancesWithoutRelease)
    assert error.blocked["producer"] == "K.empty[0] parity 0 (item 2)"
    assert error.blocked["consumer 0"].startswith("K.full[0]")


class ReleasesWhatItNeverHad(Consumer):
    def overlapped(self, q, blocks):
        self.K.release(self.K.peek())
        yield from super().overlapped(q, blocks)


class TestReleaseOfAStageThatWasNeverProduced:
    def test_cause(self):
        expect(ReleaseBeforeProduction, "releases item 0 of K, which it never held", consumer=ReleasesWhatItNeverHad)

    def test_symptom_a_stage_looks_free_that_is_not(self):
        """Unmonitored: the producer takes slot 0 again, and the consumer finds a later item in it."""
        with pytest.raises((StaleGeneration, EarlyRead, EarlyReuse)):
            run(ONE, [6], SLOW, consumer=ReleasesWhatItNeverHad, monitored=False)

    def test_a_second_release(self):
        class Twice(Consumer):
            def release_v(self, slot):
                super().release_v(slot)
                super().release_v(slot)

        expect(ReleaseBeforeProduction, "a second time", consumer=Twice)

    def test_a_consumer_that_is_none(self):
        with pytest.raises(ValueError, match="none of its consumers"):
            RingConsumer(Cta(ONE).k, "stranger")


class IgnoresParity(Consumer):
    """Looks at the stage only: the phase never flips."""

    def overlapped(self, q, blocks):
        self.K.advance = lambda: (
            setattr(self.K, "ordinal", self.K.ordinal + 1)
            or setattr(self.K, "state", PipelineState((self.K.state.z + 1) % self.K.ring.stages, self.K.ring.stages))
        )
        return super().overlapped(q, blocks)


def test_a_stage_without_parity_takes_an_old_completion_for_the_new_one():
    with pytest.raises(StaleGeneration, match=r"took generation 0 of K\[0\] for 1, that of item 2"):
        run(ONE, [5], Durations(load=50), consumer=IgnoresParity)


def test_a_stage_without_parity_can_also_wait_for_ever():
    error = expect(Deadlock, tiles=[5], consumer=IgnoresParity)  # the new tile has landed: its parity is the other one
    assert error.blocked["consumer 0"] == "K.full[0] parity 0 (item 2)"


def cluster(tail):
    """Two CTAs share the first one's producer: the second one's consumer arrives at barriers in the first's memory."""
    machine = Machine()
    ring = Ring(machine, "K", 2, ["consumer 0", "consumer 1"], copy_cycles=lambda: 1)
    alive = {"producer", "consumer 0"}  # the threads of CTA 0

    def leave(name):
        alive.discard(name)
        ring.open = bool(alive)

    def produce():
        side = RingProducer(ring)
        for r in range(3):
            slot = yield from side.acquire()
            side.copy(slot, r)
        if tail:
            yield from side.tail()

    def consume(name, cycles):
        side = RingConsumer(ring, name)
        for _ in range(3):
            slot = yield from side.wait()
            yield Work(cycles)
            side.release(slot)

    machine.spawn("producer", produce(), lambda: leave("producer"))
    machine.spawn("consumer 0", consume("consumer 0", 1), lambda: leave("consumer 0"))
    machine.spawn("consumer 1", consume("consumer 1", 20))
    machine.run()
    return ring


class TestProducerTail:
    def test_without_it_a_peer_arrives_at_a_cta_that_has_gone(self):
        with pytest.raises(DanglingArrival, match=r"consumer 1 releases K\[\d\] of a CTA that has exited"):
            cluster(tail=False)

    def test_with_it_the_producer_stays_until_all_is_given_back(self):
        ring = cluster(tail=True)
        tail = [e for e in ring.machine.events if e.action == "tail"]
        last = max(e.time for e in ring.machine.events if e.action == "release")
        assert [e.time for e in tail] == [last]

    def test_it_is_no_payload(self):
        ring = cluster(tail=True)
        assert (ring.produced, len(ring.acquired)) == (3, 3)
        ring.check_conservation(range(3))

    def test_a_dummy_tile_in_its_place_is_one_too_many(self):
        class DummyTail(Producer):
            def run(self, tiles):
                yield from super().run(tiles)
                slot = yield from self.V.acquire()
                self.V.copy(slot, "dummy")

        expect(ConservationError, "V: acquired", producer=DummyTail)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Ring(Machine(), "K", 0, ["consumer"]), "0 stages and 1 consumers"),
        (lambda: Ring(Machine(), "K", 2, []), "2 stages and 0 consumers"),
        (lambda: Ring(Machine(), "K", 2, ["consumer"], arrivals=0), "0 arrivals"),
        (lambda: Ring(Machine(), "K", 2, ["consumer"], tile_bytes=0), "0 bytes"),
        (
            lambda: RingConsumer(Ring(Machine(), "K", 2, ["consumer"]), "nobody"),
            "ring K: nobody is none of its consumers",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
