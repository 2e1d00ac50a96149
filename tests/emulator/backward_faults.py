"""Faults to be planted into the kernels of gradients, each with a case that it breaks."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from cupyfa.testing import BackwardCase, Case

__all__ = ["EARLY", "RACES", "UNORDERED", "UNSEEN", "WRONG", "Fault", "Shown"]


class Shown(NamedTuple):
    """A call.

    Attributes
    ----------
    case : BackwardCase
        Its arrays and options.
    sms : int
        Multiprocessors. One: a CTA walks all query heads of its keys.
    config : tuple
        Pairs of a field of the spec and its value.
    """

    case: BackwardCase
    sms: int = 1
    config: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Fault:
    """An edit of a kernel's text.

    Attributes
    ----------
    file : str
        Below ``cuda/``.
    old, new : str
        A pattern that the text holds once, and what stands there instead.
    case : Shown
        A call that shows it.
    finding : str
        What the emulator calls it.
    why : str
        Why it calls it nothing.
    """

    file: str
    old: str
    new: str
    case: Shown
    finding: str = ""
    why: str = ""


def of(*sizes: Any, dlse: bool = False, deterministic: bool = False, **options: Any) -> Shown:
    return Shown(BackwardCase(Case("fault", *sizes, **options), dlse, deterministic))


#: More steps than slots, two key tiles of which the last one is short, and a key head for two query heads.
NARROW = of(1, 300, 200, 2, 1, 64, "float16")
PLAIN = of(1, 200, 150, 2, 1, 128, "float16")
CAUSAL = of(1, 300, 270, 2, 1, 128, "float16", True)
WINDOW = of(1, 300, 330, 2, 1, 128, "float16", window_size=(70, 45))
WIDE_WINDOW = of(1, 400, 400, 1, 1, 128, "float16", window_size=(250, None))  # some tiles are inside of it
BATCHES = of(2, 150, 200, 4, 2, 128, "float16", True, alibi=True)
CAPPED = of(1, 150, 200, 2, 1, 64, "float16", softcap=3.0)
ORDERED = of(1, 300, 300, 2, 1, 64, "float16", True, deterministic=True)
FOUR = of(1, 200, 500, 1, 1, 128, "float16", deterministic=True)
TIGHT = PLAIN._replace(config=(("dout_stages", 1),))  # fewer slots for dO than for Q
SUNK = of(3, 150, 100, 4, 2, 64, "float16", True, sink=True, dlse=True)
ROWS = of(2, 300, 100, 2, 2, 64, "float16", True, dlse=True)
SCALED = of(1, 150, 200, 2, 1, 64, "float16", softmax_scale=0.5)
#: Of tiles whose keys warpgroups share: each computes two parts of dQ, one, or four.
WIDE = of(1, 200, 100, 2, 1, 256, "float16")
WIDE_ONE = of(1, 200, 100, 2, 1, 64, "float16", softcap=3.0, head_dim_v=136)
#: 128 queries a step, of which each warpgroup has the dQ of 64 rows, a part of its columns after the other.
WIDE_ROWS = of(1, 400, 100, 2, 1, 192, "float16", head_dim_v=128)
#: Half of a panel, and a quarter, are a warpgroup's part of what whole panels leave over.
RAGGED = of(1, 200, 150, 2, 1, 96, "float16")
RAGGED_ORDERED = of(1, 200, 150, 2, 1, 96, "float16", deterministic=True)
RAGGED_WIDE = of(1, 150, 100, 2, 1, 192, "float16")
WIDE_FOUR = of(1, 150, 100, 2, 1, 256, "float16", True, alibi=True)
WIDE_ORDERED = of(1, 130, 130, 2, 1, 256, "float16", True, alibi=True, deterministic=True)
ROOMY = WIDE._replace(config=(("dout_stages", 2),))  # no slot of dO keeps the producer from bringing a Q
UNEQUAL = of(1, 130, 100, 2, 1, 192, "float16", head_dim_v=128)
#: Of query heads that CTAs share: two for one CTA and one for the other, or one for each.
SHARED = of(2, 70, 150, 6, 2, 128, "float16")._replace(sms=16)
SHARED_WIDE = of(2, 130, 100, 4, 2, 192, "float16", head_dim_v=128)._replace(sms=132)

KERNEL = "hopper/bwd.cu"
COLUMNS, CONSUMER, WIDE_CONSUMER, EPILOGUE, GEMM, PLACE, TILE, PRODUCER, SUM, SCORES, STORAGE, BIAS = (
    f"hopper/bwd/{name}.cuh"
    for name in (
        "columns", "consumer", "wide_consumer", "epilogue", "gemm", "key_place", "key_tile", "producer", "query_sum",
        "scores", "storage", "bias",
    )
)  # fmt: skip
BEFORE, AFTER, SINK, RING = "bwd_preprocess.cu", "bwd_postprocess.cu", "bwd_sink.cu", "ring.cuh"
LAYOUT = "sum_layout.cuh"
FENCE = r"  ptx::fence_proxy_async_shared_cta\(\);\n"
IN_FLIGHT, TMA = "WGMMA_REGISTER_READ_IN_FLIGHT", "SHARED_READ_OF_IN_FLIGHT_TMA_DATA"
BEING_READ, NO_PROXY = "SHARED_WRITE_TO_BUFFER_BEING_READ", "SHARED_MISSING_PROXY_FENCE"
DEADLOCK, TIMEOUT = "PROGRESS_DEADLOCK", "PROGRESS_TIMEOUT"
UNORDERED_READ, UNORDERED_WRITES = "SHARED_READ_NOT_ORDERED_AFTER_WRITE", "SHARED_WRITE_NOT_ORDERED_AFTER_WRITE"

#: Faults of order, which the checks find under one schedule or another.
RACES: dict[str, Fault] = {
    "barriers are not initialised in time": Fault(
        KERNEL, r"  __syncthreads\(\);  // proves.*", "", PLAIN, "MBARRIER_NOT_INITIALISED"
    ),
    "K is not waited for": Fault(CONSUMER, r"wait_parity\(shared_address\(&storage_\.k_full\), 0\);.*", "", PLAIN, TMA),
    "V is not waited for": Fault(CONSUMER, r"wait_parity\(shared_address\(&storage_\.v_full\), 0\);.*", "", PLAIN, TMA),
    "tiles are not waited for": Fault(RING, r"wait_parity\(slot\.full, this->parity_\);.*", "", PLAIN, TMA),
    "slots are not waited for": Fault(
        RING,
        r"wait_parity\(slot\.empty, this->parity_\);  // proves that all consumers are done with the t.*",
        "",
        PLAIN,
        UNORDERED_WRITES,
    ),
    "the parity of a ring stays": Fault(RING, r"parity_ \^= 1;", "", PLAIN, UNORDERED_WRITES),
    "K expects half of its bytes": Fault(
        PRODUCER, r"Storage::k_bytes\)", "Storage::k_bytes / 2)", PLAIN, "MBARRIER_FLIP_WITH_TMA_IN_FLIGHT"
    ),
    "the lse is not counted": Fault(
        STORAGE,
        r"q_slot_bytes, q_filled>",
        "q_slot_bytes, q_bytes>",
        PLAIN,
        "MBARRIER_FLIP_WITH_TMA_IN_FLIGHT",
    ),
    "delta is not counted": Fault(
        STORAGE,
        r"dout_slot_bytes, dout_filled>",
        "dout_slot_bytes, dout_bytes>",
        PLAIN,
        "MBARRIER_FLIP_WITH_TMA_IN_FLIGHT",
    ),
    "the first scores are read in flight": Fault(
        CONSUMER, r"complete_product<0>\(P\);.*", "ptx::pin_registers(P);", PLAIN, IN_FLIGHT
    ),
    "dP is read in flight": Fault(CONSUMER, r"complete_product<0>\(dP\);", "ptx::pin_registers(dP);", PLAIN, IN_FLIGHT),
    "the next scores are read in flight": Fault(
        CONSUMER, r"complete_product<2>\(P\);.*", "complete_product<3>(P);", PLAIN, IN_FLIGHT
    ),
    "dQ is read in flight": Fault(
        CONSUMER, r"complete_product<1>\(dQ\);", "complete_product<2>(dQ);", PLAIN, IN_FLIGHT
    ),
    "the product of dK is not waited for": Fault(
        CONSUMER, r"ptx::wgmma_wait_group<0>\(\);  // proves dK.*", "", PLAIN, BEING_READ
    ),
    "the product of dV is not waited for": Fault(
        CONSUMER, r"ptx::wgmma_wait_group<more \? 1 : 0>\(\);.*", "", TIGHT, BEING_READ
    ),
    "Q is released twice": Fault(
        CONSUMER, r"complete_product<1>\(dQ\);", "release(q); complete_product<1>(dQ);", PLAIN, TMA
    ),
    "Q is released before its product is complete": Fault(
        CONSUMER,
        r"ptx::wgmma_wait_group<0>\(\);(  // proves dK.*)\n\s*release\(q\);",
        r"release(q);\nptx::wgmma_wait_group<0>();",
        PLAIN,
        BEING_READ,
    ),
    "dO is released before its product is complete": Fault(
        CONSUMER,
        r"ptx::wgmma_wait_group<more \? 1 : 0>\(\);(.*)\n\s*release\(dout\);",
        "release(dout);\nptx::wgmma_wait_group<more ? 1 : 0>();",
        TIGHT,
        BEING_READ,
    ),
    "Q is not released": Fault(CONSUMER, r"      release\(q\);\n", "", PLAIN, DEADLOCK),
    "dO is not released": Fault(CONSUMER, r"      release\(dout\);\n", "", PLAIN, DEADLOCK),
    "slots are released by one warp": Fault(
        CONSUMER, r"if \(place_\.lane\(\) == 0\) cupyfa", "if (place_.thread() == 0) cupyfa", PLAIN, DEADLOCK
    ),
    "slots are released by all lanes": Fault(
        CONSUMER, r"if \(place_\.lane\(\) == 0\) cupyfa", "cupyfa", PLAIN, DEADLOCK
    ),
    "slots count one warpgroup": Fault(
        KERNEL, r"storage\.q_barriers, bwd_consumer_warps<S>", "storage.q_barriers, warpgroup_warps", PLAIN, BEING_READ
    ),
    "dS has one buffer": Fault(STORAGE, r"S\.wide\(\) \? 1 : 2;", "1;", PLAIN, BEING_READ),
    "dS is not fenced": Fault(CONSUMER, r"  " + FENCE + r"    __syncwarp\(\);", "__syncwarp();", PLAIN, NO_PROXY),
    "dS is fenced behind its barrier": Fault(
        CONSUMER,
        r"  " + FENCE + r"(    __syncwarp\(\);\n.*\n)",
        r"\1ptx::fence_proxy_async_shared_cta();\n",
        PLAIN,
        NO_PROXY,
    ),
    "dS is not waited for": Fault(CONSUMER, r"      wait_for_ds\(number\);\n", "", PLAIN, UNORDERED_READ),
    "the parity of dS stays": Fault(CONSUMER, r"number / ds_stages<S> % 2\)", "0)", PLAIN, UNORDERED_READ),
    "the parity of dS is the other": Fault(
        CONSUMER,
        r"number / ds_stages<S> % 2\)",
        "number / ds_stages<S> % 2 ^ 1)",
        PLAIN,
        UNORDERED_READ,
    ),
    "dS waits for one warpgroup": Fault(
        KERNEL,
        r"shared_address\(&barrier\), bwd_consumer_warps<S>",
        "shared_address(&barrier), warpgroup_warps",
        PLAIN,
        "SHARED_UNINITIALISED_READ",
    ),
    "registers of scores are not fenced": Fault(
        GEMM, r"ptx::wgmma_fence\(\);  // earlier reads of `scores`.*", "", PLAIN, "WGMMA_MISSING_FENCE"
    ),
    "registers of operands are not fenced": Fault(
        GEMM, r"ptx::wgmma_fence\(\);  // earlier writes of the operand.*", "", PLAIN, "WGMMA_MISSING_FENCE"
    ),
    "K is overwritten while dQ reads it": Fault(CONSUMER, r"ptx::bar_sync\(walked_barrier.*", "", PLAIN, BEING_READ),
    "staged gradients are not fenced": Fault(EPILOGUE, FENCE, "", PLAIN, NO_PROXY),
    "gradients leave before they are staged": Fault(
        EPILOGUE, r"ptx::bar_sync\(staged_barrier \+ place.*", "", PLAIN, UNORDERED_READ
    ),
    "gradients leave before both warpgroups have staged them": Fault(
        EPILOGUE, r"ptx::bar_sync\(staged_barrier, warpgroup_threads \* .*", "", WIDE, UNORDERED_READ
    ),
    "warpgroups stage at one barrier": Fault(
        EPILOGUE, r"staged_barrier \+ place\.warpgroup", "staged_barrier", PLAIN, UNORDERED_READ
    ),
    "a CTA ends while its gradients leave": Fault(
        EPILOGUE, r"ptx::cp_async_bulk_wait_group_read<0>\(\);.*", "", PLAIN, "BULK_EXIT_WITH_STORE_UNWAITED"
    ),
    "a dQ that waits is overwritten": Fault(
        RING,
        r"wait_parity\(slot\.empty, this->parity_\);  // proves that all consumers are done with the d.*",
        "",
        ORDERED,
        BEING_READ,
    ),
    "a dQ that waits is not released": Fault(SUM, r"    release\(slot\);\n", "", ORDERED, DEADLOCK),
    "a dQ that waits is released while it is read": Fault(
        SUM, r"    ptx::cp_async_bulk_wait_group_read<0>\(\);.*", "", ORDERED, BEING_READ
    ),
    "turns count from the first key tile": Fault(
        TILE, r"S\.deterministic \? tiles_n - 1 - n : n", "n", ORDERED, TIMEOUT
    ),
    "turns wait for a tile that nobody computes": Fault(
        TILE, r"if constexpr \(!S\.causal\) return last;", "return last;", ORDERED, TIMEOUT
    ),
    "turns are not set to 0": Fault(BEFORE, r"if \(p\.turns != nullptr &&", "if (false &&", ORDERED, TIMEOUT),
    "K of a wide tile is not waited for": Fault(
        WIDE_CONSUMER, r"wait_parity\(shared_address\(&storage_\.k_full\), 0\);.*", "", WIDE, TMA
    ),
    "V of a wide tile is not waited for": Fault(
        WIDE_CONSUMER, r"wait_parity\(shared_address\(&storage_\.v_full\), 0\);.*", "", WIDE, TMA
    ),
    "the first scores of a wide tile are read in flight": Fault(
        WIDE_CONSUMER, r"complete_product<0>\(P\);.*", "ptx::pin_registers(P);", WIDE, IN_FLIGHT
    ),
    "dP of a wide tile is read in flight": Fault(
        WIDE_CONSUMER, r"complete_product<0>\(dP\);", "ptx::pin_registers(dP);", WIDE, IN_FLIGHT
    ),
    "the first dQ of a wide tile is read in flight": Fault(
        WIDE_CONSUMER, r"complete_product<more \? 1 : 0>\(dQ\);.*", "complete_product<2>(dQ);", WIDE, IN_FLIGHT
    ),
    "the only dQ of a wide tile is read in flight": Fault(
        WIDE_CONSUMER, r"complete_product<more \? 1 : 0>\(dQ\);.*", "complete_product<2>(dQ);", WIDE_ONE, IN_FLIGHT
    ),
    "a dQ between others is read in flight": Fault(
        WIDE_CONSUMER,
        r"complete_product<0>\(dQ\);(\n.*first_part \+ part\);)",
        r"complete_product<1>(dQ);\1",
        WIDE_FOUR,
        IN_FLIGHT,
    ),
    "the last dQ of a wide tile is read in flight": Fault(
        WIDE_CONSUMER,
        r"complete_product<0>\(dQ\);(\n.*first_part \+ parts - 1\);)",
        r"ptx::pin_registers(dQ);\1",
        WIDE,
        IN_FLIGHT,
    ),
    "the next scores of a wide tile are read in flight": Fault(
        WIDE_CONSUMER, r"complete_product<parts == 1 \? 0 : 1>\(P\);", "complete_product<2>(P);", WIDE, IN_FLIGHT
    ),
    "the next scores are read in flight where they are alone": Fault(
        WIDE_CONSUMER, r"complete_product<parts == 1 \? 0 : 1>\(P\);", "complete_product<1>(P);", WIDE_ONE, IN_FLIGHT
    ),
    "P and dS are overwritten while they are read": Fault(
        WIDE_CONSUMER, r"ptx::bar_sync\(free_barrier.*", "", WIDE, BEING_READ
    ),
    "P and dS are overwritten while the last of four products reads them": Fault(
        WIDE_CONSUMER, r"ptx::bar_sync\(free_barrier.*", "", WIDE_FOUR, BEING_READ
    ),
    "a warpgroup waits for itself until P and dS are free": Fault(
        WIDE_CONSUMER,
        r"bar_sync\(free_barrier, warpgroup_threads \* S\.consumers\(\)\)",
        "bar_sync(staged_barrier + place_.warpgroup, warpgroup_threads)",
        WIDE,
        BEING_READ,
    ),
    "P and dS of the other warpgroup are not waited for": Fault(
        WIDE_CONSUMER, r"ptx::bar_sync\(written_barrier.*", "", WIDE, UNORDERED_READ
    ),
    "a warpgroup waits for its own P and dS": Fault(
        WIDE_CONSUMER,
        r"bar_sync\(written_barrier, warpgroup_threads \* S\.consumers\(\)\)",
        "bar_sync(staged_barrier + place_.warpgroup, warpgroup_threads)",
        WIDE,
        UNORDERED_READ,
    ),
    "P and dS are not fenced": Fault(WIDE_CONSUMER, FENCE, "", WIDE, NO_PROXY),
    "P and dS are fenced by one thread": Fault(
        WIDE_CONSUMER,
        FENCE,
        "if (place_.thread() == 0) ptx::fence_proxy_async_shared_cta();\n",
        WIDE,
        NO_PROXY,
    ),
    "P is fenced before it is written": Fault(
        WIDE_CONSUMER,
        r"      write\(p_tile, P\);\n(      write.*\n)    " + FENCE,
        r"ptx::fence_proxy_async_shared_cta();\nwrite(p_tile, P);\n\1",
        WIDE,
        NO_PROXY,
    ),
    "registers of the first dQ are not fenced": Fault(
        GEMM, r"ptx::wgmma_fence\(\);  // earlier reads of dQ.*", "", WIDE, "WGMMA_MISSING_FENCE"
    ),
    "dO of a wide tile is released before its product is complete": Fault(
        WIDE_CONSUMER,
        r"(      ptx::wgmma_wait_group<more \? 3 : 2>\(\);.*\n)(      release\(dout\);\n)",
        r"\2\1",
        WIDE,
        BEING_READ,
    ),
    "Q of a wide tile is released before its product is complete": Fault(
        WIDE_CONSUMER,
        r"(      ptx::wgmma_wait_group<more \? 2 : 1>\(\);.*\n)(      release\(q\);\n)",
        r"\2\1",
        ROOMY,
        BEING_READ,
    ),
    "Q of a wide tile is released twice": Fault(
        WIDE_CONSUMER, r"      release\(q\);\n", "release(q); release(q);\n", WIDE, DEADLOCK
    ),
    "dO of a wide tile is not released": Fault(WIDE_CONSUMER, r"      release\(dout\);\n", "", WIDE, DEADLOCK),
    "Q of a wide tile is not released": Fault(WIDE_CONSUMER, r"      release\(q\);\n", "", WIDE, DEADLOCK),
    "slots of a wide tile are released by one warp": Fault(
        WIDE_CONSUMER, r"if \(place_\.lane\(\) == 0\) cupyfa", "if (place_.thread() == 0) cupyfa", WIDE, DEADLOCK
    ),
    "slots of a wide tile are released by all lanes": Fault(
        WIDE_CONSUMER, r"if \(place_\.lane\(\) == 0\) cupyfa", "cupyfa", WIDE, DEADLOCK
    ),
    "K of a wide tile is overwritten while dQ reads it": Fault(
        WIDE_CONSUMER, r"ptx::bar_sync\(walked_barrier.*", "", WIDE, BEING_READ
    ),
    "a wide dQ that waits is overwritten": Fault(
        RING,
        r"wait_parity\(slot\.empty, this->parity_\);  // proves that all consumers are done with the d.*",
        "",
        WIDE_ORDERED,
        BEING_READ,
    ),
    "a dQ that waits is announced by one warp": Fault(
        SUM, r"if \(place_\.lane\(\) == 0\) ptx", "if (place_.thread() == 0) ptx", ORDERED, DEADLOCK
    ),
    "an adder takes one part of a wide tile": Fault(
        SUM, r"i < DqPart<S>::of_warpgroup", "i < 1", WIDE_ORDERED, DEADLOCK
    ),
    "parts of a wide tile share turns": Fault(SUM, r"::of_tile \+ part;", "::of_tile;", WIDE_ORDERED, TIMEOUT),
    "a tile has the turns of two parts": Fault(
        SUM, r"tile \* DqPart<S>::of_tile \+", "tile * 2 +", WIDE_ORDERED, TIMEOUT
    ),
    "tiles of dQ are rounded before all threads have them": Fault(
        AFTER, r"  __syncthreads\(\);.*", "", NARROW, UNORDERED_READ
    ),
    "parts of a sink are added before all warps have them": Fault(
        BEFORE, r"    __syncthreads\(\);\n", "", SUNK, UNORDERED_READ
    ),
}
#: Edits that no schedule shows, each with the reason: it is no fault, or the emulator has no rule for it.
UNSEEN: dict[str, Fault] = {
    "P and dS are fenced behind their barrier": Fault(
        WIDE_CONSUMER,
        r"    " + FENCE + r"(      ptx::bar_sync\(written.*\n)",
        r"\1ptx::fence_proxy_async_shared_cta();\n",
        WIDE,
        why="no fault: all who issue products fence themselves, behind the barrier that orders the writes of all",
    ),
    "a warpgroup waits for itself until K of a wide tile is free": Fault(
        WIDE_CONSUMER,
        r"bar_sync\(walked_barrier, warpgroup_threads \* S\.consumers\(\)\)",
        "bar_sync(6 + place_.warpgroup, warpgroup_threads)",
        WIDE,
        why="no fault: a warpgroup stages dK in the columns of K that its own dQ reads last; all have read V",
    ),
    "a dQ that waits is not fenced": Fault(
        SUM,
        r"  " + FENCE + r"    __syncwarp\(\);",
        "__syncwarp();",
        ORDERED,
        why="a gap: the emulator does not tell fences by state space, and the adder fences global memory",
    ),
    "registers of a wide dV and dK are not fenced": Fault(
        GEMM,
        r"ptx::wgmma_fence\(\);  // earlier accesses of the gradient.*",
        "",
        WIDE,
        why="no fault: nothing but products has them between two fences of scores, which fence all registers",
    ),
}
#: Faults that begin a kernel too early. Nothing but a programmatic launch shows them.
EARLY: dict[str, Fault] = {
    "rows are read before they are prepared": Fault(
        PRODUCER, r" ptx::griddepcontrol_wait\(\);  // proves lse.*", "{}", PLAIN
    ),
    "the sum is read before it is complete": Fault(AFTER, r"  ptx::griddepcontrol_wait\(\);.*", "", PLAIN),
    "parts of gradients are read before they are complete": Fault(
        AFTER, r"  ptx::griddepcontrol_wait\(\);.*", "", SHARED
    ),
    "parts of a sink are read before they are there": Fault(SINK, r"  ptx::griddepcontrol_wait\(\);.*", "", SUNK),
}
#: Faults of the order of additions: all is right but for the bits, which depend on the schedule.
UNORDERED: dict[str, Fault] = {
    "turns are not waited for": Fault(SUM, r"    while \(ptx::ld_acquire.*", "", FOUR),
}
#: Faults of what is computed.
WRONG: dict[str, Fault] = {
    "dV is made of dS": Fault(CONSUMER, r"\(dV, P_rounded, ", "(dV, dS, ", PLAIN),
    "dK is made of P": Fault(CONSUMER, r"\(dK, dS, q\.data\)", "(dK, P_rounded, q.data)", PLAIN),
    "both warpgroups have the first keys": Fault(
        CONSUMER, r"panel_bytes\(warpgroup_rows \* place_\.warpgroup\)", "0", PLAIN
    ),
    "dS of 64 queries repeat": Fault(CONSUMER, r"query / panel_cols \* panel_bytes\(S\.tile_n\);", "0;", NARROW),
    "dK is not scaled": Fault(EPILOGUE, r"\(dK, p\.scale, place, k\)", "(dK, 1.f, place, k)", PLAIN),
    "dV is scaled": Fault(EPILOGUE, r"\(dV, 1\.f, place, v\)", "(dV, p.scale, place, v)", PLAIN),
    "columns of gradients repeat": Fault(
        EPILOGUE, r"data \+ column / panel_cols \* panel_bytes\(S\.tile_n\)", "data", PLAIN
    ),
    "rows of the second warpgroup are stored as those of the first": Fault(
        EPILOGUE, r"tile\.n \* S\.tile_n \+ row\)", "tile.n * S.tile_n)", PLAIN
    ),
    "gradients of keys are stored to the first batch": Fault(
        EPILOGUE, r"tile\.keys\(tile\.n \* S\.tile_n \+ row\)", "Rows{tile.n * S.tile_n + row, tile.head, 0}", BATCHES
    ),
    "dQ is of one half of the keys": Fault(GEMM, r"step < S\.tile_n / 16", "step < S.tile_n / 32", PLAIN),
    "columns of dQ repeat": Fault(COLUMNS, r"0>\(width \* part\)", "0>(0)", WIDE),
    "rows of dQ repeat": Fault(STORAGE, r"by_rows \? part / of_warpgroup \* warpgroup_rows : 0", "0", NARROW),
    "scores lack columns": Fault(GEMM, r"step < columns / 16", "step < columns / 32", PLAIN),
    "keys of a thread are neighbours": Fault(PLACE, r"lane\(\) / 4; \}", "lane() / 8; }", CAUSAL),
    "warps have the keys of the first one": Fault(
        PLACE, r"first_key\(\) \+ 16 \* warp\(\) \+ lane\(\) / 4", "first_key() + lane() / 4", CAUSAL
    ),
    "the mask begins a key early": Fault(
        SCORES, r"key - (tile_\.last_diagonal\(p_\)) - first_query", r"key - \1 - 1 - first_query", CAUSAL
    ),
    "the mask begins a key late": Fault(
        SCORES, r"key - (tile_\.last_diagonal\(p_\)) - first_query", r"key - \1 + 1 - first_query", CAUSAL
    ),
    "the window ends a row late": Fault(
        SCORES, r"key \+ 1 - tile_\.first_diagonal", "key + 2 - tile_.first_diagonal", WINDOW
    ),
    "the window ends a row early": Fault(
        SCORES, r"key \+ 1 - tile_\.first_diagonal", "key - tile_.first_diagonal", WINDOW
    ),
    "both keys of a thread have one limit": Fault(SCORES, r"place_\.key\(\) \+ 8 \* r;", "place_.key();", CAUSAL),
    "tiles are never masked": Fault(SCORES, r"if \(!range\.sees_all\(query\.m\)\)", "if (false)", CAUSAL),
    "delta is not subtracted": Fault(SCORES, r"\(value - of_query\[i % 2\]\)", "value", PLAIN),
    "delta is that of the next query": Fault(
        SCORES, r"\(value - of_query\[i % 2\]\)", "(value - of_query[1 - i % 2])", PLAIN
    ),
    "dS lacks P": Fault(SCORES, r"value = P\[4 \* group \+ i\] \* ", "value = ", PLAIN),
    "slopes of the cap are left out": Fault(
        SCORES, r"if constexpr \(Slopes::kept\) value \*= slopes\[i\];", "", CAPPED
    ),
    "slopes of the cap are of the first queries": Fault(
        SCORES, r"own_ \+ group \* warpgroup_threads \* 16", "own_", CAPPED
    ),
    "the cap has the slope of a logistic function": Fault(SCORES, r"-4\.f \* score", "-score", CAPPED),
    "ALiBi rises": Fault(SCORES, r"= -p_\.alibi", "= p_.alibi", BATCHES),
    "ALiBi slopes are of the first head": Fault(SCORES, r"query\.head \* p_\.alibi", "0 * p_.alibi", BATCHES),
    "ALiBi counts from the first key": Fault(SCORES, r" - tile_\.n \* S\.tile_n - place_", " - place_", BATCHES),
    "lse is that of the first rows": Fault(
        BIAS, r"8 \* group \+ place\.query\(\)\), words", "place.query()), words", PLAIN
    ),
    "a key tile begins a query tile late": Fault(
        TILE,
        r"max\(0, first - tile\.last_diagonal\(p\)\) / S\.tile_m;",
        "max(0, first - tile.last_diagonal(p)) / S.tile_m + 1;",
        CAUSAL,
    ),
    "a key tile ends a query tile early": Fault(TILE, r"last_row / S\.tile_m \+ 1\)", "last_row / S.tile_m)", WINDOW),
    "tiles under the diagonal begin early": Fault(
        TILE, r"(last_diagonal\(p\)\)) \+ S\.tile_m - 1\) / S\.tile_m;", r"\1) / S.tile_m;", CAUSAL
    ),
    "tiles inside the window end late": Fault(
        TILE,
        r"first - tile\.first_diagonal\(p\) \+ 1\) / S\.tile_m;",
        "first - tile.first_diagonal(p) + 1) / S.tile_m + 1;",
        WIDE_WINDOW,
    ),
    "a key head has the first query heads": Fault(
        TILE, r"int\(head \* p\.heads_per_kv \+ before\)", "int(head + before)", BATCHES
    ),
    "a query head is left out": Fault(TILE, r"left_\(range\.count\(\) \* tile\.heads\)", "left_(range.count())", PLAIN),
    "key tiles of a section repeat": Fault(TILE, r"= rest / heads;", "= 0 * rest / heads;", CAUSAL),
    "keys are of the first batch": Fault(
        PRODUCER,
        r"p\.k, tile\.keys\(tile\.n \* S\.tile_n\)",
        "p.k, Rows{tile.n * S.tile_n, tile.head, 0}",
        BATCHES,
    ),
    "rows of lse are of the first batch": Fault(
        PRODUCER,
        r"tile\.template first_query_tile<S>\(p, step\.tile\(\)\.head\)",
        "u64(step.tile().head) * p.tiles_m",
        BATCHES,
    ),
    "columns beyond 64 are the first": Fault(PRODUCER, r"map, panel \* panel_cols,", "map, 0,", PLAIN),
    "parts of dQ are added to the first warpgroup's": Fault(
        SUM, r"\(DqPart<S>::first_row\(part\), column\)", "(0, 0)", PLAIN
    ),
    "dQ is added to the first head's": Fault(SUM, r"<S>\(p, query\.head\)", "<S>(p, 0)", PLAIN),
    "lse stays natural": Fault(BEFORE, r"lse \* p\.lse_factor :", "lse :", PLAIN),
    "a gradient of the lse is added": Fault(BEFORE, r"delta -= p\.dlse", "delta += p.dlse", ROWS),
    "the gradient of the lse is of the first head": Fault(BEFORE, r"head \* p\.dlse_strides\.head", "0", ROWS),
    "delta is of one lane": Fault(BEFORE, r"delta = sum_of_lanes\(delta, lanes\);", "", PLAIN),
    "dQ begins with what was there": Fault(BEFORE, r"i < \(end - begin\) \* row_vectors;", "i < 0;", PLAIN),
    "rows of the output are of the first head": Fault(
        BEFORE, r"row \* strides\.row \+ head \* strides\.head", "row * strides.row", PLAIN
    ),
    "a sink rises": Fault(BEFORE, r"dsink -= ptx", "dsink += ptx", SUNK),
    "a sink is of the first head": Fault(BEFORE, r"p\.sink\[head \* ", "p.sink[0 * ", SUNK),
    "a sink has the rows of one lane": Fault(BEFORE, r"dsink = sum_of_lanes\(dsink, 32\);", "", SUNK),
    "a sink has the rows of one warp": Fault(
        BEFORE, r"for \(float x : of_warps\) sum \+= x;", "sum = of_warps[0];", SUNK
    ),
    "a sink has one batch": Fault(SINK, r"batch < p\.batch", "batch < 1", SUNK),
    "a sink has one part": Fault(SINK, r"part < p\.parts_head; part", "part < 1; part", SUNK),
    "dQ is not scaled": Fault(AFTER, r"\(x\[i\]\.x \* p\.scale, x\[i\]\.y \* p\.scale\)", "(x[i].x, x[i].y)", SCALED),
    "rows of dQ are eight apart": Fault(AFTER, r"to\[8 \* pitch\] = ", "to[4 * pitch] = ", PLAIN),
    "dQ has the tiles of the first warpgroup": Fault(AFTER, r"= sums\[\(first \+", "= sums[(first / 2 * 2 +", PLAIN),
    "columns of dQ beyond head_dim are written": Fault(
        AFTER, r"if \(column >= p\.head_dim\) continue;", "", of(1, 70, 80, 2, 1, 40, "float16")
    ),
    "rows of dQ beyond the last are written": Fault(AFTER, r"min\(S\.tile_m, rows\.count\)", "S.tile_m", PLAIN),
    "dQ of the last head is left out": Fault(AFTER, r"\+ head \* p\.out_strides\.head", "", PLAIN),
    "dV of a wide tile is made of dS": Fault(WIDE_CONSUMER, r"\(dV, p_tile, ", "(dV, ds_tile, ", WIDE),
    "dK of a wide tile is made of P": Fault(WIDE_CONSUMER, r"\(dK, ds_tile, ", "(dK, p_tile, ", WIDE),
    "dQ of a wide tile is made of P": Fault(
        WIDE_CONSUMER, r"\(dQ, ds_tile, k, first_part\)", "(dQ, p_tile, k, first_part)", WIDE
    ),
    "P of a wide tile is dS": Fault(WIDE_CONSUMER, r"write\(p_tile, P\)", "write(p_tile, dP)", WIDE),
    "both warpgroups have the first queries": Fault(WIDE_CONSUMER, r"own_queries = .*;", "own_queries = 0;", WIDE),
    "both warpgroups write the first queries": Fault(
        WIDE_CONSUMER, r"row = place_\.first_query\(\) \+ query;", "row = query;", WIDE
    ),
    "both warpgroups mask the first queries": Fault(
        PLACE, r"S\.wide\(\) \? S\.queries\(\) \* warpgroup : 0", "0", WIDE
    ),
    "warpgroups of a wide tile have keys of their own": Fault(
        PLACE, r"S\.wide\(\) \? 0 : warpgroup_rows", "warpgroup_rows", WIDE
    ),
    "both warpgroups have the first columns of dK": Fault(
        WIDE_CONSUMER, r"q\.data, place_\.warpgroup\);", "q.data, 0);", WIDE
    ),
    "both warpgroups have the first columns of dV": Fault(
        WIDE_CONSUMER, r"dout\.data, place_\.warpgroup\);", "dout.data, 0);", UNEQUAL
    ),
    "both warpgroups have the first parts of dQ": Fault(WIDE_CONSUMER, r"parts \* place_\.warpgroup;", "0;", WIDE),
    "middle parts of dQ are left out": Fault(
        WIDE_CONSUMER, r"int part = 1; part < parts;", "int part = parts - 1; part < parts;", WIDE_FOUR
    ),
    "the second part of dQ is left out": Fault(WIDE_CONSUMER, r"int part = 1;", "int part = 2;", WIDE),
    "parts of dQ have the columns of the first": Fault(
        WIDE_CONSUMER, r"\(dQ, ds_tile, k, first_part \+ part\)", "(dQ, ds_tile, k, first_part)", WIDE
    ),
    "a part of dQ is added to the first": Fault(
        WIDE_CONSUMER, r"query, first_part \+ part\);", "query, first_part);", WIDE_FOUR
    ),
    "the last part of dQ is added to the first": Fault(
        WIDE_CONSUMER, r"query, first_part \+ parts - 1\);", "query, first_part);", WIDE
    ),
    "dQ is added to the next query tile": Fault(
        WIDE_CONSUMER, r"(      const QueryTile query = .*\n)(      step\.advance\(\);\n)", r"\2\1", WIDE
    ),
    "parts of 32 columns begin at panels": Fault(COLUMNS, r" \+ column % panel_cols \* 2;", ";", WIDE_FOUR),
    "parts of dQ begin in the first panel": Fault(
        COLUMNS, r"tile \+ column / panel_cols \* panel_bytes\(rows\)", "tile", WIDE
    ),
    "pairs of panels are those of the first warpgroup": Fault(
        COLUMNS, r"0>\(of_pairs \* warpgroup\)", "0>(0)", RAGGED_WIDE
    ),
    "half panels are those of the first warpgroup": Fault(
        COLUMNS, r"of_pairs>\(2 \* of_pairs \+ of_panel \* warpgroup\)", "of_pairs>(2 * of_pairs)", RAGGED_WIDE
    ),
    "half panels begin in the first": Fault(
        COLUMNS, r"of_pairs>\(2 \* of_pairs \+ of_panel", "of_pairs>(of_panel", RAGGED_WIDE
    ),
    "what panels leave over is the first warpgroup's": Fault(
        COLUMNS, r"of_panel\) \+ of_rest \* warpgroup\)", "of_panel))", RAGGED
    ),
    "what panels leave over begins in the first": Fault(
        COLUMNS, r"\(2 \* \(of_pairs \+ of_panel\) \+ of_rest", "(of_rest", RAGGED
    ),
    "pieces have the registers of the first": Fault(COLUMNS, r"all\[first / 2\]", "all[0]", RAGGED_WIDE),
    "an operand in shared memory has 16 queries": Fault(GEMM, r"panel_bytes\(S\.tile_n\) \+ query_bytes", "0", WIDE),
    "an operand in shared memory has 64 queries": Fault(
        GEMM, r"panel \* panel_bytes\(S\.tile_n\) \+ query_bytes", "query_bytes", WIDE_ROWS
    ),
    "operands are written to the first 64 queries": Fault(
        WIDE_CONSUMER, r"tile \+ row / panel_cols \* panel_bytes\(S\.tile_n\)", "tile", WIDE_ROWS
    ),
    "parts of rows are of the first 64": Fault(
        STORAGE, r"by_rows \? part / of_warpgroup \* warpgroup_rows : 0", "0", WIDE_ROWS
    ),
    "parts of rows begin at the first column": Fault(
        STORAGE, r"by_rows \? part % of_warpgroup : part", "by_rows ? 0 : part", WIDE_ROWS
    ),
    "columns of a gradient are staged in the first chunks": Fault(
        EPILOGUE, r"column % panel_cols / 16", "i % panel_cols / 16", RAGGED_WIDE
    ),
    "panels of a gradient are the first": Fault(EPILOGUE, r"map, panel \* panel_cols,", "map, 0,", WIDE),
    "pieces of a dQ that waits are the first": Fault(
        SUM, r"slot\.data \+ first \* column_bytes", "slot.data", RAGGED_ORDERED
    ),
    "pieces of a dQ are the first": Fault(SUM, r"&dQ\[first / 2 \+ i\]", "&dQ[i]", RAGGED),
    "adders of a wide tile add the same parts": Fault(
        SUM, r"DqPart<S>::of_warpgroup \* warpgroup \+ i\)", "DqPart<S>::of_warpgroup * 0 + i)", WIDE_ORDERED
    ),
    "parts of gradients overwrite each other": Fault(EPILOGUE, r"\(tile\.part \* heads \+ head\)", "head", SHARED),
    "parts of gradients are of the first batch": Fault(
        EPILOGUE, r"head = tile\.batch \* p\.heads_kv \+ tile\.head;", "head = tile.head;", SHARED
    ),
    "parts of gradients are of the first head": Fault(
        EPILOGUE, r"head = tile\.batch \* p\.heads_kv \+ tile\.head;", "head = tile.batch * p.heads_kv;", SHARED
    ),
    "parts of gradients are of the first key tile": Fault(
        EPILOGUE, r"\* p\.tiles_n \+ tile\.n;", "* p.tiles_n;", SHARED
    ),
    "parts of gradients are too far from each other": Fault(
        EPILOGUE, r"p\.tiles_n / p\.parts, head", "p.tiles_n, head", SHARED
    ),
    "parts have the keys of the first warpgroup": Fault(
        EPILOGUE,
        r"\(place\.first_key\(\), column\)",
        "(0, column)",
        SHARED,
    ),
    "parts have the columns of the first warpgroup": Fault(
        EPILOGUE, r"\(place\.first_key\(\), column\)", "(place.first_key(), 0)", SHARED_WIDE
    ),
    "columns of parts repeat": Fault(EPILOGUE, r"own \+ i / sum_floats \* sum_group", "own", SHARED),
    "parts of dV are those of dK": Fault(EPILOGUE, r"\(p\.dv_parts, dV,", "(p.dk_parts, dV,", SHARED),
    "rows of sums have the columns of one group": Fault(LAYOUT, r"\* \(columns / sum_columns\)", "", SHARED),
    "parts have the first query heads": Fault(
        TILE, r"\(head \* p\.heads_per_kv \+ before\)", "(head * p.heads_per_kv)", SHARED
    ),
    "the last part has heads of the next group": Fault(
        TILE, r"min\(p\.heads_per_part, p\.heads_per_kv - before\)", "p.heads_per_part", SHARED
    ),
    "the first part is all": Fault(AFTER, r"part < p\.parts;", "part < 1;", SHARED),
    "parts are the first one": Fault(AFTER, r"sums \+ part \* \(p\.part_stride / 4\)", "sums", SHARED),
    "a column has one part": Fault(AFTER, r"x\[i\]\.w \+ other\.w", "x[i].w", SHARED),
    "the first part is added twice": Fault(AFTER, r"for \(int part = 1;", "for (int part = 0;", SHARED_WIDE),
}
