"""Variable lengths: the paper's sorted batches, and the release's prefix sums, which are not a sort."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.scheduling import varlen
from cupyfa.oracles.scheduling.costs import TileCost
from cupyfa.oracles.scheduling.makespan import list_schedule, makespan_lower_bound
from cupyfa.oracles.scheduling.orders import WorkTile, order_costs
from cupyfa.oracles.scheduling.varlen import BATCHES_PER_SCAN, VarlenProblem, WorkMapViolation

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=120)
LENGTHS = st.lists(st.integers(0, 900), min_size=1, max_size=80)
PRINTED = VarlenProblem((128, 768, 256, 512))


def test_doctests():
    assert doctest.testmod(varlen).failed == 0


def test_virtual_to_actual_map():
    assert PRINTED.worktiles == [1, 6, 2, 4]
    assert PRINTED.virtual_to_actual() == [1, 3, 2, 0]
    assert [PRINTED.worktiles[batch] for batch in PRINTED.virtual_to_actual()] == [6, 4, 2, 1]


def test_the_sort_key_is_time_per_tile_and_not_the_number_of_tiles():
    mixed = VarlenProblem((2048, 1, 1, 512), lengths_k=(2048, 16384, 100, 512))  # two prefills, two decodes
    assert mixed.worktiles == [16, 1, 1, 4]
    assert mixed.virtual_to_actual() == [1, 0, 3, 2]
    # With an overhead that is the same for all tiles the order stays.
    assert mixed.virtual_to_actual(TileCost(fixed=100)) == [1, 0, 3, 2]


@EXAMPLES
@given(lengths=LENGTHS)
def test_the_map_is_a_stable_sort(lengths):
    problem = VarlenProblem(tuple(lengths))
    virtual = problem.virtual_to_actual()
    assert sorted(virtual) == list(range(len(lengths)))
    longest = [-(-lengths[batch] // 128) for batch in virtual]
    assert longest == sorted(longest, reverse=True)
    assert all(a < b for a, b, s, t in zip(virtual, virtual[1:], longest, longest[1:], strict=False) if s == t)


@EXAMPLES
@given(lengths=LENGTHS, heads=st.integers(1, 5), section=st.integers(1, 6), reverse=st.booleans())
def test_prefix_sums_recover_every_tile_in_the_order_of_the_requests(lengths, heads, section, reverse):
    problem = VarlenProblem(tuple(lengths), heads=heads)
    order = problem.order(section, reverse)
    assert len(order) == heads * sum(problem.worktiles)
    for flat in {0, len(order) // 2, len(order) - 1} & set(range(len(order))):
        assert problem.locate(flat, section, reverse).tile == order[flat]
    assert problem.locate(len(order), section, reverse) is None


def test_every_tile_of_a_large_batch_is_located_once():
    rng = np.random.default_rng(0)
    problem = VarlenProblem(tuple(rng.integers(0, 700, 100).tolist()), heads=3)
    found = [problem.locate(flat, 2) for flat in range(len(problem.order()))]
    assert [f.tile for f in found] == problem.order(2)
    assert all(f.scans == f.tile.batch // BATCHES_PER_SCAN + 1 for f in found)
    assert max(f.scans for f in found) == 4


def test_a_scan_covers_31_batches():
    problem = VarlenProblem((1,) * 63)
    assert [problem.locate(flat).scans for flat in (0, 30, 31, 61, 62)] == [1, 1, 2, 2, 3]


def test_prefix_sums_are_no_sort():
    """0x0B failure: the release finds the batch of every tile, and no longest-first map exists on the way."""
    located = [PRINTED.locate(flat).tile for flat in range(13)]
    assert [t.batch for t in located] == [0] + [1] * 6 + [2] * 2 + [3] * 4  # as the requests came
    sorted_order = PRINTED.order(batches=PRINTED.virtual_to_actual())
    assert [t.batch for t in sorted_order] == [1] * 6 + [3] * 4 + [2] * 2 + [0]
    assert set(located) == set(sorted_order)
    assert located[0] == WorkTile(0, 0, 0)  # the shortest tile of all starts first
    assert sorted_order[0] == WorkTile(1, 0, 5)


def test_a_long_request_that_comes_last_is_what_the_sort_is_for():
    problem = VarlenProblem((256,) * 60 + (4096,))
    costs = [TileCost(fixed=1).of(blocks) for blocks in problem.key_blocks()]

    def makespan(order):
        return list_schedule(order_costs(order, costs), None, 24).makespan

    by_length = makespan(problem.order(batches=problem.virtual_to_actual()))
    assert by_length < 1.05 * makespan_lower_bound(order_costs(problem.order(), costs), 24)
    assert makespan(problem.order()) > 1.1 * by_length


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: VarlenProblem((1, 2)).order(batches=[0, 0]), WorkMapViolation, "each of 2 batches once"),
        (lambda: VarlenProblem((1, 2), lengths_k=(3,)), ValueError, "1 key lengths for 2 query lengths"),
        (lambda: VarlenProblem((1, -2)), ValueError, "must not be negative"),
        (lambda: VarlenProblem((1,), heads=0), ValueError, "heads is 0"),
        (lambda: PRINTED.locate(-1), ValueError, "tile -1 does not exist"),
        (lambda: PRINTED.locate(0, section=0), ValueError, "section is 0"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
