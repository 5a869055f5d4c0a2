// Packed, an expert after the other: gate and up [intermediate, hidden padded to 8], down [hidden, intermediate padded
// to 8], of w_type. Floor: the bytes of the experts hit.
#include "../cuda/experts.cuh"
#include "../cuda/pack.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

ExpertShape sizes(const MoeExpertsShape& s) {
  return {s.max_rows, s.hidden, s.intermediate, s.n_experts, s.top_k, s.type};
}

// Elements of gate (and of up), and of an expert.
int64_t projection(const MoeExpertsShape& shape) { return shape.intermediate * padded_to_8(shape.hidden); }
int64_t one_expert(const MoeExpertsShape& shape) {
  return 2 * projection(shape) + shape.hidden * padded_to_8(shape.intermediate);
}

template <class W>
struct Experts {
  const W* packed;
  int64_t projection, one_expert;
  int padded_hidden, padded_intermediate;
  __device__ FloatMatrix<W> matrix(int64_t expert, int which) const {
    return {packed + expert * one_expert + which * projection, which == 2 ? padded_intermediate : padded_hidden};
  }
};

const char* refuse(const MoeExpertsShape& shape) {
  if (shape.n_experts > kMaxExperts) return "n_experts: more than 1024";
  if (shape.type == kBFloat16 && shape.w_type != kBFloat16) return "w_type: must be bf16 with bf16 inputs";
  return nullptr;
}

size_t packed_bytes(const MoeExpertsShape& shape) {
  return static_cast<size_t>(one_expert(shape) * shape.n_experts) * size_of(shape.w_type);
}

cudaError_t pack(const MoeExpertsShape& shape, const MoeExpertsWeights& weights, void* packed, cudaStream_t stream) {
  return with_type(weights.type, [&](auto source) {
    return with_type(shape.w_type, [&](auto w) {
      using Source = decltype(source);
      using W = decltype(w);
      W* to = static_cast<W*>(packed) + weights.expert * one_expert(shape);
      cudaError_t error =
          pack_rows(static_cast<const Source*>(weights.gate), shape.intermediate, shape.hidden, to, stream);
      to += projection(shape);
      if (error == cudaSuccess)
        error = pack_rows(static_cast<const Source*>(weights.up), shape.intermediate, shape.hidden, to, stream);
      to += projection(shape);
      if (error == cudaSuccess)
        error = pack_rows(static_cast<const Source*>(weights.down), shape.hidden, shape.intermediate, to, stream);
      return error;
    });
  });
}

size_t workspace(const MoeExpertsShape& shape) { return ExpertScratch::bytes(sizes(shape)); }

template <class X, class W>
void launch(const MoeExpertsShape& shape, const MoeExpertsArgs& args, void* workspace, cudaStream_t stream) {
  const Experts<W> experts{static_cast<const W*>(args.packed), projection(shape), one_expert(shape),
                           static_cast<int>(padded_to_8(shape.hidden)), static_cast<int>(padded_to_8(shape.intermediate))};
  launch_experts<X>(sizes(shape), experts, args, workspace, stream);
}

void run(const MoeExpertsShape& shape, const MoeExpertsArgs& args, void* workspace, cudaStream_t stream) {
  if (shape.type == kBFloat16)
    launch<bf16, bf16>(shape, args, workspace, stream);
  else if (shape.w_type == kBFloat16)
    launch<float, bf16>(shape, args, workspace, stream);
  else
    launch<float, float>(shape, args, workspace, stream);
}

}  // namespace

const Operator moe_experts = {"moe_experts",
                              refuse_as<MoeExpertsShape, refuse>,
                              bytes_as<MoeExpertsShape, packed_bytes>,
                              prepare_as<MoeExpertsShape, MoeExpertsWeights, pack>,
                              bytes_as<MoeExpertsShape, workspace>,
                              run_as<MoeExpertsShape, MoeExpertsArgs, run>};

}  // namespace kdtree
