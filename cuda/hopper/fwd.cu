// Hopper forward attention (FlashAttention-3, arXiv 2407.08608): O = softmax(scale Q K') V, one query tile at a time.
//
// Schedule of a CTA, for two consumer warpgroups with overlap and pingpong; j runs from the last key block to the first:
//
//   producer, 1 thread   K[n] Q K[n-1] V[n] K[n-2] V[n-1] ... K[0] V[1] K'[n] Q' V[0] K'[n-1] V'[n] ...
//   consumer 0           S[n] softmax[n] | issue, pass | softmax[n-1]            | P[n-1] | issue, pass | ...
//     its WGMMA                          | S[n-1] |  O += P[n] V[n]              |        | S[n-2] | ...
//   consumer 1           S[n] softmax[n] | waits for its turn | issue, pass | softmax[n-1]            | ...
//     its WGMMA                                               | S[n-1] |  O += P[n] V[n]              | ...
//   storer, 1 thread     waits for O, stores it
//   bias, 1 thread       B[n] B[n-1] ... B[0] B'[n] ..., if there is one that TMA copies
//
// K' and so on are of the next tile. Without pingpong, which is how the selected kernels are, nobody waits for a turn. A
// consumer reads its part of a bias while the scores are computed.
//
// Softmax runs under this warpgroup's own O product, and under both products of the other warpgroup. A speculative
// softmax has no maximum to wait for: P[n-1] is there before O += P[n] V[n] is complete, and O is rescaled only in the
// rare rounds in which a row has left the range of its reference. At the end of a tile, O += P[0] V[0] is issued together
// with the first scores of the next tile; under these, O is normalised and handed to the storer.
//
// Reading order: this file, consumer.cuh (the mainloop), producer.cuh, storer.cuh, storage.cuh, work.cuh and ring.cuh (how
// they meet), tile_scheduler.cuh (which tiles), bias.cuh, score_mod.cuh, mask.cuh, logits.cuh, softmax.cuh and
// speculative_softmax.cuh (the arithmetic), epilogue.cuh. three_stage.cuh is another mainloop, and unspecialized.cuh the kernel without roles: for comparisons.
#include "hopper/consumer.cuh"
#include "hopper/producer.cuh"
#include "hopper/storage.cuh"
#include "hopper/storer.cuh"
#include "hopper/three_stage.cuh"
#include "hopper/unspecialized.cuh"
#include "params.h"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

template <FwdSpec S>
constexpr bool is_valid() {
  static_assert(S.head_dim % 32 == 0 && S.head_dim <= 256 && S.head_dim_v % 32 == 0 && S.head_dim_v <= 256,
                "head_dim and head_dim_v are padded to multiples of 32, at most 256");
  static_assert(S.tile_m == 64 || S.tile_m == 128 || S.tile_m == 192, "one to three consumer warpgroups of 64 rows");
  static_assert(S.tile_n % 16 == 0, "P V takes 16 keys per instruction (and ptx/wgmma.cuh lists the shapes)");
  static_assert(S.stages >= 1 && S.q_stages >= 1, "a ring needs a slot");
  static_assert(!S.speculative || S.overlap,
                "a speculative softmax is written for overlap: set overlap=True, or speculative=False");
  static_assert(S.rescale_threshold == 0 || !S.speculative,
                "a speculative softmax has a range of its own: set speculative=False, or rescale_threshold=0");
  static_assert(
      S.exp2_fma == 0 || S.speculative,
      "what the polynomial makes of a NaN is seen by a speculative softmax: set speculative=True, or exp2_fma=0");
  static_assert(!S.three_stage || S.overlap, "three stages overlap: set overlap=True, or three_stage=False");
  static_assert(!S.three_stage || !S.speculative,
                "three stages are written for the exact softmax: set speculative=False, or three_stage=False");
  static_assert(!S.three_stage || !S.pingpong, "three stages take no turns: set pingpong=False, or three_stage=False");
  static_assert(!S.three_stage || S.stages >= 2,
                "three stages wait for the next K while the last one is read: set stages to 2, or three_stage=False");
  static_assert(!S.pingpong || S.consumers() >= 2, "taking turns needs two warpgroups");
  static_assert(!S.setmaxnreg || S.consumers() >= 2,
                "with tile_m=64 a thread can have 255 registers anyway: set setmaxnreg=False");
  if constexpr (!S.warp_specialized) {
    static_assert(S.scheduler == Scheduler::one_tile && S.q_stages == 1,
                  "without warp specialization a CTA computes one tile: set scheduler=one_tile, q_stages=1");
    static_assert(!S.pingpong && !S.setmaxnreg,
                  "without warp specialization no warp waits for its turn or can spare registers: set pingpong=False, "
                  "setmaxnreg=False");
    static_assert(S.overlap && !S.three_stage && S.stages >= 2,
                  "without warp specialization a copy runs under the products of the next block: set overlap=True, "
                  "three_stage=False, and stages to 2 or more");
  }
  static_assert(S.warp_specialized && !S.three_stage || !S.window && !S.modifies_scores() && !S.varlen,
                "windows, score modifiers and packed sequences are written for the roles and two stages: set "
                "warp_specialized=True, three_stage=False");
  static_assert(S.bias != Bias::none || !S.bias_float32, "no bias has no type: set bias_float32=False");
  static_assert(S.bias_stages > 0 == BiasBox<S>::copied, "a ring has slots: set bias_stages where TMA copies the bias");
  static_assert(sizeof(Storage<S>) <= 227 * 1024, "tiles and stages exceed the shared memory of a CTA");
  return true;
}

template <FwdSpec S>
__global__ void __launch_bounds__(S.threads(), 1) forward(const __grid_constant__ FwdParams p) {
  static_assert(is_valid<S>());
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& storage = *reinterpret_cast<Storage<S>*>(shared_memory);

  if (threadIdx.x == 0) {
    if (shared_address(&storage) % swizzle_atom_bytes != 0) __trap();  // the swizzle works on absolute addresses
    initialise(storage.work_barriers, storage.tiles, consumer_warps<S>);
    initialise(storage.k_barriers, consumer_warps<S>);
    initialise(storage.v_barriers, consumer_warps<S>);
    if constexpr (BiasBox<S>::copied) initialise(storage.bias.barriers, consumer_warps<S>);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // proves that the barriers are initialised

  if constexpr (!S.warp_specialized) {
    Unspecialized<S>(p, storage).run();
  } else if (threadIdx.x < warpgroup_threads) {
    if constexpr (S.setmaxnreg) ptx::setmaxnreg_dec<S.producer_registers()>();
    if (threadIdx.x == 0) produce<S>(p, storage);
    if (threadIdx.x == 32) store<S>(p, storage);
    if constexpr (BiasBox<S>::copied) {
      if (threadIdx.x == 64) produce_bias<S>(p, storage);
    }
  } else {
    if constexpr (S.setmaxnreg) ptx::setmaxnreg_inc<S.consumer_registers()>();
    Consumer<S>(p, storage).run();
  }
}

template <FwdSpec S>
__constant__ KernelTraits forward_traits = {
    .threads = S.threads(),
    .shared_bytes = int(sizeof(Storage<S>)),
    .cluster_size = 1,
    .tile_m = S.tile_m,
    .tile_n = S.tile_n,
    .box_cols = panel_cols,
    .bias_box_cols = BiasBox<S>::copied ? BiasBox<S>::cols : 0,
    .bias_box_rows = BiasBox<S>::copied ? BiasBox<S>::rows : 0,
    .bias_swizzle = BiasBox<S>::copied ? BiasBox<S>::swizzle : 0,
    .persistent = S.scheduler != Scheduler::one_tile,
    .dynamic = S.scheduler == Scheduler::dynamic,
    .producer_registers = S.setmaxnreg ? S.producer_registers() : 0,
    .consumer_registers = S.setmaxnreg ? S.consumer_registers() : 0,
};

}  // namespace cupyfa::hopper
