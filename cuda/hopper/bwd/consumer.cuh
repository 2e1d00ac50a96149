// The consumer role: a warpgroup has 64 keys of the tile, and walks the query tiles that see them. Its inner loop is the
// backward pass of the paper (specification 0x0A), and its twin is cupyfa/oracles/backward_online.py.
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
class BwdConsumer {
  using Storage = BwdStorage<S>;

 public:
  __device__ BwdConsumer(const BwdParams& p, Storage& storage)
      : p_(p), storage_(storage), place_(KeyPlace<S>::of_thread()), tile_(key_tile(p, storage)),
        Q_(storage.q, storage.q_barriers), dO_(storage.dout, storage.dout_barriers), matrix_row_(place_.matrix_row()) {}

  __device__ void run() {
    float dK[S.head_dim / 2], dV[S.head_dim_v / 2];
#pragma unroll
    for (float& x : dK) x = 0.f;
#pragma unroll
    for (float& x : dV) x = 0.f;
    const QueryRange range = QueryRange::of<S>(p_, tile_);
    Steps step(range, tile_);
    if (step.any()) walk(dK, dV, range, step);
    // Proves that the dQ of all warpgroups is complete, so that nobody reads K.
    ptx::bar_sync(walked_barrier, warpgroup_threads * S.consumers());
    if constexpr (S.bias == Bias::none) {
      store_gradients(p_, storage_, place_, tile_, dK, dV);
    } else {  // the place of the tile is computed again: during the walk, registers are scarce
      store_gradients(p_, storage_, place_, key_tile(p_, storage_, ptx::opaque(blockIdx.x)), dK, dV);
    }
  }

 private:
  __device__ void walk(float (&dK)[S.head_dim / 2], float (&dV)[S.head_dim_v / 2], const QueryRange& range,
                       Steps& step) {
    const SharedAddress k = shared_address(storage_.k), v = shared_address(storage_.v);
    const SharedAddress own_rows = panel_bytes(warpgroup_rows * place_.warpgroup);
    Scores<S> scores(p_, tile_, place_, {storage_.cap, place_}, {p_, storage_.bias, storage_.bias_barriers, place_});
    QuerySum<S> sum(p_, storage_, tile_, place_);
    typename Scores<S>::Values P, dP;
    float dQ[DqPart<S>::values];
    u32 P_rounded[S.tile_m / 4], dS[S.tile_m / 4];

    wait_parity(shared_address(&storage_.k_full), 0);  // proves K
    Slot q = Q_.wait();
    issue_transposed<S, S.head_dim>(P, k + own_rows, q.data);
    complete_product<0>(P);  // proves S of the first query tile
    scores.exponentiate(P, q.data + Storage::q_bytes, step.tile(), range);
    wait_parity(shared_address(&storage_.v_full), 0);  // proves V

    u32 number = 0;  // of the step
    const auto round = [&]<bool more>() {
      const Slot dout = dO_.wait();
      issue_transposed<S, S.head_dim_v>(dP, v + own_rows, dout.data);  // dP' = V dO'
      complete_product<0>(dP);
      scores.differentiate(dP, P, dout.data + Storage::dout_bytes);
      round_scores<S>(dS, dP);
      write_ds(dS, number);
      round_scores<S>(P_rounded, P);

      issue_keys<S, S.head_dim_v>(dV, P_rounded, dout.data);  // dV += P' dO
      Slot next_q;
      if constexpr (more) {
        next_q = Q_.wait();
        issue_transposed<S, S.head_dim>(P, k + own_rows, next_q.data);  // the next S' = K Q'
      }
      ptx::wgmma_wait_group<more ? 1 : 0>();  // proves dV: its P has the registers that dQ will have
      release(dout);
      wait_for_ds(number);
      issue_queries<S>(dQ, shared_address(storage_.ds[number % ds_stages<S>]), k, place_.warpgroup);  // dQ = dS K
      issue_keys<S, S.head_dim>(dK, dS, q.data);  // dK += dS' Q
      const QueryTile query = step.tile();
      step.advance();
      if constexpr (more) {
        complete_product<2>(P);  // proves the next S; dQ and dK are in flight under its exponentials
        scores.exponentiate(P, next_q.data + Storage::q_bytes, step.tile(), range);
      }
      complete_product<1>(dQ);
      sum.add(dQ, query, place_.warpgroup);
      ptx::wgmma_wait_group<0>();  // proves dK, and that it no longer reads Q and dS
      release(q);
      if constexpr (more) q = next_q;
      ++number;
    };
    while (!step.is_last()) round.template operator()<true>();
    round.template operator()<false>();
    ptx::pin_registers(dK);
    ptx::pin_registers(dV);
  }

  /// Leaves this warp's rows for all warpgroups. Nobody reads what was here: it was of the step before the last one, and who
  /// has come to wait_for_ds() of the last one has seen all warpgroups finish with it.
  __device__ void write_ds(const u32 (&dS)[S.tile_m / 4], u32 number) const {
    const u32 stage = number % ds_stages<S>;
    const SharedAddress row = shared_address(storage_.ds[stage]) + matrix_row_;
#pragma unroll
    for (int query = 0; query < S.tile_m; query += 16) {
      const SharedAddress panel = row + query / panel_cols * panel_bytes(S.tile_n);
      const u32* matrices = &dS[query / 4];
      ptx::stmatrix_x4(swizzled_pair(panel, query % panel_cols / 16), matrices[0], matrices[1], matrices[2],
                       matrices[3]);
    }
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    if (place_.lane() == 0) ptx::mbarrier_arrive(shared_address(&storage_.ds_full[stage]));
  }

  __device__ void wait_for_ds(u32 number) const {
    // Proves that all warpgroups have written their rows, and finished the step before.
    wait_parity(shared_address(&storage_.ds_full[number % ds_stages<S>]), number / ds_stages<S> % 2);
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
  u32 matrix_row_;  // of the dS that this lane writes
};

}  // namespace cupyfa::hopper
