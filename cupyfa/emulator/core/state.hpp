// What the machine holds: the program and its launch, warps, CTAs, barriers, asynchronous operations.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "isa.hpp"
#include "report.hpp"
#include "shadow.hpp"
#include "vector.hpp"

namespace cupyfa::emulator {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

// --- what is run -----------------------------------------------------------------------------------------------------

struct Program {
  std::vector<Instruction> code;
  std::vector<i32> pool;
  std::vector<u32> constants;  ///< 32 lanes each
  i32 rows = 0, predicates = 1;
  std::vector<std::pair<i32, i32>> specials;  ///< row, Special
  std::vector<u8> data;  ///< .global and .const variables
  u32 param_bytes = 0, static_shared = 0, dynamic_shared_offset = 0, local_bytes = 0;

  std::vector<u8> roles;  ///< of each operand: 1 read, 2 written, 4 a predicate

  // Made by finish(): rows that an instruction reads and writes, as spans of these lists.
  std::vector<i32> use_begin, uses, def_begin, defs;
  std::vector<LaneFunction> function;  ///< null: the machine executes it
  std::vector<u8> touches;  ///< the instruction has a row that some wgmma or tcgen05.ld uses
  std::vector<i32> async_index;  ///< row -> its number among those rows, -1: none
  i32 async_rows = 0;
  bool has_tcgen05 = false, has_wgmma = false;

  void finish();
};

struct Dim3 {
  u32 x = 1, y = 1, z = 1;
  u32 count() const { return x * y * z; }
};

struct Buffer {
  u64 base, size;
  u8* data;
  bool writable, protocol;
  std::string name;
  bool initialised = true;
  std::vector<bool> written{};  ///< bytes, of a buffer that had no values at launch
};

/// Who runs when. A probability of 1 completes asynchronous work at once, 0 only when no warp can run.
struct Policy {
  double copies = 1, products = 1;  ///< chance of an asynchronous operation at each scheduling step
  bool newest_first = false;  ///< copies complete in reverse order
  int pieces = 1;  ///< a copy lands in so many parts
  int quantum = 0;  ///< instructions before another warp may run, 0: until it waits
  enum Order { round_robin, random, priorities, first, last } order = round_robin;
  double spurious = 0;  ///< chance that try_wait fails for no reason
  bool impatient = false;  ///< try_wait fails once before it suspends: its time limit is short
  bool random_elect = false;
};

struct Options {
  Policy policy;
  u64 seed = 0;
  bool checks = true;
  bool strict_warpgroup = false;  ///< a wait by one warp proves only its own part of a wgmma
  bool review = false;  ///< report findings on which sources disagree
  bool stop_at_error = false;
  bool record = false;  ///< keep events for a timeline
  bool lenient_tcgen05 = false;  ///< missing tcgen05 fences and waits are information, not errors
  bool programmatic = false;  ///< launched while the grid before it may still run
  u64 max_instructions = 0;  ///< of the whole run; 0: as many as it takes
  u64 max_idle = 0;  ///< instructions in a row without an event; 0: as many as it takes
  u32 sms = 132, resident = 1;
  u32 slots = 512;  ///< asynchronous clock slots of the resident clusters
  u32 launch_registers = 0;  ///< per thread, 0: as many as fit
};

struct Event {
  u64 time;
  i32 at, cta, warp;
  u8 kind;  ///< 0 issue, 1 completion, 2 wait, 3 release
  i32 object;  ///< shared offset of the mbarrier, or slot
  u64 value;  ///< phase or group
};

// --- state -----------------------------------------------------------------------------------------------------------

struct Cta;
struct Cluster;
class Machine;

/// Knowledge of lanes that have learned the same. Sections of `width` slots each: happens-before; generic accesses that
/// the async proxy may rely on; tcgen05 accesses published by fence::before; and those visible after fence::after.
struct LaneClock {
  u32 mask;
  std::vector<u32> v;
};

/// Lanes of a warp at the same instruction.
struct Group {
  i32 pc;
  u32 mask;
  u8 stage = 0;  ///< of an instruction that waits: what it has already done
  bool blocked = false;
  u64 seen = 0;  ///< number of events when it last could not go on
  u64 data = 0;  ///< of a waiting instruction
  u8 repeated = 0;  ///< times that it has executed its instruction, of those that a mutation adds
};

struct BulkGroup {
  int reading = 0, writing = 0;
};
struct BulkQueue {  ///< of one thread
  std::vector<BulkGroup> groups;  ///< groups[0] is number `first`; the last one is open
  u32 first = 1;  ///< the number of groups.front()
  u32 slot = 0;  ///< slot: reads done, slot + 1: writes done
  u32 last = 0;  ///< group of the newest operation
  i32 at = -1;
};

struct FencePoint {  ///< what lanes knew at their last fence: a strong write after it publishes that
  u32 mask;
  Strength scope;
  std::vector<u32> v;
};
struct Observed {  ///< what strong reads that do not acquire have met: a fence after them acquires it
  u32 mask, home;
  std::vector<u32> v;
};
struct Release {  ///< published at a place in memory
  u32 home;
  Strength scope;
  std::vector<u32> v;
};

struct AsyncRow {  ///< a register row that wgmma or tcgen05.ld may be using
  u64 written_by = 0;  ///< operation that will write it, 0: none
  u64 read_by = 0;  ///< operation that may still read it
  i32 at = -1;
  u64 touched = 0;  ///< instruction count of the last ordinary access
};

struct Warp {
  Cta* cta = nullptr;
  int index = 0;  ///< in its CTA
  int clock_base = 0;  ///< slot of its lane 0
  u32 epoch = 1;
  std::vector<u32> regs, preds;
  std::vector<Group> groups;
  u32 exited = 0, lanes_mask = 0;
  std::vector<LaneClock> clocks;
  std::vector<AsyncRow> async;
  std::vector<u32> side;  ///< values of rows in flight
  int async_pending = 0;  ///< rows in flight
  u64 wgmma_issued = 0, wgmma_groups = 0, wgmma_in_group = 0;
  std::vector<u64> wgmma_group_end;  ///< newest operation of each committed group
  u64 fence_time = 0, time = 0;  ///< instruction counts
  std::map<int, BulkQueue> bulk;  ///< by lane
  u32 cp_slot = 0, cp_groups = 0;
  std::vector<u32> cp_pending;  ///< copies of each closed group that are in flight
  std::unordered_map<u32, u64> phases;  ///< last completed phase seen of each mbarrier
  u32 registers = 0;
  u64 priority = 0;
  u32 cluster_arrived = 0;  ///< lanes that have arrived at the generation of the cluster barrier that is open
  u32 cluster_unpaired = 0;  ///< lanes that have arrived and not waited
  u64 cluster_target = 0;  ///< generation that they will wait for
  u64 cluster_waited = 0;  ///< generation whose end the warp has seen
  u64 polled = 0, polled_at = 0;  ///< number of events, and of instructions, when it last looked at memory in vain
  std::vector<FencePoint> fences;
  std::vector<Observed> observed;
  bool gave_up = false;  ///< its last try_wait failed because of Policy::impatient
  std::vector<u8> local;
  // tcgen05
  u32 tc_slot = 0;  ///< tc_slot: loads done, tc_slot + 1: stores done; 0: none yet
  u32 tc_loads = 0, tc_stores = 0;
  std::vector<i32> tc_rows;  ///< registers that loads in flight will write

  bool done() const { return groups.empty(); }
  Registers registers_view(const Program& p) { return {regs.data(), p.constants.data(), preds.data()}; }
};

struct MBarrier {
  bool valid = false, fenced = false;
  u32 offset = 0, slot = 0;
  u32 count = 0, pending = 0;
  i64 tx = 0;
  u64 phase = 0;  ///< phases completed
  Stamp init;
  i32 init_at = -1;
  u64 announced = 0;  ///< generation of the cluster barrier that carries its fenced initialisation; 0: none
  int in_flight = 0;  ///< copies that will complete at this barrier in this phase
  std::vector<u32> arriving, completed;  ///< clocks: of the phase that is open, of the last one that is complete
};

struct NamedBarrier {
  u32 expected = 0, arrived = 0;
  bool everyone = false;  ///< it names no count: threads that have ended do not matter
  std::array<u32, 32> present{};  ///< lanes of each warp that have arrived
  u64 generation = 0;
  i32 at = -1;
  u32 votes = 0, vote_and = 1, vote_or = 0;
  u32 result_popc = 0, result_and = 0, result_or = 0;
  std::vector<u32> clock;
};

struct WgmmaOperation {
  std::array<i32, 4> at{-1, -1, -1, -1};
  std::array<bool, 4> issued{}, scale{};
  std::array<u64, 4> group{};
  std::array<std::array<u64, 2>, 4> descriptors{};
};
struct Warpgroup {
  std::deque<WgmmaOperation> queue;
  u64 first = 1;  ///< number of queue.front(); operations count from 1
  u64 done = 0;  ///< operations executed
  u32 slot = 0;  ///< four slots, one a warp
};

struct TmemReader {
  Stamp stamp;
  i32 at = -1;
  u8 halves = 0;
};
struct TmemCell {  ///< one column of the 32 lanes of a warp; bits of `halves`: lanes 0 to 15, 16 to 31
  enum Kind : u8 { nothing, product, store, copy } kind = nothing;  ///< what wrote it last
  u8 halves = 0;  ///< of that write
  u8 initialised = 0;  ///< halves
  i32 writer_at = -1;
  Stamp writer;
  u64 accumulator = 0;  ///< of a product: place and shape
  std::vector<TmemReader> readers;
};
struct Tmem {
  static constexpr u32 columns = 512, lanes = 128;
  std::vector<float> cells = std::vector<float>(columns * lanes);  ///< [column][lane]
  std::vector<TmemCell> shadow;  ///< [column][lane quarter]
  std::array<u16, 4 * columns> pending{};  ///< [column][quarter]: writes issued, not executed
  std::array<u16, columns> allocation{};  ///< number of the allocation, 0: free
  u16 allocations = 0;
  u32 last_columns = columns;
  i32 allocated_at = -1, group_at = -1;
  bool relinquished = false;
  u8 group = 0;  ///< cta_group of the instructions so far
  u64 pair_begun = 0, pair_done = 0;  ///< allocations, as the warps of both CTAs must make them together
  u32 pair_column = 0;  ///< of the last one that the other CTA has done
};

struct Debt {  ///< what has to be over, to a thread's knowledge, when a CTA ends
  Hazard hazard;
  Stamp stamp;
  i32 at, cta, warp;
};

struct Cta {
  Cluster* cluster = nullptr;
  u32 rank = 0, linear = 0;
  u32 home = 0;  ///< as in Access
  Dim3 id;
  std::vector<u8> shared;
  std::unique_ptr<Shadow> shadow;
  std::vector<i32> barrier_at;  ///< index into barriers, by offset / 8
  std::deque<MBarrier> barriers;
  std::array<NamedBarrier, 16> named;
  std::deque<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  u32 pool = 0;  ///< free registers
  int alive = 0;
  std::unique_ptr<Tmem> tmem;
  std::vector<Debt> debts;
  bool exited() const { return alive == 0; }
};

struct Cluster {
  Dim3 id;
  std::deque<Cta> ctas;
  u32 barrier_expected = 0;
  u64 barrier_generation = 0;
  std::vector<u32> barrier_clock, barrier_completed;  ///< of the generation that is open, of the last one
  int alive = 0;
};

// --- asynchronous copies ---------------------------------------------------------------------------------------------

struct CopyRow {
  u64 global;  ///< address of the row's first element
  u32 shared;  ///< offset before swizzling
  i32 begin, end;  ///< elements inside the tensor
};
struct Copy {
  enum Kind : u8 { to_shared, to_global, shared_to_shared, reduce_global, reduce_shared, async16 } kind;
  Cta* cta;  ///< of the issuing thread
  Warp* warp;
  int lane;
  i32 at;
  std::vector<CopyRow> rows;
  size_t next = 0;
  u32 element = 1, row_elements = 0, element_stride = 1, swizzle = 0;
  u8 type = 0, fill = 0;
  Reduction reduction = Reduction::add;
  u32 targets = 0;  ///< CTAs of the cluster that receive it
  u32 source_offset = 0;
  u32 barrier_offset = 0;
  bool has_barrier = false;
  u32 barrier_mask = 0xff;  ///< applied to the receiver's rank: the leader of a pair
  u32 bytes = 0;
  std::array<u64, 16> phase{};  ///< of the mbarrier at issue, by the rank of the CTA that receives it
  u32 group = 0;  ///< of the bulk queue
  std::vector<u8> buffer;
  bool read_done = false;
};

struct TcOperation {
  enum Kind : u8 { product, commit, copy } kind = product;
  Warp* warp = nullptr;
  i32 at = -1;
  u32 number = 0;  ///< in its queue, from 1
  u32 d = 0, a_tmem = 0;  ///< addresses in tensor memory
  u64 a = 0, b = 0;  ///< matrix descriptors
  u32 idesc = 0;
  float scale = 0;  ///< of D before the products are added
  std::array<u32, 8> mask{};  ///< lanes that are not written
  u32 barrier = 0, targets = 0;
  std::vector<u32> clock;  ///< of a commit: what it publishes
};
struct TcQueue {  ///< of one issuing thread
  std::deque<TcOperation> operations;
  u32 issued = 0, slot = 0;
};

enum class Step { next, jump, block, yield, stop };

/// Where an address points.
struct Place {
  Space space;
  Cta* cta;
  u32 offset;
  u64 address;
};

}  // namespace cupyfa::emulator
