// The producer roles: a warp keeps the ring of K filled by TMA, another one that of V. A block may lie on many pages, so that each lane
// copies its own boxes, of as many rows as pages allow, down to one.
#pragma once
#include "hopper/decode/share.cuh"
#include "hopper/decode/storage.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/tma.cuh"

namespace cupyfa::hopper::decode {

template <int stages, int slot_bytes>
class WarpRingProducer : RingWalk<stages, slot_bytes> {
 public:
  __device__ WarpRingProducer(const void* data, const RingBarriers<stages>& barriers)
      : RingWalk<stages, slot_bytes>(data, barriers, 1) {}

  /// The next slot, by all lanes, to be filled with `slot_bytes` bytes by all together.
  __device__ Slot acquire() {
    const Slot slot = this->slot();
    wait_parity(slot.empty, this->parity_);  // proves that all consumers are done with the block of the last round
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_expect_tx(slot.full, slot_bytes);
    __syncwarp();  // proves that the barrier expects what the lanes copy
    this->advance();
    return slot;
  }
};

/// Copies a block of a cache into a slot. A box without a page arrives as zeros: its coordinate is outside the tensor.
template <DecodeSpec S, int columns>
__device__ inline void load(const TensorMap& map, const Slot& slot, const DecodeParams& p, const Share<S>& share,
                            int block) {
  for (int row = threadIdx.x % 32 * p.box_rows; row < S.tile_n; row += 32 * p.box_rows) {
    const CacheRow at = share.keys.at(block * S.tile_n + row);
#pragma unroll
    for (int panel = 0; panel < panels(columns); ++panel) {
      ptx::cp_async_bulk_tensor_4d_load(slot.data + panel * panel_bytes(S.tile_n) + row * panel_row_bytes, map,
                                        panel * panel_cols, at.row, share.head_kv, at.page, slot.full);
    }
  }
}

template <DecodeSpec S, int columns, int slot_bytes>
__device__ void produce(const void* data, const RingBarriers<S.stages>& barriers, const TensorMap& map,
                        const DecodeParams& p, const Share<S>& share) {
  WarpRingProducer<S.stages, slot_bytes> ring(data, barriers);
  for (int j = share.blocks.begin; j < share.blocks.end; ++j) load<S, columns>(map, ring.acquire(), p, share, j);
  // No tail: consumers wait for every block, so nothing is in flight when they exit.
}

/// All blocks of K or of V, by a warp.
template <DecodeSpec S>
__device__ void produce(const DecodeParams& p, Storage<S>& storage, const Share<S>& share, bool of_v) {
  ptx::griddepcontrol_wait();  // proves what the call has appended; all else that a CTA reads was there before
  auto& [q, k, v] = storage.rings;
  if constexpr (panels(S.head_dim) == panels(S.head_dim_v)) {  // one code for both
    produce<S, S.head_dim, Storage<S>::k_bytes>(of_v ? v[0] : k[0], of_v ? storage.v_barriers : storage.k_barriers,
                                                of_v ? p.v : p.k, p, share);
  } else if (of_v) {
    produce<S, S.head_dim_v, Storage<S>::v_bytes>(v, storage.v_barriers, p.v, p, share);
  } else {
    produce<S, S.head_dim, Storage<S>::k_bytes>(k, storage.k_barriers, p.k, p, share);
  }
}

}  // namespace cupyfa::hopper::decode
