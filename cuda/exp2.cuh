// 2^x on the FMA units, to spare the exponential unit (specification 0x09; arXiv 2603.05451, section 3.1.3). The twin of this
// file is exp2_polynomial in cupyfa/oracles/exp2/polynomial.py.
#pragma once
#include "ptx/arithmetic.cuh"

namespace cupyfa {

/// Relative error 8.8e-5. Exactly 0 at -127 and below; above 127, and for a NaN, a number of 2^127 or more.
__device__ inline float exp2_polynomial(float x) {
  constexpr float magic = 0x1.8p23f;  // around it, numbers are whole
  x = ptx::min_nan(ptx::max_nan(x, -127.f), 127.f);
  const float y = ptx::add_rm_ftz(x, magic);  // the low bits hold floor(x)
  const float f = x - (y - magic);
  const float p = fmaf(fmaf(fmaf(0x1.3be13ap-4f, f, 0x1.d20d48p-3f), f, 0x1.63ea32p-1f), f, 1.f);
  const u32 exponent = __builtin_bit_cast(u32, y) << 23;  // floor(x), where the exponent of p is
  return __builtin_bit_cast(float, __builtin_bit_cast(u32, p) + exponent);
}

}  // namespace cupyfa
