// Run-time parameters of the kernels that compute gradients: the same ABI as params.h.
#ifndef CUPYFA_BWD_PARAMS_H
#define CUPYFA_BWD_PARAMS_H

#include "params.h"

namespace cupyfa {

/// The gradients of attention. Tensor maps have the dimensions (head_dim, seqlen, heads, batch).
///
/// What a query row needs beside Q and dO is in the workspace, for each head padded to whole tiles of `tiles_m * tile_m`
/// rows, which is what `rows` below counts; so is the sum of dQ in float32, tile by tile, in the order in which the threads
/// of the kernel hold it (DqTile).
///
/// Packed sequences are a batch of 1 there, and tensor maps are those of FwdParams. Of a head, each sequence has whole tiles
/// (packed_rows.cuh), `tiles_m` for all. A plan has the key tiles: in it, queries and keys have changed places.
struct BwdParams {
  TensorMap q, k, v, dout;
  TensorMap dk, dv;  ///< where a CTA has all query heads of its keys
  TensorMap bias;  ///< (seqlen_k, seqlen_q, heads, batch), each of the last two 1 where it is the same for all
  float*
      dk_parts;  ///< otherwise its sums are parts, (parts, batch, heads_kv, tiles_n, tile_n * head_dim), in the order in
  float* dv_parts;  ///< which the threads of the kernel hold them
  const float* lse_log2;  ///< (batch, heads_q, rows): lse in base 2, with a bias natural; +inf where a row sees no key
  const float* delta;  ///< (batch, heads_q, rows): sum of dO O, less dlse; 0 where there is no row
  float* dq;  ///< (batch, heads_q, tiles_m, tile_m * head_dim), 0 at first
  unsigned* turns;  ///< for a fixed order: how many CTAs have added each part of a query tile, 0 at first
  const float* alibi_slopes;  ///< for each query head
  const Plan* plan;  ///< of packed sequences
  long long alibi_stride_batch, alibi_stride_head;  ///< in elements
  const void* bias_data;  ///< of one row for all queries
  Strides bias_strides;  ///< in elements, of which a column is a key; 0 where it is the same for all
  const float* bias_rows;  ///< (batch, heads_q, rows): of one column for all keys
  float scale_log2;  ///< softmax_scale * log2(e). With a softcap: 2 * softcap * log2(e)
  float scale;  ///< softmax_scale, the factor of dK
  float softcap_slope;  ///< 2 * log2(e) * softmax_scale / softcap
  float softcap_log2;  ///< softcap * log2(e)
  float logit_scale;  ///< with a bias, in place of scale_log2: what makes natural logits of scores
  float softcap;  ///< with a bias, in place of softcap_log2: natural
  int seqlen_q, seqlen_k;
  int last_diagonal;  ///< causal: row i sees no key behind i + last_diagonal
  int first_diagonal;  ///< window: row i sees no key before i + first_diagonal. Packed: both are for sequences
  ///< with as many queries as keys, others add the difference
  unsigned heads_q, heads_kv;
  unsigned heads_per_kv;  ///< query heads that share one key/value head
  unsigned heads_per_part;  ///< of those, how many a CTA walks
  unsigned parts;  ///< how many CTAs share a key tile
  unsigned tiles_m, tiles_n;  ///< query tiles and key tiles of one head
  unsigned heads_per_section;  ///< key/value heads whose queries, gradients and sums should stay in L2 together
};

/// The gradient of a bias, which has one index along axes on which the bias repeats.
struct BiasGradientParams {
  BwdParams scores;  ///< with tiles and tensor maps of this kernel, and without sums
  void* dbias;
  Strides strides;  ///< of it, in elements; a column is a key
  int batches, heads, rows, keys;  ///< of it
  int batch;  ///< of the problem
};

/// The kernel before it: delta, lse in base 2, and zeros.
struct PreprocessParams {
  const void* out;
  const void* dout;
  const float* lse;  ///< natural logarithm
  const float* dlse;  ///< the gradient of lse, or null
  const float* sink;  ///< a logit for each query head, or null
  Strides out_strides, dout_strides, lse_strides, dlse_strides;
  long long sink_stride;  ///< in elements
  float* lse_log2;
  float* delta;
  float* dsink;  ///< (batch, heads_q, CTAs of a head): what the rows of a CTA add to the gradient of the sink, or null
  const void* bias;  ///< of one column for all keys, or null
  Strides bias_strides;  ///< as in BwdParams
  float* bias_rows;  ///< where it goes
  float* dq;
  long long dq_head;  ///< floats of a head
  unsigned* turns;  ///< null: order is free
  const int* cu_seqlens_q;  ///< where the packed sequences begin, and where the last one ends; null: not packed
  const int* seqused_q;  ///< how many rows of each are queries; null: all
  const Plan* plan;  ///< of packed sequences
  unsigned turns_head;
  int tile_m;  ///< of the kernel behind it
  float lse_factor;  ///< log2(e); 1 where a bias makes natural logits
  int bias_float32;  ///< 1: the bias is; 0: it has the type of out
  int seqlen_q;  ///< packed: of the array
  int rows, head_dim_v;
  unsigned heads_q;
  int vectors;  ///< 1: rows of out and dout can be loaded by 16 bytes
};

/// The gradient of the sinks.
struct SinkParams {
  const float* parts;  ///< (batch, heads_q, parts_head), of the preprocess kernel
  float* dsink;
  long long dsink_stride;  ///< in elements
  int batch, parts_head;
};

/// The kernel after it: dQ, or dK and dV where their sums are in parts, scaled and rounded.
struct PostprocessParams {
  const float* sums;  ///< (parts, batch, heads, tiles, tile_m * head_dim)
  long long part_stride;  ///< in elements
  void* out;
  Strides out_strides;
  const int* cu_seqlens;  ///< as in PreprocessParams, as the next two
  const int* seqused;
  const Plan* plan;
  float scale;
  int parts;
  int seqlen;  ///< packed: of the array
  int head_dim;
  unsigned heads, tiles;
  int vectors;  ///< 1: rows of it can be stored by 16 bytes
};

}  // namespace cupyfa

#endif
