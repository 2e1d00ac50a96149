// Where a thread of a consumer warpgroup stands in a query tile.
#pragma once
#include "layout.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

/// The thread owns the rows `row()` and `row() + 8` of the tile (accumulator layout of WGMMA).
template <FwdSpec S>
struct Place {
  int warpgroup;

  __device__ static Place of_thread() {
    const int thread = threadIdx.x - warpgroup_threads;  // the first warpgroup is the producer
    // Read from lane 0, the warpgroup is known to be uniform: descriptors are then computed once for the warp, in uniform
    // registers (measured: no spills with three warpgroups, 28 fewer instructions in the mainloop).
    return {__shfl_sync(0xffffffff, thread / warpgroup_threads, 0)};
  }

  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int warp() const { return threadIdx.x / 32 % 4; }
  __device__ int row() const { return warpgroup_rows * warpgroup + 16 * warp() + lane() / 4; }

  /// The 64 rows of this warpgroup in a panel of a tile with tile_m rows.
  __device__ SharedAddress rows_of(SharedAddress panel) const {
    return panel + panel_bytes(warpgroup_rows * warpgroup);
  }
};

}  // namespace cupyfa::hopper
