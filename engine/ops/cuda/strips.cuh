// Weights as the tensor cores eat them: strips of 16 outputs, a strip being units of 64 inputs. A tile is kStrips strips
// (the last one what is left) and lies unit by unit: [tile][unit][strip of the tile], so that any units of it are one
// piece of memory. A unit holds each lane's share in 16-byte pieces. Inputs are padded to whole units and outputs to
// whole strips with zero weights.
//
// A unit is two halves of 32 inputs, each of which two m16n8k16 take. Lane 4 g + t holds four pairs of inputs of outputs
// g and g + 8 of a half: pairs 0 and 1 are for the first product. Which pairs those are depends on how rows come:
//   gathered rows (stream_gathered.cuh): inputs 8 t … 8 t + 7, so that a lane has its share of row g by one 16-byte load;
//   rows in tiles (stream_dense.cuh): pair p begins at input 8 p + 2 t, the order of the product itself.
#pragma once
#include "ptx.cuh"
#include "reduce.cuh"

namespace kdtree::cuda {

constexpr int kStrips = 8;  // of a tile

// The first input of a lane's pair p in a half.
struct GatheredOrder {
  static __host__ __device__ constexpr int input(int t, int p) { return 8 * t + 2 * p; }
};
struct TileOrder {
  static __host__ __device__ constexpr int input(int t, int p) { return 8 * p + 2 * t; }
};

// The 2 x 8 pairs of a lane for a half: operand a of the first product and of the second.
struct HalfStrip {
  uint32_t a[8];
};

// c += half · rows for one tile of 8 rows is these two; b: a lane's four pairs of its row.
__device__ inline void multiply_first(float (&c)[4], const uint32_t (&a)[8], uint4 b) {
  multiply_add(c, a[0], a[1], a[2], a[3], b.x, b.y);
}
__device__ inline void multiply_second(float (&c)[4], const uint32_t (&a)[8], uint4 b) {
  multiply_add(c, a[4], a[5], a[6], a[7], b.z, b.w);
}

// A word is a lane's eight inputs of an output, code = q + 8: pairs 0 … 3 begin at bits 0, 8, 4, 12, the second input of
// each lies 16 bits higher. A unit is
//   [lane][word of half 0, output g; of half 0, output g + 8; of half 1, g; of half 1, g + 8]          512 bytes
//   [g][half][scale of output g, of output g + 8] in bf16, times 2^6                                    64 bytes
//
// As the bits of a bf16, an integer below 256 is that many times 2^-133, so a nibble needs no conversion, and one that
// lies 4 bits higher is 16 times as much: one fma makes either (code - 8) · 2^-6, exactly.
struct Int4Units {
  static constexpr int kUnitBytes = 576;
  static constexpr float kPackedScale = 0x1p6f;

  // kHalves halves from the unit on: one, the half-th, or those of whole units, `stride` bytes apart.
  template <int kHalves>
  static __device__ void load(const char* unit, int stride, int half, HalfStrip (&strip)[kHalves],
                              uint32_t (&scales)[kHalves]) {
    uint2 codes[kHalves];
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
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      dequantize(codes[h].x, strip[h].a);
      dequantize(codes[h].y, strip[h].a + 1);
    }
  }
  static __device__ void add_scaled(float (&total)[4], uint32_t scales, const float (&sum)[4]) {
    const float low = __uint_as_float(scales << 16), high = __uint_as_float(scales & 0xFFFF0000u);
    total[0] = fmaf(low, sum[0], total[0]);
    total[1] = fmaf(low, sum[1], total[1]);
    total[2] = fmaf(high, sum[2], total[2]);
    total[3] = fmaf(high, sum[3], total[3]);
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
struct Bf16Units {
  static constexpr int kUnitBytes = 2048;

  static __device__ HalfStrip load(const char* unit, int half) {
    const auto* a = reinterpret_cast<const uint4*>(unit + half * (kUnitBytes / 2)) + lane_id();
    const uint4 low = a[0], high = a[32];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
};

}  // namespace kdtree::cuda
