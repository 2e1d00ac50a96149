// Which tile of the gradient of a bias a CTA has, and which tiles of scores it is the sum of.
#pragma once
#include "bwd_params.h"
#include "hopper/bwd/key_tile.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

/// Indices begin <= i < end.
struct Span {
  int begin, end;

  /// One of an axis, or all of them where there is only one sum.
  __device__ static Span of(int index, bool is_sum, int all) { return is_sum ? Span{0, all} : Span{index, index + 1}; }
};

/// A tile of the gradient: key tiles of its row of tiles, its rows, its heads, its batches.
struct BiasTile {
  int batch, head, m, n;

  template <BiasGradientSpec S>
  __device__ static BiasTile of(const BiasGradientParams& p, u32 number) {
    const u32 tiles_n = (p.keys + S.tile_n - 1) / S.tile_n, tiles_m = (p.rows + S.tile_m - 1) / S.tile_m;
    const u32 row = number / tiles_n, head_in_all = row / tiles_m, batch = head_in_all / p.heads;
    return {int(batch), int(head_in_all - batch * p.heads), int(row - head_in_all * tiles_m),
            int(number - row * tiles_n)};
  }

  /// Calls `visit(keys, queries, range)` for each tile of scores that any query sees, always in the same order.
  template <BiasGradientSpec S, class Visit>
  __device__ void for_each_tile(const BiasGradientParams& p, Visit visit) const {
    const Span batches = Span::of(batch, p.batches == 1, p.batch);
    const Span heads = Span::of(head, p.heads == 1, p.scores.heads_q);
    const Span rows = Span::of(m, p.rows == 1, p.scores.tiles_m), keys = Span::of(n, p.keys == 1, p.scores.tiles_n);
    for (int b = batches.begin; b < batches.end; ++b) {
      for (int h = heads.begin; h < heads.end; ++h) {
        for (int key = keys.begin; key < keys.end; ++key) {
          const KeyTile tile = {key, h / int(p.scores.heads_per_kv), b, 0, h, 1};
          const QueryRange range = QueryRange::of<S.tile()>(p.scores, tile);
          const int end = min(rows.end, range.end);
          for (int query = max(rows.begin, range.begin); query < end; ++query) visit(tile, QueryTile{query, h}, range);
        }
      }
    }
  }
};

}  // namespace cupyfa::hopper
