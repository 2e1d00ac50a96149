// Which part of the problem a CTA has: the rows of a tile, and a split of the keys that they see.
#pragma once
#include "decode_params.h"
#include "kv_cache.cuh"
#include "mask.cuh"
#include "spec.cuh"

namespace cupyfa::hopper::decode {

/// The rows of a key/value head are the query heads that share it, for one query after the other, so that a tile's rows read
/// the same keys.
struct Row {
  int query, head;
};

/// Which split of which tile a CTA has. The CTAs of a cluster have neighbouring splits of one tile.
struct Place {
  int split, tile_m, head_kv, sequence;

  __device__ static Place of_cta(const DecodeParams& p) {
    const u32 tile = blockIdx.x / p.splits, head = tile / p.tiles_m, sequence = head / p.heads_kv;
    return {int(blockIdx.x - tile * p.splits.divisor), int(tile - head * p.tiles_m.divisor),
            int(head - sequence * p.heads_kv.divisor), int(sequence)};
  }
};

/// A CTA's share. All roles need it, so that it is computed once, before they part.
template <DecodeSpec S>
class Share {
 public:
  /// `keys`: of the sequence.
  __device__ Share(const DecodeParams& p, const Place& place, const CachedSequence& keys)
      : split(place.split), head_kv(place.head_kv), sequence(place.sequence), keys(keys), seqlen_k(keys.seqlen_k()),
        queries(QueryRows::of(p.cu_seqlens_q, p.cu_seqlens_stride, p.seqlen_q, p.total_q, sequence)),
        first_row(place.tile_m * S.tile_m), rows(min(S.tile_m, queries.count * int(p.group.divisor) - first_row)),
        p_(p) {
    blocks = rows > 0 ? blocks_of(row(first_row).query, row(first_row + rows - 1).query) : BlockRange{};
  }

  __device__ Row row(int number) const {
    const int query = u32(number) / p_.group, group = p_.group.divisor;
    return {query, head_kv * group + number - query * group};
  }

  /// The key of a query's own position, aligned bottom-right, and the keys first_key(query) <= j < visible_keys(query) that
  /// it sees.
  __device__ int diagonal(int query) const { return query + seqlen_k - queries.count; }
  __device__ int first_key(int query) const { return p_.left >= diagonal(query) ? 0 : diagonal(query) - p_.left; }
  __device__ int visible_keys(int query) const {
    const int behind = queries.count - 1 - query;  // keys that a causal mask hides
    return p_.right >= behind ? seqlen_k : diagonal(query) + p_.right + 1;
  }

  int split, head_kv, sequence;
  CachedSequence keys;
  int seqlen_k;
  QueryRows queries;
  int first_row, rows;  ///< of the head; a packed sequence may have none
  BlockRange
      blocks;    ///< of the split: begin <= j < end. All rows of the tile see all keys of the blocks low <= j < full

 private:
  /// Of the split, for these queries.
  __device__ BlockRange blocks_of(int first, int last) const {
    const int begin = first_key(first) / S.tile_n;
    const int end = (max(0, visible_keys(last)) + S.tile_n - 1) / S.tile_n;
    const int count = max(0, end - begin), size = p_.blocks_per_split;
    const int from = size > 0 ? min(count, split * size) : part_of(count, split);
    const int to = size > 0 ? min(count, from + size) : part_of(count, split + 1);
    return {begin + from, (first_key(last) + S.tile_n - 1) / S.tile_n, max(0, visible_keys(first)) / S.tile_n,
            begin + to};
  }

  /// count * number / p_.splits, without an overflow.
  __device__ int part_of(int count, int number) const {
    const int whole = u32(count) / p_.splits, rest = count - whole * int(p_.splits.divisor);
    return whole * number + u32(rest * number) / p_.splits;
  }

  const DecodeParams& p_;
};

}  // namespace cupyfa::hopper::decode
