// Q of a tile, from memory to shared memory: scattered as its rows may be, and rotated.
#pragma once
#include "hopper/decode/share.cuh"
#include "layout.cuh"
#include "ptx/st_shared.cuh"
#include "rotary.cuh"

namespace cupyfa::hopper::decode {

/// Eight columns, one by one: of any stride, and rotated. A loop, as instructions have to come from memory as well.
template <DecodeSpec S>
__device__ inline void gather(const DecodeParams& p, long long begin, int column, int position, u32 (&words)[4]) {
  const auto load = [&](int c) { return element<S.dtype>(p.q, begin + c * p.q_strides.column); };
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int c = column + 2 * i;
    words[i] = ptx::cvt_rn_x2<S.dtype>(rotated<S.dtype>(p.rotary, position, c, load),
                                       rotated<S.dtype>(p.rotary, position, c + 1, load));
  }
}

/// Sixteen bytes for each thread in turn. Rows that the head does not have, and columns beyond head_dim, are zeros.
template <DecodeSpec S>
__device__ inline void load_queries(const DecodeParams& p, const Share<S>& share, SharedAddress q) {
  constexpr int chunk_columns = 8, row_chunks = S.head_dim / chunk_columns;
  const bool vectors = p.q_vectors && p.rotary.dim == 0 && u64(p.q) % 16 == 0;
  const u32 flip = p.negate_scores ? 0x80008000 : 0;  // -Q K': the sign of a 16-bit float is its first bit
  for (int i = threadIdx.x; i < S.tile_m * row_chunks; i += S.consumer_threads()) {
    const int row = i / row_chunks, chunk = i % row_chunks;
    const int column = chunk * chunk_columns;
    u32 words[4] = {};
    if (row < share.rows && column < p.head_dim) {
      const Row at = share.row(share.first_row + row);
      const long long begin = (p.cu_seqlens_q == nullptr ? share.sequence * p.q_strides.batch : 0) +
                              (share.queries.begin + at.query) * p.q_strides.row + at.head * p.q_strides.head;
      if (vectors) {
        const uint4 chunk = *reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(p.q) + begin + column);
        words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
      } else {
        gather<S>(p, begin, column, share.keys.before() + (p.rotate_by_row ? at.query : 0), words);
      }
#pragma unroll
      for (u32& word : words) word ^= flip;
    }
    const SharedAddress panel = q + column / panel_cols * panel_bytes(S.tile_m);
    ptx::st_shared_v4(swizzled_chunk(panel, row, column % panel_cols / chunk_columns), words);
  }
}

}  // namespace cupyfa::hopper::decode
