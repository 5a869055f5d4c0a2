// What the CUDA kernels share beside arithmetic: defaults and adapters of the operator table, and grids.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../operator.h"

namespace kdtree::cuda {

// Of the device in use; backend::init sets it. Sizes grids only: no sum is ever split by it.
extern int multiprocessors;

// Of the matrix kernels: plain, or the streaming tensor cores where bf16 and the shape allow. backend::init sets it from
// the environment's KDTREE_CUDA. Weights are packed for a rung, so it must not change afterwards.
enum class Rung { kPlain, kStream };
extern Rung rung;

// By its name; false if there is none of that name. Null: the default.
inline bool choose_rung(const char* name) {
  if (name && std::strcmp(name, "plain") && std::strcmp(name, "stream")) return false;
  rung = name && !std::strcmp(name, "plain") ? Rung::kPlain : Rung::kStream;
  return true;
}

// What a block of sm_120 may use; sm_90 has more, but a kernel is one source for both.
constexpr size_t kMaxSharedBytes = 101376;

inline const char* accept_any(const void*) { return nullptr; }
inline size_t no_bytes(const void*) { return 0; }

// Adapt typed functions to the table's untyped ones. A kernel launcher's error is read here, once for all; a launcher
// returns what else fails.
template <class Shape, class Args, auto launch>
int run_as(const void* shape, const void* args, void* workspace, void* stream) {
  const auto run = [&] {
    return launch(*static_cast<const Shape*>(shape), *static_cast<const Args*>(args), workspace,
                  static_cast<cudaStream_t>(stream));
  };
  cudaError_t error = cudaSuccess;
  if constexpr (std::is_void_v<decltype(run())>)
    run();
  else
    error = run();
  return static_cast<int>(error != cudaSuccess ? error : cudaGetLastError());
}
template <class Shape, class Weights, cudaError_t (*pack)(const Shape&, const Weights&, void*, cudaStream_t)>
int prepare_as(const void* shape, const void* weights, void* packed, void* stream) {
  return static_cast<int>(pack(*static_cast<const Shape*>(shape), *static_cast<const Weights*>(weights), packed,
                               static_cast<cudaStream_t>(stream)));
}
template <class Shape, size_t (*bytes)(const Shape&)>
size_t bytes_as(const void* shape) {
  return bytes(*static_cast<const Shape*>(shape));
}
template <class Shape, const char* (*reason)(const Shape&)>
const char* refuse_as(const void* shape) {
  return reason(*static_cast<const Shape*>(shape));
}

template <class A, class B>
__host__ __device__ constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

// Blocks for `work` independent pieces, `per_block` at a time. Kernels walk their pieces in a grid-wide loop over what
// *n_rows leaves of them, so that a launch made for many rows costs little when there are few.
inline unsigned grid_for(int64_t work, int64_t per_block, int blocks_per_multiprocessor) {
  const int64_t most = int64_t{multiprocessors} * blocks_per_multiprocessor;
  return static_cast<unsigned>(std::max<int64_t>(1, std::min(ceil_div(work, per_block), most)));
}

}  // namespace kdtree::cuda
