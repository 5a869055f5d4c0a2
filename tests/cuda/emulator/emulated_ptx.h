// engine/ops/cuda/ptx.cuh for emulated threads (cuda_runtime.h beside this file). Bulk copies stay pending until a
// thread waits for one, and then arrive in any order. Grids run one after the other: the one in front has ended.
//
// Fresh memory is filled with 0xFF (by engine.operators, and shared memory here): what reads 16 such bytes reads past what
// was written.
#pragma once
#include <algorithm>

#include "cuda_runtime.h"

#define __grid_constant__

struct alignas(16) int4 { int32_t x, y, z, w; };

inline void refuse_unwritten(const void* from, size_t bytes, const char* what) {
  const auto* p = static_cast<const unsigned char*>(from);
  if (!std::all_of(p, p + bytes, [](unsigned char c) { return c == 0xFF; })) return;
  std::fprintf(stderr, "emulated kernel: %s of what no one wrote\n", what);
  std::abort();
}
template <class T>
T __ldcg(const T* p) {
  refuse_unwritten(p, sizeof(T), "__ldcg");
  return *p;
}
template <class T>
T __shfl_up_sync(unsigned, T v, int by) {
  const uint64_t* all = emulator::exchange(__func__, v);
  const size_t lane = emulator::lane(), from = lane >= static_cast<size_t>(by) ? lane - static_cast<size_t>(by) : lane;
  return emulator::as<T>(all[from]);
}
inline cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
  *memory = std::aligned_alloc(256, (bytes + 256) / 256 * 256);
  return 0;
}
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return std::free(memory), 0; }

namespace kdtree::cuda {

// What a barrier's 8 bytes hold.
struct EmulatedBarrier {
  int32_t bytes;  // announced and not yet copied
  uint8_t arrivals, missing, phase, unused;
};
struct Piece {
  char* to;
  const char* from;
};
struct PendingCopy {  // one in bulk, or all pieces that a thread began
  char* to;
  const char* from;
  int bytes;
  EmulatedBarrier* barrier;
  std::vector<Piece> pieces;
};
inline std::vector<PendingCopy> pending_copies;
inline unsigned barrier_generation = 0;  // changes with every phase and every copy: those who wait look again

inline EmulatedBarrier* emulated(uint64_t* barrier) { return reinterpret_cast<EmulatedBarrier*>(barrier); }
inline void end_phase_if_over(EmulatedBarrier* barrier) {
  if (barrier->missing || barrier->bytes) return;
  barrier->missing = barrier->arrivals;
  barrier->phase ^= 1;
  ++barrier_generation;
}
[[noreturn]] inline void refuse_ptx(const char* what) {
  std::fprintf(stderr, "emulated kernel: %s\n", what);
  std::abort();
}

inline void init_barrier(uint64_t* barrier, int arrivals) {
  *emulated(barrier) = {0, static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), 0, 0};
}
inline void publish_barriers() {}
inline void arrive_expecting(uint64_t* barrier, int bytes) {
  if (emulated(barrier)->missing == 0) refuse_ptx("too many arrivals at a barrier");
  emulated(barrier)->bytes += bytes;
  --emulated(barrier)->missing;
  end_phase_if_over(emulated(barrier));
}
inline void arrive(uint64_t* barrier) { arrive_expecting(barrier, 0); }
inline void wait_phase(uint64_t* barrier, uint32_t parity) {
  static uint64_t random = 1;
  while (emulated(barrier)->phase == parity) {
    if (pending_copies.empty()) {
      emulator::Fiber& fiber = emulator::self();
      fiber.waits_for = &barrier_generation;
      fiber.seen = barrier_generation;
      swapcontext(&fiber.context, &emulator::running.scheduler);
      fiber.waits_for = nullptr;
      continue;
    }
    random = random * 6364136223846793005u + 1442695040888963407u;
    std::swap(pending_copies[(random >> 33) % pending_copies.size()], pending_copies.back());
    const PendingCopy copy = pending_copies.back();
    pending_copies.pop_back();
    for (const Piece& piece : copy.pieces) {
      refuse_unwritten(piece.from, 16, "copy_16");
      std::memcpy(piece.to, piece.from, 16);
    }
    if (copy.bytes) {
      refuse_unwritten(copy.from + copy.bytes - 16, 16, "copy_weights");
      std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
      copy.barrier->bytes -= copy.bytes;
      end_phase_if_over(copy.barrier);
    } else {
      arrive(reinterpret_cast<uint64_t*>(copy.barrier));
    }
  }
}
inline void copy_weights(void* to, const void* from, int bytes, uint64_t* barrier) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(bytes);
  if (all % 16 || bytes <= 0) refuse_ptx("a bulk copy of other than whole 16-byte pieces");
  pending_copies.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes, emulated(barrier), {}});
  ++barrier_generation;
}
// A thread's pieces are there when its arrival is, not before.
inline std::vector<Piece> pieces_of_thread[emulator::kMostBlocks * 1024];
inline void copy_16(void* to, const void* from) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16) refuse_ptx("a piece at an odd address");
  pieces_of_thread[emulator::running.current].push_back({static_cast<char*>(to), static_cast<const char*>(from)});
}
inline void arrive_when_copied(uint64_t* barrier) {
  pending_copies.push_back({nullptr, nullptr, 0, emulated(barrier), std::move(pieces_of_thread[emulator::running.current])});
  pieces_of_thread[emulator::running.current].clear();
  ++barrier_generation;
}
inline void wait_for_grid_in_front() {}
inline void let_next_grid_start() {}
inline void let_copies_overwrite() {}
inline void cluster_sync() { emulator::wait(emulator::running.cluster_barrier, emulator::running.alive); }
inline void cluster_sync_to_overwrite() { cluster_sync(); }
inline float4 load_from_block_if(bool there, const float4* p, unsigned rank) {
  const auto offset = reinterpret_cast<const char*>(p) - emulator::dynamic_shared;
  return there ? *reinterpret_cast<const float4*>(emulator::shared_memory[rank] + offset) : float4{0, 0, 0, 0};
}
template <class... Parameters, class... Arguments>
void launch_early_in_clusters(unsigned cluster, void (*kernel)(Parameters...), unsigned grid, unsigned threads,
                              size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  emulator::launch(grid, threads, shared_bytes, stream, [=] { kernel(static_cast<Parameters>(arguments)...); }, cluster);
}
template <class... Parameters>
cudaError_t most_clusters(int* count, unsigned cluster, void (*)(Parameters...), unsigned, size_t) {
  return *count = static_cast<int>(std::max(1u, 4 / cluster)), 0;
}
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), unsigned grid, unsigned threads, size_t shared_bytes,
                  cudaStream_t stream, Arguments... arguments) {
  launch_early_in_clusters(1, kernel, grid, threads, shared_bytes, stream, arguments...);
}

inline float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  const auto rounded = [](float v) -> uint32_t {
    const uint32_t bits = __float_as_uint(v);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  };
  return rounded(fmaf(low_bf16(a), low_bf16(b), low_bf16(c))) |
         rounded(fmaf(high_bf16(a), high_bf16(b), high_bf16(c))) << 16;
}
inline void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  uint64_t a_rows[2][32], b_columns[32];
  std::memcpy(a_rows[0], emulator::exchange("mma a", uint64_t{a2} << 32 | a0), sizeof a_rows[0]);
  std::memcpy(a_rows[1], emulator::exchange("mma a", uint64_t{a3} << 32 | a1), sizeof a_rows[1]);
  std::memcpy(b_columns, emulator::exchange("mma b", uint64_t{b1} << 32 | b0), sizeof b_columns);
  const size_t g = emulator::lane() / 4, t = emulator::lane() % 4;
  for (size_t i = 0; i < 4; ++i)
    for (size_t k = 0; k < 8; ++k) {  // pairs of inputs, ascending
      const uint64_t a = a_rows[i / 2][4 * g + k % 4], b = b_columns[4 * (2 * t + i % 2) + k % 4];
      const auto a_pair = static_cast<uint32_t>(a >> (k / 4 * 32)), b_pair = static_cast<uint32_t>(b >> (k / 4 * 32));
      c[i] += low_bf16(a_pair) * low_bf16(b_pair);
      c[i] += high_bf16(a_pair) * high_bf16(b_pair);
    }
}

}  // namespace kdtree::cuda
