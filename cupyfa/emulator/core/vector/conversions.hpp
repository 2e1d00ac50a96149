// Conversions between all types.
#pragma once
#include "floats.hpp"

namespace cupyfa::emulator {
namespace {

/// Integers to integers: truncate or extend; saturation clamps to the target's range.
template <class To, class From>
void cvt_integer(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  using D = std::conditional_t<sizeof(To) == 8, Two<u64>, One<u32>>;
  using A = std::conditional_t<sizeof(From) == 8, Two<u64>, One<u32>>;
  const D d = D::destination(r, e);
  const A a = A::source(r, e + D::entries);
  const bool sat = in.attr[1] & flag_sat;
  each_lane(mask, [&](int l) {
    const From x = static_cast<From>(a.get(l));
    __int128 v = x;
    if (sat) {
      const __int128 low = std::is_signed_v<To> ? -(__int128(1) << (8 * sizeof(To) - 1)) : 0;
      const __int128 high = (__int128(1) << (8 * sizeof(To) - (std::is_signed_v<To> ? 1 : 0))) - 1;
      v = v < low ? low : v > high ? high : v;
    }
    // A narrow signed result fills the register's 32 bits with its sign, 16-bit registers keep 16.
    const To t = static_cast<To>(v);
    if constexpr (sizeof(To) == 8) {
      d.put(l, static_cast<u64>(t));
    } else {
      d.put(l, static_cast<u32>(static_cast<std::conditional_t<std::is_signed_v<To>, i32, u32>>(t)));
    }
  });
}
template <class To, class From>
void cvt_integer_fast(const Instruction&, const int32_t* e, const Registers& r, u32 mask) {
  using D = std::conditional_t<sizeof(To) == 8, Two<u64>, One<u32>>;
  using A = std::conditional_t<sizeof(From) == 8, Two<u64>, One<u32>>;
  const D d = D::destination(r, e);
  const A a = A::source(r, e + D::entries);
  each_lane(mask, [&](int l) {
    const To t = static_cast<To>(static_cast<From>(a.get(l)));
    if constexpr (sizeof(To) == 8) {
      d.put(l, static_cast<u64>(t));
    } else {
      d.put(l, static_cast<u32>(static_cast<std::conditional_t<std::is_signed_v<To>, i32, u32>>(t)));
    }
  });
}

struct FloatFormat {
  static double get(T type, u64 u) {
    switch (type) {
    case T::f32:
      return float_of(static_cast<u32>(u));
    case T::f64:
      return double_of(u);
    case T::f16:
      return double_of_f16(static_cast<u32>(u) & 0xffff);
    default:
      return float_of_bf16(static_cast<u32>(u) & 0xffff);
    }
  }
};
inline double round_integer(double x, Rounding mode) {
  switch (mode) {
  case Rounding::rzi:
  case Rounding::rz:
    return std::trunc(x);
  case Rounding::rmi:
  case Rounding::rm:
    return std::floor(x);
  case Rounding::rpi:
  case Rounding::rp:
    return std::ceil(x);
  default:
    return std::nearbyint(x);
  }
}
/// An integer as a float of 24 bits or fewer, or a double, with any rounding.
inline double integer_to_double(__int128 v) {
  // 64 bits do not fit a double: round to odd, which a later rounding to at most 51 bits does not notice.
  const double d = static_cast<double>(v);
  const __int128 back = static_cast<__int128>(d);
  if (back == v) return d;
  return to_odd({d, v > back ? 1.0 : -1.0});
}
inline bool is_float(T t) { return t == T::f32 || t == T::f64 || t == T::f16 || t == T::bf16; }
inline bool is_signed(T t) { return t == T::s8 || t == T::s16 || t == T::s32 || t == T::s64; }
inline int width_of(T t) {
  switch (t) {
  case T::b8:
  case T::u8:
  case T::s8:
    return 8;
  case T::b16:
  case T::u16:
  case T::s16:
  case T::f16:
  case T::bf16:
    return 16;
  case T::b64:
  case T::u64:
  case T::s64:
  case T::f64:
    return 64;
  default:
    return 32;
  }
}
/// What a NaN becomes: conversions from and to f64, and bf16 to f32, keep its payload, the others give one NaN.
u64 converted_nan(const Instruction& in, T to, T from, u64 u) {
  if (to == T::f64) {
    if (from == T::f64) return quiet(u);
    if (from == T::f32 && (in.attr[1] & flag_ftz)) return bits_of(static_cast<double>(float_of(nan_f32)));
    return quiet(bits_of(FloatFormat::get(from, u)));
  }
  if (from == T::f64 && to == T::f32) return (u >> 32 & 0x8000'0000) | 0x7f80'0000 | (quiet(u) >> 29 & 0x7f'ffff);
  if (from == T::f64) return narrow_nan(u, to == T::f16 ? 10 : 7);
  if (to == T::f32) return from == T::bf16 ? (u & 0xffff) << 16 : nan_f32;
  return nan_f16;
}
u64 float_to(const Instruction& in, T to, double x) {
  const auto mode = static_cast<Rounding>(in.attr[0]);
  if ((in.attr[1] & flag_relu) && !(x > 0)) x = x == x ? 0 : x;
  if (in.attr[1] & flag_sat) x = x > 0 ? (x < 1 ? x : 1) : 0;
  switch (to) {
  case T::f64:
    return x == x ? bits_of(x) : nan_f64;
  case T::f32: {
    if ((in.attr[1] & flag_ftz) && is_flushed(x, mode)) x = std::copysign(0.0, x);
    return bits_of(canonical(round_to_float(x, mode)));
  }
  case T::f16: {
    u32 h = f16_of(x, mode);
    if ((in.attr[1] & flag_satfinite) && (h & 0x7fff) == 0x7c00) h = (h & 0x8000) | 0x7bff;
    return h;
  }
  case T::bf16: {
    u32 h = bf16_of(x, mode);
    if ((in.attr[1] & flag_satfinite) && (h & 0x7fff) == 0x7f80) h = (h & 0x8000) | 0x7f7f;
    return h;
  }
  default:
    return 0;
  }
}
u64 float_to_integer(const Instruction& in, T to, double x) {
  const int width = width_of(to);
  if (x != x) return width == 64 || static_cast<T>(in.type2) == T::f64 ? u64(1) << (width - 1) : 0;
  x = round_integer(x, static_cast<Rounding>(in.attr[0]));
  const bool s = is_signed(to);
  const double low = s ? -std::ldexp(1.0, width - 1) : 0, high = std::ldexp(1.0, width - (s ? 1 : 0));
  u64 v;
  if (x <= low) {
    v = s ? u64(1) << (width - 1) : 0;
    if (s && width < 64) v = ~u64(0) << (width - 1);
  } else if (x >= high) {
    v = s ? (u64(1) << (width - 1)) - 1 : width == 64 ? ~u64(0) : (u64(1) << width) - 1;
  } else {
    v = s ? static_cast<u64>(static_cast<i64>(x)) : static_cast<u64>(x);
  }
  return v;
}
void cvt_general(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const auto to = static_cast<T>(in.type), from = static_cast<T>(in.type2);
  const bool d2 = width_of(to) == 64, a2 = width_of(from) == 64;
  const u32 *low = r.source(e[d2 ? 2 : 1]), *high = a2 ? r.source(e[(d2 ? 2 : 1) + 1]) : low;
  u32 *out_low = r.row(e[0]), *out_high = d2 ? r.row(e[1]) : nullptr;
  const auto mode = static_cast<Rounding>(in.attr[0]);
  each_lane(mask, [&](int l) {
    u64 u = low[l] | (a2 ? static_cast<u64>(high[l]) << 32 : 0), v;
    if (is_float(from)) {
      if (from == T::f32 && (in.attr[1] & flag_ftz)) u = flush(static_cast<u32>(u));
      double x = FloatFormat::get(from, u);
      if (is_float(to)) {
        const bool integral =
            mode == Rounding::rni || mode == Rounding::rzi || mode == Rounding::rmi || mode == Rounding::rpi;
        if (integral) x = round_integer(x, mode);
        v = x != x && !(in.attr[1] & flag_sat) ? converted_nan(in, to, from, u) : float_to(in, to, x);
      } else {
        v = float_to_integer(in, to, x);
      }
    } else {
      __int128 x = 0;
      switch (from) {
      case T::s8:
        x = static_cast<int8_t>(u);
        break;
      case T::s16:
        x = static_cast<int16_t>(u);
        break;
      case T::s32:
        x = static_cast<i32>(u);
        break;
      case T::s64:
        x = static_cast<i64>(u);
        break;
      case T::u8:
      case T::b8:
        x = static_cast<u8>(u);
        break;
      case T::u16:
      case T::b16:
        x = static_cast<u16>(u);
        break;
      case T::u32:
      case T::b32:
        x = static_cast<u32>(u);
        break;
      default:
        x = u;
      }
      v = to == T::f64 ? bits_of(double_of_integer(x, mode)) : float_to(in, to, integer_to_double(x));
    }
    out_low[l] = static_cast<u32>(v);
    if (out_high) out_high[l] = static_cast<u32>(v >> 32);
  });
}
/// e4m3x2, e5m2x2 to f16x2 and back.
void cvt_float8(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  u32* d = r.row(e[0]);
  const u32* a = r.source(e[1]);
  const auto to = static_cast<T>(in.type), from = static_cast<T>(in.type2);
  const bool relu = in.attr[1] & flag_relu;
  each_lane(mask, [&](int l) {
    u32 halves[2];
    for (int i = 0; i < 2; ++i) {
      if (to == T::f16x2) {
        const u32 v = a[l] >> (8 * i) & 0xff;
        u32 h = from == T::e5m2x2 ? v << 8 : f16_of(float_of_e4m3(v));
        if ((h & 0x7fff) > 0x7c00) h = nan_f16;
        if (relu && (h & 0x8000) && (h & 0x7fff) <= 0x7c00) h = 0;
        halves[i] = h;
      } else {
        float x = float_of_f16(a[l] >> (16 * i) & 0xffff);
        if (relu && !(x > 0)) x = x == x ? 0 : x;
        halves[i] = to == T::e5m2x2 ? e5m2_of(x) : e4m3_of(x);
      }
    }
    d[l] = to == T::f16x2 ? halves[0] | halves[1] << 16 : halves[0] | halves[1] << 8;
  });
}
template <T to, bool plain>
void cvt_pack(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  u32* d = r.row(e[0]);
  const u32 *high = r.source(e[1]), *low = r.source(e[2]);
  if constexpr (plain && (to == T::bf16x2 || to == T::f16x2)) {
    each_lane(mask, [&](int l) {
      const float x = float_of(low[l]), y = float_of(high[l]);
      d[l] = to == T::bf16x2 ? bf16_of(x) | bf16_of(y) << 16 : f16_of(x) | f16_of(y) << 16;
    });
  } else {
    Instruction half = in;
    half.type = static_cast<u8>(to == T::bf16x2 ? T::bf16 : T::f16);
    each_lane(mask, [&](int l) {
      u32 v[2];
      for (int i = 0; i < 2; ++i) {
        float x = float_of(i ? high[l] : low[l]);
        if (to == T::bf16x2 || to == T::f16x2) {
          v[i] = static_cast<u32>(float_to(half, static_cast<T>(half.type), x));
        } else {
          if ((in.attr[1] & flag_relu) && !(x > 0)) x = x == x ? 0 : x;
          v[i] = to == T::e5m2x2 ? e5m2_of(x) : e4m3_of(x);
        }
      }
      d[l] = v[0] | v[1] << (to == T::bf16x2 || to == T::f16x2 ? 16 : 8);
    });
  }
}
void cvt_bf16_f32(const Instruction&, const int32_t* e, const Registers& r, u32 mask) {
  u32* d = r.row(e[0]);
  const u32* a = r.source(e[1]);
  each_lane(mask, [&](int l) { d[l] = bf16_of(float_of(a[l])); });
}
void cvt_f32_bf16(const Instruction&, const int32_t* e, const Registers& r, u32 mask) {
  u32* d = r.row(e[0]);
  const u32* a = r.source(e[1]);
  each_lane(mask, [&](int l) { d[l] = a[l] << 16; });
}
void cvt_tf32(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  u32* d = r.row(e[0]);
  const u32* a = r.source(e[1]);
  each_lane(mask, [&](int l) {
    u32 v = tf32_of(float_of(a[l]), static_cast<Rounding>(in.attr[0]));
    if ((in.attr[1] & flag_satfinite) && (v & 0x7fff'ffff) == 0x7f80'0000) v = (v & 0x8000'0000) | 0x7f7f'e000;
    d[l] = (in.attr[1] & flag_relu) && v >> 31 ? 0 : v;
  });
}

template <class To>
LaneFunction select_integer_cvt(T from, bool sat) {
  switch (from) {
  case T::u8:
  case T::b8:
    return sat ? cvt_integer<To, u8> : cvt_integer_fast<To, u8>;
  case T::s8:
    return sat ? cvt_integer<To, int8_t> : cvt_integer_fast<To, int8_t>;
  case T::u16:
  case T::b16:
    return sat ? cvt_integer<To, u16> : cvt_integer_fast<To, u16>;
  case T::s16:
    return sat ? cvt_integer<To, int16_t> : cvt_integer_fast<To, int16_t>;
  case T::u32:
  case T::b32:
    return sat ? cvt_integer<To, u32> : cvt_integer_fast<To, u32>;
  case T::s32:
    return sat ? cvt_integer<To, i32> : cvt_integer_fast<To, i32>;
  case T::u64:
  case T::b64:
    return sat ? cvt_integer<To, u64> : cvt_integer_fast<To, u64>;
  case T::s64:
    return sat ? cvt_integer<To, i64> : cvt_integer_fast<To, i64>;
  default:
    return nullptr;
  }
}
LaneFunction select_cvt(const Instruction& in) {
  const auto to = static_cast<T>(in.type), from = static_cast<T>(in.type2);
  const bool sat = in.attr[1] & flag_sat;
  if (to == T::e4m3x2 || to == T::e5m2x2 || from == T::e4m3x2 || from == T::e5m2x2) return cvt_float8;
  if (to == T::tf32) return from == T::f32 ? cvt_tf32 : nullptr;
  if (is_float(to) || is_float(from)) {
    const bool nearest = in.attr[0] == static_cast<u8>(Rounding::rn) || in.attr[0] == 0;
    if (to == T::bf16 && from == T::f32 && nearest && !in.attr[1]) return cvt_bf16_f32;
    if (to == T::f32 && from == T::bf16 && !in.attr[1] && nearest) return cvt_f32_bf16;
    return cvt_general;
  }
  switch (to) {
  case T::u8:
  case T::b8:
    return select_integer_cvt<u8>(from, sat);
  case T::s8:
    return select_integer_cvt<int8_t>(from, sat);
  case T::u16:
  case T::b16:
    return select_integer_cvt<u16>(from, sat);
  case T::s16:
    return select_integer_cvt<int16_t>(from, sat);
  case T::u32:
  case T::b32:
    return select_integer_cvt<u32>(from, sat);
  case T::s32:
    return select_integer_cvt<i32>(from, sat);
  case T::u64:
  case T::b64:
    return select_integer_cvt<u64>(from, sat);
  case T::s64:
    return select_integer_cvt<i64>(from, sat);
  default:
    return nullptr;
  }
}

}  // namespace
}  // namespace cupyfa::emulator
