// Plans sequences whose lengths are on the device (specification 0x0B): which query tiles they have, and in which order the
// kernels take them. One CTA; the host never learns the lengths. The sequences are packed, or each has a batch of its own.
//
//   all threads   are the offsets ascending?  |  rows of each class of cost  |  where a class begins  |  the tiles
//
// A plan covers every row of q. The rows of no sequence, before the first one, behind the last one and where seqused_q ends
// a sequence early, make stretches without keys, so that the kernel that reads the plan writes them as rows that see none.
//
// The kernel of gradients has key tiles, and a plan of them: in its parameters, keys and queries have changed places.
#include "packed_rows.cuh"
#include "params.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/types.cuh"

namespace cupyfa {

constexpr u32 plan_threads = 1024;
constexpr u32 warp_threads = 32;
constexpr u32 all_lanes = 0xffffffff;

/// Rows of q, packed or of a batch, that see keys of one sequence, or none.
struct Stretch {
  int q_begin, seqlen_q, k_begin, seqlen_k, sequence;

  __device__ u32 tiles(const PlanParams& p) const { return (seqlen_q + p.tile_m - 1) / p.tile_m; }
};

/// Whether the sequences before `end` begin in order, within the array. All threads get the answer.
__device__ inline bool ascending(const int* cu_seqlens, u32 sequences, int total) {
  bool wrong = false;
  for (u32 i = threadIdx.x; cu_seqlens != nullptr && i < sequences; i += plan_threads) {
    const int begin = cu_seqlens[i], end = cu_seqlens[i + 1];
    wrong |= begin < 0 || end < begin || end > total;
  }
  return !__syncthreads_or(wrong);
}

/// Where a sequence begins, and how long it is.
struct Bounds {
  int begin, length;

  __device__ Bounds(const int* cu_seqlens, u32 i, int step, int rows)
      : begin(cu_seqlens == nullptr ? int(i) * step : cu_seqlens[i]),
        length(cu_seqlens == nullptr ? rows : cu_seqlens[i + 1] - begin) {}
};

/// Stretches with an odd number are the sequences, those with an even one the rows before a sequence, and behind the last.
__device__ inline Stretch stretch(const PlanParams& p, u32 sequences, u32 number) {
  const u32 i = number / 2;
  if (number % 2 == 1) {
    const Bounds q(p.cu_seqlens_q, i, p.q_step, p.rows_q), k(p.cu_seqlens_k, i, p.k_step, p.rows_k);
    return {q.begin, used(p.seqused_q, i, q.length), k.begin, used(p.seqused_k, i, k.length), int(i)};
  }
  int begin = 0, end = p.cu_seqlens_q == nullptr ? 0 : i < sequences ? p.cu_seqlens_q[i] : p.total_q, batch = 0;
  if (i > 0) {
    const Bounds before(p.cu_seqlens_q, i - 1, p.q_step, p.rows_q);
    begin = before.begin + used(p.seqused_q, i - 1, before.length);
    if (p.cu_seqlens_q == nullptr) end = before.begin + before.length, batch = int(i - 1);
  }
  return {begin, end - begin, 0, 0, batch};
}

/// The class of a stretch: 0 for the longest tiles. A cost is the number of key blocks; its leading bits as a float make 16
/// classes of an octave.
constexpr u32 cost_classes = 512;
__device__ inline u32 class_of(const PlanParams& p, const Stretch& s) {
  if (!p.longest_first) return 0;
  const int keys = min(s.seqlen_k, p.window);
  const u32 blocks = 1 + keys / p.tile_n;
  constexpr u32 mantissa = 23, kept = 4, one = 127 << kept;
  return cost_classes - 1 - ((__float_as_uint(float(blocks)) >> (mantissa - kept)) - one);
}

/// As cupyfa/schedule.py, which says why, for the heads of one sequence.
__device__ inline u32 heads_per_section(const PlanParams& p, const Stretch& s, u32 tiles) {
  if (!p.tiles_grow || s.seqlen_k == 0) return 1;
  const u32 quarter = 4 * p.multiprocessors / tiles;
  const u32 spread = min(p.multiprocessors / 4, max(p.multiprocessors / 16, quarter));
  const u32 wanted = max(max(p.keys_in_l2 / s.seqlen_k * p.heads_per_kv, spread), 1u);
  const u32 sections = max(1u, (p.heads_q + wanted / 2) / wanted);
  const u32 heads = (p.heads_q + sections - 1) / sections;
  return (heads + p.heads_per_kv - 1) / p.heads_per_kv * p.heads_per_kv;
}

/// Turns the tiles of the classes into the number of each class' first tile, and returns the number of all.
__device__ inline u32 accumulate(u32 (&classes)[cost_classes], u32 (&of_warps)[cost_classes / warp_threads]) {
  const u32 lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
  u32 before = 0, own = 0;
  if (threadIdx.x < cost_classes) {
    own = classes[threadIdx.x];
    u32 sum = own;
    for (u32 step = 1; step < warp_threads; step *= 2) {
      const u32 other = __shfl_up_sync(all_lanes, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == warp_threads - 1) of_warps[warp] = sum;
    before = sum - own;
  }
  __syncthreads();  // proves the sums of the warps
  u32 all = 0;
  for (u32 i = 0; i < cost_classes / warp_threads; ++i) {
    if (i < warp) before += of_warps[i];
    all += of_warps[i];
  }
  if (threadIdx.x < cost_classes) classes[threadIdx.x] = before;
  __syncthreads();  // proves where the classes begin
  return all;
}

__global__ void __launch_bounds__(plan_threads, 1) make_plan(const __grid_constant__ PlanParams p) {
  ptx::griddepcontrol_launch_dependents();  // whoever reads the plan may set itself up
  __shared__ u32 classes[cost_classes], of_warps[cost_classes / warp_threads];
  for (u32 i = threadIdx.x; i < cost_classes; i += plan_threads) classes[i] = 0;

  // Else there are none, and all rows see no key: whatever is in the offsets, nobody leaves the arrays. (Both have a
  // barrier: no short circuit. The first one proves the zeros above.)
  const bool q_valid = ascending(p.cu_seqlens_q, p.sequences, p.total_q);
  const bool valid = ascending(p.cu_seqlens_k, p.sequences, p.total_k) && q_valid;
  const u32 sequences = valid ? p.sequences : 0;
  const u32 stretches = 2 * sequences + 1;

  for (u32 i = threadIdx.x; i < stretches; i += plan_threads) {
    const Stretch s = stretch(p, sequences, i);
    if (s.seqlen_q > 0) atomicAdd(&classes[class_of(p, s)], s.tiles(p));
  }
  __syncthreads();  // proves the tiles of the classes
  const u32 count = accumulate(classes, of_warps);
  if (threadIdx.x == 0) p.plan->count = count, p.plan->sequences = sequences;

  // A lane looks at a stretch, and writes its tiles. A sequence may have very many: those its warp writes.
  const u32 lane = threadIdx.x % warp_threads;
  for (u32 base = threadIdx.x - lane; base < stretches; base += plan_threads) {
    Stretch own = {};
    if (base + lane < stretches) own = stretch(p, sequences, base + lane);
    const u32 own_count = own.tiles(p);
    PackedTile own_tile = {own.q_begin, own.seqlen_q, own.k_begin, own.seqlen_k, own.sequence};
    if (own_count > 0) {
      own_tile.first = atomicAdd(&classes[class_of(p, own)], own_count);
      own_tile.heads_per_section = heads_per_section(p, own, own_count);
    }
    const bool many = own_count > 2;
    for (u32 i = 0; i < own_count && !many; ++i) p.plan->tiles[own_tile.first + i] = own_tile;
    for (u32 left = __ballot_sync(all_lanes, many); left != 0; left &= left - 1) {
      const auto from = [source = __ffs(left) - 1](auto value) { return __shfl_sync(all_lanes, value, source); };
      const PackedTile tile = {from(own_tile.q_begin),          from(own_tile.seqlen_q), from(own_tile.k_begin),
                               from(own_tile.seqlen_k),         from(own_tile.sequence), from(own_tile.first),
                               from(own_tile.heads_per_section)};
      const u32 count = from(own_count);
      for (u32 i = lane; i < count; i += warp_threads) p.plan->tiles[tile.first + i] = tile;
    }
  }
}

__constant__ KernelTraits plan_traits = {.threads = plan_threads, .cluster_size = 1};

}  // namespace cupyfa
