"""What a figure may be called: a model's bound is no run time, a source's target is no compiled register count.

Specification 0x08 and 0x0A keep four kinds of evidence apart: the paper's model, the kernel's source, the compiled
binary, a run. A `Figure` carries its kind, and asking for it as another kind raises the error that names the mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..violations import ContractViolation

__all__ = [
    "Figure",
    "Kind",
    "BoundCalledRuntime",
    "EvidenceOverreach",
    "OracleCalledDeviceEvidence",
    "SourceOrderCalledTimeline",
    "SumCalledRuntime",
    "TargetCalledRegisterCount",
]


class EvidenceOverreach(ContractViolation):
    """A figure of one kind was presented as another (specification 0x08)."""


class BoundCalledRuntime(EvidenceOverreach):
    """The largest resource time assumes perfect overlap and leaves resources out; it is no run time (0x08)."""


class SumCalledRuntime(EvidenceOverreach):
    """The sum of the resource times forbids overlap by assumption; it is no overlapped run time (0x08)."""


class TargetCalledRegisterCount(EvidenceOverreach):
    """A ``setmaxnreg`` target in a source says nothing about allocation or spills (specification 0x08)."""


class SourceOrderCalledTimeline(EvidenceOverreach):
    """An issue order in a source knows no lowering, no gaps and no stalls (specification 0x08)."""


class OracleCalledDeviceEvidence(EvidenceOverreach):
    """Arithmetic that checks out on a CPU is no evidence from a device (specification 0x08)."""


class Kind(Enum):
    """What a figure is, and which error says that it was taken for something else (specification 0x08)."""

    LOWER_BOUND = "lower bound of the resource model"
    SERIAL_SUM = "sum of the resource model's terms"
    REGISTER_TARGET = "setmaxnreg target in a source"
    ISSUE_ORDER = "issue order in a source"
    ORACLE = "result of a CPU oracle"
    COMPILED = "property of a compiled binary"
    MEASURED = "measurement on a device"


_OVERREACH: dict[Kind, type[EvidenceOverreach]] = {
    Kind.LOWER_BOUND: BoundCalledRuntime,
    Kind.SERIAL_SUM: SumCalledRuntime,
    Kind.REGISTER_TARGET: TargetCalledRegisterCount,
    Kind.ISSUE_ORDER: SourceOrderCalledTimeline,
    Kind.ORACLE: OracleCalledDeviceEvidence,
}


@dataclass(frozen=True)
class Figure:
    """A value together with what it is.

    Attributes
    ----------
    value : float
        The number.
    unit : str
        Its unit.
    kind : Kind
        Where it comes from (0x08, 0x0A: the tables of evidence).

    Examples
    --------
    >>> bound = Figure(1024, "cycles", Kind.LOWER_BOUND)
    >>> bound.as_kind(Kind.LOWER_BOUND)
    1024
    >>> bound.as_kind(Kind.MEASURED)
    Traceback (most recent call last):
    ...
    cupyfa.oracles.blackwell.claims.BoundCalledRuntime: 1024 cycles: a lower bound of the resource model, not a \
measurement on a device
    """

    value: float
    unit: str
    kind: Kind

    def as_kind(self, kind: Kind) -> float:
        """Return the value if the figure is of that kind.

        Parameters
        ----------
        kind : Kind
            What the caller is about to call the figure.

        Returns
        -------
        float
            The value.

        Raises
        ------
        EvidenceOverreach
            The subclass that names what the figure was mistaken for.
        """
        if kind is self.kind:
            return self.value
        error = _OVERREACH.get(self.kind, EvidenceOverreach)
        raise error(f"{self.value:g} {self.unit}: a {self.kind.value}, not a {kind.value}")
