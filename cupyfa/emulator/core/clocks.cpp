// Vector clocks of warps. Lanes share a clock while they have learned the same (LaneClock); a wait by some of them splits
// it, __syncwarp joins it again.
#include "machine.hpp"

namespace cupyfa::emulator {

namespace {
constexpr int happens = 0, fenced = 1, tc_visible = 3;
}

u32 Machine::new_slot(u32 span) {
  if (next_slot_ + span > slot_limit_) {
    report.add(Hazard::PROGRESS_SLOTS_EXHAUSTED, Severity::error, -1, -1, -1, -1, 0, "clock slots",
               "the run needs more than " + std::to_string(options_.slots) + " asynchronous slots: raise slots=");
    throw Stopped();
  }
  const u32 slot = next_slot_;
  next_slot_ += span;
  return slot;
}

LaneClock& Machine::own_clock(Warp& w, u32 mask) {
  for (LaneClock& c : w.clocks)
    if (c.mask & mask) return c;
  return w.clocks.front();
}

/// What all lanes of the mask know.
const std::vector<u32>& Machine::knowledge(Warp& w, u32 mask) {
  const std::vector<u32>* only = nullptr;
  bool many = false;
  for (LaneClock& c : w.clocks) {
    if (!(c.mask & mask)) continue;
    if (!only) {
      only = &c.v;
    } else {
      if (!many) scratch_ = *only;
      many = true;
      unit_.meet(scratch_.data(), c.v.data(), static_cast<int>(c.v.size()));
    }
  }
  return many ? scratch_ : *only;
}

/// A release by the lanes of the mask: their knowledge and their own accesses so far.
void Machine::publish(Warp& w, u32 mask, std::vector<u32>& into) {
  const int published = static_cast<int>(width_ * (sections_ > 2 ? 3 : 2));
  for (LaneClock& c : w.clocks)
    if (c.mask & mask) unit_.join(into.data(), c.v.data(), published);
  for (int l = 0; l < lanes; ++l)
    if (mask >> l & 1) into[w.clock_base + l] = std::max(into[w.clock_base + l], w.epoch);
  ++w.epoch;
}

void Machine::acquire(Warp& w, u32 mask, const std::vector<u32>& from) {
  const int published = static_cast<int>(width_ * (sections_ > 2 ? 3 : 2));
  for (size_t i = 0, n = w.clocks.size(); i < n; ++i) {
    const u32 both = w.clocks[i].mask & mask;
    if (!both) continue;
    if (both != w.clocks[i].mask) {
      w.clocks.push_back({both, w.clocks[i].v});
      w.clocks[i].mask &= ~both;
      unit_.join(w.clocks.back().v.data(), from.data(), published);
    } else {
      unit_.join(w.clocks[i].v.data(), from.data(), published);
    }
  }
}

/// The lanes have seen that `slot` reached `epoch`.
void Machine::learn(Warp& w, u32 mask, u32 slot, u32 epoch, bool tc) {
  for (size_t i = 0, n = w.clocks.size(); i < n; ++i) {
    const u32 both = w.clocks[i].mask & mask;
    if (!both) continue;
    LaneClock* c = &w.clocks[i];
    if (section(c->v, happens)[slot] >= epoch && !tc) continue;
    if (both != c->mask) {
      w.clocks.push_back({both, w.clocks[i].v});
      w.clocks[i].mask &= ~both;
      c = &w.clocks.back();
    }
    u32& known = section(c->v, happens)[slot];
    known = std::max(known, epoch);
    if (tc && sections_ > 2) {
      u32& visible = section(c->v, tc_visible)[slot];
      visible = std::max(visible, epoch);
    }
  }
}

/// The lanes of the mask wait for one another, with memory ordering.
void Machine::sync_lanes(Warp& w, u32 mask) {
  if (!options_.checks) return;
  LaneClock joined{0, {}};
  for (size_t i = 0; i < w.clocks.size();) {
    LaneClock& c = w.clocks[i];
    const u32 both = c.mask & mask;
    if (!both) {
      ++i;
      continue;
    }
    if (joined.v.empty()) {
      joined.v = c.v;
    } else {
      unit_.join(joined.v.data(), c.v.data(), static_cast<int>(c.v.size()));
    }
    joined.mask |= both;
    c.mask &= ~both;
    if (c.mask == 0) {
      if (i + 1 != w.clocks.size()) w.clocks[i] = std::move(w.clocks.back());
      w.clocks.pop_back();
    } else {
      ++i;
    }
  }
  for (int l = 0; l < lanes; ++l)
    if (joined.mask >> l & 1) joined.v[w.clock_base + l] = w.epoch;
  ++w.epoch;
  w.clocks.push_back(std::move(joined));
}

/// fence.proxy.async: what each lane knows of generic accesses, its own included, holds for the async proxy. The lanes part,
/// because none learns that another one has fenced.
void Machine::fence_proxy(Warp& w, u32 mask) {
  if (!options_.checks) return;
  std::vector<LaneClock> clocks;
  for (LaneClock& c : w.clocks) {
    const u32 both = c.mask & mask;
    for (int l = 0; l < lanes; ++l) {
      if (!(both >> l & 1)) continue;
      clocks.push_back({1u << l, c.v});
      std::vector<u32>& v = clocks.back().v;
      unit_.join(section(v, fenced), section(v, happens), static_cast<int>(width_));
      section(v, fenced)[w.clock_base + l] = w.epoch;
    }
    c.mask &= ~both;
    if (c.mask) clocks.push_back(std::move(c));
  }
  w.clocks = std::move(clocks);
  ++w.epoch;
}

}  // namespace cupyfa::emulator
