// The CPU's expert kernel, shared by moe_experts and w4a16_moe_experts: pairs (row, slot) are grouped by expert, so that
// an expert's weights are read once for all its rows; experts without rows cost nothing.
#pragma once
#include "linear.h"
#include "swiglu.h"

namespace kdtree::KDTREE_PATH {

struct ExpertShape {
  int64_t max_rows, hidden, intermediate, n_experts, top_k;
};

// The workspace: everything in fp32 but the lists.
struct ExpertScratch {
  float* x;         // [rows, input_stride(hidden)]
  float* gate_up;   // [pairs, 2, intermediate]
  float* h;         // [pairs, input_stride(intermediate)]: silu(gate) * up, rounded to the activation type
  float* down;      // [pairs, hidden]
  int32_t* first;   // [n_experts + 1]: an expert's pairs are order[first[e]] … order[first[e + 1] - 1]
  int32_t* order;   // [pairs]: pair = row * top_k + slot, ascending within an expert
  int32_t* hit;     // [n_experts]: the experts with pairs

  ExpertScratch(const ExpertShape& shape, void* workspace) {
    const int64_t pairs = shape.max_rows * shape.top_k;
    x = static_cast<float*>(workspace);
    gate_up = x + shape.max_rows * input_stride(shape.hidden);
    h = gate_up + pairs * 2 * shape.intermediate;
    down = h + pairs * input_stride(shape.intermediate);
    first = reinterpret_cast<int32_t*>(down + pairs * shape.hidden);
    order = first + shape.n_experts + 1;
    hit = order + pairs;
  }
  static size_t bytes(const ExpertShape& shape) {
    const int64_t pairs = shape.max_rows * shape.top_k;
    const int64_t of_pair = 2 * shape.intermediate + input_stride(shape.intermediate) + shape.hidden + 1;
    return 4 * static_cast<size_t>(shape.max_rows * input_stride(shape.hidden) + pairs * of_pair + 2 * shape.n_experts + 1);
  }
};

// Sorts the pairs by expert; returns the number of experts hit.
inline int64_t group_by_expert(const ExpertShape& shape, int64_t pairs, const int32_t* experts, ExpertScratch& scratch) {
  std::fill_n(scratch.first, shape.n_experts + 1, 0);
  for (int64_t p = 0; p < pairs; ++p) ++scratch.first[experts[p] + 1];
  int64_t hits = 0;
  for (int64_t e = 0; e < shape.n_experts; ++e) {
    if (scratch.first[e + 1]) scratch.hit[hits++] = static_cast<int32_t>(e);
    scratch.first[e + 1] += scratch.first[e];
  }
  for (int64_t p = 0; p < pairs; ++p) scratch.order[scratch.first[experts[p]]++] = static_cast<int32_t>(p);
  for (int64_t e = shape.n_experts; e > 0; --e) scratch.first[e] = scratch.first[e - 1];
  scratch.first[0] = 0;
  return hits;
}

// matrix(expert, 0 | 1 | 2) is gate, up or down.
template <class T, class Args, class Matrix>
void run_experts(const ExpertShape& shape, const Args& args, void* workspace, Matrix&& matrix) {
  ExpertScratch scratch(shape, workspace);
  const int64_t rows = *args.n_rows, pairs = rows * shape.top_k;
  const int64_t hidden = shape.hidden, intermediate = shape.intermediate;
  const int64_t x_stride = input_stride(hidden), h_stride = input_stride(intermediate);
  const T* x = static_cast<const T*>(args.x);
  for (int64_t r = 0; r < rows; ++r) convert(x + r * hidden, scratch.x + r * x_stride, hidden);
  const int64_t hits = group_by_expert(shape, pairs, args.experts, scratch);

  // One strip of one matrix for all pairs of an expert, to y + pair * stride.
  const auto multiply_pairs = [&](int64_t expert, int which, int64_t strip, auto&& input, float* y, int64_t stride) {
    const int32_t* list = scratch.order + scratch.first[expert];
    multiply(
        matrix(expert, which), strip, scratch.first[expert + 1] - scratch.first[expert],
        [&](int64_t i) { return input(list[i]); },
        [&](int64_t i, int64_t output, int64_t outputs, F32x16 sums) {
          store(y + list[i] * stride + output, sums, outputs);
        });
  };

  const int64_t middle_strips = strips_of(intermediate), out_strips = strips_of(hidden);
  for_each_job(hits * 2 * middle_strips, pairs * 2 * hidden * intermediate, [&](int64_t job) {
    const int64_t expert = scratch.hit[job / (2 * middle_strips)];
    const int which = static_cast<int>(job / middle_strips % 2);
    multiply_pairs(
        expert, which, job % middle_strips, [&](int64_t pair) { return scratch.x + pair / shape.top_k * x_stride; },
        scratch.gate_up + which * intermediate, 2 * intermediate);
  });
  for_each_job(pairs, pairs * intermediate * kExpCost, [&](int64_t pair) {
    const float* gate = scratch.gate_up + pair * 2 * intermediate;
    float* h = scratch.h + pair * h_stride;
    swiglu_row(gate, gate + intermediate, h, intermediate);
    each_sixteen(intermediate, [&](int64_t i, int64_t lanes) {
      store(h + i, rounded(static_cast<T*>(nullptr), load(h + i, lanes)), lanes);
    });
  });
  for_each_job(hits * out_strips, pairs * hidden * intermediate, [&](int64_t job) {
    multiply_pairs(
        scratch.hit[job / out_strips], 2, job % out_strips, [&](int64_t pair) { return scratch.h + pair * h_stride; },
        scratch.down, hidden);
  });

  const T* shared = static_cast<const T*>(args.shared);
  const T* residual = static_cast<const T*>(args.residual);
  T* y = static_cast<T*>(args.y);
  for_each_job(rows, pairs * hidden, [&](int64_t row) {
    each_sixteen(hidden, [&](int64_t c, int64_t lanes) {
      const int64_t at = row * hidden + c;
      F32x16 sum = {};
      for (int64_t k = 0; k < shape.top_k; ++k) {
        const int64_t pair = row * shape.top_k + k;
        sum = fma(splat(args.weights[pair]), load(scratch.down + pair * hidden + c, lanes), sum);
      }
      if (shared) sum = sum + load(shared + at, lanes);
      if (residual) sum = load(residual + at, lanes) + sum;
      store(y + at, sum, lanes);
    });
  });
}

}  // namespace kdtree::KDTREE_PATH
