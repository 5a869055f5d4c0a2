// Reductions over warps and blocks. The tree of additions is fixed by the number of threads.
#pragma once
#include <cstdint>

namespace kdtree::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x & 31); }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x >> 5); }

// Every lane gets combine over the warp; combine must commute.
template <class T, class F>
__device__ T warp_reduce(T v, F combine) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) v = combine(v, __shfl_xor_sync(kAllLanes, v, mask));
  return v;
}

// Every thread of the block (a multiple of 32 threads, at most 1024) gets combine over it. Ends with a barrier, so that
// calls may follow each other.
template <class T, class F>
__device__ T block_reduce(T v, T neutral, F combine) {
  __shared__ T partial[32];
  v = warp_reduce(v, combine);
  if (lane_id() == 0) partial[warp_id()] = v;
  __syncthreads();
  v = warp_reduce(lane_id() < static_cast<int>(blockDim.x >> 5) ? partial[lane_id()] : neutral, combine);
  __syncthreads();
  return v;
}

struct Add {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return b > a ? b : a;
  }
};

// Sums v[i] over the lanes; lane i gets the total of v[i]. The tree is the same for every i.
template <int kHalf = 16>
__device__ float sum_scatter(float (&v)[32]) {
  const bool upper = lane_id() & kHalf;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float low = v[i], high = v[i + kHalf];
    v[i] = (upper ? high : low) + __shfl_xor_sync(kAllLanes, upper ? low : high, kHalf);
  }
  if constexpr (kHalf > 1) return sum_scatter<kHalf / 2>(v);
  return v[0];
}

}  // namespace kdtree::cuda
