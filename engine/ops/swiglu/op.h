// swiglu: y = silu(gate) * up, in fp32, rounded once to `type`.
#pragma once
#include "../operator.h"

namespace kdtree {

struct SwigluShape {
  int32_t max_rows;
  int32_t cols;
  int32_t type;
};

struct SwigluArgs {
  const int32_t* n_rows;
  const void* gate_up;  // [max_rows, 2, cols]: gate, then up
  void* y;              // [max_rows, cols]
};

extern const Operator swiglu;

}  // namespace kdtree
