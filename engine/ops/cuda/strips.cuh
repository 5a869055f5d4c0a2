// Weights as the tensor cores eat them: strips of 16 outputs, a strip being units of 64 inputs. A tile is kStrips strips
// (the last one what is left) and lies unit by unit: [tile][unit][strip of the tile], so that any units of it are one
// piece of memory. A unit holds each lane's share in 16-byte pieces. Inputs are padded to whole units and outputs to
// whole strips with zero weights.
//
// A unit is two halves of 32 inputs, two products of 16. Lane 4 g + t holds pairs 2 t, 2 t + 8, 2 t + 16, 2 t + 24 (and
// one more) of a half, of outputs g and g + 8: the first two are for the first product.
//
// Rows of x that meet them lie in tiles of 8, [unit][tile][row][16-byte piece], piece c where c ^ row would be: a lane's
// pairs of a tile's half are one load of 8 x 8 matrices without a bank conflict, and a warpgroup's products take them so.
#pragma once
#include "ptx.cuh"
#include "reduce.cuh"

namespace kdtree::cuda {

constexpr int kStrips = 8;  // of a tile

constexpr int kTileBytes = 1024;  // 8 rows of a unit

// Whether warpgroups multiply so many tiles of rows: they do several at a time.
template <int kRowTiles>
constexpr bool kByGroup = kWarpgroups && kRowTiles >= 4;

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

// A lane's pairs of half h of a tile of rows; `row`, of the tile, is that which the lane finds for all: lane_id() % 8.
__device__ inline uint4 load_rows(const char* tile, int row, int h) {
  return load_matrices(tile + row * 128 + ((lane_id() / 8 ^ row) * 16 ^ 64 * h));
}

// A word is a lane's 8 inputs of an output, code = q + 8: its pairs begin at bits 0, 8, 4, 12, and their second inputs lie
// 16 bits higher. A unit is
//   [lane][word of half 0, output g; of half 0, output g + 8; of half 1, g; of half 1, g + 8]          512 bytes
//   [g][half][scale of output g, of output g + 8] in bf16, times 2^6                                    64 bytes
//
// As the bits of a bf16, an integer below 256 is that many times 2^-133, so a nibble needs no conversion, and one that
// lies 4 bits higher is 16 times as much: one fma makes either (code - 8) · 2^-6, exactly.
struct Int4Strips {
  static constexpr int kUnitBytes = 576;
  static constexpr float kPackedScale = 0x1p6f;
  static constexpr int units_a_stage(int row_tiles) { return row_tiles <= 2 ? 4 : 2; }
  static __host__ __device__ constexpr int units_at_once(int row_tiles) { return row_tiles == 1 ? 2 : 1; }

  // Adds the product of kUnits units, `stride` bytes apart. The scale of a group is applied in fp32 to the group's sum.
  template <int kUnits, int kRowTiles>
  static __device__ void multiply(const char* unit, int stride, const char* x, int row, float (&total)[kRowTiles][4]) {
    constexpr int kHalves = 2 * kUnits, kAtOnce = kRowTiles >= 4 ? 1 : kHalves;  // sums that do not wait for each other
#pragma unroll kAtOnce
    for (int first = 0; first < kHalves; first += kAtOnce) {
      uint2 codes[kAtOnce];
      uint32_t scales[kAtOnce];
      if constexpr (kAtOnce == 1) {
        const char* at = unit + first / 2 * stride;
        codes[0] = reinterpret_cast<const uint2*>(at)[2 * lane_id() + first % 2];
        scales[0] = reinterpret_cast<const uint32_t*>(at + 512)[2 * (lane_id() / 4) + first % 2];
      } else {
#pragma unroll
        for (int h = 0; h < kHalves; h += 2) {
          const uint4 both = reinterpret_cast<const uint4*>(unit + h / 2 * stride)[lane_id()];
          const uint2 pairs = reinterpret_cast<const uint2*>(unit + h / 2 * stride + 512)[lane_id() / 4];
          codes[h] = {both.x, both.y}, codes[h + 1] = {both.z, both.w};
          scales[h] = pairs.x, scales[h + 1] = pairs.y;
        }
      }
      HalfStrip strip[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) dequantize(codes[i], strip[i]);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        float sum[kAtOnce][4] = {};
        uint4 rows[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          rows[i] = load_rows(x + ((first + i) / 2 * kRowTiles + r) * kTileBytes, row, (first + i) % 2);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) multiply_first(sum[i], strip[i], rows[i]);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) multiply_second(sum[i], strip[i], rows[i]);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) add_scaled(total[r], scales[i], sum[i]);
      }
    }
  }

  // The same of one unit by a warpgroup, on the rows `bytes` from x on.
  template <int kRowTiles>
  static __device__ void multiply_by_group(const char* unit, GroupTiles x, int bytes, float (&total)[kRowTiles][4]) {
    const uint4 codes = reinterpret_cast<const uint4*>(unit)[lane_id()];
    const uint2 scales = reinterpret_cast<const uint2*>(unit + 512)[lane_id() / 4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      HalfStrip strip;
      float sum[kRowTiles][4];
      dequantize(h ? uint2{codes.z, codes.w} : uint2{codes.x, codes.y}, strip);
      begin_products<false>(sum, strip.a, x, bytes, h);
      wait_for_products(sum);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) add_scaled(total[r], h ? scales.y : scales.x, sum[r]);
    }
  }

 private:
  static __device__ void add_scaled(float (&total)[4], uint32_t scales, const float (&sum)[4]) {
    const float low = __uint_as_float(scales << 16), high = __uint_as_float(scales & 0xFFFF0000u);
    total[0] = fmaf(low, sum[0], total[0]);
    total[1] = fmaf(low, sum[1], total[1]);
    total[2] = fmaf(high, sum[2], total[2]);
    total[3] = fmaf(high, sum[3], total[3]);
  }
  static __device__ void dequantize(uint2 codes, HalfStrip& strip) {
    dequantize(codes.x, strip.a);
    dequantize(codes.y, strip.a + 1);
  }
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
  static __host__ __device__ constexpr int units_at_once(int) { return 1; }

  template <int kUnits, int kRowTiles>
  static __device__ void multiply(const char* unit, int stride, const char* x, int row, float (&total)[kRowTiles][4]) {
#pragma unroll
    for (int h = 0; h < 2 * kUnits; ++h) {
      const HalfStrip strip = half_strip(unit + h / 2 * stride, h % 2);
      uint4 rows[kRowTiles];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) 
        rows[r] = load_rows(x + (h / 2 * kRowTiles + r) * kTileBytes, row, h % 2);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) multiply_first(total[r], strip, rows[r]);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) multiply_second(total[r], strip, rows[r]);
    }
  }

  template <int kRowTiles>
  static __device__ void multiply_by_group(const char* unit, GroupTiles x, int bytes, float (&total)[kRowTiles][4]) {
    const HalfStrip first = half_strip(unit, 0), second = half_strip(unit, 1);
    begin_products<true>(total, first.a, x, bytes, 0);
    begin_products<true>(total, second.a, x, bytes, 1);
    wait_for_products(total);
  }

 private:
  static __device__ HalfStrip half_strip(const char* unit, int h) {
    const auto* a = reinterpret_cast<const uint4*>(unit + h * (kUnitBytes / 2)) + lane_id();
    const uint4 low = a[0], high = a[32];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
};

}  // namespace kdtree::cuda
