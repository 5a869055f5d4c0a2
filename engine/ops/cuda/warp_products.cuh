// Products with tiles of rows by a warp's own m16n8k16, where there are no warpgroups: what ptx.cuh says of them holds.
#pragma once
#include "strips.cuh"

#ifndef KDTREE_WARPGROUPS
namespace kdtree::cuda {

struct RowTiles {
  const char* tiles;
  __device__ explicit RowTiles(const char* p) : tiles(p) {}
};
__device__ constexpr int tiles_at_once(int tiles) { return tiles < 2 ? tiles : 2; }
__device__ inline void let_products_begin() {}
template <bool kAdds, int kTiles>
__device__ inline void begin_products(float (&c)[kTiles][4], const uint32_t (&a)[8], RowTiles b, int bytes) {
  const int lane = static_cast<int>(threadIdx.x % 32), row = lane % 8;
  const char* at = b.tiles + bytes / kTileBytes * kTileBytes + row * 128;
  const int piece = bytes % 128 / 16 + lane / 8;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const uint4 rows = load_matrices(at + tile * kTileBytes + (piece ^ row) * 16);
    if (!kAdds) c[tile][0] = c[tile][1] = c[tile][2] = c[tile][3] = 0;
    multiply_first(c[tile], a, rows);
    multiply_second(c[tile], a, rows);
  }
}
__device__ inline void wait_for_products() {}
template <int kTiles>
__device__ inline void take_products(float (&)[kTiles][4]) {}

}  // namespace kdtree::cuda
#endif
