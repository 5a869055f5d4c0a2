#include "../cpu/linear.h"
#include "../cpu/operator_cpu.h"
#include "op.h"

namespace kdtree {
namespace {

const char* refuse(const W4a16GemmShape& shape) {
  if (shape.group != 32 && shape.group != 64 && shape.group != 128) return "group: must be 32, 64 or 128";
  if (shape.k % shape.group) return "k: must be a multiple of group";
  return nullptr;
}

size_t packed_bytes(const W4a16GemmShape& shape) {
  return with_type(shape.scale_type, [&](auto* s) {
    return Int4Tiles<std::remove_pointer_t<decltype(s)>>::bytes(shape.n, shape.k, shape.group);
  });
}

void pack(const W4a16GemmShape& shape, const W4a16GemmWeights& weights, void* packed) {
  with_type(shape.scale_type, [&](auto* s) {
    using S = std::remove_pointer_t<decltype(s)>;
    pack_int4_tiles(weights.qw, static_cast<const S*>(weights.sc), shape.n, shape.k, shape.group, packed);
  });
}

// The inputs in fp32, [rows][k].
size_t workspace(const W4a16GemmShape& shape) {
  return sizeof(float) * static_cast<size_t>(shape.max_rows) * static_cast<size_t>(shape.k);
}

template <class X, class Y, class S>
void multiply(const W4a16GemmShape& shape, const W4a16GemmArgs& args, float* inputs) {
  const int64_t rows = *args.n_rows, tiles = tiles_of(shape.n);
  for (int64_t r = 0; r < rows; ++r) {
    const X* x = static_cast<const X*>(args.x) + r * shape.x_row_stride;
    for (int64_t c = 0; c < shape.k; ++c) inputs[r * shape.k + c] = to_float(x[c]);
  }
  const Int4Tiles<S> weights(args.packed, shape.n, shape.k, shape.group);
#pragma omp parallel for schedule(static) if (rows * shape.n * shape.k > 500000)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t outputs = std::min<int64_t>(kTile, shape.n - tile * kTile);
    for (int64_t first = 0; first < rows; first += kRowsAtOnce)
      multiply_tile(
          weights, tile, std::min(kRowsAtOnce, rows - first),
          [&](int64_t r) { return inputs + (first + r) * shape.k; },
          [&](int64_t r, F32x16 y) {
            const int64_t at = (first + r) * shape.y_row_stride + tile * kTile;
            if (args.add) y = load_partial(static_cast<const Y*>(args.add) + at, outputs) + y;
            store(static_cast<Y*>(args.y) + at, y, outputs);
          });
  }
}

void run(const W4a16GemmShape& shape, const W4a16GemmArgs& args, void* workspace) {
  with_type(shape.x_type, [&](auto* x) {
    with_type(shape.y_type, [&](auto* y) {
      with_type(shape.scale_type, [&](auto* s) {
        multiply<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(y)>,
                 std::remove_pointer_t<decltype(s)>>(shape, args, static_cast<float*>(workspace));
      });
    });
  });
}

}  // namespace

const Operator w4a16_gemm = {"w4a16_gemm",
                             refuse_as<W4a16GemmShape, refuse>,
                             bytes_as<W4a16GemmShape, packed_bytes>,
                             prepare_as<W4a16GemmShape, W4a16GemmWeights, pack>,
                             bytes_as<W4a16GemmShape, workspace>,
                             run_as<W4a16GemmShape, W4a16GemmArgs, run>};

}  // namespace kdtree
