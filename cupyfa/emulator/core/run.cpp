// Launch, scheduling and the regular end of a run.
#include <algorithm>
#include <sstream>

#include "machine.hpp"

namespace cupyfa::emulator {

namespace {

bool is_async_register_user(Operation o) { return o == Operation::wgmma || o == Operation::tc_ld; }

}  // namespace

void Program::finish() {
  const VectorUnit& unit = vector_unit();
  const size_t n = code.size();
  for (size_t i = 0; i < n; ++i) {
    use_begin.push_back(static_cast<i32>(uses.size()));
    def_begin.push_back(static_cast<i32>(defs.size()));
    for (i32 k = code[i].operands; k < code[i].operands + code[i].operand_count; ++k) {
      const u8 role = roles[static_cast<size_t>(k)];
      if (role & 4 || pool[static_cast<size_t>(k)] < 0) continue;
      if (role & 1) uses.push_back(pool[static_cast<size_t>(k)]);
      if (role & 2) defs.push_back(pool[static_cast<size_t>(k)]);
    }
  }
  use_begin.push_back(static_cast<i32>(uses.size()));
  def_begin.push_back(static_cast<i32>(defs.size()));
  function.assign(n, nullptr);
  touches.assign(n, 0);
  async_index.assign(static_cast<size_t>(rows), -1);
  for (size_t i = 0; i < n; ++i) {
    function[i] = unit.select(code[i]);
    const auto o = static_cast<Operation>(code[i].operation);
    has_wgmma |= o == Operation::wgmma;
    has_tcgen05 |= o >= Operation::tc_alloc && o <= Operation::tc_shift;
    if (!is_async_register_user(o)) continue;
    const auto mark = [&](const std::vector<i32>& begin, const std::vector<i32>& list) {
      for (i32 k = begin[i]; k < begin[i + 1]; ++k)
        if (list[k] >= 0 && async_index[list[k]] < 0) async_index[list[k]] = async_rows++;
    };
    mark(def_begin, defs);
    if (o == Operation::wgmma) mark(use_begin, uses);
  }
  for (size_t i = 0; i < n; ++i) {
    if (is_async_register_user(static_cast<Operation>(code[i].operation))) continue;
    const auto any = [&](const std::vector<i32>& begin, const std::vector<i32>& list) {
      for (i32 k = begin[i]; k < begin[i + 1]; ++k)
        if (list[k] >= 0 && async_index[list[k]] >= 0) return true;
      return false;
    };
    touches[i] = any(use_begin, uses) || any(def_begin, defs);
  }
}

Machine::Machine(const Program& program, std::vector<Buffer> buffers, Options options, Dim3 grid, Dim3 block,
                 Dim3 cluster, u32 dynamic_shared, std::vector<u8> params)
    : program_(program), buffers_(std::move(buffers)), options_(options), grid_(grid), block_(block),
      cluster_dims_(cluster), dynamic_shared_(dynamic_shared), params_(std::move(params)), data_(program.data),
      unit_(vector_unit()) {
  shared_bytes_ = program.dynamic_shared_offset + dynamic_shared;
  sections_ = program.has_tcgen05 ? 4 : 2;
  const u32 warps = (block.count() + lanes - 1) / lanes;
  const u32 threads = options_.resident * cluster.count() * warps * lanes;
  slot_limit_ = threads + options_.slots;
  width_ = options_.checks ? (slot_limit_ + 15) / 16 * 16 : 0;
  cluster_count_ = grid.count() / cluster.count();
  rng_ = options_.seed * 0x9e37'79b9'7f4a'7c15 + 0x1234'5678'9abc'def1;
  std::sort(buffers_.begin(), buffers_.end(), [](const Buffer& a, const Buffer& b) { return a.base < b.base; });
  for (Buffer& b : buffers_) {
    if (!b.initialised) b.written.assign(b.size, false), tracks_written_ = true;
    tracks_global_ |= b.protocol;
  }
  tracks_global_ |= options_.programmatic;
}

u64 Machine::random() {  // xorshift64*
  rng_ ^= rng_ >> 12, rng_ ^= rng_ << 25, rng_ ^= rng_ >> 27;
  return rng_ * 0x2545'f491'4f6c'dd1d;
}

void Machine::record(const Warp& w, i32 at, u8 kind, i32 object, u64 value) {
  if (options_.record)
    events.push_back({instructions, at, static_cast<i32>(w.cta->linear), w.index, kind,
                      object < 0 ? object : object - static_cast<i32>(shared_first), value});
}

void Machine::hazard(Hazard h, Severity s, const Warp* warp, u32 mask, i32 at, i32 other, std::string object,
                     std::string detail) {
  report.add(h, s, at, other, warp ? static_cast<i32>(warp->cta->linear) : -1, warp ? warp->index : -1, mask,
             std::move(object), std::move(detail));
  if (s == Severity::error && options_.stop_at_error) throw Stopped();
}

void Machine::start_warp(Cta& cta, int index) {
  Warp& w = cta.warps.emplace_back();
  w.cta = &cta;
  w.index = index;
  const u32 first = static_cast<u32>(index) * lanes, threads = block_.count();
  w.lanes_mask = threads - first >= lanes ? all_lanes : (1u << (threads - first)) - 1;
  w.regs.assign(static_cast<size_t>(program_.rows) * lanes, 0);
  w.preds.assign(static_cast<size_t>(program_.predicates), 0);
  w.preds[0] = all_lanes;
  w.groups.push_back({0, w.lanes_mask});
  w.async.assign(static_cast<size_t>(program_.async_rows), {});
  if (program_.async_rows) w.side.assign(static_cast<size_t>(program_.async_rows) * lanes, 0);
  if (options_.checks) {
    w.clock_base = static_cast<int>(next_slot_);
    next_slot_ += lanes;
    w.clocks.push_back({all_lanes, std::vector<u32>(static_cast<size_t>(width_) * sections_, 0)});
    if (program_.has_tcgen05) w.tc_slot = 0;
  }
  w.local.assign(static_cast<size_t>(program_.local_bytes) * lanes, 0xff);
  w.priority = random();
  const Cluster& cluster = *cta.cluster;
  const Dim3 in_cluster = {cta.id.x % cluster_dims_.x, cta.id.y % cluster_dims_.y, cta.id.z % cluster_dims_.z};
  for (const auto& [row, special] : program_.specials) {
    u32* r = w.regs.data() + static_cast<size_t>(row) * lanes;
    for (u32 l = 0; l < lanes; ++l) {
      const u32 t = first + l;
      u32 v = 0;
      switch (static_cast<Special>(special)) {
      case Special::tid_x:
        v = t % block_.x;
        break;
      case Special::tid_y:
        v = t / block_.x % block_.y;
        break;
      case Special::tid_z:
        v = t / (block_.x * block_.y);
        break;
      case Special::ntid_x:
        v = block_.x;
        break;
      case Special::ntid_y:
        v = block_.y;
        break;
      case Special::ntid_z:
        v = block_.z;
        break;
      case Special::ctaid_x:
        v = cta.id.x;
        break;
      case Special::ctaid_y:
        v = cta.id.y;
        break;
      case Special::ctaid_z:
        v = cta.id.z;
        break;
      case Special::nctaid_x:
        v = grid_.x;
        break;
      case Special::nctaid_y:
        v = grid_.y;
        break;
      case Special::nctaid_z:
        v = grid_.z;
        break;
      case Special::laneid:
        v = l;
        break;
      case Special::warpid:
        v = static_cast<u32>(index);
        break;
      case Special::nwarpid:
        v = (threads + lanes - 1) / lanes;
        break;
      case Special::smid:
        v = cta.linear % options_.sms;
        break;
      case Special::nsmid:
        v = options_.sms;
        break;
      case Special::clusterid_x:
        v = cluster.id.x;
        break;
      case Special::clusterid_y:
        v = cluster.id.y;
        break;
      case Special::clusterid_z:
        v = cluster.id.z;
        break;
      case Special::nclusterid_x:
        v = grid_.x / cluster_dims_.x;
        break;
      case Special::nclusterid_y:
        v = grid_.y / cluster_dims_.y;
        break;
      case Special::nclusterid_z:
        v = grid_.z / cluster_dims_.z;
        break;
      case Special::cluster_ctaid_x:
        v = in_cluster.x;
        break;
      case Special::cluster_ctaid_y:
        v = in_cluster.y;
        break;
      case Special::cluster_ctaid_z:
        v = in_cluster.z;
        break;
      case Special::cluster_nctaid_x:
        v = cluster_dims_.x;
        break;
      case Special::cluster_nctaid_y:
        v = cluster_dims_.y;
        break;
      case Special::cluster_nctaid_z:
        v = cluster_dims_.z;
        break;
      case Special::cluster_ctarank:
        v = cta.rank;
        break;
      case Special::cluster_nctarank:
        v = cluster_dims_.count();
        break;
      case Special::lanemask_eq:
        v = 1u << l;
        break;
      case Special::lanemask_lt:
        v = (1u << l) - 1;
        break;
      case Special::lanemask_le:
        v = l == 31 ? all_lanes : (2u << l) - 1;
        break;
      case Special::lanemask_gt:
        v = l == 31 ? 0 : ~((2u << l) - 1);
        break;
      case Special::lanemask_ge:
        v = ~((1u << l) - 1);
        break;
      case Special::dynamic_smem_size:
        v = dynamic_shared_;
        break;
      case Special::total_smem_size:
        v = shared_bytes_;
        break;
      case Special::shared_base:
        v = cta.rank << 24 | shared_first;
        break;
      default:
        break;
      }
      r[l] = v;
    }
  }
}

void Machine::start_cluster(u32 linear) {
  Cluster& cluster = clusters_.emplace_back();
  const Dim3 clusters = {grid_.x / cluster_dims_.x, grid_.y / cluster_dims_.y, grid_.z / cluster_dims_.z};
  cluster.id = {linear % clusters.x, linear / clusters.x % clusters.y, linear / (clusters.x * clusters.y)};
  const u32 threads = block_.count(), warps = (threads + lanes - 1) / lanes;
  for (u32 rank = 0; rank < cluster_dims_.count(); ++rank) {
    Cta& cta = cluster.ctas.emplace_back();
    cta.cluster = &cluster;
    cta.rank = rank;
    cta.home = linear << 5 | rank;
    cta.id = {cluster.id.x * cluster_dims_.x + rank % cluster_dims_.x,
              cluster.id.y * cluster_dims_.y + rank / cluster_dims_.x % cluster_dims_.y,
              cluster.id.z * cluster_dims_.z + rank / (cluster_dims_.x * cluster_dims_.y)};
    cta.linear = cta.id.x + grid_.x * (cta.id.y + grid_.y * cta.id.z);
    cta.shared.assign(shared_first + shared_bytes_, 0xff);  // NaN in every float format
    if (options_.checks) cta.shadow = std::make_unique<Shadow>(shared_first + shared_bytes_);
    cta.barrier_at.assign(cta.shared.size() / 8 + 1, -1);
    // As many registers as fit, in units of 8 a thread: what ptxas gives a kernel with its launch bounds.
    u32 registers =
        options_.launch_registers ? options_.launch_registers : std::min(255u, 65536 / (warps * lanes) / 8 * 8);
    if (registers == 255) registers = 248;
    for (u32 i = 0; i < warps; ++i) start_warp(cta, static_cast<int>(i));
    for (Warp& w : cta.warps) w.registers = registers, warps_.push_back(&w);
    cta.alive = static_cast<int>(warps);
    cta.warpgroups.resize((warps + 3) / 4);
    if (options_.checks)
      for (NamedBarrier& b : cta.named) b.clock.assign(static_cast<size_t>(width_) * sections_, 0);
  }
  cluster.alive = static_cast<int>(cluster.ctas.size());
  cluster.barrier_expected = cluster_dims_.count() * threads;
  if (options_.checks) cluster.barrier_clock.assign(static_cast<size_t>(width_) * sections_, 0);
}

void Machine::run() {
  try {
    while (next_cluster_ < cluster_count_) {
      clusters_.clear();
      warps_.clear();
      copies_.clear();
      tc_queues_.clear();
      next_slot_ = 0, grid_slot_ = 0;
      releases_.clear();
      global_shadow_.clear();
      for (const Buffer& b : buffers_)
        global_shadow_.push_back(
            options_.checks && b.protocol ? std::make_unique<Shadow>(static_cast<u32>(b.size), true) : nullptr);
      clc_failed_ = false;
      for (u32 i = 0; i < options_.resident && next_cluster_ < cluster_count_; ++i) start_cluster(next_cluster_++);
      for (Cluster& cluster : clusters_)
        for (Cta& cta : cluster.ctas)
          for (Warpgroup& g : cta.warpgroups)
            if (options_.checks && program_.has_wgmma) g.slot = new_slot(4);
      if (options_.checks && options_.programmatic) grid_slot_ = new_slot();
      run_resident();
    }
  } catch (const Stopped&) {}
}

bool Machine::can_run(const Warp& w) const {
  for (const Group& g : w.groups)
    if (!g.blocked || g.seen != event_count_ || timeout_wake_) return true;
  return false;
}

Warp* Machine::pick_warp() {
  const size_t n = warps_.size();
  const Policy::Order order = options_.policy.order;
  const size_t start = order == Policy::round_robin ? turn_++ % n : order == Policy::random ? random() % n : 0;
  Warp *best = nullptr, *polling = nullptr;
  for (size_t i = 0; i < n; ++i) {
    Warp* w = warps_[(start + i) % n];
    if (w->done() || !can_run(*w)) continue;
    if (order == Policy::round_robin || order == Policy::random) return w;
    if (w->polled == event_count_) {  // it has looked at memory, and nothing has happened since: all others come first
      if (!polling || w->polled_at < polling->polled_at) polling = w;
      continue;
    }
    const bool better = !best || (order == Policy::priorities ? w->priority > best->priority
                                  : order == Policy::first    ? w->index < best->index
                                                              : w->index > best->index);
    if (better) best = w;
  }
  if (!best) return polling;
  if (random() % 64 == 0) best->priority = random() >> 8;  // PCT changes priorities now and then
  return best;
}

void Machine::run_resident() {
  const Policy& p = options_.policy;
  u64 polls = 0;
  while (!warps_.empty()) {
    const u64 events_before = event_count_;
    if (p.copies > 0 && (p.copies >= 1 || chance() < p.copies)) {
      while (run_async(true, false) && p.copies >= 1) {}
    }
    if (p.products > 0 && (p.products >= 1 || chance() < p.products)) {
      while (run_async(false, true) && p.products >= 1) {}
    }
    Warp* w = pick_warp();
    if (!w) {
      if (run_async(true, true)) continue;
      if (event_count_ == last_progress_) {
        bool registers = false;
        for (const Warp* warp : warps_)
          for (const Group& g : warp->groups)
            registers |=
                static_cast<Operation>(program_.code[static_cast<size_t>(g.pc)].operation) == Operation::setmaxnreg;
        report_stuck(registers ? Hazard::REGISTERS_POOL_DEADLOCK : Hazard::PROGRESS_DEADLOCK, "nothing can run");
      }
      last_progress_ = event_count_;
      timeout_wake_ = true;  // suspended try_waits time out and return false, once
      for (Warp* warp : warps_) {
        if (!warp->done()) run_warp(*warp);
      }
      timeout_wake_ = false;
      continue;
    }
    run_warp(*w);
    if (w->done())
      warps_.erase(std::remove_if(warps_.begin(), warps_.end(), [](Warp* x) { return x->done(); }), warps_.end());
    // Warps that spin on memory must not starve the engines that they wait for.
    polls = event_count_ == events_before ? polls + 1 : 0;
    if (polls >= 20) run_async(true, true), polls = 0;
    if (event_count_ != idle_events_) idle_events_ = event_count_, idle_since_ = instructions;
    if (options_.max_instructions && instructions > options_.max_instructions)
      report_stuck(Hazard::PROGRESS_TIMEOUT, "stopped after " + std::to_string(instructions) + " warp instructions");
    if (options_.max_idle && instructions - idle_since_ > options_.max_idle)
      report_stuck(Hazard::PROGRESS_TIMEOUT, "stopped after " + std::to_string(instructions - idle_since_) +
                                                 " warp instructions in which nothing happened");
  }
  while (run_async(true, true)) {}
  for (Cluster& cluster : clusters_)
    for (Cta& cta : cluster.ctas) {
      for (MBarrier& b : cta.barriers) {
        if (b.valid && (b.pending != b.count || b.tx != 0))
          hazard(Hazard::MBARRIER_LEFT_MID_PHASE, Severity::review, nullptr, 0, b.init_at, -1, name_of(cta, b),
                 "at the end of the CTA " + std::to_string(b.count - b.pending) + " of " + std::to_string(b.count) +
                     " arrivals have come and " + std::to_string(b.tx) + " bytes are pending");
      }
      for (size_t i = 0; i < cta.named.size(); ++i)
        if (cta.named[i].arrived)
          hazard(Hazard::BARRIER_LEFTOVER, Severity::error, nullptr, 0, cta.named[i].at, -1,
                 "named barrier " + std::to_string(i),
                 "at the end of the CTA " + std::to_string(cta.named[i].arrived) + " of " +
                     std::to_string(cta.named[i].expected) + " threads have arrived");
      if (cta.tmem) check_tmem_exit(cta);
    }
}

/// One asynchronous operation of the engines named, in the order that the policy wants.
bool Machine::run_async(bool copies, bool products) {
  if (copies && !copies_.empty()) {
    const size_t n = copies_.size();
    const Policy& p = options_.policy;
    const size_t i = p.newest_first ? n - 1 : p.order == Policy::random ? random() % n : 0;
    ++async_operations;
    run_copy(i);
    event();
    return true;
  }
  if (products) {
    for (Cluster& cluster : clusters_)
      for (Cta& cta : cluster.ctas)
        for (Warpgroup& group : cta.warpgroups)
          if (run_wgmma(cta, group)) {
            ++async_operations;
            event();
            return true;
          }
    for (auto& [key, queue] : tc_queues_)
      if (run_tcgen05(queue)) {
        ++async_operations;
        event();
        return true;
      }
  }
  return false;
}

void Machine::run_warp(Warp& w) {
  const Instruction* code = program_.code.data();
  const i32* pool = program_.pool.data();
  const LaneFunction* function = program_.function.data();
  const Registers registers = w.registers_view(program_);
  const u64 left = options_.max_instructions
                       ? options_.max_instructions + 1 - std::min(instructions, options_.max_instructions)
                       : 1 << 20;
  int budget = options_.policy.quantum ? 1 + static_cast<int>(random() % static_cast<u64>(options_.policy.quantum))
                                       : static_cast<int>(std::min<u64>(left, 1 << 20));
  while (!w.groups.empty() && budget > 0) {
    // The lowest group that can go on: lanes that left a loop early wait at its end until the others come.
    Group* g = nullptr;
    for (Group& c : w.groups) {
      if (c.blocked && c.seen == event_count_ && !timeout_wake_) continue;
      if (!g || c.pc < g->pc) g = &c;
    }
    if (!g) return;
    i32 limit = INT32_MAX;
    if (w.groups.size() > 1) {
      bool merged = false;
      for (size_t i = 0; i < w.groups.size(); ++i) {
        Group& c = w.groups[i];
        if (&c == g) continue;
        if (c.pc == g->pc && c.stage == 0 && g->stage == 0) {
          g->mask |= c.mask;
          g->blocked = false;
          const size_t me = static_cast<size_t>(g - w.groups.data());
          w.groups.erase(w.groups.begin() + static_cast<std::ptrdiff_t>(i));
          g = &w.groups[me > i ? me - 1 : me];
          merged = true;
          break;
        }
        if (c.pc > g->pc) limit = std::min(limit, c.pc);
      }
      if (merged) continue;
    }
    g->blocked = false;
    while (budget-- > 0) {
      const i32 pc = g->pc;
      if (pc >= limit) break;
      const Instruction& in = code[pc];
      ++instructions, ++w.time;
      u32 mask = g->mask;
      if (in.guard >= 0) {
        const u32 p = registers.predicates[in.guard];
        mask &= in.guard_negated ? ~p : p;
        if (mask == 0) {
          ++g->pc;
          continue;
        }
      }
      if (program_.touches[pc] && options_.checks) check_rows(w, in, pc);
      if (function[pc]) {
        function[pc](in, pool + in.operands, registers, mask);
        ++g->pc;
        continue;
      }
      const size_t groups_before = w.groups.size();
      const Step step = execute(w, *g, in, mask);
      if (step == Step::next) {
        const bool again = g->repeated < in.repeat;
        g->repeated = again ? g->repeated + 1 : 0;
        if (!again) ++g->pc;
        if (!issued_) continue;
        issued_ = false;  // the scheduler may complete at once what this instruction has issued
        return;
      }
      if (step == Step::block) {
        g->blocked = true;
        g->seen = event_count_;
        if (w.groups.size() == 1) return;
        break;
      }
      if (step == Step::yield) {
        ++g->pc;
        w.polled = event_count_, w.polled_at = instructions;
        return;
      }
      if (step == Step::stop) return;
      if (w.groups.size() != groups_before || limit != INT32_MAX) break;  // jump
    }
  }
}

void Machine::leave(Cta& cta) {
  if (--cta.alive > 0) return;
  if (options_.checks) {
    check_debts(cta);
    for (Warp& w : cta.warps)
      for (auto& [lane, queue] : w.bulk)
        if (queue.last && section(own_clock(w, 1u << lane).v, 0)[queue.slot] < queue.last)
          hazard(Hazard::BULK_EXIT_WITH_STORE_UNWAITED, Severity::error, &w, 1u << lane, queue.at, -1, "CTA",
                 "the thread that issued this store never waited for its group to read shared memory");
  }
  --cta.cluster->alive;
}

}  // namespace cupyfa::emulator
