#include "table.h"

#include "../../ops/argmax/op.h"
#include "../../ops/draft_script/op.h"
#include "../../ops/embed/op.h"
#include "../../ops/gemm/op.h"
#include "../../ops/kv_compact/op.h"
#include "../../ops/moe_experts/op.h"
#include "../../ops/moe_route/op.h"
#include "../../ops/rms_norm/op.h"
#include "../../ops/rope/op.h"
#include "../../ops/swiglu/op.h"
#include "../../ops/tree_accept/op.h"
#include "../../ops/tree_attention/op.h"
#include "../../ops/tree_build/op.h"
#include "../../ops/w4a16_gemm/op.h"
#include "../../ops/w4a16_moe_experts/op.h"
#include "../backend.h"

namespace kdtree::cuda {

int init_gemm();
int init_moe_experts();
int init_tree_attention();
int init_w4a16_gemm();
int init_w4a16_moe_experts();

const KernelInit* kernel_inits() {
  static const KernelInit inits[] = {{"gemm", init_gemm},
                                     {"moe_experts", init_moe_experts},
                                     {"tree_attention", init_tree_attention},
                                     {"w4a16_gemm", init_w4a16_gemm},
                                     {"w4a16_moe_experts", init_w4a16_moe_experts},
                                     {nullptr, nullptr}};
  return inits;
}

}  // namespace kdtree::cuda

namespace kdtree::backend {

const Operator* const* operators() {
  static const Operator* const table[] = {
      &draft_script, &tree_build, &embed,      &rms_norm,          &gemm,   &rope,        &tree_attention, &moe_route,
      &moe_experts,  &swiglu,     &w4a16_gemm, &w4a16_moe_experts, &argmax, &tree_accept, &kv_compact,     nullptr};
  return table;
}

}  // namespace kdtree::backend
