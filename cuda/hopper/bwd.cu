// Hopper attention gradients (specification 0x0A; arXiv 2407.08608, algorithm of the backward pass): a CTA computes dK and
// dV of one key tile, and adds its part of dQ of each query tile that sees it to a sum in memory.
//
// Schedule of a CTA; i runs over the query tiles that see its keys, of each head that shares them:
//
//   producer, 1 thread   K Q[0] V dO[0] Q[1] dO[1] Q[2] ...
//   consumer             dP[i]        | dS[i] to shared memory, rounded P[i] | issue ...         | P[i+1] = exp | dQ[i] to memory
//     its WGMMA          dP[i]=V dO'  |                                      | dV, S[i+1], dQ, dK              |
//   adder, 1 thread for each consumer, only for a fixed order: waits for its turn, adds dQ[i]
//
// Scores are transposed, S = K Q', so that P and dS of a warpgroup's 64 keys are the register operands of its dV and dK.
// Only dS crosses warpgroups: each of them computes a part of dQ over all keys of the tile. The dQ of 128 keys is added to
// float32 in L2, where it meets those of the other key tiles (query_sum.cuh); bwd_preprocess.cu has set the sum to zero, and
// computed lse in base 2 and delta; bwd_postprocess.cu rounds the sum.
//
// Where a head dimension exceeds 128, a tile has 64 keys, and warpgroups share queries and columns instead
// (wide_consumer.cuh).
//
// Reading order: this file, consumer.cuh (the mainloop), scores.cuh (its arithmetic), gemm.cuh, key_tile.cuh (which tiles),
// producer.cuh, query_sum.cuh, epilogue.cuh, storage.cuh.
#include "hopper/bwd/consumer.cuh"
#include "hopper/bwd/producer.cuh"
#include "hopper/bwd/query_sum.cuh"
#include "hopper/bwd/storage.cuh"
#include "hopper/bwd/wide_consumer.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

template <BwdSpec S>
constexpr bool is_valid() {
  static_assert(!(S.varlen && S.partial),
                "a CTA has all query heads of packed keys: set partial=False, or varlen=False");
  static_assert(S.q_stages >= 2, "the next scores are computed while this Q is read: set q_stages to 2 or more");
  static_assert(sizeof(BwdStorage<S>) <= 227 * 1024, "tiles and stages exceed the shared memory of a CTA");
  return true;
}

template <BwdSpec S>
__global__ void __launch_bounds__(S.threads(), 1) backward(const __grid_constant__ BwdParams p) {
  static_assert(is_valid<S>());
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& storage = *reinterpret_cast<BwdStorage<S>*>(shared_memory);

  if (threadIdx.x == 0) {
    if (shared_address(&storage) % swizzle_atom_bytes != 0) __trap();  // the swizzle works on absolute addresses
    ptx::mbarrier_init(shared_address(&storage.k_full), 1);
    ptx::mbarrier_init(shared_address(&storage.v_full), 1);
    for (u64& barrier : storage.ds_full) ptx::mbarrier_init(shared_address(&barrier), bwd_consumer_warps<S>);
    if constexpr (S.deterministic) {
      for (auto& barriers : storage.dq.barriers) initialise(barriers, 1, warpgroup_warps);
    }
    if constexpr (S.bias == Bias::tile) initialise(storage.bias_barriers.ring, bwd_consumer_warps<S>);
    initialise(storage.q_barriers, bwd_consumer_warps<S>);
    initialise(storage.dout_barriers, bwd_consumer_warps<S>);
    ptx::fence_mbarrier_init();
    if constexpr (S.varlen) {
      ptx::griddepcontrol_wait();  // proves the plan, lse, delta, and the zeros of dQ
      storage.planned.tile = VarlenKeyTile::of<S>(p, blockIdx.x);
    }
  }
  __syncthreads();  // proves that the barriers are initialised, and the tile of a plan
  if constexpr (S.varlen) {
    if (!storage.planned.tile.valid()) return;
  }

  if (threadIdx.x < warpgroup_threads) {
    if constexpr (S.setmaxnreg) ptx::setmaxnreg_dec<S.producer_registers()>();
    if (threadIdx.x == 0) produce<S>(p, storage);
    if constexpr (S.bias == Bias::tile) {
      if (threadIdx.x == 96) produce_bias<S>(p, storage);  // of the last warp; adders have those between
    }
    if constexpr (S.deterministic) {
      const int adder = int(threadIdx.x) / 32 - 1;  // a warp for each consumer warpgroup
      if (0 <= adder && adder < S.consumers() && threadIdx.x % 32 == 0) add_in_turn<S>(p, storage, adder);
    }
  } else {
    if constexpr (S.setmaxnreg) ptx::setmaxnreg_inc<S.consumer_registers()>();
    if constexpr (S.wide()) {
      WideConsumer<S>(p, storage).run();
    } else {
      BwdConsumer<S>(p, storage).run();
    }
  }
}

template <BwdSpec S>
__constant__ KernelTraits backward_traits = {
    .threads = S.threads(),
    .shared_bytes = int(sizeof(BwdStorage<S>)),
    .cluster_size = 1,
    .tile_m = S.tile_m,
    .tile_n = S.tile_n,
    .box_cols = panel_cols,
    .producer_registers = S.setmaxnreg ? S.producer_registers() : 0,
    .consumer_registers = S.setmaxnreg ? S.consumer_registers() : 0,
};

}  // namespace cupyfa::hopper
