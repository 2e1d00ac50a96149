"""The backward ledger: every figure of 0x0A for one CTA and for a pair."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell import backward_ledger
from cupyfa.oracles.blackwell.backward_ledger import CONTRACTIONS, one_cta, two_cta
from cupyfa.oracles.blackwell.claims import BoundCalledRuntime, Figure, Kind, OracleCalledDeviceEvidence
from cupyfa.oracles.blackwell.ledger import Rates, Tile
from cupyfa.oracles.violations import ContractViolation

CUBE = Tile(128, 128, 128)


def test_one_cta_table():
    row = one_cta(CUBE)
    assert (row.mma, row.operands, row.ds_write, row.dq_staging, row.smem, row.exp) == (
        2560,
        2048,
        256,
        1024,
        3328,
        1024,
    )
    assert row.ds_exchange == 0
    assert row.lower_bound.value == 3328
    assert row.excess / row.mma == 0.3


def test_two_cta_table():
    row = two_cta(CUBE)
    assert (row.mma, row.operands, row.ds_write, row.ds_exchange, row.dq_staging, row.smem, row.exp) == (
        2560,
        1536,
        256,
        384,
        512,
        2688,
        1024,
    )
    assert row.lower_bound.value == 2688


def test_what_the_pair_saves():
    alone, pair = one_cta(CUBE), two_cta(CUBE)
    assert round(100 * (alone.smem - pair.smem) / alone.smem, 2) == 19.23
    assert (alone.excess, pair.excess) == (768, 128)
    assert round(100 * (alone.excess - pair.excess) / alone.excess, 2) == 83.33


def test_normalized_forms():
    # The specification divides elements by 64 (2 bytes at 128 bytes/cycle) and dQ by 16 (8 bytes).
    tile = Tile(96, 160, 192)
    row = one_cta(tile)
    m, n, d = tile.m, tile.n, tile.d
    assert row.mma == 10 * m * n * d / 8192
    assert row.operands == (4 * m * d + 3 * n * d + m * n) / 64
    assert row.ds_write == m * n / 64
    assert row.dq_staging == m * d / 16
    assert row.exp == m * n / 16


def test_dq_reduction_elements():
    plans = [backward_ledger.dq_reduction_elements(256, 128, 2, group) for group in (1, 2)]
    assert plans == [65536, 32768]
    assert plans[1] / plans[0] == 0.5
    assert backward_ledger.dq_reduction_elements(128, 64, 5, 2) == 128 * 64 * 3  # an odd partition adds alone


def test_exchange_payload():
    assert backward_ledger.exchange_bytes(128, 128) == 128 * 128 * 2
    # The payload is not the ledger's 384 cycles: one pass over what one CTA sends takes 128.
    assert backward_ledger.exchange_bytes(128, 128) / 2 / 128 == 128 != two_cta(CUBE).ds_exchange


def test_five_products():
    names = tuple(c.name for c in CONTRACTIONS)
    assert names == ("S", "dP", "dV", "dK", "dQ")
    assert backward_ledger.check_contractions(names) == 10
    for name in names:
        with pytest.raises(backward_ledger.MissingContraction, match=name):
            backward_ledger.check_contractions(tuple(n for n in names if n != name))


def test_the_bound_is_no_timing_and_the_oracle_no_device():
    with pytest.raises(BoundCalledRuntime, match="3328"):
        one_cta(CUBE).lower_bound.as_kind(Kind.MEASURED)
    with pytest.raises(OracleCalledDeviceEvidence):
        Figure(0.0, "error of dQ", Kind.ORACLE).as_kind(Kind.MEASURED)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: two_cta(Tile(127, 128, 128)), "even"),
        (lambda: backward_ledger.exchange_bytes(3, 4), "even"),
        (lambda: backward_ledger.exchange_bytes(0, 4), "m must be positive"),
        (lambda: backward_ledger.dq_reduction_elements(1, 1, 0, 1), "key_partitions"),
        (lambda: backward_ledger.dq_reduction_elements(1, 1, 1, 4), "cta_group"),
    ],
)
def test_bad_input(call, word):
    with pytest.raises(ContractViolation, match=word):
        call()


SIZES = st.integers(1, 8).map(lambda n: 32 * n)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(SIZES, SIZES, SIZES, st.integers(1, 10000).map(float))
def test_the_pair_trades_reads_for_an_exchange(m, n, d, rate):
    tile, rates = Tile(m, n, d), Rates(smem=rate)
    alone, pair = one_cta(tile, rates), two_cta(tile, rates)
    assert pair.operands == pytest.approx(alone.operands - 2 * 2 * m * d / rate)
    assert pair.dq_staging == pytest.approx(alone.dq_staging / 2)
    assert (pair.mma, pair.exp, pair.ds_write) == (alone.mma, alone.exp, alone.ds_write)
    # The exchange costs 3 m n bytes, operands and dQ save 8 m d: the pair wins unless keys outnumber 8/3 of d.
    assert (pair.smem < alone.smem) == (3 * n < 8 * d)
