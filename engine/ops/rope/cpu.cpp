#include "../cpu/operator_cpu.h"
#include "../cpu/vector.h"
#include "op.h"

namespace kdtree::KDTREE_PATH {
namespace {

template <class T>
void rotate(const RopeShape& shape, const RopeArgs& args) {
  const int64_t first = args.y_first_row ? *args.y_first_row : 0;
  const int64_t pairs = shape.dim / 2;
  for (int64_t i = 0; i < *args.n_rows; ++i) {
    const int64_t position = int64_t{*args.prefix} + args.depths[i];
    const float* cos = args.cos + position * pairs;
    const float* sin = args.sin + position * pairs;
    for (int64_t h = 0; h < shape.heads; ++h) {
      const T* x = static_cast<const T*>(args.x) + i * shape.x_row_stride + h * shape.x_head_stride;
      T* y = static_cast<T*>(args.y) + (first + i) * shape.y_row_stride + h * shape.y_head_stride;
      for (int64_t p = 0; p < pairs; ++p) {
        const float even = to_float(x[2 * p]), odd = to_float(x[2 * p + 1]);
        store(y + 2 * p, even * cos[p] - odd * sin[p]);
        store(y + 2 * p + 1, odd * cos[p] + even * sin[p]);
      }
    }
  }
}

const char* refuse(const RopeShape& shape) { return shape.dim % 2 ? "dim: must be even" : nullptr; }

void run(const RopeShape& shape, const RopeArgs& args, void*) {
  with_type(shape.type, [&](auto* type) { rotate<std::remove_pointer_t<decltype(type)>>(shape, args); });
}

}  // namespace

KDTREE_OPERATOR(rope) = {"rope",   refuse_as<RopeShape, refuse>,   no_bytes, nullptr,
                         no_bytes, run_as<RopeShape, RopeArgs, run>};

}  // namespace kdtree::KDTREE_PATH
