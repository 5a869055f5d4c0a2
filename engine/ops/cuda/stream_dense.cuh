// y[i] = add[i] + x[i] · w^T over stream_tiles: blocks are rows 0 … 63, 64 … 127 and so on. A matrix with few outputs is
// split by inputs among the blocks of a cluster.
#pragma once
#include "pack_strips.cuh"
#include "stream_tiles.cuh"

namespace kdtree::cuda {

template <class W>
struct DenseJob {
  using Strips = W;
  static constexpr int kBlockRows = 64;
  static constexpr bool kSplits = true, kWeightsAhead = false, kGathers = false;
  Tiling tiling;
  const int32_t* n_rows;
  const char* packed;
  Rows rows;
  const void* add;
  void* y;
  int64_t y_stride;
  int32_t y_type;
  bool by_fours;  // y and add are bf16 whose outputs lie in 8-byte groups of four

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
  __device__ int64_t stride() const { return rows.stride; }
  __device__ void store_one(int64_t at, float sum) const {
    store_as(y, at, y_type, add ? load_as(add, at, y_type) + sum : sum);
  }
  __device__ void store(int row, int strip, int g, float low, float high) const {
    const int output = 16 * strip + g;
    const int64_t at = row * y_stride + output;
    if (output < tiling.outputs) store_one(at, low);
    if (output + 8 < tiling.outputs) store_one(at + 8, high);
  }
  __device__ void store4(int row, int output, float4 sums) const {
    float v[4] = {sums.x, sums.y, sums.z, sums.w}, before[4];
    const int64_t at = row * y_stride + output;
    if (by_fours) {
      if (output >= tiling.outputs) return;
      if (add) load4(static_cast<const bf16*>(add) + at, before);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = add ? before[i] + v[i] : v[i];
      return cuda::store4(static_cast<bf16*>(y) + at, v);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (output + i < tiling.outputs) store_one(at + i, v[i]);
  }
};

template <class W>
struct StreamDense {
  int64_t max_rows;
  Tiling tiling;
  StreamDense(int64_t max_rows, int outputs, int inputs) : max_rows(max_rows), tiling(outputs, inputs, true) {}

  static cudaError_t init() { return init_stream<DenseJob<W>>(); }
  size_t packed_bytes() const { return strip_bytes<W>(tiling.strips, tiling.inputs); }
  size_t workspace() const { return static_cast<size_t>(max_rows * tiling.inputs) * sizeof(bf16); }

  template <class Args>
  void launch(const Args& args, int64_t x_stride, int64_t y_stride, int32_t y_type, void* workspace,
              cudaStream_t stream) const {
    const Rows rows = aligned_rows(args.n_rows, static_cast<const bf16*>(args.x), x_stride, max_rows, tiling.inputs,
                                   static_cast<bf16*>(workspace), stream);
    const auto address = reinterpret_cast<uintptr_t>(args.y) | reinterpret_cast<uintptr_t>(args.add);
    const bool by_fours = y_type == kBFloat16 && (y_stride | tiling.outputs) % 4 == 0 && address % 8 == 0;
    launch_stream(DenseJob<W>{tiling, args.n_rows, static_cast<const char*>(args.packed), rows, args.add, args.y,
                              y_stride, y_type, by_fours},
                  ceil_div(max_rows, DenseJob<W>::kBlockRows) * tiling.tiles(), stream);
  }
};

}  // namespace kdtree::cuda
