// Lets a host compiler read the kernel's sources: the CUDA words mean nothing, and what a thread asks of the hardware is
// printed, one line each. Waits return at once: no role of the kernel lets its path depend on one.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __device__
#define __global__
#define __shared__
#define __constant__ static const
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Dim {
  unsigned x;
};
inline Dim threadIdx, blockIdx, gridDim;

inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
template <class T>
T __shfl_sync(unsigned, T value, int) {  // only lane 0 runs
  return value;
}
inline float __shfl_xor_sync(unsigned, float value, int) { return value; }
inline int __any_sync(unsigned, unsigned value) { return value != 0; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline void __syncthreads() { std::puts("cta_sync"); }
inline void __trap() {
  std::puts("trap");
  std::exit(1);
}

namespace cupyfa::hopper {
extern unsigned char shared_memory[];
}
inline const void* shared_window;
inline unsigned long long __cvta_generic_to_shared(const void* pointer) {
  return 1024 + (static_cast<const char*>(pointer) - static_cast<const char*>(shared_window));
}
