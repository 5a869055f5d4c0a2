// gemm: y[b, i] = add[b, i] + x[b, i] @ w[b]^T with float weights, fp32 accumulation, one rounding to y_type.
// With x_type bf16 the weights are rounded to bf16 when they are packed.
#pragma once
#include "../operator.h"

namespace kdtree {

struct GemmShape {
  int32_t max_rows;
  int32_t n;               // outputs
  int32_t k;               // inputs
  int32_t batch;           // independent products (attention heads); 1 for a linear layer
  int32_t x_row_stride;    // elements, as all strides
  int32_t x_batch_stride;
  int32_t y_row_stride;    // of y and add
  int32_t y_batch_stride;
  int32_t x_type;
  int32_t y_type;          // of y and add
  int32_t w_type;          // of the packed weights: bf16 if x_type is, else the source's type
};

struct GemmWeights {
  const void* w;  // [batch, n, k]
  int32_t type;   // of w
};

struct GemmArgs {
  const int32_t* n_rows;
  const void* x;
  const void* packed;
  const void* add;  // null = 0; may be y itself
  void* y;
};

extern const Operator gemm;

}  // namespace kdtree
