"""Which registers share a row of the register file."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from cupyfa.emulator import isa
from cupyfa.emulator.builder import DEFINED, PREDICATE, USED, Builder, Record
from cupyfa.emulator.copies import forward_copies
from cupyfa.emulator.flow import Flow

__all__ = ["Allocation", "allocate", "own_rows", "share_rows"]


@dataclass
class Allocation:
    """Records with rows of the register file, and the rows of the special registers with their numbers."""

    records: list[Record]
    rows: int
    specials: tuple[tuple[int, int], ...]


def allocate(builder: Builder, first: Sequence[int], optimise: bool) -> Allocation:
    """Return the records with their rows and branch targets.

    Parameters
    ----------
    builder : Builder
        With the records of an entry.
    first : sequence of int
        The first record of each statement.
    optimise : bool
        Share rows and drop copies; without it each register has rows of its own.
    """
    records = builder.records
    for record in records:
        record.targets = tuple([first[target] for target in record.targets])
    specials = list(builder.specials.items())
    rows = builder.rows
    if optimise:
        own = own_rows(records)
        records = forward_copies(records, own)
        place = share_rows(records, [row for _, row in specials], own)
        rows = max(place.values(), default=-1) + 1
        for record in records:
            record.entries = [
                place[entry] if role & (USED | DEFINED) and not role & PREDICATE else entry
                for entry, role in zip(record.entries, record.roles, strict=True)
            ]
        specials = [(name, place[row]) for name, row in specials]
    for record in records:
        if record.operation == "bra":
            record.imm = record.targets[0]
        elif record.targets:
            record.entries[-len(record.targets) :] = record.targets
    return Allocation(records, rows, tuple([(row, isa.SPECIALS[name]) for name, row in specials]))


def own_rows(records: Sequence[Record]) -> set[int]:
    """Return the rows that asynchronous operations read or write after their issue.

    Parameters
    ----------
    records : sequence of Record
        Of the whole kernel.
    """
    own: set[int] = set()
    for record in records:
        if record.operation == "wgmma":
            written = sum(bool(role & DEFINED) for role in record.roles)
            # The accumulators, and A where it is in registers; descriptors are read at issue.
            operands = record.entries[: written + (4 if record.attr[0] else 0)]
            own.update(row for row in operands if row >= 0)
        elif record.operation == "tc_ld":
            entries = zip(record.entries, record.roles, strict=True)
            own.update(row for row, role in entries if role & (DEFINED | PREDICATE) == DEFINED)
    return own


def share_rows(records: Sequence[Record], specials: Sequence[int], own: set[int]) -> dict[int, int]:
    """Return the row of the register file for each row of the records.

    Parameters
    ----------
    records : sequence of Record
        With `targets` that count records.
    specials : sequence of int
        Rows that are filled at launch: nobody shares them.
    own : set of int
        Rows that nobody else may share.

    Notes
    -----
    Rows that more than one block knows are coloured by interference. The others fill the gaps: within each block, in
    one pass, with rows that nothing else uses at any point of that block.
    """
    flow = Flow(records)
    reserved = dict.fromkeys(specials)
    reserved.update(dict.fromkeys(sorted(own)))
    place = {row: number for number, row in enumerate(reserved)}
    crossing = [row for row in flow.bit if row not in place]
    first_shared = len(place)
    place.update(_colour(records, flow, crossing, first_shared))
    _fill_gaps(flow, place, first_shared)
    return place


def _colour(records: Sequence[Record], flow: Flow, crossing: list[int], first_shared: int) -> dict[int, int]:
    """Return rows for those that cross blocks: two never share if one is written while the other is live."""
    conflicts = _interference(records, flow, crossing)
    members: list[int] = []
    conflicting: list[int] = []
    place = {}
    for row in crossing:
        bit, mine = flow.bit[row], conflicts[row]
        for colour, member in enumerate(members):
            # Conflicts are noted at the side of the one that is written.
            if not (member & mine or conflicting[colour] >> bit & 1):
                break
        else:
            colour = len(members)
            members.append(0)
            conflicting.append(0)
        members[colour] |= 1 << bit
        conflicting[colour] |= mine
        place[row] = first_shared + colour
    return place


def _interference(records: Sequence[Record], flow: Flow, crossing: list[int]) -> dict[int, int]:
    """Return for each row what is live after any write of it."""
    conflicts = dict.fromkeys(crossing, 0)
    bits = flow.bit
    for number, block in enumerate(flow.blocks):
        live = flow.live_out[number]
        for index in reversed(block):
            written, read = flow.definitions[index], flow.uses[index]
            beside = live
            if not flow.in_place[index]:
                for row in read:
                    if row in bits:
                        beside |= 1 << bits[row]
            for row in written:
                if row in conflicts:
                    conflicts[row] |= beside & ~(1 << bits[row])
            if records[index].guard < 0:
                for row in written:
                    if row in bits:
                        live &= ~(1 << bits[row])
            for row in read:
                if row in bits:
                    live |= 1 << bits[row]
    return conflicts


def _fill_gaps(flow: Flow, place: dict[int, int], first_shared: int) -> None:
    """Give rows to those that only one block knows."""
    of_bit = list(flow.bit)
    for number, block in enumerate(flow.blocks):
        taken = _taken(flow, number, block, place, of_bit)
        last: dict[int, int] = {}
        for index in block:
            for row in (*flow.uses[index], *flow.definitions[index]):
                if row not in place:
                    last[row] = index
        free: list[int] = []
        unused = first_shared
        for index in block:
            ending = [row for row in dict.fromkeys(flow.uses[index]) if last.get(row) == index and row in place]
            if flow.in_place[index]:
                for row in ending:
                    heapq.heappush(free, place[row])
            for row in dict.fromkeys(flow.definitions[index]):
                if row in place:
                    continue
                if free:
                    place[row] = heapq.heappop(free)
                else:
                    while unused in taken:
                        unused += 1
                    place[row] = unused
                    unused += 1
                if last[row] == index:
                    ending.append(row)
                    if flow.in_place[index]:
                        heapq.heappush(free, place[row])
            if not flow.in_place[index]:
                for row in ending:
                    heapq.heappush(free, place[row])


def _taken(flow: Flow, number: int, block: range, place: dict[int, int], of_bit: list[int]) -> set[int]:
    """Return the rows that a block's own values must leave alone: what lives through it, or occurs in it."""
    live = flow.live_in[number]
    taken = set()
    while live:
        lowest = live & -live
        taken.add(place[of_bit[lowest.bit_length() - 1]])
        live ^= lowest
    for index in block:
        for row in (*flow.uses[index], *flow.definitions[index]):
            if row in flow.bit:
                taken.add(place[row])
    return taken
