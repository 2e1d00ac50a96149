// Where a thread of a consumer warpgroup stands in a query tile.
#pragma once
#include "layout.cuh"
#include "mask.cuh"
#include "params.h"
#include "score_mod.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

/// The thread owns the rows `row()` and `row() + 8` of the tile (accumulator layout of WGMMA).
template <FwdSpec S>
struct Place {
  int warpgroup;

  __device__ static Place of_thread() {
    const int thread = threadIdx.x - warpgroup_threads * S.producers();  // the producer comes first
    // Read from lane 0, the warpgroup is known to be uniform: descriptors are then computed once for the warp, in uniform
    // registers (measured: no spills with three warpgroups, 28 fewer instructions in the mainloop).
    return {__shfl_sync(0xffffffff, thread / warpgroup_threads, 0)};
  }

  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int warp() const { return threadIdx.x / 32 % 4; }
  __device__ int column() const { return 2 * (lane() % 4); }  // the first one in a block
  __device__ int row() const { return warpgroup_rows * warpgroup + 16 * warp() + lane() / 4; }

  /// All warpgroups walk the blocks of the whole tile, so that they take equal turns; each masks for its own rows, and one
  /// above the diagonal may mask a whole block.
  __device__ BlockRange blocks_of(const Sequence<S>& sequence, int m) const {
    const int row = m * S.tile_m, own = row + warpgroup_rows * warpgroup;
    const BlockRange all = BlockRange::of<S>(sequence, row, row + S.tile_m);
    const BlockRange masked = BlockRange::of<S>(sequence, own, own + warpgroup_rows);
    return {all.begin, masked.low, masked.full, all.end};
  }

  __device__ Mask<S> mask_of(const Sequence<S>& sequence, int m) const {
    return {sequence, m * S.tile_m + row(), column()};
  }

  __device__ ScoreMod<S> score_mod_of(const FwdParams& p, const TileOf<S>& tile) const {
    return {p, tile, tile.m * S.tile_m + row(), column()};
  }

  /// The 64 rows of this warpgroup in a panel of a tile with tile_m rows.
  __device__ SharedAddress rows_of(SharedAddress panel) const {
    return panel + panel_bytes(warpgroup_rows * warpgroup);
  }
};

}  // namespace cupyfa::hopper
