// Asynchronous copies: TMA tensors, bulk copies and reductions, cp.async, cluster launch control.
//
// A copy is stamped in the shadow when it is issued, so that verdicts do not depend on when it is executed. Its
// destination in shared memory holds NaN patterns until its parts land, in the order that the policy chooses.
#include <bit>
#include <sstream>

#include "machine.hpp"
#include "numeric.hpp"
#include "tensormap.hpp"

namespace cupyfa::emulator {

u64 reduce_value(Type type, Reduction op, u64 a, u64 b, u64 c);

namespace {

/// The value type of a reduction, by CUtensorMapDataType.
Type map_value(u8 type) {
  constexpr Type types[] = {Type::b8, Type::b16, Type::u32, Type::s32, Type::u64, Type::s64, Type::f16,
                            Type::f32, Type::f64, Type::bf16, Type::f32, Type::f32, Type::f32};
  return types[type];
}
u32 value_bytes(Type t) {
  switch (t) {
    case Type::f16: case Type::bf16: case Type::b16: case Type::u16: return 2;
    case Type::u64: case Type::s64: case Type::b64: case Type::f64: return 8;
    default: return 4;
  }
}

}  // namespace

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
  const bool writes = c.kind == Copy::to_shared || c.kind == Copy::shared_to_shared || c.kind == Copy::reduce_shared || c.kind == Copy::async16;
  const u32 row_bytes = c.row_elements * c.element;
  if (options_.checks && c.kind != Copy::async16) {
    std::vector<u32>& v = own_clock(w, bit).v;
    // The issuing thread knows its own accesses so far.
    section(v, 0)[w.clock_base + c.lane] = w.epoch++;
  }
  const auto each_chunk = [&](auto f) {
    for (const CopyRow& row : c.rows)
      for (u32 x = 0; x < row_bytes;) {
        const u32 linear = row.shared + x, length = std::min(row_bytes - x, 16 - linear % 16);
        const u32 at = swizzled(linear & ~15u, c.swizzle) + linear % 16;
        f(at, at + length);
        x += length;
      }
  };
  for (Cta& cta : c.cta->cluster->ctas) {
    const bool target = writes ? c.targets >> cta.rank & 1 : &cta == c.cta;
    if (!target) continue;
    Access a{{}, true, nullptr, nullptr, c.at};
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
        if (writes && c.kind != Copy::reduce_shared) {
          cta.shadow->write(begin, end, a, found);
        } else if (!writes) {
          cta.shadow->read(begin, end, a, found);
        }
      }
      if (writes && c.kind != Copy::reduce_shared) std::memset(cta.shared.data() + begin, 0xff, end - begin);
    });
    if ((c.kind == Copy::shared_to_shared || c.kind == Copy::reduce_shared) && options_.checks) {  // the source: until the receiver's barrier completes
      const i32 i = cta.barrier_at[c.barrier_offset / 8];
      const std::vector<u32>& v = own_clock(w, bit).v;
      if (i >= 0) {
        const Access read{{cta.barriers[static_cast<size_t>(i)].slot, static_cast<u32>(cta.barriers[static_cast<size_t>(i)].phase + 1), 1},
                          true, section(v, 0), section(v, 1), c.at};
        c.cta->shadow->read(c.source_offset, c.source_offset + row_bytes, read,
                            [&](const Conflict& x) { conflict(x, w, bit, c.at, *c.cta, c.source_offset); });
      }
    }
  }
}

void Machine::issue(Copy&& c) {
  stamp_copy(c);
  if (c.has_barrier) {
    for (Cta& cta : c.cta->cluster->ctas) {
      if (!(c.targets >> cta.rank & 1)) continue;
      Cta& home = c.cta->cluster->ctas[c.barrier_mask == 0xff ? cta.rank : cta.rank & c.barrier_mask];
      MBarrier* b = barrier_at(c.warp, home, c.barrier_offset, 1u << c.lane, c.at, true);
      if (!b) return;
      ++b->in_flight;
      c.phase = b->phase;
    }
    record(*c.warp, c.at, 0, static_cast<i32>(c.barrier_offset), c.phase);
  } else if (c.kind != Copy::async16) {
    BulkQueue& q = bulk_queue(*c.warp, c.lane);
    c.group = q.first + static_cast<u32>(q.groups.size()) - 1;
    ++q.groups.back().reading, ++q.groups.back().writing;
    q.last = c.group, q.at = c.at;
    record(*c.warp, c.at, 0, static_cast<i32>(c.rows.empty() ? 0 : c.rows.front().shared), c.group);
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
      if (c.fill && c.element == 2) {
        const u16 nan = c.type == 9 ? 0x7fff : 0x7fff;
        for (u32 x = 0; x < c.row_elements; ++x) std::memcpy(buffer + 2 * x, &nan, 2);
      } else if (c.fill && c.element == 4) {
        const u32 nan = 0x7fff'ffff;
        for (u32 x = 0; x < c.row_elements; ++x) std::memcpy(buffer + 4 * x, &nan, 4);
      } else if (c.fill) {
        const u64 nan = 0x7fff'ffff'ffff'ffff;
        for (u32 x = 0; x < row_bytes; ++x) buffer[x] = reinterpret_cast<const u8*>(&nan)[x % 8];
      } else {
        std::memset(buffer, 0, row_bytes);
      }
      if (row.end > row.begin) {
        const u64 step = static_cast<u64>(c.element) * c.element_stride;
        const u64 from = row.global + static_cast<u64>(static_cast<i64>(row.begin)) * step;
        const u64 length = static_cast<u64>(row.end - row.begin - 1) * step + c.element;
        const u8* g = global_memory(from, length, false, c.warp, 1u << c.lane, c.at);
        if (g && c.element_stride == 1) std::memcpy(buffer + static_cast<u32>(row.begin) * c.element, g, length);
        if (g && c.element_stride != 1)
          for (i32 x = row.begin; x < row.end; ++x)
            std::memcpy(buffer + static_cast<u32>(x) * c.element, g + static_cast<u64>(x - row.begin) * step, c.element);
      }
    }
    for (Cta& cta : c.cta->cluster->ctas) {
      if (!(c.targets >> cta.rank & 1)) continue;
      for (u32 x = 0; x < row_bytes;) {
        const u32 linear = row.shared + x, length = std::min(row_bytes - x, 16 - linear % 16);
        const u32 at = swizzled(linear & ~15u, c.swizzle) + linear % 16;
        if (c.kind == Copy::reduce_shared) {
          const Type t = static_cast<Type>(c.type);
          const u32 n = value_bytes(t);
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
    const u64 phase = d.phase;
    Warp* issuer = d.warp;
    if (finished) remove();
    for (Cta& cta : cluster.ctas) {
      if (!(targets >> cta.rank & 1)) continue;
      Cta& home = cluster.ctas[mask == 0xff ? cta.rank : cta.rank & mask];
      const i32 i = home.barrier_at[offset / 8];
      if (i < 0) continue;
      MBarrier& b = home.barriers[static_cast<size_t>(i)];
      if (!b.valid) continue;
      if (b.phase != phase && !reported(Hazard::MBARRIER_TMA_COMPLETES_IN_LATER_PHASE, at, b.init_at))
        hazard(Hazard::MBARRIER_TMA_COMPLETES_IN_LATER_PHASE, Severity::error, issuer, 0, at, b.init_at, name_of(home, b),
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
        std::memcpy(c.buffer.data() + i * row_bytes + x, c.cta->shared.data() + swizzled(linear & ~15u, c.swizzle) + linear % 16, length);
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
        const u32 size = value_bytes(t);
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
  record(*c.warp, c.at, 1, static_cast<i32>(c.rows.empty() ? 0 : c.rows.front().shared), c.group);
  remove();
  return true;
}

Step Machine::tensor_copy(Warp& w, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const auto o = static_cast<Operation>(in.operation);
  const bool loads = o == Operation::tensor_load;
  const i32 pc = static_cast<i32>(&in - program_.code.data());
  const int dims = in.attr[0];
  const i32* destination = loads ? e : e + 3 + dims;
  const i32* map_address = loads ? e + 3 : e;
  const i32* coordinates = map_address + 3;
  for (int l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    const u32 bit = 1u << l;
    const u64 where = address(r, map_address, l, true);
    const Place at_map = locate(w, Space::generic, where);
    TensorMap map;
    const u8* bytes = nullptr;
    if (at_map.space == Space::param) {
      if (at_map.offset + sizeof(map) <= params_.size() && at_map.offset % 64 == 0) bytes = params_.data() + at_map.offset;
    } else if (at_map.space == Space::global) {
      bytes = global_memory(where, sizeof(map), false, &w, bit, pc);
    }
    if (bytes) std::memcpy(&map, bytes, sizeof(map));
    if (!bytes || map.magic != tensor_map_magic || map.rank != dims || !element_bytes(map.type)) {
      std::ostringstream s;
      s << "0x" << std::hex << where << " holds no tensor map of rank " << dims;
      hazard(Hazard::BULK_BAD_TENSOR_MAP, Severity::error, &w, bit, pc, -1, "tensor map", s.str());
      continue;
    }
    Copy c{};
    c.kind = loads ? Copy::to_shared : o == Operation::tensor_store ? Copy::to_global : Copy::reduce_global;
    c.cta = w.cta, c.warp = &w, c.lane = l, c.at = pc;
    c.element = element_bytes(map.type);
    c.swizzle = map.swizzle, c.fill = map.fill;
    c.type = o == Operation::tensor_reduce ? static_cast<u8>(map_value(map.type)) : map.type;
    if (o == Operation::tensor_reduce) c.reduction = static_cast<Reduction>(in.attr[1]);
    c.element_stride = map.element_strides[0];
    u32 count[5] = {1, 1, 1, 1, 1};
    i64 start[5] = {};
    for (int d = 0; d < dims; ++d) {
      count[d] = (map.box[d] + map.element_strides[d] - 1) / map.element_strides[d];
      start[d] = static_cast<i32>(r.source(coordinates[d])[l]);
    }
    start[dims > 1 ? 1 : 0] += in.bias;
    c.row_elements = count[0];
    const Place place = locate(w, Space::generic, address(r, destination, l, true));
    const Place shared = place.space == Space::shared ? place : locate(w, Space::shared, address(r, destination, l, false));
    c.bytes = count[0] * count[1] * count[2] * count[3] * count[4] * c.element;
    const u32 row_bytes = c.row_elements * c.element;
    if (!shared.cta || shared.offset < shared_first || shared.offset + c.bytes > shared.cta->shared.size() || shared.offset % 16 ||
        (loads && shared.offset % 128) || (c.swizzle && c.swizzle < row_bytes)) {
      hazard(shared.offset % 16 || (loads && shared.offset % 128) ? Hazard::SHARED_MISALIGNED : Hazard::SHARED_OUT_OF_BOUNDS,
             Severity::error, &w, bit, pc, -1, "shared memory",
             "a box of " + std::to_string(c.bytes) + " bytes at byte " + std::to_string(static_cast<i64>(shared.offset) - shared_first) +
                 " of " + std::to_string(shared_bytes_) + "; it must be 128-byte aligned (16 for stores) and inside, and a row of it " +
                 "must not be longer than the swizzle");
      continue;
    }
    u32 row = 0;
    c.rows.reserve(count[1] * count[2] * count[3] * count[4]);
    for (u32 i4 = 0; i4 < count[4]; ++i4)
      for (u32 i3 = 0; i3 < count[3]; ++i3)
        for (u32 i2 = 0; i2 < count[2]; ++i2)
          for (u32 i1 = 0; i1 < count[1]; ++i1, ++row) {
            const u32 i[5] = {0, i1, i2, i3, i4};
            bool inside = true;
            i64 offset = start[0] * static_cast<i64>(c.element);
            for (int d = 1; d < dims; ++d) {
              const i64 x = start[d] + static_cast<i64>(i[d]) * map.element_strides[d];
              inside &= x >= 0 && static_cast<u64>(x) < map.shape[d];
              offset += x * static_cast<i64>(map.strides[d - 1]);
            }
            i32 begin = 0, end = 0;
            if (inside) {
              const i64 s = map.element_strides[0];
              begin = static_cast<i32>(start[0] < 0 ? std::min<i64>(count[0], (-start[0] + s - 1) / s) : 0);
              const i64 left = static_cast<i64>(map.shape[0]) - start[0];
              end = static_cast<i32>(left <= 0 ? 0 : std::min<i64>(count[0], (left + s - 1) / s));
            }
            c.rows.push_back({map.address + static_cast<u64>(offset), shared.offset + row * row_bytes, begin, std::max(begin, end)});
          }
    if (loads) {
      const i32* m = coordinates + dims;
      const Place mp = locate(w, Space::generic, address(r, m, l, true));
      const Place barrier = mp.space == Space::shared ? mp : locate(w, Space::shared, address(r, m, l, false));
      c.has_barrier = true;
      c.barrier_offset = barrier.offset;
      c.targets = m[3] == absent ? 1u << shared.cta->rank : r.source(m[3])[l] & 0xffff;
      if (in.attr[1] == 2 && barrier.cta && barrier.cta != shared.cta) c.barrier_mask = 0xfe;  // the leader of the pair
      if (!barrier.cta || (in.attr[1] != 2 && barrier.cta != shared.cta)) {
        hazard(Hazard::MBARRIER_NOT_INITIALISED, Severity::error, &w, bit, pc, -1, "mbarrier",
               "the mbarrier of a copy must be in the CTA that receives it");
        continue;
      }
      if (!memory(w, barrier, 8, true, l, pc)) continue;
    }
    issue(std::move(c));
  }
  return Step::next;
}

Step Machine::bulk_copy(Warp& w, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const bool reduces = static_cast<Operation>(in.operation) == Operation::bulk_reduce;
  const i32 pc = static_cast<i32>(&in - program_.code.data());
  for (int l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    const u32 bit = 1u << l;
    const auto shared_place = [&](const i32* a) {
      const Place p = locate(w, Space::generic, address(r, a, l, true));
      return p.space == Space::shared ? p : locate(w, Space::shared, address(r, a, l, false));
    };
    const u32 n = r.source(e[6])[l];
    Copy c{};
    c.cta = w.cta, c.warp = &w, c.lane = l, c.at = pc;
    c.element = 1, c.row_elements = n, c.bytes = n;
    const int direction = in.attr[0];
    const Place s = direction == 0 ? shared_place(e) : shared_place(e + 3);
    if (n % 16 || n == 0 || s.offset % 16 || !s.cta || s.offset < shared_first || s.offset + n > s.cta->shared.size()) {
      hazard(n % 16 || s.offset % 16 ? Hazard::SHARED_MISALIGNED : Hazard::SHARED_OUT_OF_BOUNDS, Severity::error, &w, bit, pc, -1,
             "shared memory", std::to_string(n) + " bytes at byte " + std::to_string(static_cast<i64>(s.offset) - shared_first) +
             "; size and address must be multiples of 16, inside the CTA's memory");
      continue;
    }
    if (reduces) c.reduction = static_cast<Reduction>(in.attr[1]), c.type = in.type;
    if (direction == 2) {
      c.kind = reduces ? Copy::reduce_global : Copy::to_global;
      if (reduces) c.element = value_bytes(static_cast<Type>(in.type)), c.row_elements = n / c.element;
      c.rows.push_back({address(r, e, l, true), s.offset, 0, static_cast<i32>(c.row_elements)});
      issue(std::move(c));
      continue;
    }
    const Place barrier = shared_place(e + 7);
    c.has_barrier = true;
    c.barrier_offset = barrier.offset;
    if (direction == 0) {
      c.kind = Copy::to_shared;
      c.targets = e[10] == absent ? 1u << s.cta->rank : r.source(e[10])[l] & 0xffff;
      c.rows.push_back({address(r, e + 3, l, true), s.offset, 0, static_cast<i32>(n)});
    } else {
      const Place d = shared_place(e);
      c.kind = reduces ? Copy::reduce_shared : Copy::shared_to_shared;
      if (!d.cta || d.offset + n > d.cta->shared.size() || d.offset % 16) {
        hazard(Hazard::SHARED_OUT_OF_BOUNDS, Severity::error, &w, bit, pc, -1, "shared memory", "destination of a bulk copy");
        continue;
      }
      c.targets = 1u << d.cta->rank;
      c.source_offset = s.offset;
      c.rows.push_back({0, d.offset, 0, static_cast<i32>(n)});
      if (d.cta->exited()) hazard(Hazard::SHARED_PEER_EXITED, Severity::error, &w, bit, pc, -1, "shared memory", "the receiving CTA has ended");
    }
    if (!barrier.cta || !memory(w, barrier, 8, true, l, pc)) continue;
    issue(std::move(c));
  }
  return Step::next;
}

Step Machine::bulk_group(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const bool commit = static_cast<Operation>(in.operation) == Operation::bulk_commit;
  for (int l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    if (commit) {
      if (w.bulk.count(l)) bulk_queue(w, l).groups.emplace_back();
      continue;
    }
    if (!w.bulk.count(l)) continue;  // a lane that has issued nothing has nothing to wait for
    BulkQueue& q = bulk_queue(w, l);
    const size_t closed = q.groups.size() - 1;
    const i64 wanted = static_cast<i64>(closed) - (in.imm + in.bias);
    for (i64 i = 0; i < wanted; ++i)
      if (q.groups[static_cast<size_t>(i)].reading > 0 || (!in.attr[0] && q.groups[static_cast<size_t>(i)].writing > 0)) return Step::block;
    if (wanted > 0 && options_.checks) {
      const u32 epoch = q.first + static_cast<u32>(wanted) - 1;
      learn(w, 1u << l, q.slot, epoch);
      if (!in.attr[0]) learn(w, 1u << l, q.slot + 1, epoch);
      record(w, g.pc, 2, -100, epoch);
    }
  }
  return Step::next;
}

Step Machine::cp_async(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  if (options_.checks && !w.cp_slot) w.cp_slot = new_slot();
  switch (static_cast<Operation>(in.operation)) {
    case Operation::cp_async: {
      const u32 bytes = static_cast<u32>(in.imm);
      for (int l = 0; l < lanes; ++l) {
        if (!(mask >> l & 1)) continue;
        const Place p = locate(w, Space::generic, address(r, e, l, true));
        const Place s = p.space == Space::shared ? p : locate(w, Space::shared, address(r, e, l, false));
        if (!memory(w, s, bytes, true, l, g.pc)) continue;
        u32 n = e[6] == absent ? bytes : std::min(bytes, r.source(e[6])[l]);
        if (e[7] != absent && (r.predicate(e[7]) >> l & 1)) n = 0;
        Copy c{};
        c.kind = Copy::async16;
        c.cta = w.cta, c.warp = &w, c.lane = l, c.at = g.pc;
        c.row_elements = bytes, c.targets = 1u << s.cta->rank;
        c.group = w.cp_groups + 1;
        c.rows.push_back({address(r, e + 3, l, true), s.offset, 0, static_cast<i32>(n)});
        if (w.cp_pending.size() < c.group) w.cp_pending.resize(c.group, 0);
        ++w.cp_pending[c.group - 1];
        issue(std::move(c));
      }
      return Step::next;
    }
    case Operation::cp_async_commit: ++w.cp_groups; return Step::next;
    case Operation::cp_async_wait: {
      const i64 wanted = in.attr[0] ? static_cast<i64>(w.cp_groups) + 1 : static_cast<i64>(w.cp_groups) - in.imm - in.bias;
      for (i64 i = 0; i < wanted && i < static_cast<i64>(w.cp_pending.size()); ++i)
        if (w.cp_pending[static_cast<size_t>(i)]) return Step::block;
      if (wanted > 0 && options_.checks) learn(w, mask, w.cp_slot, static_cast<u32>(wanted));
      return Step::next;
    }
    default: {  // an arrival when all earlier copies of the thread are complete
      for (u32 pending : w.cp_pending)
        if (pending) return Step::block;  // completes no later than the hardware's own arrival would be observed
      for (int l = 0; l < lanes; ++l) {
        if (!(mask >> l & 1)) continue;
        const Place p = locate(w, Space::generic, address(r, e, l, true));
        const Place s = p.space == Space::shared ? p : locate(w, Space::shared, address(r, e, l, false));
        if (!memory(w, s, 8, true, l, g.pc)) continue;
        MBarrier* b = barrier_at(&w, *s.cta, s.offset, 1u << l, g.pc, false);
        if (!b) continue;
        if (options_.checks) {
          publish(w, 1u << l, b->arriving);
          u32& slot = b->arriving[w.cp_slot];
          slot = std::max(slot, w.cp_groups + 1);
        }
        if (!in.attr[0]) ++b->pending;  // without .noinc the arrival is one that nobody had counted
        arrive(*s.cta, *b, 1, g.pc, &w);
      }
      return Step::next;
    }
  }
}

Step Machine::launch_control(Warp& w, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const i32 pc = static_cast<i32>(&in - program_.code.data());
  if (static_cast<Operation>(in.operation) == Operation::clc_query) {
    const int outputs = in.attr[0] == 4 ? 4 : 1;
    const i32* a = e + outputs;
    const u32* word[4] = {r.source(a[0]), r.source(a[1]), r.source(a[2]), r.source(a[3])};
    if (in.attr[0] == 0) {
      u32 bits = 0;
      for (int l = 0; l < lanes; ++l) bits |= (word[2][l] & 1) << l;
      r.set_predicate(e[0], bits, mask);
      return Step::next;
    }
    for (int l = 0; l < lanes; ++l) {
      if (!(mask >> l & 1)) continue;
      const u32 id[4] = {word[0][l], word[1][l] & 0xffff, word[1][l] >> 16, 0};
      for (int i = 0; i < outputs; ++i)
        if (e[i] != absent) r.row(e[i])[l] = id[outputs == 4 ? i : in.attr[0] - 1];
    }
    return Step::next;
  }
  for (int l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    const auto shared_place = [&](const i32* a) {
      const Place p = locate(w, Space::generic, address(r, a, l, true));
      return p.space == Space::shared ? p : locate(w, Space::shared, address(r, a, l, false));
    };
    const Place response = shared_place(e), barrier = shared_place(e + 3);
    if (!memory(w, response, 16, true, l, pc) || !memory(w, barrier, 8, true, l, pc)) continue;
    if (clc_failed_ && !reported(Hazard::GRID_CLC_AFTER_FAILURE, pc, -1))
      hazard(Hazard::GRID_CLC_AFTER_FAILURE, Severity::error, &w, 1u << l, pc, -1, "cluster launch control",
             "another try_cancel after one that failed is undefined");
    u32 words[4] = {0, 0, 0, 0};
    if (next_cluster_ < cluster_count_) {
      const Dim3 n = {grid_.x / cluster_dims_.x, grid_.y / cluster_dims_.y, grid_.z / cluster_dims_.z};
      const u32 i = next_cluster_++;
      words[0] = i % n.x * cluster_dims_.x;
      words[1] = (i / n.x % n.y * cluster_dims_.y) | (i / (n.x * n.y) * cluster_dims_.z) << 16;
      words[2] = 1;
    } else {
      clc_failed_ = true;
    }
    // The answer comes as an asynchronous write of 16 bytes from a buffer that the machine owns.
    for (Cta& cta : w.cta->cluster->ctas) {
      if (!in.attr[0] && &cta != response.cta) continue;
      MBarrier* b = barrier_at(&w, cta, barrier.offset, 1u << l, pc, true);
      if (!b) continue;
      if (options_.checks) {
        std::vector<u32>& v = own_clock(w, 1u << l).v;
        section(v, 0)[w.clock_base + l] = w.epoch++;
        const Access a{{b->slot, static_cast<u32>(b->phase + 1), 1}, true, section(v, 0), section(v, 1), pc};
        cta.shadow->write(response.offset, response.offset + 16, a, [&](const Conflict& x) { conflict(x, w, 1u << l, pc, cta, response.offset); });
      }
      std::memcpy(cta.shared.data() + response.offset, words, 16);
      complete_tx(cta, *b, 16, pc);
    }
  }
  return Step::next;
}

}  // namespace cupyfa::emulator
