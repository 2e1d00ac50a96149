"""What every table of a benchmark needs below it: the machine, the versions, who is absent and who was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupyfa.bench.manifest import Row
from cupyfa.bench.peers import Availability

__all__ = ["circumstances"]


def circumstances(rows: Sequence[Row], peers: Sequence[Availability], header: Mapping[str, Any]) -> list[str]:
    """Return under which circumstances the figures were measured.

    Parameters
    ----------
    rows : sequence of Row
        The cells.
    peers : sequence of Availability
        All peers.
    header : Mapping
        From :func:`cupyfa.bench.manifest.environment`.

    Returns
    -------
    list of str
        Lines.
    """
    lines = [
        f"{header['gpu']}, driver {header['driver']}, NVRTC {header['nvrtc']}, CuPy {header['cupy']}, torch "
        f"{header['torch']}, cuDNN {header['cudnn']}, cupyfa {header['cupyfa']}.",
    ]
    seen = [row.after for row in rows if row.after is not None]
    if seen:
        mhz, watts = [x["sm_mhz"] for x in seen], [x["power_w"] for x in seen]
        lines.append(
            f"After a cell: SM {min(mhz):.0f} to {max(mhz):.0f} MHz, power {min(watts):.0f} to {max(watts):.0f} W."
        )
    lines += [f"{peer.title} ({peer.name}): {peer.version}" for peer in peers if peer.version is not None]
    lines += [f"{peer.title} ({peer.name}): absent: {peer.reason}" for peer in peers if peer.version is None]
    for row in rows:
        lines += [f"{name}, {row.cell}: not timed: {c.message}" for name, c in row.checks.items() if not c.passed]
    return lines
