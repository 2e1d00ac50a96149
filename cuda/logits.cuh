// What the scores of a softmax are: how they become logits in base 2, and in which base a row is closed. The twins are
// ScaledScores and NaturalLogits in cupyfa/oracles/logits.py.
#pragma once
#include "ptx/arithmetic.cuh"

namespace cupyfa {

constexpr float log2_e = 1.44269504088896341f;
constexpr float ln_2 = 0.693147180559945309f;

/// Scores that a positive number turns into logits in base 2. References and sums are closed in base 2.
class ScaledScores {
 public:
  /// `scale_log2` is positive, so that masked scores stay -inf.
  __device__ explicit ScaledScores(float scale_log2) : scale_log2_(scale_log2) {}

  /// The factor of the scores of a row with this maximum.
  __device__ float scale(float /* maximum */) const { return scale_log2_; }

  /// What a retained reference keeps of a maximum, and what that is in the frame of another one.
  __device__ float kept(float maximum) const { return __fmul_rn(maximum, scale_log2_); }
  __device__ float in_frame(float kept, float /* of */) const { return kept; }

  __device__ static float of_natural(float logit) { return logit * log2_e; }
  __device__ static float exponential(float logit) { return ptx::ex2_approx_ftz(logit); }
  __device__ static float lse(float reference, float sum) { return (reference + ptx::lg2_approx_ftz(sum)) * ln_2; }

 private:
  float scale_log2_;
};

/// Scores that are natural logits, of any size: a bias may be the most negative number of its type. In base 2 that
/// overflows, and a row of nothing else would pass for one that sees no key. So large maxima have another factor: two
/// floats that differ do so by 2^104 there, and any factor makes an exponential of 0 of that.
class NaturalLogits {
 public:
  __device__ static float scale(float maximum) { return fabsf(maximum) > 0x1p127f ? 0.5f : log2_e; }
  __device__ static float kept(float maximum) { return maximum; }
  __device__ static float in_frame(float kept, float of) { return __fmul_rn(kept, scale(of)); }

  __device__ static float of_natural(float logit) { return logit; }
  __device__ static float exponential(float logit) { return ptx::ex2_approx_ftz(logit * log2_e); }
  __device__ static float lse(float reference, float sum) { return fmaf(ptx::lg2_approx_ftz(sum), ln_2, reference); }
};

}  // namespace cupyfa
