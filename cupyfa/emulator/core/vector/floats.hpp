// float32, also in pairs: sums, products, quotients and roots with every rounding, and minimum and maximum.
#pragma once
#include "../rounding.hpp"
#include "lanes.hpp"

namespace cupyfa::emulator {
namespace {

inline float canonical(float x) { return x == x ? x : float_of(nan_f32); }
inline float saturate(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }  // NaN becomes 0

template <bool ftz>
inline float in(float x) {
  return ftz ? flush(x) : x;
}
template <bool ftz>
inline float out(const Instruction& i, float x) {
  x = canonical(ftz ? flush(x) : x);
  return i.attr[1] & flag_sat ? saturate(x) : x;
}
/// The common case, without a look at the saturation flag.
template <bool ftz>
inline float fast(float x) {
  return canonical(ftz ? flush(x) : x);
}

// The compiler would turn x * 1 + 0 into x and such; contraction is off by option, and these keep each rounding.
template <bool ftz>
struct FAdd {
  static float of(const Instruction&, float a, float b) { return fast<ftz>(in<ftz>(a) + in<ftz>(b)); }
};
template <bool ftz>
struct FSub {
  static float of(const Instruction&, float a, float b) { return fast<ftz>(in<ftz>(a) - in<ftz>(b)); }
};
template <bool ftz>
struct FMul {
  static float of(const Instruction&, float a, float b) { return fast<ftz>(in<ftz>(a) * in<ftz>(b)); }
};
template <bool ftz>
struct FFma {
  static float of(const Instruction&, float a, float b, float c) {
    return fast<ftz>(__builtin_fmaf(in<ftz>(a), in<ftz>(b), in<ftz>(c)));
  }
};

/// 2^-126, where the rounding of a subnormal number may have hidden that .ftz flushes it.
inline bool at_border(u32 bits) { return (bits & 0x7fff'ffff) == 0x0080'0000; }

/// Any rounding and saturation, by exact sums in double.
enum class Kind { add, sub, mul, fma };
template <Kind kind>
struct Directed {
  static float compute(const Instruction& i, float a, float b, float c) {
    const bool ftz = i.attr[1] & flag_ftz;
    if (ftz) a = flush(a), b = flush(b), c = flush(c);
    double x;
    const double da = a, db = b, dc = c;
    if constexpr (kind == Kind::mul) {
      x = da * db;  // exact: 48 bits, exponents in range
    } else if constexpr (kind == Kind::add) {
      x = to_odd(exact_sum(da, db));
    } else if constexpr (kind == Kind::sub) {
      x = to_odd(exact_sum(da, -db));
    } else {
      x = to_odd(exact_sum(da * db, dc));
    }
    const auto mode = static_cast<Rounding>(i.attr[0]);
    if (x == 0 && kind != Kind::mul && mode == Rounding::rm) {
      // An exact cancellation is -0 when rounding down, +0 otherwise; equal signs keep theirs.
      const double first = kind == Kind::fma ? da * db : da;
      const double second = kind == Kind::fma ? dc : kind == Kind::sub ? -db : db;
      if (!(std::signbit(first) == 0 && std::signbit(second) == 0)) x = -0.0;
    }
    if (ftz && is_flushed(x, mode)) x = std::copysign(0.0, x);
    const float y = canonical(round_to_float(x, mode));
    if ((i.attr[1] & flag_relu) && !(y > 0) && y == y) return 0;
    return i.attr[1] & flag_sat ? saturate(y) : y;
  }
  static float of(const Instruction& i, float a, float b) { return compute(i, a, b, 0); }
  static float of(const Instruction& i, float a, float b, float c) { return compute(i, a, b, c); }
};

/// mul.ftz and fma.ftz: a vector loop, and another look at the lanes whose result lies at the border.
template <class F, Kind kind>
void flushing(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  u32* d = r.row(e[0]);
  const u32 *a = r.source(e[1]), *b = r.source(e[2]), *c = kind == Kind::fma ? r.source(e[3]) : b;
  const auto compute = [&](auto f, int l) {
    using G = decltype(f);
    if constexpr (kind == Kind::fma) {
      return bits_of(G::of(in, float_of(a[l]), float_of(b[l]), float_of(c[l])));
    } else {
      return bits_of(G::of(in, float_of(a[l]), float_of(b[l])));
    }
  };
  u32 y[lanes], border = 0;
#pragma GCC ivdep
  for (int l = 0; l < lanes; ++l) y[l] = compute(F(), l);
  for (int l = 0; l < lanes; ++l) border |= at_border(y[l]) ? 1 : 0;
  if (border)
    for (int l = 0; l < lanes; ++l)
      if (at_border(y[l])) y[l] = compute(Directed<kind>(), l);
  each_lane(mask, [&](int l) { d[l] = y[l]; });
}

template <bool ftz, bool keep_nan, bool maximum>
struct FMinMax {
  static float of(const Instruction&, float a, float b) {
    a = in<ftz>(a), b = in<ftz>(b);
    const bool swap = maximum ? (a < b || (a == b && (bits_of(a) >> 31))) : (b < a || (a == b && (bits_of(b) >> 31)));
    float m = swap ? b : a;
    m = a == a ? m : b;
    m = b == b ? m : a;
    const bool nan = keep_nan ? (a != a || b != b) : (a != a && b != b);
    return nan ? float_of(nan_f32) : m;
  }
  static float of(const Instruction& i, float a, float b, float c) { return of(i, of(i, a, b), c); }
};
struct FMinMaxAny {
  static float of(const Instruction& i, float a, float b) {
    const bool maximum =
        static_cast<Operation>(i.operation) == Operation::max || static_cast<Operation>(i.operation) == Operation::max3;
    const u32 sign = (bits_of(a) ^ bits_of(b)) & 0x8000'0000;
    if (i.attr[1] & (flag_abs | flag_xorsign)) a = std::fabs(a), b = std::fabs(b);
    if (i.attr[1] & flag_ftz) a = flush(a), b = flush(b);
    float m = i.attr[1] & flag_nan
                  ? (maximum ? FMinMax<false, true, true>::of(i, a, b) : FMinMax<false, true, false>::of(i, a, b))
                  : (maximum ? FMinMax<false, false, true>::of(i, a, b) : FMinMax<false, false, false>::of(i, a, b));
    if ((i.attr[1] & flag_xorsign) && m == m) m = float_of((bits_of(m) & 0x7fff'ffff) | sign);
    return m;
  }
  static float of(const Instruction& i, float a, float b, float c) { return of(i, of(i, a, b), c); }
};

template <bool ftz>
struct FNeg {
  static float of(const Instruction&, float a) { return float_of(bits_of(in<ftz>(a)) ^ 0x8000'0000); }
};
template <bool ftz>
struct FAbs {
  static float of(const Instruction&, float a) { return float_of(bits_of(in<ftz>(a)) & 0x7fff'ffff); }
};

struct Rcp {
  static float of(const Instruction& i, float a) {
    if (i.attr[1] & flag_ftz) a = flush(a);
    const auto mode = static_cast<Rounding>(i.attr[0]);
    float y = 1.0f / a;
    if (is_directed(mode) && std::isfinite(a)) {
      const double q = 1.0 / a;  // the quotient's own error decides the direction where it lies on a float
      const double e = std::fma(q, static_cast<double>(a), -1.0);
      y = round_to_float(to_odd({q, std::isfinite(q) ? -e * q : 0}), mode);
    }
    return canonical(i.attr[1] & flag_ftz ? flush(y) : y);
  }
};
struct FDiv {
  static float of(const Instruction& i, float a, float b) {
    if (i.attr[1] & flag_ftz) a = flush(a), b = flush(b);
    const auto mode = static_cast<Rounding>(i.attr[0]);
    float y = a / b;
    const bool border = (i.attr[1] & flag_ftz) && at_border(bits_of(y));
    if ((is_directed(mode) || border) && std::isfinite(a) && std::isfinite(b) && b != 0) {
      const double q = static_cast<double>(a) / b;
      const double e = std::fma(q, static_cast<double>(b), -static_cast<double>(a));
      const double x = to_odd({q, -e / b});
      y = (i.attr[1] & flag_ftz) && is_flushed(x, mode) ? float_of(bits_of(y) & 0x8000'0000) : round_to_float(x, mode);
    }
    return canonical(i.attr[1] & flag_ftz ? flush(y) : y);
  }
};
struct Sqrt {
  static float of(const Instruction& i, float a) {
    if (i.attr[1] & flag_ftz) a = flush(a);
    const auto mode = static_cast<Rounding>(i.attr[0]);
    float y = std::sqrt(a);
    if (is_directed(mode)) {
      const double q = std::sqrt(static_cast<double>(a));
      y = round_to_float(to_odd({q, -std::fma(q, q, -static_cast<double>(a))}), mode);
    }
    return canonical(i.attr[1] & flag_ftz ? flush(y) : y);
  }
};

/// f32x2: the float32 instruction on both halves. Operands are pairs of rows.
template <class F, int arity>
void pairwise(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  for (int half = 0; half < 2; ++half) {
    u32* d = r.row(e[half]);
    const u32 *a = r.source(e[2 + half]), *b = r.source(e[4 + half]), *c = arity > 2 ? r.source(e[6 + half]) : a;
    each_lane(mask, [&](int l) {
      if constexpr (arity == 2) {
        d[l] = bits_of(F::of(in, float_of(a[l]), float_of(b[l])));
      } else {
        d[l] = bits_of(F::of(in, float_of(a[l]), float_of(b[l]), float_of(c[l])));
      }
    });
  }
}

// --- by attributes ---------------------------------------------------------------------------------------------------

bool plain_rounding(const Instruction& in) {
  const auto mode = static_cast<Rounding>(in.attr[0]);
  return (mode == Rounding::rn || mode == Rounding::unrounded) && !(in.attr[1] & ~flag_ftz);
}
template <template <bool> class F>
LaneFunction float_binary(const Instruction& in) {
  return in.attr[1] & flag_ftz ? binary<Float, Float, Float, F<true>> : binary<Float, Float, Float, F<false>>;
}
template <template <bool> class F, Kind kind>
LaneFunction float_arithmetic(const Instruction& in) {
  return plain_rounding(in) ? float_binary<F>(in) : binary<Float, Float, Float, Directed<kind>>;
}
template <template <bool> class F, Kind kind>
LaneFunction pair_arithmetic(const Instruction& in) {
  if (!plain_rounding(in)) return pairwise<Directed<kind>, 2>;
  return in.attr[1] & flag_ftz ? pairwise<F<true>, 2> : pairwise<F<false>, 2>;
}
template <bool maximum>
LaneFunction float_minmax(const Instruction& in) {
  const auto operation = static_cast<Operation>(in.operation);
  const bool three = operation == Operation::min3 || operation == Operation::max3;
  if (three) return ternary<Float, Float, Float, Float, FMinMaxAny>;
  if (in.attr[1] & (flag_abs | flag_xorsign)) return binary<Float, Float, Float, FMinMaxAny>;
  const bool ftz = in.attr[1] & flag_ftz, nan = in.attr[1] & flag_nan;
  if (ftz)
    return nan ? binary<Float, Float, Float, FMinMax<true, true, maximum>>
               : binary<Float, Float, Float, FMinMax<true, false, maximum>>;
  return nan ? binary<Float, Float, Float, FMinMax<false, true, maximum>>
             : binary<Float, Float, Float, FMinMax<false, false, maximum>>;
}

}  // namespace
}  // namespace cupyfa::emulator
