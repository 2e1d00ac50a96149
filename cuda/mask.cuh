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

/// Key blocks that rows row_begin <= i < row_end need: blocks j < end. All of them see all keys of the blocks j < full.
struct BlockRange {
  int full, end;

  template <FwdSpec S>
  __device__ static BlockRange of(const FwdParams& p, int row_begin, int row_end) {
    const int most = max(0, visible_keys<S>(p, row_end - 1));
    const int least = max(0, visible_keys<S>(p, row_begin));
    return {least / S.tile_n, (most + S.tile_n - 1) / S.tile_n};
  }
};

/// Masks the scores of a warpgroup's 64 rows in the accumulator layout of WGMMA: a thread has two rows.
template <FwdSpec S>
class Mask {
 public:
  __device__ Mask(const FwdParams& p, int row, int first_column)
      : first_column_(first_column), visible_{visible_keys<S>(p, row), visible_keys<S>(p, row + 8)} {}

  __device__ void apply(float (&scores)[S.tile_n / 2], int block) const {
    const int begin = block * S.tile_n + first_column_;
    const int limit[2] = {visible_[0] - begin, visible_[1] - begin};
#pragma unroll
    for (int i = 0; i < S.tile_n / 2; ++i) {
      const int column = 8 * (i / 4) + i % 2;
      if (column >= limit[i / 2 % 2]) scores[i] = minus_infinity;
    }
  }

 private:
  int first_column_;
  int visible_[2];
};

}  // namespace cupyfa
