// Floor: the packed bytes, 0.5625 a weight with group 32 and bf16 scales. bf16 inputs with such weights stream:
//   Packed: strips (DenseInt4).
// All others take the plain kernel, which is also the check of the streaming one (the same values as fp32 scales):
//   Packed: codes [n, k/8], then scales [n, k/group] of scale_type, as the bundle has them, read once for every 8 rows.
#include "../cuda/dot.cuh"
#include "../cuda/operator.cuh"
#include "../cuda/pack.cuh"
#include "../cuda/stream_dense.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kWarps = 4;

template <class X>
__global__ void __launch_bounds__(32 * kWarps, 1) multiply(W4a16GemmShape shape, W4a16GemmArgs args, bool aligned) {
  const int64_t n_rows = *args.n_rows;
  const int64_t row_tiles = ceil_div(n_rows, kRows), tiles = row_tiles * ceil_div(shape.n, kOutputs);
  const auto* codes = static_cast<const uint32_t*>(args.packed);
  const Int4Matrix matrix{codes, codes + int64_t{shape.n} * (shape.k / 8), shape.k / 8, shape.group / 8,
                          shape.scale_type};
  for (int64_t tile = int64_t{blockIdx.x} * kWarps + warp_id(); tile < tiles; tile += int64_t{gridDim.x} * kWarps) {
    const int64_t first_row = tile % row_tiles * kRows, first_output = tile / row_tiles * kOutputs;
    const int rows = static_cast<int>(min(int64_t{kRows}, n_rows - first_row));

    Int4Row w[kOutputs];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) w[o] = matrix.row(min(first_output + o, int64_t{shape.n} - 1));
    const X* x[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = static_cast<const X*>(args.x) + (first_row + r) * shape.x_row_stride;

    float y = dot_tile(w, x, rows, shape.k, aligned);
    const int r = lane_id() % kRows;
    const int64_t output = first_output + lane_id() / kRows;
    if (r < rows && output < shape.n) {
      const int64_t at = (first_row + r) * shape.y_row_stride + output;
      if (args.add) y = load_as(args.add, at, shape.y_type) + y;
      store_as(args.y, at, shape.y_type, y);
    }
  }
}

const char* refuse(const W4a16GemmShape& shape) {
  if (shape.group != 32 && shape.group != 64 && shape.group != 128) return "group: must be 32, 64 or 128";
  if (shape.k % shape.group) return "k: must be a multiple of group";
  return nullptr;
}

size_t code_bytes(const W4a16GemmShape& shape) { return static_cast<size_t>(shape.n) * static_cast<size_t>(shape.k) / 2; }
size_t scale_bytes(const W4a16GemmShape& shape) {
  return static_cast<size_t>(shape.n) * static_cast<size_t>(shape.k / shape.group) * size_of(shape.scale_type);
}

bool streams(const W4a16GemmShape& shape) {
  return rung != Rung::kPlain && shape.x_type == kBFloat16 && shape.scale_type == kBFloat16 && shape.group == 32;
}
StreamDense<DenseInt4> streaming(const W4a16GemmShape& shape) { return {shape.max_rows, shape.n, shape.k}; }

size_t packed_bytes(const W4a16GemmShape& shape) {
  return streams(shape) ? streaming(shape).packed_bytes() : code_bytes(shape) + scale_bytes(shape);
}
size_t workspace(const W4a16GemmShape& shape) { return streams(shape) ? streaming(shape).workspace() : 0; }

cudaError_t pack(const W4a16GemmShape& shape, const W4a16GemmWeights& weights, void* packed, cudaStream_t stream) {
  if (streams(shape)) {
    const Staged codes(weights.qw, code_bytes(shape), stream), scales(weights.sc, scale_bytes(shape), stream);
    if (codes.error != cudaSuccess) return codes.error;
    if (scales.error != cudaSuccess) return scales.error;
    pack_strips<DenseInt4>(StripSource<uint32_t>::of(codes.as<uint32_t>(), shape.n, shape.k / 8),
                           StripSource<bf16>::of(scales.as<bf16>(), shape.n, shape.k / 32), shape.k,
                           streaming(shape).tiling.strips, packed, stream);
    return cudaGetLastError();
  }
  const cudaError_t error = upload(packed, weights.qw, code_bytes(shape), stream);
  if (error != cudaSuccess) return error;
  return upload(static_cast<char*>(packed) + code_bytes(shape), weights.sc, scale_bytes(shape), stream);
}

cudaError_t run(const W4a16GemmShape& shape, const W4a16GemmArgs& args, void* workspace, cudaStream_t stream) {
  if (streams(shape))
    return streaming(shape).launch(args, shape.x_row_stride, shape.y_row_stride, shape.y_type, workspace, stream);
  const int64_t tiles = int64_t{ceil_div(shape.n, kOutputs)} * ceil_div(shape.max_rows, kRows);
  const bool aligned = aligned16(args.x, shape.x_row_stride, size_of(shape.x_type));
  with_type(shape.x_type, [&](auto x) {
    multiply<decltype(x)><<<grid_for(tiles, kWarps, 8), 32 * kWarps, 0, stream>>>(shape, args, aligned);
  });
  return cudaSuccess;
}

}  // namespace

namespace cuda {

int init_w4a16_gemm() { return StreamDense<DenseInt4>::init(); }

}  // namespace cuda

const Operator w4a16_gemm = {"w4a16_gemm",
                             refuse_as<W4a16GemmShape, refuse>,
                             bytes_as<W4a16GemmShape, packed_bytes>,
                             prepare_as<W4a16GemmShape, W4a16GemmWeights, pack>,
                             bytes_as<W4a16GemmShape, workspace>,
                             run_as<W4a16GemmShape, W4a16GemmArgs, run>};

}  // namespace kdtree
