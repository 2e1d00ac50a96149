// Matrix operands in shared memory: from a descriptor to addresses (PTX ISA, "Matrix descriptor", "Canonical layouts").
#pragma once
#include <cstdint>

#include "isa.hpp"
#include "tensormap.hpp"

namespace cupyfa::emulator {

/// A descriptor, decoded. Byte offsets.
struct MatrixDescriptor {
  uint32_t start, leading, stride, swizzle;
  bool valid;
  uint32_t base = 0;  ///< base offset: rows of 128 bytes that the swizzle's pattern begins before the matrix
};

inline MatrixDescriptor hopper_descriptor(uint64_t d) {
  constexpr uint32_t swizzles[] = {0, 128, 64, 32};
  return {static_cast<uint32_t>(d & 0x3fff) << 4,
          static_cast<uint32_t>(d >> 16 & 0x3fff) << 4,
          static_cast<uint32_t>(d >> 32 & 0x3fff) << 4,
          swizzles[d >> 62],
          true,
          static_cast<uint32_t>(d >> 49 & 7)};
}

inline MatrixDescriptor blackwell_descriptor(uint64_t d) {
  constexpr uint32_t swizzles[] = {0, 128, 128, 0, 64, 0, 32, 0};
  const uint32_t code = static_cast<uint32_t>(d >> 61);
  // Bits 46 to 48 hold 1; a base offset, a leading-offset mode and 32-byte atoms are not modelled.
  const bool valid = (d >> 46 & 7) == 1 && (d >> 49 & 7) == 0 && (d >> 52 & 1) == 0 &&
                     (code == 0 || code == 2 || code == 4 || code == 6);
  return {static_cast<uint32_t>(d & 0x3fff) << 4, static_cast<uint32_t>(d >> 16 & 0x3fff) << 4,
          static_cast<uint32_t>(d >> 32 & 0x3fff) << 4, swizzles[code], valid};
}

/// Calls f(address, mn, k) for each 16-byte chunk of an operand with `extent` rows along M or N and `bytes_k` bytes along
/// K (for K-major). A chunk holds 16 / size elements, along K for a K-major operand, along M or N otherwise; (mn, k) is
/// its first element. Addresses are those after the swizzle.
template <class F>
void each_chunk(const MatrixDescriptor& d, bool mn_major, uint32_t size, uint32_t extent, uint32_t k_extent, F f) {
  const uint32_t per_chunk = 16 / size;
  if (!mn_major) {
    // Without a swizzle the chunks of a row are `leading` apart; with one a row is contiguous in its swizzle span.
    const uint32_t row = d.swizzle ? d.swizzle : 16, chunk = d.swizzle ? 16 : d.leading;
    for (uint32_t mn = 0; mn < extent; ++mn)
      for (uint32_t k = 0; k < k_extent; k += per_chunk) {
        const uint32_t linear = d.start + mn / 8 * d.stride + mn % 8 * row + k / per_chunk * chunk;
        f(swizzled(linear - 128 * d.base, d.swizzle) + 128 * d.base, mn, k);
      }
    return;
  }
  const uint32_t span = d.swizzle ? d.swizzle / size : per_chunk;  // elements along M or N in one pattern row
  const uint32_t row = d.swizzle ? d.swizzle : 16;
  const uint32_t block = d.swizzle ? d.leading : d.stride, group = d.swizzle ? d.stride : d.leading;
  for (uint32_t k = 0; k < k_extent; ++k)
    for (uint32_t mn = 0; mn < extent; mn += per_chunk) {
      const uint32_t linear = d.start + mn / span * block + k / 8 * group + k % 8 * row + mn % span * size;
      f(swizzled(linear - 128 * d.base, d.swizzle) + 128 * d.base, mn, k);
    }
}

}  // namespace cupyfa::emulator
