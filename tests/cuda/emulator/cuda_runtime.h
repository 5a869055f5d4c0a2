// Stands in for CUDA's header when the kernels are compiled for the CPU: every CUDA thread is a fiber, blocks run one
// after the other, those of a cluster together. Barriers and warp operations switch fibers, in an order that changes from switch to switch, so that a
// missing barrier shows; a block whose threads all wait ends the program. Only what engine/ops uses is here.
#pragma once
#include <math.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static
#define __noinline__

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaErrorLaunchOutOfResources = 701;
enum cudaMemcpyKind { cudaMemcpyHostToDevice };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaGetLastError() { return 0; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return 0;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return 0;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 2, 0;
}

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulator {

inline dim3 thread_index, block_index, block_size, grid_size;
inline unsigned cluster_size;
constexpr size_t kSharedBytes = 101376;
constexpr unsigned kMostBlocks = 8;  // of a cluster
alignas(256) inline char shared_memory[kMostBlocks][kSharedBytes];
inline char* dynamic_shared = shared_memory[0];  // of the block whose thread runs

struct Barrier {
  unsigned arrived = 0, generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool ended;
  const unsigned* waits_for;  // a barrier's generation, until it is no longer `seen`
  unsigned seen;
  bool has_arrived, has_waited;  // at the cluster's barrier and not waited since; ever
};

struct Warp {
  Barrier barrier;
  unsigned members;  // that have not ended
  unsigned operations[32];
  const char* names[32];  // of the operation that each lane is at
  uint64_t values[2][32];
};

struct Block {
  Barrier barrier;
  unsigned alive;
  int counts[3];
};

// The blocks that run together: one, or a cluster.
struct Blocks {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Block of_rank[kMostBlocks];
  Barrier cluster_barrier;
  unsigned alive;
  ucontext_t scheduler;
  size_t current;
  std::function<void()> kernel;
};
inline Blocks running;

inline Fiber& self() { return running.fibers[running.current]; }
inline Warp& warp() { return running.warps[running.current / 32]; }
inline Block& block() { return running.of_rank[running.current / block_size.x]; }

inline void release_if_all(Barrier& barrier, unsigned members) {
  if (members && barrier.arrived == members) barrier.arrived = 0, ++barrier.generation;
}
inline void wait(Barrier& barrier, unsigned members) {
  Fiber& fiber = self();
  fiber.seen = barrier.generation;
  fiber.waits_for = &barrier.generation;
  ++barrier.arrived;
  release_if_all(barrier, members);
  swapcontext(&fiber.context, &running.scheduler);
  fiber.waits_for = nullptr;
}

// One time in sixteen others run for long: what a thread still does after it arrived somewhere then comes late.
inline void fall_behind() {
  static uint64_t random = 1;
  random = random * 6364136223846793005u + 1442695040888963407u;
  for (int turns = random >> 60 ? 0 : 64; turns > 0; --turns) swapcontext(&self().context, &running.scheduler);
}

inline void (*at_end_of_block)(const char* shared_memory);

inline void thread_main() {
  running.kernel();
  if (self().has_arrived) {
    std::fprintf(stderr, "emulated kernel: a thread ended that had arrived for its cluster and not waited\n");
    std::abort();
  }
  self().ended = true;
  --running.alive;
  if (--block().alive == 0 && at_end_of_block) at_end_of_block(dynamic_shared);
  --warp().members;
  release_if_all(running.cluster_barrier, running.alive);
  release_if_all(block().barrier, block().alive);
  release_if_all(warp().barrier, warp().members);
  swapcontext(&self().context, &running.scheduler);
}

// Blocks (x, y) … (x + cluster - 1, y).
inline void run_blocks(unsigned x, unsigned y, unsigned cluster) {
  static uint64_t random = 1;
  const size_t threads = block_size.x, all = threads * cluster;
  constexpr size_t kStack = 64 << 10;
  if (running.fibers.size() < all) running.fibers.resize(all);
  running.warps.assign((all + 31) / 32, Warp{});
  running.cluster_barrier = {};
  running.alive = static_cast<unsigned>(all);
  for (unsigned rank = 0; rank < cluster; ++rank) {
    running.of_rank[rank] = {{}, static_cast<unsigned>(threads), {}};
    std::memset(shared_memory[rank], 0xFF, kSharedBytes);
  }
  for (size_t t = 0; t < all; ++t) {
    Fiber& fiber = running.fibers[t];
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, thread_main, 0);
    fiber.ended = false;
    fiber.waits_for = nullptr;
    fiber.has_arrived = fiber.has_waited = false;
    ++running.warps[t / 32].members;
  }
  while (running.alive) {
    bool moved = false;
    random = random * 6364136223846793005u + 1442695040888963407u;
    const size_t start = (random >> 33) % all, step = random >> 62 & 1 ? 1 : all - 1;
    for (size_t i = 0, t = start; i < all; ++i, t = (t + step) % all) {
      Fiber& fiber = running.fibers[t];
      if (fiber.ended || (fiber.waits_for && *fiber.waits_for == fiber.seen)) continue;
      moved = true;
      running.current = t;
      thread_index = dim3(static_cast<unsigned>(t % threads), 0, 0);
      block_index = dim3(x + static_cast<unsigned>(t / threads), y, 0);
      dynamic_shared = shared_memory[t / threads];
      swapcontext(&running.scheduler, &fiber.context);
    }
    if (!moved) {
      std::fprintf(stderr, "emulated kernel: all threads of block (%u, %u) wait\n", x, y);
      std::abort();
    }
  }
}

template <class Kernel>
void launch(dim3 grid, dim3 threads, size_t shared_bytes, cudaStream_t, Kernel kernel, unsigned cluster = 1) {
  if (shared_bytes > kSharedBytes || threads.x > 1024 || threads.y * threads.z != 1 || grid.x * grid.y == 0 ||
      cluster > kMostBlocks || grid.x % cluster || (cluster > 1 && threads.x % 32)) {
    std::fprintf(stderr, "emulated kernel: launch refused\n");
    std::abort();
  }
  running.kernel = kernel;
  grid_size = grid;
  block_size = threads;
  cluster_size = cluster;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; x += cluster) run_blocks(x, y, cluster);
}

// What each lane of the warp brings to operation `name`, by lane.
template <class T>
const uint64_t* exchange(const char* name, T value) {
  static_assert(sizeof(T) <= 8);
  const size_t lane = running.current % 32;
  Warp& mine = warp();
  uint64_t* values = mine.values[mine.operations[lane]++ % 2];
  values[lane] = 0;
  mine.names[lane] = name;
  std::memcpy(&values[lane], &value, sizeof value);
  if (mine.barrier.arrived + 1 == mine.members)  // the last one
    for (size_t other = 0; other < 32; ++other)
      if (mine.names[other] != name && !running.fibers[running.current - lane + other].ended) {
        std::fprintf(stderr, "emulated kernel: lane %zu is at %s, lane %zu at %s\n", lane, name, other, mine.names[other]);
        std::abort();
      }
  wait(mine.barrier, mine.members);
  return values;
}
template <class T>
T as(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline size_t lane() { return running.current % 32; }

}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

inline void __syncthreads() { emulator::wait(emulator::block().barrier, emulator::block().alive); }
inline int __syncthreads_count(bool predicate) {
  const unsigned generation = emulator::block().barrier.generation;
  int* counts = emulator::block().counts;
  int& count = counts[generation % 3];
  counts[(generation + 1) % 3] = 0;
  count += predicate;
  __syncthreads();
  return count;
}
inline int __syncthreads_or(bool predicate) { return __syncthreads_count(predicate) > 0; }
inline void __syncwarp() { emulator::exchange(__func__, 0); }
template <class T>
T __shfl_xor_sync(unsigned, T v, int mask) {
  return emulator::as<T>(emulator::exchange(__func__, v)[emulator::lane() ^ static_cast<size_t>(mask)]);
}
template <class T>
T __shfl_sync(unsigned, T v, int from) {
  return emulator::as<T>(emulator::exchange(__func__, v)[from & 31]);
}
template <class T>
T __shfl_down_sync(unsigned, T v, int by) {
  const size_t from = emulator::lane() + static_cast<size_t>(by);
  return emulator::as<T>(emulator::exchange(__func__, v)[from < 32 ? from : emulator::lane()]);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  const uint64_t* all = emulator::exchange(__func__, predicate);
  unsigned ballot = 0;
  for (unsigned i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(all[i] != 0) << i;
  return ballot;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t v) {
  const uint64_t* all = emulator::exchange(__func__, v);
  return static_cast<uint32_t>(*std::max_element(all, all + 32));
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t v) {
  const uint64_t* all = emulator::exchange(__func__, v);
  return static_cast<uint32_t>(*std::min_element(all, all + 32));
}
template <class T>
T atomicAdd(T* to, T by) {
  const T before = *to;
  *to += by;
  return before;
}
template <class T>
T atomicMin(T* to, T by) {
  const T before = *to;
  *to = std::min(*to, by);
  return before;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline uint32_t __float_as_uint(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t v) { return emulator::as<float>(v); }

template <class A, class B>
constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
