// Where the rows of a tile lie in the tensor maps.
#pragma once
#include "params.h"
#include "tile_scheduler.cuh"

namespace cupyfa::hopper {

/// Coordinates along seqlen and batch: row i is at (first + i, batch). See FwdParams for packed sequences.
struct Rows {
  int first, batch;

  template <FwdSpec S>
  __device__ static Rows of_q(const FwdParams& p, const TileOf<S>& tile) {
    if constexpr (S.varlen) {
      return {p.seqlen_q - tile.seqlen_q + tile.m * S.tile_m, tile.q_begin + tile.seqlen_q};
    } else {
      return {tile.m * S.tile_m, tile.batch};
    }
  }

  template <FwdSpec S>
  __device__ static Rows of_k(const FwdParams& p, const TileOf<S>& tile) {
    if constexpr (S.varlen) {
      return {p.seqlen_k - tile.seqlen_k, tile.k_begin + tile.seqlen_k};
    } else {
      return {0, tile.batch};
    }
  }
};

}  // namespace cupyfa::hopper
