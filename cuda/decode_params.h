// Run-time parameters of the kernels that read and write key/value caches: the same ABI as params.h.
#ifndef CUPYFA_DECODE_PARAMS_H
#define CUPYFA_DECODE_PARAMS_H

#include "params.h"

namespace cupyfa {

/// A divisor of numbers below 2^31, which only the host knows: n / divisor = n * multiplier >> shift. A division is a dozen
/// times as long, and before the first copy of a CTA there are eight of them.
struct Divisor {
  unsigned divisor, multiplier, shift;
};

/// Where the keys and values of a sequence are. A page is `page_size` rows of the caches; without a table, the whole row of
/// a sequence is its one page.
struct CachePlaces {
  const int* cache_seqlens;    ///< how many keys each sequence has before the call; null: `cache_seqlen`
  const int* page_table;       ///< the pages of each sequence, or null
  const int* cache_batch_idx;  ///< without a table: the row of each sequence in the caches; null: its number
  long long seqlens_stride;    ///< in elements, as the next three
  long long table_stride_batch, table_stride_page;
  long long batch_idx_stride;
  int cache_seqlen;
  Divisor page_size;
  int pages;     ///< of the caches. A page that is none of them reads as zeros, and nobody writes it
  int capacity;  ///< the most keys of a sequence; lengths beyond count as that
  int appended;  ///< keys that the call adds to each sequence
};

/// Rotary position embedding of the first `dim` columns: a pair of columns is turned by the angle of its position.
struct Rotary {
  const void* cos;  ///< (positions, dim / 2), as the next one
  const void* sin;
  long long cos_stride, sin_stride;  ///< from a position to the next, in elements
  int dim;                           ///< 0: none
  int positions;                     ///< later ones count as the last
  int interleaved;                   ///< pairs are neighbours; otherwise they are dim / 2 apart
};

/// Attention of few queries over caches. Tensor maps have the dimensions (head_dim, page_size, heads, pages).
struct DecodeParams {
  TensorMap k, v;
  // What a CTA needs before it can copy: side by side, as parameters come from memory too, a line at a time.
  CachePlaces places;
  Divisor heads_kv;
  Divisor group;  ///< query heads that share one key/value head
  Divisor tiles_m;  ///< of the rows of a key/value head: `group` for each query
  Divisor splits;  ///< of the keys of a sequence
  int blocks_per_split;  ///< 0: each split has the same part of them
  int box_rows;  ///< rows of a copy; a divisor of page_size, or the tile's
  int seqlen_q;  ///< of each sequence; packed: of the longest one
  int total_q;  ///< rows of the packed q
  int left, right;  ///< of the window, of which a causal mask is the right side
  const int* cu_seqlens_q;  ///< where the queries of a sequence begin in the packed q; null: q is not packed
  long long cu_seqlens_stride;
  // What its roles need later.
  Rotary rotary;            ///< of the queries; K is rotated where it is appended
  const void* q;
  void* out;
  float* lse;               ///< natural logarithm, or null
  float*
      partial_out;  ///< (parts, batch, heads_q, seqlen_q, head_dim_v), a part for each key group of each split; null: clusters merge
  float* partial_lse;  ///< (parts, batch, heads_q, seqlen_q)
  const float* sink;  ///< a logit for each query head, or null
  const float* alibi_slopes;
  Strides q_strides, out_strides, lse_strides;
  long long sink_stride, alibi_stride_batch, alibi_stride_head;
  float scale_log2, softcap_slope, softcap;  ///< as in FwdParams
  int negate_scores;  ///< softmax_scale is negative
  int q_vectors;  ///< sixteen bytes of q can be loaded at a time, if it begins at a multiple of them
  int head_dim, head_dim_v;
  int rotate_by_row;  ///< 1: query i is at the position of its own key; 0: all are at that of the first
  int batch, heads_q;
};

/// Writes new keys and values into caches.
struct AppendParams {
  CachePlaces places;
  Rotary rotary;  ///< of the keys
  const void* k;
  const void* v;
  void* k_cache;
  void* v_cache;
  Strides k_strides, v_strides;
  Strides k_cache_strides, v_cache_strides;  ///< batch: from a page to the next
  int batch, heads_kv, head_dim, head_dim_v;
};

/// Merges the parts of DecodeParams.
struct CombineParams {
  const float* partial_out;
  const float* partial_lse;
  void* out;
  float* lse;
  const int* cu_seqlens_q;
  const float* sink;
  Strides out_strides, lse_strides;
  long long cu_seqlens_stride, sink_stride;
  int parts, batch, heads_q, seqlen_q, total_q, head_dim_v;
};

}  // namespace cupyfa

#endif
