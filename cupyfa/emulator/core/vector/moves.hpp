// Moves, selections, packing, and logic of predicates.
#pragma once
#include "lanes.hpp"

namespace cupyfa::emulator {
namespace {

void mov_pred(const Instruction&, const int32_t* e, const Registers& r, u32 mask) {
  r.set_predicate(e[0], r.predicate(e[1]), mask);
}
void logic_pred(const Instruction& in, const int32_t* e, const Registers& r, u32 mask) {
  const u32 a = r.predicate(e[1]);
  u32 d;
  switch (static_cast<Operation>(in.operation)) {
  case Operation::and_:
    d = a & r.predicate(e[2]);
    break;
  case Operation::or_:
    d = a | r.predicate(e[2]);
    break;
  case Operation::xor_:
    d = a ^ r.predicate(e[2]);
    break;
  default:
    d = ~a;
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

}  // namespace
}  // namespace cupyfa::emulator
