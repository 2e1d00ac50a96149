// The consumer role: a warpgroup computes 64 rows of the tile. Where registers allow, the softmax of a block runs under the
// products of its neighbours. Elsewhere another warpgroup or CTA computes meanwhile.
#pragma once
#include "hopper/consumer.cuh"
#include "hopper/decode/queries.cuh"
#include "hopper/decode/share.cuh"
#include "hopper/decode/storage.cuh"
#include "hopper/gemm.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"

namespace cupyfa::hopper::decode {

/// A walk over every block of a ring, of which a key group waits for its own. These are always in the same slots: in a slot
/// of both groups, one could take the landing before last for that of its block, as it does not wait for the last one.
template <int stages, int slot_bytes>
class GroupRingConsumer : RingWalk<stages, slot_bytes> {
 public:
  __device__ GroupRingConsumer(const void* data, const RingBarriers<stages>& barriers, u32 first)
      : RingWalk<stages, slot_bytes>(data, barriers, 0, first) {}

  __device__ Slot wait(int key_groups) {
    const Slot slot = this->slot();
    wait_parity(slot.full, this->parity_);  // proves that the block has landed
    for (int i = 0; i < key_groups; ++i) this->advance();
    return slot;
  }
};

template <DecodeSpec S>
class Consumer {
 public:
  __device__ Consumer(const DecodeParams& p, Storage<S>& storage, const Share<S>& share)
      : p_(p), storage_(storage), share_(share),
        // Read from lane 0, the warpgroup is known to be uniform.
        warpgroup_(__shfl_sync(0xffffffff, threadIdx.x / warpgroup_threads, 0)),
        K_(storage.rings.k, storage.k_barriers, key_group()), V_(storage.rings.v, storage.v_barriers, key_group()) {}

  __device__ void run() {
    const SharedAddress tile = shared_address(storage_.rings.q);
    load_queries<S>(p_, share_, tile);
    ptx::fence_proxy_async_shared_cta();
    ptx::bar_sync(consumers_barrier, S.consumer_threads());  // proves Q

    const SharedAddress q = in_own_cta(tile + panel_bytes(warpgroup_rows * row_group()));
    const Limits limits = limits_of_rows();
    const Mask<T> mask(limits.begin, limits.end, column());
    Softmax softmax(ScaledScores(S.alibi ? 1.f : p_.scale_log2));
    Output O;
    clear(O);
    if constexpr (S.overlaps()) {
      overlapped(q, mask, softmax, O);
    } else {
      without_overlap(q, mask, softmax, O);
    }
    RowPair lse;
    const RowPair inverse = softmax.finish(lse);
    clear_rows_without_keys<T>(O, inverse);
    if (p_.partial_out == nullptr) {
      leave_part(O, inverse, lse);
    } else {
      store_part(O, inverse, lse);
    }
  }

 private:
  static constexpr FwdSpec T = S.tile();
  using Scores = float[S.tile_n / 2];
  using Probabilities = u32[S.tile_n / 4];
  using Output = float[S.head_dim_v / 2];
  using Softmax = OnlineSoftmax<ScaledScores, 0>;

  __device__ void without_overlap(SharedAddress q, const Mask<T>& mask, Softmax& softmax, Output& O) {
    for (int j = first_block(); j < share_.blocks.end; j += S.key_groups) {
      Scores scores;
      Probabilities P;
      const Slot k = K_.wait(S.key_groups);
      issue_scores<T>(scores, q, in_own_cta(k.data));
      complete<0>(scores);  // proves S_j
      release(k);
      scale_rows(O, weigh(scores, j, mask, softmax));
      round_from<T>(P, scores);
      const Slot v = wait_for_values(j);
      issue_output<T>(O, P, in_own_cta(v.data));
      complete<0>(O);  // proves O
      release(v);
    }
  }

  __device__ void overlapped(SharedAddress q, const Mask<T>& mask, Softmax& softmax, Output& O) {
    const int end = share_.blocks.end;
    int j = first_block();
    if (j >= end) return;
    Scores scores;
    Probabilities P;
    Slot k = K_.wait(S.key_groups);
    issue_scores<T>(scores, q, in_own_cta(k.data));
    complete<0>(scores);  // proves S of the first block
    release(k);
    weigh(scores, j, mask, softmax);  // nothing was accumulated before: there is no O to scale
    round_from<T>(P, scores);
    if (j + S.key_groups < end) k = K_.wait(S.key_groups);
    while (j + S.key_groups < end) {
      const Slot v = wait_for_values(j);
      issue_scores<T>(scores, q, in_own_cta(k.data));  // S_{j+1} = Q K_{j+1}'
      issue_output<T>(O, P, in_own_cta(v.data));  // O += P_j V_j
      complete<1>(scores);  // proves S_{j+1}; O is still in flight
      release(k);
      j += S.key_groups;
      const RowPair shrink = weigh(scores, j, mask, softmax);
      // Here, because ptxas moves exponentials below a WGMMA wait of the same basic block (hopper/consumer.cuh).
      if (j + S.key_groups < end) k = K_.wait(S.key_groups);
      complete<0>(O);  // proves O
      release(v);
      scale_rows(O, shrink);
      round_from<T>(P, scores);
    }
    const Slot v = wait_for_values(j);
    issue_output<T>(O, P, in_own_cta(v.data));
    complete<0>(O);  // proves the last O
    release(v);
  }

  /// Turns the scores of a block into weights. Returns what brings O into their frame.
  __device__ RowPair weigh(Scores& scores, int block, const Mask<T>& mask, Softmax& softmax) const {
    if constexpr (S.softcap || S.alibi) modify(scores, block);
    mask.apply(scores, block, share_.blocks);
    RowPair shrink;
    softmax.update(scores, shrink);
    return shrink;
  }

  /// The values of a block, and zeros behind the last one.
  __device__ Slot wait_for_values(int block) {
    const Slot v = V_.wait(S.key_groups);
    if ((block + 1) * S.tile_n > share_.seqlen_k) clear_tail(v, share_.seqlen_k - block * S.tile_n);
    return v;
  }

  struct Limits {
    int begin[2], end[2];
  };

  __device__ int row_group() const { return warpgroup_ % S.row_groups(); }
  __device__ int key_group() const { return warpgroup_ / S.row_groups(); }
  __device__ int first_block() const { return share_.blocks.begin + key_group(); }
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ int column() const { return 2 * (lane() % 4); }
  /// Rows of the tile: this thread's first one, and the other one eight further on.
  __device__ int row(int r) const {
    return warpgroup_rows * row_group() + 16 * (threadIdx.x / 32 % 4) + lane() / 4 + 8 * r;
  }
  __device__ Row row_of_head(int r) const {
    return share_.row(share_.first_row + min(row(r), share_.rows - 1));  // of the last one, if there is none
  }

  __device__ Limits limits_of_rows() const {
    Limits limits;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row_of_head(r).query;
      limits.begin[r] = share_.first_key(query);
      limits.end[r] = share_.visible_keys(query);
    }
    return limits;
  }

  /// As ScoreMod, but the rows of a thread may be of two heads.
  __device__ void modify(Scores& scores, int block) const {
    float slope[2], distance[2];
    if constexpr (S.alibi) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Row at = row_of_head(r);
        slope[r] = -p_.alibi_slopes[share_.sequence * p_.alibi_stride_batch + at.head * p_.alibi_stride_head];
        slope[r] = __fmul_rn(slope[r], log2_e);
        distance[r] = float(block * S.tile_n + column() - share_.diagonal(at.query));
      }
    }
#pragma unroll
    for (int i = 0; i < S.tile_n / 2; ++i) {
      if constexpr (S.softcap) scores[i] = capped(scores[i], p_.softcap_slope);
      if constexpr (S.alibi) {
        const int r = i / 2 % 2;
        scores[i] = fmaf(slope[r], fabsf(distance[r] + (8 * (i / 4) + i % 2)), __fmul_rn(scores[i], p_.scale_log2));
      }
    }
  }

  /// Zeros for the rows of V behind the last key: whatever is there, 0 * NaN would reach the output.
  __device__ void clear_tail(const Slot& v, int keys) const {
    constexpr int row_chunks = panel_row_bytes / 16;
    if (row_group() == 0) {
      const u32 zeros[4] = {};
      const int chunks = (S.tile_n - keys) * row_chunks;
      for (int i = threadIdx.x % warpgroup_threads; i < chunks; i += warpgroup_threads) {
        const SharedAddress at = v.data + (keys + i / row_chunks) * panel_row_bytes + i % row_chunks * 16;
#pragma unroll
        for (int panel = 0; panel < panels(S.head_dim_v); ++panel) {
          ptx::st_shared_v4(at + panel * panel_bytes(S.tile_n), zeros);
        }
      }
      ptx::fence_proxy_async_shared_cta();
    }
    ptx::bar_sync(tail_barrier + key_group(), warpgroup_threads * S.row_groups());  // proves the zeros
  }

  /// With a softcap, logits have been too small by it.
  __device__ float shift() const { return S.softcap ? p_.softcap : 0.f; }

  /// For the merge in shared memory, in that of the rings.
  __device__ void leave_part(const Output& O, const RowPair& inverse, const RowPair& lse) {
    ptx::bar_sync(consumers_barrier, S.consumer_threads());  // proves that all blocks have been read
    Part<S>& part = storage_.parts[key_group()];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row(r) >= share_.rows) continue;
      if (lane() % 4 == 0) part.lse[row(r)] = lse.row[r] + shift();
#pragma unroll
      for (int i = 2 * r; i < S.head_dim_v / 2; i += 4) {
        *reinterpret_cast<float2*>(&part.out[row(r)][8 * (i / 4) + column()]) = {O[i] * inverse.row[r],
                                                                                 O[i + 1] * inverse.row[r]};
      }
    }
  }

  /// For combine.cu.
  __device__ void store_part(const Output& O, const RowPair& inverse, const RowPair& lse) const {
    const long long part = share_.split * S.key_groups + key_group();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row(r) >= share_.rows) continue;
      const Row at = row_of_head(r);
      const long long number = ((part * p_.batch + share_.sequence) * p_.heads_q + at.head) * p_.seqlen_q + at.query;
      if (lane() % 4 == 0) p_.partial_lse[number] = lse.row[r] + shift();
      float* out = p_.partial_out + number * p_.head_dim_v;
#pragma unroll
      for (int i = 2 * r; i < S.head_dim_v / 2; i += 4) {
        const int c = 8 * (i / 4) + column();
        if (c >= p_.head_dim_v) break;
        *reinterpret_cast<float2*>(out + c) = {O[i] * inverse.row[r], O[i + 1] * inverse.row[r]};
      }
    }
  }

  /// Each warp answers for itself: its wait covers its own part of the WGMMA that read the slot.
  __device__ void release(const Slot& slot) const {
    if (lane() == 0) cupyfa::release(slot);
  }

  const DecodeParams& p_;
  Storage<S>& storage_;
  const Share<S>& share_;
  int warpgroup_;
  GroupRingConsumer<S.stages, Storage<S>::k_bytes> K_;
  GroupRingConsumer<S.stages, Storage<S>::v_bytes> V_;
};

}  // namespace cupyfa::hopper::decode
