// The expert kernels over stream_gathered: pairs (row, slot) are sorted by expert into blocks that share its weights; then
// gate, up and silu in one launch, down in the next, and the sum over slots in router order. Each launch overlaps the
// end of the one in front. Experts without rows cost nothing, and so do rows that a smaller tree leaves out.
#pragma once
#include "pack_strips.cuh"
#include "stream_gathered.cuh"
#include "swiglu.cuh"

namespace kdtree::cuda {

constexpr int kMostExperts = 1024;  // a thread each when sorting
constexpr int kSortedAtOnce = 2048;

struct StreamExpertsShape {
  int64_t max_rows;
  int hidden, intermediate, n_experts, top_k;
  int64_t max_pairs() const { return max_rows * top_k; }
  int64_t max_blocks() const { return std::min(max_pairs(), n_experts + max_pairs() / kGatheredRows); }
};

// What sorting leaves. Read past the L1: it may have been written while the reader's launch was already on its way.
struct ExpertBlocks {
  Block* blocks;    // by class
  uint64_t* counts;  // how many, by class
  int32_t* order;   // [pairs]: pair = row · top_k + slot, ascending within an expert

  __device__ uint64_t count() const { return __ldcg(reinterpret_cast<const unsigned long long*>(counts)); }
  __device__ Block block(int i) const {
    const int4 v = __ldcg(reinterpret_cast<const int4*>(blocks + i));
    return {v.x, v.y, v.z, v.w};
  }
  __device__ int pair(const Block& block, int i) const {
    return i == 0 ? block.entry : __ldcg(order + block.first + i);
  }
};

struct StreamExpertsScratch {
  float* down;   // [pairs, hidden]
  bf16* middle;  // [pairs, intermediate]: silu(gate) · up
  bf16* x;       // [max_rows, hidden]: for rows that start at odd addresses
  ExpertBlocks sorted;

  // Places what is needed one after the other, in multiples of 16 bytes; returns their size.
  static size_t place(const StreamExpertsShape& shape, void* workspace, StreamExpertsScratch& scratch) {
    size_t used = 0;
    const auto take = [&](auto& pointer, int64_t count) {
      using T = std::remove_pointer_t<std::remove_reference_t<decltype(pointer)>>;
      pointer = reinterpret_cast<T*>(static_cast<char*>(workspace) + used);
      used += (static_cast<size_t>(count) * sizeof(T) + 15) / 16 * 16;
    };
    take(scratch.down, shape.max_pairs() * shape.hidden);
    take(scratch.middle, shape.max_pairs() * shape.intermediate);
    take(scratch.x, shape.max_rows * shape.hidden);
    take(scratch.sorted.blocks, shape.max_blocks());
    take(scratch.sorted.counts, 1);
    take(scratch.sorted.order, shape.max_pairs());
    return used;
  }
};

// One block, a thread an expert.
static __global__ void __launch_bounds__(kMostExperts)
    sort_by_expert(const int32_t* n_rows, const int32_t* experts, int top_k, int max_pairs, ExpertBlocks sorted) {
  __align__(16) __shared__ int32_t ids[kSortedAtOnce];
  __shared__ int32_t warp_pairs[32];
  __shared__ uint64_t warp_blocks[32];
  let_next_grid_start();
  const int expert = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const auto fetch = [&](int first) {
    __syncthreads();
    for (int i = expert; i < kSortedAtOnce && first + i < max_pairs; i += threads) ids[i] = experts[first + i];
    __syncthreads();
  };
  const int pairs = *n_rows * top_k;
  fetch(0);  // does not wait for *n_rows
  int count = 0;
  for (int first = 0; first < pairs; first += kSortedAtOnce) {
    if (first > 0) fetch(first);
    const int most = min(kSortedAtOnce, pairs - first);
    for (int i = 0; i < most; ++i) count += ids[i] == expert;
  }

  // Blocks of each class, 16 bits each: whole ones first, then the rest.
  constexpr int whole_class = class_of(kGatheredRows);
  const int whole = count / kGatheredRows, rest = count % kGatheredRows, rest_class = class_of(rest);
  const uint64_t blocks =
      (static_cast<uint64_t>(whole) << (16 * whole_class)) + (rest ? uint64_t{1} << (16 * rest_class) : 0);
  uint64_t blocks_before = blocks;
  int pairs_before = count;
#pragma unroll
  for (int reach = 1; reach < 32; reach *= 2) {  // inclusive sums over the warp
    const uint64_t b = __shfl_up_sync(kAllLanes, blocks_before, reach);
    const int p = __shfl_up_sync(kAllLanes, pairs_before, reach);
    if (lane_id() >= reach) blocks_before += b, pairs_before += p;
  }
  if (lane_id() == 31) warp_blocks[warp_id()] = blocks_before, warp_pairs[warp_id()] = pairs_before;
  __syncthreads();
  uint64_t all_blocks = 0;
  blocks_before -= blocks, pairs_before -= count;
  for (int w = 0; w < threads / 32; ++w) {
    if (w == warp_id()) blocks_before += all_blocks;
    if (w < warp_id()) pairs_before += warp_pairs[w];
    all_blocks += warp_blocks[w];
  }
  if (expert == 0) *sorted.counts = all_blocks;
  int at = blocks_of(blocks_before, rest_class) + (rest_class == whole_class ? whole : 0);
  for (int c = 0; c < rest_class; ++c) at += blocks_of(all_blocks, c);
  int seen = 0;
  for (int first = 0; first < pairs; first += kSortedAtOnce) {
    if (pairs > kSortedAtOnce) fetch(first);
    const int most = min(kSortedAtOnce, pairs - first);
    for (int i = 0; i < most; ++i) {
      if (ids[i] != expert) continue;
      const int place = pairs_before + seen;
      sorted.order[place] = first + i;
      if (seen % kGatheredRows == 0) {
        const bool is_whole = seen < whole * kGatheredRows;
        sorted.blocks[is_whole ? blocks_of(blocks_before, whole_class) + seen / kGatheredRows : at] = {
            expert, place, is_whole ? kGatheredRows : rest, first + i};
      }
      ++seen;
    }
  }
}

// Strips hold 8 outputs of gate and the same of up, so a lane has both sums of an output.
template <class W>
struct GateUpJob {
  using Strips = W;
  static constexpr bool kWeightsAhead = false;
  Tiling tiling;
  ExpertBlocks sorted;
  const char* packed;
  int64_t expert_bytes;
  const bf16* x;
  bf16* middle;
  int intermediate, top_k;

  __device__ uint64_t blocks() const { return sorted.count(); }
  __device__ Block block(int i) const { return sorted.block(i); }
  __device__ const char* weights(int expert) const { return packed + expert * expert_bytes; }
  __device__ int entry(const Block& block, int i) const { return sorted.pair(block, i); }
  __device__ const bf16* inputs(int pair) const { return x + int64_t{pair / top_k} * tiling.inputs; }
  __device__ void store(int pair, int strip, int g, float gate, float up) const {
    const int output = 8 * strip + g;
    if (output < intermediate) middle[int64_t{pair} * intermediate + output] = rounded<bf16>(swiglu(gate, up));
  }
};

template <class W>
struct DownJob {
  using Strips = W;
  static constexpr bool kWeightsAhead = true;
  Tiling tiling;
  ExpertBlocks sorted;
  const char* packed;  // of expert 0's down
  int64_t expert_bytes;
  const bf16* middle;
  float* down;

  __device__ uint64_t blocks() const { return sorted.count(); }
  __device__ Block block(int i) const { return sorted.block(i); }
  __device__ const char* weights(int expert) const { return packed + expert * expert_bytes; }
  __device__ int entry(const Block& block, int i) const { return sorted.pair(block, i); }
  __device__ const bf16* inputs(int pair) const { return middle + int64_t{pair} * tiling.inputs; }
  __device__ void store(int pair, int strip, int g, float low, float high) const {
    const int output = 16 * strip + g;
    float* to = down + int64_t{pair} * tiling.outputs + output;
    if (output < tiling.outputs) to[0] = low;
    if (output + 8 < tiling.outputs) to[8] = high;
  }
};

// Four columns a thread; hidden is a multiple of 4. `aligned`: shared, residual and y start at multiples of 8 bytes.
static __global__ void __launch_bounds__(128)
    sum_slots(const int32_t* n_rows, const float* weights, const float* down, const bf16* shared, const bf16* residual,
              bf16* y, int hidden, int top_k, bool aligned) {
  wait_for_grid_in_front();
  const int64_t count = int64_t{*n_rows} * (hidden / 4);
  const auto load = [&](const bf16* p, float (&v)[4]) {
    if (aligned) return load4(p, v);
#pragma unroll
    for (int c = 0; c < 4; ++c) v[c] = to_float(p[c]);
  };
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / (hidden / 4), column = i % (hidden / 4) * 4, at = row * hidden + column;
    float sum[4] = {0, 0, 0, 0}, other[4];
#pragma unroll 8
    for (int slot = 0; slot < top_k; ++slot) {
      const int64_t pair = row * top_k + slot;
      const float weight = weights[pair];
      const float4 v = *reinterpret_cast<const float4*>(down + pair * hidden + column);
      sum[0] = fmaf(weight, v.x, sum[0]), sum[1] = fmaf(weight, v.y, sum[1]);
      sum[2] = fmaf(weight, v.z, sum[2]), sum[3] = fmaf(weight, v.w, sum[3]);
    }
    if (shared) {
      load(shared + at, other);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += other[c];
    }
    if (residual) {
      load(residual + at, other);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] = other[c] + sum[c];
    }
    if (aligned) {
      store4(y + at, sum);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) y[at + c] = rounded<bf16>(sum[c]);
    }
  }
}

template <class W>
struct StreamExperts {
  StreamExpertsShape shape;
  Tiling gate_up, down;
  explicit StreamExperts(const StreamExpertsShape& s)
      : shape(s),
        gate_up(2 * ceil_div(s.intermediate, 8) * 8, s.hidden, false),
        down(s.hidden, s.intermediate, false) {}

  static cudaError_t init() {
    const cudaError_t error = init_gathered<GateUpJob<W>>();
    return error == cudaSuccess ? init_gathered<DownJob<W>>() : error;
  }

  int64_t gate_up_bytes() const { return int64_t{gate_up.strips} * gate_up.units * W::kUnitBytes; }
  int64_t expert_bytes() const { return gate_up_bytes() + int64_t{down.strips} * down.units * W::kUnitBytes; }

  size_t workspace() const {
    StreamExpertsScratch scratch;
    return StreamExpertsScratch::place(shape, nullptr, scratch);
  }

  void gate_up_and_down(const void* weights, const bf16* x, const StreamExpertsScratch& scratch,
                        cudaStream_t stream) const {
    const auto* packed = static_cast<const char*>(weights);
    launch_gathered(GateUpJob<W>{gate_up, scratch.sorted, packed, expert_bytes(), x, scratch.middle, shape.intermediate,
                               shape.top_k},
                  shape.max_blocks() * gate_up.tiles(), stream);
    launch_gathered(DownJob<W>{down, scratch.sorted, packed + gate_up_bytes(), expert_bytes(), scratch.middle,
                             scratch.down},
                  shape.max_blocks() * down.tiles(), stream);
  }

  template <class Args>
  void launch(const Args& args, void* workspace, cudaStream_t stream) const {
    StreamExpertsScratch scratch;
    StreamExpertsScratch::place(shape, workspace, scratch);
    const bf16* x = aligned_rows(args.n_rows, static_cast<const bf16*>(args.x), shape.hidden, shape.max_rows,
                                 shape.hidden, scratch.x, stream).x;
    const auto threads = static_cast<unsigned>(ceil_div(shape.n_experts, 32) * 32);
    sort_by_expert<<<1, threads, 0, stream>>>(args.n_rows, args.experts, shape.top_k,
                                              static_cast<int>(shape.max_pairs()), scratch.sorted);
    gate_up_and_down(args.packed, x, scratch, stream);
    const auto* shared = static_cast<const bf16*>(args.shared);
    const auto* residual = static_cast<const bf16*>(args.residual);
    auto* y = static_cast<bf16*>(args.y);
    const bool aligned = (reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(residual) |
                          reinterpret_cast<uintptr_t>(y)) % 8 == 0;
    launch_early(sum_slots, grid_for(shape.max_rows * shape.hidden / 4, 128, 16), 128, 0, stream, args.n_rows,
                 args.weights, scratch.down, shared, residual, y, shape.hidden, shape.top_k, aligned);
  }
};

}  // namespace kdtree::cuda
