// The producer role: one thread that keeps the rings of Q, K and V filled by TMA (specification 0x03), and another one for
// that of a bias.
#pragma once
#include "hopper/rows.cuh"
#include "hopper/storage.cuh"
#include "mask.cuh"
#include "params.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/tma.cuh"
#include "tile_scheduler.cuh"

namespace cupyfa::hopper {

/// Copies a tile of a tensor into a slot, one panel of 64 columns at a time. Rows and columns outside the tensor arrive as
/// zeros.
template <FwdSpec S, int columns, int tile_rows>
__device__ inline void load(const TensorMap& map, const Slot& slot, const Rows& rows) {
#pragma unroll
  for (int panel = 0; panel < panels(columns); ++panel) {
    load_box<S.varlen>(slot.data + panel * panel_bytes(tile_rows), map, panel * panel_cols, rows, slot.full);
  }
}

/// Where the keys and values of a tile lie in the tensor maps.
struct Keys {
  int first, last;  // rows of the first and of the last block
  int head, batch;

  template <FwdSpec S>
  __device__ static Keys of(const FwdParams& p, const TileOf<S>& tile) {
    const int row = tile.m * S.tile_m;
    const BlockRange blocks = BlockRange::of<S>(Sequence<S>(p, tile), row, row + S.tile_m);
    const Rows rows = Rows::of_k<S>(tile);
    return {rows.first + blocks.begin * S.tile_n, rows.first + (blocks.end - 1) * S.tile_n, rows.head, rows.batch};
  }
  __device__ Rows from(int row) const { return {row, head, batch}; }
};

/// Copies blocks of the bias.
template <FwdSpec S>
class BiasProducer {
 public:
  __device__ BiasProducer(const FwdParams& p, Storage<S>& storage)
      : p_(p), ring_(storage.bias.data, storage.bias.barriers) {
    ptx::prefetch_tensormap(p.bias);
  }

  /// The block that begins with this row of K. A bias counts keys from the beginning of their sequence.
  __device__ void load(const TileOf<S>& tile, int row) {
    const int key = row - Rows::of_k<S>(tile).first;
    const Slot slot = ring_.acquire();
#pragma unroll
    for (int panel = 0; panel < BiasBox<S>::panels; ++panel) {
      ptx::cp_async_bulk_tensor_4d_load(slot.data + panel * BiasBox<S>::panel_bytes, p_.bias,
                                        key + panel * BiasBox<S>::cols, S.bias == Bias::row ? 0 : tile.m * S.tile_m,
                                        p_.bias_stride_head == 0 ? 0 : tile.head,
                                        p_.bias_stride_batch == 0 ? 0 : tile.batch, slot.full);
    }
  }

 private:
  const FwdParams& p_;
  typename Storage<S>::BiasProducer ring_;
};

/// The order of loads is the order in which slots become free, and the order of use: K runs one block ahead of V, into the
/// next tile as well, and with it the next Q. A single Q slot is free only after the last V of its
/// tile.
template <FwdSpec S>
__device__ void produce(const FwdParams& p, Storage<S>& storage) {
  typename Storage<S>::WorkProducer works(storage.qo, storage.work_barriers, storage.tiles);
  typename Storage<S>::KProducer K(storage.k, storage.k_barriers);
  typename Storage<S>::VProducer V(storage.v, storage.v_barriers);
  ptx::prefetch_tensormap(p.q);
  ptx::prefetch_tensormap(p.k);
  ptx::prefetch_tensormap(p.v);

  const auto load_k = [&](const Keys& keys, int row) {
    load<S, S.head_dim, S.tile_n>(p.k, K.acquire(), keys.from(row));
  };
  const auto load_v = [&](const Keys& keys, int row) {
    load<S, S.head_dim_v, S.tile_n>(p.v, V.acquire(), keys.from(row));
  };
  const auto post = [&](const TileOf<S>& tile) {
    load<S, S.head_dim, S.tile_m>(p.q, works.post(tile, Storage<S>::q_bytes), Rows::of_q<S>(tile));
  };
  const auto post_or_close = [&](const TileOf<S>& tile) {
    if (tile.valid()) {
      post(tile);
    } else {
      works.close();
    }
  };

  if constexpr (S.varlen) ptx::griddepcontrol_wait();  // proves the plan; nobody does anything before the first load
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
    for (int row = these.last; row > these.first + S.tile_n; row -= S.tile_n) {
      load_k(these, row - S.tile_n);
      load_v(these, row);
    }
    tiles.advance();  // here a draw is back before the next slot is free, and it binds the CTA no earlier than it must
    if (these.last > these.first) {
      load_k(these, these.first);
      load_v(these, these.first + S.tile_n);
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

/// Likewise one thread: no K or V waits for a slot of the bias, nor a slot of the bias for theirs. It needs no arrival at the
/// tiles that it reads: a tile stays in its slot until its O has left, and that takes all of its bias.
template <FwdSpec S>
__device__ void produce_bias(const FwdParams& p, Storage<S>& storage) {
  typename Storage<S>::WorkConsumer works(storage.qo, storage.work_barriers, storage.tiles);
  BiasProducer<S> bias(p, storage);
  while (true) {
    const TileOf<S> tile = works.tile(works.next());
    if (!tile.valid()) return;
    const Keys keys = Keys::of<S>(p, tile);
    for (int row = keys.last; row >= keys.first; row -= S.tile_n) bias.load(tile, row);
  }
}

}  // namespace cupyfa::hopper
