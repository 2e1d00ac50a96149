// The gradient of the learnable logits: the parts that the preprocess kernel has left for each head, in a fixed order.
#include "bwd_params.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/types.cuh"

namespace cupyfa {

constexpr int sink_threads = 32;

/// A warp has a head. Lane l adds the parts l, l + 32 and so on, over all batches; then the lanes are added.
__global__ void __launch_bounds__(sink_threads) sum_sink(const __grid_constant__ SinkParams p) {
  ptx::griddepcontrol_wait();  // proves the parts
  float sum = 0.f;
  for (int batch = 0; batch < p.batch; ++batch) {
    const float* parts = p.parts + (u64(batch) * gridDim.x + blockIdx.x) * p.parts_head;
    for (int part = threadIdx.x; part < p.parts_head; part += sink_threads) sum += parts[part];
  }
  for (int distance = sink_threads / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  if (threadIdx.x == 0) p.dsink[blockIdx.x * p.dsink_stride] = sum;
}

__constant__ KernelTraits sink_traits = {.threads = sink_threads, .cluster_size = 1};

}  // namespace cupyfa
