// What the compiler may know.
#pragma once
#include "ptx/types.cuh"

namespace cupyfa::ptx {

/// The same value, of which the compiler no longer knows where it comes from. No instruction.
__device__ inline u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace cupyfa::ptx
