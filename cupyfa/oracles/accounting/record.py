"""What a benchmark figure may be compared with: conditions and manifests (specification 0x0D).

A figure has a numerator (`flops`), an interval that was timed, and an artifact and a baseline to which it belongs.
A ratio of two figures means something only where all three agree. The functions here refuse the other ratios by name;
each refusal is a way in which published comparisons go wrong (FlashAttention-3, arXiv 2407.08608, section 4;
FlashAttention-4, arXiv 2603.05451, section 5 and appendix A). Which witness a statement needs at all is in `evidence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..violations import ContractViolation
from .rates import speedup

__all__ = [
    "COMPARED_FIELDS",
    "MANIFEST_FIELDS",
    "FallbackMeasured",
    "IncompleteManifest",
    "ManifestConflict",
    "Measurement",
    "UnreconciledBaseline",
    "merge_manifests",
    "missing_fields",
    "reconciled_speedup",
]


class UnreconciledBaseline(ContractViolation):
    """Two measurements differ in more than what is compared (0x0D)."""


class IncompleteManifest(ContractViolation):
    """A measurement does not say under which conditions it was made (0x0D)."""


class ManifestConflict(ContractViolation):
    """Two records of one experiment contradict each other (0x0D)."""


class FallbackMeasured(ContractViolation):
    """Another backend ran than the figure names (0x0D)."""


#: What two measurements must share before their ratio is quoted.
COMPARED_FIELDS = (
    *("gpu", "power_mode", "clocks"),
    *("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v"),
    *("dtype", "scales", "causal", "window", "sparsity", "deterministic"),
    *("boundary", "warmup", "synchronization", "repetitions", "statistic", "numerator", "tolerance"),
)

#: What one benchmark row records, by group.
MANIFEST_FIELDS: dict[str, tuple[str, ...]] = {
    "identity": ("release", "source_hashes", "dependencies", "artifact_hashes", "symbol"),
    "environment": ("gpu", "multiprocessors", "memory", "clocks", "power_mode", "driver", "toolchain", "framework"),
    "dispatch": ("requested", "admitted", "compile_key", "scheduler", "cluster", "splits", "fallback"),
    "problem": (
        *("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v"),
        *("dtype", "scales", "causal", "window", "sparsity", "varlen", "paged"),
    ),
    "measurement": (
        *("numerator", "warmup", "repetitions", "synchronization", "statistic", "distribution"),
        *("compile_boundary", "preprocess_boundary", "allocation_boundary"),
    ),
    "correctness": ("reference", "tolerance", "max_error", "mean_error", "deterministic"),
}


@dataclass(frozen=True)
class Measurement:
    """One timed run with its conditions (0x0D).

    Attributes
    ----------
    seconds : float
        The statistic of the times.
    version : str
        Exact version of what ran.
    requested, executed : str
        Backend that was asked for, and the one whose kernel ran.
    conditions : Mapping
        A value for every name in `COMPARED_FIELDS`.
    """

    seconds: float
    version: str
    requested: str
    executed: str
    conditions: Mapping[str, object] = field(default_factory=dict)


def reconciled_speedup(baseline: Measurement, candidate: Measurement) -> float:
    """Return the speedup of two measurements that differ in nothing but what ran (0x0D).

    Parameters
    ----------
    baseline, candidate : Measurement
        Both complete.

    Returns
    -------
    float
        ``t_baseline / t_candidate``.

    Raises
    ------
    IncompleteManifest
        If a version or a condition is not recorded.
    FallbackMeasured
        If something else ran than was requested.
    UnreconciledBaseline
        If a condition differs; the message names all of them.
    """
    for run in (baseline, candidate):
        missing = [name for name in COMPARED_FIELDS if name not in run.conditions]
        if missing or not run.version:
            raise IncompleteManifest(f"accounting: a measurement lacks {', '.join(missing) or 'its version'}")
        if run.executed != run.requested:
            raise FallbackMeasured(f"accounting: {run.requested} was requested but {run.executed} ran")
    different = [name for name in COMPARED_FIELDS if baseline.conditions[name] != candidate.conditions[name]]
    if different:
        raise UnreconciledBaseline(f"accounting: the measurements differ in {', '.join(different)}")
    return speedup(baseline.seconds, candidate.seconds)


def missing_fields(manifest: Mapping[str, Mapping[str, object]]) -> list[str]:
    """List what a benchmark row does not record (0x0D).

    Parameters
    ----------
    manifest : Mapping
        Group to name to value, see `MANIFEST_FIELDS`.

    Returns
    -------
    list of str
        ``"group.name"``; empty if the row can be reproduced.

    Raises
    ------
    IncompleteManifest
        If a group does not map names to values.

    Examples
    --------
    >>> missing_fields({})[0], len(missing_fields({}))
    ('identity.release', 48)
    """
    for group, values in manifest.items():
        if not isinstance(values, Mapping):
            raise IncompleteManifest(f"accounting: the group {group} is {values!r}; it must map names to values")
    return [
        f"{group}.{n}" for group, names in MANIFEST_FIELDS.items() for n in names if n not in manifest.get(group, {})
    ]


def merge_manifests(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    """Join two records of one experiment, if they agree wherever both speak (0x0D).

    Parameters
    ----------
    first, second : Mapping
        Field to value.

    Returns
    -------
    dict
        All fields.

    Raises
    ------
    ManifestConflict
        If a field has two values. Which one is right cannot be told from here, so neither is taken.

    Examples
    --------
    >>> merge_manifests({"gpu": "B200"}, {"gpu": "B100"})
    Traceback (most recent call last):
    cupyfa.oracles.accounting.record.ManifestConflict: accounting: the records disagree: gpu is B200 and B100
    """
    conflicts = [name for name in first if name in second and first[name] != second[name]]
    if conflicts:
        text = "; ".join(f"{name} is {first[name]} and {second[name]}" for name in conflicts)
        raise ManifestConflict(f"accounting: the records disagree: {text}")
    return {**first, **second}
