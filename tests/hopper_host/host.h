// Lets a host compiler read the kernel's sources: the CUDA words mean nothing, and a thread that asks something of the
// hardware is suspended there. The test plays the hardware, and lets the thread go on when it has what it asked for.
#pragma once
#include <cmath>
#include <cstdarg>
#include <cstdio>
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
static Dim threadIdx, blockIdx, gridDim;

/// Suspends the running thread with a request: a word and its numbers, as printf writes them.
void request(const char* format, ...);

static int min(int a, int b) { return a < b ? a : b; }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
template <class T>
T __shfl_sync(unsigned, T value, int) {  // only lane 0 runs
  return value;
}
static float __shfl_xor_sync(unsigned, float value, int) { return value; }
static unsigned __reduce_or_sync(unsigned, unsigned value) { return value; }
static int __all_sync(unsigned, int value) { return value; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
static unsigned atomicAdd(unsigned* address, unsigned value) { return (*address += value) - value; }
static void __syncwarp() {}
static void __syncthreads() { request("cta_sync"); }
static void __trap() { request("trap"); }

namespace cupyfa::hopper {
extern unsigned char shared_memory[];
}
static unsigned long long __cvta_generic_to_shared(const void* pointer) {
  return 1024 + (static_cast<const unsigned char*>(pointer) - cupyfa::hopper::shared_memory);
}
