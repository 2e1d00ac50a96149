// Work on whole rows of 32 lanes: arithmetic, matrix products, clock joins. The only part that is compiled more than
// once, for different vector units (levels); the best one that the processor has is chosen at run time.
#pragma once
#include "isa.hpp"

namespace cupyfa::emulator {

constexpr int lanes = 32;
constexpr uint32_t all_lanes = 0xffff'ffff;

/// Where a warp's operands live.
struct Registers {
  uint32_t* rows;             ///< rows[32 * r + lane]
  const uint32_t* constants;  ///< the same for constants
  uint32_t* predicates;       ///< one bit a lane; predicate 0 is all ones

  uint32_t* row(int32_t entry) const { return rows + 32 * static_cast<int64_t>(entry); }
  const uint32_t* source(int32_t entry) const {
    return entry >= 0 ? rows + 32 * static_cast<int64_t>(entry) : constants + 32 * static_cast<int64_t>(~entry);
  }
  uint32_t predicate(int32_t entry) const { return entry & negated ? ~predicates[entry ^ negated] : predicates[entry]; }
  void set_predicate(int32_t entry, uint32_t value, uint32_t mask) const {
    predicates[entry] = (predicates[entry] & ~mask) | (value & mask);
  }
};

/// Executes an arithmetic instruction for the lanes of `mask`.
using LaneFunction = void (*)(const Instruction& in, const int32_t* operands, const Registers& registers,
                              uint32_t mask);

/// The functions of one level.
struct VectorUnit {
  const char* name;
  /// Null: this unit does not know the instruction.
  LaneFunction (*select)(const Instruction& in);
  /// clock[i] = max(clock[i], other[i])
  void (*join)(uint32_t* clock, const uint32_t* other, int count);
  /// clock[i] = min(clock[i], other[i])
  void (*meet)(uint32_t* clock, const uint32_t* other, int count);
  /// Whether clock[i] >= epoch for each lane i of the mask.
  bool (*covers)(const uint32_t* clock, uint32_t epoch, uint32_t mask);
  /// D[64 x n] (+)= A B for a warpgroup: accumulator i of warp w is the row rows[w][i] (fragment layout of
  /// wgmma.mma_async). a[k][64], b[k][n]; `half` packs two f16 accumulators into a row.
  void (*wgmma)(uint32_t* const* const* rows, const float* a, const float* b, int n, int k, bool accumulate, bool half);
  /// d[column][lane] (+)= sum over k of a[k][lane] b[k][column], for `height` lanes from `lane` on (multiples of 16).
  /// d has 128 lanes a column; a has `a_stride` floats a row.
  void (*tcgen05_mma)(float* d, const float* a, int a_stride, const float* b, int n, int k, int lane, int height,
                      float scale);
};

/// The best unit for this processor.
const VectorUnit& vector_unit();

}  // namespace cupyfa::emulator
