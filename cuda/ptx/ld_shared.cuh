// Loads from shared memory into registers.
#pragma once
#include "ptx/types.cuh"

namespace cupyfa::ptx {

/// A word; the address is a multiple of 4.
__device__ inline u32 ld_shared(SharedAddress address) {
  u32 word;
  asm volatile("ld.shared::cta.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

/// Two words; the address is a multiple of 8.
__device__ inline void ld_shared_v2(SharedAddress address, u32& w0, u32& w1) {
  asm volatile("ld.shared::cta.v2.b32 {%0, %1}, [%2];" : "=r"(w0), "=r"(w1) : "r"(address) : "memory");
}

/// Four words; the address is a multiple of 16.
__device__ inline void ld_shared_v4(SharedAddress address, u32 (&words)[4]) {
  asm volatile("ld.shared::cta.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

/// Four 8x8 matrices of 16-bit elements (PTX ISA, "ldmatrix"): lane l gives the address of row l % 8 of matrix l / 8, and
/// gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each.
__device__ inline void ldmatrix_x4(SharedAddress row, u32& m0, u32& m1, u32& m2, u32& m3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
               : "r"(row)
               : "memory");
}

/// Two such matrices, transposed: lanes 0 to 15 give the addresses of their rows, and a lane gets elements 2 (l % 4) and
/// 2 (l % 4) + 1 of column l / 4 of each.
__device__ inline void ldmatrix_x2_trans(SharedAddress row, u32& m0, u32& m1) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 {%0, %1}, [%2];"
               : "=r"(m0), "=r"(m1)
               : "r"(row)
               : "memory");
}

}  // namespace cupyfa::ptx
