// The matrix kernel for few rows of bf16: weights (strips.cuh) stream from memory once, through a ring in shared
// memory, past the tensor cores, with all rows that meet them beside them.
//
// A strip is the 16 side of the product, 8 rows of x are the 8 side. Halves follow each other in ascending order, and a
// column of the result depends on its own row of x alone: a row has the same bits in whatever company it comes.
//
// A block is up to 64 rows of x that meet the same matrix. Its work is cut into tiles of kStrips strips (and, where a
// matrix has few outputs, into splits of its inputs, fixed by its size); block and tile make an item. Items are dealt
// to a grid that fills the device once. In a thread block kStrips warps multiply, a strip each; two more keep weights
// and rows in flight, across the items' borders too.
#pragma once
#include <algorithm>

#include "numbers.cuh"
#include "operator.cuh"
#include "strips.cuh"

namespace kdtree::cuda {

constexpr int kClasses = 4;  // of blocks, by tiles of 8 rows: 8, 4, 2, 1; large first, so that small ones fill the end
constexpr int kStreamBlocks = 2;  // a multiprocessor
constexpr int kMaxStages = 8;
constexpr int kMostSplits = 8;
constexpr size_t kBarrierBytes = 2 * kClasses * kMaxStages * sizeof(uint64_t);
constexpr size_t kZeroBytes = 512;  // a row of x in the longest stage
constexpr size_t kCountsOffset = kBarrierBytes + kZeroBytes;  // in shared memory
constexpr size_t kStageOffset = kCountsOffset + 16 * sizeof(uint64_t);

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
  // blocks of a tile's splits are a cluster, and all clusters are to run at once: 32 of 7 fit an H200, 32 of 8 do not.
  Tiling(int outputs, int inputs, bool split)
      : outputs(outputs),
        inputs(inputs),
        units(ceil_div(inputs, 64)),
        halves(inputs / 32),
        strips(ceil_div(outputs, 16)) {
    const int most = split ? std::max(1, std::min({kMostSplits, 224 / ceil_div(strips, kStrips), units / 4})) : 1;
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
//   kBlockRows                  most rows of a block
//   kSplits                     whether inputs may be split
//   kWeightsAhead               true if blocks are there before the grid in front has ended. Its warps must all have waited
//                               for what is in front of it, and the grid behind reads nothing before its own wait
//   tiling
//   blocks()                    how many, 16 bits a class; block(i): i counts over all classes, 0 first
//   weights(matrix)             its first strip
//   entry(block, i)             names row i of a block, for
//   inputs(entry)               the row, 16-byte aligned
//   kGathers, stride()          false if a block's rows lie so many elements apart
//   store(entry, strip, g, low, high)        outputs g and g + 8 of that strip; or, where inputs are split,
//   store4(row, output, sums)                four outputs

template <class W, int kRowTiles>
struct Stage {
  using Strips = W;
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kClass = class_of(kRows);
  static constexpr int kUnits = Strips::units_a_stage(kRowTiles);
  static constexpr int kRowBytes = 128 * kUnits + 64;  // 64 more: 16-byte loads of two rows then hit all banks
  static constexpr int kRowsOffset = kUnits * kStrips * Strips::kUnitBytes;
  static constexpr int kBytes = kRowsOffset + kRows * kRowBytes;
  static constexpr int kCount = std::min<int>(kMaxStages, (kMaxSharedBytes - kStageOffset) / kBytes);
  static_assert(kCount >= 3);
};

// Of the thread block; a function, so that its address is a constant and no register.
__device__ inline char* shared_memory() {
  extern __shared__ __align__(128) char shared[];
  return shared;
}

// A ring of stages; all sides walk it in the same order.
template <class S>
struct Ring {
  int index = 0;
  uint32_t phase = 0;
  static __device__ uint64_t* barriers() {
    return reinterpret_cast<uint64_t*>(shared_memory()) + S::kClass * 2 * kMaxStages;
  }
  __device__ uint64_t* full() const { return barriers() + index; }
  __device__ uint64_t* empty() const { return full() + kMaxStages; }
  __device__ char* stage() const { return shared_memory() + kStageOffset + index * S::kBytes; }
  __device__ const char* zeros() const { return shared_memory() + kBarrierBytes; }
  __device__ void next() {
    if (++index == S::kCount) index = 0, phase ^= 1;
  }
};

// A block's sums where inputs are split: [row][output], in the ring's memory.
constexpr int kSumsStride = 16 * kStrips + 4;  // floats; 4 more: the lanes of a store then hit all banks
__device__ inline float* split_sums() { return reinterpret_cast<float*>(shared_memory() + kStageOffset); }

__device__ inline void add(float4& sum, float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// On all threads of the cluster: adds the splits' sums of a tile in ascending order, four outputs a thread.
template <class Job>
__device__ void add_splits(const Job& job, const Block& block, const Tile& tile) {
  if constexpr (Job::kSplits) {
    cluster_sync();
    constexpr unsigned columns = 4 * kStrips;
    const unsigned splits = job.tiling.splits, own = tile.split, first = (splits - own) % splits;
    const unsigned count = static_cast<unsigned>(block.count) * columns;
    for (unsigned i = own * blockDim.x + threadIdx.x; i < count; i += splits * blockDim.x) {
      const unsigned row = i / columns, column = 4 * (i % columns);
      const auto* at = reinterpret_cast<const float4*>(split_sums() + row * kSumsStride + column);
      // All loads are on their way before one is waited for; a block begins with its own sums, so that not all read the
      // same block at a time. Split 0 is load `first`.
      float4 sum = {0, 0, 0, 0}, loaded[kMostSplits];
#pragma unroll
      for (unsigned s = 0; s < kMostSplits; ++s)
        loaded[s] = load_from_block_if(s < splits, at, s < splits - own ? own + s : own + s - splits);
#pragma unroll
      for (unsigned s = 0; s < kMostSplits; ++s)
        if (s >= first && s < splits) add(sum, loaded[s]);
#pragma unroll
      for (unsigned s = 0; s < kMostSplits; ++s)
        if (s < first) add(sum, loaded[s]);
      job.store4(block.first + row, 16 * tile.strip + column, sum);
    }
    cluster_sync_to_overwrite();
  }
}
template <class Job>
__device__ void meet_to_add_splits(const Job& job, const Block& block, const Tile& tile) {
  if (!Job::kSplits || job.tiling.splits == 1) return;
  __syncthreads();
  add_splits(job, block, tile);
}

// On a warp, of which one lane works: keeps weights in flight, one bulk copy a stage.
template <class Job, class S>
__device__ __noinline__ void send_weights(const Job& job, unsigned item, unsigned items, unsigned first_block) {
  const Tiling& tiling = job.tiling;
  const unsigned tiles = tiling.tiles();
  Ring<S> ring;
  for (; item < items; item += gridDim.x) {
    const Tile tile = tiling.tile(item % tiles);
    const Block block = job.block(first_block + item / tiles);
    const int unit_bytes = tile.strips * S::Strips::kUnitBytes;
    const char* from = job.weights(block.matrix) + int64_t{tile.strip} * tiling.units * S::Strips::kUnitBytes +
                       int64_t{tile.unit} * unit_bytes;
#pragma unroll 1
    for (int units = lane_id() == 0 ? ceil_div(tile.halves, 2) : 0; units > 0; units -= S::kUnits, ring.next()) {
      const int bytes = min(S::kUnits, units) * unit_bytes;
      wait_phase(ring.empty(), ring.phase ^ 1);
      arrive_expecting(ring.full(), bytes);
      copy_weights(ring.stage(), from, bytes, ring.full());
      from += bytes;
    }
    __syncwarp();
    meet_to_add_splits(job, block, tile);
  }
}

// On a warp: keeps rows in flight. A lane copies the same 16 bytes of every row that it comes to.
template <class Job, class S>
__device__ __noinline__ void send_rows(const Job& job, unsigned item, unsigned items, unsigned first_block) {
  constexpr int kPieces = 8 * S::kUnits;  // of a row in a stage
  constexpr int kRowsAtOnce = 32 / kPieces, kTurns = S::kRows / kRowsAtOnce, kStep = kRowsAtOnce * S::kRowBytes;
  constexpr int kKept = Job::kGathers ? kTurns : 1;  // where the rows of every turn lie, or of the first
  const int piece = lane_id() % kPieces, first_row = lane_id() / kPieces;
  const unsigned tiles = job.tiling.tiles();
  Ring<S> ring;
  for (; item < items; item += gridDim.x) {
    const Tile tile = job.tiling.tile(item % tiles);
    const Block block = job.block(first_block + item / tiles);
    const bf16* rows[kKept];
#pragma unroll
    for (int turn = 0; turn < kKept; ++turn)
      if (turn * kRowsAtOnce < block.count)  // past the last row a lane takes that once more
        rows[turn] = job.inputs(job.entry(block, min(first_row + turn * kRowsAtOnce, block.count - 1))) +
                     64 * tile.unit + 8 * piece;
#pragma unroll 1
    for (int halves = tile.halves; halves > 0; halves -= 2 * S::kUnits, ring.next()) {
      wait_phase(ring.empty(), ring.phase ^ 1);
      char* to = ring.stage() + S::kRowsOffset + first_row * S::kRowBytes + 16 * piece;
      const int done = 32 * (tile.halves - halves);
      if (piece >= 4 * halves) {
        // the inputs end before
      } else if constexpr (Job::kGathers) {
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
          if (turn * kRowsAtOnce >= block.count) break;
          copy_16(to + turn * kStep, rows[turn] + done);
        }
      } else {
        const bf16* from = rows[0] + done;
        const int64_t step = kRowsAtOnce * job.stride();
        int row = first_row;
        for (; row - first_row + 8 <= block.count; row += 8) {
#pragma unroll
          for (int turn = 0; turn < 8 / kRowsAtOnce; ++turn, to += kStep, from += step) copy_16(to, from);
        }
#pragma unroll 1
        for (; row < block.count; row += kRowsAtOnce, to += kStep, from += step) copy_16(to, from);
      }
      arrive_when_copied(ring.full());
    }
    meet_to_add_splits(job, block, tile);
  }
}

// The stages of one item: total += weights · rows.
template <class S, int kRowTiles>
__device__ void multiply_item(Ring<S>& ring, int halves, int strips, int count, float (&total)[kRowTiles][4]) {
  using W = typename S::Strips;
  constexpr int kTileBytes = 8 * S::kRowBytes;
  const int g = lane_id() / 4, t = lane_id() % 4;
  const bool mine = warp_id() < strips;
  const int unit_bytes = strips * W::kUnitBytes;
  // Rows that are not there are not stored. Zeros save their products power; beside other tiles they are any bits.
  const bool absent = kRowTiles == 1 && g >= count;
  for (; halves > 0; halves -= 2 * S::kUnits, ring.next()) {
    wait_phase(ring.full(), ring.phase);
    const char* strip = ring.stage() + warp_id() * W::kUnitBytes;
    const char* x = (absent ? ring.zeros() : ring.stage() + S::kRowsOffset + g * S::kRowBytes) + 16 * t;
    // Sums that do not wait for each other: as many as registers allow.
    constexpr int kAllowed = kRowTiles == 1 ? 4 : kRowTiles <= 4 ? 2 : 1;
    constexpr int kHalves = kAllowed < 2 * S::kUnits ? kAllowed : 2 * S::kUnits;
    constexpr int kRowsAtOnce = kRowTiles < 4 ? kRowTiles : 4;
    constexpr int kUnrolled = kRowTiles == 1 ? 2 * S::kUnits : 1;
    if (mine && kHalves > 1 && halves >= 2 * S::kUnits) {
#pragma unroll kUnrolled
      for (int h = 0; h < 2 * S::kUnits; h += kHalves)
        W::template multiply<kHalves, kRowsAtOnce, kTileBytes>(strip + h / 2 * unit_bytes, unit_bytes, 0, x + 64 * h,
                                                               total);
    } else if (mine) {
      const int here = min(2 * S::kUnits, halves);
#pragma unroll 1
      for (int h = 0; h < here; ++h)
        W::template multiply<1, kHalves == 1 ? kRowsAtOnce : 1, kTileBytes>(strip + h / 2 * unit_bytes, unit_bytes,
                                                                            h % 2, x + 64 * h, total);
    }
    __syncwarp();
    if (lane_id() == 0) arrive(ring.empty());
  }
}

template <class Job, class S, int kRowTiles>
__device__ void consume(const Job& job, unsigned item, unsigned items, unsigned first_block) {
  const Tiling& tiling = job.tiling;
  const unsigned tiles = tiling.tiles();
  const int g = lane_id() / 4, t = lane_id() % 4;
  Ring<S> ring;
  Block next;
  if (kRowTiles <= 2 && item < items) next = job.block(first_block + item / tiles);
  for (; item < items; item += gridDim.x) {
    Block block = kRowTiles <= 2 ? next : job.block(first_block + item / tiles);
    Tile tile = tiling.tile(item % tiles);
    if (kRowTiles <= 2 && item + gridDim.x < items) next = job.block(first_block + (item + gridDim.x) / tiles);
    constexpr int kAhead = kRowTiles <= 2 ? kRowTiles : 0;  // entries fetched before they are needed
    int entries[kAhead + 1][2];
#pragma unroll
    for (int r = 0; r < kAhead; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) entries[r][i] = job.entry(block, min(8 * r + 2 * t + i, block.count - 1));
    float total[kRowTiles][4] = {};
    multiply_item(ring, tile.halves, tile.strips, block.count, total);
    if (kRowTiles >= 4 && !Job::kGathers) {  // found again rather than kept in registers that the loop needs
      asm volatile("" : "+r"(item));
      block = job.block(first_block + item / tiles), tile = tiling.tile(item % tiles);
    }
    const bool mine = warp_id() < tile.strips, split = Job::kSplits && tiling.splits > 1;
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

// Blocks of each class, as every warp has read it: in shared memory, since registers are short.
__device__ inline volatile uint64_t* counts_of_warp() {
  return reinterpret_cast<uint64_t*>(shared_memory() + kCountsOffset) + warp_id();
}

template <int kRowTiles, class Job>
__device__ void stream_class(const Job& job) {
  using S = Stage<typename Job::Strips, kRowTiles>;
  const uint64_t counts = *counts_of_warp();
  const unsigned tiles = job.tiling.tiles(), items = blocks_of(counts, S::kClass) * tiles, grid = gridDim.x;
  if (items == 0) return;  // for the whole grid
  unsigned first_block = 0;
#pragma unroll
  for (int c = 0; c < S::kClass; ++c) first_block += blocks_of(counts, c);
  if (first_block > 0) {  // the class before laid out the ring otherwise
    let_copies_overwrite();
    __syncthreads();
  }
  const unsigned item = (blockIdx.x + grid - first_block * tiles % grid) % grid;  // dealing goes on where it stopped
  if (warp_id() < kStrips)
    consume<Job, S, kRowTiles>(job, item, items, first_block);
  else if (warp_id() == kStrips)
    send_rows<Job, S>(job, item, items, first_block);
  else
    send_weights<Job, S>(job, item, items, first_block);
}

// On one thread.
template <class S>
__device__ void init_ring() {
#pragma unroll
  for (int i = 0; i < S::kCount; ++i) {
    init_barrier(Ring<S>::barriers() + i, 1 + 32);  // weights, and every lane's pieces of rows
    init_barrier(Ring<S>::barriers() + kMaxStages + i, kStrips);
  }
}

constexpr int kStreamThreads = 32 * (kStrips + 2);

template <class Job>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks) stream_tiles(const __grid_constant__ Job job) {
  using W = typename Job::Strips;
  if (threadIdx.x == 32 * (kStrips + 1)) {
    if constexpr (Job::kBlockRows > 32) init_ring<Stage<W, 8>>();
    init_ring<Stage<W, 4>>();
    init_ring<Stage<W, 2>>();
    init_ring<Stage<W, 1>>();
    publish_barriers();
  }
  if (warp_id() == kStrips) reinterpret_cast<uint4*>(shared_memory() + kBarrierBytes)[lane_id()] = {0, 0, 0, 0};
  __syncthreads();
  if (!Job::kWeightsAhead || warp_id() != kStrips + 1) wait_for_grid_in_front();
  let_next_grid_start();
  *counts_of_warp() = job.blocks();
  __syncwarp();
  if constexpr (Job::kBlockRows > 32) stream_class<8>(job);
  stream_class<4>(job);
  stream_class<2>(job);
  stream_class<1>(job);
}

// Thread blocks of a grid that run at once, by the size of a cluster.
template <class Job>
unsigned stream_blocks[kMostSplits + 1];

// Before the first launch; not while a stream is captured.
template <class Job>
cudaError_t init_stream() {
  if (rung == Rung::kPlain) return cudaSuccess;
  cudaError_t error =
      cudaFuncSetAttribute(stream_tiles<Job>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
  stream_blocks<Job>[1] = static_cast<unsigned>(multiprocessors * kStreamBlocks);
  for (unsigned cluster = 2; Job::kSplits && error == cudaSuccess && cluster <= kMostSplits; ++cluster) {
    int clusters = 0;
    error = most_clusters(&clusters, cluster, stream_tiles<Job>, kStreamThreads, kMaxSharedBytes);
    if (error == cudaSuccess && clusters == 0) error = cudaErrorLaunchOutOfResources;
    stream_blocks<Job>[cluster] = cluster * static_cast<unsigned>(clusters);
  }
  return error;
}

template <class Job>
void launch_stream(const Job& job, int64_t most_items, cudaStream_t stream) {
  const unsigned cluster = job.tiling.splits;
  const auto grid = static_cast<unsigned>(std::clamp<int64_t>(most_items, cluster, stream_blocks<Job>[cluster]));
  launch_early_in_clusters(cluster, stream_tiles<Job>, grid, kStreamThreads, kMaxSharedBytes, stream, job);
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

// Rows that start at multiples of 16 bytes, as copies need them: x itself or a copy. `columns`: a multiple of 8.
inline Rows aligned_rows(const int32_t* n_rows, const bf16* x, int64_t stride, int64_t max_rows, int columns,
                         bf16* copy, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(x) % 16 == 0 && stride % 8 == 0) return {x, stride};
  copy_row_elements<<<grid_for(max_rows * columns, 256, 8), 256, 0, stream>>>(n_rows, x, stride, columns, copy);
  return {copy, columns};
}

}  // namespace kdtree::cuda
