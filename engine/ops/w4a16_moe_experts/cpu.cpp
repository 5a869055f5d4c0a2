#include "../cpu/experts.h"
#include "../cpu/operator_cpu.h"
#include "op.h"

namespace kdtree::KDTREE_PATH {
namespace {

ExpertShape sizes(const W4a16MoeExpertsShape& s) {
  return {s.max_rows, s.hidden, s.intermediate, s.n_experts, s.top_k};
}

// Bytes of one expert: gate, up, down.
template <class S>
struct Layout {
  size_t projection, down;
  explicit Layout(const W4a16MoeExpertsShape& s)
      : projection(Int4Matrix<S>::bytes(s.intermediate, s.hidden, s.group)),
        down(Int4Matrix<S>::bytes(s.hidden, s.intermediate, s.group)) {}
  size_t expert() const { return 2 * projection + down; }
};

const char* refuse(const W4a16MoeExpertsShape& shape) {
  if (shape.group != 32 && shape.group != 64 && shape.group != 128) return "group: must be 32, 64 or 128";
  if (shape.hidden % shape.group) return "hidden: must be a multiple of group";
  if (shape.intermediate % shape.group) return "intermediate: must be a multiple of group";
  return nullptr;
}

size_t packed_bytes(const W4a16MoeExpertsShape& shape) {
  return static_cast<size_t>(shape.n_experts) * with_type(shape.scale_type, [&](auto* s) {
    return Layout<std::remove_pointer_t<decltype(s)>>(shape).expert();
  });
}

void pack(const W4a16MoeExpertsShape& shape, const W4a16MoeExpertsWeights& weights, void* packed) {
  with_type(shape.scale_type, [&](auto* s) {
    using S = std::remove_pointer_t<decltype(s)>;
    const Layout<S> layout(shape);
    char* to = static_cast<char*>(packed) + static_cast<size_t>(weights.expert) * layout.expert();
    pack_int4(weights.gate_qw, static_cast<const S*>(weights.gate_sc), shape.intermediate, shape.hidden, shape.group,
              to);
    pack_int4(weights.up_qw, static_cast<const S*>(weights.up_sc), shape.intermediate, shape.hidden, shape.group,
              to + layout.projection);
    pack_int4(weights.down_qw, static_cast<const S*>(weights.down_sc), shape.hidden, shape.intermediate, shape.group,
              to + 2 * layout.projection);
  });
}

size_t workspace(const W4a16MoeExpertsShape& shape) { return ExpertScratch::bytes(sizes(shape)); }

void run(const W4a16MoeExpertsShape& shape, const W4a16MoeExpertsArgs& args, void* workspace) {
  with_type(shape.type, [&](auto* type) {
    with_type(shape.scale_type, [&](auto* s) {
      using S = std::remove_pointer_t<decltype(s)>;
      const Layout<S> layout(shape);
      run_experts<std::remove_pointer_t<decltype(type)>>(
          sizes(shape), args, workspace, [&](int64_t expert, int which) {
            const char* from = static_cast<const char*>(args.packed) + static_cast<size_t>(expert) * layout.expert() +
                               static_cast<size_t>(which) * layout.projection;
            return which == 2 ? Int4Matrix<S>(from, shape.hidden, shape.intermediate, shape.group)
                              : Int4Matrix<S>(from, shape.intermediate, shape.hidden, shape.group);
          });
    });
  });
}

}  // namespace

KDTREE_OPERATOR(w4a16_moe_experts) = {"w4a16_moe_experts",
                                      refuse_as<W4a16MoeExpertsShape, refuse>,
                                      bytes_as<W4a16MoeExpertsShape, packed_bytes>,
                                      prepare_as<W4a16MoeExpertsShape, W4a16MoeExpertsWeights, pack>,
                                      bytes_as<W4a16MoeExpertsShape, workspace>,
                                      run_as<W4a16MoeExpertsShape, W4a16MoeExpertsArgs, run>};

}  // namespace kdtree::KDTREE_PATH
