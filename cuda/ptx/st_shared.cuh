// Stores from registers to shared memory.
#pragma once
#include "ptx/types.cuh"

namespace cupyfa::ptx {

/// Four words; the address is a multiple of 16.
__device__ inline void st_shared_v4(SharedAddress address, const u32 (&words)[4]) {
  asm volatile("st.shared::cta.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

}  // namespace cupyfa::ptx
