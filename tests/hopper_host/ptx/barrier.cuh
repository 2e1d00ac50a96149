#pragma once

namespace cupyfa::ptx {
inline void bar_sync(int id, int threads) { std::printf("bar_sync %d %d\n", id, threads); }
inline void bar_arrive(int id, int threads) { std::printf("bar_arrive %d %d\n", id, threads); }
}  // namespace cupyfa::ptx
