// Rounding that is rare: directed modes of doubles, narrow formats and integers, and what becomes of a NaN's payload.
// Static, like numeric.hpp.
#pragma once
#include <cfenv>

#include "numeric.hpp"

namespace cupyfa::emulator {

static inline bool is_directed(Rounding mode) {
  return mode == Rounding::rz || mode == Rounding::rm || mode == Rounding::rp;
}

/// Whether .ftz flushes a float result whose value is x (perhaps rounded to odd): as on an H200, where its 24 bits,
/// rounded as if there were no smallest exponent, lie below 2^-126.
static inline bool is_flushed(double x, Rounding mode) {
  return std::fabs(x) < 0x1p-126 && std::fabs(round_to_float(x * 0x1p64, mode)) < 0x1p-62f;
}

/// f() under a rounding mode of the processor. It reads its operands from volatile variables and its result goes to one,
/// so that the compiler computes nothing outside of the calls.
template <class F>
static inline double under(Rounding mode, F f) {
  if (!is_directed(mode)) return f();
  const int before = std::fegetround();
  std::fesetround(mode == Rounding::rz ? FE_TOWARDZERO : mode == Rounding::rm ? FE_DOWNWARD : FE_UPWARD);
  const volatile double result = f();
  std::fesetround(before);
  return result;
}

/// A NaN made quiet, its payload kept: what conversions and the double-precision unit do.
static inline uint64_t quiet(uint64_t u) { return u | uint64_t(1) << 51; }

/// A NaN of a double as f16 and bf16: sign and the upper bits of the payload.
static inline uint32_t narrow_nan(uint64_t u, int fraction) {
  const uint32_t payload = static_cast<uint32_t>(quiet(u) >> (52 - fraction)) & ((1u << fraction) - 1);
  const uint32_t exponent = fraction == 10 ? 0x7c00 : 0x7f80;
  return (static_cast<uint32_t>(u >> 48) & 0x8000) | exponent | payload;
}

/// The neighbour of a 16-bit number that the mode asks for, from the nearest number h to x and its value.
static inline uint32_t directed16(uint32_t h, double value, double x, Rounding mode) {
  if (!is_directed(mode) || x != x || value == x) return h;
  const bool negative = h & 0x8000, above = value > x;
  const bool down = mode == Rounding::rm || (mode == Rounding::rz && x > 0);
  if (above == down) return above ? (negative ? h + 1 : h - 1) : (negative ? h - 1 : h + 1);
  return h;
}
static inline uint32_t f16_of(double x, Rounding mode) {
  const uint32_t h = f16_of(x);
  return directed16(h, double_of_f16(h), x, mode);
}
static inline uint32_t bf16_of(double x, Rounding mode) {
  const uint32_t h = bf16_of(x);
  return directed16(h, float_of_bf16(h), x, mode);
}

/// tf32: the upper 19 bits of a float. rna rounds halves away from zero, and cuts NaNs off (some become infinities).
static inline uint32_t tf32_of(float x, Rounding mode) {
  const uint32_t u = bits_of(x);
  if (x != x && mode != Rounding::rna) return nan_f32 & 0xffff'e000;
  if ((u & 0x7fff'ffff) >= 0x7f80'0000 || mode == Rounding::rz) return u & 0xffff'e000;
  return (u + (mode == Rounding::rna ? 0x1000 : 0xfff + (u >> 13 & 1))) & 0xffff'e000;
}

/// An integer of up to 65 bits as a double.
static inline double double_of_integer(__int128 v, Rounding mode) {
  const double nearest = static_cast<double>(v);
  const __int128 back = static_cast<__int128>(nearest);
  if (!is_directed(mode) || back == v) return nearest;
  const bool above = back > v, down = mode == Rounding::rm || (mode == Rounding::rz && v > 0);
  if (above != down) return nearest;
  const uint64_t u = bits_of(nearest);
  return double_of(above == (v > 0) ? u - 1 : u + 1);
}

}  // namespace cupyfa::emulator
