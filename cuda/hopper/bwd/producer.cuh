// The producer role: one thread that brings K and V, and keeps the rings of Q and dO filled.
#pragma once
#include "hopper/bwd/key_tile.cuh"
#include "hopper/bwd/storage.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/tma.cuh"

namespace cupyfa::hopper {

/// Copies rows of a head, one panel of 64 columns at a time. Rows and columns outside the tensor arrive as zeros.
template <int columns, int rows>
__device__ inline void load_rows(SharedAddress data, const TensorMap& map, int row, int head, int batch,
                                 SharedAddress full) {
#pragma unroll
  for (int panel = 0; panel < panels(columns); ++panel) {
    ptx::cp_async_bulk_tensor_4d_load(data + panel * panel_bytes(rows), map, panel * panel_cols, row, head, batch,
                                      full);
  }
}

template <BwdSpec S>
__device__ void produce(const BwdParams& p, BwdStorage<S>& storage) {
  using Storage = BwdStorage<S>;
  typename Storage::QProducer Q(storage.q, storage.q_barriers);
  typename Storage::DoutProducer dO(storage.dout, storage.dout_barriers);
  const KeyTile tile = KeyTile::of<S>(p, blockIdx.x);
  Steps step(QueryRange::of<S>(p, tile.n), tile);
  if (!step.any()) return;  // nobody sees these keys, and nobody waits for them

  const SharedAddress k_full = shared_address(&storage.k_full), v_full = shared_address(&storage.v_full);
  ptx::mbarrier_arrive_expect_tx(k_full, Storage::k_bytes);
  load_rows<S.head_dim, S.tile_n>(shared_address(storage.k), p.k, tile.n * S.tile_n, tile.head, tile.batch, k_full);
  const auto row_of = [&] {
    return u64(tile.batch * p.heads_q + step.tile().head) * p.tiles_m * S.tile_m + step.tile().m * S.tile_m;
  };
  const auto load_q = [&] {
    const Slot slot = Q.acquire();
    load_rows<S.head_dim, S.tile_m>(slot.data, p.q, step.tile().m * S.tile_m, step.tile().head, tile.batch, slot.full);
    ptx::cp_async_bulk_load(slot.data + Storage::q_bytes, p.lse_log2 + row_of(), Storage::row_bytes, slot.full);
  };
  const auto load_dout = [&] {
    const Slot slot = dO.acquire();
    load_rows<S.head_dim_v, S.tile_m>(slot.data, p.dout, step.tile().m * S.tile_m, step.tile().head, tile.batch,
                                      slot.full);
    ptx::cp_async_bulk_load(slot.data + Storage::dout_bytes, p.delta + row_of(), Storage::row_bytes, slot.full);
  };
  ptx::griddepcontrol_wait();  // proves lse and delta, and through them, to the consumers, the zeros of dQ
  load_q();
  ptx::mbarrier_arrive_expect_tx(v_full, Storage::v_bytes);
  load_rows<S.head_dim_v, S.tile_n>(shared_address(storage.v), p.v, tile.n * S.tile_n, tile.head, tile.batch, v_full);
  while (true) {
    load_dout();
    step.advance();
    if (!step.any()) return;
    load_q();
  }
}

}  // namespace cupyfa::hopper
