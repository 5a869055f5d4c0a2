#include "limits.h"

#include <cmath>
#include <string>

#include "memory.h"

namespace kdtree {
namespace {

constexpr int64_t kMaxSize = 1 << 20;       // of one dimension or count
constexpr int64_t kMaxWidth = 1 << 24;      // of a row that several dimensions make
constexpr int64_t kMaxPositions = 1 << 30;

[[noreturn]] void refuse(const std::string& field, int64_t value, const std::string& reason) {
  fail(field + ": " + std::to_string(value) + ": " + reason);
}

void require_within(const std::string& field, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    refuse(field, value, "must lie in " + std::to_string(least) + ".." + std::to_string(most));
}

void require_width(const char* field, int32_t value, int64_t width, int64_t most) {
  if (width > most) refuse(field, value, "makes " + std::to_string(width) + " in all, more than " + std::to_string(most));
}

void require_positive(const char* field, double value) {
  if (!(value > 0 && std::isfinite(static_cast<float>(value))))
    fail(std::string(field) + ": " + std::to_string(value) + ": must be positive and finite in float32");
}

void require_tokens(const char* what, const int32_t* tokens, int32_t count, int32_t vocab) {
  for (int32_t i = 0; i < count; ++i)
    if (tokens[i] < 0 || tokens[i] >= vocab)
      refuse(what, tokens[i], "outside the vocabulary of " + std::to_string(vocab));
}

}  // namespace

void check_model(const ModelConfig& c) {
  const struct {
    const char* field;
    int32_t value;
    int64_t least;
  } sizes[] = {{"vocab_size", c.vocab_size, 2},
               {"hidden_size", c.hidden_size, 1},
               {"num_hidden_layers", c.num_hidden_layers, 1},
               {"num_attention_heads", c.num_attention_heads, 1},
               {"q_lora_rank", c.q_lora_rank, 0},
               {"kv_lora_rank", c.kv_lora_rank, 1},
               {"qk_nope_head_dim", c.qk_nope_head_dim, 1},
               {"qk_rope_head_dim", c.qk_rope_head_dim, 2},
               {"v_head_dim", c.v_head_dim, 1},
               {"intermediate_size", c.intermediate_size, 1},
               {"n_routed_experts", c.n_routed_experts, 0},
               {"moe_intermediate_size", c.moe_intermediate_size, c.n_routed_experts ? 1 : 0},
               {"n_shared_experts", c.n_shared_experts, 0},
               {"num_experts_per_tok", c.num_experts_per_tok, c.n_routed_experts ? 1 : 0},
               {"n_group", c.n_group, c.n_routed_experts ? 1 : 0},
               {"topk_group", c.topk_group, c.n_routed_experts ? 1 : 0},
               {"first_k_dense_replace", c.first_k_dense_replace, 0},
               {"moe_layer_freq", c.moe_layer_freq, 1},
               {"group_size", c.group_size, 0}};
  for (const auto& size : sizes) require_within(size.field, size.value, size.least, kMaxSize);
  if (c.qk_rope_head_dim % 2) refuse("qk_rope_head_dim", c.qk_rope_head_dim, "must be even");

  const int64_t heads = c.num_attention_heads, nope = c.qk_nope_head_dim, rope = c.qk_rope_head_dim;
  require_width("num_attention_heads", c.num_attention_heads, heads * (nope + rope), kMaxWidth);
  require_width("num_attention_heads", c.num_attention_heads, heads * (nope + c.v_head_dim), kMaxWidth);
  require_width("num_attention_heads", c.num_attention_heads, heads * c.kv_lora_rank, kMaxWidth);
  require_width("n_shared_experts", c.n_shared_experts, int64_t{2} * c.n_shared_experts * c.moe_intermediate_size,
                kMaxWidth);
  require_width("n_routed_experts", c.n_routed_experts, int64_t{c.n_routed_experts} * c.moe_intermediate_size,
                kMaxPositions);
  require_width("num_hidden_layers", c.num_hidden_layers, c.num_hidden_layers * (c.kv_lora_rank + rope), kMaxPositions);

  require_positive("routed_scaling_factor", c.routed_scaling_factor);
  require_positive("rms_norm_eps", c.rms_norm_eps);
  require_positive("rope_factor", c.rope_factor);
  require_positive("rope_attention_factor", c.rope_attention_factor);
  if (!(c.rope_theta > 1 && std::isfinite(c.rope_theta)))
    fail("rope_theta: " + std::to_string(c.rope_theta) + ": must exceed 1");
  if (c.rope_factor != 1) {
    require_positive("rope_beta_fast", c.rope_beta_fast);
    require_positive("rope_beta_slow", c.rope_beta_slow);
    require_within("rope_original_positions", c.rope_original_positions, 1, kMaxPositions);
    if (!(c.rope_mscale_all_dim >= 0 && std::isfinite(c.rope_mscale_all_dim)))
      fail("rope_mscale_all_dim: " + std::to_string(c.rope_mscale_all_dim) + ": must not be negative");
  }
}

void check_options(const EngineOptions& options) {
  require_within("context", options.context, 2, kMaxPositions);
  require_within("block_size", options.block_size, 1, kMaxSize);
  require_within("tree_budget", options.tree_budget, 0, kMaxSize);
  require_within("prefill_chunk", options.prefill_chunk, 1, kMaxSize);
  if (options.activations != kFloat32 && options.activations != kBFloat16)
    refuse("activations", options.activations, "must be float32 or bfloat16");
}

void check_request(const Request& request, const ModelConfig& config, const EngineOptions& options) {
  if (request.prompt_length < 1) fail("prompt: empty: needs at least one token");
  if (request.prompt_length >= options.context)
    fail("prompt: " + std::to_string(request.prompt_length) + " tokens: the context holds " +
         std::to_string(options.context));
  require_tokens("prompt", request.prompt, request.prompt_length, config.vocab_size);
  if (request.kept < 0 || request.kept >= request.prompt_length)
    refuse("kept", request.kept, "must leave at least the last of " + std::to_string(request.prompt_length) +
                                     " prompt tokens");
  if (request.mode != kAutoregressive && request.mode != kDdtree) refuse("mode", request.mode, "must be ar or ddtree");
  if (request.max_new_tokens < 1) refuse("max_new_tokens", request.max_new_tokens, "must be positive");
  require_within("stop_token_ids", request.n_stop_ids, 0, kMaxStopIds);
  require_within("script_length", request.script_length, 0, INT32_MAX);
  require_tokens("script", request.script, request.script_length, config.vocab_size);
  // A block past the context is what KV pool, positions and output have room for.
  require_within("overrun", request.overrun, 0, request.mode == kDdtree ? 0 : options.block_size);
}

}  // namespace kdtree
