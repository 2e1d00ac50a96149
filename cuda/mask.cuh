// Which keys a query row sees, for tiles and for accumulator fragments. Diagonals are aligned bottom-right: with a window
// (left, right), row i sees key j when i + d - left <= j <= i + d + right, where d = seqlen_k - seqlen_q; a causal mask has
// right = 0. The twin of this file is cupyfa/oracles/mask.py.
#pragma once
#include "params.h"
#include "spec.cuh"
#include "tile_scheduler.cuh"

namespace cupyfa {

constexpr float minus_infinity = __builtin_bit_cast(float, 0xff800000u);

/// The sequence that a tile belongs to. Its keys first_key(row) <= j < visible_keys(row) are visible to a row; there may be
/// none.
template <FwdSpec S>
class Sequence {
 public:
  __device__ Sequence(const FwdParams& p, const TileOf<S>& tile) : p_(p) {
    if constexpr (S.varlen) {
      seqlen_q_ = tile.seqlen_q;
      seqlen_k_ = tile.seqlen_k;
    }
  }

  __device__ int seqlen_q() const { return S.varlen ? seqlen_q_ : p_.seqlen_q; }
  __device__ int seqlen_k() const { return S.varlen ? seqlen_k_ : p_.seqlen_k; }

  __device__ int visible_keys(int row) const {
    return S.causal ? min(seqlen_k(), row + 1 + p_.last_diagonal + shift()) : seqlen_k();
  }
  __device__ int first_key(int row) const { return S.window ? max(0, row + p_.first_diagonal + shift()) : 0; }

 private:
  __device__ int shift() const { return S.varlen ? seqlen_k_ - seqlen_q_ : 0; }  // else it is in the diagonals

  const FwdParams& p_;
  int seqlen_q_, seqlen_k_;
};

/// Key blocks that rows row_begin <= i < row_end walk over: the blocks begin <= j < end that they need, and one even if they
/// see no key. All of them see all keys of the blocks low <= j < full.
struct BlockRange {
  int begin, low, full, end;

  template <FwdSpec S>
  __device__ static BlockRange of(const Sequence<S>& sequence, int row_begin, int row_end) {
    const int most = max(0, sequence.visible_keys(row_end - 1));
    const int least = max(0, sequence.visible_keys(row_begin));
    return {sequence.first_key(row_begin) / S.tile_n, (sequence.first_key(row_end - 1) + S.tile_n - 1) / S.tile_n,
            least / S.tile_n, max(1, (most + S.tile_n - 1) / S.tile_n)};
  }
};

/// Masks the scores of a warpgroup's 64 rows in the accumulator layout of WGMMA: a thread has two rows.
template <FwdSpec S>
class Mask {
 public:
  /// The thread's rows are `row` and `row + 8`, its first column in a block is `column`.
  __device__ Mask(const Sequence<S>& sequence, int row, int column)
      : begin_{sequence.first_key(row) - column, sequence.first_key(row + 8) - column},
        end_{sequence.visible_keys(row) - column, sequence.visible_keys(row + 8) - column} {}

  /// Of rows that see the keys begin[r] <= j < end[r].
  __device__ Mask(const int (&begin)[2], const int (&end)[2], int column)
      : begin_{begin[0] - column, begin[1] - column}, end_{end[0] - column, end[1] - column} {}

  /// `blocks`: of these rows. Few blocks have both ends, so each is looked for by itself.
  __device__ void apply(float (&scores)[S.tile_n / 2], int block, const BlockRange& blocks) const {
    if (block >= blocks.full) {
      hide(scores, end_, block, [](int column, int end) { return column >= end; });
    }
    if (S.window && block < blocks.low) {
      hide(scores, begin_, block, [](int column, int begin) { return column < begin; });
    }
  }

 private:
  template <class Hidden>
  __device__ void hide(float (&scores)[S.tile_n / 2], const int (&limits)[2], int block, Hidden is_hidden) const {
    const int limit[2] = {limits[0] - block * S.tile_n, limits[1] - block * S.tile_n};
#pragma unroll
    for (int i = 0; i < S.tile_n / 2; ++i) {
      const int column = 8 * (i / 4) + i % 2;  // from the first one
      if (is_hidden(column, limit[i / 2 % 2])) scores[i] = minus_infinity;
    }
  }

  int begin_[2], end_[2];  // columns from the thread's first one of block 0, where what a row sees begins and ends
};

}  // namespace cupyfa
