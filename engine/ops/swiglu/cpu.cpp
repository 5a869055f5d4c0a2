#include "../cpu/operator_cpu.h"
#include "../cpu/swiglu.h"
#include "op.h"

namespace kdtree::KDTREE_PATH {
namespace {

void run(const SwigluShape& shape, const SwigluArgs& args, void*) {
  with_type(shape.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t i = 0; i < *args.n_rows; ++i) {
      const T* gate = static_cast<const T*>(args.gate_up) + 2 * i * shape.cols;
      swiglu_row(gate, gate + shape.cols, static_cast<T*>(args.y) + i * shape.cols, shape.cols);
    }
  });
}

}  // namespace

KDTREE_OPERATOR(swiglu) = {"swiglu", accept_any, no_bytes, nullptr, no_bytes, run_as<SwigluShape, SwigluArgs, run>};

}  // namespace kdtree::KDTREE_PATH
