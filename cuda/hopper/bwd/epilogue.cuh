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
__device__ inline void stage_gradient(const float (&gradient)[S.own_columns(columns) / 2], float scale,
                                      const KeyPlace<S>& place, SharedAddress data) {
  const SharedAddress row =
      data + place.first_column(columns) / panel_cols * panel_bytes(S.tile_n) + place.matrix_row();
#pragma unroll
  for (int column = 0; column < S.own_columns(columns); column += 16) {
    const float* x = &gradient[column / 2];
    const auto round = [&](int i) { return ptx::cvt_rn_x2<S.dtype>(x[i] * scale, x[i + 1] * scale); };
    const SharedAddress panel = row + column / panel_cols * panel_bytes(S.tile_n);
    ptx::stmatrix_x4(swizzled_pair(panel, column % panel_cols / 16), round(0), round(2), round(4), round(6));
  }
}

/// Starts to store it. Rows and columns outside the tensor are not written.
template <BwdSpec S, int columns>
__device__ inline void issue_store(const TensorMap& map, const KeyPlace<S>& place, const KeyTile& tile,
                                   SharedAddress data) {
  const int row = place.first_key(), first_panel = place.first_column(columns) / panel_cols;
#pragma unroll
  for (int i = 0; i < panels(S.own_columns(columns)); ++i) {
    const int panel = first_panel + i;
    ptx::cp_async_bulk_tensor_4d_store(map, panel * panel_cols, tile.n * S.tile_n + row, tile.head, tile.batch,
                                       data + panel * panel_bytes(S.tile_n) + panel_bytes(row));
  }
}

/// Stores it as it is, for the postprocess kernel.
template <BwdSpec S, int columns>
__device__ inline void store_part(float* parts, const float (&gradient)[S.own_columns(columns) / 2], const BwdParams& p,
                                  const KeyPlace<S>& place, const KeyTile& tile) {
  const u64 heads = gridDim.x / p.tiles_n / p.parts, head = tile.batch * p.heads_kv + tile.head;
  const u64 number = (tile.part * heads + head) * p.tiles_n + tile.n;
  float* own = parts + number * (S.tile_n * columns) +
               sum_offset<columns>(place.first_key(), place.first_column(columns)) + sum_floats * place.thread();
#pragma unroll
  for (int i = 0; i < S.own_columns(columns) / 2; i += sum_floats) {
    *reinterpret_cast<float4*>(own + i / sum_floats * sum_group) = {gradient[i], gradient[i + 1], gradient[i + 2],
                                                                    gradient[i + 3]};
  }
}

template <BwdSpec S>
__device__ inline void store_gradients(const BwdParams& p, BwdStorage<S>& storage, const KeyPlace<S>& place,
                                       const KeyTile& tile, const float (&dK)[S.own_columns(S.head_dim) / 2],
                                       const float (&dV)[S.own_columns(S.head_dim_v) / 2]) {
  if constexpr (S.partial) {
    store_part<S, S.head_dim_v>(p.dv_parts, dV, p, place, tile);
    store_part<S, S.head_dim>(p.dk_parts, dK, p, place, tile);
  } else {
    const SharedAddress k = shared_address(storage.k), v = shared_address(storage.v);
    stage_gradient<S, S.head_dim_v>(dV, 1.f, place, v);
    stage_gradient<S, S.head_dim>(dK, p.scale, place, k);
    ptx::fence_proxy_async_shared_cta();
    ptx::bar_sync(staged_barrier + place.warpgroup, warpgroup_threads);  // proves that all rows are staged
    if (place.thread() == 0) {
      issue_store<S, S.head_dim_v>(p.dv, place, tile, v);
      issue_store<S, S.head_dim>(p.dk, place, tile, k);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();  // shared memory must outlive the copy
    }
  }
}

}  // namespace cupyfa::hopper
