// The CPU's expert kernel, shared by moe_experts and w4a16_moe_experts: pairs (row, slot) are grouped by expert, so that
// an expert's weights are read once for all its rows; experts without rows cost nothing.
#pragma once
#include "linear.h"
#include "swiglu.h"

namespace kdtree {

struct ExpertShape {
  int64_t max_rows, hidden, intermediate, n_experts, top_k;
};

// The workspace: everything in fp32 but the lists.
struct ExpertScratch {
  float* x;         // [rows, hidden]
  float* gate_up;   // [pairs, 2, intermediate]
  float* h;         // [pairs, intermediate]: silu(gate) * up, rounded to the activation type
  float* down;      // [pairs, hidden]
  int32_t* first;   // [n_experts + 1]: an expert's pairs are order[first[e]] … order[first[e + 1] - 1]
  int32_t* order;   // [pairs]: pair = row * top_k + slot, ascending within an expert
  int32_t* hit;     // [n_experts]: the experts with pairs

  ExpertScratch(const ExpertShape& shape, void* workspace) {
    const int64_t pairs = shape.max_rows * shape.top_k;
    x = static_cast<float*>(workspace);
    gate_up = x + shape.max_rows * shape.hidden;
    h = gate_up + pairs * 2 * shape.intermediate;
    down = h + pairs * shape.intermediate;
    first = reinterpret_cast<int32_t*>(down + pairs * shape.hidden);
    order = first + shape.n_experts + 1;
    hit = order + pairs;
  }
  static size_t bytes(const ExpertShape& shape) {
    const int64_t pairs = shape.max_rows * shape.top_k;
    return 4 * static_cast<size_t>(shape.max_rows * shape.hidden + pairs * (3 * shape.intermediate + shape.hidden + 1) +
                                   2 * shape.n_experts + 1);
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

// matrix(expert, 0 | 1 | 2) gives the tiles of gate, up or down.
template <class T, class Args, class Matrix>
void run_experts(const ExpertShape& shape, const Args& args, void* workspace, Matrix&& matrix) {
  ExpertScratch scratch(shape, workspace);
  const int64_t rows = *args.n_rows, pairs = rows * shape.top_k;
  const int64_t hidden = shape.hidden, intermediate = shape.intermediate;
  const T* x = static_cast<const T*>(args.x);
  for (int64_t i = 0; i < rows * hidden; ++i) scratch.x[i] = to_float(x[i]);
  const int64_t hits = group_by_expert(shape, pairs, args.experts, scratch);

  // One tile of one matrix for all pairs of an expert.
  const auto multiply = [&](int64_t expert, int which, int64_t tile, auto&& input, float* output, int64_t n,
                            int64_t stride) {
    const auto tiles = matrix(expert, which);
    const int32_t* list = scratch.order + scratch.first[expert];
    const int64_t count = scratch.first[expert + 1] - scratch.first[expert];
    for (int64_t begin = 0; begin < count; begin += kRowsAtOnce)
      multiply_tile(
          tiles, tile, std::min(kRowsAtOnce, count - begin), [&](int64_t i) { return input(list[begin + i]); },
          [&](int64_t i, F32x16 y) {
            store(output + list[begin + i] * stride + tile * kTile, y, std::min(kTile, n - tile * kTile));
          });
  };

  const int64_t middle_tiles = tiles_of(intermediate), out_tiles = tiles_of(hidden);
#pragma omp parallel for schedule(static) if (pairs * hidden * intermediate > 250000)
  for (int64_t job = 0; job < hits * 2 * middle_tiles; ++job) {
    const int64_t expert = scratch.hit[job / (2 * middle_tiles)];
    const int which = static_cast<int>(job / middle_tiles % 2);
    multiply(expert, which, job % middle_tiles, [&](int64_t pair) { return scratch.x + pair / shape.top_k * hidden; },
             scratch.gate_up + which * intermediate, intermediate, 2 * intermediate);
  }
  for (int64_t p = 0; p < pairs; ++p) {
    const float* gate = scratch.gate_up + p * 2 * intermediate;
    float* h = scratch.h + p * intermediate;
    swiglu_row(gate, gate + intermediate, h, intermediate);
    for (int64_t i = 0; i < intermediate; ++i) {
      T rounded;
      store(&rounded, h[i]);
      h[i] = to_float(rounded);
    }
  }
#pragma omp parallel for schedule(static) if (pairs * hidden * intermediate > 250000)
  for (int64_t job = 0; job < hits * out_tiles; ++job)
    multiply(scratch.hit[job / out_tiles], 2, job % out_tiles,
             [&](int64_t pair) { return scratch.h + pair * intermediate; }, scratch.down, hidden, hidden);

  const T* shared = static_cast<const T*>(args.shared);
  const T* residual = static_cast<const T*>(args.residual);
  T* y = static_cast<T*>(args.y);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < hidden; ++c) {
      float sum = 0;
      for (int64_t k = 0; k < shape.top_k; ++k) {
        const int64_t pair = r * shape.top_k + k;
        sum += args.weights[pair] * scratch.down[pair * hidden + c];
      }
      if (shared) sum += to_float(shared[r * hidden + c]);
      if (residual) sum = to_float(residual[r * hidden + c]) + sum;
      store(y + r * hidden + c, sum);
    }
}

}  // namespace kdtree
