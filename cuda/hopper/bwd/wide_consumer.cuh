// The consumer role where the head dimensions are large: both warpgroups have the 64 keys of the tile. Each computes the
// scores of half of the queries, and half of the columns of the gradients, so P and dS are operands in shared memory.
#pragma once
#include "hopper/bwd/epilogue.cuh"
#include "hopper/bwd/gemm.cuh"
#include "hopper/bwd/key_place.cuh"
#include "hopper/bwd/query_sum.cuh"
#include "hopper/bwd/scores.cuh"
#include "ptx/fence.cuh"
#include "ptx/opaque.cuh"
#include "ptx/stmatrix.cuh"

namespace cupyfa::hopper {

template <BwdSpec S>
class WideConsumer {
  using Storage = BwdStorage<S>;
  using DkColumns = OwnColumns<S, S.head_dim>;
  using DvColumns = OwnColumns<S, S.head_dim_v>;

 public:
  __device__ WideConsumer(const BwdParams& p, Storage& storage)
      : p_(p), storage_(storage), place_(KeyPlace<S>::of_thread()), tile_(key_tile(p, storage)),
        Q_(storage.q, storage.q_barriers), dO_(storage.dout, storage.dout_barriers), matrix_row_(place_.matrix_row()) {}

  __device__ void run() {
    float dK[DkColumns::count / 2], dV[DvColumns::count / 2];
#pragma unroll
    for (float& x : dK) x = 0.f;
#pragma unroll
    for (float& x : dV) x = 0.f;
    const QueryRange range = QueryRange::of<S>(p_, tile_);
    Steps step(range, tile_);
    if (step.any()) walk(dK, dV, range, step);
    ptx::bar_sync(walked_barrier, warpgroup_threads * S.consumers());  // proves that nobody reads K and V
    if constexpr (S.bias == Bias::none && !S.alibi) {
      store_gradients(p_, storage_, place_, tile_, dK, dV);
    } else {  // the place of the tile is computed again: during the walk, registers are scarce
      store_gradients(p_, storage_, place_, key_tile(p_, storage_, ptx::opaque(blockIdx.x)), dK, dV);
    }
  }

 private:
  using Values = typename Scores<S>::Values;

  __device__ void walk(float (&dK)[DkColumns::count / 2], float (&dV)[DvColumns::count / 2], const QueryRange& range,
                       Steps& step) {
    const SharedAddress k = shared_address(storage_.k), v = shared_address(storage_.v);
    const SharedAddress own_queries = panel_bytes(place_.first_query());
    const SharedAddress p_tile = shared_address(storage_.p.data), ds_tile = shared_address(storage_.ds[0]);
    constexpr int parts = DqPart<S>::of_warpgroup;
    const int first_part = parts * place_.warpgroup;
    Scores<S> scores(p_, tile_, place_, {storage_.cap, place_}, {p_, storage_.bias, storage_.bias_barriers, place_});
    QuerySum<S> sum(p_, storage_, tile_, place_);
    Values P, dP;
    float dQ[DqPart<S>::values];

    wait_parity(shared_address(&storage_.k_full), 0);  // proves K
    Slot q = Q_.wait();
    issue_transposed<S, S.head_dim>(P, k, q.data + own_queries);
    complete_product<0>(P);  // proves S of the first query tile
    scores.exponentiate(P, q.data + Storage::q_bytes, step.tile(), range);
    wait_parity(shared_address(&storage_.v_full), 0);  // proves V

    const auto round = [&]<bool more>() {
      const Slot dout = dO_.wait();
      issue_transposed<S, S.head_dim_v>(dP, v, dout.data + own_queries);  // dP' = V dO'
      complete_product<0>(dP);
      scores.differentiate(dP, P, dout.data + Storage::dout_bytes);
      ptx::bar_sync(free_barrier, warpgroup_threads * S.consumers());  // proves that nobody reads the P and dS before
      write(p_tile, P);
      write(ds_tile, dP);
      ptx::fence_proxy_async_shared_cta();
      ptx::bar_sync(written_barrier, warpgroup_threads * S.consumers());  // proves P and dS of all queries

      issue_shared_keys<S, S.head_dim_v>(dV, p_tile, dout.data, place_.warpgroup);  // dV += P' dO
      issue_shared_keys<S, S.head_dim>(dK, ds_tile, q.data, place_.warpgroup);  // dK += dS' Q
      issue_queries<S>(dQ, ds_tile, k, first_part);  // dQ = dS K
      const QueryTile query = step.tile();
      step.advance();
      Slot next_q;
      if constexpr (more) {
        next_q = Q_.wait();
        issue_transposed<S, S.head_dim>(P, k, next_q.data + own_queries);  // the next S' = K Q'
      }
      ptx::wgmma_wait_group<more ? 3 : 2>();  // proves dV
      release(dout);
      ptx::wgmma_wait_group<more ? 2 : 1>();  // proves dK
      release(q);
      complete_product<more ? 1 : 0>(dQ);  // the next S is in flight
      sum.add(dQ, query, first_part);
#pragma unroll
      for (int part = 1; part < parts; ++part) {
        issue_queries<S>(dQ, ds_tile, k, first_part + part);
        if (part < parts - 1) {
          complete_product<0>(dQ);
          sum.add(dQ, query, first_part + part);
        }
      }
      if constexpr (more) {
        complete_product<parts == 1 ? 0 : 1>(P);  // proves the next S; the last dQ is in flight under its exponentials
        scores.exponentiate(P, next_q.data + Storage::q_bytes, step.tile(), range);
        q = next_q;
      }
      if constexpr (parts > 1) {
        complete_product<0>(dQ);
        sum.add(dQ, query, first_part + parts - 1);
      }
    };
    while (!step.is_last()) round.template operator()<true>();
    round.template operator()<false>();
    ptx::pin_registers(dK);
    ptx::pin_registers(dV);
  }

  /// This warp's keys and queries of a tile of operands.
  __device__ void write(SharedAddress tile, const Values& values) const {
    u32 rounded[S.queries() / 4];
    round_scores<S>(rounded, values);
#pragma unroll
    for (int query = 0; query < S.queries(); query += 16) {
      const u32* matrices = &rounded[query / 4];
      const int row = place_.first_query() + query;  // of the tile's transposed columns
      const SharedAddress panel = tile + row / panel_cols * panel_bytes(S.tile_n) + matrix_row_;
      ptx::stmatrix_x4(swizzled_pair(panel, row % panel_cols / 16), matrices[0], matrices[1], matrices[2], matrices[3]);
    }
  }

  /// Each warp answers for itself: its wait covers its own part of the WGMMA that read the slot.
  __device__ void release(const Slot& slot) const {
    if (place_.lane() == 0) cupyfa::release(slot);
  }

  const BwdParams& p_;
  Storage& storage_;
  KeyPlace<S> place_;
  KeptKeyTile<S> tile_;
  typename Storage::QConsumer Q_;
  typename Storage::DoutConsumer dO_;
  u32 matrix_row_;  // of the P and dS that this lane writes
};

}  // namespace cupyfa::hopper
