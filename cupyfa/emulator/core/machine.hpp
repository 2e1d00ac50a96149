// The machine: warps, CTAs and asynchronous engines of the clusters that are resident together, and their scheduler.
//
//   run.cpp        launch, scheduler, policies
//   progress.cpp   deadlock reports
//   execute.cpp    one instruction of a warp, control; memory.cpp: loads, stores, atomics; collectives.cpp: of all lanes
//   order.cpp      what accesses to shared and global memory are checked for: order, races, who may end
//   barriers.cpp   mbarriers, named and cluster barriers, fences, register pool
//   copies.cpp     asynchronous copies in flight; tensor_copies.cpp, bulk_copies.cpp: the instructions that issue them
//   wgmma.cpp      warpgroup products; operands.hpp reads matrix descriptors
//   tcgen05.cpp    products, copies and commits of tcgen05
//   tmem.cpp       tensor memory: allocation and shadow; tmem_access.cpp: loads and stores; tcgen05.hpp: what they share
#pragma once
#include "state.hpp"

namespace cupyfa::emulator {

class Stopped {};  ///< thrown to end the run: a trap, the instruction limit, a deadlock, stop_at_error

class Machine {
 public:
  Machine(const Program& program, std::vector<Buffer> buffers, Options options, Dim3 grid, Dim3 block, Dim3 cluster,
          u32 dynamic_shared, std::vector<u8> params);
  void run();

  Report report;
  std::vector<Event> events;
  u64 instructions = 0, async_operations = 0, checks = 0, shuffles = 0, votes = 0;

 private:
  // run.cpp
  void start_cluster(u32 linear);
  void start_warp(Cta& cta, int index);
  void run_resident();
  bool run_async(bool copies, bool products);
  Warp* pick_warp();
  void run_warp(Warp& warp);
  bool can_run(const Warp& warp) const;
  void leave(Cta& cta);
  double chance() { return static_cast<double>(random() >> 11) * 0x1p-53; }
  u64 random();
  void event() { ++event_count_; }
  void record(const Warp& w, i32 at, u8 kind, i32 object, u64 value);
  void hazard(Hazard h, Severity s, const Warp* warp, u32 lanes, i32 at, i32 other, std::string object,
              std::string detail = {});
  bool reported(Hazard h, i32 at, i32 other) { return report.known(h, at, other); }

  // progress.cpp
  void report_stuck(Hazard h, const std::string& why);
  std::string waits_for(Warp& w, const Group& group);

  // order.cpp
  enum class Use : u8 { read, write, update };
  Access access_of(Warp& w, int lane, Strength strength, i32 at);
  void shared_access(Warp& w, int lane, Cta& cta, u32 offset, u32 bytes, Use use, i32 at, Strength strength = weak);
  void global_access(Warp& w, int lane, u64 address, u32 bytes, Use use, i32 at, Strength strength);
  void memory_access(Warp& w, int lane, const Place& place, u32 bytes, Use use, i32 at, Order order, Scope scope);
  void synchronise(Warp& w, u32 bit, u64 key, Use use, Order order, Strength strength);
  void fence(Warp& w, u32 mask, Strength scope);
  void copy_access(Copy& c);
  void after_grid(Warp& w, u32 bit, i32 at);
  void check_written(u64 address, u64 bytes, Warp& w, u32 lanes, i32 at);
  void conflict(const Conflict& c, const Warp& w, u32 lanes, i32 at, const Cta& cta, u32 offset);
  void race(const Conflict& c, const Warp& w, u32 lanes, i32 at, const Buffer& buffer, u64 address);
  void owe(Cta& cta, Hazard h, const Stamp& stamp, i32 at, const Warp& w);
  void check_debts(Cta& cta);
  int find_buffer(u64 address, u64 bytes);
  bool tracked(const Place& p) const {
    return options_.checks && (p.space == Space::shared || (tracks_global_ && p.space == Space::global));
  }

  // execute.cpp
  Step execute(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step branch(Warp& w, Group& g, const Instruction& in, u32 mask);
  void check_rows(Warp& w, const Instruction& in, i32 pc);
  bool converged(Warp& w, Group& g, const Instruction& in, u32 mask, const char* what);
  u32 uniform(const Warp& w, const u32* row, u32 mask, i32 at, const char* what);

  // memory.cpp
  u64 address(const Registers& r, const i32* e, int lane, bool wide) const;
  Place locate(Warp& w, Space space, u64 address);
  u8* memory(Warp& w, const Place& place, u32 bytes, bool write, int lane, i32 at);
  u8* global_memory(u64 address, u64 bytes, bool write, const Warp* w, u32 lanes, i32 at);
  Step load(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step store(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step atomic(Warp& w, Group& g, const Instruction& in, u32 mask);

  // collectives.cpp
  Step matrix(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step warp_collective(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step shuffle(Warp& w, const Instruction& in, u32 mask);
  Step vote(Warp& w, const Instruction& in, u32 mask);

  // clocks
  u32* section(std::vector<u32>& clock, int s) { return clock.data() + static_cast<size_t>(s) * width_; }
  const u32* section(const std::vector<u32>& clock, int s) const {
    return clock.data() + static_cast<size_t>(s) * width_;
  }
  u32 new_slot(u32 span = 1);
  void publish(Warp& w, u32 mask, std::vector<u32>& into);
  void acquire(Warp& w, u32 mask, const std::vector<u32>& from);
  void learn(Warp& w, u32 mask, u32 slot, u32 epoch, bool tc = false);
  void sync_lanes(Warp& w, u32 mask);
  const std::vector<u32>& knowledge(Warp& w, u32 mask);
  void fence_proxy(Warp& w, u32 mask);
  LaneClock& own_clock(Warp& w, u32 mask);

  // barriers.cpp
  Step mbarrier(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step mbarrier_wait(Warp& w, Group& g, const Instruction& in, u32 mask);
  MBarrier* barrier_at(Warp* w, Cta& cta, u32 offset, u32 lanes, i32 at, bool remote_or_async);
  void arrive(Cta& cta, MBarrier& b, u32 count, i32 at, Warp* w);
  void complete_tx(Cta& cta, MBarrier& b, i64 bytes, i32 at);
  void settle(Cta& cta, MBarrier& b);
  std::string name_of(const Cta& cta, const MBarrier& b) const;
  Step named_barrier(Warp& w, Group& g, const Instruction& in, u32 mask);
  bool aligned_here(Warp& w, Group& g, const Instruction& in, u32 mask);
  void settle_named(Cta& cta, u32 id);
  void leave_barriers(Warp& w, u32 mask);
  Step cluster_barrier(Warp& w, Group& g, const Instruction& in, u32 mask);
  void settle_cluster_barrier(Cluster& cluster);
  Step set_registers(Warp& w, Group& g, const Instruction& in, u32 mask);

  // tensor_copies.cpp, bulk_copies.cpp
  Step tensor_copy(Warp& w, const Instruction& in, u32 mask);
  Step bulk_copy(Warp& w, const Instruction& in, u32 mask);
  Step bulk_group(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step cp_async(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step launch_control(Warp& w, const Instruction& in, u32 mask);

  // copies.cpp
  BulkQueue& bulk_queue(Warp& w, int lane);
  void issue(Copy&& copy);
  bool run_copy(size_t index);
  void land(Copy& copy, size_t first, size_t last);
  void stamp_copy(Copy& copy);

  // wgmma.cpp
  Step wgmma(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step wgmma_wait(Warp& w, Group& g, const Instruction& in, u32 mask);
  bool run_wgmma(Cta& cta, Warpgroup& group);
  void finish_rows(Warp& w, u64 done);
  void operand_footprint(Warp& w, Cta& cta, const Access& access, u64 descriptor, bool mn_major, Type type, int mn,
                         i32 at);

  // tcgen05.cpp, tmem.cpp: the rest is in struct Tcgen05
  Step tcgen05(Warp& w, Group& g, const Instruction& in, u32 mask);
  bool run_tcgen05(TcQueue& queue);
  void check_tmem_exit(Cta& cta);

  friend struct Tcgen05;

  const Program& program_;
  std::vector<Buffer> buffers_;
  Options options_;
  Dim3 grid_, block_, cluster_dims_;
  u32 dynamic_shared_, shared_bytes_;
  std::vector<u8> params_;
  std::vector<u8> data_;  ///< .global and .const variables: each launch begins with the initial ones
  const VectorUnit& unit_;
  std::deque<Cluster> clusters_;
  std::vector<Warp*> warps_;  ///< alive, of the resident clusters
  std::vector<Copy> copies_;
  std::map<std::pair<Cta*, int>, TcQueue> tc_queues_;  ///< by CTA and thread
  u32 width_ = 0, sections_ = 2, next_slot_ = 0, slot_limit_ = 0, grid_slot_ = 0;
  std::vector<u32> scratch_;
  u64 event_count_ = 1, rng_, turn_ = 0, last_progress_ = 0;
  bool timeout_wake_ = false;
  bool issued_ = false;  ///< an asynchronous operation, since the scheduler last looked
  u32 next_cluster_ = 0, cluster_count_ = 0;
  u64 last_buffer_ = 0;
  bool tracks_global_ = false, tracks_written_ = false;  ///< some global memory is looked at: its order, its values
  std::vector<std::unique_ptr<Shadow>> global_shadow_;  ///< of the buffers that CTAs synchronise by
  std::unordered_map<u64, std::vector<Release>> releases_;  ///< by address; of shared memory by CTA and offset
  u64 idle_since_ = 0, idle_events_ = 0;
  bool clc_failed_ = false, tc_order_noted_ = false;
};

}  // namespace cupyfa::emulator
