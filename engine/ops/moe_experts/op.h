// moe_experts: y = residual + ((sum over slots, in router order, of weight * down(silu(gate x) * up x)) + shared),
// float weights. The sum is fp32 and rounded once to `type`; silu(gate) * up is rounded to `type` before down.
#pragma once
#include "../operator.h"

namespace kdtree {

struct MoeExpertsShape {
  int32_t max_rows;
  int32_t hidden;
  int32_t intermediate;
  int32_t n_experts;
  int32_t top_k;
  int32_t type;          // of x, shared, residual and y
  int32_t w_type;        // of the packed weights: bf16 if type is, else the source's type
};

// One expert at a time, so that loading streams.
struct MoeExpertsWeights {
  int32_t expert;
  int32_t type;      // of the pointers below
  const void* gate;  // [intermediate, hidden]
  const void* up;    // [intermediate, hidden]
  const void* down;  // [hidden, intermediate]
};

struct MoeExpertsArgs {
  const int32_t* n_rows;
  const void* x;           // [max_rows, hidden]
  const int32_t* experts;  // [max_rows, top_k]
  const float* weights;    // [max_rows, top_k]
  const void* packed;
  const void* shared;      // [max_rows, hidden]; null = 0
  const void* residual;    // [max_rows, hidden]; null = 0; may be y itself
  void* y;                 // [max_rows, hidden]
};

extern const Operator moe_experts;

}  // namespace kdtree
