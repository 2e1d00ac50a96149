#pragma once
#include "params.h"
#include "ptx/types.cuh"

namespace cupyfa::ptx {
inline void prefetch_tensormap(const TensorMap&) {}
// A tensor map carries a letter, so that a request can name the tensor.
inline void cp_async_bulk_tensor_4d_load(SharedAddress destination, const TensorMap& map, int c0, int c1, int c2,
                                         int c3, SharedAddress barrier) {
  request("load %c %u %d %d %d %d %u", char(map.opaque[0]), destination, c0, c1, c2, c3, barrier);
}
inline void cp_async_bulk_tensor_4d_store(const TensorMap& map, int c0, int c1, int c2, int c3, SharedAddress source) {
  request("store %c %u %d %d %d %d", char(map.opaque[0]), source, c0, c1, c2, c3);
}
// Of packed sequences, which have their own tests: no replay asks for these.
inline void cp_async_bulk_tensor_5d_load(SharedAddress, const TensorMap&, int, int, int, int, int, SharedAddress) {
  __trap();
}
inline void cp_async_bulk_tensor_5d_store(const TensorMap&, int, int, int, int, int, SharedAddress) { __trap(); }
inline void cp_async_bulk_commit_group() { request("bulk_commit"); }
template <int pending>
inline void cp_async_bulk_wait_group_read() {
  request("bulk_wait %d", pending);
}
}  // namespace cupyfa::ptx
