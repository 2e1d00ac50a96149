// Products, copies and commits of tcgen05: asynchronous operations of the issuing thread, executed in its order.
//
// Footprints are recorded at issue, stamped with the thread's slot and the operation's number; only a commit that has
// been waited for proves them complete. With cta_group::2 both CTAs of a pair give their rows of A and their columns of
// B, each at the same offset of its own memory, and both receive their rows of D.
#include <bit>
#include <cmath>
#include <sstream>

#include "numeric.hpp"
#include "operands.hpp"
#include "tcgen05.hpp"

namespace cupyfa::emulator {

void read_operand(const Cta& cta, const MatrixDescriptor& d, bool mn_major, Type type, u32 size, u32 extent, u32 k,
                  bool negate, float* out);

namespace {

constexpr u32 height = Tmem::lanes;
constexpr u32 max_k = 32, max_n = 256;

/// An instruction descriptor, with what the instruction itself says.
struct Product {
  Type a, b;
  bool half, negate_a, negate_b, a_mn, b_mn, a_in_tmem;
  u32 m, n, k, size, ctas;
  bool folded;  ///< the halves of N lie in the two halves of the lanes
  u32 a_rows;  ///< that each CTA gives
  u32 d_columns;  ///< that each CTA receives

  Product(u32 idesc, const Instruction& in) {
    const u32 kind = in.attr[2], format_a = idesc >> 7 & 7, format_b = idesc >> 10 & 7;
    const auto type = [&](u32 format) {
      if (kind == 0) return format ? Type::bf16 : Type::f16;
      if (kind == 1) return Type::tf32;
      return format ? Type::e5m2 : Type::e4m3;
    };
    a = type(format_a), b = type(format_b);
    half = (idesc >> 4 & 3) == 0;
    negate_a = idesc >> 13 & 1, negate_b = idesc >> 14 & 1;
    a_mn = idesc >> 15 & 1, b_mn = idesc >> 16 & 1;
    a_in_tmem = in.attr[1];
    n = (idesc >> 17 & 63) * 8, m = (idesc >> 24 & 31) * 16;
    size = kind == 0 ? 2 : kind == 1 ? 4 : 1;
    k = 32 / size;
    ctas = in.attr[0];
    folded = ctas == 2 && m == 128;
    a_rows = m / ctas;
    d_columns = folded ? n / 2 : n;
  }

  u32 b_columns() const { return n / ctas; }
  u8 halves(u32 d) const { return m / ctas == 64 && !folded ? (d >> 16 & 16 ? 2 : 1) : 3; }
};

/// Why the fields of an instruction descriptor are no valid product; empty: they are.
std::string fault(u32 idesc, const Instruction& in, const Product& p, u32 d, u32 a_tmem) {
  const u32 kind = in.attr[2], format_d = idesc >> 4 & 3, format_a = idesc >> 7 & 7, format_b = idesc >> 10 & 7;
  if (idesc & 0xe080'0048 || idesc & 3) return "reserved bits, sparsity, saturation or a shift are set";
  if (kind == 0 && (format_a > 1 || format_b > 1)) return "kind::f16 takes float16 (0) and bfloat16 (1)";
  if (kind == 1 && (format_a != 2 || format_b != 2)) return "kind::tf32 takes tf32 (2)";
  if (format_d > 1 || (kind == 1 && format_d != 1)) return "the format of D does not fit the kind";
  if (p.m != 128 && p.m != (p.ctas == 1 ? 64u : 256u)) return "M is " + std::to_string(p.m);
  const u32 step = kind == 2 && p.b_mn ? 16 * p.ctas : p.ctas == 1 && p.m == 64 ? 8 : 16;
  if (p.n == 0 || p.n > max_n || p.n % step)
    return "N is " + std::to_string(p.n) + ", it must be a multiple of " + std::to_string(step) + " up to 256";
  if (p.a_in_tmem && p.a_mn) return "A in tensor memory cannot be transposed";
  if (kind == 1 && (p.a_mn || p.b_mn))
    return "a transposed tf32 operand needs 32-byte swizzle atoms, which are not modelled";
  if (in.imm >= 0 && kind == 2) return "scale-input-d is for kinds f16 and tf32";
  const u32 lane = d >> 16;
  if (lane != 0 && !(p.ctas == 1 && p.m == 64 && lane == 16)) return "D starts at lane " + std::to_string(lane);
  if (p.a_in_tmem && a_tmem >> 16 != lane) return "A and D start at different lanes";
  return {};
}

/// Formats that PTX has and the machine has not.
const char* unsupported(u32 idesc, const Instruction& in) {
  if (in.attr[2] == 3) return "tcgen05.mma.kind::i8";
  if (idesc >> 2 & 1) return "sparse tcgen05.mma";
  if (in.attr[2] != 2) return nullptr;
  constexpr const char* names[] = {nullptr, nullptr, "format 2", "E2M3", "E3M2", "E2M1", "format 6", "format 7"};
  const char* a = names[idesc >> 7 & 7];
  return a ? a : names[idesc >> 10 & 7];
}

/// Elements of A in tensor memory: element k of lane l becomes out[k][l].
void unpack(const Product& p, const float* cells, float* out) {
  const u32 per_cell = 4 / p.size, bits = 8 * p.size;
  for (u32 j = 0; j < p.k / per_cell; ++j)
    for (u32 h = 0; h < per_cell; ++h) {
      const float* from = cells + static_cast<size_t>(height) * j;
      float* to = out + static_cast<size_t>(height) * (per_cell * j + h);
      if (p.a == Type::bf16) {
        for (u32 l = 0; l < height; ++l) to[l] = float_of(h ? bits_of(from[l]) & 0xffff'0000 : bits_of(from[l]) << 16);
      } else if (p.a == Type::f16) {
        for (u32 l = 0; l < height; ++l) to[l] = float_of_f16(bits_of(from[l]) >> (16 * h) & 0xffff);
      } else {
        for (u32 l = 0; l < height; ++l)
          to[l] = element_of(p.a, p.size == 4 ? bits_of(from[l]) : bits_of(from[l]) >> (bits * h) & 0xff);
      }
      if (p.negate_a)
        for (u32 l = 0; l < height; ++l) to[l] = -to[l];
    }
}

/// tcgen05.cp: rows of the source and 32-bit columns; where row r goes.
struct CopyShape {
  u32 rows, columns, copies;
};
constexpr CopyShape copy_shapes[] = {{128, 8, 1}, {}, {128, 4, 1}, {64, 4, 2}, {64, 4, 2}, {32, 4, 4}};
u32 copy_lane(int shape, u32 row, u32 copy) {
  switch (shape) {
  case 3:
    return row + 64 * copy;  // ::02_13
  case 4:
    return row % 32 + 64 * (row / 32) + 32 * copy;  // ::01_23
  case 5:
    return row + 32 * copy;
  default:
    return row;
  }
}

template <class F>
void each_cta(const TcOperation& op, u32 ctas, F f) {
  Cta& own = *op.warp->cta;
  for (u32 i = 0; i < ctas; ++i) f(ctas == 1 ? own : own.cluster->ctas[(own.rank & ~1u) + i], i);
}

TmemRegion d_region(const Product& p, const TcOperation& op, Cta& cta, u32 i) {
  TmemRegion r{&cta, op.d & 0xffff, p.d_columns, 0, p.halves(op.d)};
  for (u32 q = 0; q < 4; ++q) r.quarters |= op.mask[4 * i + q] == all_lanes ? 0 : 1 << q;
  return r;
}

}  // namespace

TcQueue& Tcgen05::queue(Warp& w, int lane) {
  const auto [position, fresh] = m.tc_queues_.try_emplace({w.cta, w.index * lanes + lane});
  if (fresh && m.options_.checks) position->second.slot = m.new_slot();
  return position->second;
}

void Tcgen05::push(Warp& w, int lane, TcOperation&& op) {
  TcQueue& q = queue(w, lane);
  m.record(w, op.at, 0, -300 - w.index, op.number);
  q.operations.push_back(std::move(op));
  m.issued_ = true;
  m.event();
}

void Tcgen05::product(Warp& w, int lane, i32 at, const Instruction& in) {
  const i32* e = m.program_.pool.data() + in.operands;
  const Registers r = w.registers_view(m.program_);
  const u32 bit = 1u << lane;
  const auto value = [&](i32 entry) { return r.source(entry)[lane]; };
  const auto wide = [&](const i32* entry) {
    return static_cast<u64>(value(entry[0])) | static_cast<u64>(value(entry[1])) << 32;
  };
  TcQueue& q = queue(w, lane);
  TcOperation op;
  op.warp = &w, op.at = at, op.number = ++q.issued;
  op.d = value(e[0]) + static_cast<u32>(e[1]);
  const i32* b = e + (in.attr[1] ? 4 : 5);
  if (in.attr[1]) {
    op.a_tmem = value(e[2]) + static_cast<u32>(e[3]);
  } else {
    op.a = wide(e + 2);
  }
  op.b = wide(b) + static_cast<u64>(static_cast<i64>(in.bias));
  op.idesc = value(b[2]);
  const bool accumulates = r.predicate(b[3]) & bit;
  op.scale = !accumulates ? 0.0f : in.imm < 0 ? 1.0f : std::ldexp(1.0f, -in.imm);
  for (u32 i = 0; i < in.attr[4]; ++i) op.mask[i] = value(b[4 + i]);
  if (const char* name = unsupported(op.idesc, in)) {
    bad(Hazard::DECODE_UNSUPPORTED, w, bit, at, "instruction", std::string(name) + " is not modelled");
    throw Stopped();
  }
  const Product p(op.idesc, in);
  if (const std::string why = fault(op.idesc, in, p, op.d, op.a_tmem); !why.empty()) {
    std::ostringstream s;
    s << "0x" << std::hex << op.idesc << ": " << why;
    bad(Hazard::TMEM_BAD_DESCRIPTOR, w, bit, at, "instruction descriptor", s.str());
    return;
  }
  if (!group(w, bit, at, in.attr[0]) || (p.ctas == 2 && !pair(w, bit, at, *w.cta))) return;

  TmemAccess write_d{w, bit, at, TmemCell::product}, read_a{w, bit, at};
  bool ok = true;
  const u32 a_columns = p.k * p.size / 4;
  each_cta(op, p.ctas, [&](Cta& cta, u32 i) {
    ok = usable(write_d, d_region(p, op, cta, i)) && ok;
    if (p.a_in_tmem) ok = usable(read_a, {&cta, op.a_tmem & 0xffff, a_columns}) && ok;
  });
  if (!ok) return;
  if (m.options_.checks) {
    std::vector<u32>& v = m.own_clock(w, bit).v;
    m.section(v, 0)[w.clock_base + lane] = w.epoch++;  // the thread knows its own accesses so far
    const Access shared{{q.slot, op.number, 1}, true, m.section(v, 0), m.section(v, 1), at};
    write_d.stamp = read_a.stamp = shared.stamp;
    know(write_d, v), know(read_a, v);
    // Place, shape and kind of the accumulator: what products must share for PTX to promise their order.
    write_d.accumulator = static_cast<u64>(in.attr[2]) << 61 | static_cast<u64>(op.idesc & 0x1f7e'0030) << 32 | op.d;
    each_cta(op, p.ctas, [&](Cta& cta, u32 i) {
      if (p.a_in_tmem) {
        read({&cta, op.a_tmem & 0xffff, a_columns, 15, p.halves(op.d)}, read_a);
      } else {
        m.operand_footprint(w, cta, shared, op.a, p.a_mn, p.a, static_cast<int>(p.a_rows), at);
      }
      m.operand_footprint(w, cta, shared, op.b, p.b_mn, p.b, static_cast<int>(p.b_columns()), at);
      write(d_region(p, op, cta, i), write_d, accumulates);
    });
  }
  each_cta(op, p.ctas, [&](Cta& cta, u32 i) { mark_pending(d_region(p, op, cta, i), 1); });
  push(w, lane, std::move(op));
}

void Tcgen05::run_product(const TcOperation& op) {
  const Instruction& in = m.program_.code[static_cast<size_t>(op.at)];
  const Product p(op.idesc, in);
  alignas(64) static thread_local float a[max_k * height], b[2][max_k * max_n];
  const u32 nb = p.b_columns();
  each_cta(op, p.ctas, [&](Cta& cta, u32 i) {
    read_operand(cta, blackwell_descriptor(op.b), p.b_mn, p.b, p.size, nb, p.k, p.negate_b, b[i]);
  });
  each_cta(op, p.ctas, [&](Cta& cta, u32 i) {
    Tmem& t = *cta.tmem;
    mark_pending(d_region(p, op, cta, i), -1);
    u32 stride = p.a_rows;
    if (p.a_in_tmem) {
      stride = height;
      unpack(p, t.cells.data() + static_cast<size_t>(op.a_tmem & 0xffff) * height, a);
    } else {
      read_operand(cta, blackwell_descriptor(op.a), p.a_mn, p.a, p.size, p.a_rows, p.k, p.negate_a, a);
    }
    float* const d = t.cells.data() + static_cast<size_t>(op.d & 0xffff) * height;
    const size_t cells = static_cast<size_t>(p.d_columns) * height;
    // Rare: lanes that must keep their values, and D in float16.
    const bool masked = std::any_of(op.mask.begin() + 4 * i, op.mask.begin() + 4 * i + 4, [](u32 x) { return x != 0; });
    std::vector<float> old;
    if (masked || p.half) old.assign(d, d + cells);
    if (p.half)
      for (size_t x = 0; x < cells; ++x) d[x] = float_of_f16(bits_of(d[x]) & 0xffff);
    // Rows `first` on of A, for `count` lanes, times a part of B.
    const auto multiply = [&](u32 column, u32 lane, u32 count, u32 first, u32 part) {
      m.unit_.tcgen05_mma(d + static_cast<size_t>(column) * height, a + first, static_cast<int>(stride), b[part],
                          static_cast<int>(nb), static_cast<int>(p.k), static_cast<int>(lane), static_cast<int>(count),
                          op.scale);
    };
    if (p.folded) {
      for (u32 part = 0; part < 2; ++part) multiply(0, 64 * part, 64, p.a_in_tmem ? 64 * part : 0, part);
    } else if (p.a_rows == 64) {
      const u32 offset = op.d >> 16;
      for (u32 q = 0; q < 4; ++q) multiply(0, 32 * q + offset, 16, p.a_in_tmem ? 32 * q + offset : 16 * q, 0);
    } else {
      for (u32 part = 0; part < p.ctas; ++part) multiply(nb * part, 0, height, 0, part);
    }
    const bool partial = p.a_rows == 64 && !p.folded;  // half of the lanes are not D's
    const auto written = [&](u32 lane) {
      return !(op.mask[4 * i + lane / 32] >> (lane % 32) & 1) && (!partial || (lane & 16) == (op.d >> 16 & 16));
    };
    if (masked || p.half)
      for (u32 lane = 0; lane < height; ++lane)
        for (u32 c = 0; c < p.d_columns; ++c) {
          const size_t x = static_cast<size_t>(c) * height + lane;
          d[x] = !written(lane) ? old[x] : p.half ? float_of(f16_of(d[x])) : d[x];
        }
  });
}

void Tcgen05::commit(Warp& w, int lane, i32 at, const Instruction& in) {
  const i32* e = m.program_.pool.data() + in.operands;
  const Registers r = w.registers_view(m.program_);
  const u32 bit = 1u << lane;
  group(w, bit, at, in.attr[0]);
  const Place p = m.locate(w, Space::generic, m.address(r, e, lane, true));
  const Place place = p.space == Space::shared ? p : m.locate(w, Space::shared, m.address(r, e, lane, false));
  if (!m.memory(w, place, 8, true, lane, at)) return;
  TcQueue& q = queue(w, lane);
  TcOperation op;
  op.kind = TcOperation::commit;
  op.warp = &w, op.at = at, op.number = ++q.issued;
  op.barrier = place.offset;
  op.targets = in.attr[1] ? r.source(e[3])[lane] & 0xffff : 1u << place.cta->rank;
  for (Cta& cta : w.cta->cluster->ctas)
    if ((op.targets >> cta.rank & 1) && !m.barrier_at(&w, cta, op.barrier, bit, at, true))
      op.targets &= ~(1u << cta.rank);
  if (m.options_.checks) {
    // What the thread knows, its own accesses, and its queue up to here; fence::before_thread_sync is implied.
    const std::vector<u32>& v = m.own_clock(w, bit).v;
    op.clock.assign(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(3 * m.width_));
    u32 *happens = m.section(op.clock, 0), *published = m.section(op.clock, 2);
    m.unit_.join(published, happens, static_cast<int>(m.width_));
    happens[w.clock_base + lane] = w.epoch++;
    happens[q.slot] = published[q.slot] = op.number;
  }
  push(w, lane, std::move(op));
}

void Tcgen05::run_commit(const TcOperation& op) {
  for (Cta& cta : op.warp->cta->cluster->ctas) {
    if (!(op.targets >> cta.rank & 1)) continue;
    const i32 i = cta.barrier_at[op.barrier / 8];
    if (i < 0 || !cta.barriers[static_cast<size_t>(i)].valid) continue;
    MBarrier& b = cta.barriers[static_cast<size_t>(i)];
    if (m.options_.checks) m.unit_.join(b.arriving.data(), op.clock.data(), static_cast<int>(3 * m.width_));
    m.arrive(cta, b, 1, op.at, op.warp);
  }
}

void Tcgen05::copy(Warp& w, int lane, i32 at, const Instruction& in) {
  const i32* e = m.program_.pool.data() + in.operands;
  const Registers r = w.registers_view(m.program_);
  const u32 bit = 1u << lane;
  const CopyShape& shape = copy_shapes[in.attr[1]];
  if (shape.rows == 0) {
    bad(Hazard::DECODE_UNSUPPORTED, w, bit, at, "instruction", "tcgen05.cp.4x256b is not modelled");
    throw Stopped();
  }
  TcQueue& q = queue(w, lane);
  TcOperation op;
  op.kind = TcOperation::copy;
  op.warp = &w, op.at = at, op.number = ++q.issued;
  op.d = r.source(e[0])[lane] + static_cast<u32>(e[1]);
  op.a = static_cast<u64>(r.source(e[2])[lane]) | static_cast<u64>(r.source(e[3])[lane]) << 32;
  const MatrixDescriptor descriptor = blackwell_descriptor(op.a);
  if (op.d >> 16 || !descriptor.valid) {
    bad(Hazard::TMEM_BAD_DESCRIPTOR, w, bit, at, "matrix descriptor",
        op.d >> 16 ? "the copy starts at lane " + std::to_string(op.d >> 16) : "not a valid form");
    return;
  }
  if (!group(w, bit, at, in.attr[0]) || (in.attr[0] == 2 && !pair(w, bit, at, *w.cta))) return;
  TmemAccess a{w, bit, at, TmemCell::copy};
  bool ok = true;
  each_cta(op, in.attr[0], [&](Cta& cta, u32) { ok = usable(a, {&cta, op.d, shape.columns}) && ok; });
  if (!ok) return;
  each_cta(op, in.attr[0], [&](Cta& cta, u32) {
    const TmemRegion region{&cta, op.d, shape.columns};
    mark_pending(region, 1);
    if (!m.options_.checks) return;
    std::vector<u32>& v = m.own_clock(w, bit).v;
    m.section(v, 0)[w.clock_base + lane] = w.epoch++;
    a.stamp = {q.slot, op.number, 1};
    know(a, v);
    const Access source{a.stamp, true, a.happens, m.section(v, 1), at};
    each_chunk(descriptor, false, 4, shape.rows, shape.columns, [&](u32 from, u32, u32) {
      if (from < shared_first || from + 16 > cta.shared.size()) return;
      ++m.checks;
      cta.shadow->read(from, from + 16, source, [&](const Conflict& c) { m.conflict(c, w, bit, at, cta, from); });
    });
    write(region, a, false);
  });
  push(w, lane, std::move(op));
}

void Tcgen05::run_copy(const TcOperation& op) {
  const Instruction& in = m.program_.code[static_cast<size_t>(op.at)];
  const CopyShape& shape = copy_shapes[in.attr[1]];
  each_cta(op, in.attr[0], [&](Cta& cta, u32) {
    Tmem& t = *cta.tmem;
    mark_pending({&cta, op.d, shape.columns}, -1);
    each_chunk(blackwell_descriptor(op.a), false, 4, shape.rows, shape.columns, [&](u32 from, u32 row, u32 column) {
      if (from < shared_first || from + 16 > cta.shared.size()) return;  // reported at issue
      for (u32 copy = 0; copy < shape.copies; ++copy)
        for (u32 c = 0; c < 4; ++c)
          std::memcpy(&t.cells[static_cast<size_t>(op.d + column + c) * height + copy_lane(in.attr[1], row, copy)],
                      cta.shared.data() + from + 4 * c, 4);
    });
  });
}

Step Machine::tcgen05(Warp& w, Group& g, const Instruction& in, u32 mask) {
  Tcgen05 t{*this};
  switch (static_cast<Operation>(in.operation)) {
  case Operation::tc_alloc:
    return t.allocate(w, g, in, mask);
  case Operation::tc_dealloc:
  case Operation::tc_relinquish:
    return t.release(w, g, in, mask);
  case Operation::tc_ld:
    return t.load(w, g, in, mask);
  case Operation::tc_st:
    return t.store(w, g, in, mask);
  case Operation::tc_wait:
    return t.wait(w, g, in, mask);
  case Operation::tc_fence:
    return t.fence(w, in, mask);
  case Operation::tc_shift:
    hazard(Hazard::DECODE_UNSUPPORTED, Severity::error, &w, mask, g.pc, -1, "instruction",
           "tcgen05.shift is not modelled");
    throw Stopped();
  default:
    break;
  }
  for (int lane = 0; lane < lanes; ++lane) {  // each thread issues for itself
    if (!(mask >> lane & 1)) continue;
    switch (static_cast<Operation>(in.operation)) {
    case Operation::tc_mma:
      t.product(w, lane, g.pc, in);
      break;
    case Operation::tc_commit:
      t.commit(w, lane, g.pc, in);
      break;
    default:
      t.copy(w, lane, g.pc, in);
      break;
    }
  }
  return Step::next;
}

bool Machine::run_tcgen05(TcQueue& queue) {
  if (queue.operations.empty()) return false;
  const TcOperation op = std::move(queue.operations.front());
  queue.operations.pop_front();
  Tcgen05 t{*this};
  switch (op.kind) {
  case TcOperation::product:
    t.run_product(op);
    break;
  case TcOperation::commit:
    t.run_commit(op);
    break;
  default:
    t.run_copy(op);
    break;
  }
  record(*op.warp, op.at, 1, -300 - op.warp->index, op.number);
  return true;
}

}  // namespace cupyfa::emulator
