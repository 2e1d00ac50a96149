// mbarriers, named barriers, the cluster barrier and the register pool.
#include <bit>
#include <sstream>

#include "machine.hpp"

namespace cupyfa::emulator {

std::string Machine::name_of(const Cta& cta, const MBarrier& b) const {
  std::ostringstream s;
  s << "mbarrier at byte " << b.offset - shared_first << " of CTA " << cta.linear;
  return s.str();
}

/// The mbarrier at an offset, or null after a report. `async`: the user is another CTA or the async proxy, which sees an
/// initialisation only after a fence.
MBarrier* Machine::barrier_at(Warp* w, Cta& cta, u32 offset, u32 mask, i32 at, bool async) {
  const i32 i = offset / 8 < cta.barrier_at.size() ? cta.barrier_at[offset / 8] : -1;
  if (i < 0 || !cta.barriers[static_cast<size_t>(i)].valid || offset % 8) {
    if (!reported(Hazard::MBARRIER_NOT_INITIALISED, at, -1))
      hazard(Hazard::MBARRIER_NOT_INITIALISED, Severity::error, w, mask, at, -1,
             "byte " + std::to_string(static_cast<i64>(offset) - shared_first) + " of CTA " +
                 std::to_string(cta.linear),
             "no mbarrier was initialised here");
    return nullptr;
  }
  MBarrier& b = cta.barriers[static_cast<size_t>(i)];
  if (options_.checks && w) {
    const u32 own = static_cast<u32>(w->clock_base);
    const bool self =
        w->cta == &cta && b.init.slot >= own && b.init.slot < own + lanes && (mask >> (b.init.slot - own) & 1);
    // A relaxed arrival at the cluster barrier carries the initialisations that were fenced before it.
    const bool announced = b.announced && w->cluster_waited >= b.announced;
    if (!self && !announced && !reached(section(knowledge(*w, mask), 0), b.init) &&
        !reported(Hazard::MBARRIER_INIT_NOT_VISIBLE, at, b.init_at))
      hazard(Hazard::MBARRIER_INIT_NOT_VISIBLE, Severity::error, w, mask, at, b.init_at, name_of(cta, b),
             "nothing orders its initialisation before this use");
    if (async && !b.fenced && !reported(Hazard::MBARRIER_INIT_NOT_FENCED, at, b.init_at))
      hazard(Hazard::MBARRIER_INIT_NOT_FENCED, Severity::error, w, mask, at, b.init_at, name_of(cta, b),
             "another CTA or the async proxy uses it, and the initialising thread executed no fence.mbarrier_init");
  }
  return &b;
}

/// The phase completes when no arrival and no byte is pending.
void Machine::settle(Cta& cta, MBarrier& b) {
  if (b.pending != 0 || b.tx != 0) return;
  if (b.in_flight > 0) {
    hazard(Hazard::MBARRIER_FLIP_WITH_TMA_IN_FLIGHT, Severity::error, nullptr, 0, b.init_at, -1, name_of(cta, b),
           "phase " + std::to_string(b.phase) + " completes while " + std::to_string(b.in_flight) +
               " copies that signal it are in flight: fewer bytes were expected than are copied");
    b.in_flight = 0;
  }
  ++b.phase;
  b.pending = b.count;
  if (options_.checks) b.completed = b.arriving;
  event();
}

void Machine::arrive(Cta& cta, MBarrier& b, u32 count, i32 at, Warp* w) {
  if (count > b.pending) {
    hazard(Hazard::MBARRIER_OVER_ARRIVAL, Severity::error, w, 0, at, b.init_at, name_of(cta, b),
           std::to_string(count) + " arrivals, but phase " + std::to_string(b.phase) + " waits for " +
               std::to_string(b.pending) + " of " + std::to_string(b.count));
    count = b.pending;
  }
  b.pending -= count;
  event();
  settle(cta, b);
}

void Machine::complete_tx(Cta& cta, MBarrier& b, i64 bytes, i32 at) {
  b.tx -= bytes;
  if (b.tx > (1 << 20) - 1 || b.tx < -((1 << 20) - 1))
    hazard(Hazard::MBARRIER_TX_RANGE, Severity::error, nullptr, 0, at, b.init_at, name_of(cta, b),
           std::to_string(b.tx) + " pending bytes; the counter holds 2^20 - 1");
  event();
  settle(cta, b);
}

Step Machine::mbarrier(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const auto o = static_cast<Operation>(in.operation);
  if (o == Operation::mbarrier_pending) {
    const u32* low = r.source(e[1]);
    for (int l = 0; l < lanes; ++l)
      if (mask >> l & 1) r.row(e[0])[l] = low[l] & 0xf'ffff;
    return Step::next;
  }
  const i32* a = o == Operation::mbarrier_arrive ? e + 2 : e;
  u32 published = 0;
  const u32 now = w.epoch;  // of all lanes: the first that publishes raises it
  for (int l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    const u32 bit = 1u << l;
    const Place place = locate(w, Space::generic, address(r, a, l, true));
    const bool generic = place.space == Space::shared;
    const Place p = generic ? place : locate(w, Space::shared, address(r, a, l, false));
    if (!memory(w, p, 8, true, l, g.pc)) continue;
    Cta& cta = *p.cta;
    const bool remote = &cta != w.cta;
    if (o == Operation::mbarrier_init) {
      const i64 count = static_cast<i64>(static_cast<i32>(r.source(e[3])[l])) + in.bias;
      i32& index = cta.barrier_at[p.offset / 8];
      if (index >= 0 && cta.barriers[static_cast<size_t>(index)].valid && !reported(Hazard::MBARRIER_REINIT, g.pc, -1))
        hazard(Hazard::MBARRIER_REINIT, Severity::error, &w, bit, g.pc,
               cta.barriers[static_cast<size_t>(index)].init_at, name_of(cta, cta.barriers[static_cast<size_t>(index)]),
               "initialised again without mbarrier.inval");
      if (index < 0) {
        index = static_cast<i32>(cta.barriers.size());
        cta.barriers.emplace_back();
        if (options_.checks) cta.barriers.back().slot = new_slot();
      }
      MBarrier& b = cta.barriers[static_cast<size_t>(index)];
      if (count < 1 || count > (1 << 20) - 1)
        hazard(Hazard::MBARRIER_COUNT_RANGE, Severity::error, &w, bit, g.pc, -1, "mbarrier",
               "initialised with a count of " + std::to_string(count) + "; it must be 1 to 2^20 - 1");
      const u32 slot = b.slot;
      b = MBarrier();
      b.slot = slot, b.valid = true, b.offset = p.offset;
      b.count = b.pending = static_cast<u32>(std::max<i64>(count, 1));
      b.init = {static_cast<u32>(w.clock_base + l), w.epoch, 1};
      b.init_at = g.pc;
      if (options_.checks) {
        b.arriving.assign(static_cast<size_t>(width_) * sections_, 0);
        b.completed.assign(static_cast<size_t>(width_) * sections_, 0);
      }
      event();
      continue;
    }
    MBarrier* b = barrier_at(&w, cta, p.offset, bit, g.pc, remote);
    if (!b) continue;
    if (o == Operation::mbarrier_inval) {
      b->valid = false;
      continue;
    }
    if (o == Operation::mbarrier_tx) {
      const i64 bytes = static_cast<i64>(r.source(e[3])[l]) + in.bias;
      record(w, g.pc, 3, static_cast<i32>(p.offset), b->phase);
      complete_tx(cta, *b, in.attr[0] == 0 ? -bytes : bytes, g.pc);
      continue;
    }
    // The order of one instruction: expect-tx, then the arrival.
    const u64 state = (b->phase << 20 | b->pending) + (u64(1) << 62);
    if (e[0] != absent) {
      r.row(e[0])[l] = static_cast<u32>(state);
      r.row(e[1])[l] = static_cast<u32>(state >> 32);
    }
    if (e[6] != absent) {
      b->tx += static_cast<i64>(r.source(e[6])[l]) + in.bias;
      if (b->tx > (1 << 20) - 1)
        hazard(Hazard::MBARRIER_TX_RANGE, Severity::error, &w, bit, g.pc, b->init_at, name_of(cta, *b),
               std::to_string(b->tx) + " pending bytes; the counter holds 2^20 - 1");
    }
    const u32 count = e[5] != absent ? r.source(e[5])[l] : 1;
    record(w, g.pc, 3, static_cast<i32>(p.offset), b->phase);
    if (options_.checks && remote)
      owe(cta, Hazard::SHARED_PEER_EXITED, {static_cast<u32>(w.clock_base + l), now, 1}, g.pc, w);
    if (options_.checks && !(published >> l & 1) && static_cast<Order>(in.attr[2]) != Order::relaxed) {
      // Lanes that arrive together at one barrier publish together.
      u32 together = 0;
      for (int k = l; k < lanes; ++k)
        if ((mask >> k & 1) && address(r, a, k, true) == address(r, a, l, true)) together |= 1u << k;
      publish(w, together, b->arriving);
      published |= together;
    }
    if (in.attr[0]) b->count -= count;  // arrive_drop also lowers the count of the phases to come
    arrive(cta, *b, count, g.pc, &w);
  }
  return Step::next;
}

Step Machine::mbarrier_wait(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  const bool suspends = in.attr[0], parity = in.attr[1];
  if (suspends && g.stage == 0 && options_.policy.spurious > 0 && chance() < options_.policy.spurious) {
    r.set_predicate(e[0], 0, mask);
    return Step::yield;
  }
  u32 done = 0, learners = 0;
  MBarrier* learning = nullptr;
  bool pending = false;
  for (int l = 0; l < lanes; ++l) {
    if (!(mask >> l & 1)) continue;
    const u32 bit = 1u << l;
    const Place place = locate(w, Space::generic, address(r, e + 1, l, true));
    const Place p = place.space == Space::shared ? place : locate(w, Space::shared, address(r, e + 1, l, false));
    if (!memory(w, p, 8, false, l, g.pc)) {
      done |= bit;
      continue;
    }
    MBarrier* b = barrier_at(&w, *p.cta, p.offset, bit, g.pc, false);
    if (!b) {
      done |= bit;
      continue;
    }
    bool complete;
    if (parity) {
      complete = (b->phase & 1) != ((r.source(e[4])[l] ^ static_cast<u32>(in.bias)) & 1);
    } else {
      const u64 state = r.source(e[4])[l] | static_cast<u64>(r.source(e[5])[l]) << 32;
      complete = b->phase != (state & ~(u64(1) << 62)) >> 20;
    }
    if (!complete) {
      pending = true;
      continue;
    }
    done |= bit;
    record(w, g.pc, 2, static_cast<i32>(p.offset), b->phase);
    if (!options_.checks || static_cast<Order>(in.attr[2]) == Order::relaxed) continue;
    u64& seen = w.phases[p.cta->rank << 24 | p.offset];
    if (parity && b->phase > seen + 1 && (b->phase - seen) % 2 == 1 && b->phase > 0 && seen > 0 &&
        !reported(Hazard::MBARRIER_PHASE_SKEW, g.pc, b->init_at))
      hazard(Hazard::MBARRIER_PHASE_SKEW, Severity::error, &w, bit, g.pc, b->init_at, name_of(*p.cta, *b),
             "the warp has seen " + std::to_string(seen) + " phases complete, and takes phase " +
                 std::to_string(b->phase - 1) + " for the next one: same parity, another generation");
    seen = b->phase;
    if (b->phase == 0) continue;
    if (learning && learning != b) {
      acquire(w, learners, learning->completed);
      learn(w, learners, learning->slot, static_cast<u32>(learning->phase), true);
      learners = 0;
    }
    learning = b;  // lanes that wait together learn together
    learners |= bit;
  }
  if (learning) {
    acquire(w, learners, learning->completed);
    learn(w, learners, learning->slot, static_cast<u32>(learning->phase), true);
  }
  if (pending && suspends && !timeout_wake_) {
    if (options_.policy.impatient && g.stage == 0 && !w.gave_up) {
      w.gave_up = true;
      r.set_predicate(e[0], done, mask);
      return Step::yield;
    }
    g.stage = 1;
    return Step::block;
  }
  g.stage = 0, w.gave_up = false;
  r.set_predicate(e[0], done, mask);
  return pending ? Step::yield : Step::next;
}

Step Machine::named_barrier(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const i32* e = program_.pool.data() + in.operands;
  const Registers r = w.registers_view(program_);
  if (g.stage == 2) {  // completed while this warp waited
    g.stage = 0;
    NamedBarrier& b = w.cta->named[g.data & 15];
    if (in.attr[0] == 2)
      for (int l = 0; l < lanes; ++l)
        if (mask >> l & 1) r.row(e[0])[l] = b.result_popc;
    if (in.attr[0] == 3) r.set_predicate(e[0], b.result_and ? all_lanes : 0, mask);
    if (in.attr[0] == 4) r.set_predicate(e[0], b.result_or ? all_lanes : 0, mask);
    return Step::next;
  }
  if (g.stage == 1) return Step::block;
  if (in.attr[1] && !aligned_here(w, g, in, mask)) return Step::block;
  const u32 id = uniform(w, r.source(e[2]), mask, g.pc, "barrier number");
  if (id > 15) {
    hazard(Hazard::BARRIER_ID_RANGE, Severity::error, &w, mask, g.pc, -1, "barrier " + std::to_string(id),
           "a CTA has barriers 0 to 15");
    return Step::next;
  }
  const u32 threads = (block_.count() + lanes - 1) / lanes * lanes;
  const bool everyone = e[3] == absent;
  const u32 count =
      everyone ? threads : uniform(w, r.source(e[3]), mask, g.pc, "barrier count") + static_cast<u32>(in.bias);
  NamedBarrier& b = w.cta->named[id];
  const std::string name = "named barrier " + std::to_string(id) + " of CTA " + std::to_string(w.cta->linear);
  const auto mismatch = [&](i32 other, const std::string& detail) {
    if (!reported(Hazard::BARRIER_COUNT_MISMATCH, g.pc, other))
      hazard(Hazard::BARRIER_COUNT_MISMATCH, Severity::error, &w, mask, g.pc, other, name, detail);
  };
  if (count == 0 || count % lanes || count > threads)
    mismatch(-1, "a count of " + std::to_string(count) + " threads; it must be a multiple of 32, at most " +
                     std::to_string(threads));
  if (b.arrived && b.expected != count)
    mismatch(b.at, "expects " + std::to_string(count) + " threads, another user of the same generation " +
                       std::to_string(b.expected));
  // Threads that arrive again before the others have come take the place of somebody else's arrival.
  u32& present = b.present[static_cast<size_t>(w.index)];
  if (present & mask) mismatch(b.at, "the warp arrives a second time in one generation");
  const bool first = b.arrived == 0;
  b.expected = count, b.everyone = everyone;
  b.at = g.pc;
  // The hardware counts warps: one of which only some lanes are alive counts in full.
  const u32 alive = w.lanes_mask & ~w.exited;
  b.arrived += static_cast<u32>(std::popcount(mask) + (present ? 0 : std::popcount(~alive)));
  present |= mask | ~alive;
  if (first && everyone)
    for (const Warp& other : w.cta->warps)
      if (other.done()) b.arrived += lanes, b.present[static_cast<size_t>(other.index)] = all_lanes;
  if (in.attr[0] >= 2) {
    const u32 p = r.predicate(e[1]) & mask;
    b.votes += static_cast<u32>(std::popcount(p));
    b.vote_and &= p == mask, b.vote_or |= p != 0;
  }
  const bool waits = in.attr[0] != 1;
  if (options_.checks) {
    if (waits) sync_lanes(w, mask);
    publish(w, mask, b.clock);
  }
  record(w, g.pc, 3, -static_cast<i32>(id) - 1, b.generation);
  event();
  if (b.arrived > b.expected)
    mismatch(b.at,
             std::to_string(b.arrived) + " threads have arrived, " + std::to_string(b.expected) + " were expected");
  if (waits) g.stage = 1, g.data = id;
  settle_named(*w.cta, id);
  if (!waits) return Step::next;
  return g.stage == 2 ? named_barrier(w, g, in, mask) : Step::block;
}

/// Whether the lanes of the warp that are alive execute an aligned barrier together; if not, they wait for one another.
bool Machine::aligned_here(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const Group* elsewhere = nullptr;
  u32 here = mask;
  for (const Group& other : w.groups)
    if (&other != &g && other.blocked &&
        static_cast<Operation>(program_.code[static_cast<size_t>(other.pc)].operation) == Operation::bar)
      here |= other.mask, elsewhere = &other;
  if (!elsewhere || elsewhere->pc == g.pc || here != (w.lanes_mask & ~w.exited))
    return converged(w, g, in, mask, "aligned barrier");
  if (!reported(Hazard::BARRIER_ALIGNED_BARRIER_MULTI_SITE, g.pc, elsewhere->pc))
    hazard(
        Hazard::BARRIER_ALIGNED_BARRIER_MULTI_SITE, Severity::error, &w, mask, g.pc, elsewhere->pc, "aligned barrier",
        "lanes of one warp wait at different instructions, which are aligned: all of them must execute the same one");
  return true;
}

/// The generation of a named barrier ends when all of its threads have arrived.
void Machine::settle_named(Cta& cta, u32 id) {
  NamedBarrier& b = cta.named[id];
  if (b.arrived == 0 || b.arrived < b.expected) return;
  b.result_popc = b.votes, b.result_and = b.vote_and, b.result_or = b.vote_or;
  b.arrived = 0, b.votes = 0, b.vote_and = 1, b.vote_or = 0;
  b.present.fill(0);
  ++b.generation;
  event();
  for (Warp& w : cta.warps)
    for (Group& g : w.groups) {
      const bool waits = g.stage == 1 && g.data == id &&
                         static_cast<Operation>(program_.code[static_cast<size_t>(g.pc)].operation) == Operation::bar;
      if (!waits) continue;
      if (options_.checks) acquire(w, g.mask, b.clock);
      record(w, g.pc, 2, -static_cast<i32>(id) - 1, b.generation);
      g.stage = 2;
    }
  if (options_.checks) std::fill(b.clock.begin(), b.clock.end(), 0);
}

/// Barriers that wait for everybody do not wait for lanes that have ended.
void Machine::leave_barriers(Warp& w, u32 mask) {
  settle_cluster_barrier(*w.cta->cluster);
  for (u32 id = 0; id < w.cta->named.size(); ++id) {
    NamedBarrier& b = w.cta->named[id];
    u32& present = b.present[static_cast<size_t>(w.index)];
    const bool over = (w.lanes_mask & ~w.exited) == 0;
    if (b.arrived == 0 || !(present || (b.everyone && over))) continue;
    const u32 counted = present ? mask & ~present : all_lanes;
    b.arrived += static_cast<u32>(std::popcount(counted));
    present |= counted;
    settle_named(*w.cta, id);
  }
}

/// A generation of the cluster barrier ends when every thread has arrived or ended.
void Machine::settle_cluster_barrier(Cluster& cluster) {
  u32 there = 0;
  bool arrived = false;
  for (const Cta& cta : cluster.ctas)
    for (const Warp& w : cta.warps) {
      there += static_cast<u32>(std::popcount((w.exited | w.cluster_arrived) & w.lanes_mask));
      arrived |= w.cluster_arrived != 0;
    }
  if (!arrived || there < cluster.barrier_expected) return;
  for (Cta& cta : cluster.ctas)
    for (Warp& w : cta.warps) w.cluster_arrived = 0;
  ++cluster.barrier_generation;
  cluster.barrier_completed = cluster.barrier_clock;
  event();
}

Step Machine::cluster_barrier(Warp& w, Group& g, const Instruction& in, u32 mask) {
  Cluster& cluster = *w.cta->cluster;
  if (in.attr[1] && !converged(w, g, in, mask, "aligned cluster barrier")) return Step::block;
  const auto unpaired = [&](const char* why) {
    if (!reported(Hazard::BARRIER_CLUSTER_BARRIER_UNPAIRED, g.pc, -1))
      hazard(Hazard::BARRIER_CLUSTER_BARRIER_UNPAIRED, Severity::error, &w, mask, g.pc, -1, "cluster barrier", why);
  };
  if (in.attr[0] == 0) {
    if (w.cluster_unpaired & mask) unpaired("a second arrival without a wait");
    w.cluster_target = cluster.barrier_generation + 1;
    if (options_.checks && !in.attr[2]) publish(w, mask, cluster.barrier_clock);
    if (in.attr[2])  // relaxed: it orders nothing but initialisations that were fenced
      for (Cta& cta : cluster.ctas)
        for (MBarrier& b : cta.barriers) {
          const u32 lane = b.init.slot - static_cast<u32>(w.clock_base);
          if (b.valid && b.fenced && !b.announced && lane < lanes && (mask >> lane & 1)) b.announced = w.cluster_target;
        }
    w.cluster_arrived |= mask, w.cluster_unpaired |= mask;
    event();
    settle_cluster_barrier(cluster);
    return Step::next;
  }
  if (mask & ~w.cluster_unpaired) {
    unpaired("a wait without an arrival");
    if (!(mask & w.cluster_unpaired)) return Step::next;
  }
  if (cluster.barrier_generation < w.cluster_target) return Step::block;
  w.cluster_unpaired &= ~mask, w.cluster_waited = w.cluster_target;
  if (options_.checks) acquire(w, mask, cluster.barrier_completed);
  return Step::next;
}

Step Machine::set_registers(Warp& w, Group& g, const Instruction& in, u32 mask) {
  const u32 wanted = static_cast<u32>(in.imm + in.bias);
  if (!converged(w, g, in, mask, "setmaxnreg")) return Step::block;
  const auto bad = [&](const std::string& why) {
    if (!reported(Hazard::REGISTERS_SETMAXNREG_BAD, g.pc, -1))
      hazard(Hazard::REGISTERS_SETMAXNREG_BAD, Severity::error, &w, mask, g.pc, -1, "registers", why);
  };
  if (wanted < 24 || wanted > 256 || wanted % 8)
    bad(std::to_string(wanted) + " registers; it must be a multiple of 8 from 24 to 256");
  const bool inc = in.attr[0];
  if (inc ? wanted < w.registers : wanted > w.registers)
    bad(std::string(inc ? "inc" : "dec") + " to " + std::to_string(wanted) + " from " + std::to_string(w.registers));
  if (!inc) {
    w.cta->pool += (w.registers - std::min(wanted, w.registers)) * lanes;
    w.registers = std::min(wanted, w.registers);
    event();
    return Step::next;
  }
  const u32 more = (wanted - std::min(wanted, w.registers)) * lanes;
  if (w.cta->pool < more) return Step::block;
  w.cta->pool -= more;
  w.registers = wanted;
  return Step::next;
}

}  // namespace cupyfa::emulator
