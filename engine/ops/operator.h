// The operator contract: what every kernel, on every backend, offers to the core.
//
// An operator is described by three plain structs in its op.h, which Python reads too (engine/contract.py), so
// they hold one field a line, of type int32_t, int64_t, float, double or a pointer:
//   <Op>Shape    by value: model shapes, maxima, element types. Fixed when the engine is loaded.
//   <Op>Weights  host pointers to the weights as the bundle has them (operators without weights have none).
//   <Op>Args     pointers into the backend's memory: activations, and everything that changes from round to round.
//
// Rows: `n_rows` is read by the kernel, never by the host. Rows >= *n_rows are not computed and nothing is written
// for them, but they may be read: inputs have max_rows rows; *n_rows <= max_rows. Optional pointers may be null, as
// their comment says.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kdtree {

// Element types, as int32_t in the structs.
constexpr int32_t kFloat32 = 0;
constexpr int32_t kBFloat16 = 1;

inline size_t size_of(int32_t type) { return type == kBFloat16 ? 2 : 4; }

struct Operator {
  const char* name;
  // Null if this backend can run the shape, else the reason, which names the field.
  const char* (*refuse)(const void* shape);
  // Bytes of the weights in the kernel's own layout; 0 for an operator without weights.
  size_t (*packed_bytes)(const void* shape);
  // Weights (host memory) -> packed (backend memory). Once, at load. Null for an operator without weights.
  int (*prepare)(const void* shape, const void* weights, void* packed, void* stream);
  // Bytes of scratch for the largest call. The core hands one workspace, as large as the largest need, to all.
  size_t (*workspace)(const void* shape);
  // Neither allocates nor synchronises. 0, or the backend's error code.
  int (*run)(const void* shape, const void* args, void* workspace, void* stream);
};

}  // namespace kdtree
