// Instructions of a warp that are more than arithmetic: control, memory, collectives.
#include <bit>
#include <sstream>

#include "machine.hpp"
#include "numeric.hpp"

namespace cupyfa::emulator {

namespace {

u32 bytes_of(Type t) {
  switch (t) {
    case Type::b8: case Type::u8: case Type::s8: return 1;
    case Type::b16: case Type::u16: case Type::s16: case Type::f16: case Type::bf16: return 2;
    case Type::b64: case Type::u64: case Type::s64: case Type::f64: case Type::f32x2: return 8;
    case Type::b128: return 16;
    default: return 4;
  }
}
int rows_of(Type t) { return bytes_of(t) == 8 ? 2 : bytes_of(t) == 16 ? 4 : 1; }

}  // namespace

u64 Machine::address(const Registers& r, const i32* e, int lane, bool wide) const {
  const u64 low = r.source(e[0])[lane];
  if (!wide) return static_cast<u32>(low + static_cast<u32>(e[2]));
  const u64 high = r.source(e[1])[lane];
  return (high << 32 | low) + static_cast<u64>(static_cast<i64>(e[2]));
}

Place Machine::locate(Warp& w, Space space, u64 address) {
  if (space == Space::generic) {
    switch (address >> 32) {
      case shared_window: return locate(w, Space::shared, address & 0xffff'ffff);
      case local_window: return {Space::local, w.cta, static_cast<u32>(address), address};
      case param_window: return {Space::param, w.cta, static_cast<u32>(address), address};
      default: return {Space::global, w.cta, 0, address};
    }
  }
  if (space == Space::shared) {
    const u32 rank = static_cast<u32>(address) >> 24, offset = static_cast<u32>(address) & 0xff'ffff;
    Cluster& c = *w.cta->cluster;
    return {space, rank < c.ctas.size() ? &c.ctas[rank] : nullptr, offset, address};
  }
  return {space, w.cta, static_cast<u32>(address), address};
}

u8* Machine::global_memory(u64 address, u64 bytes, bool write, const Warp* w, u32 mask, i32 at) {
  const auto inside = [&](const Buffer& b) { return address >= b.base && address + bytes <= b.base + b.size && address + bytes >= address; };
  if (last_buffer_ >= buffers_.size() || !inside(buffers_[last_buffer_])) {
    const u64 in_data = address - module_data;
    if (address >= module_data && in_data < data_.size() && bytes <= data_.size() - in_data) return data_.data() + in_data;
    auto b = std::upper_bound(buffers_.begin(), buffers_.end(), address, [](u64 x, const Buffer& y) { return x < y.base; });
    if (b == buffers_.begin() || !inside(*--b)) {
      if (!reported(Hazard::GRID_GLOBAL_OUT_OF_BOUNDS, at, -1)) {
        std::ostringstream s;
        s << bytes << " bytes at 0x" << std::hex << address;
        if (!buffers_.empty() && b != buffers_.end() && address >= b->base)
          s << std::dec << ", byte " << address - b->base << " of " << b->name << ", which has " << b->size;
        hazard(Hazard::GRID_GLOBAL_OUT_OF_BOUNDS, Severity::error, w, mask, at, -1, "global memory", s.str());
      }
      return nullptr;
    }
    last_buffer_ = static_cast<u64>(b - buffers_.begin());
  }
  Buffer& b = buffers_[last_buffer_];
  if (write && !b.writable) {
    hazard(Hazard::GRID_GLOBAL_READ_ONLY, Severity::error, w, mask, at, -1, b.name, "written, but the caller passed it as an input");
    return nullptr;
  }
  return b.data + (address - b.base);
}

/// Where the bytes of one lane's access lie, or null after a report.
u8* Machine::memory(Warp& w, const Place& place, u32 bytes, bool write, int lane, i32 at) {
  const auto misaligned = [&](Hazard h, u64 value) {
    if (value % bytes == 0) return false;
    if (!reported(h, at, -1)) {
      std::ostringstream s;
      s << "address 0x" << std::hex << value << " for " << std::dec << bytes << " bytes";
      hazard(h, Severity::error, &w, 1u << lane, at, -1, "memory", s.str());
    }
    return true;
  };
  switch (place.space) {
    case Space::shared: {
      if (misaligned(Hazard::SHARED_MISALIGNED, place.offset)) return nullptr;
      if (!place.cta || place.offset < shared_first || place.offset + bytes > place.cta->shared.size()) {
        if (!reported(Hazard::SHARED_OUT_OF_BOUNDS, at, -1))
          hazard(Hazard::SHARED_OUT_OF_BOUNDS, Severity::error, &w, 1u << lane, at, -1, "shared memory",
                 place.cta ? std::to_string(bytes) + " bytes at offset " + std::to_string(static_cast<i64>(place.offset) - shared_first) +
                                 " of " + std::to_string(shared_bytes_)
                           : "the cluster has no CTA of that rank");
        return nullptr;
      }
      if (place.cta->exited() && place.cta != w.cta && !reported(Hazard::SHARED_PEER_EXITED, at, -1))
        hazard(Hazard::SHARED_PEER_EXITED, Severity::error, &w, 1u << lane, at, -1, "shared memory",
               "the CTA of rank " + std::to_string(place.cta->rank) + " has ended");
      return place.cta->shared.data() + place.offset;
    }
    case Space::global:
      if (misaligned(Hazard::GRID_GLOBAL_MISALIGNED, place.address)) return nullptr;
      return global_memory(place.address, bytes, write, &w, 1u << lane, at);
    case Space::param:
      if (write || place.offset + bytes > params_.size()) break;
      return params_.data() + place.offset;
    case Space::local:
      if (place.offset + bytes > program_.local_bytes) break;
      return w.local.data() + static_cast<size_t>(lane) * program_.local_bytes + place.offset;
    default: {
      const u64 a = place.address >= module_data ? place.address - module_data : place.address;
      if (write || a + bytes > data_.size()) break;
      return data_.data() + a;
    }
  }
  if (!reported(Hazard::GRID_GLOBAL_OUT_OF_BOUNDS, at, -1))
    hazard(Hazard::GRID_GLOBAL_OUT_OF_BOUNDS, Severity::error, &w, 1u << lane, at, -1,
           place.space == Space::param ? "parameters" : place.space == Space::local ? "local memory" : "constants",
           "byte " + std::to_string(place.address));
  return nullptr;
}

void Machine::conflict(const Conflict& c, const Warp& w, u32 mask, i32 at, const Cta& cta, u32 offset) {
  if (reported(c.hazard, at, c.other)) return;
  std::ostringstream s;
  s << "CTA " << cta.linear << ", byte " << offset - shared_first << " of its shared memory";
  hazard(c.hazard, Severity::error, &w, mask, at, c.other, s.str());
}

void Machine::shared_access(Warp& w, int lane, Cta& cta, u32 offset, u32 bytes, bool write, i32 at) {
  ++checks;
  const u32 mask = 1u << lane;
  const std::vector<u32>& v = own_clock(w, mask).v;
  const Access a{{static_cast<u32>(w.clock_base + lane), w.epoch, 1}, false, section(v, 0), section(v, 1), at};
  const auto found = [&](const Conflict& c) { conflict(c, w, mask, at, cta, offset); };
  if (write) {
    cta.shadow->write(offset, offset + bytes, a, found);
  } else {
    cta.shadow->read(offset, offset + bytes, a, found);
  }
}

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
      if (write) row.touched = w.time;
      if (row.written_by) {
        const bool load = row.written_by >> 63;
        const bool lenient = load && options_.lenient_tcgen05;
        const Hazard h = load ? Hazard::TMEM_REGISTER_READ_BEFORE_WAIT
                              : write ? Hazard::WGMMA_REGISTER_WRITE_IN_FLIGHT : Hazard::WGMMA_REGISTER_READ_IN_FLIGHT;
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
  if (w.async_pending) visit(program_.use_begin, program_.uses, false);
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
    case O::nop: case O::prefetch_map: return Step::next;
    case O::bra: return branch(w, g, in, mask);
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
      if (g.mask) return Step::next;
      for (size_t i = 0; i < w.groups.size(); ++i)
        if (&w.groups[i] == &g) {
          w.groups.erase(w.groups.begin() + static_cast<std::ptrdiff_t>(i));
          break;
        }
      if (w.groups.empty()) {
        if (options_.checks && w.wgmma_in_group)
          hazard(Hazard::WGMMA_UNCOMMITTED_AT_EXIT, Severity::error, &w, mask, static_cast<i32>(&in - program_.code.data()), -1,
                 "warpgroup", "wgmma operations were never committed");
        settle_cluster_barrier(*w.cta->cluster);
        leave(*w.cta);
      }
      return Step::stop;
    }
    case O::trap: case O::brkpt:
      hazard(Hazard::PROGRESS_TRAP, Severity::error, &w, mask, g.pc, -1, "trap", "the kernel stopped itself");
      throw Stopped();
    case O::nanosleep: event(); return Step::yield;
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
    case O::ld: return load(w, g, in, mask);
    case O::st: return store(w, g, in, mask);
    case O::atom: case O::red: return atomic(w, g, in, mask);
    case O::ldmatrix: case O::stmatrix: case O::movmatrix: return matrix(w, g, in, mask);
    case O::cvta: case O::isspacep: case O::mapa: case O::getctarank: {
      const bool wide = static_cast<Type>(in.type) == Type::b64 || static_cast<Type>(in.type) == Type::u64;
      const auto space = static_cast<Space>(in.attr[0]);
      const u32 window = space == Space::shared ? shared_window : space == Space::local ? local_window
                                                : space == Space::param ? param_window : 0;
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
    case O::shfl: case O::vote: case O::redux: case O::match: case O::elect: case O::activemask: case O::syncwarp:
      return warp_collective(w, g, in, mask);
    case O::bar: return named_barrier(w, g, in, mask);
    case O::cluster_barrier: return cluster_barrier(w, g, in, mask);
    case O::fence: case O::fence_proxy_other: return Step::next;
    case O::fence_proxy_async: fence_proxy(w, mask); [[fallthrough]];
    case O::fence_mbarrier_init:
      for (Cta& cta : w.cta->cluster->ctas)
        for (MBarrier& b : cta.barriers)
          if (b.init.slot >= static_cast<u32>(w.clock_base) && b.init.slot < static_cast<u32>(w.clock_base) + lanes &&
              (mask >> (b.init.slot - static_cast<u32>(w.clock_base)) & 1))
            b.fenced = true;
      return Step::next;
    case O::mbarrier_init: case O::mbarrier_inval: case O::mbarrier_arrive: case O::mbarrier_tx:
    case O::mbarrier_pending: return mbarrier(w, g, in, mask);
    case O::mbarrier_wait: return mbarrier_wait(w, g, in, mask);
    case O::cp_async: case O::cp_async_commit: case O::cp_async_wait: case O::cp_async_mbarrier_arrive:
      return cp_async(w, g, in, mask);
    case O::bulk_copy: case O::bulk_reduce: return bulk_copy(w, in, mask);
    case O::tensor_load: case O::tensor_store: case O::tensor_reduce: return tensor_copy(w, in, mask);
    case O::bulk_commit: case O::bulk_wait: return bulk_group(w, g, in, mask);
    case O::wgmma: return wgmma(w, g, in, mask);
    case O::wgmma_fence: case O::wgmma_commit: case O::wgmma_wait: return wgmma_wait(w, g, in, mask);
    case O::setmaxnreg: return set_registers(w, g, in, mask);
    case O::griddep: w.grid_waited |= in.attr[0] == 0; return Step::next;
    case O::clc_try_cancel: case O::clc_query: return launch_control(w, in, mask);
    default: break;
  }
  const auto o = static_cast<O>(in.operation);
  if (o >= O::tc_alloc && o <= O::tc_shift) return tcgen05(w, g, in, mask);
  hazard(Hazard::DECODE_UNSUPPORTED, Severity::error, &w, mask, g.pc, -1, "instruction",
         "the machine does not execute this operation for this type");
  throw Stopped();
}

Step Machine::load(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const auto type = static_cast<Type>(in.type);
  const u32 size = bytes_of(type), count = in.attr[1], total = size * count;
  const int rows = rows_of(type) * static_cast<int>(count);
  const i32* a = e + rows;
  const auto space = static_cast<Space>(in.attr[0]);
  const bool wide = space != Space::shared;
  u32 value[lanes][32];
  for (int l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    const Place place = locate(w, space, address(r, a, l, wide));
    u8 raw[128];
    const u8* from = memory(w, place, total, false, l, g.pc);
    if (from) {
      std::memcpy(raw, from, total);
      if (place.space == Space::shared && options_.checks) shared_access(w, l, *place.cta, place.offset, total, false, g.pc);
    } else {
      std::memset(raw, 0xff, total);
    }
    if (size >= 4) {
      std::memcpy(value[l], raw, total);
    } else {
      for (u32 i = 0; i < count; ++i) {
        u32 v = 0;
        std::memcpy(&v, raw + size * i, size);
        if (type == Type::s8) v = static_cast<u32>(static_cast<i32>(static_cast<int8_t>(v)));
        if (type == Type::s16) v = static_cast<u32>(static_cast<i32>(static_cast<int16_t>(v)));
        value[l][i] = v;
      }
    }
  }
  for (int i = 0; i < rows; ++i) {
    if (e[i] == absent) continue;
    u32* d = r.row(e[i]);
    for (int l = 0; l < lanes; ++l)
      if (mask >> l & 1) d[l] = value[l][i];
  }
  const auto order = static_cast<Order>(in.attr[2]);
  if (order == Order::weak || space == Space::param || space == Space::local) return Step::next;
  return Step::yield;  // a loop that polls memory must let others run
}

Step Machine::store(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const auto type = static_cast<Type>(in.type);
  const u32 size = bytes_of(type), count = in.attr[1], total = size * count;
  const int rows = rows_of(type) * static_cast<int>(count);
  const auto space = static_cast<Space>(in.attr[0]);
  for (int l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    const Place place = locate(w, space, address(r, e, l, space != Space::shared));
    u8* to = memory(w, place, total, true, l, g.pc);
    if (!to) continue;
    if (place.space == Space::shared && options_.checks) shared_access(w, l, *place.cta, place.offset, total, true, g.pc);
    u8 raw[128];
    for (int i = 0; i < rows; ++i) {
      const u32 v = r.source(e[3 + i])[l];
      std::memcpy(raw + (size >= 4 ? 4 * static_cast<u32>(i) : size * static_cast<u32>(i)), &v, size >= 4 ? 4 : size);
    }
    std::memcpy(to, raw, total);
  }
  if (static_cast<Order>(in.attr[2]) != Order::weak) event();
  return Step::next;
}

namespace {

template <class V>
V reduce_integer(Reduction op, V a, V b, V c) {
  switch (op) {
    case Reduction::add: return static_cast<V>(static_cast<std::make_unsigned_t<V>>(a) + static_cast<std::make_unsigned_t<V>>(b));
    case Reduction::min: return a < b ? a : b;
    case Reduction::max: return a > b ? a : b;
    case Reduction::inc: return a >= b ? V(0) : static_cast<V>(a + 1);
    case Reduction::dec: return a == 0 || a > b ? b : static_cast<V>(a - 1);
    case Reduction::and_: return a & b;
    case Reduction::or_: return a | b;
    case Reduction::xor_: return a ^ b;
    case Reduction::exch: return b;
    default: return a == b ? c : a;  // cas: b is compared, c stored
  }
}
float reduce_float(Reduction op, float a, float b) {
  switch (op) {
    case Reduction::min: return a != a ? b : b != b ? a : a < b || (a == b && std::signbit(a)) ? a : b;
    case Reduction::max: return a != a ? b : b != b ? a : a > b || (a == b && !std::signbit(a)) ? a : b;
    default: return a + b;
  }
}

}  // namespace

/// old (op) b for a value of the type, as bits.
u64 reduce_value(Type type, Reduction op, u64 a, u64 b, u64 c) {
  switch (type) {
    case Type::s32: return static_cast<u32>(reduce_integer(op, static_cast<i32>(a), static_cast<i32>(b), static_cast<i32>(c)));
    case Type::s64: return static_cast<u64>(reduce_integer(op, static_cast<i64>(a), static_cast<i64>(b), static_cast<i64>(c)));
    case Type::u64: case Type::b64: return reduce_integer(op, a, b, c);
    case Type::f32: {
      if (op == Reduction::exch) return b;
      const float y = reduce_float(op, float_of(static_cast<u32>(a)), float_of(static_cast<u32>(b)));
      return y == y ? bits_of(y) : nan_f32;
    }
    case Type::f64: {
      const double y = double_of(a) + double_of(b);
      return y == y ? bits_of(y) : nan_f64;
    }
    case Type::f16: return f16_of(reduce_float(op, float_of_f16(static_cast<u32>(a)), float_of_f16(static_cast<u32>(b))));
    case Type::bf16: return bf16_of(reduce_float(op, float_of_bf16(static_cast<u32>(a)), float_of_bf16(static_cast<u32>(b))));
    case Type::f16x2: case Type::bf16x2: {
      const Type half = type == Type::f16x2 ? Type::f16 : Type::bf16;
      return reduce_value(half, op, a & 0xffff, b & 0xffff, 0) | reduce_value(half, op, a >> 16 & 0xffff, b >> 16 & 0xffff, 0) << 16;
    }
    case Type::b16: case Type::u16: return reduce_integer(op, static_cast<u16>(a), static_cast<u16>(b), static_cast<u16>(c));
    default: return reduce_integer(op, static_cast<u32>(a), static_cast<u32>(b), static_cast<u32>(c));
  }
}

Step Machine::atomic(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const auto type = static_cast<Type>(in.type);
  const bool returns = static_cast<Operation>(in.operation) == Operation::atom;
  const u32 size = bytes_of(type), count = returns ? 1 : std::max<u32>(1, in.attr[4]);
  const int width = rows_of(type);
  const i32* a = e + (returns ? width : 0);
  const i32* values = a + 3;
  const auto space = static_cast<Space>(in.attr[0]);
  const auto op = static_cast<Reduction>(in.attr[1]);
  const auto get = [&](const i32* entry, int l) {
    u64 v = r.source(entry[0])[l];
    if (width == 2) v |= static_cast<u64>(r.source(entry[1])[l]) << 32;
    return v;
  };
  for (int l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    const Place place = locate(w, space, address(r, a, l, space != Space::shared));
    u8* at = memory(w, place, size * count, true, l, g.pc);
    if (!at) continue;
    for (u32 i = 0; i < count; ++i) {
      u64 old = 0;
      std::memcpy(&old, at + size * i, size);
      const u64 b = get(values + width * static_cast<int>(i), l), c = op == Reduction::cas ? get(values + width, l) : 0;
      const u64 fresh = reduce_value(type, op, old, b, c);
      std::memcpy(at + size * i, &fresh, size);
      if (returns && e[0] != absent) {
        r.row(e[0])[l] = static_cast<u32>(old);
        if (width == 2) r.row(e[1])[l] = static_cast<u32>(old >> 32);
      }
    }
  }
  event();
  return returns ? Step::yield : Step::next;
}

Step Machine::matrix(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const auto o = static_cast<Operation>(in.operation);
  if (!converged(w, g, in, mask, "matrix of the warp")) return Step::block;
  if (o == Operation::movmatrix) {
    u16 m[8][8];
    const u32* a = r.source(e[1]);
    for (u32 l = 0; l < lanes; ++l)
      for (u32 i = 0; i < 2; ++i) m[l / 4][2 * (l % 4) + i] = static_cast<u16>(a[l] >> (16 * i));
    for (u32 l = 0; l < lanes; ++l) r.row(e[0])[l] = m[2 * (l % 4)][l / 4] | static_cast<u32>(m[2 * (l % 4) + 1][l / 4]) << 16;
    return Step::next;
  }
  const bool is_load = o == Operation::ldmatrix, trans = in.attr[1];
  const int n = in.attr[0];
  const i32* a = is_load ? e + n : e;
  const i32* values = is_load ? e : e + 3;
  for (int m = 0; m < n; ++m) {
    u8* row[8];
    for (int i = 0; i < 8; ++i) {
      const int l = 8 * m + i;
      const Place place = locate(w, Space::shared, address(r, a, l, false));
      row[i] = memory(w, place, 16, !is_load, l, g.pc);
      if (row[i] && options_.checks) shared_access(w, l, *place.cta, place.offset, 16, !is_load, g.pc);
    }
    u16 matrix[8][8];
    std::memset(matrix, 0xff, sizeof(matrix));
    if (is_load) {
      for (int i = 0; i < 8; ++i)
        if (row[i]) std::memcpy(matrix[i], row[i], 16);
      u32* d = r.row(values[m]);
      for (u32 l = 0; l < lanes; ++l)
        d[l] = trans ? matrix[2 * (l % 4)][l / 4] | static_cast<u32>(matrix[2 * (l % 4) + 1][l / 4]) << 16
                     : matrix[l / 4][2 * (l % 4)] | static_cast<u32>(matrix[l / 4][2 * (l % 4) + 1]) << 16;
    } else {
      const u32* s = r.source(values[m]);
      for (u32 l = 0; l < lanes; ++l)
        for (u32 i = 0; i < 2; ++i) {
          const u16 v = static_cast<u16>(s[l] >> (16 * i));
          (trans ? matrix[2 * (l % 4) + i][l / 4] : matrix[l / 4][2 * (l % 4) + i]) = v;
        }
      for (int i = 0; i < 8; ++i)
        if (row[i]) std::memcpy(row[i], matrix[i], 16);
    }
  }
  return Step::next;
}

/// Instructions with a member mask: all members that are alive must be here.
Step Machine::warp_collective(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const auto o = static_cast<Operation>(in.operation);
  if (o == Operation::activemask) {
    for (int l = 0; l < lanes; ++l)
      if (mask >> l & 1) r.row(e[0])[l] = mask;
    return Step::next;
  }
  const i32 mask_entry = e[in.operand_count - 1];
  const u32 members = r.source(mask_entry)[std::countr_zero(mask)] & w.lanes_mask & ~w.exited;
  if ((members & mask) != members) {
    if (o == Operation::syncwarp) {  // lanes may stand at different instructions
      u32 here = mask;
      for (const Group& other : w.groups)
        if (other.stage == 9) here |= other.mask;
      if ((here & members) == members) {
        sync_lanes(w, members);
        event();
        for (Group& other : w.groups)
          if (other.stage == 9 && &other != &g) other.stage = 10;
        g.stage = 0;
        return Step::next;
      }
      if (g.stage == 10) {
        g.stage = 0;
        return Step::next;
      }
      g.stage = 9;
      return Step::block;
    }
    if (!(g.mask & ~mask & members) && !timeout_wake_) return Step::block;
    if (!reported(Hazard::WARP_DIVERGENT_ALIGNED_OP, g.pc, -1)) {
      std::ostringstream s;
      s << std::hex << "member mask " << members << ", but only lanes " << mask << " are here";
      hazard(Hazard::WARP_DIVERGENT_ALIGNED_OP, Severity::error, &w, mask, g.pc, -1, "warp", s.str());
    }
  }
  switch (o) {
    case Operation::syncwarp: {
      g.stage = 0;
      sync_lanes(w, mask);
      return Step::next;
    }
    case Operation::shfl: return shuffle(w, in, mask);
    case Operation::vote: return vote(w, in, mask);
    case Operation::elect: {
      int leader = std::countr_zero(members & mask ? members & mask : mask);
      if (options_.policy.random_elect) {
        // Any lane, but always the same one for a member mask: PTX promises that.
        const u64 pick = (options_.seed * 0x9e37'79b9'7f4a'7c15 ^ mask) * 0x2545'f491'4f6c'dd1d >> 33;
        int skip = static_cast<int>(pick % static_cast<u64>(std::popcount(mask)));
        for (leader = 0; leader < lanes; ++leader)
          if ((mask >> leader & 1) && skip-- == 0) break;
      }
      if (e[0] != absent)
        for (int l = 0; l < lanes; ++l)
          if (mask >> l & 1) r.row(e[0])[l] = static_cast<u32>(leader);
      r.set_predicate(e[1], 1u << leader, mask);
      return Step::next;
    }
    case Operation::redux: {
      const u32* a = r.source(e[1]);
      const auto type = static_cast<Type>(in.type);
      u64 v = 0;
      bool first = true, nan = false;
      for (int l = 0; l < lanes; ++l) {
        if (!(mask >> l & 1)) continue;
        u32 x = a[l];
        if (type == Type::f32) {
          if (in.attr[1] & flag_abs) x &= 0x7fff'ffff;
          nan |= (x & 0x7fff'ffff) > 0x7f80'0000;
        }
        v = first ? x : reduce_value(type, static_cast<Reduction>(in.attr[0]), v, x, 0);
        first = false;
      }
      if (nan && (in.attr[1] & flag_nan)) v = nan_f32;
      for (int l = 0; l < lanes; ++l)
        if (mask >> l & 1) r.row(e[0])[l] = static_cast<u32>(v);
      return Step::next;
    }
    default: {  // match: d p? a(1 or 2) m
      const bool wide = static_cast<Type>(in.type) == Type::b64;
      const u32 *low = r.source(e[2]), *high = wide ? r.source(e[3]) : low;
      u32 d[lanes], all = 0;
      for (int l = 0; l < lanes; ++l) {
        d[l] = 0;
        for (int k = 0; k < lanes; ++k)
          if ((mask >> k & 1) && low[k] == low[l] && high[k] == high[l]) d[l] |= 1u << k;
        if ((mask >> l & 1) && d[l] == mask) all |= 1u << l;
      }
      const bool equal = (all & mask) == mask;
      for (int l = 0; l < lanes; ++l)
        if (mask >> l & 1) r.row(e[0])[l] = in.attr[0] ? (equal ? mask : 0) : d[l];
      if (in.attr[0] && e[1] != absent) r.set_predicate(e[1], equal ? all_lanes : 0, mask);
      return Step::next;
    }
  }
}

Step Machine::shuffle(Warp& w, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  u32 a[lanes], d[lanes], valid = 0;
  std::memcpy(a, r.source(e[2]), sizeof(a));
  const u32 *b = r.source(e[3]), *c = r.source(e[4]);
  bool inactive = false;
  for (u32 l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    const u32 segment = c[l] >> 8 & 31, clamp = c[l] & 31, by = b[l] & 31;
    const u32 highest = (l & segment) | (clamp & ~segment), lowest = l & segment;
    u32 j;
    bool ok;
    switch (in.attr[0]) {
      case 0: j = l - by, ok = static_cast<i32>(j) >= static_cast<i32>(highest); break;
      case 1: j = l + by, ok = j <= highest; break;
      case 2: j = l ^ by, ok = j <= highest; break;
      default: j = lowest | (by & ~segment), ok = j <= highest;
    }
    if (!ok) j = l;
    j &= 31;
    inactive |= !(mask >> j & 1);
    d[l] = a[j];
    valid |= ok ? 1u << l : 0;
  }
  if (inactive && !reported(Hazard::WARP_SHUFFLE_INACTIVE_LANE, static_cast<i32>(&in - program_.code.data()), -1))
    hazard(Hazard::WARP_SHUFFLE_INACTIVE_LANE, Severity::error, &w, mask, static_cast<i32>(&in - program_.code.data()), -1,
           "warp", "a lane reads a lane that does not take part: its value is undefined");
  u32* out = r.row(e[0]);
  for (int l = 0; l < lanes; ++l)
    if (mask >> l & 1) out[l] = d[l];
  if (e[1] != absent) r.set_predicate(e[1], valid, mask);
  return Step::next;
}

Step Machine::vote(Warp& w, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const u32 p = r.predicate(e[1]) & mask;
  if (in.attr[0] == 3) {
    for (int l = 0; l < lanes; ++l)
      if (mask >> l & 1) r.row(e[0])[l] = p;
    return Step::next;
  }
  const bool yes = in.attr[0] == 0 ? p == mask : in.attr[0] == 1 ? p != 0 : p == 0 || p == mask;
  r.set_predicate(e[0], yes ? all_lanes : 0, mask);
  return Step::next;
}

}  // namespace cupyfa::emulator
