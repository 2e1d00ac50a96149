// Merges the parts that splits have left: out = sum_s exp(lse_s - lse) out_s, with lse the logarithm of the sum of exp(lse_s),
// to which a sink adds one term. A CTA for each row. The order of the sum is that of the parts, so that the result does
// not depend on what else is in the batch. Its twin is cupyfa/oracles/splits.py.
#include "kv_cache.cuh"
#include "logits.cuh"
#include "mask.cuh"
#include "params.h"
#include "ptx/arithmetic.cuh"
#include "ptx/griddepcontrol.cuh"

namespace cupyfa {

constexpr int warp_lanes = 32;
constexpr int combine_warps = 4;
constexpr int combine_threads = combine_warps * warp_lanes;
constexpr int most_columns = 256;

__device__ inline float warp_max(float x) {
  for (int lanes = warp_lanes / 2; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, lanes));
  return x;
}

__device__ inline float warp_sum(float x) {
  for (int lanes = warp_lanes / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
  return x;
}

/// Four columns of the row in one part, or zeros.
struct Chunk {
  float4 x;

  __device__ static Chunk load(const float* of_row, bool exists) {
    return {exists ? *reinterpret_cast<const float4*>(of_row) : float4{}};
  }
  __device__ void add(float weight, const Chunk& o) {
    x.x = fmaf(weight, o.x.x, x.x);
    x.y = fmaf(weight, o.x.y, x.y);
    x.z = fmaf(weight, o.x.z, x.z);
    x.w = fmaf(weight, o.x.w, x.w);
  }
};

template <DType dtype>
__global__ void __launch_bounds__(combine_threads) combine(const __grid_constant__ CombineParams p) {
  constexpr int first_parts = warp_lanes / combine_warps;  // of the first 32, those whose outputs a warp adds
  __shared__ __align__(16) float parts[combine_warps][most_columns];
  const u32 number = blockIdx.x, of_heads = number / p.seqlen_q, rows = gridDim.x;
  const int row = number - of_heads * p.seqlen_q, sequence = of_heads / p.heads_q;
  const int head = of_heads - sequence * p.heads_q;
  const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
  // Read at once: no kernel of the call writes a sink or offsets, and the first one has waited for all before it.
  const float sink = p.sink == nullptr ? minus_infinity : p.sink[head * p.sink_stride];
  const QueryRows queries = QueryRows::of(p.cu_seqlens_q, p.cu_seqlens_stride, p.seqlen_q, p.total_q, sequence);
  if (row >= queries.count) {
    ptx::griddepcontrol_wait();  // a grid that does not wait may end before the one in front of it
    return;
  }
  const int columns = p.head_dim_v;
  const float* of_row = p.partial_out + u64(number) * columns;
  const auto load = [&](int part, int column) {
    return Chunk::load(of_row + u64(part) * rows * columns + column, part < p.parts && column < columns);
  };
  ptx::griddepcontrol_wait();  // proves the partial results

  // The outputs of the first 32 parts are under way while their weights are computed: lane i has that of part i. What a
  // part without keys holds is 0.
  Chunk first[first_parts];
#pragma unroll
  for (int i = 0; i < first_parts; ++i) first[i] = load(combine_warps * i + warp, 4 * lane);
  const auto lse = [&](int part) { return part < p.parts ? p.partial_lse[u64(part) * rows + number] : minus_infinity; };
  const float of_lane = lse(lane);
  float maximum = fmaxf(sink, of_lane);
#pragma unroll 1
  for (int part = warp_lanes + lane; part < p.parts; part += warp_lanes) maximum = fmaxf(maximum, lse(part));
  maximum = warp_max(maximum);
  const float origin = maximum == minus_infinity ? 0.f : maximum;
  const auto weigh = [&](float lse) { return ptx::ex2_approx_ftz((lse - origin) * log2_e); };
  const float weight = weigh(of_lane);
  float sum = weight;
#pragma unroll 1
  for (int part = warp_lanes + lane; part < p.parts; part += warp_lanes) sum += weigh(lse(part));
  sum = warp_sum(sum) + weigh(sink);

#pragma unroll 1
  for (int base = 0; base < columns; base += 4 * warp_lanes) {
    const int column = base + 4 * lane;
    Chunk O = {};
#pragma unroll
    for (int i = 0; i < first_parts; ++i) {
      const int part = combine_warps * i + warp;
      O.add(__shfl_sync(0xffffffff, weight, part), base == 0 ? first[i] : load(part, column));
    }
#pragma unroll 1
    for (int part = warp_lanes + warp; part < p.parts; part += combine_warps) {
      O.add(weigh(lse(part)), load(part, column));
    }
    if (column < columns) *reinterpret_cast<float4*>(&parts[warp][column]) = O.x;
  }
  __syncthreads();  // proves the parts

  const float inverse = sum == 0.f ? 0.f : ptx::rcp_approx_ftz(sum);  // 0: without keys
  const long long batch = p.cu_seqlens_q == nullptr ? sequence : 0, at_row = queries.begin + row;
  unsigned short* out = static_cast<unsigned short*>(p.out) + batch * p.out_strides.batch + at_row * p.out_strides.row +
                        head * p.out_strides.head;
  for (int column = 2 * threadIdx.x; column < columns; column += 2 * combine_threads) {
    float pair[2] = {};
#pragma unroll
    for (int i = 0; i < combine_warps; ++i) {
      pair[0] += parts[i][column];
      pair[1] += parts[i][column + 1];
    }
    const u32 packed = ptx::cvt_rn_x2<dtype>(pair[0] * inverse, pair[1] * inverse);
    out[column * p.out_strides.column] = packed & 0xffff;
    out[(column + 1) * p.out_strides.column] = packed >> 16;
  }
  if (p.lse != nullptr && threadIdx.x == 0) {
    p.lse[batch * p.lse_strides.batch + at_row * p.lse_strides.row + head * p.lse_strides.head] =
        fmaf(ptx::lg2_approx_ftz(sum), ln_2, origin);
  }
}

template <DType dtype>
__constant__ KernelTraits combine_traits = {.threads = combine_threads, .cluster_size = 1};

}  // namespace cupyfa
