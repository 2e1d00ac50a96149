#pragma once
#include "ptx/types.cuh"

namespace cupyfa::ptx {
inline void mbarrier_init(SharedAddress barrier, u32 arrivals) { std::printf("init %u %u\n", barrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(SharedAddress barrier) { std::printf("arrive %u\n", barrier); }
inline void mbarrier_arrive_expect_tx(SharedAddress barrier, u32 bytes) {
  std::printf("expect %u %u\n", barrier, bytes);
}
inline bool mbarrier_try_wait_parity(SharedAddress barrier, u32 parity) {
  std::printf("try_wait %u %u\n", barrier, parity);
  return true;
}
}  // namespace cupyfa::ptx
