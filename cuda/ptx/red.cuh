// Reductions in global memory (PTX ISA, "red"), and a load that sees what was written before one of them.
#pragma once
#include "ptx/types.cuh"

namespace cupyfa::ptx {

/// Adds four floats, each by itself. The address is a multiple of 16.
__device__ inline void red_add_v4(float* address, float x0, float x1, float x2, float x3) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x0), "f"(x1), "f"(x2),
               "f"(x3)
               : "memory");
}

/// Adds one, behind all that this thread has written before.
__device__ inline void red_release_increment(u32* address) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(address) : "memory");
}

__device__ inline u32 ld_acquire(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

}  // namespace cupyfa::ptx
