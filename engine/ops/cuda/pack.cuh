// Weights from the bundle into the layout that dot.cuh reads: once, at load.
#pragma once
#include <cuda_runtime.h>

#include <type_traits>
#include <vector>

#include "numbers.cuh"

namespace kdtree::cuda {

inline int64_t padded_to_8(int64_t k) { return (k + 7) / 8 * 8; }

inline cudaError_t upload(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);  // `from` is pageable: it may be freed next
}

// w [rows, k] of Source (host) -> packed [rows, padded_to_8(k)] of W (device), rounded once.
template <class Source, class W>
cudaError_t pack_rows(const Source* w, int64_t rows, int64_t k, W* packed, cudaStream_t stream) {
  const int64_t padded = padded_to_8(k);
  if (std::is_same_v<Source, W> && padded == k)
    return upload(packed, w, static_cast<size_t>(rows * k) * sizeof(W), stream);
  constexpr int64_t kChunk = 1 << 22;  // elements of host memory at a time
  const int64_t rows_at_once = kChunk / padded > 0 ? kChunk / padded : 1;
  std::vector<W> chunk;
  for (int64_t first = 0; first < rows; first += rows_at_once) {
    const int64_t count = std::min(rows_at_once, rows - first);
    chunk.assign(static_cast<size_t>(count * padded), rounded<W>(0.0f));
    for (int64_t r = 0; r < count; ++r)
      for (int64_t c = 0; c < k; ++c)
        chunk[static_cast<size_t>(r * padded + c)] = rounded<W>(to_float(w[(first + r) * k + c]));
    const cudaError_t error = upload(packed + first * padded, chunk.data(), chunk.size() * sizeof(W), stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace kdtree::cuda
