// The choice of a vector unit: the best one that the processor has, or the one that CUPYFA_EMULATOR_LEVEL names.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "vector.hpp"

namespace cupyfa::emulator {

const VectorUnit& vector_unit_baseline();
#ifdef CUPYFA_X86_LEVELS
const VectorUnit& vector_unit_v3();
const VectorUnit& vector_unit_v4();
#endif

namespace {

struct Level {
  const char* name;
  const VectorUnit& (*unit)();
  bool supported;
};

const VectorUnit& choose() {
#ifdef CUPYFA_X86_LEVELS
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512cd");
#endif
  const Level levels[] = {
#ifdef CUPYFA_X86_LEVELS
      {"v4", vector_unit_v4, v4},
      {"v3", vector_unit_v3, v3},
#endif
      {"baseline", vector_unit_baseline, true},
  };
  const char* wanted = std::getenv("CUPYFA_EMULATOR_LEVEL");
  for (const Level& level : levels)
    if (level.supported && (!wanted || !*wanted || std::string(wanted) == level.name)) return level.unit();
  throw std::runtime_error(std::string("CUPYFA_EMULATOR_LEVEL is ") + wanted +
                           ", which this processor or build does not have");
}

}  // namespace

const VectorUnit& vector_unit() {
  static const VectorUnit& unit = choose();
  return unit;
}

}  // namespace cupyfa::emulator
