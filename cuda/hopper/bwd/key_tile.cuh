// Which key tile a CTA has, and which query tiles see it.
#pragma once
#include "bwd_params.h"
#include "ptx/types.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

/// A key tile of one key/value head, for some of the query heads that share it.
///
/// Tiles come in sections of heads whose queries fit into L2 together, all heads of a tile side by side: from the first
/// tile on, which is the longest one of a causal problem, or from the last one on where dQ is summed in that order. There, a
/// CTA waits for the ones with later keys, and those have smaller numbers: it never waits for one that cannot start.
struct KeyTile {
  int n, head, batch;
  int part;                      // of the query heads
  int first_query_head, heads;  // those

  template <BwdSpec S>
  __device__ static KeyTile of(const BwdParams& p, u32 number) {
    const u32 section = number / (p.tiles_n * p.heads_per_section);
    const u32 first_head = section * p.heads_per_section;
    const u32 rest = number - first_head * p.tiles_n;
    const u32 heads = min(p.heads_per_section, gridDim.x / p.tiles_n - first_head);
    const u32 n = rest / heads;
    const u32 of_all = first_head + rest - n * heads, head_in_all = of_all / p.parts;
    const u32 part = of_all - head_in_all * p.parts, batch = head_in_all / p.heads_kv;
    const u32 head = head_in_all - batch * p.heads_kv, before = part * p.heads_per_part;
    return {int(S.deterministic ? p.tiles_n - 1 - n : n),
            int(head),
            int(batch),
            int(part),
            int(head * p.heads_per_kv + before),
            int(min(p.heads_per_part, p.heads_per_kv - before))};
  }
};

/// The last key tile that a query tile sees.
template <BwdSpec S>
__device__ inline int last_key_tile(const BwdParams& p, int m) {
  const int last = int(p.tiles_n) - 1;
  if constexpr (!S.causal) return last;
  const int last_row = min(p.seqlen_q, (m + 1) * S.tile_m) - 1;
  return min(last, max(0, last_row + p.last_diagonal) / S.tile_n);
}

/// Query tiles begin <= m < end see keys of a tile; those of full_begin <= m < full_end see all of them.
struct QueryRange {
  int begin, full_begin, full_end, end;

  template <BwdSpec S>
  __device__ static QueryRange of(const BwdParams& p, int n) {
    const int first = n * S.tile_n, last = first + S.tile_n - 1, tiles_m = int(p.tiles_m);
    QueryRange range = {0, 0, tiles_m, tiles_m};
    if constexpr (S.causal) {
      range.begin = max(0, first - p.last_diagonal) / S.tile_m;
      range.full_begin = (max(0, last - p.last_diagonal) + S.tile_m - 1) / S.tile_m;
    }
    if constexpr (S.window) {
      const int last_row = min(last, p.seqlen_k - 1) - p.first_diagonal;
      range.end = min(tiles_m, last_row < 0 ? 0 : last_row / S.tile_m + 1);
      range.full_end = max(0, first - p.first_diagonal + 1) / S.tile_m;
    }
    if (last >= p.seqlen_k) range.full_begin = range.end;  // keys that do not exist are hidden from all
    return range;
  }

  __device__ int count() const { return max(0, end - begin); }
  __device__ bool sees_all(int m) const { return full_begin <= m && m < full_end; }
};

/// A query tile of a query head.
struct QueryTile {
  int m, head;
};

/// A CTA walks the query tiles of each head that shares its keys.
class Steps {
 public:
  __device__ Steps(const QueryRange& range, const KeyTile& tile)
      : begin_(range.begin), end_(range.end), tile_{range.begin, tile.first_query_head},
        left_(range.count() * tile.heads) {}

  __device__ bool any() const { return left_ > 0; }
  __device__ bool is_last() const { return left_ == 1; }
  __device__ QueryTile tile() const { return tile_; }
  __device__ void advance() {
    --left_;
    if (++tile_.m == end_) tile_ = {begin_, tile_.head + 1};
  }

 private:
  int begin_, end_;
  QueryTile tile_;
  int left_;
};

}  // namespace cupyfa::hopper
