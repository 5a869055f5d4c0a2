// argmax: the lowest index of the largest value of each row. NaN never wins; a row of nothing but NaN gives -1,
// which stops the run (tree_accept).
#pragma once
#include "../operator.h"

namespace kdtree {

struct ArgmaxShape {
  int32_t max_rows;
  int32_t cols;
};

struct ArgmaxArgs {
  const int32_t* n_rows;
  const float* x;    // [max_rows, cols]
  int32_t* indices;  // [max_rows]
};

extern const Operator argmax;

}  // namespace kdtree
