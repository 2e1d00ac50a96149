"""The flow of control between records, and which rows are live where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from cupyfa.emulator.builder import DEFINED, PREDICATE, USED, Record

__all__ = ["ELEMENTWISE", "Flow"]

#: Operations that compute each lane's result from the same lane's operands alone, so that a result of one row may take
#: the row of an operand that is read for the last time. Others may have written before they have read all.
ELEMENTWISE: Final = frozenset(
    """
    mov pack16 pack8 selp add sub mul_lo mul_hi div rem min max mad_lo mad_hi neg abs not_ cnot popc clz brev bfind
    and_ or_ xor_ shl shr shf bfe bfi prmt lop3 sad mul fma min3 max3 rcp sqrt rsqrt ex2 lg2 sin cos tanh copysign set
    cvt cvt_pack
    """.split()  # noqa: SIM905
)
_ENDS: Final = frozenset(("exit", "trap", "brx"))


class Flow:
    """Basic blocks of records, and the rows that are live at their borders.

    Parameters
    ----------
    records : sequence of Record
        With `targets` that count records.

    Attributes
    ----------
    definitions, uses : list of tuple
        The rows that each record writes and reads.
    in_place : list of bool
        Whether the record's result may take the row of an operand.
    blocks : list of range
        The records of each block.
    block_of : list of int
        The block of each record.
    bit : dict
        The rows that a block does not keep to itself, and their bits in the live sets.
    live_in, live_out : list of int
        Of each block.

    Notes
    -----
    A lane has its own program counter and its own slot in every row, so that what is live along a lane's path is what
    counts: divergence needs no care. A guarded write leaves the row alone in some lanes, so it ends no live range.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.definitions: list[tuple[int, ...]] = []
        self.uses: list[tuple[int, ...]] = []
        self.in_place: list[bool] = []
        for record in records:
            entries = list(zip(record.entries, record.roles, strict=True))
            written = tuple([row for row, role in entries if role & (DEFINED | PREDICATE) == DEFINED])
            self.definitions.append(written)
            self.uses.append(tuple([row for row, role in entries if role & (USED | PREDICATE) == USED]))
            self.in_place.append(len(written) == 1 and record.operation in ELEMENTWISE)
        self._find_blocks(records)
        self._find_crossing(records)
        self._solve()

    def _find_blocks(self, records: Sequence[Record]) -> None:
        count = len(records)
        starts = {0}
        for index, record in enumerate(records):
            if record.targets or record.operation in _ENDS:
                starts.update(record.targets)
                starts.add(index + 1)
        ordered = [*sorted(start for start in starts if start < count), count]
        self.blocks = [range(start, stop) for start, stop in pairwise(ordered)]
        self.block_of = [0] * count
        for number, block in enumerate(self.blocks):
            self.block_of[block.start : block.stop] = [number] * len(block)
        self.successors: list[list[int]] = []
        for number, block in enumerate(self.blocks):
            last = records[block[-1]]
            following = [self.block_of[target] for target in last.targets if target < count]
            falls_through = last.guard >= 0 or (last.operation not in _ENDS and last.operation != "bra")
            if falls_through and number + 1 < len(self.blocks):
                following.append(number + 1)
            self.successors.append(following)

    def _find_crossing(self, records: Sequence[Record]) -> None:
        """Find the rows that more than one block touches or that a block reads before it writes them."""
        home: dict[int, int] = {}
        crossing: dict[int, None] = {}
        self.exposed: list[list[int]] = []
        self.killed: list[list[int]] = []
        for number, block in enumerate(self.blocks):
            exposed: dict[int, None] = {}
            killed: set[int] = set()
            for index in block:
                guarded = records[index].guard >= 0
                for row in self.uses[index]:
                    if row not in killed:
                        exposed[row] = None
                    if home.setdefault(row, number) != number:
                        crossing[row] = None
                for row in self.definitions[index]:
                    if home.setdefault(row, number) != number:
                        crossing[row] = None
                    if not guarded:
                        killed.add(row)
            crossing.update(exposed)
            self.exposed.append(list(exposed))
            self.killed.append(list(killed))
        self.bit = {row: bit for bit, row in enumerate(crossing)}

    def _solve(self) -> None:
        """Solve the equations backwards, until nothing changes."""
        count = len(self.blocks)
        uses = [sum(1 << self.bit[row] for row in rows) for rows in self.exposed]
        kept = [~sum(1 << self.bit[row] for row in rows if row in self.bit) for rows in self.killed]
        predecessors: list[list[int]] = [[] for _ in range(count)]
        for number, following in enumerate(self.successors):
            for successor in following:
                predecessors[successor].append(number)
        self.live_in, self.live_out = [0] * count, [0] * count
        waiting = list(range(count))
        queued = [True] * count
        while waiting:
            number = waiting.pop()
            queued[number] = False
            live_out = 0
            for successor in self.successors[number]:
                live_out |= self.live_in[successor]
            self.live_out[number] = live_out
            live_in = uses[number] | (live_out & kept[number])
            if live_in != self.live_in[number]:
                self.live_in[number] = live_in
                for predecessor in predecessors[number]:
                    if not queued[predecessor]:
                        queued[predecessor] = True
                        waiting.append(predecessor)
