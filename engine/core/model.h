// The transformer: one forward call over the rows of a draft tree (or of a chain: prefill, plain decoding).
#pragma once
#include "weights.h"

namespace kdtree {

// The rows of a call, in the backend's memory.
struct Rows {
  Buffer state;       // DecodeState
  Buffer tokens;      // [max_rows]
  Buffer parents;     // [max_rows]
  Buffer depths;      // [max_rows]

  const int32_t* n_rows() const { return &state.as<DecodeState>()->n_rows; }
  const int32_t* prefix() const { return &state.as<DecodeState>()->prefix; }
};

class Model {
 public:
  // Refuses, naming operator and field, what the backend cannot run. The tensors may go once this returns.
  Model(const ModelConfig& config, const EngineOptions& options, const TensorSource& source, Operators& ops,
        backend::Stream stream);

  // Forwards *n_rows rows: their keys go to pool rows prefix, prefix + 1, …; with `head`, their logits and argmax to
  // logits() and next_tokens().
  void forward(const Rows& rows, bool head, backend::Stream stream);

  const ModelConfig& config() const { return config_; }
  int32_t max_rows() const { return max_rows_; }
  int64_t pool_rows() const { return pool_rows_; }  // of one layer: the context, then room for a call's rows
  int32_t kv_width() const { return config_.kv_lora_rank + config_.qk_rope_head_dim; }
  void* kv() const { return kv_.as(); }             // [layers, pool_rows, kv_width] of the activation type
  const float* logits() const { return logits_.as<float>(); }             // [max_rows, vocab]
  const int32_t* next_tokens() const { return next_tokens_.as<int32_t>(); }  // [max_rows]

 private:
  void attention(const Layer& layer, char* pool, const Rows& rows, backend::Stream stream);
  void feed_forward(const Layer& layer, const Rows& rows, backend::Stream stream);
  RmsNormShape norm_shape(int32_t cols, int32_t x_stride, int32_t y_stride, float eps) const;

  ModelConfig config_;
  int32_t type_;
  int32_t max_rows_;
  int64_t pool_rows_;
  Operators& ops_;
  Weights weights_;
  Buffer cos_, sin_;

  EmbedShape embed_shape_;
  RmsNormShape hidden_norm_, q_norm_, kv_norm_;
  RopeShape q_rope_, k_rope_;
  TreeAttentionShape attention_shape_;
  MoeRouteShape route_shape_;
  ArgmaxShape argmax_shape_;

  Buffer kv_;
  Buffer x_, h_;                       // [max_rows, hidden]: residual stream; normed
  Buffer q_a_, q_a_normed_;            // [max_rows, q_lora]
  Buffer q_;                           // [max_rows, heads, nope + rope]
  Buffer kv_a_;                        // [max_rows, kv_lora + rope]
  Buffer q_latent_, attended_;         // [max_rows, heads, kv_lora]
  Buffer values_;                      // [max_rows, heads, v]
  Buffer gate_up_, activated_;         // [max_rows, 2, intermediate], [max_rows, intermediate]
  Buffer shared_;                      // [max_rows, hidden]
  Buffer router_logits_, expert_weights_, experts_;
  Buffer logits_, next_tokens_;
};

}  // namespace kdtree
