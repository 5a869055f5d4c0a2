// kv_compact: moves the accepted rows of every layer to the end of the committed prefix, in ascending order because
// moves overlap. tree_accept has advanced state->prefix: row accepted_rows[i] of the verify call lies at pool row
// base + accepted_rows[i] and goes to base + i, base = prefix - accepted.
#pragma once
#include "../decode_state.h"
#include "../operator.h"

namespace kdtree {

struct KvCompactShape {
  int32_t layers;
  int32_t width;       // kv_lora_rank + rope_dim
  int32_t pool_rows;   // rows of one layer's pool
  int32_t max_depth;
  int32_t type;
};

struct KvCompactArgs {
  const DecodeState* state;
  const int32_t* accepted_rows;  // [max_depth + 1], ascending
  void* kv;                      // [layers, pool_rows, width]
};

extern const Operator kv_compact;

}  // namespace kdtree
