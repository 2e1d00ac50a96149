// Shared-memory tiles and how WGMMA is told about them.
//
// Every tile of 16-bit elements is stored in panels of 64 columns: [panel][row][128 bytes], as TMA writes a box of 64
// columns with CU_TENSOR_MAP_SWIZZLE_128B. The swizzle exchanges the 16-byte chunks of a row: chunk ^= row % 8, on
// absolute shared-memory addresses, so a tile starts at a multiple of 1024 bytes.
#pragma once
#include "ptx/types.cuh"

namespace cupyfa {

constexpr int panel_cols = 64;
constexpr int panel_row_bytes = 128;
constexpr int swizzle_atom_bytes = 1024;  // 8 rows

constexpr int panel_bytes(int rows) { return rows * panel_row_bytes; }

/// Panels of a tile; the last one may be filled in part.
constexpr int panels(int columns) { return (columns + panel_cols - 1) / panel_cols; }

/// A matrix descriptor (PTX ISA, "Matrix descriptor format" of wgmma), in units of 16 bytes: the start address in bits 0
/// to 13, the leading byte offset in 16 to 29, the stride byte offset in 32 to 45; bit 62 selects the 128-byte swizzle.
/// Only the lower word depends on the address, and an offset never carries out of the address field: shared memory ends
/// below 2^18. So a step through a tile is one addition.
struct Descriptor {
  u32 low, high;

  __device__ static Descriptor swizzled(SharedAddress start, int leading_bytes, int stride_bytes) {
    return {(u32(leading_bytes >> 4) << 16) | (start >> 4), (1u << 30) | u32(stride_bytes >> 4)};
  }

  /// The same operand, `bytes` further on.
  __device__ u64 at(int bytes) const { return (u64{high} << 32) | (low + u32(bytes >> 4)); }
};

/// An address as a descriptor has it. In a cluster, that of a CTA other than the first has the CTA's rank in its upper bits,
/// which would reach into the leading byte offset.
__device__ inline SharedAddress in_own_cta(SharedAddress address) { return address & 0x3ffff; }

/// Contiguous along K (Q and K in Q K'). Groups of 8 rows follow each other; the leading offset is not used.
__device__ inline Descriptor k_major(SharedAddress start) {
  return Descriptor::swizzled(start, 16, swizzle_atom_bytes);
}

/// Contiguous along N (V in P V): the leading offset goes from a panel of 64 columns to the next.
__device__ inline Descriptor mn_major(SharedAddress start, int rows) {
  return Descriptor::swizzled(start, panel_bytes(rows), swizzle_atom_bytes);
}

/// The address of a 16-byte chunk of a row in a panel.
__device__ inline SharedAddress swizzled_chunk(SharedAddress panel, int row, int chunk) {
  return panel + row * panel_row_bytes + ((chunk ^ (row & 7)) << 4);
}

/// The same of every second chunk: `first` is the address of chunk 0 or 1 of a row, and this is that of chunk 2 `pair` or
/// 2 `pair` + 1. An exchange of chunks has nothing to do with the bits above.
__device__ inline SharedAddress swizzled_pair(SharedAddress first, int pair) { return first ^ (pair << 5); }

}  // namespace cupyfa
