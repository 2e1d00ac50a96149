// Which query tiles a CTA computes, and in which order (specification 0x0B). The producer asks; the other roles get their
// tiles from it.
//
// Heads are taken in sections whose keys and values fit into L2 together. Within a section a causal problem starts with
// the tiles that see most keys (longest first), all heads of a tile row side by side; a section of one head makes the query
// tiles of that head neighbours. Without longest_first, for comparisons, tiles come head by head, from the first rows on.
#pragma once
#include "params.h"
#include "ptx/types.cuh"
#include "spec.cuh"

namespace cupyfa {

/// A query tile of one head.
struct alignas(16) Tile {
  int m;  // query rows m * tile_m and up; -1: there are no more tiles
  int head;  // query head
  int head_kv;  // the key/value head that it reads
  int batch;

  __device__ bool valid() const { return m >= 0; }
};

/// The same, of a packed sequence.
struct VarlenTile : Tile {
  int q_begin, seqlen_q, k_begin, seqlen_k;  // as in PackedTile; the batch is the number of the sequence
};

namespace detail {
template <bool varlen>
struct TileOf {
  using type = Tile;
};
template <>
struct TileOf<true> {
  using type = VarlenTile;
};
}  // namespace detail

template <FwdSpec S>
using TileOf = typename detail::TileOf<S.varlen>::type;

template <FwdSpec S>
class TileScheduler {
 public:
  __device__ explicit TileScheduler(const FwdParams& p) : p_(p), number_(blockIdx.x - gridDim.x), round_(0) {
    if constexpr (S.varlen) tiles_ = p.plan->count * p.heads_q;
  }

  /// Starts to look for the next tile; after an invalid one there is none. Nothing uses the number here: a draw takes as
  /// long as a load from memory, and the producer has other things to do.
  __device__ void advance() {
    if (S.scheduler == Scheduler::one_tile) {
      number_ = tiles();
    } else if (draws()) {
      number_ = atomicAdd(p_.tile_counter, 1u);
    } else {
      // In every other round the CTAs take their tiles in reverse, so that nobody always gets the longest one.
      const bool reverse = S.tiles_grow() && round_ % 2 == 0;
      number_ = round_ * gridDim.x + (reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
      ++round_;
    }
  }

  /// The tile that was looked for, at first the one that the CTA starts with.
  __device__ TileOf<S> tile() const {
    const u32 ordinal = gridDim.x + number_;
    if (ordinal >= tiles()) {
      // Each CTA starts with a tile and draws until it gets none: as many draws as there are tiles. The last one makes
      // the counter ready for the next launch.
      if (draws() && number_ == tiles() - 1) *p_.tile_counter = 0;
      return {-1, 0, 0, 0};
    }
    if constexpr (S.varlen) {
      const PackedTile packed = p_.plan->tiles[ordinal / p_.heads_q];
      const u32 tiles_m = (packed.seqlen_q + S.tile_m - 1) / S.tile_m;
      const Tile tile = of_heads(ordinal - packed.first * p_.heads_q, tiles_m, p_.heads_q, packed.heads_per_section);
      return {{tile.m, tile.head, tile.head_kv, packed.sequence},
              packed.q_begin,
              packed.seqlen_q,
              packed.k_begin,
              packed.seqlen_k};
    } else {
      return of_heads(ordinal, p_.tiles_m, p_.heads_total, p_.heads_per_section);
    }
  }

 private:
  /// The tile with a number among those of some heads.
  __device__ Tile of_heads(u32 ordinal, u32 tiles_m, u32 all_heads, u32 heads_per_section) const {
    if constexpr (!S.longest_first) {
      const u32 head_in_all = ordinal / tiles_m;
      return tile_of(ordinal - head_in_all * tiles_m, head_in_all);
    }
    const u32 section = ordinal / (tiles_m * heads_per_section);
    const u32 first_head = section * heads_per_section;
    const u32 rest = ordinal - first_head * tiles_m;
    const u32 heads = min(heads_per_section, all_heads - first_head);
    const u32 m = rest / heads;
    return tile_of(S.tiles_grow() ? tiles_m - 1 - m : m, first_head + (rest - m * heads));
  }

  __device__ Tile tile_of(u32 m, u32 head_in_all) const {
    const u32 batch = head_in_all / p_.heads_q;
    const u32 head = head_in_all - batch * p_.heads_q;
    return {int(m), int(head), int(head / p_.heads_per_kv), int(batch)};
  }
  __device__ bool draws() const { return S.scheduler == Scheduler::dynamic && p_.tile_counter != nullptr; }

  __device__ u32 tiles() const { return S.varlen ? tiles_ : p_.tiles; }

  const FwdParams& p_;
  u32 tiles_;  // of a plan
  u32 number_;  // of the tile, counted from the first that no CTA starts with
  u32 round_;
};

}  // namespace cupyfa
