// Fences between the generic proxy (ld, st, stmatrix) and the async proxy (TMA, WGMMA operands).
#pragma once

namespace cupyfa::ptx {

/// Orders this thread's earlier shared-memory writes before later accesses by the async proxy. Every writing thread
/// must execute it, before the barrier that hands the data over. The unqualified form would also fence global memory.
__device__ inline void fence_proxy_async_shared_cta() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// The same of global memory, in both directions.
__device__ inline void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace cupyfa::ptx
