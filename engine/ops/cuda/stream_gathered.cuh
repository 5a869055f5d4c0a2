// Rows of a list that meet a matrix of their own, as the experts' do: a block is up to kGatheredRows of them. One warp
// copies rows, 16 bytes a lane; one thread copies weights, a bulk copy a stage.
#pragma once
#include "stream.cuh"

namespace kdtree::cuda {

constexpr int kGatheredRows = 32;  // of a block

// Blocks of each class, 16 bits each.
__device__ inline unsigned blocks_of(uint64_t counts, int block_class) {
  return static_cast<unsigned>(counts >> (16 * block_class)) & 0xFFFF;
}

// Rows first, first + 1, … of a list, and the matrix they meet; `entry` is the list's at `first`.
struct Block {
  int32_t matrix, first, count, entry;
};

// A job says what is multiplied, and what becomes of the result:
//   Strips
//   kWeightsAhead               true if blocks are there before the grid in front has ended. Its warps must all have waited
//                               for what is in front of it, and the grid behind reads nothing before its own wait
//   tiling
//   blocks()                    how many, 16 bits a class; block(i): i counts over all classes, 0 first
//   weights(matrix)             its first strip
//   entry(block, i)             names row i of a block, for
//   inputs(entry)               the row, 16-byte aligned
//   store(entry, strip, g, low, high)        outputs g and g + 8 of that strip

// INT4 strips: the scale of a group is applied in fp32 to the group's sum.
struct GatheredInt4 : Int4Units {
  using Order = GatheredOrder;
  static constexpr int units_a_stage(int row_tiles) { return row_tiles <= 2 ? 4 : 2; }

  // Adds the product of halves as Int4Units::load takes them. Sums of kRowsAtOnce tiles do not wait for each other.
  template <int kHalves, int kRowsAtOnce, int kTileBytes, int kRowTiles>
  static __device__ void multiply(const char* unit, int stride, int half, const char* x, float (&total)[kRowTiles][4]) {
    HalfStrip strip[kHalves];
    uint32_t scales[kHalves];
    load(unit, stride, half, strip, scales);
#pragma unroll
    for (int first = 0; first < kRowTiles; first += kRowsAtOnce) {
      float sum[kRowsAtOnce][kHalves][4] = {};
      uint4 rows[kRowsAtOnce][kHalves];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
          rows[r][h] = *reinterpret_cast<const uint4*>(x + (first + r) * kTileBytes + 64 * h);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) multiply_first(sum[r][h], strip[h].a, rows[r][h]);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) multiply_second(sum[r][h], strip[h].a, rows[r][h]);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) add_scaled(total[first + r], scales[h], sum[r][h]);
    }
  }
};

struct GatheredBf16 : Bf16Units {
  using Order = GatheredOrder;
  static constexpr int units_a_stage(int) { return 1; }

  template <int kHalves, int kRowsAtOnce, int kTileBytes, int kRowTiles>
  static __device__ void multiply(const char* unit, int stride, int half, const char* x, float (&total)[kRowTiles][4]) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const HalfStrip strip = load(unit + h / 2 * stride, half + h % 2);
#pragma unroll
      for (int first = 0; first < kRowTiles; first += kRowsAtOnce) {
        uint4 rows[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r)
          rows[r] = *reinterpret_cast<const uint4*>(x + (first + r) * kTileBytes + 64 * h);
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) multiply_first(total[first + r], strip.a, rows[r]);
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) multiply_second(total[first + r], strip.a, rows[r]);
      }
    }
  }
};

// Shared memory: barriers of every class's ring, zeros, counts, stages.
constexpr int kZerosOffset = kClasses * kRingBarrierBytes;
constexpr int kZeroBytes = 512;  // a row of x in the longest stage
constexpr int kCountsOffset = kZerosOffset + kZeroBytes;

template <class W, int kRowTiles>
struct Stage {
  using Strips = W;
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kClass = class_of(kRows);
  static constexpr int kUnits = Strips::units_a_stage(kRowTiles);
  static constexpr int kRowBytes = 128 * kUnits + 64;  // 64 more: 16-byte loads of two rows then hit all banks
  static constexpr int kRowsOffset = kUnits * kStrips * Strips::kUnitBytes;
  static constexpr int kBytes = kRowsOffset + kRows * kRowBytes;
  static constexpr int kOffset = kCountsOffset + 16 * sizeof(uint64_t);
  static constexpr int kCount = std::min<int>(kMaxStages, (kMaxSharedBytes - kOffset) / kBytes);
  static_assert(kCount >= 3);
  using Stages = Ring<kClass * kRingBarrierBytes, kCount>;
  static __device__ char* at(const Stages& ring) { return shared_memory() + kOffset + ring.index * kBytes; }
};

__device__ inline const char* zeros() { return shared_memory() + kZerosOffset; }

// On a warp, of which one lane works: keeps weights in flight, one bulk copy a stage.
template <class Job, class S>
__device__ __noinline__ void send_weights(const Job& job, unsigned item, unsigned items, unsigned first_block) {
  const Tiling& tiling = job.tiling;
  const unsigned tiles = tiling.tiles();
  typename S::Stages ring;
  for (; item < items; item += gridDim.x) {
    const Tile tile = tiling.tile(item % tiles);
    const Block block = job.block(first_block + item / tiles);
    const int unit_bytes = tile.strips * S::Strips::kUnitBytes;
    const char* from = job.weights(block.matrix) + int64_t{tile.strip} * tiling.units * S::Strips::kUnitBytes;
#pragma unroll 1
    for (int units = lane_id() == 0 ? tile.units : 0; units > 0; units -= S::kUnits, ring.next()) {
      const int bytes = min(S::kUnits, units) * unit_bytes;
      wait_phase(ring.empty(), ring.phase ^ 1);
      arrive_expecting(ring.full(), bytes);
      copy_weights(S::at(ring), from, bytes, ring.full());
      from += bytes;
    }
    __syncwarp();
  }
}

// On a warp: keeps rows in flight. A lane copies the same 16 bytes of every row that it comes to.
template <class Job, class S>
__device__ __noinline__ void send_rows(const Job& job, unsigned item, unsigned items, unsigned first_block) {
  constexpr int kPieces = 8 * S::kUnits;  // of a row in a stage
  constexpr int kRowsAtOnce = 32 / kPieces, kTurns = S::kRows / kRowsAtOnce, kStep = kRowsAtOnce * S::kRowBytes;
  const int piece = lane_id() % kPieces, first_row = lane_id() / kPieces;
  const unsigned tiles = job.tiling.tiles();
  typename S::Stages ring;
  for (; item < items; item += gridDim.x) {
    const Block block = job.block(first_block + item / tiles);
    const bf16* rows[kTurns];  // where those of every turn lie
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
      if (turn * kRowsAtOnce < block.count)  // past the last row a lane takes that once more
        rows[turn] = job.inputs(job.entry(block, min(first_row + turn * kRowsAtOnce, block.count - 1))) + 8 * piece;
#pragma unroll 1
    for (int done = 0, inputs = job.tiling.inputs; done < inputs; done += 64 * S::kUnits, ring.next()) {
      wait_phase(ring.empty(), ring.phase ^ 1);
      char* to = S::at(ring) + S::kRowsOffset + first_row * S::kRowBytes + 16 * piece;
      if (done + 8 * piece < inputs) {
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
          if (turn * kRowsAtOnce >= block.count) break;
          copy_16(to + turn * kStep, rows[turn] + done);
        }
      }
      arrive_when_copied(ring.full());
    }
  }
}

// The stages of one item: total += weights · rows.
template <class S, int kRowTiles>
__device__ void multiply_item(typename S::Stages& ring, int halves, int strips, int count, float (&total)[kRowTiles][4]) {
  using W = typename S::Strips;
  constexpr int kTileBytes = 8 * S::kRowBytes;
  const int g = lane_id() / 4, t = lane_id() % 4;
  const bool mine = warp_id() < strips;
  const int unit_bytes = strips * W::kUnitBytes;
  // Rows that are not there are not stored. Zeros save their products power; beside other tiles they are any bits.
  const bool absent = kRowTiles == 1 && g >= count;
  for (; halves > 0; halves -= 2 * S::kUnits, ring.next()) {
    wait_phase(ring.full(), ring.phase);
    const char* strip = S::at(ring) + warp_id() * W::kUnitBytes;
    const char* x = (absent ? zeros() : S::at(ring) + S::kRowsOffset + g * S::kRowBytes) + 16 * t;
    // Sums that do not wait for each other: as many as registers allow.
    constexpr int kAllowed = kRowTiles == 1 ? 4 : 2;
    constexpr int kHalves = kAllowed < 2 * S::kUnits ? kAllowed : 2 * S::kUnits;
    constexpr int kUnrolled = kRowTiles == 1 ? 2 * S::kUnits : 1;
    if (mine && halves >= 2 * S::kUnits) {
#pragma unroll kUnrolled
      for (int h = 0; h < 2 * S::kUnits; h += kHalves)
        W::template multiply<kHalves, kRowTiles, kTileBytes>(strip + h / 2 * unit_bytes, unit_bytes, 0, x + 64 * h,
                                                               total);
    } else if (mine) {
      const int here = min(2 * S::kUnits, halves);
#pragma unroll 1
      for (int h = 0; h < here; ++h)
        W::template multiply<1, 1, kTileBytes>(strip + h / 2 * unit_bytes, unit_bytes, h % 2, x + 64 * h, total);
    }
    ring.release();
  }
}

template <class Job, class S, int kRowTiles>
__device__ void consume(const Job& job, unsigned item, unsigned items, unsigned first_block) {
  const Tiling& tiling = job.tiling;
  const unsigned tiles = tiling.tiles();
  const int t = lane_id() % 4;
  typename S::Stages ring;
  Block next;
  if (kRowTiles <= 2 && item < items) next = job.block(first_block + item / tiles);
  for (; item < items; item += gridDim.x) {
    const Block block = kRowTiles <= 2 ? next : job.block(first_block + item / tiles);
    const Tile tile = tiling.tile(item % tiles);
    if (kRowTiles <= 2 && item + gridDim.x < items) next = job.block(first_block + (item + gridDim.x) / tiles);
    constexpr int kAhead = kRowTiles <= 2 ? kRowTiles : 0;  // entries fetched before they are needed
    int entries[kAhead + 1][2];
#pragma unroll
    for (int r = 0; r < kAhead; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) entries[r][i] = job.entry(block, min(8 * r + 2 * t + i, block.count - 1));
    float total[kRowTiles][4] = {};
    multiply_item<S>(ring, tiling.inputs / 32, tile.strips, block.count, total);
    if (warp_id() >= tile.strips) continue;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * r + 2 * t + i;
        if (row < block.count)
          job.store(r < kAhead ? entries[r][i] : job.entry(block, row), tile.strip + warp_id(), lane_id() / 4,
                    total[r][i], total[r][2 + i]);
      }
  }
}

// Blocks of each class, as every warp has read it: in shared memory, since registers are short.
__device__ inline volatile uint64_t* counts_of_warp() {
  return reinterpret_cast<uint64_t*>(shared_memory() + kCountsOffset) + warp_id();
}

template <int kRowTiles, class Job>
__device__ void gathered_class(const Job& job) {
  using S = Stage<typename Job::Strips, kRowTiles>;
  const uint64_t counts = *counts_of_warp();
  const unsigned tiles = job.tiling.tiles(), items = blocks_of(counts, S::kClass) * tiles, grid = gridDim.x;
  if (items == 0) return;  // for the whole grid
  unsigned first_block = 0;
#pragma unroll
  for (int c = 0; c < S::kClass; ++c) first_block += blocks_of(counts, c);
  if (first_block > 0) {  // the class before laid out the ring otherwise
    let_copies_follow();
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

constexpr int kGatheredThreads = 32 * (kStrips + 2);

template <class Job>
__global__ void __launch_bounds__(kGatheredThreads, kStreamBlocks) stream_gathered(const __grid_constant__ Job job) {
  using W = typename Job::Strips;
  static_assert(kGatheredRows == Stage<W, 4>::kRows);
  if (warp_id() == kStrips + 1) {
    constexpr int kFillers = 1 + 32;  // weights, and every lane's pieces of rows
    Stage<W, 4>::Stages::init(kFillers);
    Stage<W, 2>::Stages::init(kFillers);
    Stage<W, 1>::Stages::init(kFillers);
    publish_barriers();
  }
  if (warp_id() == kStrips) reinterpret_cast<uint4*>(shared_memory() + kZerosOffset)[lane_id()] = {0, 0, 0, 0};
  __syncthreads();
  if (!Job::kWeightsAhead || warp_id() != kStrips + 1) wait_for_grid_in_front();
  let_next_grid_start();
  *counts_of_warp() = job.blocks();
  __syncwarp();
  gathered_class<4>(job);
  gathered_class<2>(job);
  gathered_class<1>(job);
}

template <class Job>
unsigned gathered_at_once;  // thread blocks

// Before the first launch.
template <class Job>
cudaError_t init_gathered() {
  if (rung == Rung::kPlain) return cudaSuccess;
  return init_stream(stream_gathered<Job>, kGatheredThreads, &gathered_at_once<Job>);
}

template <class Job>
void launch_gathered(const Job& job, int64_t most_items, cudaStream_t stream) {
  launch_early(stream_gathered<Job>, static_cast<unsigned>(std::min<int64_t>(most_items, gathered_at_once<Job>)),
               kGatheredThreads, kMaxSharedBytes, stream, job);
}

}  // namespace kdtree::cuda
