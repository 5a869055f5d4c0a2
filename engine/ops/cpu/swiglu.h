// y = silu(gate) * up of one row: swiglu, and the middle of an expert.
#pragma once
#include "vector.h"

namespace kdtree::KDTREE_PATH {

template <class In, class Out>
KDTREE_INLINE void swiglu_row(const In* gate, const In* up, Out* y, int64_t n) {
  each_sixteen(n, [&](int64_t i, int64_t lanes) {
    const F32x16 g = load(gate + i, lanes);
    store(y + i, g * sigmoid(g) * load(up + i, lanes), lanes);
  });
}

}  // namespace kdtree::KDTREE_PATH
