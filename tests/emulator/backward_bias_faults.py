"""Faults to be planted into what the kernels of gradients do with a bias, each with a case that it breaks."""

from __future__ import annotations

from emulator.backward_faults import (
    BEFORE,
    BEING_READ,
    BIAS,
    DEADLOCK,
    IN_FLIGHT,
    KERNEL,
    PRODUCER,
    SCORES,
    STORAGE,
    UNORDERED_READ,
    Fault,
    of,
)

__all__ = ["EARLY", "RACES", "WRONG"]

#: A bias with rows and columns, in both types, more than one step for each CTA.
BIASED = of(1, 150, 200, 2, 1, 64, "float16", bias="hqk")
BIASED_16 = of(2, 150, 200, 2, 1, 128, "float16", bias="bhqk", bias_dtype="same")
BIASED_WIDE = of(1, 130, 100, 2, 1, 192, "float16", True, bias="hqk", softcap=3.0, alibi=True)
#: One row for all queries, and one column for all keys.
ROW = of(2, 150, 200, 2, 1, 64, "float16", bias="bhk")
COLUMN = of(2, 150, 200, 2, 1, 64, "float16", True, bias="bhq", bias_dtype="same", sink=True)
COLUMN_32 = of(1, 150, 200, 2, 1, 64, "float16", True, bias="hq", sink=True)
#: What is the sum over batches, heads, or both, and of one tile or more.
OF_HEADS = of(2, 70, 150, 4, 2, 64, "float16", bias="qk")
OF_ALL = of(2, 150, 200, 2, 2, 64, "float16", True, bias="h", bias_dtype="same", sink=True)

BIAS_TILE, BIAS_KERNEL = "hopper/bwd/bias_tile.cuh", "hopper/bwd_bias.cu"

#: As `emulator.backward_faults.RACES`.
RACES: dict[str, Fault] = {
    "a bias is not given back": Fault(SCORES, r"    bias_\.done\(\);\n", "", BIASED, DEADLOCK),
    "a bias is given back before it is read": Fault(
        SCORES,
        r"(    bias_\.begin\(.*\);\n)((?:.*\n)*?)    bias_\.done\(\);\n",
        r"\1    bias_.done();\n\2",
        BIASED,
        BEING_READ,
    ),
    "a bias of a wide tile is given back before it is read": Fault(
        SCORES,
        r"(    bias_\.begin\(.*\);\n)((?:.*\n)*?)    bias_\.done\(\);\n",
        r"\1    bias_.done();\n\2",
        BIASED_WIDE,
        BEING_READ,
    ),
    "a bias is given back by all lanes": Fault(
        BIAS, r"if \(place_\.lane\(\) == 0\) release", "release", BIASED, DEADLOCK
    ),
    "a bias waits for one warpgroup": Fault(
        KERNEL,
        r"storage\.bias_barriers\.ring, bwd_consumer_warps<S>",
        "storage.bias_barriers.ring, warpgroup_warps",
        BIASED,
        BEING_READ,
    ),
    "a column is not counted": Fault(
        STORAGE,
        r"\(S\.bias == Bias::column \? 2 : 1\) \* row_bytes",
        "row_bytes",
        COLUMN,
        "MBARRIER_FLIP_WITH_TMA_IN_FLIGHT",
    ),
    "barriers of the gradient of a bias are not initialised in time": Fault(
        BIAS_KERNEL, r"  __syncthreads\(\);  // proves.*", "", BIASED, "MBARRIER_NOT_INITIALISED"
    ),
    "scores of the gradient of a bias are read in flight": Fault(
        BIAS_KERNEL, r"complete_product<1>\(P\);.*", "complete_product<2>(P);", BIASED, IN_FLIGHT
    ),
    "dP of the gradient of a bias is read in flight": Fault(
        BIAS_KERNEL, r"complete_product<0>\(dP\);", "complete_product<1>(dP);", BIASED, IN_FLIGHT
    ),
    "tiles of the gradient of a bias are not released": Fault(
        BIAS_KERNEL, r"if \(place_\.lane\(\) == 0\) release\(slot\);", "", OF_HEADS, DEADLOCK
    ),
    "tiles of the gradient of a bias are released while they are read": Fault(
        BIAS_KERNEL,
        r"(      complete_product<0>\(dP\);\n(?:.*\n){2})(      if \(place_\.lane\(\) == 0\) release\(slot\);\n)",
        r"\2\1",
        OF_HEADS,
        BEING_READ,
    ),
    "tiles of the gradient of a bias wait for one warpgroup": Fault(
        BIAS_KERNEL,
        r"storage\.barriers, bias_consumer_threads / 32",
        "storage.barriers, bias_consumer_threads / 64",
        OF_HEADS,
        BEING_READ,
    ),
    "delta of the gradient of a bias is not counted": Fault(
        BIAS_KERNEL,
        r"\(S\.bias == Bias::column \? 3 : 2\)",
        "(S.bias == Bias::column ? 2 : 1)",
        BIASED,
        "MBARRIER_FLIP_WITH_TMA_IN_FLIGHT",
    ),
    "sums are written over tiles that are read": Fault(
        BIAS_KERNEL, r"ptx::bar_sync\(walked_barrier.*", "", BIASED, BEING_READ
    ),
    "sums are stored before they are there": Fault(
        BIAS_KERNEL,
        r"ptx::bar_sync\(written_barrier, bias_consumer_threads\);  // proves the sums.*",
        "",
        BIASED,
        UNORDERED_READ,
    ),
    "sums of queries are stored before they are there": Fault(
        BIAS_KERNEL,
        r"ptx::bar_sync\(written_barrier, bias_consumer_threads\);  // proves the first row.*",
        "",
        OF_ALL,
        UNORDERED_READ,
    ),
    "sums of keys are stored before they are there": Fault(
        BIAS_KERNEL,
        r"ptx::bar_sync\(written_barrier, bias_consumer_threads\);  // proves the first col.*",
        "",
        COLUMN,
        UNORDERED_READ,
    ),
}
#: As `emulator.backward_faults.EARLY`.
EARLY: dict[str, Fault] = {
    "rows of the gradient of a bias are read before they are prepared": Fault(
        BIAS_KERNEL, r"  ptx::griddepcontrol_wait\(\);.*", "", BIASED
    ),
}
#: As `emulator.backward_faults.WRONG`.
WRONG: dict[str, Fault] = {
    "a bias is scaled": Fault(
        SCORES,
        r"score = fmaf\(score, scale, natural \? bias\[i\] : shift\);",
        "score = natural ? (score + bias[i]) * scale : fmaf(score, scale, shift);",
        BIASED,
    ),
    "natural logits are in base 2": Fault(SCORES, r"\(score \+ shift\) \* log2_e;", "score + shift;", BIASED),
    "the lse beside a bias is in base 2": Fault(BEFORE, r"lse \* p\.lse_factor :", "lse * log2_e :", BIASED),
    "a cap beside a bias is in base 2": Fault(
        SCORES, r"natural \? p_\.softcap : p_\.softcap_log2", "p_.softcap_log2", BIASED_WIDE
    ),
    "ALiBi beside a bias is in base 2": Fault(
        SCORES, r"if constexpr \(!natural\) alibi_slope", "alibi_slope", BIASED_WIDE
    ),
    "a bias is that of the first head": Fault(PRODUCER, r"== 0 \? 0 : query\.head,", "== 0 ? 0 : 0,", BIASED),
    "a bias is that of the first batch": Fault(PRODUCER, r"== 0 \? 0 : tile\.batch;", "== 0 ? 0 : 0;", BIASED_16),
    "panels of a bias have the first keys": Fault(
        PRODUCER, r"tile\.n \* S\.tile_n \+ panel \* cols,", "tile.n * S.tile_n,", BIASED
    ),
    "rows of a bias are the first": Fault(
        PRODUCER, r"panel \* cols, query\.m \* S\.tile_m, head", "panel * cols, 0, head", BIASED
    ),
    "groups of eight queries have the first rows of a bias": Fault(
        BIAS, r"\+ c \* panel_row_bytes \+ group \* swizzle_atom_bytes\)", "+ c * panel_row_bytes)", BIASED
    ),
    "groups of eight queries have the first rows of a bias of 16 bits": Fault(
        BIAS, r"first_ \+ group \* swizzle_atom_bytes, pairs", "first_, pairs", BIASED_16
    ),
    "keys of a thread have one bias": Fault(BIAS, r" \^ \(r << 5\)\)", ")", BIASED),
    "chunks of odd rows are not exchanged": Fault(BIAS, r" \^ \(c << 4\) ", " ", BIASED),
    "keys of a thread have one bias of 16 bits": Fault(BIAS, r"lane / 8 % 2 \* 8\);", "0);", BIASED_16),
    "warps have the bias of the first one": Fault(
        BIAS, r"place_\.first_key\(\) \+ 16 \* warp \+ \(S", "place_.first_key() + (S", BIASED
    ),
    "warpgroups of a wide tile have the bias of the first queries": Fault(
        BIAS, r"query = place_\.first_query\(\) \+ ", "query = ", BIASED_WIDE
    ),
    "a row is that of the first key tile": Fault(
        BIAS, r"first = tile\.n \* S\.tile_n \+ place_", "first = place_", ROW
    ),
    "a row is that of the first head": Fault(BIAS, r" \+ query\.head \* p_\.bias_strides\.head", "", ROW),
    "a row is that of the first batch": Fault(BIAS, r"= tile\.batch \* p_\.bias_strides\.batch", "= 0", ROW),
    "a row is that of the first of two keys": Fault(
        BIAS, r"values\[i\] = of_key_\[i / 2\]", "values[i] = of_key_[0]", ROW
    ),
    "a column is that of the other query": Fault(
        BIAS, r"values\[i\] = of_query\[i % 2\]", "values[i] = of_query[1 - i % 2]", COLUMN
    ),
    "a column is that of the first head": Fault(
        BEFORE, r"head \* strides\.head \+ row \* strides\.row;\n  if", "row * strides.row;\n  if", COLUMN
    ),
    "a column is of float32": Fault(
        BEFORE,
        r"if \(p\.bias_float32\)",
        "if (!p.bias_float32)",
        COLUMN_32,
    ),
    "the gradient of a bias has the slopes of a cap": Fault(
        BIAS_KERNEL,
        r"      scores\.differentiate\(dP, P, (.*)\);",
        r"      scores.differentiate(dP, P, \1); for (float& x : dP) x *= .5f;",
        BIASED_WIDE,
    ),
    "the gradient of a bias is of one batch": Fault(
        BIAS_TILE, r"p\.batches == 1, p\.batch\)", "p.batches == 1, 1)", OF_HEADS
    ),
    "the gradient of a bias is of one head": Fault(
        BIAS_TILE, r"p\.heads == 1, p\.scores\.heads_q\)", "p.heads == 1, 1)", OF_HEADS
    ),
    "the gradient of a bias is of one query tile": Fault(
        BIAS_TILE, r"p\.rows == 1, p\.scores\.tiles_m\)", "p.rows == 1, 1)", ROW
    ),
    "the gradient of a bias is of one key tile": Fault(
        BIAS_TILE, r"p\.keys == 1, p\.scores\.tiles_n\)", "p.keys == 1, 1)", COLUMN
    ),
    "the gradient of a bias has the keys of the first head": Fault(
        BIAS_TILE, r"h / int\(p\.scores\.heads_per_kv\)", "0", OF_HEADS
    ),
    "sums of the gradient of a bias forget": Fault(BIAS_KERNEL, r"sum\[i\] \+= dP\[i\]", "sum[i] = dP[i]", OF_HEADS),
    "queries are not added": Fault(BIAS_KERNEL, r"    if \(p_\.rows == 1\) add_rows\(\);\n", "", ROW),
    "keys are not added": Fault(BIAS_KERNEL, r"    if \(p_\.keys == 1\) add_keys\(\);\n", "", COLUMN),
    "the gradient of a bias of all is that of a row": Fault(
        BIAS_KERNEL, r"    if \(p_\.keys == 1\) add_keys\(\);\n", "", OF_ALL
    ),
    "the gradient of a bias is stored to the first head": Fault(
        BIAS_KERNEL, r" \+ own_\.head \* p_\.strides\.head", "", BIASED
    ),
    "the gradient of a bias is stored to the first batch": Fault(
        BIAS_KERNEL, r"own_\.batch \* p_\.strides\.batch \+ ", "", BIASED_16
    ),
    "rows of the gradient of a bias beyond the last are written": Fault(
        BIAS_KERNEL, r"min\(S\.tile_m, p_\.rows - first_row\)", "S.tile_m", BIASED
    ),
    "keys of the gradient of a bias beyond the last are written": Fault(
        BIAS_KERNEL, r"    if \(own_\.n \* S\.tile_n \+ key >= p_\.keys\) return;\n", "", BIASED
    ),
}
