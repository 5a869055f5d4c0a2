#include "model.h"

#include <algorithm>

#include "rope_table.h"

namespace kdtree {
namespace {

// The published model code builds these two norms with its class default, whatever rms_norm_eps says.
constexpr float kLoraNormEps = 1e-6f;

}  // namespace

RmsNormShape Model::norm_shape(int32_t cols, int32_t x_stride, int32_t y_stride, float eps) const {
  return {max_rows_, cols, x_stride, y_stride, type_, eps};
}

Model::Model(const ModelConfig& config, const EngineOptions& options, const TensorSource& source, Operators& ops,
             backend::Stream stream)
    : config_(config),
      type_(options.activations),
      max_rows_(std::max({options.tree_budget + 1, options.prefill_chunk, options.block_size + 1})),
      pool_rows_(int64_t{options.context} + max_rows_),
      ops_(ops),
      weights_(load_weights(config, options, max_rows_, source, ops, stream)) {
  const ModelConfig& c = config_;
  const int32_t hidden = c.hidden_size, heads = c.num_attention_heads, rank = c.kv_lora_rank;
  const int32_t nope = c.qk_nope_head_dim, rope = c.qk_rope_head_dim, width = kv_width();
  // A block past the context: the last round's tree, and the rows a record runs on past the end.
  const int32_t positions = options.context + options.block_size + 2;

  embed_shape_ = {max_rows_, c.vocab_size, hidden, type_};
  hidden_norm_ = norm_shape(hidden, hidden, hidden, static_cast<float>(c.rms_norm_eps));
  q_norm_ = norm_shape(c.q_lora_rank, c.q_lora_rank, c.q_lora_rank, kLoraNormEps);
  kv_norm_ = norm_shape(rank, width, width, kLoraNormEps);
  q_rope_ = {max_rows_, heads, rope, heads * (nope + rope), nope + rope, heads * (nope + rope), nope + rope, type_};
  k_rope_ = {max_rows_, 1, rope, width, 0, width, 0, type_};
  attention_shape_ = {max_rows_, heads,     rank,  rope,
                      heads * (nope + rope), nope + rope, positions, type_, softmax_scale(c)};
  route_shape_ = {max_rows_,  c.n_routed_experts, c.num_experts_per_tok, c.n_group,
                  c.topk_group, c.norm_topk_prob,   static_cast<float>(c.routed_scaling_factor)};
  argmax_shape_ = {max_rows_, c.vocab_size};
  ops_.embed.plan(embed_shape_);
  ops_.rms_norm.plan(hidden_norm_);
  ops_.rms_norm.plan(kv_norm_);
  if (c.q_lora_rank) ops_.rms_norm.plan(q_norm_);
  ops_.rope.plan(q_rope_);
  ops_.rope.plan(k_rope_);
  ops_.tree_attention.plan(attention_shape_);
  ops_.argmax.plan(argmax_shape_);

  kv_ = Buffer(static_cast<size_t>(c.num_hidden_layers * pool_rows_ * width) * size_of(type_), "KV pool");
  const RopeTable table = rope_table(c, positions);
  const auto upload = [&](const std::vector<float>& values, const char* what) {
    Buffer buffer(values.size() * sizeof(float), what);
    check(backend::upload(buffer.as(), values.data(), values.size() * sizeof(float), stream), "upload");
    return buffer;
  };
  cos_ = upload(table.cos, "rope table");
  sin_ = upload(table.sin, "rope table");

  const auto rows_of = [&](int64_t cols, const char* what) {
    return Buffer(static_cast<size_t>(max_rows_ * cols) * size_of(type_), what);
  };
  int32_t widest = c.intermediate_size;
  bool moe = false;
  for (int32_t i = 0; i < c.num_hidden_layers; ++i) moe = moe || is_moe_layer(c, i);
  if (moe) {
    widest = std::max(widest, c.moe_intermediate_size * c.n_shared_experts);
    ops_.moe_route.plan(route_shape_);
    router_logits_ = Buffer(static_cast<size_t>(max_rows_) * static_cast<size_t>(c.n_routed_experts) * 4, "router");
    expert_weights_ = Buffer(static_cast<size_t>(max_rows_) * static_cast<size_t>(c.num_experts_per_tok) * 4, "router");
    experts_ = Buffer(static_cast<size_t>(max_rows_) * static_cast<size_t>(c.num_experts_per_tok) * 4, "router");
    shared_ = rows_of(hidden, "activations");
  }
  ops_.swiglu.plan({max_rows_, widest, type_});
  x_ = rows_of(hidden, "activations");
  h_ = rows_of(hidden, "activations");
  q_a_ = rows_of(c.q_lora_rank, "activations");
  q_a_normed_ = rows_of(c.q_lora_rank, "activations");
  q_ = rows_of(heads * (nope + rope), "activations");
  kv_a_ = rows_of(width, "activations");
  q_latent_ = rows_of(heads * rank, "activations");
  attended_ = rows_of(heads * rank, "activations");
  values_ = rows_of(heads * c.v_head_dim, "activations");
  gate_up_ = rows_of(2 * widest, "activations");
  activated_ = rows_of(widest, "activations");
  logits_ = Buffer(static_cast<size_t>(max_rows_) * static_cast<size_t>(c.vocab_size) * 4, "logits");
  next_tokens_ = Buffer(static_cast<size_t>(max_rows_) * 4, "next tokens");
}

void Model::attention(const Layer& layer, char* pool, const Rows& rows, backend::Stream stream) {
  const int32_t* n = rows.n_rows();
  const auto offset = [&](const Buffer& buffer, int32_t elements) {
    return buffer.as<char>() + static_cast<size_t>(elements) * size_of(type_);
  };
  char* pool_rope = pool + static_cast<size_t>(config_.kv_lora_rank) * size_of(type_);
  const void* q_input = h_.as();
  if (config_.q_lora_rank) {
    layer.q_a.run(ops_, n, h_.as(), nullptr, q_a_.as(), stream);
    ops_.rms_norm(q_norm_, {n, q_a_.as(), layer.q_norm.as(), q_a_normed_.as(), nullptr}, stream);
    q_input = q_a_normed_.as();
  }
  layer.q_b.run(ops_, n, q_input, nullptr, q_.as(), stream);
  layer.kv_a.run(ops_, n, h_.as(), nullptr, kv_a_.as(), stream);

  // Every row's key goes to the pool before any row reads it there.
  const float *cos = cos_.as<float>(), *sin = sin_.as<float>();
  const int32_t *prefix = rows.prefix(), *depths = rows.depths.as<int32_t>();
  ops_.rms_norm(kv_norm_, {n, kv_a_.as(), layer.kv_norm.as(), pool, prefix}, stream);
  ops_.rope(k_rope_, {n, prefix, depths, cos, sin, offset(kv_a_, config_.kv_lora_rank), pool_rope, prefix}, stream);
  void* q_rope = offset(q_, config_.qk_nope_head_dim);
  ops_.rope(q_rope_, {n, prefix, depths, cos, sin, q_rope, q_rope, nullptr}, stream);

  layer.uk.run(ops_, n, q_.as(), nullptr, q_latent_.as(), stream);
  ops_.tree_attention(attention_shape_,
                      {n, prefix, rows.parents.as<int32_t>(), depths, q_latent_.as(), q_rope, pool, attended_.as()},
                      stream);
  layer.uv.run(ops_, n, attended_.as(), nullptr, values_.as(), stream);
  layer.o.run(ops_, n, values_.as(), x_.as(), x_.as(), stream);
}

void Model::feed_forward(const Layer& layer, const Rows& rows, backend::Stream stream) {
  const int32_t* n = rows.n_rows();
  const auto gated = [&](int32_t intermediate) {
    char* up = gate_up_.as<char>() + static_cast<size_t>(intermediate) * size_of(type_);
    layer.mlp.gate.run(ops_, n, h_.as(), nullptr, gate_up_.as(), stream);
    layer.mlp.up.run(ops_, n, h_.as(), nullptr, up, stream);
    ops_.swiglu({max_rows_, intermediate, type_}, {n, gate_up_.as(), activated_.as()}, stream);
  };
  if (!layer.moe) {
    gated(config_.intermediate_size);
    layer.mlp.down.run(ops_, n, activated_.as(), x_.as(), x_.as(), stream);
    return;
  }
  const void* shared = nullptr;
  if (config_.n_shared_experts) {
    gated(config_.moe_intermediate_size * config_.n_shared_experts);
    layer.mlp.down.run(ops_, n, activated_.as(), nullptr, shared_.as(), stream);
    shared = shared_.as();
  }
  layer.router.run(ops_, n, h_.as(), nullptr, router_logits_.as(), stream);
  ops_.moe_route(route_shape_,
                 {n, router_logits_.as<float>(), layer.router_bias.as<float>(), experts_.as<int32_t>(),
                  expert_weights_.as<float>()},
                 stream);
  layer.experts.run(ops_, n, h_.as(), experts_.as<int32_t>(), expert_weights_.as<float>(), shared, x_.as(), x_.as(),
                    stream);
}

void Model::forward(const Rows& rows, bool head, backend::Stream stream) {
  const int32_t* n = rows.n_rows();
  ops_.embed(embed_shape_, {n, rows.tokens.as<int32_t>(), weights_.embedding.as(), x_.as()}, stream);
  const size_t layer_bytes = static_cast<size_t>(pool_rows_ * kv_width()) * size_of(type_);
  for (size_t i = 0; i < weights_.layers.size(); ++i) {
    const Layer& layer = weights_.layers[i];
    ops_.rms_norm(hidden_norm_, {n, x_.as(), layer.input_norm.as(), h_.as(), nullptr}, stream);
    attention(layer, kv_.as<char>() + i * layer_bytes, rows, stream);
    ops_.rms_norm(hidden_norm_, {n, x_.as(), layer.post_norm.as(), h_.as(), nullptr}, stream);
    feed_forward(layer, rows, stream);
  }
  if (!head) return;
  ops_.rms_norm(hidden_norm_, {n, x_.as(), weights_.final_norm.as(), h_.as(), nullptr}, stream);
  weights_.head.run(ops_, n, h_.as(), nullptr, logits_.as(), stream);
  ops_.argmax(argmax_shape_, {n, logits_.as<float>(), next_tokens_.as<int32_t>()}, stream);
}

}  // namespace kdtree
