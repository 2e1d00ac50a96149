// Integer arithmetic, bits and shifts, and the instance for a type.
#pragma once
#include "lanes.hpp"

namespace cupyfa::emulator {
namespace {

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
CUPYFA_OP(And, a& b, V a, V b);
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
#undef CUPYFA_OP

// --- by type ---------------------------------------------------------------------------------------------------------

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
  case T::u16:
  case T::b16:
    return Binary<F>::template with<Half<u16>>();
  case T::s16:
    return Binary<F>::template with<Half<int16_t>>();
  case T::u32:
  case T::b32:
    return Binary<F>::template with<One<u32>>();
  case T::s32:
    return Binary<F>::template with<One<i32>>();
  case T::u64:
  case T::b64:
    return Binary<F>::template with<Two<u64>>();
  case T::s64:
    return Binary<F>::template with<Two<i64>>();
  default:
    return nullptr;
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
  case T::u16:
    return integer_ternary<F, Half<u16>>();
  case T::s16:
    return integer_ternary<F, Half<int16_t>>();
  case T::u32:
  case T::b32:
    return integer_ternary<F, One<u32>>();
  case T::s32:
    return integer_ternary<F, One<i32>>();
  case T::u64:
  case T::b64:
    return integer_ternary<F, Two<u64>>();
  case T::s64:
    return integer_ternary<F, Two<i64>>();
  default:
    return nullptr;
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
  case T::u16:
  case T::b16:
    return integer_unary<F, Half<u16>>();
  case T::s16:
    return integer_unary<F, Half<int16_t>>();
  case T::u32:
  case T::b32:
    return integer_unary<F, One<u32>>();
  case T::s32:
    return integer_unary<F, One<i32>>();
  case T::u64:
  case T::b64:
    return integer_unary<F, Two<u64>>();
  case T::s64:
    return integer_unary<F, Two<i64>>();
  default:
    return nullptr;
  }
}
/// Shifts: the amount is one row for every width.
template <class F>
LaneFunction shift(T type) {
  switch (type) {
  case T::u16:
  case T::b16:
    return binary<Half<u16>, Half<u16>, One<u32>, F>;
  case T::s16:
    return binary<Half<int16_t>, Half<int16_t>, One<u32>, F>;
  case T::u32:
  case T::b32:
    return binary<One<u32>, One<u32>, One<u32>, F>;
  case T::s32:
    return binary<One<i32>, One<i32>, One<u32>, F>;
  case T::u64:
  case T::b64:
    return binary<Two<u64>, Two<u64>, One<u32>, F>;
  case T::s64:
    return binary<Two<i64>, Two<i64>, One<u32>, F>;
  default:
    return nullptr;
  }
}
/// To a 32-bit count from 32 or 64 bits.
template <class F>
LaneFunction count(T type) {
  switch (type) {
  case T::u32:
  case T::b32:
    return unary<One<u32>, One<u32>, F>;
  case T::s32:
    return unary<One<u32>, One<i32>, F>;
  case T::u64:
  case T::b64:
    return unary<One<u32>, Two<u64>, F>;
  case T::s64:
    return unary<One<u32>, Two<i64>, F>;
  default:
    return nullptr;
  }
}

}  // namespace
}  // namespace cupyfa::emulator
