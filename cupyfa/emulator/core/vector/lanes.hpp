// Operands: how a value of 16, 32 or 64 bits lies in rows of 32 lanes, and loops over the lanes.
//
// The headers of this folder belong to vector.cpp, which is compiled once a level: all is in an anonymous namespace.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../vector.hpp"
#include "../numeric.hpp"

namespace cupyfa::emulator {
namespace {

using T = Type;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

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

int entries_of(T type) {
  switch (type) {
  case T::b64:
  case T::u64:
  case T::s64:
  case T::f64:
  case T::f32x2:
    return 2;
  case T::b128:
    return 4;
  default:
    return 1;
  }
}

}  // namespace
}  // namespace cupyfa::emulator
