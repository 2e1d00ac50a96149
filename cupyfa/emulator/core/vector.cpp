// The vector unit of one level. meson compiles this file once a level with CUPYFA_LEVEL and the options of that level;
// everything but the exported function is in an anonymous namespace, so that no code of a higher level is shared.
#include "vector.hpp"

#include <type_traits>

#include "numeric.hpp"
#include "rounding.hpp"

#define CUPYFA_CAT_(a, b) a##b
#define CUPYFA_CAT(a, b) CUPYFA_CAT_(a, b)
#define CUPYFA_STRING_(a) #a
#define CUPYFA_STRING(a) CUPYFA_STRING_(a)
#ifndef CUPYFA_LEVEL
#define CUPYFA_LEVEL baseline
#endif

namespace cupyfa::emulator {
namespace {

using T = Type;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

// --- operands: how a value of 16, 32 or 64 bits lies in rows ---------------------------------------------------------

/// A value in one row, as `V` (uint32_t or int32_t).
template <class V>
struct One {
  static constexpr int entries = 1;
  using value = V;
  u32* row;
  static One destination(const Registers& r, const int32_t* e) { return {r.row(e[0])}; }
  static One source(const Registers& r, const int32_t* e) { return {const_cast<u32*>(r.source(e[0]))}; }
  V get(int l) const { return static_cast<V>(row[l]); }
  void put(int l, V v) const { row[l] = static_cast<u32>(v); }
};

/// The low 16 bits of a row.
template <class V>
struct Half {
  static constexpr int entries = 1;
  using value = V;
  u32* row;
  static Half destination(const Registers& r, const int32_t* e) { return {r.row(e[0])}; }
  static Half source(const Registers& r, const int32_t* e) { return {const_cast<u32*>(r.source(e[0]))}; }
  V get(int l) const { return static_cast<V>(row[l]); }
  void put(int l, V v) const { row[l] = static_cast<u16>(v); }
};

template <class V>
struct Two {
  static constexpr int entries = 2;
  using value = V;
  u32 *low, *high;
  static Two destination(const Registers& r, const int32_t* e) { return {r.row(e[0]), r.row(e[1])}; }
  static Two source(const Registers& r, const int32_t* e) {
    return {const_cast<u32*>(r.source(e[0])), const_cast<u32*>(r.source(e[1]))};
  }
  V get(int l) const { return static_cast<V>(low[l] | static_cast<u64>(high[l]) << 32); }
  void put(int l, V v) const {
    low[l] = static_cast<u32>(static_cast<u64>(v));
    high[l] = static_cast<u32>(static_cast<u64>(v) >> 32);
  }
};

struct Float {
  static constexpr int entries = 1;
  using value = float;
  u32* row;
  static Float destination(const Registers& r, const int32_t* e) { return {r.row(e[0])}; }
  static Float source(const Registers& r, const int32_t* e) { return {const_cast<u32*>(r.source(e[0]))}; }
  float get(int l) const { return float_of(row[l]); }
  void put(int l, float v) const { row[l] = bits_of(v); }
};

struct Double {
  static constexpr int entries = 2;
  using value = double;
  Two<u64> rows;
  static Double destination(const Registers& r, const int32_t* e) { return {Two<u64>::destination(r, e)}; }
  static Double source(const Registers& r, const int32_t* e) { return {Two<u64>::source(r, e)}; }
  double get(int l) const { return double_of(rows.get(l)); }
  void put(int l, double v) const { rows.put(l, bits_of(v)); }
};

/// f(l) for the lanes of the mask; a full warp is the case that the compiler vectorises.
template <class F>
inline void each_lane(u32 mask, F f) {
  if (mask == all_lanes) {
#pragma GCC ivdep
    for (int l = 0; l < lanes; ++l) f(l);
  } else {
    for (int l = 0; l < lanes; ++l)
      if (mask >> l & 1) f(l);
  }
}

// f(instruction, values...): attributes that matter for speed are template arguments of F instead.
template <class D, class A, class F>
void unary(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const D d = D::destination(r, e);
  const A a = A::source(r, e + D::entries);
  each_lane(mask, [&](int l) { d.put(l, F::of(in, a.get(l))); });
}
template <class D, class A, class B, class F>
void binary(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const D d = D::destination(r, e);
  const A a = A::source(r, e + D::entries);
  const B b = B::source(r, e + D::entries + A::entries);
  each_lane(mask, [&](int l) { d.put(l, F::of(in, a.get(l), b.get(l))); });
}
template <class D, class A, class B, class C, class F>
void ternary(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const D d = D::destination(r, e);
  const A a = A::source(r, e + D::entries);
  const B b = B::source(r, e + D::entries + A::entries);
  const C c = C::source(r, e + D::entries + A::entries + B::entries);
  each_lane(mask, [&](int l) { d.put(l, F::of(in, a.get(l), b.get(l), c.get(l))); });
}

// --- integers --------------------------------------------------------------------------------------------------------

#define CUPYFA_OP(Name, expression_of, ...) \
  struct Name { \
    template <class V> \
    static V of(const Instruction& in [[maybe_unused]], __VA_ARGS__) { \
      return static_cast<V>(expression_of); \
    } \
  }

template <class V>
using Unsigned = std::conditional_t<sizeof(V) == 8, u64, std::conditional_t<sizeof(V) == 4, u32, u16>>;
template <class V>
using Wide = std::conditional_t<std::is_signed_v<V>, std::conditional_t<sizeof(V) == 8, __int128, i64>,
                                std::conditional_t<sizeof(V) == 8, unsigned __int128, u64>>;

// Sums and products wrap, so they are computed in the unsigned type (16-bit ones in 32 bits: no integer promotion).
template <class V>
using Wrap = std::conditional_t<sizeof(V) == 8, u64, u32>;

CUPYFA_OP(Add, Wrap<V>(a) + Wrap<V>(b), V a, V b);
CUPYFA_OP(Sub, Wrap<V>(a) - Wrap<V>(b), V a, V b);
CUPYFA_OP(MulLo, Wrap<V>(a) * Wrap<V>(b), V a, V b);
CUPYFA_OP(MulHi, Wide<V>(a) * Wide<V>(b) >> (8 * sizeof(V)), V a, V b);
CUPYFA_OP(MadLo, Wrap<V>(a) * Wrap<V>(b) + Wrap<V>(c), V a, V b, V c);
CUPYFA_OP(MadHi, Wrap<V>(static_cast<V>(Wide<V>(a) * Wide<V>(b) >> (8 * sizeof(V)))) + Wrap<V>(c), V a, V b, V c);
CUPYFA_OP(Min, a < b ? a : b, V a, V b);
CUPYFA_OP(Max, a > b ? a : b, V a, V b);
CUPYFA_OP(And, a & b, V a, V b);
CUPYFA_OP(Or, a | b, V a, V b);
CUPYFA_OP(Xor, a ^ b, V a, V b);
CUPYFA_OP(Not, ~a, V a);
CUPYFA_OP(Cnot, a == 0 ? 1 : 0, V a);
CUPYFA_OP(Neg, Wrap<V>(0) - Wrap<V>(a), V a);
CUPYFA_OP(Abs, a < 0 ? Wrap<V>(0) - Wrap<V>(a) : Wrap<V>(a), V a);
CUPYFA_OP(Move, a, V a);
CUPYFA_OP(Sad, Wrap<V>(c) + (a < b ? Wrap<V>(b) - Wrap<V>(a) : Wrap<V>(a) - Wrap<V>(b)), V a, V b, V c);

// .sat, which only s32 has.
template <class V>
inline i32 clamped(V x) {
  return static_cast<i32>(x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : x);
}
struct AddSat {
  static i32 of(const Instruction&, i32 a, i32 b) { return clamped(static_cast<i64>(a) + b); }
};
struct SubSat {
  static i32 of(const Instruction&, i32 a, i32 b) { return clamped(static_cast<i64>(a) - b); }
};
struct MadHiSat {
  static i32 of(const Instruction&, i32 a, i32 b, i32 c) { return clamped((static_cast<i64>(a) * b >> 32) + c); }
};

// By zero both quotient and remainder are all ones, signed or not (as on an H200); the one overflow wraps.
struct Div {
  template <class V>
  static V of(const Instruction&, V a, V b) {
    if (b == 0) return static_cast<V>(~V(0));
    if (std::is_signed_v<V> && b == V(-1)) return static_cast<V>(Wrap<V>(0) - Wrap<V>(a));
    return static_cast<V>(a / b);
  }
};
struct Rem {
  template <class V>
  static V of(const Instruction&, V a, V b) {
    if (b == 0) return static_cast<V>(~V(0));
    if (std::is_signed_v<V> && b == V(-1)) return 0;
    return static_cast<V>(a % b);
  }
};
struct Shl {
  template <class V>
  static V of(const Instruction&, V a, u32 b) {
    return b >= 8 * sizeof(V) ? V(0) : static_cast<V>(Wrap<V>(a) << b);
  }
};
struct Shr {
  template <class V>
  static V of(const Instruction&, V a, u32 b) {
    constexpr u32 bits = 8 * sizeof(V);
    if constexpr (std::is_signed_v<V>) {
      return static_cast<V>(a >> (b >= bits ? bits - 1 : b));
    } else {
      return b >= bits ? V(0) : static_cast<V>(a >> b);
    }
  }
};

struct MulWide {
  template <class V>
  static auto of(const Instruction&, V a, V b) {
    if constexpr (sizeof(V) == 2) {
      return static_cast<u32>(static_cast<i32>(a) * static_cast<i32>(b));
    } else {
      return static_cast<u64>(Wide<V>(a) * Wide<V>(b));
    }
  }
};
struct MulWide16u {
  static u32 of(const Instruction&, u16 a, u16 b) { return static_cast<u32>(a) * static_cast<u32>(b); }
};
struct MadWide16 {
  template <class V>
  static u32 of(const Instruction&, V a, V b, u32 c) {
    return static_cast<u32>(static_cast<Wrap<V>>(a) * static_cast<Wrap<V>>(b)) + c;
  }
};
struct MadWide32 {
  template <class V>
  static u64 of(const Instruction&, V a, V b, u64 c) {
    return static_cast<u64>(Wide<V>(a) * Wide<V>(b)) + c;
  }
};

template <class V>
int leading_zeros(V a) {
  int n = 0;
  for (int i = 8 * static_cast<int>(sizeof(V)) - 1; i >= 0 && !(a >> i & 1); --i) ++n;
  return n;
}
struct Popc {
  template <class V>
  static u32 of(const Instruction&, V a) {
    return static_cast<u32>(__builtin_popcountll(a));
  }
};
struct Clz {
  template <class V>
  static u32 of(const Instruction&, V a) {
    return static_cast<u32>(leading_zeros(a));
  }
};
struct Brev {
  template <class V>
  static V of(const Instruction&, V a) {
    V r = 0;
    for (unsigned i = 0; i < 8 * sizeof(V); ++i) r = static_cast<V>(r << 1 | (a >> i & 1));
    return r;
  }
};
struct Bfind {
  template <class V>
  static u32 of(const Instruction& in, V a) {
    using U = Unsigned<V>;
    U u = static_cast<U>(a);
    if (std::is_signed_v<V> && a < 0) u = static_cast<U>(~u);
    if (u == 0) return 0xffff'ffff;
    const int n = leading_zeros(u), top = 8 * static_cast<int>(sizeof(V)) - 1 - n;
    return static_cast<u32>(in.attr[0] ? n : top);
  }
};
/// Position and length of a bit field: of 32 bits the hardware looks at the low byte only, of 64 bits at all.
template <class V>
inline u32 field_number(u32 x) {
  return sizeof(V) == 8 ? x : x & 0xff;
}
struct Bfe {
  template <class V>
  static V of(const Instruction&, V a, u32 b, u32 c) {
    constexpr u32 bits = 8 * sizeof(V);
    using U = Unsigned<V>;
    const u32 position = field_number<V>(b), length = field_number<V>(c);
    const U u = static_cast<U>(a);
    U field = position >= bits ? 0 : static_cast<U>(u >> position);
    if (length < bits) field &= static_cast<U>((U(1) << length) - 1);
    if (length == 0 || !std::is_signed_v<V>) return static_cast<V>(length == 0 ? 0 : field);
    // The field is filled with the bit at its top, at most the sign.
    const u32 top = position >= bits || length >= bits - position ? bits - 1 : position + length - 1;
    if ((u >> top & 1) == 0) return static_cast<V>(field);
    const u32 kept = top + 1 > position ? top + 1 - position : 0;
    const U ones = kept >= bits ? 0 : static_cast<U>(~U(0) << kept);
    return static_cast<V>(field | ones);
  }
};
void bfi(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const auto run = [&](auto d, auto a, auto b, const u32* c, const u32* n) {
    using V = decltype(a.get(0));
    constexpr u32 bits = 8 * sizeof(V);
    each_lane(mask, [&](int l) {
      const u32 position = field_number<V>(c[l]), length = field_number<V>(n[l]);
      if (length == 0 || position >= bits) return d.put(l, b.get(l));
      V field = length >= bits ? ~V(0) : static_cast<V>((V(1) << length) - 1);
      field = static_cast<V>(field << position);
      d.put(l, (b.get(l) & ~field) | (static_cast<V>(a.get(l) << position) & field));
    });
  };
  if (static_cast<T>(in.type) == T::b64) {
    run(Two<u64>::destination(r, e), Two<u64>::source(r, e + 2), Two<u64>::source(r, e + 4), r.source(e[6]),
        r.source(e[7]));
  } else {
    run(One<u32>::destination(r, e), One<u32>::source(r, e + 1), One<u32>::source(r, e + 2), r.source(e[3]),
        r.source(e[4]));
  }
}
struct Prmt {
  static u32 of(const Instruction&, u32 a, u32 b, u32 c) {
    const u64 bytes = static_cast<u64>(b) << 32 | a;
    u32 d = 0;
    for (int i = 0; i < 4; ++i) {
      const u32 selector = c >> (4 * i) & 0xf;
      u32 byte = static_cast<u32>(bytes >> (8 * (selector & 7)) & 0xff);
      if (selector & 8) byte = byte & 0x80 ? 0xff : 0;
      d |= byte << (8 * i);
    }
    return d;
  }
};
struct Lop3 {
  static u32 of(const Instruction& in, u32 a, u32 b, u32 c) {
    u32 d = 0;
    for (int i = 0; i < 8; ++i) {
      if (in.imm >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    }
    return d;
  }
};
struct Shf {
  static u32 of(const Instruction& in, u32 a, u32 b, u32 c) {
    const u64 both = static_cast<u64>(b) << 32 | a;
    const u32 n = in.attr[1] ? c & 31 : (c > 32 ? 32 : c);
    return static_cast<u32>(in.attr[0] ? both >> n : both << n >> 32);
  }
};

// --- float32 ---------------------------------------------------------------------------------------------------------

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

/// Results below the normal numbers are flushed before they are rounded: 2^-126 itself may have come from below.
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
      const double first = kind == Kind::fma ? da * db : da, second = kind == Kind::fma ? dc : kind == Kind::sub ? -db : db;
      if (!(std::signbit(first) == 0 && std::signbit(second) == 0)) x = -0.0;
    }
    if (ftz && std::fabs(x) < smallest_normal_f32) x = std::copysign(0.0, x);
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
    const bool maximum = static_cast<Operation>(i.operation) == Operation::max ||
                         static_cast<Operation>(i.operation) == Operation::max3;
    const u32 sign = (bits_of(a) ^ bits_of(b)) & 0x8000'0000;
    if (i.attr[1] & (flag_abs | flag_xorsign)) a = std::fabs(a), b = std::fabs(b);
    if (i.attr[1] & flag_ftz) a = flush(a), b = flush(b);
    float m = i.attr[1] & flag_nan ? (maximum ? FMinMax<false, true, true>::of(i, a, b) : FMinMax<false, true, false>::of(i, a, b))
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
      y = (i.attr[1] & flag_ftz) && std::fabs(x) < smallest_normal_f32 ? float_of(bits_of(y) & 0x8000'0000)
                                                                       : round_to_float(x, mode);
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
#define CUPYFA_FUNCTION(Name, expression) \
  struct Name { \
    static float of(const Instruction& i, float a) { \
      if (i.attr[1] & flag_ftz) a = flush(a); \
      const float y = static_cast<float>(expression); \
      return canonical(i.attr[1] & flag_ftz ? flush(y) : y); \
    } \
  }
CUPYFA_FUNCTION(Rsqrt, 1.0 / std::sqrt(static_cast<double>(a)));
CUPYFA_FUNCTION(Sin, std::sin(a));
CUPYFA_FUNCTION(Cos, std::cos(a));
CUPYFA_FUNCTION(Tanh, std::tanh(a));
#undef CUPYFA_FUNCTION

template <class V>
struct CopySign {
  static V of(const Instruction&, V a, V b) {
    constexpr V sign = V(1) << (8 * sizeof(V) - 1);
    return (a & sign) | (b & ~sign);
  }
};

// --- other float types: one value at a time, through double ----------------------------------------------------------

enum class Format { f16, bf16, f64 };
template <Format format>
struct Scalar {
  static double get(u64 bits) {
    if constexpr (format == Format::f64) return double_of(bits);
    return format == Format::f16 ? double_of_f16(static_cast<u32>(bits)) : float_of_bf16(static_cast<u32>(bits));
  }
  static u64 put(const Instruction& i, double x) {
    if ((i.attr[1] & flag_relu) && !(x > 0)) x = x == x ? 0 : x;
    if (i.attr[1] & flag_sat) x = x > 0 ? (x < 1 ? x : 1) : 0;
    if constexpr (format == Format::f64) return x == x ? bits_of(x) : nan_f64;
    u32 h = format == Format::f16 ? f16_of(x) : bf16_of(x);
    if ((i.attr[1] & flag_ftz) && format == Format::f16 && (h & 0x7c00) == 0) h &= 0x8000;
    return h;
  }
  static u64 flushed(const Instruction& i, u64 bits) {
    return format == Format::f16 && (i.attr[1] & flag_ftz) && (bits & 0x7c00) == 0 ? bits & 0x8000 : bits;
  }
  static u64 compute(const Instruction& i, u64 ua, u64 ub, u64 uc) {
    ua = flushed(i, ua), ub = flushed(i, ub), uc = flushed(i, uc);
    const double a = get(ua), b = get(ub), c = get(uc);
    constexpr u64 sign = format == Format::f64 ? u64(1) << 63 : 0x8000;
    switch (static_cast<Operation>(i.operation)) {
      case Operation::add: return put(i, format == Format::f64 ? a + b : to_odd(exact_sum(a, b)));
      case Operation::sub: return put(i, format == Format::f64 ? a - b : to_odd(exact_sum(a, -b)));
      case Operation::mul: return put(i, a * b);
      case Operation::fma: return put(i, format == Format::f64 ? std::fma(a, b, c) : to_odd(exact_sum(a * b, c)));
      case Operation::div: return put(i, a / b);
      case Operation::neg: return ua ^ sign;
      case Operation::abs: return ua & ~sign;
      case Operation::rcp: return put(i, 1 / a);
      case Operation::sqrt: return put(i, std::sqrt(a));
      case Operation::rsqrt: return put(i, 1 / std::sqrt(a));
      case Operation::ex2: return put(i, std::exp2(a));
      case Operation::tanh: return put(i, std::tanh(a));
      default: break;
    }
    const bool maximum = static_cast<Operation>(i.operation) == Operation::max;
    const bool nan = i.attr[1] & flag_nan ? a != a || b != b : a != a && b != b;
    if (nan) return format == Format::f64 ? nan_f64 : 0x7fff;
    if (a != a) return ub;
    if (b != b) return ua;
    const bool first = maximum ? (a > b || (a == b && !(ua & sign))) : (a < b || (a == b && (ua & sign)));
    return first ? ua : ub;
  }
};
template <Format format>
void scalar64(const Instruction& in, const int32_t* e, const Registers& r, u32 mask, int arity) {
  const auto d = Two<u64>::destination(r, e), a = Two<u64>::source(r, e + 2);
  const auto b = arity > 1 ? Two<u64>::source(r, e + 4) : a, c = arity > 2 ? Two<u64>::source(r, e + 6) : a;
  each_lane(mask, [&](int l) { d.put(l, Scalar<format>::compute(in, a.get(l), b.get(l), c.get(l))); });
}
template <Format format, bool packed>
void scalar16(const Instruction& in, const int32_t* e, const Registers& r, u32 mask, int arity) {
  u32* d = r.row(e[0]);
  const u32 *a = r.source(e[1]), *b = arity > 1 ? r.source(e[2]) : a, *c = arity > 2 ? r.source(e[3]) : a;
  each_lane(mask, [&](int l) {
    u64 v = Scalar<format>::compute(in, a[l] & 0xffff, b[l] & 0xffff, c[l] & 0xffff);
    if (packed) v |= Scalar<format>::compute(in, a[l] >> 16, b[l] >> 16, c[l] >> 16) << 16;
    d[l] = static_cast<u32>(v);
  });
}
int arity_of(const Instruction& in) {
  switch (static_cast<Operation>(in.operation)) {
    case Operation::add: case Operation::sub: case Operation::mul: case Operation::div: case Operation::min:
    case Operation::max: return 2;
    case Operation::fma: return 3;
    default: return 1;
  }
}
void scalar(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const int n = arity_of(in);
  switch (static_cast<T>(in.type)) {
    case T::f64: return scalar64<Format::f64>(in, e, r, mask, n);
    case T::f16: return scalar16<Format::f16, false>(in, e, r, mask, n);
    case T::f16x2: return scalar16<Format::f16, true>(in, e, r, mask, n);
    case T::bf16: return scalar16<Format::bf16, false>(in, e, r, mask, n);
    default: return scalar16<Format::bf16, true>(in, e, r, mask, n);
  }
}

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

// --- moves, predicates -----------------------------------------------------------------------------------------------

void mov_pred(const Instruction&, const int32_t* e, const Registers& r, u32 mask) {
  r.set_predicate(e[0], r.predicate(e[1]), mask);
}
void logic_pred(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const u32 a = r.predicate(e[1]);
  u32 d;
  switch (static_cast<Operation>(in.operation)) {
    case Operation::and_: d = a & r.predicate(e[2]); break;
    case Operation::or_: d = a | r.predicate(e[2]); break;
    case Operation::xor_: d = a ^ r.predicate(e[2]); break;
    default: d = ~a;
  }
  r.set_predicate(e[0], d, mask);
}
template <int rows>
void mov_rows(const Instruction&, const int32_t* e, const Registers& r, u32 mask) {
  const u32* a[rows];
  u32 copy[rows][lanes];
  for (int i = 0; i < rows; ++i) {
    a[i] = r.source(e[rows + i]);
    if (rows > 1) std::memcpy(copy[i], a[i], sizeof(copy[i])), a[i] = copy[i];  // {a, b} = {b, a}
  }
  for (int i = 0; i < rows; ++i) {
    if (e[i] == absent) continue;
    u32* d = r.row(e[i]);
    const u32* s = a[i];
    each_lane(mask, [&](int l) { d[l] = s[l]; });
  }
}
template <int rows>
void selp(const Instruction&, const int32_t* e, const Registers& r, u32 mask) {
  const u32 p = r.predicate(e[3 * rows]);
  for (int i = 0; i < rows; ++i) {
    u32* d = r.row(e[i]);
    const u32 *a = r.source(e[rows + i]), *b = r.source(e[2 * rows + i]);
    each_lane(mask, [&](int l) { d[l] = p >> l & 1 ? a[l] : b[l]; });
  }
}
struct Pack16 {
  static u32 of(const Instruction&, u32 a, u32 b) { return (a & 0xffff) | b << 16; }
};
struct Pack8 {
  static u32 of(const Instruction&, u32 a, u32 b) { return (a & 0xff) | (b & 0xff) << 8; }
};
void unpack16(const Instruction&, const int32_t* e, const Registers& r, u32 mask) {
  u32 a[lanes];
  std::memcpy(a, r.source(e[2]), sizeof(a));
  for (int half = 0; half < 2; ++half) {
    if (e[half] == absent) continue;
    u32* d = r.row(e[half]);
    each_lane(mask, [&](int l) { d[l] = a[l] >> (16 * half) & 0xffff; });
  }
}

template <class V>
bool compare(Comparison c, V a, V b) {
  const bool unordered = a != a || b != b;
  switch (c) {
    case Comparison::eq: return a == b;
    case Comparison::ne: return !unordered && a != b;
    case Comparison::lt: return a < b;
    case Comparison::le: return a <= b;
    case Comparison::gt: return a > b;
    case Comparison::ge: return a >= b;
    case Comparison::equ: return unordered || a == b;
    case Comparison::neu: return a != b;
    case Comparison::ltu: return unordered || a < b;
    case Comparison::leu: return unordered || a <= b;
    case Comparison::gtu: return unordered || a > b;
    case Comparison::geu: return unordered || a >= b;
    case Comparison::num: return !unordered;
    default: return unordered;
  }
}

/// A bit per lane: the comparison as a template argument, so that its loop is one vector comparison.
template <class A, Comparison c>
u32 compare_lanes(A a, A b) {
  u32 flags[lanes], bits = 0;
#pragma GCC ivdep
  for (int l = 0; l < lanes; ++l) flags[l] = compare(c, a.get(l), b.get(l)) ? 1u << l : 0;
  for (int l = 0; l < lanes; ++l) bits |= flags[l];
  return bits;
}
template <class A>
u32 compare_lanes(Comparison c, A a, A b) {
  switch (c) {
    case Comparison::eq: return compare_lanes<A, Comparison::eq>(a, b);
    case Comparison::ne: return compare_lanes<A, Comparison::ne>(a, b);
    case Comparison::lt: return compare_lanes<A, Comparison::lt>(a, b);
    case Comparison::le: return compare_lanes<A, Comparison::le>(a, b);
    case Comparison::gt: return compare_lanes<A, Comparison::gt>(a, b);
    case Comparison::ge: return compare_lanes<A, Comparison::ge>(a, b);
    case Comparison::equ: return compare_lanes<A, Comparison::equ>(a, b);
    case Comparison::neu: return compare_lanes<A, Comparison::neu>(a, b);
    case Comparison::ltu: return compare_lanes<A, Comparison::ltu>(a, b);
    case Comparison::leu: return compare_lanes<A, Comparison::leu>(a, b);
    case Comparison::gtu: return compare_lanes<A, Comparison::gtu>(a, b);
    case Comparison::geu: return compare_lanes<A, Comparison::geu>(a, b);
    case Comparison::num: return compare_lanes<A, Comparison::num>(a, b);
    default: return compare_lanes<A, Comparison::nan>(a, b);
  }
}
template <class A, bool ftz = false>
u32 compare_rows(const Instruction& in, const int32_t* e, const Registers& r) {
  const auto c = static_cast<Comparison>(in.attr[0]);
  if constexpr (ftz) {
    u32 a[lanes], b[lanes];
    const u32 *x = r.source(e[0]), *y = r.source(e[1]);
    for (int l = 0; l < lanes; ++l) a[l] = flush(x[l]), b[l] = flush(y[l]);
    return compare_lanes(c, Float{a}, Float{b});
  } else {
    return compare_lanes(c, A::source(r, e), A::source(r, e + A::entries));
  }
}
u32 compare_halves(const Instruction& in, const int32_t* e, const Registers& r) {
  const u32 *a = r.source(e[0]), *b = r.source(e[1]);
  u32 bits = 0;
  for (int l = 0; l < lanes; ++l) {
    const bool half = static_cast<T>(in.type) == T::f16;
    const float x = half ? float_of_f16(a[l] & 0xffff) : float_of_bf16(a[l] & 0xffff);
    const float y = half ? float_of_f16(b[l] & 0xffff) : float_of_bf16(b[l] & 0xffff);
    bits |= compare(static_cast<Comparison>(in.attr[0]), x, y) ? 1u << l : 0;
  }
  return bits;
}
using Compare = u32 (*)(const Instruction&, const int32_t*, const Registers&);
inline Compare comparer(const Instruction& in) {
  switch (static_cast<T>(in.type)) {
    case T::s16: return compare_rows<Half<int16_t>>;
    case T::b16: case T::u16: return compare_rows<Half<u16>>;
    case T::s32: return compare_rows<One<i32>>;
    case T::b32: case T::u32: return compare_rows<One<u32>>;
    case T::s64: return compare_rows<Two<i64>>;
    case T::b64: case T::u64: return compare_rows<Two<u64>>;
    case T::f32: return in.attr[2] ? compare_rows<Float, true> : compare_rows<Float>;
    case T::f64: return compare_rows<Double>;
    case T::f16: case T::bf16: return compare_halves;
    default: return nullptr;
  }
}
int entries_of(T type) {
  switch (type) {
    case T::b64: case T::u64: case T::s64: case T::f64: case T::f32x2: return 2;
    case T::b128: return 4;
    default: return 1;
  }
}
void setp(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const u32 t = comparer(in)(in, e + 2, r);
  u32 p = t, q = ~t;
  const auto boolean = static_cast<Boolean>(in.attr[1]);
  if (boolean != Boolean::none) {
    const u32 c = r.predicate(e[2 + 2 * entries_of(static_cast<T>(in.type))]);
    const auto combine = [&](u32 x) { return boolean == Boolean::and_ ? x & c : boolean == Boolean::or_ ? x | c : x ^ c; };
    p = combine(p), q = combine(q);
  }
  if (e[0] != absent) r.set_predicate(e[0], p, mask);
  if (e[1] != absent) r.set_predicate(e[1], q, mask);
}
void set(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  u32* d = r.row(e[0]);
  const u32 t = comparer(in)(in, e + 1, r);
  const u32 yes = static_cast<T>(in.type2) == T::f32 ? 0x3f80'0000 : 0xffff'ffff;
  each_lane(mask, [&](int l) { d[l] = t >> l & 1 ? yes : 0; });
}
void testp(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  u32 bits = 0;
  for (int l = 0; l < lanes; ++l) {
    double x;
    bool subnormal;
    if (static_cast<T>(in.type) == T::f64) {
      const u64 u = Two<u64>::source(r, e + 1).get(l);
      x = double_of(u);
      subnormal = x != 0 && (u >> 52 & 0x7ff) == 0;
    } else {
      const u32 u = r.source(e[1])[l];
      x = float_of(u);
      subnormal = x != 0 && (u >> 23 & 0xff) == 0;
    }
    const bool finite = x - x == 0;
    const bool answers[] = {finite, x == x && !finite, x == x, x != x, finite && !subnormal, subnormal};
    bits |= answers[in.attr[0]] ? 1u << l : 0;
  }
  r.set_predicate(e[0], bits, mask);
}

// --- conversions -----------------------------------------------------------------------------------------------------

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
      case T::f32: return float_of(static_cast<u32>(u));
      case T::f64: return double_of(u);
      case T::f16: return double_of_f16(static_cast<u32>(u) & 0xffff);
      default: return float_of_bf16(static_cast<u32>(u) & 0xffff);
    }
  }
};
inline double round_integer(double x, Rounding mode) {
  switch (mode) {
    case Rounding::rzi: case Rounding::rz: return std::trunc(x);
    case Rounding::rmi: case Rounding::rm: return std::floor(x);
    case Rounding::rpi: case Rounding::rp: return std::ceil(x);
    default: return std::nearbyint(x);
  }
}
/// An integer as a float of 24 bits or fewer, or a double, with any rounding.
inline double integer_to_double(__int128 v) {
  // 64 bits do not fit a double: round to odd, which a later rounding to at most 51 bits does not notice. To f64 itself
  // only the default rounding is supported, which the plain conversion does.
  const double d = static_cast<double>(v);
  const __int128 back = static_cast<__int128>(d);
  if (back == v) return d;
  return to_odd({d, v > back ? 1.0 : -1.0});
}
inline bool is_float(T t) { return t == T::f32 || t == T::f64 || t == T::f16 || t == T::bf16; }
inline bool is_signed(T t) { return t == T::s8 || t == T::s16 || t == T::s32 || t == T::s64; }
inline int width_of(T t) {
  switch (t) {
    case T::b8: case T::u8: case T::s8: return 8;
    case T::b16: case T::u16: case T::s16: case T::f16: case T::bf16: return 16;
    case T::b64: case T::u64: case T::s64: case T::f64: return 64;
    default: return 32;
  }
}
inline u32 round_bf16(float y, Rounding mode) {
  if (y != y) return nan_bf16;
  if (mode == Rounding::rz) return bits_of(y) >> 16;
  return bf16_of(y);
}
/// A double (exact or rounded to odd) to f16 or bf16, toward zero.
inline u32 f16_toward_zero(double x) {
  u32 h = f16_of(x);
  if (x != x) return nan_f16;
  if (!std::isinf(x) && std::fabs(double_of_f16(h)) > std::fabs(x)) --h;
  return h;
}
u64 float_to(const Instruction& in, T to, double x, bool exact64 = true) {
  const auto mode = static_cast<Rounding>(in.attr[0]);
  (void)exact64;
  if ((in.attr[1] & flag_relu) && !(x > 0)) x = x == x ? 0 : x;
  if (in.attr[1] & flag_sat) x = x > 0 ? (x < 1 ? x : 1) : 0;
  switch (to) {
    case T::f64: return x == x ? bits_of(x) : nan_f64;
    case T::f32: {
      float y = round_to_float(x, mode);
      if (in.attr[1] & flag_ftz) y = flush(y);
      return bits_of(canonical(y));
    }
    case T::f16: {
      u32 h = mode == Rounding::rz ? f16_toward_zero(x) : f16_of(x);
      if ((in.attr[1] & flag_satfinite) && (h & 0x7fff) == 0x7c00) h = (h & 0x8000) | 0x7bff;
      return h;
    }
    case T::bf16: {
      u32 h = bf16_of(x);
      if (mode == Rounding::rz && x == x && !std::isinf(x) && std::fabs(float_of_bf16(h)) > std::fabs(x)) --h;
      if ((in.attr[1] & flag_satfinite) && (h & 0x7fff) == 0x7f80) h = (h & 0x8000) | 0x7f7f;
      return h;
    }
    default: return 0;
  }
}
u64 float_to_integer(const Instruction& in, T to, double x) {
  const int width = width_of(to);
  if (x != x) return width == 64 ? u64(1) << 63 : is_signed(to) && width == 32 ? 0 : 0;
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
        const bool integral = mode == Rounding::rni || mode == Rounding::rzi || mode == Rounding::rmi || mode == Rounding::rpi;
        if (integral) x = round_integer(x, mode);
        v = float_to(in, to, x);
      } else {
        v = float_to_integer(in, to, x);
      }
    } else {
      __int128 x = 0;
      switch (from) {
        case T::s8: x = static_cast<int8_t>(u); break;
        case T::s16: x = static_cast<int16_t>(u); break;
        case T::s32: x = static_cast<i32>(u); break;
        case T::s64: x = static_cast<i64>(u); break;
        case T::u8: case T::b8: x = static_cast<u8>(u); break;
        case T::u16: case T::b16: x = static_cast<u16>(u); break;
        case T::u32: case T::b32: x = static_cast<u32>(u); break;
        default: x = u;
      }
      v = to == T::f64 ? bits_of(static_cast<double>(x)) : float_to(in, to, integer_to_double(x));
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
  each_lane(mask, [&](int l) { d[l] = bits_of(canonical(float_of(a[l] << 16))); });
}

template <class To>
LaneFunction select_integer_cvt(T from, bool sat) {
  switch (from) {
    case T::u8: case T::b8: return sat ? cvt_integer<To, u8> : cvt_integer_fast<To, u8>;
    case T::s8: return sat ? cvt_integer<To, int8_t> : cvt_integer_fast<To, int8_t>;
    case T::u16: case T::b16: return sat ? cvt_integer<To, u16> : cvt_integer_fast<To, u16>;
    case T::s16: return sat ? cvt_integer<To, int16_t> : cvt_integer_fast<To, int16_t>;
    case T::u32: case T::b32: return sat ? cvt_integer<To, u32> : cvt_integer_fast<To, u32>;
    case T::s32: return sat ? cvt_integer<To, i32> : cvt_integer_fast<To, i32>;
    case T::u64: case T::b64: return sat ? cvt_integer<To, u64> : cvt_integer_fast<To, u64>;
    case T::s64: return sat ? cvt_integer<To, i64> : cvt_integer_fast<To, i64>;
    default: return nullptr;
  }
}
LaneFunction select_cvt(const Instruction& in) {
  const auto to = static_cast<T>(in.type), from = static_cast<T>(in.type2);
  const bool sat = in.attr[1] & flag_sat;
  if (to == T::e4m3x2 || to == T::e5m2x2 || from == T::e4m3x2 || from == T::e5m2x2) return cvt_float8;
  if (is_float(to) || is_float(from)) {
    const bool nearest = in.attr[0] == static_cast<u8>(Rounding::rn) || in.attr[0] == 0;
    if (to == T::bf16 && from == T::f32 && nearest && !in.attr[1]) return cvt_bf16_f32;
    if (to == T::f32 && from == T::bf16 && !in.attr[1] && nearest) return cvt_f32_bf16;
    return cvt_general;
  }
  switch (to) {
    case T::u8: case T::b8: return select_integer_cvt<u8>(from, sat);
    case T::s8: return select_integer_cvt<int8_t>(from, sat);
    case T::u16: case T::b16: return select_integer_cvt<u16>(from, sat);
    case T::s16: return select_integer_cvt<int16_t>(from, sat);
    case T::u32: case T::b32: return select_integer_cvt<u32>(from, sat);
    case T::s32: return select_integer_cvt<i32>(from, sat);
    case T::u64: case T::b64: return select_integer_cvt<u64>(from, sat);
    case T::s64: return select_integer_cvt<i64>(from, sat);
    default: return nullptr;
  }
}

// --- selection -------------------------------------------------------------------------------------------------------

template <class F>
struct Binary {
  template <class R>
  static LaneFunction with() {
    struct G {
      static typename R::value of(const Instruction& i, typename R::value a, typename R::value b) {
        return F::template of<typename R::value>(i, a, b);
      }
    };
    return binary<R, R, R, G>;
  }
};
template <class F>
LaneFunction integer_binary(T type) {
  switch (type) {
    case T::u16: case T::b16: return Binary<F>::template with<Half<u16>>();
    case T::s16: return Binary<F>::template with<Half<int16_t>>();
    case T::u32: case T::b32: return Binary<F>::template with<One<u32>>();
    case T::s32: return Binary<F>::template with<One<i32>>();
    case T::u64: case T::b64: return Binary<F>::template with<Two<u64>>();
    case T::s64: return Binary<F>::template with<Two<i64>>();
    default: return nullptr;
  }
}
template <class F, class R>
LaneFunction integer_ternary() {
  struct G {
    static typename R::value of(const Instruction& i, typename R::value a, typename R::value b, typename R::value c) {
      return F::template of<typename R::value>(i, a, b, c);
    }
  };
  return ternary<R, R, R, R, G>;
}
template <class F>
LaneFunction integer_ternary(T type) {
  switch (type) {
    case T::u16: return integer_ternary<F, Half<u16>>();
    case T::s16: return integer_ternary<F, Half<int16_t>>();
    case T::u32: case T::b32: return integer_ternary<F, One<u32>>();
    case T::s32: return integer_ternary<F, One<i32>>();
    case T::u64: case T::b64: return integer_ternary<F, Two<u64>>();
    case T::s64: return integer_ternary<F, Two<i64>>();
    default: return nullptr;
  }
}
template <class F, class R>
LaneFunction integer_unary() {
  struct G {
    static typename R::value of(const Instruction& i, typename R::value a) {
      return F::template of<typename R::value>(i, a);
    }
  };
  return unary<R, R, G>;
}
template <class F>
LaneFunction integer_unary(T type) {
  switch (type) {
    case T::u16: case T::b16: return integer_unary<F, Half<u16>>();
    case T::s16: return integer_unary<F, Half<int16_t>>();
    case T::u32: case T::b32: return integer_unary<F, One<u32>>();
    case T::s32: return integer_unary<F, One<i32>>();
    case T::u64: case T::b64: return integer_unary<F, Two<u64>>();
    case T::s64: return integer_unary<F, Two<i64>>();
    default: return nullptr;
  }
}
/// Shifts: the amount is one row for every width.
template <class F>
LaneFunction shift(T type) {
  switch (type) {
    case T::u16: case T::b16: return binary<Half<u16>, Half<u16>, One<u32>, F>;
    case T::s16: return binary<Half<int16_t>, Half<int16_t>, One<u32>, F>;
    case T::u32: case T::b32: return binary<One<u32>, One<u32>, One<u32>, F>;
    case T::s32: return binary<One<i32>, One<i32>, One<u32>, F>;
    case T::u64: case T::b64: return binary<Two<u64>, Two<u64>, One<u32>, F>;
    case T::s64: return binary<Two<i64>, Two<i64>, One<u32>, F>;
    default: return nullptr;
  }
}
/// To a 32-bit count from 32 or 64 bits.
template <class F>
LaneFunction count(T type) {
  switch (type) {
    case T::u32: case T::b32: return unary<One<u32>, One<u32>, F>;
    case T::s32: return unary<One<u32>, One<i32>, F>;
    case T::u64: case T::b64: return unary<One<u32>, Two<u64>, F>;
    case T::s64: return unary<One<u32>, Two<i64>, F>;
    default: return nullptr;
  }
}
bool is_other_float(T t) {
  return t == T::f64 || t == T::f16 || t == T::f16x2 || t == T::bf16 || t == T::bf16x2;
}
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
  const bool three = static_cast<Operation>(in.operation) == Operation::min3 || static_cast<Operation>(in.operation) == Operation::max3;
  if (three) return ternary<Float, Float, Float, Float, FMinMaxAny>;
  if (in.attr[1] & (flag_abs | flag_xorsign)) return binary<Float, Float, Float, FMinMaxAny>;
  const bool ftz = in.attr[1] & flag_ftz, nan = in.attr[1] & flag_nan;
  if (ftz) return nan ? binary<Float, Float, Float, FMinMax<true, true, maximum>> : binary<Float, Float, Float, FMinMax<true, false, maximum>>;
  return nan ? binary<Float, Float, Float, FMinMax<false, true, maximum>> : binary<Float, Float, Float, FMinMax<false, false, maximum>>;
}

LaneFunction select_add(const Instruction& in, T type, bool subtract) {
  if (type == T::f32 && in.type2) return add_mixed;
  if (type == T::f32) return subtract ? float_arithmetic<FSub, Kind::sub>(in) : float_arithmetic<FAdd, Kind::add>(in);
  if (type == T::f32x2) return subtract ? pair_arithmetic<FSub, Kind::sub>(in) : pair_arithmetic<FAdd, Kind::add>(in);
  if (is_other_float(type)) return scalar;
  if (in.attr[1] & flag_sat)
    return type != T::s32 ? nullptr : subtract ? binary<One<i32>, One<i32>, One<i32>, SubSat> : binary<One<i32>, One<i32>, One<i32>, AddSat>;
  return subtract ? integer_binary<Sub>(type) : integer_binary<Add>(type);
}
LaneFunction select_logic(const Instruction& in, T type) {
  if (type == T::pred) return logic_pred;
  switch (static_cast<Operation>(in.operation)) {
    case Operation::and_: return integer_binary<And>(type);
    case Operation::or_: return integer_binary<Or>(type);
    case Operation::xor_: return integer_binary<Xor>(type);
    default: return integer_unary<Not>(type);
  }
}
LaneFunction select_fma(const Instruction& in, T type) {
  if (type == T::f32 && in.type2) return fma_mixed;
  if (is_other_float(type)) return scalar;
  const bool ftz = in.attr[1] & flag_ftz, plain = plain_rounding(in);
  if (type == T::f32x2) return !plain ? pairwise<Directed<Kind::fma>, 3> : ftz ? pairwise<FFma<true>, 3> : pairwise<FFma<false>, 3>;
  if (type != T::f32) return nullptr;
  if (!plain) return ternary<Float, Float, Float, Float, Directed<Kind::fma>>;
  return ftz ? flushing<FFma<true>, Kind::fma> : ternary<Float, Float, Float, Float, FFma<false>>;
}

LaneFunction select(const Instruction& in) {
  const auto type = static_cast<T>(in.type);
  const bool ftz = in.attr[1] & flag_ftz;
  using O = Operation;
  switch (static_cast<O>(in.operation)) {
    case O::mov:
      if (type == T::pred) return mov_pred;
      return entries_of(type) == 4 ? mov_rows<4> : entries_of(type) == 2 ? mov_rows<2> : mov_rows<1>;
    case O::pack16: return binary<One<u32>, One<u32>, One<u32>, Pack16>;
    case O::pack8: return binary<One<u32>, One<u32>, One<u32>, Pack8>;
    case O::unpack16: return unpack16;
    case O::selp: return entries_of(type) == 2 ? selp<2> : selp<1>;
    case O::add: return select_add(in, type, false);
    case O::sub: return select_add(in, type, true);
    case O::mul:
      if (type == T::f32 && plain_rounding(in) && ftz) return flushing<FMul<true>, Kind::mul>;
      if (type == T::f32) return float_arithmetic<FMul, Kind::mul>(in);
      if (type == T::f32x2) return pair_arithmetic<FMul, Kind::mul>(in);
      return is_other_float(type) ? scalar : nullptr;
    case O::mul_lo: return integer_binary<MulLo>(type);
    case O::mul_hi: return integer_binary<MulHi>(type);
    case O::mad_lo: return integer_ternary<MadLo>(type);
    case O::mad_hi:
      if (in.attr[1] & flag_sat) return type == T::s32 ? ternary<One<i32>, One<i32>, One<i32>, One<i32>, MadHiSat> : nullptr;
      return integer_ternary<MadHi>(type);
    case O::sad: return integer_ternary<Sad>(type);
    case O::mul_wide:
      switch (type) {
        case T::u16: return binary<One<u32>, Half<u16>, Half<u16>, MulWide16u>;
        case T::s16: return binary<One<u32>, Half<int16_t>, Half<int16_t>, MulWide>;
        case T::u32: return binary<Two<u64>, One<u32>, One<u32>, MulWide>;
        case T::s32: return binary<Two<u64>, One<i32>, One<i32>, MulWide>;
        default: return nullptr;
      }
    case O::mad_wide:
      switch (type) {
        case T::u16: return ternary<One<u32>, Half<u16>, Half<u16>, One<u32>, MadWide16>;
        case T::s16: return ternary<One<u32>, Half<int16_t>, Half<int16_t>, One<u32>, MadWide16>;
        case T::u32: return ternary<Two<u64>, One<u32>, One<u32>, Two<u64>, MadWide32>;
        case T::s32: return ternary<Two<u64>, One<i32>, One<i32>, Two<u64>, MadWide32>;
        default: return nullptr;
      }
    case O::div:
      if (type == T::f32) return binary<Float, Float, Float, FDiv>;
      return is_other_float(type) ? scalar : integer_binary<Div>(type);
    case O::rem: return integer_binary<Rem>(type);
    case O::min:
      if (type == T::f32) return float_minmax<false>(in);
      return is_other_float(type) ? scalar : integer_binary<Min>(type);
    case O::max:
      if (type == T::f32) return float_minmax<true>(in);
      return is_other_float(type) ? scalar : integer_binary<Max>(type);
    case O::min3: return type == T::f32 ? float_minmax<false>(in) : nullptr;
    case O::max3: return type == T::f32 ? float_minmax<true>(in) : nullptr;
    case O::neg:
      if (type == T::f32) return ftz ? unary<Float, Float, FNeg<true>> : unary<Float, Float, FNeg<false>>;
      return is_other_float(type) ? scalar : integer_unary<Neg>(type);
    case O::abs:
      if (type == T::f32) return ftz ? unary<Float, Float, FAbs<true>> : unary<Float, Float, FAbs<false>>;
      return is_other_float(type) ? scalar : integer_unary<Abs>(type);
    case O::and_: case O::or_: case O::xor_: case O::not_: return select_logic(in, type);
    case O::cnot: return integer_unary<Cnot>(type);
    case O::popc: return count<Popc>(type);
    case O::clz: return count<Clz>(type);
    case O::bfind: return count<Bfind>(type);
    case O::brev: return integer_unary<Brev>(type == T::b64 || type == T::u64 ? T::u64 : T::u32);
    case O::shl: return shift<Shl>(type);
    case O::shr: return shift<Shr>(type);
    case O::shf: return ternary<One<u32>, One<u32>, One<u32>, One<u32>, Shf>;
    case O::bfe:
      switch (type) {
        case T::u32: return ternary<One<u32>, One<u32>, One<u32>, One<u32>, Bfe>;
        case T::s32: return ternary<One<i32>, One<i32>, One<u32>, One<u32>, Bfe>;
        case T::u64: return ternary<Two<u64>, Two<u64>, One<u32>, One<u32>, Bfe>;
        case T::s64: return ternary<Two<i64>, Two<i64>, One<u32>, One<u32>, Bfe>;
        default: return nullptr;
      }
    case O::bfi: return bfi;
    case O::prmt: return ternary<One<u32>, One<u32>, One<u32>, One<u32>, Prmt>;
    case O::lop3: return ternary<One<u32>, One<u32>, One<u32>, One<u32>, Lop3>;
    case O::fma: return select_fma(in, type);
    case O::rcp: return type == T::f32 ? unary<Float, Float, Rcp> : is_other_float(type) ? scalar : nullptr;
    case O::sqrt: return type == T::f32 ? unary<Float, Float, Sqrt> : is_other_float(type) ? scalar : nullptr;
    case O::rsqrt: return type == T::f32 ? unary<Float, Float, Rsqrt> : is_other_float(type) ? scalar : nullptr;
    case O::ex2:
      if (type == T::f32) return ftz ? unary<Float, Float, Ex2<true>> : unary<Float, Float, Ex2<false>>;
      return is_other_float(type) ? scalar : nullptr;
    case O::lg2: return type == T::f32 ? unary<Float, Float, Lg2> : nullptr;
    case O::sin: return type == T::f32 ? unary<Float, Float, Sin> : nullptr;
    case O::cos: return type == T::f32 ? unary<Float, Float, Cos> : nullptr;
    case O::tanh: return type == T::f32 ? unary<Float, Float, Tanh> : is_other_float(type) ? scalar : nullptr;
    case O::copysign:
      if (type == T::f64) return binary<Two<u64>, Two<u64>, Two<u64>, CopySign<u64>>;
      return type == T::f32 ? binary<One<u32>, One<u32>, One<u32>, CopySign<u32>> : nullptr;
    case O::testp: return testp;
    case O::setp: return comparer(in) ? setp : nullptr;
    case O::set: return comparer(in) ? set : nullptr;
    case O::cvt: return select_cvt(in);
    case O::cvt_pack: {
      const bool plain = in.attr[0] == static_cast<u8>(Rounding::rn) && in.attr[1] == 0;
      if (type == T::bf16x2) return plain ? cvt_pack<T::bf16x2, true> : cvt_pack<T::bf16x2, false>;
      if (type == T::f16x2) return plain ? cvt_pack<T::f16x2, true> : cvt_pack<T::f16x2, false>;
      if (type == T::e4m3x2) return cvt_pack<T::e4m3x2, false>;
      return type == T::e5m2x2 ? cvt_pack<T::e5m2x2, false> : nullptr;
    }
    default: return nullptr;
  }
}

// --- clocks ----------------------------------------------------------------------------------------------------------

void join(u32* clock, const u32* other, int n) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) clock[i] = clock[i] > other[i] ? clock[i] : other[i];
}
void meet(u32* clock, const u32* other, int n) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) clock[i] = clock[i] < other[i] ? clock[i] : other[i];
}
bool covers(const u32* clock, u32 epoch, u32 mask) {
  u32 behind = 0;
  for (int l = 0; l < lanes; ++l) behind |= (clock[l] < epoch ? 1u : 0u) << l;
  return (behind & mask) == 0;
}

// --- matrix products -------------------------------------------------------------------------------------------------

/// Accumulators 4j + i of every warp are columns 8j + 2 (lane % 4) + i % 2 of rows 16 w + lane / 4 + 8 (i / 2).
void wgmma(u32* const* const* rows, const float* a, const float* b, int n, int k, bool accumulate, bool half) {
  alignas(64) float left[2][4][64][lanes];  // [row half][warp][k][lane], k at most 64
  for (int h = 0; h < 2; ++h)
    for (int w = 0; w < 4; ++w)
      for (int i = 0; i < k; ++i)
        for (int l = 0; l < lanes; ++l) left[h][w][i][l] = a[64 * i + 16 * w + l / 4 + 8 * h];
  for (int j = 0; j < n / 8; ++j) {
    for (int parity = 0; parity < 2; ++parity) {
      alignas(64) float right[64][lanes];
      for (int i = 0; i < k; ++i)
        for (int l = 0; l < lanes; ++l) right[i][l] = b[static_cast<int64_t>(n) * i + 8 * j + 2 * (l % 4) + parity];
      for (int h = 0; h < 2; ++h) {
        for (int w = 0; w < 4; ++w) {
          u32* row = half ? rows[w][2 * j + h] : rows[w][4 * j + 2 * h + parity];
          alignas(64) float sum[lanes];
          for (int l = 0; l < lanes; ++l) {
            const float old = half ? float_of_f16(row[l] >> (16 * parity) & 0xffff) : float_of(row[l]);
            sum[l] = accumulate ? old : 0.0f;
          }
          for (int i = 0; i < k; ++i) {
            const float *x = left[h][w][i], *y = right[i];
#pragma GCC ivdep
            for (int l = 0; l < lanes; ++l) sum[l] += x[l] * y[l];
          }
          for (int l = 0; l < lanes; ++l) {
            if (half) {
              const u32 keep = row[l] & (parity ? 0x0000'ffffu : 0xffff'0000u);
              row[l] = keep | f16_of(sum[l]) << (16 * parity);
            } else {
              row[l] = bits_of(canonical(sum[l]));
            }
          }
        }
      }
    }
  }
}

template <int height>
void product(float* d, const float* a, int a_stride, const float* b, int n, int k, float scale) {
  for (int j = 0; j < n; ++j) {
    float* column = d + 128 * static_cast<int64_t>(j);
    alignas(64) float sum[height];
    for (int l = 0; l < height; ++l) sum[l] = scale == 0 ? 0.0f : column[l] * scale;
    for (int i = 0; i < k; ++i) {
      const float y = b[static_cast<int64_t>(n) * i + j];
      const float* x = a + static_cast<int64_t>(a_stride) * i;
#pragma GCC ivdep
      for (int l = 0; l < height; ++l) sum[l] += x[l] * y;
    }
    for (int l = 0; l < height; ++l) column[l] = canonical(sum[l]);
  }
}
void tcgen05_mma(float* d, const float* a, int a_stride, const float* b, int n, int k, int lane, int height,
                 float scale) {
  int done = 0;
  for (; height - done >= 64; done += 64) product<64>(d + lane + done, a + done, a_stride, b, n, k, scale);
  for (; height - done >= 16; done += 16) product<16>(d + lane + done, a + done, a_stride, b, n, k, scale);
}

const VectorUnit unit = {CUPYFA_STRING(CUPYFA_LEVEL), select, join, meet, covers, wgmma, tcgen05_mma};

}  // namespace

/// The unit of this file's level; vector_unit() in levels.cpp chooses among them.
const VectorUnit& CUPYFA_CAT(vector_unit_, CUPYFA_LEVEL)() { return unit; }

}  // namespace cupyfa::emulator
