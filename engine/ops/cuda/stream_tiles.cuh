// The matrix kernel for few rows of bf16: weights (strips.cuh) stream from memory once, through a ring in shared
// memory, past the tensor cores, with all rows that meet them beside them.
//
// A strip is the 16 side of the product, 8 rows of x are the 8 side. Halves follow each other in ascending order, and a
// column of the result depends on its own row of x alone: a row has the same bits in whatever company it comes.
//
// A block is up to 64 rows of x that meet the same matrix. Its work is cut into tiles of kStrips strips (and, where a
// matrix has few outputs, into splits of its inputs, fixed by its size); block and tile make an item. Items are dealt
// to a grid that fills the device once. In a thread block kStrips warps multiply, a strip each; one or two more keep
// weights and rows in flight, across the items' borders too.
#pragma once
#include <algorithm>

#include "numbers.cuh"
#include "operator.cuh"
#include "strips.cuh"

namespace kdtree::cuda {

constexpr int kStrips = 8;
constexpr int kStreamBlocks = 2;  // a multiprocessor
constexpr int kClasses = 4;  // of blocks, by tiles of 8 rows: 8, 4, 2, 1; large first, so that small ones fill the end
constexpr int kMaxStages = 8;
constexpr size_t kBarrierBytes = 2 * kClasses * kMaxStages * sizeof(uint64_t);
constexpr size_t kZeroBytes = 512;  // a row of x in a stage
constexpr size_t kStageOffset = kBarrierBytes + kZeroBytes + 16;  // in shared memory: barriers, zeros, counts of blocks

__host__ __device__ constexpr int class_of(int rows) {
  return rows > 32 ? 0 : rows > 16 ? 1 : rows > 8 ? 2 : 3;
}

// Blocks of each class, 16 bits each.
__device__ inline unsigned blocks_of(uint64_t counts, int block_class) {
  return static_cast<unsigned>(counts >> (16 * block_class)) & 0xFFFF;
}

// Rows first, first + 1, … of a list, and the matrix they meet; `entry` is the list's at `first`.
struct Block {
  int32_t matrix, first, count, entry;
};

struct Tile {
  int strip, strips, unit, halves, split;
};

// How every matrix of a job is cut.
struct Tiling {
  int outputs, inputs;
  int units, halves, strips, units_a_split;
  unsigned splits;

  // Splits are for matrices whose tiles would leave most of a large device idle; they depend on the matrix alone. The
  // blocks of a tile's splits are a cluster, which may have 8.
  Tiling(int outputs, int inputs, bool split)
      : outputs(outputs),
        inputs(inputs),
        units(ceil_div(inputs, 64)),
        halves(inputs / 32),
        strips(ceil_div(outputs, 16)) {
    const int most = split ? std::max(1, std::min({8, 256 / ceil_div(strips, kStrips), units / 4})) : 1;
    units_a_split = ceil_div(units, most);
    splits = ceil_div(units, units_a_split);
  }
  __host__ __device__ unsigned tiles() const { return static_cast<unsigned>(ceil_div(strips, kStrips)) * splits; }
  __device__ Tile tile(unsigned i) const {
    const int split = static_cast<int>(i % splits), unit = split * units_a_split;
    const int strip = static_cast<int>(i / splits) * kStrips;
    return {strip, min(kStrips, strips - strip), unit, min(2 * units_a_split, halves - 2 * unit), split};
  }
};

// A job says what is multiplied, and what becomes of the result:
//   Strips
//   kBlockRows, kCopyWarps      most rows of a block; 1 copy warp leaves registers for 64, 2 gather rows faster
//   kSplits                     whether inputs may be split (with 1 copy warp)
//   kWeightsAhead               true (with 2 copy warps) if blocks are there before the grid in front has ended
//   tiling
//   blocks()                    how many, 16 bits a class; block(i): i counts over all classes, 0 first
//   weights(matrix)             its first strip
//   entry(block, i)             names row i of a block, for
//   inputs(entry)               the row, 16-byte aligned
//   store(entry, strip, g, low, high)        outputs g and g + 8 of that strip; or, where inputs are split,
//   store4(row, output, sums)                four outputs

template <class Strips, int kRowTiles>
struct Stage {
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kClass = class_of(kRows);
  static constexpr int kUnits = Strips::units_a_stage(kRowTiles);
  static constexpr int kStripBytes = kUnits * Strips::kUnitBytes;
  static constexpr int kRowBytes = 128 * kUnits + 64;  // 64 more: 16-byte loads of two rows then hit all banks
  static constexpr int kBytes = kStrips * kStripBytes + kRows * kRowBytes;
  static constexpr int kCount = std::min<int>(kMaxStages, (kMaxSharedBytes - kStageOffset) / kBytes);
  static_assert(kCount >= 3);
};

// Of the block; a function, so that its address is a constant and no register.
__device__ inline char* shared_memory() {
  extern __shared__ __align__(128) char shared[];
  return shared;
}

// A ring of stages; all sides walk it in the same order.
template <class S>
struct Ring {
  int index = 0;
  uint32_t phase = 0;
  __device__ uint64_t* full() const {
    return reinterpret_cast<uint64_t*>(shared_memory()) + S::kClass * 2 * kMaxStages + index;
  }
  __device__ uint64_t* empty() const { return full() + kMaxStages; }
  __device__ char* stage() const { return shared_memory() + kStageOffset + index * S::kBytes; }
  __device__ const char* zeros() const { return shared_memory() + kBarrierBytes; }
  __device__ uint64_t counts() const {
    return *reinterpret_cast<const uint64_t*>(shared_memory() + kBarrierBytes + kZeroBytes);
  }
  __device__ unsigned items(unsigned tiles) const { return blocks_of(counts(), S::kClass) * tiles; }
  __device__ void next() {
    if (++index == S::kCount) index = 0, phase ^= 1;
  }
};

template <class T>
__device__ T* of_lane(T* p, int lane) {
  return reinterpret_cast<T*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(p), lane));
}

// Keeps weights in flight, a strip a lane, and rows: a bulk copy each, by lane l for rows l and l + 32; or by pieces of 16
// bytes, which the lanes share. One warp does both or one each. (Inlined, it costs consumers a spilled register.)
template <bool kAsync, bool kWeights, bool kRows, class Job, class S>
__device__ __noinline__ void send(const Job& job, Ring<S> ring, unsigned item, unsigned first_block) {
  const Tiling& tiling = job.tiling;
  const unsigned tiles = tiling.tiles();
  const int64_t strip_bytes = int64_t{tiling.units} * Job::Strips::kUnitBytes;
  constexpr int kOfLane = kRows ? ceil_div(S::kRows, 32) : 0;
  for (; item < ring.items(tiles); item += gridDim.x) {
    const Tile tile = tiling.tile(item % tiles);
    const Block block = job.block(first_block + item / tiles);
    const char* weights = job.weights(block.matrix) + (tile.strip + lane_id()) * strip_bytes +
                          int64_t{tile.unit} * Job::Strips::kUnitBytes;
    const bf16* rows[kOfLane + 1];
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      rows[i] = job.inputs(job.entry(block, min(lane_id() + 32 * i, block.count - 1))) + 64 * tile.unit;
#pragma unroll 1
    for (int halves = tile.halves; halves > 0; halves -= 2 * S::kUnits, ring.next()) {
      const int here = min(2 * S::kUnits, halves), done = (tile.halves - halves) / 2;
      const int weight_bytes = ceil_div(here, 2) * Job::Strips::kUnitBytes, row_bytes = 64 * here;
      wait_phase(ring.empty(), ring.phase ^ 1);
      constexpr bool kBulkRows = kRows && !kAsync;
      if ((kWeights || kBulkRows) && lane_id() == 0)
        arrive_expecting(ring.full(),
                         (kWeights ? tile.strips * weight_bytes : 0) + (kBulkRows ? block.count * row_bytes : 0));
      __syncwarp();
      if (kWeights && lane_id() < tile.strips)
        copy_weights(ring.stage() + lane_id() * S::kStripBytes, weights + done * Job::Strips::kUnitBytes, weight_bytes,
                     ring.full());
      char* to = ring.stage() + kStrips * S::kStripBytes;
      if constexpr (kRows && kAsync) {
        constexpr int kPieces = 8 * S::kUnits;  // of a row
#pragma unroll 1
        for (int i = lane_id(); i - lane_id() < block.count * kPieces; i += 32) {
          const int row = i / kPieces, piece = i % kPieces;
          const bf16* from = of_lane(row < 32 ? rows[0] : rows[kOfLane - 1], row % 32);
          if (row < block.count && 16 * piece < row_bytes)
            copy_16(to + row * S::kRowBytes + 16 * piece, from + 64 * done + 8 * piece);
        }
        arrive_when_copied(ring.full());
      } else {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          const int row = lane_id() + 32 * i;
          if (row < block.count) copy_rows(to + row * S::kRowBytes, rows[i] + 64 * done, row_bytes, ring.full());
        }
      }
    }
    if (Job::kSplits && tiling.splits > 1) {
      __syncthreads();
      add_splits(job, block, tile);
    }
  }
}

// A block's sums where inputs are split: [row][output], in the ring's memory.
constexpr int kSumsStride = 16 * kStrips + 4;  // floats; 4 more: the lanes of a store then hit all banks
__device__ inline float* split_sums() { return reinterpret_cast<float*>(shared_memory() + kStageOffset); }

// On all threads of the cluster: adds the splits' sums of a tile in ascending order, four outputs a thread.
template <class Job>
__device__ void add_splits(const Job& job, const Block& block, const Tile& tile) {
  if constexpr (Job::kSplits) {
    cluster_sync();
    constexpr unsigned columns = 4 * kStrips;
    const unsigned splits = job.tiling.splits, count = static_cast<unsigned>(block.count) * columns;
    for (unsigned i = tile.split * blockDim.x + threadIdx.x; i < count; i += splits * blockDim.x) {
      const unsigned row = i / columns, column = 4 * (i % columns);
      const auto* at = reinterpret_cast<const float4*>(split_sums() + row * kSumsStride + column);
      float4 sum = load_from_block(at, 0);
#pragma unroll 7
      for (unsigned s = 1; s < splits; ++s) {
        const float4 v = load_from_block(at, s);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      job.store4(block.first + row, 16 * tile.strip + column, sum);
    }
    let_copies_overwrite();
    cluster_sync();
  }
}

template <class Job, class S, int kRowTiles>
__device__ void consume(const Job& job, Ring<S> ring, unsigned item, unsigned first_block) {
  const Tiling& tiling = job.tiling;
  const unsigned tiles = tiling.tiles();
  const int g = lane_id() / 4, t = lane_id() % 4;
  Block next;
  if (kRowTiles <= 2 && item < ring.items(tiles)) next = job.block(first_block + item / tiles);
  for (; item < ring.items(tiles); item += gridDim.x) {
    const Block block = kRowTiles <= 2 ? next : job.block(first_block + item / tiles);
    const Tile tile = tiling.tile(item % tiles);
    if (kRowTiles <= 2 && item + gridDim.x < ring.items(tiles))
      next = job.block(first_block + (item + gridDim.x) / tiles);
    const bool mine = warp_id() < tile.strips;
    constexpr int kAhead = kRowTiles <= 2 ? kRowTiles : 0;  // entries fetched before they are needed
    int entries[kAhead + 1][2];
#pragma unroll
    for (int r = 0; r < kAhead; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) entries[r][i] = job.entry(block, min(8 * r + 2 * t + i, block.count - 1));

    // Rows that are not there are zeros, or (beside other tiles) any bits; they are not stored.
    const bool absent = kRowTiles == 1 && g >= block.count;
    float total[kRowTiles][4] = {};
    for (int halves = tile.halves; halves > 0; halves -= 2 * S::kUnits, ring.next()) {
      wait_phase(ring.full(), ring.phase);
      const char* strip = ring.stage() + warp_id() * S::kStripBytes;
      const char* x = (absent ? ring.zeros() : ring.stage() + kStrips * S::kStripBytes + g * S::kRowBytes) + 16 * t;
      using W = typename Job::Strips;
      constexpr int kTileBytes = 8 * S::kRowBytes;
      constexpr int kUnrolled = kRowTiles == 1 ? S::kUnits : 1;
      constexpr int kAtOnce = kRowTiles == 1 && S::kUnits > 1 ? 2 : 1;  // units whose sums do not wait for each other
      if (mine && kRowTiles <= 2 && halves >= 2 * S::kUnits) {
#pragma unroll kUnrolled
        for (int u = 0; u < S::kUnits; u += kAtOnce)
          W::template multiply<kAtOnce, kTileBytes>(strip + u * W::kUnitBytes, x + 128 * u, total);
      } else if (mine) {
#pragma unroll 1
        for (int half = 0; half < 2 * S::kUnits && half < halves; ++half)
          W::template multiply_half<kTileBytes>(strip, half, x, total);
      }
      __syncwarp();
      if (lane_id() == 0) arrive(ring.empty());
    }

    const bool split = Job::kSplits && tiling.splits > 1;
    if (split) __syncthreads();  // the ring is done with: sums take its place
    if (mine || split)
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = 8 * r + 2 * t + i;
          if (row >= block.count) continue;
          if (split) {
            float* to = split_sums() + row * kSumsStride + 16 * warp_id() + g;
            to[0] = total[r][i], to[8] = total[r][2 + i];
          } else {
            job.store(r < kAhead ? entries[r][i] : job.entry(block, row), tile.strip + warp_id(), g, total[r][i],
                      total[r][2 + i]);
          }
        }
    if (split) add_splits(job, block, tile);
  }
}

template <bool kAsync, int kRowTiles, class Job>
__device__ void stream_class(const Job& job) {
  using S = Stage<typename Job::Strips, kRowTiles>;
  const Ring<S> ring;
  const unsigned tiles = job.tiling.tiles(), grid = gridDim.x;
  if (ring.items(tiles) == 0) return;  // for the whole grid
  unsigned first_block = 0;
#pragma unroll
  for (int c = 0; c < S::kClass; ++c) first_block += blocks_of(ring.counts(), c);
  const unsigned item = (blockIdx.x + grid - first_block * tiles % grid) % grid;  // dealing goes on where it stopped
  if (warp_id() == kStrips)
    send<kAsync, true, Job::kCopyWarps == 1>(job, ring, item, first_block);
  else if (warp_id() == kStrips + 1)
    send<kAsync, false, true>(job, ring, item, first_block);
  else
    consume<Job, S, kRowTiles>(job, ring, item, first_block);
  __syncthreads();  // the next class lays out the ring anew
}

template <class Job>
constexpr int kStreamThreads = 32 * (kStrips + Job::kCopyWarps);

template <class Job, bool kAsync>
__global__ void __launch_bounds__(kStreamThreads<Job>, kStreamBlocks) stream_tiles(const __grid_constant__ Job job) {
  char* shared = shared_memory();
  if (threadIdx.x < 2 * kClasses * kMaxStages) {
    const int i = static_cast<int>(threadIdx.x);
    constexpr int kFullArrivals = kAsync ? 1 + 32 : Job::kCopyWarps;  // weights, and every lane's pieces of rows
    init_barrier(reinterpret_cast<uint64_t*>(shared) + i, i / kMaxStages % 2 ? kStrips : kFullArrivals);
    publish_barriers();
  }
  if (threadIdx.x < kZeroBytes / 16) reinterpret_cast<uint4*>(shared + kBarrierBytes)[threadIdx.x] = {0, 0, 0, 0};
  if (!Job::kWeightsAhead) wait_for_grid_in_front();
  let_next_grid_start();
  if (threadIdx.x == 0) *reinterpret_cast<uint64_t*>(shared + kBarrierBytes + kZeroBytes) = job.blocks();
  __syncthreads();
  if (Job::kWeightsAhead && warp_id() == kStrips + Job::kCopyWarps - 1)
    wait_for_grid_in_front();  // weights may lie in the ring before
  if constexpr (Job::kBlockRows > 32) stream_class<kAsync, 8>(job);
  stream_class<kAsync, 4>(job);
  stream_class<kAsync, 2>(job);
  stream_class<kAsync, 1>(job);
}

template <class Job>
void launch_stream(const Job& job, int64_t most_items, cudaStream_t stream) {
  const auto kernel = rung == Rung::kAsync ? stream_tiles<Job, true> : stream_tiles<Job, false>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
  const unsigned cluster = job.tiling.splits, grid = grid_for(most_items, 1, kStreamBlocks) / cluster * cluster;
  launch_early_in_clusters(cluster, kernel, std::max(grid, cluster), kStreamThreads<Job>, kMaxSharedBytes,
                           stream, job);
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

// Rows that start at multiples of 16 bytes, as bulk copies need them: x itself or a copy. `columns`: a multiple of 8.
inline Rows aligned_rows(const int32_t* n_rows, const bf16* x, int64_t stride, int64_t max_rows, int columns,
                         bf16* copy, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(x) % 16 == 0 && stride % 8 == 0) return {x, stride};
  copy_row_elements<<<grid_for(max_rows * columns, 256, 8), 256, 0, stream>>>(n_rows, x, stride, columns, copy);
  return {copy, columns};
}

}  // namespace kdtree::cuda
