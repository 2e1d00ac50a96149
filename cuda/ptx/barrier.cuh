// Named barriers of a CTA (PTX ISA, "bar, barrier"): identifiers 0 to 15, of which 0 is __syncthreads().
#pragma once

namespace cupyfa::ptx {

/// Arrives with the whole warp and waits until `threads` threads have arrived.
__device__ inline void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Arrives with the whole warp and goes on.
__device__ inline void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cupyfa::ptx
