#pragma once
#include "ptx/types.cuh"
#include "spec.cuh"

namespace cupyfa::ptx {
inline void wgmma_fence() { request("fence"); }
inline void wgmma_commit_group() { request("commit"); }
template <int pending>
inline void wgmma_wait_group() {
  request("wait %d", pending);
}
template <int count>
inline void pin_registers(float (&)[count]) {}

template <int N>
struct wgmma_m64k16 {
  template <DType, int scale_a, int trans_b>
  static void ss(float (&)[N / 2], u64 a, u64 b, u32 accumulate) {
    request("ss %d %llu %llu %u %d", N, a, b, accumulate, trans_b);
  }
  template <DType, int scale_a, int trans_b>
  static void rs(float (&)[N / 2], const u32*, u64 b, u32 accumulate) {
    request("rs %d 0 %llu %u %d", N, b, accumulate, trans_b);
  }
};
}  // namespace cupyfa::ptx
