// Asynchronous warpgroup matrix multiply-accumulate (PTX ISA, "wgmma.mma_async"): D[64, N] += A[64, 16] B[16, N].
//
// The accumulators D are float32 registers; accumulator i of a thread is row 16 * warp + lane / 4 + 8 * (i / 2 % 2),
// column 8 * (i / 4) + 2 * (lane % 4) + i % 2 ("Matrix fragments for wgmma.mma_async.m64nNk16"). A comes from shared
// memory (ss) or from registers (rs), B always from shared memory, both described by 64-bit matrix descriptors.
#pragma once
#include "ptx/types.cuh"
#include "spec.cuh"

namespace cupyfa::ptx {

/// Orders earlier register accesses of the warpgroup before the wgmma that follow. It completes nothing.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Closes the group of all wgmma issued since the last one.
__device__ inline void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most `pending` of the newest groups are in flight: every older group has completed.
template <int pending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/// After a wait: tells the compiler that the registers changed there, so that no read moves above the wait.
template <int count>
__device__ inline void pin_registers(float (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

/// The instruction for one N. `scale_a` is 1 or -1 and multiplies A; `trans_b` is 1 for a B that is contiguous along N,
/// `trans_a` for an A in shared memory that is contiguous along M.
template <int N>
struct wgmma_m64k16;

// An asm statement numbers its operands, so each shape spells its registers out. The macros below only count.
#define CUPYFA_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUPYFA_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define CUPYFA_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define CUPYFA_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define CUPYFA_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define CUPYFA_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define CUPYFA_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define CUPYFA_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define CUPYFA_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define CUPYFA_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define CUPYFA_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define CUPYFA_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define CUPYFA_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define CUPYFA_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define CUPYFA_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define CUPYFA_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define CUPYFA_REGISTERS_16 CUPYFA_R0
#define CUPYFA_REGISTERS_32 CUPYFA_R0 ", " CUPYFA_R1
#define CUPYFA_REGISTERS_48 CUPYFA_REGISTERS_32 ", " CUPYFA_R2
#define CUPYFA_REGISTERS_64 CUPYFA_REGISTERS_48 ", " CUPYFA_R3
#define CUPYFA_REGISTERS_80 CUPYFA_REGISTERS_64 ", " CUPYFA_R4
#define CUPYFA_REGISTERS_96 CUPYFA_REGISTERS_80 ", " CUPYFA_R5
#define CUPYFA_REGISTERS_112 CUPYFA_REGISTERS_96 ", " CUPYFA_R6
#define CUPYFA_REGISTERS_128 CUPYFA_REGISTERS_112 ", " CUPYFA_R7
#define CUPYFA_REGISTERS_144 CUPYFA_REGISTERS_128 ", " CUPYFA_R8
#define CUPYFA_REGISTERS_160 CUPYFA_REGISTERS_144 ", " CUPYFA_R9
#define CUPYFA_REGISTERS_176 CUPYFA_REGISTERS_160 ", " CUPYFA_R10
#define CUPYFA_REGISTERS_192 CUPYFA_REGISTERS_176 ", " CUPYFA_R11
#define CUPYFA_REGISTERS_224 CUPYFA_REGISTERS_192 ", " CUPYFA_R12 ", " CUPYFA_R13
#define CUPYFA_REGISTERS_256 CUPYFA_REGISTERS_224 ", " CUPYFA_R14 ", " CUPYFA_R15
#define CUPYFA_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define CUPYFA_D_16 CUPYFA_D8(0)
#define CUPYFA_D_32 CUPYFA_D8(0), CUPYFA_D8(8)
#define CUPYFA_D_48 CUPYFA_D_32, CUPYFA_D8(16)
#define CUPYFA_D_64 CUPYFA_D_48, CUPYFA_D8(24)
#define CUPYFA_D_80 CUPYFA_D_64, CUPYFA_D8(32)
#define CUPYFA_D_96 CUPYFA_D_80, CUPYFA_D8(40)
#define CUPYFA_D_112 CUPYFA_D_96, CUPYFA_D8(48)
#define CUPYFA_D_128 CUPYFA_D_112, CUPYFA_D8(56)
#define CUPYFA_D_144 CUPYFA_D_128, CUPYFA_D8(64)
#define CUPYFA_D_160 CUPYFA_D_144, CUPYFA_D8(72)
#define CUPYFA_D_176 CUPYFA_D_160, CUPYFA_D8(80)
#define CUPYFA_D_192 CUPYFA_D_176, CUPYFA_D8(88)
#define CUPYFA_D_224 CUPYFA_D_192, CUPYFA_D8(96), CUPYFA_D8(104)
#define CUPYFA_D_256 CUPYFA_D_224, CUPYFA_D8(112), CUPYFA_D8(120)

#define CUPYFA_WGMMA(N, TYPE, A, B, ACCUMULATE, SCALE_A, TRANS) \
  "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " ACCUMULATE \
  ", 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" CUPYFA_REGISTERS_##N \
      "}, " A ", " B ", accumulate, " SCALE_A ", 1, " TRANS ";\n}"

// The operands after the N/2 accumulators are numbered c0, c1, ...: the caller of the macro does the sum.
#define CUPYFA_WGMMA_SHAPE(N, c0, c1, c2, c3, c4, c5, c6, c7) \
  template <> \
  struct wgmma_m64k16<N> { \
    template <DType dtype, int scale_a, int trans_b, int trans_a = 0> \
    __device__ static void ss(float (&d)[N / 2], u64 a, u64 b, u32 accumulate) { \
      if constexpr (dtype == DType::bfloat16) { \
        asm volatile(CUPYFA_WGMMA(N, "bf16", c0, c1, c2, c3, c4 ", " c5) \
                     : CUPYFA_D_##N \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(scale_a), "n"(trans_a), "n"(trans_b)); \
      } else { \
        asm volatile(CUPYFA_WGMMA(N, "f16", c0, c1, c2, c3, c4 ", " c5) \
                     : CUPYFA_D_##N \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(scale_a), "n"(trans_a), "n"(trans_b)); \
      } \
    } \
    template <DType dtype, int scale_a, int trans_b> \
    __device__ static void rs(float (&d)[N / 2], const u32* a, u64 b, u32 accumulate) { \
      if constexpr (dtype == DType::bfloat16) { \
        asm volatile(CUPYFA_WGMMA(N, "bf16", "{" c0 ", " c1 ", " c2 ", " c3 "}", c4, c5, c6, c7) \
                     : CUPYFA_D_##N \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(scale_a), \
                       "n"(trans_b)); \
      } else { \
        asm volatile(CUPYFA_WGMMA(N, "f16", "{" c0 ", " c1 ", " c2 ", " c3 "}", c4, c5, c6, c7) \
                     : CUPYFA_D_##N \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(scale_a), \
                       "n"(trans_b)); \
      } \
    } \
  };

CUPYFA_WGMMA_SHAPE(16, "%8", "%9", "%10", "%11", "%12", "%13", "%14", "%15")
CUPYFA_WGMMA_SHAPE(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23")
CUPYFA_WGMMA_SHAPE(48, "%24", "%25", "%26", "%27", "%28", "%29", "%30", "%31")
CUPYFA_WGMMA_SHAPE(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39")
CUPYFA_WGMMA_SHAPE(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46", "%47")
CUPYFA_WGMMA_SHAPE(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55")
CUPYFA_WGMMA_SHAPE(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62", "%63")
CUPYFA_WGMMA_SHAPE(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71")
CUPYFA_WGMMA_SHAPE(144, "%72", "%73", "%74", "%75", "%76", "%77", "%78", "%79")
CUPYFA_WGMMA_SHAPE(160, "%80", "%81", "%82", "%83", "%84", "%85", "%86", "%87")
CUPYFA_WGMMA_SHAPE(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94", "%95")
CUPYFA_WGMMA_SHAPE(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103")
CUPYFA_WGMMA_SHAPE(224, "%112", "%113", "%114", "%115", "%116", "%117", "%118", "%119")
CUPYFA_WGMMA_SHAPE(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135")

#undef CUPYFA_WGMMA_SHAPE
#undef CUPYFA_WGMMA
#undef CUPYFA_D8

}  // namespace cupyfa::ptx
