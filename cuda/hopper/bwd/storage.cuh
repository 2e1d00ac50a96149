// The shared memory of the backward kernel: where its roles meet.
#pragma once
#include "bwd_params.h"
#include "hopper/bwd/columns.cuh"
#include "hopper/bwd/key_tile.cuh"
#include "layout.cuh"
#include "ring.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

/// Named barriers of a CTA; 0 is __syncthreads(). The last one is the first of one for each consumer warpgroup.
enum BwdBarrier : int { walked_barrier = 1, free_barrier, written_barrier, staged_barrier };

/// Buffers of dS: a warpgroup writes that of the next step while the other one still multiplies this one, or waits.
template <BwdSpec S>
constexpr int ds_stages = S.wide() ? 1 : 2;

/// The columns of K, or of V, whose gradients a warpgroup has: all of them for its own keys, or half where it shares the keys.
template <BwdSpec S, int columns>
using OwnColumns = Choose<S.wide(), HalfOf<columns>, AllOf<columns>>;

/// The part of dQ that a warpgroup computes at a time, of each query tile: of half of its rows, or of its columns, and where
/// those are many, parts one after the other.
template <BwdSpec S>
struct DqPart {
  static constexpr bool by_rows = S.tile_m == warpgroup_rows * S.consumers();
  // Registers of a wide tile have room for 64 columns, or for 32 and whatever changes scores.
  static constexpr bool plain = !S.window && !S.softcap && !S.alibi && S.bias == Bias::none && !S.partial;
  static constexpr int own = by_rows ? S.head_dim : S.head_dim / S.consumers();
  static constexpr int columns = !S.wide() || own <= (plain ? 96 : 64) ? own : plain && own % 64 == 0 ? 64 : 32;
  static constexpr int of_warpgroup = own / columns;
  static constexpr int of_tile = S.consumers() * of_warpgroup;
  static constexpr int values = columns / 2;  // of a thread

  using Columns =
      Choose<of_warpgroup == 1, Choose<by_rows, AllOf<S.head_dim>, HalfOf<S.head_dim>>, PartOf<S.head_dim, columns>>;

  __device__ static int first_row(int part) { return by_rows ? part / of_warpgroup * warpgroup_rows : 0; }

  /// Calls `piece.operator()<width, first>(column)` for columns `first` and up of a thread's, which begin at `column`.
  template <typename Function>
  __device__ static void each_piece(int part, const Function& piece) {
    Columns::each_piece(by_rows ? part % of_warpgroup : part, piece);
  }
};

/// dQ on its way to memory, where its order is fixed: a warpgroup's part of a query tile, or half of it.
template <BwdSpec S>
struct DqStorage {};

template <BwdSpec S>
  requires(S.deterministic)
struct DqStorage<S> {
  static constexpr int part_bytes = warpgroup_rows * DqPart<S>::columns * int(sizeof(float));
  static_assert(DqPart<S>::columns >= 32, "there is a counter for every 64 rows and 32 columns of a query tile");
  using Writer = RingWriter<1, part_bytes>;
  using Consumer = RingConsumer<1, part_bytes>;

  alignas(128) unsigned char parts[S.consumers()][part_bytes];
  RingBarriers<1> barriers[S.consumers()];
};

/// What a softcap leaves for the gradient, in the order in which a thread writes and reads it.
template <BwdSpec S>
struct SlopeStorage {};

template <BwdSpec S>
  requires(S.softcap)
struct SlopeStorage<S> {
  alignas(16) float slopes[S.consumers()][S.queries() / 8][warpgroup_threads][4];
};

/// A bias of a step, (queries, keys): panels of 128 bytes a row, as TMA writes them with that swizzle.
template <BwdSpec S>
struct TileBias {};
template <BwdSpec S>
struct TileBiasBarriers {};

template <BwdSpec S>
  requires(S.bias == Bias::tile)
struct TileBias<S> {
  static constexpr int cols = panel_row_bytes / (S.bias_float32 ? 4 : 2);  // of a panel
  static constexpr int bytes = S.tile_n / cols * panel_bytes(S.tile_m);
  static_assert(S.tile_n % cols == 0);
  using Producer = RingProducer<1, bytes>;
  using Consumer = RingConsumer<1, bytes>;

  alignas(swizzle_atom_bytes) unsigned char data[bytes];
};
template <BwdSpec S>
  requires(S.bias == Bias::tile)
struct TileBiasBarriers<S> {
  RingBarriers<1> ring;
};

/// P, where it is no register operand.
template <BwdSpec S>
struct PStorage {};

template <BwdSpec S>
  requires(S.wide())
struct PStorage<S> {
  alignas(swizzle_atom_bytes) unsigned char data[panels(S.tile_m) * panel_bytes(S.tile_n)];  // (keys, queries)
};

/// The key tile, where a thread reads it from a plan.
template <BwdSpec S>
struct TileStorage {};

template <BwdSpec S>
  requires(S.varlen)
struct TileStorage<S> {
  VarlenKeyTile tile;
};

template <BwdSpec S>
struct BwdStorage {
  static constexpr int k_bytes = panels(S.head_dim) * panel_bytes(S.tile_n);
  static constexpr int v_bytes = panels(S.head_dim_v) * panel_bytes(S.tile_n);
  static constexpr int q_bytes = panels(S.head_dim) * panel_bytes(S.tile_m);
  static constexpr int dout_bytes = panels(S.head_dim_v) * panel_bytes(S.tile_m);
  static constexpr int ds_bytes = panels(S.tile_m) * panel_bytes(S.tile_n);
  static constexpr int row_bytes = S.tile_m * int(sizeof(float));  // of lse, and of delta
  // Behind a Q is the lse of its rows, and behind that a bias of one column; behind a dO is their delta.
  static constexpr int q_filled = q_bytes + (S.bias == Bias::column ? 2 : 1) * row_bytes;
  static constexpr int dout_filled = dout_bytes + row_bytes;
  static constexpr int q_slot_bytes = q_bytes + swizzle_atom_bytes;
  static constexpr int dout_slot_bytes = S.dout_stages == 1 ? dout_filled : dout_bytes + swizzle_atom_bytes;
  static_assert(2 * row_bytes <= swizzle_atom_bytes);

  alignas(swizzle_atom_bytes) unsigned char k[k_bytes];  // dK leaves through it
  alignas(swizzle_atom_bytes) unsigned char v[v_bytes];  // dV leaves through it
  alignas(swizzle_atom_bytes) unsigned char q[S.q_stages][q_slot_bytes];
  alignas(swizzle_atom_bytes) unsigned char ds[ds_stages<S>][ds_bytes];  // (keys, queries)
  [[no_unique_address]] PStorage<S> p;
  [[no_unique_address]] TileBias<S> bias;
  alignas(swizzle_atom_bytes) unsigned char dout[S.dout_stages][dout_slot_bytes];
  [[no_unique_address]] DqStorage<S> dq;
  [[no_unique_address]] SlopeStorage<S> cap;
  [[no_unique_address]] TileStorage<S> planned;
  u64 k_full, v_full;
  u64 ds_full[ds_stages<S>];
  RingBarriers<S.q_stages> q_barriers;
  RingBarriers<S.dout_stages> dout_barriers;
  [[no_unique_address]] TileBiasBarriers<S> bias_barriers;

  using QProducer = RingProducer<S.q_stages, q_slot_bytes, q_filled>;
  using QConsumer = RingConsumer<S.q_stages, q_slot_bytes>;
  using DoutProducer = RingProducer<S.dout_stages, dout_slot_bytes, dout_filled>;
  using DoutConsumer = RingConsumer<S.dout_stages, dout_slot_bytes>;
};

/// The key tile of this CTA, whose number is `number`.
template <BwdSpec S>
__device__ inline KeptKeyTile<S> key_tile(const BwdParams& p, const BwdStorage<S>& storage, u32 number = blockIdx.x) {
  if constexpr (S.varlen) {
    return storage.planned.tile;
  } else {
    return KeyTile::of<S>(p, number);
  }
}

/// Each consumer warp answers for itself: its part of the products that read a slot is complete, its rows are written.
constexpr u32 warpgroup_warps = warpgroup_threads / 32;
template <BwdSpec S>
constexpr u32 bwd_consumer_warps = warpgroup_warps * S.consumers();

}  // namespace cupyfa::hopper
