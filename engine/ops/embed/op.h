// embed: y[i] = table[tokens[i]].
#pragma once
#include "../operator.h"

namespace kdtree {

struct EmbedShape {
  int32_t max_rows;
  int32_t vocab;
  int32_t hidden;
  int32_t type;        // of table and y
};

struct EmbedArgs {
  const int32_t* n_rows;
  const int32_t* tokens;  // [max_rows], each in [0, vocab)
  const void* table;      // [vocab, hidden]
  void* y;                // [max_rows, hidden]
};

extern const Operator embed;

}  // namespace kdtree
