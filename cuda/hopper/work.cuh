// How a query tile passes through a CTA. The producer posts its coordinates together with its Q; consumers leave their O
// in the same slot; the storer takes O out and gives the slot back.
#pragma once
#include "ring.cuh"
#include "spec.cuh"
#include "tile_scheduler.cuh"

namespace cupyfa::hopper {

template <int stages>
struct WorkBarriers {
  RingBarriers<stages> q;  // full: coordinates and Q are here; empty: O has left
  u64 staged[stages];  // O is in the slot
};

/// By one thread. `stagers`: arrivals that say that O is in the slot.
template <class Tile, int stages>
__device__ inline void initialise(WorkBarriers<stages>& barriers, Tile (&tiles)[stages], u32 stagers) {
  initialise(barriers.q, 1);
  for (int stage = 0; stage < stages; ++stage) {
    ptx::mbarrier_init(shared_address(&barriers.staged[stage]), stagers);
    tiles[stage] = {};  // close() writes a part of it, and readers load all
  }
}

/// A tile in its slot. All else is computed from that, or read where it is needed: registers are scarce.
struct Work {
  u32 stage;
  u32 parity;  // of this round of the ring
};

template <class Tile, int stages, int slot_bytes>
class WorkProducer : RingWalk<stages, slot_bytes> {
 public:
  __device__ WorkProducer(const void* data, const WorkBarriers<stages>& barriers, Tile (&tiles)[stages])
      : RingWalk<stages, slot_bytes>(data, barriers.q, 1), tiles_(tiles) {}

  /// The next slot, to be filled with `q_bytes` bytes of Q.
  __device__ Slot post(const Tile& tile, u32 q_bytes) {
    const Slot slot = empty();
    tiles_[this->stage_] = tile;
    this->advance();
    ptx::mbarrier_arrive_expect_tx(slot.full, q_bytes);
    return slot;
  }

  /// Tells the other roles that there is no more.
  __device__ void close() {
    const Slot slot = empty();
    tiles_[this->stage_].m = -1;
    ptx::mbarrier_arrive(slot.full);
  }

 private:
  __device__ Slot empty() const {
    const Slot slot = this->slot();
    wait_parity(slot.empty, this->parity_);  // proves that the O of the last round has left, and its tile is done
    return slot;
  }

  Tile (&tiles_)[stages];
};

template <class Tile, int stages, int slot_bytes>
class WorkConsumer : RingWalk<stages, slot_bytes> {
 public:
  __device__ WorkConsumer(const void* data, const WorkBarriers<stages>& barriers, const Tile (&tiles)[stages])
      : RingWalk<stages, slot_bytes>(data, barriers.q, 0), staged_(shared_address(&barriers.staged)), tiles_(tiles) {}

  __device__ Work next() {
    wait_parity(this->slot().full, this->parity_);  // proves that the coordinates and Q have landed
    const Work work = {this->stage_, this->parity_};
    this->advance();
    return work;
  }

  __device__ Tile tile(const Work& work) const { return tiles_[work.stage]; }
  __device__ SharedAddress data(const Work& work) const { return this->data_ + work.stage * slot_bytes; }
  __device__ SharedAddress staged(const Work& work) const { return staged_ + work.stage * 8; }
  __device__ SharedAddress empty(const Work& work) const { return this->barriers_ + (stages + work.stage) * 8; }

 private:
  SharedAddress staged_;
  const Tile (&tiles_)[stages];
};

}  // namespace cupyfa::hopper
