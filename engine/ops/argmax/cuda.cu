// Two launches: the best key of every 4096 columns, then the best of those. A maximum does not depend on the order.
#include "../cuda/numbers.cuh"
#include "../cuda/operator.cuh"
#include "../cuda/reduce.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;
constexpr int kChunk = 4096;

__global__ void best_of_chunks(ArgmaxShape shape, ArgmaxArgs args, uint64_t* best) {
  const int64_t chunks = ceil_div(shape.cols, kChunk);
  for (int64_t i = blockIdx.x; i < *args.n_rows * chunks; i += gridDim.x) {
    const float* x = args.x + i / chunks * shape.cols;
    const int first = static_cast<int>(i % chunks) * kChunk, last = min(first + kChunk, shape.cols);
    uint64_t key = 0;
    for (int c = first + threadIdx.x; c < last; c += kThreads) key = max(key, key_of(x[c], c));
    key = block_reduce(key, uint64_t{0}, Max());
    if (threadIdx.x == 0) best[i] = key;
  }
}

__global__ void best_of_rows(ArgmaxShape shape, ArgmaxArgs args, const uint64_t* best) {
  const int64_t chunks = ceil_div(shape.cols, kChunk);
  for (int64_t row = blockIdx.x; row < *args.n_rows; row += gridDim.x) {
    uint64_t key = 0;
    for (int64_t i = threadIdx.x; i < chunks; i += 32) key = max(key, best[row * chunks + i]);
    key = warp_reduce(key, Max());
    if (threadIdx.x == 0) args.indices[row] = key >> 32 ? index_of(key) : -1;  // NaN has the order 0
  }
}

size_t workspace(const ArgmaxShape& shape) {
  return sizeof(uint64_t) * static_cast<size_t>(shape.max_rows) * static_cast<size_t>(ceil_div(shape.cols, kChunk));
}

void run(const ArgmaxShape& shape, const ArgmaxArgs& args, void* workspace, cudaStream_t stream) {
  auto* best = static_cast<uint64_t*>(workspace);
  best_of_chunks<<<grid_for(int64_t{shape.max_rows} * ceil_div(shape.cols, kChunk), 1, 8), kThreads, 0, stream>>>(
      shape, args, best);
  best_of_rows<<<grid_for(shape.max_rows, 1, 8), 32, 0, stream>>>(shape, args, best);
}

}  // namespace

const Operator argmax = {"argmax", accept_any, no_bytes, nullptr, bytes_as<ArgmaxShape, workspace>,
                         run_as<ArgmaxShape, ArgmaxArgs, run>};

}  // namespace kdtree
