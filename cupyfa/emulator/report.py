"""What a run has found, as text and as JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
from typing import Any

__all__ = ["Event", "Finding", "Place", "Run"]

#: Findings of one hazard that the text of a report has; JSON has all.
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Place:
    """An instruction of the kernel.

    Attributes
    ----------
    index : int
        Of the decoded record.
    file, line
        Source position, from ``.loc``; of the PTX text where there is none.
    callers : tuple of (str, int)
        Where it was inlined, innermost first.
    text : str
        The PTX instruction.
    """

    index: int
    file: str
    line: int
    callers: tuple[tuple[str, int], ...]
    text: str

    def __str__(self) -> str:
        """Return ``file:line``, with up to three calls that it was inlined through, and the instruction."""
        called = ", ".join(f"{_short(file)}:{line}" for file, line in self.callers[:3])
        text = self.text if len(self.text) <= 100 else self.text[:97] + "..."
        return f"{_short(self.file)}:{self.line}{f' (from {called})' if called else ''}: {text}"


def _short(file: str) -> str:
    """Return a kernel source's name from ``cuda/`` on: the compiler puts the working directory in front of it."""
    at = file.rfind("/cuda/")
    return file[at + 1 :] if at >= 0 else file


@dataclasses.dataclass(frozen=True)
class Finding:
    """A hazard.

    Attributes
    ----------
    hazard : str
        Its stable name, GROUP_NAME.
    severity : {"error", "review", "information"}
        ``review``: sources disagree whether the machine guarantees it.
    place, other : Place or None
        Where it was seen, and what it conflicts with.
    cta, warp, lanes : int
        Who was there; -1 for nobody.
    object, detail : str
        What it is about; what was there and what was needed.
    times : int
        How many memory cells (of 16 bytes, or single bytes where an access covers only a part of those) or lanes of
        these two places met, added up over the run.
    """

    hazard: str
    severity: str
    place: Place | None
    other: Place | None
    cta: int
    warp: int
    lanes: int
    object: str
    detail: str
    times: int

    def __str__(self) -> str:
        """Return the finding on two to four lines."""
        who = f"CTA {self.cta} warp {self.warp}" if self.warp >= 0 else "the machine"
        lines = [
            f"{self.severity}: {self.hazard}: {self.object}" + (f" [{self.times} times]" if self.times > 1 else "")
        ]
        if self.detail:
            lines.append(f"    {self.detail}")
        if self.place is not None:
            lines.append(f"    {who}: {self.place}")
        if self.other is not None:
            lines.append(f"    against: {self.other}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Event:
    """An entry of a timeline.

    Attributes
    ----------
    time : int
        Instructions executed by the whole machine before it.
    place : Place
        The instruction.
    cta, warp : int
        Who.
    kind : {"issue", "complete", "wait", "release"}
        What happened.
    object : int
        Offset of the mbarrier in shared memory; below 0: a named barrier (-1 - number), bulk groups (-100), the
        products of a warpgroup (-200 - number), the tcgen05 operations of a warp (-300 - number).
    value : int
        Phase, generation or group; of a product that is issued or complete, its number.
    """

    time: int
    place: Place
    cta: int
    warp: int
    kind: str
    object: int
    value: int


@dataclasses.dataclass(frozen=True)
class Run:
    """The outcome of a launch.

    Attributes
    ----------
    kernel, arch, policy : str
        What ran, and under which schedule.
    seed : int
        Of the schedule.
    findings : tuple of Finding
        Empty when nothing was found.
    statistics : dict
        ``instructions``, ``shuffles`` and ``votes`` (of warps), ``async_operations``, ``checks``, ``seconds``.
    events : tuple of Event
        With ``record=True``.
    """

    kernel: str
    arch: str
    policy: str
    seed: int
    findings: tuple[Finding, ...]
    statistics: dict[str, float]
    events: tuple[Event, ...] = dataclasses.field(default=(), repr=False)

    @property
    def verdict(self) -> str:
        """``clean``, ``review``, ``error``, or ``incomplete`` when the emulator could not execute an instruction."""
        severities = {finding.severity for finding in self.findings}
        if any(f.hazard in ("DECODE_UNSUPPORTED", "PROGRESS_SLOTS_EXHAUSTED") for f in self.findings):
            return "incomplete"
        return "error" if "error" in severities else "review" if "review" in severities else "clean"

    @property
    def hazards(self) -> tuple[str, ...]:
        """Names of the errors, each once, in the order in which they were found."""
        return tuple(dict.fromkeys(f.hazard for f in self.findings if f.severity == "error"))

    def __str__(self) -> str:
        """Return the report as text: of each hazard the first findings."""
        kernel = self.kernel if len(self.kernel) <= 60 else self.kernel[:57] + "..."
        lines = [f"{self.verdict}: {kernel} on {self.arch}, policy {self.policy}, seed {self.seed}"]
        shown = collections.Counter[tuple[str, str]]()
        for finding in self.findings:
            shown[finding.severity, finding.hazard] += 1
            if shown[finding.severity, finding.hazard] <= _SHOWN:
                lines.append(str(finding))
        for (severity, hazard), count in shown.items():
            if count > _SHOWN:
                lines.append(f"{severity}: {hazard}: at {count - _SHOWN} more pairs of places")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the report as JSON, without events."""
        content: dict[str, Any] = {"verdict": self.verdict, **dataclasses.asdict(self)}
        del content["events"]
        return json.dumps(content, indent=2)
