"""For each hazard a micro-kernel on which it has to be reported and a nearly identical one that has to be clean.

Files that another part of the tests owns add their pairs to the same table; ``OWNERS`` says which groups those are.
"""

from __future__ import annotations

from . import barriers, bulk, grid, mbarriers, progress, shared, warps, wgmma
from .pair import Pair

PAIRS: tuple[Pair, ...] = (
    *shared.PAIRS,
    *mbarriers.PAIRS,
    *barriers.PAIRS,
    *warps.PAIRS,
    *wgmma.PAIRS,
    *bulk.PAIRS,
    *grid.PAIRS,
    *progress.PAIRS,
)

#: Groups whose pairs stand elsewhere: group -> module with a table HAZARDS of the names that it tests.
OWNERS = {"TMEM": "emulator.test_tcgen05"}
