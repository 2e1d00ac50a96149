"""The parser: scopes, labels, literals, comments, locations, and errors with their lines."""

from __future__ import annotations

import pytest
from emulator.ptx_text import module

from cupyfa.emulator.ptx import Entry, Module, parse
from cupyfa.emulator.scopes import Register
from cupyfa.emulator.syntax import (
    Address,
    Integer,
    Name,
    Pair,
    PtxError,
    Real,
    UnsupportedInstruction,
    Vector,
    parse_operand,
)


def entry(body: str, **parts: str) -> Entry:
    return parse(module(body, **parts)).entries["k"]


def opcodes(body: str) -> list[str]:
    return [statement.opcode for statement in entry(body).statements]


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("%r1", Name("%r1")),
        ("%tid.x", Name("%tid.x")),
        ("_", Name("_")),
        ("!%p1", Name("%p1", negated=True)),
        ("symbol+8", Name("symbol", 8)),
        ("symbol + -8", Name("symbol", -8)),
        ("symbol-8", Name("symbol", -8)),
        ("-1", Integer(-1)),
        ("0x1F", Integer(31)),
        ("0x1fU", Integer(31)),
        ("-0x8000000000000000", Integer(-(1 << 63))),
        ("0b101", Integer(5)),
        ("017", Integer(15)),
        ("4294967295U", Integer(4294967295)),
        ("'a'", Integer(97)),
        ("0f3F800000", Real(0x3F800000, True)),
        ("0F7fffffff", Real(0x7FFFFFFF, True)),
        ("0d3FF0000000000000", Real(0x3FF0000000000000, False)),
        ("1.5", Real(0x3FF8000000000000, False)),
        ("-2.5e-1", Real(0xBFD0000000000000, False)),
        ("1e3", Real(0x408F400000000000, False)),
        ("[%rd1]", Address(Name("%rd1"))),
        ("[%rd1+-16]", Address(Name("%rd1", -16))),
        ("[ %rd1 + 0x10 ]", Address(Name("%rd1", 16))),
        ("[128]", Address(Integer(128))),
        ("[%rd1, {%r1, 0}]", Address(Name("%rd1"), (Name("%r1"), Integer(0)))),
        ("{%r1, _, 7}", Vector((Name("%r1"), Name("_"), Integer(7)))),
        ("%r1|%p1", Pair(Name("%r1"), Name("%p1"))),
        ("_ | %p1", Pair(Name("_"), Name("%p1"))),
    ],
)
def test_operands(text: str, operand: object) -> None:
    assert parse_operand(text) == operand


@pytest.mark.parametrize(
    "text", ["", "%", "1x", "08", "0x", "[", "[]", "[%r1", "a|b|c", "%r1+%r2", "!1", "{a", "1 2", "0f3F"]
)
def test_operands_that_are_none(text: str) -> None:
    with pytest.raises(PtxError):
        parse_operand(text)


def test_reals_convert_between_the_sizes() -> None:
    assert Real(0x3FF8000000000000, False).single_bits() == 0x3FC00000
    assert Real(0x3FC00000, True).double_bits() == 0x3FF8000000000000
    assert Real(0xFFC00001, True).single_bits() == 0xFFC00001  # a payload stays
    assert Real(0x7FEFFFFFFFFFFFFF, False).single_bits() == 0x7F800000
    assert Real(0xFFEFFFFFFFFFFFFF, False).single_bits() == 0xFF800000


def test_statements_do_not_care_about_lines_and_comments() -> None:
    body = """
    .reg .b32 %r<4>; .reg .pred p;
    mov.b32 %r1, 1; mov.b32 %r2, 2;  // add.s32 %r1, %r1, 1; with a semicolon
    add.s32 %r3,
            %r1,   /* between; */
            %r2;
    @!p bra done; ; bra.uni done;
    done: ret;
    """
    statements = entry(body).statements
    assert [s.opcode for s in statements] == ["mov.b32", "mov.b32", "add.s32", "bra", "bra.uni", "ret"]
    add = statements[2]
    assert add.text == "add.s32 %r3, %r1, %r2"
    assert add.line == statements[1].line + 1
    assert add.operands == (Name("%r3"), Name("%r1"), Name("%r2"))
    assert (statements[3].guard, statements[3].guard_negated) == ("p", True)
    assert (statements[0].guard, statements[0].guard_negated) == (None, False)


def test_bytes_and_nul_bytes_are_read() -> None:
    parsed = parse(module("ret;").encode() + b"\0\0")
    assert [s.opcode for s in parsed.entries["k"].statements] == ["ret"]
    assert parsed.target == "sm_100a"
    assert parsed.version == "9.0"


def test_scopes_hide_registers_and_labels() -> None:
    body = """
    .reg .b32 %r<2>; .reg .pred p;
    { .reg .b64 p; LOOP: bra LOOP; }
    { .reg .b32 %r<1>; .reg .b64 x<8>; LOOP: { bra LOOP; } }
    LOOP: bra LOOP;
    """
    first, second, third = entry(body).statements
    assert [s.scope.find_label("LOOP") for s in (first, second, third)] == [0, 1, 2]

    def kind(statement: object, name: str) -> str | None:
        found = statement.scope.find(name)  # type: ignore[attr-defined]
        return found.type if isinstance(found, Register) else None

    assert [kind(s, "p") for s in (first, second, third)] == ["b64", "pred", "pred"]
    assert [kind(s, "x7") for s in (first, second, third)] == [None, "b64", None]
    assert kind(second, "x8") is None
    assert kind(second, "%r1") == "b32"
    assert second.scope.find("%r0") is not third.scope.find("%r0")
    assert second.scope.find("%r1") is third.scope.find("%r1")
    assert third.scope.find("%r01") is None


def test_directives_of_a_kernel() -> None:
    text = module("ret;").replace(
        ") {", ')\n.maxntid 384, 1, 1\n.minnctapersm 1\n.maxnreg 168\n.reqnctapercluster 2,1,1 .pragma "x"\n{'
    )
    directives = parse(text).entries["k"].directives
    assert directives["maxntid"] == (384, 1, 1)
    assert directives["minnctapersm"] == (1,)
    assert directives["maxnreg"] == (168,)
    assert directives["reqnctapercluster"] == (2, 1, 1)


def test_parameters_have_qualifiers_before_their_names() -> None:
    parameters = """
    .param .u64 .ptr .global .align 16 pointer,
    .param .align 64 .b8 map[128],
    .param .u64 .ptr .align 1 other,
    .param .f32 scale"""
    found = entry("ret;", parameters=parameters).parameters
    assert [(p.name, p.type, p.align, p.size) for p in found] == [
        ("pointer", "u64", 16, 8),
        ("map", "b8", 64, 128),
        ("other", "u64", 1, 8),
        ("scale", "f32", 4, 4),
    ]


def locations(parsed: Module) -> list[tuple[str, int, tuple[tuple[str, int], ...]]]:
    found = [parsed.locations[s.location] for s in parsed.entries["k"].statements]
    return [(place.file, place.line, place.callers) for place in found]


def test_locations_follow_loc_with_the_whole_chain() -> None:
    body = """
    membar.cta;
    .loc 1 10 3
    membar.cta;
    .loc 2 20 5, function_name $L__info_string0, inlined_at 1 11 5
    .loc 3 30 7, function_name $L__info_string1+4, inlined_at 2 20 5
    membar.cta; membar.gl;
    """
    tail = '.file 1 "a//b.cu"\n.file 2 "ring.cuh", 123, 456\n.section .debug_str { $L__info_string0: .b8 1,2\n}\n'
    assert locations(parse(module(body) + tail)) == [
        ("<ptx>", 0, ()),
        ("a//b.cu", 10, ()),
        ("<file 3>", 30, (("ring.cuh", 20), ("a//b.cu", 11))),
        ("<file 3>", 30, (("ring.cuh", 20), ("a//b.cu", 11))),
    ]


def test_functions_and_prototypes_are_passed_over() -> None:
    head = """
    .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
    .visible .func helper(.param .b32 x) { .reg .b32 %r<2>; { nonsense here } ret; }
    .weak .entry declared(.param .u32 x);
    """
    assert list(parse(module("ret;", head=head)).entries) == ["k"]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "no .target"),
        ("hello", 1, "cannot read this part of the module"),
        (module("mov.b32 %r1, 1"), 6, "missing semicolon"),
        (module("ret;").replace("}", ""), 8, "ends inside the kernel k"),
        (module(".reg .b33 x;"), 6, "unknown type .b33"),
        (module(".reg .b32 x; .reg .b64 x;"), 6, "x is declared twice"),
        (module("x: ret; x: ret;"), 6, "label x is defined twice"),
        (module("ret;\nadd.s32 {a, b;"), 7, "cannot read the operands"),
        (module("ret;\nadd.s32 a, , b;"), 7, "operand is missing"),
        (module(".branchtargets a, b;"), 6, "without a label"),
        (module(".shared .align 3 .b8 x[4];"), 6, "alignment of 3"),
        (module(".shared x[4];"), 6, "without a known type"),
        (module("ret;") + ".entry k() { ret; }", 8, "k is defined twice"),
        (module("ret;", head=".global .u32 a; .global .u32 a;"), 4, "a is declared twice"),
        (module("ret;", parameters=".param .u32 a, .param .u32 a"), 5, "a is declared twice"),
        (module("ret;") + ".section .debug { ", 8, "no brace closes"),
    ],
)
def test_malformed_modules(text: str, line: int, problem: str) -> None:
    with pytest.raises(PtxError) as caught:
        parse(text)
    assert problem in str(caught.value)
    assert caught.value.line == line
    assert f"PTX line {line}: " in str(caught.value)


def test_unsupported_parts_of_a_module() -> None:
    with pytest.raises(UnsupportedInstruction, match="32 bits"):
        parse(module("ret;").replace("address_size 64", "address_size 32"))
    with pytest.raises(UnsupportedInstruction, match=r"directive \.unknown inside a kernel"):
        parse(module(".unknown 1;"))
