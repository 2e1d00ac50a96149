#pragma once
#include "ptx/types.cuh"

namespace cupyfa::ptx {
inline void stmatrix_x4(SharedAddress row, u32, u32, u32, u32) { std::printf("stmatrix %u\n", row); }
}  // namespace cupyfa::ptx
