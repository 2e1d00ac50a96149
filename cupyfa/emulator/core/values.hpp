// Values in memory: their sizes, and what a reduction makes of two of them.
#pragma once
#include "machine.hpp"

namespace cupyfa::emulator {

inline u32 bytes_of(Type t) {
  switch (t) {
  case Type::b8:
  case Type::u8:
  case Type::s8:
    return 1;
  case Type::b16:
  case Type::u16:
  case Type::s16:
  case Type::f16:
  case Type::bf16:
    return 2;
  case Type::b64:
  case Type::u64:
  case Type::s64:
  case Type::f64:
  case Type::f32x2:
    return 8;
  case Type::b128:
    return 16;
  default:
    return 4;
  }
}
inline int rows_of(Type t) { return bytes_of(t) == 8 ? 2 : bytes_of(t) == 16 ? 4 : 1; }

/// a (op) b for a value of the type, as bits. `c`: what compare-and-swap writes.
u64 reduce_value(Type type, Reduction op, u64 a, u64 b, u64 c);

}  // namespace cupyfa::emulator
