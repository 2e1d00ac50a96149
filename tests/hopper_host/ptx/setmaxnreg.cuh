#pragma once

namespace cupyfa::ptx {
template <int registers>
inline void setmaxnreg_dec() {
  request("setmaxnreg %d", registers);
}
template <int registers>
inline void setmaxnreg_inc() {
  request("setmaxnreg %d", registers);
}
}  // namespace cupyfa::ptx
