// Run-time parameters of the kernels: plain structs, the one ABI between host and device.
//
// The kernels read this file as part of their amalgamated source; _launch.pyx compiles against it and packs the same
// structs. Whatever changes the instructions of a kernel is in spec.cuh, whatever changes only its data is here.
#ifndef CUPYFA_PARAMS_H
#define CUPYFA_PARAMS_H

namespace cupyfa {

/// The driver's CUtensorMap: opaque, 128 bytes, 64-byte aligned (CUDA driver API, cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

/// Strides of a matrix of heads, in elements. Packed sequences have no batch.
struct Strides {
  long long batch, row, head, column;
};

/// A query tile of sequences whose lengths the device knows, for all heads. The tiles of a sequence are behind each other in the plan, and each of
/// them says the same: which rows of the sequence it is follows from its number, and from the head.
struct alignas(16) PackedTile {
  int q_begin, seqlen_q;       ///< the sequence's rows in q
  int k_begin, seqlen_k;       ///< its rows in k and v
  int sequence;                ///< its number in the batch
  unsigned first;              ///< the number of its first tile in the plan
  unsigned heads_per_section;  ///< query heads whose keys and values should stay in L2 together
  unsigned padding;
};

/// Which tiles such sequences have, in the order in which they are computed: what plan.cu writes and the kernels read.
struct Plan {
  unsigned count;
  unsigned sequences;  ///< as many as there are, or 0 if their offsets are not ascending
  unsigned padding[6];
  PackedTile tiles[1];  ///< as many as fit into the caller's memory
};

/// The size along seqlen of the tensor maps of packed sequences: no sequence is longer.
constexpr int packed_rows = 1 << 30;

/// Parameters of an attention forward. Tensor maps have the dimensions (head_dim, seqlen, heads, batch), innermost
/// first, whatever the strides of the arrays are.
///
/// With packed sequences they have the dimensions (head_dim, packed_rows, heads, total + 1, packed_rows + 1), where total
/// is the number of tokens, of stride s along tokens. The strides of the second and of the fourth dimension are s, that of
/// the fifth is 2^34 - s, and its coordinate packed_rows, which together take packed_rows * s from an address, modulo 2^64.
/// So row i of a sequence of n tokens that begins at token b is at (packed_rows - n + i, b + n): the end of the sequence is
/// the end of the second dimension, and TMA never touches a neighbour.
///
/// Sequences that are not packed, but whose lengths the device knows, have the same dimensions. A batch begins so many rows
/// behind the one before as its stride is times that of rows: `q_step` in q, `q_step + o_shift` in out.
struct FwdParams {
  TensorMap q, k, v, o;
  float* lse;                      ///< natural logarithm, or null when nobody asked for it
  long long lse_stride_batch;      ///< in elements
  long long lse_stride_head;       ///< in elements
  long long lse_stride_row;        ///< in elements
  const float* sink;               ///< a logit for each query head, natural
  const float* alibi_slopes;       ///< for each query head
  long long sink_stride;           ///< in elements
  long long alibi_stride_batch;    ///< in elements
  long long alibi_stride_head;     ///< in elements
  float scale_log2;                ///< |softmax_scale| * log2(e), at least FLT_MIN; the sign is in the spec. With a
                                   ///< softcap: 2 * softcap * log2(e)
  float softcap_slope;             ///< 2 * log2(e) * |softmax_scale| / softcap
  float softcap;                   ///< natural
  int seqlen_q, seqlen_k;          ///< packed: of the arrays
  int q_step, o_shift;             ///< with a plan; 0 for packed sequences
  int last_diagonal;               ///< causal: row i sees no key behind i + last_diagonal
  int first_diagonal;  ///< window: row i sees no key before i + first_diagonal. Packed: both are for sequences
  ///< with as many queries as keys, others add the difference
  unsigned heads_q;  ///< query heads
  unsigned heads_per_kv;  ///< query heads that share one key/value head
  unsigned heads_total;  ///< batch * heads_q
  unsigned tiles_m;  ///< query tiles of one head
  unsigned tiles;  ///< heads_total * tiles_m
  unsigned heads_per_section;  ///< query heads whose keys and values should stay in L2 together
  const Plan* plan;  ///< of packed sequences
  unsigned* tile_counter;  ///< 0 between launches, for the dynamic scheduler; null: tiles are dealt out
  TensorMap bias;  ///< (seqlen_k, rows, heads, batch), each of the last three 1 where it is the same for all
  const void* bias_data;  ///< for kernels that gather it
  long long bias_stride_batch;  ///< in elements, as the next three; 0 where it is the same for all
  long long bias_stride_head;
  long long bias_stride_row;
  long long bias_stride_key;
  int bias_rows, bias_keys;  ///< how many it has; packed: from the beginning of each sequence on
  float scale;  ///< with a bias, in place of scale_log2: what makes natural logits of scores
};

/// Parameters of the kernel that makes a plan.
struct PlanParams {
  const int* cu_seqlens_q;  ///< where the packed sequences begin in q, and where the last one ends; null: not packed
  const int* cu_seqlens_k;  ///< likewise in k and v
  const int* seqused_q;  ///< how many rows of each are queries; null: all
  const int* seqused_k;  ///< how many are keys; null: all
  Plan* plan;  ///< with room for total_q / tile_m + min(total_q, 2 * sequences + 1) tiles
  unsigned sequences;
  int rows_q, rows_k;  ///< of each sequence, if they are not packed
  int q_step, k_step;  ///< rows of q, and of k and v, from a batch to the next
  int total_q, total_k;  ///< rows of the packed arrays
  int tile_m, tile_n;  ///< of the kernel that will read it
  int window;  ///< the most keys that a row sees
  unsigned heads_q, heads_per_kv;
  unsigned keys_in_l2;  ///< keys of one head whose K and V fill half of L2
  unsigned multiprocessors;
  int tiles_grow;  ///< 1: tiles differ in length by the row, and take sections of heads
  int longest_first;  ///< 1: sort the sequences
};

/// What the host must know to launch a kernel. Computed once, by C++; Python reads it back.
struct KernelTraits {
  int threads;
  int shared_bytes;
  int cluster_size;
  int tile_m;
  int tile_n;
  int box_cols;  ///< columns of the TMA boxes of Q, K, V and O
  int bias_box_cols, bias_box_rows;  ///< of the bias; 0 where TMA does not copy it
  int bias_swizzle;  ///< bytes of its span; 0: none
  int persistent;  ///< 1: launch at most one CTA per multiprocessor; 0: one CTA per tile
  int dynamic;  ///< 1: CTAs draw their tiles from a counter
  int producer_registers, consumer_registers;  ///< per thread, by setmaxnreg; 0: as the launch gives them
};

}  // namespace cupyfa

#endif
