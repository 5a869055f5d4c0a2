// The CPU's matrix kernel, shared by gemm, w4a16_gemm and both expert operators.
//
// Weights lie in tiles of 16 outputs, one input after the other. An output is
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

constexpr int64_t kTile = kLanes;      // outputs
constexpr int64_t kStrip = 4;          // tiles of one job
constexpr int64_t kFloatBlock = 32;    // inputs of one partial sum of a float matrix
constexpr int64_t kPrefetch = 2048;    // bytes ahead of the weights being read

// Sums of a register block, rows × tiles, that fit the registers beside a weight and an input.
constexpr int kMostRows = kParts == 1 ? 8 : kParts == 2 ? 6 : 3;
constexpr int tiles_beside(int rows) {
  if (kParts == 1) return rows <= 4 ? 4 : 2;
  return kParts == 2 && rows <= 2 ? 2 : 1;
}

inline int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }
inline int64_t strips_of(int64_t n) { return (tiles_of(n) + kStrip - 1) / kStrip; }

// ---- float weights: [tiles][k][16], outputs past n are 0 ---------------------------------------------------------
template <class W>
struct FloatTiles {
  const W* packed;
  int64_t k;

  static size_t bytes(int64_t n, int64_t k) { return static_cast<size_t>(tiles_of(n) * kTile * k) * sizeof(W); }
  int64_t block() const { return kFloatBlock; }

  // The weights of kStep inputs of one tile.
  static constexpr int kStep = 1;
  struct Step {
    F32x16 w;
    KDTREE_INLINE F32x16 operator[](int) const { return w; }
  };
  KDTREE_INLINE Step step(int64_t tile, int64_t input) const {
    const W* from = packed + (tile * k + input) * kTile;
    __builtin_prefetch(reinterpret_cast<const char*>(from) + kPrefetch);
    return {load(from)};
  }
  KDTREE_INLINE F32x16 scale(int64_t, int64_t) const { return splat(1.0f); }
};

template <class Source, class W>
void pack_float_tiles(const Source* w, int64_t n, int64_t k, W* packed) {
  for_each_job(tiles_of(n), n * k, [&](int64_t t) {
    for (int64_t c = 0; c < k; ++c)
      for (int64_t j = 0; j < kTile; ++j) {
        const int64_t row = t * kTile + j;
        store(packed + (t * k + c) * kTile + j, row < n ? to_float(w[row * k + c]) : 0.0f);
      }
  });
}

// ---- INT4: codes [tiles][k/8][16] words, then scales [tiles][k/group][16] -----------------------------------------
// Word w of output j is the bundle's with the top bit of every nibble flipped: nibble − 8 in two's complement.
template <class S>
struct Int4Tiles {
  const uint32_t* codes;
  const S* scales;
  int64_t k, group, groups;

  Int4Tiles(const void* packed, int64_t n, int64_t k, int64_t group)
      : codes(static_cast<const uint32_t*>(packed)),
        scales(reinterpret_cast<const S*>(codes + tiles_of(n) * kTile * (k / 8))),
        k(k),
        group(group),
        groups(k / group) {}

  static size_t bytes(int64_t n, int64_t k, int64_t group) {
    return static_cast<size_t>(tiles_of(n) * kTile) *
           (static_cast<size_t>(k / 8) * sizeof(uint32_t) + static_cast<size_t>(k / group) * sizeof(S));
  }
  int64_t block() const { return group; }

  static constexpr int kStep = 8;
  struct Step {
    I32x16 words;  // one of every output
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
  KDTREE_INLINE Step step(int64_t tile, int64_t input) const {
    const uint32_t* from = codes + (tile * k + input) * (kTile / 8);
    __builtin_prefetch(reinterpret_cast<const char*>(from) + kPrefetch);
    return {load(from)};
  }
  KDTREE_INLINE F32x16 scale(int64_t tile, int64_t block) const { return load(scales + (tile * groups + block) * kTile); }
};

template <class S>
void pack_int4_tiles(const int32_t* qw, const S* sc, int64_t n, int64_t k, int64_t group, void* packed) {
  auto* codes = static_cast<uint32_t*>(packed);
  auto* scales = reinterpret_cast<S*>(codes + tiles_of(n) * kTile * (k / 8));
  const int64_t words = k / 8, groups = k / group;
  for_each_job(tiles_of(n), n * k, [&](int64_t t) {
    for (int64_t j = 0; j < kTile; ++j) {
      const int64_t row = t * kTile + j;
      for (int64_t w = 0; w < words; ++w)
        codes[(t * words + w) * kTile + j] = row < n ? static_cast<uint32_t>(qw[row * words + w]) ^ 0x88888888u : 0;
      for (int64_t g = 0; g < groups; ++g) scales[(t * groups + g) * kTile + j] = row < n ? sc[row * groups + g] : S{};
    }
  });
}

// ---- inputs ------------------------------------------------------------------------------------------------------
// Rows of fp32 inputs lie k + 16 apart: at a multiple of 4096 bytes they would all fall into the same cache set.
constexpr int64_t input_stride(int64_t k) { return k + kLanes; }

// ---- the product -------------------------------------------------------------------------------------------------
template <class Tiles>
using Block = void (*)(const Tiles& tiles, int64_t tile, const float* const* x, F32x16* totals);

// Tiles tile … tile + n_tiles - 1 times `rows` rows: totals[rows][n_tiles].
template <class Tiles, int n_tiles, int rows>
__attribute__((noinline)) void multiply_block(const Tiles& tiles, int64_t tile, const float* const* x,
                                              F32x16* totals) {
  for (int i = 0; i < rows * n_tiles; ++i) totals[i] = F32x16{};
  const float* in[rows];
  for (int r = 0; r < rows; ++r) in[r] = x[r];
  const int64_t block = tiles.block();
  for (int64_t begin = 0, index = 0; begin < tiles.k; begin += block, ++index) {
    const int64_t end = std::min(begin + block, tiles.k);
    F32x16 sums[rows][n_tiles] = {};
    for (int64_t k = begin; k < end; k += Tiles::kStep) {
      typename Tiles::Step step[n_tiles];
#pragma GCC unroll 8
      for (int t = 0; t < n_tiles; ++t) step[t] = tiles.step(tile + t, k);
#pragma GCC unroll 8
      for (int i = 0; i < Tiles::kStep; ++i) {
        F32x16 w[n_tiles];
#pragma GCC unroll 8
        for (int t = 0; t < n_tiles; ++t) w[t] = step[t][i];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
          const F32x16 input = splat(in[r][k + i]);
#pragma GCC unroll 8
          for (int t = 0; t < n_tiles; ++t) sums[r][t] = fma(input, w[t], sums[r][t]);
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < n_tiles; ++t) {
      const F32x16 scale = tiles.scale(tile + t, index);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) totals[r * n_tiles + t] = fma(scale, sums[r][t], totals[r * n_tiles + t]);
    }
  }
}

template <class Tiles, bool abreast, size_t... i>
constexpr std::array<Block<Tiles>, kMostRows> blocks_of(std::index_sequence<i...>) {
  return {multiply_block<Tiles, abreast ? tiles_beside(i + 1) : 1, i + 1>...};
}

// Tiles first … end - 1 times `count` rows: emit(row, tile, 16 outputs). input(row) points to fp32 inputs.
template <class Tiles, class Input, class Emit>
KDTREE_INLINE void multiply(const Tiles& tiles, int64_t first, int64_t end, int64_t count, Input&& input, Emit&& emit) {
  using Rows = std::make_index_sequence<kMostRows>;
  static constexpr auto abreast = blocks_of<Tiles, true>(Rows()), single = blocks_of<Tiles, false>(Rows());
  const float* x[kMostRows];
  F32x16 totals[kMostRows * kStrip];
  const int64_t row_blocks = (count + kMostRows - 1) / kMostRows;
  for (int64_t b = 0; b < row_blocks; ++b) {
    const int64_t begin = count * b / row_blocks, rows = count * (b + 1) / row_blocks - begin;
    for (int64_t r = 0; r < rows; ++r) x[r] = input(begin + r);
    const int64_t beside = tiles_beside(static_cast<int>(rows));
    for (int64_t tile = first; tile < end;) {
      const int64_t n_tiles = tile + beside <= end ? beside : 1;
      (n_tiles == beside ? abreast : single)[static_cast<size_t>(rows - 1)](tiles, tile, x, totals);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t t = 0; t < n_tiles; ++t) emit(begin + r, tile + t, totals[r * n_tiles + t]);
      tile += n_tiles;
    }
  }
}

}  // namespace kdtree::KDTREE_PATH
