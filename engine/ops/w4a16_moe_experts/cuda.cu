// Floor: the bytes of the experts hit. bf16 activations with groups of 32 and bf16 scales stream:
//   Packed: an expert after the other: strips of gate and up, strips of down (stream_experts.cuh, GatheredInt4).
// All others take the plain kernels, which are also the check of the streaming ones (the same values as fp32 scales):
//   Packed: all experts' codes (gate, up, down of expert 0, then of expert 1, …), then all their scales in the same
//   order, as the bundle has them.
#include "../cuda/experts.cuh"
#include "../cuda/pack.cuh"
#include "../cuda/stream_experts.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

ExpertShape sizes(const W4a16MoeExpertsShape& s) {
  return {s.max_rows, s.hidden, s.intermediate, s.n_experts, s.top_k, s.type};
}

// Weights of one matrix; all three are as large.
int64_t one_matrix(const W4a16MoeExpertsShape& shape) { return int64_t{shape.hidden} * shape.intermediate; }
size_t code_bytes(const W4a16MoeExpertsShape& shape) {
  return static_cast<size_t>(3 * shape.n_experts * one_matrix(shape)) / 2;
}

struct Experts {
  const uint32_t* codes;
  const char* scales;
  int64_t one_matrix;
  int hidden, intermediate, group, scale_type;
  __device__ Int4Matrix matrix(int64_t expert, int which) const {
    const int64_t before = (3 * expert + which) * one_matrix;
    const int scale_bytes = scale_type == kBFloat16 ? 2 : 4;
    return {codes + before / 8, scales + before / group * scale_bytes, (which == 2 ? intermediate : hidden) / 8, group / 8,
            scale_type};
  }
};

const char* refuse(const W4a16MoeExpertsShape& shape) {
  if (shape.group != 32 && shape.group != 64 && shape.group != 128) return "group: must be 32, 64 or 128";
  if (shape.hidden % shape.group) return "hidden: must be a multiple of group";
  if (shape.intermediate % shape.group) return "intermediate: must be a multiple of group";
  if (shape.n_experts > kMaxExperts) return "n_experts: more than 1024";
  return nullptr;
}

bool streams(const W4a16MoeExpertsShape& shape) {
  return rung != Rung::kPlain && shape.type == kBFloat16 && shape.scale_type == kBFloat16 && shape.group == 32;
}

StreamExperts<GatheredInt4> streaming(const W4a16MoeExpertsShape& s) {
  return StreamExperts<GatheredInt4>({s.max_rows, s.hidden, s.intermediate, s.n_experts, s.top_k});
}

size_t packed_bytes(const W4a16MoeExpertsShape& shape) {
  if (streams(shape)) return static_cast<size_t>(streaming(shape).expert_bytes() * shape.n_experts);
  return code_bytes(shape) + static_cast<size_t>(3 * shape.n_experts * (one_matrix(shape) / shape.group)) *
                                 size_of(shape.scale_type);
}

cudaError_t pack_streaming(const W4a16MoeExpertsShape& shape, const W4a16MoeExpertsWeights& weights, void* packed,
                           cudaStream_t stream) {
  const auto layout = streaming(shape);
  const size_t code_bytes = static_cast<size_t>(one_matrix(shape)) / 2;
  const size_t scale_bytes = static_cast<size_t>(one_matrix(shape) / shape.group) * sizeof(bf16);
  const Staged gate(weights.gate_qw, code_bytes, stream), up(weights.up_qw, code_bytes, stream),
      down(weights.down_qw, code_bytes, stream), gate_sc(weights.gate_sc, scale_bytes, stream),
      up_sc(weights.up_sc, scale_bytes, stream), down_sc(weights.down_sc, scale_bytes, stream);
  for (const Staged* staged : {&gate, &up, &down, &gate_sc, &up_sc, &down_sc})
    if (staged->error != cudaSuccess) return staged->error;
  const int hidden = shape.hidden, width = shape.intermediate;
  char* to = static_cast<char*>(packed) + weights.expert * layout.expert_bytes();
  pack_strips<GatheredInt4>(StripSource<uint32_t>::of(gate.as<uint32_t>(), up.as<uint32_t>(), width),
                            StripSource<bf16>::of(gate_sc.as<bf16>(), up_sc.as<bf16>(), width), hidden,
                            layout.gate_up.strips, to, stream);
  pack_strips<GatheredInt4>(StripSource<uint32_t>::of(down.as<uint32_t>(), hidden, width / 8),
                            StripSource<bf16>::of(down_sc.as<bf16>(), hidden, width / 32), width, layout.down.strips,
                            to + layout.gate_up_bytes(), stream);
  return cudaGetLastError();
}

cudaError_t pack(const W4a16MoeExpertsShape& shape, const W4a16MoeExpertsWeights& weights, void* packed,
                 cudaStream_t stream) {
  if (streams(shape)) return pack_streaming(shape, weights, packed, stream);
  const int32_t* codes[3] = {weights.gate_qw, weights.up_qw, weights.down_qw};
  const void* scales[3] = {weights.gate_sc, weights.up_sc, weights.down_sc};
  const size_t one_codes = static_cast<size_t>(one_matrix(shape)) / 2;
  const size_t one_scales = static_cast<size_t>(one_matrix(shape) / shape.group) * size_of(shape.scale_type);
  char* all_scales = static_cast<char*>(packed) + code_bytes(shape);
  for (size_t which = 0; which < 3; ++which) {
    const size_t at = 3 * static_cast<size_t>(weights.expert) + which;
    cudaError_t error = upload(static_cast<char*>(packed) + at * one_codes, codes[which], one_codes, stream);
    if (error == cudaSuccess) error = upload(all_scales + at * one_scales, scales[which], one_scales, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

size_t workspace(const W4a16MoeExpertsShape& shape) {
  if (streams(shape)) return streaming(shape).workspace();
  return ExpertScratch::bytes(sizes(shape));
}

void run(const W4a16MoeExpertsShape& shape, const W4a16MoeExpertsArgs& args, void* workspace, cudaStream_t stream) {
  if (streams(shape)) return streaming(shape).launch(args, workspace, stream);
  const Experts experts{static_cast<const uint32_t*>(args.packed),
                        static_cast<const char*>(args.packed) + code_bytes(shape),
                        one_matrix(shape),
                        shape.hidden,
                        shape.intermediate,
                        shape.group,
                        shape.scale_type};
  with_type(shape.type,
            [&](auto x) { launch_experts<decltype(x)>(sizes(shape), experts, args, workspace, stream); });
}

}  // namespace

namespace cuda {

int init_w4a16_moe_experts() { return StreamExperts<GatheredInt4>::init(); }

}  // namespace cuda

const Operator w4a16_moe_experts = {"w4a16_moe_experts",
                                    refuse_as<W4a16MoeExpertsShape, refuse>,
                                    bytes_as<W4a16MoeExpertsShape, packed_bytes>,
                                    prepare_as<W4a16MoeExpertsShape, W4a16MoeExpertsWeights, pack>,
                                    bytes_as<W4a16MoeExpertsShape, workspace>,
                                    run_as<W4a16MoeExpertsShape, W4a16MoeExpertsArgs, run>};

}  // namespace kdtree
