// What the machine has to say: hazards by name, each with the two places that meet, and the object that they meet at.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace cupyfa::emulator {

// clang-format off: the list is a table.

// The names are stable. In a name the first underscore-separated word is the group.
#define CUPYFA_HAZARDS(X) \
  X(SHARED_READ_OF_IN_FLIGHT_TMA_DATA) X(SHARED_READ_NOT_ORDERED_AFTER_WRITE) X(SHARED_WRITE_NOT_ORDERED_AFTER_WRITE) \
  X(SHARED_WRITE_TO_BUFFER_BEING_READ) X(SHARED_MISSING_PROXY_FENCE) X(SHARED_UNINITIALISED_READ) \
  X(SHARED_OUT_OF_BOUNDS) X(SHARED_MISALIGNED) X(SHARED_PEER_EXITED) \
  X(MBARRIER_NOT_INITIALISED) X(MBARRIER_INIT_NOT_VISIBLE) X(MBARRIER_INIT_NOT_FENCED) X(MBARRIER_REINIT) \
  X(MBARRIER_OVER_ARRIVAL) X(MBARRIER_TX_RANGE) X(MBARRIER_FLIP_WITH_TMA_IN_FLIGHT) \
  X(MBARRIER_TMA_COMPLETES_IN_LATER_PHASE) X(MBARRIER_PHASE_SKEW) X(MBARRIER_LEFT_MID_PHASE) X(MBARRIER_COUNT_RANGE) \
  X(BARRIER_COUNT_MISMATCH) X(BARRIER_LEFTOVER) X(BARRIER_ALIGNED_BARRIER_MULTI_SITE) X(BARRIER_ID_RANGE) \
  X(BARRIER_CLUSTER_BARRIER_UNPAIRED) \
  X(WARP_DIVERGENT_ALIGNED_OP) X(WARP_SHUFFLE_INACTIVE_LANE) X(WARP_NOT_UNIFORM) \
  X(WGMMA_REGISTER_READ_IN_FLIGHT) X(WGMMA_REGISTER_WRITE_IN_FLIGHT) X(WGMMA_MISSING_FENCE) X(WGMMA_BAD_DESCRIPTOR) \
  X(WGMMA_UNCOMMITTED_AT_EXIT) \
  X(TMEM_NOT_ALLOCATED) X(TMEM_UNINITIALISED_READ) X(TMEM_READ_OF_IN_FLIGHT_MMA) X(TMEM_READ_OF_UNFINISHED_STORE) \
  X(TMEM_OVERWRITE_WHILE_READ) X(TMEM_MISSING_FENCE) X(TMEM_DEALLOC_IN_USE) X(TMEM_ALLOC_AFTER_RELINQUISH) \
  X(TMEM_ALLOC_GROWS) X(TMEM_LANE_VIOLATION) X(TMEM_LEAK) X(TMEM_BAD_COLUMNS) X(TMEM_MIXED_CTA_GROUP) \
  X(TMEM_REGISTER_READ_BEFORE_WAIT) X(TMEM_BAD_DESCRIPTOR) X(TMEM_CROSS_ACCUMULATOR_ORDER) \
  X(BULK_EXIT_WITH_STORE_UNWAITED) X(BULK_EXIT_WITH_LOAD_IN_FLIGHT) X(BULK_BAD_TENSOR_MAP) \
  X(REGISTERS_SETMAXNREG_BAD) X(REGISTERS_POOL_DEADLOCK) \
  X(GRID_READ_BEFORE_GRIDDEP_WAIT) X(GRID_GLOBAL_OUT_OF_BOUNDS) X(GRID_GLOBAL_MISALIGNED) X(GRID_GLOBAL_READ_ONLY) \
  X(GRID_GLOBAL_UNINITIALISED_READ) \
  X(GRID_GLOBAL_RACE) X(GRID_CLC_AFTER_FAILURE) \
  X(PROGRESS_DEADLOCK) X(PROGRESS_TIMEOUT) X(PROGRESS_TRAP) X(PROGRESS_SLOTS_EXHAUSTED) \
  X(DECODE_UNSUPPORTED)

// clang-format on

enum class Hazard : uint8_t {
#define CUPYFA_NAME(name) name,
  CUPYFA_HAZARDS(CUPYFA_NAME)
#undef CUPYFA_NAME
      count
};

enum class Severity : uint8_t { information, review, error };

struct Finding {
  Hazard hazard;
  Severity severity;
  int32_t at;     ///< instruction where it was seen
  int32_t other;  ///< the instruction that it conflicts with, -1: none
  int32_t cta, warp;
  uint32_t lanes;
  std::string object, detail;
  uint64_t times;
};

/// Findings, each pair of places once.
class Report {
 public:
  void add(Hazard hazard, Severity severity, int32_t at, int32_t other, int32_t cta, int32_t warp, uint32_t lanes,
           std::string object, std::string detail) {
    auto [position, fresh] = index_.try_emplace({hazard, at, other}, findings_.size());
    if (!fresh) {
      ++findings_[position->second].times;
      return;
    }
    if (severity == Severity::error) ++errors_;
    findings_.push_back({hazard, severity, at, other, cta, warp, lanes, std::move(object), std::move(detail), 1});
  }
  bool known(Hazard hazard, int32_t at, int32_t other) {
    const auto position = index_.find({hazard, at, other});
    if (position == index_.end()) return false;
    ++findings_[position->second].times;
    return true;
  }
  const std::vector<Finding>& findings() const { return findings_; }
  int errors() const { return errors_; }

 private:
  std::vector<Finding> findings_;
  std::map<std::tuple<Hazard, int32_t, int32_t>, size_t> index_;
  int errors_ = 0;
};

}  // namespace cupyfa::emulator
