// Instructions that CUDA C++ has no word for: matrix products, copies into shared memory and the barriers that count
// them, clusters of blocks, kernels that start before the one in front of them has ended.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#ifndef __CUDACC__
#include "emulated_ptx.h"  // a host compiler: the kernels run on emulated threads, where there is no GPU
#else
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
// Initialised barriers become visible to the copy engine; a __syncthreads follows.
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
// What the block's threads have written may be overwritten by bulk copies that are issued from now on.
__device__ inline void let_copies_overwrite() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters: blocks that run side by side and read each other's shared memory ----------------------------------
// Every thread of every block of the cluster; writes to shared memory before it are seen after it, in all of them.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
// The same once the threads have read from each other's blocks, which bulk copies may overwrite from now on. The fence
// comes first: it waits for the reads, the arrival orders nothing.
__device__ inline void cluster_sync_to_overwrite() {
  let_copies_overwrite();
  asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
}
// What lies at p, an address in the caller's shared memory, in that of the cluster's block `rank`; zeros if not `there`.
__device__ inline float4 load_from_block_if(bool there, const float4* p, unsigned rank) {
  float4 v;
  asm volatile(
      "{\n\t.reg .pred there;\n\t.reg .u32 address;\n\t"
      "setp.ne.u32 there, %6, 0;\n\t"
      "mov.f32 %0, 0f00000000;\n\tmov.f32 %1, 0f00000000;\n\tmov.f32 %2, 0f00000000;\n\tmov.f32 %3, 0f00000000;\n\t"
      "mapa.shared::cluster.u32 address, %4, %5;\n\t"
      "@there ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [address];\n\t}"
      : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
      : "r"(shared_address(p)), "r"(rank), "r"(static_cast<unsigned>(there))
      : "memory");
  return v;
}

// ---- 16 bytes a thread; a barrier counts them as an arrival of that thread, once all it began so far are in -------
// Zeros if not `there`; then nothing is read.
__device__ inline void copy_16_if(bool there, void* to, const void* from) {
  asm volatile(
      "{\n\t.reg .pred absent;\n\t"
      "setp.eq.u32 absent, %2, 0;\n\t"
      "cp.async.cg.shared.global [%0], [%1], 16, absent;\n\t}" ::"r"(shared_address(to)),
      "l"(from), "r"(static_cast<unsigned>(there))
      : "memory");
}
__device__ inline void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// ---- products of a warpgroup: four warps that multiply 16 rows of a each by the same tiles of b in shared memory ----
// For a as multiply_add has it and tiles of 8 columns, c += a b or c = a b. Products run beside their warp: c and a are not
// to be touched until wait_for_products. The bits are those of multiply_add (tests/cuda/mma_parity.py).
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kWarpgroups = true;
#else
constexpr bool kWarpgroups = false;
#endif

// Tiles from p, a multiple of 1024, on: 8 columns of 64 k (128 bytes) each, 1024 bytes a tile, the 16-byte pieces of a
// column in the order of the 128-byte swizzle: piece c of column r is where c ^ r would be.
struct GroupTiles {
  uint32_t description;  // the lower half; the same for all lanes, so that a uniform register holds it
  __device__ explicit GroupTiles(const char* p)
      : description(__reduce_min_sync(0xFFFFFFFFu, (shared_address(p) >> 4 & 0x3FFF) | 1 << 16)) {}
  // 16 k that begin `bytes` further: tiles, or k within their columns.
  __device__ uint32_t at(int bytes) const { return description + static_cast<uint32_t>(bytes >> 4); }
};
// What ordinary stores and 16-byte copies have brought into shared memory may be read by products from now on.
__device__ inline void let_products_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before the first product that takes registers which were written since the last.
__device__ inline void let_products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// 16 k of four tiles. The upper half of their description: 1024 bytes from tile to tile, 128-byte swizzle.
template <bool kAdds>
__device__ inline void begin_product(float (&c)[4][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{\n\t.reg .pred adds;\n\t.reg .b32 high;\n\t.reg .b64 b;\n\t"
      "setp.ne.u32 adds, %21, 0;\n\tmov.b32 high, 0x40000040;\n\tmov.b64 b, {%20, high};\n\t"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, b, adds, 1, 1, 0;\n\t}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
        "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]),
        "+f"(c[3][2]), "+f"(c[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAdds));
}
// The same of eight.
template <bool kAdds>
__device__ inline void begin_product(float (&c)[8][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{\n\t.reg .pred adds;\n\t.reg .b32 high;\n\t.reg .b64 b;\n\t"
      "setp.ne.u32 adds, %37, 0;\n\tmov.b32 high, 0x40000040;\n\tmov.b64 b, {%36, high};\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
      "%30,%31}, {%32,%33,%34,%35}, b, adds, 1, 1, 0;\n\t}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
        "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]),
        "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]),
        "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
        "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAdds));
}
// Of 32 k, the half-th of the tiles that begin `bytes` from b on: a[0 … 3] the first 16, a[4 … 7] the others.
template <bool kAdds, int kTiles>
__device__ inline void begin_products(float (&c)[kTiles][4], const uint32_t (&a)[8], GroupTiles b, int bytes, int half) {
  let_products_begin();
  begin_product<kAdds>(c, a, b.at(bytes + 64 * half));
  begin_product<true>(c, a + 4, b.at(bytes + 64 * half + 32));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kTiles>
__device__ inline void wait_for_products(float (&c)[kTiles][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)  // no use of c moves in front of it
    asm volatile("" : "+f"(c[tile][0]), "+f"(c[tile][1]), "+f"(c[tile][2]), "+f"(c[tile][3])::"memory");
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
