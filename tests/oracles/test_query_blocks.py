"""The query blocks of a key tile, against the definition of what a row sees."""

import itertools

import numpy as np
import pytest

from cupyfa.oracles.mask import visible
from cupyfa.oracles.query_blocks import QueryRange, query_range


@pytest.mark.parametrize("window", [(None, None), (0, 0), (3, None), (None, 2), (5, 1), (1, 7), (40, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_that_are_visited_and_those_that_are_whole(causal, window):
    sizes = itertools.product((1, 4, 7, 12, 19), (1, 3, 8, 13, 20), (2, 3, 4, 8), (3, 4, 5, 8))
    for seqlen_q, seqlen_k, tile_m, tile_n in sizes:
        seen = visible(seqlen_q, seqlen_k, causal, window_size=window)
        for n in range(0, seqlen_k, tile_n):
            got = query_range(n, n + tile_n, seqlen_q, seqlen_k, tile_m, causal, window)
            blocks = [seen[m : m + tile_m, n : n + tile_n] for m in range(0, seqlen_q, tile_m)]
            visited = np.flatnonzero([block.any() for block in blocks])
            assert [*visited] == [*range(got.first, got.end)], (seqlen_q, seqlen_k, tile_m, n)
            whole = [m for m in visited if blocks[m].all()]
            assert whole == [*range(got.low, got.full)], (seqlen_q, seqlen_k, tile_m, n)
            assert got.first <= got.low <= got.full <= got.end


def test_keys_that_do_not_exist_visit_nothing():
    assert query_range(8, 16, 5, 8, 4, causal=False) == QueryRange(0, 0, 0, 0)
    got = query_range(0, 4, 0, 8, 4, causal=True)
    assert got.first == got.end


@pytest.mark.parametrize(("arguments", "message"), [((0, 4, 5, 8, 0), "tile_m is 0"), ((-1, 4, 5, 8, 2), "key_begin")])
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=f"^query_range: {message}"):
        query_range(*arguments, causal=False)
