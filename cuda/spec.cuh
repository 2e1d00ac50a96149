// The compile key. One struct names everything that changes the instructions of a kernel; it is the kernel's template
// argument, and cupyfa/spec.py mirrors it and renders it as the C++ name expression.
#pragma once

namespace cupyfa {

constexpr int warpgroup_threads = 128;
constexpr int warpgroup_rows = 64;  ///< rows of a WGMMA

enum class DType : int { float16, bfloat16 };

enum class Scheduler : int {
  one_tile,    ///< one CTA per tile; the hardware deals them out in order
  persistent,  ///< one CTA per multiprocessor takes every gridDim-th tile
  dynamic,     ///< one CTA per multiprocessor takes the next tile whenever it can load one
};

/// How the additive bias of scores reaches a consumer.
enum class Bias : int {
  none,    ///< there is none
  tile,    ///< TMA copies it, block by block
  row,     ///< likewise, but it is one row for all queries
  gather,  ///< each thread loads its own elements: for strides and addresses that TMA does not take
  column,  ///< it is the same for all keys, and comes with what else a query row has: gradients only
};

/// Forward attention.
struct FwdSpec {
  DType dtype;          ///< of Q, K, V, P and O
  int head_dim;         ///< of Q and K, padded to a multiple of 32; TMA fills the rest with zeros
  int head_dim_v;       ///< of V and O, likewise
  int tile_m;           ///< query rows of a CTA: 64 for each consumer warpgroup
  int tile_n;           ///< keys of one step
  int stages;           ///< of the K ring and of the V ring
  int q_stages;         ///< of the Q ring; 2 lets the next tile's Q arrive under this tile
  bool varlen;          ///< lengths of sequences are on the device, and a plan lists their tiles
  bool causal;          ///< keys end at a diagonal: bottom-right aligned, or a window's right side
  bool window;          ///< keys begin at a diagonal: a window's left side
  bool sink;            ///< each head has a learnable logit without a value
  bool softcap;         ///< scores are capped by a hyperbolic tangent
  bool alibi;           ///< scores fall with the distance between query and key
  Bias bias;            ///< is added to the scaled, capped scores
  bool bias_float32;    ///< its elements are float32; otherwise they are of `dtype`
  int bias_stages;      ///< of its ring; 0 where TMA does not copy it
  bool negate_scores;   ///< softmax_scale is negative: WGMMA computes -Q K', the magnitude stays in the parameters
  bool overlap;         ///< issue the next scores before the softmax of this warpgroup has its P multiplied
  bool three_stage;     ///< the scores after the next ones are under way as well; exact, and without turns
  bool speculative;     ///< softmax against a retained maximum, checked afterwards; needs overlap
  int rescale_threshold;  ///< an exact softmax keeps its frame while no maximum of the warp grows by more, in base 2
  int exp2_fma;  ///< of eight groups of eight keys, so many have their speculative exponentials on the FMA units
  bool pingpong;  ///< consumer warpgroups take turns to issue, by named barriers
  bool warp_specialized;  ///< a warpgroup of its own copies; false: the first thread of the consumers does
  Scheduler scheduler;
  bool longest_first;  ///< tiles in sections, the longest of a section first; otherwise head by head
  bool setmaxnreg;  ///< move registers from the producer to the consumers

  /// Tiles differ in length, by the row: a window keeps all but the first ones alike.
  constexpr bool tiles_grow() const { return causal && !window; }
  /// Scores are more than scaled.
  constexpr bool modifies_scores() const { return softcap || alibi || bias != Bias::none; }
  constexpr int consumers() const { return tile_m / warpgroup_rows; }
  constexpr int producers() const { return warp_specialized ? 1 : 0; }  // warpgroups, before the consumers
  constexpr int threads() const { return warpgroup_threads * (producers() + consumers()); }
  // The register pool is what the launch allocates: 168 * 384 = 40 * 128 + 232 * 256, 128 * 512 = 32 * 128 + 160 * 384.
  // A larger request would wait for registers for ever.
  constexpr int producer_registers() const { return consumers() == 2 ? 40 : 32; }
  constexpr int consumer_registers() const { return consumers() == 2 ? 232 : 160; }
};

/// Attention of few queries over caches.
struct DecodeSpec {
  DType dtype;     ///< of Q, K, V, P and O
  int head_dim;    ///< of Q and K, padded to a multiple of 32; TMA fills the rest with zeros
  int head_dim_v;  ///< of V and O, likewise
  int tile_m;      ///< rows of a CTA: 64 for each warpgroup of a key group
  int tile_n;      ///< keys of one step; splits are cut at multiples of it
  int stages;      ///< of the K ring and of the V ring
  int key_groups;  ///< of consumer warpgroups, which take the blocks in turn
  int residents;   ///< CTAs of a multiprocessor
  bool softcap;    ///< scores are capped by a hyperbolic tangent
  bool alibi;      ///< scores fall with the distance between query and key

  constexpr int row_groups() const { return tile_m / warpgroup_rows; }
  /// The softmax of a block runs under the products of its neighbours, where registers hold two blocks.
  constexpr bool overlaps() const { return head_dim_v <= 128 && (row_groups() == 1 || residents == 1); }
  /// Consumers of blocks of 128 keys need more registers than they begin with: the producers' warpgroup leaves them some.
  constexpr bool moves_registers() const { return tile_n == 128; }
  constexpr int producer_registers() const { return moves_registers() ? 40 : 0; }
  constexpr int consumer_registers() const { return moves_registers() ? 232 : 0; }
  constexpr int consumer_threads() const { return warpgroup_threads * row_groups() * key_groups; }
  /// A warp produces K, another one V; two more make a warpgroup of them.
  constexpr int threads() const { return consumer_threads() + (moves_registers() ? warpgroup_threads : 64); }

  /// What the parts that this kernel shares with the forward kernel have to know. Keys begin and end anywhere.
  constexpr FwdSpec tile() const {
    FwdSpec tile = {};
    tile.dtype = dtype;
    tile.head_dim = head_dim;
    tile.head_dim_v = head_dim_v;
    tile.tile_m = tile_m;
    tile.tile_n = tile_n;
    tile.causal = tile.window = true;
    return tile;
  }
};

/// The gradients of attention.
struct BwdSpec {
  DType dtype;          ///< of Q, K, V, dO, P, dS and the gradients
  int head_dim;         ///< of Q and K, padded to 64, 96 or a larger multiple of 64; TMA fills the rest with zeros
  int head_dim_v;       ///< of V and dO, likewise
  int tile_m;           ///< query rows of one step
  int tile_n;           ///< keys of a CTA: 128, or 64 that warpgroups share
  int q_stages;         ///< of the Q ring
  int dout_stages;      ///< of the dO ring
  bool varlen;          ///< sequences are packed, and a plan lists their key tiles
  bool causal;          ///< keys end at a diagonal
  bool window;          ///< keys begin at a diagonal
  bool softcap;         ///< scores are capped by a hyperbolic tangent
  bool alibi;           ///< scores fall with the distance between query and key
  Bias bias;            ///< is added to the scaled, capped scores; of a row, each thread loads its own elements
  bool bias_float32;    ///< its elements are float32; otherwise they are of `dtype`
  bool partial;         ///< dK and dV are of some of the query heads that share the keys, and left in float32
  bool deterministic;   ///< dQ is summed in a fixed order of the key tiles: from the last one to the first
  bool setmaxnreg;      ///< move registers from the producer to the consumers

  /// The gradients of 64 keys, and what else there is, are too many for the registers of one warpgroup: both have all keys
  /// of the tile, half of the queries of a step, and half of the columns of the gradients.
  constexpr bool wide() const { return tile_n == warpgroup_rows; }
  constexpr int consumers() const { return 2; }
  constexpr int threads() const { return warpgroup_threads * (1 + consumers()); }
  constexpr int queries() const { return wide() ? tile_m / consumers() : tile_m; }  ///< of a consumer's scores
  // As in FwdSpec; where a dQ is added as one, the producer warps need fewer.
  constexpr bool spares() const { return deterministic && (wide() || head_dim % 64 != 0); }
  constexpr int producer_registers() const { return spares() ? 40 : 24; }
  constexpr int consumer_registers() const { return spares() ? 232 : 240; }
};

/// The gradient of a bias.
struct BiasGradientSpec {
  DType dtype;  ///< of Q, K, V and dO
  int head_dim;  ///< as in BwdSpec, as all that follows
  int head_dim_v;
  int stages;  ///< of the ring of tiles
  bool causal;
  bool window;
  bool softcap;
  bool alibi;
  Bias bias;
  bool bias_float32;  ///< the bias and its gradient are; otherwise they are of `dtype`

  static constexpr int tile_m = 64, tile_n = 128;

  /// What the parts that this kernel shares with that of the other gradients have to know.
  constexpr BwdSpec tile() const {
    BwdSpec tile = {};
    tile.dtype = dtype;
    tile.head_dim = head_dim;
    tile.head_dim_v = head_dim_v;
    tile.tile_m = tile_m;
    tile.tile_n = tile_n;
    tile.q_stages = tile.dout_stages = stages;
    tile.causal = causal;
    tile.window = window;
    tile.softcap = softcap;
    tile.alibi = alibi;
    tile.bias = bias;
    tile.bias_float32 = bias_float32;
    return tile;
  }
};

/// What becomes of sums of gradients.
struct PostprocessSpec {
  DType dtype;  ///< of the gradient
  int head_dim;  ///< padded, as in BwdSpec
  int tile_m;  ///< rows of a tile
};

}  // namespace cupyfa
