"""Ratios that are refused: differing conditions, missing records, fallbacks, contradictions."""

import dataclasses
import doctest

import pytest

from cupyfa.oracles.accounting import record
from cupyfa.oracles.accounting.record import (
    COMPARED_FIELDS,
    MANIFEST_FIELDS,
    FallbackMeasured,
    IncompleteManifest,
    ManifestConflict,
    Measurement,
    UnreconciledBaseline,
    merge_manifests,
    missing_fields,
    reconciled_speedup,
)
from cupyfa.oracles.evidence import Claim, EvidenceTooWeak, Witness, require

CONDITIONS = dict.fromkeys(COMPARED_FIELDS, "same")
FAST = Measurement(1.0e-3, "1.2.3", "hopper", "hopper", CONDITIONS)
SLOW = Measurement(1.3e-3, "9.13", "cudnn", "cudnn", CONDITIONS)

# What the main text and the appendix of one paper say about the same experiment.
MAIN_TEXT = {"gpu": "B200", "cudnn": "9.13", "arxiv": "2603.05451"}
APPENDIX = {"gpu": "B100 180GB SXM6 (1000W)", "warmup": 5, "repetitions": 10, "statistic": "mean", "cudnn": "9.19.1.2"}


def test_doctests():
    assert doctest.testmod(record).failed == 0


def test_reconciled_runs_have_a_ratio():
    assert reconciled_speedup(SLOW, FAST) == pytest.approx(1.3)


@pytest.mark.parametrize("name", COMPARED_FIELDS)
def test_any_difference_in_conditions_is_refused(name):
    other = dataclasses.replace(SLOW, conditions=CONDITIONS | {name: "other"})
    with pytest.raises(UnreconciledBaseline, match=rf"differ in {name}$"):
        reconciled_speedup(other, FAST)
    unknown = {key: value for key, value in CONDITIONS.items() if key != name}
    with pytest.raises(IncompleteManifest, match=rf"lacks {name}$"):
        reconciled_speedup(SLOW, dataclasses.replace(FAST, conditions=unknown))


def test_all_differences_are_named():
    other = dataclasses.replace(SLOW, conditions=CONDITIONS | {"seqlen_k": 1, "numerator": "dense", "boundary": "cold"})
    with pytest.raises(UnreconciledBaseline, match="differ in seqlen_k, boundary, numerator"):
        reconciled_speedup(other, FAST)


def test_a_version_is_part_of_a_baseline():
    with pytest.raises(IncompleteManifest, match="lacks its version"):
        reconciled_speedup(dataclasses.replace(SLOW, version=""), FAST)


def test_a_fallback_is_not_the_backend_that_was_named():
    with pytest.raises(FallbackMeasured, match="hopper was requested but generic ran"):
        reconciled_speedup(SLOW, dataclasses.replace(FAST, executed="generic"))


def test_the_papers_two_records_are_not_merged():
    with pytest.raises(ManifestConflict, match=r"gpu is B200 and B100 .*; cudnn is 9.13 and 9.19.1.2"):
        merge_manifests(MAIN_TEXT, APPENDIX)
    agreeing = {k: v for k, v in APPENDIX.items() if k not in MAIN_TEXT}
    assert merge_manifests(MAIN_TEXT, agreeing) == MAIN_TEXT | agreeing


def test_a_row_records_six_groups():
    assert list(MANIFEST_FIELDS) == [
        *("identity", "environment", "dispatch", "problem", "measurement", "correctness"),
    ]
    full = {group: dict.fromkeys(names, 0) for group, names in MANIFEST_FIELDS.items()}
    assert missing_fields(full) == []
    for group, names in MANIFEST_FIELDS.items():
        for name in names:
            less = {**full, group: {n: 0 for n in names if n != name}}
            assert missing_fields(less) == [f"{group}.{name}"]


@pytest.mark.parametrize("witnesses", [{Witness.PAPER}, {Witness.SOURCE}, {Witness.PAPER, Witness.SOURCE}])
def test_a_papers_bars_are_not_a_releases(witnesses):
    """0x0E measurement failure: the throughput of a release needs a run of that release."""
    with pytest.raises(EvidenceTooWeak, match="it takes run"):
        require(Claim.THROUGHPUT, witnesses)
    require(Claim.THROUGHPUT, witnesses | {Witness.RUN})


def test_no_evidence_stands_in_for_another():
    """The section's labels: reported, audited, compiled and measured are four statements."""
    own = {
        Claim.DESIGN_EXISTS: Witness.PAPER,
        Claim.SHAPE_ACCEPTED: Witness.SOURCE,
        Claim.INSTRUCTION_EMITTED: Witness.ARTIFACT,
        Claim.THROUGHPUT: Witness.RUN,
    }
    for claim, witness in own.items():
        require(claim, {witness})
    for claim, witness in ((a, own[b]) for a in own for b in own if list(own).index(b) < list(own).index(a)):
        with pytest.raises(EvidenceTooWeak):
            require(claim, {witness})  # what comes earlier never proves what comes later


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: missing_fields({"identity": None}), IncompleteManifest, "the group identity is None"),
        (lambda: reconciled_speedup(dataclasses.replace(SLOW, conditions={}), FAST), IncompleteManifest, "lacks gpu, "),
        (lambda: reconciled_speedup(dataclasses.replace(SLOW, seconds=0.0), FAST), ValueError, "times are 0.0 and"),
        (lambda: merge_manifests({"gpu": 1}, {"gpu": 2}), ManifestConflict, "gpu is 1 and 2"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
