// Which query tiles a CTA computes, and in which order (specification 0x0B). Every role of a CTA walks the same list.
//
// Heads are taken in sections whose keys and values fit into L2 together. Within a section a causal problem starts with
// the tiles that see most keys (longest first), all heads of a tile row side by side; a section of one head makes the query
// tiles of that head neighbours.
#pragma once
#include "params.h"
#include "ptx/types.cuh"
#include "spec.cuh"

namespace cupyfa {

struct Tile {
  int m;  // query rows m * tile_m and up
  int head;  // query head
  int head_kv;  // the key/value head that it reads
  int batch;
};

template <FwdSpec S>
class TileScheduler {
 public:
  __device__ explicit TileScheduler(const FwdParams& p) : p_(p), ordinal_(blockIdx.x), round_(0) {}

  __device__ bool valid() const { return ordinal_ < p_.tiles; }

  __device__ void next() {
    if constexpr (S.scheduler == Scheduler::one_tile) {
      ordinal_ = p_.tiles;
    } else {
      // In every other round the CTAs take their tiles in reverse, so that nobody always gets the longest one.
      ++round_;
      const bool reverse = S.causal && round_ % 2 == 1;
      ordinal_ = round_ * gridDim.x + (reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
  }

  __device__ Tile tile() const {
    const u32 section = ordinal_ / (p_.tiles_m * p_.heads_per_section);
    const u32 first_head = section * p_.heads_per_section;
    const u32 rest = ordinal_ - first_head * p_.tiles_m;
    const u32 heads = min(p_.heads_per_section, p_.heads_total - first_head);
    const u32 m = rest / heads;
    const u32 head_in_all = first_head + (rest - m * heads);
    const u32 batch = head_in_all / p_.heads_q;
    const u32 head = head_in_all - batch * p_.heads_q;
    return {int(S.causal ? p_.tiles_m - 1 - m : m), int(head), int(head / p_.heads_per_kv), int(batch)};
  }

 private:
  const FwdParams& p_;
  u32 ordinal_, round_;
};

}  // namespace cupyfa
