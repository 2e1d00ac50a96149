"""The instructions that random programs are made of."""

from __future__ import annotations

import struct
from functools import cache
from typing import Final

from . import data

REGISTERS: Final = {"r": 6, "f": 5, "d": 3, "h": 2, "p": 3}
IMMEDIATES: Final = ("0", "1", "-1", "7", "31", "32", "0x7fffffff", "0x80000000", "0xff00ff", "12345")
FLOATS: Final = (1.0, 0.5, -2.0, 3.0, 0.1, 65504.0, -1e-3, 16777216.0)

# Capital letters are results, small ones operands: R, r 32 bits, F, f float32, D, d 64 bits, H, h 16 bits, P, p
# predicates; i: a 32-bit register or a number, g: a float or a number; #n: a number below n. The operands of one letter
# differ where "!" ends the line: a minimum of a NaN and itself might be taken for a move.
TABLE: Final = """
add.s32 R r i|sub.s32 R r i|mul.lo.s32 R r i|mul.hi.s32 R r i|mul.hi.u32 R r i|mad.lo.s32 R r i r|mad.hi.u32 R r r r
mad.hi.s32 R r r i|min.s32 R r i|max.s32 R r i|min.u32 R r i|max.u32 R r i|add.sat.s32 R r i|sub.sat.s32 R r i
neg.s32 R r|abs.s32 R r|not.b32 R r|cnot.b32 R r|popc.b32 R r|clz.b32 R r|brev.b32 R r|bfind.u32 R r|bfind.s32 R r
bfind.shiftamt.u32 R r|and.b32 R r i|or.b32 R r i|xor.b32 R r i|shl.b32 R r i|shr.u32 R r i|shr.s32 R r i
shl.b32 R r #33|shr.s32 R r #33|shf.l.wrap.b32 R r r i|shf.r.wrap.b32 R r r i|shf.l.clamp.b32 R r r i
shf.r.clamp.b32 R r r i|bfe.u32 R r #40 #40|bfe.s32 R r #40 #40|bfe.s32 R r r r|bfi.b32 R r r #40 #40
bfi.b32 R r r r r|prmt.b32 R r r i|prmt.b32 R r r #65536|lop3.b32 R r r r #256|lop3.b32 R r r i #256|sad.s32 R r r r
sad.u32 R r r r|selp.b32 R r i p|set.lt.u32.s32 R r i|set.gtu.u32.f32 R f g|set.ge.f32.s32 F r i|mul.wide.s32 D r i
mul.wide.u32 D r i|mad.wide.s32 D r r d|mad.wide.u32 D r i d|add.s64 D d d|sub.s64 D d d|mul.lo.s64 D d d
mul.hi.u64 D d d|mul.hi.s64 D d d|mad.lo.s64 D d d d|min.s64 D d d|max.u64 D d d|neg.s64 D d|abs.s64 D d|and.b64 D d d
or.b64 D d d|xor.b64 D d d|not.b64 D d|shl.b64 D d #70|shr.u64 D d r|shr.s64 D d #70|popc.b64 R d|clz.b64 R d
brev.b64 D d|bfind.s64 R d|bfe.u64 D d #70 #70|bfe.s64 D d #70 #70|bfi.b64 D d d #70 #70|selp.b64 D d d p
mov.b64 D {r,r}|cvt.u32.u64 R d|cvt.s64.s32 D r|cvt.u64.u32 D r|cvt.sat.s32.s64 R d|cvt.sat.u32.s32 R r|add.s16 H h h
sub.s16 H h h|mul.lo.s16 H h h|mul.hi.u16 H h h|min.s16 H h h|max.u16 H h h|and.b16 H h h|xor.b16 H h h|not.b16 H h
shl.b16 H h #18|shr.s16 H h #18|mul.wide.s16 R h h|mul.wide.u16 R h h|mad.lo.s16 H h h h|cvt.u16.u32 H r
cvt.s32.s16 R h|cvt.u32.u16 R h|cvt.s32.s8 R r|cvt.u32.u8 R r|cvt.sat.s16.s32 H r|cvt.sat.u8.s32 R r|mov.b32 R {h,h}
add.rn.f32 F f g|sub.rn.f32 F f g|mul.rn.f32 F f g|fma.rn.f32 F f f g|fma.rn.f32 F f g f|add.rz.f32 F f g
mul.rz.f32 F f f|fma.rz.f32 F f f f|add.rm.f32 F f f|add.rp.f32 F f f|mul.rm.f32 F f f|mul.rp.f32 F f g
fma.rm.f32 F f f f|fma.rp.f32 F f f f|sub.rm.f32 F f f|add.rn.ftz.f32 F f f|mul.rn.ftz.f32 F f f
fma.rn.ftz.f32 F f f f|add.rn.sat.f32 F f f|fma.rn.sat.f32 F f f f|mul.rn.sat.f32 F f g|min.f32 F f f !
max.f32 F f f !|min.NaN.f32 F f f !|max.NaN.f32 F f f !|min.ftz.f32 F f f !|max.f32 F f g|neg.f32 F f|abs.f32 F f
selp.f32 F f f p|rcp.rn.f32 F f|div.rn.f32 F f f|sqrt.rn.f32 F f|cvt.rni.f32.f32 F f|cvt.rzi.f32.f32 F f
cvt.rmi.f32.f32 F f|cvt.rpi.f32.f32 F f|cvt.sat.f32.f32 F f|cvt.rn.f32.s32 F r|cvt.rn.f32.u32 F r|cvt.rz.f32.s32 F r
cvt.rp.f32.u32 F r|cvt.rn.f32.s64 F d|cvt.rzi.s32.f32 R f|cvt.rni.s32.f32 R f|cvt.rmi.s32.f32 R f|cvt.rpi.u32.f32 R f
cvt.rzi.u32.f32 R f|cvt.rzi.s64.f32 D f|cvt.rn.f16.f32 H f|cvt.rz.f16.f32 H f|cvt.rn.bf16.f32 H f
cvt.rn.relu.bf16.f32 H f|cvt.f32.f16 F h|cvt.f32.bf16 F h|cvt.rn.f16x2.f32 R f f|cvt.rn.bf16x2.f32 R f f
cvt.rz.bf16x2.f32 R f f|cvt.rn.relu.f16x2.f32 R f f|cvt.rn.satfinite.e4m3x2.f32 H f f
cvt.rn.satfinite.e5m2x2.f32 H f f|cvt.rn.f16x2.e4m3x2 R h|cvt.rn.f16x2.e5m2x2 R h|cvt.rn.satfinite.e4m3x2.f16x2 H r
cvt.rna.tf32.f32 R f|add.rn.f16x2 R r r|sub.rn.f16x2 R r r|mul.rn.f16x2 R r r|fma.rn.f16x2 R r r r
fma.rn.relu.f16x2 R r r r|min.f16x2 R r r !|max.NaN.f16x2 R r r !|add.rn.bf16x2 R r r|mul.rn.bf16x2 R r r
fma.rn.bf16x2 R r r r|max.bf16x2 R r r !|min.NaN.bf16x2 R r r !|add.rn.f16 H h h|mul.rn.f16 H h h|fma.rn.f16 H h h h
fma.rn.bf16 H h h h|setp.lt.s32 P r i|setp.ge.u32 P r i|setp.eq.s32 P r i|setp.ne.s64 P d d|setp.lt.u64 P d d
setp.gt.s16 P h h|setp.lt.f32 P f g|setp.geu.f32 P f f|setp.nan.f32 P f f|setp.neu.f32 P f g|setp.le.ftz.f32 P f f
setp.gt.f16 P h h|setp.ltu.bf16 P h h|setp.lt.and.s32 P r i p|setp.gt.or.f32 P f f p|setp.ne.xor.u32 P r i p
and.pred P p p|or.pred P p p|xor.pred P p p|not.pred P p|testp.finite.f32 P f|testp.subnormal.f32 P f
"""

# Several instructions; the letters are chosen once. %w, %x0, %g, %pn are free in them.
SEQUENCES: Final = (
    ("div.s32", "and.b32 %x0, {r1}, 0x7fff; or.b32 %x0, %x0, 1; div.s32 {R}, {r}, %x0;"),
    ("rem.u32", "or.b32 %x0, {r1}, 1; rem.u32 {R}, {r}, %x0;"),
    ("div.u64", "or.b64 %w0, {d1}, 1; div.u64 {D}, {d}, %w0;"),
    ("mov float bits", "setp.nan.f32 %pn, {f}, {f}; mov.b32 {R}, {f}; @%pn mov.b32 {R}, 0x7fffffff;"),
    ("mov int bits", "and.b32 %x0, {r}, 0xbfffffff; mov.b32 {F}, %x0;"),
    ("add.f64", "cvt.f64.f32 %w0, {f}; cvt.f64.f32 %w1, {f1}; add.rn.f64 %w0, %w0, %w1; cvt.rn.f32.f64 {F}, %w0;"),
    ("fma.f64", "cvt.f64.f32 %w0, {f}; cvt.f64.f32 %w1, {f1}; fma.rz.f64 %w0, %w0, %w1, %w1; cvt.rz.f32.f64 {F}, %w0;"),
    ("mov unpack", "mov.b32 {{{H}, %g}}, {r}; mov.b32 {R}, {{%g, {H}}};"),
    ("mov.b64 unpack", "mov.b64 {{%x0, %x1}}, {d}; xor.b32 {R}, %x0, %x1;"),
    ("shfl.bfly", "shfl.sync.bfly.b32 {R}, {r}, {n}, 31, 0xffffffff;"),
    ("shfl.up", "shfl.sync.up.b32 {R}|{P}, {r}, {n}, 0, 0xffffffff;"),
    ("shfl.down", "shfl.sync.down.b32 {R}|{P}, {r}, {n}, 0x181f, 0xffffffff;"),
    ("shfl.idx", "shfl.sync.idx.b32 {R}, {r}, {r1}, 31, 0xffffffff;"),
    ("shfl float", "shfl.sync.bfly.b32 {F}, {f}, {n}, 31, 0xffffffff;"),
    ("vote.ballot", "vote.sync.ballot.b32 {R}, {p}, 0xffffffff;"),
    ("vote.any", "vote.sync.any.pred {P}, {p}, 0xffffffff;"),
    ("redux.add", "redux.sync.add.s32 {R}, {r}, 0xffffffff;"),
    ("redux.max", "redux.sync.max.u32 {R}, {r}, 0xffffffff;"),
    ("match.any", "match.any.sync.b32 {R}, {r}, 0xffffffff;"),
)


class Choice:
    """Random numbers of a program."""

    def __init__(self, seed: int) -> None:
        self.numbers = iter(data.words(1000 + seed, 1024).tolist())

    def below(self, n: int) -> int:
        return next(self.numbers) * n >> 32

    def register(self, kind: str, but: str = "") -> str:
        while (name := f"%{kind}{self.below(REGISTERS[kind])}") == but:
            pass
        return name


@cache
def instructions() -> tuple[str, ...]:
    return tuple(entry for line in TABLE.split("\n") for entry in line.split("|") if entry)


def operand(choice: Choice, letter: str, but: str) -> str:
    if letter.startswith("#"):
        return str(choice.below(int(letter[1:])))
    if letter.startswith("{"):
        return "{" + ", ".join(choice.register(kind) for kind in letter[1:-1].split(",")) + "}"
    if letter in "ig" and choice.below(4) == 0:
        if letter == "i":
            return IMMEDIATES[choice.below(len(IMMEDIATES))]
        return "0f" + struct.pack(">f", FLOATS[choice.below(len(FLOATS))]).hex().upper()
    return choice.register({"i": "r", "g": "f"}.get(letter, letter.lower()), but)


# ptxas forgets the guard of these (13.0 at every level of optimisation), and tf32 shows the payload of a NaN.
UNGUARDED: Final = ("testp.", "set.ge.f32.", "cvt.rna.tf32.")


def guarded(choice: Choice, text: str) -> str:
    guard = f"@{'!' * choice.below(2)}{choice.register('p')} " if choice.below(7) == 0 else ""
    return text if text.startswith(UNGUARDED) else guard + text


def instruction(choice: Choice) -> tuple[str, str]:
    """A random instruction: its spelling, for diagnosis, and its text."""
    table = instructions()
    index = choice.below(len(table) + 2 * len(SEQUENCES))
    if index < len(table):
        spelling, *letters = table[index].split()
        distinct = letters[-1] == "!"
        operands: list[str] = []
        for letter in letters[: len(letters) - distinct]:
            last = operands[-1] if distinct and len(operands) > 1 else ""
            operands.append(operand(choice, letter, last))
        text = guarded(choice, f"{spelling} {', '.join(operands)};")
        if spelling == "cvt.rna.tf32.f32":
            text = f"setp.nan.f32 %pn, {operands[1]}, {operands[1]}; {text} @%pn mov.b32 {operands[0]}, 0x7fffffff;"
        return spelling, text
    spelling, text = SEQUENCES[(index - len(table)) // 2]
    names = {kind.upper(): choice.register(kind) for kind in REGISTERS}
    names |= {kind: choice.register(kind) for kind in REGISTERS}
    names |= {f"{kind}1": choice.register(kind, names[kind]) for kind in REGISTERS}
    return spelling, text.format(n=choice.below(32), **names)
