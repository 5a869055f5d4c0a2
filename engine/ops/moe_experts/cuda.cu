// Floor: the bytes of the experts hit. bf16 experts whose widths are multiples of 32 stream:
//   Packed: an expert after the other: strips of gate and up, strips of down (stream_experts.cuh, GatheredBf16).
// All others take the plain kernels:
//   Packed, an expert after the other: gate and up [intermediate, hidden padded to 8], down [hidden, intermediate
//   padded to 8], of w_type.
#include "../cuda/experts.cuh"
#include "../cuda/pack.cuh"
#include "../cuda/stream_experts.cuh"
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

bool streams(const MoeExpertsShape& shape) {
  return rung != Rung::kPlain && shape.type == kBFloat16 && shape.hidden % 32 == 0 && shape.intermediate % 32 == 0;
}
StreamExperts<GatheredBf16> streaming(const MoeExpertsShape& s) {
  return StreamExperts<GatheredBf16>({s.max_rows, s.hidden, s.intermediate, s.n_experts, s.top_k});
}

size_t packed_bytes(const MoeExpertsShape& shape) {
  if (streams(shape)) return static_cast<size_t>(streaming(shape).expert_bytes() * shape.n_experts);
  return static_cast<size_t>(one_expert(shape) * shape.n_experts) * size_of(shape.w_type);
}

template <class Source>
cudaError_t pack_streaming(const MoeExpertsShape& shape, const MoeExpertsWeights& weights, void* packed,
                           cudaStream_t stream) {
  const auto layout = streaming(shape);
  const int hidden = shape.hidden, width = shape.intermediate;
  const size_t bytes = static_cast<size_t>(hidden) * static_cast<size_t>(width) * sizeof(Source);
  const Staged gate(weights.gate, bytes, stream), up(weights.up, bytes, stream);
  if (gate.error != cudaSuccess) return gate.error;
  if (up.error != cudaSuccess) return up.error;
  char* to = static_cast<char*>(packed) + weights.expert * layout.expert_bytes();
  pack_strips<GatheredBf16>(StripSource<Source>::of(gate.as<Source>(), up.as<Source>(), width), hidden,
                            layout.gate_up.strips, to, stream);
  return stage_strips<GatheredBf16>(static_cast<const Source*>(weights.down), hidden, width,
                                    to + layout.gate_up_bytes(), stream);
}

cudaError_t pack(const MoeExpertsShape& shape, const MoeExpertsWeights& weights, void* packed, cudaStream_t stream) {
  if (streams(shape))
    return with_type(weights.type, [&](auto source) {
      return pack_streaming<decltype(source)>(shape, weights, packed, stream);
    });
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

size_t workspace(const MoeExpertsShape& shape) {
  return streams(shape) ? streaming(shape).workspace() : ExpertScratch::bytes(sizes(shape));
}

template <class X, class W>
void launch(const MoeExpertsShape& shape, const MoeExpertsArgs& args, void* workspace, cudaStream_t stream) {
  const Experts<W> experts{static_cast<const W*>(args.packed), projection(shape), one_expert(shape),
                           static_cast<int>(padded_to_8(shape.hidden)), static_cast<int>(padded_to_8(shape.intermediate))};
  launch_experts<X>(sizes(shape), experts, args, workspace, stream);
}

void run(const MoeExpertsShape& shape, const MoeExpertsArgs& args, void* workspace, cudaStream_t stream) {
  if (streams(shape)) return streaming(shape).launch(args, workspace, stream);
  if (shape.type == kBFloat16)
    launch<bf16, bf16>(shape, args, workspace, stream);
  else if (shape.w_type == kBFloat16)
    launch<float, bf16>(shape, args, workspace, stream);
  else
    launch<float, float>(shape, args, workspace, stream);
}

}  // namespace

namespace cuda {

int init_moe_experts() { return StreamExperts<GatheredBf16>::init(); }

}  // namespace cuda

const Operator moe_experts = {"moe_experts",
                              refuse_as<MoeExpertsShape, refuse>,
                              bytes_as<MoeExpertsShape, packed_bytes>,
                              prepare_as<MoeExpertsShape, MoeExpertsWeights, pack>,
                              bytes_as<MoeExpertsShape, workspace>,
                              run_as<MoeExpertsShape, MoeExpertsArgs, run>};

}  // namespace kdtree
