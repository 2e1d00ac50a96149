#pragma once

namespace cupyfa::ptx {
inline void bar_sync(int id, int threads) { request("bar_sync %d %d", id, threads); }
inline void bar_arrive(int id, int threads) { request("bar_arrive %d %d", id, threads); }
}  // namespace cupyfa::ptx
