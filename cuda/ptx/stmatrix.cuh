// Stores 8x8 matrices of 16-bit elements from a warp's registers (PTX ISA, "stmatrix").
#pragma once
#include "ptx/types.cuh"

namespace cupyfa::ptx {

/// Four matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void stmatrix_x4(SharedAddress row, u32 m0, u32 m1, u32 m2, u32 m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace cupyfa::ptx
