// Weights as the tensor cores eat them: strips of 16 outputs, a strip being units of 64 inputs. A tile is kStrips strips
// (the last one what is left) and lies unit by unit: [tile][unit][strip of the tile], so that any units of it are one
// piece of memory. A unit holds each lane's share in 16-byte pieces. Inputs are padded to whole units and outputs to
// whole strips with zero weights; only halves of 32 inputs that exist are multiplied.
//
// Lane 4 g + t holds inputs 8 t … 8 t + 7 of every half, of outputs g and g + 8; and the same inputs of row g of x,
// which is one 16-byte load from x as it lies. Two m16n8k16 take a half: inputs 0 … 3 of each eight first, then 4 … 7.
#pragma once
#include "ptx.cuh"
#include "reduce.cuh"

namespace kdtree::cuda {

constexpr int kStrips = 8;  // of a tile

// The 2 x 8 pairs of a lane for a half: operand a of the first product and of the second.
struct HalfStrip {
  uint32_t a[8];
};

// sum += strip half · rows, for one tile of 8 rows, is these two.
__device__ inline void multiply_first(float (&sum)[4], const HalfStrip& strip, uint4 rows) {
  multiply_add(sum, strip.a[0], strip.a[1], strip.a[2], strip.a[3], rows.x, rows.y);
}
__device__ inline void multiply_second(float (&sum)[4], const HalfStrip& strip, uint4 rows) {
  multiply_add(sum, strip.a[4], strip.a[5], strip.a[6], strip.a[7], rows.z, rows.w);
}

// A word is 8 inputs of an output, code = q + 8: inputs 0, 2, 4, 6 from bits 0, 8, 4, 12 on, their odd neighbours 16
// bits higher. A unit is
//   [lane][word of half 0, output g; of half 0, output g + 8; of half 1, g; of half 1, g + 8]          512 bytes
//   [g][half][scale of output g, of output g + 8] in bf16, times 2^6                                    64 bytes
//
// As the bits of a bf16, an integer below 256 is that many times 2^-133, so a nibble needs no conversion, and one that
// lies 4 bits higher is 16 times as much: one fma makes either (code - 8) · 2^-6, exactly.
struct Int4Strips {
  static constexpr int kUnitBytes = 576;
  static constexpr float kPackedScale = 0x1p6f;
  static constexpr int units_a_stage(int row_tiles) { return row_tiles <= 2 ? 4 : 2; }

  // Adds the product of kHalves halves: one, the half-th of a unit, or those of whole units, `stride` bytes apart. The
  // scale of a group is applied in fp32 to the group's sum. Sums of kRowsAtOnce tiles do not wait for each other.
  template <int kHalves, int kRowsAtOnce, int kTileBytes, int kRowTiles>
  static __device__ void multiply(const char* unit, int stride, int half, const char* x, float (&total)[kRowTiles][4]) {
    uint2 codes[kHalves];
    uint32_t scales[kHalves];
    if constexpr (kHalves == 1) {
      codes[0] = reinterpret_cast<const uint2*>(unit)[2 * lane_id() + half];
      scales[0] = reinterpret_cast<const uint32_t*>(unit + 512)[2 * (lane_id() / 4) + half];
    } else {
#pragma unroll
      for (int h = 0; h < kHalves; h += 2) {
        const uint4 both = reinterpret_cast<const uint4*>(unit + h / 2 * stride)[lane_id()];
        const uint2 pairs = reinterpret_cast<const uint2*>(unit + h / 2 * stride + 512)[lane_id() / 4];
        codes[h] = {both.x, both.y}, codes[h + 1] = {both.z, both.w};
        scales[h] = pairs.x, scales[h + 1] = pairs.y;
      }
    }
    HalfStrip strip[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      dequantize(codes[h].x, strip[h].a);
      dequantize(codes[h].y, strip[h].a + 1);
    }
#pragma unroll
    for (int first = 0; first < kRowTiles; first += kRowsAtOnce) {
      float sum[kRowsAtOnce][kHalves][4] = {};
      uint4 rows[kRowsAtOnce][kHalves];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
          rows[r][h] = *reinterpret_cast<const uint4*>(x + (first + r) * kTileBytes + 64 * h);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) multiply_first(sum[r][h], strip[h], rows[r][h]);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) multiply_second(sum[r][h], strip[h], rows[r][h]);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const float low = __uint_as_float(scales[h] << 16), high = __uint_as_float(scales[h] & 0xFFFF0000u);
          float(&to)[4] = total[first + r];
          to[0] = fmaf(low, sum[r][h][0], to[0]);
          to[1] = fmaf(low, sum[r][h][1], to[1]);
          to[2] = fmaf(high, sum[r][h][2], to[2]);
          to[3] = fmaf(high, sum[r][h][3], to[3]);
        }
    }
  }

 private:
  // Pairs of inputs to a[0], a[2], a[4], a[6].
  static __device__ void dequantize(uint32_t word, uint32_t* a) {
    constexpr uint32_t kLow = 0x000F000F, kHigh = 0x00F000F0;
    constexpr uint32_t k2To127 = 0x7F007F00, k2To123 = 0x7D007D00, kMinus8 = 0xBE00BE00;  // the last times 2^-6
    a[0] = fma_pair(word & kLow, k2To127, kMinus8);
    a[2] = fma_pair(word >> 8 & kLow, k2To127, kMinus8);
    a[4] = fma_pair(word & kHigh, k2To123, kMinus8);
    a[6] = fma_pair(word >> 8 & kHigh, k2To123, kMinus8);
  }
};

// A unit is [half][product][lane][operand a]: pairs of inputs of output g, of g + 8, and the next pair of both.
struct Bf16Strips {
  static constexpr int kUnitBytes = 2048;
  static constexpr int units_a_stage(int) { return 1; }

  template <int kHalves, int kRowsAtOnce, int kTileBytes, int kRowTiles>
  static __device__ void multiply(const char* unit, int stride, int half, const char* x, float (&total)[kRowTiles][4]) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const auto* a = reinterpret_cast<const uint4*>(unit + h / 2 * stride + (half + h % 2) * (kUnitBytes / 2)) + lane_id();
      const uint4 low = a[0], high = a[32];
      const HalfStrip strip = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
#pragma unroll
      for (int first = 0; first < kRowTiles; first += kRowsAtOnce) {
        uint4 rows[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r)
          rows[r] = *reinterpret_cast<const uint4*>(x + (first + r) * kTileBytes + 64 * h);
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) multiply_first(total[first + r], strip, rows[r]);
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) multiply_second(total[first + r], strip, rows[r]);
      }
    }
  }
};

}  // namespace kdtree::cuda
