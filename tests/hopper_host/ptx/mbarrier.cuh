#pragma once
#include "ptx/types.cuh"

namespace cupyfa::ptx {
inline void mbarrier_init(SharedAddress barrier, u32 arrivals) { request("init %u %u", barrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(SharedAddress barrier) { request("arrive %u", barrier); }
inline void mbarrier_arrive_expect_tx(SharedAddress barrier, u32 bytes) { request("expect %u %u", barrier, bytes); }
inline bool mbarrier_try_wait_parity(SharedAddress barrier, u32 parity) {
  request("try_wait %u %u", barrier, parity);
  return true;
}
}  // namespace cupyfa::ptx
