// Rotary position embedding, as the elements of a row are loaded: float32, rounded once.
#pragma once
#include "decode_params.h"
#include "ptx/arithmetic.cuh"

namespace cupyfa {

/// An element of an array of 16-bit numbers.
template <DType dtype>
__device__ inline float element(const void* array, long long index) {
  return ptx::unpack<dtype>(static_cast<const unsigned short*>(array)[index], false);
}

/// Column `column` of a row at a position; `load(c)` returns an element of the row.
template <DType dtype, class Load>
__device__ inline float rotated(const Rotary& rotary, int position, int column, Load load) {
  const float x = load(column);
  if (column >= rotary.dim) return x;
  const int half = rotary.dim / 2;
  const bool second = rotary.interleaved ? column % 2 != 0 : column >= half;
  const int pair = rotary.interleaved ? column / 2 : second ? column - half : column;
  const int distance = rotary.interleaved ? 1 : half;
  const float other = load(second ? column - distance : column + distance);
  const long long at = min(max(position, 0), rotary.positions - 1);
  const float cosine = element<dtype>(rotary.cos, at * rotary.cos_stride + pair);
  const float sine = element<dtype>(rotary.sin, at * rotary.sin_stride + pair);
  // Never contracted: what is appended is then what the oracle appends, bit for bit.
  return __fadd_rn(__fmul_rn(x, cosine), __fmul_rn(second ? other : -other, sine));
}

}  // namespace cupyfa
