// Writes new keys and values into the caches of their sequences, the keys rotated: eight columns at a time.
#include "kv_cache.cuh"
#include "params.h"
#include "ptx/griddepcontrol.cuh"
#include "rotary.cuh"

namespace cupyfa {

constexpr int append_threads = 256;
constexpr int append_columns = 8;  // 16 bytes of a cache

/// Eight columns of row `i` of a head to the place of its key.
template <DType dtype, class Element>
__device__ inline void append(const Strides& strides, void* cache, const CacheRow& row, int head, int column,
                              Element x) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = ptx::cvt_rn_x2<dtype>(x(column + 2 * i), x(column + 2 * i + 1));
  const long long at = row.page * strides.batch + row.row * strides.row + head * strides.head + column;
  *reinterpret_cast<uint4*>(static_cast<unsigned short*>(cache) + at) = {words[0], words[1], words[2], words[3]};
}

/// A CTA for each new key and its value.
template <DType dtype>
__global__ void __launch_bounds__(append_threads) append_kv(const __grid_constant__ AppendParams p) {
  ptx::griddepcontrol_launch_dependents();  // whoever reads the caches may set itself up
  const int sequence = blockIdx.x / p.places.appended, i = blockIdx.x - sequence * p.places.appended;
  const CachedSequence cached(p.places, sequence);
  const int key = cached.before() + i;
  const CacheRow row = cached.at(key);
  if (key >= p.places.capacity || row.page < 0) return;  // the cache is full, or there is no such page

  const int k_chunks = p.head_dim / append_columns, chunks = k_chunks + p.head_dim_v / append_columns;
  for (int n = threadIdx.x; n < p.heads_kv * chunks; n += append_threads) {
    const int head = n / chunks, chunk = n - head * chunks;
    if (chunk < k_chunks) {
      const long long begin = sequence * p.k_strides.batch + i * p.k_strides.row + head * p.k_strides.head;
      const auto load = [&](int column) { return element<dtype>(p.k, begin + column * p.k_strides.column); };
      append<dtype>(p.k_cache_strides, p.k_cache, row, head, chunk * append_columns,
                    [&](int column) { return rotated<dtype>(p.rotary, key, column, load); });
    } else {
      const long long begin = sequence * p.v_strides.batch + i * p.v_strides.row + head * p.v_strides.head;
      append<dtype>(p.v_cache_strides, p.v_cache, row, head, (chunk - k_chunks) * append_columns,
                    [&](int column) { return element<dtype>(p.v, begin + column * p.v_strides.column); });
    }
  }
}

template <DType dtype>
__constant__ KernelTraits append_traits = {.threads = append_threads, .cluster_size = 1};

}  // namespace cupyfa
