// The other float types: f64, f16 and bf16, one value at a time and through double.
#pragma once
#include "floats.hpp"

namespace cupyfa::emulator {
namespace {

template <class V>
struct CopySign {
  static V of(const Instruction&, V a, V b) {
    constexpr V sign = V(1) << (8 * sizeof(V) - 1);
    return (a & sign) | (b & ~sign);
  }
};

int arity_of(const Instruction& in) {
  switch (static_cast<Operation>(in.operation)) {
  case Operation::add:
  case Operation::sub:
  case Operation::mul:
  case Operation::div:
  case Operation::min:
  case Operation::max:
    return 2;
  case Operation::fma:
    return 3;
  default:
    return 1;
  }
}

/// min and max of numbers as bit patterns: -0 is less than +0.
inline bool first_wins(bool maximum, double a, double b, bool a_negative) {
  return maximum ? a > b || (a == b && !a_negative) : a < b || (a == b && a_negative);
}

struct F64 {
  /// The result where no operand is a NaN. Each operand is read again under the rounding mode.
  static double number(const Instruction& i, double a, double b, double c) {
    const auto mode = static_cast<Rounding>(i.attr[0]);
    const volatile double x = a, y = b, z = c;
    switch (static_cast<Operation>(i.operation)) {
    case Operation::add:
      return under(mode, [&] { return x + y; });
    case Operation::sub:
      return under(mode, [&] { return x - y; });
    case Operation::mul:
      return under(mode, [&] { return x * y; });
    case Operation::fma:
      return under(mode, [&] { return std::fma(x, y, z); });
    case Operation::div:
      return under(mode, [&] { return x / y; });
    case Operation::rcp:
      return under(mode, [&] { return 1 / x; });
    case Operation::sqrt:
      return under(mode, [&] { return std::sqrt(x); });
    default:
      return 1 / std::sqrt(a);  // rsqrt
    }
  }
  static u64 compute(const Instruction& i, u64 ua, u64 ub, u64 uc) {
    constexpr u64 sign = u64(1) << 63;
    const double a = double_of(ua), b = double_of(ub), c = double_of(uc);
    switch (static_cast<Operation>(i.operation)) {
    case Operation::neg:
      return ua ^ sign;
    case Operation::abs:
      return ua & ~sign;
    case Operation::min:
    case Operation::max:
      if (a != a) return b != b ? quiet(ua) : ub;
      if (b != b) return ua;
      return first_wins(static_cast<Operation>(i.operation) == Operation::max, a, b, ua & sign) ? ua : ub;
    default:
      break;
    }
    if (a != a) return quiet(ua);  // the double-precision unit keeps the payload of an operand
    if (b != b) return quiet(ub);
    if (c != c) return quiet(uc);
    const double y = number(i, a, b, c);
    return y == y ? bits_of(y) : nan_f64;
  }
};

enum class Format { f16, bf16 };
template <Format format>
struct Scalar {
  static constexpr u32 sign = 0x8000, nan = 0x7fff;
  static double get(u32 bits) { return format == Format::f16 ? double_of_f16(bits) : float_of_bf16(bits); }
  static u32 put(const Instruction& i, double x) {
    if ((i.attr[1] & flag_relu) && !(x > 0)) x = x == x ? 0 : x;
    if (i.attr[1] & flag_sat) x = x > 0 ? (x < 1 ? x : 1) : 0;
    u32 h = format == Format::f16 ? f16_of(x) : bf16_of(x);
    if ((i.attr[1] & flag_ftz) && format == Format::f16 && (h & 0x7c00) == 0) h &= sign;
    return h;
  }
  static u32 flushed(const Instruction& i, u32 bits) {
    return format == Format::f16 && (i.attr[1] & flag_ftz) && (bits & 0x7c00) == 0 ? bits & sign : bits;
  }
  static u32 extreme(const Instruction& i, u32 ua, u32 ub) {
    const u32 product = i.attr[1] & flag_xorsign ? (ua ^ ub) & sign : 0;
    if (i.attr[1] & (flag_abs | flag_xorsign)) ua &= ~sign, ub &= ~sign;
    const double a = get(ua), b = get(ub);
    if (i.attr[1] & flag_nan ? a != a || b != b : a != a && b != b) return nan;
    if (a != a) return ub | product;
    if (b != b) return ua | product;
    const bool first = first_wins(static_cast<Operation>(i.operation) == Operation::max, a, b, ua & sign);
    return (first ? ua : ub) | product;
  }
  static u32 compute(const Instruction& i, u32 ua, u32 ub, u32 uc) {
    ua = flushed(i, ua), ub = flushed(i, ub), uc = flushed(i, uc);
    const double a = get(ua), b = get(ub), c = get(uc);
    switch (static_cast<Operation>(i.operation)) {
    case Operation::add:
      return put(i, to_odd(exact_sum(a, b)));
    case Operation::sub:
      return put(i, to_odd(exact_sum(a, -b)));
    case Operation::mul:
      return put(i, a * b);
    case Operation::fma:
      return put(i, to_odd(exact_sum(a * b, c)));
    case Operation::div:
      return put(i, a / b);
    case Operation::neg:
      return ua ^ sign;
    case Operation::abs:
      return ua & ~sign;
    case Operation::rcp:
      return put(i, 1 / a);
    case Operation::sqrt:
      return put(i, std::sqrt(a));
    case Operation::rsqrt:
      return put(i, 1 / std::sqrt(a));
    case Operation::ex2:
      return put(i, std::exp2(a));
    case Operation::tanh:
      return put(i, std::tanh(a));
    default:
      return extreme(i, ua, ub);
    }
  }
};
void scalar64(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const int n = arity_of(in);
  const auto d = Two<u64>::destination(r, e), a = Two<u64>::source(r, e + 2);
  const auto b = n > 1 ? Two<u64>::source(r, e + 4) : a, c = n > 2 ? Two<u64>::source(r, e + 6) : a;
  each_lane(mask, [&](int l) { d.put(l, F64::compute(in, a.get(l), b.get(l), c.get(l))); });
}
template <Format format, bool packed>
void scalar16(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const int n = arity_of(in);
  u32* d = r.row(e[0]);
  const u32 *a = r.source(e[1]), *b = n > 1 ? r.source(e[2]) : a, *c = n > 2 ? r.source(e[3]) : a;
  each_lane(mask, [&](int l) {
    u32 v = Scalar<format>::compute(in, a[l] & 0xffff, b[l] & 0xffff, c[l] & 0xffff);
    if (packed) v |= Scalar<format>::compute(in, a[l] >> 16, b[l] >> 16, c[l] >> 16) << 16;
    d[l] = v;
  });
}
LaneFunction scalar(T type) {
  switch (type) {
  case T::f64:
    return scalar64;
  case T::f16:
    return scalar16<Format::f16, false>;
  case T::f16x2:
    return scalar16<Format::f16, true>;
  case T::bf16:
    return scalar16<Format::bf16, false>;
  default:
    return scalar16<Format::bf16, true>;
  }
}

bool is_other_float(T t) { return t == T::f64 || t == T::f16 || t == T::f16x2 || t == T::bf16 || t == T::bf16x2; }

/// fma.f32 with a and b in f16 or bf16.
void fma_mixed(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  u32* d = r.row(e[0]);
  const u32 *a = r.source(e[1]), *b = r.source(e[2]), *c = r.source(e[3]);
  const bool half = static_cast<T>(in.type2) == T::f16;
  each_lane(mask, [&](int l) {
    const float x = half ? float_of_f16(a[l] & 0xffff) : float_of_bf16(a[l] & 0xffff);
    const float y = half ? float_of_f16(b[l] & 0xffff) : float_of_bf16(b[l] & 0xffff);
    d[l] = bits_of(canonical(__builtin_fmaf(x, y, float_of(c[l]))));
  });
}
/// add, sub of f32 with a in f16 or bf16.
void add_mixed(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  u32* d = r.row(e[0]);
  const u32 *a = r.source(e[1]), *c = r.source(e[2]);
  const bool half = static_cast<T>(in.type2) == T::f16, negate = static_cast<Operation>(in.operation) == Operation::sub;
  each_lane(mask, [&](int l) {
    const float x = half ? float_of_f16(a[l] & 0xffff) : float_of_bf16(a[l] & 0xffff);
    d[l] = bits_of(canonical(negate ? x - float_of(c[l]) : x + float_of(c[l])));
  });
}

}  // namespace
}  // namespace cupyfa::emulator
