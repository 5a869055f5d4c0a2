#include "../cpu/linear.h"
#include "../cpu/operator_cpu.h"
#include "op.h"

namespace kdtree::KDTREE_PATH {
namespace {

const char* refuse(const W4a16GemmShape& shape) {
  if (shape.group != 32 && shape.group != 64 && shape.group != 128) return "group: must be 32, 64 or 128";
  if (shape.k % shape.group) return "k: must be a multiple of group";
  return nullptr;
}

size_t packed_bytes(const W4a16GemmShape& shape) {
  return with_type(shape.scale_type, [&](auto* s) {
    return Int4Matrix<std::remove_pointer_t<decltype(s)>>::bytes(shape.n, shape.k, shape.group);
  });
}

void pack(const W4a16GemmShape& shape, const W4a16GemmWeights& weights, void* packed) {
  with_type(shape.scale_type, [&](auto* s) {
    using S = std::remove_pointer_t<decltype(s)>;
    pack_int4(weights.qw, static_cast<const S*>(weights.sc), shape.n, shape.k, shape.group, packed);
  });
}

// The inputs in fp32, [rows][input_stride(k)].
size_t workspace(const W4a16GemmShape& shape) {
  return sizeof(float) * static_cast<size_t>(shape.max_rows * input_stride(shape.k));
}

template <class X, class Y, class S>
void run_typed(const W4a16GemmShape& shape, const W4a16GemmArgs& args, float* inputs) {
  const int64_t rows = *args.n_rows, stride = input_stride(shape.k);
  for (int64_t r = 0; r < rows; ++r)
    convert(static_cast<const X*>(args.x) + r * shape.x_row_stride, inputs + r * stride, shape.k);
  const Int4Matrix<S> weights(args.packed, shape.n, shape.k, shape.group);
  for_each_job(strips_of(shape.n), rows * shape.n * shape.k, [&](int64_t strip) {
    multiply(
        weights, strip, rows, [&](int64_t row) { return inputs + row * stride; },
        [&](int64_t row, int64_t output, int64_t outputs, F32x16 y) {
          const int64_t at = row * shape.y_row_stride + output;
          if (args.add) y = load(static_cast<const Y*>(args.add) + at, outputs) + y;
          store(static_cast<Y*>(args.y) + at, y, outputs);
        });
  });
}

void run(const W4a16GemmShape& shape, const W4a16GemmArgs& args, void* workspace) {
  with_type(shape.x_type, [&](auto* x) {
    with_type(shape.y_type, [&](auto* y) {
      with_type(shape.scale_type, [&](auto* s) {
        run_typed<std::remove_pointer_t<decltype(x)>, std::remove_pointer_t<decltype(y)>,
                  std::remove_pointer_t<decltype(s)>>(shape, args, static_cast<float*>(workspace));
      });
    });
  });
}

}  // namespace

KDTREE_OPERATOR(w4a16_gemm) = {"w4a16_gemm",
                               refuse_as<W4a16GemmShape, refuse>,
                               bytes_as<W4a16GemmShape, packed_bytes>,
                               prepare_as<W4a16GemmShape, W4a16GemmWeights, pack>,
                               bytes_as<W4a16GemmShape, workspace>,
                               run_as<W4a16GemmShape, W4a16GemmArgs, run>};

}  // namespace kdtree::KDTREE_PATH
