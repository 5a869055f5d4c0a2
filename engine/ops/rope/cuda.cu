#include "../cuda/numbers.cuh"
#include "../cuda/operator.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

template <class T>
__global__ void rotate(RopeShape shape, RopeArgs args) {
  const int pairs = shape.dim / 2;
  const int64_t first = args.y_first_row ? *args.y_first_row : 0;
  for (int64_t row = blockIdx.x; row < *args.n_rows; row += gridDim.x) {
    const int64_t position = int64_t{*args.prefix} + args.depths[row];
    for (int i = threadIdx.x; i < shape.heads * pairs; i += blockDim.x) {
      const int head = i / pairs, pair = i % pairs;
      const T* x = static_cast<const T*>(args.x) + row * shape.x_row_stride + int64_t{head} * shape.x_head_stride;
      T* y = static_cast<T*>(args.y) + (first + row) * shape.y_row_stride + int64_t{head} * shape.y_head_stride;
      const float c = args.cos[position * pairs + pair], s = args.sin[position * pairs + pair];
      const float even = to_float(x[2 * pair]), odd = to_float(x[2 * pair + 1]);
      y[2 * pair] = rounded<T>(even * c - odd * s);
      y[2 * pair + 1] = rounded<T>(odd * c + even * s);
    }
  }
}

const char* refuse(const RopeShape& shape) { return shape.dim % 2 ? "dim: must be even" : nullptr; }

void run(const RopeShape& shape, const RopeArgs& args, void*, cudaStream_t stream) {
  with_type(shape.type, [&](auto t) {
    rotate<decltype(t)><<<grid_for(shape.max_rows, 1, 8), 256, 0, stream>>>(shape, args);
  });
}

}  // namespace

const Operator rope = {"rope",   refuse_as<RopeShape, refuse>,   no_bytes, nullptr,
                       no_bytes, run_as<RopeShape, RopeArgs, run>};

}  // namespace kdtree
