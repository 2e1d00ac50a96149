// Who waits for what, when a run does not come to its end.
#include <bit>
#include <map>
#include <sstream>
#include <tuple>

#include "machine.hpp"

namespace cupyfa::emulator {

namespace {

constexpr size_t most_lines = 40;

/// 0, 1, 2, 5 as "0-2, 5".
std::string ranges(const std::vector<int>& numbers) {
  std::ostringstream s;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    s << (i ? ", " : "") << numbers[i];
    if (last > i) s << "-" << numbers[last];
    i = last + 1;
  }
  return s.str();
}

}  // namespace

/// "#12" stands for the place of instruction 12: the caller knows files and lines.
std::string Machine::waits_for(Warp& w, const Group& g) {
  const Instruction& in = program_.code[static_cast<size_t>(g.pc)];
  const auto o = static_cast<Operation>(in.operation);
  const Registers r = w.registers_view(program_);
  const i32* e = program_.pool.data() + in.operands;
  const int lane = std::countr_zero(g.mask);
  std::ostringstream s;
  switch (o) {
  case Operation::mbarrier_wait: {
    const Place generic = locate(w, Space::generic, address(r, e + 1, lane, true));
    const Place p = generic.space == Space::shared ? generic : locate(w, Space::shared, address(r, e + 1, lane, false));
    const i32 i = p.cta && p.offset / 8 < p.cta->barrier_at.size() ? p.cta->barrier_at[p.offset / 8] : -1;
    if (i < 0) return "waits for an mbarrier that does not exist";
    const MBarrier& b = p.cta->barriers[static_cast<size_t>(i)];
    s << "waits for " << name_of(*p.cta, b);
    if (in.attr[1]) s << ", parity " << ((r.source(e[4])[lane] ^ static_cast<u32>(in.bias)) & 1);
    s << ": phase " << b.phase << " is open, " << b.pending << " of " << b.count << " arrivals ";
    if (b.tx < 0)
      s << "are missing, " << -b.tx << " bytes more than expected have arrived, ";
    else
      s << "and " << b.tx << " bytes are missing, ";
    s << b.in_flight << " copies in flight";
    break;
  }
  case Operation::bar: {
    const u32 id = g.stage == 1 ? static_cast<u32>(g.data) & 15 : r.source(e[2])[lane] & 15;
    const NamedBarrier& b = w.cta->named[id];
    if (g.stage == 0)
      s << "waits for the other lanes of its warp at ";
    else
      s << "waits for ";
    s << "named barrier " << id << ": " << b.arrived << " of " << b.expected << " threads have arrived";
    break;
  }
  case Operation::cluster_barrier: {
    u32 there = 0;
    for (const Cta& cta : w.cta->cluster->ctas)
      for (const Warp& other : cta.warps)
        there += static_cast<u32>(std::popcount((other.exited | other.cluster_arrived) & other.lanes_mask));
    s << "waits for the cluster barrier: " << there << " of " << w.cta->cluster->barrier_expected
      << " threads have arrived";
    break;
  }
  case Operation::wgmma_wait: {
    const Warpgroup& group = w.cta->warpgroups[static_cast<size_t>(w.index / 4)];
    s << "waits for products of its warpgroup: " << group.done << " are complete, this warp has issued "
      << w.wgmma_issued;
    break;
  }
  case Operation::setmaxnreg:
    s << "waits for " << in.imm + in.bias << " registers a thread: " << w.cta->pool << " of the CTA are free";
    break;
  case Operation::tc_alloc:
    s << "waits for free columns of tensor memory";
    break;
  case Operation::bulk_wait:
    s << "waits for bulk groups";
    break;
  case Operation::cp_async_wait:
  case Operation::cp_async_mbarrier_arrive:
    s << "waits for cp.async copies";
    break;
  default:
    if (!g.blocked) return "runs";
    s << "waits for lanes of its warp; here are " << std::hex << g.mask;
  }
  return s.str();
}

/// Ends the run: a line for the warps of a CTA that stand at one place, then what is in flight.
void Machine::report_stuck(Hazard h, const std::string& why) {
  using Line = std::tuple<u32, i32, std::string>;
  std::map<Line, std::pair<std::vector<int>, u32>> lines;
  i32 at = -1;
  const Warp* first = nullptr;
  for (Warp* w : warps_)
    for (const Group& g : w->groups) {
      auto& [members, mask] = lines[{w->cta->linear, g.pc, waits_for(*w, g)}];
      members.push_back(w->index), mask |= g.mask;
      if (!first) first = w, at = g.pc;
    }
  std::ostringstream s;
  s << why;
  size_t shown = 0;
  for (const auto& [line, who] : lines) {
    const auto& [cta, pc, text] = line;
    if (++shown > most_lines) break;
    s << "\n  CTA " << cta << " warp" << (who.first.size() > 1 ? "s " : " ") << ranges(who.first);
    if (who.second != all_lanes) s << " (lanes " << std::hex << who.second << std::dec << ")";
    s << " at #" << pc << ": " << text;
  }
  if (shown > most_lines) s << "\n  and others at " << lines.size() - most_lines << " more places";
  std::map<i32, int> copies;
  for (const Copy& c : copies_) ++copies[c.at];
  for (const auto& [pc, count] : copies)
    s << "\n  in flight: " << count << (count > 1 ? " copies of #" : " copy of #") << pc;
  size_t products = 0;
  for (const auto& [key, queue] : tc_queues_) products += queue.operations.size();
  for (const Cluster& cluster : clusters_)
    for (const Cta& cta : cluster.ctas)
      for (const Warpgroup& g : cta.warpgroups) products += g.queue.size();
  if (products) s << "\n  in flight: " << products << " matrix operations that cannot execute yet";
  report.add(h, Severity::error, at, -1, first ? static_cast<i32>(first->cta->linear) : -1, first ? first->index : -1,
             first && !first->groups.empty() ? first->groups.front().mask : 0, "launch", s.str());
  throw Stopped();
}

}  // namespace cupyfa::emulator
