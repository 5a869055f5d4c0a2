// moe_route: sigmoid router of DeepSeek-V3. choice = sigmoid(logits) + bias picks the experts (group-limited top-k,
// group score = sum of its two best choices); the weights are the unbiased sigmoids, normalised, then scaled.
// Slots are in router order: choice descending, ties to the lower expert.
#pragma once
#include "../operator.h"

namespace kdtree {

struct MoeRouteShape {
  int32_t max_rows;
  int32_t n_experts;
  int32_t top_k;
  int32_t n_group;
  int32_t topk_group;
  int32_t norm_topk_prob;  // 0 or 1
  float scaling;
};

struct MoeRouteArgs {
  const int32_t* n_rows;
  const float* logits;  // [max_rows, n_experts]
  const float* bias;    // [n_experts]
  int32_t* experts;     // [max_rows, top_k]
  float* weights;       // [max_rows, top_k]
};

extern const Operator moe_route;

}  // namespace kdtree
