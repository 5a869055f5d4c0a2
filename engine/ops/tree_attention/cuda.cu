// Two launches: partial softmax sums of (row, 8 heads, split of the row's keys), then a merge over the splits.
//
// A block walks its split in tiles of 32 keys, gathered into shared memory as fp32; a warp serves one head. Scores: a
// key a lane. Output: a lane keeps every 32nd column of the latent. Number and boundaries of splits are a function of
// the row's own key count alone (splits_of, keys_per_split), tiles start at the split, and splits merge in ascending
// order, so a row's bytes do not depend on the rows beside it.
//
// Workspace: accumulators [rows, heads, splits, kv_lora_rank], then (maximum, sum) [rows, heads, splits], fp32.
#include "../cuda/numbers.cuh"
#include "../cuda/operator.cuh"
#include "../cuda/reduce.cuh"
#include "op.h"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kHeads = 8;  // of a block, a warp each
constexpr int kThreads = 32 * kHeads;
constexpr int kTile = 32;  // keys
constexpr int kMaxRank = 512;
constexpr int kMaxWidth = kMaxRank + 64;
constexpr int kColumns = kMaxRank / 32;  // of a lane
constexpr int kMaxSplits = 16;
constexpr int kLeastSplitKeys = 128;

__host__ __device__ int splits_of(int keys) {
  return min(kMaxSplits, ceil_div(keys, kLeastSplitKeys));
}
__host__ __device__ int keys_per_split(int keys) { return ceil_div(ceil_div(keys, splits_of(keys)), kTile) * kTile; }

// Floats from one query or key to the next in shared memory: an odd number of 16-byte units, free of bank conflicts.
__host__ __device__ int padded_width(int width) { return 4 * (ceil_div(width, 4) | 1); }

struct SharedLayout {
  int width, path_rows;
  int tile_floats() const { return std::max(kTile * padded_width(width), path_rows); }  // also stages the parents
  size_t bytes() const {
    return sizeof(float) * static_cast<size_t>(kHeads * padded_width(width) + tile_floats() + kHeads * kTile + path_rows);
  }
};
static_assert(sizeof(float) * (kHeads + kTile) * 4 * (kMaxWidth / 4 + 1) + 4 * kHeads * kTile < kMaxSharedBytes,
              "queries and keys of the largest width fit a block of sm_120");

SharedLayout shared_layout(const TreeAttentionShape& shape) {
  return {shape.kv_lora_rank + shape.rope_dim, shape.max_rows};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    attend(TreeAttentionShape shape, TreeAttentionArgs args, int tile_floats, int max_splits, float* accumulators,
           float2* softmax) {
  extern __shared__ __align__(16) float shared[];
  const int rank = shape.kv_lora_rank, width = rank + shape.rope_dim, stride = padded_width(width);
  float* queries = shared;                                // [kHeads][stride]
  float* tile = queries + kHeads * stride;                // [kTile][stride]
  float* weights = tile + tile_floats;                    // [kHeads][kTile]
  int* path = reinterpret_cast<int*>(weights + kHeads * kTile);  // pool rows past the prefix, by depth
  const int thread = static_cast<int>(threadIdx.x), warp = warp_id(), lane = lane_id();
  const int prefix = *args.prefix, n_rows = *args.n_rows;
  const int head_groups = ceil_div(shape.heads, kHeads);
  const T* kv = static_cast<const T*>(args.kv);

  for (int64_t work = blockIdx.x; work < int64_t{n_rows} * head_groups * max_splits; work += gridDim.x) {
    const int split = static_cast<int>(work % max_splits);
    const int first_head = static_cast<int>(work / max_splits % head_groups) * kHeads;
    const int64_t row = work / max_splits / head_groups;
    const int keys = prefix + args.depths[row] + 1;
    const int first_key = split * keys_per_split(keys), last_key = min(keys, first_key + keys_per_split(keys));
    if (first_key >= last_key) continue;  // the whole block

    if (last_key > prefix) {  // the row's ancestors
      int* parents = reinterpret_cast<int*>(tile);
      for (int i = thread; i <= row; i += kThreads) parents[i] = args.parents[i];
      __syncthreads();
      if (thread == 0)
        for (int depth = keys - prefix - 1, node = static_cast<int>(row); depth >= 0; --depth, node = parents[node])
          path[depth] = node;
    }
    for (int i = thread; i < kHeads * stride; i += kThreads) {
      const int head = first_head + i / stride, c = i % stride;
      float q = 0;
      if (head < shape.heads && c < rank)
        q = to_float(static_cast<const T*>(args.q_latent)[(row * shape.heads + head) * rank + c]);
      else if (head < shape.heads && c < width)
        q = to_float(static_cast<const T*>(args.q_rope)[row * shape.q_rope_row_stride +
                                                        int64_t{head} * shape.q_rope_head_stride + c - rank]);
      queries[i] = q;
    }

    float largest = -INFINITY, sum = 0, total[kColumns] = {};
    for (int begin = first_key; begin < last_key; begin += kTile) {
      __syncthreads();  // path is ready; the last tile is used up
      for (int key = warp; key < kTile; key += kHeads) {
        const int j = begin + key;
        const int64_t pool_row = j < prefix ? j : j < last_key ? int64_t{prefix} + path[j - prefix] : -1;
        for (int c = lane; c < stride; c += 32)
          tile[key * stride + c] = c < width && pool_row >= 0 && j < last_key ? to_float(kv[pool_row * width + c]) : 0.0f;
      }
      __syncthreads();

      float4 dot = {0, 0, 0, 0};
      const auto* q = reinterpret_cast<const float4*>(queries + warp * stride);
      const auto* k = reinterpret_cast<const float4*>(tile + lane * stride);
      for (int c = 0; c < stride / 4; ++c) {
        dot.x = fmaf(q[c].x, k[c].x, dot.x);
        dot.y = fmaf(q[c].y, k[c].y, dot.y);
        dot.z = fmaf(q[c].z, k[c].z, dot.z);
        dot.w = fmaf(q[c].w, k[c].w, dot.w);
      }
      const float score =
          begin + lane < last_key ? (dot.x + dot.y + (dot.z + dot.w)) * shape.softmax_scale : -INFINITY;
      const float new_largest = fmaxf(largest, warp_reduce(score, Max()));
      const float p = expf(score - new_largest), shrink = expf(largest - new_largest);
      sum = fmaf(sum, shrink, warp_reduce(p, Add()));
      largest = new_largest;
      weights[warp * kTile + lane] = p;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (32 * i < rank) {
          const int c = min(32 * i + lane, rank - 1);  // past rank: computed again, not stored
          float t = total[i] * shrink;
#pragma unroll 8
          for (int key = 0; key < kTile; ++key) t = fmaf(weights[warp * kTile + key], tile[key * stride + c], t);
          total[i] = t;
        }
      }
    }

    const int head = first_head + warp;
    if (head < shape.heads) {
      const int64_t at = (row * shape.heads + head) * max_splits + split;
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (32 * i + lane < rank) accumulators[at * rank + 32 * i + lane] = total[i];
      if (lane == 0) softmax[at] = make_float2(largest, sum);
    }
    __syncthreads();  // before the next piece of work overwrites queries and path
  }
}

template <class T>
__global__ void merge(TreeAttentionShape shape, TreeAttentionArgs args, int max_splits, const float* accumulators,
                      const float2* softmax) {
  const int rank = shape.kv_lora_rank;
  for (int64_t i = blockIdx.x; i < int64_t{*args.n_rows} * shape.heads; i += gridDim.x) {
    const int keys = *args.prefix + args.depths[i / shape.heads] + 1;
    const int splits = ceil_div(keys, keys_per_split(keys));
    const float2* parts = softmax + i * max_splits;
    float largest = -INFINITY, sum = 0;
    for (int s = 0; s < splits; ++s) largest = fmaxf(largest, parts[s].x);
    for (int s = 0; s < splits; ++s) sum = fmaf(parts[s].y, expf(parts[s].x - largest), sum);
    for (int c = static_cast<int>(threadIdx.x); c < rank; c += static_cast<int>(blockDim.x)) {
      float total = 0;
      for (int s = 0; s < splits; ++s)
        total = fmaf(accumulators[(i * max_splits + s) * rank + c], expf(parts[s].x - largest), total);
      static_cast<T*>(args.y)[i * rank + c] = rounded<T>(total / sum);
    }
  }
}

const char* refuse(const TreeAttentionShape& shape) {
  if (shape.kv_lora_rank < 1 || shape.kv_lora_rank > kMaxRank) return "kv_lora_rank: must lie in 1..512";
  if (shape.rope_dim < 0 || shape.rope_dim > kMaxWidth - kMaxRank) return "rope_dim: must lie in 0..64";
  if (shared_layout(shape).bytes() > kMaxSharedBytes) return "max_rows: more rows than fit a block's shared memory";
  return nullptr;
}

int64_t partials(const TreeAttentionShape& shape) {
  return int64_t{shape.max_rows} * shape.heads * splits_of(shape.max_keys);
}

size_t workspace(const TreeAttentionShape& shape) {
  const int64_t accumulators = (partials(shape) * shape.kv_lora_rank + 1) / 2 * 2;
  return sizeof(float) * static_cast<size_t>(accumulators + 2 * partials(shape));
}

void run(const TreeAttentionShape& shape, const TreeAttentionArgs& args, void* workspace, cudaStream_t stream) {
  const int max_splits = splits_of(shape.max_keys);
  auto* accumulators = static_cast<float*>(workspace);
  auto* softmax = reinterpret_cast<float2*>(accumulators + (partials(shape) * shape.kv_lora_rank + 1) / 2 * 2);
  const SharedLayout layout = shared_layout(shape);
  const int64_t pieces = int64_t{shape.max_rows} * ceil_div(shape.heads, kHeads) * max_splits;
  with_type(shape.type, [&](auto t) {
    using T = decltype(t);
    attend<T><<<grid_for(pieces, 1, 4), kThreads, layout.bytes(), stream>>>(
        shape, args, layout.tile_floats(), max_splits, accumulators, softmax);
    merge<T><<<grid_for(int64_t{shape.max_rows} * shape.heads, 1, 8), 128, 0, stream>>>(shape, args, max_splits,
                                                                                       accumulators, softmax);
  });
}

}  // namespace

namespace cuda {

int init_tree_attention() {
  const cudaError_t error =
      cudaFuncSetAttribute(attend<float>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(attend<bf16>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
}

}  // namespace cuda

const Operator tree_attention = {"tree_attention",
                                 refuse_as<TreeAttentionShape, refuse>,
                                 no_bytes,
                                 nullptr,
                                 bytes_as<TreeAttentionShape, workspace>,
                                 run_as<TreeAttentionShape, TreeAttentionArgs, run>};

}  // namespace kdtree
