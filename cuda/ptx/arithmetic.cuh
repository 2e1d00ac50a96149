// Approximate functions and packed conversions that C++ has no exact spelling for.
#pragma once
#include "ptx/types.cuh"
#include "spec.cuh"

namespace cupyfa::ptx {

/// 2^x with a relative error of about 2^-22; ex2(-inf) = +0. One MUFU instruction.
__device__ inline float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1/x with an error of at most one ulp; rcp(0) = inf.
__device__ inline float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x); lg2(0) = -inf.
__device__ inline float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// a + b, rounded down.
__device__ inline float add_rm_ftz(float a, float b) {
  float y;
  asm("add.rm.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// The larger, the smaller; NaN if one of them is.
__device__ inline float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ inline float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// One of two packed numbers, the lower or the upper one, widened.
template <DType dtype>
__device__ inline float unpack(u32 packed, bool upper) {
  if constexpr (dtype == DType::bfloat16) return __builtin_bit_cast(float, upper ? packed & 0xffff0000 : packed << 16);
  float y;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.f32.f16 %0, low;\n"
      "}"
      : "=f"(y)
      : "r"(upper ? packed >> 16 : packed));
  return y;
}

/// Two floats rounded to nearest even and packed, `low` in the lower half.
template <DType dtype>
__device__ inline u32 cvt_rn_x2(float low, float high) {
  u32 packed;
  if constexpr (dtype == DType::bfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

}  // namespace cupyfa::ptx
