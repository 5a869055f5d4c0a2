// Every operator, and decoding, as torch.ops.kdtree.*, on LibTorch's stable ABI. engine/torch_ops/build.py compiles it.
//
// Nothing is kept between calls. What the engine passes by pointer (n, prefix, …) is taken from sizes and arguments.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

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
#include "tensors.h"

namespace kdtree::torch_ops {
namespace {

constexpr ScalarType kInt = ScalarType::Int;
constexpr ScalarType kFloat = ScalarType::Float;
constexpr int64_t kStateFields = sizeof(DecodeState) / sizeof(int32_t);

int32_t rows_of(const Tensor& x) { return x.dim() > 0 ? static_cast<int32_t>(x.size(0)) : 0; }

// ---- row by row --------------------------------------------------------------------------------------------------
Tensor embed(const Tensor& tokens, const Tensor& table) {
  Call call("embed", tokens);
  const ScalarType type = call.floating("table", table);
  call.check("tokens", tokens, kInt, {kAny});
  call.check("table", table, type, {kAny, kAny});
  call.check_range("tokens", tokens, 0, table.size(0));
  const EmbedShape shape{rows_of(tokens), call.narrow("table", table.size(0)), call.narrow("table", table.size(1)),
                         element_type(type)};
  Tensor y = call.empty({shape.max_rows, shape.hidden}, type);
  call.run(shape, EmbedArgs{call.scalar(shape.max_rows), data<int32_t>(tokens), table.const_data_ptr(),
                            y.mutable_data_ptr()});
  return y;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Call call("rms_norm", x);
  const ScalarType type = call.floating("x", x);
  call.check_strided("x", x, type, {kAny, kAny});
  call.check("weight", weight, type, {x.size(1)});
  const int32_t cols = call.narrow("x", x.size(1));
  const RmsNormShape shape{rows_of(x), cols, call.narrow("x", x.stride(0)), cols, element_type(type),
                           static_cast<float>(eps)};
  Tensor y = call.empty({shape.max_rows, cols}, type);
  call.run(shape, RmsNormArgs{call.scalar(shape.max_rows), x.const_data_ptr(), weight.const_data_ptr(),
                              y.mutable_data_ptr(), nullptr});
  return y;
}

Tensor swiglu(const Tensor& gate_up) {
  Call call("swiglu", gate_up);
  const ScalarType type = call.floating("gate_up", gate_up);
  call.check("gate_up", gate_up, type, {kAny, 2, kAny});
  const SwigluShape shape{rows_of(gate_up), call.narrow("gate_up", gate_up.size(2)), element_type(type)};
  Tensor y = call.empty({shape.max_rows, shape.cols}, type);
  call.run(shape, SwigluArgs{call.scalar(shape.max_rows), gate_up.const_data_ptr(), y.mutable_data_ptr()});
  return y;
}

Tensor argmax(const Tensor& x) {
  Call call("argmax", x);
  call.check("x", x, kFloat, {kAny, kAny});
  const ArgmaxShape shape{rows_of(x), call.narrow("x", x.size(1))};
  Tensor indices = call.empty({shape.max_rows}, kInt);
  call.run(shape, ArgmaxArgs{call.scalar(shape.max_rows), data<float>(x), mutable_data<int32_t>(indices)});
  return indices;
}

Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& cos, const Tensor& sin) {
  Call call("rope", x);
  const ScalarType type = call.floating("x", x);
  call.check_strided("x", x, type, {kAny, kAny, kAny});
  const int32_t heads = call.narrow("x", x.size(1)), dim = call.narrow("x", x.size(2));
  call.check("positions", positions, kInt, {x.size(0)});
  call.check("cos", cos, kFloat, {kAny, dim / 2});
  call.check("sin", sin, kFloat, {cos.size(0), dim / 2});
  call.check_range("positions", positions, 0, cos.size(0));
  const RopeShape shape{rows_of(x),  heads, dim, call.narrow("x", x.stride(0)), call.narrow("x", x.stride(1)),
                        heads * dim, dim,   element_type(type)};
  Tensor y = call.empty({shape.max_rows, heads, dim}, type);
  call.run(shape, RopeArgs{call.scalar(shape.max_rows), call.scalar(0), data<int32_t>(positions), data<float>(cos),
                           data<float>(sin), x.const_data_ptr(), y.mutable_data_ptr(), nullptr});
  return y;
}

// ---- matrices ----------------------------------------------------------------------------------------------------
bool is_batched(const Tensor& x) { return x.dim() == 3; }

// x [rows, k] or [rows, batch, k]: its sizes and strides, with batch 1 where it has none.
struct Rows {
  int32_t rows, batch, k, row_stride, batch_stride;

  Rows(const Call& call, const char* name, const Tensor& x, ScalarType type) {
    const bool batched = is_batched(x);
    call.check_strided(name, x, type, batched ? Sizes{kAny, kAny, kAny} : Sizes{kAny, kAny});
    rows = rows_of(x);
    batch = batched ? call.narrow(name, x.size(1)) : 1;
    k = call.narrow(name, x.size(x.dim() - 1));
    row_stride = call.narrow(name, x.stride(0));
    batch_stride = batched ? call.narrow(name, x.stride(1)) : 0;
  }
  Sizes output(int64_t n, bool batched) const { return batched ? Sizes{rows, batch, n} : Sizes{rows, n}; }
};

ScalarType output_type(const Call& call, ScalarType x, std::optional<ScalarType> out) {
  call.require(!out || *out == x || (*out == kFloat && x == ScalarType::BFloat16), "out_type",
               "must be that of x, or Float");
  return out.value_or(x);
}

GemmShape gemm_shape(const Call& call, int64_t n, int64_t k, int64_t batch, ScalarType w_type) {
  GemmShape shape{};
  shape.n = call.narrow("n", n);
  shape.k = call.narrow("k", k);
  shape.batch = call.narrow("batch", batch);
  shape.w_type = element_type(w_type);
  return shape;
}

Tensor gemm_prepare(const Tensor& w, ScalarType activations) {
  Call call("gemm", w);
  const ScalarType type = call.floating("w", w);
  const bool batched = is_batched(w);
  call.check("w", w, type, batched ? Sizes{kAny, kAny, kAny} : Sizes{kAny, kAny});
  GemmShape shape = gemm_shape(call, w.size(batched), w.size(1 + batched), batched ? w.size(0) : 1,
                               activations == ScalarType::BFloat16 ? activations : type);
  shape.x_type = shape.y_type = element_type(activations);
  const Tensor packed = call.allocate_packed(shape), host = on_host(w);
  call.prepare(shape, GemmWeights{host.const_data_ptr(), element_type(type)}, packed);
  return packed;
}

Tensor gemm(const Tensor& x, const Tensor& packed, int64_t n, ScalarType w_type, const std::optional<Tensor>& add,
            std::optional<ScalarType> out_type) {
  Call call("gemm", x);
  const ScalarType type = call.floating("x", x), y_type = output_type(call, type, out_type);
  const Rows in(call, "x", x, type);
  call.require(type == kFloat || w_type == type, "w_type", "must be BFloat16 where x is");
  GemmShape shape = gemm_shape(call, n, in.k, in.batch, w_type);
  shape.max_rows = in.rows;
  shape.x_row_stride = in.row_stride;
  shape.x_batch_stride = in.batch_stride;
  shape.y_row_stride = call.narrow("n", in.batch * n);
  shape.y_batch_stride = shape.n;
  shape.x_type = element_type(type);
  shape.y_type = element_type(y_type);
  call.check_packed(packed, shape);
  const Sizes sizes = in.output(n, is_batched(x));
  if (add) call.check("add", *add, y_type, sizes);
  Tensor y = call.empty(sizes, y_type);
  call.run(shape, GemmArgs{call.scalar(in.rows), x.const_data_ptr(), packed.const_data_ptr(), data(add),
                           y.mutable_data_ptr()});
  return y;
}

// A quantised matrix [..., n, k/8] with its scales [..., n, k/group].
void check_int4(const Call& call, const char* qw_name, const Tensor& qw, const char* sc_name, const Tensor& sc,
                ScalarType scale_type, Sizes sizes, int64_t group) {
  call.require(group > 0, "group", "must be positive");
  call.require(sizes.back() == kAny || sizes.back() % 8 == 0, qw_name, "the inputs must be a multiple of 8");
  if (sizes.back() != kAny) sizes.back() /= 8;
  call.check(qw_name, qw, kInt, sizes);
  sizes[sizes.size() - 2] = qw.size(qw.dim() - 2);
  sizes.back() = qw.size(qw.dim() - 1) * 8 / group;
  call.check(sc_name, sc, scale_type, sizes);
}

Tensor w4a16_gemm_prepare(const Tensor& qw, const Tensor& sc, int64_t group, ScalarType activations) {
  Call call("w4a16_gemm", qw);
  const ScalarType scale_type = call.floating("sc", sc);
  check_int4(call, "qw", qw, "sc", sc, scale_type, {kAny, kAny}, group);
  W4a16GemmShape shape{};
  shape.n = call.narrow("qw", qw.size(0));
  shape.k = call.narrow("qw", qw.size(1) * 8);
  shape.group = call.narrow("group", group);
  shape.x_type = element_type(activations);
  shape.scale_type = element_type(scale_type);
  const Tensor packed = call.allocate_packed(shape), qw_host = on_host(qw), sc_host = on_host(sc);
  call.prepare(shape, W4a16GemmWeights{data<int32_t>(qw_host), sc_host.const_data_ptr()}, packed);
  return packed;
}

Tensor w4a16_gemm(const Tensor& x, const Tensor& packed, int64_t n, int64_t group, ScalarType scale_type,
                  const std::optional<Tensor>& add, std::optional<ScalarType> out_type) {
  Call call("w4a16_gemm", x);
  const ScalarType type = call.floating("x", x), y_type = output_type(call, type, out_type);
  call.check_strided("x", x, type, {kAny, kAny});
  const Rows in(call, "x", x, type);
  const int32_t outputs = call.narrow("n", n);
  const W4a16GemmShape shape{in.rows,       outputs, in.k,
                             call.narrow("group", group), in.row_stride, outputs,
                             element_type(type), element_type(y_type), element_type(scale_type)};
  call.check_packed(packed, shape);
  if (add) call.check("add", *add, y_type, {in.rows, n});
  Tensor y = call.empty({in.rows, n}, y_type);
  call.run(shape, W4a16GemmArgs{call.scalar(in.rows), x.const_data_ptr(), packed.const_data_ptr(), data(add),
                                y.mutable_data_ptr()});
  return y;
}

// ---- experts -----------------------------------------------------------------------------------------------------
std::tuple<Tensor, Tensor> moe_route(const Tensor& logits, const Tensor& bias, int64_t top_k, int64_t n_group,
                                     int64_t topk_group, bool norm_topk_prob, double scaling) {
  Call call("moe_route", logits);
  call.check("logits", logits, kFloat, {kAny, kAny});
  call.check("bias", bias, kFloat, {logits.size(1)});
  const MoeRouteShape shape{rows_of(logits),
                            call.narrow("logits", logits.size(1)),
                            call.narrow("top_k", top_k),
                            call.narrow("n_group", n_group),
                            call.narrow("topk_group", topk_group),
                            norm_topk_prob,
                            static_cast<float>(scaling)};
  call.accept(shape);
  Tensor experts = call.empty({shape.max_rows, top_k}, kInt), weights = call.empty({shape.max_rows, top_k}, kFloat);
  call.run(shape, MoeRouteArgs{call.scalar(shape.max_rows), data<float>(logits), data<float>(bias),
                               mutable_data<int32_t>(experts), mutable_data<float>(weights)});
  return {experts, weights};
}

Tensor moe_experts_prepare(const Tensor& gate, const Tensor& up, const Tensor& down, ScalarType activations) {
  Call call("moe_experts", gate);
  const ScalarType type = call.floating("gate", gate);
  call.check("gate", gate, type, {kAny, kAny, kAny});
  const int64_t count = gate.size(0), intermediate = gate.size(1), hidden = gate.size(2);
  call.check("up", up, type, {count, intermediate, hidden});
  call.check("down", down, type, {count, hidden, intermediate});
  MoeExpertsShape shape{};
  shape.hidden = call.narrow("gate", hidden);
  shape.intermediate = call.narrow("gate", intermediate);
  shape.n_experts = call.narrow("gate", count);
  shape.top_k = 1;
  shape.type = element_type(activations);
  shape.w_type = activations == ScalarType::BFloat16 ? kBFloat16 : element_type(type);
  const Tensor packed = call.allocate_packed(shape), g = on_host(gate), u = on_host(up), d = on_host(down);
  const size_t matrix = static_cast<size_t>(hidden * intermediate) * g.element_size();
  for (int32_t e = 0; e < shape.n_experts; ++e)
    call.prepare(shape, MoeExpertsWeights{e, element_type(type), data<char>(g) + e * matrix, data<char>(u) + e * matrix,
                                          data<char>(d) + e * matrix}, packed);
  return packed;
}

// Checks what both expert operators take besides weights.
void check_experts(const Call& call, const Tensor& x, ScalarType type, const Tensor& experts, const Tensor& weights,
                   int64_t n_experts, const std::optional<Tensor>& shared, const std::optional<Tensor>& residual) {
  call.check("x", x, type, {kAny, kAny});
  call.check("experts", experts, kInt, {x.size(0), kAny});
  call.check("weights", weights, kFloat, {x.size(0), experts.size(1)});
  call.check_range("experts", experts, 0, n_experts);
  if (shared) call.check("shared", *shared, type, {x.size(0), x.size(1)});
  if (residual) call.check("residual", *residual, type, {x.size(0), x.size(1)});
}

Tensor moe_experts(const Tensor& x, const Tensor& experts, const Tensor& weights, const Tensor& packed,
                   int64_t n_experts, int64_t intermediate, ScalarType w_type, const std::optional<Tensor>& shared,
                   const std::optional<Tensor>& residual) {
  Call call("moe_experts", x);
  const ScalarType type = call.floating("x", x);
  check_experts(call, x, type, experts, weights, n_experts, shared, residual);
  call.require(type == kFloat || w_type == type, "w_type", "must be BFloat16 where x is");
  const MoeExpertsShape shape{rows_of(x),
                              call.narrow("x", x.size(1)),
                              call.narrow("intermediate", intermediate),
                              call.narrow("n_experts", n_experts),
                              call.narrow("experts", experts.size(1)),
                              element_type(type),
                              element_type(w_type)};
  call.check_packed(packed, shape);
  Tensor y = call.empty({x.size(0), x.size(1)}, type);
  call.run(shape, MoeExpertsArgs{call.scalar(shape.max_rows), x.const_data_ptr(), data<int32_t>(experts),
                                 data<float>(weights), packed.const_data_ptr(), data(shared), data(residual),
                                 y.mutable_data_ptr()});
  return y;
}

Tensor w4a16_moe_experts_prepare(const Tensor& gate_qw, const Tensor& gate_sc, const Tensor& up_qw,
                                 const Tensor& up_sc, const Tensor& down_qw, const Tensor& down_sc, int64_t group,
                                 ScalarType activations) {
  Call call("w4a16_moe_experts", gate_qw);
  const ScalarType scale_type = call.floating("gate_sc", gate_sc);
  check_int4(call, "gate_qw", gate_qw, "gate_sc", gate_sc, scale_type, {kAny, kAny, kAny}, group);
  const int64_t count = gate_qw.size(0), intermediate = gate_qw.size(1), hidden = gate_qw.size(2) * 8;
  check_int4(call, "up_qw", up_qw, "up_sc", up_sc, scale_type, {count, intermediate, hidden}, group);
  check_int4(call, "down_qw", down_qw, "down_sc", down_sc, scale_type, {count, hidden, intermediate}, group);
  W4a16MoeExpertsShape shape{};
  shape.hidden = call.narrow("gate_qw", hidden);
  shape.intermediate = call.narrow("gate_qw", intermediate);
  shape.n_experts = call.narrow("gate_qw", count);
  shape.top_k = 1;
  shape.group = call.narrow("group", group);
  shape.type = element_type(activations);
  shape.scale_type = element_type(scale_type);
  const Tensor packed = call.allocate_packed(shape);
  const Tensor host[] = {on_host(gate_qw), on_host(gate_sc), on_host(up_qw),
                         on_host(up_sc),   on_host(down_qw), on_host(down_sc)};
  const auto of = [&](int i, int32_t expert) {
    return data<char>(host[i]) + static_cast<size_t>(expert) * (host[i].numel() / count) * host[i].element_size();
  };
  const auto codes = [&](int i, int32_t expert) { return reinterpret_cast<const int32_t*>(of(i, expert)); };
  for (int32_t e = 0; e < shape.n_experts; ++e)
    call.prepare(shape, W4a16MoeExpertsWeights{e, codes(0, e), of(1, e), codes(2, e), of(3, e), codes(4, e), of(5, e)},
                 packed);
  return packed;
}

Tensor w4a16_moe_experts(const Tensor& x, const Tensor& experts, const Tensor& weights, const Tensor& packed,
                         int64_t n_experts, int64_t intermediate, int64_t group, ScalarType scale_type,
                         const std::optional<Tensor>& shared, const std::optional<Tensor>& residual) {
  Call call("w4a16_moe_experts", x);
  const ScalarType type = call.floating("x", x);
  check_experts(call, x, type, experts, weights, n_experts, shared, residual);
  const W4a16MoeExpertsShape shape{rows_of(x),
                                   call.narrow("x", x.size(1)),
                                   call.narrow("intermediate", intermediate),
                                   call.narrow("n_experts", n_experts),
                                   call.narrow("experts", experts.size(1)),
                                   call.narrow("group", group),
                                   element_type(type),
                                   element_type(scale_type)};
  call.check_packed(packed, shape);
  Tensor y = call.empty({x.size(0), x.size(1)}, type);
  call.run(shape, W4a16MoeExpertsArgs{call.scalar(shape.max_rows), x.const_data_ptr(), data<int32_t>(experts),
                                      data<float>(weights), packed.const_data_ptr(), data(shared), data(residual),
                                      y.mutable_data_ptr()});
  return y;
}

// ---- the draft tree ----------------------------------------------------------------------------------------------
Tensor tree_attention(const Tensor& q_latent, const Tensor& q_rope, const Tensor& kv, int64_t prefix,
                      const Tensor& parents, const Tensor& depths, double softmax_scale) {
  Call call("tree_attention", q_latent);
  const ScalarType type = call.floating("q_latent", q_latent);
  call.check("q_latent", q_latent, type, {kAny, kAny, kAny});
  const int64_t rows = q_latent.size(0), heads = q_latent.size(1), rank = q_latent.size(2);
  call.check_strided("q_rope", q_rope, type, {rows, heads, kAny});
  call.check("kv", kv, type, {kAny, rank + q_rope.size(2)});
  call.check("parents", parents, kInt, {rows});
  call.check("depths", depths, kInt, {rows});
  call.require(prefix >= 0 && prefix + rows <= kv.size(0), "prefix", "prefix and rows must fit the rows of kv");
  call.check_range("parents", parents, -1, rows);
  call.check_range("depths", depths, 0, rows);
  if (parents.is_cpu())
    for (int64_t i = 0; i < rows; ++i) {
      const int32_t parent = data<int32_t>(parents)[i], depth = data<int32_t>(depths)[i];
      call.require(parent < i, "parents", "row " + std::to_string(i) + " stands before its parent");
      call.require(depth == (parent < 0 ? 0 : data<int32_t>(depths)[parent] + 1), "depths",
                   "row " + std::to_string(i) + " must be one deeper than its parent");
    }
  const TreeAttentionShape shape{call.narrow("q_latent", rows),
                                 call.narrow("q_latent", heads),
                                 call.narrow("q_latent", rank),
                                 call.narrow("q_rope", q_rope.size(2)),
                                 call.narrow("q_rope", q_rope.stride(0)),
                                 call.narrow("q_rope", q_rope.stride(1)),
                                 call.narrow("prefix", prefix + rows),
                                 element_type(type),
                                 static_cast<float>(softmax_scale)};
  Tensor y = call.empty({rows, heads, rank}, type);
  call.run(shape, TreeAttentionArgs{call.scalar(rows), call.scalar(prefix), data<int32_t>(parents),
                                    data<int32_t>(depths), q_latent.const_data_ptr(), q_rope.const_data_ptr(),
                                    kv.const_data_ptr(), y.mutable_data_ptr()});
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> tree_build(const Tensor& logits, int64_t root,
                                                                      int64_t budget) {
  Call call("tree_build", logits);
  call.check("logits", logits, kFloat, {kAny, kAny});
  call.require(budget >= 0, "budget", "must not be negative");
  const int64_t top_k = std::min(budget, logits.size(1));
  const TreeBuildShape shape{rows_of(logits), call.narrow("logits", logits.size(1)), call.narrow("budget", budget),
                             call.narrow("budget", top_k)};
  const Tensor state = call.full({kStateFields}, 0);
  Tensor tokens = call.full({budget + 1}, -1), parents = call.full({budget + 1}, -1);
  Tensor depths = call.full({budget + 1}, -1);
  Tensor first = torch::stable::narrow(tokens, 0, 0, 1);
  torch::stable::fill_(first, static_cast<double>(root));
  Tensor top_tokens = call.empty({logits.size(0), top_k}, kInt), log_probs = call.empty({logits.size(0), top_k}, kFloat);
  call.run(shape, TreeBuildArgs{data<float>(logits), mutable_data<DecodeState>(state), mutable_data<int32_t>(tokens),
                                mutable_data<int32_t>(parents), mutable_data<int32_t>(depths),
                                mutable_data<int32_t>(top_tokens), mutable_data<float>(log_probs)});
  Tensor counted = state;
  static_assert(offsetof(DecodeState, n_rows) == 0);
  Tensor n_rows = torch::stable::clone(torch::stable::narrow(counted, 0, 0, 1));
  return {tokens, parents, depths, n_rows, top_tokens, log_probs};
}

void tree_accept(const Tensor& state, const Tensor& tokens, const Tensor& parents, const Tensor& next_tokens,
                 const Tensor& stop_ids, const Tensor& accepted_rows, const Tensor& output) {
  Call call("tree_accept", state);
  call.check("state", state, kInt, {kStateFields});
  call.check("tokens", tokens, kInt, {kAny});
  call.check("parents", parents, kInt, {tokens.size(0)});
  call.check("next_tokens", next_tokens, kInt, {tokens.size(0)});
  call.check("stop_ids", stop_ids, kInt, {kAny});
  call.check("accepted_rows", accepted_rows, kInt, {kAny});
  call.check("output", output, kInt, {kAny});
  if (state.is_cpu()) {
    const DecodeState& s = *data<DecodeState>(state);
    call.require(s.n_rows <= tokens.size(0), "state", "n_rows must not exceed the rows of tokens");
    call.require(s.n_stop_ids <= stop_ids.size(0), "state", "n_stop_ids must not exceed those of stop_ids");
    call.require(s.done || s.generated < s.limit, "state", "generated must be below limit");
    call.require(s.limit <= output.size(0), "state", "limit must not exceed the size of output");
  }
  const TreeAcceptShape shape{rows_of(tokens), call.narrow("accepted_rows", accepted_rows.size(0) - 1)};
  call.run(shape, TreeAcceptArgs{mutable_data<DecodeState>(state), mutable_data<int32_t>(tokens),
                                 data<int32_t>(parents), data<int32_t>(next_tokens), data<int32_t>(stop_ids),
                                 mutable_data<int32_t>(accepted_rows), mutable_data<int32_t>(output)});
}

void kv_compact(const Tensor& state, const Tensor& accepted_rows, const Tensor& kv) {
  Call call("kv_compact", state);
  const ScalarType type = call.floating("kv", kv);
  call.check("state", state, kInt, {kStateFields});
  call.check("accepted_rows", accepted_rows, kInt, {kAny});
  call.check("kv", kv, type, {kAny, kAny, kAny});
  const int64_t max_depth = accepted_rows.size(0) - 1;
  if (state.is_cpu()) {
    const DecodeState& s = *data<DecodeState>(state);
    const int64_t base = int64_t{s.prefix} - s.accepted;
    call.require(0 <= s.accepted && s.accepted <= max_depth + 1, "state", "accepted must fit accepted_rows");
    call.require(base >= 0, "state", "accepted must not exceed prefix");
    for (int32_t i = 0; i < s.accepted; ++i) {
      const int64_t row = data<int32_t>(accepted_rows)[i];
      call.require(i <= row && base + row < kv.size(1), "accepted_rows",
                   "entry " + std::to_string(i) + " lies outside the call or the pool");
    }
  }
  const KvCompactShape shape{call.narrow("kv", kv.size(0)), call.narrow("kv", kv.size(2)),
                             call.narrow("kv", kv.size(1)), call.narrow("accepted_rows", max_depth),
                             element_type(type)};
  call.run(shape, KvCompactArgs{data<DecodeState>(state), data<int32_t>(accepted_rows), kv.mutable_data_ptr()});
}

Tensor draft_script(const Tensor& state, const Tensor& script, int64_t levels, int64_t vocab, int64_t kind, double p,
                    int64_t seed) {
  Call call("draft_script", state);
  call.check("state", state, kInt, {kStateFields});
  call.check("script", script, kInt, {kAny});
  call.check_range("script", script, 0, vocab);
  call.require(levels >= 0, "levels", "must not be negative");
  const DraftScriptShape shape{call.narrow("levels", levels), call.narrow("vocab", vocab), call.narrow("kind", kind),
                               static_cast<float>(p), seed};
  call.accept(shape);
  Tensor logits = call.empty({levels, vocab}, kFloat);
  call.run(shape, DraftScriptArgs{data<DecodeState>(state), data<int32_t>(script), call.scalar(script.size(0)),
                                  mutable_data<float>(logits)});
  return logits;
}

// ---- decoding ----------------------------------------------------------------------------------------------------
// Tokens of the rounds so far.
struct Received {
  int32_t* tokens;
  int64_t room;
};

int32_t receive(void* user, const Round* round) {
  auto& received = *static_cast<Received*>(user);
  const int64_t count = std::min<int64_t>(round->n_tokens, received.room);
  received.tokens = std::copy_n(round->tokens, count, received.tokens);
  received.room -= count;
  return 0;
}

std::tuple<Tensor, Tensor> generate(const Tensor& prompt, const Tensor& stop_ids, const Tensor& script, int64_t engine,
                                    int64_t mode, int64_t max_new_tokens) {
  Call call("generate", prompt);
  call.check("prompt", prompt, kInt, {kAny});
  call.check("stop_ids", stop_ids, kInt, {kAny});
  call.check("script", script, kInt, {kAny});
  call.require(engine != 0, "engine", "is null");
  call.require(max_new_tokens >= 0, "max_new_tokens", "must not be negative");
  const Tensor host[] = {on_host(prompt), on_host(stop_ids), on_host(script)};
  Request request{};
  request.prompt = data<int32_t>(host[0]);
  request.prompt_length = rows_of(prompt);
  request.mode = call.narrow("mode", mode);
  request.max_new_tokens = call.narrow("max_new_tokens", max_new_tokens);
  request.stop_ids = data<int32_t>(host[1]);
  request.n_stop_ids = rows_of(stop_ids);
  request.script = data<int32_t>(host[2]);
  request.script_length = rows_of(script);
  const Tensor tokens = host_full({max_new_tokens}, -1), counts = host_full({4}, 0);
  Received received{mutable_data<int32_t>(tokens), max_new_tokens};
  Result result{};
  if (kdtree_generate(reinterpret_cast<kdtree_engine*>(engine), &request, receive, &received, &result))
    call.throw_error(kdtree_error());
  const int32_t values[] = {result.generated, result.committed, result.steps, result.stop_reason};
  std::copy(std::begin(values), std::end(values), mutable_data<int32_t>(counts));
  return {call.to_device(tokens), call.to_device(counts)};
}

}  // namespace
}  // namespace kdtree::torch_ops

#define KDTREE_IMPL(op) m.impl(#op, TORCH_BOX(&kdtree::torch_ops::op))

STABLE_TORCH_LIBRARY_IMPL(kdtree, KDTREE_TORCH_KEY, m) {
  KDTREE_IMPL(embed);
  KDTREE_IMPL(rms_norm);
  KDTREE_IMPL(swiglu);
  KDTREE_IMPL(argmax);
  KDTREE_IMPL(rope);
  KDTREE_IMPL(gemm_prepare);
  KDTREE_IMPL(gemm);
  KDTREE_IMPL(w4a16_gemm_prepare);
  KDTREE_IMPL(w4a16_gemm);
  KDTREE_IMPL(moe_route);
  KDTREE_IMPL(moe_experts_prepare);
  KDTREE_IMPL(moe_experts);
  KDTREE_IMPL(w4a16_moe_experts_prepare);
  KDTREE_IMPL(w4a16_moe_experts);
  KDTREE_IMPL(tree_attention);
  KDTREE_IMPL(tree_build);
  KDTREE_IMPL(tree_accept);
  KDTREE_IMPL(kv_compact);
  KDTREE_IMPL(draft_script);
  KDTREE_IMPL(generate);
}
