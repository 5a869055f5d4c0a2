// rope: rotates the interleaved pairs (2i, 2i+1) of every head by the angle of the row's position,
// *prefix + depths[row]. Position is depth in the tree, never the row's index.
#pragma once
#include "../operator.h"

namespace kdtree {

struct RopeShape {
  int32_t max_rows;
  int32_t heads;
  int32_t dim;            // even
  int32_t x_row_stride;   // elements, as all strides
  int32_t x_head_stride;
  int32_t y_row_stride;
  int32_t y_head_stride;
  int32_t type;
};

struct RopeArgs {
  const int32_t* n_rows;
  const int32_t* prefix;
  const int32_t* depths;       // [max_rows]
  const float* cos;            // [positions, dim/2], YaRN's attention factor included
  const float* sin;
  const void* x;
  void* y;                     // may be x (in place)
  const int32_t* y_first_row;  // null = 0: row i is written to y's row *y_first_row + i (the KV pool)
};

extern const Operator rope;

}  // namespace kdtree
