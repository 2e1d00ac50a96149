// The producer role: one thread that keeps the rings of Q, K and V filled by TMA (specification 0x03).
#pragma once
#include "hopper/storage.cuh"
#include "mask.cuh"
#include "params.h"
#include "ptx/tma.cuh"
#include "tile_scheduler.cuh"

namespace cupyfa::hopper {

/// Copies `rows` rows of a tensor into a slot, one panel of 64 columns at a time. Rows and columns outside the tensor
/// arrive as zeros.
template <FwdSpec S, int rows>
__device__ inline void load(const TensorMap& map, const Slot& slot, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < S.panels(); ++panel) {
    ptx::cp_async_bulk_tensor_4d_load(slot.data + panel * panel_bytes(rows), map, panel * panel_cols, row, head, batch,
                                      slot.full);
  }
}

/// The order of loads is the order of use: K runs one block ahead of V, and Q comes behind the first K, because its slot
/// may still hold the O of an earlier tile.
template <FwdSpec S>
__device__ void produce(const FwdParams& p, Storage<S>& storage) {
  typename Storage<S>::QProducer Q(storage.q, storage.q_barriers);
  typename Storage<S>::KVProducer K(storage.k, storage.k_barriers);
  typename Storage<S>::KVProducer V(storage.v, storage.v_barriers);
  ptx::prefetch_tensormap(p.q);
  ptx::prefetch_tensormap(p.k);
  ptx::prefetch_tensormap(p.v);

  for (TileScheduler<S> tiles(p); tiles.valid(); tiles.next()) {
    const Tile tile = tiles.tile();
    const int row = tile.m * S.tile_m;
    const int last = BlockRange::of<S>(p, row, row + S.tile_m).end - 1;

    if (last >= 0) load<S, S.tile_n>(p.k, K.acquire(), last * S.tile_n, tile.head_kv, tile.batch);
    load<S, S.tile_m>(p.q, Q.acquire(), row, tile.head, tile.batch);
    for (int j = last; j >= 0; --j) {
      if (j > 0) load<S, S.tile_n>(p.k, K.acquire(), (j - 1) * S.tile_n, tile.head_kv, tile.batch);
      load<S, S.tile_n>(p.v, V.acquire(), j * S.tile_n, tile.head_kv, tile.batch);
    }
  }
  // No tail: consumers wait for every tile that was asked for, so nothing is in flight when they exit.
}

}  // namespace cupyfa::hopper
