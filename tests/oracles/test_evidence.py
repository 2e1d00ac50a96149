"""What proves what; what a compile key must hold; when a statement expires."""

import dataclasses
import itertools

import pytest

from cupyfa.oracles.blackwell.dispatch import Call, two_cta
from cupyfa.oracles.evidence import (
    BETA23,
    BETA24,
    CHECKLIST,
    Claim,
    CompileCache,
    EvidenceTooWeak,
    ExpiredStatement,
    Pin,
    SkippedStep,
    StaleExecutor,
    Standing,
    Step,
    Strength,
    Witness,
    check_statement,
    missing_from,
    reached,
    require,
    strength,
)

PROOFS = {
    Claim.DESIGN_EXISTS: {Witness.PAPER},
    Claim.VARIANT_RAN: {Witness.ARTIFACT, Witness.RUN},
    Claim.SHAPE_ACCEPTED: {Witness.SOURCE, Witness.RUN},
    Claim.SHAPE_EXECUTES: {Witness.RUN},
    Claim.INSTRUCTION_EMITTED: {Witness.ARTIFACT},
    Claim.RESIDENCY: {Witness.RUN},
    Claim.THROUGHPUT: {Witness.RUN},
    Claim.FASTER: {Witness.RUN},
    Claim.LONG_CONTEXT_QUALITY: set(),
}


@pytest.mark.parametrize("claim", list(Claim))
def test_matrix(claim):
    assert {w for w in Witness if strength(claim, w) is Strength.PROVES} == PROOFS[claim]
    for witnesses in itertools.chain.from_iterable(itertools.combinations(Witness, n) for n in range(5)):
        if PROOFS[claim] & set(witnesses):
            require(claim, witnesses)
        else:
            with pytest.raises(EvidenceTooWeak, match=claim.value):
                require(claim, witnesses)


def test_eligible_is_not_selected():
    assert two_cta(Call())
    with pytest.raises(EvidenceTooWeak, match="it takes compiled artifact or run"):
        require(Claim.VARIANT_RAN, {Witness.SOURCE})


def test_half_a_payload_is_no_speedup():
    with pytest.raises(EvidenceTooWeak, match="'the two-CTA path is faster' from compiled artifact, paper, source"):
        require(Claim.FASTER, {Witness.PAPER, Witness.SOURCE, Witness.ARTIFACT})


def test_admission_is_not_execution():
    require(Claim.SHAPE_ACCEPTED, {Witness.SOURCE})
    with pytest.raises(EvidenceTooWeak, match="this shape executes"):
        require(Claim.SHAPE_EXECUTES, {Witness.SOURCE, Witness.ARTIFACT})


def test_a_throughput_needs_a_run():
    require(Claim.THROUGHPUT, {Witness.RUN})
    with pytest.raises(
        EvidenceTooWeak, match="reaches that throughput' from compiled artifact, paper, source; it takes run"
    ):
        require(Claim.THROUGHPUT, set(Witness) - {Witness.RUN})


def test_throughput_says_nothing_about_answers():
    with pytest.raises(EvidenceTooWeak, match="another study"):
        require(Claim.LONG_CONTEXT_QUALITY, set(Witness))


def test_steps_are_not_skipped():
    for last in Step:
        assert reached([step for step in Step if step <= last]) is last
        for gap in Step:
            if gap < last:
                with pytest.raises(SkippedStep, match=f"{last.name} is shown but {gap.name} is not"):
                    reached([step for step in Step if step <= last and step is not gap])
    assert reached([]) is Step.CALL


def test_standing():
    record = {"selected": "hd128", "kernel": "fwd", "resources": {"registers": 168}, "bottleneck": "mma"}
    assert Standing.of({}) is Standing.REQUESTED
    assert Standing.of({"selected": "hd128"}) is Standing.SELECTED
    assert Standing.of(record) is Standing.PROFILED
    release = {**record, "versions": "x", "timing": [1.0], "correctness": "ok", "fallback_test": "ok"}
    assert Standing.of(release) is Standing.RELEASED
    for name in ("versions", "timing", "correctness", "fallback_test"):
        assert Standing.of({**release, name: None}) is Standing.PROFILED
    assert Standing.of({**release, "kernel": ""}) is Standing.SELECTED, "a benchmark of an unknown kernel"


def test_checklist():
    record = {group: dict.fromkeys(names, 0) for group, names in CHECKLIST.items()}
    assert missing_from(record) == []
    for group, names in CHECKLIST.items():
        for name in names:
            cut = {**record, group: {**record[group], name: None}}
            assert missing_from(cut) == [f"{group}.{name}"]
    assert len(missing_from({})) == sum(len(names) for names in CHECKLIST.values())


# --- The compile key ---

CONSTEXPR = ("dtype", "head_dim", "causal", "pack_gqa", "two_cta", "lse", "page_table", "tile_n")
BASE = dict.fromkeys(CONSTEXPR, 0)


def key_of(names):
    return lambda call: tuple(call[name] for name in names)


@pytest.mark.parametrize("omitted", CONSTEXPR)
def test_a_field_that_the_key_omits_returns_a_stale_kernel(omitted):
    complete = CompileCache(key_of(CONSTEXPR), key_of(CONSTEXPR))
    lacking = CompileCache(key_of([n for n in CONSTEXPR if n != omitted]), key_of(CONSTEXPR))
    changed = {**BASE, omitted: 1}
    assert complete.run(BASE) != complete.run(changed)
    assert complete.compiled == 2, "a change of code is a cache miss"
    lacking.run(BASE)
    with pytest.raises(StaleExecutor):
        lacking.run(changed)


def test_data_in_the_key_costs_compilations():
    tidy = CompileCache(key_of(CONSTEXPR), key_of(CONSTEXPR))
    wasteful = CompileCache(key_of([*CONSTEXPR, "batch"]), key_of(CONSTEXPR))
    for batch in range(10):
        call = {**BASE, "batch": batch}
        assert tidy.run(call) == wasteful.run(call)
    assert (tidy.compiled, wasteful.compiled) == (1, 10)


# --- Pins ---


def test_the_newer_release_says_nothing_about_the_pinned_one():
    for pinned, current in ((BETA23, BETA24), (BETA24, BETA23)):
        with pytest.raises(ExpiredStatement, match=r"\['release', 'commit'\] changed"):
            check_statement(pinned, current)
    assert BETA23.commit.startswith("2409214a")
    assert BETA24.commit.startswith("849f660f")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Pin)])
def test_every_coordinate_expires_a_statement(field):
    check_statement(BETA23, dataclasses.replace(BETA23))
    with pytest.raises(ExpiredStatement, match=rf"\['{field}'\] changed"):
        check_statement(BETA23, dataclasses.replace(BETA23, **{field: "other"}))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: strength("a longest-first design exists", Witness.RUN), r"must be a Claim and a Witness"),
        (lambda: strength(Claim.FASTER, "run"), r"must be a Claim and a Witness"),
        (lambda: require(Claim.FASTER, []), r"from nothing"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
