// Asynchronous copies, once they are issued.
//
// A copy is stamped in the shadow when it is issued, so that verdicts do not depend on when it is executed. Its
// destination in shared memory holds NaN patterns until its parts land, in the order that the policy chooses.
#include <algorithm>
#include <bit>

#include "machine.hpp"
#include "tensormap.hpp"
#include "values.hpp"

namespace cupyfa::emulator {

BulkQueue& Machine::bulk_queue(Warp& w, int lane) {
  BulkQueue& q = w.bulk[lane];
  if (q.groups.empty()) {
    q.groups.emplace_back();
    if (options_.checks) q.slot = new_slot(2);
  }
  return q;
}

/// Records the shared-memory footprint of a copy that has just been issued, and poisons what it will write.
void Machine::stamp_copy(Copy& c) {
  Warp& w = *c.warp;
  const u32 bit = 1u << c.lane;
  const bool writes = c.kind == Copy::to_shared || c.kind == Copy::shared_to_shared || c.kind == Copy::reduce_shared ||
                      c.kind == Copy::async16;
  const u32 row_bytes = c.row_elements * c.element;
  if (options_.checks) {
    std::vector<u32>& v = own_clock(w, bit).v;
    // The issuing thread knows its own accesses so far.
    section(v, 0)[w.clock_base + c.lane] = w.epoch++;
  }
  const bool stores = c.kind == Copy::to_global || c.kind == Copy::reduce_global;
  const auto each_chunk = [&](auto f) {
    for (const CopyRow& row : c.rows)
      // A load fills clipped elements too; of a store they go nowhere, and need not have been written.
      for (u32 x = stores ? static_cast<u32>(row.begin) * c.element : 0,
               end = stores ? static_cast<u32>(row.end) * c.element : row_bytes;
           x < end;) {
        const u32 linear = row.shared + x, length = std::min(end - x, 16 - linear % 16);
        const u32 at = swizzled(linear & ~15u, c.swizzle) + linear % 16;
        f(at, at + length);
        x += length;
      }
  };
  for (Cta& cta : c.cta->cluster->ctas) {
    const bool target = writes ? c.targets >> cta.rank & 1 : &cta == c.cta;
    if (!target) continue;
    Access a{{}, true, nullptr, nullptr, c.at};
    a.home = w.cta->home, a.review = options_.review;
    if (c.kind == Copy::reduce_shared) a.strength = strong_in_gpu;  // its operations are relaxed atomics
    if (cta.exited() && !reported(Hazard::SHARED_PEER_EXITED, c.at, -1))
      hazard(Hazard::SHARED_PEER_EXITED, Severity::error, &w, bit, c.at, -1, "shared memory",
             "the receiving CTA has ended");
    if (options_.checks) {
      const std::vector<u32>& v = own_clock(w, bit).v;
      a.happens = section(v, 0), a.fenced = section(v, 1);
      if (writes && c.kind != Copy::async16) {
        const u32 rank = c.barrier_mask == 0xff ? cta.rank : cta.rank & c.barrier_mask;
        Cta& home = c.cta->cluster->ctas[rank];
        const i32 i = home.barrier_at[c.barrier_offset / 8];
        if (i < 0) continue;
        MBarrier& b = home.barriers[static_cast<size_t>(i)];
        a.stamp = {b.slot, static_cast<u32>(b.phase + 1), 1};
        owe(cta, Hazard::BULK_EXIT_WITH_LOAD_IN_FLIGHT, a.stamp, c.at, w);
      } else if (c.kind == Copy::async16) {
        a.async = false;
        a.stamp = {w.cp_slot, w.cp_groups + 1, 1};
      } else {
        const BulkQueue& q = bulk_queue(w, c.lane);
        a.stamp = {q.slot, q.first + static_cast<u32>(q.groups.size()) - 1, 1};
      }
    }
    each_chunk([&](u32 begin, u32 end) {
      if (options_.checks && a.stamp.epoch) {
        ++checks;
        const auto found = [&](const Conflict& x) { conflict(x, w, bit, c.at, cta, begin); };
        if (c.kind == Copy::reduce_shared) {
          cta.shadow->update(begin, end, a, found);
        } else if (writes) {
          cta.shadow->write(begin, end, a, found);
        } else {
          cta.shadow->read(begin, end, a, found);
        }
      }
      if (writes && c.kind != Copy::reduce_shared) std::memset(cta.shared.data() + begin, 0xff, end - begin);
    });
    if ((c.kind == Copy::shared_to_shared || c.kind == Copy::reduce_shared) &&
        options_.checks) {  // the source: until the receiver's barrier completes
      const i32 i = cta.barrier_at[c.barrier_offset / 8];
      const std::vector<u32>& v = own_clock(w, bit).v;
      if (i >= 0) {
        const Access read{{cta.barriers[static_cast<size_t>(i)].slot,
                           static_cast<u32>(cta.barriers[static_cast<size_t>(i)].phase + 1), 1},
                          true,
                          section(v, 0),
                          section(v, 1),
                          c.at};
        owe(*c.cta, Hazard::BULK_EXIT_WITH_STORE_UNWAITED, read.stamp, c.at, w);
        c.cta->shadow->read(c.source_offset, c.source_offset + row_bytes, read,
                            [&](const Conflict& x) { conflict(x, w, bit, c.at, *c.cta, c.source_offset); });
      }
    }
  }
  if (options_.checks && tracks_global_) copy_access(c);
}

void Machine::issue(Copy&& c) {
  if (c.targets >> c.cta->cluster->ctas.size()) {
    hazard(Hazard::SHARED_OUT_OF_BOUNDS, Severity::error, c.warp, 1u << c.lane, c.at, -1, "multicast",
           "its mask names a CTA that the cluster does not have");
    c.targets &= (1u << c.cta->cluster->ctas.size()) - 1;
  }
  stamp_copy(c);
  if (c.has_barrier) {
    for (Cta& cta : c.cta->cluster->ctas) {
      if (!(c.targets >> cta.rank & 1)) continue;
      Cta& home = c.cta->cluster->ctas[c.barrier_mask == 0xff ? cta.rank : cta.rank & c.barrier_mask];
      MBarrier* b = barrier_at(c.warp, home, c.barrier_offset, 1u << c.lane, c.at, true);
      if (!b) {
        c.targets &= ~(1u << cta.rank);
        continue;
      }
      ++b->in_flight;
      c.phase[cta.rank] = b->phase;
    }
    if (!c.targets) return;
    record(*c.warp, c.at, 0, static_cast<i32>(c.barrier_offset),
           c.phase[static_cast<size_t>(std::countr_zero(c.targets))]);
  } else if (c.kind != Copy::async16) {
    BulkQueue& q = bulk_queue(*c.warp, c.lane);
    c.group = q.first + static_cast<u32>(q.groups.size()) - 1;
    ++q.groups.back().reading, ++q.groups.back().writing;
    q.last = c.group, q.at = c.at;
    record(*c.warp, c.at, 0, -100, c.group);
  }
  copies_.push_back(std::move(c));
  issued_ = true;
}

/// Moves rows [first, last) of a copy into shared memory.
void Machine::land(Copy& c, size_t first, size_t last) {
  const u32 row_bytes = c.row_elements * c.element;
  u8 line[4096];
  for (size_t i = first; i < last; ++i) {
    const CopyRow& row = c.rows[i];
    std::vector<u8> large;
    u8* buffer = line;
    if (row_bytes > sizeof(line)) large.resize(row_bytes), buffer = large.data();
    if (c.kind == Copy::shared_to_shared || c.kind == Copy::reduce_shared) {
      std::memcpy(buffer, c.cta->shared.data() + c.source_offset, row_bytes);
    } else {
      if (c.fill) {  // the H200's pattern, a NaN in every floating-point type
        for (u32 x = 0; x < row_bytes; ++x) buffer[x] = x % 2 ? 0x7f : 0xf7;
      } else {
        std::memset(buffer, 0, row_bytes);
      }
      if (row.end > row.begin) {
        const u64 step = static_cast<u64>(c.element) * c.element_stride;
        const u64 from = row.global + static_cast<u64>(static_cast<i64>(row.begin)) * step;
        const u64 length = static_cast<u64>(row.end - row.begin - 1) * step + c.element;
        const u8* g = global_memory(from, length, false, c.warp, 1u << c.lane, c.at);
        if (tracks_written_) check_written(from, length, *c.warp, 1u << c.lane, c.at);
        if (g && c.element_stride == 1) std::memcpy(buffer + static_cast<u32>(row.begin) * c.element, g, length);
        if (g && c.element_stride != 1)
          for (i32 x = row.begin; x < row.end; ++x)
            std::memcpy(buffer + static_cast<u32>(x) * c.element, g + static_cast<u64>(x - row.begin) * step,
                        c.element);
      }
    }
    for (Cta& cta : c.cta->cluster->ctas) {
      if (!(c.targets >> cta.rank & 1)) continue;
      for (u32 x = 0; x < row_bytes;) {
        const u32 linear = row.shared + x, length = std::min(row_bytes - x, 16 - linear % 16);
        const u32 at = swizzled(linear & ~15u, c.swizzle) + linear % 16;
        if (c.kind == Copy::reduce_shared) {
          const Type t = static_cast<Type>(c.type);
          const u32 n = bytes_of(t);
          for (u32 k = 0; k < length; k += n) {
            u64 old = 0, more = 0;
            std::memcpy(&old, cta.shared.data() + at + k, n);
            std::memcpy(&more, buffer + x + k, n);
            const u64 v = reduce_value(t, c.reduction, old, more, 0);
            std::memcpy(cta.shared.data() + at + k, &v, n);
          }
        } else {
          std::memcpy(cta.shared.data() + at, buffer + x, length);
        }
        x += length;
      }
    }
  }
}

/// Executes the next part of a copy.
bool Machine::run_copy(size_t index) {
  Copy& c = copies_[index];
  const size_t n = c.rows.size();
  const size_t pieces = static_cast<size_t>(std::max(1, options_.policy.pieces));
  const size_t step = std::max<size_t>(1, (n + pieces - 1) / pieces);
  const u32 row_bytes = c.row_elements * c.element;
  const auto remove = [&] { copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(index)); };
  if (c.kind == Copy::async16) {
    land(c, 0, n);
    Warp& w = *c.warp;
    const u32 group = c.group;
    if (group <= w.cp_pending.size() && group > 0) --w.cp_pending[group - 1];
    remove();
    return true;
  }
  if (c.kind == Copy::to_shared || c.kind == Copy::shared_to_shared || c.kind == Copy::reduce_shared) {
    const size_t last = std::min(n, c.next + step);
    land(c, c.next, last);
    const u32 bytes = static_cast<u32>(last - c.next) * row_bytes;
    c.next = last;
    const bool finished = last == n;
    const Copy kept = finished ? std::move(copies_[index]) : Copy();
    const Copy& d = finished ? kept : copies_[index];
    Cluster& cluster = *d.cta->cluster;
    const u32 targets = d.targets, mask = d.barrier_mask, offset = d.barrier_offset;
    const i32 at = d.at;
    const std::array<u64, 16> phases = d.phase;
    Warp* issuer = d.warp;
    if (finished) remove();
    for (Cta& cta : cluster.ctas) {
      if (!(targets >> cta.rank & 1)) continue;
      Cta& home = cluster.ctas[mask == 0xff ? cta.rank : cta.rank & mask];
      const i32 i = home.barrier_at[offset / 8];
      if (i < 0) continue;
      MBarrier& b = home.barriers[static_cast<size_t>(i)];
      if (!b.valid) continue;
      const u64 phase = phases[cta.rank];
      if (b.phase != phase && !reported(Hazard::MBARRIER_TMA_COMPLETES_IN_LATER_PHASE, at, b.init_at))
        hazard(Hazard::MBARRIER_TMA_COMPLETES_IN_LATER_PHASE, Severity::error, issuer, 0, at, b.init_at,
               name_of(home, b),
               "issued in phase " + std::to_string(phase) + ", bytes counted in phase " + std::to_string(b.phase));
      if (finished && b.phase == phase && b.in_flight > 0) --b.in_flight;
      record(*issuer, at, 1, static_cast<i32>(offset), b.phase);
      complete_tx(home, b, bytes, at);
    }
    return true;
  }
  // Shared to global: all is read first, then written; a wait for reading covers the first half only.
  BulkQueue& q = c.warp->bulk[c.lane];
  BulkGroup* group = c.group >= q.first && c.group - q.first < q.groups.size() ? &q.groups[c.group - q.first] : nullptr;
  if (!c.read_done) {
    c.buffer.resize(n * row_bytes);
    for (size_t i = 0; i < n; ++i)
      for (u32 x = 0; x < row_bytes;) {
        const u32 linear = c.rows[i].shared + x, length = std::min(row_bytes - x, 16 - linear % 16);
        std::memcpy(c.buffer.data() + i * row_bytes + x,
                    c.cta->shared.data() + swizzled(linear & ~15u, c.swizzle) + linear % 16, length);
        x += length;
      }
    c.read_done = true;
    if (group) --group->reading;
    return true;
  }
  for (size_t i = 0; i < n; ++i) {
    const CopyRow& row = c.rows[i];
    if (row.end <= row.begin) continue;
    const u64 step_bytes = static_cast<u64>(c.element) * c.element_stride;
    const u64 to = row.global + static_cast<u64>(static_cast<i64>(row.begin)) * step_bytes;
    const u64 length = static_cast<u64>(row.end - row.begin - 1) * step_bytes + c.element;
    if (tracks_written_ && c.kind == Copy::reduce_global) check_written(to, length, *c.warp, 1u << c.lane, c.at);
    u8* g = global_memory(to, length, true, c.warp, 1u << c.lane, c.at);
    if (!g) continue;
    for (i32 x = row.begin; x < row.end; ++x) {
      const u8* from = c.buffer.data() + i * row_bytes + static_cast<u32>(x) * c.element;
      u8* target = g + static_cast<u64>(x - row.begin) * step_bytes;
      if (c.kind == Copy::to_global) {
        if (c.element_stride == 1) {
          std::memcpy(target, from, length);
          break;
        }
        std::memcpy(target, from, c.element);
      } else {
        const Type t = static_cast<Type>(c.type);
        const u32 size = bytes_of(t);
        for (u32 k = 0; k < c.element; k += size) {
          u64 old = 0, more = 0;
          std::memcpy(&old, target + k, size);
          std::memcpy(&more, from + k, size);
          const u64 v = reduce_value(t, c.reduction, old, more, 0);
          std::memcpy(target + k, &v, size);
        }
      }
    }
  }
  if (group) --group->writing;
  record(*c.warp, c.at, 1, -100, c.group);
  remove();
  return true;
}

}  // namespace cupyfa::emulator
