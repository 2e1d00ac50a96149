// Online softmax of a warpgroup's 64 rows in the accumulator layout of WGMMA (specification 0x01 and 0x05). A thread has
// two rows, and the four threads of a quad share them. The twin of this file is OnlineSoftmax in cupyfa/oracles/softmax.py.
#pragma once
#include "logits.cuh"
#include "mask.cuh"
#include "ptx/arithmetic.cuh"

namespace cupyfa {

/// Factors for the two rows of a thread.
struct RowPair {
  float row[2];
};

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

/// Closes a row with a sum relative to a reference. Returns the factor that normalises O, +0 for a row without keys and for
/// no other; `lse` is a natural logarithm.
template <class Logits>
__device__ inline float close_row(float reference, float sum, float& lse) {
  lse = Logits::lse(reference, sum);  // without keys: -inf + -inf
  // The sum of a row without keys is 0. It is NaN if all of a row's scores are: no maximum shows them.
  return reference == minus_infinity ? sum : ptx::rcp_approx_ftz(sum);
}

/// The same with one more logit, which has no value: a sink, in the base of the reference.
template <class Logits>
__device__ inline float close_row(float reference, float sum, float& lse, float sink) {
  const float maximum = fmaxf(reference, sink);
  const float origin = maximum == minus_infinity ? 0.f : maximum;
  const float shrink = Logits::exponential(reference - origin);
  const float total = fmaf(sum, shrink, Logits::exponential(sink - origin));
  lse = Logits::lse(maximum, total);
  if (reference == minus_infinity) return sum;
  const float inverse = shrink * ptx::rcp_approx_ftz(total);
  return inverse == 0.f ? -0.f : inverse;  // beside a far larger sink: its O may still be a NaN
}

/// The largest of a block's scores in row r of the thread.
template <int count>
__device__ inline float block_max(const float (&scores)[count], int r) {
  // Even and odd columns are two independent chains: half the latency.
  float even = scores[2 * r], odd = scores[2 * r + 1];
#pragma unroll
  for (int i = 4; i < count; i += 4) {
    even = fmaxf(even, scores[i + 2 * r]);
    odd = fmaxf(odd, scores[i + 2 * r + 1]);
  }
  return quad_max(fmaxf(even, odd));
}

/// `threshold`: while no maximum of the warp's 16 rows has grown by more, in base 2, the old ones stay, and O in their frame
/// (specification 0x09, arXiv 2603.05451, section 3.1.4). With 0 they always move, which takes no vote.
template <class Logits, int threshold>
class OnlineSoftmax {
 public:
  __device__ explicit OnlineSoftmax(Logits logits) : logits_(logits) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum_[r] = minus_infinity;
      sum_[r][0] = sum_[r][1] = 0.f;
    }
  }

  /// Turns scores into exp2(scale * (score - maximum)). `shrink` brings what was accumulated before into the frame of the
  /// new maximum. Returns whether that is the old one.
  template <int count>
  __device__ bool update(float (&scores)[count], RowPair& shrink) {
    float maxima[2];
    const bool stays = threshold > 0 && find_maxima(maxima, scores);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float maximum = threshold > 0 ? maxima[r] : fmaxf(maximum_[r], block_max(scores, r));
      // A row that has seen no key has -inf: any finite reference makes its exponentials 0 rather than NaN.
      const float scale = logits_.scale(maximum);
      const float reference = maximum == minus_infinity ? 0.f : scaled(maximum, scale);
      shrink.row[r] = ptx::ex2_approx_ftz(scaled(maximum_[r], scale) - reference);
      maximum_[r] = maximum;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = sum_[r][c] * shrink.row[r];
#pragma unroll
        for (int i = 2 * r + c; i < count; i += 4) {
          scores[i] = ptx::ex2_approx_ftz(fmaf(scores[i], scale, -reference));
          sum += scores[i];
        }
        sum_[r][c] = sum;
      }
    }
    return stays;
  }

  /// A natural logit, in the base of the references.
  __device__ static float of_natural(float logit) { return Logits::of_natural(logit); }

  /// As `close_row`, for both rows. `sink`: one, or none.
  template <class... Sink>
  __device__ RowPair finish(RowPair& lse, Sink... sink) const {
    RowPair inverse;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      inverse.row[r] =
          close_row<Logits>(logits_.kept(maximum_[r]), quad_sum(sum_[r][0] + sum_[r][1]), lse.row[r], sink...);
    }
    return inverse;
  }

 private:
  /// The maxima after a block, or the old ones if they stay.
  template <int count>
  __device__ bool find_maxima(float (&maxima)[2], const float (&scores)[count]) const {
    bool near = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maxima[r] = fmaxf(maximum_[r], block_max(scores, r));
      const float scale = logits_.scale(maxima[r]);
      near =
          near && scaled(maxima[r], scale) - scaled(maximum_[r], scale) <= threshold;  // not where the old one is -inf
    }
    const bool stays = __all_sync(0xffffffff, near);
    if (stays) {
      maxima[0] = maximum_[0];
      maxima[1] = maximum_[1];
    }
    return stays;
  }

  /// Rounded, and never contracted into an fma: the same maximum must give the same reference, so that a maximum that
  /// stays shrinks by exactly 1. With an fma the error of the product stayed, and the sum drifted by 2^-24 in each block.
  __device__ static float scaled(float maximum, float scale) { return __fmul_rn(maximum, scale); }

  Logits logits_;
  float maximum_[2];  // of the raw scores; with a threshold, an earlier one
  float sum_[2][2];  // this thread's part: row, column parity
};

}  // namespace cupyfa
