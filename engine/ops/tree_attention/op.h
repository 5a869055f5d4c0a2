// tree_attention: absorbed MLA over a latent KV pool, for the rows of a draft tree.
// Row i attends to len = *prefix + depths[i] + 1 keys: [prefix | its ancestors by depth | itself]. Key j is pool row
// j for j < *prefix, then row *prefix + a of ancestor a, so that key j sits at position j exactly as it will after
// compaction (ancestor gather, not a mask). All keys are read from the pool.
//   s_j = (q_latent . c_j + q_rope . k_j) * softmax_scale;  p = softmax(s) in fp32;  y = sum_j p_j c_j
#pragma once
#include "../operator.h"

namespace kdtree {

struct TreeAttentionShape {
  int32_t max_rows;
  int32_t heads;
  int32_t kv_lora_rank;
  int32_t rope_dim;
  int32_t q_rope_row_stride;   // elements
  int32_t q_rope_head_stride;
  int32_t max_keys;            // longest len of any row
  int32_t type;                // of q_latent, q_rope, kv and y
  float softmax_scale;
};

struct TreeAttentionArgs {
  const int32_t* n_rows;
  const int32_t* prefix;
  const int32_t* parents;  // [max_rows]; -1 for the root, else a smaller row
  const int32_t* depths;   // [max_rows]; root 0
  const void* q_latent;    // [max_rows, heads, kv_lora_rank]
  const void* q_rope;      // roped
  const void* kv;          // [pool rows, kv_lora_rank + rope_dim]: normed latent, then roped key
  void* y;                 // [max_rows, heads, kv_lora_rank]
};

extern const Operator tree_attention;

}  // namespace kdtree
