// The choice of a vector unit.
#include "vector.hpp"

namespace cupyfa::emulator {

const VectorUnit& vector_unit_baseline();
#ifdef CUPYFA_X86_LEVELS
const VectorUnit& vector_unit_v3();
const VectorUnit& vector_unit_v4();
#endif

const VectorUnit& vector_unit() {
  static const VectorUnit& unit = [&]() -> const VectorUnit& {
#ifdef CUPYFA_X86_LEVELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
      return vector_unit_v4();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
      return vector_unit_v3();
#endif
    return vector_unit_baseline();
  }();
  return unit;
}

}  // namespace cupyfa::emulator
