#include "../cpu/operator_cpu.h"
#include "../cpu/vector.h"
#include "op.h"

#include <algorithm>
#include <limits>

namespace kdtree::KDTREE_PATH {
namespace {

bool is_nan(float x) { return x != x; }

// Takes the `count` largest of the n values that are not taken yet, largest first, ties to the lower index. A NaN comes
// after every number, so that even a row of NaN (which the logits will report) picks valid indices.
template <class Visit>
void take_largest(const float* values, bool* taken, int32_t n, int32_t count, Visit&& visit) {
  for (int32_t i = 0; i < count; ++i) {
    int32_t best = -1;
    for (int32_t j = 0; j < n; ++j)
      if (!taken[j] && (best < 0 || values[j] > values[best] || (is_nan(values[best]) && !is_nan(values[j])))) best = j;
    visit(i, best);
    taken[best] = true;
  }
}

float top_two_sum(const float* choice, int32_t n) {
  float first = -std::numeric_limits<float>::infinity(), second = first;
  for (int32_t i = 0; i < n; ++i) {
    second = std::max(second, std::min(first, choice[i]));
    first = std::max(first, choice[i]);
  }
  return n > 1 ? first + second : first;
}

void route(const MoeRouteShape& shape, const float* logits, const float* bias, float* scratch, int32_t* experts,
           float* weights) {
  float* scores = scratch;
  float* choice = scores + shape.n_experts;
  float* groups = choice + shape.n_experts;
  bool* taken = reinterpret_cast<bool*>(groups + shape.n_group);
  std::fill_n(taken, shape.n_experts, false);
  each_sixteen(shape.n_experts,
               [&](int64_t e, int64_t lanes) { store(scores + e, sigmoid(load(logits + e, lanes)), lanes); });
  for (int32_t e = 0; e < shape.n_experts; ++e) choice[e] = scores[e] + bias[e];

  if (shape.topk_group < shape.n_group) {
    const int32_t size = shape.n_experts / shape.n_group;
    for (int32_t g = 0; g < shape.n_group; ++g) groups[g] = top_two_sum(choice + g * size, size);
    bool* kept = taken + shape.n_experts;
    std::fill_n(kept, shape.n_group, false);
    take_largest(groups, kept, shape.n_group, shape.topk_group, [](int32_t, int32_t) {});
    for (int32_t e = 0; e < shape.n_experts; ++e) taken[e] = !kept[e / size];
  }

  take_largest(choice, taken, shape.n_experts, shape.top_k, [&](int32_t slot, int32_t e) {
    experts[slot] = e;
    weights[slot] = scores[e];
  });
  float total = 1;
  if (shape.norm_topk_prob) {
    total = 0;
    for (int32_t k = 0; k < shape.top_k; ++k) total += weights[k];
    total += 1e-20f;  // as in the published model code
  }
  for (int32_t k = 0; k < shape.top_k; ++k) weights[k] = weights[k] / total * shape.scaling;
}

const char* refuse(const MoeRouteShape& shape) {
  if (shape.n_group < 1 || shape.n_experts % shape.n_group) return "n_group: must divide n_experts";
  if (shape.topk_group < 1 || shape.topk_group > shape.n_group) return "topk_group: must lie in 1..n_group";
  if (shape.top_k < 1 || shape.top_k > shape.topk_group * (shape.n_experts / shape.n_group))
    return "top_k: more than the experts of topk_group groups";
  return nullptr;
}

size_t workspace(const MoeRouteShape& shape) {
  const size_t experts = static_cast<size_t>(shape.n_experts), groups = static_cast<size_t>(shape.n_group);
  return (2 * experts + groups) * sizeof(float) + (experts + groups) * sizeof(bool);
}

void run(const MoeRouteShape& shape, const MoeRouteArgs& args, void* workspace) {
  for (int64_t i = 0; i < *args.n_rows; ++i)
    route(shape, args.logits + i * shape.n_experts, args.bias, static_cast<float*>(workspace),
          args.experts + i * shape.top_k, args.weights + i * shape.top_k);
}

}  // namespace

KDTREE_OPERATOR(moe_route) = {"moe_route",
                              refuse_as<MoeRouteShape, refuse>,
                              no_bytes,
                              nullptr,
                              bytes_as<MoeRouteShape, workspace>,
                              run_as<MoeRouteShape, MoeRouteArgs, run>};

}  // namespace kdtree::KDTREE_PATH
