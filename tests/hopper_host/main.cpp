// Runs lane 0 of each warp of one CTA through the kernel and prints what it asks for. SPECS is a list of X(spec).
#include "host.h"

#include "hopper/fwd.cu"

namespace cupyfa::hopper {
alignas(1024) unsigned char shared_memory[256 * 1024];

template <FwdSpec S>
void trace(const FwdParams& p) {
  shared_window = shared_memory;
  const auto& storage = *reinterpret_cast<Storage<S>*>(shared_memory);
  const auto where = [](const void* member) { return shared_address(member); };
  std::printf("layout %u %u %u %u %u %u %zu\n", where(storage.q), where(storage.k), where(storage.v),
              where(&storage.q_barriers), where(&storage.k_barriers), where(&storage.v_barriers), sizeof(Storage<S>));
  std::printf("chunks");
  for (int i = 0; i < 16 * 8; ++i) std::printf(" %u", swizzled_chunk(1024, i / 8, i % 8));
  std::puts("");
  for (int thread = 0; thread < S.threads(); thread += thread ? 32 : 128) {
    threadIdx.x = thread;
    std::printf("agent %d\n", thread);
    forward<S>(p);
  }
}
}  // namespace cupyfa::hopper

int main(int argc, char** argv) {
  using namespace cupyfa;
  if (argc != 7) return 2;
  const auto number = [&](int i) { return unsigned(std::atoi(argv[i])); };
  FwdParams p = {};
  p.q.opaque[0] = 'Q';
  p.k.opaque[0] = 'K';
  p.v.opaque[0] = 'V';
  p.seqlen_q = number(2);
  p.seqlen_k = number(3);
  p.heads_q = p.heads_total = number(4);
  p.heads_per_kv = number(5);
  p.tiles_m = number(6);
  p.tiles = p.heads_total * p.tiles_m;
  p.heads_per_section = 1;
  p.scale_log2 = 1;
  gridDim.x = 1;
  int chosen = std::atoi(argv[1]);
#define X(...) \
  if (chosen-- == 0) hopper::trace<__VA_ARGS__>(p);
  SPECS
}
