// Merges the parts that splits have left: out = sum_s exp(lse_s - lse) out_s, with lse the logarithm of the sum of exp(lse_s),
// to which a sink adds one term. A warp for each row: with more of them, what a row waits for takes as long, and there is
// less code to be fetched. The order of the sum is that of the parts, so that the result does not depend on what else is in
// the batch. Its twin is cupyfa/oracles/splits.py.
#include "kv_cache.cuh"
#include "logits.cuh"
#include "mask.cuh"
#include "params.h"
#include "ptx/arithmetic.cuh"
#include "ptx/griddepcontrol.cuh"

namespace cupyfa {

constexpr int warp_lanes = 32;
constexpr int batch_parts = 16;  // whose outputs are loaded at a time; a divisor of the lanes of a warp

__device__ inline float warp_max(float x) {
  for (int lanes = warp_lanes / 2; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, lanes));
  return x;
}

__device__ inline float warp_sum(float x) {
  for (int lanes = warp_lanes / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
  return x;
}

template <DType dtype>
__global__ void __launch_bounds__(warp_lanes) combine(const __grid_constant__ CombineParams p) {
  const u32 number = blockIdx.x, of_heads = number / p.seqlen_q, rows = gridDim.x;
  const int row = number - of_heads * p.seqlen_q, sequence = of_heads / p.heads_q;
  const int head = of_heads - sequence * p.heads_q, lane = threadIdx.x;
  // Read at once: no kernel of the call writes a sink or offsets, and the first one has waited for all before it.
  const float sink = p.sink == nullptr ? minus_infinity : p.sink[head * p.sink_stride];
  const QueryRows queries = QueryRows::of(p.cu_seqlens_q, p.cu_seqlens_stride, p.seqlen_q, p.total_q, sequence);
  if (row >= queries.count) {
    ptx::griddepcontrol_wait();  // a grid that does not wait may end before the one in front of it
    return;
  }
  const int columns = p.head_dim_v;
  const long long batch = p.cu_seqlens_q == nullptr ? sequence : 0, at_row = queries.begin + row;
  unsigned short* out = static_cast<unsigned short*>(p.out) + batch * p.out_strides.batch + at_row * p.out_strides.row +
                        head * p.out_strides.head;
  const auto lse = [&](int part) { return part < p.parts ? p.partial_lse[u64(part) * rows + number] : minus_infinity; };
  ptx::griddepcontrol_wait();  // proves the partial results

  float origin, inverse, first_weight;
  const auto weigh = [&](float lse) { return ptx::ex2_approx_ftz((lse - origin) * log2_e); };
#pragma unroll 1
  for (int begin = 0; begin < columns; begin += 4 * warp_lanes) {
    const int column = begin + 4 * lane;
    float O[4] = {}, weight;  // a lane has the weight of one in 32 parts
#pragma unroll 1
    for (int base = 0; base < p.parts; base += batch_parts) {
      // Four columns of each part, or zeros. What a part without keys holds is 0.
      float4 o[batch_parts];
      const float* at = p.partial_out + (u64(base) * rows + number) * columns + column;
#pragma unroll
      for (int i = 0; i < batch_parts; ++i) {
        o[i] = base + i < p.parts && column < columns ? *reinterpret_cast<const float4*>(at) : float4{};
        at += u64(rows) * columns;
      }
      if (base == 0 && begin == 0) {  // while the first ones are under way
        const float of_lane = lse(lane);
        float maximum = fmaxf(sink, of_lane);
#pragma unroll 1
        for (int part = warp_lanes + lane; part < p.parts; part += warp_lanes) maximum = fmaxf(maximum, lse(part));
        maximum = warp_max(maximum);
        origin = maximum == minus_infinity ? 0.f : maximum;
        first_weight = weigh(of_lane);
        float sum = first_weight;
#pragma unroll 1
        for (int part = warp_lanes + lane; part < p.parts; part += warp_lanes) sum += weigh(lse(part));
        sum = warp_sum(sum) + weigh(sink);
        inverse = sum == 0.f ? 0.f : ptx::rcp_approx_ftz(sum);  // 0: without keys
        if (p.lse != nullptr && lane == 0) {
          p.lse[batch * p.lse_strides.batch + at_row * p.lse_strides.row + head * p.lse_strides.head] =
              fmaf(ptx::lg2_approx_ftz(sum), ln_2, origin);
        }
      }
      if (base % warp_lanes == 0) weight = base == 0 ? first_weight : weigh(lse(base + lane));
#pragma unroll
      for (int i = 0; i < batch_parts; ++i) {
        const float of_part = __shfl_sync(0xffffffff, weight, base % warp_lanes + i);
        O[0] = fmaf(of_part, o[i].x, O[0]);
        O[1] = fmaf(of_part, o[i].y, O[1]);
        O[2] = fmaf(of_part, o[i].z, O[2]);
        O[3] = fmaf(of_part, o[i].w, O[3]);
      }
    }
    if (column < columns) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const u32 pair = ptx::cvt_rn_x2<dtype>(O[i] * inverse, O[i + 1] * inverse);
        out[(column + i) * p.out_strides.column] = pair & 0xffff;
        out[(column + i + 1) * p.out_strides.column] = pair >> 16;
      }
    }
  }
}

template <DType dtype>
__constant__ KernelTraits combine_traits = {.threads = warp_lanes, .cluster_size = 1};

}  // namespace cupyfa
