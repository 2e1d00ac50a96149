// Functions of float32 that the manual gives a bound for, not a result.
#pragma once
#include "floats.hpp"

namespace cupyfa::emulator {
namespace {

// ex2.approx: 2^n p(f) with |f| <= 1/2. The relative error is below 2^-22.5, the bound of the PTX ISA for it is 2^-22.
inline float exp2_approximate(float x) {
  const float clamped = x < -160.0f ? -160.0f : (x > 160.0f ? 160.0f : x);
  const float magic = 0x1.8p23f;
  const float n = (clamped + magic) - magic;
  const float f = clamped - n;
  float p = 1.540353040e-4f;
  p = p * f + 1.333355815e-3f;
  p = p * f + 9.618129108e-3f;
  p = p * f + 5.550410866e-2f;
  p = p * f + 2.402265070e-1f;
  p = p * f + 6.931471806e-1f;
  p = p * f + 1.0f;
  // Two factors, because 2^n alone may be out of range where the product is not.
  const int k = static_cast<int>(n), first = k >> 1, second = k - first;
  const float y = p * float_of(static_cast<u32>(first + 127) << 23) * float_of(static_cast<u32>(second + 127) << 23);
  return x == x ? y : float_of(nan_f32);
}
template <bool ftz>
struct Ex2 {
  static float of(const Instruction&, float a) { return fast<ftz>(exp2_approximate(in<ftz>(a))); }
};
struct Lg2 {
  static float of(const Instruction& i, float a) {
    if (i.attr[1] & flag_ftz) a = flush(a);
    return canonical(std::log2(a));
  }
};
#define CUPYFA_FUNCTION(Name, expression) \
  struct Name { \
    static float of(const Instruction& i, float a) { \
      if (i.attr[1] & flag_ftz) a = flush(a); \
      const float y = static_cast<float>(expression); \
      return canonical(i.attr[1] & flag_ftz ? flush(y) : y); \
    } \
  }
CUPYFA_FUNCTION(Rsqrt, 1.0 / std::sqrt(static_cast<double>(a)));
// The hardware takes the turns of |a| in float32: of a huge argument nothing is left but whole and half ones.
struct Angle {
  double turn;    ///< 0 to 1/2
  bool negative;  ///< a, or in the second half of the circle
  bool second_half;
  explicit Angle(float a) {
    const double turns = std::fabs(a * 0.15915494309189535f), part = turns - std::floor(turns);
    second_half = part >= 0.5;
    turn = second_half ? part - 0.5 : part;
    negative = std::signbit(a) != second_half;
  }
};
constexpr double circle = 6.283185307179586;
inline double sine(float a) {
  const Angle at(a);
  const double y = std::sin(circle * (at.turn > 0.25 ? 0.5 - at.turn : at.turn));
  return at.negative ? -y : y;
}
inline double cosine(float a) {
  const Angle at(a);
  const double y = std::sin(circle * (0.25 - at.turn));
  return at.second_half ? -y : y;
}
CUPYFA_FUNCTION(Sin, sine(a));
CUPYFA_FUNCTION(Cos, cosine(a));
CUPYFA_FUNCTION(Tanh, std::tanh(a));
#undef CUPYFA_FUNCTION

}  // namespace
}  // namespace cupyfa::emulator
