// The sum of dQ over key tiles, in global memory: a warpgroup adds its part of each query tile.
#pragma once
#include "hopper/bwd/gemm.cuh"
#include "hopper/bwd/key_tile.cuh"
#include "hopper/bwd/key_place.cuh"
#include "hopper/bwd/storage.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/red.cuh"
#include "ptx/st_shared.cuh"
#include "ptx/tma.cuh"
#include "sum_layout.cuh"

namespace cupyfa::hopper {

/// A part of a query tile of a head.
template <BwdSpec S>
struct SumPart {
  u64 tile;  // of all heads
  int part;

  __device__ static SumPart of(const BwdParams& p, const KeyTileOf<S>& keys, const QueryTile& query, int part) {
    return {keys.template first_query_tile<S>(p, query.head) + query.m, part};
  }
  __device__ float* sum(const BwdParams& p, int column) const {
    return p.dq + tile * (S.tile_m * S.head_dim) + sum_offset<S.head_dim>(DqPart<S>::first_row(part), column);
  }
  __device__ u32* turn(const BwdParams& p) const { return p.turns + tile * DqPart<S>::of_tile + part; }
};

/// Adds in any order, each thread for itself.
template <BwdSpec S>
class QuerySum {
 public:
  __device__ QuerySum(const BwdParams& p, BwdStorage<S>&, const KeyTileOf<S>& tile, const KeyPlace<S>& place)
      : p_(p), tile_(tile), place_(place) {}

  __device__ void add(const float (&dQ)[DqPart<S>::values], const QueryTile& query, int part) {
    const SumPart<S> sum = SumPart<S>::of(p_, tile_, query, part);
    DqPart<S>::each_piece(part, [&]<int width, int first>(int column) {
      float* own = sum.sum(p_, column) + sum_floats * place_.thread();
#pragma unroll
      for (int i = 0; i < width / 2; i += sum_floats) {
        const float* x = &dQ[first / 2 + i];
        ptx::red_add_v4(own + i / sum_floats * sum_group, x[0], x[1], x[2], x[3]);
      }
    });
  }

 private:
  const BwdParams& p_;
  const KeyTileOf<S>& tile_;
  const KeyPlace<S>& place_;
};

/// Leaves a part in shared memory for a thread that waits for its turn to add it.
template <BwdSpec S>
  requires(S.deterministic)
class QuerySum<S> {
 public:
  __device__ QuerySum(const BwdParams&, BwdStorage<S>& storage, const KeyTileOf<S>&, const KeyPlace<S>& place)
      : place_(place), parts_(storage.dq.parts[place.warpgroup], storage.dq.barriers[place.warpgroup]) {}

  __device__ void add(const float (&dQ)[DqPart<S>::values], const QueryTile&, int) {
    const Slot slot = parts_.acquire();
#pragma unroll
    for (int i = 0; i < DqPart<S>::values; i += 4) {
      const u32 words[4] = {__float_as_uint(dQ[i]), __float_as_uint(dQ[i + 1]), __float_as_uint(dQ[i + 2]),
                            __float_as_uint(dQ[i + 3])};
      ptx::st_shared_v4(slot.data + 16 * place_.thread() + i * warpgroup_threads * int(sizeof(float)), words);
    }
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    if (place_.lane() == 0) ptx::mbarrier_arrive(slot.full);
  }

 private:
  const KeyPlace<S>& place_;
  typename DqStorage<S>::Writer parts_;
};

/// The adder role: one thread for each consumer warpgroup, whose parts it takes in their order. CTAs with later keys add before this one.
template <BwdSpec S>
__device__ void add_in_turn(const BwdParams& p, BwdStorage<S>& storage, int warpgroup) {
  const KeptKeyTile<S> tile = key_tile(p, storage);
  typename DqStorage<S>::Consumer parts(storage.dq.parts[warpgroup], storage.dq.barriers[warpgroup]);
  for (Steps step(QueryRange::of<S>(p, tile), tile); step.any(); step.advance()) {
    const QueryTile query = step.tile();
    const u32 predecessors = last_key_tile<S>(p, tile, query.m) - tile.n;
#pragma unroll 1  // registers of this role are few
    for (int i = 0; i < DqPart<S>::of_warpgroup; ++i) {
      const SumPart<S> part = SumPart<S>::of(p, tile, query, DqPart<S>::of_warpgroup * warpgroup + i);
      const Slot slot = parts.wait();
      while (ptx::ld_acquire(part.turn(p)) != predecessors) {}
      ptx::fence_proxy_async_global();  // what the predecessors have added comes before
      DqPart<S>::each_piece(part.part, [&]<int width, int first>(int column) {
        constexpr int column_bytes = warpgroup_rows * int(sizeof(float));
        ptx::cp_reduce_async_bulk_add_f32(part.sum(p, column), slot.data + first * column_bytes, width * column_bytes);
      });
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();  // proves that the part has been read
      release(slot);
      ptx::cp_async_bulk_wait_group<0>();  // proves the sum
      ptx::fence_proxy_async_global();
      ptx::red_release_increment(part.turn(p));
    }
  }
}

}  // namespace cupyfa::hopper
