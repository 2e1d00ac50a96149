#pragma once

namespace cupyfa::ptx {
template <int registers>
inline void setmaxnreg_dec() {
  std::printf("setmaxnreg %d\n", registers);
}
template <int registers>
inline void setmaxnreg_inc() {
  std::printf("setmaxnreg %d\n", registers);
}
}  // namespace cupyfa::ptx
