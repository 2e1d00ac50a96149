// Where a tile of sums of gradients has what a thread holds of it.
//
// Sums are stored as accumulators of WGMMA: for every 64 rows of a tile, for every eight of its columns, four floats of each
// thread of a warpgroup, so that a warp stores 512 bytes in a row. Whose accumulators they are, and of which products, does
// not matter: thread t has the rows 16 * warp + lane / 4 + {0, 8} and the columns 2 * (lane % 4) + {0, 1} of the eight.
#pragma once
#include "ptx/types.cuh"
#include "spec.cuh"

namespace cupyfa {

constexpr int sum_columns = 8;
constexpr int sum_floats = 4;  // of a thread
constexpr int sum_group = sum_floats * warpgroup_threads;

/// The floats of a warpgroup that begin at these rows (a multiple of 64) and this column (a multiple of 8).
template <int columns>
__device__ constexpr int sum_offset(int row, int column) {
  return (row / warpgroup_rows * (columns / sum_columns) + column / sum_columns) * sum_group;
}

}  // namespace cupyfa
