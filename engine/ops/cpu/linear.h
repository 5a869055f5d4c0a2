// The CPU's matrix kernel, shared by gemm, w4a16_gemm and both expert operators.
//
// A tile is 16 outputs, one a lane; a strip, the work of one job, is as many tiles as one row is multiplied by at once.
// An output is
//   total = total + scale · (sum of x[k] · w[k] over a block of inputs, k ascending), blocks ascending,
// with scale = 1 for float weights. That order depends on k alone: not on the number of rows, the tile, the thread.
//
// At few rows the weights' bytes are the floor: each is read once, unpacked in registers and used for up to kMostRows
// rows at once. Several tiles side by side keep enough sums in flight to hide the latency of a multiply-add.
#pragma once
#include <array>
#include <utility>

#include "threads.h"

namespace kdtree::KDTREE_PATH {

constexpr int64_t kTile = kLanes;    // outputs
constexpr int64_t kFloatBlock = 32;  // inputs of one partial sum of a float matrix
constexpr int64_t kPrefetch = 4096;  // bytes ahead of the weights being read

// Sums of a register block, rows × tiles, that fit the registers beside a weight and an input.
constexpr int kMostRows = kParts == 1 ? 8 : kParts == 2 ? 6 : 3;
constexpr int tiles_beside(int rows) {
  if (kParts == 1) return rows <= 4 ? 4 : 2;
  return kParts == 2 && rows <= 2 ? 2 : 1;
}
constexpr int64_t kStripTiles = tiles_beside(1);  // of a whole strip; the last one may have fewer

inline int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }
inline int64_t strips_of(int64_t n) { return (tiles_of(n) + kStripTiles - 1) / kStripTiles; }
inline int64_t tiles_in_strip(int64_t n, int64_t strip) {
  return std::min(kStripTiles, tiles_of(n) - strip * kStripTiles);
}

KDTREE_INLINE void prefetch(const void* from) { __builtin_prefetch(static_cast<const char*>(from) + kPrefetch); }

// ---- float weights: [tiles][k][16], outputs past n are 0 ---------------------------------------------------------
// A strip may be larger than a cache, so what passes over it tile by tile finds each tile in one piece.
template <class W>
struct FloatMatrix {
  const W* packed;
  int64_t n, k;

  static size_t bytes(int64_t n, int64_t k) { return static_cast<size_t>(tiles_of(n) * kTile * k) * sizeof(W); }

  // The weights of kStep inputs of one tile.
  static constexpr int kStep = 1;
  struct Step {
    F32x16 w;
    KDTREE_INLINE F32x16 operator[](int) const { return w; }
  };
  struct Block {
    const W* weights;  // of the strip's first tile
    int64_t k;
    KDTREE_INLINE Step step(int64_t index, int64_t tile) const {
      const W* from = weights + (tile * k + index) * kTile;
      prefetch(from);
      return {load(from)};
    }
    KDTREE_INLINE F32x16 scale(int64_t) const { return splat(1.0f); }
  };
  struct Strip {
    const W* weights;
    int64_t tiles, k;
    KDTREE_INLINE int64_t block_inputs() const { return kFloatBlock; }
    KDTREE_INLINE Block block(int64_t index) const { return {weights + index * kFloatBlock * kTile, k}; }
  };
  Strip strip(int64_t s) const { return {packed + s * kStripTiles * kTile * k, tiles_in_strip(n, s), k}; }
};

template <class Source, class W>
void pack_float(const Source* w, int64_t n, int64_t k, W* packed) {
  for_each_job(tiles_of(n), n * k, [&](int64_t tile) {
    for (int64_t c = 0; c < k; ++c)
      for (int64_t j = 0; j < kTile; ++j) {
        const int64_t row = tile * kTile + j;
        store(packed + (tile * k + c) * kTile + j, row < n ? to_float(w[row * k + c]) : 0.0f);
      }
  });
}

// ---- INT4: [strips][k/group] blocks, a block: scales [tiles][16], then words of eight codes [group/8][tiles][16] ---
// One stream, in the order in which few rows read it. A word is the bundle's with the top bit of every nibble flipped:
// nibble − 8 in two's complement.
template <class S>
struct Int4Matrix {
  const char* packed;
  int64_t n, k, group;

  Int4Matrix(const void* packed, int64_t n, int64_t k, int64_t group)
      : packed(static_cast<const char*>(packed)), n(n), k(k), group(group) {}

  // Of one block of one tile.
  static size_t tile_bytes(int64_t group) {
    return static_cast<size_t>(kTile) * (sizeof(S) + static_cast<size_t>(group / 2));
  }
  static size_t bytes(int64_t n, int64_t k, int64_t group) {
    return static_cast<size_t>(tiles_of(n) * (k / group)) * tile_bytes(group);
  }

  static constexpr int kStep = 8;
  struct Step {
    I32x16 words;
    // Nibble i as fp32, exact.
    KDTREE_INLINE F32x16 operator[](int i) const {
      return each_part([&](int p) {
#if defined(__AVX512F__)
        // A look-up by the low four bits of every lane.
        const F32s integers = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
        return __builtin_shuffle(integers, words.part[p] >> (4 * i));
#else
        return __builtin_convertvector((words.part[p] << (28 - 4 * i)) >> 28, F32s);
#endif
      });
    }
  };
  struct Block {
    const S* scales;
    const uint32_t* words;
    int64_t tiles;
    KDTREE_INLINE Step step(int64_t index, int64_t tile) const {
      const uint32_t* from = words + (index * tiles + tile) * kTile;
      prefetch(from);
      return {load(from)};
    }
    KDTREE_INLINE F32x16 scale(int64_t tile) const { return load(scales + tile * kTile); }
  };
  struct Strip {
    const char* blocks;
    int64_t tiles, k, group;
    KDTREE_INLINE int64_t block_inputs() const { return group; }
    KDTREE_INLINE Block block(int64_t index) const {
      const char* at = blocks + static_cast<size_t>(index * tiles) * tile_bytes(group);
      const auto* scales = reinterpret_cast<const S*>(at);
      return {scales, reinterpret_cast<const uint32_t*>(scales + tiles * kTile), tiles};
    }
  };
  Strip strip(int64_t s) const {
    const auto before = static_cast<size_t>(s * kStripTiles * (k / group));
    return {packed + before * tile_bytes(group), tiles_in_strip(n, s), k, group};
  }
};

template <class S>
void pack_int4(const int32_t* qw, const S* sc, int64_t n, int64_t k, int64_t group, void* packed) {
  const Int4Matrix<S> matrix(packed, n, k, group);
  const int64_t words = k / 8, groups = k / group, group_words = group / 8;
  for_each_job(strips_of(n), n * k, [&](int64_t s) {
    const auto strip = matrix.strip(s);
    const int64_t outputs = strip.tiles * kTile;
    for (int64_t g = 0; g < groups; ++g) {
      const auto block = strip.block(g);
      auto* scales = const_cast<S*>(block.scales);
      auto* codes = const_cast<uint32_t*>(block.words);
      for (int64_t j = 0; j < outputs; ++j) {
        const int64_t row = s * kStripTiles * kTile + j;
        scales[j] = row < n ? sc[row * groups + g] : S{};
        for (int64_t w = 0; w < group_words; ++w)
          codes[w * outputs + j] =
              row < n ? static_cast<uint32_t>(qw[row * words + g * group_words + w]) ^ 0x88888888u : 0;
      }
    }
  });
}

// ---- inputs ------------------------------------------------------------------------------------------------------
// Rows of fp32 inputs lie k + 16 apart: at a multiple of 4096 bytes they would all fall into the same cache set.
constexpr int64_t input_stride(int64_t k) { return k + kLanes; }

// ---- the product -------------------------------------------------------------------------------------------------
template <class Strip>
using RegisterBlock = void (*)(const Strip& strip, int64_t tile, const float* const* x, F32x16* totals);

// Tiles tile … tile + n_tiles - 1 of a strip times `rows` rows: totals[rows][n_tiles].
template <class Matrix, int n_tiles, int rows>
__attribute__((noinline)) void multiply_block(const typename Matrix::Strip& strip, int64_t tile, const float* const* x,
                                              F32x16* totals) {
  for (int i = 0; i < rows * n_tiles; ++i) totals[i] = F32x16{};
  const float* in[rows];
  for (int r = 0; r < rows; ++r) in[r] = x[r];
  const int64_t inputs = strip.block_inputs();
  for (int64_t begin = 0, index = 0; begin < strip.k; begin += inputs, ++index) {
    const auto block = strip.block(index);
    const int64_t steps = std::min(inputs, strip.k - begin) / Matrix::kStep;
    F32x16 sums[rows][n_tiles] = {};
    for (int64_t i = 0; i < steps; ++i) {
      typename Matrix::Step step[n_tiles];
#pragma GCC unroll 8
      for (int t = 0; t < n_tiles; ++t) step[t] = block.step(i, tile + t);
#pragma GCC unroll 8
      for (int j = 0; j < Matrix::kStep; ++j) {
        F32x16 w[n_tiles];
#pragma GCC unroll 8
        for (int t = 0; t < n_tiles; ++t) w[t] = step[t][j];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
          const F32x16 input = splat(in[r][begin + i * Matrix::kStep + j]);
#pragma GCC unroll 8
          for (int t = 0; t < n_tiles; ++t) sums[r][t] = fma(input, w[t], sums[r][t]);
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < n_tiles; ++t) {
      const F32x16 scale = block.scale(tile + t);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) totals[r * n_tiles + t] = fma(scale, sums[r][t], totals[r * n_tiles + t]);
    }
  }
}

template <class Matrix, bool abreast, size_t... i>
constexpr std::array<RegisterBlock<typename Matrix::Strip>, kMostRows> blocks_of(std::index_sequence<i...>) {
  return {multiply_block<Matrix, abreast ? tiles_beside(i + 1) : 1, i + 1>...};
}

// Strip s of a matrix times `count` rows: emit(row, first output, how many, these outputs). input(row) points to fp32.
template <class Matrix, class Input, class Emit>
KDTREE_INLINE void multiply(const Matrix& matrix, int64_t s, int64_t count, Input&& input, Emit&& emit) {
  using Rows = std::make_index_sequence<kMostRows>;
  static constexpr auto abreast = blocks_of<Matrix, true>(Rows()), single = blocks_of<Matrix, false>(Rows());
  const auto strip = matrix.strip(s);
  const float* x[kMostRows];
  F32x16 totals[kMostRows * kStripTiles];
  const int64_t row_blocks = (count + kMostRows - 1) / kMostRows;
  for (int64_t b = 0; b < row_blocks; ++b) {
    const int64_t begin = count * b / row_blocks, rows = count * (b + 1) / row_blocks - begin;
    for (int64_t r = 0; r < rows; ++r) x[r] = input(begin + r);
    const int64_t beside = tiles_beside(static_cast<int>(rows));
    for (int64_t tile = 0; tile < strip.tiles;) {
      const int64_t n_tiles = tile + beside <= strip.tiles ? beside : 1;
      (n_tiles == beside ? abreast : single)[static_cast<size_t>(rows - 1)](strip, tile, x, totals);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t t = 0; t < n_tiles; ++t) {
          const int64_t output = (s * kStripTiles + tile + t) * kTile;
          emit(begin + r, output, std::min(kTile, matrix.n - output), totals[r * n_tiles + t]);
        }
      tile += n_tiles;
    }
  }
}

}  // namespace kdtree::KDTREE_PATH
