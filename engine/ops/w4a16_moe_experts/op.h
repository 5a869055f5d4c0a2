// w4a16_moe_experts: moe_experts with INT4 weights w = (nibble - 8) * scale, one scale per `group` inputs.
#pragma once
#include "../operator.h"

namespace kdtree {

struct W4a16MoeExpertsShape {
  int32_t max_rows;
  int32_t hidden;        // a multiple of group
  int32_t intermediate;  // a multiple of group
  int32_t n_experts;
  int32_t top_k;
  int32_t group;         // 32, 64 or 128
  int32_t type;          // of x, shared, residual and y
  int32_t scale_type;    // as the bundle has it
};

// One expert at a time, so that loading streams.
struct W4a16MoeExpertsWeights {
  int32_t expert;
  const int32_t* gate_qw;  // [intermediate, hidden/8]
  const void* gate_sc;     // [intermediate, hidden/group] of scale_type
  const int32_t* up_qw;
  const void* up_sc;
  const int32_t* down_qw;  // [hidden, intermediate/8]
  const void* down_sc;     // [hidden, intermediate/group]
};

struct W4a16MoeExpertsArgs {
  const int32_t* n_rows;
  const void* x;           // [max_rows, hidden]
  const int32_t* experts;  // [max_rows, top_k]
  const float* weights;    // [max_rows, top_k]
  const void* packed;
  const void* shared;      // [max_rows, hidden]; null = 0
  const void* residual;    // [max_rows, hidden]; null = 0; may be y itself
  void* y;                 // [max_rows, hidden]
};

extern const Operator w4a16_moe_experts;

}  // namespace kdtree
