// mbarrier objects (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").
#pragma once
#include "ptx/types.cuh"

namespace cupyfa::ptx {

__device__ inline void mbarrier_init(SharedAddress barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Makes initialised barriers visible to the async proxy (and to a cluster) before anyone uses them.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// One arrival that also adds `bytes` to what the phase waits for.
__device__ inline void mbarrier_arrive_expect_tx(SharedAddress barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// True once the phase of this parity has completed. May suspend the thread for a while, and may fail spuriously.
__device__ inline bool mbarrier_try_wait_parity(SharedAddress barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace cupyfa::ptx
