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

/// Parameters of an attention forward. Tensor maps have the dimensions (head_dim, seqlen, heads, batch), innermost
/// first, whatever the strides of the arrays are.
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
  int seqlen_q, seqlen_k;
  int last_diagonal;               ///< causal: row i sees no key behind i + last_diagonal
  int first_diagonal;              ///< window: row i sees no key before i + first_diagonal
  unsigned heads_q;                ///< query heads
  unsigned heads_per_kv;           ///< query heads that share one key/value head
  unsigned heads_total;            ///< batch * heads_q
  unsigned tiles_m;                ///< query tiles of one head
  unsigned tiles;                  ///< heads_total * tiles_m
  unsigned heads_per_section;      ///< query heads whose keys and values should stay in L2 together
  unsigned* tile_counter;          ///< 0 between launches, for the dynamic scheduler; null: tiles are dealt out
};

/// What the host must know to launch a kernel. Computed once, by C++; Python reads it back.
struct KernelTraits {
  int threads;
  int shared_bytes;
  int cluster_size;
  int tile_m;
  int tile_n;
  int box_cols;  ///< columns of every TMA box
  int persistent;  ///< 1: launch at most one CTA per multiprocessor; 0: one CTA per tile
  int dynamic;     ///< 1: CTAs draw their tiles from a counter
  int producer_registers, consumer_registers;  ///< per thread, by setmaxnreg; 0: as the launch gives them
};

}  // namespace cupyfa

#endif
