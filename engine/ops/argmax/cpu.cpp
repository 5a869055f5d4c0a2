#include "../cpu/operator_cpu.h"
#include "op.h"

namespace kdtree::KDTREE_PATH {
namespace {

void run(const ArgmaxShape& shape, const ArgmaxArgs& args, void*) {
  for (int64_t i = 0; i < *args.n_rows; ++i) {
    const float* x = args.x + i * shape.cols;
    int32_t best = -1;
    for (int32_t c = 0; c < shape.cols; ++c)
      if (x[c] == x[c] && (best < 0 || x[c] > x[best])) best = c;
    args.indices[i] = best;
  }
}

}  // namespace

KDTREE_OPERATOR(argmax) = {"argmax", accept_any, no_bytes, nullptr, no_bytes, run_as<ArgmaxShape, ArgmaxArgs, run>};

}  // namespace kdtree::KDTREE_PATH
