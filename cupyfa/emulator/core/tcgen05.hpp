// What the files of tcgen05 share: accesses to tensor memory, and how they are checked.
//
// Orders are proved as in shared memory (shadow.hpp), with two differences. A warp's tcgen05.ld and tcgen05.st are
// asynchronous: slots of the warp count those that a tcgen05.wait has covered. And the order between threads needs
// tcgen05.fence on both sides: a clock's section 2 has what stood in front of fence::before when it was published,
// section 3 what a fence::after has made visible to the thread.
#pragma once
#include "machine.hpp"

namespace cupyfa::emulator {

/// Cells of one CTA's tensor memory.
struct TmemRegion {
  Cta* cta;
  u32 column, columns;
  u8 quarters = 15;  ///< a bit for the 32 lanes of each warp
  u8 halves = 3;     ///< a bit for the lower and upper 16 lanes of each quarter
};

/// One access, and what its threads know.
struct TmemAccess {
  Warp& warp;
  u32 mask;
  i32 at;
  TmemCell::Kind kind = TmemCell::nothing;  ///< what it leaves, nothing: it only reads
  Stamp stamp{};
  const u32 *happens = nullptr, *published = nullptr, *visible = nullptr;
  u64 accumulator = 0;
};

/// The instructions of tcgen05, as parts of the machine.
struct Tcgen05 {
  Machine& m;
  // The last finding of this instruction: most of its cells have the same one.
  Hazard last_hazard = Hazard::count;
  i32 last_other = -1;

  // tmem.cpp
  Tmem& memory(Cta& cta);
  Cta* pair(Warp& w, u32 mask, i32 at, Cta& cta);
  bool group(Warp& w, u32 mask, i32 at, u8 group);
  bool usable(const TmemAccess& a, const TmemRegion& r);
  void know(TmemAccess& a, const std::vector<u32>& clock);
  void read(const TmemRegion& r, const TmemAccess& a);
  void write(const TmemRegion& r, const TmemAccess& a, bool accumulates);
  void mark_pending(const TmemRegion& r, int change);
  Step allocate(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step release(Warp& w, Group& g, const Instruction& in, u32 mask);
  void found(Hazard h, const TmemAccess& a, const TmemRegion& r, u32 column, u32 quarter, i32 other,
             const char* detail);
  void bad(Hazard h, Warp& w, u32 mask, i32 at, std::string object, std::string detail, i32 other = -1);

  // tmem_access.cpp
  Step load(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step store(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step wait(Warp& w, Group& g, const Instruction& in, u32 mask);
  Step fence(Warp& w, const Instruction& in, u32 mask);

  // tcgen05.cpp
  TcQueue& queue(Warp& w, int lane);
  void push(Warp& w, int lane, TcOperation&& op);
  void product(Warp& w, int lane, i32 at, const Instruction& in);
  void commit(Warp& w, int lane, i32 at, const Instruction& in);
  void copy(Warp& w, int lane, i32 at, const Instruction& in);
  void run_product(const TcOperation& op);
  void run_commit(const TcOperation& op);
  void run_copy(const TcOperation& op);

 private:
  void check_order(const Stamp& before, i32 other, const TmemAccess& a, const TmemRegion& r, u32 column, u32 quarter,
                   Hazard unordered, const char* detail);
  void check_writer(const TmemCell& c, const TmemAccess& a, const TmemRegion& r, u32 column, u32 quarter, bool reads);
  void note_order(const TmemAccess& a, i32 other);
  template <class F>
  Step transfer(Warp& w, Group& g, const Instruction& in, u32 mask, const i32* address, F f);
};

}  // namespace cupyfa::emulator
