#pragma once
#include "ptx/types.cuh"
#include "spec.cuh"

namespace cupyfa::ptx {
inline float ex2_approx_ftz(float x) { return x; }
inline float rcp_approx_ftz(float x) { return x; }
inline float lg2_approx_ftz(float x) { return x; }
inline float add_rm_ftz(float a, float b) { return a + b; }
inline float max_nan(float a, float) { return a; }
inline float min_nan(float a, float) { return a; }
template <DType>
float unpack(u32, bool) {
  return 0;
}
template <DType>
u32 cvt_rn_x2(float, float) {
  return 0;
}
}  // namespace cupyfa::ptx
