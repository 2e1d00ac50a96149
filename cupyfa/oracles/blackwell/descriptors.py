"""The two descriptors of a tcgen05 product, bit by bit: of the instruction and of an operand in shared memory (0x07).

Layouts follow the PTX ISA manual for sm_100a. The tests hold both against words that the reference implementation's
own PTX contains. Nothing here has executed on such a device: a descriptor that encodes is a descriptor that encodes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..violations import ContractViolation

__all__ = [
    "Dtype",
    "IllegalShape",
    "InstructionDescriptor",
    "Kind",
    "MalformedDescriptor",
    "SmemDescriptor",
    "Swizzle",
    "check_shape",
    "k_steps",
]


class IllegalShape(ContractViolation):
    """M and N that the kind of instruction and the CTA group do not offer (specification 0x07)."""


class MalformedDescriptor(ContractViolation):
    """Bits that no legal descriptor has, a Hopper descriptor among them (specification 0x07)."""


class Kind(enum.Enum):
    """``.kind`` of the instruction; the descriptor does not hold it (specification 0x07)."""

    F16 = "f16"
    TF32 = "tf32"
    F8F6F4 = "f8f6f4"
    I8 = "i8"

    @property
    def k(self) -> int:
        """Reduction length of one dense instruction: 32 bytes of operand."""
        return {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}[self.value]


class Dtype(enum.Enum):
    """Type of an operand or of the accumulator (specification 0x07)."""

    F16 = "f16"
    BF16 = "bf16"
    TF32 = "tf32"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E2M3 = "e2m3"
    E3M2 = "e3m2"
    E2M1 = "e2m1"
    U8 = "u8"
    S8 = "s8"
    F32 = "f32"
    S32 = "s32"


_OPERANDS = {
    Kind.F16: {Dtype.F16: 0, Dtype.BF16: 1},
    Kind.TF32: {Dtype.TF32: 2},
    Kind.F8F6F4: {Dtype.E4M3: 0, Dtype.E5M2: 1, Dtype.E2M3: 3, Dtype.E3M2: 4, Dtype.E2M1: 5},
    Kind.I8: {Dtype.U8: 0, Dtype.S8: 1},
}
_ACCUMULATORS = {Dtype.F16: 0, Dtype.F32: 1, Dtype.S32: 2}


def _check_kind(kind: Kind) -> None:
    if not isinstance(kind, Kind):
        raise TypeError(f"kind is {kind!r}; one of {', '.join(f'Kind.{known.name}' for known in Kind)}")


def _accumulators(kind: Kind) -> tuple[Dtype, ...]:
    if kind is Kind.I8:
        return (Dtype.S32,)
    return (Dtype.F32,) if kind is Kind.TF32 else (Dtype.F16, Dtype.F32)


def check_shape(kind: Kind, m: int, n: int, cta_group: int) -> None:
    """Refuse a shape that a dense instruction (not ``.ws``) does not have (specification 0x07).

    Parameters
    ----------
    kind : Kind
        Of the instruction.
    m : int
        Rows of the whole group: 64 or 128 for one CTA, 128 or 256 for a pair.
    n : int
        Columns: up to 256, in steps of 8 for one CTA (16 at M = 128) and of 16 for a pair; ``i8`` has steps of its own.
    cta_group : int
        1 or 2.

    Raises
    ------
    IllegalShape
        Naming the dimension.

    Examples
    --------
    >>> check_shape(Kind.F16, 256, 128, 2)
    """
    _check_kind(kind)
    if cta_group not in (1, 2):
        raise ValueError(f"check_shape: cta_group is {cta_group}; it must be 1 or 2")
    if m not in (64 * cta_group, 128 * cta_group):
        raise IllegalShape(f"M = {m} with cta_group::{cta_group}; it must be {64 * cta_group} or {128 * cta_group}")
    if kind is Kind.I8:
        small = (8, 16, 24, 32) if cta_group == 1 else (32,)
        legal = n in small or (n % (16 * cta_group) == 0 and max(small) < n <= 256)
    else:
        step = 16 if cta_group == 2 or m == 128 else 8
        legal = n % step == 0 and 0 < n <= 256
    if not legal:
        raise IllegalShape(f"N = {n} with kind::{kind.value}, M = {m}, cta_group::{cta_group}")


@dataclass(frozen=True)
class InstructionDescriptor:
    """What a product needs to know beside its addresses: types, majors, M and N.

    Attributes
    ----------
    kind : Kind
        Of the instruction. Not encoded: FP16 and E4M3 descriptors are the same bits.
    a, b : Dtype
        Operands.
    m, n : int
        M of the whole group, and N. Neither K nor the CTA group is encoded.
    d : Dtype
        Accumulator.
    a_mn_major, b_mn_major : bool
        False: K is contiguous.
    negate_a, negate_b : bool
        Sign changes.

    Examples
    --------
    >>> qk = InstructionDescriptor(Kind.F16, Dtype.BF16, Dtype.BF16, 128, 128)
    >>> hex(qk.encode())
    '0x8200490'
    >>> InstructionDescriptor.decode(0x08200490, Kind.F16) == qk
    True
    """

    kind: Kind
    a: Dtype
    b: Dtype
    m: int
    n: int
    d: Dtype = Dtype.F32
    a_mn_major: bool = False
    b_mn_major: bool = False
    negate_a: bool = False
    negate_b: bool = False

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        for name, dtype in (("a", self.a), ("b", self.b), ("d", self.d)):
            if not isinstance(dtype, Dtype):
                raise TypeError(f"InstructionDescriptor: {name} is {dtype!r}, which is no Dtype")
        for name, dtype in (("a", self.a), ("b", self.b)):
            if dtype not in _OPERANDS[self.kind]:
                raise ValueError(f"InstructionDescriptor: {name} is {dtype.value}, which kind::{self.kind.value} lacks")
        if self.d not in _accumulators(self.kind):
            raise ValueError(f"InstructionDescriptor: d is {self.d.value}, not one of kind::{self.kind.value}")
        if self.m % 16 or not 0 < self.m <= 256 or self.n % 8 or not 0 < self.n <= 256:
            raise IllegalShape(f"M = {self.m} and N = {self.n}; they are multiples of 16 and 8, up to 256")

    def encode(self) -> int:
        """Return the 32 bits."""
        operands = _OPERANDS[self.kind]
        return (
            _ACCUMULATORS[self.d] << 4
            | operands[self.a] << 7
            | operands[self.b] << 10
            | self.negate_a << 13
            | self.negate_b << 14
            | self.a_mn_major << 15
            | self.b_mn_major << 16
            | (self.n >> 3) << 17
            | (self.m >> 4) << 24
        )

    @classmethod
    def decode(cls, word: int, kind: Kind) -> InstructionDescriptor:
        """Read 32 bits.

        Parameters
        ----------
        word : int
            The descriptor of a dense, unsaturated product.
        kind : Kind
            Has to be known: the same bits mean different types.

        Returns
        -------
        InstructionDescriptor
            Such that ``encode()`` gives the word back.

        Raises
        ------
        MalformedDescriptor
            If a reserved or unmodelled bit is set, or a code has no meaning.
        """
        _check_kind(kind)
        if not 0 <= word < 2**32:
            raise MalformedDescriptor(f"{word:#x} is not a 32-bit word")
        unused = word & (0b1111 | 1 << 6 | 1 << 23 | 0b111 << 29)
        if unused:
            raise MalformedDescriptor(f"{word:#010x} has bits {unused:#x}: sparse, saturating, .ws or reserved")

        def look_up(what: str, table: dict[Dtype, int], code: int) -> Dtype:
            """Find the type of a format code."""
            for dtype, value in table.items():
                if value == code:
                    return dtype
            raise MalformedDescriptor(f"{word:#010x}: {what} format {code} does not exist in kind::{kind.value}")

        operands = _OPERANDS[kind]
        return cls(
            kind=kind,
            a=look_up("A", operands, word >> 7 & 7),
            b=look_up("B", operands, word >> 10 & 7),
            m=(word >> 24 & 0x1F) << 4,
            n=(word >> 17 & 0x3F) << 3,
            d=look_up("D", {d: _ACCUMULATORS[d] for d in _accumulators(kind)}, word >> 4 & 3),
            a_mn_major=bool(word >> 15 & 1),
            b_mn_major=bool(word >> 16 & 1),
            negate_a=bool(word >> 13 & 1),
            negate_b=bool(word >> 14 & 1),
        )


class Swizzle(enum.Enum):
    """Swizzle code in bits 61 to 63. Hopper's codes are two bits wide and mean something else (0x07)."""

    NONE = 0
    B128_ATOM32 = 1
    B128 = 2
    B64 = 4
    B32 = 6


#: Bits 46 to 48 of every Blackwell descriptor; a Hopper descriptor has 0 there.
_VERSION = 0b001


@dataclass(frozen=True)
class SmemDescriptor:
    """Where an operand lies in shared memory (specification 0x07).

    Attributes
    ----------
    address : int
        Start, in bytes, a multiple of 16. The CTA's rank (bits 24 and up) is not encoded, so that one value names the
        same place in both CTAs of a pair.
    lbo, sbo : int
        Leading and stride byte offsets, multiples of 16 below 2**18. What they mean depends on major and swizzle.
    swizzle : Swizzle
        Pattern.
    base_offset : int
        ``(pattern start >> 7) & 7``; 0 for a tile that starts with its pattern.
    lbo_absolute : bool
        Always False on sm_100a.

    Examples
    --------
    >>> q = SmemDescriptor(address=0x11000, lbo=16, sbo=1024, swizzle=Swizzle.B128)
    >>> f"{q.encode():#018x}"
    '0x4000404000011100'
    >>> SmemDescriptor.decode(q.encode()) == q
    True
    """

    address: int
    lbo: int
    sbo: int
    swizzle: Swizzle
    base_offset: int = 0
    lbo_absolute: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.swizzle, Swizzle):
            raise TypeError(f"SmemDescriptor: {self.swizzle!r} is no Swizzle; a width such as 128 is not a mode")
        for name in ("address", "lbo", "sbo"):
            value = getattr(self, name)
            if value < 0 or value % 16 or (name != "address" and value >= 2**18):
                raise ValueError(f"SmemDescriptor: {name} is {value:#x}; it must be a multiple of 16 below 2**18")
        if not 0 <= self.base_offset < 8:
            raise ValueError(f"SmemDescriptor: base_offset is {self.base_offset}; it has 3 bits")

    def encode(self) -> int:
        """Return the 64 bits."""
        return (
            (self.address & 0x3FFFF) >> 4
            | self.lbo >> 4 << 16
            | self.sbo >> 4 << 32
            | _VERSION << 46
            | self.base_offset << 49
            | self.lbo_absolute << 52
            | self.swizzle.value << 61
        )

    @classmethod
    def decode(cls, word: int) -> SmemDescriptor:
        """Read 64 bits.

        Parameters
        ----------
        word : int
            The descriptor.

        Returns
        -------
        SmemDescriptor
            With the address inside one CTA.

        Raises
        ------
        MalformedDescriptor
            If the constant field is not 001, a reserved bit is set, or the swizzle code does not exist.
        """
        if not 0 <= word < 2**64:
            raise MalformedDescriptor(f"{word:#x} is not a 64-bit word")
        if word >> 46 & 7 != _VERSION:
            raise MalformedDescriptor(f"{word:#018x}: bits 46 to 48 are {word >> 46 & 7:03b}, not 001 (Hopper's: 000)")
        if word & (0b11 << 14 | 0b11 << 30 | 0xFF << 53):
            raise MalformedDescriptor(f"{word:#018x} has a reserved bit set")
        code = word >> 61
        if code not in {swizzle.value for swizzle in Swizzle}:
            raise MalformedDescriptor(f"{word:#018x}: swizzle code {code} does not exist")
        return cls(
            address=(word & 0x3FFF) << 4,
            lbo=(word >> 16 & 0x3FFF) << 4,
            sbo=(word >> 32 & 0x3FFF) << 4,
            swizzle=Swizzle(code),
            base_offset=word >> 49 & 7,
            lbo_absolute=bool(word >> 52 & 1),
        )


def k_steps(start: SmemDescriptor, k: int, kind: Kind, *, mn_major: bool, rows: int) -> list[int]:
    """Descriptors of the instructions that walk along K through one operand tile (specification 0x07).

    Parameters
    ----------
    start : SmemDescriptor
        Of the tile's first element; its swizzle says how wide a row is.
    k : int
        Reduction length of the tile.
    kind : Kind
        Decides how much of it one instruction takes.
    mn_major : bool
        False: a step is 32 bytes along the row, and a new panel of `rows` rows begins after each row's width. True: a
        step is the ``kind.k`` rows that it takes.
    rows : int
        Rows of the tile, used if it is K-major.

    Returns
    -------
    list of int
        One encoded descriptor per instruction.

    Examples
    --------
    >>> q = SmemDescriptor(address=0x11000, lbo=16, sbo=1024, swizzle=Swizzle.B128)
    >>> [f"{word & 0xFFFF:04x}" for word in k_steps(q, 128, Kind.F16, mn_major=False, rows=128)]
    ['1100', '1102', '1104', '1106', '1500', '1502', '1504', '1506']
    """
    width = {Swizzle.B128: 128, Swizzle.B64: 64, Swizzle.B32: 32}.get(start.swizzle)
    if width is None:
        raise ValueError(f"k_steps: swizzle {start.swizzle.name} is not modelled")
    _check_kind(kind)
    if rows < 1:
        raise ValueError(f"k_steps: a tile of {rows} rows")
    if k <= 0 or k % kind.k:
        raise ValueError(f"k_steps: K = {k} is not a multiple of {kind.k}, which one kind::{kind.value} takes")
    words = []
    for step in range(k // kind.k):
        panel, byte = divmod(32 * step, width)
        offset = step * kind.k * width if mn_major else panel * rows * width + byte
        words.append(SmemDescriptor(start.address + offset, start.lbo, start.sbo, start.swizzle).encode())
    return words
