"""The backward loop and its tensor-memory maps: equal offsets are legal only because lives are disjoint."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell import backward_ledger, backward_map, backward_schedule
from cupyfa.oracles.blackwell.backward_map import map_1cta, map_2cta, map_192_2cta
from cupyfa.oracles.blackwell.backward_schedule import check, step, trace_1cta, trace_2cta, trace_serial
from cupyfa.oracles.blackwell.lifetimes import LiveAlias
from cupyfa.oracles.blackwell.tmem import Region
from cupyfa.oracles.violations import ContractViolation


def columns(layout):
    return {name: (region.begin, region.end) for name, region in layout.regions.items()}


def test_map_of_one_cta():
    got = columns(map_1cta())
    assert got["S"] == (0, 128)
    assert got["P"][0] == 0
    assert got["dV"] == (128, 256)
    assert got["dP"] == got["dQ"] == (256, 384)
    assert got["dS"][0] == 256
    assert got["dK"] == (384, 512)
    assert map_1cta().columns == 512


def test_map_of_the_pair():
    got = columns(map_2cta())
    assert got["P"] == (0, 64)
    assert got["dQ"] == (64, 128)
    assert got["dV"] == (128, 256)
    assert got["dP"] == (256, 384)
    assert got["dS"][0] == 256
    assert got["dK"] == (384, 512)
    assert map_2cta().columns == 512


def test_map_of_head_dim_192_is_another_contract():
    layout = map_192_2cta()
    assert layout.columns == 512
    assert layout.regions["dK"].width == 192
    check(trace_serial(3, pair=True), layout)
    with pytest.raises(LiveAlias):
        check(trace_2cta(3), layout)


def test_widths_need_the_cta_group():
    layout = map_2cta()
    backward_map.check_width(layout.regions["dQ"], 128, 128, cta_group=2)
    backward_map.check_width(layout.regions["S"], 256, 128, cta_group=2)
    # From the offsets alone S would end where dQ begins; the pair's layout writes all 128 columns.
    with pytest.raises(backward_map.UnprovenWidth, match="writes 128"):
        backward_map.check_width(Region("S", 0, 64), 256, 128, cta_group=2)
    with pytest.raises(backward_map.UnprovenWidth, match="writes 64"):
        backward_map.check_width(Region("dQ", 64, 128), 128, 128, cta_group=2)


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.integers(1, 9))
def test_right_traces(tiles):
    check(trace_1cta(tiles), map_1cta())
    check(trace_2cta(tiles), map_2cta())
    check(trace_serial(tiles), map_1cta())
    check(trace_serial(tiles, pair=True), map_2cta())


def test_mma_order():
    steady = [f"{s.action}{s.tile}" for s in trace_1cta(5) if s.agent == "mma"]
    assert steady[3:8] == ["S1", "dK0", "dQ0", "dP1", "dV1"]
    steady = [f"{s.action}{s.tile}" for s in trace_2cta(5) if s.agent == "mma"]
    assert steady[3:8] == ["S1", "dK0", "dP1", "dQ0", "dV1"]


def test_concurrent_alias_in_one_cta():
    # The pair's order issues the next dP before dQ of this tile: on the map of one CTA both want [256, 384).
    with pytest.raises(LiveAlias, match="256"):
        check(
            [replace(s, reads=tuple(r.replace("dS.full", "dS.smem") for r in s.reads)) for s in trace_2cta(3)],
            map_1cta(),
        )


def test_dq_before_dk_has_read_ds():
    trace = trace_1cta(2)
    dK, dQ = (next(n for n, s in enumerate(trace) if (s.action, s.tile) == (a, 0)) for a in ("dK", "dQ"))
    trace[dK], trace[dQ] = trace[dQ], trace[dK]
    with pytest.raises(LiveAlias, match="dS and dQ"):
        check(trace, map_1cta())


def test_dq_of_the_pair_waits_until_the_scores_are_read():
    # Reading widths off the offsets would allow this: dQ is written while S still has its upper 64 columns.
    order = [("S", 1), ("dK", 0), ("dP", 1), ("dQ", 0), ("P", 1), ("dV", 1), ("dS", 1), ("exchange", 1), ("reduce", 0)]
    trace = [*trace_2cta(1)[:6], *(step(action, tile, pair=True) for action, tile in order)]
    trace += [s for s in trace_2cta(2) if (s.action, s.tile) in {("dK", 1), ("dQ", 1), ("reduce", 1), ("epilogue", 1)}]
    with pytest.raises(LiveAlias, match="64 to 127"):
        check(trace, map_2cta())
    narrow = backward_map.BackwardMap({**map_2cta().regions, "S": Region("S", 0, 64)})
    check(trace, narrow)


def test_one_product_left_out():
    for name in ("S", "dP", "dV", "dK", "dQ"):
        trace = [s for s in trace_1cta(2) if s.action != name]
        with pytest.raises((backward_ledger.MissingContraction, backward_schedule.BrokenDependency)):
            check(trace, map_1cta())
    with pytest.raises(backward_ledger.MissingContraction, match="S"):
        backward_ledger.check_contractions(("dP", "dV", "dK", "dQ"))


@pytest.mark.parametrize("name", ["P", "dS", "S", "dP"])
def test_a_score_matrix_in_global_memory(name):
    trace = [replace(s, writes=(*s.writes, f"{name}.global")) if s.action == name else s for s in trace_1cta(2)]
    with pytest.raises(backward_schedule.GlobalMaterialization, match=f"writes {name}.global"):
        check(trace, map_1cta())


def test_dq_before_the_exchange():
    trace = [s for s in trace_2cta(3) if s.action != "exchange"]
    with pytest.raises(backward_schedule.BrokenDependency, match=r"dQ of tile 0 reads dS\.full"):
        check(trace, map_2cta())


def test_lives_are_read_off_the_trace():
    objects = {(life.region.name, life.block): life for life in backward_schedule.lives(trace_2cta(3), map_2cta())}
    assert objects["dQ", 0].begin > objects["S", 1].end - 1  # dQ of tile 0 comes after S of tile 1 was read
    assert objects["dQ", 0].begin < objects["P", 1].end  # and overlaps P of tile 1: what the tighter packing buys
    assert objects["dV", -1].begin < objects["dV", -1].end == len(trace_2cta(3)) - 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step("dX", 0), "no step is 'dX' of tile 0"),
        (lambda: step("S", -1), "of tile -1"),
        (lambda: trace_1cta(-1), "tiles must not be negative, not -1"),
        (lambda: trace_2cta(-1), "tiles must not be negative, not -1"),
        (lambda: trace_serial(-1), "tiles must not be negative, not -1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ContractViolation, match=message):
        call()
