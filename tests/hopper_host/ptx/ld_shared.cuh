#pragma once
#include "ptx/types.cuh"

namespace cupyfa::ptx {
// Of a bias, which has its tests under the emulator: no replay asks for these.
inline u32 ld_shared(SharedAddress) { __trap(); }
inline void ld_shared_v2(SharedAddress, u32&, u32&) { __trap(); }
inline void ldmatrix_x4(SharedAddress, u32&, u32&, u32&, u32&) { __trap(); }
}  // namespace cupyfa::ptx
