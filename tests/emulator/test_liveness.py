"""Sharing of rows and removal of copies: random programs compute the same, and nobody shares an asynchronous row."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from emulator.ptx_text import decoded

from cupyfa.emulator import isa
from cupyfa.emulator.builder import DEFINED, USED, Record
from cupyfa.emulator.decode import Program
from cupyfa.emulator.flow import ELEMENTWISE, Flow
from cupyfa.emulator.liveness import own_rows, share_rows

_NAMES = {number: name for name, number in isa.OPERATIONS.items()}
_POISON = 0xDEADBEEF
_MASK = 0xFFFFFFFF


class Lane:
    """One lane: as much of the machine as the random programs need.

    A tcgen05.ld lands late: until the wait its registers are poisoned, and what it loads is a function of the address.
    Loads without an address that was loaded before the wait therefore show every mistake in who owns a row.
    """

    def __init__(self, program: Program, inputs: list[int]) -> None:
        self.program = program
        self.rows = [_POISON] * program.rows
        self.predicates = [True] + [False] * (program.predicates - 1)
        self.inputs = inputs
        self.stores: list[tuple[int, int]] = []
        self.in_flight: list[tuple[int, int]] = []

    def row(self, entry: int) -> int:
        return self.rows[entry] if entry >= 0 else int(self.program.constants[~entry])

    def predicate(self, entry: int) -> bool:
        return self.predicates[entry & ~isa.NEGATED] != bool(entry & isa.NEGATED)

    def run(self) -> list[tuple[int, int]]:
        """Execute; return what was stored where."""
        code, counter, steps = self.program.code, 0, 0
        while True:
            steps += 1
            assert steps < 20000, "the program does not end"
            record = code[counter]
            counter += 1
            guard = int(record["guard"])
            if guard >= 0 and self.predicates[guard] == bool(record["guard_negated"]):
                continue
            name = _NAMES[int(record["operation"])]
            if name == "exit":
                return self.stores
            if name == "bra":
                counter = int(record["imm"])
                continue
            start = int(record["operands"])
            self.step(name, self.program.pool[start : start + int(record["operand_count"])].tolist(), record)

    def step(self, name: str, entries: list[int], record: object) -> None:
        half = len(entries) // 2
        rows = self.rows
        if name == "mov":
            # One row after the other, as the machine may: overlapping rows would show.
            for target, source in zip(entries[:half], entries[half:], strict=True):
                rows[target] = self.row(source)
        elif name == "add" and len(entries) == 3:
            rows[entries[0]] = self.row(entries[1]) + self.row(entries[2]) & _MASK
        elif name == "add":
            # The low row is written before the high rows are read.
            total = self.row(entries[2]) + self.row(entries[4])
            rows[entries[0]] = total & _MASK
            rows[entries[1]] = self.row(entries[3]) + self.row(entries[5]) + (total >> 32) & _MASK
        elif name == "selp":
            rows[entries[0]] = self.row(entries[1] if self.predicate(entries[3]) else entries[2])
        elif name == "setp":
            self.predicates[entries[0]] = self.row(entries[2]) < self.row(entries[3])
        elif name == "ld":
            rows[entries[0]] = self.inputs[entries[3] // 4]
        elif name == "st":
            self.stores.append((entries[2], self.row(entries[3])))
        elif name == "tc_ld":
            for index, target in enumerate(entries[:2]):
                rows[target] = _POISON
                self.in_flight.append((target, self.row(entries[3]) * 7 + index & _MASK))
        elif name == "tc_wait":
            for target, value in self.in_flight:
                rows[target] = value
            self.in_flight.clear()
        else:
            raise AssertionError(name)


class Generator:
    """Random structured programs that define each register before they read it.

    Variables (a few, written anywhere, guarded too) and temporaries (written once, as compilers do) are mixed, with
    packs and unpacks between them.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.temporaries = self.labels = self.stores = self.loops = 0
        self.words = [f"%v{index}" for index in range(5)]
        self.pairs = ["%d0", "%d1"]

    def text(self) -> str:
        for index, name in enumerate(self.words):
            self.lines.append(f"ld.param.u32 {name}, [in+{4 * index}];")
        for index, name in enumerate(self.pairs):
            self.lines.append(f"mov.b64 {name}, {{%v{index}, %v{index + 1}}};")
        self.sequence(list(self.words), list(self.pairs), 3)
        for name in self.words:
            self.store(name)
        head = f".reg .b32 %v<5>, %t<{self.temporaries + 1}>, %i<{self.loops + 1}>; .reg .b64 %d<2>, "
        head += f"%w<{self.temporaries + 1}>; .reg .pred %p<4>;"
        return "\n".join([head, *self.lines, "ret;"])

    def fresh(self, letter: str) -> str:
        self.temporaries += 1
        return f"%{letter}{self.temporaries}"

    def store(self, name: str) -> None:
        self.lines.append(f"st.global.u32 [{4 * self.stores}], {name};")
        self.stores += 1

    def sequence(self, words: list[str], pairs: list[str], depth: int) -> None:
        for _ in range(self.random.randrange(3, 9)):
            choice = self.random.random()
            if choice < 0.12 and depth:
                self.branch(words, pairs, depth)
            elif choice < 0.2 and depth:
                self.loop(words, pairs, depth)
            else:
                self.statement(words, pairs)

    def branch(self, words: list[str], pairs: list[str], depth: int) -> None:
        self.labels += 1
        label = self.labels
        self.lines.append(f"setp.lt.u32 %p0, {self.word(words)}, {self.word(words)};\n@%p0 bra ELSE{label};")
        self.sequence(list(words), list(pairs), depth - 1)
        self.lines.append(f"bra.uni END{label};\nELSE{label}:")
        if self.random.random() < 0.7:
            self.sequence(list(words), list(pairs), depth - 1)
        self.lines.append(f"END{label}:")

    def loop(self, words: list[str], pairs: list[str], depth: int) -> None:
        self.labels += 1
        self.loops += 1
        label, counter = self.labels, f"%i{self.loops}"
        self.lines.append(f"mov.u32 {counter}, 0;\nLOOP{label}:")
        self.sequence(list(words), list(pairs), depth - 1)
        self.lines.append(f"add.s32 {counter}, {counter}, 1;\nsetp.lt.u32 %p1, {counter}, 3;\n@%p1 bra LOOP{label};")

    def word(self, words: list[str]) -> str:
        return str(self.random.randrange(100)) if self.random.random() < 0.1 else self.random.choice(words)

    def target(self, names: list[str], letter: str) -> str:
        """A variable, or a new temporary that later statements of this scope may read."""
        if self.random.random() < 0.4:
            return self.random.choice(self.words if letter == "t" else self.pairs)
        name = self.fresh(letter)
        names.append(name)
        return name

    def statement(self, words: list[str], pairs: list[str]) -> None:
        random = self.random
        a, b = self.word(words), self.word(words)
        kind = random.choice(
            ("mov", "mov", "add", "selp", "pack", "unpack", "half", "wide", "move", "guard", "store", "load")
        )
        if kind == "mov":
            self.lines.append(f"mov.b32 {self.target(words, 't')}, {a};")
        elif kind == "add":
            self.lines.append(f"add.s32 {self.target(words, 't')}, {a}, {b};")
        elif kind == "selp":
            self.lines.append(f"setp.lt.u32 %p2, {a}, {b};\nselp.b32 {self.target(words, 't')}, {a}, {b}, !%p2;")
        elif kind == "pack":
            self.lines.append(f"mov.b64 {self.target(pairs, 'w')}, {{{a}, {b}}};")
        elif kind == "unpack":
            source, both = random.choice(pairs), random.sample(self.words, 2)
            if random.random() < 0.6:
                both = [self.fresh("t"), self.fresh("t")]
                words += both
            self.lines.append(f"mov.b64 {{{both[0]}, {both[1]}}}, {source};")
        elif kind == "half":
            self.lines.append(f"mov.b64 {{_, {self.target(words, 't')}}}, {random.choice(pairs)};")
        elif kind == "wide":
            x, y = random.choice(pairs), random.choice(pairs)
            self.lines.append(f"add.s64 {self.target(pairs, 'w')}, {x}, {y};")
        elif kind == "move":
            x = random.choice(pairs)
            self.lines.append(f"mov.b64 {self.target(pairs, 'w')}, {x};")
        elif kind == "guard":
            self.lines.append(f"setp.lt.u32 %p3, {a}, {b};\n@%p3 add.s32 {random.choice(self.words)}, {b}, 5;")
        elif kind == "store":
            self.store(random.choice(words))
        else:
            self.load(words, pairs)

    def load(self, words: list[str], pairs: list[str]) -> None:
        """A load from tensor memory, work that does not touch it, and the wait; into variables now and then."""
        targets = [self.fresh("t"), self.fresh("t")]
        if self.random.random() < 0.3:
            targets = self.random.sample(self.words[3:], 2)
        self.lines.append(
            f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {{{targets[0]}, {targets[1]}}}, [{self.word(words)}];"
        )
        others = [name for name in words if name not in targets]
        hidden, self.words = self.words, [name for name in self.words if name not in targets]
        for _ in range(self.random.randrange(4)):
            before = len(others)
            self.statement_without_load(others, pairs)
            words += others[before:]
        self.words = hidden
        self.lines.append("tcgen05.wait::ld.sync.aligned;")
        words += [name for name in targets if name not in words]

    def statement_without_load(self, words: list[str], pairs: list[str]) -> None:
        a, b = self.word(words), self.word(words)
        if self.random.random() < 0.5:
            self.lines.append(f"add.s32 {self.target(words, 't')}, {a}, {b};")
        else:
            self.lines.append(f"mov.b64 {self.target(pairs, 'w')}, {{{a}, {b}}};")


def versions(text: str) -> Iterator[Program]:
    for optimise in (False, True):
        yield decoded(text, optimise=optimise, parameters=".param .align 4 .b8 in[20]")


@pytest.mark.parametrize("seed", range(300))
def test_random_programs_compute_the_same(seed: int) -> None:
    text = Generator(seed).text()
    plain, shared = versions(text)
    assert shared.rows <= plain.rows
    assert len(shared.code) <= len(plain.code)
    for round_number in range(3):
        inputs = [random.Random(round_number).randrange(1 << (4, 8, 32)[round_number]) for _ in range(5)]
        assert Lane(plain, inputs).run() == Lane(shared, inputs).run()


def test_random_programs_share_and_lose_copies() -> None:
    """The programs above are worth something: most rows are shared and copies go."""
    plain_rows = shared_rows = copies = left = 0
    mov = isa.OPERATIONS["mov"]
    for seed in range(0, 300, 10):
        plain, shared = versions(Generator(seed).text())
        plain_rows, shared_rows = plain_rows + plain.rows, shared_rows + shared.rows
        copies += int((plain.code["operation"] == mov).sum())
        left += int((shared.code["operation"] == mov).sum())
    assert shared_rows < plain_rows * 0.75
    assert left < copies * 0.85


def test_packs_and_unpacks_of_a_chain_disappear() -> None:
    text = """
    .reg .b32 %r<8>; .reg .b64 %rd<4>;
    ld.global.v2.u32 {%r1, %r2}, [0];
    mov.b64 %rd1, {%r1, %r2};
    add.s64 %rd2, %rd1, %rd1;
    mov.b64 {%r3, %r4}, %rd2;
    mov.b32 %r5, %r4;
    st.global.v2.u32 [8], {%r3, %r5};
    """
    program = decoded(text, optimise=True)
    assert [_NAMES[number] for number in program.code["operation"].tolist()] == ["ld", "add", "st", "exit"]
    load, add, store = (program.pool[record["operands"] :].tolist() for record in program.code[:3])
    assert add[2:4] == add[4:6] == load[:2]
    assert store[3:5] == add[:2]
    assert program.text[1] == "add.s64 %rd2, %rd1, %rd1"


def test_constants_and_special_registers_are_read_where_they_are() -> None:
    text = ".reg .b32 %r<4>; mov.u32 %r1, %tid.x; mov.u32 %r2, 7; add.s32 %r3, %r1, %r2; st.global.u32 [0], %r3;"
    program = decoded(text, optimise=True)
    assert [_NAMES[number] for number in program.code["operation"].tolist()] == ["add", "st", "exit"]
    ((row, number),) = program.specials
    assert number == isa.SPECIALS["tid_x"]
    assert program.pool[1] == row
    assert program.constants[~program.pool[2]] == 7
    assert program.roles[:3].tolist() == [2, 1, 8]


WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3},"


def moves(text: str) -> int:
    return int((decoded(text, optimise=True).code["operation"] == isa.OPERATIONS["mov"]).sum())


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        # The original changes while the copy is alive.
        ("ld.global.u32 %r1, [0]; mov.b32 %r2, %r1; add.s32 %r1, %r1, 1; st.global.v2.u32 [0], {%r1, %r2};", 1),
        # ... and when it does so after the last reader.
        ("ld.global.u32 %r1, [0]; mov.b32 %r2, %r1; st.global.u32 [0], %r2; add.s32 %r1, %r1, 1;", 0),
        # Around a loop: the copy of the last round is read after the original is new.
        ("mov.b32 %r2, 0; L: ld.global.u32 %r1, [0]; st.global.u32 [0], %r2; mov.b32 %r2, %r1; bra L;", 2),
        ("L: ld.global.u32 %r1, [0]; st.global.u32 [0], %r2; mov.b32 %r2, %r1; bra L;", 1),
        # Guarded.
        ("ld.global.u32 %r1, [0]; @%p1 mov.b32 %r2, %r1; st.global.u32 [0], %r2;", 1),
        # A circle.
        ("mov.b32 %r1, %r2; mov.b32 %r2, %r1; st.global.u32 [0], %r2;", 1),
        # Half of a pair.
        ("ld.global.u32 %r1, [0]; mov.b64 %rd1, {%r1, %r1}; add.s32 %r1, %r1, 1; st.global.u64 [0], %rd1;", 1),
        # Into a register that an asynchronous operation reads.
        (f"ld.global.u32 %r1, [0]; mov.b32 %r2, %r1; {WGMMA} {{%r2, %r2, %r2, %r2}}, %rd1, 1, 1, 1, 0;", 1),
        # From tensor memory: not across a wait.
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [0]; mov.b32 %r2, %r1; st.global.u32 [0], %r2;", 0),
        (
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [0]; mov.b32 %r2, %r1; tcgen05.wait::ld.sync.aligned; "
            "st.global.u32 [0], %r2;",
            1,
        ),
    ],
)
def test_copies_that_must_stay(body: str, kept: int) -> None:
    assert moves(".reg .b32 %r<4>; .reg .f32 %f<4>; .reg .b64 %rd<2>; .reg .pred %p<2>; " + body) == kept


def records(*shapes: tuple[str, list[int], list[int]]) -> list[Record]:
    """Records as (operation, written rows, read rows)."""
    return [
        Record(name, entries=written + read, roles=[DEFINED] * len(written) + [USED] * len(read))
        for name, written, read in shapes
    ]


def test_a_result_takes_the_row_of_an_operand_only_where_that_is_safe() -> None:
    def same(name: str, written: list[int]) -> bool:
        place = share_rows(records(("ld", [0], []), (name, written, [0]), ("st", [], written)), [], set())
        return place[0] in [place[row] for row in written]

    assert same("add", [1])
    assert not same("add", [1, 2])  # two rows: the first may be written before the second is read
    assert not same("shfl", [1])
    assert set(isa.OPERATIONS) >= ELEMENTWISE


def test_asynchronous_rows_are_not_shared() -> None:
    listing = records(("tc_ld", [0, 1], []), ("ld", [2], []), ("st", [], [2]), ("ld", [3], []), ("st", [], [3]))
    shared = share_rows(listing, [], set())
    assert len({shared[row] for row in range(4)}) == 2
    place = share_rows(listing, [], own_rows(listing))
    assert len({place[row] for row in (0, 1, 2)}) == 3
    assert place[2] == place[3]

    # The same for rows that more than one block knows.
    def same_across(name: str, written: list[int]) -> bool:
        listing = records(("ld", [0], []), ("bra", [], []), (name, written, [0]), ("bra", [], []), ("st", [], written))
        for index in (1, 3):
            listing[index].guard, listing[index].targets = 1, (index + 1,)
        place = share_rows(listing, [], set())
        return place[0] in [place[row] for row in written]

    assert same_across("add", [1])
    assert not same_across("add", [1, 2])
    assert not same_across("shfl", [1])


def test_a_guarded_write_leaves_the_value_in_other_lanes() -> None:
    # 0 is written in the first block and again under a guard; between them 1 comes and goes, as in the last block.
    listing = records(("ld", [0], []), ("bra", [], []), ("ld", [1], []), ("st", [], [1]), ("ld", [0], []))
    listing += records(("bra", [], []), ("st", [], [0]), ("ld", [1], []), ("st", [], [1]))
    listing[1].guard, listing[1].targets = 1, (2,)
    listing[4].guard = 2
    listing[5].guard, listing[5].targets = 1, (6,)
    place = share_rows(listing, [], set())
    assert place[0] != place[1]


def test_rows_of_special_registers_are_not_shared() -> None:
    listing = records(("add", [1], [0]), ("bra", [], [1]), ("ld", [2], []), ("bra", [], []), ("st", [], [2]))
    for index in (1, 3):
        listing[index].guard, listing[index].targets = 1, (index + 1,)
    place = share_rows(listing, [0], set())
    assert place[0] not in (place[1], place[2])
    assert place[1] == place[2]
    program = decoded(
        ".reg .b32 %r<9>; .reg .pred %p; add.s32 %r1, %tid.x, 1; @%p bra A; A: st.global.u32 [0], %r1; @%p bra B; B: "
        + "".join(f"ld.global.u32 %r{index}, [0]; st.global.u32 [0], %r{index};" for index in range(2, 9)),
        optimise=True,
    )
    ((special, _),) = program.specials
    assert special not in program.pool[program.roles == 2]
    assert program.rows == 2


def test_own_rows() -> None:
    load = Record("tc_ld", entries=[4, 5, isa.ABSENT, 6, 0, isa.ABSENT], roles=[2, 2, 0, 1, 0, 0])
    product = Record("wgmma", attr=(1, 0, 1), entries=[0, 1, 2, 3, 10, 11, 12, 13, 20, 21], roles=[3] * 4 + [1] * 6)
    assert own_rows([load]) == {4, 5}
    assert own_rows([product]) == {0, 1, 2, 3, 10, 11, 12, 13}


def test_liveness_along_paths() -> None:
    # 0: if (p) goto 3; 1: r = ..; 2: goto 4; 3: nothing; 4: use r
    listing = records(
        ("bra", [], []), ("ld", [7], []), ("bra", [], []), ("nop", [], []), ("st", [], [7]), ("exit", [], [])
    )
    listing[0].guard, listing[0].targets = 1, (3,)
    listing[2].targets = (4,)
    flow = Flow(listing)
    assert [(block.start, block.stop) for block in flow.blocks] == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert flow.successors == [[2, 1], [3], [3], []]
    bit = 1 << flow.bit[7]
    assert [bool(live & bit) for live in flow.live_in] == [True, False, True, True]
    listing[1].guard = 2  # a guarded write ends no range
    assert Flow(listing).live_in[1]
