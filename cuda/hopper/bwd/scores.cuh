// The arithmetic between the products, in the accumulator layout of transposed scores. Its twin is
// cupyfa/oracles/backward_online.py.
#pragma once
#include "hopper/bwd/bias.cuh"
#include "hopper/bwd/key_place.cuh"
#include "hopper/bwd/key_tile.cuh"
#include "hopper/bwd/storage.cuh"
#include "logits.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/st_shared.cuh"
#include "score_mod.cuh"

namespace cupyfa::hopper {

/// The slopes of the softcap, for a thread's scores: shared memory has room for them, registers have not.
template <BwdSpec S>
class CapSlopes {
 public:
  static constexpr bool kept = S.softcap;

  __device__ CapSlopes(SlopeStorage<S>& storage, const KeyPlace<S>& place) {
    if constexpr (S.softcap) own_ = shared_address(&storage.slopes[place.warpgroup][0][place.thread()]);
  }
  __device__ void put(int group, const float (&slopes)[4]) const {
    const u32 words[4] = {__float_as_uint(slopes[0]), __float_as_uint(slopes[1]), __float_as_uint(slopes[2]),
                          __float_as_uint(slopes[3])};
    ptx::st_shared_v4(at(group), words);
  }
  __device__ void get(int group, float (&slopes)[4]) const {
    u32 words[4];
    ptx::ld_shared_v4(at(group), words);
#pragma unroll
    for (int i = 0; i < 4; ++i) slopes[i] = __uint_as_float(words[i]);
  }

 private:
  __device__ SharedAddress at(int group) const { return own_ + group * warpgroup_threads * 16; }
  SharedAddress own_;
};

/// Nobody needs them: the gradient of a bias is that of the capped scores.
struct NoSlopes {
  static constexpr bool kept = false;
};

/// What becomes of the scores of a thread's two keys.
template <BwdSpec S, class Slopes = CapSlopes<S>>
class Scores {
 public:
  using Values = float[S.queries() / 2];

  __device__ Scores(const BwdParams& p, const KeyTileOf<S>& tile, const KeyPlace<S>& place, const Slopes& slopes,
                    const ScoreBias<S>& bias)
      : p_(p), tile_(tile), place_(place), slopes_(slopes), bias_(bias) {}

  /// P = exp2(scale S - lse), 0 where a query does not see a key. `lse`: of the query tile's rows, in shared memory, and
  /// behind it a bias of one column.
  __device__ void exponentiate(Values& scores, SharedAddress lse, const QueryTile& query, const QueryRange& range) {
    float distance = 0.f, alibi_slope = 0.f;  // the distance: of the first query from the diagonal of the first key
    if constexpr (S.alibi) {
      distance = float(query.m * S.tile_m + place_.query() + tile_.seqlen_k(p_) - tile_.seqlen_q(p_) -
                       tile_.n * S.tile_n - place_.key());
      alibi_slope = -p_.alibi_slopes[tile_.batch * p_.alibi_stride_batch + query.head * p_.alibi_stride_head];
      if constexpr (!natural) alibi_slope *= log2_e;
    }
    const float scale = natural ? p_.logit_scale : p_.scale_log2, cap_shift = natural ? p_.softcap : p_.softcap_log2;
    bias_.begin(tile_, query, lse + S.tile_m * int(sizeof(float)));
    if constexpr (S.softcap) cap(scores);
#pragma unroll
    for (int group = 0; group < S.queries() / 8; ++group) {
      float of_query[2], bias[4];
      load_pair(lse, group, place_, of_query);
      if constexpr (natural) bias_.get(group, bias);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[4 * group + i];
        const float shift = S.softcap ? cap_shift - of_query[i % 2] : -of_query[i % 2];
        score = fmaf(score, scale, natural ? bias[i] : shift);
        if constexpr (S.alibi) score = fmaf(alibi_slope, fabsf(distance + (8 * group + i % 2 - 8 * (i / 2))), score);
        if constexpr (natural) score = (score + shift) * log2_e;
        score = ptx::ex2_approx_ftz(score);
      }
    }
    bias_.done();
    if (!range.sees_all(query.m)) hide(scores, query.m);
  }

  /// dS = P (dP - delta), times the slope of the cap if it was kept. `delta`: of the query tile's rows, in shared memory.
  __device__ void differentiate(Values& dP, const Values& P, SharedAddress delta) const {
#pragma unroll
    for (int group = 0; group < S.queries() / 8; ++group) {
      float of_query[2], slopes[4];
      load_pair(delta, group, place_, of_query);
      if constexpr (Slopes::kept) slopes_.get(group, slopes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = dP[4 * group + i];
        value = P[4 * group + i] * (value - of_query[i % 2]);
        if constexpr (Slopes::kept) value *= slopes[i];
      }
    }
  }

 private:
  // As in ScoreMod: a bias makes natural logits, so that the most negative number of its type does not overflow.
  static constexpr bool natural = S.bias != Bias::none;

  /// Scores become (tanh - 1) / 2; what the gradient needs is kept.
  __device__ void cap(Values& scores) const {
#pragma unroll
    for (int group = 0; group < S.queries() / 8; ++group) {
      float slopes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[4 * group + i];
        score = capped(score, p_.softcap_slope);
        if constexpr (Slopes::kept) slopes[i] = -4.f * score * (1.f + score);  // 1 - tanh^2
      }
      if constexpr (Slopes::kept) slopes_.put(group, slopes);
    }
  }

  /// The limits are computed here: few tiles need them, and registers are scarce.
  __device__ void hide(Values& P, int m) const {
    const int first_query = m * S.tile_m + place_.query();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = tile_.n * S.tile_n + place_.key() + 8 * r;
      int begin = S.causal ? key - tile_.last_diagonal(p_) - first_query : 0;
      if (key >= tile_.seqlen_k(p_)) begin = S.tile_m;
      const int end = S.window ? key + 1 - tile_.first_diagonal(p_) - first_query : S.tile_m;
#pragma unroll
      for (int i = 0; i < S.queries() / 4; ++i) {
        const int query = 8 * (i / 2) + i % 2;  // from the thread's first one
        if (query < begin || (S.window && query >= end)) P[4 * (i / 2) + 2 * r + i % 2] = 0.f;
      }
    }
  }

  const BwdParams& p_;
  const KeyTileOf<S>& tile_;
  const KeyPlace<S>& place_;
  Slopes slopes_;
  ScoreBias<S> bias_;
};

template <BwdSpec S>
__device__ inline void round_scores(u32 (&packed)[S.queries() / 4], const float (&scores)[S.queries() / 2]) {
#pragma unroll
  for (int i = 0; i < S.queries() / 4; ++i) packed[i] = ptx::cvt_rn_x2<S.dtype>(scores[2 * i], scores[2 * i + 1]);
}

}  // namespace cupyfa::hopper
