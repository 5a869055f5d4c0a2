#include "../cuda/swiglu.cuh"

#include "../cuda/numbers.cuh"
#include "../cuda/operator.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

template <class T>
__global__ void multiply(const int32_t* n_rows, const T* gate_up, int cols, T* y) {
  const int64_t count = int64_t{*n_rows} * cols;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const T* gate = gate_up + i / cols * 2 * cols + i % cols;
    y[i] = rounded<T>(cuda::swiglu(to_float(gate[0]), to_float(gate[cols])));
  }
}

void run(const SwigluShape& shape, const SwigluArgs& args, void*, cudaStream_t stream) {
  with_type(shape.type, [&](auto t) {
    using T = decltype(t);
    multiply<<<grid_for(int64_t{shape.max_rows} * shape.cols, 256, 8), 256, 0, stream>>>(
        args.n_rows, static_cast<const T*>(args.gate_up), shape.cols, static_cast<T*>(args.y));
  });
}

}  // namespace

const Operator swiglu = {"swiglu", accept_any, no_bytes, nullptr, no_bytes, run_as<SwigluShape, SwigluArgs, run>};

}  // namespace kdtree
