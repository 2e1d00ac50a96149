// The storer role: one thread that moves finished output tiles from shared memory to global memory by TMA, so that no
// consumer waits for a store.
#pragma once
#include "hopper/rows.cuh"
#include "hopper/storage.cuh"
#include "params.h"
#include "ptx/tma.cuh"

namespace cupyfa::hopper {

/// Starts to store the O of a tile that is staged at `o`.
template <FwdSpec S>
__device__ inline void issue_store(const FwdParams& p, const TileOf<S>& tile, SharedAddress o) {
  Rows rows = Rows::of_q<S>(tile);
  if constexpr (S.varlen) rows.batch += tile.batch * p.o_shift;
#pragma unroll
  for (int panel = 0; panel < panels(S.head_dim_v); ++panel) {
    store_box<S.varlen>(p.o, panel * panel_cols, rows, o + panel * panel_bytes(S.tile_m));
  }
  ptx::cp_async_bulk_commit_group();
}

template <FwdSpec S>
__device__ void store(const FwdParams& p, Storage<S>& storage) {
  typename Storage<S>::WorkConsumer works(storage.qo, storage.work_barriers, storage.tiles);
  while (true) {
    const Work work = works.next();
    const TileOf<S> tile = works.tile(work);
    if (!tile.valid()) return;
    wait_parity(works.staged(work), work.parity);  // proves that all rows of O are staged, and visible to TMA
    issue_store<S>(p, tile, works.data(work));
    ptx::cp_async_bulk_wait_group_read<0>();  // proves that O has been read: the slot may take the next Q
    ptx::mbarrier_arrive(works.empty(work));
  }
}

}  // namespace cupyfa::hopper
