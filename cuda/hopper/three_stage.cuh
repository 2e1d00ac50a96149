// A consumer's walk with three key blocks under way (arXiv 2407.08608, appendix B.3, algorithm 3), beside the two of
// Consumer::overlapped. For comparisons: it needs a second S, and what that costs is in docs/notes/hopper_forward.md.
#pragma once
#include "hopper/consumer.cuh"

namespace cupyfa::hopper {

/// Exact softmax, one tile at a time. While the softmax of block j - 1 runs, S_{j-2} and O += P_j V_j are in flight, so O,
/// two S and P live at the same time. The next K is waited for under the products: K and V need two slots each.
template <FwdSpec S>
__device__ void Consumer<S>::three_stage() {
  while (true) {
    const Work work = works_.next();
    const int m = row_tile(work);
    if (m < 0) return;
    const Sequence<S> sequence = sequence_of(work);
    const BlockRange blocks = place_.blocks_of(sequence, m);
    const Mask<S> mask = place_.mask_of(sequence, m);
    auto softmax = make_softmax<S>(p_);
    Scores one, two;  // of the next block and of the one after it, in turn: a copy would have to wait for the product
    Probabilities P;
    Output O;
    clear(O);

    // The first two scores wait for themselves.
    int j = blocks.end - 1;
    Slot k = K_.wait();
    issue_scores<S>(one, rows_of(work), k.data);
    complete<0>(one);  // proves S of the last block
    release(k);
    mask.apply(one, j, blocks);
    RowPair shrink;
    softmax.update(one, shrink);  // nothing was accumulated before: there is no O to scale
    round_from<S>(P, one);
    if (j > 0) {
      k = K_.wait();
      issue_scores<S>(two, rows_of(work), k.data);
      complete<0>(two);  // proves S of the block before it
      release(k);
      if (j > 1) k = K_.wait();  // of the first round below
    }

    // From P_j and S_{j-1} to P_{j-1} and S_{j-2}.
    const auto round = [&](Scores& scores, Scores& scores_next) {
      issue_scores<S>(scores_next, rows_of(work), k.data);  // S_{j-2} = Q K_{j-2}'
      const Slot v = V_.wait();
      issue_output<S>(O, P, v.data);  // O += P_j V_j
      --j;
      // From here to the next wait everything runs under both products.
      mask.apply(scores, j, blocks);
      const bool same_frame = softmax.update(scores, shrink);
      const Slot k_read = k;
      if (j > 1) k = K_.wait();  // ends the basic block: see Consumer::overlapped
      // One wait for both products: K released behind the first would cost registers (from 96 keys on ptxas: C7512).
      complete<0>(O);  // proves O and S_{j-2}, and that their products no longer read K, V and P
      ptx::pin_registers(scores_next);
      release(k_read);
      release(v);
      if (!same_frame) scale_rows(O, shrink);
      round_from<S>(P, scores);
    };

    // The last softmax has the product of the block before it, and no scores.
    const auto drain = [&](Scores& scores) {
      Slot v = V_.wait();
      issue_output<S>(O, P, v.data);
      mask.apply(scores, 0, blocks);
      const bool same_frame = softmax.update(scores, shrink);
      const Slot v_read = v;
      v = V_.wait();  // ends the basic block
      complete<0>(O);
      release(v_read);
      if (!same_frame) scale_rows(O, shrink);
      round_from<S>(P, scores);
      return v;
    };

    Slot v;
    while (true) {
      if (j == 0) {
        v = V_.wait();
        break;
      }
      if (j == 1) {
        v = drain(two);
        break;
      }
      round(two, one);
      if (j == 1) {
        v = drain(one);
        break;
      }
      round(one, two);
    }
    issue_output<S>(O, P, v.data);
    complete<0>(O);  // proves the last O
    release(v);
    finish(O, softmax, work);
  }
}

}  // namespace cupyfa::hopper
