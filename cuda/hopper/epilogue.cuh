// The end of a tile: O is normalised, rounded and stored by TMA through the shared memory of its Q.
#pragma once
#include "hopper/place.cuh"
#include "hopper/storage.cuh"
#include "params.h"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "softmax.cuh"
#include "tile_scheduler.cuh"

namespace cupyfa::hopper {

template <FwdSpec S>
__device__ inline void store_lse(const FwdParams& p, const Tile& tile, const Place<S>& place, const RowPair& lse) {
  if (p.lse == nullptr || place.lane % 4 != 0) return;
  float* head = p.lse + tile.batch * p.lse_stride_batch + tile.head * p.lse_stride_head;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = tile.m * S.tile_m + place.row + 8 * r;
    if (row < p.seqlen_q) head[row * p.lse_stride_row] = lse.row[r];
  }
}

/// Rounds a warpgroup's O into its rows of the slot.
template <FwdSpec S>
__device__ inline void stage_output(const float (&O)[S.head_dim / 2], const RowPair& inverse, const Place<S>& place,
                                    const Slot& slot) {
  const int row = 16 * place.warp + place.lane % 16;
#pragma unroll
  for (int column = 0; column < S.head_dim; column += 16) {
    const float* o = &O[column / 2];  // 8 accumulators: two 8x8 blocks, rows g and g + 8
    const auto round = [&](int i) {
      const float factor = inverse.row[i / 2 % 2];
      return ptx::cvt_rn_x2<S.dtype>(o[i] * factor, o[i + 1] * factor);
    };
    const SharedAddress panel = place.rows_of(slot.data + column / panel_cols * panel_bytes(S.tile_m));
    const int chunk = column % panel_cols / 8 + place.lane / 16;
    ptx::stmatrix_x4(swizzled_chunk(panel, row, chunk), round(0), round(2), round(4), round(6));
  }
}

/// Stores a warpgroup's O and gives the Q slot back.
template <FwdSpec S>
__device__ inline void store_output(const FwdParams& p, const float (&O)[S.head_dim / 2], const RowPair& inverse,
                                    const Tile& tile, const Place<S>& place, const Slot& slot) {
  const int barrier = epilogue_barrier + place.warpgroup;
  ptx::bar_sync(barrier, warpgroup_threads);  // proves that all four warps have finished reading Q
  stage_output<S>(O, inverse, place, slot);
  ptx::fence_proxy_async_shared_cta();
  ptx::bar_sync(barrier, warpgroup_threads);  // proves that all rows are staged, and visible to TMA
  if (place.warp == 0 && place.lane == 0) {
    const int row = tile.m * S.tile_m + warpgroup_rows * place.warpgroup;
#pragma unroll
    for (int panel = 0; panel < S.panels(); ++panel) {
      ptx::cp_async_bulk_tensor_4d_store(p.o, panel * panel_cols, row, tile.head, tile.batch,
                                         place.rows_of(slot.data + panel * panel_bytes(S.tile_m)));
    }
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();  // proves that O has been read: the slot may take the next Q
    Storage<S>::QConsumer::release(slot);
  }
}

}  // namespace cupyfa::hopper
