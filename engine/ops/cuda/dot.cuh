// The plain matrix kernel, shared by gemm, w4a16_gemm and both expert operators: a warp computes 4 outputs of up to 8
// rows. Weights are read once for the 8 rows.
//
// An output is the sum over lanes of fma chains: lane l walks the eights of inputs l, l + 32, …, each ascending; then a
// butterfly over the lanes. That order depends on k alone, and no row's arithmetic depends on the tile's other rows.
#pragma once
#include "numbers.cuh"
#include "reduce.cuh"

namespace kdtree::cuda {

constexpr int kOutputs = 4;  // of a tile: 4 × 8 = 32 totals, one a lane
constexpr int kRows = 8;

// A row of float weights, padded with zeros to a multiple of 8.
template <class W>
struct FloatRow {
  const W* w;
  __device__ void load8(int eight, float (&v)[8]) const { kdtree::cuda::load8(w + int64_t{8} * eight, v); }
};
template <class W>
struct FloatMatrix {
  const W* w;  // [n, padded]
  int padded;
  __device__ FloatRow<W> row(int64_t i) const { return {w + i * padded}; }
};

// A row of INT4 weights in the bundle's own layout. w = (nibble − 8) · scale.
struct Int4Row {
  const uint32_t* codes;
  const void* scales;
  int64_t first_scale;
  int words_per_group;
  int scale_type;
  __device__ void load8(int eight, float (&v)[8]) const {
    const uint32_t word = codes[eight];
    const float scale = load_as(scales, first_scale + eight / words_per_group, scale_type);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = static_cast<float>(static_cast<int>(word >> (4 * i) & 15) - 8) * scale;
  }
};
struct Int4Matrix {
  const uint32_t* codes;  // [n, words]
  const void* scales;     // [n, words / words_per_group]
  int words;
  int words_per_group;
  int scale_type;
  __device__ Int4Row row(int64_t i) const {
    return {codes + i * words, scales, i * (words / words_per_group), words_per_group, scale_type};
  }
};

template <class X>
__device__ void load_inputs(const X* x, int eight, int k, bool aligned, float (&v)[8]) {
  const int first = 8 * eight;
  if (aligned && first + 8 <= k) {
    load8(x + first, v);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = first + i < k ? to_float(x[first + i]) : 0.0f;
  }
}

// Lane 8 o + r gets the product of weight row o and input row r, for r < rows. `aligned`: the rows of x start at multiples
// of 16 bytes.
template <class Row, class X>
__device__ float dot_tile(const Row (&w)[kOutputs], const X* const (&x)[kRows], int rows, int k, bool aligned) {
  float total[kOutputs * kRows];
#pragma unroll
  for (float& t : total) t = 0;
  for (int eight = lane_id(); 8 * eight < k; eight += 32) {
    float weights[kOutputs][8];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) w[o].load8(eight, weights[o]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < rows) {
        float inputs[8];
        load_inputs(x[r], eight, k, aligned, inputs);
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int o = 0; o < kOutputs; ++o)
            total[o * kRows + r] = fmaf(inputs[i], weights[o][i], total[o * kRows + r]);
      }
    }
  }
  return sum_scatter(total);
}

// Rows of `elements` at base, base + stride, … start at multiples of 16 bytes.
inline bool aligned16(const void* base, int64_t stride, size_t element) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && static_cast<size_t>(stride) * element % 16 == 0;
}

}  // namespace kdtree::cuda
