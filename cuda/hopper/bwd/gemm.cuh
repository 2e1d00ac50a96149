// The five matrix products of a warpgroup, issued to the tensor cores and left in flight. The warpgroup has 64 keys: their
// rows of the transposed scores are its accumulators, which are the operands of dV and dK as they stand.
#pragma once
#include "hopper/bwd/storage.cuh"
#include "ptx/opaque.cuh"
#include "ptx/wgmma.cuh"

namespace cupyfa::hopper {

/// Starts S' = K Q' or dP' = V dO', for 64 rows that begin at `keys` in a tile of tile_n rows, and the queries that begin at
/// `queries` in one of tile_m rows.
template <BwdSpec S, int columns>
__device__ inline void issue_transposed(float (&scores)[S.queries() / 2], SharedAddress keys, SharedAddress queries) {
  // The compiler would see that keys stay where they are, and keep a descriptor a step in registers.
  if constexpr (!S.wide() || S.softcap || S.varlen) keys = ptx::opaque(keys);
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

/// The same of the columns of one of the warpgroups that share 64 keys, with an operand in shared memory.
template <BwdSpec S, int columns>
__device__ inline void issue_shared_keys(float (&gradient)[columns / 4], SharedAddress operand, SharedAddress queries,
                                         int warpgroup) {
  ptx::wgmma_fence();  // earlier accesses of the gradient come before these
  HalfOf<columns>::each_piece(warpgroup, [&]<int width, int first>(int column) {
    const Descriptor A = k_major(operand), B = mn_major(column_address(queries, column, S.tile_m), S.tile_m);
    auto& own = accumulators_of<width, first>(gradient);
#pragma unroll
    for (int step = 0; step < S.tile_m / 16; ++step) {
      const int panel = step / 4, query_bytes = step % 4 * 32;
      ptx::wgmma_m64k16<width>::template ss<S.dtype, 1, 1>(own, A.at(panel * panel_bytes(S.tile_n) + query_bytes),
                                                           B.at(step * 16 * panel_row_bytes), 1);
    }
  });
  ptx::wgmma_commit_group();
}

/// Starts a part of dQ = dS K over all keys of the CTA.
template <BwdSpec S>
__device__ inline void issue_queries(float (&dQ)[DqPart<S>::values], SharedAddress ds, SharedAddress k, int part) {
  const Descriptor A = mn_major(column_address(ds, DqPart<S>::first_row(part), S.tile_n), S.tile_n);
  ptx::wgmma_fence();  // earlier reads of dQ come before these writes
  DqPart<S>::each_piece(part, [&]<int width, int first>(int column) {
    const Descriptor B = mn_major(column_address(k, column, S.tile_n), S.tile_n);
    auto& own = accumulators_of<width, first>(dQ);
#pragma unroll
    for (int step = 0; step < S.tile_n / 16; ++step) {
      ptx::wgmma_m64k16<width>::template ss<S.dtype, 1, 1, 1>(own, A.at(step * 16 * panel_row_bytes),
                                                              B.at(step * 16 * panel_row_bytes), step > 0);
    }
  });
  ptx::wgmma_commit_group();
}

/// Waits until at most `pending` of the newest products are in flight; the accumulators of an older one may be read.
template <int pending, int count>
__device__ inline void complete_product(float (&accumulators)[count]) {
  ptx::wgmma_wait_group<pending>();
  ptx::pin_registers(accumulators);
}

}  // namespace cupyfa::hopper
