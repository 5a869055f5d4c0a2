// Angles of rotary positions, with YaRN, and the softmax scale that goes with it.
#pragma once
#include <vector>

#include "config.h"

namespace kdtree {

struct RopeTable {
  std::vector<float> cos;  // [positions, qk_rope_head_dim / 2], YaRN's attention factor included
  std::vector<float> sin;
};

// Computed in double, rounded once.
RopeTable rope_table(const ModelConfig& config, int64_t positions);

// (nope + rope)^-1/2 · m², m = YaRN's mscale_all_dim correction.
float softmax_scale(const ModelConfig& config);

}  // namespace kdtree
