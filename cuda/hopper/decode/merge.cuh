// The end of a tile: the parts of the cluster's key groups become the output. A part is a normalised output with its lse, and
// out = sum_i exp(lse_i - lse) out_i; a sink adds a term to the sum of exp(lse_i) and no output. The order of the sum is that
// of the splits, whatever else the grid computes.
#pragma once
#include "hopper/decode/share.cuh"
#include "hopper/decode/storage.cuh"
#include "logits.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cluster.cuh"

namespace cupyfa::hopper::decode {

template <DecodeSpec S>
class Merge {
 public:
  __device__ Merge(const DecodeParams& p, const Storage<S>& storage, const Share<S>& share)
      : p_(p), share_(share), parts_(shared_address(storage.parts)), count_(ptx::cluster_nctarank() * S.key_groups) {}

  /// Four columns of a row for each thread of the cluster in turn. The parts are complete, and stay until all are done.
  __device__ void run() const {
    const int row_chunks = p_.head_dim_v / 4, chunks = share_.rows * row_chunks;
    const u32 threads = ptx::cluster_nctarank() * S.consumer_threads();
    for (int i = ptx::cluster_ctarank() * S.consumer_threads() + threadIdx.x; i < chunks; i += threads) {
      merge(i / row_chunks, i % row_chunks * 4);
    }
  }

 private:
  __device__ void merge(int row, int column) const {
    const Row of = share_.row(share_.first_row + row);
    const float sink = p_.sink != nullptr ? p_.sink[of.head * p_.sink_stride] : minus_infinity;
    float maximum = sink, sum = sink == minus_infinity ? 0.f : 1.f;  // relative to the maximum
    float4 O = {};
#pragma unroll 2
    for (int i = 0; i < count_; ++i) {
      const u32 part = at(i);
      const float lse = ptx::ld_shared_cluster(part + lse_offset(row));
      const float4 o = ptx::ld_shared_cluster_v4(part + (row * Part<S>::pitch + column) * sizeof(float));
      const float before = maximum;
      maximum = fmaxf(before, lse);
      const float origin = maximum == minus_infinity ? 0.f : maximum;
      const float shrink = ptx::ex2_approx_ftz((before - origin) * log2_e);
      const float weight = ptx::ex2_approx_ftz((lse - origin) * log2_e);
      sum = fmaf(sum, shrink, weight);
      O.x = fmaf(O.x, shrink, weight * o.x);
      O.y = fmaf(O.y, shrink, weight * o.y);
      O.z = fmaf(O.z, shrink, weight * o.z);
      O.w = fmaf(O.w, shrink, weight * o.w);
    }
    const float origin = maximum == minus_infinity ? 0.f : maximum;
    const float inverse = sum == 0.f ? 0.f : ptx::rcp_approx_ftz(sum);  // 0: without keys
    const float of_row = fmaf(ptx::lg2_approx_ftz(sum), ln_2, origin);
    const float result[4] = {O.x * inverse, O.y * inverse, O.z * inverse, O.w * inverse};
    store(of, column, result, of_row);
  }

  /// The part of a key group, in the shared memory of its CTA.
  __device__ u32 at(int i) const { return ptx::mapa(parts_ + i % S.key_groups * sizeof(Part<S>), i / S.key_groups); }
  __device__ static int lse_offset(int row) { return (S.tile_m * Part<S>::pitch + row) * sizeof(float); }

  __device__ void store(const Row& row, int column, const float (&result)[4], float lse) const {
    const long long batch = p_.cu_seqlens_q == nullptr ? share_.sequence : 0;
    const long long query = share_.queries.begin + row.query;
    if (p_.lse != nullptr && column == 0) {
      p_.lse[batch * p_.lse_strides.batch + query * p_.lse_strides.row + row.head * p_.lse_strides.head] = lse;
    }
    unsigned short* out = static_cast<unsigned short*>(p_.out) + batch * p_.out_strides.batch +
                          query * p_.out_strides.row + row.head * p_.out_strides.head;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const u32 pair = ptx::cvt_rn_x2<S.dtype>(result[i], result[i + 1]);
      out[(column + i) * p_.out_strides.column] = pair & 0xffff;
      out[(column + i + 1) * p_.out_strides.column] = pair >> 16;
    }
  }

  const DecodeParams& p_;
  const Share<S>& share_;
  SharedAddress parts_;
  int count_;
};

}  // namespace cupyfa::hopper::decode
