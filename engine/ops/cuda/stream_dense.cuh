// y[i] = add[i] + x[i] · w^T: blocks are rows 0 … 63, 64 … 127 and so on of x, and all meet one matrix. One thread copies
// weights and tiles of rows. A matrix with few outputs is split by inputs among the thread blocks of a cluster, which then
// send each other their sums: each adds a share of them.
#pragma once
#include "pack_strips.cuh"
#include "stream.cuh"
#include "warp_products.cuh"

namespace kdtree::cuda {

constexpr int kDenseRows = 64;  // of a block
constexpr int kMostTiles = kDenseRows / 8;

// Products of the units of a stage with tiles of rows: total += weights · rows. `stride`: bytes from a unit to the next.
// INT4: the scale of a group is applied in fp32 to the group's sum.
struct DenseInt4 : Int4Units {
  using Order = TileOrder;
  static constexpr int kUnitsAStage = 2;

  template <int kUnits, int kRowTiles>
  static __device__ void multiply(const char* unit, int stride, RowTiles rows, float (&total)[kRowTiles][4]) {
    // Sums that do not wait for each other: of so many halves and tiles.
    constexpr int kHalves = 2 * kUnits, kAllowed = kRowTiles == 1 ? 4 : kRowTiles <= 4 ? 2 : 1;
    constexpr int kAtOnce = kAllowed < kHalves ? kAllowed : kHalves, kTiles = tiles_at_once(kRowTiles);
    constexpr int kUnrolled = kTiles == kRowTiles ? kHalves : 1;
#pragma unroll kUnrolled
    for (int first = 0; first < kHalves; first += kAtOnce) {
      HalfStrip strip[kAtOnce];
      uint32_t scales[kAtOnce];
      load(unit + first / 2 * stride, stride, first % 2, strip, scales);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; tile += kTiles) {
        float sum[kAtOnce][kTiles][4];
        let_products_begin();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          begin_products<false>(sum[i], strip[i].a, rows, tiles_of_half<kRowTiles>(first + i) + tile * kTileBytes);
        wait_for_products();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          take_products(sum[i]);
#pragma unroll
          for (int r = 0; r < kTiles; ++r) add_scaled(total[tile + r], scales[i], sum[i][r]);
        }
      }
    }
  }
  // Bytes from the tiles of the stage's first half to those of half h.
  template <int kRowTiles>
  static __device__ constexpr int tiles_of_half(int h) {
    return h / 2 * kRowTiles * kTileBytes + h % 2 * 64;
  }
};

struct DenseBf16 : Bf16Units {
  using Order = TileOrder;
  static constexpr int kUnitsAStage = 1;

  template <int kUnits, int kRowTiles>
  static __device__ void multiply(const char* unit, int, RowTiles rows, float (&total)[kRowTiles][4]) {
    static_assert(kUnits == 1);
    const HalfStrip first = load(unit, 0), second = load(unit, 1);
    let_products_begin();
    begin_products<true>(total, first.a, rows, 0);
    begin_products<true>(total, second.a, rows, 64);
    wait_for_products();
    take_products(total);
  }
};

// Shared memory: barriers and notes, the ring, and what the others send of split sums.
constexpr int kNotesOffset = kRingBarrierBytes + sizeof(uint64_t);
constexpr int kRingOffset = kTileBytes;

// Where inputs are split, a thread block's sums lie [row][output] in the ring's memory.
constexpr int kSumsStride = 16 * kStrips + 4;  // floats; 4 more: the lanes of a store then hit all banks

// Stages of blocks of so many tiles of rows. Weights come first, so that those of the first stages lie where they do for
// any number of rows.
template <class W, int kTilesOfRows, bool kHasSplits>
struct DenseStage {
  using Strips = W;
  static constexpr int kRowTiles = kTilesOfRows;
  static constexpr bool kSplits = kHasSplits;
  static constexpr int kClass = class_of(8 * kRowTiles);
  static constexpr int kUnits = W::kUnitsAStage;
  static constexpr int kWeightBytes = kUnits * kStrips * W::kUnitBytes;
  static constexpr int kUnitOfRows = kRowTiles * kTileBytes;
  static constexpr int kBytes = kWeightBytes + kUnits * kUnitOfRows;
  static constexpr int kSumBytes = kSplits ? 8 * kRowTiles * kSumsStride * static_cast<int>(sizeof(float)) : 0;
  static constexpr int kReceivedBytes = kSplits ? kSumBytes + 16 * kMostSplits : 0;  // each split's share of the sums
  static constexpr int kRoom = static_cast<int>(kMaxSharedBytes) - kRingOffset;
  // What is received lies behind the ring; or, where that would leave hardly a ring, in it behind the sums: the others'
  // rings must then be done with before anything is sent.
  static constexpr bool kReceivesInRing = kSplits && (kRoom - kReceivedBytes) / kBytes * kUnits < 4;
  static constexpr int kCount = std::min(kMaxStages, (kRoom - (kReceivesInRing ? 0 : kReceivedBytes)) / kBytes);
  static constexpr int kReceivedOffset = kReceivesInRing ? kSumBytes : kCount * kBytes;
  static_assert(kCount >= 2 && kWeightBytes % kTileBytes == 0 && kSumBytes <= kCount * kBytes &&
                kReceivedOffset + kReceivedBytes <= kRoom);
  using Stages = Ring<0, kCount>;

  static __device__ char* weights(int stage) { return shared_memory() + kRingOffset + stage * kWeightBytes; }
  static __device__ char* rows(int stage) { return weights(kCount) + stage * (kUnits * kUnitOfRows); }
  static __device__ float* sums() { return reinterpret_cast<float*>(weights(0)); }
  static __device__ float4* received() { return reinterpret_cast<float4*>(weights(0) + kReceivedOffset); }
};

template <class W>
struct DenseJob {
  RowMap rows[kClasses];
  Tiling tiling;
  const int32_t* n_rows;
  const char* packed;
  const void* add;
  void* y;
  int64_t y_stride;
  int32_t y_type;
  bool by_fours;  // y and add are bf16 whose outputs lie in 8-byte groups of four

  __device__ void store(int64_t at, float sum) const {
    store_as(y, at, y_type, add ? load_as(add, at, y_type) + sum : sum);
  }
  // Outputs g and g + 8 of a strip.
  __device__ void store2(int row, int strip, int g, float low, float high) const {
    const int output = 16 * strip + g;
    const int64_t at = row * y_stride + output;
    if (output < tiling.outputs) store(at, low);
    if (output + 8 < tiling.outputs) store(at + 8, high);
  }
  // Four outputs.
  __device__ void store4(int row, int output, float4 sums) const {
    float v[4] = {sums.x, sums.y, sums.z, sums.w}, before[4];
    const int64_t at = row * y_stride + output;
    if (by_fours) {
      if (output >= tiling.outputs) return;
      if (add) load4(static_cast<const bf16*>(add) + at, before);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = add ? before[i] + v[i] : v[i];
      return cuda::store4(static_cast<bf16*>(y) + at, v);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (output + i < tiling.outputs) store(at + i, v[i]);
  }
};

// Registers are short beside 64 rows' sums. The value, and what follows from it, is found anew where this is called, and
// not kept from before.
template <class T>
__device__ T anew(T value) {
  asm volatile("" : "+r"(value));
  return value;
}

// What a warp knows beside its products.
struct WarpNotes {
  int32_t rows;  // n
  uint32_t item;  // of those dealt to the cluster: cluster_index(), and every cluster_count()-th further
  uint32_t phase;  // of the barrier that counts received sums
};
__device__ inline volatile WarpNotes& notes() {
  return reinterpret_cast<WarpNotes*>(shared_memory() + kNotesOffset)[anew(warp_id())];
}
template <class F>
__device__ void note(F change) {
  __syncwarp();
  if (lane_id() == 0) change(notes());
  __syncwarp();
}
__device__ inline uint64_t* sums_received() {
  return reinterpret_cast<uint64_t*>(shared_memory() + kRingBarrierBytes);
}

// An item: a tile of weights and the block of rows that it meets.
struct DenseItem {
  Tile tile;
  int first_row, count;  // 0: there are no more items

  template <class W>
  __device__ static DenseItem noted(const DenseJob<W>& job) {
    const unsigned tiles = job.tiling.tiles();
    unsigned block = 0, tile = notes().item;
    if (tile >= tiles) block = tile / tiles, tile %= tiles;  // up to kDenseRows rows need no division
    const int first_row = static_cast<int>(block) * kDenseRows;
    return {job.tiling.tile(tile, rank_in_cluster()), first_row, max(0, min(kDenseRows, notes().rows - first_row))};
  }
};

// Goes on to the thread block's next item. False if there is none.
template <class W>
__device__ bool next_item(const DenseJob<W>& job) {
  const auto blocks = static_cast<unsigned>(ceil_div(notes().rows, kDenseRows));
  if (notes().item + cluster_count() >= blocks * job.tiling.tiles()) return false;
  note([](auto& notes) { notes.item = notes.item + cluster_count(); });
  return true;
}

// ---- on the one thread that keeps weights and rows in flight ---------------------------------------------------------
// Weights of one tile, stage by stage.
template <class S>
struct WeightsOf {
  const char* from;
  int unit_bytes, units;  // left

  template <class W>
  __device__ WeightsOf(const DenseJob<W>& job, const Tile& tile)
      : from(job.packed + (int64_t{tile.strip} * job.tiling.units + int64_t{tile.unit} * tile.strips) * W::kUnitBytes),
        unit_bytes(tile.strips * W::kUnitBytes),
        units(tile.units) {}
  __device__ void send(int stage, uint64_t* full) {
    const int bytes = min(S::kUnits, units) * unit_bytes;
    arrive_expecting(full, bytes);
    copy_weights(S::weights(stage), from, bytes, full);
    skip();
  }
  __device__ void skip() {
    from += min(S::kUnits, units) * unit_bytes;
    units -= S::kUnits;
  }
};

constexpr int kFillers = 2;  // of a stage: weights, and rows

// The first stages of a thread block's first item. Their weights do not depend on the number of rows, if there are any;
// the ring is the shortest. Returns for how many they are on their way.
template <class S, class W>
__device__ int send_weights_ahead(const DenseJob<W>& job) {
  int stages = 0;
  if (cluster_index() >= job.tiling.tiles()) return stages;
  WeightsOf<S> weights(job, job.tiling.tile(cluster_index(), rank_in_cluster()));
  typename S::Stages ring;
  for (; stages < S::kCount && weights.units > 0; ++stages, ring.next()) weights.send(stages, ring.full());
  return stages;
}
template <class S, class W>
__device__ void send_rows(const DenseJob<W>& job, int stage, int units, int column, int first_row, uint64_t* full) {
  arrive_expecting(full, units * S::kUnitOfRows);
  for (int u = 0; u < units; ++u)
    copy_tiles(S::rows(stage) + u * S::kUnitOfRows, job.rows[S::kClass], column + 64 * u, first_row, full);
}
template <class S, class W>
__device__ void send_rows_ahead(const DenseJob<W>& job, int stages) {
  const Tile tile = job.tiling.tile(cluster_index(), rank_in_cluster());
  typename S::Stages ring;
  for (int unit = 0; stages > 0; --stages, unit += S::kUnits, ring.next())
    send_rows<S>(job, ring.index, min(S::kUnits, tile.units - unit), 64 * (tile.unit + unit), 0, ring.full());
}
// Their copies end even if there are no rows.
template <class S>
__device__ void take_back(int stages) {
  typename S::Stages ring;
  for (; stages > 0; --stages, ring.next()) {
    arrive(ring.full());
    wait_phase(ring.full(), ring.phase);
  }
}

// The `ahead` first stages of weights are on their way; and of rows, where blocks are the largest.
template <class S, class W>
__device__ void send_item(const DenseJob<W>& job, typename S::Stages& ring, const DenseItem& item, int ahead) {
  WeightsOf<S> weights(job, item.tile);
#pragma unroll 1
  for (int column = 64 * item.tile.unit; weights.units > 0; column += 64 * S::kUnits, ring.next()) {
    const int units = min(S::kUnits, weights.units);
    if (ahead-- > 0) {
      weights.skip();
      if (S::kRowTiles == kMostTiles) continue;
    } else {
      wait_phase(ring.empty(), ring.phase ^ 1);
      weights.send(ring.index, ring.full());
    }
    send_rows<S>(job, ring.index, units, column, item.first_row, ring.full());
  }
}

// ---- on a warp of those that multiply --------------------------------------------------------------------------------
// Past the last strip a warp takes that once more: a warpgroup's warps multiply together.
template <class S>
__device__ void multiply_item(typename S::Stages& ring, const Tile& tile, float (&total)[S::kRowTiles][4]) {
  using W = typename S::Strips;
  const int strip = min(warp_id(), tile.strips - 1), stride = tile.strips * W::kUnitBytes;
#pragma unroll 1
  for (int units = tile.units; units > 0; units -= S::kUnits, ring.next()) {
    const RowTiles rows(S::rows(ring.index));
    const char* unit = S::weights(ring.index) + strip * W::kUnitBytes;
    wait_phase(ring.full(), ring.phase);
    if (units >= S::kUnits)
      W::template multiply<S::kUnits>(unit, stride, rows, total);
    else
      W::template multiply<1>(unit, stride, rows, total);
    ring.release();
  }
}

// A warp's totals, into y or to the thread block's sums.
template <class S, class W>
__device__ void keep_or_store(const DenseJob<W>& job, const DenseItem& item, const float (&total)[S::kRowTiles][4]) {
  const int lane = anew(lane_id()), g = lane / 4, t = lane % 4, strip = anew(warp_id());
  if (!S::kSplits && strip >= item.tile.strips) return;
#pragma unroll
  for (int r = 0; r < S::kRowTiles; ++r)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 8 * r + 2 * t + i;
      if (row >= item.count) continue;
      if constexpr (S::kSplits) {
        float* to = S::sums() + row * kSumsStride + 16 * strip + g;
        to[0] = total[r][i], to[8] = total[r][2 + i];
      } else {
        job.store2(item.first_row + row, item.tile.strip + strip, g, total[r][i], total[r][2 + i]);
      }
    }
}

__device__ inline void add(float4& sum, float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// The thread block's ring is done with: sums take its place. Its last warp, which has none, vouches for what all have read.
template <class S>
__device__ void end_ring() {
  if (S::kReceivesInRing && warp_id() < kStrips) cluster_arrive_relaxed();
  __syncthreads();
  if (S::kReceivesInRing && warp_id() == kStrips) cluster_arrive();
}

// On all threads of the cluster, once the thread block's sums lie in S::sums(): adds those of a tile in ascending order
// of splits. What a thread block adds, its share, are 16-byte pieces of [row][output]; the others send it theirs. They
// must have begun, and have read what they received before.
template <class S, class W>
__device__ void add_splits(const DenseJob<W>& job, const DenseItem& item) {
  constexpr int kPieces = kSumsStride / 4;  // of a row
  const int splits = static_cast<int>(job.tiling.splits), own = static_cast<int>(rank_in_cluster());
  const int all = item.count * kPieces, share = ceil_div(all, splits), thread = static_cast<int>(threadIdx.x);
  const auto size = [&](int split) { return max(0, min(share, all - split * share)); };
  const auto* sums = reinterpret_cast<const float4*>(S::sums());
  let_copies_follow();
  __syncthreads();
  if (S::kReceivesInRing) cluster_wait();  // the others' rings are done with
  if (thread < splits - 1) {
    const int next = own + 1 + thread, to = next < splits ? next : next - splits;
    if (size(to) > 0)
      copy_to_block(to, S::received() + own * share, sums + to * share, 16 * size(to), sums_received());
  }
  if (thread == 0) arrive_expecting(sums_received(), 16 * (splits - 1) * size(own));
  wait_phase(sums_received(), notes().phase);
  cluster_arrive_relaxed();
  for (int i = thread; i < size(own); i += static_cast<int>(blockDim.x)) {
    const int at = own * share + i, row = at / kPieces, output = at % kPieces * 4;
    if (output >= 16 * kStrips) continue;  // what pads a row
    float4 sum = {0, 0, 0, 0}, of[kMostSplits];
#pragma unroll
    for (int s = 0; s < kMostSplits; ++s) {  // past the last the own once more, so that none waits for a branch
      const float4* from = S::received() + s * share + i;
      of[s] = *(s == own || s >= splits ? sums + at : from);
    }
#pragma unroll
    for (int s = 0; s < kMostSplits; ++s)
      if (s < splits) add(sum, of[s]);
    job.store4(item.first_row + row, 16 * item.tile.strip + output, sum);
  }
  cluster_wait();  // the others have received what was sent: the block may end
}
// Between items: all have read what they received, and the ring may be filled again.
__device__ inline void end_splits() {
  note([](auto& notes) { notes.phase = notes.phase ^ 1; });
  cluster_arrive();
  cluster_wait();
}

// ---- on all threads --------------------------------------------------------------------------------------------------
// Items, as long as their blocks are of one class. Returns whether there are more. `ahead`: send_item's, for the
// first.
template <class S, class W>
__device__ bool dense_class(const DenseJob<W>& job, int ahead) {
  static_assert(S::kCount >= DenseStage<W, kMostTiles, S::kSplits>::kCount, "a ring holds all stages that are ahead");
  typename S::Stages ring;
  do {
    float total[S::kRowTiles][4] = {};
    if (warp_id() < kStrips)
      multiply_item<S>(ring, DenseItem::noted(job).tile, total);
    else if (lane_id() == 0)
      send_item<S>(job, ring, DenseItem::noted(job), ahead);
    ahead = 0;
    __syncwarp();
    const DenseItem item = DenseItem::noted(job);
    if (S::kSplits) end_ring<S>();
    if (warp_id() < kStrips) keep_or_store<S>(job, item, total);
    if constexpr (S::kSplits) add_splits<S>(job, item);
    if (!next_item(job)) return false;
    if (S::kSplits) end_splits();
  } while (class_of(DenseItem::noted(job).count) == S::kClass);
  return true;
}
// Whole blocks come first, then what is left.
template <bool kSplits, class W>
__device__ bool any_class(const DenseJob<W>& job, int ahead) {
  switch (class_of(DenseItem::noted(job).count)) {
    case class_of(64): return dense_class<DenseStage<W, kMostTiles, kSplits>>(job, ahead);
    case class_of(32): return dense_class<DenseStage<W, 4, kSplits>>(job, ahead);
    case class_of(16): return dense_class<DenseStage<W, 2, kSplits>>(job, ahead);
    default: return dense_class<DenseStage<W, 1, kSplits>>(job, ahead);
  }
}

constexpr int kDenseThreads = 32 * (kStrips + 1);

// Weights are copied before the grid in front has ended, which therefore must not be one that packs them.
template <class W, bool kSplits>
__global__ void __launch_bounds__(kDenseThreads, kStreamBlocks) stream_dense(const __grid_constant__ DenseJob<W> job) {
  using Most = DenseStage<W, kMostTiles, kSplits>;
  int ahead = 0;
  if (warp_id() == kStrips) {
    Ring<0, kMaxStages>::init(kFillers);
    if (lane_id() == 0) init_barrier(sums_received(), 1);
    publish_barriers();
    __syncwarp();
    if (lane_id() == 0) ahead = send_weights_ahead<Most>(job);
  }
  __syncthreads();
  if (kSplits) cluster_arrive_relaxed();
  wait_for_grid_in_front();
  let_next_grid_start();
  const int n = *job.n_rows;
  if (ahead > 0 && class_of(n) == Most::kClass) send_rows_ahead<Most>(job, ahead);
  note([&](auto& notes) {
    notes.rows = n;
    notes.item = cluster_index();
    notes.phase = 0;
  });
  if (kSplits) cluster_wait();  // all have begun
  if (DenseItem::noted(job).count == 0) return take_back<Most>(ahead);
  while (any_class<kSplits>(job, ahead)) {
    ahead = 0;
    let_copies_follow();
    __syncthreads();  // the next class lays out the ring otherwise
    if (warp_id() == kStrips) {
      Ring<0, kMaxStages>::init_again(kFillers);
      publish_barriers();
    }
    __syncthreads();
  }
}

template <class W>
class StreamDense {
 public:
  const Tiling tiling;
  StreamDense(int64_t max_rows, int outputs, int inputs) : tiling(outputs, inputs, true), max_rows_(max_rows) {}

  // Before the first launch; not while a stream is captured.
  static cudaError_t init() {
    if (rung == Rung::kPlain) return cudaSuccess;
    cudaError_t error = RowMap::init();
    for (const auto kernel : {stream_dense<W, true>, stream_dense<W, false>})
      if (error == cudaSuccess) error = init_stream(kernel, kDenseThreads, &blocks_[1]);
    for (unsigned cluster = 2; error == cudaSuccess && cluster <= kMostSplits; ++cluster) {
      int clusters = 0;
      error = most_clusters(&clusters, cluster, stream_dense<W, true>, kDenseThreads, kMaxSharedBytes);
      if (error == cudaSuccess && clusters == 0) error = cudaErrorLaunchOutOfResources;
      blocks_[cluster] = cluster * static_cast<unsigned>(clusters);
    }
    return error;
  }
  size_t packed_bytes() const { return strip_bytes<W>(tiling.strips, tiling.inputs); }
  size_t workspace() const { return static_cast<size_t>(max_rows_ * tiling.inputs) * sizeof(bf16); }

  template <class Args>
  cudaError_t launch(const Args& args, int64_t x_stride, int64_t y_stride, int32_t y_type, void* workspace,
                     cudaStream_t stream) const {
    const Rows x = aligned_rows(args.n_rows, static_cast<const bf16*>(args.x), x_stride, max_rows_, tiling.inputs,
                                static_cast<bf16*>(workspace), stream);
    const auto address = reinterpret_cast<uintptr_t>(args.y) | reinterpret_cast<uintptr_t>(args.add);
    const bool by_fours = y_type == kBFloat16 && (y_stride | tiling.outputs) % 4 == 0 && address % 8 == 0;
    DenseJob<W> job{{}, tiling, args.n_rows, static_cast<const char*>(args.packed), args.add, args.y, y_stride, y_type,
                    by_fours};
    for (const int tiles : {8, 4, 2, 1}) {
      const cudaError_t error =
          RowMap::make(&job.rows[class_of(8 * tiles)], x.x, x.stride * static_cast<int64_t>(sizeof(bf16)), tiling.inputs,
                       max_rows_, tiles);
      if (error != cudaSuccess) return error;
    }
    const unsigned cluster = tiling.splits;
    const int64_t blocks = ceil_div(max_rows_, kDenseRows) * tiling.tiles() * cluster;
    launch_early_in_clusters(cluster, cluster > 1 ? stream_dense<W, true> : stream_dense<W, false>,
                             static_cast<unsigned>(std::min<int64_t>(blocks, blocks_[cluster])), kDenseThreads,
                             kMaxSharedBytes, stream, job);
    return cudaSuccess;
  }

 private:
  const int64_t max_rows_;
  static inline unsigned blocks_[kMostSplits + 1];  // thread blocks that run at once, by the size of a cluster
};

}  // namespace kdtree::cuda
