// Which keys a query row sees, for tiles and for accumulator fragments. Causal masks are aligned bottom-right:
// row i sees key j when j <= i + seqlen_k - seqlen_q. The twin of this file is cupyfa/oracles/mask.py.
#pragma once
#include "params.h"
#include "spec.cuh"

namespace cupyfa {

constexpr float minus_infinity = __builtin_bit_cast(float, 0xff800000u);

/// Keys 0 <= j < visible_keys(row) are visible to the row; may be negative.
template <FwdSpec S>
__device__ inline int visible_keys(const FwdParams& p, int row) {
  return S.causal ? min(p.seqlen_k, row + 1 + (p.seqlen_k - p.seqlen_q)) : p.seqlen_k;
}

/// Key blocks that rows row_begin <= i < row_end walk over: the blocks j < end that they need, and the first one even if
/// they see no key. All of them see all keys of the blocks j < full.
struct BlockRange {
  int full, end;

  template <FwdSpec S>
  __device__ static BlockRange of(const FwdParams& p, int row_begin, int row_end) {
    const int most = max(0, visible_keys<S>(p, row_end - 1));
    const int least = max(0, visible_keys<S>(p, row_begin));
    return {least / S.tile_n, max(1, (most + S.tile_n - 1) / S.tile_n)};
  }
};

/// Masks the scores of a warpgroup's 64 rows in the accumulator layout of WGMMA: a thread has two rows.
template <FwdSpec S>
class Mask {
 public:
  /// The thread's rows are `row` and `row + 8`, its first column in a block is `column`.
  __device__ Mask(const FwdParams& p, int row, int column)
      : limit_{visible_keys<S>(p, row) - column, visible_keys<S>(p, row + 8) - column} {}

  __device__ void apply(float (&scores)[S.tile_n / 2], int block) const {
    const int limit[2] = {limit_[0] - block * S.tile_n, limit_[1] - block * S.tile_n};
#pragma unroll
    for (int i = 0; i < S.tile_n / 2; ++i) {
      const int column = 8 * (i / 4) + i % 2;  // from the first one
      if (column >= limit[i / 2 % 2]) scores[i] = minus_infinity;
    }
  }

 private:
  int limit_[2];  // columns from the thread's first one of block 0 that a row sees
};

}  // namespace cupyfa
