"""Aliases are legal if addresses or lives are apart."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell.events import Event
from cupyfa.oracles.blackwell.lifetimes import Live, LiveAlias, audit, forward_timeline, legal_alias, live_intervals
from cupyfa.oracles.blackwell.tmem import MapExceedsCapacity, Region, forward_map

MAP = forward_map(128, 128, 2)


def interval(name):
    return st.builds(
        lambda begin, width, t, dt: Live(Region(name, begin, width), t, t + dt),
        st.integers(0, 12),
        st.integers(1, 8),
        st.integers(0, 12),
        st.integers(1, 8),
    )


@settings(deadline=None, derandomize=True, max_examples=300)
@given(interval("x"), interval("y"))
def test_legal_alias_is_disjointness_in_the_plane(x, y):
    def cells(live):
        return {(c, t) for c in range(live.region.begin, live.region.end) for t in range(live.begin, live.end)}

    apart = not cells(x) & cells(y)
    assert legal_alias(x, y) == legal_alias(y, x) == apart
    if apart:
        audit([x, y])
    else:
        with pytest.raises(LiveAlias, match="x and y are both live in columns"):
            audit([x, y])


@pytest.mark.parametrize("p_bits", [8, 16])
@pytest.mark.parametrize("key_blocks", [1, 2, 5])
def test_schedule_is_legal_for_every_map(key_blocks, p_bits):
    for tile_n in (16, 64, 128, 192, 240):
        for head_dim_v in (64, 96, 128, 192, 256):
            for q_stages in (1, 2):
                try:
                    layout = forward_map(tile_n, head_dim_v, q_stages, p_bits)
                except MapExceedsCapacity:
                    continue
                lives = live_intervals(layout, forward_timeline(layout, key_blocks))
                assert len(lives) == q_stages * (2 * key_blocks + 1)
                audit(lives)


def test_p_takes_over_what_s_leaves():
    lives = {(x.region.name, x.block): x for x in live_intervals(MAP, forward_timeline(MAP, 3))}
    for i in (0, 1):
        for j in range(3):
            S, P = lives[f"S{i}", j], lives[f"P{i}", j]
            assert S.region.overlaps(P.region)
            assert S.end <= P.begin
            if j < 2:
                assert P.end <= lives[f"S{i}", j + 1].begin
        O = lives[f"O{i}", -1]
        assert O.begin < lives[f"P{i}", 0].end
        assert O.end > lives[f"P{i}", 2].end


@pytest.mark.parametrize("earlier", [1, 2, 3])
def test_writing_p_before_s_is_released_is_caught(earlier):
    lives = live_intervals(MAP, forward_timeline(MAP, 1))
    at = next(i for i, x in enumerate(lives) if x.region.name == "P0")
    release = next(x.end for x in lives if x.region.name == "S0")
    moved = [*lives]
    moved[at] = dataclasses.replace(lives[at], begin=release - earlier)
    assert all(0 <= x.region.begin < x.region.end <= 512 for x in moved), "capacity sees nothing wrong"
    with pytest.raises(LiveAlias, match=r"(S0 and P0|P0 and S0) are both live in columns 64 to 127"):
        audit(moved)


def reorder(events, first, second):
    """Let two events change places."""
    events = list(events)
    a, b = (next(k for k, e in enumerate(events) if (e.action, e.subject, e.block) == key) for key in (first, second))
    events[a], events[b] = (
        dataclasses.replace(events[b], time=events[a].time),
        dataclasses.replace(events[a], time=events[b].time),
    )
    return events


def test_store_before_the_load_is_closed_is_caught():
    events = reorder(forward_timeline(MAP, 2), ("loaded", "S1", 0), ("store", "P1", 0))
    with pytest.raises(LiveAlias, match="S1"):
        audit(live_intervals(MAP, events))


def test_next_scores_before_p_is_consumed_are_caught():
    events = reorder(forward_timeline(MAP, 2), ("consumed", "P0", 0), ("issue", "S0", 1))
    with pytest.raises(LiveAlias, match="P0"):
        audit(live_intervals(MAP, events))


def test_moving_p_out_of_the_way_would_need_more_columns():
    # The same early store is legal if P has columns of its own, which is what 2 N + 2 d_v + N columns would mean.
    events = reorder(forward_timeline(MAP, 1), ("loaded", "S0", 0), ("store", "P0", 0))
    lives = live_intervals(MAP, events)
    apart = [
        dataclasses.replace(x, region=Region("P", 512 + x.region.begin, 64)) if x.region.name[0] == "P" else x
        for x in lives
    ]
    audit(apart)


def test_lives_are_well_formed():
    events = forward_timeline(MAP, 2)
    with pytest.raises(ValueError, match="born again"):
        live_intervals(MAP, [events[0], *events])
    with pytest.raises(ValueError, match="without having lived"):
        live_intervals(MAP, events[1:])
    with pytest.raises(ValueError, match="O1 never died"):
        live_intervals(MAP, events[:-1])
    with pytest.raises(ValueError, match="no time at all"):
        Live(Region("S0", 0, 128), 3, 3)
    with pytest.raises(ValueError, match="key_blocks is 0"):
        forward_timeline(MAP, 0)


def test_times_are_ordinals():
    events = forward_timeline(MAP, 4)
    assert [e.time for e in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Region("S0", -1, 128), "S0 is 128 columns at -1"),
        (lambda: Region("S0", 0, 0), "S0 is 0 columns"),
        (lambda: live_intervals(MAP, [Event(0, "mma", "issue", "S9")]), "issue of 'S9'; the map has S0"),
        (lambda: forward_timeline(MAP, -1), "key_blocks is -1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
