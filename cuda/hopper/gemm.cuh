// The two matrix products of a warpgroup, issued to the tensor cores and left in flight.
#pragma once
#include "hopper/storage.cuh"
#include "ptx/opaque.cuh"
#include "ptx/wgmma.cuh"

namespace cupyfa::hopper {

/// Starts S = Q K', or -Q K', for 64 rows of Q that begin at `q`.
template <FwdSpec S>
__device__ inline void issue_scores(float (&scores)[S.tile_n / 2], SharedAddress q, SharedAddress k) {
  constexpr int sign = S.negate_scores ? -1 : 1;
  q = ptx::opaque(q);  // the compiler would see that Q stays where it is, and keep a descriptor a step in registers
  const Descriptor Q = k_major(q), K = k_major(k);
  ptx::wgmma_fence();  // earlier reads of `scores` come before these writes
#pragma unroll
  for (int step = 0; step < S.head_dim / 16; ++step) {
    const int panel = step / 4, column_bytes = step % 4 * 32;
    ptx::wgmma_m64k16<S.tile_n>::template ss<S.dtype, sign, 0>(
        scores, Q.at(panel * panel_bytes(S.tile_m) + column_bytes), K.at(panel * panel_bytes(S.tile_n) + column_bytes),
        step > 0);
  }
  ptx::wgmma_commit_group();
}

/// Starts O += P V. The accumulator layout of S is the operand layout of P (layouts of "wgmma.mma_async.m64nNk16"), so P
/// never leaves the registers.
template <FwdSpec S>
__device__ inline void issue_output(float (&O)[S.head_dim_v / 2], const u32 (&P)[S.tile_n / 4], SharedAddress v) {
  const Descriptor V = mn_major(v, S.tile_n);
  ptx::wgmma_fence();  // earlier writes of O and P come before these reads
#pragma unroll
  for (int step = 0; step < S.tile_n / 16; ++step) {
    ptx::wgmma_m64k16<S.head_dim_v>::template rs<S.dtype, 1, 1>(O, &P[4 * step], V.at(step * 16 * panel_row_bytes), 1);
  }
  ptx::wgmma_commit_group();
}

/// Waits until at most `pending` of the newest products are in flight; the accumulators of an older one may be read.
template <int pending, int count>
__device__ inline void complete(float (&accumulators)[count]) {
  ptx::wgmma_wait_group<pending>();
  ptx::pin_registers(accumulators);
}

}  // namespace cupyfa::hopper
