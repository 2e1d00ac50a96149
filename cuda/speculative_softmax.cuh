// Online softmax that keeps an old maximum as its reference and looks at the probabilities afterwards (specification
// 0x09, omega = 0). While all of a warp's 16 rows stay in range, which they nearly always do, there is no maximum, no
// shuffle and no rescaling. Its twin is SpeculativeSoftmax in cupyfa/oracles/softmax.py.
//
// A probability is 2^(score * scale - reference). It is infinite, NaN or large only if the block's sum that it is part of is
// too, and that sum is needed anyway: looking costs four comparisons. After a block that grew so far that its like may leave
// the range, the next one is not tried: where scores grow in every block, this is the exact softmax.
#pragma once
#include "exp2.cuh"
#include "ptx/arithmetic.cuh"
#include "softmax.cuh"
#include "spec.cuh"

namespace cupyfa {

/// `exp2_fma` of eight groups of eight keys go to the polynomial; a correction, which sees everything, never does.
template <class Logits, DType dtype, int exp2_fma>
class SpeculativeSoftmax {
 public:
  /// A block is in range if all its sums, each of one thread, row and column parity, are below this. Then so is every
  /// probability, and finite in its 16-bit format. What a high limit costs is in docs/notes/hopper_forward.md.
  static constexpr float limit = dtype == DType::bfloat16 ? 0x1p60f : 0x1p15f;

  __device__ explicit SpeculativeSoftmax(Logits logits) : logits_(logits), try_next_(true) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference_[r] = minus_infinity;
      sum_[r][0] = sum_[r][1] = 0.f;
    }
  }

  /// P from the references at hand. False: a row of the warp has left the range, or is expected to; P is useless, and all
  /// else is as before.
  template <int count>
  __device__ bool speculate(u32 (&P)[count / 2], const float (&scores)[count]) {
    if (!try_next_) return false;
    const float scale[2] = {logits_.scale(reference_[0]), logits_.scale(reference_[1])};
    const float reference[2] = {in_own_frame(0), in_own_frame(1)};
    float sum[2][2];  // of this block
#pragma unroll
    for (int i = 0; i < count; i += 2) {
      const int r = i / 2 % 2;
      const bool on_fma = i / 4 * exp2_fma % 8 + exp2_fma >= 8;  // evenly spread
      const float even = exponential(fmaf(scores[i], scale[r], -reference[r]), on_fma);
      const float odd = exponential(fmaf(scores[i + 1], scale[r], -reference[r]), on_fma);
      sum[r][0] = i < 4 ? even : sum[r][0] + even;
      sum[r][1] = i < 4 ? odd : sum[r][1] + odd;
      P[i / 2] = ptx::cvt_rn_x2<dtype>(even, odd);
    }
    // A NaN is not in range either.
    const bool in_range = sum[0][0] < limit && sum[0][1] < limit && sum[1][0] < limit && sum[1][1] < limit;
    if (!__all_sync(0xffffffff, in_range)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r][0] += sum[r][0];
      sum_[r][1] += sum[r][1];
    }
    return true;
  }

  /// P from new references. Returns the factor that brings what was accumulated before into their frame.
  template <int count>
  __device__ RowPair correct(u32 (&P)[count / 2], const float (&scores)[count]) {
    constexpr float expected = limit / (count / 4);  // so much in all columns of a sum makes it the limit
    RowPair shrink;
    bool calm = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float maximum = fmaxf(reference_[r], logits_.kept(block_max(scores, r)));
      const float scale = logits_.scale(maximum);
      // A row that has seen no key: any finite reference makes its exponentials 0 rather than NaN.
      const float reference = maximum == minus_infinity ? 0.f : logits_.in_frame(maximum, maximum);
      shrink.row[r] = ptx::ex2_approx_ftz(logits_.in_frame(reference_[r], maximum) - reference);
      // A first key tells nothing about the next block.
      calm = calm && (shrink.row[r] > 1 / expected || reference_[r] == minus_infinity);
      reference_[r] = maximum;
#pragma unroll
      for (int c = 0; c < 2; ++c) sum_[r][c] *= shrink.row[r];
#pragma unroll
      for (int i = 2 * r; i < count; i += 4) {
        const float a = ptx::ex2_approx_ftz(fmaf(scores[i], scale, -reference));
        const float b = ptx::ex2_approx_ftz(fmaf(scores[i + 1], scale, -reference));
        sum_[r][0] += a;
        sum_[r][1] += b;
        P[i / 2] = ptx::cvt_rn_x2<dtype>(a, b);
      }
    }
    try_next_ = __all_sync(0xffffffff, calm);
    return shrink;
  }

  /// A natural logit, in the base of the references.
  __device__ static float of_natural(float logit) { return Logits::of_natural(logit); }

  /// As `close_row`, for both rows. `sink`: one, or none.
  template <class... Sink>
  __device__ RowPair finish(RowPair& lse, Sink... sink) const {
    RowPair inverse;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      inverse.row[r] = close_row<Logits>(reference_[r], quad_sum(sum_[r][0] + sum_[r][1]), lse.row[r], sink...);
    }
    return inverse;
  }

 private:
  __device__ float in_own_frame(int r) const { return logits_.in_frame(reference_[r], reference_[r]); }

  __device__ static float exponential(float x, bool on_fma) {
    return on_fma ? exp2_polynomial(x) : ptx::ex2_approx_ftz(x);
  }

  Logits logits_;
  float reference_
      [2];  // an earlier maximum, as it is kept; -inf: no key seen yet, so that the next block is not in range
  float sum_[2][2];  // this thread's part: row, column parity
  bool try_next_;  // whether the next block is likely to be in range; the same in all threads of the warp
};

}  // namespace cupyfa
