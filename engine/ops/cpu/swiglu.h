// y = silu(gate) * up of one row: swiglu, and the middle of an expert.
#pragma once
#include <algorithm>

#include "vector.h"

namespace kdtree {

template <class In, class Out>
KDTREE_INLINE void swiglu_row(const In* gate, const In* up, Out* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, n - i);
    const F32x16 g = load_partial(gate + i, count);
    store(y + i, g * sigmoid(g) * load_partial(up + i, count), count);
  }
}

}  // namespace kdtree
