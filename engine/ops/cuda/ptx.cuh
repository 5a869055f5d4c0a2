// Instructions that CUDA C++ has no word for: matrix products, copies into shared memory and the barriers that count
// them, clusters of blocks, kernels that start before the one in front of them has ended.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#ifndef __CUDACC__
#include "emulated_ptx.h"  // a host compiler: the kernels run on emulated threads, where there is no GPU
#else
#include <cuda.h>

namespace kdtree::cuda {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// c += a b for a 16 x 16 and b 16 x 8. Lane 4 g + t holds rows g and g + 8 of a, column g of b, and of c the columns
// 2 t and 2 t + 1 of rows g (c[0], c[1]) and g + 8.
__device__ inline void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16 bits; lane 8 i + r says where row r of the i-th lies, 16 bytes. Lane 4 g + t gets columns 2 t
// and 2 t + 1 of row g of each.
__device__ inline uint4 load_matrices(const char* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(row))
               : "memory");
  return v;
}

// a b + c for two bf16 in one word, subnormal numbers included.
__device__ inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a) : "r"(a), "r"(b), "r"(c));
  return a;
}

// ---- barriers in shared memory: a phase ends when all arrivals and all announced bytes are in ---------------------
__device__ inline void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void end_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Barriers that the thread has initialised become visible to the copy engine; a barrier of the threads that use them
// follows.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Returns once the phase of this parity has ended. A new barrier is in phase 0, so waiting for 1 passes at once.
__device__ inline void wait_phase(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// ---- bulk copies: 16-byte aligned addresses and size; the bytes count towards the barrier's phase -----------------
// Weights are read once, hence evict-first: activations and partial sums keep the L2. sm_120 faults on such policies.
__device__ inline void copy_weights(void* to, const void* from, int bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 1200
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#else
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}
// What the thread has read or written in shared memory, copies that are begun behind a barrier may overwrite or read.
__device__ inline void let_copies_follow() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters: blocks that run side by side and copy into each other's shared memory ------------------------------
// Every thread of every block of the cluster arrives, and waits before it arrives again. What a thread has read or written
// before it arrives, it has read or written when others return; copies that they then begin may overwrite it.
__device__ inline void cluster_arrive() {
  asm volatile("fence.proxy.async.shared::cta;\n\tbarrier.cluster.arrive.release;" ::: "memory");
}
// The same, but only that it has come so far (published barriers, ended phases) is known of a thread that arrives.
__device__ inline void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// Which cluster of the grid the block is in, of how many, and its own place in there.
__device__ inline unsigned cluster_index() {
  unsigned v;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(v));
  return v;
}
__device__ inline unsigned cluster_count() {
  unsigned v;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(v));
  return v;
}
__device__ inline unsigned rank_in_cluster() {
  unsigned v;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
  return v;
}
// A bulk copy to the cluster's block `rank`: `to` and `barrier` are addresses in the caller's shared memory. Only the receiver
// learns that it has ended.
__device__ inline void copy_to_block(unsigned rank, void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile(
      "{\n\t.reg .u32 to, barrier;\n\t"
      "mapa.shared::cluster.u32 to, %0, %4;\n\tmapa.shared::cluster.u32 barrier, %3, %4;\n\t"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%1], %2, [barrier];\n\t}" ::"r"(
          shared_address(to)),
      "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

// ---- rows in tiles of 8 -------------------------------------------------------------------------------------------
// A tile: 64 elements of 8 rows, 128 bytes a row, the 16-byte pieces of a row in the order of the 128-byte swizzle: piece
// c of row r lies where c ^ r would. Tiles lie at multiples of 1024 in shared memory.
constexpr int kTileBytes = 1024;

// A matrix of bf16 rows of which so many tiles, one behind the other, are copied at a time. A parameter of the kernel.
struct RowMap {
  CUtensorMap map;
  // Before the first map is made; asks the driver, which a capture forbids.
  static cudaError_t init() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    encode() = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    return error != cudaSuccess || found ? error : cudaErrorSymbolNotFound;
  }
  // Rows `row_bytes` apart; these and x are multiples of 16.
  static cudaError_t make(RowMap* map, const void* x, int64_t row_bytes, int columns, int64_t rows, int tiles) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t stride = static_cast<cuuint64_t>(row_bytes);
    const cuuint32_t copied[] = {64, static_cast<cuuint32_t>(8 * tiles)}, step[] = {1, 1};
    const CUresult result = encode()(&map->map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(x), sizes,
                                     &stride, copied, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
  }

 private:
  static decltype(&cuTensorMapEncodeTiled)& encode() {
    static decltype(&cuTensorMapEncodeTiled) function = nullptr;
    return function;
  }
};
// The tiles of rows `row` and on, from `column` on; zeros where the matrix has no such rows or columns.
__device__ inline void copy_tiles(void* to, const RowMap& rows, int column, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(&rows.map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// ---- products with tiles of rows ----------------------------------------------------------------------------------
// c += a b or c = a b, for a as multiply_add has it and tiles of 8 columns of b. On sm_90 a warpgroup makes them, four warps
// with 16 rows of a each that read the same tiles, and they run beside their warps: c and a are not to be touched until
// wait_for_products. Elsewhere a warp makes them (warp_products.cuh). The bits are the same (tests/cuda/mma_parity.py).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(KDTREE_NO_WARPGROUPS)
#define KDTREE_WARPGROUPS
// Tiles one behind the other from p on.
struct RowTiles {
  uint32_t description;  // the lower half; the same for all lanes, so that a uniform register holds it
  __device__ explicit RowTiles(const char* p)
      : description(__reduce_min_sync(0xFFFFFFFFu, (shared_address(p) >> 4 & 0x3FFF) | 1 << 16)) {}
};
// Tiles that products are made with at once: all that there are, or as many as registers allow.
__device__ constexpr int tiles_at_once(int tiles) { return tiles; }
// Before the first product that takes registers which were written since the last.
__device__ inline void let_products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// 16 k. The upper half of the description: 1024 bytes from tile to tile, 128-byte swizzle.
#define KDTREE_ROWS(adds, rows)                                           \
  "{\n\t.reg .pred adds;\n\t.reg .b32 high;\n\t.reg .b64 b;\n\t" \
  "setp.ne.u32 adds, %" #adds ", 0;\n\tmov.b32 high, 0x40000040;\n\tmov.b64 b, {%" #rows ", high};\n\t"
#define KDTREE_TILE(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define KDTREE_WEIGHTS(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
template <bool kAdds>
__device__ inline void begin_product(float (&c)[1][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      KDTREE_ROWS(9, 8) "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, b, adds, 1, 1, 0;\n\t}"
      : KDTREE_TILE(0)
      : KDTREE_WEIGHTS(a), "r"(b), "n"(kAdds));
}
template <bool kAdds>
__device__ inline void begin_product(float (&c)[2][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      KDTREE_ROWS(13, 12) "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, b, adds, 1, 1, 0;\n\t}"
      : KDTREE_TILE(0), KDTREE_TILE(1)
      : KDTREE_WEIGHTS(a), "r"(b), "n"(kAdds));
}
template <bool kAdds>
__device__ inline void begin_product(float (&c)[4][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      KDTREE_ROWS(21, 20) "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, b, adds, 1, 1, 0;\n\t}"
      : KDTREE_TILE(0), KDTREE_TILE(1), KDTREE_TILE(2), KDTREE_TILE(3)
      : KDTREE_WEIGHTS(a), "r"(b), "n"(kAdds));
}
template <bool kAdds>
__device__ inline void begin_product(float (&c)[8][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      KDTREE_ROWS(37, 36) "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
      "%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, b, adds, 1, 1, 0;\n\t}"
      : KDTREE_TILE(0), KDTREE_TILE(1), KDTREE_TILE(2), KDTREE_TILE(3), KDTREE_TILE(4), KDTREE_TILE(5),
        KDTREE_TILE(6), KDTREE_TILE(7)
      : KDTREE_WEIGHTS(a), "r"(b), "n"(kAdds));
}
#undef KDTREE_ROWS
#undef KDTREE_TILE
#undef KDTREE_WEIGHTS
// Of the 32 k that begin `bytes` from b on, in other tiles or within these.
template <bool kAdds, int kTiles>
__device__ inline void begin_products(float (&c)[kTiles][4], const uint32_t (&a)[8], RowTiles b, int bytes) {
  const uint32_t at = b.description + static_cast<uint32_t>(bytes >> 4);
  begin_product<kAdds>(c, a, at);
  begin_product<true>(c, a + 4, at + 2);
}
__device__ inline void wait_for_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// After the wait: no use of c moves in front of it.
template <int kTiles>
__device__ inline void take_products(float (&c)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
    asm volatile("" : "+f"(c[tile][0]), "+f"(c[tile][1]), "+f"(c[tile][2]), "+f"(c[tile][3])::"memory");
}
#endif

// ---- 16 bytes a thread; a barrier counts them as an arrival of that thread, once all it began so far are in -------
__device__ inline void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ inline void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// ---- dependent launches -------------------------------------------------------------------------------------------
// The grid in front of this one (see launch_early) has ended and its writes are visible.
__device__ inline void wait_for_grid_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next grid may start once every block of this one has said so or ended; it waits for our end where it needs it.
__device__ inline void let_next_grid_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Launches a kernel that may start before the one in front of it has ended, and that calls wait_for_grid_in_front
// before it touches what that one reads or writes. As every such kernel waits, the end of one is the end of all before.
// `cluster` blocks, of which grid is a multiple, make a cluster.
class EarlyInClusters {
 public:
  EarlyInClusters(unsigned cluster, unsigned grid, unsigned threads, size_t shared_bytes, cudaStream_t stream) {
    attributes_[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[0].val.programmaticStreamSerializationAllowed = 1;
    attributes_[1].id = cudaLaunchAttributeClusterDimension;
    attributes_[1].val.clusterDim.x = cluster;
    attributes_[1].val.clusterDim.y = attributes_[1].val.clusterDim.z = 1;
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes_;
    config.numAttrs = cluster > 1 ? 2 : 1;
  }
  EarlyInClusters(const EarlyInClusters&) = delete;
  EarlyInClusters& operator=(const EarlyInClusters&) = delete;
  cudaLaunchConfig_t config = {};

 private:
  cudaLaunchAttribute attributes_[2];
};
template <class... Parameters, class... Arguments>
void launch_early_in_clusters(unsigned cluster, void (*kernel)(Parameters...), unsigned grid, unsigned threads,
                              size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  const EarlyInClusters launch(cluster, grid, threads, shared_bytes, stream);
  cudaLaunchKernelEx(&launch.config, kernel, static_cast<Parameters>(arguments)...);
}
// How many clusters of that size the device holds at once.
template <class... Parameters>
cudaError_t most_clusters(int* count, unsigned cluster, void (*kernel)(Parameters...), unsigned threads,
                          size_t shared_bytes) {
  const EarlyInClusters launch(cluster, cluster, threads, shared_bytes, nullptr);
  return cudaOccupancyMaxActiveClusters(count, kernel, &launch.config);
}
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), unsigned grid, unsigned threads, size_t shared_bytes,
                  cudaStream_t stream, Arguments... arguments) {
  launch_early_in_clusters(1, kernel, grid, threads, shared_bytes, stream, arguments...);
}

}  // namespace kdtree::cuda
#endif
