// The CPU's matrix kernel, shared by gemm, w4a16_gemm and both expert operators.
//
// Weights lie in tiles of 16 outputs; a tile gives, for a block of inputs, a [block][16] panel of fp32 values. An output
// is total = total + scale * (x[k] * w[k] summed over the block, k ascending), blocks ascending, with scale = 1 for
// float weights. That order depends on k alone: not on the number of rows, the tile, the thread or the vector width.
#pragma once
#include <algorithm>

#include "vector.h"

namespace kdtree {

constexpr int64_t kTile = kLanes;        // outputs
constexpr int64_t kMaxBlock = 128;       // inputs: the largest INT4 group
constexpr int64_t kFloatBlock = 32;      // inputs of one partial sum of a float matrix
constexpr int64_t kRowsAtOnce = 64;      // rows that share one unpacking of a panel

inline int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }

// ---- float weights: [tiles][k][16], outputs past n are 0 ---------------------------------------------------------
template <class W>
struct FloatTiles {
  const W* packed;
  int64_t k;

  static size_t bytes(int64_t n, int64_t k) { return static_cast<size_t>(tiles_of(n) * kTile * k) * sizeof(W); }
  int64_t block() const { return std::min(kFloatBlock, k); }

  KDTREE_INLINE F32x16 scale(int64_t, int64_t) const { return splat(1.0f); }
  KDTREE_INLINE void panel(int64_t tile, int64_t begin, int64_t count, F32x16* out) const {
    const W* from = packed + (tile * k + begin) * kTile;
    for (int64_t i = 0; i < count; ++i) out[i] = load(from + i * kTile);
  }
};

template <class Source, class W>
void pack_float_tiles(const Source* w, int64_t n, int64_t k, W* packed) {
  for (int64_t t = 0; t < tiles_of(n); ++t)
    for (int64_t c = 0; c < k; ++c)
      for (int64_t j = 0; j < kTile; ++j) {
        const int64_t row = t * kTile + j;
        store(packed + (t * k + c) * kTile + j, row < n ? to_float(w[row * k + c]) : 0.0f);
      }
}

// ---- INT4: codes [tiles][k/8][16] words (word w of row j is the bundle's), then scales [tiles][k/group][16] --------
template <class S>
struct Int4Tiles {
  const uint32_t* codes;
  const S* scales;
  int64_t k;
  int64_t group;

  Int4Tiles(const void* packed, int64_t n, int64_t k, int64_t group)
      : codes(static_cast<const uint32_t*>(packed)),
        scales(reinterpret_cast<const S*>(codes + tiles_of(n) * kTile * (k / 8))),
        k(k),
        group(group) {}

  static size_t bytes(int64_t n, int64_t k, int64_t group) {
    return static_cast<size_t>(tiles_of(n) * kTile) * (static_cast<size_t>(k / 8) * 4 + static_cast<size_t>(k / group) * sizeof(S));
  }
  int64_t block() const { return group; }

  KDTREE_INLINE F32x16 scale(int64_t tile, int64_t begin) const {
    return load(scales + (tile * (k / group) + begin / group) * kTile);
  }
  // The integers nibble − 8, exact in fp32.
  KDTREE_INLINE void panel(int64_t tile, int64_t begin, int64_t count, F32x16* out) const {
    const uint32_t* from = codes + (tile * (k / 8) + begin / 8) * kTile;
    for (int64_t w = 0; w < count / 8; ++w) {
      U32x16 words;
      std::memcpy(&words, from + w * kTile, sizeof words);
      for (int i = 0; i < 8; ++i) {
        const U32x16 nibble = (words >> (4 * i)) & 15u;
        out[8 * w + i] = __builtin_convertvector(reinterpret_cast<I32x16>(nibble) - 8, F32x16);
      }
    }
  }
};

template <class S>
void pack_int4_tiles(const int32_t* qw, const S* sc, int64_t n, int64_t k, int64_t group, void* packed) {
  auto* codes = static_cast<uint32_t*>(packed);
  auto* scales = reinterpret_cast<S*>(codes + tiles_of(n) * kTile * (k / 8));
  const int64_t words = k / 8, groups = k / group;
  for (int64_t t = 0; t < tiles_of(n); ++t)
    for (int64_t j = 0; j < kTile; ++j) {
      const int64_t row = t * kTile + j;
      for (int64_t w = 0; w < words; ++w)
        codes[(t * words + w) * kTile + j] = row < n ? static_cast<uint32_t>(qw[row * words + w]) : 0x88888888u;
      for (int64_t g = 0; g < groups; ++g) scales[(t * groups + g) * kTile + j] = row < n ? sc[row * groups + g] : S{};
    }
}

// One tile of outputs for `rows` rows (at most kRowsAtOnce): emit(row, 16 sums). x(row) points to fp32 inputs.
template <class Tiles, class X, class Emit>
KDTREE_INLINE void multiply_tile(const Tiles& tiles, int64_t tile, int64_t rows, X&& x, Emit&& emit) {
  F32x16 total[kRowsAtOnce];
  F32x16 panel[kMaxBlock];
  for (int64_t r = 0; r < rows; ++r) total[r] = F32x16{};
  const int64_t block = tiles.block();
  for (int64_t begin = 0; begin < tiles.k; begin += block) {
    const int64_t count = std::min(block, tiles.k - begin);
    tiles.panel(tile, begin, count, panel);
    const F32x16 scale = tiles.scale(tile, begin);
    for (int64_t r = 0; r < rows; ++r) {
      const float* in = x(r) + begin;
      F32x16 acc = {};
      for (int64_t i = 0; i < count; ++i) acc += splat(in[i]) * panel[i];
      total[r] += scale * acc;
    }
  }
  for (int64_t r = 0; r < rows; ++r) emit(r, total[r]);
}

}  // namespace kdtree
