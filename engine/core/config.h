// What the engine is built for. Plain structs, one field a line: Python reads them (engine/contract.py).
#pragma once
#include <cstdint>

namespace kdtree {

// Hugging Face's fields, with optional ones resolved: q_lora_rank 0 = none, n_routed_experts 0 = all layers dense,
// rope_factor 1 = no YaRN.
struct ModelConfig {
  int32_t vocab_size;
  int32_t hidden_size;
  int32_t num_hidden_layers;
  int32_t num_attention_heads;
  int32_t q_lora_rank;
  int32_t kv_lora_rank;
  int32_t qk_nope_head_dim;
  int32_t qk_rope_head_dim;
  int32_t v_head_dim;
  int32_t intermediate_size;
  int32_t moe_intermediate_size;
  int32_t n_routed_experts;
  int32_t n_shared_experts;
  int32_t num_experts_per_tok;
  int32_t n_group;
  int32_t topk_group;
  int32_t norm_topk_prob;
  int32_t first_k_dense_replace;
  int32_t moe_layer_freq;
  double routed_scaling_factor;
  double rms_norm_eps;
  double rope_theta;
  double rope_factor;
  double rope_beta_fast;
  double rope_beta_slow;
  double rope_attention_factor;    // on cos and sin
  double rope_mscale_all_dim;      // in the softmax scale
  int32_t rope_original_positions;
  int32_t group_size;              // of INT4 weights; 0 if the bundle has none
};

struct EngineOptions {
  int32_t context;        // most positions of a sequence
  int32_t block_size;     // b: one drafter call yields b - 1 levels
  int32_t tree_budget;    // B: a verify call has at most B + 1 rows
  int32_t prefill_chunk;  // prompt rows of one prefill call
  int32_t activations;    // kFloat32 or kBFloat16
  int32_t drafter;        // kOracle, kNoisy or kAdversarial
  float drafter_p;
  int64_t drafter_seed;
};

// A tensor of the bundle in host memory, which must stay there until the engine is built.
struct Tensor {
  const char* name;
  int32_t type;       // kFloat32, kBFloat16 or kInt32
  int32_t rank;
  int64_t rows;       // 1-D tensors: their length
  int64_t cols;       // 1-D tensors: 1
  const void* data;
};

constexpr int32_t kInt32 = 2;

constexpr int32_t kAutoregressive = 0;
constexpr int32_t kDdtree = 1;

// One round, as the host sees it after it ended. Row pointers are null unless the request records.
struct Round {
  int32_t n_rows;        // rows of the verify call
  int32_t accepted;      // rows committed to the KV pool
  int32_t prefix;        // committed positions after the round
  int32_t n_tokens;      // new tokens, after the cut
  int32_t overrun;       // 1: after the end of the output, for records
  const int32_t* tokens;
  const float* logits;   // [accepted, vocab]
  const void* kv;        // [layers, accepted, kv_lora_rank + rope]
};

struct Request {
  const int32_t* prompt;
  int32_t prompt_length;
  int32_t kept;             // rows of the KV pool that hold the prompt's first tokens already; fewer than prompt_length
  int32_t mode;             // kAutoregressive or kDdtree
  int32_t max_new_tokens;
  const int32_t* stop_ids;
  int32_t n_stop_ids;
  int32_t script_length;
  const int32_t* script;    // draft_script's sequence: prompt and continuation
  int32_t record;           // 1: every round carries its logits and KV rows
  int32_t overrun;          // rounds to go on past the end, so that a tree's last rows have something to be compared with
};

struct Result {
  int32_t generated;
  int32_t committed;
  int32_t steps;        // rounds after the one that yields the first token
  int32_t stop_reason;  // kStopToken, kTokenLimit, kContextLimit or kCancelled
};

constexpr int32_t kContextLimit = 4;
constexpr int32_t kCancelled = 5;

}  // namespace kdtree
