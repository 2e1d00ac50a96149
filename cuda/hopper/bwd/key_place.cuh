// Where a thread of a consumer warpgroup stands in a tile of transposed scores, whose rows are keys.
#pragma once
#include "layout.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

/// The thread has the keys `key()` and `key() + 8` of a key tile, and of every eight queries two, from `query()` on
/// (accumulator layout of WGMMA). Warpgroups have keys of their own, or queries of their own (BwdSpec::wide).
template <BwdSpec S>
struct KeyPlace {
  int warpgroup;

  __device__ static KeyPlace of_thread() {
    // Read from lane 0, it is known to be uniform, and so are the descriptors that depend on it. The producer comes first.
    return {__shfl_sync(0xffffffff, int(threadIdx.x) / warpgroup_threads - 1, 0)};
  }

  __device__ int thread() const { return threadIdx.x % warpgroup_threads; }
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int warp() const { return threadIdx.x / 32 % 4; }
  __device__ int first_key() const { return S.wide() ? 0 : warpgroup_rows * warpgroup; }
  __device__ int first_query() const { return S.wide() ? S.queries() * warpgroup : 0; }
  __device__ int key() const { return first_key() + 16 * warp() + lane() / 4; }
  __device__ int query() const { return first_query() + 2 * (lane() % 4); }

  /// Where, in a panel of keys, this lane's row of the matrices begins that a warp stores: in chunk 0 or 1.
  __device__ u32 matrix_row() const { return swizzled_chunk(0, first_key() + 16 * warp() + lane() % 16, lane() / 16); }
};

}  // namespace cupyfa::hopper
