// What the CUDA benchmark needs beside the library: a layer of experts made on the device, both GEMMs of the expert
// kernels alone, the read rate, and the two steps a peer lacks (order by expert, sum over slots).
// Functions return 0 or CUDA's error; pointers are the device's. rules/bench_cuda.smk compiles it.
#include "../ops/w4a16_moe_experts/cuda.cu"

#include <cstdlib>

namespace kdtree::cuda {
int multiprocessors = 0;
Rung rung = Rung::kStream;
}  // namespace kdtree::cuda

namespace kdtree {
namespace {

constexpr int kReadThreads = 256, kReadBlocks = 16, kReadAhead = 8;  // blocks a multiprocessor; loads in flight a thread
constexpr int kAlignThreads = 1024;                                  // an expert each

__device__ uint32_t hash(uint64_t i) {
  i ^= i >> 30, i *= 0xBF58476D1CE4E5B9, i ^= i >> 27, i *= 0x94D049BB133111EB;
  return static_cast<uint32_t>(i >> 32);
}

// Scales of either sign over a decade.
__global__ void fill_expert(uint32_t* codes, bf16* scales, int64_t words, int64_t groups, int64_t expert) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += int64_t{gridDim.x} * blockDim.x) {
    codes[i] = hash(static_cast<uint64_t>(expert * words + i + 1));
    if (i >= groups) continue;
    const uint32_t h = hash(static_cast<uint64_t>(expert * groups + i) + (uint64_t{1} << 50));
    scales[i] = rounded<bf16>(0.004f * (0.1f + static_cast<float>(h & 0xFFFF) / 65536) * (h >> 31 ? -1.0f : 1.0f));
  }
}

__global__ void read_all(const uint4* from, int64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += kReadAhead * step) {
    uint4 v[kReadAhead];
#pragma unroll
    for (int u = 0; u < kReadAhead; ++u) v[u] = __ldcs(from + i + u * step);
#pragma unroll
    for (int u = 0; u < kReadAhead; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (sum == 12345) *sink = sum;
}

// Pairs by expert, each expert's padded to a multiple of `block` with the number of pairs. One block, a thread an expert.
__global__ void __launch_bounds__(kAlignThreads)
    align_pairs(const int32_t* experts, int pairs, int block, int32_t* sorted, int32_t* block_experts, int32_t* padded) {
  __shared__ int32_t ids[kAlignThreads], warp_sums[32];
  const int expert = static_cast<int>(threadIdx.x), lane = expert % 32, warp = expert / 32;
  if (expert < pairs) ids[expert] = experts[expert];
  __syncthreads();
  int count = 0;
  for (int i = 0; i < pairs; ++i) count += ids[i] == expert;
  const int room = (count + block - 1) / block * block;
  int end = room;
#pragma unroll
  for (int reach = 1; reach < 32; reach *= 2) {
    const int before = __shfl_up_sync(0xFFFFFFFFu, end, reach);
    if (lane >= reach) end += before;
  }
  if (lane == 31) warp_sums[warp] = end;
  __syncthreads();
  for (int w = 0; w < warp; ++w) end += warp_sums[w];
  int at = end - room;
  for (int b = at; b < end; b += block) block_experts[b / block] = expert;
  for (int i = 0; count && i < pairs; ++i)
    if (ids[i] == expert) sorted[at++] = i;
  while (at < end) sorted[at++] = pairs;
  if (expert == kAlignThreads - 1) *padded = end;
}

// y[row] = sum over slots of weights[row, slot] · values[row, slot]: eight columns a thread.
__global__ void sum_weighted(const float* weights, const bf16* values, bf16* y, int rows, int top_k, int columns) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), row = i / (columns / 8), at = i % (columns / 8);
  if (row >= rows) return;
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int slot = 0; slot < top_k; ++slot) {
    const int64_t pair = int64_t{row} * top_k + slot;
    const uint4 four = reinterpret_cast<const uint4*>(values + pair * columns)[at];
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
    const float weight = weights[pair];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      sum[2 * c] = fmaf(weight, __uint_as_float(words[c] << 16), sum[2 * c]);
      sum[2 * c + 1] = fmaf(weight, __uint_as_float(words[c] & 0xFFFF0000u), sum[2 * c + 1]);
    }
  }
  __align__(16) bf16 rounded_sum[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) rounded_sum[c] = rounded<bf16>(sum[c]);
  reinterpret_cast<uint4*>(y + int64_t{row} * columns)[at] = *reinterpret_cast<const uint4*>(rounded_sum);
}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

extern "C" {

int bench_init() {
  cuda::choose_rung(std::getenv("KDTREE_CUDA"));
  const cudaError_t error = cudaDeviceGetAttribute(&cuda::multiprocessors, cudaDevAttrMultiProcessorCount, 0);
  return error == cudaSuccess ? cuda::init_w4a16_moe_experts() : error;
}

// Bytes of an expert's layer in the library's layout; what the library's packed_bytes must agree with.
int64_t bench_expert_bytes(const W4a16MoeExpertsShape* shape) { return streaming(*shape).expert_bytes(); }
// What one step of bench_read reads: it takes multiples of this.
int64_t bench_read_step() { return int64_t{16} * kReadAhead * kReadThreads * kReadBlocks * cuda::multiprocessors; }

// The bundle's gate, up and down of one expert, one after the other: codes, and scales.
int bench_fill(const W4a16MoeExpertsShape* shape, int64_t expert, uint32_t* codes, void* scales, cudaStream_t stream) {
  const int64_t weights = 3 * one_matrix(*shape);
  fill_expert<<<2048, 256, 0, stream>>>(codes, static_cast<bf16*>(scales), weights / 8, weights / 32, expert);
  return cudaGetLastError();
}
int bench_pack(const W4a16MoeExpertsShape* shape, int64_t expert, const uint32_t* codes, const void* scales, void* packed,
               cudaStream_t stream) {
  const auto layout = streaming(*shape);
  const int64_t one = one_matrix(*shape);
  const int hidden = shape->hidden, width = shape->intermediate;
  const auto* sc = static_cast<const bf16*>(scales);
  char* to = static_cast<char*>(packed) + expert * layout.expert_bytes();
  pack_strips<GatheredInt4>(StripSource<uint32_t>::of(codes, codes + one / 8, width),
                            StripSource<bf16>::of(sc, sc + one / 32, width), hidden, layout.gate_up.strips, to, stream);
  pack_strips<GatheredInt4>(StripSource<uint32_t>::of(codes + one / 4, hidden, width / 8),
                            StripSource<bf16>::of(sc + one / 16, hidden, width / 32), width, layout.down.strips,
                            to + layout.gate_up_bytes(), stream);
  return cudaGetLastError();
}

// Gate, up and down of a call whose workspace holds what sorting left, from a call of the whole layer.
int bench_gemms(const W4a16MoeExpertsShape* shape, const W4a16MoeExpertsArgs* args, void* workspace, cudaStream_t stream) {
  const auto layout = streaming(*shape);
  StreamExpertsScratch scratch;
  StreamExpertsScratch::place(layout.shape, workspace, scratch);
  layout.gate_up_and_down(args->packed, static_cast<const bf16*>(args->x), scratch, stream);
  return cudaGetLastError();
}

int bench_read(const void* from, int64_t bytes, uint32_t* sink, cudaStream_t stream) {
  if (bytes % bench_read_step()) return cudaErrorInvalidValue;
  const auto blocks = static_cast<unsigned>(kReadBlocks * cuda::multiprocessors);
  read_all<<<blocks, kReadThreads, 0, stream>>>(static_cast<const uint4*>(from), bytes / 16, sink);
  return cudaGetLastError();
}

int bench_align(const int32_t* experts, int pairs, int block, int32_t* sorted, int32_t* block_experts, int32_t* padded,
                cudaStream_t stream) {
  if (pairs > kAlignThreads) return cudaErrorInvalidValue;
  align_pairs<<<1, kAlignThreads, 0, stream>>>(experts, pairs, block, sorted, block_experts, padded);
  return cudaGetLastError();
}

int bench_sum(const float* weights, const void* values, void* y, int rows, int top_k, int columns, cudaStream_t stream) {
  if (columns % 8) return cudaErrorInvalidValue;
  const auto blocks = static_cast<unsigned>((rows * (columns / 8) + 127) / 128);
  sum_weighted<<<blocks, 128, 0, stream>>>(weights, static_cast<const bf16*>(values), static_cast<bf16*>(y), rows, top_k,
                                           columns);
  return cudaGetLastError();
}

}  // extern "C"
