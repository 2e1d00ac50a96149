#pragma once
#include "ptx/types.cuh"

namespace cupyfa::ptx {
inline void stmatrix_x4(SharedAddress row, u32, u32, u32, u32) { request("stmatrix %u", row); }
}  // namespace cupyfa::ptx
