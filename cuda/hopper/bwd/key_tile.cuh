// Which key tile a CTA has, and which query tiles see it.
#pragma once
#include "bwd_params.h"
#include "hopper/rows.cuh"
#include "packed_rows.cuh"
#include "ptx/types.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

/// A key tile of one key/value head, for some of the query heads that share it, and the sequence that it belongs to.
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
    const auto [n, of_all] = numbered<S>(number, p.tiles_n, gridDim.x / p.tiles_n, p.heads_per_section);
    const u32 head_in_all = of_all / p.parts;
    const u32 part = of_all - head_in_all * p.parts, batch = head_in_all / p.heads_kv;
    const u32 head = head_in_all - batch * p.heads_kv, before = part * p.heads_per_part;
    return {n,
            int(head),
            int(batch),
            int(part),
            int(head * p.heads_per_kv + before),
            int(min(p.heads_per_part, p.heads_per_kv - before))};
  }

  __device__ int seqlen_q(const BwdParams& p) const { return p.seqlen_q; }
  __device__ int seqlen_k(const BwdParams& p) const { return p.seqlen_k; }
  __device__ int last_diagonal(const BwdParams& p) const { return p.last_diagonal; }
  __device__ int first_diagonal(const BwdParams& p) const { return p.first_diagonal; }

  /// Of a head, where its rows begin in the tensor maps.
  __device__ Rows queries(int row, int query_head) const { return {row, query_head, batch}; }
  __device__ Rows keys(int row) const { return {row, head, batch}; }

  /// The number of its first query tile in the workspace.
  template <BwdSpec S>
  __device__ u64 first_query_tile(const BwdParams& p, int query_head) const {
    return u64(batch * p.heads_q + query_head) * p.tiles_m;
  }

 protected:
  struct Numbered {
    int n;
    u32 head;
  };

  /// The tile with a number among those of some heads.
  template <BwdSpec S>
  __device__ static Numbered numbered(u32 number, u32 tiles_n, u32 all_heads, u32 heads_per_section) {
    const u32 section = number / (tiles_n * heads_per_section);
    const u32 first_head = section * heads_per_section;
    const u32 rest = number - first_head * tiles_n;
    const u32 heads = min(heads_per_section, all_heads - first_head);
    const u32 n = rest / heads;
    return {int(S.deterministic ? tiles_n - 1 - n : n), first_head + rest - n * heads};
  }
};

/// The same, of a packed sequence, or of keys that are no sequence's, for which there are no queries.
struct VarlenKeyTile : KeyTile {
  int q_begin, q_rows, k_begin, k_rows;  // of the sequence

  /// A plan has a sequence's tiles one behind the other, and in it, queries and keys have changed places.
  template <BwdSpec S>
  __device__ static VarlenKeyTile of(const BwdParams& p, u32 number) {
    if (number >= p.plan->count * p.heads_kv) return {{.n = -1}};  // only the device knows how many there are
    const PackedTile packed = p.plan->tiles[number / p.heads_kv];
    const u32 tiles_n = (packed.seqlen_q + S.tile_n - 1) / S.tile_n;
    const auto [n, head] =
        numbered<S>(number - packed.first * p.heads_kv, tiles_n, p.heads_kv, packed.heads_per_section);
    return {{n, int(head), packed.sequence, 0, int(head * p.heads_per_kv), int(p.heads_per_kv)},
            packed.k_begin,
            packed.seqlen_k,
            packed.q_begin,
            packed.seqlen_q};
  }
  __device__ bool valid() const { return n >= 0; }

  __device__ int seqlen_q(const BwdParams&) const { return q_rows; }
  __device__ int seqlen_k(const BwdParams&) const { return k_rows; }
  __device__ int last_diagonal(const BwdParams& p) const { return p.last_diagonal + k_rows - q_rows; }
  __device__ int first_diagonal(const BwdParams& p) const { return p.first_diagonal + k_rows - q_rows; }

  __device__ Rows queries(int row, int query_head) const {
    return {packed_rows - q_rows + row, query_head, q_begin + q_rows};
  }
  __device__ Rows keys(int row) const { return {packed_rows - k_rows + row, head, k_begin + k_rows}; }

  template <BwdSpec S>
  __device__ u64 first_query_tile(const BwdParams& p, int query_head) const {
    return u64(query_head) * p.tiles_m + first_tile_of_sequence(q_begin, batch, S.tile_m);
  }
};

namespace detail {
template <bool varlen>
struct KeyTileOf {
  using type = KeyTile;
  using kept = KeyTile;
};
template <>
struct KeyTileOf<true> {
  using type = VarlenKeyTile;
  using kept = const VarlenKeyTile&;
};
}  // namespace detail

template <BwdSpec S>
using KeyTileOf = typename detail::KeyTileOf<S.varlen>::type;

/// What a thread keeps of it. Where all lengths are the sequence's, that is nothing: they are in shared memory, for
/// registers are scarce.
template <BwdSpec S>
using KeptKeyTile = typename detail::KeyTileOf<S.varlen>::kept;

/// The last key tile that a query tile sees.
template <BwdSpec S>
__device__ inline int last_key_tile(const BwdParams& p, const KeyTileOf<S>& tile, int m) {
  const int last = (tile.seqlen_k(p) + S.tile_n - 1) / S.tile_n - 1;
  if constexpr (!S.causal) return last;
  const int last_row = min(tile.seqlen_q(p), (m + 1) * S.tile_m) - 1;
  return min(last, max(0, last_row + tile.last_diagonal(p)) / S.tile_n);
}

/// Query tiles begin <= m < end see keys of a tile; those of full_begin <= m < full_end see all of them.
struct QueryRange {
  int begin, full_begin, full_end, end;

  template <BwdSpec S>
  __device__ static QueryRange of(const BwdParams& p, const KeyTileOf<S>& tile) {
    const int first = tile.n * S.tile_n, last = first + S.tile_n - 1;
    const int tiles_m = (tile.seqlen_q(p) + S.tile_m - 1) / S.tile_m;
    QueryRange range = {0, 0, tiles_m, tiles_m};
    if constexpr (S.causal) {
      range.begin = max(0, first - tile.last_diagonal(p)) / S.tile_m;
      range.full_begin = (max(0, last - tile.last_diagonal(p)) + S.tile_m - 1) / S.tile_m;
    }
    if constexpr (S.window) {
      const int last_row = min(last, tile.seqlen_k(p) - 1) - tile.first_diagonal(p);
      range.end = min(tiles_m, last_row < 0 ? 0 : last_row / S.tile_m + 1);
      range.full_end = max(0, first - tile.first_diagonal(p) + 1) / S.tile_m;
    }
    if (last >= tile.seqlen_k(p)) range.full_begin = range.end;  // keys that do not exist are hidden from all
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
