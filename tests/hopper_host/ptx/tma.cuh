#pragma once
#include "params.h"
#include "ptx/types.cuh"

namespace cupyfa::ptx {
inline void prefetch_tensormap(const TensorMap&) {}
// A tensor map carries a letter, so that the trace can name the tensor.
inline void cp_async_bulk_tensor_4d_load(SharedAddress destination, const TensorMap& map, int c0, int c1, int c2, int c3,
                                         SharedAddress barrier) {
  std::printf("load %u %c %d %d %d %d %u\n", destination, char(map.opaque[0]), c0, c1, c2, c3, barrier);
}
inline void cp_async_bulk_tensor_4d_store(const TensorMap&, int c0, int c1, int c2, int c3, SharedAddress source) {
  std::printf("store %u %d %d %d %d\n", source, c0, c1, c2, c3);
}
inline void cp_async_bulk_commit_group() { std::puts("bulk_commit"); }
template <int pending>
inline void cp_async_bulk_wait_group_read() {
  std::printf("bulk_wait %d\n", pending);
}
}  // namespace cupyfa::ptx
