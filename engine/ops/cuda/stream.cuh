// What the streaming kernels share. Weights (strips.cuh) stream from memory once, through a ring in shared memory, past
// the tensor cores, with all rows of bf16 that meet them beside them: rows of one list, gathered (stream_gathered.cuh), or
// rows as they lie (stream_dense.cuh).
//
// A strip is the 16 side of the product, 8 rows of x are the 8 side. Halves follow each other in ascending order, and a
// column of the result depends on its own row of x alone: a row has the same bits in whatever company it comes.
//
// A block is up to 64 rows of x that meet the same matrix. Its work is cut into tiles of kStrips strips (and, where a
// matrix has few outputs, into splits of its inputs, fixed by its size); block and tile make an item. Items are dealt
// to a grid that fills the device once. In a thread block kStrips warps multiply, a strip each; others keep weights
// and rows in flight, across the items' borders too.
#pragma once
#include <algorithm>

#include "numbers.cuh"
#include "operator.cuh"
#include "strips.cuh"

namespace kdtree::cuda {

constexpr int kClasses = 4;  // of blocks, by tiles of 8 rows: 8, 4, 2, 1; large first, so that small ones fill the end
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kStreamBlocks = 1;  // a multiprocessor, whose shared memory holds no second one
#else
constexpr int kStreamBlocks = 2;
#endif
constexpr int kMaxStages = 8;
constexpr int kMostSplits = 6, kSplitThreadBlocks = 224;

__host__ __device__ constexpr int class_of(int rows) {
  return rows > 32 ? 0 : rows > 16 ? 1 : rows > 8 ? 2 : 3;
}

struct Tile {
  int strip, strips, unit, units;
};

// How a matrix is cut.
struct Tiling {
  int outputs, inputs;
  int units, strips, units_a_split;
  unsigned splits;

  // Splits are for matrices whose tiles would leave most of a large device idle; they depend on the matrix alone, and
  // another rule means other bits. The thread blocks of a tile's splits are a cluster, and all clusters are to run at
  // once, with places left: of 7 an H200 holds just 32, and one that starts while others end finds no 7 places side by
  // side. It has 264 places, and holds 39 clusters of 6, 62 of 4.
  Tiling(int outputs, int inputs, bool split)
      : outputs(outputs),
        inputs(inputs),
        units(ceil_div(inputs, 64)),
        strips(ceil_div(outputs, 16)) {
    const int most = split ? std::max(1, std::min({kMostSplits, kSplitThreadBlocks / ceil_div(strips, kStrips), units / 4})) : 1;
    units_a_split = ceil_div(units, most);
    splits = static_cast<unsigned>(ceil_div(units, units_a_split));
  }
  __host__ __device__ unsigned tiles() const { return static_cast<unsigned>(ceil_div(strips, kStrips)); }
  __device__ Tile tile(unsigned i, unsigned split = 0) const {
    const int strip = static_cast<int>(i) * kStrips, unit = static_cast<int>(split) * units_a_split;
    return {strip, min(kStrips, strips - strip), unit, min(units_a_split, units - unit)};
  }
};

// Of the thread block; a function, so that its address is a constant and no register.
__device__ inline char* shared_memory() {
  extern __shared__ __align__(1024) char shared[];
  return shared;
}

// Of a warp that has done with a stage. compute-sanitizer's racecheck takes only lanes that arrive for ordered: for it
// the tests build with 32.
#ifndef KDTREE_ARRIVALS_OF_A_WARP
#define KDTREE_ARRIVALS_OF_A_WARP 1
#endif
constexpr int kArrivalsOfAWarp = KDTREE_ARRIVALS_OF_A_WARP;
static_assert(kArrivalsOfAWarp == 1 || kArrivalsOfAWarp == 32);

// A ring of stages; all sides walk it in the same order. Its barriers begin at kBarriers in shared memory.
template <int kBarriers, int kCount>
struct Ring {
  int index = 0;
  uint32_t phase = 0;
  static __device__ uint64_t* barriers() { return reinterpret_cast<uint64_t*>(shared_memory() + kBarriers); }
  // On a warp, whose threads all publish. `fillers` arrive when a stage is full, besides the bytes that they announce.
  static __device__ void init(int fillers) {
    if (lane_id() >= kCount) return;
    init_barrier(barriers() + lane_id(), fillers);
    init_barrier(barriers() + kMaxStages + lane_id(), kStrips * kArrivalsOfAWarp);
  }
  // The same once all have done with it.
  static __device__ void init_again(int fillers) {
    if (lane_id() >= kCount) return;
    end_barrier(barriers() + lane_id());
    end_barrier(barriers() + kMaxStages + lane_id());
    init(fillers);
  }
  __device__ uint64_t* full() const { return barriers() + index; }
  __device__ uint64_t* empty() const { return full() + kMaxStages; }
  // On a warp whose lanes have read what they need of the stage.
  __device__ void release() const {
    __syncwarp();
    if (lane_id() < kArrivalsOfAWarp) arrive(empty());
  }
  __device__ void next() {
    if (++index == kCount) index = 0, phase ^= 1;
  }
};
constexpr int kRingBarrierBytes = 2 * kMaxStages * sizeof(uint64_t);

// Before a kernel's first launch. `at_once`: its thread blocks that the device holds.
template <class... Parameters>
cudaError_t init_stream(void (*kernel)(Parameters...), int threads, unsigned* at_once) {
  int blocks = 0;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, kMaxSharedBytes);
  if (error == cudaSuccess && blocks == 0) error = cudaErrorLaunchOutOfResources;
  *at_once = static_cast<unsigned>(blocks * multiprocessors);
  return error;
}

struct Rows {
  const bf16* x;
  int64_t stride;
};

static __global__ void copy_row_elements(const int32_t* n_rows, const bf16* from, int64_t stride, int columns,
                                         bf16* to) {
  const int64_t count = int64_t{*n_rows} * columns;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x)
    to[i] = from[i / columns * stride + i % columns];
}

// Rows that start at multiples of 16 bytes and do not overlap, as copies need them: x itself or a copy. `columns`: a multiple of 8.
inline Rows aligned_rows(const int32_t* n_rows, const bf16* x, int64_t stride, int64_t max_rows, int columns,
                         bf16* copy, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(x) % 16 == 0 && stride % 8 == 0 && stride >= columns) return {x, stride};
  copy_row_elements<<<grid_for(max_rows * columns, 256, 8), 256, 0, stream>>>(n_rows, x, stride, columns, copy);
  return {copy, columns};
}

}  // namespace kdtree::cuda
