// Instructions that the lanes of a warp execute together: matrices of a warp, shuffles, votes, reductions.
#include <bit>
#include <sstream>

#include "machine.hpp"
#include "numeric.hpp"
#include "values.hpp"

namespace cupyfa::emulator {

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
    for (u32 l = 0; l < lanes; ++l)
      r.row(e[0])[l] = m[2 * (l % 4)][l / 4] | static_cast<u32>(m[2 * (l % 4) + 1][l / 4]) << 16;
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
      if (row[i] && options_.checks)
        shared_access(w, l, *place.cta, place.offset, 16, is_load ? Use::read : Use::write, g.pc);
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
  const u32* named = r.source(mask_entry);
  const u32 alive = w.lanes_mask & ~w.exited;
  const auto like_first = [&](u32 these) {
    u32 same = 0;
    for (int l = 0; l < lanes; ++l)
      if ((these >> l & 1) && named[l] == named[std::countr_zero(these)]) same |= 1u << l;
    return same;
  };
  const u32 same = like_first(mask);
  if (same != mask) {  // lanes that name other members belong to another instance of the instruction
    bool complete = true;
    for (u32 left = mask; left; left &= ~like_first(left))
      complete &= (named[std::countr_zero(left)] & alive & ~like_first(left)) == 0;
    if (complete) {
      const Step first = warp_collective(w, g, in, same);
      return first == Step::next ? warp_collective(w, g, in, mask & ~same) : first;
    }
    if (o != Operation::syncwarp && !timeout_wake_) return Step::block;
  }
  const u32 members = named[std::countr_zero(mask)] & alive;
  if ((mask & ~members) && same == mask && !reported(Hazard::WARP_DIVERGENT_ALIGNED_OP, g.pc, -1)) {
    std::ostringstream s;
    s << std::hex << "lanes " << (mask & ~members) << " execute it, but its member mask " << members
      << " does not name them";
    hazard(Hazard::WARP_DIVERGENT_ALIGNED_OP, Severity::error, &w, mask, g.pc, -1, "warp", s.str());
  }
  if ((members & mask) != members) {
    if (o == Operation::syncwarp) {  // lanes may stand at different instructions
      u32 here = mask;
      for (const Group& other : w.groups)
        if (other.stage == 9) here |= other.mask;
      if ((here & members) == members) {
        sync_lanes(w, members);
        event();
        for (Group& other : w.groups)
          if (other.stage == 9 && &other != &g && (other.mask & members)) other.stage = 10;
        g.stage = 0;
        return Step::next;
      }
      if (g.stage == 10) {
        g.stage = 0;
        return Step::next;
      }
      if (const u32 others = g.mask & ~mask) {  // predicated off: they go on, and may meet these elsewhere
        g.mask = mask, g.stage = 9;
        w.groups.push_back({g.pc + 1, others});
        return Step::jump;
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
  case Operation::shfl:
    ++shuffles;
    return shuffle(w, in, mask);
  case Operation::vote:
    ++votes;
    return vote(w, in, mask);
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
    case 0:
      j = l - by, ok = static_cast<i32>(j) >= static_cast<i32>(highest);
      break;
    case 1:
      j = l + by, ok = j <= highest;
      break;
    case 2:
      j = l ^ by, ok = j <= highest;
      break;
    default:
      j = lowest | (by & ~segment), ok = j <= highest;
    }
    if (!ok) j = l;
    j &= 31;
    inactive |= !(mask >> j & 1);
    d[l] = a[j];
    valid |= ok ? 1u << l : 0;
  }
  if (inactive && !reported(Hazard::WARP_SHUFFLE_INACTIVE_LANE, static_cast<i32>(&in - program_.code.data()), -1))
    hazard(Hazard::WARP_SHUFFLE_INACTIVE_LANE, Severity::error, &w, mask, static_cast<i32>(&in - program_.code.data()),
           -1, "warp", "a lane reads a lane that does not take part: its value is undefined");
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
