// What an access to memory is checked for: whether something orders it after those it conflicts with, whether what it
// finds has been written, and whether the CTA that it reaches may end. Also the memory model's own synchronisation:
// releases and acquires at a place in memory, fences beside relaxed accesses, each with its scope.
#include <sstream>

#include "machine.hpp"

namespace cupyfa::emulator {

namespace {

/// Whether a scope of a thread in CTA `a` has the threads of CTA `b`.
bool reaches(Strength scope, u32 a, u32 b) {
  return scope == strong_in_gpu || (scope == strong_in_cluster && a >> 5 == b >> 5) || (scope != weak && a == b);
}

Strength strength_of(Order order, Scope scope) {
  if (order == Order::weak) return weak;
  return scope == Scope::cta ? strong_in_cta : scope == Scope::cluster ? strong_in_cluster : strong_in_gpu;
}

constexpr u64 shared_key = u64(1) << 63;  ///< of releases in shared memory, beside the address in the cluster

}  // namespace

Access Machine::access_of(Warp& w, int lane, Strength strength, i32 at) {
  const std::vector<u32>& v = own_clock(w, 1u << lane).v;
  return {{static_cast<u32>(w.clock_base + lane), w.epoch, 1},
          false,
          section(v, 0),
          section(v, 1),
          at,
          strength,
          w.cta->home,
          options_.review};
}

// --- findings --------------------------------------------------------------------------------------------------------

void Machine::conflict(const Conflict& c, const Warp& w, u32 mask, i32 at, const Cta& cta, u32 offset) {
  if (reported(c.hazard, at, c.other)) return;
  std::ostringstream s;
  s << "CTA " << cta.linear << ", byte " << offset - shared_first << " of its shared memory";
  hazard(c.hazard, c.review ? Severity::review : Severity::error, &w, mask, at, c.other, s.str(),
         c.review ? "it is written by the async proxy, and no fence.proxy.async lies between an ordinary read and that"
                  : "");
}

void Machine::race(const Conflict& c, const Warp& w, u32 mask, i32 at, const Buffer& buffer, u64 address) {
  if (c.review || reported(Hazard::GRID_GLOBAL_RACE, at, c.other)) return;
  const char* what = "";
  switch (c.hazard) {
  case Hazard::SHARED_READ_NOT_ORDERED_AFTER_WRITE:
    what = "a read that nothing orders after the write";
    break;
  case Hazard::SHARED_READ_OF_IN_FLIGHT_TMA_DATA:
    what = "a read of what an asynchronous copy may not have written yet";
    break;
  case Hazard::SHARED_WRITE_TO_BUFFER_BEING_READ:
    what = "a write that nothing orders after the read";
    break;
  case Hazard::SHARED_MISSING_PROXY_FENCE:
    what = "no fence.proxy.async lies between an ordinary write and this asynchronous copy";
    break;
  default:
    what = "two writes that nothing orders";
  }
  hazard(Hazard::GRID_GLOBAL_RACE, Severity::error, &w, mask, at, c.other,
         buffer.name + ", byte " + std::to_string(address - buffer.base), what);
}

// --- shared memory ---------------------------------------------------------------------------------------------------

void Machine::shared_access(Warp& w, int lane, Cta& cta, u32 offset, u32 bytes, Use use, i32 at, Strength strength) {
  ++checks;
  const Access a = access_of(w, lane, strength, at);
  const auto found = [&](const Conflict& c) { conflict(c, w, 1u << lane, at, cta, offset); };
  switch (use) {
  case Use::read:
    cta.shadow->read(offset, offset + bytes, a, found);
    break;
  case Use::write:
    cta.shadow->write(offset, offset + bytes, a, found);
    break;
  default:
    cta.shadow->update(offset, offset + bytes, a, found);
  }
  if (&cta != w.cta) owe(cta, Hazard::SHARED_PEER_EXITED, a.stamp, at, w);
}

/// Something uses the memory of a CTA, which may end only when one of its threads knows that this is over.
void Machine::owe(Cta& cta, Hazard h, const Stamp& stamp, i32 at, const Warp& w) {
  for (Debt& d : cta.debts)
    if (d.stamp.slot == stamp.slot && d.hazard == h) {
      if (d.stamp.epoch <= stamp.epoch) d.stamp = stamp, d.at = at;
      return;
    }
  cta.debts.push_back({h, stamp, at, static_cast<i32>(w.cta->linear), w.index});
}

void Machine::check_debts(Cta& cta) {
  if (cta.debts.empty()) return;
  std::vector<u32> known(static_cast<size_t>(width_) * sections_, 0);
  for (const Warp& w : cta.warps)
    for (const LaneClock& c : w.clocks) unit_.join(known.data(), c.v.data(), static_cast<int>(width_));
  for (const Debt& d : cta.debts) {
    if (reached(known.data(), d.stamp) || reported(d.hazard, d.at, -1)) continue;
    const char* why =
        d.hazard == Hazard::SHARED_PEER_EXITED ? "the CTA may end before another CTA's access to its shared memory"
        : d.hazard == Hazard::BULK_EXIT_WITH_LOAD_IN_FLIGHT
            ? "the CTA may end before this copy into its shared memory has landed: none of its threads knows of a wait "
              "for it"
            : "the CTA may end before this copy has read its shared memory: none of its threads knows of a wait for it";
    report.add(d.hazard, Severity::error, d.at, -1, d.cta, d.warp, 0, "CTA " + std::to_string(cta.linear), why);
    if (options_.stop_at_error) throw Stopped();
  }
}

// --- global memory ---------------------------------------------------------------------------------------------------

/// The buffer that holds all of these bytes, -1: none.
int Machine::find_buffer(u64 address, u64 bytes) {
  const auto inside = [&](const Buffer& b) {
    return address >= b.base && bytes <= b.size && address - b.base <= b.size - bytes;
  };
  if (last_buffer_ < buffers_.size() && inside(buffers_[last_buffer_])) return static_cast<int>(last_buffer_);
  auto b =
      std::upper_bound(buffers_.begin(), buffers_.end(), address, [](u64 x, const Buffer& y) { return x < y.base; });
  if (b == buffers_.begin() || !inside(*--b)) return -1;
  last_buffer_ = static_cast<u64>(b - buffers_.begin());
  return static_cast<int>(last_buffer_);
}

/// Reading what the grid before this one may still be writing.
void Machine::after_grid(Warp& w, u32 bit, i32 at) {
  if (!grid_slot_ || section(own_clock(w, bit).v, 0)[grid_slot_] ||
      reported(Hazard::GRID_READ_BEFORE_GRIDDEP_WAIT, at, -1))
    return;
  hazard(Hazard::GRID_READ_BEFORE_GRIDDEP_WAIT, Severity::error, &w, bit, at, -1, "global memory",
         "the grid before may still write it: no griddepcontrol.wait is ordered before this read");
}

void Machine::check_written(u64 address, u64 bytes, Warp& w, u32 mask, i32 at) {
  const int i = find_buffer(address, bytes);
  if (i < 0 || buffers_[static_cast<size_t>(i)].initialised) return;
  Buffer& b = buffers_[static_cast<size_t>(i)];
  for (u64 x = address - b.base; x < address - b.base + bytes; ++x)
    if (!b.written[x]) {
      if (!reported(Hazard::GRID_GLOBAL_UNINITIALISED_READ, at, -1))
        hazard(Hazard::GRID_GLOBAL_UNINITIALISED_READ, Severity::error, &w, mask, at, -1,
               b.name + ", byte " + std::to_string(x), "nobody has written it");
      return;
    }
}

void Machine::global_access(Warp& w, int lane, u64 address, u32 bytes, Use use, i32 at, Strength strength) {
  const int i = find_buffer(address, bytes);
  if (i < 0 || !global_shadow_[static_cast<size_t>(i)]) return;
  ++checks;
  const Buffer& b = buffers_[static_cast<size_t>(i)];
  Shadow& shadow = *global_shadow_[static_cast<size_t>(i)];
  const Access a = access_of(w, lane, strength, at);
  const auto found = [&](const Conflict& c) { race(c, w, 1u << lane, at, b, address); };
  const u32 begin = static_cast<u32>(address - b.base);
  if (use == Use::read) {
    shadow.read(begin, begin + bytes, a, found);
  } else if (use == Use::write) {
    shadow.write(begin, begin + bytes, a, found);
  } else {
    shadow.update(begin, begin + bytes, a, found);
  }
}

/// The global side of a copy that is being issued.
void Machine::copy_access(Copy& c) {
  const bool loads = c.kind == Copy::to_shared || c.kind == Copy::async16;
  if (loads ? c.targets == 0 : c.kind != Copy::to_global && c.kind != Copy::reduce_global) return;
  Warp& w = *c.warp;
  const u32 bit = 1u << c.lane;
  if (c.kind != Copy::to_global) after_grid(w, bit, c.at);
  for (const CopyRow& row : c.rows) {
    if (row.end <= row.begin) continue;
    const u64 step = static_cast<u64>(c.element) * c.element_stride;
    const u64 from = row.global + static_cast<u64>(static_cast<i64>(row.begin)) * step;
    const u64 length = static_cast<u64>(row.end - row.begin - 1) * step + c.element;
    const int i = find_buffer(from, length);
    if (i < 0 || !global_shadow_[static_cast<size_t>(i)]) continue;
    const Buffer& b = buffers_[static_cast<size_t>(i)];
    Shadow& shadow = *global_shadow_[static_cast<size_t>(i)];
    Access a = access_of(w, c.lane, weak, c.at);
    a.async = c.kind != Copy::async16;
    if (c.kind == Copy::async16) {
      a.stamp = {w.cp_slot, w.cp_groups + 1, 1};
    } else if (loads) {
      const u32 rank = static_cast<u32>(__builtin_ctz(c.targets)) & c.barrier_mask;
      const Cta& home = c.cta->cluster->ctas[rank];
      const i32 barrier = home.barrier_at[c.barrier_offset / 8];
      if (barrier < 0) return;
      const MBarrier& m = home.barriers[static_cast<size_t>(barrier)];
      a.stamp = {m.slot, static_cast<u32>(m.phase + 1), 1};
    } else {
      const BulkQueue& q = bulk_queue(w, c.lane);
      a.stamp = {q.slot + 1, q.first + static_cast<u32>(q.groups.size()) - 1, 1};
      if (c.kind == Copy::reduce_global) a.strength = strong_in_gpu;
    }
    const auto found = [&](const Conflict& x) { race(x, w, bit, c.at, b, from); };
    const u64 piece = c.element_stride == 1 ? length : c.element, stride = c.element_stride == 1 ? length : step;
    for (u64 x = from; x < from + length; x += stride) {
      const u32 begin = static_cast<u32>(x - b.base), end = begin + static_cast<u32>(piece);
      if (loads) {
        shadow.read(begin, end, a, found);
      } else if (c.kind == Copy::to_global) {
        shadow.write(begin, end, a, found);
      } else {
        shadow.update(begin, end, a, found);
      }
    }
  }
}

// --- synchronisation by memory ---------------------------------------------------------------------------------------

/// One lane's access, after its bounds were checked: order, and what it releases and acquires.
void Machine::memory_access(Warp& w, int lane, const Place& place, u32 bytes, Use use, i32 at, Order order,
                            Scope scope) {
  const Strength strength = strength_of(order, scope);
  const u32 bit = 1u << lane;
  u64 key = 0;
  if (place.space == Space::shared) {
    shared_access(w, lane, *place.cta, place.offset, bytes, use, at, strength);
    key = shared_key | static_cast<u64>(place.cta->linear) << 24 | place.offset;
  } else if (place.space == Space::global) {
    if (use != Use::write) after_grid(w, bit, at);
    global_access(w, lane, place.address, bytes, use, at, strength);
    const int i = find_buffer(place.address, bytes);
    if (i < 0 || !global_shadow_[static_cast<size_t>(i)]) return;
    key = place.address;
  } else {
    return;
  }
  if (strength != weak || !releases_.empty()) synchronise(w, bit, key, use, order, strength);
}

void Machine::synchronise(Warp& w, u32 bit, u64 key, Use use, Order order, Strength strength) {
  // Another value than the one released: who reads it learns nothing. An atomic carries the releases before it on.
  if (use == Use::write) releases_.erase(key);
  if (strength == weak) return;
  const bool releases = order == Order::release || order == Order::acq_rel || order == Order::sc;
  const bool acquires = order == Order::acquire || order == Order::acq_rel || order == Order::sc;
  if (use != Use::write) {
    const auto place = releases_.find(key);
    if (place != releases_.end())
      for (const Release& r : place->second) {
        if (!reaches(strength, w.cta->home, r.home) || !reaches(r.scope, r.home, w.cta->home)) continue;
        if (acquires) {
          acquire(w, bit, r.v);
          continue;
        }
        Observed* known = nullptr;
        for (Observed& o : w.observed)
          if (o.mask == bit && o.home == r.home) known = &o;
        if (!known) known = &w.observed.emplace_back(Observed{bit, r.home, std::vector<u32>(r.v.size(), 0)});
        unit_.join(known->v.data(), r.v.data(), static_cast<int>(r.v.size()));
      }
  }
  if (use == Use::read) return;
  const auto published = [&](Strength scope) -> std::vector<u32>& {
    std::vector<Release>& list = releases_[key];
    for (Release& r : list)
      if (r.home == w.cta->home && r.scope == scope) return r.v;
    return list.emplace_back(Release{w.cta->home, scope, std::vector<u32>(static_cast<size_t>(width_) * sections_, 0)})
        .v;
  };
  if (releases) publish(w, bit, published(strength));
  for (const FencePoint& f : w.fences)
    if (f.mask & bit) {
      std::vector<u32>& into = published(std::min(strength, f.scope));
      unit_.join(into.data(), f.v.data(), static_cast<int>(into.size()));
    }
}

/// fence and membar: strong writes after it publish what the lanes know now; strong reads before it are acquired.
void Machine::fence(Warp& w, u32 mask, Strength scope) {
  if (!options_.checks) return;
  for (const Observed& o : w.observed)
    if ((o.mask & mask) && reaches(scope, w.cta->home, o.home)) acquire(w, o.mask & mask, o.v);
  std::erase_if(w.observed, [&](const Observed& o) { return (o.mask & mask) && reaches(scope, w.cta->home, o.home); });
  for (FencePoint& f : w.fences)
    if (f.scope <= scope) f.mask &= ~mask;
  std::erase_if(w.fences, [](const FencePoint& f) { return f.mask == 0; });
  // Lanes that have learned the same share one entry.
  for (const LaneClock& c : w.clocks) {
    const u32 both = c.mask & mask;
    if (!both) continue;
    FencePoint& f = w.fences.emplace_back(FencePoint{both, scope, c.v});
    if (sections_ > 2) std::fill(f.v.begin() + static_cast<std::ptrdiff_t>(width_) * 3, f.v.end(), 0);
    for (int l = 0; l < lanes; ++l)
      if (both >> l & 1) f.v[static_cast<size_t>(w.clock_base + l)] = w.epoch;
  }
  ++w.epoch;
}

}  // namespace cupyfa::emulator
