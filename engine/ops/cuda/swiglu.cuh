#pragma once

namespace kdtree::cuda {

// silu(gate) · up: swiglu, and the middle of an expert.
__device__ inline float swiglu(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

}  // namespace kdtree::cuda
