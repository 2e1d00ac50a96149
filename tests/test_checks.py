"""The quick answer to whether arrays can share memory."""

from __future__ import annotations

import pytest

from cupyfa.checks import are_apart


@pytest.mark.parametrize(
    ("addresses", "spans", "apart"),
    [
        ((), (), True),
        ((100, 200), ((0, 100), (0, 100)), True),
        ((200, 100), ((0, 100), (0, 100)), True),
        ((100, 199), ((0, 100), (0, 100)), False),
        ((200, 300), ((0, 100), (-101, 0)), False),  # the elements of the second one are in front of its first
        ((200, 300), ((0, 100), (0, 0)), True),
        ((100, 120, 130), ((0, 200), (0, 5), (0, 5)), False),  # the first one goes on behind the second
        ((100, None, 0), ((0, 100), (0, 100), (0, 100)), True),
    ],
)
def test_arrays_behind_each_other_are_apart(
    addresses: tuple[int | None, ...], spans: tuple[tuple[int, int], ...], apart: bool
) -> None:
    assert are_apart(addresses, spans) == apart
