// Online softmax that keeps an old maximum as its reference and looks at the probabilities afterwards (specification
// 0x09, omega = -offset and tau = offset + 1). While all of a warp's 16 rows stay in range, which they nearly always do,
// there is no maximum, no shuffle and no rescaling. Its twin is SpeculativeSoftmax in cupyfa/oracles/online.py.
//
// A probability is 2^(score * scale - reference). One that rounds to 2 or more, is infinite or NaN has the top bit of
// its exponent set, in both 16-bit formats: the OR of all packed words shows whether any has left the range.
#pragma once
#include "ptx/arithmetic.cuh"
#include "softmax.cuh"
#include "spec.cuh"

namespace cupyfa {

template <DType dtype>
class SpeculativeSoftmax {
 public:
  /// The largest score at hand when a reference is taken has the probability 2^-offset: scores can grow by offset + 1
  /// before the next one. What a large offset costs is in docs/notes/hopper_forward.md.
  static constexpr int offset = dtype == DType::bfloat16 ? 60 : 7;

  __device__ explicit SpeculativeSoftmax(float scale_log2) : scale_log2_(scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum_[r] = reference_[r] = minus_infinity;
      sum_[r][0] = sum_[r][1] = 0.f;
    }
  }

  /// P from the references at hand. False: a row of the warp has left the range, P is useless, and all else is as before.
  template <int count>
  __device__ bool speculate(u32 (&P)[count / 2], const float (&scores)[count]) {
    float sum[2][2] = {{sum_[0][0], sum_[0][1]}, {sum_[1][0], sum_[1][1]}};
    u32 seen = 0;
#pragma unroll
    for (int i = 0; i < count; i += 2) {
      const int r = i / 2 % 2;
      const float even = ptx::ex2_approx_ftz(fmaf(scores[i], scale_log2_, -reference_[r]));
      const float odd = ptx::ex2_approx_ftz(fmaf(scores[i + 1], scale_log2_, -reference_[r]));
      sum[r][0] += even;
      sum[r][1] += odd;
      P[i / 2] = ptx::cvt_rn_x2<dtype>(even, odd);
      seen |= P[i / 2];
    }
    if (__any_sync(0xffffffff, seen & 0x40004000u)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r][0] = sum[r][0];
      sum_[r][1] = sum[r][1];
    }
    return true;
  }

  /// P from new references. Returns the factor that brings what was accumulated before into their frame.
  template <int count>
  __device__ RowPair correct(u32 (&P)[count / 2], const float (&scores)[count]) {
    RowPair shrink;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum_[r] = fmaxf(maximum_[r], block_max(scores, r));
      // A row that has seen no key: any finite reference makes its exponentials 0 rather than NaN.
      const bool empty = maximum_[r] == minus_infinity;
      const float reference = empty ? 0.f : __fmul_rn(maximum_[r], scale_log2_) + offset;
      shrink.row[r] = ptx::ex2_approx_ftz(reference_[r] - reference);
      reference_[r] = empty ? minus_infinity : reference;
#pragma unroll
      for (int c = 0; c < 2; ++c) sum_[r][c] *= shrink.row[r];
#pragma unroll
      for (int i = 2 * r; i < count; i += 4) {
        const float a = ptx::ex2_approx_ftz(fmaf(scores[i], scale_log2_, -reference));
        const float b = ptx::ex2_approx_ftz(fmaf(scores[i + 1], scale_log2_, -reference));
        sum_[r][0] += a;
        sum_[r][1] += b;
        P[i / 2] = ptx::cvt_rn_x2<dtype>(a, b);
      }
    }
    return shrink;
  }

  /// The factor that normalises O, 0 for a row without keys, and the natural logarithm of the row's sum.
  __device__ RowPair finish(RowPair& lse) {
    constexpr float ln2 = 0.693147180559945309f;
    constexpr float scale = __builtin_bit_cast(float, (127u + offset) << 23);  // 2^offset
    RowPair inverse;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(sum_[r][0] + sum_[r][1]);
      inverse.row[r] = maximum_[r] == minus_infinity ? 0.f : 1.f / sum;
      // Scaled, because lg2 is most exact where its result is small.
      lse.row[r] = (reference_[r] - offset + ptx::lg2_approx_ftz(sum * scale)) * ln2;
    }
    return inverse;
  }

 private:
  float scale_log2_;
  float maximum_[2];  // of the raw scores, when the reference was taken
  float reference_[2];  // scaled maximum + offset; -inf: no key seen yet, so that the next block is not in range
  float sum_[2][2];  // this thread's part: row, column parity
};

}  // namespace cupyfa
