// y[i] = add[i] + x[i] · w^T over stream_tiles: blocks are rows 0 … 63, 64 … 127 and so on. A matrix with few outputs is
// split by inputs. A second launch adds the splits' sums in ascending order and rounds; fp32 sums of a matrix that
// needs neither go to y at once.
#pragma once
#include "pack_strips.cuh"
#include "stream_tiles.cuh"

namespace kdtree::cuda {

template <class W>
struct DenseJob {
  using Strips = W;
  static constexpr int kBlockRows = 64, kCopyWarps = 1;
  static constexpr bool kWeightsAhead = false;
  Tiling tiling;
  const int32_t* n_rows;
  const char* packed;
  Rows rows;
  float* sums;  // [splits, max_rows, outputs]
  int64_t split_stride, row_stride;

  __device__ uint64_t blocks() const {
    const int n = *n_rows, rest = n % kBlockRows;
    return static_cast<uint64_t>(n / kBlockRows) + (rest ? uint64_t{1} << (16 * class_of(rest)) : 0);
  }
  __device__ Block block(unsigned i) const {
    const int first = static_cast<int>(i) * kBlockRows;
    return {0, first, min(kBlockRows, *n_rows - first), first};
  }
  __device__ const char* weights(int) const { return packed; }
  __device__ int entry(const Block& block, int i) const { return block.first + i; }
  __device__ const bf16* inputs(int row) const { return rows.x + row * rows.stride; }
  __device__ void store(int row, const Tile& tile, int strip, int g, float low, float high) const {
    const int output = 16 * strip + g;
    float* to = sums + tile.split * split_stride + row * row_stride + output;
    if (output < tiling.outputs) to[0] = low;
    if (output + 8 < tiling.outputs) to[8] = high;
  }
};

static __global__ void __launch_bounds__(256)
    sum_splits(const int32_t* n_rows, const float* sums, int splits, int64_t split_stride, int outputs, const void* add,
               void* y, int64_t y_stride, int32_t y_type) {
  wait_for_grid_in_front();
  const int64_t count = int64_t{*n_rows} * outputs;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    float sum = sums[i];
#pragma unroll 8
    for (int s = 1; s < splits; ++s) sum += sums[s * split_stride + i];
    const int64_t at = i / outputs * y_stride + i % outputs;
    store_as(y, at, y_type, add ? load_as(add, at, y_type) + sum : sum);
  }
}

template <class W>
struct StreamDense {
  int64_t max_rows;
  Tiling tiling;
  StreamDense(int64_t max_rows, int outputs, int inputs) : max_rows(max_rows), tiling(outputs, inputs, true) {}

  size_t packed_bytes() const { return strip_bytes<W>(tiling.strips, tiling.inputs); }
  int64_t split_stride() const { return max_rows * tiling.outputs; }
  size_t workspace() const {
    return static_cast<size_t>(tiling.splits * split_stride()) * sizeof(float) +
           static_cast<size_t>(max_rows * tiling.inputs) * sizeof(bf16);
  }

  template <class Args>
  void launch(const Args& args, int64_t x_stride, int64_t y_stride, int32_t y_type, void* workspace,
              cudaStream_t stream) const {
    const bool at_once = tiling.splits == 1 && y_type == kFloat32 && !args.add;
    auto* copy = static_cast<bf16*>(workspace);
    float* sums = at_once ? static_cast<float*>(args.y) : reinterpret_cast<float*>(copy + max_rows * tiling.inputs);
    const Rows rows = aligned_rows(args.n_rows, static_cast<const bf16*>(args.x), x_stride, max_rows, tiling.inputs,
                                   copy, stream);
    launch_stream(DenseJob<W>{tiling, args.n_rows, static_cast<const char*>(args.packed), rows, sums, split_stride(),
                              at_once ? y_stride : tiling.outputs},
                  ceil_div(max_rows, DenseJob<W>::kBlockRows) * tiling.tiles(), stream);
    if (at_once) return;
    launch_early(sum_splits, grid_for(max_rows * tiling.outputs, 256, 8), 256, 0, stream, args.n_rows, sums,
                 static_cast<int>(tiling.splits), split_stride(), tiling.outputs, args.add, args.y, y_stride, y_type);
  }
};

}  // namespace kdtree::cuda
