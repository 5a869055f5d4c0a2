// w4a16_gemm: y[i] = add[i] + x[i] @ w^T with INT4 weights w = (nibble - 8) * scale, one scale per `group` inputs.
// fp32 accumulation, one rounding to y_type.
#pragma once
#include "../operator.h"

namespace kdtree {

struct W4a16GemmShape {
  int32_t max_rows;
  int32_t n;             // outputs
  int32_t k;             // inputs, a multiple of group
  int32_t group;         // 32, 64 or 128
  int32_t x_row_stride;  // elements, as all strides
  int32_t y_row_stride;  // of y and add
  int32_t x_type;
  int32_t y_type;        // of y and add
  int32_t scale_type;    // as the bundle has it
};

struct W4a16GemmWeights {
  const int32_t* qw;  // [n, k/8], column 8w+i in bits 4i..4i+3 of word w, code = q + 8
  const void* sc;     // [n, k/group] of scale_type
};

struct W4a16GemmArgs {
  const int32_t* n_rows;
  const void* x;
  const void* packed;
  const void* add;  // null = 0; may be y itself
  void* y;
};

extern const Operator w4a16_gemm;

}  // namespace kdtree
