"""Faults to be planted into what the gradients of packed sequences have beside the kernels of others."""

from __future__ import annotations

from emulator.backward_faults import AFTER, BEFORE, KERNEL, TILE, TIMEOUT, Fault, Shown

from cupyfa.testing import BackwardCase, PackedCase

__all__ = ["EARLY", "RACES", "WRONG"]

PACKED_ROWS, ROWS, PLAN = "packed_rows.cuh", "hopper/rows.cuh", "plan.cu"


def of(case: PackedCase, dlse: bool = False, deterministic: bool = False) -> Shown:
    return Shown(BackwardCase(case, dlse, deterministic))


#: Fewer keys than queries and more, several tiles of both, and key heads that query heads share.
RAGGED = of(PackedCase("fault", (70, 200, 3), (150, 10, 3), 4, 2, causal=True))
#: Rows of nobody before, between and behind the sequences.
USED = of(PackedCase("fault", (100, 60), (90, 140), used_q=(37, 60), used_k=(64, 140), before=5, behind=9))
WINDOW = of(PackedCase("fault", (150, 40), (200, 90), window_size=(50, 0), head_dim=128, dtype="float16"))
SLOPES = of(PackedCase("fault", (110, 33), (80, 130), 4, 2, 128, alibi=True))
EVEN = of(PackedCase("fault", (100, 70), (200, 100), head_dim=128, dtype="float16"), deterministic=True)
ORDERED = of(PackedCase("fault", (200, 130, 300), causal=True), deterministic=True)
SUNK = of(PackedCase("fault", (90, 33), (80, 0), 4, 2, causal=True, sink=True, used_q=(70, 33)), dlse=True)
BEHIND = of(PackedCase("fault", (90, 33), behind=7))
#: More runs of rows than a CTA of the kernels around has threads.
MANY = of(PackedCase("fault", ((1, 0, 2) + (0,) * 27) * 10, heads_q=1, softcap=3.0))

#: Faults of order.
RACES: dict[str, Fault] = {
    "the tile of a plan is read before it is there": Fault(
        KERNEL, r"  __syncthreads\(\);  // proves.*", "", RAGGED, "SHARED_UNINITIALISED_READ"
    ),
    "turns of packed key tiles are those of all": Fault(
        TILE, r"int\(S\.deterministic \? tiles_n - 1 - n : n\)", "int(n)", ORDERED, TIMEOUT
    ),
    "turns are those of all keys": Fault(
        TILE, r"&\) const \{ return k_rows; \}", "& p) const { return p.seqlen_k; }", EVEN, TIMEOUT
    ),
}
#: Kernels that begin too early.
EARLY: dict[str, Fault] = {
    "a tile is read before it is planned": Fault(KERNEL, r"ptx::griddepcontrol_wait\(\);.*", "", RAGGED),
    "rows are looked for before they are planned": Fault(BEFORE, r"ptx::griddepcontrol_wait\(\);.*", "", RAGGED),
    "packed sums are read before they are complete": Fault(AFTER, r"  ptx::griddepcontrol_wait\(\);.*", "", RAGGED),
}
#: Faults of what is computed.
WRONG: dict[str, Fault] = {
    "queries run into the neighbour": Fault(
        TILE, r"packed_rows - q_rows \+ row,", "packed_rows - q_rows + row - 1,", RAGGED
    ),
    "keys run into the neighbour": Fault(
        TILE, r"packed_rows - k_rows \+ row,", "packed_rows - k_rows + row - 1,", RAGGED
    ),
    "queries are of the first sequence": Fault(TILE, r"query_head, q_begin \+ q_rows", "query_head, q_rows", RAGGED),
    "keys are of the first sequence": Fault(TILE, r"head, k_begin \+ k_rows", "head, k_rows", RAGGED),
    "a CTA without a tile has one": Fault(KERNEL, r"if \(!storage\.planned\.tile\.valid\(\)\) return;", "", RAGGED),
    "the diagonal is of equal lengths": Fault(TILE, r"p\.last_diagonal \+ k_rows - q_rows", "p.last_diagonal", RAGGED),
    "the window is of equal lengths": Fault(TILE, r"p\.first_diagonal \+ k_rows - q_rows", "p.first_diagonal", WINDOW),
    "sequences have the queries of all": Fault(
        TILE, r"&\) const \{ return q_rows; \}", "& p) const { return p.seqlen_q; }", SLOPES
    ),
    "sums are of the first sequence": Fault(TILE, r"\(q_begin, batch, S\.tile_m\)", "(q_begin, 0, S.tile_m)", RAGGED),
    "sums are of the first head": Fault(TILE, r"u64\(query_head\) \* p\.tiles_m", "0", RAGGED),
    "the slopes are of the first sequence": Fault(TILE, r"int\(head\), packed\.sequence,", "int(head), 0,", SLOPES),
    "packed keys have the first query heads": Fault(
        TILE, r"packed\.sequence, 0, int\(head \* p\.heads_per_kv\)", "packed.sequence, 0, int(head)", RAGGED
    ),
    "tiles count from the beginning of the plan": Fault(
        TILE, r"number - packed\.first \* p\.heads_kv", "number", RAGGED
    ),
    "tiles of the last heads are left out": Fault(TILE, r"plan->count \* p\.heads_kv", "plan->count", RAGGED),
    "a planned tile is taken for the next one": Fault(TILE, r"tiles\[number / p\.heads_kv\]", "tiles[number]", RAGGED),
    "a box to the end of the array": Fault(ROWS, r"packed_rows, barrier\)", "0, barrier)", RAGGED),
    "a key tile is one of queries": Fault(TILE, r"tiles_n = \(packed\.seqlen_q", "tiles_n = (packed.seqlen_k", RAGGED),
    "runs begin with the tile before": Fault(PACKED_ROWS, r"/ tile_rows \+ run; \}", "/ tile_rows; }", RAGGED),
    "rows of a tile are the first of the run": Fault(
        PACKED_ROWS, r"\(tile - first_tile\(first, run, tile_rows\)\) \* tile_rows;", "0;", RAGGED
    ),
    "unused rows are used": Fault(PACKED_ROWS, r"length - before\}", "end - first - before}", USED),
    "rows behind the last sequence are left out": Fault(PACKED_ROWS, r"sequences \+ 2;", "sequences + 1;", BEHIND),
    "rows before the first sequence are the first one's": Fault(
        PACKED_ROWS, r"0 < run && run <= sequences", "run <= sequences", USED
    ),
    "a search takes one step": Fault(PACKED_ROWS, r"while \(behind - run > 1\)", "if (behind - run > 1)", MANY),
    "a search ends a run early": Fault(PACKED_ROWS, r"run \+= \(hits - 1\) \* step;", "run += (hits - 1);", MANY),
    "seqused is not looked at": Fault(PACKED_ROWS, r"seqused == nullptr \? length", "true ? length", USED),
    "delta is of the row in the workspace": Fault(BEFORE, r"shift = packed\.first - first, ", "", RAGGED),
    "unused rows have a delta": Fault(BEFORE, r"first \+ packed\.used;", "first + packed.count;", USED),
    "a packed sink has all rows": Fault(BEFORE, r"first \+ packed\.used;", "first + packed.count;", SUNK),
    "dQ is written to the row in the workspace": Fault(
        AFTER, r"\(rows\.first \+ row\)", "(m * S.tile_m + row)", RAGGED
    ),
    "dQ of unused rows is what is in the sum": Fault(AFTER, r"if \(row < rows\.used\)", "", USED),
    "rows of nobody have no tiles": Fault(PLAN, r"2 \* sequences \+ 1;", "2 * sequences;", USED),
    "all sequences are planned whatever their offsets": Fault(
        PLAN, r"p\.plan->sequences = sequences;", "p.plan->sequences = 0;", RAGGED
    ),
}
