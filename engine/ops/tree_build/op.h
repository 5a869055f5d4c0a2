// tree_build: log-softmax and top-k of every level's logits, then the best-first draft tree (DDTree, algorithm 1).
// Score of a node = its parent's score + its log-prob (one fp32 add); higher first, equal scores by the
// lexicographically smaller rank tuple; top-k ties to the lower token; -inf and NaN are never pushed.
// Nodes are written in pop order as rows 1, 2, … (row 0 is the root, which the last round left in tokens[0]).
// Writes nothing but state->n_rows = 0 once state->done.
#pragma once
#include "../decode_state.h"
#include "../operator.h"

namespace kdtree {

struct TreeBuildShape {
  int32_t levels;  // L = block_size - 1
  int32_t vocab;
  int32_t budget;  // most nodes, the root not counted; max_rows of the verify call = budget + 1
  int32_t top_k;   // min(budget, vocab)
};

struct TreeBuildArgs {
  const float* logits;     // [levels, vocab]
  DecodeState* state;      // reads done, writes n_rows
  int32_t* tokens;         // [budget + 1]
  int32_t* parents;        // [budget + 1]; parents[0] = -1
  int32_t* depths;         // [budget + 1]; depths[0] = 0
  int32_t* top_tokens;     // [levels, top_k]; null = not wanted
  float* top_log_probs;    // [levels, top_k]; null = not wanted
};

extern const Operator tree_build;

}  // namespace kdtree
