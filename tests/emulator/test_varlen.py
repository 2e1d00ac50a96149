"""Packed sequences under the emulator: the plan and its twin, the kernel and the oracle, and planted faults."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest
from nvrtc_tools import import_nvrtc
from packed import call, hold_to_oracle

import cupyfa
from cupyfa import compiler, emulate, sources
from cupyfa.emulator import POLICIES
from cupyfa.operand import Arrays
from cupyfa.options import check_options
from cupyfa.oracles.packed import sequences
from cupyfa.packing import read_plan
from cupyfa.spec import Bias
from cupyfa.testing import PACKED_CASES, PackedCase


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


def prepare(case: PackedCase, config: dict[str, Any] | None = None, **changes: Any) -> emulate.Prepared:
    """A call whose outputs are NaN."""
    arguments = call(case) | changes
    options = check_options(causal=case.causal, window_size=case.window_size, softcap=case.softcap)
    q, v = arguments["q"], arguments["v"]
    out, lse = np.empty((*q.shape[:2], v.shape[2]), q.dtype), np.full(q.shape[1::-1], np.nan, np.float32)
    out.view(np.uint16)[...] = 0x7FFF
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    return emulate.prepare_arrays(Arrays(**arrays, out=out, lse=lse), options, config=config, sms=2)


def plan_of(prepared: emulate.Prepared) -> Any:
    assert prepared.planning is not None
    return read_plan(prepared.planning.plan)


@pytest.mark.parametrize(
    ("case", "policy"), [*zip(PACKED_CASES, itertools.cycle(POLICIES), strict=False)], ids=lambda x: getattr(x, "id", x)
)
def test_kernel_is_right(case: PackedCase, policy: str) -> None:
    prepared = prepare(case)
    run = prepared.launch(policy=policy)
    assert run.verdict == "clean", run
    hold_to_oracle(case, prepared.out, prepared.lse)


@pytest.mark.parametrize(
    "config",
    [{"scheduler": "one_tile"}, {"scheduler": "persistent"}, {"longest_first": False}, {"speculative": False}],
    ids=str,
)
def test_other_schedules(config: dict[str, Any]) -> None:
    for case in PACKED_CASES[1:8]:
        prepared = prepare(case, config)
        assert prepared.launch().verdict == "clean"
        hold_to_oracle(case, prepared.out, prepared.lse)


def test_the_public_function() -> None:
    case = PACKED_CASES[2]
    out, lse = cupyfa.attention_varlen(**call(case), backend="emulator", return_lse=True)
    hold_to_oracle(case, out, lse)


# --- The plan ---


def expected_tiles(case: PackedCase, tile_m: int) -> list[tuple[int, ...]]:
    """What a plan says of each tile but its place: rows, keys and the number of the sequence."""
    lengths = case.lengths
    total = int(lengths["cu_seqlens_q"][-1]) + case.behind
    tiles, end = [], 0
    for i, (rows, keys) in enumerate(sequences(**lengths)):
        begin = int(lengths["cu_seqlens_q"][i])
        tiles += [(end, begin - end, 0, 0, 0)] * -(-(begin - end) // tile_m)
        n = rows.stop - rows.start
        tiles += [(rows.start, n, keys.start, keys.stop - keys.start, i)] * -(-n // tile_m)
        end = rows.stop
    return tiles + [(end, total - end, 0, 0, 0)] * -(-(total - end) // tile_m)


@pytest.mark.parametrize("case", PACKED_CASES, ids=lambda case: case.id)
def test_a_plan_lists_every_tile_once_the_longest_first(case: PackedCase) -> None:
    prepared = prepare(case)
    assert prepared.planning is not None
    assert prepared.planning.launch().verdict == "clean"
    plan, spec = plan_of(prepared), prepared.selection.spec
    said = [tuple(int(tile[name]) for name in plan.dtype.names[:5]) for tile in plan]
    assert sorted(said) == sorted(expected_tiles(case, spec.tile_m))
    for number, tile in enumerate(plan):  # the tiles of a sequence are neighbours, and say where they begin
        count = -(-int(tile["seqlen_q"]) // spec.tile_m)
        assert tile["first"] <= number < tile["first"] + count
        assert set(plan["first"][tile["first"] : tile["first"] + count]) == {tile["first"]}
        section = int(tile["heads_per_section"])
        assert 1 <= section <= case.heads_q + case.heads_q // case.heads_kv
        if spec.causal and not spec.window and tile["seqlen_k"]:
            assert section % (case.heads_q // case.heads_kv) == 0
    blocks = (
        1
        + np.minimum(plan["seqlen_k"], np.inf if np.isinf(prepared.problem.window) else prepared.problem.window)
        // spec.tile_n
    )
    classes = np.floor(np.log2(blocks) * 16)
    assert (np.diff(classes) < 2).all()  # a class is at most a sixteenth of an octave


def test_a_plan_of_very_many_and_of_very_long_sequences() -> None:
    lengths = (1,) * 1500 + (5000,)
    case = PackedCase("many", lengths, heads_q=1, head_dim=32)
    prepared = prepare(case)
    assert prepared.planning is not None
    assert prepared.planning.launch().verdict == "clean"
    plan = plan_of(prepared)
    said = sorted(tuple(int(tile[name]) for name in plan.dtype.names[:5]) for tile in plan)
    assert said == sorted(expected_tiles(case, prepared.selection.spec.tile_m))
    assert plan["sequence"][0] == 1500


BROKEN = {
    "falling": [0, 150, 140, 488],
    "negative": [-1, 100, 231, 488],
    "beyond": [0, 100, 231, 489],
    "garbage": [2**30, 5, -(2**31), 2**31 - 1],
}


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_offsets_make_rows_without_keys(name: str, side: str) -> None:
    case = PackedCase("broken", (100, 131, 257), causal=True)
    prepared = prepare(case, **{f"cu_seqlens_{side}": np.array(BROKEN[name], np.int32)})
    run = prepared.launch()
    assert run.verdict == "clean", run
    assert not prepared.out.any()
    assert prepared.lse is not None
    assert np.isneginf(prepared.lse).all()


def test_c09_nothing_is_read_behind_the_offsets() -> None:
    # The emulator finds a read behind an array; a read inside the memory of a larger one would get this garbage.
    case = PackedCase("c09", (129, 0, 1))
    memory = {name: np.full(12, 2**30, np.int32) for name in case.lengths}
    for name, offsets in case.lengths.items():
        memory[name][:4] = offsets
    prepared = prepare(case, **{name: array[:4] for name, array in memory.items()})
    assert prepared.launch().verdict == "clean"
    hold_to_oracle(case, prepared.out, prepared.lse)


@pytest.mark.parametrize(
    ("axes", "rows", "keys", "access"),
    [("bhqk", 60, 64, Bias.TILE), ("bhk", 1, 64, Bias.ROW), ("bhqk", 60, 63, Bias.GATHER)],
    ids=str,
)
def test_a_bias_is_0_behind_its_end(axes: str, rows: int, keys: int, access: Bias) -> None:
    case = PackedCase("short", (130, 7), (150, 90), causal=True, heads_q=4, heads_kv=2, bias=axes, bias_beyond=(0, 2))
    whole = call(case)["bias"]
    if rows > 1:
        whole[:, :, rows:] = 0
    whole[..., keys:] = 0
    expected = prepare(case, bias=whole)
    assert expected.launch().verdict == "clean"
    short = prepare(case, bias=np.ascontiguousarray(whole[:, :, :rows, :keys]))
    assert short.selection.spec.bias is access
    run = short.launch()
    assert run.verdict == "clean", run
    tolerance = {"rtol": 2**-6, "atol": 2**-6}  # blocks of the other kernel have another size
    np.testing.assert_allclose(short.out.astype(np.float32), expected.out.astype(np.float32), **tolerance)


# --- Planted faults ---

ROWS, SCHEDULER, PLAN, MASK = "hopper/rows.cuh", "tile_scheduler.cuh", "plan.cu", "mask.cuh"
PRODUCER, READER = "hopper/producer.cuh", "hopper/bias.cuh"
RAGGED = PackedCase("ragged", (70, 200, 3), (150, 10, 3), causal=True, heads_q=4, heads_kv=2)
USED = PackedCase("used", (100, 60), (90, 140), used_q=(37, 60), used_k=(64, 140), before=5, behind=9, dtype="float16")
TILES = PackedCase("tiles", (130, 7), (150, 90), causal=True, heads_q=4, heads_kv=2, bias="bhqk", bias_beyond=(3, 2))
GATHERED = dataclasses.replace(TILES, bias="qk", bias_beyond=(1, 1))  # reads behind its end leave it
FAULTS = {
    # name: file, pattern, replacement, the case that shows it
    "keys run into the neighbour": (ROWS, r"packed_rows - tile\.seqlen_k,", "packed_rows - tile.seqlen_k - 1,", RAGGED),
    "keys of the first sequence": (ROWS, r"tile\.k_begin \+ tile\.seqlen_k", "tile.seqlen_k", RAGGED),
    "queries of the first sequence": (ROWS, r"tile\.q_begin \+ tile\.seqlen_q", "tile.seqlen_q", RAGGED),
    "O runs into the neighbour": (ROWS, r"tile\.seqlen_q \+ row", "tile.seqlen_q + row - 1", RAGGED),
    "the diagonal of equal lengths": (MASK, r"S\.varlen \? seqlen_k_ - seqlen_q_ : 0", "0", RAGGED),
    "lse of the first sequence": ("hopper/epilogue.cuh", r"\(tile\.q_begin - tile\.batch \* p\.q_step\)", "0", RAGGED),
    "tiles of the whole plan": (SCHEDULER, r"ordinal - packed\.first \* p_\.heads_q", "ordinal", RAGGED),
    "one tile of a sequence": (PLAN, r"i < own_count && !many", "i < 1 && !many", RAGGED),
    "seqused is not looked at": ("packed_rows.cuh", r"seqused == nullptr \? length", "true ? length", USED),
    "no stretch behind the last sequence": (PLAN, r"2 \* sequences \+ 1;", "2 * sequences;", USED),
    "the bias counts keys from the array": (PRODUCER, r"row - Rows::of_k<S>\(tile\)\.first", "row", TILES),
    "the bias of the first sequence": (PRODUCER, r"0 : tile\.batch,", "0 : 0,", TILES),
    "a gathered bias has all rows": (READER, r"has_row_\[row\] && ", "", GATHERED),
    "a gathered bias has all keys": (READER, r" && key < p_\.bias_keys", "", GATHERED),
    "no stretch behind what is used": (
        PLAN, r"begin = before\.begin \+ used\([^;]*;", "begin = p.cu_seqlens_q[i];", USED
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda name: name.replace(" ", "_"))
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, case = FAULTS[fault]
    read = sources.read

    def edited(path: str) -> str:
        text, count = re.subn(old, new, read(path)) if path == file else (read(path), 1)
        assert count == 1, f"{path} holds {old!r} {count} times: the kernel has changed, so must the fault"
        return text

    monkeypatch.setattr(sources, "read", edited)
    monkeypatch.setattr(compiler, "amalgamate", sources.amalgamate.__wrapped__)
    monkeypatch.setattr(emulate, "kernel_of", emulate.kernel_of.__wrapped__)
    prepared = prepare(case)
    run = prepared.launch()
    if run.verdict == "clean":
        with pytest.raises(AssertionError, match=r"^(out|lse)\["):
            hold_to_oracle(case, prepared.out, prepared.lse)
