"""Removal of copies: packing and unpacking of 64-bit registers, which are two rows each, and plain moves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Final

from cupyfa.emulator.builder import CONSTANT, DEFINED, PREDICATE, USED, Record
from cupyfa.emulator.flow import Flow

__all__ = ["forward_copies"]

# These change what may be read of a register that an asynchronous operation owns.
_WAITS: Final = frozenset(("tc_wait", "wgmma_wait", "wgmma_fence", "wgmma_commit"))


def forward_copies(records: Sequence[Record], own: Set[int]) -> list[Record]:
    """Return the records without the copies whose readers can read the original.

    Parameters
    ----------
    records : sequence of Record
        With `targets` that count records.
    own : set of int
        Rows that asynchronous operations read or write.

    Notes
    -----
    A copy ``d = a`` goes if it is the only definition of d, is not guarded, and nothing defines a while d is live: then
    between the copy and each reader of d on any path, d is live, so a still has the value. A reader that no copy comes
    before reads an undefined register in both versions. Originals of copies of copies are found first, and each copy
    is checked against the original in the end.
    """
    return _Copies(records, own).result()


class _Copies:
    """What is known of definitions and readers."""

    def __init__(self, records: Sequence[Record], own: Set[int]) -> None:
        self.records, self.own = records, own
        self.flow = Flow(records)
        self.defined: dict[int, list[int]] = {}
        self.used: dict[int, list[int]] = {}
        for index in range(len(records)):
            for row in self.flow.definitions[index]:
                self.defined.setdefault(row, []).append(index)
            for row in self.flow.uses[index]:
                self.used.setdefault(row, []).append(index)
        self.waits = [index for index, record in enumerate(records) if record.operation in _WAITS]
        self.sources = self._find_sources()
        self.originals: dict[int, int] = {}

    def _find_sources(self) -> dict[int, int]:
        """Return destination -> source of the copies that may go."""
        sources = {}
        for record in self.records:
            if record.operation == "mov" and record.type != "pred" and record.guard < 0:
                half = len(record.entries) // 2
                for target, source in zip(record.entries[:half], record.entries[half:], strict=True):
                    if len(self.defined[target]) == 1 and target not in self.own and target != source:
                        sources[target] = source
        return sources

    def result(self) -> list[Record]:
        """Return the new records."""
        for target in self.sources:
            self._resolve(target)
        originals = {target: original for target, original in self.originals.items() if target != original}
        kept: list[Record] = []
        position = []
        for record in self.records:
            position.append(len(kept))
            kept.extend(_rewritten(record, originals))
        position.append(len(kept))
        for record in kept:
            record.targets = tuple([position[target] for target in record.targets])
        return kept

    def _resolve(self, row: int) -> int:
        """Return the original that a row's readers can read: the row itself if its copy stays."""
        chain = []
        while row in self.sources and row not in self.originals:
            # Until it is known the row stands for itself, which ends a circle of copies.
            self.originals[row] = row
            chain.append(row)
            row = self.sources[row]
        original = self.originals.get(row, row)
        for target in reversed(chain):
            if self._can_read(target, original):
                self.originals[target] = original
            else:
                original = target
        return original

    def _can_read(self, target: int, original: int) -> bool:
        """Return whether the readers of a copy can read the original."""
        if original == target:
            return False
        if original < 0:
            return True
        if original in self.own and not self._no_wait_between(target):
            return False
        readers = self.used.get(target, ())
        for index in self.defined.get(original, ()):
            if self._live_after(target, index) or (not self.flow.in_place[index] and index in readers):
                return False
        return True

    def _live_after(self, row: int, index: int) -> bool:
        """Return whether a row with one definition is live after a record."""
        block = self.flow.block_of[index]
        end = self.flow.blocks[block].stop
        definition = self.defined[row][0]
        readers = self.used.get(row, [])
        following = bisect_right(readers, index)
        reader = readers[following] if following < len(readers) else end
        if index < definition < end:
            return reader <= definition
        if reader < end:
            return True
        bit = self.flow.bit.get(row)
        return bit is not None and bool(self.flow.live_out[block] >> bit & 1)

    def _no_wait_between(self, target: int) -> bool:
        """Return whether no wait lies between a copy and its readers.

        Then reading late is the same hazard, or none, as reading at the copy.
        """
        definition = self.defined[target][0]
        readers = self.used.get(target, [])
        if not readers:
            return True
        block = self.flow.blocks[self.flow.block_of[definition]]
        if target in self.flow.bit or readers[-1] not in block:
            return False
        following = bisect_right(self.waits, definition)
        return following == len(self.waits) or self.waits[following] > readers[-1]


def _rewritten(record: Record, originals: dict[int, int]) -> list[Record]:
    """Return a record with its operands replaced; of a copy what is left of it."""
    entries = [
        originals.get(entry, entry) if role & (USED | DEFINED | PREDICATE) == USED else entry
        for entry, role in zip(record.entries, record.roles, strict=True)
    ]
    roles = [
        CONSTANT if role == USED and entry < 0 else role for entry, role in zip(entries, record.roles, strict=True)
    ]
    if record.operation != "mov" or record.type == "pred":
        return [replace(record, entries=entries, roles=roles)]
    half = len(entries) // 2
    pairs = [
        (target, source, role)
        for target, source, role in zip(entries[:half], entries[half:], roles[half:], strict=True)
        if target not in originals
    ]
    if len(pairs) == half:
        return [replace(record, entries=entries, roles=roles)]
    return [
        replace(record, type="b32", entries=[target, source], roles=[DEFINED, role]) for target, source, role in pairs
    ]
