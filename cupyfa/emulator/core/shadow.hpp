// Shared memory's shadow: who wrote and who reads each 16-byte granule, against vector clocks.
//
// An access is stamped (slot, epoch): the slot of the accessing thread, or of what proves an asynchronous access
// complete (an mbarrier's phase, a warpgroup's wgmma group, a thread's bulk group). A later access is ordered after it if
// the later one's clock has reached that epoch in that slot. A granule is split into bytes at the first access that does
// not cover it, so that footprints are exact, and becomes one again when a later write covers it.
#pragma once
#include <array>
#include <memory>
#include <unordered_map>
#include <vector>

#include "report.hpp"

namespace cupyfa::emulator {

struct Stamp {
  uint32_t slot = 0, epoch = 0;  ///< epoch 0: never
  uint32_t span = 1;             ///< slots in a row that must all have reached the epoch
};

inline bool reached(const uint32_t* clock, const Stamp& s) {
  for (uint32_t i = 0; i < s.span; ++i)
    if (clock[s.slot + i] < s.epoch) return false;
  return true;
}

/// One access, and what its thread knows.
struct Access {
  Stamp stamp;
  bool async;              ///< by the async proxy
  const uint32_t* happens; ///< happens-before clock of the issuing thread
  const uint32_t* fenced;  ///< generic accesses that the async proxy may rely on
  int32_t at;              ///< instruction
};

struct Conflict {
  Hazard hazard;
  int32_t other;
};

class Shadow {
 public:
  explicit Shadow(uint32_t bytes) : granules_(bytes / 16 + 1) {}

  /// Calls found(Conflict) for every conflict of the read of [begin, end).
  template <class F>
  void read(uint32_t begin, uint32_t end, const Access& a, F found) {
    each(begin, end, false, [&](Cell& cell) { read_cell(cell, a, found); });
  }
  template <class F>
  void write(uint32_t begin, uint32_t end, const Access& a, F found) {
    each(begin, end, true, [&](Cell& cell) { write_cell(cell, a, found); });
  }
  /// What an instruction that is not an access leaves: initialised memory that nobody uses.
  void clear(uint32_t begin, uint32_t end) {
    each(begin, end, true, [](Cell& cell) { cell = Cell(); });
  }

 private:
  struct Reader {
    Stamp stamp;
    int32_t at;
    bool async;
  };
  struct Cell {
    Stamp writer;
    int32_t writer_at = -1;
    bool written = false, writer_async = false;
    uint8_t readers = 0;
    std::array<Reader, 3> reader;
    std::unique_ptr<std::vector<Reader>> more;

    Cell() = default;
    Cell(const Cell& o) { *this = o; }
    Cell& operator=(const Cell& o) {
      writer = o.writer, writer_at = o.writer_at, written = o.written, writer_async = o.writer_async;
      readers = o.readers, reader = o.reader;
      more = o.more ? std::make_unique<std::vector<Reader>>(*o.more) : nullptr;
      return *this;
    }
  };
  struct Granule {
    Cell cell;
    std::unique_ptr<std::array<Cell, 16>> bytes;
  };

  template <class F>
  void each(uint32_t begin, uint32_t end, bool merge, F f) {
    for (uint32_t g = begin / 16; 16 * g < end; ++g) {
      Granule& granule = granules_[g];
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

  template <class F>
  static bool after_writer(const Cell& cell, const Access& a, Hazard unordered, F found) {
    if (!cell.written) return true;
    if (cell.writer.slot == a.stamp.slot && !a.async && !cell.writer_async) return true;  // the same thread
    const bool same = cell.writer_async && a.async && cell.writer.slot == a.stamp.slot &&
                      cell.writer.epoch == a.stamp.epoch;
    if (same) return true;  // pieces of one phase, each reported on its own if they overlap wrongly in value
    if (!reached(a.happens, cell.writer) && !(a.async && !cell.writer_async && reached(a.fenced, cell.writer))) {
      // An issuer knows its own generic writes without a clock; the async proxy does not.
      found(Conflict{unordered, cell.writer_at});
      return false;
    }
    if (a.async && !cell.writer_async && !reached(a.fenced, cell.writer)) {
      found(Conflict{Hazard::SHARED_MISSING_PROXY_FENCE, cell.writer_at});
      return false;
    }
    return true;
  }

  template <class F>
  void read_cell(Cell& cell, const Access& a, F found) {
    if (!cell.written) {
      found(Conflict{Hazard::SHARED_UNINITIALISED_READ, -1});
      return;
    }
    after_writer(cell, a, Hazard::SHARED_READ_NOT_ORDERED_AFTER_WRITE, found);
    for (int i = 0; i < cell.readers; ++i) {
      Reader& r = cell.reader[i];
      if (r.stamp.slot == a.stamp.slot && r.async == a.async) {
        if (r.stamp.epoch < a.stamp.epoch) r.stamp = a.stamp, r.at = a.at;
        return;
      }
    }
    // A reader that this one is ordered after needs no entry: whoever is ordered after this one is ordered after it.
    for (int i = 0; i < cell.readers; ++i) {
      if (reached(a.happens, cell.reader[i].stamp)) {
        cell.reader[i] = {a.stamp, a.at, a.async};
        return;
      }
    }
    if (cell.readers < 3) {
      cell.reader[cell.readers++] = {a.stamp, a.at, a.async};
      return;
    }
    if (!cell.more) cell.more = std::make_unique<std::vector<Reader>>();
    for (Reader& r : *cell.more) {
      if ((r.stamp.slot == a.stamp.slot && r.async == a.async) || reached(a.happens, r.stamp)) {
        r = {a.stamp, a.at, a.async};
        return;
      }
    }
    cell.more->push_back({a.stamp, a.at, a.async});
  }

  template <class F>
  static void after_reader(const Reader& r, const Access& a, F found) {
    if (r.stamp.slot == a.stamp.slot && !a.async && !r.async) return;
    if (!reached(a.happens, r.stamp)) found(Conflict{Hazard::SHARED_WRITE_TO_BUFFER_BEING_READ, r.at});
  }

  template <class F>
  void write_cell(Cell& cell, const Access& a, F found) {
    after_writer(cell, a, Hazard::SHARED_WRITE_NOT_ORDERED_AFTER_WRITE, found);
    for (int i = 0; i < cell.readers; ++i) after_reader(cell.reader[i], a, found);
    if (cell.more)
      for (const Reader& r : *cell.more) after_reader(r, a, found);
    cell.writer = a.stamp;
    cell.writer_at = a.at;
    cell.writer_async = a.async;
    cell.written = true;
    cell.readers = 0;
    cell.more.reset();
  }

  std::vector<Granule> granules_;
};

}  // namespace cupyfa::emulator
