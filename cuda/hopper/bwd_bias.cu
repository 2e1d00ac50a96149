// The gradient of an additive bias (specification 0x0A): that of the logits, P (dP - delta), summed over the axes along which
// the bias repeats.
//
// A CTA has a tile of it, and computes the scores of all tiles that it is the sum of, in a fixed order and once more: so
// sums stay in registers, whichever axes they are over, and no two CTAs add to the same number.
//
//   producer, 1 thread   K Q V dO of a tile, beside the lse and the delta of its rows
//   bias, 1 thread       B, if it has rows and columns
//   consumer             S = K Q', dP = V dO' | sum += P (dP - delta)
//
// Reading order: this file, bwd/bias_tile.cuh (which tiles), bwd/scores.cuh (the arithmetic, as for the other gradients).
#include "hopper/bwd/bias_tile.cuh"
#include "hopper/bwd/gemm.cuh"
#include "hopper/bwd/key_place.cuh"
#include "hopper/bwd/producer.cuh"
#include "hopper/bwd/scores.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "spec.cuh"

namespace cupyfa::hopper {

template <BiasGradientSpec S>
struct BiasGradientStorage {
  using Tiles = BwdStorage<S.tile()>;
  // Of a slot: K, V, Q, dO, then the lse of the rows, a bias of one column, and their delta.
  static constexpr int v_begin = Tiles::k_bytes, q_begin = v_begin + Tiles::v_bytes;
  static constexpr int dout_begin = q_begin + Tiles::q_bytes, lse_begin = dout_begin + Tiles::dout_bytes;
  static constexpr int delta_begin = lse_begin + 2 * Tiles::row_bytes;
  static constexpr int slot_bytes = lse_begin + swizzle_atom_bytes;
  static constexpr int filled = lse_begin + (S.bias == Bias::column ? 3 : 2) * Tiles::row_bytes;
  static constexpr int pitch = S.tile_n + 4;  // of sums: a warp's are in all banks
  static_assert(3 * Tiles::row_bytes <= swizzle_atom_bytes);
  static_assert(S.tile_m * pitch * int(sizeof(float)) <= slot_bytes, "the sums leave through a slot");
  using Producer = RingProducer<S.stages, slot_bytes, filled>;
  using Consumer = RingConsumer<S.stages, slot_bytes>;

  alignas(swizzle_atom_bytes) unsigned char tiles[S.stages][slot_bytes];
  [[no_unique_address]] TileBias<S.tile()> bias;
  RingBarriers<S.stages> barriers;
  [[no_unique_address]] TileBiasBarriers<S.tile()> bias_barriers;
};

constexpr int bias_gradient_threads = 3 * warpgroup_threads;
constexpr int bias_consumer_threads = 2 * warpgroup_threads;

template <BiasGradientSpec S>
__device__ void produce_tiles(const BiasGradientParams& params, BiasGradientStorage<S>& storage) {
  using Storage = BiasGradientStorage<S>;
  using Tiles = typename Storage::Tiles;
  const BwdParams& p = params.scores;
  typename Storage::Producer ring(storage.tiles, storage.barriers);
  ptx::griddepcontrol_wait();  // proves lse and delta
  BiasTile::of<S>(params, blockIdx.x)
      .template for_each_tile<S>(params, [&](const KeyTile& tile, const QueryTile& query, const QueryRange&) {
        const Slot slot = ring.acquire();
        const int row = query.m * S.tile_m;
        const Rows keys = tile.keys(tile.n * S.tile_n), queries = tile.queries(row, query.head);
        load_rows<false, S.head_dim, S.tile_n>(slot.data, p.k, keys, slot.full);
        load_rows<false, S.head_dim, S.tile_m>(slot.data + Storage::q_begin, p.q, queries, slot.full);
        load_rows<false, S.head_dim_v, S.tile_n>(slot.data + Storage::v_begin, p.v, keys, slot.full);
        load_rows<false, S.head_dim_v, S.tile_m>(slot.data + Storage::dout_begin, p.dout, queries, slot.full);
        const u64 place = u64(tile.batch * p.heads_q + query.head) * p.tiles_m * S.tile_m + row;
        const SharedAddress lse = slot.data + Storage::lse_begin;
        ptx::cp_async_bulk_load(lse, p.lse_log2 + place, Tiles::row_bytes, slot.full);
        if constexpr (S.bias == Bias::column) {
          ptx::cp_async_bulk_load(lse + Tiles::row_bytes, p.bias_rows + place, Tiles::row_bytes, slot.full);
        }
        ptx::cp_async_bulk_load(slot.data + Storage::delta_begin, p.delta + place, Tiles::row_bytes, slot.full);
      });
}

template <BiasGradientSpec S>
__device__ void produce_biases(const BiasGradientParams& p, BiasGradientStorage<S>& storage) {
  typename TileBias<S.tile()>::Producer ring(storage.bias.data, storage.bias_barriers.ring);
  BiasTile::of<S>(p, blockIdx.x)
      .template for_each_tile<S>(p, [&](const KeyTile& tile, const QueryTile& query, const QueryRange&) {
        load_bias<S.tile()>(p.scores, ring.acquire(), tile, query);
      });
}

/// A warpgroup has 64 keys of the tile.
template <BiasGradientSpec S>
class BiasGradientConsumer {
  using Storage = BiasGradientStorage<S>;
  using Place = KeyPlace<S.tile()>;
  using OfScores = Scores<S.tile(), NoSlopes>;
  using Values = typename OfScores::Values;

 public:
  __device__ BiasGradientConsumer(const BiasGradientParams& p, Storage& storage)
      : p_(p), storage_(storage), place_(Place::of_thread()), own_(BiasTile::of<S>(p, blockIdx.x)) {}

  __device__ void run() {
    Values sum;
#pragma unroll
    for (float& x : sum) x = 0.f;
    add_tiles(sum);
    leave(sum);
    ptx::bar_sync(written_barrier, bias_consumer_threads);  // proves the sums of all warpgroups
    if (p_.rows == 1) add_rows();
    if (p_.keys == 1) add_keys();
    store();
  }

 private:
  __device__ void add_tiles(Values& sum) {
    typename Storage::Consumer ring(storage_.tiles, storage_.barriers);
    const SharedAddress own_keys = panel_bytes(place_.first_key());
    KeyTile keys = {};
    OfScores scores(p_.scores, keys, place_, {}, {p_.scores, storage_.bias, storage_.bias_barriers, place_});
    own_.for_each_tile<S>(p_, [&](const KeyTile& tile, const QueryTile& query, const QueryRange& range) {
      Values P, dP;
      keys = tile;
      const Slot slot = ring.wait();
      issue_transposed<S.tile(), S.head_dim>(P, slot.data + own_keys, slot.data + Storage::q_begin);
      issue_transposed<S.tile(), S.head_dim_v>(dP, slot.data + Storage::v_begin + own_keys,
                                               slot.data + Storage::dout_begin);
      complete_product<1>(P);  // dP is in flight under its exponentials
      scores.exponentiate(P, slot.data + Storage::lse_begin, query, range);
      complete_product<0>(dP);
      scores.differentiate(dP, P, slot.data + Storage::delta_begin);
      __syncwarp();  // all lanes have read lse and delta
      if (place_.lane() == 0) release(slot);
#pragma unroll
      for (int i = 0; i < S.tile_m / 2; ++i) sum[i] += dP[i];
    });
  }

  /// Writes the thread's sums where the first tiles were.
  __device__ void leave(const Values& sum) const {
    ptx::bar_sync(walked_barrier, bias_consumer_threads);  // proves that nobody reads the tiles
#pragma unroll
    for (int i = 0; i < S.tile_m / 2; ++i) {
      *sum_of(8 * (i / 4) + place_.query() + i % 2, place_.key() + 8 * (i / 2 % 2)) = sum[i];
    }
  }

  __device__ void add_rows() const {
    if (thread() < S.tile_n) {
      float sum = 0.f;
      for (int query = 0; query < S.tile_m; ++query) sum += *sum_of(query, thread());
      *sum_of(0, thread()) = sum;
    }
    ptx::bar_sync(written_barrier, bias_consumer_threads);  // proves the first row
  }

  __device__ void add_keys() const {
    if (thread() < S.tile_m) {
      float sum = 0.f;
      for (int key = 0; key < S.tile_n; ++key) sum += *sum_of(thread(), key);
      *sum_of(thread(), 0) = sum;
    }
    ptx::bar_sync(written_barrier, bias_consumer_threads);  // proves the first column
  }

  /// Neighbours along the keys by neighbouring threads.
  __device__ void store() const {
    const long long head = own_.batch * p_.strides.batch + own_.head * p_.strides.head;
    const int first_row = own_.m * S.tile_m, key = thread() % S.tile_n;
    const int rows = min(S.tile_m, p_.rows - first_row);
    if (own_.n * S.tile_n + key >= p_.keys) return;
    for (int query = thread() / S.tile_n; query < rows; query += bias_consumer_threads / S.tile_n) {
      const float value = *sum_of(query, key);
      const long long place =
          head + (first_row + query) * p_.strides.row + (own_.n * S.tile_n + key) * p_.strides.column;
      if constexpr (S.bias_float32) {
        static_cast<float*>(p_.dbias)[place] = value;
      } else {
        static_cast<u16*>(p_.dbias)[place] = u16(ptx::cvt_rn_x2<S.dtype>(value, 0.f));
      }
    }
  }

  __device__ int thread() const { return threadIdx.x - warpgroup_threads; }
  __device__ float* sum_of(int query, int key) const {
    return reinterpret_cast<float*>(storage_.tiles) + query * Storage::pitch + key;
  }

  const BiasGradientParams& p_;
  Storage& storage_;
  Place place_;
  BiasTile own_;
};

template <BiasGradientSpec S>
__global__ void __launch_bounds__(bias_gradient_threads, 1) bias_gradient(const
                                                                          __grid_constant__ BiasGradientParams p) {
  static_assert(sizeof(BiasGradientStorage<S>) <= 227 * 1024, "tiles and stages exceed the shared memory of a CTA");
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& storage = *reinterpret_cast<BiasGradientStorage<S>*>(shared_memory);
  if (threadIdx.x == 0) {
    if (shared_address(&storage) % swizzle_atom_bytes != 0) __trap();  // the swizzle works on absolute addresses
    initialise(storage.barriers, bias_consumer_threads / 32);
    if constexpr (S.bias == Bias::tile) initialise(storage.bias_barriers.ring, bias_consumer_threads / 32);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // proves that the barriers are initialised

  if (threadIdx.x < warpgroup_threads) {
    if (threadIdx.x == 0) produce_tiles<S>(p, storage);
    if constexpr (S.bias == Bias::tile) {
      if (threadIdx.x == 32) produce_biases<S>(p, storage);
    }
  } else {
    BiasGradientConsumer<S>(p, storage).run();
  }
}

template <BiasGradientSpec S>
__constant__ KernelTraits bias_gradient_traits = {
    .threads = bias_gradient_threads,
    .shared_bytes = int(sizeof(BiasGradientStorage<S>)),
    .cluster_size = 1,
    .tile_m = S.tile_m,
    .tile_n = S.tile_n,
    .box_cols = panel_cols,
};

}  // namespace cupyfa::hopper
