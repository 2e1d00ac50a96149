// Tensor memory: allocation, loads and stores of warps, and the shadow that proves accesses ordered.
#include <bit>
#include <sstream>

#include "numeric.hpp"
#include "tcgen05.hpp"

namespace cupyfa::emulator {

namespace {

constexpr u32 columns_total = Tmem::columns, height = Tmem::lanes;
constexpr u64 by_load = u64(1) << 63;

/// Shapes of tcgen05.ld and st: registers and columns for each repetition.
struct LoadShape {
  u32 registers, columns;
  bool half;  ///< 16 lanes
};
constexpr LoadShape load_shapes[] = {{1, 1, false}, {1, 2, true}, {2, 4, true}, {4, 8, true}, {1, 1, true}};

struct Place2 {
  u32 lane, column;
};
/// Where register r of thread l lies, from the address of the instruction.
Place2 fragment(int shape, u32 r, u32 l) {
  switch (shape) {
    case 0: return {l, r};
    case 1: return {l / 4 + 8 * (l % 2), l / 2 % 2 + 2 * r};
    case 2: return {l / 4 + 8 * (r % 2), l % 4 + 4 * (r / 2)};
    case 3: return {l / 4 + 8 * (r / 2 % 2), r % 2 + 2 * (l % 4) + 8 * (r / 4)};
    default: return {l % 16, r};
  }
}

void poison(float* from, size_t count) { std::memset(from, 0xff, count * sizeof(float)); }

}  // namespace

Tmem& Tcgen05::memory(Cta& cta) {
  if (!cta.tmem) {
    cta.tmem = std::make_unique<Tmem>();
    poison(cta.tmem->cells.data(), cta.tmem->cells.size());
    cta.tmem->shadow.resize(4 * columns_total);
  }
  return *cta.tmem;
}

void Tcgen05::bad(Hazard h, Warp& w, u32 mask, i32 at, std::string object, std::string detail, i32 other) {
  if (!m.reported(h, at, other))
    m.hazard(h, Severity::error, &w, mask, at, other, std::move(object), std::move(detail));
}

/// The other CTA of the pair, or null after a report.
Cta* Tcgen05::pair(Warp& w, u32 mask, i32 at, Cta& cta) {
  Cluster& cluster = *cta.cluster;
  if ((cta.rank ^ 1) >= cluster.ctas.size()) {
    bad(Hazard::TMEM_MIXED_CTA_GROUP, w, mask, at, "cluster", "cta_group::2, but the CTA has no peer: ranks 2i and 2i + 1 are a pair");
    return nullptr;
  }
  Cta& peer = cluster.ctas[cta.rank ^ 1];
  if (peer.exited()) bad(Hazard::SHARED_PEER_EXITED, w, mask, at, "cluster", "the other CTA of the pair has ended");
  return &peer;
}

/// All instructions of a kernel must name the same cta_group.
bool Tcgen05::group(Warp& w, u32 mask, i32 at, u8 group) {
  Tmem& t = memory(*w.cta);
  if (t.group == 0) t.group = group, t.group_at = at;
  if (t.group == group) return true;
  bad(Hazard::TMEM_MIXED_CTA_GROUP, w, mask, at, "kernel",
      "cta_group::" + std::to_string(group) + " after cta_group::" + std::to_string(t.group), t.group_at);
  return false;
}

/// Whether the columns lie inside the memory and are allocated.
bool Tcgen05::usable(const TmemAccess& a, const TmemRegion& r) {
  const Tmem& t = memory(*r.cta);
  bool ok = r.column + r.columns <= columns_total;
  for (u32 c = r.column; ok && c < r.column + r.columns; ++c) ok = t.allocation[c] != 0;
  if (!ok)
    bad(Hazard::TMEM_NOT_ALLOCATED, a.warp, a.mask, a.at, "tensor memory of CTA " + std::to_string(r.cta->linear),
        "columns " + std::to_string(r.column) + " to " + std::to_string(r.column + r.columns - 1) + " are not all allocated");
  return ok;
}

// --- checks ----------------------------------------------------------------------------------------------------------

void Tcgen05::know(TmemAccess& a, const std::vector<u32>& clock) {
  a.happens = m.section(clock, 0), a.published = m.section(clock, 2), a.visible = m.section(clock, 3);
}

void Tcgen05::found(Hazard h, const TmemAccess& a, const TmemRegion& r, u32 column, u32 quarter, i32 other,
                    const char* detail) {
  if (h == last_hazard && other == last_other) return;
  last_hazard = h, last_other = other;
  if (m.reported(h, a.at, other)) return;
  const bool lenient = h == Hazard::TMEM_MISSING_FENCE && m.options_.lenient_tcgen05;
  std::ostringstream s;
  s << "tensor memory of CTA " << r.cta->linear << ", column " << column << ", lanes " << 32 * quarter << " to " << 32 * quarter + 31;
  m.hazard(h, lenient ? Severity::information : Severity::error, &a.warp, a.mask, a.at, other, s.str(), detail);
}

/// The order of one thread's products is promised for the same accumulator only; the hardware keeps it for all.
void Tcgen05::note_order(const TmemAccess& a, i32 other) {
  if (m.tc_order_noted_) return;
  m.tc_order_noted_ = true;
  m.hazard(Hazard::TMEM_CROSS_ACCUMULATOR_ORDER, Severity::information, &a.warp, a.mask, a.at, other, "tensor memory",
           "relies on the order of one thread's operations on different accumulators, which PTX does not promise");
}

void Tcgen05::check_order(const Stamp& before, i32 other, const TmemAccess& a, const TmemRegion& r, u32 column,
                          u32 quarter, Hazard unordered, const char* detail) {
  if (!reached(a.happens, before)) {
    found(unordered, a, r, column, quarter, other, detail);
    return;
  }
  const u32 own = a.warp.tc_slot;
  if (own && (before.slot == own || before.slot == own + 1)) return;  // a wait of the same warp is enough
  if (!reached(a.visible, before))
    found(Hazard::TMEM_MISSING_FENCE, a, r, column, quarter, other,
          reached(a.published, before) ? "no tcgen05.fence::after_thread_sync since the synchronization that orders them"
                                       : "no tcgen05.fence::before_thread_sync in front of the synchronization that orders them");
}

void Tcgen05::check_writer(const TmemCell& c, const TmemAccess& a, const TmemRegion& r, u32 column, u32 quarter, bool reads) {
  if (c.kind == TmemCell::nothing || !(c.halves & r.halves)) return;
  if (c.writer.slot == a.stamp.slot) {  // the same queue, or stores of the same warp
    const bool promised = c.kind == TmemCell::copy || c.kind == TmemCell::store ||
                          (a.kind == TmemCell::product && c.accumulator == a.accumulator);
    if (!promised && !reached(a.happens, c.writer)) note_order(a, c.writer_at);
    return;
  }
  if (c.kind == TmemCell::store) {
    check_order(c.writer, c.writer_at, a, r, column, quarter, Hazard::TMEM_READ_OF_UNFINISHED_STORE,
                reads ? "read before the store is known to be complete (tcgen05.wait::st, then a synchronization)"
                      : "written again before the store is known to be complete (tcgen05.wait::st, then a synchronization)");
  } else {
    check_order(c.writer, c.writer_at, a, r, column, quarter, Hazard::TMEM_READ_OF_IN_FLIGHT_MMA,
                reads ? "read before a commit of the operation that writes it has been waited for"
                      : "written before a commit of the operation that writes it has been waited for");
  }
}

void Tcgen05::read(const TmemRegion& r, const TmemAccess& a) {
  Tmem& t = *r.cta->tmem;
  for (u32 column = r.column; column < r.column + r.columns; ++column)
    for (u32 quarter = 0; quarter < 4; ++quarter) {
      if (!(r.quarters >> quarter & 1)) continue;
      ++m.checks;
      TmemCell& c = t.shadow[4 * column + quarter];
      if ((c.initialised & r.halves) != r.halves)
        found(Hazard::TMEM_UNINITIALISED_READ, a, r, column, quarter, -1, "nothing has written it since its allocation");
      check_writer(c, a, r, column, quarter, true);
      // One entry a reader; a reader that this one is ordered after needs none.
      const auto same = [&](const TmemReader& x) { return x.stamp.slot == a.stamp.slot || reached(a.happens, x.stamp); };
      auto old = std::find_if(c.readers.begin(), c.readers.end(), same);
      if (old == c.readers.end()) {
        c.readers.push_back({a.stamp, a.at, r.halves});
      } else {
        *old = {a.stamp, a.at, static_cast<u8>(old->halves | r.halves)};
      }
    }
}

/// `accumulates`: what was there is read as well.
void Tcgen05::write(const TmemRegion& r, const TmemAccess& a, bool accumulates) {
  Tmem& t = *r.cta->tmem;
  for (u32 column = r.column; column < r.column + r.columns; ++column)
    for (u32 quarter = 0; quarter < 4; ++quarter) {
      if (!(r.quarters >> quarter & 1)) continue;
      ++m.checks;
      TmemCell& c = t.shadow[4 * column + quarter];
      if (a.kind == TmemCell::product && c.kind == a.kind && c.writer.slot == a.stamp.slot && c.accumulator == a.accumulator &&
          c.readers.empty()) {  // the usual case: the next step of the same product
        c.writer.epoch = a.stamp.epoch, c.writer_at = a.at;
        continue;
      }
      if (accumulates && (c.initialised & r.halves) != r.halves)
        found(Hazard::TMEM_UNINITIALISED_READ, a, r, column, quarter, -1, "nothing has written it since its allocation");
      check_writer(c, a, r, column, quarter, accumulates);
      for (const TmemReader& reader : c.readers) {
        if (!(reader.halves & r.halves)) continue;
        if (reader.stamp.slot == a.stamp.slot) {
          if (!reached(a.happens, reader.stamp)) note_order(a, reader.at);
        } else {
          check_order(reader.stamp, reader.at, a, r, column, quarter, Hazard::TMEM_OVERWRITE_WHILE_READ,
                      "written before the reader is known to be done (tcgen05.wait::ld or a commit, then a synchronization)");
        }
      }
      std::erase_if(c.readers, [&](const TmemReader& x) { return (x.halves & ~r.halves) == 0; });
      c.kind = a.kind, c.writer = a.stamp, c.writer_at = a.at, c.halves = r.halves, c.accumulator = a.accumulator;
      c.initialised |= r.halves;
    }
}

void Tcgen05::mark_pending(const TmemRegion& r, int change) {
  u16* p = r.cta->tmem->pending.data() + 4 * r.column;
  for (u32 i = 0; i < 4 * r.columns; ++i)
    if (r.quarters >> (i % 4) & 1) p[i] = static_cast<u16>(p[i] + change);
}

// --- allocation ------------------------------------------------------------------------------------------------------

Step Tcgen05::allocate(Warp& w, Group& g, const Instruction& in, u32 mask) {
  if (!m.converged(w, g, in, mask, "tcgen05.alloc")) return Step::block;
  const i32* e = m.program_.pool.data() + in.operands;
  const Registers r = w.registers_view(m.program_);
  Tmem& t = memory(*w.cta);
  const u32 asked = m.uniform(w, r.source(e[3]), mask, g.pc, "number of columns");
  const u32 n = std::bit_ceil(std::clamp(asked, 32u, columns_total));
  const std::string object = "tensor memory of CTA " + std::to_string(w.cta->linear);
  Cta* peer = in.attr[0] == 2 ? pair(w, mask, g.pc, *w.cta) : nullptr;
  if (g.stage == 0) {
    group(w, mask, g.pc, in.attr[0]);
    if (n != asked)
      bad(Hazard::TMEM_BAD_COLUMNS, w, mask, g.pc, object, std::to_string(asked) + " columns; it must be a power of two from 32 to 512");
    if (t.relinquished) bad(Hazard::TMEM_ALLOC_AFTER_RELINQUISH, w, mask, g.pc, object, "the CTA has relinquished its permit", t.group_at);
    if (n > t.last_columns)
      bad(Hazard::TMEM_ALLOC_GROWS, w, mask, g.pc, object,
          std::to_string(n) + " columns after " + std::to_string(t.last_columns) + ": allocations must not grow", t.allocated_at);
    g.data = ++t.pair_begun;
    g.stage = 1;
    m.event();
  }
  u32 column = columns_total;
  const auto is_free = [&](const Tmem& x, u32 first) {
    for (u32 c = first; c < first + n; ++c)
      if (x.allocation[c]) return false;
    return true;
  };
  if (peer) {  // the warps of both CTAs allocate together; the second one finds what the first one did
    Tmem& other = memory(*peer);
    if (t.pair_done < g.data) {
      if (other.pair_begun < g.data) return Step::block;
      for (column = 0; column < columns_total && !(is_free(t, column) && is_free(other, column));) column += n;
      if (column == columns_total) return Step::block;
      other.pair_done = g.data, other.pair_column = column;
    } else {
      column = t.pair_column;
    }
  } else {
    for (column = 0; column < columns_total && !is_free(t, column);) column += n;
    if (column == columns_total) return Step::block;
  }
  g.stage = 0;
  ++t.allocations;
  std::fill_n(t.allocation.begin() + column, n, t.allocations);
  t.last_columns = n, t.allocated_at = g.pc;
  poison(t.cells.data() + static_cast<size_t>(column) * height, static_cast<size_t>(n) * height);
  std::fill_n(t.shadow.begin() + 4 * column, 4 * n, TmemCell());
  m.event();
  const int lane = std::countr_zero(mask);
  const Place p = m.locate(w, Space::generic, m.address(r, e, lane, true));
  const Place place = p.space == Space::shared ? p : m.locate(w, Space::shared, m.address(r, e, lane, false));
  u8* to = m.memory(w, place, 4, true, lane, g.pc);
  if (!to) return Step::next;
  if (m.options_.checks) m.shared_access(w, lane, *place.cta, place.offset, 4, true, g.pc);
  std::memcpy(to, &column, 4);
  return Step::next;
}

/// dealloc and relinquish_alloc_permit
Step Tcgen05::release(Warp& w, Group& g, const Instruction& in, u32 mask) {
  if (!m.converged(w, g, in, mask, "tcgen05.dealloc")) return Step::block;
  const i32* e = m.program_.pool.data() + in.operands;
  const Registers r = w.registers_view(m.program_);
  Tmem& t = memory(*w.cta);
  group(w, mask, g.pc, in.attr[0]);
  if (static_cast<Operation>(in.operation) == Operation::tc_relinquish) {
    t.relinquished = true;
    return Step::next;
  }
  const u32 address = m.uniform(w, r.source(e[0]), mask, g.pc, "tensor memory address");
  const u32 n = m.uniform(w, r.source(e[1]), mask, g.pc, "number of columns");
  const std::string object = "tensor memory of CTA " + std::to_string(w.cta->linear);
  if (n < 32 || n > columns_total || !std::has_single_bit(n)) {
    bad(Hazard::TMEM_BAD_COLUMNS, w, mask, g.pc, object, std::to_string(n) + " columns; it must be a power of two from 32 to 512");
    return Step::next;
  }
  const u16 number = address < columns_total && address + n <= columns_total ? t.allocation[address] : 0;
  bool whole = number != 0 && (address == 0 || t.allocation[address - 1] != number) &&
               (address + n == columns_total || t.allocation[address + n] != number);
  for (u32 c = address; whole && c < address + n; ++c) whole = t.allocation[c] == number;
  if (!whole) {
    bad(Hazard::TMEM_NOT_ALLOCATED, w, mask, g.pc, object,
        std::to_string(n) + " columns from " + std::to_string(address) + " on are no allocation");
    return Step::next;
  }
  TmemAccess a{w, mask, g.pc};
  if (m.options_.checks) know(a, m.knowledge(w, mask));
  const TmemRegion region{w.cta, address, n};
  for (u32 i = 4 * address; i < 4 * (address + n); ++i) {
    TmemCell& c = t.shadow[i];
    const auto check = [&](bool unordered, i32 other) {
      if (unordered) found(Hazard::TMEM_DEALLOC_IN_USE, a, region, i / 4, i % 4, other, "nothing orders this access before the deallocation");
    };
    if (t.pending[i]) check(true, c.writer_at);
    if (m.options_.checks) {
      if (c.kind != TmemCell::nothing) check(!reached(a.happens, c.writer), c.writer_at);
      for (const TmemReader& x : c.readers) check(!reached(a.happens, x.stamp), x.at);
    }
    c = TmemCell();
  }
  poison(t.cells.data() + static_cast<size_t>(address) * height, static_cast<size_t>(n) * height);
  std::fill_n(t.allocation.begin() + address, n, u16(0));
  m.event();
  return Step::next;
}

void Machine::check_tmem_exit(Cta& cta) {
  const auto left = std::count_if(cta.tmem->allocation.begin(), cta.tmem->allocation.end(), [](u16 x) { return x != 0; });
  if (left)
    hazard(Hazard::TMEM_LEAK, Severity::error, nullptr, 0, cta.tmem->allocated_at, -1, "tensor memory of CTA " + std::to_string(cta.linear),
           std::to_string(left) + " columns are still allocated at the end of the CTA");
}

// --- loads and stores ------------------------------------------------------------------------------------------------

/// What ld and st have in common. Calls f(address, ok): the lane and column, and whether the access is legal.
template <class F>
Step Tcgen05::transfer(Warp& w, Group& g, const Instruction& in, u32 mask, const i32* e, F f) {
  if (!m.converged(w, g, in, mask, "tcgen05.ld and st")) return Step::block;
  const Registers r = w.registers_view(m.program_);
  const LoadShape& shape = load_shapes[in.attr[1]];
  const u32 address = m.uniform(w, r.source(e[0]), mask, g.pc, "tensor memory address") + static_cast<u32>(e[1]);
  const u32 lane = address >> 16, column = address & 0xffff, quarter = static_cast<u32>(w.index % 4);
  if (!w.tc_slot && m.options_.checks) w.tc_slot = m.new_slot(2);
  const bool is_store = static_cast<Operation>(in.operation) == Operation::tc_st;
  TmemAccess a{w, mask, g.pc};
  const u32 number = is_store ? ++w.tc_stores : ++w.tc_loads;
  bool ok = lane == 32 * quarter || (shape.half && lane == 32 * quarter + 16);
  if (!ok)
    bad(Hazard::TMEM_LANE_VIOLATION, w, mask, g.pc, "tensor memory of CTA " + std::to_string(w.cta->linear),
        "lane " + std::to_string(lane) + "; warp " + std::to_string(w.index) + " has lanes " + std::to_string(32 * quarter) + " to " +
            std::to_string(32 * quarter + 31) + (shape.half ? ", and the shape starts at the first or the seventeenth" : ", and the shape starts at the first"));
  const u32 columns = shape.columns * in.attr[2] * (in.attr[3] ? 2 : 1);
  const u8 halves = !shape.half ? 3 : lane % 32 ? 2 : 1;
  const u32 second = in.attr[1] == 4 ? static_cast<u32>(e[2]) : 0;
  for (u32 part = 0; part < (in.attr[1] == 4 ? 2u : 1u) && ok; ++part) {
    const TmemRegion region{w.cta, column + part * second, columns, static_cast<u8>(1 << quarter), halves};
    ok = usable(a, region);
    if (!ok || !m.options_.checks) continue;
    a.kind = is_store ? TmemCell::store : TmemCell::nothing;
    a.stamp = {w.tc_slot + (is_store ? 1 : 0), number, 1};
    know(a, m.knowledge(w, mask));
    if (is_store) {
      write(region, a, false);
    } else {
      read(region, a);
    }
  }
  f(Place2{lane, column}, second, ok);
  return Step::next;
}

Step Tcgen05::load(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = m.program_.pool.data() + in.operands;
  const int shape = in.attr[1];
  const u32 registers = load_shapes[shape].registers * in.attr[2];
  const i32* address = e + registers + 1;
  return transfer(w, g, in, mask, address, [&](Place2 from, u32 second, bool ok) {
    Tmem& t = memory(*w.cta);
    const bool lenient = m.options_.lenient_tcgen05, pack = in.attr[3];
    const Registers r = w.registers_view(m.program_);
    const auto cell = [&](u32 lane, u32 column) {
      return t.pending[4 * column + lane / 32] ? nan_f32 : bits_of(t.cells[static_cast<size_t>(column) * height + lane]);
    };
    if (w.tc_rows.size() > 1024)
      std::erase_if(w.tc_rows, [&](i32 row) { return !w.async[static_cast<size_t>(m.program_.async_index[static_cast<size_t>(row)])].written_by; });
    // A register is the load's until the wait: it holds NaN, the value waits at its side.
    const auto deliver = [&](i32 row, const u32* value) {
      if (row == absent) return;
      const size_t i = static_cast<size_t>(m.program_.async_index[static_cast<size_t>(row)]);
      AsyncRow& owner = w.async[i];
      if (!owner.written_by) {
        ++w.async_pending;
        w.tc_rows.push_back(row);
      }
      owner.written_by = by_load | w.tc_loads, owner.at = g.pc;
      u32* now = r.row(row);
      if (!lenient) {
        std::fill_n(now, lanes, nan_f32);
        now = w.side.data() + i * lanes;
      }
      std::memcpy(now, value, lanes * sizeof(u32));
    };
    const auto type = static_cast<Type>(in.type);
    const bool is_max = in.attr[4] == 2;
    u32 best[lanes];
    for (u32 j = 0; j < registers; ++j) {
      alignas(64) u32 value[lanes];
      if (!ok) {
        std::fill_n(value, lanes, nan_f32);
      } else if (shape == 0 && !pack) {
        if (t.pending[4 * (from.column + j) + from.lane / 32]) {
          std::fill_n(value, lanes, nan_f32);
        } else {
          std::memcpy(value, t.cells.data() + static_cast<size_t>(from.column + j) * height + from.lane, sizeof(value));
        }
      } else {
        for (u32 l = 0; l < lanes; ++l) {
          const Place2 p = fragment(shape, j, l);
          const u32 lane = from.lane + p.lane, column = from.column + (l >= 16 ? second : 0) + p.column * (pack ? 2 : 1);
          value[l] = pack ? (cell(lane, column) & 0xffff) | cell(lane, column + 1) << 16 : cell(lane, column);
        }
      }
      deliver(e[j], value);
      if (!in.attr[4]) continue;
      for (u32 l = 0; l < lanes; ++l) {
        u32 x = value[l];
        if (type != Type::f32) {
          const bool greater = type == Type::s32 ? static_cast<i32>(x) > static_cast<i32>(best[l]) : x > best[l];
          if (j == 0 || greater == is_max) best[l] = x;
          continue;
        }
        if (in.attr[5] & flag_abs) x &= 0x7fff'ffff;
        const float v = float_of(x), b = float_of(best[l]);
        const bool sticky = in.attr[5] & flag_nan;  // otherwise a NaN loses against a number
        if (j == 0 || (v != v ? sticky : b != b ? !sticky : (v > b) == is_max)) best[l] = x;
      }
    }
    if (in.attr[4]) deliver(e[registers], best);
    if (lenient && m.options_.checks) m.learn(w, mask, w.tc_slot, w.tc_loads);  // the scoreboard waits before any use
  });
}

Step Tcgen05::store(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = m.program_.pool.data() + in.operands;
  return transfer(w, g, in, mask, e, [&](Place2 to, u32 second, bool ok) {
    if (!ok) return;
    Tmem& t = memory(*w.cta);
    const int shape = in.attr[1];
    const bool unpack = in.attr[3];
    const Registers r = w.registers_view(m.program_);
    for (u32 j = 0; j < load_shapes[shape].registers * in.attr[2]; ++j) {
      const u32* value = r.source(e[3 + j]);
      if (shape == 0 && !unpack) {
        std::memcpy(t.cells.data() + static_cast<size_t>(to.column + j) * height + to.lane, value, lanes * sizeof(u32));
        continue;
      }
      for (u32 l = 0; l < lanes; ++l) {
        const Place2 p = fragment(shape, j, l);
        const u32 column = to.column + (l >= 16 ? second : 0) + p.column * (unpack ? 2 : 1);
        float* cell = t.cells.data() + static_cast<size_t>(column) * height + to.lane + p.lane;
        cell[0] = float_of(unpack ? value[l] & 0xffff : value[l]);
        if (unpack) cell[height] = float_of(value[l] >> 16);
      }
    }
  });
}

Step Tcgen05::wait(Warp& w, Group& g, const Instruction& in, u32 mask) {
  if (!m.converged(w, g, in, mask, "tcgen05.wait")) return Step::block;
  if (in.attr[1]) {
    if (m.options_.checks && w.tc_slot) m.learn(w, mask, w.tc_slot + 1, w.tc_stores);
    return Step::next;
  }
  for (const i32 row : w.tc_rows) {
    const size_t i = static_cast<size_t>(m.program_.async_index[static_cast<size_t>(row)]);
    if (!w.async[i].written_by) continue;
    if (!m.options_.lenient_tcgen05)
      std::memcpy(w.regs.data() + static_cast<size_t>(row) * lanes, w.side.data() + i * lanes, lanes * sizeof(u32));
    w.async[i].written_by = 0;
    --w.async_pending;
  }
  w.tc_rows.clear();
  if (m.options_.checks && w.tc_slot) m.learn(w, mask, w.tc_slot, w.tc_loads);
  return Step::next;
}

/// fence::before_thread_sync publishes what the thread knows to be complete; after_thread_sync makes use of it.
Step Tcgen05::fence(Warp& w, const Instruction& in, u32 mask) {
  if (!m.options_.checks) return Step::next;
  const int to = in.attr[1] ? 3 : 2, from = in.attr[1] ? 2 : 0;
  for (size_t i = 0, n = w.clocks.size(); i < n; ++i) {
    const u32 both = w.clocks[i].mask & mask;
    if (!both) continue;
    size_t target = i;
    if (both != w.clocks[i].mask) {
      target = w.clocks.size();
      w.clocks.push_back({both, w.clocks[i].v});
      w.clocks[i].mask &= ~both;
    }
    std::vector<u32>& v = w.clocks[target].v;
    m.unit_.join(m.section(v, to), m.section(v, from), static_cast<int>(m.width_));
  }
  return Step::next;
}

}  // namespace cupyfa::emulator
