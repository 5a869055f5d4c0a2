// What the CPU kernels share beside arithmetic: the path they are compiled for, and defaults of the operator table.
#pragma once
#include "../operator.h"

// A kernel is compiled once per path (compile.sh): `portable`, `avx2` or `avx512`, which names its namespace too, so
// that the linker cannot mix code of two instruction sets. The backend picks the path's table at run time.
#ifndef KDTREE_PATH
#error "compile with engine/ops/cpu/compile.sh"
#endif

// Defines kdtree::<path>::<name>, the path's entry in the backend's table.
#define KDTREE_OPERATOR(name) \
  extern const Operator name; \
  const Operator name

namespace kdtree::KDTREE_PATH {

inline const char* accept_any(const void*) { return nullptr; }
inline size_t no_bytes(const void*) { return 0; }

// Adapts typed functions to the table's untyped ones.
template <class Shape, class Args, void (*kernel)(const Shape&, const Args&, void*)>
int run_as(const void* shape, const void* args, void* workspace, void*) {
  kernel(*static_cast<const Shape*>(shape), *static_cast<const Args*>(args), workspace);
  return 0;
}
template <class Shape, class Weights, void (*pack)(const Shape&, const Weights&, void*)>
int prepare_as(const void* shape, const void* weights, void* packed, void*) {
  pack(*static_cast<const Shape*>(shape), *static_cast<const Weights*>(weights), packed);
  return 0;
}
template <class Shape, size_t (*bytes)(const Shape&)>
size_t bytes_as(const void* shape) {
  return bytes(*static_cast<const Shape*>(shape));
}
template <class Shape, const char* (*reason)(const Shape&)>
const char* refuse_as(const void* shape) {
  return reason(*static_cast<const Shape*>(shape));
}

}  // namespace kdtree::KDTREE_PATH
