// The shared memory of the forward kernel: where its roles meet.
#pragma once
#include "layout.cuh"
#include "ring.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

/// Named barriers of a CTA; 0 is __syncthreads(). One of each kind for each of the at most three consumer warpgroups.
enum NamedBarrier : int { turn_barrier = 1, epilogue_barrier = turn_barrier + 3 };

template <FwdSpec S>
struct Storage {
  static constexpr int q_bytes = S.panels() * panel_bytes(S.tile_m);
  static constexpr int kv_bytes = S.panels() * panel_bytes(S.tile_n);

  alignas(swizzle_atom_bytes) unsigned char q[S.q_stages][q_bytes];  // O leaves through the slot of its Q
  alignas(swizzle_atom_bytes) unsigned char k[S.stages][kv_bytes];
  alignas(swizzle_atom_bytes) unsigned char v[S.stages][kv_bytes];
  RingBarriers<S.q_stages> q_barriers;
  RingBarriers<S.stages> k_barriers;
  RingBarriers<S.stages> v_barriers;

  using QProducer = RingProducer<S.q_stages, q_bytes>;
  using QConsumer = RingConsumer<S.q_stages, q_bytes>;
  using KVProducer = RingProducer<S.stages, kv_bytes>;
  using KVConsumer = RingConsumer<S.stages, kv_bytes>;
};

/// Consumer warps that release a K or V slot: each says that its part of the covered WGMMA is complete.
template <FwdSpec S>
constexpr u32 kv_releases = 4 * S.consumers();

/// Consumer warpgroups that release a Q slot: each says that its O has left the slot.
template <FwdSpec S>
constexpr u32 q_releases = S.consumers();

}  // namespace cupyfa::hopper
