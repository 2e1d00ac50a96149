// The additive bias in the accumulator layout of transposed scores: four elements of a thread for every eight queries, in the
// order of its scores.
#pragma once
#include "bwd_params.h"
#include "hopper/bwd/key_place.cuh"
#include "hopper/bwd/key_tile.cuh"
#include "hopper/bwd/storage.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/opaque.cuh"

namespace cupyfa::hopper {

/// A pair of a row vector in shared memory, float32: of the thread's two queries of eight.
template <BwdSpec S>
__device__ inline void load_pair(SharedAddress rows, int group, const KeyPlace<S>& place, float (&pair)[2]) {
  u32 words[2];
  ptx::ld_shared_v2(rows + 4 * (8 * group + place.query()), words[0], words[1]);
  pair[0] = __uint_as_float(words[0]);
  pair[1] = __uint_as_float(words[1]);
}

/// No bias.
template <BwdSpec S>
class ScoreBias {
 public:
  __device__ ScoreBias(const BwdParams&, TileBias<S>&, TileBiasBarriers<S>&, const KeyPlace<S>&) {}
  __device__ void begin(const KeyTile&, const QueryTile&, SharedAddress) {}
  __device__ void done() const {}
};

/// One column for all keys, from behind the lse of the queries.
template <BwdSpec S>
  requires(S.bias == Bias::column)
class ScoreBias<S> {
 public:
  __device__ ScoreBias(const BwdParams&, TileBias<S>&, TileBiasBarriers<S>&, const KeyPlace<S>& place)
      : place_(place) {}
  __device__ void begin(const KeyTile&, const QueryTile&, SharedAddress rows) { rows_ = rows; }
  __device__ void get(int group, float (&values)[4]) const {
    float of_query[2];
    load_pair(rows_, group, place_, of_query);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = of_query[i % 2];
  }
  __device__ void done() const {}

 private:
  const KeyPlace<S>& place_;
  SharedAddress rows_;
};

/// One row for all queries: the elements of the thread's two keys, whatever the strides.
template <BwdSpec S>
  requires(S.bias == Bias::row)
class ScoreBias<S> {
 public:
  __device__ ScoreBias(const BwdParams& p, TileBias<S>&, TileBiasBarriers<S>&, const KeyPlace<S>& place)
      : p_(p), place_(place) {}

  __device__ void begin(const KeyTile& tile, const QueryTile& query, SharedAddress) {
    const long long head = tile.batch * p_.bias_strides.batch + query.head * p_.bias_strides.head;
    // Computed in each step: registers are scarce in between.
    const int thread = ptx::opaque(threadIdx.x), warp = thread / 32 % 4;
    const int first = tile.n * S.tile_n + place_.first_key() + 16 * warp + thread % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = min(first + 8 * r, p_.seqlen_k - 1);  // those behind it are hidden
      of_key_[r] = load(head + key * p_.bias_strides.column);
    }
  }
  __device__ void get(int, float (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = of_key_[i / 2];
  }
  __device__ void done() const {}

 private:
  __device__ float load(long long offset) const {
    if constexpr (S.bias_float32)
      return static_cast<const float*>(p_.bias_data)[offset];
    else
      return ptx::unpack<S.dtype>(static_cast<const u16*>(p_.bias_data)[offset], false);
  }

  const BwdParams& p_;
  const KeyPlace<S>& place_;
  float of_key_[2];
};

/// From shared memory, whose rows are queries.
template <BwdSpec S>
  requires(S.bias == Bias::tile)
class ScoreBias<S> {
  using Storage = TileBias<S>;

 public:
  __device__ ScoreBias(const BwdParams&, Storage& storage, TileBiasBarriers<S>& barriers, const KeyPlace<S>& place)
      : place_(place), ring_(storage.data, barriers.ring) {}

  __device__ void begin(const KeyTile&, const QueryTile&, SharedAddress) {
    slot_ = ring_.wait();
    first_ = slot_.data + offset();
  }

  __device__ void get(int group, float (&values)[4]) {
    if constexpr (S.bias_float32) {
      // Row 2 (lane % 4) + c has its chunks exchanged by that number; the eight keys of a warp's load and its four rows are
      // in 32 banks.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = i % 2, r = i / 2;
        values[i] = __uint_as_float(
            ptx::ld_shared((first_ ^ (c << 4) ^ (r << 5)) + c * panel_row_bytes + group * swizzle_atom_bytes));
      }
    } else {
      u32 pairs[2];
      __syncwarp();  // keeps these loads behind those of the group before: else they take registers that spill
      ptx::ldmatrix_x2_trans(first_ + group * swizzle_atom_bytes, pairs[0], pairs[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = ptx::unpack<S.dtype>(pairs[i / 2], i % 2);
    }
  }

  /// Behind what uses all that the warp has loaded, as in the forward kernel.
  __device__ void done() const {
    __syncwarp();  // all lanes have read
    if (place_.lane() == 0) release(slot_);
  }

 private:
  /// Where the thread's first element is, or the row that it gives to ldmatrix: of a matrix for keys 0 to 7 of a warp, or of
  /// one for keys 8 to 15. Computed in each step: registers are scarce in between.
  __device__ u32 offset() const {
    const int thread = ptx::opaque(threadIdx.x), lane = thread % 32, warp = thread / 32 % 4;
    const int key = place_.first_key() + 16 * warp + (S.bias_float32 ? lane / 4 : lane / 8 % 2 * 8);
    const int query = place_.first_query() + (S.bias_float32 ? 2 * (lane % 4) : lane % 8);
    constexpr int of_chunk = Storage::cols / 8;
    return swizzled_chunk(key / Storage::cols * panel_bytes(S.tile_m), query, key % Storage::cols / of_chunk) +
           key % of_chunk * (S.bias_float32 ? 4 : 2);
  }

  const KeyPlace<S>& place_;
  typename Storage::Consumer ring_;
  Slot slot_;
  SharedAddress first_;
};

}  // namespace cupyfa::hopper
