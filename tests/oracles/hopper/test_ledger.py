"""Registers and shared memory of a Hopper CTA: every figure of specification 0x02 and 0x05."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.hopper.ledger import (
    REFERENCE_REGISTERS,
    SM90,
    DivergentCollective,
    OverBudget,
    RegisterPool,
    ThreadRegisters,
    ownership,
    resident_blocks,
    setmaxnreg,
    shared_memory,
    tile_bytes,
)
from cupyfa.oracles.hopper.live_words import live_words, third_stage_bytes, two_stage_bytes
from cupyfa.oracles.hopper.machine import Deadlock

exact = settings(deadline=None, derandomize=True, max_examples=100)
KIB = 1024


def test_limits():
    assert (SM90.registers, SM90.registers_per_thread, SM90.blocks) == (65_536, 255, 32)
    assert (SM90.shared_bytes, SM90.shared_bytes_per_block) == (228 * KIB, 227 * KIB)
    assert SM90.opt_in_above == 48 * KIB


# --- Registers ---


@pytest.mark.parametrize(("consumers", "expected"), [(1, 39_936), (2, 64_512), (3, 65_536)])
def test_ownership(consumers, expected):
    registers = REFERENCE_REGISTERS[consumers]
    assert ownership(consumers, registers) == expected
    assert expected == 128 * registers.producer + 128 * consumers * registers.consumer


def test_three_consumers_fill_the_multiprocessor_exactly():
    assert ownership(3, REFERENCE_REGISTERS[3]) == SM90.registers
    with pytest.raises(OverBudget, match="66560 registers asked for, 65536 in a multiprocessor"):
        ownership(3, ThreadRegisters(40, 160))


def test_the_one_consumer_request_is_a_hint():
    """256 may be asked for, 255 can be addressed."""
    assert setmaxnreg(REFERENCE_REGISTERS[1].consumer) == SM90.registers_per_thread + 1


@pytest.mark.parametrize("registers", [16, 23, 25, 100, 264])
def test_setmaxnreg_operand(registers):
    with pytest.raises(ValueError, match="a multiple of 8 from 24 to 256"):
        setmaxnreg(registers)


@pytest.mark.parametrize(("consumers", "launch"), [(2, 168), (3, 128)])
def test_reallocation_moves_what_the_launch_gave(consumers, launch):
    registers = REFERENCE_REGISTERS[consumers]
    pool = RegisterPool(1 + consumers, launch)
    assert not pool.can(consumers, registers.consumer)  # waits until the producer has given back
    pool.request(0, [registers.producer] * 4)
    for g in range(1, 1 + consumers):
        pool.request(g, [registers.consumer] * 4)
    assert pool.free == 0


class TestRegisterRedistributionLeftOut:
    def test_consumer_waits_for_registers_that_nobody_gives(self):
        with pytest.raises(Deadlock, match="warpgroup 1 waits for 9216 registers, 0 are free"):
            RegisterPool(3, 168).request(1, [240] * 4)

    def test_one_warp_does_something_else(self):
        with pytest.raises(DivergentCollective, match=r"\[24, 24, 24, 168\]"):
            RegisterPool(3, 168).request(0, [24, 24, 24, 168])

    def test_more_than_the_launch_allocated_is_never_granted(self):
        pool = RegisterPool(3, 168)
        pool.request(0, [32] * 4)
        pool.request(1, [240] * 4)
        with pytest.raises(Deadlock):
            pool.request(2, [240] * 4)


@pytest.mark.parametrize(("threads", "registers", "shared", "expected"), [
    (384, 168, 227 * KIB, 1),  # a legal CTA that leaves no room for another
    (384, 168, 64 * KIB, 1),  # and a small one that registers limit
    (256, 128, 64 * KIB, 2),
    (32, 24, 0, 32),  # the architectural ceiling
    (128, 33, 0, 12),  # a warp takes 1056 registers, which is 1280 in units of 256: 12.8 CTAs, not 15.5
    (128, 40, 0, 12),  # and those units let it have 40 a thread
    (1024, 32, 0, 2),  # threads
    (128, 255, 228 * KIB, 0),
    (128, 256, 0, 0),
])  # fmt: skip
def test_residency(threads, registers, shared, expected):
    assert resident_blocks(threads, registers, shared) == expected


# --- Shared memory ---


def test_transactions_of_a_tile():
    assert tile_bytes(128, 128, 2) == 32_768 == 32 * KIB


def test_printed_payload():
    memory = shared_memory(128, 128, 128, 128, 2, 2)
    assert (memory.q, memory.k, memory.v, memory.p) == (32 * KIB, 64 * KIB, 64 * KIB, 0)
    assert memory.payload == 160 * KIB
    assert shared_memory(128, 128, 128, 128, 2, 2, q_in_registers=True).payload == 128 * KIB
    assert memory.barriers == 80


def test_p_through_shared_memory():
    assert shared_memory(128, 128, 128, 128, 2, 2, p_in_shared=True).p == 32 * KIB


@exact
@given(
    *[st.sampled_from([64, 80, 96, 112, 128, 176, 192])] * 2,
    *[st.sampled_from([64, 96, 128, 192, 256])] * 2,
    st.sampled_from([1, 2]),
    st.integers(1, 4),
    st.booleans(),
)
def test_sharing_saves_the_smaller_of_q_and_v(m, n, d, d_v, b, s, p):
    apart = shared_memory(m, n, d, d_v, b, s, p_in_shared=p)
    together = shared_memory(m, n, d, d_v, b, s, p_in_shared=p, q_in_registers=True)
    assert apart.payload == m * d * b + s * n * d * b + s * n * d_v * b + p * m * n * b
    assert apart.payload - together.payload == min(apart.q, apart.v)
    assert apart.barriers == 8 * (2 + 4 * s)


# --- Live registers of the two-stage loop ---


def test_printed_live_words():
    words = live_words(128, 128, 128, consumers=2, p_itemsize=2)
    assert (words.output, words.scores, words.probabilities) == (64, 64, 32)
    assert words.total == 160
    to_bytes = 4 * 128 * 2  # per word and thread
    assert [w * to_bytes for w in (words.output, words.scores, words.probabilities)] == [64 * KIB, 64 * KIB, 32 * KIB]
    assert words.total * to_bytes == 160 * KIB
    assert REFERENCE_REGISTERS[2].consumer - words.total == 80  # for everything else


def test_second_stage():
    assert two_stage_bytes(128, 128) == 65_536 == 64 * KIB
    assert two_stage_bytes(128, 128) // 4 == 16_384
    assert two_stage_bytes(128, 128) / 4 / (128 * 2) == 64


def test_third_stage():
    extra = third_stage_bytes(128, 128, 2)
    assert extra == 32.5 * KIB
    assert Fraction(extra, 4 * 128 * 2) == Fraction(65, 2)  # 32.5 words
    total = live_words(128, 128, 128, 2, 2).total + Fraction(extra, 4 * 128 * 2)
    assert total == 192.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tile_bytes(0, 128, 2), "0 x 128 elements"),
        (lambda: ownership(0, REFERENCE_REGISTERS[1]), "0 consumer warpgroups"),
        (lambda: shared_memory(128, 128, 128, 128, 2, 0), "0 stages"),
        (lambda: live_words(128, 128, 128, 0, 2), "start at 1"),
        (lambda: resident_blocks(100, 32, 0), "100 threads"),
        (lambda: resident_blocks(128, 0, 0), "0 registers"),
        (lambda: resident_blocks(128, 32, -1), "-1 bytes"),
        (lambda: RegisterPool(0, 168), "0 warpgroups"),
        (lambda: RegisterPool(3, 0), "0 registers per thread"),
        (lambda: RegisterPool(3, 168).can(3, 24), "warpgroup 3 of 3"),
        (lambda: RegisterPool(3, 168).request(-1, [24] * 4), "warpgroup -1 of 3"),
        (lambda: third_stage_bytes(128, 0, 2), "128 x 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
