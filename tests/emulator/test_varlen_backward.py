"""Gradients of packed sequences under the emulator: lengths, neighbours, broken offsets, bits, and planted faults."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from emulator import test_backward
from emulator.test_backward import Call, call_of, check, launches, plant, read_too_early
from emulator.varlen_backward_faults import EARLY, MANY, RACES, RAGGED, USED, WRONG
from nvrtc_tools import import_nvrtc
from sampling import sample

import cupyfa
from cupyfa import attention_backward, attention_varlen_backward
from cupyfa.backward_select import BWD_CANDIDATES
from cupyfa.oracles.packed import sequences
from cupyfa.testing import BackwardCase, PackedCase, assert_gradients_close, random_array


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


def of(*lengths: Any, dlse: bool = False, deterministic: bool = False, **options: Any) -> BackwardCase:
    return BackwardCase(PackedCase("here", *lengths, **options), dlse, deterministic)


#: Lengths around the sizes of tiles, with options that change what a key tile walks.
LENGTHS = [
    of((128, 129, 127, 1), (127, 1, 129, 128), causal=True),
    of((64, 65, 0, 63), (65, 0, 63, 64), head_dim=128, dtype="float16", window_size=(40, 10)),
    of((65, 130), (300, 20), 4, 1, 128, causal=True, alibi=True, window_size=(100, None)),
    of((64, 65), (130, 200), 2, 2, 256, "float16", sink=True, softcap=3.0, dlse=True),
    of((300, 7), (7, 300), 3, 3, 64, causal=True, sink=True, softcap=3.0, dlse=True, before=70, behind=70),
    of((130, 127), (65, 63), 2, 1, 192, causal=True, head_dim_v=128, window_size=(100, 30)),
    of((127, 1, 129), (63, 66, 1), 2, 1, 96, "float16", causal=True, softcap=3.0, alibi=True),
]


def test_the_lengths_have_every_kernel() -> None:
    cases = [dataclasses.replace(case, deterministic=ordered) for case in LENGTHS for ordered in (False, True)]
    rows = {}  # without those that only a bias takes: they differ in nothing else from one before them
    for row in BWD_CANDIDATES:
        rows.setdefault((row.head_dim, row.head_dim_v, row.softcap, row.deterministic), row)
    assert {Call(case).prepared.selection.candidate for case in cases} == {*rows.values()}


@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "ordered"])
@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_lengths_around_tiles(number: int, deterministic: bool) -> None:
    case = dataclasses.replace(LENGTHS[number], deterministic=deterministic)
    policy = ("fine", "late_products", "random", "late_copies", "pct", "random", "late_products")[number]
    call = check(case, policy=policy, seed=number, resident=1 + number % 3)
    assert call.prepared.selection.spec.varlen
    assert call.prepared.selection.parts == 1


def test_stages_begin_with_a_plan() -> None:
    plain = ["plan.cu", "bwd_preprocess.cu", "hopper/bwd.cu", "bwd_postprocess.cu"]
    for sink in (False, True):
        stages = Call(of((70, 80), sink=sink)).prepared.stages
        assert [stage.spec.entry for stage in stages] == plain + ["bwd_sink.cu"] * sink


def test_more_sequences_than_threads_look_for_rows() -> None:
    check(MANY.case)


# --- Neighbours ---


@pytest.mark.parametrize("of_nan", [0, 1, 2])
def test_a_neighbour_of_nan_changes_no_bit(of_nan: int) -> None:
    case = of((70, 33, 130), (50, 90, 131), causal=True, deterministic=True)
    arrays = case.make_arrays()
    expected = attention_varlen_backward(**arrays, causal=True, deterministic=True, backend="emulator")
    ranges = [*sequences(arrays["cu_seqlens_q"], arrays["cu_seqlens_k"])]
    rows, keys = ranges[of_nan]
    for name, where in (("q", rows), ("dout", rows), ("out", rows), ("k", keys), ("v", keys)):
        arrays[name][where] = np.nan
    arrays["lse"][:, rows] = np.nan
    got = attention_varlen_backward(**arrays, causal=True, deterministic=True, backend="emulator")
    for i, (rows, keys) in enumerate(ranges):
        for x, y, where in zip(got[:3], expected[:3], (rows, keys, keys), strict=True):
            if i != of_nan:
                np.testing.assert_array_equal(x[where], y[where])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sequence_has_the_bits_that_it_has_alone(head_dim: int) -> None:
    """Its tiles, its additions and their order are those of a batch of one, of whose keys no CTAs share the heads."""
    options: dict[str, Any] = {"causal": True, "deterministic": True, "backend": "emulator"}
    case = of((70, 150), (200, 140), 2, 2, head_dim, causal=True, deterministic=True)
    arrays = case.make_arrays()
    got = attention_varlen_backward(**arrays, **options)
    for rows, keys in sequences(arrays["cu_seqlens_q"], arrays["cu_seqlens_k"]):
        places = {"dout": rows, "q": rows, "k": keys, "v": keys, "out": rows}
        alone = {name: arrays[name][None, where] for name, where in places.items()}
        expected = attention_backward(**alone, lse=arrays["lse"][None, :, rows], **options)
        for x, y, where in zip(got[:3], expected[:3], (rows, keys, keys), strict=True):
            np.testing.assert_array_equal(x[where], y[0])


# --- Offsets ---

BROKEN = {
    "descending q": ("cu_seqlens_q", [0, 60, 40, 100]),
    "descending k": ("cu_seqlens_k", [0, 100, 30, 110]),
    "q before the array": ("cu_seqlens_q", [-5, 40, 60, 100]),
    "k before the array": ("cu_seqlens_k", [-2147483648, 40, 60, 110]),
    "q behind the array": ("cu_seqlens_q", [0, 40, 60, 101]),
    "k behind the array": ("cu_seqlens_k", [0, 40, 60, 2147483647]),
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda name: name.replace(" ", "_"))
def test_broken_offsets_are_no_sequences(broken: str) -> None:
    name, offsets = BROKEN[broken]
    case = of((40, 20, 40), (40, 20, 50), causal=True, sink=True, dlse=True, deterministic=True)
    call = Call(case, **{name: np.array(offsets, np.int32)})
    run = call.prepared.launch()
    assert run.verdict == "clean", run
    for gradient, guarded in call.guarded.items():
        guarded.check(gradient)
        assert not guarded.array.any(), gradient


@pytest.mark.parametrize("used", [(-1, 61), (1000, -7)], ids=str)
def test_seqused_is_clamped(used: tuple[int, int]) -> None:
    """A negative number is 0, one beyond the length the length."""
    lengths = {"q": (100, 60), "k": (90, 140)}
    clamped = {
        side: tuple(min(max(n, 0), most) for n, most in zip(used, those, strict=True))
        for side, those in lengths.items()
    }
    case = of(*lengths.values(), used_q=clamped["q"], used_k=clamped["k"])
    call = Call(case, **{f"seqused_{side}": np.array(used, np.int32) for side in lengths})
    assert call.prepared.launch().verdict == "clean"
    call.hold_to_oracle()


def test_each_launch_takes_the_lengths_that_it_finds() -> None:
    """As a replay of a graph does."""
    first, second = (of(lengths, lengths, causal=True, heads_kv=2) for lengths in ((70, 150, 30), (10, 180, 60)))
    call, expected = Call(first), Call(second)
    assert call.prepared.launch().verdict == expected.prepared.launch().verdict == "clean"
    for name, x in call.read.items():
        x[...] = expected.read[name]
    assert call.prepared.launch().verdict == "clean"
    assert_gradients_close(call.gradients, second)


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"lengths_q": (5, 0, 7), "lengths_k": (0, 0, 0), "used_q": (3, 0, 7)},
        {"lengths_q": (0, 0), "lengths_k": (3, 4)},
        {"lengths_q": (), "behind": 4},
    ],
    ids=["no_keys", "no_queries", "no_sequence"],
)
def test_c03_gradients_of_no_keys_no_queries_or_no_sequence(options: dict[str, Any], dlse: bool) -> None:
    """The lse of a row that sees no key is the sink."""
    call = check(of(**options, sink=True, dlse=dlse))
    assert call.prepared.stages == ()


# --- Arrays of any place ---


def test_views_give_what_contiguous_arrays_give() -> None:
    case = of((40, 33), (60, 20), 4, 2, causal=True, sink=True, dlse=True, deterministic=True)
    arrays, options = case.make_arrays(), case.call_options
    expected = attention_varlen_backward(**arrays, **options, backend="emulator")
    views = dict(arrays)
    for name in ("dout", "q", "k", "v", "out"):
        wide = np.full((*arrays[name].shape[:2], 67), np.nan, arrays[name].dtype)
        views[name] = wide[..., 1:65]
        views[name][...] = arrays[name]
    for name in ("lse", "dlse"):
        views[name] = np.asfortranarray(arrays[name])
    around = {f"d{name}": np.full((*arrays[name].shape[:2], 65), np.nan, arrays[name].dtype) for name in "qkv"}
    written = {name: x[..., :64] for name, x in around.items()}
    got = attention_varlen_backward(**views, **written, **options, backend="emulator")
    for x, y in zip(got[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(x, y)
    for name, x in around.items():
        assert np.isnan(x[..., 64].astype(np.float32)).all(), name


# --- Bits that repeat ---


@pytest.mark.parametrize("head_dim", sample([64, 128, 256], 2))
def test_c58_deterministic_bits_do_not_depend_on_the_schedule(head_dim: int) -> None:
    """Nor on the order of the plan, in which sequences of one class come as they like."""
    case = of((100, 140, 140, 90), (280, 150, 150, 270), causal=True, head_dim=head_dim, deterministic=True)
    found = set()
    for policy, seed, resident in itertools.product(("random", "fine"), range(2), (1, 4)):
        call = check(case, policy=policy, seed=seed, resident=resident)
        found.add(tuple(call.guarded[name].array.tobytes() for name in ("dq", "dk", "dv")))
    assert len(found) == 1


# --- What users reported ---


def test_c08_nothing_is_written_where_keys_have_length_0() -> None:
    """The gradients lie between canaries."""
    call = check(of((3, 50, 2), (0, 60, 0), causal=True))
    assert not call.guarded["dq"].array[:3].any()


def test_c18_gradients_of_rows_past_the_last_sequence_are_0() -> None:
    """Whatever the arrays hold there."""
    for case in (of((14, 33), (20, 41), behind=70), of((14, 33), (20, 41), behind=5, used_q=(9, 33), used_k=(1, 41))):
        arrays = case.make_arrays()
        call = check(case)
        for name, side in (("dq", "q"), ("dk", "k"), ("dv", "k")):
            nobodys = np.ones(len(arrays[side]), bool)
            for rows, keys in sequences(**case.forward.lengths):
                nobodys[rows if side == "q" else keys] = False
            assert not call.guarded[name].array[nobodys].any()


def test_the_public_functions() -> None:
    q, k, v = (random_array((90, heads, 64), np.float16, heads) for heads in (4, 2, 2))
    offsets = np.int32([0, 40, 40, 90])
    (out, lse), pullback = cupyfa.attention_vjp(q, k, v, offsets, offsets, causal=True, return_lse=True)
    expected = pullback(out)
    got = attention_varlen_backward(out, q, k, v, out, lse, offsets, offsets, causal=True, backend="emulator")
    for x, y in zip(got[:3], expected[:3], strict=True):
        np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), atol=5e-3, rtol=2e-2)


# --- Kernels that begin before the one in front has ended ---


@pytest.mark.parametrize("shown", [RAGGED, USED], ids=["ragged", "used"])
def test_a_kernel_waits_for_the_one_in_front_of_it(shown: Any) -> None:
    call = call_of(shown)
    assert read_too_early(call) == []
    call.hold_to_oracle()


# --- Planted faults ---


def named(faults: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("fault", sample([*faults], 3), ids=lambda name: name.replace(" ", "_"))


@named(RACES)
def test_a_fault_of_order_is_found_and_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = RACES[fault]
    test_backward.assert_right(planted.case)
    plant(planted, monkeypatch)
    assert any(planted.finding in run.hazards for _, run in launches(planted.case))


@named(EARLY)
def test_a_kernel_that_begins_too_early_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_too_early(call_of(EARLY[fault].case)) == []
    plant(EARLY[fault], monkeypatch)
    assert read_too_early(call_of(EARLY[fault].case)) != []


@named(WRONG)
def test_a_wrong_result_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = WRONG[fault].case
    test_backward.assert_right(case, 1)
    plant(WRONG[fault], monkeypatch)
    call, run = next(launches(case))
    if run.verdict == "clean":
        with pytest.raises(AssertionError, match=r"^(dq|dk|dv|dsink)\[|^canary broken|Arrays are not equal"):
            call.hold_to_oracle()
