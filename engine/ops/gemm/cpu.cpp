#include "../cpu/linear.h"
#include "../cpu/operator_cpu.h"
#include "op.h"

namespace kdtree::KDTREE_PATH {
namespace {

size_t packed_bytes(const GemmShape& shape) {
  return static_cast<size_t>(shape.batch) * with_type(shape.w_type, [&](auto* w) {
    return FloatMatrix<std::remove_pointer_t<decltype(w)>>::bytes(shape.n, shape.k);
  });
}

void pack(const GemmShape& shape, const GemmWeights& weights, void* packed) {
  with_type(weights.type, [&](auto* source) {
    with_type(shape.w_type, [&](auto* w) {
      using Source = std::remove_pointer_t<decltype(source)>;
      using W = std::remove_pointer_t<decltype(w)>;
      const int64_t matrix = int64_t{shape.n} * shape.k;
      const int64_t tiled = tiles_of(shape.n) * kTile * shape.k;
      for (int64_t b = 0; b < shape.batch; ++b)
        pack_float(static_cast<const Source*>(weights.w) + b * matrix, shape.n, shape.k,
                   static_cast<W*>(packed) + b * tiled);
    });
  });
}

// The inputs in fp32, [batch][rows][input_stride(k)].
size_t workspace(const GemmShape& shape) {
  return sizeof(float) * static_cast<size_t>(shape.batch * shape.max_rows * input_stride(shape.k));
}

template <class X, class Y, class W>
void run_typed(const GemmShape& shape, const GemmArgs& args, float* inputs) {
  const int64_t rows = *args.n_rows, strips = strips_of(shape.n), stride = input_stride(shape.k);
  const int64_t tiled = tiles_of(shape.n) * kTile * shape.k;
  for (int64_t b = 0; b < shape.batch; ++b)
    for (int64_t r = 0; r < rows; ++r)
      convert(static_cast<const X*>(args.x) + b * shape.x_batch_stride + r * shape.x_row_stride,
              inputs + (b * rows + r) * stride, shape.k);
  for_each_job(shape.batch * strips, rows * shape.batch * shape.n * shape.k, [&](int64_t job) {
    const int64_t b = job / strips;
    multiply(
        FloatMatrix<W>{static_cast<const W*>(args.packed) + b * tiled, shape.n, shape.k}, job % strips, rows,
        [&](int64_t row) { return inputs + (b * rows + row) * stride; },
        [&](int64_t row, int64_t output, int64_t outputs, F32x16 y) {
          const int64_t at = b * shape.y_batch_stride + row * shape.y_row_stride + output;
          if (args.add) y = load(static_cast<const Y*>(args.add) + at, outputs) + y;
          store(static_cast<Y*>(args.y) + at, y, outputs);
        });
  });
}

void run(const GemmShape& shape, const GemmArgs& args, void* workspace) {
  with_type(shape.x_type, [&](auto* x) {
    with_type(shape.y_type, [&](auto* y) {
      with_type(shape.w_type, [&](auto* w) {
        run_typed<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(y)>,
                  std::remove_pointer_t<decltype(w)>>(shape, args, static_cast<float*>(workspace));
      });
    });
  });
}

}  // namespace

KDTREE_OPERATOR(gemm) = {"gemm",
                         accept_any,
                         bytes_as<GemmShape, packed_bytes>,
                         prepare_as<GemmShape, GemmWeights, pack>,
                         bytes_as<GemmShape, workspace>,
                         run_as<GemmShape, GemmArgs, run>};

}  // namespace kdtree::KDTREE_PATH
