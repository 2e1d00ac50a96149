// Before the gradients: what a query row needs beside Q and dO, and zeros where dQ will be summed (specification 0x0A). Each
// group of lanes has a row. Its twin is cupyfa/oracles/backward_online.py.
#include "bwd_params.h"
#include "logits.cuh"
#include "mask.cuh"
#include "packed_rows.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/griddepcontrol.cuh"
#include "spec.cuh"

namespace cupyfa {

constexpr int preprocess_threads = 256;
constexpr int preprocess_rows = 64;  // of a CTA
constexpr int vector_elements = 8;  // of 16 bytes

/// A row of a matrix, whose elements are at any distance from each other, or in vectors.
template <DType dtype>
struct MatrixRow {
  const u16* data;
  long long column_stride;
  int columns;

  __device__ static MatrixRow of(const void* matrix, const Strides& strides, int batch, int row, int head,
                                 int columns) {
    const long long offset = batch * strides.batch + row * strides.row + head * strides.head;
    return {static_cast<const u16*>(matrix) + offset, strides.column, columns};
  }

  /// Elements `first` and up, packed; 0 behind the last one.
  __device__ uint4 load(int first, bool vectors) const {
    if (vectors) return *reinterpret_cast<const uint4*>(data + first);
    u32 words[4] = {};
#pragma unroll
    for (int i = 0; i < vector_elements; ++i) {
      if (first + i < columns) words[i / 2] |= u32(data[(first + i) * column_stride]) << 16 * (i % 2);
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

template <DType dtype>
__device__ inline float dot(const uint4& a, const uint4& b) {
  const u32 of_a[4] = {a.x, a.y, a.z, a.w}, of_b[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < vector_elements; ++i) {
    sum = fmaf(ptx::unpack<dtype>(of_a[i / 2], i % 2), ptx::unpack<dtype>(of_b[i / 2], i % 2), sum);
  }
  return sum;
}

__device__ inline float sum_of_lanes(float x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}

/// What a bias that is the same for all keys adds to the scores of a row.
template <DType dtype>
__device__ inline float bias_of_row(const PreprocessParams& p, int batch, int head, int row) {
  const Strides& strides = p.bias_strides;
  const long long offset = batch * strides.batch + head * strides.head + row * strides.row;
  if (p.bias_float32) return static_cast<const float*>(p.bias)[offset];
  return ptx::unpack<dtype>(static_cast<const u16*>(p.bias)[offset], false);
}

template <DType dtype>
__global__ void __launch_bounds__(preprocess_threads) preprocess(const __grid_constant__ PreprocessParams p) {
  __shared__ float of_warps[preprocess_threads / 32];
  ptx::griddepcontrol_launch_dependents();  // the next kernel loads K and V meanwhile
  const u32 ctas = (p.rows + preprocess_rows - 1) / preprocess_rows;  // of a head
  const u32 head_in_all = blockIdx.x / ctas, part = blockIdx.x - head_in_all * ctas;
  const int batch = head_in_all / p.heads_q, head = head_in_all - batch * p.heads_q;
  const int begin = part * preprocess_rows;
  int end = min(p.rows, begin + preprocess_rows);

  int lanes = 1;  // of a row: a power of two
  while (lanes < 32 && lanes * vector_elements < p.head_dim_v) lanes *= 2;
  const int lane = threadIdx.x % lanes;
  // A row of the workspace is as many rows of the arrays behind it as `shift` says, if it is one of `exist`.
  int shift = 0, exist = p.seqlen_q;
  if (p.cu_seqlens_q != nullptr) {
    ptx::griddepcontrol_wait();  // proves the plan
    const u32 tile = begin / p.tile_m;
    const auto packed =
        PackedRows::of<preprocess_threads>(p.cu_seqlens_q, p.seqused_q, p.plan, p.seqlen_q, p.tile_m, tile);
    const int first = tile * p.tile_m;
    shift = packed.first - first, exist = first + packed.used;
    if (packed.used <= 0) end = begin;  // nobody looks at the tile
  }
  const float sink = p.sink == nullptr ? minus_infinity : p.sink[head * p.sink_stride];
  float dsink = 0.f;
#pragma unroll 2
  for (int row = begin + int(threadIdx.x) / lanes; row < begin + preprocess_rows; row += preprocess_threads / lanes) {
    const bool exists = row < exist;
    const int own = row + shift;
    float delta = 0.f;
    if (exists) {
      const auto O = MatrixRow<dtype>::of(p.out, p.out_strides, batch, own, head, p.head_dim_v);
      const auto dO = MatrixRow<dtype>::of(p.dout, p.dout_strides, batch, own, head, p.head_dim_v);
      for (int first = vector_elements * lane; first < p.head_dim_v; first += vector_elements * lanes) {
        delta += dot<dtype>(O.load(first, p.vectors), dO.load(first, p.vectors));
      }
    }
    delta = sum_of_lanes(delta, lanes);
    if (lane != 0 || row >= end) continue;
    float lse = minus_infinity;
    if (exists) lse = p.lse[batch * p.lse_strides.batch + head * p.lse_strides.head + own * p.lse_strides.row];
    const bool sees_keys = lse != minus_infinity;
    if (!sees_keys) {
      delta = 0.f;
    } else if (p.dlse != nullptr) {
      delta -= p.dlse[batch * p.dlse_strides.batch + head * p.dlse_strides.head + own * p.dlse_strides.row];
    }
    const u64 place = u64(head_in_all) * p.rows + row;
    p.lse_log2[place] = sees_keys ? lse * p.lse_factor : -minus_infinity;  // exp2 of what is left is 0
    p.delta[place] = delta;
    if (p.bias != nullptr) p.bias_rows[place] = exists ? bias_of_row<dtype>(p, batch, head, row) : 0.f;
    if (sees_keys) dsink -= ptx::ex2_approx_ftz((sink - lse) * log2_e) * delta;
  }
  if (p.dsink != nullptr) {  // in a fixed order
    dsink = sum_of_lanes(dsink, 32);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = dsink;
    __syncthreads();
    if (threadIdx.x == 0) {
      float sum = 0.f;
      for (float x : of_warps) sum += x;
      p.dsink[blockIdx.x] = sum;
    }
  }

  const int row_vectors = p.dq_head / p.rows / 4;
  // A head may have more than 2^31 vectors, the rows of a CTA have few.
  float4* dq = reinterpret_cast<float4*>(p.dq + head_in_all * p.dq_head) + u64(begin) * row_vectors;
  for (int i = threadIdx.x; i < (end - begin) * row_vectors; i += preprocess_threads) dq[i] = float4{};
  if (p.turns != nullptr && part == 0) {
    for (u32 i = threadIdx.x; i < p.turns_head; i += preprocess_threads) p.turns[head_in_all * p.turns_head + i] = 0;
  }
}

template <DType dtype>
__constant__ KernelTraits preprocess_traits = {
    .threads = preprocess_threads, .cluster_size = 1, .tile_m = preprocess_rows};

}  // namespace cupyfa
