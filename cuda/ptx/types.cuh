// Short names for the integer types that PTX registers and addresses have.
#pragma once

namespace cupyfa {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using SharedAddress = u32;  ///< an address in the .shared::cta window, in bytes

}  // namespace cupyfa
