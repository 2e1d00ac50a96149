// Memory: addresses, what may be accessed, loads, stores and atomics.
#include <sstream>

#include "machine.hpp"
#include "numeric.hpp"
#include "values.hpp"

namespace cupyfa::emulator {

u64 Machine::address(const Registers& r, const i32* e, int lane, bool wide) const {
  const u64 low = r.source(e[0])[lane];
  if (!wide) return static_cast<u32>(low + static_cast<u32>(e[2]));
  const u64 high = r.source(e[1])[lane];
  return (high << 32 | low) + static_cast<u64>(static_cast<i64>(e[2]));
}

Place Machine::locate(Warp& w, Space space, u64 address) {
  if (space == Space::generic) {
    switch (address >> 32) {
    case shared_window:
      return locate(w, Space::shared, address & 0xffff'ffff);
    case local_window:
      return {Space::local, w.cta, static_cast<u32>(address), address};
    case param_window:
      return {Space::param, w.cta, static_cast<u32>(address), address};
    default:
      return {Space::global, w.cta, 0, address};
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
  const int i = find_buffer(address, bytes);
  if (i < 0) {
    const u64 in_data = address - module_data;
    if (address >= module_data && in_data < data_.size() && bytes <= data_.size() - in_data)
      return data_.data() + in_data;
    if (!reported(Hazard::GRID_GLOBAL_OUT_OF_BOUNDS, at, -1)) {
      std::ostringstream s;
      s << bytes << " bytes at 0x" << std::hex << address;
      const auto b = std::upper_bound(buffers_.begin(), buffers_.end(), address,
                                      [](u64 x, const Buffer& y) { return x < y.base; });
      if (b != buffers_.begin()) {
        const Buffer& before = *std::prev(b);
        s << std::dec << ", byte " << address - before.base << " of " << before.name << ", which has " << before.size;
      }
      hazard(Hazard::GRID_GLOBAL_OUT_OF_BOUNDS, Severity::error, w, mask, at, -1, "global memory", s.str());
    }
    return nullptr;
  }
  Buffer& b = buffers_[static_cast<size_t>(i)];
  const u64 offset = address - b.base;
  if (write && !b.writable) {
    hazard(Hazard::GRID_GLOBAL_READ_ONLY, Severity::error, w, mask, at, -1, b.name,
           "written, but the caller passed it as an input");
    return nullptr;
  }
  if (write && !b.initialised)
    std::fill(b.written.begin() + static_cast<std::ptrdiff_t>(offset),
              b.written.begin() + static_cast<std::ptrdiff_t>(offset + bytes), true);
  return b.data + offset;
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
               place.cta ? std::to_string(bytes) + " bytes at offset " +
                               std::to_string(static_cast<i64>(place.offset) - shared_first) + " of " +
                               std::to_string(shared_bytes_)
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
    if (write || u64{place.offset} + bytes > params_.size()) break;
    return params_.data() + place.offset;
  case Space::local:
    if (u64{place.offset} + bytes > program_.local_bytes) break;
    return w.local.data() + static_cast<size_t>(lane) * program_.local_bytes + place.offset;
  default: {
    const u64 a = place.address >= module_data ? place.address - module_data : place.address;
    if (write || a > data_.size() || bytes > data_.size() - a) break;
    return data_.data() + a;
  }
  }
  if (!reported(Hazard::GRID_GLOBAL_OUT_OF_BOUNDS, at, -1))
    hazard(Hazard::GRID_GLOBAL_OUT_OF_BOUNDS, Severity::error, &w, 1u << lane, at, -1,
           place.space == Space::param   ? "parameters"
           : place.space == Space::local ? "local memory"
                                         : "constants",
           "byte " + std::to_string(place.address));
  return nullptr;
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
      if (tracked(place))
        memory_access(w, l, place, total, Use::read, g.pc, static_cast<Order>(in.attr[2]),
                      static_cast<Scope>(in.attr[3]));
      if (tracks_written_ && place.space == Space::global) check_written(place.address, total, w, 1u << l, g.pc);
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
    if (tracked(place))
      memory_access(w, l, place, total, Use::write, g.pc, static_cast<Order>(in.attr[2]),
                    static_cast<Scope>(in.attr[3]));
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
  case Reduction::add:
    return static_cast<V>(static_cast<std::make_unsigned_t<V>>(a) + static_cast<std::make_unsigned_t<V>>(b));
  case Reduction::min:
    return a < b ? a : b;
  case Reduction::max:
    return a > b ? a : b;
  case Reduction::inc:
    return a >= b ? V(0) : static_cast<V>(a + 1);
  case Reduction::dec:
    return a == 0 || a > b ? b : static_cast<V>(a - 1);
  case Reduction::and_:
    return a & b;
  case Reduction::or_:
    return a | b;
  case Reduction::xor_:
    return a ^ b;
  case Reduction::exch:
    return b;
  default:
    return a == b ? c : a;  // cas: b is compared, c stored
  }
}
float reduce_float(Reduction op, float a, float b) {
  switch (op) {
  case Reduction::min:
    return a != a ? b : b != b ? a : a < b || (a == b && std::signbit(a)) ? a : b;
  case Reduction::max:
    return a != a ? b : b != b ? a : a > b || (a == b && !std::signbit(a)) ? a : b;
  default:
    return a + b;
  }
}

}  // namespace

u64 reduce_value(Type type, Reduction op, u64 a, u64 b, u64 c) {
  switch (type) {
  case Type::s32:
    return static_cast<u32>(reduce_integer(op, static_cast<i32>(a), static_cast<i32>(b), static_cast<i32>(c)));
  case Type::s64:
    return static_cast<u64>(reduce_integer(op, static_cast<i64>(a), static_cast<i64>(b), static_cast<i64>(c)));
  case Type::u64:
  case Type::b64:
    return reduce_integer(op, a, b, c);
  case Type::f32: {
    if (op == Reduction::exch) return b;
    const float y = reduce_float(op, float_of(static_cast<u32>(a)), float_of(static_cast<u32>(b)));
    return y == y ? bits_of(y) : nan_f32;
  }
  case Type::f64: {
    const double y = double_of(a) + double_of(b);
    return y == y ? bits_of(y) : nan_f64;
  }
  case Type::f16:
    return f16_of(reduce_float(op, float_of_f16(static_cast<u32>(a)), float_of_f16(static_cast<u32>(b))));
  case Type::bf16:
    return bf16_of(reduce_float(op, float_of_bf16(static_cast<u32>(a)), float_of_bf16(static_cast<u32>(b))));
  case Type::f16x2:
  case Type::bf16x2: {
    const Type half = type == Type::f16x2 ? Type::f16 : Type::bf16;
    return reduce_value(half, op, a & 0xffff, b & 0xffff, 0) |
           reduce_value(half, op, a >> 16 & 0xffff, b >> 16 & 0xffff, 0) << 16;
  }
  case Type::b16:
  case Type::u16:
    return reduce_integer(op, static_cast<u16>(a), static_cast<u16>(b), static_cast<u16>(c));
  default:
    return reduce_integer(op, static_cast<u32>(a), static_cast<u32>(b), static_cast<u32>(c));
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
  bool changed = false;
  const auto get = [&](const i32* entry, int l) {
    u64 v = r.source(entry[0])[l];
    if (width == 2) v |= static_cast<u64>(r.source(entry[1])[l]) << 32;
    return v;
  };
  for (int l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    const Place place = locate(w, space, address(r, a, l, space != Space::shared));
    if (tracks_written_ && place.space == Space::global) check_written(place.address, size * count, w, 1u << l, g.pc);
    u8* at = memory(w, place, size * count, true, l, g.pc);
    if (!at) continue;
    if (tracked(place))
      memory_access(w, l, place, size * count, Use::update, g.pc, static_cast<Order>(in.attr[2]),
                    static_cast<Scope>(in.attr[3]));
    for (u32 i = 0; i < count; ++i) {
      u64 old = 0;
      std::memcpy(&old, at + size * i, size);
      const u64 b = get(values + width * static_cast<int>(i), l), c = op == Reduction::cas ? get(values + width, l) : 0;
      const u64 fresh = reduce_value(type, op, old, b, c);
      std::memcpy(at + size * i, &fresh, size);
      changed |= std::memcmp(&old, &fresh, size) != 0;
      if (returns && e[0] != absent) {
        r.row(e[0])[l] = static_cast<u32>(old);
        if (width == 2) r.row(e[1])[l] = static_cast<u32>(old >> 32);
      }
    }
  }
  if (changed) event();
  return returns ? Step::yield : Step::next;
}

}  // namespace cupyfa::emulator
