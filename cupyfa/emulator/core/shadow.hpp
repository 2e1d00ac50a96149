// Shared memory's shadow: who wrote and who reads each 16-byte granule, against vector clocks.
//
// An access is stamped (slot, epoch): the slot of the accessing thread, or of what proves an asynchronous access
// complete (an mbarrier's phase, a warpgroup's wgmma group, a thread's bulk group). A later access is ordered after it if
// the later one's clock has reached that epoch in that slot. A granule is split into bytes at the first access that does
// not cover it, so that footprints are exact, and becomes one again when a later write covers it. Global memory that CTAs
// synchronise by has one as well.
#pragma once
#include <algorithm>
#include <array>
#include <memory>
#include <unordered_map>
#include <vector>

#include "report.hpp"

namespace cupyfa::emulator {

struct Stamp {
  uint32_t slot = 0, epoch = 0;  ///< epoch 0: never
  uint32_t span = 1;  ///< slots in a row that must all have reached the epoch
};

inline bool reached(const uint32_t* clock, const Stamp& s) {
  for (uint32_t i = 0; i < s.span; ++i)
    if (clock[s.slot + i] < s.epoch) return false;
  return true;
}

/// Strong accesses name the threads among which they may meet without a race.
enum Strength : uint8_t { weak, strong_in_cta, strong_in_cluster, strong_in_gpu };

/// One access, and what its thread knows.
struct Access {
  Stamp stamp;
  bool async;  ///< by the async proxy
  const uint32_t* happens;  ///< happens-before clock of the issuing thread
  const uint32_t* fenced;  ///< generic accesses that the async proxy may rely on
  int32_t at;  ///< instruction
  Strength strength = weak;
  uint32_t home = 0;  ///< number of its cluster << 5 | rank of its CTA
  bool review = false;  ///< also report what sources disagree on
};

struct Conflict {
  Hazard hazard;
  int32_t other;
  bool review = false;
};

class Shadow {
 public:
  /// `initialised`: memory that has values from the start.
  explicit Shadow(uint32_t bytes, bool initialised = false)
      : pages_(bytes / 16 / page_granules + 1), initialised_(initialised) {}

  /// Calls found(Conflict) for every conflict of the read of [begin, end).
  template <class F>
  void read(uint32_t begin, uint32_t end, const Access& a, F found) {
    each(begin, end, false, [&](Cell& cell) { read_cell(cell, a, found); });
  }
  template <class F>
  void write(uint32_t begin, uint32_t end, const Access& a, F found) {
    each(begin, end, true, [&](Cell& cell) { write_cell(cell, a, found); });
  }
  /// A read and a write in one: an atomic, or a reduction by the async proxy.
  template <class F>
  void update(uint32_t begin, uint32_t end, const Access& a, F found) {
    each(begin, end, true, [&](Cell& cell) {
      if (!cell.written && !initialised_) found(Conflict{Hazard::SHARED_UNINITIALISED_READ, -1});
      write_cell(cell, a, found);
    });
  }
  /// What an instruction that is not an access leaves: initialised memory that nobody uses.
  void clear(uint32_t begin, uint32_t end) {
    each(begin, end, true, [](Cell& cell) { cell = Cell(); });
  }

 private:
  struct Past {
    Stamp stamp;
    int32_t at = -1;
    uint32_t home = 0;
    bool async = false;
    Strength strength = weak;

    Past() = default;
    explicit Past(const Access& a) : stamp(a.stamp), at(a.at), home(a.home), async(a.async), strength(a.strength) {}
  };
  using List = std::unique_ptr<std::vector<Past>>;
  struct Cell {
    Past writer;
    bool written = false;
    uint8_t readers = 0;
    std::array<Past, 3> reader;
    List more;  ///< readers
    List beside;  ///< strong writers that nothing orders with `writer`

    Cell() = default;
    Cell(const Cell& o) { *this = o; }
    Cell& operator=(const Cell& o) {
      writer = o.writer, written = o.written, readers = o.readers, reader = o.reader;
      more = o.more ? std::make_unique<std::vector<Past>>(*o.more) : nullptr;
      beside = o.beside ? std::make_unique<std::vector<Past>>(*o.beside) : nullptr;
      return *this;
    }
  };
  struct Granule {
    Cell cell;
    std::unique_ptr<std::array<Cell, 16>> bytes;
  };

  /// A workspace is large, and each CTA has a shadow of all of it, of which it touches little.
  static constexpr uint32_t page_granules = 256;
  using Page = std::array<Granule, page_granules>;

  template <class F>
  void each(uint32_t begin, uint32_t end, bool merge, F f) {
    for (uint32_t g = begin / 16; 16 * g < end; ++g) {
      std::unique_ptr<Page>& page = pages_[g / page_granules];
      if (!page) page = std::make_unique<Page>();
      Granule& granule = (*page)[g % page_granules];
      const uint32_t from = std::max(begin, 16 * g) - 16 * g, to = std::min(end, 16 * g + 16) - 16 * g;
      if (!granule.bytes) {
        if (to - from == 16) {
          f(granule.cell);
          continue;
        }
        granule.bytes = std::make_unique<std::array<Cell, 16>>();
        granule.bytes->fill(granule.cell);
      }
      for (uint32_t i = from; i < to; ++i) f((*granule.bytes)[i]);
      if (merge && to - from == 16) {  // after a write all bytes are equal
        granule.cell = granule.bytes->front();
        granule.bytes.reset();
      }
    }
  }

  /// Two strong accesses of one proxy race only if one of them does not know the other's threads.
  static bool both_strong(const Past& p, const Access& a) {
    const Strength s = std::min(p.strength, a.strength);
    return s != weak && p.async == a.async &&
           (s == strong_in_gpu || (s == strong_in_cluster && p.home >> 5 == a.home >> 5) || p.home == a.home);
  }
  static bool same_thread(const Past& p, const Access& a) {
    return p.stamp.slot == a.stamp.slot && !a.async && !p.async;
  }

  template <class F>
  static void after_writer(const Past& writer, const Access& a, Hazard unordered, F found) {
    if (same_thread(writer, a) || both_strong(writer, a)) return;
    const bool same =
        writer.async && a.async && writer.stamp.slot == a.stamp.slot && writer.stamp.epoch == a.stamp.epoch;
    if (same) return;  // pieces of one phase, each reported on its own if they overlap wrongly in value
    if (!reached(a.happens, writer.stamp) && !(a.async && !writer.async && reached(a.fenced, writer.stamp))) {
      // An issuer knows its own generic writes without a clock; the async proxy does not.
      found(Conflict{unordered, writer.at});
    } else if (a.async && !writer.async && !reached(a.fenced, writer.stamp)) {
      found(Conflict{Hazard::SHARED_MISSING_PROXY_FENCE, writer.at});
    }
  }

  template <class F>
  void read_cell(Cell& cell, const Access& a, F found) {
    if (cell.written) {
      const auto unordered = [](const Past& writer) {
        return writer.async ? Hazard::SHARED_READ_OF_IN_FLIGHT_TMA_DATA : Hazard::SHARED_READ_NOT_ORDERED_AFTER_WRITE;
      };
      after_writer(cell.writer, a, unordered(cell.writer), found);
      if (cell.beside)
        for (const Past& p : *cell.beside) after_writer(p, a, unordered(p), found);
    } else if (!initialised_) {
      found(Conflict{Hazard::SHARED_UNINITIALISED_READ, -1});
      return;
    }
    for (int i = 0; i < cell.readers; ++i) {
      Past& r = cell.reader[i];
      if (r.stamp.slot == a.stamp.slot && r.async == a.async && r.strength == a.strength) {
        if (r.stamp.epoch < a.stamp.epoch) r = Past(a);
        return;
      }
    }
    // A reader that this one is ordered after needs no entry: whoever is ordered after this one is ordered after it.
    for (int i = 0; i < cell.readers; ++i) {
      if (a.strength <= cell.reader[i].strength && reached(a.happens, cell.reader[i].stamp)) {
        cell.reader[i] = Past(a);
        return;
      }
    }
    if (cell.readers < 3) {
      cell.reader[cell.readers++] = Past(a);
      return;
    }
    if (!cell.more) cell.more = std::make_unique<std::vector<Past>>();
    for (Past& r : *cell.more) {
      const bool same = r.stamp.slot == a.stamp.slot && r.async == a.async;
      if (a.strength <= r.strength && (same || reached(a.happens, r.stamp))) {
        r = Past(a);
        return;
      }
    }
    cell.more->push_back(Past(a));
  }

  template <class F>
  static void after_reader(const Past& r, const Access& a, F found) {
    if (same_thread(r, a) || both_strong(r, a)) return;
    if (!reached(a.happens, r.stamp)) {
      found(Conflict{Hazard::SHARED_WRITE_TO_BUFFER_BEING_READ, r.at});
    } else if (a.review && a.async && !r.async && !reached(a.fenced, r.stamp)) {
      found(Conflict{Hazard::SHARED_MISSING_PROXY_FENCE, r.at, true});
    }
  }

  template <class F>
  void write_cell(Cell& cell, const Access& a, F found) {
    const auto stays = [&](const Past& p) {
      return both_strong(p, a) && !same_thread(p, a) && !reached(a.happens, p.stamp);
    };
    if (cell.written) after_writer(cell.writer, a, Hazard::SHARED_WRITE_NOT_ORDERED_AFTER_WRITE, found);
    if (cell.beside) {
      for (const Past& p : *cell.beside) after_writer(p, a, Hazard::SHARED_WRITE_NOT_ORDERED_AFTER_WRITE, found);
      std::erase_if(*cell.beside, [&](const Past& p) { return !stays(p) || p.stamp.slot == a.stamp.slot; });
    }
    if (cell.written && stays(cell.writer) && cell.writer.stamp.slot != a.stamp.slot) {
      if (!cell.beside) cell.beside = std::make_unique<std::vector<Past>>();
      cell.beside->push_back(cell.writer);
    }
    for (int i = 0; i < cell.readers; ++i) after_reader(cell.reader[i], a, found);
    if (cell.more)
      for (const Past& r : *cell.more) after_reader(r, a, found);
    cell.writer = Past(a);
    cell.written = true;
    cell.readers = 0;
    cell.more.reset();
  }

  std::vector<std::unique_ptr<Page>> pages_;  ///< null: nobody was there
  bool initialised_ = false;
};

}  // namespace cupyfa::emulator
