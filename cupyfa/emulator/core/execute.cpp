// One instruction of a warp: control, and whose instruction it is.
#include <bit>
#include <sstream>

#include "machine.hpp"

namespace cupyfa::emulator {

u32 Machine::uniform(const Warp& w, const u32* row, u32 mask, i32 at, const char* what) {
  const u32 v = row[std::countr_zero(mask)];
  for (int l = 0; l < lanes; ++l)
    if ((mask >> l & 1) && row[l] != v) {
      if (!reported(Hazard::WARP_NOT_UNIFORM, at, -1))
        hazard(Hazard::WARP_NOT_UNIFORM, Severity::error, &w, mask, at, -1, what, "lanes of the warp disagree");
      break;
    }
  return v;
}

/// Whether all lanes of the warp that are alive are here. If not: wait for those that can still come.
bool Machine::converged(Warp& w, Group& g, const Instruction&, u32 mask, const char* what) {
  const u32 alive = w.lanes_mask & ~w.exited;
  if (mask == alive) return true;
  if (g.mask == alive || timeout_wake_) {  // predicated off for some lanes, or the others never come
    if (!reported(Hazard::WARP_DIVERGENT_ALIGNED_OP, g.pc, -1)) {
      std::ostringstream s;
      s << std::hex << "lanes " << mask << " of " << alive << " execute an instruction that all must execute together";
      hazard(Hazard::WARP_DIVERGENT_ALIGNED_OP, Severity::error, &w, mask, g.pc, -1, what, s.str());
    }
    return true;
  }
  return false;
}

/// Registers that an asynchronous operation is using.
void Machine::check_rows(Warp& w, const Instruction&, i32 pc) {
  const auto visit = [&](const std::vector<i32>& begin, const std::vector<i32>& list, bool write) {
    for (i32 k = begin[static_cast<size_t>(pc)]; k < begin[static_cast<size_t>(pc) + 1]; ++k) {
      if (list[static_cast<size_t>(k)] < 0) continue;
      const i32 i = program_.async_index[static_cast<size_t>(list[static_cast<size_t>(k)])];
      if (i < 0) continue;
      AsyncRow& row = w.async[static_cast<size_t>(i)];
      row.touched = w.time;  // a read too: the wgmma that follows may overwrite the register before it
      if (row.written_by) {
        const bool load = row.written_by >> 63;
        const bool lenient = load && options_.lenient_tcgen05;
        const Hazard h = load    ? Hazard::TMEM_REGISTER_READ_BEFORE_WAIT
                         : write ? Hazard::WGMMA_REGISTER_WRITE_IN_FLIGHT
                                 : Hazard::WGMMA_REGISTER_READ_IN_FLIGHT;
        if (!reported(h, pc, row.at))
          hazard(h, lenient ? Severity::information : Severity::error, &w, all_lanes, pc, row.at, "registers",
                 "no wait covers the operation that writes them");
        if (lenient) row.written_by = 0, --w.async_pending;  // what the hardware's scoreboard does
      } else if (write && row.read_by && !reported(Hazard::WGMMA_REGISTER_WRITE_IN_FLIGHT, pc, row.at)) {
        hazard(Hazard::WGMMA_REGISTER_WRITE_IN_FLIGHT, Severity::error, &w, all_lanes, pc, row.at, "registers",
               "the wgmma in flight may still read them as its A operand");
      }
    }
  };
  visit(program_.use_begin, program_.uses, false);
  visit(program_.def_begin, program_.defs, true);
}

Step Machine::branch(Warp& w, Group& g, const Instruction& in, u32 mask) {
  if (mask == g.mask) {
    g.pc = in.imm;
    return Step::jump;
  }
  const u32 stay = g.mask & ~mask;
  g.mask = stay;
  ++g.pc;
  w.groups.push_back({in.imm, mask});
  return Step::jump;
}

Step Machine::execute(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  using O = Operation;
  switch (static_cast<O>(in.operation)) {
  case O::nop:
  case O::prefetch_map:
    return Step::next;
  case O::bra:
    return branch(w, g, in, mask);
  case O::brx: {
    const u32* index = r.source(e[0]);
    std::map<i32, u32> targets;
    for (int l = 0; l < lanes; ++l)
      if (mask >> l & 1) targets[index[l] < static_cast<u32>(e[1]) ? e[2 + index[l]] : e[2]] |= 1u << l;
    const u32 stay = g.mask & ~mask;
    bool first = stay == 0;
    g.mask = stay;
    if (stay) ++g.pc;
    std::vector<Group> more;
    for (const auto& [target, m] : targets) {
      if (first) {
        g.pc = target, g.mask = m;
        first = false;
      } else {
        more.push_back({target, m});
      }
    }
    for (const Group& m : more) w.groups.push_back(m);
    return Step::jump;
  }
  case O::exit: {
    w.exited |= mask;
    g.mask &= ~mask;
    event();
    leave_barriers(w, mask);
    if (g.mask) return Step::next;
    for (size_t i = 0; i < w.groups.size(); ++i)
      if (&w.groups[i] == &g) {
        w.groups.erase(w.groups.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
    if (w.groups.empty()) {
      if (options_.checks && w.wgmma_in_group)
        hazard(Hazard::WGMMA_UNCOMMITTED_AT_EXIT, Severity::error, &w, mask,
               static_cast<i32>(&in - program_.code.data()), -1, "warpgroup", "wgmma operations were never committed");
      leave(*w.cta);
    }
    return Step::stop;
  }
  case O::trap:
  case O::brkpt:
    hazard(Hazard::PROGRESS_TRAP, Severity::error, &w, mask, g.pc, -1, "trap", "the kernel stopped itself");
    throw Stopped();
  case O::nanosleep:
    return Step::yield;
  case O::special: {
    const u64 value = instructions;
    u32* low = r.row(e[0]);
    const bool wide = static_cast<Special>(in.imm) != Special::clock;
    for (int l = 0; l < lanes; ++l)
      if (mask >> l & 1) {
        low[l] = static_cast<u32>(value);
        if (wide) r.row(e[1])[l] = static_cast<u32>(value >> 32);
      }
    return Step::next;
  }
  case O::ld:
    return load(w, g, in, mask);
  case O::st:
    return store(w, g, in, mask);
  case O::atom:
  case O::red:
    return atomic(w, g, in, mask);
  case O::ldmatrix:
  case O::stmatrix:
  case O::movmatrix:
    return matrix(w, g, in, mask);
  case O::cvta:
  case O::isspacep:
  case O::mapa:
  case O::getctarank: {
    const bool wide = static_cast<Type>(in.type) == Type::b64 || static_cast<Type>(in.type) == Type::u64;
    const auto space = static_cast<Space>(in.attr[0]);
    const u32 window = space == Space::shared  ? shared_window
                       : space == Space::local ? local_window
                       : space == Space::param ? param_window
                                               : 0;
    if (static_cast<O>(in.operation) == O::isspacep) {
      u32 bits = 0;
      const u32* high = r.source(e[2]);
      for (int l = 0; l < lanes; ++l) {
        const u32 h = high[l];
        const bool is = window ? h == window : h != shared_window && h != local_window && h != param_window;
        bits |= is ? 1u << l : 0;
      }
      r.set_predicate(e[0], bits, mask);
      return Step::next;
    }
    if (static_cast<O>(in.operation) == O::cvta) {
      const u32* low = r.source(e[wide ? 2 : 1]);
      const u32* high = wide ? r.source(e[3]) : nullptr;
      for (int l = 0; l < lanes; ++l)
        if (mask >> l & 1) {
          const u32 a = low[l], b = high ? high[l] : 0;
          r.row(e[0])[l] = a;
          if (!wide) continue;
          r.row(e[1])[l] = window == 0 ? b : in.attr[1] ? 0 : window;
        }
      return Step::next;
    }
    const bool generic = wide && in.attr[0];
    const u32* low = r.source(e[wide ? 2 : 1]);
    if (static_cast<O>(in.operation) == O::getctarank) {
      const u32* a = r.source(e[1]);
      for (int l = 0; l < lanes; ++l)
        if (mask >> l & 1) r.row(e[0])[l] = a[l] >> 24;
      return Step::next;
    }
    const u32* rank = r.source(e[wide ? 4 : 2]);
    for (int l = 0; l < lanes; ++l)
      if (mask >> l & 1) {
        const u32 a = (low[l] & 0xff'ffff) | rank[l] << 24;
        r.row(e[0])[l] = a;
        if (wide) r.row(e[1])[l] = generic ? shared_window : r.source(e[3])[l];
      }
    return Step::next;
  }
  case O::shfl:
  case O::vote:
  case O::redux:
  case O::match:
  case O::elect:
  case O::activemask:
  case O::syncwarp:
    return warp_collective(w, g, in, mask);
  case O::bar:
    return named_barrier(w, g, in, mask);
  case O::cluster_barrier:
    return cluster_barrier(w, g, in, mask);
  case O::fence: {
    const auto scope = static_cast<Scope>(in.attr[1]);
    fence(w, mask, scope == Scope::cta ? strong_in_cta : scope == Scope::cluster ? strong_in_cluster : strong_in_gpu);
    return Step::next;
  }
  case O::fence_proxy_other:
    return Step::next;
  case O::fence_proxy_async:
    fence_proxy(w, mask);
    [[fallthrough]];
  case O::fence_mbarrier_init:
    for (Cta& cta : w.cta->cluster->ctas)
      for (MBarrier& b : cta.barriers)
        if (b.init.slot >= static_cast<u32>(w.clock_base) && b.init.slot < static_cast<u32>(w.clock_base) + lanes &&
            (mask >> (b.init.slot - static_cast<u32>(w.clock_base)) & 1))
          b.fenced = true;
    return Step::next;
  case O::mbarrier_init:
  case O::mbarrier_inval:
  case O::mbarrier_arrive:
  case O::mbarrier_tx:
  case O::mbarrier_pending:
    return mbarrier(w, g, in, mask);
  case O::mbarrier_wait:
    return mbarrier_wait(w, g, in, mask);
  case O::cp_async:
  case O::cp_async_commit:
  case O::cp_async_wait:
  case O::cp_async_mbarrier_arrive:
    return cp_async(w, g, in, mask);
  case O::bulk_copy:
  case O::bulk_reduce:
    return bulk_copy(w, in, mask);
  case O::tensor_load:
  case O::tensor_store:
  case O::tensor_reduce:
    return tensor_copy(w, in, mask);
  case O::bulk_commit:
  case O::bulk_wait:
    return bulk_group(w, g, in, mask);
  case O::wgmma:
    return wgmma(w, g, in, mask);
  case O::wgmma_fence:
  case O::wgmma_commit:
  case O::wgmma_wait:
    return wgmma_wait(w, g, in, mask);
  case O::setmaxnreg:
    return set_registers(w, g, in, mask);
  case O::griddep:
    if (in.attr[0] == 0 && grid_slot_) learn(w, mask, grid_slot_, 1);
    return Step::next;
  case O::clc_try_cancel:
  case O::clc_query:
    return launch_control(w, in, mask);
  default:
    break;
  }
  const auto o = static_cast<O>(in.operation);
  if (o >= O::tc_alloc && o <= O::tc_shift) return tcgen05(w, g, in, mask);
  hazard(Hazard::DECODE_UNSUPPORTED, Severity::error, &w, mask, g.pc, -1, "instruction",
         "the machine does not execute this operation for this type");
  throw Stopped();
}

}  // namespace cupyfa::emulator
