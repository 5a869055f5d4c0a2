// engine/ops/cuda/ptx.cuh for emulated threads (cuda_runtime.h beside this file). Copies stay pending until a thread
// waits for one, and then arrive in any order. Grids run one after the other: the one in front has ended.
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
struct Piece {  // 16 bytes
  char* to;
  const char* from;  // nullptr: zeros
};
struct PendingCopy {
  std::vector<Piece> pieces;
  EmulatedBarrier* barrier;
  int bytes;  // that the barrier counts; 0: an arrival
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
inline void end_barrier(uint64_t*) {}
inline void publish_barriers() {}
inline void arrive_expecting(uint64_t* barrier, int bytes) {
  if (emulated(barrier)->missing == 0) refuse_ptx("too many arrivals at a barrier");
  emulated(barrier)->bytes += bytes;
  --emulated(barrier)->missing;
  end_phase_if_over(emulated(barrier));
}
inline void arrive(uint64_t* barrier) {
  arrive_expecting(barrier, 0);
  emulator::fall_behind();
}
inline void perform(std::vector<PendingCopy>::iterator which) {
  std::swap(*which, pending_copies.back());
  const PendingCopy copy = std::move(pending_copies.back());
  pending_copies.pop_back();
  for (const Piece& piece : copy.pieces) {
    if (piece.from)
      std::memcpy(piece.to, piece.from, 16);
    else
      std::memset(piece.to, 0, 16);
  }
  if (!copy.bytes) return arrive_expecting(reinterpret_cast<uint64_t*>(copy.barrier), 0);
  copy.barrier->bytes -= copy.bytes;
  end_phase_if_over(copy.barrier);
}
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
    perform(pending_copies.begin() + static_cast<std::ptrdiff_t>((random >> 33) % pending_copies.size()));
  }
}
// What reads or fills a block's memory ends before the block.
inline void refuse_copies_after(const char* shared_memory) {
  const auto inside = [=](const char* p) { return p >= shared_memory && p < shared_memory + emulator::kSharedBytes; };
  for (const PendingCopy& copy : pending_copies)
    if (inside(copy.pieces[0].from) || inside(copy.pieces[0].to)) refuse_ptx("a block ended before its copies");
}
inline void begin_copy(std::vector<Piece> pieces, uint64_t* barrier, int bytes) {
  for (const Piece& piece : pieces)
    if ((reinterpret_cast<uintptr_t>(piece.to) | reinterpret_cast<uintptr_t>(piece.from)) % 16)
      refuse_ptx("a copy at an odd address");
  pending_copies.push_back({std::move(pieces), emulated(barrier), bytes});
  ++barrier_generation;
}
inline std::vector<Piece> pieces_of(void* to, const void* from, int bytes) {
  if (bytes <= 0 || bytes % 16) refuse_ptx("a bulk copy of other than whole 16-byte pieces");
  std::vector<Piece> pieces;
  for (int at = 0; at < bytes; at += 16)
    pieces.push_back({static_cast<char*>(to) + at, static_cast<const char*>(from) + at});
  return pieces;
}
inline void copy_weights(void* to, const void* from, int bytes, uint64_t* barrier) {
  refuse_unwritten(static_cast<const char*>(from) + bytes - 16, 16, "copy_weights");
  begin_copy(pieces_of(to, from, bytes), barrier, bytes);
}
// A thread's pieces are there when its arrival is, not before.
inline std::vector<Piece> pieces_of_thread[emulator::kMostBlocks * 1024];
inline void copy_16(void* to, const void* from) {
  refuse_unwritten(from, 16, "copy_16");
  pieces_of_thread[emulator::running.current].push_back({static_cast<char*>(to), static_cast<const char*>(from)});
}
inline void arrive_when_copied(uint64_t* barrier) {
  std::vector<Piece>& pieces = pieces_of_thread[emulator::running.current];
  begin_copy(std::move(pieces), barrier, 0);
  pieces.clear();
}

constexpr int kTileBytes = 1024;
struct RowMap {
  const char* x;
  int64_t row_bytes, rows;
  int columns, tiles;
  static cudaError_t init() { return 0; }
  static cudaError_t make(RowMap* map, const void* x, int64_t row_bytes, int columns, int64_t rows, int tiles) {
    if (row_bytes % 16 || reinterpret_cast<uintptr_t>(x) % 16) refuse_ptx("rows at odd addresses");
    *map = {static_cast<const char*>(x), row_bytes, rows, columns, tiles};
    return 0;
  }
};
// Rows past those that someone wrote come as they are; the first is there.
inline void copy_tiles(void* to, const RowMap& rows, int column, int row, uint64_t* barrier) {
  if ((static_cast<char*>(to) - emulator::dynamic_shared) % kTileBytes) refuse_ptx("a tile of rows at an odd address");
  std::vector<Piece> pieces;
  for (int r = 0; r < 8 * rows.tiles; ++r)
    for (int c = 0; c < 8; ++c) {
      const bool there = row + r < rows.rows && column + 8 * c < rows.columns;
      const char* from = there ? rows.x + (row + r) * rows.row_bytes + 2 * (column + 8 * c) : nullptr;
      if (r == 0 && from) refuse_unwritten(from, 16, "copy_tiles");
      pieces.push_back({static_cast<char*>(to) + 128 * r + 16 * (c ^ r % 8), from});
    }
  begin_copy(std::move(pieces), barrier, rows.tiles * kTileBytes);
}

inline void wait_for_grid_in_front() {}
inline void let_next_grid_start() {}
inline void let_copies_follow() {}
inline unsigned arrived_at[emulator::kMostBlocks * 1024];  // the barrier's generation, by thread
inline void cluster_arrive() {
  emulator::Barrier& barrier = emulator::running.cluster_barrier;
  if (emulator::self().has_arrived) refuse_ptx("arriving for the cluster twice without waiting");
  emulator::self().has_arrived = true;
  arrived_at[emulator::running.current] = barrier.generation;
  ++barrier.arrived;
  emulator::release_if_all(barrier, emulator::running.alive);
  emulator::fall_behind();
}
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() {
  emulator::Fiber& fiber = emulator::self();
  if (!fiber.has_arrived) refuse_ptx("waiting for the cluster without arriving");
  fiber.waits_for = &emulator::running.cluster_barrier.generation;
  fiber.seen = arrived_at[emulator::running.current];
  swapcontext(&fiber.context, &emulator::running.scheduler);
  fiber.waits_for = nullptr;
  fiber.has_waited = true, fiber.has_arrived = false;
}
inline unsigned cluster_index() { return emulator::block_index.x / emulator::cluster_size; }
inline unsigned cluster_count() { return emulator::grid_size.x / emulator::cluster_size; }
inline unsigned rank_in_cluster() { return emulator::block_index.x % emulator::cluster_size; }
inline char* in_block(unsigned rank, void* p) {
  return emulator::shared_memory[rank] + (static_cast<char*>(p) - emulator::dynamic_shared);
}
inline void copy_to_block(unsigned rank, void* to, const void* from, int bytes, uint64_t* barrier) {
  if (!emulator::self().has_waited) refuse_ptx("a copy to a block that may not have begun");
  begin_copy(pieces_of(in_block(rank, to), from, bytes), reinterpret_cast<uint64_t*>(in_block(rank, barrier)), bytes);
}
template <class... Parameters, class... Arguments>
void launch_early_in_clusters(unsigned cluster, void (*kernel)(Parameters...), unsigned grid, unsigned threads,
                              size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  emulator::at_end_of_block = refuse_copies_after;
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
inline uint4 load_matrices(const char* row) {
  const char* rows[32];
  std::memcpy(rows, emulator::exchange("ldmatrix", row), sizeof rows);
  uint4 v;
  for (size_t i = 0; i < 4; ++i)
    std::memcpy(&v.x + i, rows[8 * i + emulator::lane() / 4] + 4 * (emulator::lane() % 4), 4);
  return v;
}

#ifndef KDTREE_NO_WARPGROUPS
#define KDTREE_WARPGROUPS
// A warpgroup's products are made warp by warp, when they are waited for.
struct RowTiles {
  const char* tiles;
  explicit RowTiles(const char* p) : tiles(p) {
    if ((p - emulator::dynamic_shared) % kTileBytes) refuse_ptx("tiles of rows at an odd address");
  }
};
constexpr int tiles_at_once(int tiles) { return tiles; }
inline void let_products_begin() {}
inline std::vector<std::function<void()>> products_of_thread[emulator::kMostBlocks * 1024];
template <bool kAdds, int kTiles>
void begin_products(float (&c)[kTiles][4], const uint32_t (&a)[8], RowTiles b, int bytes) {
  products_of_thread[emulator::running.current].push_back([&c, &a, b, bytes] {
    const size_t g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int tile = 0; tile < kTiles; ++tile) {
      const char* row = b.tiles + bytes / kTileBytes * kTileBytes + kTileBytes * tile + 128 * g;
      uint32_t pairs[4];
      for (size_t i = 0; i < 4; ++i)
        std::memcpy(pairs + i, row + ((static_cast<size_t>(bytes % 128) / 16 + i) ^ g) * 16 + 4 * t, 4);
      if (!kAdds) std::fill_n(c[tile], 4, 0.0f);
      multiply_add(c[tile], a[0], a[1], a[2], a[3], pairs[0], pairs[1]);
      multiply_add(c[tile], a[4], a[5], a[6], a[7], pairs[2], pairs[3]);
    }
  });
}
inline void wait_for_products() {
  for (const auto& make : products_of_thread[emulator::running.current]) make();
  products_of_thread[emulator::running.current].clear();
}
template <int kTiles>
void take_products(float (&)[kTiles][4]) {}
#endif

}  // namespace kdtree::cuda
