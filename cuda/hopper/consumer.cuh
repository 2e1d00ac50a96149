// The consumer role: a warpgroup computes 64 query rows of each tile. Its inner loop is the algorithm of the paper
// (arXiv 2407.08608, algorithm 2), and its twin is cupyfa/oracles/online.py.
#pragma once
#include "hopper/epilogue.cuh"
#include "hopper/gemm.cuh"
#include "hopper/place.cuh"
#include "mask.cuh"
#include "softmax.cuh"
#include "speculative_softmax.cuh"

namespace cupyfa::hopper {

/// The pingpong token (specification 0x04): one consumer warpgroup at a time may issue to the tensor cores, so that the
/// softmax of one runs under the products of the other. It orders issue only; no data goes with it.
template <FwdSpec S>
class Turn {
 public:
  __device__ explicit Turn(int warpgroup) : own_(turn_barrier + warpgroup) {
    const bool last = warpgroup == S.consumers() - 1;
    next_ = last ? turn_barrier : own_ + 1;
    // The first warpgroup has no predecessor in the first round: the last one gives its credit.
    if (S.pingpong && last) ptx::bar_arrive(next_, participants);
  }
  __device__ void wait() const {
    if constexpr (S.pingpong) ptx::bar_sync(own_, participants);
  }
  /// After the last round the credit is back at the first warpgroup. It is taken, so that no arrival stays at exit.
  __device__ void finish() const {
    if (own_ == turn_barrier) wait();
  }
  __device__ void pass() const {
    if constexpr (S.pingpong) ptx::bar_arrive(next_, participants);
  }

 private:
  static constexpr int participants = 2 * warpgroup_threads;  // the warpgroup that waits and its predecessor
  int own_, next_;
};

template <int count>
__device__ inline void scale_rows(float (&O)[count], const RowPair& factor) {
#pragma unroll
  for (int i = 0; i < count; ++i) O[i] *= factor.row[i / 2 % 2];
}

template <FwdSpec S>
__device__ inline void round_from(u32 (&P)[S.tile_n / 4], const float (&scores)[S.tile_n / 2]) {
#pragma unroll
  for (int i = 0; i < S.tile_n / 4; ++i) P[i] = ptx::cvt_rn_x2<S.dtype>(scores[2 * i], scores[2 * i + 1]);
}

template <FwdSpec S>
__device__ inline auto make_softmax(float scale_log2) {
  if constexpr (S.speculative) {
    return SpeculativeSoftmax<S.dtype>(scale_log2);
  } else {
    return OnlineSoftmax(scale_log2);
  }
}

/// The walk over the key blocks of one tile, from the last one (the diagonal) to the first.
template <FwdSpec S>
class Mainloop {
 public:
  using Softmax = decltype(make_softmax<S>(0.f));

  __device__ Mainloop(Storage<S>& storage, const Place<S>& place)
      : K_(storage.k, storage.k_barriers), V_(storage.v, storage.v_barriers), turn_(place.warpgroup), place_(place) {}

  /// Leaves the unnormalised output in O; `blocks` is not empty.
  __device__ void run(float (&O)[S.head_dim / 2], Softmax& softmax, const Mask<S>& mask, BlockRange blocks,
                      const Slot& q) {
    const SharedAddress q_rows = place_.rows_of(q.data);
    if constexpr (S.overlap) {
      overlapped(O, softmax, mask, blocks, q_rows);
    } else {
      without_overlap(O, softmax, mask, blocks, q_rows);
    }
  }

  /// After the last tile.
  __device__ void finish() const { turn_.finish(); }

 private:
  using Scores = float[S.tile_n / 2];
  using Probabilities = u32[S.tile_n / 4];
  using Output = float[S.head_dim / 2];

  __device__ void overlapped(Output& O, Softmax& softmax, const Mask<S>& mask, BlockRange blocks, SharedAddress q) {
    Scores scores;
    // P of this block and of the next, in turn. Only a speculative softmax has the next one while this one is still
    // being multiplied; the other rounds it afterwards, into the same registers.
    Probabilities one, two;

    Slot k = K_.wait();
    issue_scores<S>(scores, q, k.data);
    complete<0>(scores);  // proves S of the last block
    release(k);
    if (blocks.end > 1) k = K_.wait();  // of the first round below
    if (blocks.end > blocks.full) mask.apply(scores, blocks.end - 1);
    // Nothing was accumulated before: there is no O to scale.
    if constexpr (S.speculative) {
      softmax.correct(one, scores);
    } else {
      softmax.update(scores);
      round_from<S>(one, scores);
    }

    const auto round = [&](int j, const Probabilities& P, Probabilities& next) {
      turn_.wait();
      issue_scores<S>(scores, q, k.data);  // S_j = Q K_j'
      const Slot v = V_.wait();
      issue_output<S>(O, P, v.data);  // O += P_{j+1} V_{j+1}
      turn_.pass();
      complete<1>(scores);  // proves S_j, and that Q K' no longer reads K; O is still in flight
      release(k);
      // From here to the next wait everything runs under the O product.
      if (j >= blocks.full) mask.apply(scores, j);
      bool in_range = false;
      RowPair shrink;
      if constexpr (S.speculative) {
        in_range = softmax.speculate(next, scores);
        if (!in_range) shrink = softmax.correct(next, scores);
      } else {
        shrink = softmax.update(scores);  // scores become exp2(scale * (S_j - maximum))
      }
      // Here, because ptxas moves exponentials below a WGMMA wait of the same basic block: they would run after O
      // instead of under it. This wait ends the block.
      if (j > 0) k = K_.wait();
      complete<0>(O);  // proves O, and that P V no longer reads P and V
      release(v);
      if (!in_range) scale_rows(O, shrink);
      if constexpr (!S.speculative) round_from<S>(next, scores);
    };
    const auto last = [&](const Probabilities& P) {
      const Slot v = V_.wait();
      issue_output<S>(O, P, v.data);
      complete<0>(O);  // proves the last O
      release(v);
    };

    int j = blocks.end - 2;
    if constexpr (S.speculative) {
      // Two rounds, so that none copies P: a copy would have to wait for the product (ptxas: C7513).
      for (; j >= 1; j -= 2) {
        round(j, one, two);
        round(j - 1, two, one);
      }
      if (j == 0) {
        round(0, one, two);
        last(two);
        return;
      }
    } else {
      for (; j >= 0; --j) round(j, one, one);
    }
    last(one);
  }

  __device__ void without_overlap(Output& O, Softmax& softmax, const Mask<S>& mask, BlockRange blocks,
                                  SharedAddress q) {
    turn_.wait();
    for (int j = blocks.end - 1; j >= 0; --j) {
      Scores scores;
      Probabilities P;
      const Slot k = K_.wait();
      issue_scores<S>(scores, q, k.data);
      turn_.pass();
      complete<0>(scores);  // proves S_j
      release(k);
      if (j >= blocks.full) mask.apply(scores, j);
      scale_rows(O, softmax.update(scores));
      round_from<S>(P, scores);
      turn_.wait();
      const Slot v = V_.wait();
      issue_output<S>(O, P, v.data);
      complete<0>(O);  // proves O
      release(v);
    }
    turn_.pass();
  }

  /// Each warp answers for itself: its wait covers its own part of the WGMMA that read the slot.
  __device__ void release(const Slot& slot) const {
    if (place_.lane == 0) Storage<S>::KVConsumer::release(slot);
  }

  typename Storage<S>::KVConsumer K_, V_;
  Turn<S> turn_;
  Place<S> place_;
};

template <FwdSpec S>
__device__ void consume(const FwdParams& p, Storage<S>& storage) {
  const Place<S> place = Place<S>::of_thread();
  typename Storage<S>::QConsumer Q(storage.q, storage.q_barriers);
  Mainloop<S> mainloop(storage, place);

  for (TileScheduler<S> tiles(p); tiles.valid(); tiles.next()) {
    const Tile tile = tiles.tile();
    const int row = tile.m * S.tile_m;
    const int first = row + warpgroup_rows * place.warpgroup;
    // All warpgroups walk the blocks of the whole tile, so that they take equal turns; each masks for its own rows, and
    // one above the diagonal may mask a whole block.
    const BlockRange blocks = {BlockRange::of<S>(p, first, first + warpgroup_rows).full,
                               BlockRange::of<S>(p, row, row + S.tile_m).end};
    const Mask<S> mask(p, row + place.row, 2 * (place.lane % 4));
    auto softmax = make_softmax<S>(p.scale_log2);
    float O[S.head_dim / 2] = {};

    const Slot q = Q.wait();
    if (blocks.end > 0) mainloop.run(O, softmax, mask, blocks, q);
    RowPair lse;
    const RowPair inverse = softmax.finish(lse);
    store_lse<S>(p, tile, place, lse);
    store_output<S>(p, O, inverse, tile, place, q);
  }
  mainloop.finish();
}

}  // namespace cupyfa::hopper
