#include "../cpu/experts.h"
#include "../cpu/operator_cpu.h"
#include "op.h"

namespace kdtree::KDTREE_PATH {
namespace {

ExpertShape sizes(const MoeExpertsShape& s) { return {s.max_rows, s.hidden, s.intermediate, s.n_experts, s.top_k}; }

// Weights of one expert, in elements: gate, up, down.
struct Layout {
  int64_t projection, down;
  explicit Layout(const MoeExpertsShape& s)
      : projection(tiles_of(s.intermediate) * kTile * s.hidden), down(tiles_of(s.hidden) * kTile * s.intermediate) {}
  int64_t expert() const { return 2 * projection + down; }
};

size_t packed_bytes(const MoeExpertsShape& shape) {
  return static_cast<size_t>(Layout(shape).expert() * shape.n_experts) * size_of(shape.w_type);
}

void pack(const MoeExpertsShape& shape, const MoeExpertsWeights& weights, void* packed) {
  with_type(weights.type, [&](auto* source) {
    with_type(shape.w_type, [&](auto* w) {
      using Source = std::remove_pointer_t<decltype(source)>;
      using W = std::remove_pointer_t<decltype(w)>;
      const Layout layout(shape);
      W* to = static_cast<W*>(packed) + weights.expert * layout.expert();
      pack_float(static_cast<const Source*>(weights.gate), shape.intermediate, shape.hidden, to);
      pack_float(static_cast<const Source*>(weights.up), shape.intermediate, shape.hidden, to + layout.projection);
      pack_float(static_cast<const Source*>(weights.down), shape.hidden, shape.intermediate, to + 2 * layout.projection);
    });
  });
}

size_t workspace(const MoeExpertsShape& shape) { return ExpertScratch::bytes(sizes(shape)); }

void run(const MoeExpertsShape& shape, const MoeExpertsArgs& args, void* workspace) {
  with_type(shape.type, [&](auto* type) {
    with_type(shape.w_type, [&](auto* w) {
      using W = std::remove_pointer_t<decltype(w)>;
      const Layout layout(shape);
      run_experts<std::remove_pointer_t<decltype(type)>>(
          sizes(shape), args, workspace, [&](int64_t expert, int which) {
            const W* from = static_cast<const W*>(args.packed) + expert * layout.expert() + which * layout.projection;
            return which == 2 ? FloatMatrix<W>{from, shape.hidden, shape.intermediate}
                              : FloatMatrix<W>{from, shape.intermediate, shape.hidden};
          });
    });
  });
}

}  // namespace

KDTREE_OPERATOR(moe_experts) = {"moe_experts",
                                accept_any,
                                bytes_as<MoeExpertsShape, packed_bytes>,
                                prepare_as<MoeExpertsShape, MoeExpertsWeights, pack>,
                                bytes_as<MoeExpertsShape, workspace>,
                                run_as<MoeExpertsShape, MoeExpertsArgs, run>};

}  // namespace kdtree::KDTREE_PATH
