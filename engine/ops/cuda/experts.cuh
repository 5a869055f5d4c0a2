// The expert kernels, shared by moe_experts and w4a16_moe_experts: pairs (row, slot) are grouped by expert into tiles of
// up to 8, so that an expert's weights are read once for 8 rows; experts without rows cost nothing, and so do rows that
// a smaller tree leaves out. Four launches: group; gate, up and silu; down; combine in router order.
#pragma once
#include "dot.cuh"
#include "operator.cuh"
#include "swiglu.cuh"

namespace kdtree::cuda {

constexpr int kExpertWarps = 4;
constexpr int kMaxExperts = 1024;  // a thread each when grouping

struct ExpertShape {
  int64_t max_rows, hidden, intermediate, n_experts, top_k;
  int32_t type;
  int64_t max_pairs() const { return max_rows * top_k; }
  int64_t max_tiles() const { return std::min(max_pairs(), n_experts + max_pairs() / kRows); }
};

// Up to kRows pairs of one expert: order[first], …
struct ExpertTile {
  int32_t expert, first, count;
};

struct ExpertScratch {
  float* down;        // [pairs, hidden]
  void* middle;       // [pairs, intermediate] of the activation type: silu(gate) · up
  ExpertTile* tiles;  // [max_tiles]
  int32_t* order;     // [pairs]: pair = row · top_k + slot, ascending within an expert
  int32_t* n_tiles;

  ExpertScratch(const ExpertShape& shape, void* workspace) {
    down = static_cast<float*>(workspace);
    middle = down + shape.max_pairs() * shape.hidden;
    // Elements of middle are counted as fp32 ones, so that what follows is aligned in either type.
    tiles = reinterpret_cast<ExpertTile*>(static_cast<float*>(middle) + shape.max_pairs() * shape.intermediate);
    order = reinterpret_cast<int32_t*>(tiles + shape.max_tiles());
    n_tiles = order + shape.max_pairs();
  }
  static size_t bytes(const ExpertShape& shape) {
    return 4 * static_cast<size_t>(shape.max_pairs() * (shape.hidden + shape.intermediate + 1) + 3 * shape.max_tiles() + 1);
  }
};

// One block, a thread an expert.
static __global__ void __launch_bounds__(kMaxExperts)
    group_by_expert(const int32_t* n_rows, const int32_t* experts, int top_k, ExpertScratch scratch) {
  __shared__ int32_t pairs_before[kMaxExperts], tiles_before[kMaxExperts];
  const int expert = static_cast<int>(threadIdx.x), pairs = *n_rows * top_k;
  int count = 0;
  for (int p = 0; p < pairs; ++p) count += experts[p] == expert;
  const int tiles = ceil_div(count, kRows);
  pairs_before[expert] = count;
  tiles_before[expert] = tiles;
  for (int reach = 1; reach < static_cast<int>(blockDim.x); reach *= 2) {  // inclusive sums
    __syncthreads();
    const int p = expert >= reach ? pairs_before[expert - reach] : 0, t = expert >= reach ? tiles_before[expert - reach] : 0;
    __syncthreads();
    pairs_before[expert] += p;
    tiles_before[expert] += t;
  }
  __syncthreads();
  if (expert == static_cast<int>(blockDim.x) - 1) *scratch.n_tiles = tiles_before[expert];
  if (count == 0) return;
  int next = pairs_before[expert] - count;
  for (int t = 0; t < tiles; ++t)
    scratch.tiles[tiles_before[expert] - tiles + t] = {expert, next + t * kRows, min(kRows, count - t * kRows)};
  for (int p = 0; p < pairs; ++p)
    if (experts[p] == expert) scratch.order[next++] = p;
}

// Experts gives `matrix(expert, which)`, which = 0 gate, 1 up, 2 down. A warp computes gate and up of 2 outputs.
template <class X, class Experts>
__global__ void __launch_bounds__(32 * kExpertWarps, 1)
    gate_and_up(ExpertShape shape, Experts experts, const X* x, ExpertScratch scratch, bool aligned) {
  X* middle = static_cast<X*>(scratch.middle);
  const int64_t output_tiles = ceil_div(shape.intermediate, 2), tiles = *scratch.n_tiles * output_tiles;
  for (int64_t i = int64_t{blockIdx.x} * kExpertWarps + warp_id(); i < tiles; i += int64_t{gridDim.x} * kExpertWarps) {
    const ExpertTile tile = scratch.tiles[i / output_tiles];
    const int64_t first_output = i % output_tiles * 2;
    const auto gate = experts.matrix(tile.expert, 0), up = experts.matrix(tile.expert, 1);
    decltype(gate.row(0)) w[kOutputs];
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      const int64_t output = min(first_output + o, shape.intermediate - 1);
      w[o] = gate.row(output);
      w[2 + o] = up.row(output);
    }
    const X* rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      rows[r] = x + scratch.order[tile.first + min(r, tile.count - 1)] / shape.top_k * shape.hidden;

    const float g = dot_tile(w, rows, tile.count, static_cast<int>(shape.hidden), aligned);
    const float u = __shfl_down_sync(kAllLanes, g, 16);  // of the same row and output
    const int r = lane_id() % kRows;
    const int64_t output = first_output + lane_id() / kRows;
    if (lane_id() < 16 && r < tile.count && output < shape.intermediate)
      middle[scratch.order[tile.first + r] * shape.intermediate + output] = rounded<X>(swiglu(g, u));
  }
}

template <class X, class Experts>
__global__ void __launch_bounds__(32 * kExpertWarps, 1)
    down(ExpertShape shape, Experts experts, ExpertScratch scratch, bool aligned) {
  const X* middle = static_cast<const X*>(scratch.middle);
  const int64_t output_tiles = ceil_div(shape.hidden, kOutputs), tiles = *scratch.n_tiles * output_tiles;
  for (int64_t i = int64_t{blockIdx.x} * kExpertWarps + warp_id(); i < tiles; i += int64_t{gridDim.x} * kExpertWarps) {
    const ExpertTile tile = scratch.tiles[i / output_tiles];
    const int64_t first_output = i % output_tiles * kOutputs;
    const auto matrix = experts.matrix(tile.expert, 2);
    decltype(matrix.row(0)) w[kOutputs];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) w[o] = matrix.row(min(first_output + o, shape.hidden - 1));
    const X* rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      rows[r] = middle + scratch.order[tile.first + min(r, tile.count - 1)] * shape.intermediate;

    const float y = dot_tile(w, rows, tile.count, static_cast<int>(shape.intermediate), aligned);
    const int r = lane_id() % kRows;
    const int64_t output = first_output + lane_id() / kRows;
    if (r < tile.count && output < shape.hidden)
      scratch.down[scratch.order[tile.first + r] * shape.hidden + output] = y;
  }
}

template <class X>
__global__ void combine(ExpertShape shape, const int32_t* n_rows, const float* weights, const float* down,
                        const X* shared, const X* residual, X* y) {
  const int64_t count = *n_rows * shape.hidden;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / shape.hidden, column = i % shape.hidden;
    float sum = 0;
    for (int64_t pair = row * shape.top_k; pair < (row + 1) * shape.top_k; ++pair)
      sum = fmaf(weights[pair], down[pair * shape.hidden + column], sum);
    if (shared) sum += to_float(shared[i]);
    if (residual) sum = to_float(residual[i]) + sum;
    y[i] = rounded<X>(sum);
  }
}

template <class X, class Experts, class Args>
void launch_experts(const ExpertShape& shape, const Experts& experts, const Args& args, void* workspace,
                    cudaStream_t stream) {
  const ExpertScratch scratch(shape, workspace);
  const X* x = static_cast<const X*>(args.x);
  const int64_t middle_tiles = shape.max_tiles() * ceil_div(shape.intermediate, 2);
  const int64_t down_tiles = shape.max_tiles() * ceil_div(shape.hidden, kOutputs);
  const auto threads = static_cast<unsigned>(ceil_div(shape.n_experts, 32) * 32);
  group_by_expert<<<1, threads, 0, stream>>>(args.n_rows, args.experts, static_cast<int>(shape.top_k), scratch);
  gate_and_up<X><<<grid_for(middle_tiles, kExpertWarps, 8), 32 * kExpertWarps, 0, stream>>>(
      shape, experts, x, scratch, aligned16(x, shape.hidden, sizeof(X)));
  down<X><<<grid_for(down_tiles, kExpertWarps, 8), 32 * kExpertWarps, 0, stream>>>(
      shape, experts, scratch, aligned16(scratch.middle, shape.intermediate, sizeof(X)));
  combine<<<grid_for(shape.max_rows * shape.hidden, 256, 8), 256, 0, stream>>>(
      shape, args.n_rows, args.weights, scratch.down, static_cast<const X*>(args.shared),
      static_cast<const X*>(args.residual), static_cast<X*>(args.y));
}

}  // namespace kdtree::cuda
