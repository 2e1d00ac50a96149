// The shared memory of the forward kernel: where its roles meet.
#pragma once
#include "hopper/work.cuh"
#include "layout.cuh"
#include "ring.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

/// Named barriers of a CTA; 0 is __syncthreads(). One of each kind for each of the at most three consumer warpgroups.
enum NamedBarrier : int { turn_barrier = 1, epilogue_barrier = turn_barrier + 3 };

/// A block of the bias in shared memory: panels of `swizzle` bytes a row, as TMA writes them with that swizzle. The widest
/// that divides a row: a copy asks L2 for no more than such a part of a row at once.
template <FwdSpec S>
struct BiasBox {
  static constexpr bool copied = S.bias == Bias::tile || S.bias == Bias::row;
  static constexpr int element_bytes = S.bias_float32 ? 4 : 2;
  static constexpr int rows = S.bias == Bias::row ? 1 : S.tile_m;
  static constexpr int row_bytes = S.tile_n * element_bytes;
  static constexpr int swizzle = S.bias == Bias::row ? 0 : row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : 32;
  // A single row is a multiple of 128 bytes, where the next slot begins.
  static constexpr int cols = S.bias == Bias::row ? (S.tile_n + 63) / 64 * 64 : swizzle / element_bytes;
  static constexpr int panels = S.bias == Bias::row ? 1 : row_bytes / swizzle;
  static constexpr int panel_bytes = rows * cols * element_bytes;
  static constexpr int bytes = panels * panel_bytes;
};

template <FwdSpec S>
struct BiasStorage {};

template <FwdSpec S>
  requires(BiasBox<S>::copied)
struct BiasStorage<S> {
  alignas(swizzle_atom_bytes) unsigned char data[S.bias_stages][BiasBox<S>::bytes];
  RingBarriers<S.bias_stages> barriers;
};

template <FwdSpec S>
struct Storage {
  static constexpr int q_bytes = panels(S.head_dim) * panel_bytes(S.tile_m);
  static constexpr int o_bytes = panels(S.head_dim_v) * panel_bytes(S.tile_m);
  static constexpr int qo_bytes = q_bytes > o_bytes ? q_bytes : o_bytes;
  static constexpr int k_bytes = panels(S.head_dim) * panel_bytes(S.tile_n);
  static constexpr int v_bytes = panels(S.head_dim_v) * panel_bytes(S.tile_n);

  alignas(swizzle_atom_bytes) unsigned char qo[S.q_stages][qo_bytes];  // O leaves through the slot of its Q
  alignas(swizzle_atom_bytes) unsigned char k[S.stages][k_bytes];
  alignas(swizzle_atom_bytes) unsigned char v[S.stages][v_bytes];
  TileOf<S> tiles[S.q_stages];
  WorkBarriers<S.q_stages> work_barriers;
  RingBarriers<S.stages> k_barriers;
  RingBarriers<S.stages> v_barriers;
  [[no_unique_address]] BiasStorage<S> bias;

  using WorkProducer = hopper::WorkProducer<TileOf<S>, S.q_stages, qo_bytes>;
  using WorkConsumer = hopper::WorkConsumer<TileOf<S>, S.q_stages, qo_bytes>;
  using KProducer = RingProducer<S.stages, k_bytes>;
  using KConsumer = RingConsumer<S.stages, k_bytes>;
  using VProducer = RingProducer<S.stages, v_bytes>;
  using VConsumer = RingConsumer<S.stages, v_bytes>;
  using BiasProducer = RingProducer<S.bias_stages, BiasBox<S>::bytes>;
  using BiasConsumer = RingConsumer<S.bias_stages, BiasBox<S>::bytes>;
};

/// Each consumer warp answers for itself: its part of the products that read a K or V slot is complete, its rows of O
/// are staged.
template <FwdSpec S>
constexpr u32 consumer_warps = 4 * S.consumers();

}  // namespace cupyfa::hopper
