#include "../cpu/operator_cpu.h"
#include "../cpu/vector.h"
#include "op.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

namespace kdtree {
namespace {

constexpr int64_t kKeyBlock = 64;  // keys of one partial sum of the output

// What one thread needs for one row: the pool rows of its keys, their scores, one head's output.
struct Scratch {
  int64_t* keys;
  float* scores;
  float* total;
  float* partial;

  Scratch(const TreeAttentionShape& shape, void* workspace, int thread) {
    char* base = static_cast<char*>(workspace) + static_cast<size_t>(thread) * bytes(shape);
    keys = reinterpret_cast<int64_t*>(base);
    scores = reinterpret_cast<float*>(keys + shape.max_keys);
    total = scores + shape.max_keys + kLanes;
    partial = total + shape.kv_lora_rank;
  }
  static size_t bytes(const TreeAttentionShape& shape) {
    const size_t used = static_cast<size_t>(shape.max_keys) * (sizeof(int64_t) + sizeof(float)) +
                        sizeof(float) * (kLanes + 2 * static_cast<size_t>(shape.kv_lora_rank));
    return (used + 63) / 64 * 64;
  }
};

// Pool rows of row i's keys by position: the prefix, its ancestors by depth, itself. Returns how many.
int64_t gather_keys(const TreeAttentionArgs& args, int64_t row, int64_t* keys) {
  const int64_t prefix = *args.prefix, count = prefix + args.depths[row] + 1;
  for (int64_t j = 0; j < prefix; ++j) keys[j] = j;
  for (int64_t j = count - 1, node = row; j >= prefix; --j, node = args.parents[node]) keys[j] = prefix + node;
  return count;
}

template <class T>
void attend(const TreeAttentionShape& shape, const T* q_latent, const T* q_rope, const T* kv, int64_t count,
            const Scratch& scratch, T* y) {
  const int64_t rank = shape.kv_lora_rank, width = rank + shape.rope_dim;
  float largest = -INFINITY;
  for (int64_t j = 0; j < count; ++j) {
    const T* key = kv + scratch.keys[j] * width;
    const float s = (dot(q_latent, key, rank) + dot(q_rope, key + rank, shape.rope_dim)) * shape.softmax_scale;
    scratch.scores[j] = s;
    largest = s > largest ? s : largest;
  }
  F32x16 sums = {};
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, count - j);
    for (int64_t i = lanes; i < kLanes; ++i) scratch.scores[j + i] = -INFINITY;  // weigh 0
    const F32x16 p = exp(load(scratch.scores + j) - splat(largest));
    store(scratch.scores + j, p);
    sums += p;
  }
  const float inverse = 1.0f / sum(sums);

  std::fill_n(scratch.total, rank, 0.0f);
  for (int64_t begin = 0; begin < count; begin += kKeyBlock) {
    std::fill_n(scratch.partial, rank, 0.0f);
    for (int64_t j = begin; j < std::min(begin + kKeyBlock, count); ++j) {
      const T* key = kv + scratch.keys[j] * width;
      const float p = scratch.scores[j];
      for (int64_t c = 0; c < rank; ++c) scratch.partial[c] += p * to_float(key[c]);
    }
    for (int64_t c = 0; c < rank; ++c) scratch.total[c] += scratch.partial[c];
  }
  for (int64_t c = 0; c < rank; ++c) store(y + c, scratch.total[c] * inverse);
}

size_t workspace(const TreeAttentionShape& shape) {
  return Scratch::bytes(shape) * static_cast<size_t>(std::max(omp_get_max_threads(), omp_get_num_procs()));
}

template <class T>
void attend_rows(const TreeAttentionShape& shape, const TreeAttentionArgs& args, void* workspace) {
  const int64_t heads = shape.heads, rank = shape.kv_lora_rank;
  // One thread per row: the keys are gathered once for all heads.
#pragma omp parallel for schedule(dynamic) if (*args.n_rows > 1 && *args.n_rows * heads * *args.prefix > 1000)
  for (int64_t row = 0; row < *args.n_rows; ++row) {
    const Scratch scratch(shape, workspace, omp_get_thread_num());
    const int64_t count = gather_keys(args, row, scratch.keys);
    for (int64_t h = 0; h < heads; ++h)
      attend(shape, static_cast<const T*>(args.q_latent) + (row * heads + h) * rank,
             static_cast<const T*>(args.q_rope) + row * shape.q_rope_row_stride + h * shape.q_rope_head_stride,
             static_cast<const T*>(args.kv), count, scratch, static_cast<T*>(args.y) + (row * heads + h) * rank);
  }
}

void run(const TreeAttentionShape& shape, const TreeAttentionArgs& args, void* workspace) {
  with_type(shape.type,
            [&](auto* type) { attend_rows<std::remove_pointer_t<decltype(type)>>(shape, args, workspace); });
}

}  // namespace

const Operator tree_attention = {"tree_attention",
                                 accept_any,
                                 no_bytes,
                                 nullptr,
                                 bytes_as<TreeAttentionShape, workspace>,
                                 run_as<TreeAttentionShape, TreeAttentionArgs, run>};

}  // namespace kdtree
