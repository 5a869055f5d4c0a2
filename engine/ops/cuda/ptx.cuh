// Instructions that CUDA C++ has no word for: matrix products, copies into shared memory and the barriers that count
// them, clusters of blocks, kernels that start before the one in front of them has ended.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#ifndef __CUDACC__
#include "emulated_ptx.h"  // a host compiler: the kernels run on emulated threads, where there is no GPU
#else
namespace kdtree::cuda {

// c += a b for a 16 x 16 and b 16 x 8. Lane 4 g + t holds rows g and g + 8 of a, column g of b, and of c the columns
// 2 t and 2 t + 1 of rows g (c[0], c[1]) and g + 8.
__device__ inline void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// a b + c for two bf16 in one word, subnormal numbers included.
__device__ inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a) : "r"(a), "r"(b), "r"(c));
  return a;
}

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

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
