// The end of a key tile: dK and dV are rounded and leave through the shared memory of K and V. Where other CTAs have the
// other query heads of these keys, they leave as they are: the postprocess kernel will add them.
#pragma once
#include "hopper/bwd/key_place.cuh"
#include "hopper/bwd/key_tile.cuh"
#include "hopper/bwd/storage.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "sum_layout.cuh"

namespace cupyfa::hopper {

/// Rounds a warpgroup's part of a gradient into its place in a tile.
template <BwdSpec S, int columns>
__device__ inline void stage_gradient(const float (&gradient)[OwnColumns<S, columns>::count / 2], float scale,
                                      const KeyPlace<S>& place, SharedAddress data) {
  OwnColumns<S, columns>::each_piece(place.warpgroup, [&]<int width, int first>(int first_column) {
#pragma unroll
    for (int i = 0; i < width; i += 16) {
      const float* x = &gradient[(first + i) / 2];
      const auto round = [&](int j) { return ptx::cvt_rn_x2<S.dtype>(x[j] * scale, x[j + 1] * scale); };
      const int column = first_column + i;
      const SharedAddress panel = data + column / panel_cols * panel_bytes(S.tile_n) + place.matrix_row();
      ptx::stmatrix_x4(swizzled_pair(panel, column % panel_cols / 16), round(0), round(2), round(4), round(6));
    }
  });
}

/// Starts to store a tile, or this warpgroup's keys of it. Rows and columns outside the tensor, or behind the sequence, are
/// not written.
template <BwdSpec S, int columns>
__device__ inline void issue_store(const TensorMap& map, const KeyPlace<S>& place, const KeyTileOf<S>& tile,
                                   SharedAddress data) {
  const int row = place.first_key();
#pragma unroll
  for (int panel = 0; panel < panels(columns); ++panel) {
    store_box<S.varlen>(map, panel * panel_cols, tile.keys(tile.n * S.tile_n + row),
                        data + panel * panel_bytes(S.tile_n) + panel_bytes(row));
  }
}

/// Stores it as it is, for the postprocess kernel.
template <BwdSpec S, int columns>
__device__ inline void store_part(float* parts, const float (&gradient)[OwnColumns<S, columns>::count / 2],
                                  const BwdParams& p, const KeyPlace<S>& place, const KeyTileOf<S>& tile) {
  const u64 heads = gridDim.x / p.tiles_n / p.parts, head = tile.batch * p.heads_kv + tile.head;
  const u64 number = (tile.part * heads + head) * p.tiles_n + tile.n;
  float* of_tile = parts + number * (S.tile_n * columns) + sum_floats * place.thread();
  OwnColumns<S, columns>::each_piece(place.warpgroup, [&]<int width, int first>(int column) {
    float* own = of_tile + sum_offset<columns>(place.first_key(), column);
#pragma unroll
    for (int i = 0; i < width / 2; i += sum_floats) {
      const float* x = &gradient[first / 2 + i];
      *reinterpret_cast<float4*>(own + i / sum_floats * sum_group) = {x[0], x[1], x[2], x[3]};
    }
  });
}

template <BwdSpec S>
__device__ inline void store_gradients(const BwdParams& p, BwdStorage<S>& storage, const KeyPlace<S>& place,
                                       const KeyTileOf<S>& tile,
                                       const float (&dK)[OwnColumns<S, S.head_dim>::count / 2],
                                       const float (&dV)[OwnColumns<S, S.head_dim_v>::count / 2]) {
  if constexpr (S.partial) {
    store_part<S, S.head_dim_v>(p.dv_parts, dV, p, place, tile);
    store_part<S, S.head_dim>(p.dk_parts, dK, p, place, tile);
  } else {
    const SharedAddress k = shared_address(storage.k), v = shared_address(storage.v);
    stage_gradient<S, S.head_dim_v>(dV, 1.f, place, v);
    stage_gradient<S, S.head_dim>(dK, p.scale, place, k);
    ptx::fence_proxy_async_shared_cta();
    // Proves that what a thread stores is staged: the keys of a warpgroup, or a gradient where both share the keys.
    if constexpr (S.wide()) {
      ptx::bar_sync(staged_barrier, warpgroup_threads * S.consumers());
    } else {
      ptx::bar_sync(staged_barrier + place.warpgroup, warpgroup_threads);
    }
    if (place.thread() == 0) {
      if (!S.wide() || place.warpgroup == 0) issue_store<S, S.head_dim_v>(p.dv, place, tile, v);
      if (!S.wide() || place.warpgroup == 1) issue_store<S, S.head_dim>(p.dk, place, tile, k);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();  // shared memory must outlive the copy
    }
  }
}

}  // namespace cupyfa::hopper
