// Loads and stores of tensor memory by warps, their waits, and the fences of tcgen05.
#include "numeric.hpp"
#include "tcgen05.hpp"

namespace cupyfa::emulator {

namespace {

constexpr u32 height = Tmem::lanes;
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
  case 0:
    return {l, r};
  case 1:
    return {l / 4 + 8 * (l % 2), l / 2 % 2 + 2 * r};
  case 2:
    return {l / 4 + 8 * (r % 2), l % 4 + 4 * (r / 2)};
  case 3:
    return {l / 4 + 8 * (r / 2 % 2), r % 2 + 2 * (l % 4) + 8 * (r / 4)};
  default:
    return {l % 16, r};
  }
}

}  // namespace

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
        "lane " + std::to_string(lane) + "; warp " + std::to_string(w.index) + " has lanes " +
            std::to_string(32 * quarter) + " to " + std::to_string(32 * quarter + 31) +
            (shape.half ? ", and the shape starts at the first or the seventeenth"
                        : ", and the shape starts at the first"));
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
      return t.pending[4 * column + lane / 32] ? nan_f32
                                               : bits_of(t.cells[static_cast<size_t>(column) * height + lane]);
    };
    if (w.tc_rows.size() > 1024)
      std::erase_if(w.tc_rows, [&](i32 row) {
        return !w.async[static_cast<size_t>(m.program_.async_index[static_cast<size_t>(row)])].written_by;
      });
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
          const u32 lane = from.lane + p.lane,
                    column = from.column + (l >= 16 ? second : 0) + p.column * (pack ? 2 : 1);
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
