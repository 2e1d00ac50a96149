"""What a piece of evidence proves, what a compile key must hold, and when a statement about support expires.

Specification 0x0C and 0x0F. A paper, a source file, a compiled artifact and a run are four different witnesses. These
functions refuse a claim whose witness is of the wrong kind; they gather no evidence themselves. What makes two timings
comparable is in `cupyfa.oracles.accounting.record`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .violations import ContractViolation

__all__ = [
    "CHECKLIST",
    "Claim",
    "CompileCache",
    "EvidenceTooWeak",
    "ExpiredStatement",
    "Pin",
    "SkippedStep",
    "StaleExecutor",
    "Standing",
    "Step",
    "Strength",
    "Witness",
    "check_statement",
    "missing_from",
    "reached",
    "require",
    "strength",
]


class EvidenceTooWeak(ContractViolation):
    """A claim that none of the evidence at hand proves (0x0C)."""


class SkippedStep(ContractViolation):
    """A later step is taken as proof of an earlier one that has not been shown (0x0C)."""


class StaleExecutor(ContractViolation):
    """A cached kernel is called under assumptions that it was not generated for (0x0C)."""


class ExpiredStatement(ContractViolation):
    """A statement about one pinned state is applied to another (0x0C)."""


class Witness(enum.Enum):
    """Where evidence comes from (0x0C)."""

    PAPER = "paper"
    SOURCE = "source"
    ARTIFACT = "compiled artifact"
    RUN = "run"


class Strength(enum.IntEnum):
    """What a witness can do for a claim (0x0C)."""

    NONE = 0
    SUGGESTS = 1
    PROVES = 2


class Claim(enum.Enum):
    """Sentences that one would like to write about a kernel (0x0C)."""

    DESIGN_EXISTS = "a longest-first design exists"
    VARIANT_RAN = "this scheduler variant ran"
    SHAPE_ACCEPTED = "the interface accepts this shape"
    SHAPE_EXECUTES = "this shape executes"
    INSTRUCTION_EMITTED = "the kernel contains this instruction"
    RESIDENCY = "this many registers and bytes are in use, and so many CTAs are resident"
    THROUGHPUT = "this release reaches that throughput"
    FASTER = "the two-CTA path is faster"
    LONG_CONTEXT_QUALITY = "the model answers well over long contexts"


_N, _S, _P = Strength.NONE, Strength.SUGGESTS, Strength.PROVES
#: Columns: paper, source, artifact, run.
_MATRIX = {
    Claim.DESIGN_EXISTS: (_P, _S, _N, _S),
    Claim.VARIANT_RAN: (_N, _S, _P, _P),
    Claim.SHAPE_ACCEPTED: (_S, _P, _S, _P),
    Claim.SHAPE_EXECUTES: (_S, _S, _S, _P),
    Claim.INSTRUCTION_EMITTED: (_S, _S, _P, _S),
    Claim.RESIDENCY: (_S, _S, _S, _P),
    Claim.THROUGHPUT: (_N, _N, _N, _P),
    Claim.FASTER: (_S, _N, _N, _P),
    Claim.LONG_CONTEXT_QUALITY: (_N, _N, _N, _N),
}


def strength(claim: Claim, witness: Witness) -> Strength:
    """Look up what a witness can do for a claim (0x0C).

    Parameters
    ----------
    claim : Claim
        What is to be said.
    witness : Witness
        What is at hand.

    Returns
    -------
    Strength
        ``PROVES``, ``SUGGESTS`` or ``NONE``.

    Examples
    --------
    >>> strength(Claim.INSTRUCTION_EMITTED, Witness.SOURCE).name
    'SUGGESTS'
    """
    row, column = _MATRIX.get(claim), dict(zip(Witness, range(len(Witness)), strict=True)).get(witness)
    if row is None or column is None:
        raise ContractViolation(f"evidence: {claim!r} and {witness!r} must be a Claim and a Witness")
    return row[column]


def require(claim: Claim, witnesses: Collection[Witness]) -> None:
    """Refuse a claim that no witness proves. Several suggestions do not add up to a proof (0x0C).

    Parameters
    ----------
    claim : Claim
        What is to be said.
    witnesses : collection of Witness
        What is at hand.

    Raises
    ------
    EvidenceTooWeak
        Naming the claim and what would prove it.

    Examples
    --------
    >>> require(Claim.SHAPE_ACCEPTED, {Witness.SOURCE})
    """
    if any(strength(claim, witness) is Strength.PROVES for witness in witnesses):
        return
    held = ", ".join(sorted(w.value for w in witnesses)) or "nothing"
    proof = [w.value for w in Witness if strength(claim, w) is Strength.PROVES]
    raise EvidenceTooWeak(f"'{claim.value}' from {held}; it takes {' or '.join(proof) if proof else 'another study'}")


class Step(enum.IntEnum):
    """The way from a call to a figure; each step can fail although those before it succeeded (0x0C)."""

    CALL = 0
    ADMITTED = 1
    SPECIALISED = 2
    LOWERED = 3
    PTX = 4
    SASS = 5
    LOADED = 6
    MEASURED = 7


def reached(shown: Collection[Step]) -> Step:
    """Return the last step up to which everything has been shown (0x0C).

    Parameters
    ----------
    shown : collection of Step
        Steps with evidence of their own.

    Returns
    -------
    Step
        The last one.

    Raises
    ------
    SkippedStep
        If a later step is shown and an earlier one is not.

    Examples
    --------
    >>> reached({Step.CALL, Step.ADMITTED}).name
    'ADMITTED'
    """
    last = max(shown, default=Step.CALL)
    for step in Step:
        if step < last and step not in shown:
            raise SkippedStep(f"{last.name} is shown but {step.name} is not")
    return last


class Standing(enum.IntEnum):
    """How much has been established about one kernel (0x0F), from weak to strongest."""

    REQUESTED = 0
    SELECTED = 1
    PROFILED = 2
    RELEASED = 3

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Standing:
        """Rate a record by what it holds.

        Parameters
        ----------
        record : mapping
            Keys ``selected`` (variant named by dispatch), ``kernel`` (name seen by a profiler), ``resources``,
            ``bottleneck``, ``versions``, ``timing``, ``correctness``, ``fallback_test``; absent or falsy is missing.

        Returns
        -------
        Standing
            The highest level all of whose parts, and all of whose lower levels' parts, are there.

        Examples
        --------
        >>> Standing.of({"selected": "hd128"}).name, Standing.of({"timing": [1.0]}).name
        ('SELECTED', 'REQUESTED')
        """
        parts = (
            ("selected",),
            ("kernel", "resources", "bottleneck"),
            ("versions", "timing", "correctness", "fallback_test"),
        )
        level = 0
        for names in parts:
            if not all(record.get(name) for name in names):
                break
            level += 1
        return cls(level)


#: What to record about one selected kernel (0x0F).
CHECKLIST: dict[str, tuple[str, ...]] = {
    "identity": ("architecture", "symbol", "commit", "compiler", "versions"),
    "shape": ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "mask", "causal", "dtype"),
    "capacity": ("registers", "shared_bytes", "tensor_memory_columns", "stages", "ctas_per_sm"),
    "movement": ("hbm_bytes", "l2", "tma_transactions", "shared_traffic"),
    "execution": ("tensor_activity", "mufu_activity", "issue_stalls", "barrier_stalls"),
    "correctness": ("reference", "max_error", "mean_error", "deterministic"),
    "timing": ("warmup", "repetitions", "distribution", "pass_boundary"),
}


def missing_from(record: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List what a record lacks (0x0F).

    Parameters
    ----------
    record : mapping
        Group -> field -> value, as in `CHECKLIST`; None is missing, 0 and False are not.

    Returns
    -------
    list of str
        ``"group.field"``, in the order of the checklist.

    Examples
    --------
    >>> missing_from({group: dict.fromkeys(names, 0) for group, names in CHECKLIST.items() if group != "movement"})
    ['movement.hbm_bytes', 'movement.l2', 'movement.tma_transactions', 'movement.shared_traffic']
    """
    return [
        f"{group}.{name}"
        for group, names in CHECKLIST.items()
        for name in names
        if record.get(group, {}).get(name) is None
    ]


class CompileCache:
    """Generated kernels by key: what the key omits, the cache cannot tell apart (0x0C).

    Attributes
    ----------
    compiled : int
        Kernels generated so far.

    Parameters
    ----------
    key : callable
        Call -> what the cache looks at.
    code : callable
        Call -> everything that the generated code depends on.

    Examples
    --------
    >>> cache = CompileCache(key=lambda call: call["causal"], code=lambda call: call["causal"])
    >>> cache.run({"causal": True, "batch": 1}), cache.run({"causal": True, "batch": 9}), cache.compiled
    (True, True, 1)
    """

    def __init__(
        self,
        key: Callable[[Mapping[str, Any]], Hashable],
        code: Callable[[Mapping[str, Any]], Hashable],
    ) -> None:
        self._key, self._code = key, code
        self._kernels: dict[Hashable, Hashable] = {}
        self.compiled = 0

    def run(self, call: Mapping[str, Any]) -> Hashable:
        """Run a call and return what its kernel was generated for.

        Raises
        ------
        StaleExecutor
            If the cache returns a kernel that was generated for another call's assumptions. The call's signature would
            have fitted; only the device code is wrong.
        """
        key = self._key(call)
        if key not in self._kernels:
            self._kernels[key] = self._code(call)
            self.compiled += 1
        if self._kernels[key] != self._code(call):
            raise StaleExecutor(f"the kernel under key {key!r} was generated for {self._kernels[key]!r}")
        return self._kernels[key]


@dataclass(frozen=True)
class Pin:
    """What a statement about support depends on; it expires when any of these changes (0x0C).

    Attributes
    ----------
    release, commit : str
        Of the attention package.
    compiler : str
        DSL, CUDA and ptxas versions.
    architecture : str
        Target.
    key_schema : str
        Fields of the compile key, and the specialisation that was selected.
    dependencies : str
        Resolved environment. An open version range is not a resolution.
    convention : str
        FLOP numerator and timing boundary.
    """

    release: str
    commit: str
    compiler: str = ""
    architecture: str = ""
    key_schema: str = ""
    dependencies: str = ""
    convention: str = ""


#: The release that the specification describes, and the one that appeared while it was written.
BETA23 = Pin("fa4-v4.0.0.beta23", "2409214a03797b168f648ea30df1adbc09ce658a")
BETA24 = Pin("fa4-v4.0.0.beta24", "849f660f73b176e5ad5670e7f822c7fa9f3eaf8b")


def check_statement(pinned: Pin, current: Pin) -> None:
    """Refuse to carry a statement from one state to another, in either direction (0x0C).

    Parameters
    ----------
    pinned : Pin
        What the statement was extracted from.
    current : Pin
        What it is applied to.

    Raises
    ------
    ExpiredStatement
        Naming every coordinate that differs.

    Examples
    --------
    >>> check_statement(BETA23, BETA23)
    """
    changed = [f.name for f in fields(Pin) if getattr(pinned, f.name) != getattr(current, f.name)]
    if changed:
        raise ExpiredStatement(
            f"a statement about {pinned.release} is not one about {current.release}: {changed} changed"
        )
