// A warp a row: top_k rounds of a warp-wide maximum over keys (choice, lower expert first) in shared memory.
#include "../cuda/numbers.cuh"
#include "../cuda/operator.cuh"
#include "../cuda/reduce.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

// Takes the largest of n keys and removes it. Every lane gets it.
__device__ uint64_t take_largest(uint64_t* keys, int n) {
  uint64_t best = 0;
  for (int i = lane_id(); i < n; i += 32) best = max(best, keys[i]);
  best = warp_reduce(best, Max());
  if (lane_id() == 0) keys[index_of(best)] = 0;
  __syncwarp();
  return best;
}

__global__ void route(MoeRouteShape shape, MoeRouteArgs args) {
  extern __shared__ uint64_t shared[];
  uint64_t* choice = shared;                                       // [n_experts] keys
  uint64_t* groups = choice + shape.n_experts;                     // [n_group] keys
  float* scores = reinterpret_cast<float*>(groups + shape.n_group);  // [n_experts]
  const int lane = lane_id(), size = shape.n_experts / shape.n_group;
  for (int64_t row = blockIdx.x; row < *args.n_rows; row += gridDim.x) {
    const float* logits = args.logits + row * shape.n_experts;
    for (int e = lane; e < shape.n_experts; e += 32) {
      scores[e] = 1.0f / (1.0f + expf(-logits[e]));
      choice[e] = key_of(scores[e] + args.bias[e], e);
    }
    __syncwarp();
    if (shape.topk_group < shape.n_group) {
      for (int g = lane; g < shape.n_group; g += 32) {
        uint64_t first = 0, second = 0;
        for (int e = g * size; e < (g + 1) * size; ++e) {
          second = max(second, min(first, choice[e]));
          first = max(first, choice[e]);
        }
        const float best = value_of(static_cast<uint32_t>(first >> 32));
        groups[g] = key_of(size > 1 ? best + value_of(static_cast<uint32_t>(second >> 32)) : best, g);
      }
      __syncwarp();
      for (int i = 0; i < shape.topk_group; ++i) take_largest(groups, shape.n_group);
      for (int e = lane; e < shape.n_experts; e += 32)
        if (groups[e / size]) choice[e] = 0;  // not taken
      __syncwarp();
    }
    float total = 0;
    for (int slot = 0; slot < shape.top_k; ++slot) {
      const int expert = index_of(take_largest(choice, shape.n_experts));
      total += scores[expert];
      if (lane == 0) args.experts[row * shape.top_k + slot] = expert;
    }
    __syncwarp();  // lane 0's experts are read by the others below
    const float divisor = shape.norm_topk_prob ? total + 1e-20f : 1.0f;  // as in the published model code
    for (int slot = lane; slot < shape.top_k; slot += 32)
      args.weights[row * shape.top_k + slot] =
          scores[args.experts[row * shape.top_k + slot]] / divisor * shape.scaling;
    __syncwarp();
  }
}

size_t shared_bytes(const MoeRouteShape& shape) {
  return static_cast<size_t>(shape.n_experts) * 12 + static_cast<size_t>(shape.n_group) * 8;
}

const char* refuse(const MoeRouteShape& shape) {
  if (shape.n_group < 1 || shape.n_experts % shape.n_group) return "n_group: must divide n_experts";
  if (shape.topk_group < 1 || shape.topk_group > shape.n_group) return "topk_group: must lie in 1..n_group";
  if (shape.top_k < 1 || shape.top_k > shape.topk_group * (shape.n_experts / shape.n_group))
    return "top_k: more than the experts of topk_group groups";
  if (shared_bytes(shape) > 48 * 1024) return "n_experts: more than fit a block's shared memory";
  return nullptr;
}

void run(const MoeRouteShape& shape, const MoeRouteArgs& args, void*, cudaStream_t stream) {
  route<<<grid_for(shape.max_rows, 1, 8), 32, shared_bytes(shape), stream>>>(shape, args);
}

}  // namespace

const Operator moe_route = {"moe_route", refuse_as<MoeRouteShape, refuse>, no_bytes, nullptr, no_bytes,
                            run_as<MoeRouteShape, MoeRouteArgs, run>};

}  // namespace kdtree
