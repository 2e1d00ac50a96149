// Comparisons and tests: a bit per lane.
#pragma once
#include "lanes.hpp"

namespace cupyfa::emulator {
namespace {

template <class V>
bool compare(Comparison c, V a, V b) {
  const bool unordered = a != a || b != b;
  switch (c) {
  case Comparison::eq:
    return a == b;
  case Comparison::ne:
    return !unordered && a != b;
  case Comparison::lt:
    return a < b;
  case Comparison::le:
    return a <= b;
  case Comparison::gt:
    return a > b;
  case Comparison::ge:
    return a >= b;
  case Comparison::equ:
    return unordered || a == b;
  case Comparison::neu:
    return a != b;
  case Comparison::ltu:
    return unordered || a < b;
  case Comparison::leu:
    return unordered || a <= b;
  case Comparison::gtu:
    return unordered || a > b;
  case Comparison::geu:
    return unordered || a >= b;
  case Comparison::num:
    return !unordered;
  default:
    return unordered;
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
  case Comparison::eq:
    return compare_lanes<A, Comparison::eq>(a, b);
  case Comparison::ne:
    return compare_lanes<A, Comparison::ne>(a, b);
  case Comparison::lt:
    return compare_lanes<A, Comparison::lt>(a, b);
  case Comparison::le:
    return compare_lanes<A, Comparison::le>(a, b);
  case Comparison::gt:
    return compare_lanes<A, Comparison::gt>(a, b);
  case Comparison::ge:
    return compare_lanes<A, Comparison::ge>(a, b);
  case Comparison::equ:
    return compare_lanes<A, Comparison::equ>(a, b);
  case Comparison::neu:
    return compare_lanes<A, Comparison::neu>(a, b);
  case Comparison::ltu:
    return compare_lanes<A, Comparison::ltu>(a, b);
  case Comparison::leu:
    return compare_lanes<A, Comparison::leu>(a, b);
  case Comparison::gtu:
    return compare_lanes<A, Comparison::gtu>(a, b);
  case Comparison::geu:
    return compare_lanes<A, Comparison::geu>(a, b);
  case Comparison::num:
    return compare_lanes<A, Comparison::num>(a, b);
  default:
    return compare_lanes<A, Comparison::nan>(a, b);
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
  case T::s16:
    return compare_rows<Half<int16_t>>;
  case T::b16:
  case T::u16:
    return compare_rows<Half<u16>>;
  case T::s32:
    return compare_rows<One<i32>>;
  case T::b32:
  case T::u32:
    return compare_rows<One<u32>>;
  case T::s64:
    return compare_rows<Two<i64>>;
  case T::b64:
  case T::u64:
    return compare_rows<Two<u64>>;
  case T::f32:
    return in.attr[2] ? compare_rows<Float, true> : compare_rows<Float>;
  case T::f64:
    return compare_rows<Double>;
  case T::f16:
  case T::bf16:
    return compare_halves;
  default:
    return nullptr;
  }
}
void setp(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const u32 t = comparer(in)(in, e + 2, r);
  u32 p = t, q = ~t;
  const auto boolean = static_cast<Boolean>(in.attr[1]);
  if (boolean != Boolean::none) {
    const u32 c = r.predicate(e[2 + 2 * entries_of(static_cast<T>(in.type))]);
    const auto combine = [&](u32 x) {
      return boolean == Boolean::and_ ? x & c : boolean == Boolean::or_ ? x | c : x ^ c;
    };
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

}  // namespace
}  // namespace cupyfa::emulator
