// A launch of the kernel on the host. Lane 0 of each warp that has a role is a coroutine: `resume` runs it up to its next
// request. SPECS is a list of X(spec).
#include "host.h"

#include <ucontext.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "hopper/fwd.cu"

namespace cupyfa::hopper {
alignas(1024) unsigned char shared_memory[256 * 1024];  // of the CTA that runs

struct Kernel {
  void (*run)(FwdParams);
  unsigned layout[9];  // addresses of the members of Storage, and its size
  void* tiles;  // what threads read and write in shared memory themselves; all else only has addresses
  size_t tiles_bytes;
};

template <FwdSpec S>
Kernel kernel() {
  auto& storage = *reinterpret_cast<Storage<S>*>(shared_memory);
  const auto at = [](const void* member) { return shared_address(member); };
  return {forward<S>,
          {at(storage.qo), at(storage.k), at(storage.v), at(storage.tiles), at(&storage.work_barriers),
           at(storage.work_barriers.staged), at(&storage.k_barriers), at(&storage.v_barriers), sizeof(Storage<S>)},
          storage.tiles,
          sizeof(storage.tiles)};
}

#define X(...) kernel<__VA_ARGS__>(),
static const Kernel kernels[] = {SPECS};
#undef X

struct Thread {
  ucontext_t context;
  char request[96];
  char stack[256 * 1024];
};

static ucontext_t machine;
static Kernel launched;
static FwdParams params;
static const float of_all_heads = 1;
static std::map<std::pair<int, int>, std::unique_ptr<Thread>> threads;  // by CTA and number
static std::map<int, std::vector<unsigned char>> tiles;  // by CTA
static Thread* running;

static void enter() {
  launched.run(params);
  std::strcpy(running->request, "exit");
}
}  // namespace cupyfa::hopper

void request(const char* format, ...) {
  using namespace cupyfa::hopper;
  std::va_list numbers;
  va_start(numbers, format);
  std::vsnprintf(running->request, sizeof(running->request), format, numbers);
  va_end(numbers);
  swapcontext(&running->context, &machine);
}

extern "C" {

const unsigned* layout(int spec) { return cupyfa::hopper::kernels[spec].layout; }

unsigned chunk_address(unsigned panel, int row, int chunk) { return cupyfa::swizzled_chunk(panel, row, chunk); }

/// Prepares a launch; what is left of the one before is forgotten.
void launch(int spec, unsigned ctas, const int* numbers, unsigned* tile_counter, float* lse) {
  using namespace cupyfa::hopper;
  launched = kernels[spec];
  params = {};
  params.q.opaque[0] = 'Q';
  params.k.opaque[0] = 'K';
  params.v.opaque[0] = 'V';
  params.o.opaque[0] = 'O';
  params.seqlen_q = numbers[0];
  params.seqlen_k = numbers[1];
  params.heads_q = numbers[2];
  params.heads_per_kv = numbers[3];
  params.heads_total = numbers[2] * numbers[4];
  params.heads_per_section = numbers[5];
  params.tiles_m = numbers[6];
  params.tiles = params.heads_total * params.tiles_m;
  params.last_diagonal = numbers[7];
  params.first_diagonal = numbers[8];
  params.scale_log2 = params.softcap_slope = 1;
  params.sink = params.alibi_slopes = &of_all_heads;
  params.tile_counter = tile_counter;
  params.lse = lse;
  params.lse_stride_row = 1;
  params.lse_stride_head = params.seqlen_q;
  params.lse_stride_batch = params.heads_q * params.lse_stride_head;
  gridDim.x = ctas;
  threads.clear();
  tiles.clear();
}

/// Runs a thread up to its next request, and returns that; "exit" is the last one.
const char* resume(int cta, int number) {
  using namespace cupyfa::hopper;
  auto& thread = threads[{cta, number}];
  if (!thread) {
    thread = std::make_unique<Thread>();
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = thread->stack;
    thread->context.uc_stack.ss_size = sizeof(thread->stack);
    thread->context.uc_link = &machine;
    makecontext(&thread->context, enter, 0);
  }
  auto& own = tiles.try_emplace(cta, launched.tiles_bytes, 0xff).first->second;
  std::memcpy(launched.tiles, own.data(), own.size());
  blockIdx.x = cta;
  threadIdx.x = number;
  running = thread.get();
  swapcontext(&machine, &running->context);
  std::memcpy(own.data(), launched.tiles, own.size());
  return running->request;
}
}
