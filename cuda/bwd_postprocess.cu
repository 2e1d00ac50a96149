// After the gradients: sums are scaled, rounded, and brought into the order of the user's array.
#include "bwd_params.h"
#include "packed_rows.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/griddepcontrol.cuh"
#include "spec.cuh"
#include "sum_layout.cuh"

namespace cupyfa {

constexpr int postprocess_warpgroups = 2;
constexpr int postprocess_threads = postprocess_warpgroups * warpgroup_threads;

/// A CTA has a tile of a head, and a thread the sums of the thread of a consumer with its number. Parts are added in their
/// order.
template <PostprocessSpec S>
__global__ void __launch_bounds__(postprocess_threads) postprocess(const __grid_constant__ PostprocessParams p) {
  constexpr int pitch = S.head_dim / 2 + 4;  // words; rows then begin in different banks
  constexpr int groups = S.tile_m / warpgroup_rows * S.head_dim / sum_columns;
  constexpr int own_groups = groups / postprocess_warpgroups;
  constexpr int together = own_groups % 8 == 0 ? 8 : own_groups % 6 == 0 ? 6 : own_groups;  // loads in flight at a time
  static_assert(own_groups % together == 0);
  extern __shared__ __align__(16) u32 tile[];
  const u32 head_in_all = blockIdx.x / p.tiles, m = blockIdx.x - head_in_all * p.tiles;
  const int batch = head_in_all / p.heads, head = head_in_all - batch * p.heads;
  const int warpgroup = threadIdx.x / warpgroup_threads, thread = threadIdx.x % warpgroup_threads;
  const float4* sums = reinterpret_cast<const float4*>(p.sums + u64(blockIdx.x) * (S.tile_m * S.head_dim)) + thread;
  ptx::griddepcontrol_wait();  // proves the sums

  PackedRows rows = {int(m) * S.tile_m, p.seqlen - int(m) * S.tile_m, S.tile_m};
  if (p.cu_seqlens != nullptr) {
    rows = PackedRows::of<postprocess_threads>(p.cu_seqlens, p.seqused, p.plan, p.seqlen, S.tile_m, m);
    if (rows.count <= 0) return;
  }
  for (int first = rows.used > 0 ? warpgroup : groups; first < groups; first += together * postprocess_warpgroups) {
    float4 x[together];
#pragma unroll
    for (int i = 0; i < together; ++i) x[i] = sums[(first + i * postprocess_warpgroups) * warpgroup_threads];
#pragma unroll 1  // its loads are in flight together as they are
    for (int part = 1; part < p.parts; ++part) {
      const float4* others = sums + part * (p.part_stride / 4);
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const float4 other = others[(first + i * postprocess_warpgroups) * warpgroup_threads];
        x[i] = {x[i].x + other.x, x[i].y + other.y, x[i].z + other.z, x[i].w + other.w};
      }
    }
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const int group = first + i * postprocess_warpgroups;
      const int row = group / (S.head_dim / sum_columns) * warpgroup_rows + 16 * (thread / 32) + thread % 32 / 4;
      u32* to = &tile[row * pitch + group % (S.head_dim / sum_columns) * 4 + thread % 4];
      to[0] = ptx::cvt_rn_x2<S.dtype>(x[i].x * p.scale, x[i].y * p.scale);
      to[8 * pitch] = ptx::cvt_rn_x2<S.dtype>(x[i].z * p.scale, x[i].w * p.scale);
    }
  }
  __syncthreads();  // proves the tile

  u16* out = static_cast<u16*>(p.out) + batch * p.out_strides.batch + head * p.out_strides.head;
  const int count = min(S.tile_m, rows.count);
  for (int i = threadIdx.x; i < count * (S.head_dim / 8); i += postprocess_threads) {
    const int row = i / (S.head_dim / 8), column = i % (S.head_dim / 8) * 8;
    if (column >= p.head_dim) continue;
    uint4 x = {};  // of rows that are no sequence's
    if (row < rows.used) x = *reinterpret_cast<const uint4*>(&tile[row * pitch + column / 2]);
    u16* to = out + (rows.first + row) * p.out_strides.row + column * p.out_strides.column;
    if (p.vectors) {
      *reinterpret_cast<uint4*>(to) = x;
      continue;
    }
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (column + j < p.head_dim) to[j * p.out_strides.column] = words[j / 2] >> 16 * (j % 2);
    }
  }
}

template <PostprocessSpec S>
__constant__ KernelTraits postprocess_traits = {
    .threads = postprocess_threads,
    .shared_bytes = S.tile_m * (S.head_dim / 2 + 4) * int(sizeof(u32)),
    .cluster_size = 1,
    .tile_m = S.tile_m,
};

}  // namespace cupyfa
