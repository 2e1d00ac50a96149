// The end of a tile: O is normalised, rounded and handed to the storer in the shared memory of its Q.
#pragma once
#include "hopper/place.cuh"
#include "hopper/storage.cuh"
#include "params.h"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/stmatrix.cuh"
#include "score_mod.cuh"
#include "softmax.cuh"
#include "tile_scheduler.cuh"

namespace cupyfa::hopper {

/// Closes the rows of a tile, with the learnable logit of its head if heads have one. With a softcap, logits have been too
/// small by it.
template <FwdSpec S, class Softmax>
__device__ inline RowPair close_rows(const FwdParams& p, const TileOf<S>& tile, const Softmax& softmax, RowPair& lse) {
  const float shift = S.softcap ? p.softcap : 0.f;
  RowPair inverse;
  if constexpr (S.sink) {
    inverse = softmax.finish(lse, Softmax::of_natural(p.sink[tile.head * p.sink_stride] - shift));
  } else {
    inverse = softmax.finish(lse);
  }
  if constexpr (S.softcap) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Never contracted: this code is there twice, and a tile's bits must not depend on which one closes it.
      lse.row[r] = __fadd_rn(lse.row[r], shift);
    }
  }
  return inverse;
}

template <FwdSpec S>
__device__ inline void store_lse(const FwdParams& p, const TileOf<S>& tile, const Place<S>& place, const RowPair& lse) {
  if (p.lse == nullptr || place.lane() % 4 != 0) return;
  float* head = p.lse + tile.head * p.lse_stride_head + tile.batch * p.lse_stride_batch;
  if constexpr (S.varlen) head += (tile.q_begin - tile.batch * p.q_step) * p.lse_stride_row;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = tile.m * S.tile_m + place.row() + 8 * r;
    if (row < Sequence<S>(p, tile).seqlen_q()) head[row * p.lse_stride_row] = lse.row[r];
  }
}

/// A row without keys is 0, whatever the V that its probabilities of 0 were multiplied with. Such rows are rare, so that a
/// vote costs less than to look at each number.
template <FwdSpec S>
__device__ inline void clear_rows_without_keys(float (&O)[S.head_dim_v / 2], const RowPair& inverse) {
  const bool empty[2] = {__float_as_uint(inverse.row[0]) == 0, __float_as_uint(inverse.row[1]) == 0};  // +0
  if (__all_sync(0xffffffff, !empty[0] && !empty[1])) return;
#pragma unroll
  for (int i = 0; i < S.head_dim_v / 2; ++i) {
    if (empty[i / 2 % 2]) O[i] = 0.f;
  }
}

/// Rounds a warpgroup's O into its rows of the slot.
template <FwdSpec S>
__device__ inline void stage_output(const float (&O)[S.head_dim_v / 2], const RowPair& inverse, const Place<S>& place,
                                    SharedAddress slot) {
  const int thread = threadIdx.x, lane = thread % 32;
  const int row = 16 * (thread / 32 % 4) + lane % 16;  // of the address that this lane gives to stmatrix
#pragma unroll
  for (int column = 0; column < S.head_dim_v; column += 16) {
    const float* o = &O[column / 2];  // 8 accumulators: two 8x8 blocks, rows g and g + 8
    const auto round = [&](int i) {
      const int r = i / 2 % 2;
      return ptx::cvt_rn_x2<S.dtype>(o[i] * inverse.row[r], o[i + 1] * inverse.row[r]);
    };
    const SharedAddress panel = place.rows_of(slot + column / panel_cols * panel_bytes(S.tile_m));
    const int chunk = column % panel_cols / 8 + lane / 16;
    ptx::stmatrix_x4(swizzled_chunk(panel, row, chunk), round(0), round(2), round(4), round(6));
  }
}

/// Leaves a warpgroup's O in the slot of its Q, for the storer.
template <FwdSpec S>
__device__ inline void hand_over(const float (&O)[S.head_dim_v / 2], const RowPair& inverse, const Place<S>& place,
                                 SharedAddress slot, SharedAddress staged) {
  // Proves that all four warps have finished reading Q.
  ptx::bar_sync(epilogue_barrier + place.warpgroup, warpgroup_threads);
  stage_output<S>(O, inverse, place, slot);
  ptx::fence_proxy_async_shared_cta();
  __syncwarp();
  if (place.lane() == 0) ptx::mbarrier_arrive(staged);
}

}  // namespace cupyfa::hopper
