// rms_norm: y = x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once to `type`.
#pragma once
#include "../operator.h"

namespace kdtree {

struct RmsNormShape {
  int32_t max_rows;
  int32_t cols;
  int32_t x_row_stride;  // elements
  int32_t y_row_stride;  // elements
  int32_t type;          // of x, weight and y
  float eps;
};

struct RmsNormArgs {
  const int32_t* n_rows;
  const void* x;
  const void* weight;          // [cols]
  void* y;
  const int32_t* y_first_row;  // null = 0: row i is written to y's row *y_first_row + i (the KV pool)
};

extern const Operator rms_norm;

}  // namespace kdtree
