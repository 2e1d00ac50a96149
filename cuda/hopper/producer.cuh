// The producer role: one thread that keeps the rings of Q, K and V filled by TMA (specification 0x03).
#pragma once
#include "hopper/rows.cuh"
#include "hopper/storage.cuh"
#include "mask.cuh"
#include "params.h"
#include "ptx/tma.cuh"
#include "tile_scheduler.cuh"

namespace cupyfa::hopper {

/// Copies `rows` rows of a tensor into a slot, one panel of 64 columns at a time. Rows and columns outside the tensor
/// arrive as zeros.
template <int columns, int rows>
__device__ inline void load(const TensorMap& map, const Slot& slot, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < panels(columns); ++panel) {
    ptx::cp_async_bulk_tensor_4d_load(slot.data + panel * panel_bytes(rows), map, panel * panel_cols, row, head, batch,
                                      slot.full);
  }
}

/// Where the keys and values of a tile lie.
struct Keys {
  int first, last;  // blocks
  int head;
  Rows rows;

  template <FwdSpec S>
  __device__ static Keys of(const FwdParams& p, const TileOf<S>& tile) {
    const int row = tile.m * S.tile_m;
    const BlockRange blocks = BlockRange::of<S>(Sequence<S>(p, tile), row, row + S.tile_m);
    return {blocks.begin, blocks.end - 1, tile.head_kv, Rows::of_k<S>(p, tile)};
  }
};

/// The order of loads is the order in which slots become free, and the order of use: K runs one block ahead of V, into the
/// next tile as well, and with it the next Q. A single Q slot is free only after the last V of its tile.
template <FwdSpec S>
__device__ void produce(const FwdParams& p, Storage<S>& storage) {
  typename Storage<S>::WorkProducer works(storage.qo, storage.work_barriers, storage.tiles);
  typename Storage<S>::KProducer K(storage.k, storage.k_barriers);
  typename Storage<S>::VProducer V(storage.v, storage.v_barriers);
  ptx::prefetch_tensormap(p.q);
  ptx::prefetch_tensormap(p.k);
  ptx::prefetch_tensormap(p.v);

  const auto load_k = [&](const Keys& keys, int block) {
    load<S.head_dim, S.tile_n>(p.k, K.acquire(), keys.rows.first + block * S.tile_n, keys.head, keys.rows.batch);
  };
  const auto load_v = [&](const Keys& keys, int block) {
    load<S.head_dim_v, S.tile_n>(p.v, V.acquire(), keys.rows.first + block * S.tile_n, keys.head, keys.rows.batch);
  };
  const auto post = [&](const TileOf<S>& tile) {
    const Rows rows = Rows::of_q<S>(p, tile);
    load<S.head_dim, S.tile_m>(p.q, works.post(tile, Storage<S>::q_bytes), rows.first, tile.head, rows.batch);
  };
  const auto post_or_close = [&](const TileOf<S>& tile) {
    if (tile.valid()) {
      post(tile);
    } else {
      works.close();
    }
  };

  TileScheduler<S> tiles(p);
  TileOf<S> tile = tiles.tile();
  if constexpr (S.varlen) {
    if (!tile.valid()) return works.close();  // only the device knows how many tiles there are; else every CTA has one
  }
  Keys keys = Keys::of<S>(p, tile);
  load_k(keys, keys.last);
  post(tile);
  while (tile.valid()) {
    const Keys these = keys;
    for (int j = these.last; j > these.first + 1; --j) {
      load_k(these, j - 1);
      load_v(these, j);
    }
    tiles.advance();  // here a draw is back before the next slot is free, and it binds the CTA no earlier than it must
    if (these.last > these.first) {
      load_k(these, these.first);
      load_v(these, these.first + 1);
    }
    tile = tiles.tile();
    if (tile.valid()) {
      keys = Keys::of<S>(p, tile);
      load_k(keys, keys.last);
    }
    if constexpr (S.q_stages > 1) post_or_close(tile);
    load_v(these, these.first);
    if constexpr (S.q_stages == 1) post_or_close(tile);
  }
  // No tail: consumers wait for every tile that was asked for, so nothing is in flight when they exit.
}

}  // namespace cupyfa::hopper
