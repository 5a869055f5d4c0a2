// Floor: the weights' bytes. A single bf16 matrix whose inputs are a multiple of 32 streams:
//   Packed: strips (DenseBf16).
// All others take the plain kernel:
//   Packed: [batch, n, k padded to 8] of w_type, read once for every 8 rows.
#include "../cuda/dot.cuh"
#include "../cuda/operator.cuh"
#include "../cuda/pack.cuh"
#include "../cuda/stream_dense.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kWarps = 4;

template <class X, class W>
__global__ void __launch_bounds__(32 * kWarps, 1) multiply(GemmShape shape, GemmArgs args, bool aligned) {
  const int64_t n_rows = *args.n_rows;
  const int64_t row_tiles = ceil_div(n_rows, kRows), output_tiles = ceil_div(shape.n, kOutputs);
  const int padded = ceil_div(shape.k, 8) * 8;
  const int64_t tiles = row_tiles * output_tiles * shape.batch;
  for (int64_t tile = int64_t{blockIdx.x} * kWarps + warp_id(); tile < tiles; tile += int64_t{gridDim.x} * kWarps) {
    const int64_t first_row = tile % row_tiles * kRows;
    const int64_t first_output = tile / row_tiles % output_tiles * kOutputs;
    const int64_t batch = tile / row_tiles / output_tiles;
    const int rows = static_cast<int>(min(int64_t{kRows}, n_rows - first_row));

    const FloatMatrix<W> matrix{static_cast<const W*>(args.packed) + batch * shape.n * padded, padded};
    FloatRow<W> w[kOutputs];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) w[o] = matrix.row(min(first_output + o, int64_t{shape.n} - 1));
    const X* x[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      x[r] = static_cast<const X*>(args.x) + batch * shape.x_batch_stride + (first_row + r) * shape.x_row_stride;

    float y = dot_tile(w, x, rows, shape.k, aligned);
    const int r = lane_id() % kRows;
    const int64_t output = first_output + lane_id() / kRows;
    if (r < rows && output < shape.n) {
      const int64_t at = batch * shape.y_batch_stride + (first_row + r) * shape.y_row_stride + output;
      if (args.add) y = load_as(args.add, at, shape.y_type) + y;
      store_as(args.y, at, shape.y_type, y);
    }
  }
}

const char* refuse(const GemmShape& shape) {
  if (shape.x_type == kBFloat16 && shape.w_type != kBFloat16) return "w_type: must be bf16 with bf16 inputs";
  return nullptr;
}

bool streams(const GemmShape& shape) {
  return rung != Rung::kPlain && shape.x_type == kBFloat16 && shape.batch == 1 && shape.k % 32 == 0;
}
StreamDense<DenseBf16> streaming(const GemmShape& shape) { return {shape.max_rows, shape.n, shape.k}; }

size_t packed_bytes(const GemmShape& shape) {
  if (streams(shape)) return streaming(shape).packed_bytes();
  return static_cast<size_t>(shape.batch * padded_to_8(shape.k)) * static_cast<size_t>(shape.n) * size_of(shape.w_type);
}

size_t workspace(const GemmShape& shape) { return streams(shape) ? streaming(shape).workspace() : 0; }

cudaError_t pack(const GemmShape& shape, const GemmWeights& weights, void* packed, cudaStream_t stream) {
  if (streams(shape))
    return with_type(weights.type, [&](auto source) {
      return stage_strips<DenseBf16>(static_cast<const decltype(source)*>(weights.w), shape.n, shape.k, packed, stream);
    });
  return with_type(weights.type, [&](auto source) {
    return with_type(shape.w_type, [&](auto w) {
      return pack_rows(static_cast<const decltype(source)*>(weights.w), int64_t{shape.batch} * shape.n, shape.k,
                       static_cast<decltype(w)*>(packed), stream);
    });
  });
}

cudaError_t run(const GemmShape& shape, const GemmArgs& args, void* workspace, cudaStream_t stream) {
  if (streams(shape))
    return streaming(shape).launch(args, shape.x_row_stride, shape.y_row_stride, shape.y_type, workspace, stream);
  const int64_t tiles = int64_t{shape.batch} * ceil_div(shape.n, kOutputs) * ceil_div(shape.max_rows, kRows);
  const unsigned grid = grid_for(tiles, kWarps, 8);
  const bool aligned = aligned16(args.x, shape.x_row_stride, size_of(shape.x_type)) &&
                       aligned16(args.x, shape.x_batch_stride, size_of(shape.x_type));
  if (shape.x_type == kBFloat16)
    multiply<bf16, bf16><<<grid, 32 * kWarps, 0, stream>>>(shape, args, aligned);
  else if (shape.w_type == kBFloat16)
    multiply<float, bf16><<<grid, 32 * kWarps, 0, stream>>>(shape, args, aligned);
  else
    multiply<float, float><<<grid, 32 * kWarps, 0, stream>>>(shape, args, aligned);
  return cudaSuccess;
}

}  // namespace

namespace cuda {

int init_gemm() { return StreamDense<DenseBf16>::init(); }

}  // namespace cuda

const Operator gemm = {"gemm",
                       refuse_as<GemmShape, refuse>,
                       bytes_as<GemmShape, packed_bytes>,
                       prepare_as<GemmShape, GemmWeights, pack>,
                       bytes_as<GemmShape, workspace>,
                       run_as<GemmShape, GemmArgs, run>};

}  // namespace kdtree
