// Which rows of a packed array a tile in the workspace has, where the host does not know the lengths of the sequences.
//
// The rows of the array are one run behind the other: those before the first sequence, each sequence with all rows up to the
// next one, and those behind the last. A run begins with a tile of its own; what it has beside the rows that a sequence uses
// is nobody's. So every row has a tile, and how many tiles there are at most follows from the size of the array and from how
// many sequences there are: total / tile_rows, and one more for each run.
#pragma once
#include "params.h"
#include "ptx/types.cuh"

namespace cupyfa {

/// How much of a sequence is used.
__device__ inline int used(const int* seqused, u32 sequence, int length) {
  return seqused == nullptr ? length : min(max(seqused[sequence], 0), length);
}

/// The number of a run's first tile. The next run begins behind its last one, for whole tiles of its rows are no more than
/// begin / tile_rows grows by, and what is left of them takes the 1 that the number of the run grows by.
__device__ inline u32 first_tile(int begin, u32 run, int tile_rows) { return u32(begin) / tile_rows + run; }

/// That of a sequence: the rows before the first one are the first run.
__device__ inline u32 first_tile_of_sequence(int begin, u32 sequence, int tile_rows) {
  return first_tile(begin, sequence + 1, tile_rows);
}

/// The rows of a tile: `first` and up, of which there are `count`, and of those are `used` a sequence's. There may be none.
struct PackedRows {
  int first, count, used;

  /// By all threads of a CTA, for one tile. `plan`: says how many sequences have offsets that are in order, all or none.
  template <u32 threads>
  __device__ static PackedRows of(const int* cu_seqlens, const int* seqused, const Plan* plan, int total, int tile_rows,
                                  u32 tile) {
    const u32 sequences = plan->sequences, runs = sequences == 0 ? 1 : sequences + 2;
    const auto begin = [&](u32 run) { return run == 0 ? 0 : cu_seqlens[run - 1]; };
    u32 run = 0, behind = runs;  // the tile's run is run <= i < behind
    while (behind - run > 1) {
      const u32 step = (behind - run + threads - 1) / threads, own = run + threadIdx.x * step;
      // All threads get it: how many of these runs begin with this tile or before it, the first one among them.
      const u32 hits = __syncthreads_count(own < behind && first_tile(begin(own), own, tile_rows) <= tile);
      run += (hits - 1) * step;
      behind = min(behind, run + step);
    }
    const int first = begin(run), end = run + 1 == runs ? total : cu_seqlens[run];
    const bool is_sequence = 0 < run && run <= sequences;
    const int length = is_sequence ? cupyfa::used(seqused, run - 1, end - first) : 0;
    const int before = (tile - first_tile(first, run, tile_rows)) * tile_rows;  // rows of the run
    return {first + before, end - first - before, length - before};
  }
};

}  // namespace cupyfa
