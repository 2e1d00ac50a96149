// Warpgroup matrix products. An operation exists from its first warp's issue, and may execute from the fourth on, in
// order, until a wait covers it. Its registers hold NaN meanwhile: the real values live in `side`.
#include <bit>
#include <sstream>

#include "machine.hpp"
#include "numeric.hpp"
#include "operands.hpp"

namespace cupyfa::emulator {

namespace {

struct Shape {
  Type d, a, b;
  int n, k, d_rows;
  bool a_registers, negate_a, negate_b, a_mn, b_mn;

  explicit Shape(const Instruction& in) {
    d = static_cast<Type>(in.type), a = static_cast<Type>(in.type2);
    b = in.attr[1] ? static_cast<Type>(in.attr[1]) : a;
    n = 8 * in.attr[2];
    k = size() == 1 ? 32 : size() == 2 ? 16 : 8;
    d_rows = d == Type::f16 ? n / 4 : n / 2;
    a_registers = in.attr[0];
    negate_a = in.attr[3], negate_b = in.attr[4];
    a_mn = in.attr[5], b_mn = in.attr[6];
  }
  u32 size() const { return a == Type::f16 || a == Type::bf16 ? 2 : a == Type::tf32 ? 4 : 1; }
};

/// Conversions of an operand's 16 bytes, eight or sixteen at a time.
void convert(Type type, const u8* from, float* to, bool negate) {
  const float sign = negate ? -1.0f : 1.0f;
  if (type == Type::bf16) {
    for (int i = 0; i < 8; ++i) {
      u16 h;
      std::memcpy(&h, from + 2 * i, 2);
      to[i] = sign * float_of_bf16(h);
    }
  } else if (type == Type::f16) {
    for (int i = 0; i < 8; ++i) {
      u16 h;
      std::memcpy(&h, from + 2 * i, 2);
      to[i] = sign * float_of_f16(h);
    }
  } else if (type == Type::tf32) {
    for (int i = 0; i < 4; ++i) {
      u32 v;
      std::memcpy(&v, from + 4 * i, 4);
      to[i] = sign * element_of(type, v);
    }
  } else {
    for (int i = 0; i < 16; ++i) to[i] = sign * element_of(type, from[i]);
  }
}

}  // namespace

/// Reads an operand into out[k][extent]. Bytes outside the CTA's memory read as NaN: they were reported at issue.
void read_operand(const Cta& cta, const MatrixDescriptor& d, bool mn_major, Type type, u32 size, u32 extent, u32 k,
                  bool negate, float* out) {
  const u32 per_chunk = 16 / size;
  each_chunk(d, mn_major, size, extent, k, [&](u32 at, u32 mn, u32 k0) {
    u8 none[16];
    std::memset(none, 0xff, sizeof(none));
    const u8* from = at >= shared_first && at + 16 <= cta.shared.size() ? cta.shared.data() + at : none;
    float v[16];
    convert(type, from, v, negate);
    for (u32 i = 0; i < per_chunk; ++i) {
      if (mn_major) {
        out[static_cast<size_t>(k0) * extent + mn + i] = v[i];
      } else {
        out[static_cast<size_t>(k0 + i) * extent + mn] = v[i];
      }
    }
  });
}

/// Checks and records that an operand will be read.
void Machine::operand_footprint(Warp& w, Cta& cta, const Access& access, u64 descriptor, bool mn_major, Type type,
                                int mn, i32 at) {
  const bool blackwell = program_.has_tcgen05;
  const MatrixDescriptor d = blackwell ? blackwell_descriptor(descriptor) : hopper_descriptor(descriptor);
  const Hazard bad = blackwell ? Hazard::TMEM_BAD_DESCRIPTOR : Hazard::WGMMA_BAD_DESCRIPTOR;
  const u32 size = type == Type::f16 || type == Type::bf16 ? 2 : type == Type::tf32 ? 4 : 1;
  bool outside = false;
  each_chunk(d, mn_major, size, static_cast<u32>(mn),
             size == 1   ? 32
             : size == 2 ? 16
                         : 8,
             [&](u32 from, u32, u32) {
               if (from < shared_first || from + 16 > cta.shared.size()) {
                 outside = true;
                 return;
               }
               if (!cta.shadow) return;
               ++checks;
               cta.shadow->read(from, from + 16, access,
                                [&](const Conflict& c) { conflict(c, w, all_lanes, at, cta, from); });
             });
  if ((!d.valid || outside) && !reported(bad, at, -1)) {
    std::ostringstream s;
    s << "0x" << std::hex << descriptor << std::dec << ": start " << d.start << ", leading offset " << d.leading
      << ", stride offset " << d.stride << ", swizzle " << d.swizzle
      << (outside ? ": reaches outside the shared memory of the CTA" : ": not a valid form");
    hazard(bad, Severity::error, &w, all_lanes, at, -1, "matrix descriptor", s.str());
  }
}

Step Machine::wgmma(Warp& w, Group& g, const Instruction& in, u32 mask) {
  if (!converged(w, g, in, mask, "wgmma")) return Step::block;
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const Shape shape(in);
  Warpgroup& group = w.cta->warpgroups[static_cast<size_t>(w.index / 4)];
  const size_t me = static_cast<size_t>(w.index % 4);
  const u64 number = ++w.wgmma_issued;
  while (group.first + group.queue.size() <= number) group.queue.emplace_back();
  WgmmaOperation& op = group.queue[number - group.first];
  op.at[me] = g.pc, op.issued[me] = true;
  op.group[me] = w.wgmma_groups + 1;
  ++w.wgmma_in_group;
  for (size_t k = 0; k < 4; ++k)
    if (op.at[k] >= 0 && op.at[k] != g.pc && !reported(Hazard::BARRIER_ALIGNED_BARRIER_MULTI_SITE, g.pc, op.at[k]))
      hazard(Hazard::BARRIER_ALIGNED_BARRIER_MULTI_SITE, Severity::error, &w, mask, g.pc, op.at[k], "warpgroup",
             "its warps execute different wgmma instructions at the same time");
  const i32* a = e + shape.d_rows;
  const i32* b = a + (shape.a_registers ? 4 : 2);
  const auto descriptor = [&](const i32* entry) {
    return static_cast<u64>(uniform(w, r.source(entry[0]), mask, g.pc, "matrix descriptor")) |
           static_cast<u64>(uniform(w, r.source(entry[1]), mask, g.pc, "matrix descriptor")) << 32;
  };
  op.descriptors[me] = {shape.a_registers ? 0 : descriptor(a), descriptor(b) +
                                                                   static_cast<u64>(static_cast<i64>(in.bias)) +
                                                                   (static_cast<u64>(static_cast<i64>(in.imm)) << 32)};
  const u32 p = r.predicate(b[2]) & mask;
  op.scale[me] = p != 0;
  if (p != 0 && p != mask && !reported(Hazard::WARP_NOT_UNIFORM, g.pc, -1))
    hazard(Hazard::WARP_NOT_UNIFORM, Severity::error, &w, mask, g.pc, -1, "scale-d", "lanes of the warp disagree");

  // Registers: after ordinary accesses a fence is needed, unless they are the accumulators of a wgmma in flight.
  bool unfenced = false;
  for (int i = 0; i < shape.d_rows; ++i) {
    AsyncRow& row = w.async[static_cast<size_t>(program_.async_index[static_cast<size_t>(e[i])])];
    if (row.touched > w.fence_time && !row.written_by) unfenced = true;
    if (!row.written_by) {
      u32* from = r.row(e[i]);
      u32* to = w.side.data() + static_cast<size_t>(program_.async_index[static_cast<size_t>(e[i])]) * lanes;
      std::memcpy(to, from, lanes * sizeof(u32));
      for (int l = 0; l < lanes; ++l) from[l] = nan_f32;
      ++w.async_pending;
    }
    row.written_by = number, row.at = g.pc;
  }
  if (shape.a_registers)
    for (int i = 0; i < 4; ++i) {
      if (a[i] < 0) continue;
      AsyncRow& row = w.async[static_cast<size_t>(program_.async_index[static_cast<size_t>(a[i])])];
      if (row.touched > w.fence_time) unfenced = true;
      if (row.written_by && row.written_by != number && !reported(Hazard::WGMMA_REGISTER_READ_IN_FLIGHT, g.pc, row.at))
        hazard(Hazard::WGMMA_REGISTER_READ_IN_FLIGHT, Severity::error, &w, mask, g.pc, row.at, "registers",
               "the A operand is the result of a wgmma that is in flight");
      if (!row.read_by) ++w.async_pending;
      row.read_by = number, row.at = g.pc;
    }
  if (w.wgmma_issued == 1 && w.fence_time == 0) unfenced = true;
  if (options_.checks && unfenced && !reported(Hazard::WGMMA_MISSING_FENCE, g.pc, -1))
    hazard(Hazard::WGMMA_MISSING_FENCE, Severity::error, &w, mask, g.pc, -1, "registers",
           "no wgmma.fence lies between the last access to its registers and this wgmma");
  record(w, g.pc, 0, -200 - w.index / 4, number);
  issued_ = true;
  if (!(op.issued[0] && op.issued[1] && op.issued[2] && op.issued[3])) return Step::next;

  // All four warps are here: what they all know must cover the operands.
  for (size_t k = 0; k < 4; ++k)
    if (op.descriptors[k] != op.descriptors[0] || op.scale[k] != op.scale[0])
      if (!reported(Hazard::WARP_NOT_UNIFORM, g.pc, -1))
        hazard(Hazard::WARP_NOT_UNIFORM, Severity::error, &w, mask, g.pc, -1, "warpgroup",
               "its warps give different operands");
  if (options_.checks) {
    std::vector<u32> common;
    for (size_t k = 0; k < 4; ++k) {
      Warp& other = w.cta->warps[static_cast<size_t>(w.index / 4 * 4) + k];
      const std::vector<u32>& v = knowledge(other, all_lanes & other.lanes_mask);
      if (common.empty()) {
        common = v;
      } else {
        unit_.meet(common.data(), v.data(), static_cast<int>(width_ * 2));
      }
    }
    const Access access{
        {group.slot, static_cast<u32>(op.group[me]), 4}, true, section(common, 0), section(common, 1), g.pc};
    if (!shape.a_registers) operand_footprint(w, *w.cta, access, op.descriptors[0][0], shape.a_mn, shape.a, 64, g.pc);
    operand_footprint(w, *w.cta, access, op.descriptors[0][1], shape.b_mn, shape.b, shape.n, g.pc);
  }
  event();
  return Step::next;
}

bool Machine::run_wgmma(Cta& cta, Warpgroup& group) {
  const u64 next = group.done + 1;
  if (next < group.first || next - group.first >= group.queue.size()) return false;
  WgmmaOperation& op = group.queue[next - group.first];
  if (!(op.issued[0] && op.issued[1] && op.issued[2] && op.issued[3])) return false;
  const Instruction& in = program_.code[static_cast<size_t>(op.at[0])];
  const Shape shape(in);
  const i32* e = program_.pool.data() + in.operands;
  const size_t first = static_cast<size_t>(&group - cta.warpgroups.data()) * 4;
  alignas(64) static thread_local float a[64 * 64], b[64 * 256];
  const u32 size = shape.size();
  if (shape.a_registers) {
    for (size_t k = 0; k < 4; ++k) {
      Warp& w = cta.warps[first + k];
      const Registers r = w.registers_view(program_);
      const i32* rows = program_.pool.data() + program_.code[static_cast<size_t>(op.at[k])].operands + shape.d_rows;
      const u32 per_row = 4 / size;
      for (u32 i = 0; i < 4; ++i) {
        const u32* v = r.source(rows[i]);
        for (u32 l = 0; l < lanes; ++l)
          for (u32 h = 0; h < per_row; ++h) {
            const u32 m = 16 * static_cast<u32>(k) + l / 4 + 8 * (i % 2),
                      kk = per_row * (l % 4) + h + 4 * per_row * (i / 2);
            const float x =
                element_of(shape.a, v[l] >> (8 * size * h) & (size == 4 ? 0xffff'ffff : (1u << (8 * size)) - 1));
            a[64 * kk + m] = shape.negate_a ? -x : x;
          }
      }
    }
  } else {
    read_operand(cta, hopper_descriptor(op.descriptors[0][0]), shape.a_mn, shape.a, size, 64, static_cast<u32>(shape.k),
                 shape.negate_a, a);
  }
  read_operand(cta, hopper_descriptor(op.descriptors[0][1]), shape.b_mn, shape.b, size, static_cast<u32>(shape.n),
               static_cast<u32>(shape.k), shape.negate_b, b);
  u32* rows[4][128];
  const u32* const* pointers[4];
  for (size_t k = 0; k < 4; ++k) {
    const i32* d = program_.pool.data() + program_.code[static_cast<size_t>(op.at[k])].operands;
    for (int i = 0; i < shape.d_rows; ++i)
      rows[k][i] = cta.warps[first + k].side.data() +
                   static_cast<size_t>(program_.async_index[static_cast<size_t>(d[i])]) * lanes;
    pointers[k] = rows[k];
  }
  (void)e;
  unit_.wgmma(const_cast<u32* const* const*>(reinterpret_cast<const u32* const* const*>(pointers)), a, b, shape.n,
              shape.k, op.scale[0], shape.d == Type::f16);
  group.done = next;
  record(cta.warps[first], op.at[0], 1, -200 - static_cast<i32>(first / 4), next);
  group.queue.pop_front();
  ++group.first;
  return true;
}

/// Gives the registers of completed operations back to the warp.
void Machine::finish_rows(Warp& w, u64 done) {
  if (!w.async_pending) return;
  for (size_t row = 0; row < program_.async_index.size(); ++row) {
    const i32 i = program_.async_index[row];
    if (i < 0) continue;
    AsyncRow& a = w.async[static_cast<size_t>(i)];
    if (a.written_by && !(a.written_by >> 63) && a.written_by <= done) {
      std::memcpy(w.regs.data() + row * lanes, w.side.data() + static_cast<size_t>(i) * lanes, lanes * sizeof(u32));
      a.written_by = 0;
      --w.async_pending;
    }
    if (a.read_by && a.read_by <= done) {
      a.read_by = 0;
      --w.async_pending;
    }
  }
}

Step Machine::wgmma_wait(Warp& w, Group& g, const Instruction& in, u32 mask) {
  if (!converged(w, g, in, mask, "wgmma")) return Step::block;
  Warpgroup& group = w.cta->warpgroups[static_cast<size_t>(w.index / 4)];
  const size_t me = static_cast<size_t>(w.index % 4);
  switch (static_cast<Operation>(in.operation)) {
  case Operation::wgmma_fence:
    w.fence_time = w.time;
    return Step::next;
  case Operation::wgmma_commit:
    ++w.wgmma_groups;
    w.wgmma_group_end.push_back(w.wgmma_issued);
    w.wgmma_in_group = 0;
    return Step::next;
  default:
    break;
  }
  const i64 wanted = static_cast<i64>(w.wgmma_groups) - (in.imm + in.bias);
  if (wanted <= 0) return Step::next;
  const u64 last = w.wgmma_group_end[static_cast<size_t>(wanted) - 1];  // the newest operation that must be complete
  if (last > group.done) return Step::block;
  if (last) finish_rows(w, last);
  record(w, g.pc, 2, -200 - w.index / 4, static_cast<u64>(wanted));
  if (options_.checks) {
    for (u32 k = 0; k < 4; ++k)
      if (!options_.strict_warpgroup || k == me) learn(w, mask, group.slot + k, static_cast<u32>(wanted));
  }
  return Step::next;
}

}  // namespace cupyfa::emulator
