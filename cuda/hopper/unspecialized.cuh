// The forward kernel without warp specialization, to measure what that is worth. Products, softmax, rings and barriers
// are those of the roles, but there is no producer and no storer: all warps compute, and the CTA's first thread also copies.
//
// Schedule of a CTA, which has one tile, for rings of two slots; j runs from the last key block n to the first:
//
//   first thread  Q K[n] V[n] K[n-1] V[n-1]         | K[n-2]               |        | K[n-3] V[n-2]          | ... | O
//   a warpgroup   S[n] softmax[n]           | issue |        softmax[n-1]  | P[n-1] | issue |       softmax[n-2] ...
//     its WGMMA                                     | S[n-1] | O += P[n] V[n]       |       | S[n-2] | ...
//
// A copy goes over what the round before has read, once the products of this round are issued: while its thread waits until
// all warps are done with the slot, the tensor cores have work. So a ring needs two slots.
#pragma once
#include "hopper/consumer.cuh"
#include "hopper/producer.cuh"
#include "hopper/storer.cuh"

namespace cupyfa::hopper {

template <FwdSpec S>
class Unspecialized {
 public:
  __device__ Unspecialized(const FwdParams& p, Storage<S>& storage)
      : p_(p), storage_(storage), place_(Place<S>::of_thread()),
        works_(storage.qo, storage.work_barriers, storage.tiles), K_(storage.k, storage.k_barriers),
        V_(storage.v, storage.v_barriers) {}

  __device__ void run() {
    Scores scores;
    Output O;
    Probabilities one, two;  // of this block and of the next, in turn, as in Consumer::overlapped

    if (copies()) load_first();
    const Work work = works_.next();
    const int m = int(__reduce_or_sync(0xffffffff, u32(works_.tile(work).m)));  // in a uniform register
    const SharedAddress q = place_.rows_of(works_.data(work));
    const Sequence<S> sequence(p_, works_.tile(work));
    const BlockRange blocks = place_.blocks_of(sequence, m);
    const Mask<S> mask = place_.mask_of(sequence, m);
    auto softmax = make_softmax<S>(p_);

    int j = blocks.end - 1;
    Slot k = K_.wait();
    issue_scores<S>(scores, q, k.data);
    complete<0>(scores);  // proves S of the last block, and that Q K' no longer reads K
    release(k);
    if (j > 0) k = K_.wait();  // of the first round below
    mask.apply(scores, j, blocks);
    if constexpr (S.speculative) {
      softmax.correct(one, scores);
    } else {
      RowPair unused;
      softmax.update(scores, unused);
      round_from<S>(one, scores);
    }
    clear(O);

    const auto round = [&](const Probabilities& P, Probabilities& P_next) {
      --j;
      // Before the scores, though only O needs it: between the products, the branch below would cost its descriptors the
      // uniform registers (tests/test_compiler.py looks at them). V was copied right behind this K.
      const Slot v = V_.wait();
      issue_scores<S>(scores, q, k.data);  // S_j = Q K_j'
      issue_output<S>(O, P, v.data);  // O += P_{j+1} V_{j+1}
      if (copies()) load_next(work, blocks.end - 1, j);
      complete<1>(scores);  // proves S_j, and that Q K' no longer reads K; O is still in flight
      release(k);
      // From here to the next wait everything runs under the O product.
      mask.apply(scores, j, blocks);
      bool same_frame;  // of O
      RowPair shrink;
      if constexpr (S.speculative) {
        same_frame = softmax.speculate(P_next, scores);
        if (!same_frame) shrink = softmax.correct(P_next, scores);
      } else {
        same_frame = softmax.update(scores, shrink);  // scores become exp2(scale * (S_j - maximum))
      }
      if (j > 0) k = K_.wait();  // here, where it ends the basic block of the exponentials, as in Consumer::overlapped
      complete<0>(O);  // proves O, and that P V no longer reads P and V
      release(v);
      if (!same_frame) scale_rows(O, shrink);
      if constexpr (!S.speculative) round_from<S>(P_next, scores);
    };

    const auto last = [&](const Probabilities& P) {
      issue_output<S>(O, P, V_.wait().data);
      complete<0>(O);  // proves the last O; nobody waits for this slot
      finish(O, softmax, work);
    };

    if constexpr (S.speculative) {
      while (j >= 2) {  // two rounds, so that none copies P
        round(one, two);
        round(two, one);
      }
      if (j == 1) {
        round(one, two);
        last(two);
        return;
      }
    } else {
      while (j >= 1) round(one, one);
    }
    last(one);
  }

 private:
  using Scores = float[S.tile_n / 2];
  using Probabilities = u32[S.tile_n / 4];
  using Output = float[S.head_dim_v / 2];
  using Softmax = decltype(make_softmax<S>(FwdParams()));

  /// Whether this is the thread that copies.
  __device__ static bool copies() { return threadIdx.x == 0; }

  /// Q, and the blocks that the rings have slots for.
  __device__ void load_first() const {
    const Tile tile = TileScheduler<S>(p_).tile();  // every CTA has one
    const int row = tile.m * S.tile_m;
    const int last = BlockRange::of<S>(Sequence<S>(p_, tile), row, row + S.tile_m).end - 1;
    typename Storage<S>::WorkProducer works(storage_.qo, storage_.work_barriers, storage_.tiles);
    load<S, S.head_dim, S.tile_m>(p_.q, works.post(tile, Storage<S>::q_bytes), Rows::of_q<S>(tile));
    for (int j = last; j >= 0 && j > last - S.stages; --j) {
      load_k(tile, last, j);
      load_v(tile, last, j);
    }
  }

  /// In the round of block j: over K_{j+1} and V_{j+2}, the last ones that the round before has read.
  __device__ void load_next(const Work& work, int last, int j) const {
    const Tile tile = works_.tile(work);
    if (j + 1 >= S.stages) load_k(tile, last, j + 1 - S.stages);
    if (j + 2 <= last && j + 2 >= S.stages) load_v(tile, last, j + 2 - S.stages);
  }

  // A walk of one step: what it would keep from block to block is computed, because registers are scarce.
  __device__ void load_k(const Tile& tile, int last, int block) const {
    typename Storage<S>::KProducer K(storage_.k, storage_.k_barriers, last - block);
    load<S, S.head_dim, S.tile_n>(p_.k, K.acquire(), {block * S.tile_n, tile.head_kv, tile.batch});
  }
  __device__ void load_v(const Tile& tile, int last, int block) const {
    typename Storage<S>::VProducer V(storage_.v, storage_.v_barriers, last - block);
    load<S, S.head_dim_v, S.tile_n>(p_.v, V.acquire(), {block * S.tile_n, tile.head_kv, tile.batch});
  }

  __device__ void finish(Output& O, const Softmax& softmax, const Work& work) const {
    RowPair lse;
    const Tile tile = works_.tile(work);
    const RowPair inverse = close_rows<S>(p_, tile, softmax, lse);
    store_lse<S>(p_, tile, place_, lse);
    clear_rows_without_keys<S>(O, inverse);
    hand_over<S>(O, inverse, place_, works_.data(work), works_.staged(work));
    if (!copies()) return;
    wait_parity(works_.staged(work), work.parity);  // proves that all rows of O are staged, and visible to TMA
    issue_store<S>(p_, tile, works_.data(work));
    ptx::cp_async_bulk_wait_group_read<0>();  // proves that O has been read: the CTA may give its shared memory back
  }

  /// Each warp answers for itself, as in Consumer.
  __device__ void release(const Slot& slot) const {
    if (place_.lane() == 0) cupyfa::release(slot);
  }

  const FwdParams& p_;
  Storage<S>& storage_;
  Place<S> place_;
  typename Storage<S>::WorkConsumer works_;
  typename Storage<S>::KConsumer K_;
  typename Storage<S>::VConsumer V_;
};

}  // namespace cupyfa::hopper
