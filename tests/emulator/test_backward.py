"""Gradients under the emulator: the table under several schedules, bits that repeat, odd arrays, and planted faults."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator import backward_bias_faults, backward_faults
from emulator.backward_faults import UNORDERED, UNSEEN, Fault, Shown
from gradients import guarded_gradients
from nvrtc_tools import import_nvrtc
from odd_views import ODD_VIEWS, OddView, written
from sampling import sample

import cupyfa
from cupyfa import attention_backward, backward_plan, compiler, emulate, emulate_backward, sources
from cupyfa.backward_problem import BackwardArrays
from cupyfa.backward_select import BWD_CANDIDATES
from cupyfa.emulate_backward import PreparedBackward
from cupyfa.emulator import POLICIES
from cupyfa.options import check_options
from cupyfa.testing import (
    BACKWARD_CASES,
    BackwardCase,
    Case,
    Guarded,
    PackedCase,
    assert_gradients_close,
    random_array,
)

WIDEST = max(row.head_dim for row in BWD_CANDIDATES)


def is_computed(case: BackwardCase) -> bool:
    """Whether it is small, and there is a kernel for it."""
    forward = case.forward
    if case.large or (isinstance(forward, PackedCase) and forward.bias):
        return False
    return max(forward.head_dim, forward.head_dim_v or 0) <= WIDEST


CASES = [case for case in BACKWARD_CASES if is_computed(case)]


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    import_nvrtc()


@functools.cache
def arrays_of(case: BackwardCase) -> dict[str, Any]:
    """Made once: the result of the forward pass is among them."""
    return case.make_arrays()


class Call:
    """A call whose gradients are NaN between canaries.

    Parameters
    ----------
    case : BackwardCase
        Its arrays and options.
    config : dict, optional
        As for `cupyfa.attention_backward`.
    sms : int, optional
        Multiprocessors; with one, a CTA walks all query heads that share its keys.
    **changes
        Arrays in place of the case's.
    """

    def __init__(
        self, case: BackwardCase, config: dict[str, Any] | None = None, sms: int | None = None, **changes: Any
    ) -> None:
        self.case = case
        options = case.call_options
        deterministic = options.pop("deterministic")
        self.read = {name: x.copy() for name, x in arrays_of(case).items()} | changes
        self.guarded: dict[str, Guarded] = guarded_gradients(self.read, options)
        self.read |= {name: options.pop(name) for name in BackwardArrays._fields if name in options}
        self.before = {name: x.copy() for name, x in self.read.items()}
        written_to = {name: x.array for name, x in self.guarded.items()}
        known = {"softmax_scale": None, "causal": False, "window_size": (None, None), "softcap": None}
        self.prepared: PreparedBackward = emulate_backward.prepare(
            BackwardArrays(**self.read, **written_to),
            check_options(**(known | options)),
            deterministic=deterministic,
            config=config,
            sms=sms,
        )

    @property
    def gradients(self) -> cupyfa.Gradients:
        """As the public function returns them."""
        return cupyfa.Gradients(**{name: x.array for name, x in self.guarded.items()})

    def hold_to_oracle(self) -> None:
        """The gradients, and that nothing else was written."""
        for name, x in self.guarded.items():
            x.check(name)
        for name, x in self.read.items():
            np.testing.assert_array_equal(x.view(np.uint8), self.before[name].view(np.uint8), name)
        assert_gradients_close(self.gradients, self.case)


def check(case: BackwardCase, config: dict[str, Any] | None = None, sms: int | None = None, **options: Any) -> Call:
    call = Call(case, config, sms)
    run = call.prepared.launch(**options)
    assert run.verdict == "clean", run
    call.hold_to_oracle()
    return call


#: Each case and a schedule of its own.
TURNS = [*zip(CASES, itertools.cycle(POLICIES), itertools.count(), strict=False)]


@pytest.mark.parametrize(("case", "policy", "seed"), sample(TURNS, 4), ids=[case.id for case in sample(CASES, 4)])
def test_kernel_is_right(case: BackwardCase, policy: str, seed: int) -> None:
    check(case, policy=policy, seed=seed)


@pytest.mark.parametrize(("case", "policy", "seed"), sample(TURNS, 7), ids=[case.id for case in sample(CASES, 7)])
def test_kernel_is_right_where_a_cta_has_all_query_heads(case: BackwardCase, policy: str, seed: int) -> None:
    """Another schedule, and several CTAs at a time."""
    names = [*POLICIES]
    call = check(case, sms=1, policy=names[(names.index(policy) + 3) % len(names)], seed=seed, resident=3)
    assert call.prepared.selection.parts == 1


def test_the_table_has_every_kernel() -> None:
    """Each row of candidates, with each option and without it, alone and beside a second CTA's part."""
    selections = [Call(case).prepared.selection for case in [*sample(CASES, 4), *SCHEDULED, *WIDE_ORDERED]]
    assert {selection.candidate for selection in selections} == {*BWD_CANDIDATES}
    for wide in (False, True):
        specs = [x.spec for x in selections if (x.spec.tile_n == 64) == wide]
        for field in ("dtype", "causal", "window", "softcap", "alibi", "deterministic", "partial"):
            assert len({getattr(spec, field) for spec in specs}) == 2, (field, wide)


def of(*sizes: Any, dlse: bool = False, deterministic: bool = False, **options: Any) -> BackwardCase:
    return BackwardCase(Case("here", *sizes, **options), dlse, deterministic)


#: A case of every kernel, with more steps than any ring has slots, and tiles of all kinds.
SCHEDULED = [
    of(1, 400, 200, 2, 1, 64, "float16"),
    of(1, 300, 200, 2, 1, 64, "bfloat16", True, softcap=5.0),
    of(1, 300, 200, 2, 1, 128, "bfloat16", True, alibi=True),
    of(1, 200, 200, 2, 2, 128, "float16", softcap=20.0, sink=True, dlse=True),
    of(1, 300, 300, 1, 1, 64, "bfloat16", window_size=(150, 20), deterministic=True),
    of(1, 200, 300, 1, 1, 128, "float16", deterministic=True),
    of(1, 150, 150, 2, 1, 128, "bfloat16", True, softcap=5.0, deterministic=True),
    of(1, 200, 130, 1, 1, 128, "bfloat16", bias="qk", bias_dtype="float32"),
    of(1, 130, 150, 2, 1, 128, "float16", True, bias="hqk", bias_dtype="float32", deterministic=True),
    of(1, 200, 130, 1, 1, 96, "bfloat16", window_size=(100, 20)),
    of(1, 150, 200, 2, 1, 72, "float16", True, head_dim_v=96, deterministic=True),
    of(1, 200, 130, 1, 1, 256, "float16"),
    of(1, 400, 100, 2, 1, 192, "bfloat16", True, head_dim_v=128),
    of(1, 200, 100, 1, 1, 192, "float16"),
    of(1, 150, 100, 1, 1, 128, "float16", head_dim_v=256),
]
#: A query tile has eight parts with a turn for each, or six.
WIDE_ORDERED = [
    of(1, 130, 200, 1, 1, 256, "float16", window_size=(60, 10), deterministic=True),
    of(1, 130, 200, 1, 1, 256, "bfloat16", softcap=5.0, deterministic=True),
    of(1, 130, 200, 2, 1, 256, "float16", True, alibi=True, deterministic=True),
    of(1, 130, 200, 2, 1, 256, "bfloat16", True, softcap=5.0, window_size=(100, None), alibi=True, deterministic=True),
    of(1, 130, 200, 2, 1, 192, "float16", True, alibi=True, head_dim_v=128, deterministic=True),
]


@pytest.mark.parametrize("policy", sample([*POLICIES], 2))
def test_every_schedule(policy: str) -> None:
    for seed, case in enumerate([*SCHEDULED, *WIDE_ORDERED]):
        check(case, sms=1 if seed % 2 else None, policy=policy, seed=seed, resident=1 + seed % 4)


@pytest.mark.parametrize("case", WIDE_ORDERED, ids=lambda case: case.id)
def test_each_part_has_a_turn(case: BackwardCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer counters than parts, some are never set to 0, and waited for."""
    call = check(case, resident=2)
    spec = call.prepared.selection.spec
    assert (spec.tile_m, spec.tile_n) == (64, 64)
    assert spec.head_dim in (192, 256)
    monkeypatch.setattr(backward_plan, "_SMALLEST_PART", 64 * 64)
    run = Call(case).prepared.launch(resident=2, stop_at_error=True, max_instructions=5_000_000, max_idle=200_000)
    assert run.verdict != "clean"


#: Query heads, the heads that a CTA has, and CTAs of a key tile: all of one group, or as many as multiprocessors take.
SHARES = [(1, 5, 1), (6, 2, 3), (8, 2, 3), (10, 1, 5), (132, 1, 5)]


@pytest.mark.parametrize(("sms", "heads_per_part", "parts"), SHARES)
@pytest.mark.parametrize(("head_dim", "deterministic"), sample([(64, False), (192, True), (64, True), (192, False)], 3))
def test_ctas_share_query_heads(sms: int, heads_per_part: int, parts: int, head_dim: int, deterministic: bool) -> None:
    """Two key tiles; the last CTA of one may have fewer heads."""
    seqlen_k = 200 if head_dim == 64 else 100
    case = of(1, 70, seqlen_k, 5, 1, head_dim, "float16", True, head_dim_v=64, deterministic=deterministic)
    selection = check(case, sms=sms, resident=2).prepared.selection
    assert (selection.heads_per_part, selection.parts) == (heads_per_part, parts)
    assert selection.spec.partial == (parts > 1)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_bits_of_parts_do_not_depend_on_the_schedule(head_dim: int) -> None:
    case = of(1, 70, 150, 4, 2, head_dim, "bfloat16", True, deterministic=True)
    found = {
        tuple(
            check(case, policy=policy, seed=3, resident=4).guarded[name].array.tobytes() for name in ("dq", "dk", "dv")
        )
        for policy in ("eager", "random", "fine")
    }
    assert len(found) == 1


@pytest.mark.parametrize("config", [{"dout_stages": 1}, {"q_stages": 2, "dout_stages": 1}], ids=str)
@pytest.mark.parametrize("policy", ["late_products", "fine"])
def test_other_rings(config: dict[str, int], policy: str) -> None:
    for case in (*SCHEDULED[1:3], SCHEDULED[8]):
        call = check(case, config, policy=policy)
        assert {name: getattr(call.prepared.selection.spec, name) for name in config} == config


def test_without_setmaxnreg() -> None:
    call = check(of(1, 100, 150, 1, 1, 64, "float16"), {"setmaxnreg": False})
    assert not call.prepared.selection.spec.setmaxnreg


@pytest.mark.parametrize("case", [*CASES[::19], *SCHEDULED[::3], WIDE_ORDERED[-1]], ids=lambda case: case.id)
def test_a_kernel_waits_for_the_one_in_front_of_it(case: BackwardCase) -> None:
    call = Call(case)
    assert read_too_early(call) == []
    if call.prepared.stages:
        call.hold_to_oracle()


#: Lines of the main kernel that read what no other kernel of the call writes.
AT_ONCE = ("shared_address(storage.k), p.k,", "p_.alibi_slopes[", "p.bias,", "p_.bias_data)[")


def read_too_early(call: Call) -> list[str]:
    """What reads too early when a kernel may begin before that in front of it has ended; all else is clean."""
    found: list[str] = []
    for stage in call.prepared.stages:
        run = stage.launch(programmatic=stage.geometry.programmatic)
        assert set(run.hazards) <= {"GRID_READ_BEFORE_GRIDDEP_WAIT"}, run
        for finding in run.findings:
            assert finding.place is not None
            places = [(finding.place.file, finding.place.line), *finding.place.callers]
            lines = [Path(file).read_text(encoding="utf-8").splitlines()[line - 1] for file, line in places]
            if not any(mark in line for mark in AT_ONCE for line in lines):
                found.append(str(finding))
    return found


# --- The public function ---


def test_the_public_function() -> None:
    case = of(1, 100, 150, 4, 2, 64, "bfloat16", True, sink=True, alibi=True, dlse=True)
    assert_gradients_close(attention_backward(**case.make_arrays(), **case.call_options, backend="emulator"), case)


def test_a_gradient_that_is_read_only_is_refused() -> None:
    case = of(1, 5, 6, 1, 1, 8)
    dk = np.broadcast_to(case.make_arrays()["k"], (1, 6, 1, 8))
    with pytest.raises(ValueError, match=r"^attention: dk is read-only; it must be writable$"):
        attention_backward(**case.make_arrays(), dk=dk, backend="emulator")


def test_stages_are_those_that_are_needed() -> None:
    sizes = (1, 70, 80, 2, 1, 64)
    entries = {
        name: [stage.spec.entry for stage in Call(case, sms=sms).prepared.stages]
        for name, case, sms in (
            ("plain", of(*sizes), 1),
            ("sink", of(*sizes, sink=True), 1),
            ("parts", of(*sizes), 2),
            ("parts and sink", of(*sizes, sink=True), 2),
            ("empty", of(1, 70, 0, 2, 1, 64, sink=True), 2),
        )
    }
    plain = ["bwd_preprocess.cu", "hopper/bwd.cu", "bwd_postprocess.cu"]
    parts = [*plain, *["bwd_postprocess.cu"] * 2]
    sink = ["bwd_sink.cu"]
    assert entries == {
        "plain": plain,
        "sink": plain + sink,
        "parts": parts,
        "parts and sink": parts + sink,
        "empty": [],
    }


# --- Bits that repeat ---

#: Three key tiles and more add to the same rows.
ORDERED = [
    of(1, 200, 500, 1, 1, 128, "float16"),
    of(1, 300, 500, 1, 1, 128, "float16", True),
    of(1, 200, 500, 2, 1, 64, "bfloat16", window_size=(400, 100)),
    of(1, 130, 250, 1, 1, 256, "float16"),
]


def bits_of_dq(case: BackwardCase) -> set[bytes]:
    """What schedules make of dq with one CTA and with several; dk and dv are always the same, and all is right."""
    found: dict[str, set[bytes]] = {name: set() for name in ("dq", "dk", "dv")}
    for policy, seed, resident in itertools.product(("random", "fine"), range(2), (1, 4)):
        call = check(case, policy=policy, seed=seed, resident=resident)
        for name, bits in found.items():
            bits.add(call.guarded[name].array.tobytes())
    assert len(found["dk"]) == len(found["dv"]) == 1
    return found["dq"]


@pytest.mark.parametrize("case", ORDERED, ids=lambda case: case.id)
def test_c57_the_order_of_additions_decides_about_bits_of_dq_alone(case: BackwardCase) -> None:
    assert len(bits_of_dq(case)) > 1


@pytest.mark.parametrize("case", ORDERED, ids=lambda case: case.id)
def test_c58_deterministic_bits_do_not_depend_on_the_schedule(case: BackwardCase) -> None:
    assert len(bits_of_dq(dataclasses.replace(case, deterministic=True))) == 1


# --- Arrays of any place ---

VIEWED = of(1, 65, 70, 4, 2, 64, "float16", True, sink=True, dlse=True, deterministic=True)


@functools.cache
def expected_of_views() -> cupyfa.Gradients:
    return check(VIEWED).gradients


def run_with(**changes: Any) -> cupyfa.Gradients:
    """Of the case with views in place of its arrays; their values are the same."""
    options = VIEWED.call_options
    return attention_backward(**(VIEWED.make_arrays() | changes), **options, backend="emulator")


def assert_same_bits(got: Any, expected: Any) -> None:
    for x, y in zip(got, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_c42_c45_inputs_anywhere_give_what_contiguous_ones_give(odd: OddView) -> None:
    arrays = VIEWED.make_arrays()
    views = {name: odd.holding(np, arrays[name]) for name in ("dout", "q", "k", "v", "out")}
    assert_same_bits(run_with(**views), expected_of_views())


@pytest.mark.parametrize("odd", ODD_VIEWS, ids=lambda odd: odd.id)
def test_c42_c45_gradients_are_written_anywhere_and_nothing_beside_them(odd: OddView) -> None:
    arrays = VIEWED.make_arrays()
    around, views = {}, {}
    for name in ("dq", "dk", "dv"):
        like = arrays[name[1:]]
        around[name], views[name] = odd.poisoned(np, like.shape, like.dtype)
    got = run_with(**views)
    for name, buffer in around.items():
        assert getattr(got, name) is views[name]
        np.testing.assert_array_equal(views[name], getattr(expected_of_views(), name))
        assert written(buffer) == views[name].size


def test_rows_of_lse_and_its_gradient_are_read_where_they_are() -> None:
    arrays = VIEWED.make_arrays()
    turned = {name: np.asfortranarray(arrays[name]) for name in ("lse", "dlse")}
    spread = {name: np.repeat(arrays[name], 3, axis=2)[..., ::3] for name in ("lse", "dlse")}
    for rows in (turned, spread):
        assert_same_bits(run_with(**rows), expected_of_views())


def test_a_gradient_of_the_output_may_be_one_number() -> None:
    ones = np.ones_like(VIEWED.make_arrays()["dout"])
    assert_same_bits(run_with(dout=np.broadcast_to(np.float16(1), ones.shape)), run_with(dout=ones))


def test_bhsd_is_bit_equal_to_bshd() -> None:
    turned = {name: x.swapaxes(1, 2) if x.ndim == 4 else x for name, x in VIEWED.make_arrays().items()}
    options = VIEWED.call_options | {"layout": "BHSD"}
    got = attention_backward(**turned, **options, backend="emulator")
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, name).swapaxes(1, 2), getattr(expected_of_views(), name))


# --- What users reported ---


def test_c01_gradients_of_more_queries_than_keys() -> None:
    call = check(of(1, 5, 2, 1, 1, 64, "float16", True))
    dq = call.guarded["dq"].array
    assert not dq[:, :3].any()
    assert dq[:, 4].any()


def test_c02_no_nan_in_gradients_of_rows_without_keys() -> None:
    """Whole tiles of them, whatever their output and its gradients hold: the lse alone says that they see nothing."""
    case = of(1, 300, 60, 2, 1, 128, "bfloat16", True, sink=True, dlse=True)
    dlse = case.make_arrays()["dlse"]
    call = Call(case, dlse=dlse)
    assert call.prepared.launch().verdict == "clean"
    call.hold_to_oracle()
    assert not call.guarded["dq"].array[:, :240].any()


@pytest.mark.parametrize("sizes", [(2, 0, 64, 4, 2, 64), (0, 64, 64, 4, 2, 64), (2, 64, 0, 4, 2, 64)], ids=str)
def test_c03_gradients_of_no_queries_no_batch_or_no_keys(sizes: tuple[int, ...]) -> None:
    call = check(of(*sizes, "float16", True, sink=True))
    assert call.prepared.stages == ()


def test_c22_c23_an_lse_below_minus_88() -> None:
    """Keys behind the last one have scores of 0, which are far above all others here."""
    shape = (1, 70, 1, 64)
    q, k, v, dout = (random_array(shape, "bfloat16", n) for n in range(4))
    q, k = np.abs(q), -np.abs(k)
    (out, lse), pullback = cupyfa.attention_vjp(q, k, v, softmax_scale=4.0, causal=True, return_lse=True)
    assert lse.max() < -88
    got = attention_backward(dout, q, k, v, out, lse, softmax_scale=4.0, causal=True, backend="emulator")
    for gradients in zip(got[:3], pullback(dout)[:3], strict=True):
        x, y = (gradient.astype(np.float64) for gradient in gradients)
        assert np.isfinite(x).all()
        assert np.linalg.norm(x - y) <= 0.01 * np.linalg.norm(y)


def test_c24_the_slope_of_a_saturated_softcap_is_0() -> None:
    check(of(1, 70, 150, 1, 1, 64, "float16", softcap=0.5, amplitude=30.0))


def test_c33_a_bound_of_0_is_a_bound() -> None:
    """A row sees one key, whose probability cannot change."""
    call = check(of(1, 200, 200, 1, 1, 64, "float16", window_size=(0, 0)))
    arrays = call.read
    np.testing.assert_array_equal(call.guarded["dv"].array, arrays["dout"])
    assert np.abs(call.guarded["dq"].array).max() < 1e-2


@pytest.mark.parametrize("ratio", [(5, 1), (6, 2), (7, 7)], ids=str)
def test_c48_ratios_of_heads(ratio: tuple[int, int]) -> None:
    check(of(2, 70, 140, *ratio, 128, "bfloat16", True))


def test_c55_a_workspace_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of turns that were never set would be waited for forever."""
    case = of(1, 200, 300, 2, 1, 64, "float16", True, deterministic=True)
    expected = check(case).gradients
    for value in (0, 1, 0x7F):
        full = functools.partial(lambda fill, shape, _, dtype: np.full(shape, fill, dtype), value)
        fake = type("numpy_of", (), {"empty": np.empty, "full": staticmethod(full), "uint8": np.uint8})
        monkeypatch.setattr(emulate_backward, "np", fake)
        assert_same_bits(check(case, resident=2).gradients, expected)


# --- Planted faults ---

ENTRIES = (
    *("plan.cu", "bwd_preprocess.cu", "hopper/bwd.cu", "bwd_postprocess.cu", "bwd_sink.cu"),
    "hopper/bwd_bias.cu",
)
RACES, EARLY, WRONG = (
    getattr(backward_faults, kind) | getattr(backward_bias_faults, kind) for kind in ("RACES", "EARLY", "WRONG")
)


def named(faults: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("fault", sample([*faults], 8), ids=lambda name: name.replace(" ", "_"))


def plant(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Edit the text of a kernel; those that do not have it stay as they are compiled."""
    read, compiled = sources.read, emulate.kernel_of

    def edited(path: str) -> str:
        if path != fault.file:
            return read(path)
        text, count = re.subn(fault.old, fault.new, read(path), flags=re.MULTILINE)
        assert count == 1, f"{path} holds {fault.old!r} {count} times: the kernel has changed, so must the fault"
        return text

    edited(fault.file)
    having_it = {entry for entry in ENTRIES if f'"cuda/{fault.file}"' in sources.amalgamate(entry)}
    with_it = functools.cache(emulate.kernel_of.__wrapped__)
    patch.setattr(sources, "read", edited)
    patch.setattr(compiler, "amalgamate", sources.amalgamate.__wrapped__)
    patch.setattr(
        emulate_backward, "kernel_of", lambda spec: with_it(spec) if spec.entry in having_it else compiled(spec)
    )


def call_of(shown: Shown) -> Call:
    return Call(shown.case, dict(shown.config), shown.sms)


def launches(shown: Shown) -> Any:
    """The call under one schedule after the other, and what was found; a kernel that hangs is stopped."""
    limits = {"max_instructions": 5_000_000, "max_idle": 200_000}
    for seed, policy in enumerate(POLICIES):
        call = call_of(shown)
        yield call, call.prepared.launch(policy=policy, seed=seed, resident=1 + seed % 3, stop_at_error=True, **limits)


@functools.cache
def assert_right(shown: Shown, schedules: int = len(POLICIES)) -> None:
    for call, run in itertools.islice(launches(shown), schedules):
        assert run.verdict == "clean", run
        call.hold_to_oracle()


@named(RACES)
def test_a_fault_of_order_is_found_and_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = RACES[fault]
    assert_right(planted.case)
    plant(planted, monkeypatch)
    assert any(planted.finding in run.hazards for _, run in launches(planted.case))


@named(UNSEEN)
def test_an_edit_that_no_schedule_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that something shows is a fault like others."""
    planted = UNSEEN[fault]
    assert planted.why
    plant(planted, monkeypatch)
    for call, run in launches(planted.case):
        assert run.verdict == "clean", run
        call.hold_to_oracle()


@named(EARLY)
def test_a_kernel_that_begins_too_early_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_too_early(call_of(EARLY[fault].case)) == []
    plant(EARLY[fault], monkeypatch)
    assert read_too_early(call_of(EARLY[fault].case)) != []


@named(UNORDERED)
def test_a_turn_that_is_not_kept_changes_bits(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = UNORDERED[fault].case.case
    assert len(bits_of_dq(case)) == 1
    plant(UNORDERED[fault], monkeypatch)
    assert len(bits_of_dq(case)) > 1


@named(WRONG)
def test_a_wrong_result_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = WRONG[fault].case
    assert_right(case, 1)
    plant(WRONG[fault], monkeypatch)
    call, run = next(launches(case))
    if run.verdict == "clean":
        with pytest.raises(AssertionError, match=r"^(dq|dk|dv|dsink|dbias)\[|^canary broken|Arrays are not equal"):
            call.hold_to_oracle()
