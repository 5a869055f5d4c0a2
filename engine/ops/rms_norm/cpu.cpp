#include "../cpu/operator_cpu.h"
#include "../cpu/vector.h"
#include "op.h"

#include <cmath>

namespace kdtree::KDTREE_PATH {
namespace {

template <class T>
void normalise(const RmsNormShape& shape, const RmsNormArgs& args) {
  const T* weight = static_cast<const T*>(args.weight);
  const int64_t first = args.y_first_row ? *args.y_first_row : 0;
  for (int64_t i = 0; i < *args.n_rows; ++i) {
    const T* x = static_cast<const T*>(args.x) + i * shape.x_row_stride;
    T* y = static_cast<T*>(args.y) + (first + i) * shape.y_row_stride;
    const float inverse = 1.0f / std::sqrt(dot(x, x, shape.cols) / static_cast<float>(shape.cols) + shape.eps);
    each_sixteen(shape.cols, [&](int64_t c, int64_t lanes) {
      store(y + c, load(x + c, lanes) * splat(inverse) * load(weight + c, lanes), lanes);
    });
  }
}

void run(const RmsNormShape& shape, const RmsNormArgs& args, void*) {
  with_type(shape.type, [&](auto* type) { normalise<std::remove_pointer_t<decltype(type)>>(shape, args); });
}

}  // namespace

KDTREE_OPERATOR(rms_norm) = {"rms_norm", accept_any, no_bytes, nullptr, no_bytes,
                             run_as<RmsNormShape, RmsNormArgs, run>};

}  // namespace kdtree::KDTREE_PATH
