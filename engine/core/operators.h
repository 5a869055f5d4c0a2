// The backend's operators, by type. The core knows them by their contract only and remembers which it called, so that
// the verdict can tell whether every operator in use was checked.
#pragma once
#include <string>
#include <vector>

#include "../ops/argmax/op.h"
#include "../ops/draft_script/op.h"
#include "../ops/embed/op.h"
#include "../ops/gemm/op.h"
#include "../ops/kv_compact/op.h"
#include "../ops/moe_experts/op.h"
#include "../ops/moe_route/op.h"
#include "../ops/rms_norm/op.h"
#include "../ops/rope/op.h"
#include "../ops/swiglu/op.h"
#include "../ops/tree_accept/op.h"
#include "../ops/tree_attention/op.h"
#include "../ops/tree_build/op.h"
#include "../ops/w4a16_gemm/op.h"
#include "../ops/w4a16_moe_experts/op.h"
#include "memory.h"

namespace kdtree {

const Operator* find_operator(const std::string& name);  // null if the backend has none

// Operators share one workspace: they run one after the other on one stream.
struct Workspace {
  size_t bytes = 0;
  Buffer memory;
};

template <class Shape, class Args>
class TypedOperator {
 public:
  TypedOperator(const char* name, Workspace& workspace) : operator_(find_operator(name)), workspace_(workspace) {
    if (!operator_) fail(std::string("operator ") + name + ": the " + backend::name() + " backend has none");
  }

  // To be called at load for every shape that will run: refuses by name what the backend cannot do, and claims scratch.
  void plan(const Shape& shape) {
    if (const char* reason = operator_->refuse(&shape)) fail(std::string("operator ") + operator_->name + ": " + reason);
    workspace_.bytes = std::max(workspace_.bytes, operator_->workspace(&shape));
  }
  size_t packed_bytes(const Shape& shape) const { return operator_->packed_bytes(&shape); }
  template <class Weights>
  void prepare(const Shape& shape, const Weights& weights, void* packed, backend::Stream stream) const {
    check(operator_->prepare(&shape, &weights, packed, stream), operator_->name);
  }
  void operator()(const Shape& shape, const Args& args, backend::Stream stream) {
    called_ = true;
    check(operator_->run(&shape, &args, workspace_.memory.as(), stream), operator_->name);
  }
  void append_if_called(std::vector<std::string>& names) const {
    if (called_) names.push_back(operator_->name);
  }

 private:
  const Operator* operator_;
  Workspace& workspace_;
  bool called_ = false;
};

struct Operators {
  Workspace workspace;
  TypedOperator<DraftScriptShape, DraftScriptArgs> draft_script{"draft_script", workspace};
  TypedOperator<TreeBuildShape, TreeBuildArgs> tree_build{"tree_build", workspace};
  TypedOperator<EmbedShape, EmbedArgs> embed{"embed", workspace};
  TypedOperator<RmsNormShape, RmsNormArgs> rms_norm{"rms_norm", workspace};
  TypedOperator<GemmShape, GemmArgs> gemm{"gemm", workspace};
  TypedOperator<W4a16GemmShape, W4a16GemmArgs> w4a16_gemm{"w4a16_gemm", workspace};
  TypedOperator<RopeShape, RopeArgs> rope{"rope", workspace};
  TypedOperator<TreeAttentionShape, TreeAttentionArgs> tree_attention{"tree_attention", workspace};
  TypedOperator<MoeRouteShape, MoeRouteArgs> moe_route{"moe_route", workspace};
  TypedOperator<MoeExpertsShape, MoeExpertsArgs> moe_experts{"moe_experts", workspace};
  TypedOperator<W4a16MoeExpertsShape, W4a16MoeExpertsArgs> w4a16_moe_experts{"w4a16_moe_experts", workspace};
  TypedOperator<SwigluShape, SwigluArgs> swiglu{"swiglu", workspace};
  TypedOperator<ArgmaxShape, ArgmaxArgs> argmax{"argmax", workspace};
  TypedOperator<TreeAcceptShape, TreeAcceptArgs> tree_accept{"tree_accept", workspace};
  TypedOperator<KvCompactShape, KvCompactArgs> kv_compact{"kv_compact", workspace};

  std::vector<std::string> called() const {
    std::vector<std::string> names;
    for_each([&](const auto& op) { op.append_if_called(names); });
    return names;
  }

 private:
  template <class Visit>
  void for_each(Visit&& visit) const {
    visit(draft_script), visit(tree_build), visit(embed), visit(rms_norm), visit(gemm), visit(w4a16_gemm), visit(rope),
        visit(tree_attention), visit(moe_route), visit(moe_experts), visit(w4a16_moe_experts), visit(swiglu),
        visit(argmax), visit(tree_accept), visit(kv_compact);
  }
};

}  // namespace kdtree
