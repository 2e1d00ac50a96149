// The instruction set between the decoder (Python) and the machine (C++): operations, operand layouts and attributes.
//
// decode.py turns one PTX instruction into one or a few records of this form; _core.pyx publishes the names of the lists
// below, so that neither side repeats a number. Layout of an instruction's operands in the pool, one int32 each:
//
//   d a b c   a row of the warp's register file (32 lanes of 32 bits), r >= 0, or of the constants, ~index < 0.
//             An operand takes one row up to 32 bits, two rows (low, high) for 64 bits, four for 128 bits.
//   p q       a predicate register; bit 30 set: negated. Predicate 0 is always true.
//   @a        an address: low row, high row (the constant 0 where the register has 32 bits), byte offset (a number).
//   #n        a number as it stands.
//   ?         an operand that may be absent: `absent`, once for each of its entries.
//
// `attr` holds what the spelling fixes. A number that a mutation changes is in `imm`, or added by the machine from `bias`.
#pragma once
#include <cstdint>

namespace cupyfa::emulator {

constexpr int32_t absent = INT32_MIN;
constexpr int32_t negated = 1 << 30;

// clang-format off: the lists are tables.

// Rows of 8- and 16-bit values use the low bits; the machine keeps the others 0 (sign-extended loads of narrow types
// fill 32 bits, as in hardware).
#define CUPYFA_TYPES(X) \
  X(none) X(pred) X(b8) X(u8) X(s8) X(b16) X(u16) X(s16) X(b32) X(u32) X(s32) X(b64) X(u64) X(s64) X(b128) \
  X(f16) X(f16x2) X(bf16) X(bf16x2) X(f32) X(f32x2) X(f64) X(tf32) X(e4m3x2) X(e5m2x2) X(e4m3) X(e5m2)

#define CUPYFA_SPACES(X) X(generic) X(global) X(shared) X(local) X(param) X(constant)

// attr[0] of arithmetic: rounding. rni, rzi, rmi, rpi of cvt round to an integer in the same directions.
#define CUPYFA_ROUNDINGS(X) X(unrounded) X(rn) X(rz) X(rm) X(rp) X(rna) X(rs) X(approx) X(full) X(rni) X(rzi) X(rmi) X(rpi)

// attr[1] of arithmetic: a bit set.
#define CUPYFA_FLAGS(X) X(ftz, 1) X(sat, 2) X(relu, 4) X(satfinite, 8) X(nan, 16) X(xorsign, 32) X(abs, 64)

// attr[0] of setp and set. The u forms are true on NaN; num and nan test both operands.
#define CUPYFA_COMPARISONS(X) \
  X(eq) X(ne) X(lt) X(le) X(gt) X(ge) X(equ) X(neu) X(ltu) X(leu) X(gtu) X(geu) X(num) X(nan)
// attr[1] of setp: how the third operand is combined.
#define CUPYFA_BOOLEANS(X) X(none) X(and_) X(or_) X(xor_)

#define CUPYFA_ORDERS(X) X(weak) X(relaxed) X(acquire) X(release) X(acq_rel) X(sc) X(volatile_)
#define CUPYFA_SCOPES(X) X(none) X(cta) X(cluster) X(gpu) X(sys)
#define CUPYFA_REDUCTIONS(X) X(add) X(min) X(max) X(inc) X(dec) X(and_) X(or_) X(xor_) X(exch) X(cas)

// Special registers that differ between launches or threads. All but the clocks are rows that the machine fills at
// launch (Program.specials); shared_base is the shared::cluster address of the CTA's own first static byte.
#define CUPYFA_SPECIALS(X) \
  X(tid_x) X(tid_y) X(tid_z) X(ntid_x) X(ntid_y) X(ntid_z) X(ctaid_x) X(ctaid_y) X(ctaid_z) X(nctaid_x) X(nctaid_y) \
  X(nctaid_z) X(laneid) X(warpid) X(nwarpid) X(smid) X(nsmid) X(clusterid_x) X(clusterid_y) X(clusterid_z) \
  X(nclusterid_x) X(nclusterid_y) X(nclusterid_z) X(cluster_ctaid_x) X(cluster_ctaid_y) X(cluster_ctaid_z) \
  X(cluster_nctaid_x) X(cluster_nctaid_y) X(cluster_nctaid_z) X(cluster_ctarank) X(cluster_nctarank) \
  X(lanemask_eq) X(lanemask_lt) X(lanemask_le) X(lanemask_gt) X(lanemask_ge) X(dynamic_smem_size) X(total_smem_size) \
  X(shared_base) X(clock) X(clock64) X(globaltimer)

// name, what it computes. `type` (and type2 where named) is the operand type. Below it stand the operands, then attr.
#define CUPYFA_OPERATIONS(X) \
  /* --- moves --- */ \
  X(nop)           /* (nothing: hints, prefetches of memory, pragmas) */ \
  X(mov)           /* d a               type: pred, b32, b64, b128 (16-bit moves are b32) */ \
  X(pack16)        /* d a b             d = a | b << 16 */ \
  X(unpack16)      /* d? e? a           d = a & 0xffff, e = a >> 16 */ \
  X(pack8)         /* d a b             d = a | b << 8 */ \
  X(special)       /* d                 imm: clock (1 row), clock64, globaltimer (2 rows) */ \
  X(selp)          /* d a b p           type: b32, b64 */ \
  /* --- integers and bits: type of PTX; b16/b32/b64/pred for logic --- */ \
  X(add) X(sub) X(mul_lo) X(mul_hi) X(div) X(rem) X(min) X(max) /* d a b   also floats where PTX has them */ \
  X(mul_wide)      /* d a b             d twice as wide as type (u16, s16, u32, s32) */ \
  X(mad_lo) X(mad_hi)                   /* d a b c */ \
  X(mad_wide)      /* d a b c           d and c twice as wide */ \
  X(neg) X(abs) X(not_) X(cnot) X(popc) X(clz) X(brev) X(bfind) /* d a   bfind attr[0]: 1 = shiftamt */ \
  X(and_) X(or_) X(xor_)                /* d a b (predicates for type pred) */ \
  X(shl) X(shr)    /* d a b             b has one row; amounts clamp; shr of s types is arithmetic */ \
  X(shf)           /* d a b c           attr[0]: 0 = l, 1 = r; attr[1]: 0 = clamp, 1 = wrap */ \
  X(bfe)           /* d a b c */ \
  X(bfi)           /* d a b c e         insert a into b at c, length e */ \
  X(prmt)          /* d a b c           attr[0]: 0 = default mode only */ \
  X(lop3)          /* d a b c           imm: truth table */ \
  X(sad)           /* d a b c */ \
  /* --- floats: attr[0] rounding, attr[1] flags --- */ \
  X(mul)           /* d a b             f32, f32x2, f64, f16, f16x2, bf16, bf16x2 */ \
  X(fma)           /* d a b c           the same types; type2 set: a, b of type2 (f16, bf16), c, d of type */ \
  X(min3) X(max3)  /* d a b c           f32 */ \
  X(rcp) X(sqrt) X(rsqrt) X(ex2) X(lg2) X(sin) X(cos) X(tanh) /* d a   (div with approx/full is div) */ \
  X(copysign)      /* d a b             d = |b| with the sign of a */ \
  X(testp)         /* p a               attr[0]: 0 finite, 1 infinite, 2 number, 3 notanumber, 4 normal, 5 subnormal */ \
  X(setp)          /* p q? a b c?       attr[0] comparison, attr[1] boolean (c is a predicate), attr[2] ftz */ \
  X(set)           /* d a b             as setp; d = all ones or 1.0 (type2 u32/s32 or f32) */ \
  X(cvt)           /* d a               type: to, type2: from; attr[0], attr[1] */ \
  X(cvt_pack)      /* d a b             to f16x2, bf16x2, e4m3x2, e5m2x2 from two f32: a goes high, b low */ \
  /* --- control --- */ \
  X(bra)           /* -                 imm: target instruction; attr[0]: uni */ \
  X(brx)           /* a #n #t0 #t1 ...  jump table */ \
  X(exit)          /* -                 ret and exit of an entry */ \
  X(trap) X(brkpt) \
  X(nanosleep)     /* a */ \
  /* --- memory --- */ \
  X(ld)            /* d... @a           attr: space, elements, order, scope; type of an element */ \
  X(st)            /* @a b...           the same */ \
  X(atom)          /* d @a b c?         attr: space, reduction, order, scope */ \
  X(red)           /* @a b...           attr: space, reduction, order, scope, elements */ \
  X(cvta)          /* d a               attr[0] space, attr[1]: 0 = space to generic, 1 = generic to space; b32 or b64 */ \
  X(isspacep)      /* p a               attr[0] space */ \
  X(mapa)          /* d a b             d: address a in the CTA of cluster rank b; b32 shared, b64 with attr[0] 1: generic */ \
  X(getctarank)    /* d a */ \
  X(prefetch_map)  /* @a                of a tensor map */ \
  X(ldmatrix)      /* d... @a           attr[0] matrices 1, 2, 4; attr[1] trans */ \
  X(stmatrix)      /* @a b...           the same */ \
  X(movmatrix)     /* d a               8x8 transpose of 16-bit elements */ \
  /* --- warps --- */ \
  X(shfl)          /* d p? a b c m      attr[0]: 0 up, 1 down, 2 bfly, 3 idx; m: member mask */ \
  X(vote)          /* d|p p m           attr[0]: 0 all, 1 any, 2 uni (d is a predicate), 3 ballot (d is a row) */ \
  X(redux)         /* d a m             attr[0] reduction (add min max and_ or_ xor_), attr[1] flags (abs, nan); type */ \
  X(match)         /* d p? a m          attr[0]: 0 any, 1 all; type b32, b64 */ \
  X(activemask)    /* d */ \
  X(elect)         /* d? p m */ \
  X(syncwarp)      /* m */ \
  /* --- barriers and fences --- */ \
  X(bar)           /* d? p? a b?        id a, threads b; attr[0]: 0 sync, 1 arrive, 2 red.popc (d), 3 red.and, 4 red.or
                      (d is a predicate, p the input); attr[1]: 1 = aligned; bias is added to the threads */ \
  X(cluster_barrier) /* -               attr[0]: 0 arrive, 1 wait; attr[1] aligned; attr[2]: 1 = relaxed */ \
  X(fence)         /* -                 attr[0] order (acq_rel, sc), attr[1] scope (membar.cta gl sys: sc cta gpu sys) */ \
  X(fence_proxy_async) /* -             attr[0] space: generic (all), global, shared */ \
  X(fence_mbarrier_init) \
  X(fence_proxy_other) /* -             alias, tensormap: accepted; attr[0]: 0 alias, 1 tensormap */ \
  X(mbarrier_init) /* @a b              bias is added to the count */ \
  X(mbarrier_inval) /* @a */ \
  X(mbarrier_arrive) /* d? @a b? c?     state d (two entries), count b, bytes c (expect_tx; bias is added); attr[0]: 1 =
                      drop, attr[1]: 1 = noComplete, attr[2] order, attr[3] scope */ \
  X(mbarrier_tx)   /* @a b              attr[0]: 0 expect_tx, 1 complete_tx; bias is added to the bytes */ \
  X(mbarrier_wait) /* p @a b            parity b (one row) or state b (two rows); attr[0]: 1 = try_wait (may suspend), 0 =
                      test_wait; attr[1]: 1 = parity; attr[2] order, attr[3] scope; bias is xored into the parity */ \
  X(mbarrier_pending) /* d a            a: state (two rows) */ \
  /* --- asynchronous copies. Addresses of mbarriers are @ operands --- */ \
  X(cp_async)      /* @s @g c? p?       imm: bytes 4, 8, 16; c: bytes really read; p: ignore-src */ \
  X(cp_async_commit) X(cp_async_wait) /* imm: groups that may be pending; attr[0]: 1 = wait_all */ \
  X(cp_async_mbarrier_arrive) /* @m     attr[0]: 1 = noinc */ \
  X(bulk_copy)     /* @d @s n @m? mask? attr[0]: 0 global to shared::cluster (or ::cta), 1 shared::cta to shared::cluster,
                      2 shared::cta to global (bulk group, no @m) */ \
  X(bulk_reduce)   /* @d @s n @m?       attr[0]: 1 or 2 as above; attr[1] reduction; type (f16, bf16, f32, f64, u32 ...) */ \
  X(tensor_load)   /* @d @map c... @m mask? attr[0] dimensions, attr[1] cta_group (0 = none); bias is added to the last
                      coordinate but one that is not 0-dimensional (coordinate 1, or 0 in 1D) */ \
  X(tensor_store)  /* @map c... @s      attr[0] dimensions; bias as above */ \
  X(tensor_reduce) /* @map c... @s      attr[0] dimensions, attr[1] reduction */ \
  X(bulk_commit) X(bulk_wait) /* imm: groups; attr[0]: 1 = .read */ \
  /* --- wgmma --- */ \
  X(wgmma_fence) X(wgmma_commit) X(wgmma_wait) /* wait imm: groups */ \
  X(wgmma)         /* d... A B p        d: N/2 rows (f32, s32) or N/4 (f16); A: descriptor (two rows) or 4 rows with attr[0]
                      1; B: descriptor; p scale-d. type: D; type2: A and B; attr[1] type of B where it differs (e4m3/e5m2),
                      attr[2] N/8, attr[3], attr[4]: negate A, B; attr[5], attr[6]: A, B MN-major. bias: added to the
                      descriptor of B, in its units; imm: to its upper half */ \
  X(setmaxnreg)    /* -                 imm: registers; attr[0]: 1 = inc */ \
  /* --- grid --- */ \
  X(griddep)       /* -                 attr[0]: 0 wait, 1 launch_dependents */ \
  X(clc_try_cancel) /* @r @m            attr[0]: 1 = multicast to the cluster */ \
  X(clc_query)     /* d... a            a: response (four rows); attr[0]: 0 is_canceled (d predicate), 1 x, 2 y, 3 z, 4 v4 (4 rows) */ \
  /* --- tcgen05. attr[0] is the cta_group (1, 2) wherever PTX has it --- */ \
  X(tc_alloc)      /* @s n */ \
  X(tc_dealloc)    /* a n */ \
  X(tc_relinquish) \
  X(tc_mma)        /* a #o A #o B i p m?...  D at TMEM a + o; A: descriptor (two rows, #o 0) or TMEM address with attr[1] 1
                      (one row and #o); B descriptor; i: instruction descriptor; p enable-input-d; m: attr[4] (0, 4, 8) rows of
                      disable-output-lane; attr[2] kind: 0 f16, 1 tf32, 2 f8f6f4, 3 i8; attr[3] collector: 0 discard, 1 fill,
                      2 use, 3 lastuse; imm: scale-input-d, or -1 */ \
  X(tc_commit)     /* @m mask?          attr[1]: 1 = multicast */ \
  X(tc_ld)         /* d... r? a #o #h?  attr[1] shape: 0 32x32b, 1 16x64b, 2 16x128b, 3 16x256b, 4 16x32bx2; attr[2] N; attr[3]: 1 =
                      pack::16b; attr[4]: 0, 1 = red min, 2 = red max (r), attr[5]: abs/NaN flags */ \
  X(tc_st)         /* a #o #h? b...     the same, attr[3]: unpack::16b */ \
  X(tc_wait)       /* -                 attr[1]: 0 ld, 1 st */ \
  X(tc_fence)      /* -                 attr[1]: 0 before_thread_sync, 1 after_thread_sync */ \
  X(tc_cp)         /* a #o s            s: descriptor (two rows); attr[1] shape: 0 128x256b, 1 4x256b, 2 128x128b, 3 64x128b.02_13,
                      4 64x128b.01_23, 5 32x128b.warpx4 */ \
  X(tc_shift)      /* a #o */

// clang-format on

#define CUPYFA_NAME(name, ...) name,
enum class Type : uint8_t { CUPYFA_TYPES(CUPYFA_NAME) count };
enum class Space : uint8_t { CUPYFA_SPACES(CUPYFA_NAME) count };
enum class Rounding : uint8_t { CUPYFA_ROUNDINGS(CUPYFA_NAME) count };
enum class Comparison : uint8_t { CUPYFA_COMPARISONS(CUPYFA_NAME) count };
enum class Boolean : uint8_t { CUPYFA_BOOLEANS(CUPYFA_NAME) count };
enum class Order : uint8_t { CUPYFA_ORDERS(CUPYFA_NAME) count };
enum class Scope : uint8_t { CUPYFA_SCOPES(CUPYFA_NAME) count };
enum class Reduction : uint8_t { CUPYFA_REDUCTIONS(CUPYFA_NAME) count };
enum class Special : uint8_t { CUPYFA_SPECIALS(CUPYFA_NAME) count };
enum class Operation : uint16_t { CUPYFA_OPERATIONS(CUPYFA_NAME) count };
#undef CUPYFA_NAME
#define CUPYFA_FLAG(name, bit) flag_##name = bit,
enum Flag : uint8_t { CUPYFA_FLAGS(CUPYFA_FLAG) };
#undef CUPYFA_FLAG

/// One decoded instruction, as decode.py writes it into a structured array.
struct Instruction {
  uint16_t operation;
  uint8_t type, type2;
  uint8_t attr[8];
  int16_t guard;  ///< predicate register that must be true, -1: none
  uint8_t guard_negated;
  uint8_t repeat;  ///< a mutation executes the instruction this many times more
  int32_t operands;  ///< index of its first operand in the pool
  int32_t operand_count;
  int32_t imm;
  int32_t bias;  ///< a mutation of a number that the kernel computes
  int32_t site;  ///< index into the program's source locations
};
static_assert(sizeof(Instruction) == 36, "decode.py declares the same layout");

// Generic addresses: the high word names the window. Shared addresses are rank << 24 | offset, offsets start at 0x400.
constexpr uint32_t shared_window = 0x7f01, local_window = 0x7f02, param_window = 0x7f03;
constexpr uint32_t shared_first = 0x400;
constexpr uint64_t module_data = 0x7d00'0000'0000;  ///< .global and .const variables of the module
constexpr uint64_t global_first = 0x7e00'0000'0000;  ///< buffers of the caller

}  // namespace cupyfa::emulator
