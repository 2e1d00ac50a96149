"""The goldens: digests of every output, whole arrays of a few, and the comparison with what the emulator computed.

``goldens.json``: {family: {case: {"fingerprint", "outputs": {name: entry}}}}; an entry holds the SHA-256 of the bytes
and one CRC-32 for each row (or for each of at most sixteen parts), so that a failure says where it is; small outputs
are there as they stand. ``goldens.npz`` holds the whole arrays under "case:output".
"""

from __future__ import annotations

import hashlib
import json
import zlib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .case import Array, Case, Output

FOLDER = Path(__file__).parent
INLINE = 512  # bytes up to which an output is kept in the JSON
PARTS = 16


def parts(output: Output, array: Array) -> tuple[tuple[str, ...], list[Array]]:
    """The array in the parts that have a checksum each, and their names."""
    if output.rows:
        return output.rows, list(array)
    flat = array.reshape(-1)
    bounds = [len(flat) * i // PARTS for i in range(PARTS + 1)]
    names = tuple(f"elements {a} to {b - 1}" for a, b in pairwise(bounds))
    return names, [flat[a:b] for a, b in pairwise(bounds)]


def entry(output: Output, array: Array) -> dict[str, Any]:
    data = np.ascontiguousarray(array).tobytes()
    checksums = "".join(f"{zlib.crc32(part.tobytes()):08x}" for part in parts(output, array)[1])
    found: dict[str, Any] = {"sha256": hashlib.sha256(data).hexdigest(), "parts": checksums}
    if len(data) <= INLINE:
        found["bytes"] = data.hex()
    return found


@cache
def load() -> tuple[dict[str, Any], dict[str, Array]]:
    """The goldens of the repository."""
    with np.load(FOLDER / "goldens.npz") as file:
        return json.loads((FOLDER / "goldens.json").read_text()), {name: file[name] for name in file.files}


def compare(case: Case, outputs: dict[str, Array], golden: dict[str, Any], kept: dict[str, Array]) -> list[str]:
    """What differs; empty if nothing does."""
    if golden["fingerprint"] != case.fingerprint():
        return [f"{case.name}: the case has changed since it ran on the H200; run goldens.py there again"]
    messages = []
    for output in case.outputs:
        array, expected = outputs[output.name], golden["outputs"][output.name]
        whole = kept.get(f"{case.name}:{output.name}")
        if whole is None and "bytes" in expected:
            whole = np.frombuffer(bytes.fromhex(expected["bytes"]), output.dtype).reshape(output.shape)
        if case.compare == "approximate":
            from .bounds import outside_bounds

            assert whole is not None, f"{case.name}: approximations are kept whole"
            messages += outside_bounds(case, output, array, whole)
        elif hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() != expected["sha256"]:
            messages.append(f"{case.name}, {output.name}: {difference(output, array, expected['parts'], whole)}")
    return messages


def difference(output: Output, array: Array, checksums: str, whole: Array | None) -> str:
    names, pieces = parts(output, array)
    wrong = [
        name
        for i, (name, part) in enumerate(zip(names, pieces, strict=True))
        if f"{zlib.crc32(part.tobytes()):08x}" != checksums[8 * i : 8 * i + 8]
    ]
    shown = "; ".join(wrong[:12]) + (f" and {len(wrong) - 12} more" if len(wrong) > 12 else "")
    text = f"{len(wrong)} of {len(names)} parts differ: {shown}"
    if whole is not None:
        mine, theirs = (a.view(f"<u{a.itemsize}") for a in (np.ascontiguousarray(array), np.ascontiguousarray(whole)))
        places = np.argwhere(mine != theirs)
        first = tuple(int(i) for i in places[0])
        values = f"emulator {mine[first]:#x} ({array[first]}), H200 {theirs[first]:#x} ({whole[first]})"
        text += f"; {len(places)} elements, first at {first}: {values}"
    return text
