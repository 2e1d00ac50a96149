// The consumer role: a warpgroup computes 64 query rows of each tile. Its inner loop is the algorithm of the paper
// (arXiv 2407.08608, algorithm 2), and its twin is cupyfa/oracles/online.py.
#pragma once
#include "hopper/bias.cuh"
#include "hopper/epilogue.cuh"
#include "hopper/gemm.cuh"
#include "hopper/place.cuh"
#include "mask.cuh"
#include "score_mod.cuh"
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
__device__ inline void clear(float (&O)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) O[i] = 0.f;
}

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

/// What ScoreMod leaves for the softmax.
template <FwdSpec S>
__device__ inline auto make_logits(const FwdParams& p) {
  if constexpr (S.bias != Bias::none) {
    return NaturalLogits();
  } else {
    return ScaledScores(S.alibi ? 1.f : p.scale_log2);
  }
}

template <FwdSpec S>
__device__ inline auto make_softmax(const FwdParams& p) {
  const auto logits = make_logits<S>(p);
  using Logits = decltype(make_logits<S>(p));
  if constexpr (S.speculative) {
    return SpeculativeSoftmax<Logits, S.dtype, S.exp2_fma>(logits);
  } else {
    return OnlineSoftmax<Logits, S.rescale_threshold>(logits);
  }
}

/// A consumer warpgroup: how it walks the key blocks of its tiles. All that it keeps between steps is in registers.
template <FwdSpec S>
class Consumer {
 public:
  __device__ Consumer(const FwdParams& p, Storage<S>& storage)
      : p_(p), place_(Place<S>::of_thread()), works_(storage.qo, storage.work_barriers, storage.tiles),
        K_(storage.k, storage.k_barriers), V_(storage.v, storage.v_barriers), bias_(p, storage, place_),
        turn_(place_.warpgroup) {}

  __device__ void run() {
    if constexpr (S.three_stage) {
      three_stage();
    } else if constexpr (S.overlap) {
      overlapped();
    } else {
      without_overlap();
    }
    turn_.finish();
  }

 private:
  using Scores = float[S.tile_n / 2];
  using Probabilities = u32[S.tile_n / 4];
  using Output = float[S.head_dim_v / 2];
  using Softmax = decltype(make_softmax<S>(FwdParams()));

  __device__ void overlapped() {
    Scores scores;
    Output O;
    // P of this block and of the next, in turn. Only a speculative softmax has the next one while this one is still
    // being multiplied; the other rounds it afterwards, into the same registers.
    Probabilities one, two;

    Work work = works_.next();
    int m = row_tile(work);
    if (S.varlen && m < 0) return;  // else every CTA has a tile
    Slot k = K_.wait();
    issue_scores<S>(scores, rows_of(work), k.data);
    complete<0>(scores);
    while (true) {
      // S of the tile's last block is complete. (Behind each of the waits above, where it is another branch, this release
      // costs the loop its uniform registers: tests/test_compiler.py looks at them.)
      release(k);
      const Sequence<S> sequence = sequence_of(work);
      const BlockRange blocks = place_.blocks_of(sequence, m);
      const Mask<S> mask = place_.mask_of(sequence, m);
      const ScoreMod<S> score_mod = place_.score_mod_of(p_, works_.tile(work));
      auto softmax = make_softmax<S>(p_);

      int j = blocks.end - 1;
      if (j > blocks.begin) k = K_.wait();  // of the first round below
      bias_.begin(works_.tile(work));
      if constexpr (S.modifies_scores()) score_mod.apply(scores, j, bias_.fetch(j));
      mask.apply(scores, j, blocks);
      // Nothing was accumulated before: there is no O to scale.
      if constexpr (S.speculative) {
        softmax.correct(one, scores);
      } else {
        RowPair unused;
        softmax.update(scores, unused);
        round_from<S>(one, scores);
      }
      bias_.done();
      clear(O);

      const auto round = [&](const Probabilities& P, Probabilities& P_next) {
        --j;
        // Into the registers that P_next will have. Loads wait behind the products that are issued before them: the many
        // of float32 come first. For the few of 16 bits, that would only make the products wait for the bias.
        BiasFragment<S> bias;
        if constexpr (BiasBox<S>::copied && S.bias_float32) bias = bias_.fetch(j);
        turn_.wait();
        issue_scores<S>(scores, rows_of(work), k.data);  // S_j = Q K_j'
        const Slot v = V_.wait();
        issue_output<S>(O, P, v.data);  // O += P_{j+1} V_{j+1}
        turn_.pass();
        if constexpr (!BiasBox<S>::copied || !S.bias_float32) bias = bias_.fetch(j);
        complete<1>(scores);  // proves S_j, and that Q K' no longer reads K; O is still in flight
        release(k);
        // From here to the next wait everything runs under the O product.
        if constexpr (S.modifies_scores()) score_mod.apply(scores, j, bias);
        mask.apply(scores, j, blocks);
        bool same_frame;  // of O
        RowPair shrink;
        if constexpr (S.speculative) {
          same_frame = softmax.speculate(P_next, scores);
          if (!same_frame) shrink = softmax.correct(P_next, scores);
        } else {
          same_frame = softmax.update(scores, shrink);  // scores become exp2(scale * (S_j - maximum))
        }
        bias_.done();
        // Here, because ptxas moves exponentials below a WGMMA wait of the same basic block: they would run after O
        // instead of under it. This wait ends the block.
        if (j > blocks.begin) k = K_.wait();
        complete<0>(O);  // proves O, and that P V no longer reads P and V
        release(v);
        if (!same_frame) scale_rows(O, shrink);
        if constexpr (!S.speculative) round_from<S>(P_next, scores);
      };

      // The last product, and with it the first scores of the next tile. False: there is none.
      const auto last = [&](const Probabilities& P) {
        const Slot v = V_.wait();
        if constexpr (S.q_stages > 1) {
          const Work next = works_.next();
          m = row_tile(next);
          if (m >= 0) {
            k = K_.wait();
            issue_output<S>(O, P, v.data);
            issue_scores<S>(scores, rows_of(next), k.data);
            complete<1>(O);  // proves the last O, and that Q is no longer read; the next S is in flight
            release(v);
            finish(O, softmax, work);
            complete<0>(scores);  // proves S of the last block
            work = next;
            return true;
          }
        }
        issue_output<S>(O, P, v.data);
        complete<0>(O);  // proves the last O
        release(v);
        finish(O, softmax, work);
        if constexpr (S.q_stages > 1) return false;
        work = works_.next();  // in the one slot, once O has left it
        m = row_tile(work);
        if (m < 0) return false;
        k = K_.wait();
        issue_scores<S>(scores, rows_of(work), k.data);
        complete<0>(scores);  // proves S of the last block
        return true;
      };

      if constexpr (S.speculative) {
        // Two rounds, so that none copies P: a copy would have to wait for the product (ptxas: C7513).
        while (j >= blocks.begin + 2) {
          round(one, two);
          round(two, one);
        }
        if (j == blocks.begin + 1) {
          round(one, two);
          if (last(two)) continue;
          return;
        }
      } else {
        while (j > blocks.begin) round(one, one);
      }
      if (!last(one)) return;
    }
  }

  __device__ void without_overlap() {
    while (true) {
      const Work work = works_.next();
      const int m = row_tile(work);
      if (m < 0) return;
      const Sequence<S> sequence = sequence_of(work);
      const BlockRange blocks = place_.blocks_of(sequence, m);
      const Mask<S> mask = place_.mask_of(sequence, m);
      const ScoreMod<S> score_mod = place_.score_mod_of(p_, works_.tile(work));
      auto softmax = make_softmax<S>(p_);
      Output O;
      clear(O);
      bias_.begin(works_.tile(work));
      turn_.wait();
      for (int j = blocks.end - 1; j >= blocks.begin; --j) {
        Scores scores;
        Probabilities P;
        const Slot k = K_.wait();
        issue_scores<S>(scores, rows_of(work), k.data);
        turn_.pass();
        const BiasFragment<S> bias = bias_.fetch(j);
        complete<0>(scores);  // proves S_j
        release(k);
        if constexpr (S.modifies_scores()) score_mod.apply(scores, j, bias);
        mask.apply(scores, j, blocks);
        RowPair shrink;
        if (!softmax.update(scores, shrink)) scale_rows(O, shrink);
        bias_.done();
        round_from<S>(P, scores);
        turn_.wait();
        const Slot v = V_.wait();
        issue_output<S>(O, P, v.data);
        complete<0>(O);  // proves O
        release(v);
      }
      turn_.pass();
      finish(O, softmax, work);
    }
  }

  __device__ void three_stage();  // three_stage.cuh

  /// The tile's row in the grid of tiles, -1 where there is no tile. As a reduction it is in a uniform register, and three
  /// warpgroups do not spill.
  __device__ int row_tile(const Work& work) const {
    return int(__reduce_or_sync(0xffffffff, u32(works_.tile(work).m)));
  }

  /// Its lengths in uniform registers, as the loop over its blocks needs them.
  __device__ Sequence<S> sequence_of(const Work& work) const {
    TileOf<S> tile;
    if constexpr (S.varlen) {
      tile = works_.tile(work);
      tile.seqlen_q = int(__reduce_or_sync(0xffffffff, u32(tile.seqlen_q)));
      tile.seqlen_k = int(__reduce_or_sync(0xffffffff, u32(tile.seqlen_k)));
    }
    return {p_, tile};
  }

  __device__ SharedAddress rows_of(const Work& work) const { return place_.rows_of(works_.data(work)); }

  __device__ void finish(Output& O, const Softmax& softmax, const Work& work) const {
    RowPair lse;
    const RowPair inverse = close_rows<S>(p_, works_.tile(work), softmax, lse);
    store_lse<S>(p_, works_.tile(work), place_, lse);
    clear_rows_without_keys<S>(O, inverse);
    hand_over<S>(O, inverse, place_, works_.data(work), works_.staged(work));
  }

  /// Each warp answers for itself: its wait covers its own part of the WGMMA that read the slot.
  __device__ void release(const Slot& slot) const {
    if (place_.lane() == 0) cupyfa::release(slot);
  }

  const FwdParams& p_;
  Place<S> place_;
  typename Storage<S>::WorkConsumer works_;
  typename Storage<S>::KConsumer K_;
  typename Storage<S>::VConsumer V_;
  BiasReader<S> bias_;
  Turn<S> turn_;
};

}  // namespace cupyfa::hopper
