// Where the rows of a tile lie in the tensor maps, and the copies of a box of them.
#pragma once
#include "params.h"
#include "ptx/tma.cuh"
#include "tile_scheduler.cuh"

namespace cupyfa::hopper {

/// Coordinates of a head's rows: along seqlen, heads and batch, or what packed sequences have instead (FwdParams).
struct Rows {
  int first, head, batch;

  template <FwdSpec S>
  __device__ static Rows of_q(const TileOf<S>& tile) {
    const int row = tile.m * S.tile_m;
    if constexpr (S.varlen) {
      return {packed_rows - tile.seqlen_q + row, tile.head, tile.q_begin + tile.seqlen_q};
    } else {
      return {row, tile.head, tile.batch};
    }
  }

  template <FwdSpec S>
  __device__ static Rows of_k(const TileOf<S>& tile) {
    if constexpr (S.varlen) {
      return {packed_rows - tile.seqlen_k, tile.head_kv, tile.k_begin + tile.seqlen_k};
    } else {
      return {0, tile.head_kv, tile.batch};
    }
  }
};

/// A box to shared memory, counted by the mbarrier.
template <bool varlen>
__device__ inline void load_box(SharedAddress box, const TensorMap& map, int column, const Rows& rows,
                                SharedAddress barrier) {
  if constexpr (varlen) {
    ptx::cp_async_bulk_tensor_5d_load(box, map, column, rows.first, rows.head, rows.batch, packed_rows, barrier);
  } else {
    ptx::cp_async_bulk_tensor_4d_load(box, map, column, rows.first, rows.head, rows.batch, barrier);
  }
}

/// A box from shared memory, in this thread's bulk group.
template <bool varlen>
__device__ inline void store_box(const TensorMap& map, int column, const Rows& rows, SharedAddress box) {
  if constexpr (varlen) {
    ptx::cp_async_bulk_tensor_5d_store(map, column, rows.first, rows.head, rows.batch, packed_rows, box);
  } else {
    ptx::cp_async_bulk_tensor_4d_store(map, column, rows.first, rows.head, rows.batch, box);
  }
}

}  // namespace cupyfa::hopper
