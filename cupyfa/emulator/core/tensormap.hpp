// The emulator's own tensor map, in the 128 bytes where a GPU has the driver's opaque one. tensormap.py writes it.
#pragma once
#include <cstdint>

namespace cupyfa::emulator {

constexpr uint32_t tensor_map_magic = 0x4d545543;  // "CUTM"

struct TensorMap {
  uint32_t magic;
  uint8_t type;     ///< CUtensorMapDataType
  uint8_t rank;
  uint8_t swizzle;  ///< bytes: 0, 32, 64, 128
  uint8_t fill;     ///< 0 zeros, 1 NaN
  uint64_t address;
  uint64_t shape[5];     ///< elements, innermost first
  uint64_t strides[4];   ///< bytes, of dimensions 1 and up
  uint32_t box[5];
  uint32_t element_strides[5];
};
static_assert(sizeof(TensorMap) == 128);

constexpr uint32_t element_bytes(uint8_t type) {
  constexpr uint8_t sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  return type < sizeof(sizes) ? sizes[type] : 0;
}

/// Whether these are the bytes of a map that tensormap.py can have written.
constexpr bool valid(const TensorMap& m) {
  bool good = m.magic == tensor_map_magic && element_bytes(m.type) && m.rank >= 1 && m.rank <= 5 &&
              (m.swizzle == 0 || m.swizzle == 32 || m.swizzle == 64 || m.swizzle == 128) && m.fill <= 1;
  for (int d = 0; d < 5; ++d)
    good = good && m.box[d] >= 1 && m.box[d] <= 256 && m.element_strides[d] >= 1 && m.element_strides[d] <= 8 &&
           m.shape[d] >= 1 && m.shape[d] <= uint64_t{1} << 32;
  for (const uint64_t stride : m.strides) good = good && stride < uint64_t{1} << 40;
  return good;
}

/// The swizzle permutes 16-byte chunks by absolute address bits: 128 bytes: 4-6 ^= 7-9; 64: 4-5 ^= 7-8; 32: 4 ^= 7.
constexpr uint32_t swizzled(uint32_t address, uint32_t bytes) {
  return address ^ (address >> 3 & (bytes == 128 ? 0x70u : bytes == 64 ? 0x30u : bytes == 32 ? 0x10u : 0u));
}

}  // namespace cupyfa::emulator
