// The few types of the CUDA driver API that the launch layer needs, so that it builds without a CUDA toolkit. Names and
// layouts are those of cuda.h; tests/test_launch.py compares the sizes with the cuda-bindings package.
#ifndef CUPYFA_DRIVER_H
#define CUPYFA_DRIVER_H

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace cupyfa::driver {

using Result = int;  // CUresult
using Stream = void*;
using Function = void*;
using Context = void*;

constexpr unsigned cluster_dimension = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr unsigned programmatic_stream_serialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr int max_dynamic_shared_size_bytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int tensor_map_float16 = 6, tensor_map_float32 = 7, tensor_map_bfloat16 = 9;  // CU_TENSOR_MAP_DATA_TYPE_*
constexpr int tensor_map_interleave_none = 0;
constexpr int tensor_map_swizzle_none = 0, tensor_map_swizzle_32b = 1, tensor_map_swizzle_64b = 2;
constexpr int tensor_map_swizzle_128b = 3;
constexpr int tensor_map_l2_promotion_128b = 2, tensor_map_l2_promotion_256b = 3;
constexpr int tensor_map_oob_fill_zeros = 0;  // CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE

struct LaunchAttribute {
  unsigned id;
  char pad[4];
  union {
    char bytes[64];
    unsigned cluster[3];
    int flag;
  } value;
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute");
static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig");
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "CUtensorMap");

using GetErrorName = Result (*)(Result, const char**);
using CtxGetCurrent = Result (*)(Context*);
using CtxSetCurrent = Result (*)(Context);
using StreamIsCapturing = Result (*)(Stream, int*);
using StreamGetId = Result (*)(Stream, unsigned long long *);
using FuncSetAttribute = Result (*)(Function, int, int);
using LaunchKernelEx = Result (*)(const LaunchConfig*, Function, void**, void**);
using TensorMapEncodeTiled = Result (*)(TensorMap*, int, std::uint32_t, void*, const std::uint64_t*,
                                        const std::uint64_t*, const std::uint32_t*, const std::uint32_t*, int, int, int,
                                        int);

}  // namespace cupyfa::driver

#endif
