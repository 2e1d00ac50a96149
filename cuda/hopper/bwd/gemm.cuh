// The five matrix products of a warpgroup, issued to the tensor cores and left in flight. The warpgroup has 64 keys: their
// rows of the transposed scores are its accumulators, which are the operands of dV and dK as they stand.
#pragma once
#include "hopper/bwd/storage.cuh"
#include "ptx/wgmma.cuh"

namespace cupyfa::hopper {

/// Starts S' = K Q' or dP' = V dO', for 64 rows that begin at `keys` in a tile of tile_n rows, and the queries that begin at
/// `queries` in one of tile_m rows.
template <BwdSpec S, int columns>
__device__ inline void issue_transposed(float (&scores)[S.queries() / 2], SharedAddress keys, SharedAddress queries) {
  const Descriptor A = k_major(keys), B = k_major(queries);
  ptx::wgmma_fence();  // earlier reads of `scores` come before these writes
#pragma unroll
  for (int step = 0; step < columns / 16; ++step) {
    const int panel = step / 4, column_bytes = step % 4 * 32;
    ptx::wgmma_m64k16<S.queries()>::template ss<S.dtype, 1, 0>(
        scores, A.at(panel * panel_bytes(S.tile_n) + column_bytes), B.at(panel * panel_bytes(S.tile_m) + column_bytes),
        step > 0);
  }
  ptx::wgmma_commit_group();
}

/// Starts dV += P' dO or dK += dS' Q, with an operand in registers.
template <BwdSpec S, int columns>
__device__ inline void issue_keys(float (&gradient)[columns / 2], const u32 (&operand)[S.tile_m / 4],
                                  SharedAddress queries) {
  const Descriptor B = mn_major(queries, S.tile_m);
  ptx::wgmma_fence();  // earlier writes of the operand come before these reads
#pragma unroll
  for (int step = 0; step < S.tile_m / 16; ++step) {
    ptx::wgmma_m64k16<columns>::template rs<S.dtype, 1, 1>(gradient, &operand[4 * step],
                                                           B.at(step * 16 * panel_row_bytes), 1);
  }
  ptx::wgmma_commit_group();
}

/// The same, with an operand of 64 keys in shared memory, and some columns of the queries.
template <BwdSpec S, int columns>
__device__ inline void issue_keys(float (&gradient)[columns / 2], SharedAddress operand, SharedAddress queries) {
  const Descriptor A = k_major(operand), B = mn_major(queries, S.tile_m);
  ptx::wgmma_fence();  // earlier accesses of the gradient come before these
#pragma unroll
  for (int step = 0; step < S.tile_m / 16; ++step) {
    ptx::wgmma_m64k16<columns>::template ss<S.dtype, 1, 1>(gradient, A.at(step * 32), B.at(step * 16 * panel_row_bytes),
                                                           1);
  }
  ptx::wgmma_commit_group();
}

/// Starts a part of dQ = dS K over all keys of the CTA.
template <BwdSpec S>
__device__ inline void issue_queries(float (&dQ)[DqPart<S>::values], SharedAddress ds, SharedAddress k, int part) {
  using Part = DqPart<S>;
  const int row = Part::first_row(part), column = Part::first_column(part);
  const Descriptor A = mn_major(ds + row / panel_cols * panel_bytes(S.tile_n), S.tile_n);
  const Descriptor B = mn_major(k + column / panel_cols * panel_bytes(S.tile_n) + column % panel_cols * 2, S.tile_n);
  ptx::wgmma_fence();  // earlier reads of dQ come before these writes
#pragma unroll
  for (int step = 0; step < S.tile_n / 16; ++step) {
    ptx::wgmma_m64k16<Part::columns>::template ss<S.dtype, 1, 1, 1>(dQ, A.at(step * 16 * panel_row_bytes),
                                                                    B.at(step * 16 * panel_row_bytes), step > 0);
  }
  ptx::wgmma_commit_group();
}

/// Waits until at most `pending` of the newest products are in flight; the accumulators of an older one may be read.
template <int pending, int count>
__device__ inline void complete_product(float (&accumulators)[count]) {
  ptx::wgmma_wait_group<pending>();
  ptx::pin_registers(accumulators);
}

}  // namespace cupyfa::hopper
