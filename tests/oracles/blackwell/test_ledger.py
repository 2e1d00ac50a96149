"""The forward ledger: every figure of 0x08, and the claims that it refuses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell import ledger
from cupyfa.oracles.blackwell.claims import BoundCalledRuntime, EvidenceOverreach, Figure, Kind, SumCalledRuntime
from cupyfa.oracles.blackwell.ledger import PAPER, Ledger, Rates, Tile, forward
from cupyfa.oracles.blackwell.tmem import logical_columns
from cupyfa.oracles.violations import ContractViolation

PROPERTIES = settings(deadline=None, derandomize=True, max_examples=60)
CUBE = Tile(128, 128, 128)


@pytest.mark.parametrize(
    ("shape", "cycles", "binding"),
    [
        ((128, 128, 128), (1024, 768, 1024), ("mma", "exp")),
        ((256, 128, 128), (2048, 1536, 2048), ("mma", "exp")),
        ((192, 96, 160), (1440, 2048, 1152), ("smem",)),
    ],
)
def test_forward_table(shape, cycles, binding):
    row = forward(Tile(*shape))
    assert (row.mma, row.smem, row.exp) == cycles
    assert row.binding == binding


@pytest.mark.parametrize(
    ("factors", "cycles", "binding"),
    [
        ({}, (1024, 768, 1024), ("mma", "exp")),
        ({"exp": 2}, (1024, 768, 512), ("mma",)),
        ({"mma": 2}, (512, 768, 1024), ("exp",)),
        ({"smem": 0.5}, (1024, 1536, 1024), ("smem",)),
    ],
)
def test_sensitivity_table(factors, cycles, binding):
    row = ledger.sensitivity(CUBE, {"machine": factors})["machine"]
    assert (row.mma, row.smem, row.exp) == cycles
    assert row.binding == binding


def test_bounds_of_the_cube():
    row = forward(CUBE)
    assert row.lower_bound == Figure(1024, "cycles", Kind.LOWER_BOUND)
    assert row.serial == Figure(2816, "cycles", Kind.SERIAL_SUM)


def test_crossover():
    assert ledger.crossover_head_dim() == 128
    assert ledger.exp_to_mma(128) == 1
    assert ledger.exp_to_mma(64) == 2
    assert ledger.smem_to_mma() == 0.75
    assert ledger.smem_to_mma(itemsize=1) == 0.375


def test_instruction_grid_of_the_ragged_tile():
    # 2 x 1 score instructions read 2 x (128 x 160) each; 2 x 2 output instructions read 128 x 96 each.
    assert ledger.forward_smem_bytes(Tile(192, 96, 160)) == 2 * (2 * 2 * 128 * 160 + 4 * 128 * 96)


def test_dropping_the_ceilings_names_the_wrong_resource():
    tile = Tile(192, 96, 160)
    bare = ledger.forward_smem_bytes(tile, ceilings=False)
    wrong = Ledger(forward(tile).mma, bare / PAPER.smem, forward(tile).exp)
    assert wrong.binding == ("mma",)
    with pytest.raises(ledger.DroppedCeilings, match="262144"):
        ledger.check_forward_smem(tile, bare)
    with pytest.raises(ledger.LedgerMismatch):
        ledger.check_forward_smem(tile, bare + 1)
    ledger.check_forward_smem(tile, ledger.forward_smem_bytes(tile))


def test_a_sum_is_no_runtime():
    with pytest.raises(SumCalledRuntime, match="2816"):
        forward(CUBE).serial.as_kind(Kind.MEASURED)


def test_a_bound_is_no_runtime():
    with pytest.raises(BoundCalledRuntime, match="1024"):
        forward(CUBE).lower_bound.as_kind(Kind.MEASURED)


def test_a_measurement_is_no_bound():
    measured = Figure(1300, "cycles", Kind.MEASURED)
    assert measured.as_kind(Kind.MEASURED) == 1300
    with pytest.raises(EvidenceOverreach):
        measured.as_kind(Kind.LOWER_BOUND)


@pytest.mark.parametrize(
    ("q_stage", "cta_group", "rows", "columns"), [(1, 1, 128, 384), (2, 1, 256, 512), (2, 2, 512, 512)]
)
def test_query_rows_and_tensor_memory(q_stage, cta_group, rows, columns):
    assert ledger.query_rows(q_stage, cta_group) == rows
    assert logical_columns(128, 128, q_stage) == columns  # in each CTA's own view
    ledger.check_query_rows(rows, q_stage, cta_group)


def test_paper_m_is_one_configuration_of_three():
    ledger.check_query_rows(256, q_stage=2, cta_group=1)
    for q_stage, cta_group in ((1, 1), (2, 2)):
        with pytest.raises(ledger.CollapsedCoordinates, match=f"{q_stage} query stages x {cta_group} CTAs"):
            ledger.check_query_rows(256, q_stage, cta_group)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: Tile(0, 1, 1), "m must be positive"),
        (lambda: Tile(1, 1, -2), "d must be positive"),
        (lambda: Rates(exp=0), "exp must be positive"),
        (lambda: PAPER.scaled(smem=-1), "smem must be positive"),
        (lambda: ledger.query_rows(3, 1), "q_stage 3"),
        (lambda: ledger.query_rows(1, 1, 0), "m_block"),
        (lambda: ledger.exp_to_mma(0), "d must be positive"),
        (lambda: ledger.smem_to_mma(0), "itemsize"),
    ],
)
def test_bad_input(call, word):
    with pytest.raises(ContractViolation, match=word):
        call()


RATES = st.builds(Rates, *(st.integers(1, 10000).map(float),) * 3)
BLOCKS = st.integers(1, 4)


@PROPERTIES
@given(BLOCKS, BLOCKS, BLOCKS, RATES)
def test_closed_forms_where_128_divides(m, n, d, rates):
    tile = Tile(128 * m, 128 * n, 128 * d)
    row = forward(tile, rates)
    assert row.smem == pytest.approx(3 * 2 * tile.m * tile.n * tile.d / (128 * rates.smem))
    assert row.exp / row.mma == pytest.approx(ledger.exp_to_mma(tile.d, rates))
    assert row.smem / row.mma == pytest.approx(ledger.smem_to_mma(2, rates))


@PROPERTIES
@given(st.integers(1, 600), st.integers(1, 600), st.integers(1, 600), RATES)
def test_ceilings_never_lower_the_bytes(m, n, d, rates):
    tile = Tile(m, n, d)
    counted, bare = ledger.forward_smem_bytes(tile), ledger.forward_smem_bytes(tile, ceilings=False)
    assert counted >= bare * (1 - 1e-12)
    # The score product reads every operand element at least once for every instruction row or column.
    assert counted >= 2 * (max(m, 128) * d + max(n, 128) * d)
    row = forward(tile, rates)
    assert row.lower_bound.value <= row.serial.value <= 3 * row.lower_bound.value
    assert row.binding


@PROPERTIES
@given(st.integers(1, 1000), RATES)
def test_crossover_separates(d, rates):
    crossover = ledger.crossover_head_dim(rates)
    assert (ledger.exp_to_mma(d, rates) > 1) == (d < crossover)
