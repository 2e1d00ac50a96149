// The shared memory of the decode kernel.
#pragma once
#include "layout.cuh"
#include "ring.cuh"
#include "spec.cuh"

namespace cupyfa::hopper::decode {

/// Named barriers of a CTA; 0 is __syncthreads().
enum NamedBarrier : int { consumers_barrier = 1, tail_barrier };  // the second one for each key group

/// What a key group leaves of its keys, for the merge. A row is followed by eight floats, so that the eight rows that a warp
/// writes at a time are in different banks.
template <DecodeSpec S>
struct Part {
  static constexpr int pitch = S.head_dim_v + 8;

  float out[S.tile_m][pitch];
  float lse[S.tile_m];
};

template <DecodeSpec S>
struct Storage {
  static constexpr int q_bytes = panels(S.head_dim) * panel_bytes(S.tile_m);
  static constexpr int k_bytes = panels(S.head_dim) * panel_bytes(S.tile_n);
  static constexpr int v_bytes = panels(S.head_dim_v) * panel_bytes(S.tile_n);

  struct Rings {
    alignas(swizzle_atom_bytes) unsigned char q[q_bytes];
    alignas(swizzle_atom_bytes) unsigned char k[S.stages][k_bytes];
    alignas(swizzle_atom_bytes) unsigned char v[S.stages][v_bytes];
  };

  union {
    Rings rings;
    Part<S> parts[S.key_groups];  // once the rings are drained
  };
  RingBarriers<S.stages> k_barriers;
  RingBarriers<S.stages> v_barriers;
};

}  // namespace cupyfa::hopper::decode
