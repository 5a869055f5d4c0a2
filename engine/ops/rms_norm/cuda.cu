#include "../cuda/numbers.cuh"
#include "../cuda/operator.cuh"
#include "../cuda/reduce.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;  // fixed: the order of the sum of squares depends on it

template <class T>
__global__ void normalise(RmsNormShape shape, RmsNormArgs args) {
  const int64_t first = args.y_first_row ? *args.y_first_row : 0;
  const T* weight = static_cast<const T*>(args.weight);
  for (int64_t row = blockIdx.x; row < *args.n_rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(args.x) + row * shape.x_row_stride;
    T* y = static_cast<T*>(args.y) + (first + row) * shape.y_row_stride;
    float squares = 0;
    for (int c = threadIdx.x; c < shape.cols; c += kThreads) squares = fmaf(to_float(x[c]), to_float(x[c]), squares);
    squares = block_reduce(squares, 0.0f, Add());
    const float inverse = 1.0f / sqrtf(squares / static_cast<float>(shape.cols) + shape.eps);
    for (int c = threadIdx.x; c < shape.cols; c += kThreads)
      y[c] = rounded<T>(to_float(x[c]) * inverse * to_float(weight[c]));
  }
}

void run(const RmsNormShape& shape, const RmsNormArgs& args, void*, cudaStream_t stream) {
  with_type(shape.type, [&](auto t) {
    normalise<decltype(t)><<<grid_for(shape.max_rows, 1, 8), kThreads, 0, stream>>>(shape, args);
  });
}

}  // namespace

const Operator rms_norm = {"rms_norm", accept_any, no_bytes, nullptr, no_bytes,
                           run_as<RmsNormShape, RmsNormArgs, run>};

}  // namespace kdtree
