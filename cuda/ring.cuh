// The circular buffer between the TMA producer and the consumer warpgroups (specification 0x03).
//
// A ring has `stages` slots. The full barrier of a slot proves that its tile has landed, the empty barrier that every
// consumer has finished with it; they are different facts. A side walks the slots in order and keeps one parity bit, which
// flips when the walk wraps: without it a wait could take the completion of an older tile for this one's.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cupyfa {

/// The barriers of a ring, in shared memory.
template <int stages>
struct RingBarriers {
  u64 full[stages];
  u64 empty[stages];
};

__device__ inline SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

__device__ inline void wait_parity(SharedAddress barrier, u32 parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {}
}

/// By one thread, before the others may use the ring. `releases`: arrivals that make a slot empty; `fills`: arrivals that
/// make it full.
template <int stages>
__device__ inline void initialise(RingBarriers<stages>& barriers, u32 releases, u32 fills = 1) {
  for (int stage = 0; stage < stages; ++stage) {
    ptx::mbarrier_init(shared_address(&barriers.full[stage]), fills);
    ptx::mbarrier_init(shared_address(&barriers.empty[stage]), releases);
  }
}

/// A slot that its holder may read or fill.
struct Slot {
  SharedAddress data;
  SharedAddress full;
  SharedAddress empty;
};

/// One of the arrivals that make a slot empty. Only after a wait that covers the last WGMMA that reads it.
__device__ inline void release(const Slot& slot) { ptx::mbarrier_arrive(slot.empty); }

/// One side's walk over the slots. Consumers start at parity 0 (nothing has landed), the producer at parity 1: the
/// completion before the first one counts as done, so that all slots start empty.
template <int stages, int slot_bytes>
class RingWalk {
 public:
  __device__ RingWalk(const void* data, const RingBarriers<stages>& barriers, u32 parity, u32 first = 0)
      : data_(shared_address(data)), barriers_(shared_address(&barriers)), stage_(first % stages),
        parity_(parity ^ (first / stages % 2)) {}

 protected:
  __device__ Slot slot() const {
    return {data_ + stage_ * slot_bytes, barriers_ + stage_ * 8, barriers_ + (stages + stage_) * 8};
  }

  __device__ void advance() {
    if (++stage_ == stages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  SharedAddress data_, barriers_;
  u32 stage_, parity_;
};

/// `filled_bytes`: what is copied into a slot.
template <int stages, int slot_bytes, int filled_bytes = slot_bytes>
class RingProducer : RingWalk<stages, slot_bytes> {
 public:
  /// `first`: the tile that the walk begins with; those before have been filled.
  __device__ RingProducer(const void* data, const RingBarriers<stages>& barriers, u32 first = 0)
      : RingWalk<stages, slot_bytes>(data, barriers, 1, first) {}

  /// The next slot, to be filled with `filled_bytes` bytes: TMA counts clipped parts of a box as well.
  __device__ Slot acquire() {
    Slot slot = this->slot();
    wait_parity(slot.empty, this->parity_);  // proves that all consumers are done with the tile of the last round
    ptx::mbarrier_arrive_expect_tx(slot.full, filled_bytes);
    this->advance();
    return slot;
  }
};

/// Of slots that threads fill, who say so themselves.
template <int stages, int slot_bytes>
class RingWriter : RingWalk<stages, slot_bytes> {
 public:
  __device__ RingWriter(const void* data, const RingBarriers<stages>& barriers)
      : RingWalk<stages, slot_bytes>(data, barriers, 1) {}

  __device__ Slot acquire() {
    Slot slot = this->slot();
    wait_parity(slot.empty, this->parity_);  // proves that all consumers are done with the data of the last round
    this->advance();
    return slot;
  }
};

template <int stages, int slot_bytes>
class RingConsumer : RingWalk<stages, slot_bytes> {
 public:
  __device__ RingConsumer(const void* data, const RingBarriers<stages>& barriers)
      : RingWalk<stages, slot_bytes>(data, barriers, 0) {}

  __device__ Slot wait() {
    Slot slot = this->slot();
    wait_parity(slot.full, this->parity_);  // proves that the tile has landed
    this->advance();
    return slot;
  }
};

}  // namespace cupyfa
