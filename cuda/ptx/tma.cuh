// Tensor copies by the Tensor Memory Accelerator (PTX ISA, "cp.async.bulk.tensor"). Coordinates are innermost first.
#pragma once
#include "params.h"
#include "ptx/types.cuh"

namespace cupyfa::ptx {

__device__ inline void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Global to shared; completion adds the box's bytes (clipped parts included) to the mbarrier's transaction count.
__device__ inline void cp_async_bulk_tensor_4d_load(SharedAddress destination, const TensorMap& map, int c0, int c1,
                                                    int c2, int c3, SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(destination),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

__device__ inline void cp_async_bulk_tensor_5d_load(SharedAddress destination, const TensorMap& map, int c0, int c1,
                                                    int c2, int c3, int c4, SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], [%7];" ::"r"(destination),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
}

/// Plain bytes, a multiple of 16 of them, global to shared; completion as above.
__device__ inline void cp_async_bulk_load(SharedAddress destination, const void* source, u32 bytes,
                                          SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

/// Shared to global; parts of the box outside the tensor are not written. Completion by the issuer's bulk groups.
__device__ inline void cp_async_bulk_tensor_4d_store(const TensorMap& map, int c0, int c1, int c2, int c3,
                                                     SharedAddress source) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(source)
               : "memory");
}

__device__ inline void cp_async_bulk_tensor_5d_store(const TensorMap& map, int c0, int c1, int c2, int c3, int c4,
                                                     SharedAddress source) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(source)
      : "memory");
}

/// Adds floats in shared memory to floats in global memory, each by itself; a multiple of 16 bytes. Completion by the
/// issuer's bulk groups.
__device__ inline void cp_reduce_async_bulk_add_f32(float* destination, SharedAddress source, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

__device__ inline void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until at most `pending` of this thread's bulk groups still read their shared-memory source.
template <int pending>
__device__ inline void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

/// Waits until at most `pending` of this thread's bulk groups are under way: what the others write is in memory.
template <int pending>
__device__ inline void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace cupyfa::ptx
