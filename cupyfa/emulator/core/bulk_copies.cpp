// Bulk copies and reductions with their groups, cp.async, cluster launch control.
#include <algorithm>

#include "machine.hpp"
#include "values.hpp"

namespace cupyfa::emulator {

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
    const auto outside = [&](const Place& p) {
      return !p.cta || p.offset < shared_first || u64{p.offset} + n > p.cta->shared.size();
    };
    const bool foreign = direction != 0 && s.cta != w.cta;
    if (n % 16 || n == 0 || s.offset % 16 || outside(s) || foreign) {
      hazard(n % 16 || s.offset % 16 ? Hazard::SHARED_MISALIGNED : Hazard::SHARED_OUT_OF_BOUNDS, Severity::error, &w,
             bit, pc, -1, "shared memory",
             std::to_string(n) + " bytes at byte " + std::to_string(static_cast<i64>(s.offset) - shared_first) +
                 (foreign ? " of another CTA; the source must be in its own"
                          : "; size and address must be multiples of 16, inside the CTA's memory"));
      continue;
    }
    if (reduces) c.reduction = static_cast<Reduction>(in.attr[1]), c.type = in.type;
    if (direction == 2) {
      c.kind = reduces ? Copy::reduce_global : Copy::to_global;
      if (reduces) c.element = bytes_of(static_cast<Type>(in.type)), c.row_elements = n / c.element;
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
      if (outside(d) || d.offset % 16) {
        hazard(Hazard::SHARED_OUT_OF_BOUNDS, Severity::error, &w, bit, pc, -1, "shared memory",
               "destination of a bulk copy");
        continue;
      }
      c.targets = 1u << d.cta->rank;
      c.source_offset = s.offset;
      c.rows.push_back({0, d.offset, 0, static_cast<i32>(n)});
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
      if (q.groups[static_cast<size_t>(i)].reading > 0 || (!in.attr[0] && q.groups[static_cast<size_t>(i)].writing > 0))
        return Step::block;
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
  case Operation::cp_async_commit:
    ++w.cp_groups;
    return Step::next;
  case Operation::cp_async_wait: {
    const i64 wanted =
        in.attr[0] ? static_cast<i64>(w.cp_groups) + 1 : static_cast<i64>(w.cp_groups) - in.imm - in.bias;
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
        owe(cta, Hazard::BULK_EXIT_WITH_LOAD_IN_FLIGHT, a.stamp, pc, w);
        cta.shadow->write(response.offset, response.offset + 16, a,
                          [&](const Conflict& x) { conflict(x, w, 1u << l, pc, cta, response.offset); });
      }
      std::memcpy(cta.shared.data() + response.offset, words, 16);
      complete_tx(cta, *b, 16, pc);
    }
  }
  return Step::next;
}

}  // namespace cupyfa::emulator
