// TMA copies and reductions of tensors: from the map and the coordinates to rows of bytes.
#include <algorithm>
#include <sstream>

#include "machine.hpp"
#include "tensormap.hpp"

namespace cupyfa::emulator {

namespace {

/// The value type of a reduction, by CUtensorMapDataType.
Type map_value(u8 type) {
  constexpr Type types[] = {Type::b8,  Type::b16, Type::u32,  Type::s32, Type::u64, Type::s64, Type::f16,
                            Type::f32, Type::f64, Type::bf16, Type::f32, Type::f32, Type::f32};
  return types[type];
}

/// Whether tensors of a type have this reduction: the manual's table for cp.reduce.async.bulk. The probes on an H200
/// (tests/emulator/micro/refused.py) agree: an illegal instruction outside the table.
bool reducible(Type type, Reduction op) {
  switch (op) {
  case Reduction::inc:
  case Reduction::dec:
    return type == Type::u32;
  case Reduction::and_:
  case Reduction::or_:
  case Reduction::xor_:
    return type == Type::u32 || type == Type::s32 || type == Type::u64;  // s64, which the manual lists, is refused
  case Reduction::min:
  case Reduction::max:
    return type == Type::u32 || type == Type::s32 || type == Type::u64 || type == Type::s64 || type == Type::f16 ||
           type == Type::bf16;
  default:
    return type != Type::b8 && type != Type::b16 && type != Type::s64;  // add
  }
}

}  // namespace

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
      if (at_map.offset + sizeof(map) <= params_.size() && at_map.offset % 64 == 0)
        bytes = params_.data() + at_map.offset;
    } else if (at_map.space == Space::global) {
      bytes = global_memory(where, sizeof(map), false, &w, bit, pc);
    }
    if (bytes) std::memcpy(&map, bytes, sizeof(map));
    if (!bytes || map.rank != dims || !valid(map)) {
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
    if (o == Operation::tensor_reduce && !reducible(static_cast<Type>(c.type), c.reduction)) {
      hazard(Hazard::BULK_BAD_TENSOR_MAP, Severity::error, &w, bit, pc, -1, "tensor map",
             "its element type does not have this reduction");
      continue;
    }
    // Loads may begin before the tensor; a store or reduction with a negative coordinate, in whichever dimension, is an
    // illegal instruction on the H200.
    const bool before = !loads && *std::min_element(start, start + dims) < 0;
    if (before) {
      std::string at;
      for (int d = 0; d < dims; ++d) at += (d ? ", " : "") + std::to_string(start[d]);
      hazard(Hazard::GRID_GLOBAL_OUT_OF_BOUNDS, Severity::error, &w, bit, pc, -1, "tensor map",
             "coordinates (" + at + "): a store or reduction must not begin before the tensor, only loads may");
      continue;
    }
    const u32 unit = 16 / c.element;  // elements
    // An illegal instruction on the H200, even where the box lies outside the tensor.
    if (start[0] % static_cast<i64>(unit)) {
      hazard(Hazard::GRID_GLOBAL_MISALIGNED, Severity::error, &w, bit, pc, -1, "tensor map",
             "the innermost coordinate " + std::to_string(start[0]) + " is not a multiple of " + std::to_string(unit) +
                 " elements, 16 bytes");
      continue;
    }
    const Place place = locate(w, Space::generic, address(r, destination, l, true));
    const Place shared =
        place.space == Space::shared ? place : locate(w, Space::shared, address(r, destination, l, false));
    const u32 row_bytes = c.row_elements * c.element;
    // A row that is narrower than the swizzle begins at a multiple of it all the same; only its own bytes are touched.
    const u32 pitch = c.swizzle ? c.swizzle : row_bytes;
    u64 rows = 1;
    for (int d = 1; d < dims; ++d) rows *= count[d];
    const u64 box_bytes = rows * row_bytes, span = (rows - 1) * pitch + row_bytes;
    if (!shared.cta || shared.offset < shared_first || shared.offset + span > shared.cta->shared.size() ||
        shared.offset % 128 || (c.swizzle && c.swizzle < row_bytes)) {
      hazard(shared.offset % 128 ? Hazard::SHARED_MISALIGNED : Hazard::SHARED_OUT_OF_BOUNDS, Severity::error, &w, bit,
             pc, -1, "shared memory",
             "a box of " + std::to_string(span) + " bytes at byte " +
                 std::to_string(static_cast<i64>(shared.offset) - shared_first) + " of " +
                 std::to_string(shared_bytes_) +
                 "; it must be 128-byte aligned and inside, and a row of it must not be longer than the swizzle");
      continue;
    }
    c.bytes = static_cast<u32>(box_bytes);
    u32 row = 0;
    c.rows.reserve(rows);
    for (u32 i4 = 0; i4 < count[4]; ++i4)
      for (u32 i3 = 0; i3 < count[3]; ++i3)
        for (u32 i2 = 0; i2 < count[2]; ++i2)
          for (u32 i1 = 0; i1 < count[1]; ++i1, ++row) {
            const u32 i[5] = {0, i1, i2, i3, i4};
            bool inside = true;
            u64 offset = static_cast<u64>(start[0]) * c.element;
            for (int d = 1; d < dims; ++d) {
              const i64 x = start[d] + static_cast<i64>(i[d]) * map.element_strides[d];
              inside &= x >= 0 && static_cast<u64>(x) < map.shape[d];
              offset += static_cast<u64>(x) * map.strides[d - 1];
            }
            i32 begin = 0, end = 0;
            if (inside) {
              const i64 s = map.element_strides[0];
              begin = static_cast<i32>(start[0] < 0 ? std::min<i64>(count[0], (-start[0] + s - 1) / s) : 0);
              const i64 left = static_cast<i64>(map.shape[0]) - start[0];
              end = static_cast<i32>(left <= 0 ? 0 : std::min<i64>(count[0], (left + s - 1) / s));
              // Stores and reductions write whole 16 bytes: the last ones may lie behind the row's end.
              if (!loads && end > begin)
                end = static_cast<i32>(std::min<u32>(count[0], (static_cast<u32>(end) + unit - 1) / unit * unit));
            }
            c.rows.push_back({map.address + offset, shared.offset + row * pitch, begin, std::max(begin, end)});
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

}  // namespace cupyfa::emulator
