// Number formats. Everything is static: this file is compiled for several vector units in one library.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include "isa.hpp"

namespace cupyfa::emulator {

static inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
static inline uint64_t bits_of(double x) {
  uint64_t u;
  std::memcpy(&u, &x, 8);
  return u;
}
static inline double double_of(uint64_t u) {
  double x;
  std::memcpy(&x, &u, 8);
  return x;
}

constexpr uint32_t nan_f32 = 0x7fff'ffff;  ///< what arithmetic gives
constexpr uint64_t nan_f64 = 0xfff8'0000'0000'0000;
constexpr uint32_t nan_f16 = 0x7fff, nan_bf16 = 0x7fff;

/// A subnormal becomes a zero of its sign.
static inline uint32_t flush(uint32_t x) { return (x & 0x7f80'0000) == 0 ? x & 0x8000'0000 : x; }
static inline float flush(float x) { return float_of(flush(bits_of(x))); }

static inline float float_of_bf16(uint32_t h) { return float_of(h << 16); }

static inline float float_of_f16(uint32_t h) {
  const uint32_t sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
  // Shifted into place the exponent is 112 too small; a product repairs it, subnormals included.
  const uint32_t normal = bits_of(float_of(magnitude << 13) * 0x1p112f);
  const uint32_t special = 0x7f80'0000 | (magnitude << 13);
  return float_of((magnitude >= 0x7c00 ? special : normal) | sign);
}

static inline uint32_t bf16_of(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return (u & 0x7fff'ffff) > 0x7f80'0000 ? nan_bf16 : rounded;
}

static inline uint32_t f16_of(float x) {
  const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fff'ffff;
  // Subnormal results: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits of the sum.
  const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3f00'0000;
  const uint32_t normal = (magnitude - 0x3800'0000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  uint32_t h = magnitude < 0x3880'0000 ? small : normal;
  h = magnitude >= 0x4780'0000 - 0x1000 ? 0x7c00 : h;  // 65520 and more round to infinity
  h = magnitude > 0x7f80'0000 ? nan_f16 : h | sign;
  return h;
}

// --- directed rounding: an exact sum is kept as a pair hi + lo of doubles -------------------------------------------

struct Pair {
  double hi, lo;
};

static inline Pair exact_sum(double a, double b) {
  const double s = a + b, t = s - a;
  const double lo = (a - (s - t)) + (b - t);
  return {s, lo == lo ? lo : 0};
}

/// Rounds hi to odd where lo is not 0, so that a second rounding to 24 bits or fewer is exact.
static inline double to_odd(Pair p) {
  const uint64_t u = bits_of(p.hi);
  if (p.lo == 0 || (u & 1) || !std::isfinite(p.hi)) return p.hi;
  const bool away = (p.lo > 0) == (p.hi > 0);
  return double_of(away ? u + 1 : u - 1);
}

/// A double, perhaps rounded to odd, as a float.
static inline float round_to_float(double x, Rounding mode) {
  const float nearest = static_cast<float>(x);
  if (mode == Rounding::rn || mode == Rounding::unrounded || nearest != nearest) return nearest;
  if (static_cast<double>(nearest) == x) return nearest;
  const bool above = static_cast<double>(nearest) > x;
  const uint32_t u = bits_of(nearest);
  const bool down = mode == Rounding::rm || (mode == Rounding::rz && x > 0);
  const bool up = mode == Rounding::rp || (mode == Rounding::rz && x < 0);
  if (above && down) return (u & 0x7fff'ffff) == 0 ? float_of(0x8000'0001) : float_of(u & 0x8000'0000 ? u + 1 : u - 1);
  if (!above && up) return (u & 0x7fff'ffff) == 0 ? float_of(0x0000'0001) : float_of(u & 0x8000'0000 ? u - 1 : u + 1);
  return nearest;
}

static inline double double_of_f16(uint32_t h) { return float_of_f16(h); }

/// A float whose significand has more bits than a format with `fraction` bits and smallest exponent `emin`, as the
/// number of that format's units: shared by the narrow formats below. Round to nearest even.
static inline double round_to_units(double x, int fraction, int emin) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent = std::ilogb(x);
  if (exponent < emin) exponent = emin;
  const double unit = std::ldexp(1.0, exponent - fraction);
  return std::nearbyint(x / unit) * unit;
}

static inline uint32_t f16_of(double x) {
  if (x != x) return nan_f16;
  return f16_of(static_cast<float>(round_to_units(x, 10, -14)));
}
static inline uint32_t bf16_of(double x) {
  if (x != x) return nan_bf16;
  return bf16_of(static_cast<float>(round_to_units(x, 7, -126)));
}

/// E4M3 (OCP "fn"): bias 7, no infinities, S.1111.111 is NaN. cvt saturates.
static inline uint32_t e4m3_of(float x) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80;
  if (x != x) return 0x7f;
  double a = std::fabs(round_to_units(x, 3, -6));
  if (a >= 448) return sign | 0x7e;
  if (a < 0x1p-6) return sign | static_cast<uint32_t>(a * 0x1p9);
  int exponent = std::ilogb(a);
  return sign | static_cast<uint32_t>((exponent + 7) * 8 + static_cast<int>(std::ldexp(a, 3 - exponent)) - 8);
}
static inline float float_of_e4m3(uint32_t v) {
  const uint32_t exponent = v >> 3 & 15, fraction = v & 7;
  float a = exponent ? std::ldexp(1.0f + fraction / 8.0f, static_cast<int>(exponent) - 7) : fraction * 0x1p-9f;
  if ((v & 0x7f) == 0x7f) return float_of(nan_f32);
  return v & 0x80 ? -a : a;
}
/// E5M2: the upper byte of an f16.
static inline uint32_t e5m2_of(float x) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80;
  if (x != x) return 0x7f;
  double a = std::fabs(round_to_units(x, 2, -14));
  if (a >= 57344) return sign | 0x7b;
  return f16_of(static_cast<float>(a)) >> 8 | sign;
}
static inline float float_of_e5m2(uint32_t v) { return float_of_f16(v << 8); }

/// An element of an MMA operand.
static inline float element_of(Type type, uint32_t v) {
  switch (type) {
  case Type::f16:
    return float_of_f16(v);
  case Type::bf16:
    return float_of_bf16(v);
  case Type::e4m3:
    return float_of_e4m3(v);
  case Type::e5m2:
    return float_of_e5m2(v);
  default:
    return float_of(v & 0xffff'e000);  // tf32
  }
}

}  // namespace cupyfa::emulator
