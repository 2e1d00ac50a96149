// The vector unit of one level: the function for an instruction. The functions are in vector/, a header a family. meson
// compiles this file once a level with CUPYFA_LEVEL and the options of that level; everything but the exported function
// is in an anonymous namespace, so that no code of a higher level is shared.
#include "vector.hpp"

#include "vector/approximations.hpp"
#include "vector/compare.hpp"
#include "vector/conversions.hpp"
#include "vector/floats.hpp"
#include "vector/halves.hpp"
#include "vector/integers.hpp"
#include "vector/moves.hpp"
#include "vector/products.hpp"

#define CUPYFA_CAT_(a, b) a##b
#define CUPYFA_CAT(a, b) CUPYFA_CAT_(a, b)
#define CUPYFA_STRING_(a) #a
#define CUPYFA_STRING(a) CUPYFA_STRING_(a)
#ifndef CUPYFA_LEVEL
#define CUPYFA_LEVEL baseline
#endif

namespace cupyfa::emulator {
namespace {

LaneFunction select_add(const Instruction& in, T type, bool subtract) {
  if (type == T::f32 && in.type2) return add_mixed;
  if (type == T::f32) return subtract ? float_arithmetic<FSub, Kind::sub>(in) : float_arithmetic<FAdd, Kind::add>(in);
  if (type == T::f32x2) return subtract ? pair_arithmetic<FSub, Kind::sub>(in) : pair_arithmetic<FAdd, Kind::add>(in);
  if (is_other_float(type)) return scalar(type);
  if (in.attr[1] & flag_sat)
    return type != T::s32 ? nullptr
           : subtract     ? binary<One<i32>, One<i32>, One<i32>, SubSat>
                          : binary<One<i32>, One<i32>, One<i32>, AddSat>;
  return subtract ? integer_binary<Sub>(type) : integer_binary<Add>(type);
}
LaneFunction select_logic(const Instruction& in, T type) {
  if (type == T::pred) return logic_pred;
  switch (static_cast<Operation>(in.operation)) {
  case Operation::and_:
    return integer_binary<And>(type);
  case Operation::or_:
    return integer_binary<Or>(type);
  case Operation::xor_:
    return integer_binary<Xor>(type);
  default:
    return integer_unary<Not>(type);
  }
}
LaneFunction select_fma(const Instruction& in, T type) {
  if (type == T::f32 && in.type2) return fma_mixed;
  if (is_other_float(type)) return scalar(type);
  const bool ftz = in.attr[1] & flag_ftz, plain = plain_rounding(in);
  if (type == T::f32x2)
    return !plain ? pairwise<Directed<Kind::fma>, 3> : ftz ? pairwise<FFma<true>, 3> : pairwise<FFma<false>, 3>;
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
  case O::pack16:
    return binary<One<u32>, One<u32>, One<u32>, Pack16>;
  case O::pack8:
    return binary<One<u32>, One<u32>, One<u32>, Pack8>;
  case O::unpack16:
    return unpack16;
  case O::selp:
    return entries_of(type) == 2 ? selp<2> : selp<1>;
  case O::add:
    return select_add(in, type, false);
  case O::sub:
    return select_add(in, type, true);
  case O::mul:
    if (type == T::f32 && plain_rounding(in) && ftz) return flushing<FMul<true>, Kind::mul>;
    if (type == T::f32) return float_arithmetic<FMul, Kind::mul>(in);
    if (type == T::f32x2) return pair_arithmetic<FMul, Kind::mul>(in);
    return is_other_float(type) ? scalar(type) : nullptr;
  case O::mul_lo:
    return integer_binary<MulLo>(type);
  case O::mul_hi:
    return integer_binary<MulHi>(type);
  case O::mad_lo:
    return integer_ternary<MadLo>(type);
  case O::mad_hi:
    if (in.attr[1] & flag_sat)
      return type == T::s32 ? ternary<One<i32>, One<i32>, One<i32>, One<i32>, MadHiSat> : nullptr;
    return integer_ternary<MadHi>(type);
  case O::sad:
    return integer_ternary<Sad>(type);
  case O::mul_wide:
    switch (type) {
    case T::u16:
      return binary<One<u32>, Half<u16>, Half<u16>, MulWide16u>;
    case T::s16:
      return binary<One<u32>, Half<int16_t>, Half<int16_t>, MulWide>;
    case T::u32:
      return binary<Two<u64>, One<u32>, One<u32>, MulWide>;
    case T::s32:
      return binary<Two<u64>, One<i32>, One<i32>, MulWide>;
    default:
      return nullptr;
    }
  case O::mad_wide:
    switch (type) {
    case T::u16:
      return ternary<One<u32>, Half<u16>, Half<u16>, One<u32>, MadWide16>;
    case T::s16:
      return ternary<One<u32>, Half<int16_t>, Half<int16_t>, One<u32>, MadWide16>;
    case T::u32:
      return ternary<Two<u64>, One<u32>, One<u32>, Two<u64>, MadWide32>;
    case T::s32:
      return ternary<Two<u64>, One<i32>, One<i32>, Two<u64>, MadWide32>;
    default:
      return nullptr;
    }
  case O::div:
    if (type == T::f32) return binary<Float, Float, Float, FDiv>;
    return is_other_float(type) ? scalar(type) : integer_binary<Div>(type);
  case O::rem:
    return integer_binary<Rem>(type);
  case O::min:
    if (type == T::f32) return float_minmax<false>(in);
    return is_other_float(type) ? scalar(type) : integer_binary<Min>(type);
  case O::max:
    if (type == T::f32) return float_minmax<true>(in);
    return is_other_float(type) ? scalar(type) : integer_binary<Max>(type);
  case O::min3:
    return type == T::f32 ? float_minmax<false>(in) : nullptr;
  case O::max3:
    return type == T::f32 ? float_minmax<true>(in) : nullptr;
  case O::neg:
    if (type == T::f32) return ftz ? unary<Float, Float, FNeg<true>> : unary<Float, Float, FNeg<false>>;
    return is_other_float(type) ? scalar(type) : integer_unary<Neg>(type);
  case O::abs:
    if (type == T::f32) return ftz ? unary<Float, Float, FAbs<true>> : unary<Float, Float, FAbs<false>>;
    return is_other_float(type) ? scalar(type) : integer_unary<Abs>(type);
  case O::and_:
  case O::or_:
  case O::xor_:
  case O::not_:
    return select_logic(in, type);
  case O::cnot:
    return integer_unary<Cnot>(type);
  case O::popc:
    return count<Popc>(type);
  case O::clz:
    return count<Clz>(type);
  case O::bfind:
    return count<Bfind>(type);
  case O::brev:
    return integer_unary<Brev>(type == T::b64 || type == T::u64 ? T::u64 : T::u32);
  case O::shl:
    return shift<Shl>(type);
  case O::shr:
    return shift<Shr>(type);
  case O::shf:
    return ternary<One<u32>, One<u32>, One<u32>, One<u32>, Shf>;
  case O::bfe:
    switch (type) {
    case T::u32:
      return ternary<One<u32>, One<u32>, One<u32>, One<u32>, Bfe>;
    case T::s32:
      return ternary<One<i32>, One<i32>, One<u32>, One<u32>, Bfe>;
    case T::u64:
      return ternary<Two<u64>, Two<u64>, One<u32>, One<u32>, Bfe>;
    case T::s64:
      return ternary<Two<i64>, Two<i64>, One<u32>, One<u32>, Bfe>;
    default:
      return nullptr;
    }
  case O::bfi:
    return bfi;
  case O::prmt:
    return ternary<One<u32>, One<u32>, One<u32>, One<u32>, Prmt>;
  case O::lop3:
    return ternary<One<u32>, One<u32>, One<u32>, One<u32>, Lop3>;
  case O::fma:
    return select_fma(in, type);
  case O::rcp:
    return type == T::f32 ? unary<Float, Float, Rcp> : is_other_float(type) ? scalar(type) : nullptr;
  case O::sqrt:
    return type == T::f32 ? unary<Float, Float, Sqrt> : is_other_float(type) ? scalar(type) : nullptr;
  case O::rsqrt:
    return type == T::f32 ? unary<Float, Float, Rsqrt> : is_other_float(type) ? scalar(type) : nullptr;
  case O::ex2:
    if (type == T::f32) return ftz ? unary<Float, Float, Ex2<true>> : unary<Float, Float, Ex2<false>>;
    return is_other_float(type) ? scalar(type) : nullptr;
  case O::lg2:
    return type == T::f32 ? unary<Float, Float, Lg2> : nullptr;
  case O::sin:
    return type == T::f32 ? unary<Float, Float, Sin> : nullptr;
  case O::cos:
    return type == T::f32 ? unary<Float, Float, Cos> : nullptr;
  case O::tanh:
    return type == T::f32 ? unary<Float, Float, Tanh> : is_other_float(type) ? scalar(type) : nullptr;
  case O::copysign:
    if (type == T::f64) return binary<Two<u64>, Two<u64>, Two<u64>, CopySign<u64>>;
    return type == T::f32 ? binary<One<u32>, One<u32>, One<u32>, CopySign<u32>> : nullptr;
  case O::testp:
    return testp;
  case O::setp:
    return comparer(in) ? setp : nullptr;
  case O::set:
    return comparer(in) ? set : nullptr;
  case O::cvt:
    return select_cvt(in);
  case O::cvt_pack: {
    const bool plain = in.attr[0] == static_cast<u8>(Rounding::rn) && in.attr[1] == 0;
    if (type == T::bf16x2) return plain ? cvt_pack<T::bf16x2, true> : cvt_pack<T::bf16x2, false>;
    if (type == T::f16x2) return plain ? cvt_pack<T::f16x2, true> : cvt_pack<T::f16x2, false>;
    if (type == T::e4m3x2) return cvt_pack<T::e4m3x2, false>;
    return type == T::e5m2x2 ? cvt_pack<T::e5m2x2, false> : nullptr;
  }
  default:
    return nullptr;
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

const VectorUnit unit = {CUPYFA_STRING(CUPYFA_LEVEL), select, join, meet, covers, wgmma, tcgen05_mma};

}  // namespace

/// The unit of this file's level; vector_unit() in levels.cpp chooses among them.
const VectorUnit& CUPYFA_CAT(vector_unit_, CUPYFA_LEVEL)() { return unit; }

}  // namespace cupyfa::emulator
