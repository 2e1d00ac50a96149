"""Descriptors against words of the reference implementation's own PTX, and round trips."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell.descriptors import (
    Dtype,
    IllegalShape,
    InstructionDescriptor,
    Kind,
    MalformedDescriptor,
    SmemDescriptor,
    Swizzle,
    check_shape,
    k_steps,
)

BF16 = (Kind.F16, Dtype.BF16)
E4M3 = (Kind.F8F6F4, Dtype.E4M3)
#: (kind and type), M, N, A is MN-major, B is MN-major -> word. CTA group for the shape check.
GOLDEN = [
    (BF16, 128, 128, False, False, 0x08200490, 1),  # Q K', S, dP
    (BF16, 128, 128, False, True, 0x08210490, 1),  # P V
    (BF16, 256, 128, False, False, 0x10200490, 2),
    (BF16, 256, 128, False, True, 0x10210490, 2),
    (BF16, 128, 64, False, True, 0x08110490, 1),  # P V, dV, dK at head dimension 64
    (BF16, 128, 96, False, True, 0x08190490, 1),
    (BF16, 128, 64, True, True, 0x08118490, 1),  # dQ at 64
    (BF16, 128, 128, True, True, 0x08218490, 2),  # dQ of a pair at 128
    (BF16, 256, 192, False, True, 0x10310490, 2),  # dK at 192
    (BF16, 128, 192, True, True, 0x08318490, 2),  # dQ at 192
    (BF16, 256, 256, False, True, 0x10410490, 2),
    (BF16, 128, 256, False, True, 0x08410490, 2),
    (E4M3, 128, 128, False, False, 0x08200010, 1),
    (E4M3, 256, 128, False, False, 0x10200010, 2),
    (E4M3, 128, 128, False, True, 0x08210010, 1),
    (E4M3, 256, 128, False, True, 0x10210010, 2),
    (E4M3, 128, 64, False, True, 0x08110010, 1),
]


@pytest.mark.parametrize(("types", "m", "n", "a_mn", "b_mn", "word", "group"), GOLDEN, ids=str)
def test_instruction_golden(types, m, n, a_mn, b_mn, word, group):
    kind, dtype = types
    descriptor = InstructionDescriptor(kind, dtype, dtype, m, n, a_mn_major=a_mn, b_mn_major=b_mn)
    assert descriptor.encode() == word
    assert InstructionDescriptor.decode(word, kind) == descriptor
    check_shape(kind, m, n, group)


@pytest.mark.parametrize(("types", "m", "n", "a_mn", "b_mn", "word", "group"), GOLDEN[:12], ids=str)
def test_fp16_differs_from_bf16_in_the_low_half(types, m, n, a_mn, b_mn, word, group):
    fp16 = InstructionDescriptor(Kind.F16, Dtype.F16, Dtype.F16, m, n, a_mn_major=a_mn, b_mn_major=b_mn).encode()
    low = {0x0490: 0x0010, 0x8490: 0x8010}[word & 0xFFFF]
    assert fp16 == word >> 16 << 16 | low
    e4m3 = InstructionDescriptor(*E4M3, Dtype.E4M3, m, n, a_mn_major=a_mn, b_mn_major=b_mn).encode()
    assert fp16 == e4m3, "only the kind tells them apart"


OPERANDS = {
    Kind.F16: (Dtype.F16, Dtype.BF16),
    Kind.TF32: (Dtype.TF32,),
    Kind.F8F6F4: (Dtype.E4M3, Dtype.E5M2, Dtype.E2M3, Dtype.E3M2, Dtype.E2M1),
    Kind.I8: (Dtype.U8, Dtype.S8),
}
RESULTS = {
    Kind.F16: (Dtype.F16, Dtype.F32),
    Kind.TF32: (Dtype.F32,),
    Kind.F8F6F4: (Dtype.F16, Dtype.F32),
    Kind.I8: (Dtype.S32,),
}


@st.composite
def instructions(draw):
    kind = draw(st.sampled_from(list(Kind)))
    operand = st.sampled_from(OPERANDS[kind])
    return InstructionDescriptor(
        kind,
        draw(operand),
        draw(operand),
        16 * draw(st.integers(1, 16)),
        8 * draw(st.integers(1, 32)),
        draw(st.sampled_from(RESULTS[kind])),
        *(draw(st.booleans()) for _ in range(4)),
    )


@settings(deadline=None, derandomize=True, max_examples=400)
@given(instructions())
def test_instruction_round_trip(descriptor):
    word = descriptor.encode()
    assert 0 <= word < 2**32
    assert InstructionDescriptor.decode(word, descriptor.kind) == descriptor


@settings(deadline=None, derandomize=True, max_examples=400)
@given(st.integers(0, 2**32 - 1), st.sampled_from(list(Kind)))
def test_a_word_decodes_to_itself_or_is_refused(word, kind):
    word &= ~(0b1111 | 1 << 6 | 1 << 23 | 0b111 << 29)  # else nearly every word is refused
    try:
        descriptor = InstructionDescriptor.decode(word, kind)
    except ValueError:
        return
    assert descriptor.encode() == word


@pytest.mark.parametrize("bit", [0, 1, 2, 3, 6, 23, 29, 30, 31])
def test_instruction_bits_that_must_be_zero(bit):
    with pytest.raises(MalformedDescriptor, match="sparse, saturating"):
        InstructionDescriptor.decode(0x08200490 | 1 << bit, Kind.F16)


@pytest.mark.parametrize(
    ("word", "kind", "message"),
    [
        (2**32, Kind.F16, "32-bit"),
        (-1, Kind.F16, "32-bit"),
        (0x08200490 | 7 << 7, Kind.F16, "A format 7 does not exist"),
        (0x08200490, Kind.TF32, "A format 1 does not exist in kind::tf32"),
        (0x08200010 | 3 << 4, Kind.F8F6F4, "D format 3 does not exist"),
        (0x08200010 | 2 << 10, Kind.F8F6F4, "B format 2 does not exist"),
        (0x08200000, Kind.I8, "D format 0 does not exist in kind::i8"),
    ],
)
def test_malformed_instruction(word, kind, message):
    with pytest.raises(MalformedDescriptor, match=message):
        InstructionDescriptor.decode(word, kind)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Kind.F16, Dtype.E4M3, Dtype.F16, 128, 128), "a is e4m3"),
        ((Kind.F8F6F4, Dtype.E4M3, Dtype.F16, 128, 128), "b is f16"),
        ((Kind.F16, Dtype.F16, Dtype.F16, 128, 128, Dtype.S32), "d is s32"),
        ((Kind.F16, Dtype.F16, Dtype.F16, 120, 128), "M = 120"),
        ((Kind.F16, Dtype.F16, Dtype.F16, 128, 264), "N = 264"),
    ],
)
def test_bad_instruction(arguments, message):
    with pytest.raises(ValueError, match=message):
        InstructionDescriptor(*arguments)


def test_k_per_instruction_is_32_bytes():
    sizes = {Kind.F16: 2, Kind.TF32: 4, Kind.F8F6F4: 1, Kind.I8: 1}
    assert {kind: kind.k * size for kind, size in sizes.items()} == dict.fromkeys(Kind, 32)


def legal(kind, m, n, group):
    try:
        check_shape(kind, m, n, group)
    except IllegalShape:
        return False
    return True


def test_shapes():
    every_n = range(265)
    for kind in (Kind.F16, Kind.TF32, Kind.F8F6F4):
        assert [n for n in every_n if legal(kind, 64, n, 1)] == list(range(8, 257, 8))
        assert [n for n in every_n if legal(kind, 128, n, 1)] == list(range(16, 257, 16))
        for m in (128, 256):
            assert [n for n in every_n if legal(kind, m, n, 2)] == list(range(16, 257, 16))
    assert [n for n in every_n if legal(Kind.I8, 128, n, 1)] == [8, 16, 24, *range(32, 257, 16)]
    assert [n for n in every_n if legal(Kind.I8, 256, n, 2)] == list(range(32, 257, 32))
    for m, group in itertools.product((32, 64, 96, 128, 192, 256, 512), (1, 2)):
        assert legal(Kind.F16, m, 128, group) == (m in ((64, 128) if group == 1 else (128, 256)))
    with pytest.raises(ValueError, match="must be 1 or 2"):
        check_shape(Kind.F16, 128, 128, 3)


# --- Shared-memory descriptors ---

SW128 = {"sbo": 1024, "swizzle": Swizzle.B128}
SW64 = {"sbo": 512, "swizzle": Swizzle.B64}
#: Operand -> (descriptor fields, high word, low word without the address, step per instruction in units of 16 bytes).
SMEM_GOLDEN = {
    "Q, K bf16": ({"lbo": 16, **SW128}, 0x40004040, 0x00010000),
    "V bf16, 128 x 128": ({"lbo": 16384, **SW128}, 0x40004040, 0x04000000),
    "V bf16, 128 x 64": ({"lbo": 0, **SW128}, 0x40004040, 0),
    "V bf16, 128 x 96": ({"lbo": 8192, **SW64}, 0x80004020, 0x02000000),
    "V fp8, 128 x 64": ({"lbo": 0, **SW64}, 0x80004020, 0),
    "K' of backward at 192": ({"lbo": 16384, **SW64}, 0x80004020, 0x04000000),
}


@pytest.mark.parametrize("operand", SMEM_GOLDEN)
@pytest.mark.parametrize("address", [0, 0x400, 0x11000, 0x21000, 0x3FFF0])
def test_smem_golden(operand, address):
    fields, high, low = SMEM_GOLDEN[operand]
    descriptor = SmemDescriptor(address, **fields)
    assert descriptor.encode() == high << 32 | low | address >> 4
    assert SmemDescriptor.decode(descriptor.encode()) == descriptor


def low(words):
    return [word & 0xFFFF for word in words]


def test_worked_addresses():
    Q = SmemDescriptor(0x11000, lbo=16, **SW128)
    assert Q.encode() == 0x4000404000011100
    words = k_steps(Q, 128, Kind.F16, mn_major=False, rows=128)
    assert low(words) == [0x1100, 0x1102, 0x1104, 0x1106, 0x1500, 0x1502, 0x1504, 0x1506]
    assert {word >> 32 for word in words} == {0x40004040}
    K = SmemDescriptor(0x21000, lbo=16, **SW128)
    assert K.encode() == 0x4000404000012100
    V = SmemDescriptor(0x21000, lbo=16384, **SW128)
    assert V.encode() == 0x4000404004002100
    assert low(k_steps(V, 128, Kind.F16, mn_major=True, rows=128)) == list(range(0x2100, 0x2481, 0x80))


@pytest.mark.parametrize(
    ("fields", "kind", "mn_major", "rows", "k", "expected"),
    [
        ({"lbo": 16, **SW128}, Kind.F16, False, 64, 128, [0, 2, 4, 6, 0x200, 0x202, 0x204, 0x206]),
        ({"lbo": 16, **SW128}, Kind.F8F6F4, False, 128, 128, [0, 2, 4, 6]),
        ({"lbo": 0, **SW128}, Kind.F16, True, 128, 128, list(range(0, 0x400, 0x80))),
        ({"lbo": 8192, **SW64}, Kind.F16, True, 128, 128, list(range(0, 0x200, 0x40))),
        ({"lbo": 0, **SW128}, Kind.F8F6F4, True, 128, 128, [0, 0x100, 0x200, 0x300]),
        ({"lbo": 0, **SW64}, Kind.F8F6F4, True, 128, 128, [0, 0x80, 0x100, 0x180]),
    ],
)
def test_steps_along_k(fields, kind, mn_major, rows, k, expected):
    assert low(k_steps(SmemDescriptor(0, **fields), k, kind, mn_major=mn_major, rows=rows)) == expected


def test_one_word_names_the_same_place_in_both_ctas():
    own, peer = (SmemDescriptor(rank << 24 | 0x11000, lbo=16, **SW128) for rank in (0, 1))
    assert own.encode() == peer.encode()


@settings(deadline=None, derandomize=True, max_examples=400)
@given(
    *(st.integers(0, 2**14 - 1).map(lambda x: 16 * x) for _ in range(3)),
    st.sampled_from(list(Swizzle)),
    st.integers(0, 7),
    st.booleans(),
)
def test_smem_round_trip(address, lbo, sbo, swizzle, base_offset, absolute):
    descriptor = SmemDescriptor(address, lbo, sbo, swizzle, base_offset, absolute)
    word = descriptor.encode()
    assert 0 <= word < 2**64
    assert SmemDescriptor.decode(word) == descriptor


@settings(deadline=None, derandomize=True, max_examples=400)
@given(st.integers(0, 2**64 - 1), st.booleans())
def test_a_smem_word_decodes_to_itself_or_is_refused(word, likely):
    if likely:
        word = word & ~(0b11 << 14 | 0b11 << 30 | 0b111 << 46 | 0xFF << 53) | 1 << 46
    try:
        descriptor = SmemDescriptor.decode(word)
    except MalformedDescriptor:
        assert not likely or word >> 61 in (3, 5, 7)
    else:
        assert descriptor.encode() == word


GOOD = 0x4000404000011100


@pytest.mark.parametrize("code", [3, 5, 7])
def test_swizzle_codes_that_do_not_exist(code):
    with pytest.raises(MalformedDescriptor, match=f"swizzle code {code} does not exist"):
        SmemDescriptor.decode(GOOD & ~(7 << 61) | code << 61)


@pytest.mark.parametrize("bit", [14, 15, 30, 31, *range(53, 61)])
def test_smem_bits_that_must_be_zero(bit):
    with pytest.raises(MalformedDescriptor, match="reserved"):
        SmemDescriptor.decode(GOOD | 1 << bit)


@pytest.mark.parametrize("hopper_code", [1, 2, 3])
def test_a_hopper_descriptor_is_refused(hopper_code):
    # Hopper: same address, LBO and SBO fields, no constant, two swizzle bits at 62.
    word = hopper_code << 62 | 1024 >> 4 << 32 | 1 << 16 | 0x1100
    with pytest.raises(MalformedDescriptor, match="bits 46 to 48 are 000"):
        SmemDescriptor.decode(word)


@pytest.mark.parametrize("word", [-1, 2**64])
def test_smem_word_size(word):
    with pytest.raises(MalformedDescriptor, match="64-bit"):
        SmemDescriptor.decode(word)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"address": 8}, "address is 0x8"),
        ({"lbo": 2**18}, "lbo is 0x40000"),
        ({"sbo": -16}, "sbo is -0x10"),
        ({"base_offset": 8}, "base_offset is 8"),
    ],
)
def test_bad_smem_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        SmemDescriptor(**{"address": 0, "lbo": 16, "sbo": 1024, "swizzle": Swizzle.B128, **fields})


def test_bad_steps():
    start = SmemDescriptor(0, lbo=16, **SW128)
    with pytest.raises(ValueError, match="not a multiple of 16"):
        k_steps(start, 24, Kind.F16, mn_major=False, rows=128)
    with pytest.raises(ValueError, match="NONE is not modelled"):
        k_steps(SmemDescriptor(0, 16, 128, Swizzle.NONE), 16, Kind.F16, mn_major=False, rows=128)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_shape("f16", 128, 128, 1), "kind is 'f16'; one of Kind"),
        (lambda: InstructionDescriptor("f16", Dtype.BF16, Dtype.BF16, 128, 128), "kind is 'f16'"),
        (lambda: InstructionDescriptor(Kind.F16, "bf16", Dtype.BF16, 128, 128), "a is 'bf16', which is no Dtype"),
        (lambda: InstructionDescriptor.decode(0x08200490, 0), "kind is 0"),
        (lambda: SmemDescriptor(0, 16, 16, 128), "128 is no Swizzle"),
    ],
)
def test_names_and_numbers_are_no_codes(call, message):
    with pytest.raises(TypeError, match=message):
        call()
