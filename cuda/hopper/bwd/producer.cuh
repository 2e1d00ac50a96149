// The producer role: one thread that brings K and V, and keeps the rings of Q and dO filled, and one for a bias.
#pragma once
#include "hopper/bwd/key_tile.cuh"
#include "hopper/bwd/storage.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/tma.cuh"

namespace cupyfa::hopper {

/// Copies rows of a head, one panel of 64 columns at a time. Rows and columns outside the tensor, or behind the sequence,
/// arrive as zeros.
template <bool varlen, int columns, int rows>
__device__ inline void load_rows(SharedAddress data, const TensorMap& map, const Rows& from, SharedAddress full) {
#pragma unroll
  for (int panel = 0; panel < panels(columns); ++panel) {
    load_box<varlen>(data + panel * panel_bytes(rows), map, panel * panel_cols, from, full);
  }
}

template <BwdSpec S>
__device__ void produce(const BwdParams& p, BwdStorage<S>& storage) {
  using Storage = BwdStorage<S>;
  typename Storage::QProducer Q(storage.q, storage.q_barriers);
  typename Storage::DoutProducer dO(storage.dout, storage.dout_barriers);
  const KeptKeyTile<S> tile = key_tile(p, storage);
  Steps step(QueryRange::of<S>(p, tile), tile);
  if (!step.any()) {  // nobody sees these keys, and nobody waits for them
    // Proves, to the kernel behind this one, that the one before it is complete: it may have no other sign of that.
    if constexpr (!S.varlen) ptx::griddepcontrol_wait();
    return;
  }

  const SharedAddress k_full = shared_address(&storage.k_full), v_full = shared_address(&storage.v_full);
  ptx::mbarrier_arrive_expect_tx(k_full, Storage::k_bytes);
  load_rows<S.varlen, S.head_dim, S.tile_n>(shared_address(storage.k), p.k, tile.keys(tile.n * S.tile_n), k_full);
  const auto row_of = [&] {
    return (tile.template first_query_tile<S>(p, step.tile().head) + step.tile().m) * S.tile_m;
  };
  const auto queries = [&] { return tile.queries(step.tile().m * S.tile_m, step.tile().head); };
  const auto load_q = [&] {
    const Slot slot = Q.acquire();
    load_rows<S.varlen, S.head_dim, S.tile_m>(slot.data, p.q, queries(), slot.full);
    ptx::cp_async_bulk_load(slot.data + Storage::q_bytes, p.lse_log2 + row_of(), Storage::row_bytes, slot.full);
    if constexpr (S.bias == Bias::column) {
      ptx::cp_async_bulk_load(slot.data + Storage::q_bytes + Storage::row_bytes, p.bias_rows + row_of(),
                              Storage::row_bytes, slot.full);
    }
  };
  const auto load_dout = [&] {
    const Slot slot = dO.acquire();
    load_rows<S.varlen, S.head_dim_v, S.tile_m>(slot.data, p.dout, queries(), slot.full);
    ptx::cp_async_bulk_load(slot.data + Storage::dout_bytes, p.delta + row_of(), Storage::row_bytes, slot.full);
  };
  if constexpr (!S.varlen)
    ptx::griddepcontrol_wait();  // proves lse and delta, and through them, to the consumers, the zeros of dQ
  load_q();
  ptx::mbarrier_arrive_expect_tx(v_full, Storage::v_bytes);
  load_rows<S.varlen, S.head_dim_v, S.tile_n>(shared_address(storage.v), p.v, tile.keys(tile.n * S.tile_n), v_full);
  while (true) {
    load_dout();
    step.advance();
    if (!step.any()) return;
    load_q();
  }
}

/// Starts to copy what is added to the scores of a step.
template <BwdSpec S>
__device__ inline void load_bias(const BwdParams& p, const Slot& slot, const KeyTile& tile, const QueryTile& query) {
  constexpr int cols = TileBias<S>::cols;
  const int head = p.bias_strides.head == 0 ? 0 : query.head, batch = p.bias_strides.batch == 0 ? 0 : tile.batch;
#pragma unroll
  for (int panel = 0; panel < S.tile_n / cols; ++panel) {
    ptx::cp_async_bulk_tensor_4d_load(slot.data + panel * panel_bytes(S.tile_m), p.bias,
                                      tile.n * S.tile_n + panel * cols, query.m * S.tile_m, head, batch, slot.full);
  }
}

/// Likewise one thread, which fills the ring of a bias with rows and columns: registers of the other one are few. No kernel
/// of the call writes what it reads, so that it has nothing to wait for.
template <BwdSpec S>
__device__ void produce_bias(const BwdParams& p, BwdStorage<S>& storage) {
  typename TileBias<S>::Producer bias(storage.bias.data, storage.bias_barriers.ring);
  const KeyTile tile = KeyTile::of<S>(p, blockIdx.x);
  for (Steps step(QueryRange::of<S>(p, tile), tile); step.any(); step.advance()) {
    load_bias<S>(p, bias.acquire(), tile, step.tile());
  }
}

}  // namespace cupyfa::hopper
