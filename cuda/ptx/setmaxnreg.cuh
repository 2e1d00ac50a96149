// Moves registers between the warpgroups of a CTA (PTX ISA, "setmaxnreg"). All warps of a warpgroup must execute it.
#pragma once

namespace cupyfa::ptx {

template <int registers>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

/// Waits until the pool of the CTA holds enough registers.
template <int registers>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace cupyfa::ptx
