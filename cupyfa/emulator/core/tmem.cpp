// Tensor memory: its allocation, and the shadow that proves accesses ordered.
#include <bit>
#include <sstream>

#include "tcgen05.hpp"

namespace cupyfa::emulator {

namespace {

constexpr u32 columns_total = Tmem::columns, height = Tmem::lanes;

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
    bad(Hazard::TMEM_MIXED_CTA_GROUP, w, mask, at, "cluster",
        "cta_group::2, but the CTA has no peer: ranks 2i and 2i + 1 are a pair");
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
        "columns " + std::to_string(r.column) + " to " + std::to_string(r.column + r.columns - 1) +
            " are not all allocated");
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
  s << "tensor memory of CTA " << r.cta->linear << ", column " << column << ", lanes " << 32 * quarter << " to "
    << 32 * quarter + 31;
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
          reached(a.published, before)
              ? "no tcgen05.fence::after_thread_sync since the synchronization that orders them"
              : "no tcgen05.fence::before_thread_sync in front of the synchronization that orders them");
}

void Tcgen05::check_writer(const TmemCell& c, const TmemAccess& a, const TmemRegion& r, u32 column, u32 quarter,
                           bool reads) {
  if (c.kind == TmemCell::nothing || !(c.halves & r.halves)) return;
  if (c.writer.slot == a.stamp.slot) {  // the same queue, or stores of the same warp
    const bool promised = c.kind == TmemCell::copy || c.kind == TmemCell::store ||
                          (a.kind == TmemCell::product && c.accumulator == a.accumulator);
    if (!promised && !reached(a.happens, c.writer)) note_order(a, c.writer_at);
    return;
  }
  if (c.kind == TmemCell::store) {
    check_order(
        c.writer, c.writer_at, a, r, column, quarter, Hazard::TMEM_READ_OF_UNFINISHED_STORE,
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
        found(Hazard::TMEM_UNINITIALISED_READ, a, r, column, quarter, -1,
              "nothing has written it since its allocation");
      check_writer(c, a, r, column, quarter, true);
      // One entry a reader; a reader that this one is ordered after needs none.
      const auto same = [&](const TmemReader& x) {
        return x.stamp.slot == a.stamp.slot || reached(a.happens, x.stamp);
      };
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
      if (a.kind == TmemCell::product && c.kind == a.kind && c.writer.slot == a.stamp.slot &&
          c.accumulator == a.accumulator && c.readers.empty()) {  // the usual case: the next step of the same product
        c.writer.epoch = a.stamp.epoch, c.writer_at = a.at;
        continue;
      }
      if (accumulates && (c.initialised & r.halves) != r.halves)
        found(Hazard::TMEM_UNINITIALISED_READ, a, r, column, quarter, -1,
              "nothing has written it since its allocation");
      check_writer(c, a, r, column, quarter, accumulates);
      for (const TmemReader& reader : c.readers) {
        if (!(reader.halves & r.halves)) continue;
        if (reader.stamp.slot == a.stamp.slot) {
          if (!reached(a.happens, reader.stamp)) note_order(a, reader.at);
        } else {
          check_order(
              reader.stamp, reader.at, a, r, column, quarter, Hazard::TMEM_OVERWRITE_WHILE_READ,
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
      bad(Hazard::TMEM_BAD_COLUMNS, w, mask, g.pc, object,
          std::to_string(asked) + " columns; it must be a power of two from 32 to 512");
    if (t.relinquished)
      bad(Hazard::TMEM_ALLOC_AFTER_RELINQUISH, w, mask, g.pc, object, "the CTA has relinquished its permit",
          t.group_at);
    if (n > t.last_columns)
      bad(Hazard::TMEM_ALLOC_GROWS, w, mask, g.pc, object,
          std::to_string(n) + " columns after " + std::to_string(t.last_columns) + ": allocations must not grow",
          t.allocated_at);
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
  if (m.options_.checks) m.shared_access(w, lane, *place.cta, place.offset, 4, Machine::Use::write, g.pc);
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
    bad(Hazard::TMEM_BAD_COLUMNS, w, mask, g.pc, object,
        std::to_string(n) + " columns; it must be a power of two from 32 to 512");
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
      if (unordered)
        found(Hazard::TMEM_DEALLOC_IN_USE, a, region, i / 4, i % 4, other,
              "nothing orders this access before the deallocation");
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
  const auto left =
      std::count_if(cta.tmem->allocation.begin(), cta.tmem->allocation.end(), [](u16 x) { return x != 0; });
  if (left)
    hazard(Hazard::TMEM_LEAK, Severity::error, nullptr, 0, cta.tmem->allocated_at, -1,
           "tensor memory of CTA " + std::to_string(cta.linear),
           std::to_string(left) + " columns are still allocated at the end of the CTA");
}

}  // namespace cupyfa::emulator
