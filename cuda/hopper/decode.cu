// Hopper decode: attention of a few queries over long caches, bound by the bytes of K and V.
//
//   K warp, V warp  |  blocks of K and V, as fast as memory gives them
//   consumers       |  Q  |  S[0] = Q K[0]'  P[0]  O += P[0] V[0]  |  S[1] ...  |  part  |  merge of all parts  |
//
// A CTA has a tile of one key/value head and a split of the keys. The rows of the tile are all query heads that share the
// head, so that K and V are read once for all of them. The key groups of a CTA take its blocks in turn. The CTAs of a cluster
// have the splits of one tile, and merge what they have found through shared memory; where there are more splits, they leave
// their parts for combine.cu.
//
// Reading order: this file, decode/share.cuh (who computes what), kv_cache.cuh (where keys are), decode/producer.cuh,
// decode/queries.cuh, decode/consumer.cuh, decode/merge.cuh; softmax, mask and products are those of the forward kernel.
#include "decode_params.h"
#include "hopper/decode/consumer.cuh"
#include "hopper/decode/merge.cuh"
#include "hopper/decode/producer.cuh"
#include "hopper/decode/share.cuh"
#include "hopper/decode/storage.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

template <DecodeSpec S>
constexpr bool is_valid_decode() {
  static_assert(S.head_dim % 32 == 0 && S.head_dim <= 256 && S.head_dim_v % 32 == 0 && S.head_dim_v <= 256,
                "head_dim and head_dim_v are padded to multiples of 32, at most 256");
  static_assert(S.tile_m == 64 || S.tile_m == 128, "one or two warpgroups of 64 rows");
  static_assert(S.tile_n == 64 || S.tile_n == 128 && S.tile_m == 128, "splits are cut at multiples of 64 or 128 keys");
  static_assert(S.key_groups == 1 || S.key_groups == 2 && S.tile_m == 64, "one or two consumer warpgroups");
  static_assert(S.stages >= 1 && S.stages % S.key_groups == 0, "each key group has as many slots, one or more");
  static_assert(S.residents * (sizeof(decode::Storage<S>) + 1024) <= 228 * 1024,
                "tiles and stages exceed the shared memory of a multiprocessor");
  return true;
}

template <DecodeSpec S>
__global__ void __launch_bounds__(S.threads(), S.residents) decode_attention(const __grid_constant__ DecodeParams p) {
  static_assert(is_valid_decode<S>());
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& storage = *reinterpret_cast<decode::Storage<S>*>(shared_memory);

  const int warp = threadIdx.x / 32, producer = warp - S.consumer_threads() / 32;
  if (threadIdx.x == S.consumer_threads()) {
    ptx::prefetch_tensormap(p.k);
    ptx::prefetch_tensormap(p.v);
  }
  const auto place = decode::Place::of_cta(p);
  const CachedSequence keys(p.places, place.sequence);  // loads that are under way while the barriers are initialised
  if (threadIdx.x == 0) {
    if (shared_address(&storage) % swizzle_atom_bytes != 0) __trap();  // the swizzle works on absolute addresses
    initialise(storage.k_barriers, 4 * S.row_groups());  // each consumer warp answers for itself
    initialise(storage.v_barriers, 4 * S.row_groups());
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_launch_dependents();  // the merge of the splits may set itself up
  const decode::Share<S> share(p, place, keys);
  __syncthreads();  // proves that the barriers are initialised

  // In this order ptxas lets the producers go on with the next instructions, which have to come from memory as well.
  if (producer < 0) {
    if constexpr (S.moves_registers()) ptx::setmaxnreg_inc<S.consumer_registers()>();
    decode::Consumer<S>(p, storage, share).run();
  } else {
    if constexpr (S.moves_registers()) ptx::setmaxnreg_dec<S.producer_registers()>();
    if (!S.moves_registers() || producer < 2) decode::produce<S>(p, storage, share, producer == 1);
  }
  if (p.partial_out != nullptr) return;  // combine.cu has the rest
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();  // proves the parts of all CTAs
  if (producer < 0) decode::Merge<S>(p, storage, share).run();
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();  // proves that nobody reads a part of this CTA any more
}

template <DecodeSpec S>
__constant__ KernelTraits decode_traits = {
    .threads = S.threads(),
    .shared_bytes = int(sizeof(decode::Storage<S>)),
    .cluster_size = 1,
    .tile_m = S.tile_m,
    .tile_n = S.tile_n,
    .box_cols = panel_cols,
    .producer_registers = S.producer_registers(),
    .consumer_registers = S.consumer_registers(),
};

}  // namespace cupyfa::hopper
