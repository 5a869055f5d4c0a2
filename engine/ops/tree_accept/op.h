// tree_accept: greedy walk from the root. At row r the target chose next_tokens[r]; if a child of r holds that token
// the walk goes there, else it ends and that token is the bonus, the next root. Accepted rows: root and matched nodes.
// The committed tokens (matched nodes, then bonus) are appended to `output` one by one until a stop token (kept) or
// the limit ends the output, also inside the path. state: reads n_rows, limit, n_stop_ids; advances prefix by
// accepted, generated, committed, steps; sets accepted, verified = n_rows, done, and n_rows = 0 if done, else 1. With
// n_rows = 0 it changes nothing but accepted = verified = 0. A next_tokens of -1 on the path (a row of NaN) sets
// done = kNanLogits and commits nothing of this round.
#pragma once
#include "../decode_state.h"
#include "../operator.h"

namespace kdtree {

struct TreeAcceptShape {
  int32_t max_rows;
  int32_t max_depth;  // longest path below the root
};

struct TreeAcceptArgs {
  DecodeState* state;
  int32_t* tokens;             // [max_rows]; tokens[0] becomes the next root
  const int32_t* parents;      // [max_rows]
  const int32_t* next_tokens;  // [max_rows], argmax of each row's logits
  const int32_t* stop_ids;     // [n_stop_ids]
  int32_t* accepted_rows;      // [max_depth + 1], ascending
  int32_t* output;             // [limit] tokens of the sequence so far
};

extern const Operator tree_accept;

}  // namespace kdtree
