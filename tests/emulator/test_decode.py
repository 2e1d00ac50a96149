"""The decoder: every spelling and operand layout, memory, immediates, errors, and kernels as compilers write them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from emulator.ptx_text import DECLARATIONS, decoded, module, rendered
from nvrtc_tools import compile_ptx, import_nvrtc

from cupyfa.compiler import compile_offline
from cupyfa.emulator import isa
from cupyfa.emulator.decode import decode
from cupyfa.emulator.opcodes import form_of
from cupyfa.emulator.program import INSTRUCTION
from cupyfa.emulator.ptx import parse
from cupyfa.emulator.syntax import PtxError, UnsupportedInstruction
from cupyfa.spec import Bias, DType, FwdSpec, Scheduler

HERE = Path(__file__).parent


def read_spellings() -> list[str]:
    """The spellings of spellings.txt, where a line has a first word and what follows it."""
    found, base = [], ""
    for line in (HERE / "spellings.txt").read_text(encoding="utf-8").splitlines():
        if not line or line[0] in "#[":
            continue
        words = line.split()
        if line[0] != " ":
            base = words.pop(0).removesuffix(":")
        found += [base if rest == "-" else f"{base}.{rest}" for rest in words]
    return found


def read_layouts() -> list[tuple[str, str, list[str]]]:
    """Target, statement and records of layouts.txt."""
    found: list[tuple[str, str, list[str]]] = []
    target = ""
    for line in (HERE / "layouts.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("target: "):
            target = line.removeprefix("target: ")
        elif line.startswith("    "):
            found[-1][2].append(line.strip())
        elif line and line[0] != "#":
            found.append((target, line, []))
    return found


SPELLINGS = read_spellings()
LAYOUTS = read_layouts()


def test_the_tables_are_whole() -> None:
    assert len(SPELLINGS) == len(set(SPELLINGS)) == 226
    assert len(LAYOUTS) > 300


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_is_known(spelling: str) -> None:
    assert form_of(spelling).operation in isa.OPERATIONS


@pytest.mark.parametrize(("target", "statement", "records"), LAYOUTS, ids=[layout[1] for layout in LAYOUTS])
def test_layout(target: str, statement: str, records: list[str]) -> None:
    assert rendered(statement, target=target) == records


def test_each_operation_has_a_layout() -> None:
    records = [re.sub(r"^@!?p\d ", "", record) for _, _, records in LAYOUTS for record in records]
    covered = {re.split(r"[. ]", record)[0] for record in records}
    # Branches and 8-bit registers have tests of their own.
    assert set(isa.OPERATIONS) - covered == {"bra", "brx", "pack8"}


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_ptxas_takes_the_statements(target: str) -> None:
    import_nvrtc()
    statements = [statement for name, statement, _ in LAYOUTS if name == target]
    kernels = [
        f'extern "C" __global__ void k{index}() {{ asm volatile("{{ {DECLARATIONS} {statement}; }}" :: "r"(0)); }}'
        for index, statement in enumerate(statements)
    ]
    source = "\n".join(kernels).replace("%", "%%")
    assert compile_ptx(source, f"-arch={target}").count(".entry") == len(statements)


def operations(body: str, **parts: str) -> list[str]:
    names = {number: name for name, number in isa.OPERATIONS.items()}
    return [names[number] for number in decoded(body, **parts).code["operation"].tolist()]


def test_the_record_is_that_of_the_machine() -> None:
    assert INSTRUCTION.itemsize == 36
    assert [INSTRUCTION.fields[name][1] for name in INSTRUCTION.names] == [0, 2, 3, 4, 12, 14, 15, 16, 20, 24, 28, 32]


def test_names_are_numbered_as_in_the_header() -> None:
    assert isa.OPERATIONS["nop"] == 0
    assert list(isa.TYPES)[:4] == ["none", "pred", "b8", "u8"]
    assert isa.FLAGS == {"ftz": 1, "sat": 2, "relu": 4, "satfinite": 8, "nan": 16, "xorsign": 32, "abs": 64}
    assert set(isa.BITS) == set(isa.TYPES) - {"none"}


def test_eight_bit_registers_pack() -> None:
    body = ".reg .b8 %b<4>; .reg .b32 %r<2>; .reg .b16 %rs<2>; mov.b32 %r1, {%b0, %b1, %b2, %b3};"
    assert operations(body) == ["pack8", "pack8", "pack16", "exit"]
    assert operations(body + " mov.b16 %rs1, {%b0, %b1};")[3:] == ["pack8", "exit"]
    assert operations(body + " mov.b32 {%b0, _, _, %b3}, %r1;")[3:] == ["bfe", "bfe", "exit"]


def test_branches_and_tables() -> None:
    program = decoded(
        """
        .reg .b32 %r<2>; .reg .pred %p;
        A: mov.b32 %r1, 0;
        @%p bra B;
        table: .branchtargets A, B, C;
        brx.idx %r1, table;
        B: bra.uni A;
        C:
        """
    )
    assert program.code["operation"].tolist() == [isa.OPERATIONS[name] for name in ("mov", "bra", "brx", "bra", "exit")]
    assert program.code["imm"].tolist() == [0, 3, 0, 0, 0]
    assert program.code["attr"][:, 0].tolist() == [0, 0, 0, 1, 0]
    assert program.code["guard"].tolist() == [-1, 1, -1, -1, -1]
    start = program.code["operands"][2]
    assert program.pool[start : start + 5].tolist() == [0, 3, 0, 3, 4]
    assert program.text == ("mov.b32 %r1, 0", "@%p bra B", "brx.idx %r1, table", "bra.uni A", "bra.uni A")


def test_parameters_are_packed_and_addressed_by_offset() -> None:
    parameters = ".param .u8 a, .param .u32 b, .param .align 64 .b8 c[128], .param .u64 d"
    program = decoded(
        ".reg .b32 %r<2>; .reg .b64 %rd<2>; ld.param.u32 %r1, [b]; ld.param.u64 %rd1, [c+8]; mov.b64 %rd1, c; mov.b64 "
        "%rd1, c+8; ld.param.u64 %rd1, [d];",
        parameters=parameters,
    )
    assert [(p.name, p.offset, p.size, p.align) for p in program.params] == [
        ("a", 0, 1, 1),
        ("b", 4, 4, 4),
        ("c", 64, 128, 64),
        ("d", 192, 8, 8),
    ]
    assert program.param_bytes == 200
    constants = program.constants.tolist()
    load = program.pool[program.code["operands"][1] :][:5].tolist()
    assert [constants[~load[2]], constants[~load[3]], load[4]] == [64, 0, 8]
    assert set(constants) == {0, 4, 64, 72, 192}


def test_shared_variables() -> None:
    head = """
    .shared .align 4 .b8 unused[4096];
    .shared .align 16 .b8 first[20];
    .extern .shared .align 1024 .b8 dynamic[];
    """
    body = """
    .shared .align 8 .b64 barrier[2];
    .reg .b32 %r<3>; .reg .b64 %rd<2>;
    mov.u64 %rd1, first;
    mov.u32 %r1, barrier;
    ld.shared.u32 %r2, [barrier+8];
    mov.u32 %r2, dynamic;
    { .shared .u32 inner; st.shared.u32 [inner], 1; }
    """
    program = decoded(body, head=head)
    assert program.shared_symbols == {"first": (0, 20), "barrier": (24, 16), "inner": (40, 4), "dynamic": (1024, 0)}
    assert (program.static_shared, program.dynamic_shared_offset) == (44, 1024)
    ((row, number),) = program.specials
    assert number == isa.SPECIALS["shared_base"]
    pool, constants = program.pool.tolist(), program.constants.tolist()
    names = {number: name for name, number in isa.OPERATIONS.items()}
    shown = [names[number] for number in program.code["operation"].tolist()]
    assert shown == ["mov", "add", "mov", "ld", "add", "mov", "st", "exit"]
    assert pool[2:4] == [row, ~constants.index(0)]
    load = pool[program.code["operands"][3] :][1:4]
    assert load == [row, ~constants.index(0), 32]


def test_data_and_its_addresses() -> None:
    head = """
    .global .align 4 .u32 one = 7;
    .const .align 8 .f32 table[4] = {0f3F800000, -2.0};
    .global .align 8 .u64 pointers[3] = {table+4, generic(one), 5};
    .visible .global .b8 text[4] = {'h', 105, 0x21};
    .global .u16 grid[2][2] = {{1, -1}, {3, 4}};
    .extern .global .u32 elsewhere;
    """
    program = decoded(".reg .b64 %rd<2>; mov.u64 %rd1, table; ld.global.u64 %rd1, [pointers+8];", head=head)
    assert program.data_symbols == {
        "one": (0, 4),
        "table": (8, 16),
        "pointers": (24, 24),
        "text": (48, 4),
        "grid": (52, 8),
    }
    assert np.frombuffer(program.data[:4], np.uint32) == 7
    assert np.frombuffer(program.data[8:24], np.float32).tolist() == [1, -2, 0, 0]
    assert np.frombuffer(program.data[24:48], np.uint64).tolist() == [isa.MODULE_DATA + 12, isa.MODULE_DATA, 5]
    assert program.data[48:52] == b"hi!\0"
    assert np.frombuffer(program.data[52:60], np.int16).tolist() == [1, -1, 3, 4]
    constants = program.constants[~program.pool[2:4]].tolist()
    assert constants == [isa.MODULE_DATA + 8 & 0xFFFFFFFF, isa.MODULE_DATA >> 32]
    with pytest.raises(UnsupportedInstruction, match="elsewhere has no definition"):
        decoded(".reg .b64 %rd<2>; mov.u64 %rd1, elsewhere;", head=head)


def test_local_memory_has_a_depot() -> None:
    program = decoded(
        ".local .align 16 .b8 __local_depot0[40]; .local .b64 more; .reg .b64 %SP, %SPL; mov.u64 %SPL, __local_depot0; "
        "cvta.local.u64 %SP, %SPL; st.local.b64 [more], %SP;"
    )
    assert program.local_bytes == 48


def test_directives() -> None:
    text = module("ret;").replace(
        ") {", ")\n.maxntid 64, 2\n.minnctapersm 3 .maxnreg 168\n.reqnctapercluster 2, 1, 1 {"
    )
    program = decode(parse(text))
    assert (program.max_threads, program.reqntid, program.min_ctas, program.max_registers) == (128, None, 3, 168)
    assert program.cluster == (2, 1, 1)
    program = decode(parse(module("ret;").replace(") {", ") .reqntid 96 {")))
    assert (program.max_threads, program.reqntid, program.min_ctas) == (96, (96,), None)
    assert (program.name, program.arch) == ("k", "sm_100a")


def test_sites_are_lines_of_loc_or_of_the_ptx() -> None:
    body = "membar.cta;\n.loc 1 9 0\nmembar.cta;\n.loc 1 8 1, function_name x, inlined_at 1 9 0\nmembar.gl; ret;"
    program = decode(parse(module(body) + '.file 1 "a.cu"\n'))
    sites = [program.sites[site] for site in program.code["site"].tolist()]
    assert sites == [("<ptx>", 6), ("a.cu", 9), ("a.cu", 8), ("a.cu", 8), ("a.cu", 8)]
    assert program.callers[program.code["site"][2]] == (("a.cu", 9),)


def test_one_kernel_of_several_has_to_be_named() -> None:
    parsed = parse(module("ret;") + ".entry other() { trap; }")
    assert decode(parsed, "other").text == ("trap", "trap")
    with pytest.raises(PtxError, match=r"2 \(k, other\): name one"):
        decode(parsed)
    with pytest.raises(PtxError, match=r"no kernel third .*k, other"):
        decode(parsed, "third")


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("add.s32 %r1, %r2", "expected 3 operands, got 2"),
        ("add.s32 %r1, %r2, %r3, %r4", "expected 3 operands, got 4"),
        ("add.s32 %r1, %r2, %rd3", "the register %rd3 is .b64, the operand has the type .s32"),
        ("add.s64 %rd1, %rd2, %r3", "the register %r3 is .b32, the operand has the type .s64"),
        ("add.s32 %r1, %r2, %p1", "%p1 is a predicate"),
        ("add.s32 %r99, %r2, %r3", "%r99 is not a declared register"),
        ("add.s32 x, %r2, %r3", "x is not declared"),
        ("add.s32 %r1, %r2, %x", "%x is neither a declared register nor a special register"),
        ("mov.b64 {_, _}, %rd1", "nothing of the vector is wanted"),
        ("add.s32 5, %r2, %r3", "expected a register"),
        ("add.s32 _, %r2, %r3", "destination must not be _"),
        ("add.s32 %r1, %r2, _", "must not be _"),
        ("add.s32 %r1, %r2+4, %r3", "expected a register"),
        ("add.s32 %r1, !%r2, %r3", "no predicate"),
        ("add.s32 %r1, [%r2], %r3", "expected a register or a number"),
        ("add.f32 %f1, %f2, 1", "the integer 1 for an operand of type .f32"),
        ("add.s32 %r1, %r2, 0f00000000", "a floating-point number for an operand of type .s32"),
        ("mov.u64 %rd1, %tid.x", "%tid.x has 32 bits"),
        ("setp.lt.s32 %r1, %r2, %r3", "%r1 is not a declared predicate"),
        ("setp.lt.s32 1, %r2, %r3", "expected a predicate"),
        ("setp.lt.s32 !%p1, %r2, %r3", "expected a predicate"),
        ("@%r1 bra x", "%r1 is not a declared predicate"),
        ("bra nowhere", "the label nowhere is not defined"),
        ("bra 5", "expected a label"),
        ("brx.idx %r1, nowhere", "no list of branch targets"),
        ("ld.global.u32 %r1, %rd1", "expected an address"),
        ("ld.global.u32 %r1, [%p1]", "%p1 is a predicate"),
        ("ld.global.u32 %r1, [%rs1]", "the register %rs1 is .b16"),
        ("ld.global.u32 %r1, [%rd1+4294967296]", "the offset is 4294967296"),
        ("ld.global.v4.u32 {%r1, %r2}, [%rd1]", "expected 4 registers in braces, got 2"),
        ("ld.global.v2.u32 %r1, [%rd1]", "expected 2 registers in braces, got 1"),
        ("mov.b64 {%r1, %r2, %r3}, %rd1", "a vector of 3 in a move of .b64"),
        ("mov.b64 {%r1, %r1}, %rd1", "written twice"),
        ("lop3.b32 %r1, %r2, %r3, %r4, 256", "the number is 256, it must be 0 to 255"),
        ("lop3.b32 %r1, %r2, %r3, %r4, %r5", "must be a number as it stands"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 8", "a copy of 8 bytes"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1}], [%r2]", "expected 2 coordinates, got 1"),
        ("elect.sync %p1, -1", "expected two destinations"),
        ("setmaxnreg.inc.sync.aligned.u32 8", "the number is 8"),
        ("mov.b64 %rd1, {%r1", "cannot read the operands"),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, %p1, 1, 1", "expected 8"),
        (
            "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, {%r1, %r2}, %p1",
            "expected 4 registers in braces",
        ),
    ],
)
def test_malformed_statements(statement: str, problem: str) -> None:
    with pytest.raises(PtxError) as caught:
        decoded(f"{DECLARATIONS}\nret;\n{statement};")
    assert problem in str(caught.value)
    assert caught.value.line == 8
    assert caught.value.text == statement


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("foo.s32 %r1, %r2", "foo is not an instruction that the emulator knows"),
        ("call.uni (%r1), f, (%r2)", "call is not an instruction"),
        ("add.q32 %r1, %r2, %r3", "add.q32"),
        ("add.rn.s32 %r1, %r2, %r3", "unknown or unsupported here: .rn"),
        ("add..s32 %r1, %r2, %r3", "unknown or unsupported here: ."),
        ("add.s32.s32 %r1, %r2, %r3", "types are .s32, .s32"),
        ("mov.u32 %r1, %gridid", "the special register %gridid"),
        ("prmt.b32.f4e %r1, %r2, %r3, %r4", ".f4e"),
        ("cvt.rs.f16x2.f32 %r1, %f1, %f2", "stochastic rounding"),
        ("cvt.s32.f32 %r1, %f1", "needs .rni"),
        ("cvt.f32.s32 %f1, %r1", "needs .rn"),
        ("ld.acquire.global.u32 %r1, [%rd1]", "scope and a memory order"),
        ("ld.global.v8.b64 {%rd1}, [%rd1]", "8 elements of .b64"),
        ("atom.global.v2.f32.add {%f1, %f2}, [%rd1], {%f1, %f2}", "a vector"),
        (
            "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1], [%r2]",
            ".im2col",
        ),
        ("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%f1}, %rd1, %rd2, %r1, 0, %p1, 1, 1, 0, 0", "k 32"),
        ("wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%r1}, %rd1, %rd2, %p1", "types"),
        ("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1", "kind::f16"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1", ".ws"),
        ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r1}, [%r2]", "256 registers"),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3]", ".async"),
        ("setp.lt.b32 %p1, %r1, %r2", "the comparison .lt of .b32"),
        ("max.xorsign.f32 %f1, %f2, %f3", ".xorsign without .abs"),
    ],
)
def test_unsupported_statements(statement: str, problem: str) -> None:
    with pytest.raises(UnsupportedInstruction) as caught:
        decoded(f"{DECLARATIONS}\nret;\n{statement};")
    assert problem in str(caught.value)
    assert caught.value.line == 8
    assert caught.value.text == statement


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (".global .u32 x = y;", "y is no .global or .const variable"),
        (".global .u32 x[1] = {1, 2};", "more initial values than elements"),
        (".global .f32 x = 1;", "the initial value '1' for the type .f32"),
        (".global .u32 x = x;", "an address in a variable of type .u32"),
        (".global .u32 x = {1, [};", "more initial values"),
        (".global .u32 x = [;", "cannot read"),
    ],
)
def test_malformed_initial_values(head: str, problem: str) -> None:
    with pytest.raises(PtxError) as caught:
        decoded("ret;", head=head)
    assert problem in str(caught.value)
    assert caught.value.line == 4


KERNEL = FwdSpec(
    dtype=DType.BFLOAT16,
    head_dim=128,
    head_dim_v=128,
    tile_m=128,
    tile_n=128,
    stages=2,
    q_stages=2,
    varlen=False,
    causal=True,
    window=False,
    sink=False,
    softcap=False,
    alibi=False,
    bias=Bias.NONE,
    bias_float32=False,
    bias_stages=0,
    negate_scores=False,
    overlap=True,
    three_stage=False,
    speculative=False,
    rescale_threshold=0,
    exp2_fma=0,
    pingpong=True,
    warp_specialized=True,
    scheduler=Scheduler.PERSISTENT,
    longest_first=True,
    setmaxnreg=True,
)


@pytest.fixture(scope="module")
def kernel_ptx() -> str:
    import_nvrtc()
    return compile_offline(KERNEL).ptx


def test_the_forward_kernel_decodes(kernel_ptx: str) -> None:
    parsed = parse(kernel_ptx)
    plain, shared = decode(parsed, optimise=False), decode(parsed)
    assert plain.max_threads == 384
    assert plain.param_bytes == 896
    assert plain.dynamic_shared_offset == 0
    assert len(shared.code) < len(plain.code)
    assert shared.rows < plain.rows / 3
    counts = np.bincount(plain.code["operation"], minlength=len(isa.OPERATIONS))
    assert counts[isa.OPERATIONS["wgmma"]] == counts[isa.OPERATIONS["wgmma"]] > 16
    removed = counts - np.bincount(shared.code["operation"], minlength=len(isa.OPERATIONS))
    assert [name for name, number in isa.OPERATIONS.items() if removed[number]] == ["mov"]


SOURCE = """
struct Big { int a[40]; };
__constant__ int table[3] = {1, 2, 3};
__device__ const char* names[2] = {"a", "b"};
extern "C" __global__ void k(Big big, int* out, int n) {
  __shared__ double values[33];
  extern __shared__ float rest[];
  int local[20];
  for (int i = 0; i < 20; ++i) local[(i * n) % 20] = big.a[i] + table[i % 3];
  values[threadIdx.x] = n;
  rest[threadIdx.x] = __expf(n) + sinf(n);
  __syncthreads();
  switch (n) {
    case 0: out[0] = local[n % 20]; break;
    case 1: out[1] = atomicAdd(out, 3); break;
    case 2: out[2] = __shfl_xor_sync(~0u, n, 1); break;
    case 3: out[3] = __popc(n) + __clz(n) + __ffs(n) + names[n & 1][0]; break;
    case 4: out[4] = (int)values[(threadIdx.x + 1) & 31]; break;
    case 5: out[5] = __ballot_sync(~0u, n > 3) + __reduce_add_sync(~0u, n); break;
    case 6: out[6] = __float2int_rn(rest[0] / 3.0f) + (int)clock64(); break;
  }
}
"""


@pytest.mark.parametrize("target", ["compute_90a", "compute_100a"])
@pytest.mark.parametrize("flags", [(), ("-lineinfo", "-use_fast_math")], ids=" ".join)
def test_ordinary_cuda_decodes(target: str, flags: tuple[str, ...]) -> None:
    parsed = parse(compile_ptx(SOURCE, f"-arch={target}", *flags))
    plain, shared = decode(parsed, "k", optimise=False), decode(parsed, "k")
    assert plain.param_bytes == 172
    assert plain.static_shared >= 33 * 8
    assert plain.dynamic_shared_offset >= plain.static_shared
    assert plain.local_bytes >= 80
    assert b"\1\0\0\0\2\0\0\0\3\0\0\0" in plain.data
    assert shared.rows < plain.rows
    if flags and flags[0] == "-lineinfo":
        assert any(file.endswith("test.cu") and line == 9 for file, line in plain.sites)


def test_calls_are_refused_by_name() -> None:
    # Not by -G: NVRTC 13.0 compiles all later kernels of the process in another way, with spills.
    source = """
    __device__ __noinline__ int twice(int n) { return clock() + 2 * n; }
    extern "C" __global__ void k(int* out, int n) { *out = twice(n); }
    """
    parsed = parse(compile_ptx(source, "-arch=compute_90a"))
    with pytest.raises(UnsupportedInstruction, match="parameter of a call, and calls are not supported"):
        decode(parsed, "k")


JUNK = [*"{}[]|:.+!@<>();,-_%$\"'0\0\u00e9", "0x", "1e999", "%p1", "-1", "99999999999999999999"]


def test_nothing_but_its_own_errors(kernel_ptx: str) -> None:
    """Truncated, shuffled and mistyped text is refused, or decodes: no other exception."""
    generator = random.Random(5)
    sources = ["\n".join(kernel_ptx.splitlines()[:400]) + "\nret;\n}\n"]
    sources += [module(f"{DECLARATIONS}\n" + ";\n".join(statement for _, statement, _ in LAYOUTS) + ";")]
    outcomes = {"decoded": 0, "refused": 0}
    for round_number in range(400):
        text = generator.choice(sources)
        words = re.split(r"(\s+|[,;{}\[\]|:.+!@<>()\"]|\b)", text)
        for _ in range(generator.choice((1, 1, 2, 5))):
            place, other = generator.randrange(len(words)), generator.randrange(len(words))
            change = generator.randrange(6)
            if change == 0:
                words[place : place + generator.choice((1, 1, 3))] = []
            elif change == 1:
                words[place], words[other] = words[other], words[place]
            elif change == 2:
                words.insert(place, words[other])
            elif change == 3:
                words[place] = generator.choice(JUNK)
            elif change == 4 and round_number % 4 == 0:
                words = words[:place]
            else:
                words[place] = words[place].swapcase()
            words = words or [""]
        try:
            decode(parse("".join(words)))
            outcomes["decoded"] += 1
        except PtxError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 30
