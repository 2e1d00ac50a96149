// Scores that are more than scaled: softcap, an additive bias and ALiBi. Its twin is cupyfa/oracles/score_mod.py.
#pragma once
#include "logits.cuh"
#include "mask.cuh"
#include "params.h"
#include "ptx/arithmetic.cuh"
#include "spec.cuh"

namespace cupyfa {

/// A consumer thread's elements of a block of the bias, packed as they are in memory: element i belongs to its score i.
template <FwdSpec S>
struct BiasFragment {
  static constexpr int per_word = S.bias_float32 ? 1 : 2;

  __device__ float operator[](int i) const {
    const u32 word = words[i / per_word];
    if constexpr (S.bias_float32) return __builtin_bit_cast(float, word);
    return ptx::unpack<S.dtype>(word, i % 2);
  }

  u32 words[S.tile_n / 2 / per_word];
};

template <FwdSpec S>
  requires(S.bias == Bias::none)
struct BiasFragment<S> {};

/// (tanh(x) - 1) / 2 = -1 / (e^2x + 1), which saturates by itself. tanh.approx, one MUFU instead of two, has only 11 good
/// bits: with c = 50 it would be off by more than a probability's last bit.
__device__ inline float capped(float score, float slope) {
  return ptx::rcp_approx_ftz(-1.f - ptx::ex2_approx_ftz(score * slope));
}

/// Of a warpgroup's 64 rows in the accumulator layout of WGMMA: a thread has two rows of a head.
template <FwdSpec S>
class ScoreMod {
 public:
  /// The thread's rows are `row` and `row + 8`, its first column in a block is `column`.
  __device__ ScoreMod(const FwdParams& p, const TileOf<S>& tile, int row, int column) : p_(p) {
    if constexpr (S.alibi) {
      slope_ = -p.alibi_slopes[tile.batch * p.alibi_stride_batch + tile.head * p.alibi_stride_head];
      if constexpr (S.bias == Bias::none) slope_ = __fmul_rn(slope_, log2_e);
      const Sequence<S> sequence(p, tile);
      distance_ = column - row - (sequence.seqlen_k() - sequence.seqlen_q());
    }
  }

  /// Before the mask. With a softcap c, a score becomes (c tanh(scale score / c) - c) / 2 c: the softmax does not see that
  /// shift, and its scale is 2 c. With a bias, it becomes a natural logit, which takes one instruction for scale and bias
  /// together. With ALiBi alone, it becomes a logit in base 2, and the scale of the softmax is 1.
  __device__ void apply(float (&scores)[S.tile_n / 2], int block, const BiasFragment<S>& bias) const {
    const float distance[2] = {float(distance_ + block * S.tile_n), float(distance_ + block * S.tile_n - 8)};
#pragma unroll
    for (int i = 0; i < S.tile_n / 2; ++i) {
      if constexpr (S.softcap) scores[i] = capped(scores[i], p_.softcap_slope);
      if constexpr (S.bias != Bias::none) scores[i] = fmaf(scores[i], p_.scale, bias[i]);
      if constexpr (S.alibi) {
        const int column = 8 * (i / 4) + i % 2;  // from the first one
        scores[i] = fmaf(slope_, fabsf(distance[i / 2 % 2] + column),
                         S.bias == Bias::none ? __fmul_rn(scores[i], p_.scale_log2) : scores[i]);
      }
    }
  }

 private:
  const FwdParams& p_;
  float slope_;  // negative, in the base of the logits
  int distance_;  // of the first column of block 0 from the diagonal of the first row
};

}  // namespace cupyfa
